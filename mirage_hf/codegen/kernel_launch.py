"""Launch hand-written kernels, with the helper that launches generated kernels."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from mirage_hf.codegen import launching
from mirage_hf.codegen.compile import prepare_triton
from mirage_hf.codegen.cubin_launch import CubinLauncher
from mirage_hf.settings import settings


@dataclass(frozen=True, eq=False)
class KernelLaunch:
    """A `@triton.jit` kernel with its sizes.

    The kernel's parameters are its tensors, then `overlaps`, then `constants` in this order.

    Attributes:
        kernel: The `@triton.jit` function.
        grid: Number of blocks.
        constants: Values of the constexprs, except `overlaps`.
    """

    kernel: Any
    grid: int
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 1

    def __post_init__(self) -> None:
        prepare_triton()

    @cached_property
    def source(self) -> str:
        """The SHA-256 of the kernel's text, of the functions that it calls, and of its sizes."""
        texts = [*_texts(self.kernel.fn, set()), *map(repr, self.constants.items())]
        return hashlib.sha256("\0".join(texts).encode()).hexdigest()

    @cached_property
    def launcher(self) -> Callable[..., None]:
        """What launches the kernel."""
        by_triton = partial(launching.launch_with_constants, constants=self.constants)
        if torch.version.cuda is None or settings().interpret:
            return by_triton
        return CubinLauncher(self.source, by_triton, self.constants)


def _texts(function: Any, seen: set[Any]) -> Iterator[str]:
    """Yield the text of a function, of the constants that it names, and of what it calls."""
    seen.add(function)
    yield inspect.getsource(function)
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        value = getattr(value, "value", value)  # of a tl.constexpr
        called = getattr(value, "fn", None)
        if isinstance(value, (bool, int, float, str)):
            yield f"{name} = {value!r}"
        elif called is not None and called not in seen:
            yield from _texts(called, seen)


def launch(what: KernelLaunch, tensors: Sequence[Tensor]) -> None:
    """Launch a kernel on the tensors' device, on its current stream.

    The first launch for given sizes and dtypes loads or compiles, so it must not be captured.
    """
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(what, tensors)
    what.launcher(what.kernel, what.grid, tensors, what.num_warps, what.num_stages)
