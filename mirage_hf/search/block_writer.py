"""Write a block graph op by op. Equal ops are written once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mirage_hf.graph.block import (
    Accumulator,
    Axis,
    BlockGraph,
    BlockInput,
    BlockOp,
    BlockOutput,
    Padding,
    Rotation,
    Stage,
    Taken,
)
from mirage_hf.graph.kernel import DTensor


class EmissionFormError(Exception):
    """An error: a plan has no block graph in the form that is tried. Another form may have one."""


class BlockWriter:
    """A block graph that is being written.

    A value is local to its stage if it changes along the loop or reads a running maximum. Reading
    it in a later stage is an error.

    Raises:
        EmissionFormError: If an op has only numbers as arguments, or reads a local value of an
            earlier stage.
    """

    def __init__(self, axes: Sequence[Axis], loop: str | None, operands: Sequence[DTensor]):
        self.axes = tuple(axes)
        self.loop = loop
        #: The tensors that the kernel reads. Block inputs name them by position.
        self.operands = list(operands)
        #: The axes of every value, by name.
        self.carried: dict[str, tuple[str, ...]] = {}
        #: The tensor that each block input with a single source reads.
        self.tensor_behind: dict[str, DTensor] = {}
        self._by_name = {a.name: a for a in axes}
        self._inputs: list[BlockInput] = []
        self._stages: list[Stage] = []
        self._body: list[BlockOp] = []
        self._accumulators: list[Accumulator] = []
        self._known: dict[tuple[object, ...], str] = {}
        self._computed: set[str] = set()
        self._local: set[str] = set()
        self._local_before: set[str] = set()
        self._count = 0

    @property
    def num_inputs(self) -> int:
        """The number of block inputs so far."""
        return len(self._inputs)

    def axes_of(self, values: Iterable[str | float]) -> set[str]:
        """Return the axes that any of the values carries. Numbers carry none."""
        return {axis for v in values if isinstance(v, str) for axis in self.carried[v]}

    def is_computed(self, value: str | float) -> bool:
        """True for the result of an op or an accumulator, False for inputs and numbers."""
        return value in self._computed

    # -- inputs ------------------------------------------------------------------------------------

    def load(
        self,
        name: str,
        sources: Sequence[DTensor],
        axes: tuple[str | None, ...],
        *,
        joined: str | None = None,
        sizes: tuple[int, ...] = (),
        bounds: str | None = None,
        rotation: Rotation | None = None,
        padding: Padding | None = None,
        taken: Taken | None = None,
    ) -> str:
        """Add a block input and return its name, which is `name` unless that is taken."""
        while name in self.carried or name in self._by_name:
            name += "_"
        positions = tuple(map(self.operand, sources))
        read = BlockInput(name, positions, axes, joined, sizes, bounds, rotation, padding, taken)
        self._inputs.append(read)
        self.carried[name] = self._in_order(read.carried)
        if len(sources) == 1:
            self.tensor_behind[name] = sources[0]
        return name

    def operand(self, tensor: DTensor) -> int:
        """Return the position of a tensor among the operands, which it joins if it is new."""
        if tensor not in self.operands:
            self.operands.append(tensor)
        return self.operands.index(tensor)

    # -- ops ---------------------------------------------------------------------------------------

    def op(
        self,
        fn: str,
        args: tuple[str | float, ...],
        attrs: tuple[tuple[str, float], ...] = (),
        over: str | None = None,
    ) -> str:
        """Add an op and return its value. With `over`, it reduces over that tile axis."""
        key = (fn, args, attrs, over)
        if key in self._known:
            return self._known[key]
        self._check_readable(args)
        if not any(isinstance(x, str) for x in args):
            raise EmissionFormError("an op of numbers alone")
        axes = self.axes_of(args)
        if over is not None:
            axes = self._reduced(axes, over)
        out = self._fresh("v")
        self.carried[out] = self._in_order(axes)
        self._body.append(BlockOp(out, fn, args, self.carried[out], attrs, over))
        self._known[key] = out
        self._computed.add(out)
        if self.loop in axes or any(a in self._local for a in args):
            self._local.add(out)
        return out

    def times(self, a: str | float, b: str | float) -> str | float:
        """Return a product. No op is written if a factor is 1 or both are numbers."""
        if isinstance(a, float) and isinstance(b, float):
            return a * b
        if 1.0 in (a, b):
            return b if a == 1.0 else a
        return self.op("mul", (a, b))

    def select(self, masks: Sequence[str], x: str | float, other: float = 0.0) -> str | float:
        """Return x where all masks are 1, and `other` elsewhere."""
        for mask in masks:
            is_mask_itself = (x, other) == (1.0, 0.0)
            x = mask if is_mask_itself else self.op("select", (mask, x, other))
        return x

    def accumulate(self, kind: str, arg: str | float, shift: str | None = None) -> str:
        """Return the "sum" or "max" of a value over the loop."""
        key = ("accumulate", kind, arg, shift)
        if key in self._known:
            return self._known[key]
        if self.loop is None or not isinstance(arg, str) or self.loop not in self.carried[arg]:
            raise EmissionFormError("a sum of something that does not change along the loop")
        self._check_readable((arg,))
        out = self._fresh("acc")
        self.carried[out] = self._in_order(self._reduced(self.carried[arg], self.loop))
        self._accumulators.append(Accumulator(out, arg, kind, self.carried[out], shift))
        self._known[key] = out
        self._computed.add(out)
        self._local.add(out)
        return out

    def _check_readable(self, values: Iterable[str | float]) -> None:
        if any(v in self._local_before for v in values):
            raise EmissionFormError("a value that changes along the loop is read after it")

    def _reduced(self, axes: Iterable[str], over: str) -> set[str]:
        """Return the axes left after a reduction: `over` gives way to its split axis, if any."""
        split_axis = self._by_name[over].split_axis
        left = set(axes) - {over}
        return left if split_axis is None else left | {split_axis}

    def _fresh(self, prefix: str) -> str:
        self._count += 1
        name = f"{prefix}{self._count}"
        return name if name not in self.carried else self._fresh(prefix)

    def _in_order(self, axes: Iterable[str]) -> tuple[str, ...]:
        wanted = set(axes)
        return tuple(a.name for a in self.axes if a.name in wanted)

    # -- stages ------------------------------------------------------------------------------------

    def end_stage(self, loops: bool) -> None:
        """End the stage that is being written and forget its local values.

        Raises:
            EmissionFormError: If the stage has no loop but a value of it changes along the loop.
        """
        if not loops and any(self.loop in op.axes for op in self._body):
            raise EmissionFormError("a value that changes along the loop is made outside of it")
        if self._body or self._accumulators:
            loop = self.loop if loops else None
            self._stages.append(Stage(loop, tuple(self._body), tuple(self._accumulators)))
        self._local_before |= {op.out for op in self._body if op.out in self._local}
        self._known = {k: v for k, v in self._known.items() if v not in self._local}
        self._body, self._accumulators, self._local = [], [], set()

    def graph(self, outputs: Sequence[BlockOutput]) -> BlockGraph:
        """Return the block graph with the stages that have ended."""
        return BlockGraph(self.axes, tuple(self._inputs), tuple(self._stages), tuple(outputs))
