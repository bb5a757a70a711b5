"""Block graphs: what one kernel does, as stages over named axes. They are immutable.

Every axis has one role. GRID axes are cut among thread blocks. The LOOP axis is walked by the
stages that name it. TILE axes are held whole by a block. A LOOP or TILE axis may be split (split-K,
split-KV). Then a GRID axis numbers its splits, and a block sees one split. If a block reduces over
a split axis, the result is partial: it carries the axis of split numbers instead.

The CLUSTER axis is cut among the blocks of one thread-block cluster. It may number splits, too.
Only a reduction over it lets a block see what the others hold. So partial results of a cluster are
added up in the same kernel.

A value carries a set of axes. A tensor has one dim per axis that it carries. Sizes of tiles are not
part of a block graph, because the schedule chooses them. The imap, fmap and omap of the Mirage
paper follow from the roles, see `graph/maps.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from mirage_hf.graph.block_checks import check_block
from mirage_hf.graph.block_parts import (
    ROTATIONS,
    SIGN_HALVES,
    SIGN_PAIRS,
    SWAP_HALVES,
    SWAP_PAIRS,
    Accumulator,
    Axis,
    AxisTable,
    BlockInput,
    BlockOp,
    BlockOutput,
    Contraction,
    Padding,
    Role,
    Rotation,
    Stage,
    Taken,
)

__all__ = [
    "ROTATIONS",
    "SIGN_HALVES",
    "SIGN_PAIRS",
    "SWAP_HALVES",
    "SWAP_PAIRS",
    "Accumulator",
    "Axis",
    "BlockGraph",
    "BlockInput",
    "BlockOp",
    "BlockOutput",
    "Contraction",
    "Padding",
    "Role",
    "Rotation",
    "Stage",
    "Taken",
]


@dataclass(frozen=True)
class BlockGraph:
    """What one kernel does.

    Construction checks names, axes and the order of definition.

    Example:
        A sum over the columns of a matrix, one row per block, with the columns walked in tiles:

        ```python
        BlockGraph(
            axes=(Axis("m", 16, Role.GRID), Axis("k", 4096, Role.LOOP)),
            inputs=(BlockInput("x", sources=(0,), axes=("m", "k")),),
            stages=(Stage("k", body=(), accumulators=(Accumulator("total", "x", "sum", ("m",)),)),),
            outputs=(BlockOutput("total", ("m", None), "float16"),),
        )
        ```

    Raises:
        GraphError: If the parts do not fit together.
    """

    axes: tuple[Axis, ...]
    inputs: tuple[BlockInput, ...]
    stages: tuple[Stage, ...]
    outputs: tuple[BlockOutput, ...]

    def __post_init__(self) -> None:
        check_block(self.axes, self.inputs, self.stages, self.outputs)

    # -- axes --------------------------------------------------------------------------------------

    @cached_property
    def _table(self) -> AxisTable:
        return AxisTable(self.axes)

    def axis(self, name: str) -> Axis:
        """Return the axis called `name`."""
        return self._table.axis(name)

    def role(self, name: str) -> Role:
        """Return the role of the axis called `name`."""
        return self._table.axis(name).role

    def named(self, *roles: Role) -> tuple[Axis, ...]:
        """Return the axes that have a role, or one of several."""
        if len(roles) == 1:
            return self._by_role.get(roles[0], ())
        return tuple(a for a in self.axes if a.role in roles)

    @cached_property
    def _by_role(self) -> dict[Role, tuple[Axis, ...]]:
        return {role: tuple(a for a in self.axes if a.role is role) for role in Role}

    @cached_property
    def cluster(self) -> Axis | None:
        """The CLUSTER axis, None if there is none."""
        return next(iter(self.named(Role.CLUSTER)), None)

    def reduced(self, axes: Iterable[str], over: str) -> set[str]:
        """Return the axes left after a reduction: `over` gives way to its split axis, if any."""
        return self._table.reduced(axes, over)

    def num_splits(self, name: str) -> int:
        """Return the number of splits of an axis, 1 if it is not split."""
        return self._table.num_splits(name)

    def split_size(self, name: str) -> int:
        """Return how many elements of a LOOP or TILE axis one block sees: one split, or all."""
        return self._table.split_size(name)

    def axis_split_by(self, name: str) -> str | None:
        """Return the axis whose splits the axis `name` numbers, None if it numbers none."""
        return self._table.axis_split_by(name)

    def differs_along(self, grid: str, axes: Sequence[str | None]) -> bool:
        """Return True if the elements of a tensor differ between blocks along a grid axis.

        Args:
            grid: The grid axis.
            axes: The tensor's axes.
        """
        split = self.axis_split_by(grid)
        return grid in axes or (split is not None and split in axes)

    # -- inputs and outputs ------------------------------------------------------------------------

    @cached_property
    def inputs_by_name(self) -> dict[str, BlockInput]:
        """The inputs by name."""
        return {i.name: i for i in self.inputs}

    def extent(self, i: BlockInput, axis: str) -> int:
        """Return how many elements the source of an input has along an axis that is not joined."""
        padded = i.padding is not None and i.padding.axis == axis
        return i.padding.size if padded else self.axis(axis).size  # type: ignore[union-attr]

    def rotation_width(self, i: BlockInput) -> int:
        """Return how many elements along the axis of an input's rotation have partners."""
        assert i.rotation is not None
        width = i.rotation.width
        return self.extent(i, i.rotation.axis) if width is None else width

    def input_axes(self, i: BlockInput) -> tuple[str, ...]:
        """Return the axes that an input carries, in the graph's order."""
        return self._table.in_order(i.carried)

    def output_dims(self, output: BlockOutput) -> tuple[int, ...]:
        """Return the dims of the tensor that an output is stored to."""
        return tuple(1 if a is None else self.axis(a).size for a in output.axes)

    # -- stages ------------------------------------------------------------------------------------

    @cached_property
    def loops(self) -> tuple[Stage, ...]:
        """The stages that loop."""
        return tuple(s for s in self.stages if s.loop is not None)

    @cached_property
    def accumulators(self) -> tuple[Accumulator, ...]:
        """The accumulators of all stages."""
        return tuple(a for s in self.stages for a in s.accumulators)

    # -- values ------------------------------------------------------------------------------------

    @cached_property
    def carried(self) -> dict[str, tuple[str, ...]]:
        """The axes that each value carries, by its name. Inputs are values too."""
        axes = {i.name: self.input_axes(i) for i in self.inputs}
        for stage in self.stages:
            axes |= {op.out: op.axes for op in stage.body}
            axes |= {acc.out: acc.axes for acc in stage.accumulators}
        return axes

    @cached_property
    def ops_by_name(self) -> dict[str, BlockOp]:
        """The ops by the name of their result."""
        return {op.out: op for op in self.ops()}

    def ops(self) -> Iterator[BlockOp]:
        """Iterate over the ops of all stages, in order."""
        for stage in self.stages:
            yield from stage.body

    @cached_property
    def contractions(self) -> dict[str, Contraction]:
        """The sums that are matrix products, by name of the sum.

        Such a sum is an accumulator, or a sum over a tile axis. It sums a product that the same
        stage computes and that nothing else reads. Each factor carries the summed axis.
        """
        reads = self._reads()
        products = {
            op.out: op
            for op in self.ops()
            if op.fn == "mul"
            and op.over is None
            and all(isinstance(a, str) for a in op.args)
            and reads[op.out] == 1
        }
        contractions = {}
        for stage, out, arg, over in self._sums():
            product = products.get(arg)
            if product is None or product not in stage.body:
                continue
            a, b = map(str, product.args)
            if a != b and over in self.carried[a] and over in self.carried[b]:
                contractions[out] = Contraction(out, a, b, over, product.out)
        return contractions

    def _reads(self) -> Counter[str]:
        """Return how often each value is read."""
        reads = Counter(a for op in self.ops() for a in op.args if isinstance(a, str))
        reads.update(acc.arg for stage in self.stages for acc in stage.accumulators)
        reads.update(o.value for o in self.outputs)
        return reads

    def _sums(self) -> Iterator[tuple[Stage, str, str, str]]:
        """Iterate over all sums in a block: the stage, the sum, the value it sums, and the axis."""
        for stage in self.stages:
            for op in stage.body:
                if op.fn == "sum" and op.over and self.role(op.over) is Role.TILE:
                    yield stage, op.out, str(op.args[0]), op.over
        for stage in self.stages:
            for acc in stage.accumulators:
                if acc.kind == "sum" and stage.loop is not None:
                    yield stage, acc.out, acc.arg, stage.loop
