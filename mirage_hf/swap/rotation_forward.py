"""Forwards of attention that rotate q and k by one kernel, for models whose prompts run their own.

In transformers a function of the model's file rotates q and k. It takes 14 launches. Attention's
forward runs with another function under its name. The module's globals stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.formats.containers import stock_forward
from mirage_hf.layers.rope import in_order
from mirage_hf.layers.row_chunks import RowChunks
from mirage_hf.swap.own_forward import Binding, is_plain_call
from mirage_hf.swap.row_kernels import is_readable, takes_rows

#: The name of the function that rotates q and k, in most files of transformers.
ROTATION = "apply_rotary_pos_emb"

#: Rotates q and k.
Rotate = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class RotationSizes:
    """What a function that rotates q and k is called with.

    Attributes:
        heads: The heads of queries.
        kv_heads: The heads of keys.
        head_dim: The elements of a head.
        rotary: The elements of a row of cos and sin.
        dtype: The dtype of q and k.
        table_dtype: The dtype of cos and sin.
        device: The device of q and k.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotary: int
    dtype: torch.dtype
    table_dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, *given: Any) -> RotationSizes | None:
        """Return the sizes of q and k (b, heads, tokens, d), cos and sin (b, tokens, rotary).

        None if these are no such tensors.
        """
        if not all(isinstance(x, Tensor) for x in given):
            return None
        if [x.dim() for x in given] != [4, 4, 3, 3]:
            return None
        q, k, cos, sin = given
        (batch, heads, tokens, head_dim), kv_heads = q.shape, k.shape[1]
        rotary = cos.shape[-1]
        tables = ((batch, tokens, rotary), (1, tokens, rotary))
        fits = (
            k.shape == (batch, kv_heads, tokens, head_dim)
            and cos.shape == sin.shape
            and tuple(cos.shape) in tables
            and k.dtype is q.dtype
            and sin.dtype is cos.dtype
        )
        if not fits:
            return None
        return cls(heads, kv_heads, head_dim, rotary, q.dtype, cos.dtype, q.device)


def table_rows(x: Tensor, batch: int, order: str) -> Tensor:
    """Return cos or sin as programs read them: (b · tokens, 1, rotary).

    Args:
        x: (b or 1, tokens, rotary), or with half as many elements.
        batch: The number of sequences.
        order: As in `RotationKernels`.
    """
    x = in_order(x, order)
    return x.expand(batch, -1, -1).reshape(-1, 1, x.shape[-1]).contiguous()


@dataclass(frozen=True, eq=False)
class RotationKernels:
    """Kernels that rotate q and k.

    Attributes:
        sizes: The sizes that they were made for.
        chunks: They run the program.
        order: The order of cos and sin as the program reads them (see `in_order`).
        by_heads: Whether stock's results have the tokens of a head side by side in memory. If not,
            they have the heads of a token so, as q and k.
    """

    sizes: RotationSizes
    chunks: RowChunks
    order: str
    by_heads: bool

    def takes(self, *given: Any) -> bool:
        """Return whether the kernels may run for q, k, cos and sin.

        In memory, q and k must have the heads of a token side by side.
        """
        if RotationSizes.of(*given) != self.sizes:
            return False
        q, k = given[:2]
        return (
            is_plain_call(q)
            and takes_rows(q.shape[0] * q.shape[2])
            and all(x.transpose(1, 2).is_contiguous() for x in (q, k))
            and all(is_readable(x, self.sizes.device) for x in given)
        )

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and k, rotated."""
        batch, tokens = q.shape[0], q.shape[2]
        rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k)]
        tables = [table_rows(x, batch, self.order) for x in (cos, sin)]
        rotated_q, rotated_k = (
            x.unflatten(0, (batch, tokens)).transpose(1, 2)
            for x in self.chunks.with_overlap([*rows, *tables])
        )
        if self.by_heads:
            return rotated_q.contiguous(), rotated_k.contiguous()
        return rotated_q, rotated_k


@dataclass(eq=False, kw_only=True)
class RotationBinding(Binding):
    """How attention runs while its model is optimized.

    Attributes:
        stock: The stock forward of its class.
        function: The function that rotates q and k there.
        kernels: The kernels that rotate q and k, None without any.
        called_with: The sizes of the last call of the function. None before a call.
    """

    stock: FunctionType
    function: Rotate
    kernels: RotationKernels | None = None
    called_with: RotationSizes | None = None

    def __post_init__(self) -> None:
        self._forward = _with_global(self.stock, ROTATION, self._rotate)

    @classmethod
    def of(cls, module: nn.Module) -> RotationBinding | None:
        """Return a binding of a module whose forward calls the function, None for any other."""
        stock = stock_forward(type(module))
        if not isinstance(stock, FunctionType) or ROTATION not in stock.__code__.co_names:
            return None
        function = stock.__globals__.get(ROTATION)
        return cls(stock=stock, function=function) if isinstance(function, FunctionType) else None

    def run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return what attention makes of its inputs."""
        stock = stock_forward(type(module))
        if stock is not self.stock or torch.compiler.is_compiling():
            return stock(module, *args, **kwargs)
        return self._forward(module, *args, **kwargs)

    def _rotate(self, *args: Any, **kwargs: Any) -> Any:
        """Return q and k, rotated: by kernels if they were made for the call."""
        function = self.stock.__globals__[ROTATION]
        if len(args) == 4 and not kwargs and function is self.function:
            if self.kernels is None:
                self.called_with = RotationSizes.of(*args)
            elif self.kernels.takes(*args):
                return self.kernels(*args)
        return function(*args, **kwargs)


class _Globals(dict[str, Any]):
    """The globals of a function, with another value for one name."""

    def __init__(self, own: dict[str, Any], name: str, value: Any):
        super().__init__({name: value, "__builtins__": own["__builtins__"]})
        self.own = own

    def __missing__(self, name: str) -> Any:
        return self.own[name]


def _with_global(function: FunctionType, name: str, value: Any) -> FunctionType:
    """Return a function that finds another value under one of its global names."""
    made = FunctionType(
        function.__code__.replace(),  # code remembers where it has found globals
        _Globals(function.__globals__, name, value),
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made
