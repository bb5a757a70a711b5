"""Forwards of norms by one kernel, for prompts that run the forward of their model.

transformers computes most norms by seven or eight torch ops. While a model is optimized, one kernel
does the work of all of them. A row is what is normalised together: a token, or a head of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.formats.containers import stock_forward
from mirage_hf.layers.row_chunks import RowChunks
from mirage_hf.match.plain import own_attributes
from mirage_hf.swap.own_forward import Binding, is_plain_call
from mirage_hf.swap.row_kernels import is_readable, takes_rows


class NormKernels:
    """The kernels of all norms that have equal blocks.

    Attributes:
        chunks: They run the program, with chunks of KERNEL_ROWS rows.
        width: The elements of a row.
        dtype: The dtype of rows and parameters.
        has_bias: Whether they add a bias.
    """

    def __init__(self, chunks: RowChunks):
        sizes = dict(chunks.block.sizes)
        self.chunks = chunks
        self.width: int = sizes["k"]
        self.dtype: torch.dtype = sizes["dtype"]
        self.has_bias: bool = sizes["norm_bias"]

    def parameters_of(self, norm: nn.Module) -> list[Tensor] | None:
        """Return the parameters that a norm has now, or None if the kernels cannot read them."""
        weight, bias = (norm._parameters.get(name) for name in ("weight", "bias"))
        if weight is None or (bias is not None) != self.has_bias:
            return None
        found = [weight] if bias is None else [weight, bias]
        fit = all(
            type(p) is nn.Parameter
            and p.dtype is self.dtype
            and p.shape == (self.width,)
            and p.is_contiguous()
            and is_readable(p, self.chunks.device)
            for p in found
        )
        return found if fit else None

    def takes(self, x: Any) -> bool:
        """Return whether the kernels may run for an input.

        The dims of the input must be in the order of their strides, because stock's output has its
        dims in the same order in memory.
        """
        return (
            is_plain_call(x)
            and x.dtype is self.dtype
            and x.dim() > 1
            and x.shape[-1] == self.width
            and takes_rows(x.numel() // self.width)
            and all(outer >= inner for outer, inner in pairwise(x.stride()))
            and is_readable(x, self.chunks.device)
        )

    def __call__(self, x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """Return what a norm with these parameters makes of an input."""
        rows = x.reshape(-1, self.width).contiguous()
        (y,) = self.chunks.with_overlap([rows, *(p[None] for p in parameters)])
        return y.view(x.shape)


@dataclass(eq=False, kw_only=True)
class NormBinding(Binding):
    """How a norm runs while its model is optimized.

    Attributes:
        kernels: The kernels. Norms with equal blocks share them.
        forward: The stock forward that they were made for.
        numbers: The attributes that they were made for, such as the epsilon.
    """

    kernels: NormKernels
    forward: Any
    numbers: dict[str, Any]

    @classmethod
    def of(cls, norm: nn.Module, kernels: NormKernels) -> NormBinding:
        """Return a binding that runs kernels while the norm keeps its class and its attributes."""
        names = [name for name, _ in own_attributes(norm)]
        return cls(
            kernels=kernels,
            forward=stock_forward(type(norm)),
            numbers={name: norm.__dict__[name] for name in names},
        )

    def run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return the norm of an input, by kernels if they were made for the call."""
        if len(args) == 1 and not kwargs and self.kernels.takes(args[0]):
            parameters = self.kernels.parameters_of(module)
            if parameters is not None and self._is_as_made(module):
                return self.kernels(args[0], parameters)
        return stock_forward(type(module))(module, *args, **kwargs)

    def _is_as_made(self, module: nn.Module) -> bool:
        state = module.__dict__
        return stock_forward(type(module)) is self.forward and all(
            _is_same(state.get(name), value) for name, value in self.numbers.items()
        )


def _is_same(value: Any, expected: Any) -> bool:
    return value is expected or (type(value) is type(expected) and value == expected)
