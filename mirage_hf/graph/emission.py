"""Turn a block that was written in tiles into a block graph over named axes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mirage_hf.graph.block import (
    Accumulator,
    Axis,
    BlockGraph,
    BlockInput,
    BlockOp,
    BlockOutput,
    Role,
    Stage,
)
from mirage_hf.graph.tiles import GRID_DIMS, Node, Span, STensor, TiledBlock
from mirage_hf.ops import table

#: The order of roles among a block graph's axes.
_ROLES = (Role.GRID, Role.CLUSTER, Role.TILE, Role.LOOP)


def axis_names(block: TiledBlock) -> dict[Span, str]:
    """Return a name for every span of a tiled block.

    The loop walks k. The rows and columns of outputs are m and n. Batches start at b.
    """
    walked = _walked(block)
    names: dict[Span, str] = {} if walked is None else {walked: "k"}
    pools = {
        "column": iter("nopq"),
        "row": iter("mij"),
        "batch": iter("bhgf"),
        "inside": iter("rcdestuvw"),
    }

    def add(axes: Sequence[Span | None], stored: bool) -> None:
        for position, span in enumerate(reversed(axes)):
            if span is None or span.root in names:
                continue
            kind = ("column", "row", "batch")[min(position, 2)] if stored else "inside"
            names[span.root] = next(pools[kind], None) or f"a{len(names)}"

    for output in block.outputs:
        add(output.axes, stored=True)
    for tile, _ in block.inputs:
        add(tile.axes, stored=False)
    return names


def _walked(block: TiledBlock) -> Span | None:
    """Return the span that the loop walks."""
    spans = (d.root for tile, _ in block.inputs for d in tile.axes if d is not None)
    return next((d for d in spans if d.walked), None)


def _unused(name: str, taken: Iterable[str]) -> str:
    while name in taken:
        name += "_"
    return name


class Emission:
    """Emits the values of a tiled block where outputs and accumulators need them.

    A value is computed in the loop or after it. If nothing that it depends on changes in the loop,
    it is computed once, in whichever of the two needs it first. If it depends on a running maximum,
    it exists in both, as different values.
    """

    def __init__(self, block: TiledBlock, positions: Sequence[int]):
        """Prepare to emit.

        Args:
            block: The tiled block.
            positions: The position among the kernel's operands of each operand of the block.
        """
        self.block, self.positions = block, positions
        self.walked = _walked(block)
        self.axis_of = axis_names(block)
        self.split_axes = {
            span: _unused(f"{name}_split", self.axis_of.values())
            for span, name in self.axis_of.items()
            if span.grid and (span.reduced or span.grid == block.cluster)
        }
        self.axes = self._axes()
        self.order = [a.name for a in self.axes]
        self.carried: dict[str, tuple[str, ...]] = {}
        self.inputs: list[BlockInput] = []
        self.bodies: dict[str, list[BlockOp]] = {"loop": [], "after": []}
        self.accumulators: list[Accumulator] = []
        #: Names of the values emitted so far, by node and phase.
        self.emitted: dict[tuple[Node, str], str] = {}

    def block_graph(self) -> BlockGraph:
        """Return the block graph: the loop first, then the stage after it.

        Raises:
            GraphError: If the tiles do not make a block graph.
        """
        self._emit_accumulators()
        outputs = tuple(self._outputs())
        used = {a for i in self.inputs for a in i.axes} | set(self.split_axes.values())
        return BlockGraph(
            tuple(a for a in self.axes if a.name in used),
            tuple(self.inputs),
            tuple(self._stages()),
            outputs,
        )

    # -- axes --------------------------------------------------------------------------------------

    def _axes(self) -> tuple[Axis, ...]:
        size = dict(zip(GRID_DIMS, self.block.grid_dim, strict=False))
        axes = []
        for span, name in self.axis_of.items():
            split_axis = self.split_axes.get(span)
            role = Role.TILE
            if split_axis is not None:
                numbers = Role.CLUSTER if span.grid == self.block.cluster else Role.GRID
                axes.append(Axis(split_axis, size[str(span.grid)], numbers))
            elif span.grid:
                role = Role.GRID
            if span.walked:
                role = Role.LOOP
            axes.append(Axis(name, span.size, role, split_axis))
        stored = [self.split_axes[span] for span in self.split_axes]
        for o in self.block.outputs:
            stored += [self.axis_of[span.root] for span in o.axes if span is not None]

        def place(a: Axis) -> tuple[int, int]:
            first = stored.index(a.name) if a.name in stored else len(stored)
            return _ROLES.index(a.role), first

        return tuple(sorted(axes, key=place))

    def _in_order(self, axes: Iterable[str]) -> tuple[str, ...]:
        wanted = set(axes)
        return tuple(a for a in self.order if a in wanted)

    def _reduced(self, axes: Iterable[str], span: Span) -> tuple[str, ...]:
        """Return the axes left after a reduction. A split span leaves its split axis."""
        added = {self.split_axes[span]} if span in self.split_axes else set()
        return self._in_order(set(axes) - {self.axis_of[span]} | added)

    # -- values ------------------------------------------------------------------------------------

    def _emit_accumulators(self) -> None:
        """Emit all accumulators that the outputs depend on, each after those that it reads."""
        seen: set[Node] = set()

        def visit(t: STensor) -> None:
            if t.node in seen:
                return
            seen.add(t.node)
            for x in t.node.args:
                if isinstance(x, STensor):
                    visit(x)
            if t.node.op == "accumulate":
                self._value(t, "loop")  # accumulators are the same in both phases

        for o in self.block.outputs:
            visit(o.tensor)

    def _value(self, t: STensor, phase: str) -> str:
        """Return the name of a tile's value in the phase "loop" or "after". Emit it if needed."""
        node = t.node
        if node.op in ("input", "accumulate"):
            phase = "any"
        elif phase == "after" and t.time == "any" and (node, "loop") in self.emitted:
            phase = "loop"  # it is the same in every trip, so it is still valid after the loop
        if (node, phase) not in self.emitted:
            if node.op == "input":
                name = self._input(t)
            elif node.op == "accumulate":
                name = self._accumulator(t)
            else:
                name = self._op(t, phase)
            self.emitted[node, phase] = name
        return self.emitted[node, phase]

    def _define(self, base: str, axes: tuple[str, ...]) -> str:
        name = base if base.isidentifier() else "v"
        name = _unused(name, {*self.carried, *self.order})
        self.carried[name] = axes
        return name

    def _input(self, t: STensor) -> str:
        # The dims of `t` may be a permutation of those in memory.
        loaded = next(tile.axes for tile, _ in self.block.inputs if tile.node is t.node)
        axes = tuple(None if span is None else self.axis_of[span.root] for span in loaded)
        name = self._define(t.name, self._in_order(a for a in axes if a))
        self.inputs.append(BlockInput(name, (self.positions[t.node.source],), axes))
        return name

    def _op(self, t: STensor, phase: str) -> str:
        node = t.node
        args = tuple(x if isinstance(x, float) else self._value(x, phase) for x in node.args)
        axes = self._in_order(a for x in args if isinstance(x, str) for a in self.carried[x])
        over = None
        if node.over is not None:
            axes = self._reduced(axes, node.over.root)
            over = self.axis_of[node.over.root]
        elif node.among is not None:
            over = self.split_axes[node.among.root]
            axes = tuple(a for a in axes if a != over)
        out = self._define(f"v{sum(map(len, self.bodies.values())) + 1}", axes)
        self.bodies[phase].append(BlockOp(out, node.op, args, axes, node.attrs, over))
        return out

    def _accumulator(self, t: STensor) -> str:
        node = t.node
        arg = node.args[0]
        assert isinstance(arg, STensor)
        assert self.walked is not None
        shift = None if node.shift is None else self._value(node.shift, "loop")
        name = self._value(arg, "loop")
        axes = self._reduced(self.carried[name], self.walked)
        out = self._define(f"acc{len(self.accumulators) + 1}", axes)
        kind = dict(node.attrs)["kind"]
        self.accumulators.append(Accumulator(out, name, kind, axes, shift))
        return out

    # -- stages and outputs ------------------------------------------------------------------------

    def _stages(self) -> list[Stage]:
        stages = []
        if self.walked is not None and (self.accumulators or self.bodies["loop"]):
            loop = self.axis_of[self.walked]
            stages.append(Stage(loop, tuple(self.bodies["loop"]), tuple(self.accumulators)))
        if self.bodies["after"]:
            stages.append(Stage(None, tuple(self.bodies["after"])))
        return stages

    def _outputs(self) -> list[BlockOutput]:
        floats = [x.dtype for _, x in self.block.inputs if x.dtype in table.COMPUTE_DTYPES]
        default = table.dtype_name(floats[0]) if floats else "float32"
        outputs = []
        for o in self.block.outputs:
            dtype = o.dtype or default
            name = self._value(o.tensor, "after")
            if o.tensor.node.op == "input":  # kernels store what they compute
                name = self._copy(name, dtype)
            dims = [None if span is None else self.axis_of[span.root] for span in o.axes]
            for position, span in o.splits_at:
                if position >= 0:
                    dims[position] = self.split_axes[span]
            new = [self.split_axes[span] for position, span in o.splits_at if position < 0]
            outputs.append(BlockOutput(name, (*new, *dims), dtype))
        return outputs

    def _copy(self, name: str, dtype: str) -> str:
        axes = self.carried[name]
        out = self._define("copy", axes)
        attrs: tuple[tuple[str, str], ...] = (("dtype", dtype),)
        self.bodies["after"].append(BlockOp(out, "cast", (name,), axes, attrs))  # type: ignore[arg-type]
        return out
