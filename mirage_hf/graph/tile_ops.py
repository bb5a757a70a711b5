"""The ops of a block graph that is built by hand: what each makes of the tiles that it reads.

An op joins the dims that meet in it. It also finds out at which time its result is ready: before
the loop, in each trip, or after the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mirage_hf import errors
from mirage_hf.graph.operands import number, several
from mirage_hf.graph.tensors import DTensor
from mirage_hf.graph.tile_rules import (
    check_distinct,
    join_spans,
    pending_after,
    time_of,
    unfinished,
)
from mirage_hf.graph.tiles import Node, Span, STensor
from mirage_hf.ops import table


class TileOps:
    """The methods that add ops to a block graph. `BlockGraphBuilder` has them."""

    #: Trips of the loop.
    forloop_range: int

    #: The grid dim whose blocks form a cluster. None: there are no clusters.
    cluster: str | None

    #: How many tiles have got a number as their name.
    _count: int

    def __getattr__(self, name: str) -> Callable[..., STensor]:
        """Return the method of an elementwise op that was registered after this class was made.

        The elementwise ops (add, mul, exp, silu, …) are methods by their names in the table: see
        `table.add_methods`.
        """
        if name.startswith("_"):
            raise AttributeError(name)
        if table.lookup(name).kind != "elementwise":
            raise errors.UnknownOpError(
                f"a block graph has no {name}; apply it in the kernel graph, "
                "before or after the block"
            )
        return partial(self._elementwise, name)

    def cast(self, x: STensor, dtype: Any) -> STensor:
        """Convert to another dtype.

        Kernels compute in float32, so this rounds only what is stored.
        """
        return self._elementwise("cast", x, dtype=table.dtype_name(table.as_dtype(dtype)))

    def matmul(self, a: STensor, b: STensor) -> STensor:
        """Multiply (… m k) by (… k n) in one trip. Accumulate the result if the loop walks k."""
        for t in (a, b):
            self._own(t, "matmul")
            if len(t.axes) < 2:
                raise errors.GraphError(f"matmul: needs matrices, got {t}")
            if t.pending or t.unreduced:
                raise unfinished(t, "matmul")
        if a.dims[-1] != b.dims[-2]:
            raise errors.inner_sizes_differ(f"%{a.name}", a.dims, f"%{b.name}", b.dims)
        # As a product over named axes: (… m k 1) · (… 1 k n), summed over k.
        left = replace(a, axes=(*a.axes, None), dims=(*a.dims, 1))
        right = replace(
            b, axes=(*b.axes[:-2], None, *b.axes[-2:]), dims=(*b.dims[:-2], 1, *b.dims[-2:])
        )
        product = self._elementwise("mul", left, right, where="matmul", originals=(a, b))
        out = self.reduction(product, len(product.dims) - 2)
        return replace(
            out, axes=(*out.axes[:-2], out.axes[-1]), dims=(*out.dims[:-2], out.dims[-1])
        )

    def reduction(self, x: STensor, dim: int, kind: str = "sum") -> STensor:
        """Reduce `dim` of the tile to size 1 by "sum", "mean" or "max"."""
        self._own(x, "reduction")
        if kind not in ("sum", "mean", "max"):
            raise errors.GraphError(f"reduction: unknown kind {kind!r}; use sum, mean or max")
        d = table.axis(dim, len(x.axes), "reduction")
        span = x.axes[d]
        if span is None:
            return x
        over = span.root
        if kind == "mean" and (over.walked or over.grid):
            raise errors.GraphError(
                f"reduction: a mean over {over.first}, which is {over.how}, "
                f"would depend on how it is cut; take the sum and divide by {over.size}"
            )
        if over.grid and over.grid in {p.root.grid for p in x.splits}:
            raise errors.GraphError(
                f"reduction: {x} already is a partial result over grid dim {over.grid}"
            )
        unreduced_now = over.walked and x.time != "after"
        wrong_accumulated = x.unreduced is not None and (not over.walked or kind != x.unreduced)
        wrong_pending = x.pending is not None and (unreduced_now or x.pending != kind)
        if wrong_pending or (wrong_accumulated and not unreduced_now):
            raise unfinished(x, "reduction")
        over.reduced = True
        reduced = replace(
            x,
            axes=(*x.axes[:d], None, *x.axes[d + 1 :]),
            dims=(*x.dims[:d], 1, *x.dims[d + 1 :]),
            splits=(*x.splits, over) if over.grid else x.splits,
        )
        if unreduced_now:
            return replace(reduced, pending=kind)
        if x.unreduced is not None:
            return replace(reduced, name=self._name("acc"), unreduced=None)
        node = Node("max" if kind == "max" else "sum", (x,), over=over)
        out = replace(reduced, name=self._name("v"), node=node)
        return self._elementwise("mul", out, 1.0 / over.size) if kind == "mean" else out

    def cluster_reduction(self, x: STensor, kind: str = "sum") -> STensor:
        """Reduce a partial result among the blocks of a cluster by "sum" or "max".

        Every block of the cluster gets the total. Blocks can reduce only after the loop.
        """
        self._own(x, "cluster_reduction")
        if kind not in ("sum", "max"):
            raise errors.GraphError(f"cluster_reduction: unknown kind {kind!r}; use sum or max")
        if x.pending or x.unreduced:
            raise unfinished(x, "cluster_reduction")
        among = next((p.root for p in x.splits if p.root.grid == self.cluster), None)
        if self.cluster is None or among is None:
            raise errors.GraphError(
                f"cluster_reduction: {x} is no partial result of the blocks of a cluster; reduce "
                "over a dim that the cluster's grid dim cuts: new_block_graph(…, cluster='x')"
            )
        held = next((a.root for a in x.axes if a is not None and a.root.grid == self.cluster), None)
        if held is not None or x.time == "loop":
            why = "changes from trip to trip" if held is None else f"still holds {held.first}"
            raise errors.GraphError(f"cluster_reduction: {x} {why}; reduce or accumulate it first")
        return replace(
            x,
            name=self._name("v"),
            node=Node(kind, (x,), among=among),
            splits=tuple(p for p in x.splits if p.root is not among),
        )

    def permute(self, x: STensor, order: Sequence[int]) -> STensor:
        """Return the tile with its dims in another order. No data moves."""
        rank = len(self._own(x, "permute").axes)
        order = tuple(table.axis(o, rank, "permute") for o in several(order, "permute", "order"))
        table.lookup("permute").infer(x.dims, order=order)
        return replace(
            x, axes=tuple(x.axes[o] for o in order), dims=tuple(x.dims[o] for o in order)
        )

    def accum(self, x: STensor, shift: STensor | None = None) -> STensor:
        """Sum over the trips of the loop.

        Args:
            x: The tile to sum.
            shift: The running maximum that `x` is relative to, as accum_max returned it (online
                softmax).
        """
        shifted = shift is not None and self.forloop_range > 1
        if shifted and not self._own(shift, "accum").is_maximum:
            raise errors.GraphError(
                f"accum: shift {shift} is not a running maximum; it comes from accum_max"
            )
        return self._accumulate("sum", x, shift)

    def accum_max(self, x: STensor) -> STensor:
        """Return the maximum over the trips of the loop.

        Inside the loop, the result is the running maximum, this trip included.
        """
        return self._accumulate("max", x, None)

    def rms_norm(self, x: STensor, weight: STensor | None = None, eps: float = 1e-6) -> STensor:
        """Compute x / sqrt(mean(x²) + eps) over the last dim, times `weight`.

        A block must hold the last dim whole.
        """
        parameters = () if weight is None else (weight,)
        return self._expand("rms_norm", x, *parameters, eps=eps)

    def layer_norm(
        self,
        x: STensor,
        weight: STensor | None = None,
        bias: STensor | None = None,
        eps: float = 1e-6,
    ) -> STensor:
        """Compute (x − mean) / sqrt(var + eps) over the last dim, times `weight`, plus `bias`.

        A block must hold the last dim whole.
        """
        parameters = (p for p in (weight, bias) if p is not None)
        return self._expand("layer_norm", x, *parameters, eps=eps)

    def _expand(self, name: str, x: STensor, *parameters: STensor, eps: float) -> STensor:
        expand = table.lookup(name).expand
        assert expand is not None
        made: STensor = expand(self, self._own(x, name), *parameters, eps=eps)
        return made

    def softmax(self, x: STensor, dim: int = -1) -> STensor:
        """Compute softmax over a dim that a block holds whole.

        The maximum is subtracted first, so that exponentials stay in range.
        """
        d = table.axis(dim, len(self._own(x, "softmax").axes), "softmax")
        over = x.axes[d]
        if over is not None and (over.root.walked or over.root.grid):
            raise errors.GraphError(
                f"softmax: {over.root.first} is {over.root.how}; "
                "spell it out with accum_max and accum(…, shift=…)"
            )
        e = self.exp(self.sub(x, self.reduction(x, d, "max")))
        return self.div(e, self.reduction(e, d))

    # -- helpers -----------------------------------------------------------------------------------

    def _elementwise(
        self,
        name: str,
        *operands: Any,
        where: str = "",
        originals: tuple[STensor, ...] = (),
        **attrs: Any,
    ) -> STensor:
        """Add an elementwise op.

        Args:
            name: The op.
            operands: Tiles and numbers.
            where: The method that the user called, for messages. Empty: `name`.
            originals: The tiles that the user gave, for messages. Empty: those among `operands`.
            attrs: The op's attributes.
        """
        entry, where = table.lookup(name), where or name
        if len(operands) != entry.arity[0]:
            raise errors.GraphError(f"{name}: takes {entry.arity[0]} operands, got {len(operands)}")
        table.check_attrs(name, attrs)
        args = [
            self._own(x, where) if isinstance(x, (STensor, DTensor)) else number(x, where)
            for x in operands
        ]
        tiles = [x for x in args if isinstance(x, STensor)]
        if not tiles:
            raise errors.GraphError(f"{name}: needs a tile of this block graph, got numbers alone")
        shown = originals or tuple(tiles)
        for t in tiles:
            if t.unreduced:
                raise unfinished(t, where)
        dims = entry.infer(*(t.dims for t in tiles)) if name != "cast" else tiles[0].dims
        axes = self._broadcast_axes(tiles, len(dims), where, shown)
        time, running = time_of(tiles, where, shown)
        out = STensor(
            self._name("v"),
            Node(name, tuple(args), tuple(sorted((entry.attrs | attrs).items()))),
            axes,
            tuple(dims),
            splits=tuple(dict.fromkeys(p.root for t in tiles for p in t.splits)),
            time=time,
            pending=pending_after(name, args, where),
            running=running,
            owner=self,
        )
        return check_distinct(out, where)

    def _broadcast_axes(
        self, tiles: Sequence[STensor], rank: int, where: str, shown: Sequence[STensor]
    ) -> tuple[Span | None, ...]:
        """Return the span of each dim of an elementwise result. Dims that meet become one."""
        axes: list[Span | None] = [None] * rank
        for t in tiles:
            for k, a in enumerate(t.axes, rank - len(t.axes)):
                if a is not None:
                    met = axes[k]
                    axes[k] = a.root if met is None else join_spans(met, a, where, shown)
        return tuple(axes)

    def _accumulate(self, kind: str, x: STensor, shift: STensor | None) -> STensor:
        what = "accum" if kind == "sum" else "accum_max"
        self._own(x, what)
        if self.forloop_range == 1:
            return x
        if x.time != "loop":
            raise errors.GraphError(
                f"{what}: {x} is the same in every trip of the loop; "
                "use it as it is, or give an input that it is made of an fmap"
            )
        if x.pending and x.pending != kind:
            raise unfinished(x, what)
        if (x.running and x.running.node) is not (shift and shift.node):
            have = "none" if x.running is None else f"%{x.running.name}"
            way = "(accum(x, shift=…))" if kind == "sum" else "(only sums have one)"
            raise errors.GraphError(
                f"{what}: {x} depends on the running maximum {have}, "
                f"its shift must be that one {way}"
            )
        walked = any(a is not None and a.root.walked for a in x.axes)
        if not walked and not x.pending:
            raise errors.GraphError(
                f"{what}: {x} depends on the loop by a running maximum alone; use it after the loop"
            )
        made = STensor(
            self._name("acc"),
            Node("accumulate", (replace(x, pending=None),), (("kind", kind),), shift=shift),
            x.axes,
            x.dims,
            x.splits,
            "after",
            unreduced=kind if walked else None,
            owner=self,
        )
        return check_distinct(made, what)

    def _own(self, t: Any, where: str) -> STensor:
        """Return `t`, a tile of this block graph."""
        if not isinstance(t, STensor):
            raise errors.GraphError(
                f"{where}: expected a tile of this block graph, got {type(t).__name__}; "
                "make one with bg.new_input"
            )
        if t.owner is not self:
            raise errors.GraphError(
                f"{where}: {t} belongs to another block graph; load what it needs with new_input"
            )
        return t

    def _name(self, base: str) -> str:
        self._count += 1
        return f"{base}{self._count}" if base in ("v", "acc") else base


table.add_methods(TileOps, "_elementwise")
