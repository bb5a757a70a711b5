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

`BlockGraphBuilder.schedule` returns the tiles that keep the numbers too. The ops are in
tile_ops.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mirage_hf import errors
from mirage_hf.graph.block import Axis, BlockGraph, Role
from mirage_hf.graph.block_parts import MAX_CLUSTER
from mirage_hf.graph.emission import Emission, axis_names
from mirage_hf.graph.tensors import DTensor
from mirage_hf.graph.tile_ops import TileOps
from mirage_hf.graph.tile_rules import (
    Map,
    check_distinct,
    check_filled,
    grid_map,
    join_cut,
    split_position,
    unfinished,
)
from mirage_hf.graph.tiles import GRID_DIMS, Node, Span, STensor, TiledBlock, TiledOutput
from mirage_hf.ops import table


@dataclass(repr=False)
class BlockGraphBuilder(TileOps):
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

    def _blocks(self, grid: str | None) -> int:
        """Return the number of blocks along a grid dim, 1 for None."""
        return 1 if grid is None else self.grid_dim[GRID_DIMS.index(grid)]

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
