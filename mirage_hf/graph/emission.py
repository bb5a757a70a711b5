"""From tiles to named axes: the block graph that a `BlockGraphBuilder` describes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

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
from mirage_hf.ops import table

if TYPE_CHECKING:
    from mirage_hf.graph.builder import BlockGraphBuilder
    from mirage_hf.graph.tiles import Node, Span, STensor

_RANK = {Role.GRID: 0, Role.TILE: 1, Role.LOOP: 2}


class Emission:
    """Values are emitted where outputs and accumulators need them: in the loop, or after it. What depends on nothing that the loop
    changes is computed once in whichever needs it first; what depends on a running maximum exists in both, as different values."""

    def __init__(self, builder: BlockGraphBuilder, positions: Sequence[int]):
        self.builder, self.positions = builder, positions
        self.walked = next(
            (d.root for t, _ in builder.inputs for d in t.axes if d is not None and d.root.walked),
            None,
        )
        self.axis_of = self.names()
        self.split_axes = {
            d: self._fresh(f"{name}_split", self.axis_of.values())
            for d, name in self.axis_of.items()
            if d.grid and d.reduced
        }
        self.axes = self._axes()
        self.order = [a.name for a in self.axes]
        self.carried: dict[str, tuple[str, ...]] = {}
        self.inputs: list[BlockInput] = []
        self.bodies: dict[str, list[BlockOp]] = {"loop": [], "after": []}
        self.accumulators: list[Accumulator] = []
        self.known: dict[tuple[Node, str], str] = {}

    @staticmethod
    def _fresh(name: str, taken: Iterable[str]) -> str:
        while name in taken:
            name += "_"
        return name

    # -- axes ---------------------------------------------------------------------------------------------------------------

    def names(self) -> dict[Span, str]:
        """A name for every class of dims: k for the loop, m and n for rows and columns of what is stored, b for batches."""
        found: dict[Span, str] = {} if self.walked is None else {self.walked: "k"}
        pools = {
            "column": iter("nopq"),
            "row": iter("mij"),
            "batch": iter("bhgf"),
            "inside": iter("rcdestuvw"),
        }
        stored = [o.axes for o in self.builder.outputs]
        for axes, pool in [
            *((a, None) for a in stored),
            *((t.axes, "inside") for t, _ in self.builder.inputs),
        ]:
            for at, d in enumerate(reversed(axes)):
                if d is not None and d.root not in found:
                    kind = pool or ("column" if at == 0 else "row" if at == 1 else "batch")
                    found[d.root] = next(pools[kind], None) or f"a{len(found)}"
        return found

    def _axes(self) -> tuple[Axis, ...]:
        size = dict(zip("xyz", self.builder.grid_dim, strict=False))
        made = []
        for d, name in self.axis_of.items():
            split_axis = self.split_axes.get(d)
            if split_axis is not None:
                made.append(Axis(split_axis, size[str(d.grid)], Role.GRID))
            role = (
                Role.LOOP if d.walked else Role.GRID if d.grid and split_axis is None else Role.TILE
            )
            made.append(Axis(name, d.size, role, split_axis))
        seen = [self.split_axes[d] for d in self.split_axes]
        for o in self.builder.outputs:
            seen += [self.axis_of[d.root] for d in o.axes if d is not None]
        return tuple(
            sorted(
                made,
                key=lambda a: (_RANK[a.role], seen.index(a.name) if a.name in seen else len(seen)),
            )
        )

    def _sorted(self, axes: Iterable[str]) -> tuple[str, ...]:
        wanted = set(axes)
        return tuple(a for a in self.order if a in wanted)

    def _without(self, axes: Iterable[str], d: Span) -> tuple[str, ...]:
        """What is left after reducing over a class: the number of its part in its place, if it is dealt out."""
        return self._sorted(
            set(axes) - {self.axis_of[d]}
            | ({self.split_axes[d]} if d in self.split_axes else set())
        )

    # -- values -------------------------------------------------------------------------------------------------------------

    def _define(self, base: str, axes: tuple[str, ...]) -> str:
        name = self._fresh(base if base.isidentifier() else "v", {*self.carried, *self.order})
        self.carried[name] = axes
        return name

    def value(self, t: STensor, phase: str) -> str:
        node = t.node
        if node.op in ("input", "accumulate"):
            phase = "any"
        elif phase == "after" and t.time == "any" and (node, "loop") in self.known:
            phase = "loop"  # the same in every trip, so it still holds
        if (node, phase) not in self.known:
            self.known[node, phase] = (
                self._input(t)
                if node.op == "input"
                else self._accumulator(t)
                if node.op == "accumulate"
                else self._op(t, phase)
            )
        return self.known[node, phase]

    def _input(self, t: STensor) -> str:
        axes = tuple(None if d is None else self.axis_of[d.root] for d in self._loaded(t))
        name = self._define(t.name, self._sorted(a for a in axes if a))
        self.inputs.append(BlockInput(name, (self.positions[t.node.source],), axes))
        return name

    def _loaded(self, t: STensor) -> tuple[Span | None, ...]:
        """The axes of an input as it is in memory; `t` may be a permutation of it."""
        return next(i.axes for i, _ in self.builder.inputs if i.node is t.node)

    def _op(self, t: STensor, phase: str) -> str:
        node = t.node
        args = tuple(x if isinstance(x, float) else self.value(x, phase) for x in node.args)
        axes = self._sorted(a for x in args if isinstance(x, str) for a in self.carried[x])
        if node.over is not None:
            axes = self._without(axes, node.over.root)
        out = self._define(f"v{sum(map(len, self.bodies.values())) + 1}", axes)
        over = None if node.over is None else self.axis_of[node.over.root]
        self.bodies[phase].append(BlockOp(out, node.op, args, axes, node.attrs, over))
        return out

    def _accumulator(self, t: STensor) -> str:
        node = t.node
        arg = node.args[0]
        assert not isinstance(arg, float) and self.walked is not None
        shift = None if node.shift is None else self.value(node.shift, "loop")
        name = self.value(arg, "loop")
        axes = self._without(self.carried[name], self.walked)
        out = self._define(f"acc{len(self.accumulators) + 1}", axes)
        self.accumulators.append(Accumulator(out, name, dict(node.attrs)["kind"], axes, shift))
        return out

    # -- the whole ------------------------------------------------------------------------------------------------------------

    def block_graph(self) -> BlockGraph:
        """Loop first, then what follows it. Errors: GraphError."""
        seen: set[Node] = set()

        def accumulators(t: STensor) -> None:
            if t.node in seen:
                return
            seen.add(t.node)
            for x in t.node.args:
                if not isinstance(x, float):
                    accumulators(x)
            if t.node.op == "accumulate":
                self.value(t, "loop")

        for o in self.builder.outputs:
            accumulators(o.tensor)
        outputs = []
        first = next(
            (
                table.dtype_name(x.dtype)
                for _, x in self.builder.inputs
                if x.dtype in table.COMPUTE_DTYPES
            ),
            "float32",
        )
        for o in self.builder.outputs:
            dtype = o.dtype or first
            name = self.value(o.tensor, "after")
            if o.tensor.node.op == "input":  # kernels store what they compute
                axes = self.carried[name]
                self.bodies["after"].append(
                    BlockOp(self._define("copy", axes), "cast", (name,), axes, (("dtype", dtype),))
                )  # type: ignore[arg-type]
                name = self.bodies["after"][-1].out
            dims = [None if d is None else self.axis_of[d.root] for d in o.axes]
            for at, d in o.splits_at:
                if at >= 0:
                    dims[at] = self.split_axes[d]
            lead = [self.split_axes[d] for at, d in o.splits_at if at < 0]
            outputs.append(BlockOutput(name, tuple([*lead, *dims]), dtype))
        stages = []
        if self.walked is not None and (self.accumulators or self.bodies["loop"]):
            stages.append(
                Stage(
                    self.axis_of[self.walked], tuple(self.bodies["loop"]), tuple(self.accumulators)
                )
            )
        if self.bodies["after"]:
            stages.append(Stage(None, tuple(self.bodies["after"])))
        used = {a for i in self.inputs for a in i.axes} | set(self.split_axes.values())
        return BlockGraph(
            tuple(a for a in self.axes if a.name in used),
            tuple(self.inputs),
            tuple(stages),
            tuple(outputs),
        )
