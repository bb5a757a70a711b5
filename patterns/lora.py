"""A PEFT linear with one plain adapter, unmerged: x · w (+ bias) + (scaling · x · a) · b.

PEFT keeps adapters of half-precision models in float32 unless told otherwise, and adds in the wider dtype; so does this. A linear on its
own is one program (`LORA`). In a layer, where one x goes to several linears, x · [a…] is a program of its own (`LORA_DOWN`), a thousandth
of the work, and the blocks of the layer take what it gives and the b (`BlockAdapters`). Scalings are operands, one for each column of a, so that
kernels serve adapters of any; PEFT scales behind b, which is the same but for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mirage_hf.graph.kernel import DTensor, KernelGraph, new_kernel_graph
from mirage_hf.patterns.parts import normed
from mirage_hf.patterns.schema import Pattern

AXES = {
    "x": "rows k",
    "w": "k n",
    "bias": "1 n",
    "a": "k r",
    "b": "r n",
    "scales": "1 r",
    "y": "rows n",
}
DOWN_AXES = {
    "x": "rows k",
    "gamma": "1 k",
    "gamma_bias": "1 k",
    "a…": "k r…",
    "scales": "1 r",
    "y": "rows r",
}


def added(g: KernelGraph, y: DTensor, delta: DTensor) -> DTensor:
    """y + delta in the wider of their dtypes, then in that of y."""
    wider = torch.promote_types(y.dtype, delta.dtype)
    total = g.add(
        y if y.dtype == wider else g.cast(y, wider),
        delta if delta.dtype == wider else g.cast(delta, wider),
    )
    return total if y.dtype == wider else g.cast(total, y.dtype)


def scaled(g: KernelGraph, low: DTensor) -> DTensor:
    """low (rows, r) by `scales` (1, r), new inputs in float32: a scaling is not rounded to the adapter's dtype."""
    scales = g.new_input((1, low.dims[1]), torch.float32, name="scales", constant=True)
    return (
        g.mul(low, scales)
        if low.dtype == scales.dtype
        else g.cast(g.mul(g.cast(low, scales.dtype), scales), low.dtype)
    )


def build(
    rows: int, k: int, n: int, r: int, bias: bool, dtype: torch.dtype, adapter_dtype: torch.dtype
) -> KernelGraph:
    g = new_kernel_graph()
    x = g.new_input((rows, k), dtype, name="x")
    y = g.matmul(x, g.new_input((k, n), dtype, strides=(1, k), name="w", constant=True))
    if bias:
        y = g.add(y, g.new_input((1, n), dtype, name="bias", constant=True))
    a = g.new_input((k, r), adapter_dtype, strides=(1, k), name="a", constant=True)
    b = g.new_input((r, n), adapter_dtype, strides=(1, r), name="b", constant=True)
    low = scaled(g, g.matmul(x if dtype == adapter_dtype else g.cast(x, adapter_dtype), a))
    g.mark_output(added(g, y, g.matmul(low, b)))
    return g


def build_down(
    rows: int,
    k: int,
    r: tuple[int, ...],
    eps: float,
    dtype: torch.dtype,
    adapter_dtype: torch.dtype,
    norm: bool = True,
    offset: float = 0.0,
    centred: bool = False,
    norm_bias: bool = False,
) -> KernelGraph:
    """`r`: the ranks of the linears that have adapters; `offset`, `centred`, `norm_bias`: what the norm is, as in `parts.normed`.
    The kernel that is launched next is that of those linears."""
    g = new_kernel_graph()
    x = g.new_input((rows, k), dtype, name="x")
    if norm:
        x = normed(g, x, "gamma", eps, offset, centred, norm_bias)
    each = [
        g.new_input((k, rank), adapter_dtype, strides=(1, k), name=f"a{i}", constant=True)
        for i, rank in enumerate(r)
    ]
    x = x if dtype == adapter_dtype else g.cast(x, adapter_dtype)
    g.mark_output(scaled(g, g.matmul(x, g.concat(each, dim=1) if len(each) > 1 else each[0])))
    return g


@dataclass(frozen=True)
class BlockAdapters:
    """The adapters of a block's linears. ranks: of each linear, 0 where it has none; where the results of several are packed, all that
    have one have the same. A program's operands are, right after x, what LORA_DOWN made for each of `reading`, and after the weights and
    biases of the linears, for each of `reading`, its b (r, n), zeros where it has none."""

    ranks: tuple[int, ...]
    dtype: torch.dtype
    packed: bool = False

    @property
    def reading(self) -> tuple[int, ...]:
        """The linears with operands of their own: of packed ones all, if one has an adapter."""
        return tuple(i for i, r in enumerate(self.ranks) if r or self.packed)

    @property
    def rank(self) -> int:
        return max(self.ranks)

    def in_dtype(self, dtype: torch.dtype) -> BlockAdapters:
        return replace(self, dtype=dtype)

    def lows(self, made: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
        """What LORA_DOWN made (rows, ranks side by side), as operands: views (rows, r), of packed linears (rows, r, n) that stand still
        along n. A linear without an adapter reads anything, times zeros."""
        starts = [sum(self.ranks[:i]) if r else 0 for i, r in enumerate(self.ranks)]
        views = {
            i: made[:, starts[i] : starts[i] + (self.ranks[i] or self.rank)] for i in self.reading
        }
        return [
            v[..., None].expand(*v.shape, widths[i]) if self.packed else v for i, v in views.items()
        ]

    def low_inputs(self, g: KernelGraph, rows: int, widths: Sequence[int]) -> list[DTensor]:
        """The inputs of a program for those."""
        k = sum(self.ranks)
        shapes = {i: (rows, self.ranks[i] or self.rank) for i in self.reading}
        if self.packed:
            return [
                g.new_input((*d, widths[i]), self.dtype, strides=(k, 1, 0), name=f"low{i}")
                for i, d in shapes.items()
            ]
        return [
            g.new_input(d, self.dtype, strides=(k, 1), name=f"low{i}") for i, d in shapes.items()
        ]

    def apart(
        self, g: KernelGraph, ys: Sequence[DTensor], lows: Sequence[DTensor]
    ) -> list[DTensor]:
        """What linears give (rows, n), with what their adapters add."""
        found = list(ys)
        for i, low in zip(self.reading, lows, strict=True):
            found[i] = added(g, ys[i], g.matmul(low, self._b(g, i, ys[i].dims[1])))
        return found

    def side_by_side(
        self, g: KernelGraph, y: DTensor, widths: Sequence[int], lows: Sequence[DTensor]
    ) -> DTensor:
        """The same for packed linears: one sum over the rank for all of y."""
        bs = [self._b(g, i, n) for i, n in enumerate(widths)]
        delta = g.reduction(g.mul(g.concat(lows, dim=2), g.concat(bs, dim=1)), 1)
        return added(g, y, g.reshape(delta, y.dims))

    def _b(self, g: KernelGraph, i: int, n: int) -> DTensor:
        rank = self.ranks[i] or self.rank
        return g.new_input((rank, n), self.dtype, strides=(1, rank), name=f"b{i}_up", constant=True)


LORA = Pattern("lora", AXES, build)
LORA_DOWN = Pattern("lora_down", DOWN_AXES, build_down, next_may_launch_early=True)
