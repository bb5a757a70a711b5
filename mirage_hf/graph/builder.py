"""Build a block graph by hand, in the terms of the Mirage paper (arXiv 2405.05751, section 2).

Users write one block in one trip of the loop, so tensors have the dims of their tiles. The imap
and omap of a tensor say which dim each grid dim cuts. The fmap says which dim the loop walks.

The result is a `BlockGraph` over named axes. It keeps the roles that grid_dim and forloop_range
give to axes, and not their numbers:

- Dims that meet in an op are one axis.
- An axis that a grid dim cuts is a GRID axis. The axis that the loop walks is the LOOP axis. All
  others are TILE axes.
- An axis that a grid dim cuts and that a block also sums is split (split-K). The partial results
  carry the number of their split, as a new dim of the output.

`BlockGraphBuilder.schedule` returns the tiles that keep the numbers too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mirage_hf import errors
from mirage_hf.graph.block import Axis, BlockGraph, Role
from mirage_hf.graph.block_parts import MAX_CLUSTER
from mirage_hf.graph.emission import Emission, axis_names
from mirage_hf.graph.operands import number, several
from mirage_hf.graph.tensors import DTensor
from mirage_hf.graph.tile_rules import (
    Map,
    check_distinct,
    check_filled,
    grid_map,
    join_cut,
    join_spans,
    pending_after,
    split_position,
    time_of,
    unfinished,
)
from mirage_hf.graph.tiles import GRID_DIMS, Node, Span, STensor, TiledBlock, TiledOutput
from mirage_hf.ops import table


@dataclass(repr=False)
class BlockGraphBuilder:
    """A block graph under construction. `mirage_hf.new_block_graph` makes one.

    Methods that add an op return its tile. Elementwise ops of the table are methods too:
    `bg.add(x, y)`, `bg.exp(x)`.

    Example:
        A matrix product, 64 columns per block, with the inner dim walked in 4 trips:

        ```python
        bg = mirage_hf.new_block_graph(grid_dim=(16,), forloop_range=4)
        x = bg.new_input(X, imap={"x": None}, fmap=1)
        w = bg.new_input(W, imap={"x": 1}, fmap=0)
        bg.new_output(bg.accum(bg.matmul(x, w)), omap={"x": 1})
        y, = kernels.customized([X, W], bg)
        ```

    Raises:
        GraphError: If no block graph expresses what was written. The message says what to change.
    """

    #: Blocks along each grid dim.
    grid_dim: tuple[int, ...]

    #: Trips of the loop.
    forloop_range: int = 1

    #: The grid dim whose blocks form a cluster. None: there are no clusters.
    cluster: str | None = None

    #: The tiles that are loaded, each with its tensor.
    inputs: list[tuple[STensor, DTensor]] = field(default_factory=list)

    #: The tiles that are stored.
    outputs: list[TiledOutput] = field(default_factory=list)

    _operands: list[DTensor] = field(default_factory=list)
    _cut: dict[str, Span] = field(default_factory=dict)
    _walked: Span | None = None
    _count: int = 0

    def __repr__(self) -> str:
        return (
            f"<BlockGraphBuilder: grid_dim {self.grid_dim}, forloop_range {self.forloop_range}, "
            f"{len(self.inputs)} inputs, {len(self.outputs)} outputs>"
        )

    # -- inputs and outputs ------------------------------------------------------------------------

    def new_input(
        self, tensor: DTensor, imap: Map | None = None, fmap: int | None = None
    ) -> STensor:
        """Load a tile of a tensor.

        Args:
            tensor: A tensor of a kernel graph.
            imap: The dim that each grid dim cuts, as a dict by name or a tuple in the order x, y,
                z. If it is None, −1 or left out, every block along that grid dim reads the same.
            fmap: The dim that the loop walks, or None.
        """
        if not isinstance(tensor, DTensor):
            raise errors.GraphError(
                f"new_input: expected a tensor of a kernel graph, got {type(tensor).__name__}; "
                "make one with graph.new_input"
            )
        rank, where = len(tensor.dims), f"new_input: {tensor.name} {errors.shape(tensor.dims)}"
        cut: dict[int, str] = {}
        for g, d in grid_map(imap, self.grid_dim, rank, where, "imap").items():
            if d in cut:
                raise errors.GraphError(
                    f"{where}: grid dims {cut[d]} and {g} both cut dim {d}; let one of them cut it"
                )
            cut[d] = g
        walked = None
        if fmap is not None and fmap != -1:
            walked = table.axis(fmap, rank, f"{where}: fmap")
        dims = tuple(self._tile_size(tensor, d, cut.get(d), walked == d) for d in range(rank))
        axes = tuple(self._span(tensor, d, cut.get(d), walked == d) for d in range(rank))
        time = "loop" if any(a is not None and a.walked for a in axes) else "any"
        node = Node("input", source=self._operand(tensor))
        made = STensor(self._name(tensor.name), node, axes, dims, time=time, owner=self)
        self.inputs.append((check_distinct(made, where), tensor))
        return made

    def _tile_size(self, tensor: DTensor, d: int, grid: str | None, walked: bool) -> int:
        """Return the size of dim `d` of a tensor's tile."""
        size = tensor.dims[d]
        pieces = self._blocks(grid) * (self.forloop_range if walked else 1)
        if size % pieces == 0:
            return size // pieces
        by = [f"grid dim {grid} of {self._blocks(grid)}"] if grid is not None else []
        by += [f"{self.forloop_range} trips"] if walked else []
        raise errors.GraphError(
            f"new_input: {tensor.name} {errors.shape(tensor.dims)}: dim {d} of size {size} "
            f"is not divisible by {' × '.join(by)}; choose numbers that divide it"
        )

    def _span(self, tensor: DTensor, d: int, grid: str | None, walked: bool) -> Span | None:
        """Return the span that dim `d` of a tensor's tile ranges over, None for size 1."""
        size = tensor.dims[d]
        if size == 1:
            return None
        grid = grid if self._blocks(grid) > 1 else None
        span = Span(size, grid, walked and self.forloop_range > 1, f"dim {d} of {tensor.name}")
        if grid is not None:
            self._cut[grid] = join_cut(self._cut.get(grid), span, f"grid dim {grid} cuts")
        if span.walked:
            self._walked = join_cut(self._walked, span, "the loop walks")
        return span

    def _operand(self, tensor: DTensor) -> int:
        """Return the number of a tensor among the operands, and add it if it is new."""
        for number_of_operand, known in enumerate(self._operands):
            if _same(known, tensor):
                return number_of_operand
        self._operands.append(tensor)
        return len(self._operands) - 1

    def new_output(self, tensor: STensor, omap: Map | None = None, dtype: Any = None) -> None:
        """Store a tile.

        Args:
            tensor: The tile.
            omap: The dim that each grid dim fills. If the tile is a sum over an axis that a grid
                dim cuts, each block has a partial sum. Then omap may leave out that grid dim, and
                the output gets a new first dim that numbers the partial sums. Or omap names a dim
                of size 1 that numbers them.
            dtype: The dtype of the output. None: the first input's.
        """
        where = f"new_output: {self._own(tensor, 'new_output')}"
        if tensor.unreduced or tensor.pending:
            raise unfinished(tensor, "new_output")
        if tensor.time == "loop":
            raise errors.GraphError(
                f"{where} changes from trip to trip; "
                "store what is accumulated over the loop (accum, accum_max)"
            )
        given = grid_map(omap, self.grid_dim, len(tensor.axes), where, "omap")
        splits_at: list[tuple[int, Span]] = []
        splits = {p.root.grid: p.root for p in tensor.splits}
        for g, n in zip(GRID_DIMS, self.grid_dim, strict=False):
            if n == 1:
                continue
            check_filled(tensor, where, g, given.get(g))
            if g in splits:
                position = split_position(tensor, where, g, given.get(g), splits_at)
                splits_at.append((position, splits[g]))
        name = None if dtype is None else table.dtype_name(table.as_dtype(dtype))
        self.outputs.append(TiledOutput(tensor, tensor.axes, tuple(splits_at), name))

    # -- ops ---------------------------------------------------------------------------------------

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

    # -- helpers of ops ----------------------------------------------------------------------------

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
        row, where = table.lookup(name), where or name
        if len(operands) != row.arity[0]:
            raise errors.GraphError(f"{name}: takes {row.arity[0]} operands, got {len(operands)}")
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
        dims = row.infer(*(t.dims for t in tiles)) if name != "cast" else tiles[0].dims
        axes = self._broadcast_axes(tiles, len(dims), where, shown)
        time, running = time_of(tiles, where, shown)
        out = STensor(
            self._name("v"),
            Node(name, tuple(args), tuple(sorted((row.attrs | attrs).items()))),
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

    def _blocks(self, grid: str | None) -> int:
        """Return the number of blocks along a grid dim, 1 for None."""
        return 1 if grid is None else self.grid_dim[GRID_DIMS.index(grid)]

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

    # -- the whole ---------------------------------------------------------------------------------

    def build(self, operands: Sequence[DTensor] | None = None) -> BlockGraph:
        """Return the block graph.

        Args:
            operands: The kernel's operands. The sources of block inputs are positions among them.
                Give the tensors of new_input in any order, or replacements for them in the order of
                new_input. None: the tensors of new_input, in that order.

        Raises:
            GraphError: If the tiles do not make a block graph.
        """
        for g, n in zip(GRID_DIMS, self.grid_dim, strict=False):
            if n > 1 and g not in self._cut:
                raise errors.GraphError(
                    f"block graph: grid dim {g} of {n} cuts no input, so its blocks would all do "
                    "the same; name it in an imap, or leave it out of grid_dim"
                )
        if self.forloop_range > 1 and self._walked is None:
            raise errors.GraphError(
                f"block graph: the loop of {self.forloop_range} trips walks no input; "
                "give one an fmap, or forloop_range=1"
            )
        if not self.outputs:
            raise errors.GraphError("block graph: there is no output; name one with new_output")
        return Emission(self._tiled(), self._positions(operands)).block_graph()

    def _tiled(self) -> TiledBlock:
        return TiledBlock(self.grid_dim, tuple(self.inputs), tuple(self.outputs), self.cluster)

    def _positions(self, operands: Sequence[DTensor] | None) -> list[int]:
        """Return the position among `operands` of each tensor given to new_input."""
        mine = self._operands
        if operands is None:
            return list(range(len(mine)))
        places = [next((k for k, t in enumerate(operands) if _same(t, m)), None) for m in mine]
        known = [k for k in places if k is not None]
        if len(known) == len(mine):
            return known
        if known or len(operands) != len(mine):
            names = ", ".join(t.name for t in mine)
            raise errors.GraphError(
                f"block graph: reads {names}; {len(operands)} operands are given that are not "
                "those; pass these tensors, or as many others in this order"
            )
        return list(range(len(mine)))

    def schedule(self) -> dict[str, int]:
        """Return, for each axis, the tile size that grid_dim and forloop_range imply.

        A tile size is the number of elements that a block holds at a time.

        Raises:
            GraphError: If a tile is not a power of two, because kernels have only such tiles. Or if
                blocks form clusters, whose tiles `generate_cuda_program` chooses.
        """
        if self.cluster is not None:
            raise errors.GraphError(
                "schedule: blocks form clusters, which Triton does not have; "
                "generate_cuda_program chooses the tiles of their kernels"
            )
        block = self.build()
        tiles = {}
        for a in block.named(Role.GRID):
            splits = block.axis_split_by(a.name) is not None
            tiles[a.name] = 1 if splits else a.size // self._blocks(self._grid_of(a))
        for a in block.named(Role.LOOP):
            tiles[a.name] = block.split_size(a.name) // self.forloop_range
        for name, tile in tiles.items():
            if tile & (tile - 1):
                raise errors.GraphError(
                    f"schedule: {tile} elements of axis {name} in a block are not a power of two; "
                    "choose a grid_dim and a forloop_range that leave one, "
                    "or leave the tiles to the tuner"
                )
        for a in block.named(Role.TILE):
            tiles[a.name] = 1 << (block.split_size(a.name) - 1).bit_length()
        return {a.name: tiles[a.name] for a in block.axes}

    def _grid_of(self, axis: Axis) -> str | None:
        """Return the grid dim that cuts an axis."""
        names = axis_names(self._tiled())
        return next((span.grid for span, name in names.items() if name == axis.name), None)


table.add_methods(BlockGraphBuilder, "_elementwise")


def _same(a: DTensor, b: DTensor) -> bool:
    return a.graph_uid == b.graph_uid and a.index == b.index


def new_block_graph(
    grid_dim: int | Sequence[int] = (1,), forloop_range: int = 1, cluster: str | None = None
) -> BlockGraphBuilder:
    """Return an empty block graph.

    The number of threads is not part of it, because the schedule chooses that.

    Args:
        grid_dim: Blocks along each of one to three grid dims x, y, z.
        forloop_range: Trips of the loop.
        cluster: The grid dim whose blocks form a thread-block cluster. They can add up what each of
            them holds, see `BlockGraphBuilder.cluster_reduction`.

    Raises:
        GraphError: If a number is not a positive integer, or if the cluster is none of the grid
            dims or has a number of blocks that is not possible.
    """
    dims = tuple(grid_dim) if isinstance(grid_dim, Sequence) else (grid_dim,)
    if not 1 <= len(dims) <= len(GRID_DIMS) or not all(map(_is_count, dims)):
        raise errors.GraphError(
            f"new_block_graph: grid_dim {grid_dim!r} is not one to three positive integers"
        )
    if not _is_count(forloop_range):
        raise errors.GraphError(
            f"new_block_graph: forloop_range {forloop_range!r} is not a positive integer"
        )
    if cluster is not None:
        names = GRID_DIMS[: len(dims)]
        blocks = dims[names.index(cluster)] if cluster in names else 0
        if not 2 <= blocks <= MAX_CLUSTER:
            raise errors.GraphError(
                f"new_block_graph: cluster {cluster!r} must be one of the grid dims "
                f"{', '.join(names)}, and have 2 to {MAX_CLUSTER} blocks"
            )
    return BlockGraphBuilder(dims, forloop_range, cluster)


def _is_count(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n > 0
