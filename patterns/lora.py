"""A PEFT linear with one plain unmerged adapter: x · w (+ bias) + (scaling · x · a) · b.

PEFT keeps adapters of half-precision models in float32 by default, and adds in the wider dtype. The
programs here do the same. A linear on its own is one program (`LORA`). In a layer several linears
read one x. There x · [a…] is a program of its own (`LORA_DOWN`), a thousandth of the work. The
blocks of the layer take its output and the weights b (`BlockAdapters`). Scalings are operands, one
for each column of a, so that kernels serve adapters of any scaling. PEFT scales after b, which
differs only in rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mirage_hf.graph.kernel import DTensor, KernelGraph, new_kernel_graph
from mirage_hf.patterns.fragments import normed
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
    """Return y + delta, computed in the wider of their dtypes and rounded to that of y."""
    wider = torch.promote_types(y.dtype, delta.dtype)
    total = g.add(
        y if y.dtype == wider else g.cast(y, wider),
        delta if delta.dtype == wider else g.cast(delta, wider),
    )
    return total if y.dtype == wider else g.cast(total, y.dtype)


def scaled(g: KernelGraph, low: DTensor) -> DTensor:
    """Return low (rows, r) times a new input `scales` (1, r).

    Scalings are in float32, so they are not rounded to the adapter's dtype.
    """
    scales = g.new_input((1, low.dims[1]), torch.float32, name="scales", constant=True)
    if low.dtype == scales.dtype:
        return g.mul(low, scales)
    return g.cast(g.mul(g.cast(low, scales.dtype), scales), low.dtype)


def build(
    rows: int, k: int, n: int, r: int, bias: bool, dtype: torch.dtype, adapter_dtype: torch.dtype
) -> KernelGraph:
    """Return the program of one linear (k, n) with an adapter of rank r."""
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
    """Return the program of the first products of several adapters that read one x.

    The kernel of the adapters' linears is launched right after it.

    Args:
        rows: The number of rows.
        k: The width of x.
        r: The ranks of the linears that have adapters.
        eps: The epsilon of the norm.
        dtype: The dtype of x.
        adapter_dtype: The dtype of the adapters.
        norm: Whether x is normalised first.
        offset: As in `parts.normed`.
        centred: As in `parts.normed`.
        norm_bias: Whether the norm has a bias.
    """
    g = new_kernel_graph()
    x = g.new_input((rows, k), dtype, name="x")
    if norm:
        x = normed(g, x, "gamma", eps, offset, centred, norm_bias)
    each = [
        g.new_input((k, rank), adapter_dtype, strides=(1, k), name=f"a{i}", constant=True)
        for i, rank in enumerate(r)
    ]
    x = x if dtype == adapter_dtype else g.cast(x, adapter_dtype)
    a = g.concat(each, dim=1) if len(each) > 1 else each[0]
    g.mark_output(scaled(g, g.matmul(x, a)))
    return g


@dataclass(frozen=True)
class BlockAdapters:
    """The adapters of the linears of a block.

    The program of such a block has two operands for each of `linears`. Right after x comes the
    first product of the adapter, which `LORA_DOWN` computes. After all weights and biases comes its
    b (r, n).
    """

    #: The rank of each linear's adapter, 0 if it has none. If `packed`, all ranks are equal or 0.
    ranks: tuple[int, ...]
    #: The dtype of the adapters.
    dtype: torch.dtype
    #: Whether the outputs of the linears are packed into one row.
    packed: bool = False

    @property
    def linears(self) -> tuple[int, ...]:
        """The linears that have adapter operands: if packed, all, with zeros for a missing b."""
        return tuple(i for i, rank in enumerate(self.ranks) if rank or self.packed)

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(self.ranks)

    def in_dtype(self, dtype: torch.dtype) -> BlockAdapters:
        """Return the same adapters in another dtype."""
        return replace(self, dtype=dtype)

    def low_operands(self, products: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
        """Return views of the first products, one for each of `linears`.

        A view is (rows, r). Of packed linears it is (rows, r, n) with stride 0 along n. A linear
        without an adapter reads any columns, because its b is zeros.

        Args:
            products: What LORA_DOWN computes (rows, ranks side by side).
            widths: The outputs of each linear, if they are packed.
        """
        operands = []
        for i in self.linears:
            rank = self.ranks[i]
            start = sum(self.ranks[:i]) if rank else 0
            view = products[:, start : start + (rank or self.rank)]
            if self.packed:
                view = view[..., None].expand(*view.shape, widths[i])
            operands.append(view)
        return operands

    def low_inputs(self, g: KernelGraph, rows: int, widths: Sequence[int]) -> list[DTensor]:
        """Return new inputs of a program for `low_operands`."""
        row = sum(self.ranks)
        inputs = []
        for i in self.linears:
            dims: tuple[int, ...] = (rows, self.ranks[i] or self.rank)
            strides: tuple[int, ...] = (row, 1)
            if self.packed:
                dims, strides = (*dims, widths[i]), (*strides, 0)
            inputs.append(g.new_input(dims, self.dtype, strides=strides, name=f"low{i}"))
        return inputs

    def add_to_each(
        self, g: KernelGraph, outputs: Sequence[DTensor], lows: Sequence[DTensor]
    ) -> list[DTensor]:
        """Return the outputs of linears (rows, n) with what their adapters add."""
        totals = list(outputs)
        for i, low in zip(self.linears, lows, strict=True):
            b = self._new_b(g, i, outputs[i].dims[1])
            totals[i] = added(g, outputs[i], g.matmul(low, b))
        return totals

    def add_to_packed(
        self, g: KernelGraph, y: DTensor, widths: Sequence[int], lows: Sequence[DTensor]
    ) -> DTensor:
        """Return the packed outputs y with what adapters add, as one sum over the rank."""
        bs = [self._new_b(g, i, n) for i, n in enumerate(widths)]
        delta = g.reduction(g.mul(g.concat(lows, dim=2), g.concat(bs, dim=1)), 1)
        return added(g, y, g.reshape(delta, y.dims))

    def _new_b(self, g: KernelGraph, linear: int, n: int) -> DTensor:
        rank = self.ranks[linear] or self.rank
        name = f"b{linear}_up"
        return g.new_input((rank, n), self.dtype, strides=(1, rank), name=name, constant=True)


LORA = Pattern("lora", AXES, build)
LORA_DOWN = Pattern("lora_down", DOWN_AXES, build_down, next_may_launch_early=True)
