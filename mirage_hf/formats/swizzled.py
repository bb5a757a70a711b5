"""Codes in a layout that their library made for a kind of GPU, and the way to the plain order.

transformers loads MXFP4 with `triton_kernels`. On Hopper that library moves codes, and mixes the
bits of eight of them, for its own kernels. Our kernels read codes output by output. So `optimize()`
rewrites the codes in their own memory, and `restore()` rewrites them again.

How codes are moved is the library's matter, and may differ between its versions. Its object for
the order converts in both directions, so nothing here knows an order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mirage_hf.formats import containers


@dataclass(frozen=True, eq=False)
class Swizzled:
    """The codes of all experts for one linear, in an order of their library.

    Attributes:
        storage: The library's holder of the bytes, `data`, and of their order, `layout`.
        plain: A view of the memory of `data` with the dims and strides of the plain order:
            (experts, bytes of the inputs, outputs), with the bytes of an output next to each other.
            It holds these codes only after `put_in_plain_order`. It may be shorter than `data`,
            because the library pads.
        plain_layout: The library's class for the plain order.
    """

    storage: Any
    plain: Tensor
    plain_layout: Callable[..., Any]

    @torch.inference_mode()  # a model may have been loaded under it; then no other mode may write
    def put_in_plain_order(self, undos: list[Callable[[], None]]) -> str | None:
        """Rewrite the codes, one expert at a time.

        Args:
            undos: Takes what puts back the library's order, bit for bit. It may be called again
                after a failure.

        Returns:
            Why it was not done: the library does not convert back what it converted. Some codes may
            be rewritten by then, so the undo must be called.
        """
        data, layout = self.storage.data, self.storage.layout
        rewritten: dict[int, Tensor | None] = {}
        undos.append(lambda: self._put_back(data, layout, rewritten))
        for expert in range(len(data)):
            part = slice(expert, expert + 1)
            plain = _copied(layout.unswizzle_data(data[part]))
            if plain.shape != self.plain[part].shape or not torch.equal(
                layout.swizzle_data(plain), data[part]
            ):
                return f"its library's order {type(layout).__name__} cannot be undone exactly"
            rewritten[expert] = plain  # an interrupt may come while the memory has neither order
            self.plain[part].copy_(plain)
            rewritten[expert] = None
        self.storage.data, self.storage.layout = self.plain, self.plain_layout(self.plain.shape)
        return None

    @torch.inference_mode()
    def _put_back(self, data: Tensor, layout: Any, rewritten: dict[int, Tensor | None]) -> None:
        """Give experts the library's order again.

        Args:
            data: The library's tensor.
            layout: Its order.
            rewritten: The experts that are rewritten. Those whose memory may have any order have
                their plain codes here. Loses each expert that is done.
        """
        for expert, plain in list(rewritten.items()):
            part = slice(expert, expert + 1)
            if plain is None:
                plain = rewritten[expert] = _copied(self.plain[part])
            data[part].copy_(_swizzled(layout, plain))
            del rewritten[expert]
        self.storage.data, self.storage.layout = data, layout


def _swizzled(layout: Any, plain: Tensor) -> Tensor:
    """Return plain codes in an order. The CPU converts them if the GPU lacks the memory."""
    with contextlib.suppress(torch.OutOfMemoryError):
        return layout.swizzle_data(plain)  # type: ignore[no-any-return]
    return layout.swizzle_data(plain.cpu())  # type: ignore[no-any-return]


def _copied(x: Tensor) -> Tensor:
    """Return a copy with the bytes of an output next to each other."""
    return x.mT.clone(memory_format=torch.contiguous_format).mT


def swizzled(wrapped: Any, plain_layout: Callable[..., Any]) -> Swizzled | None:
    """Return the codes of a tensor of `triton_kernels` in another than the plain order.

    Args:
        wrapped: The library's tensor, of shape (experts, inputs, outputs).
        plain_layout: The library's class for the plain order.

    Returns:
        The codes. None if the library cannot convert them expert by expert.
    """
    storage = wrapped.storage
    data, shape = storage.data, tuple(wrapped.shape)
    is_plain = type(data) in containers.PLAIN_TENSORS and data.dtype is torch.uint8
    if not is_plain or data.dim() != 3 or len(shape) != 3:
        return None
    experts, columns, rows = shape
    converts = all(
        callable(getattr(storage.layout, name, None)) for name in ("swizzle_data", "unswizzle_data")
    )
    # the experts follow each other, and the memory of each has no gaps
    of_one = sorted(zip(data.stride()[1:], data.shape[1:], strict=True))
    steps, size = [], 1
    for _, length in of_one:
        steps.append(size)
        size *= length
    is_dense = [step for step, _ in of_one] == steps and data.stride(0) == size
    width = columns // 2
    if not converts or not is_dense or len(data) != experts or size < width * rows:
        return None
    plain = data.as_strided((experts, width, rows), (size, 1, width))
    return Swizzled(storage, plain, plain_layout)
