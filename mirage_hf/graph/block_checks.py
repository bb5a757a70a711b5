"""Check block graphs: their names and axes, and that values are defined before use."""

from __future__ import annotations

from collections.abc import Sequence

from mirage_hf import errors
from mirage_hf.graph.block_parts import (
    MAX_CLUSTER,
    Accumulator,
    Axis,
    AxisTable,
    BlockInput,
    BlockOp,
    BlockOutput,
    Role,
    Stage,
)
from mirage_hf.ops import table

#: Roles of axes that are cut among blocks.
_CUT = (Role.GRID, Role.CLUSTER)


def check_block(
    axes: Sequence[Axis],
    inputs: Sequence[BlockInput],
    stages: Sequence[Stage],
    outputs: Sequence[BlockOutput],
) -> None:
    """Check the parts of a block graph.

    Raises:
        GraphError: If they do not fit together.
    """
    _BlockCheck(axes, inputs, stages, outputs).run()


def _error(text: str) -> errors.GraphError:
    return errors.GraphError(f"block graph: {text}")


class _BlockCheck:
    """The check of one block graph, in the order of definition."""

    def __init__(
        self,
        axes: Sequence[Axis],
        inputs: Sequence[BlockInput],
        stages: Sequence[Stage],
        outputs: Sequence[BlockOutput],
    ) -> None:
        self.axes, self.inputs, self.stages, self.outputs = axes, inputs, stages, outputs
        self.table = AxisTable(axes)
        self.loops = [a.name for a in axes if a.role is Role.LOOP]
        #: The axes of every value defined so far.
        self.carried: dict[str, tuple[str, ...]] = {}
        #: The values that the next stage may read.
        self.visible: set[str] = set()

    def run(self) -> None:
        self._check_axes()
        if not self.outputs:
            raise _error("there is no output; a kernel stores at least one value")
        for i in self.inputs:
            self._check_input(i)
        self.visible = set(self.carried)
        for stage in self.stages:
            _StageCheck(self, stage).run()
        computed = set(self.carried) - {i.name for i in self.inputs}
        for o in self.outputs:
            self._check_output(o, o.value in computed)

    def define(self, name: str, axes: tuple[str, ...]) -> None:
        """Define the value `name`, which carries `axes`."""
        if not name.isidentifier():
            raise _error(f"value name {name!r} is not an identifier")
        if name in self.carried:
            raise _error(f"{name} is defined twice")
        if any(self.table.get(a) is None for a in axes):
            raise _error(f"{name} carries an unknown axis among {axes}")
        if self.table.in_order(axes) != axes:
            raise _error(f"{name}: axes {axes} are not in the graph's order")
        self.carried[name] = axes

    # -- axes --------------------------------------------------------------------------------------

    def _check_axes(self) -> None:
        if len({a.name for a in self.axes}) != len(self.axes) or len(self.loops) > 1:
            raise _error("axis names must be unique and at most one axis loops")
        self._check_cluster([a for a in self.axes if a.role is Role.CLUSTER])
        for a in self.axes:
            if not a.name.isidentifier() or a.size < 1:
                raise _error(
                    f"axis {a.name!r} of size {a.size} must be an identifier "
                    "and have a positive size"
                )
            if a.split_axis is not None:
                self._check_split(a, a.split_axis)

    def _check_cluster(self, axes: Sequence[Axis]) -> None:
        if len(axes) > 1:
            raise _error(
                f"axes {' and '.join(a.name for a in axes)} are both cut among the blocks of a "
                "cluster; at most one axis is"
            )
        for a in axes:
            if not 2 <= a.size <= MAX_CLUSTER:
                raise _error(
                    f"cluster axis {a.name} has {a.size} elements, one for each block; "
                    f"a cluster has 2 to {MAX_CLUSTER} blocks"
                )

    def _check_split(self, a: Axis, name: str) -> None:
        numbers = self.table.get(name)
        is_cut = numbers is not None and numbers.role in _CUT and numbers.split_axis is None
        if a.role in _CUT or not is_cut:
            raise _error(
                f"axis {a.name}: only a loop or tile axis is split, "
                "and a grid or cluster axis of its own numbers the splits"
            )
        shared = [b.split_axis for b in self.axes].count(name) > 1
        if shared or any(name in i.carried for i in self.inputs):
            raise _error(
                f"axis {name} numbers the splits of {a.name}; "
                "no other axis and no input may name it"
            )
        count = self.table.num_splits(a.name)
        if (count - 1) * self.table.split_size(a.name) >= a.size:
            raise _error(
                f"axis {a.name} of size {a.size} cannot be split in {count} without an empty split"
            )

    # -- inputs and outputs ------------------------------------------------------------------------

    def _check_input(self, i: BlockInput) -> None:
        unknown = any(self.table.get(a) is None for a in i.carried)
        if unknown or len(set(i.carried)) != len(i.carried):
            raise _error(f"input {i.name}: axes {i.axes} repeat or are unknown")
        if i.sizes:
            size = self.table.axis(str(i.joined)).size
            if min(i.sizes) < 1 or sum(i.sizes) != size:
                raise _error(
                    f"input {i.name}: sizes {i.sizes} along {i.joined} must be positive "
                    f"and sum to {size}"
                )
        if i.padding is not None:
            size = self.table.axis(i.padding.axis).size
            if not 0 < i.padding.size < size:
                raise _error(
                    f"input {i.name}: {i.padding.size} elements are no part of "
                    f"axis {i.padding.axis} of {size}"
                )
        if i.rotation is not None:
            self._check_rotation(i, i.rotation.axis, i.rotation.width)
        self.define(i.name, self.table.in_order(i.carried))

    def _check_rotation(self, i: BlockInput, axis: str, width: int | None) -> None:
        padded = i.padding is not None and i.padding.axis == axis
        present = i.padding.size if padded else self.table.axis(axis).size  # type: ignore[union-attr]
        width = present if width is None else width
        if width % 2 or not 0 < width <= present:
            raise _error(
                f"input {i.name}: {width} of the {present} elements along axis {axis} cannot be "
                "partners; their number must be even"
            )

    def _check_output(self, o: BlockOutput, computed: bool) -> None:
        """Check an output. `computed`: True if a stage computes it, False if it is an input."""
        named = [a for a in o.axes if a is not None]
        in_loop = any(a in self.loops for a in named)
        if not o.axes:
            raise _error(f"output {o.value} has no dims; give it one of size 1 (None)")
        if o.value not in self.carried or sorted(self.carried[o.value]) != sorted(named):
            raise _error(f"output {o.value} does not carry the axes {o.axes}")
        if any(a.name in named and a.split_axis in named for a in self.axes):
            raise _error(
                f"output {o.value} carries an axis and the number of its split; "
                "reduce over the axis first"
            )
        if o.value not in self.visible and not (computed and in_loop):
            raise _error(f"output {o.value} is not available after its stage")
        if in_loop and not computed:
            raise _error(
                f"output {o.value} is an input along the loop axis; "
                "copy it in a stage of the loop (cast)"
            )
        if table.as_dtype(o.dtype) in table.CODE_DTYPES:
            raise _error(f"output {o.value} is {o.dtype}; only inputs of a program hold codes")


class _StageCheck:
    """The check of one stage."""

    def __init__(self, check: _BlockCheck, stage: Stage) -> None:
        self.check, self.stage = check, stage
        self.table, self.carried = check.table, check.carried
        #: The values that can be read at this point of the body.
        self.readable = set(check.visible)
        #: Running maxima by name.
        self.maxima = {
            acc.out: acc for acc in stage.accumulators if acc.kind == "max" and acc.shift is None
        }
        #: Values that depend on a running maximum, with its name.
        self.shifted: dict[str, str] = {}

    def run(self) -> None:
        stage, check = self.stage, self.check
        if stage.loop is not None and stage.loop not in check.loops:
            raise _error(f"a stage loops over {stage.loop}, which is not the loop axis")
        for op in stage.body:
            self._check_op(op)
        for acc in stage.accumulators:
            self._check_accumulator(acc)
        check.visible |= {
            op.out for op in stage.body if stage.loop not in op.axes and op.out not in self.shifted
        }
        check.visible |= {acc.out for acc in stage.accumulators}
        for o in check.outputs:
            if o.value in self.shifted and o.value not in self.maxima:
                raise _error(
                    f"output {o.value} depends on a running maximum; "
                    "only what is summed with that shift may"
                )

    def _check_op(self, op: BlockOp) -> None:
        used = [a for a in op.args if isinstance(a, str)]
        _check_fn(op)
        for name in used:
            self._define_running_maximum(name)
        shifts = {self.shifted[a] for a in used if a in self.shifted}
        if len(shifts) > 1:
            raise _error(f"{op.out} depends on two running maxima, {' and '.join(sorted(shifts))}")
        if shifts:
            self.shifted[op.out] = shifts.pop()
        missing = [a for a in used if a not in self.readable]
        if missing:
            raise _error(f"{op.out} reads {missing[0]}, which is not available there")
        self._check_op_axes(op, used)
        self.check.define(op.out, op.axes)
        self.readable.add(op.out)

    def _define_running_maximum(self, name: str) -> None:
        """Define a maximum that the body reads while it grows."""
        acc = self.maxima.get(name)
        if acc is not None and name not in self.readable and acc.arg in self.readable:
            self.check.define(name, self._accumulated_axes(acc))
            self.readable.add(name)
            self.shifted[name] = name

    def _check_op_axes(self, op: BlockOp, used: Sequence[str]) -> None:
        axes = {x for a in used for x in self.carried[a]}
        if op.over is not None and op.over in axes:
            axes = self.table.reduced(axes, op.over)
        if axes != set(op.axes):
            raise _error(f"{op.out} carries {op.axes}, its arguments give {tuple(axes)}")
        if self.stage.loop is None and any(x in self.check.loops for x in op.axes):
            raise _error(f"{op.out} carries the loop axis outside a loop")
        if op.over is not None:
            axis = self.table.get(op.over)
            reducible = axis is not None and axis.role in (Role.TILE, Role.CLUSTER)
            if not reducible or op.over not in self.carried[used[0]]:
                raise _error(
                    f"{op.out} reduces over {op.over}, "
                    f"which must be a tile or cluster axis that {used[0]} carries"
                )
            if axis is not None and axis.role is Role.CLUSTER:
                self._check_exchange(op, used[0])

    def _check_exchange(self, op: BlockOp, arg: str) -> None:
        """Check a reduction among the blocks of a cluster. All blocks take part at once."""
        if self.stage.loop is not None:
            raise _error(
                f"{op.out} is reduced among the blocks of a cluster inside the loop over "
                f"{self.stage.loop}; reduce it in a stage without a loop"
            )
        split = self.table.axis_split_by(str(op.over))
        if split in self.carried[arg]:
            raise _error(
                f"{op.out} reduces over {op.over}, but {arg} still carries {split}, of which each "
                f"block of the cluster holds another part; reduce over {split} first"
            )

    def _check_accumulator(self, acc: Accumulator) -> None:
        loop = self.stage.loop
        readable = acc.arg in self.readable and loop in self.carried[acc.arg]
        if not readable or acc.kind not in ("sum", "max"):
            raise _error(
                f"accumulator {acc.out} must sum or max a value of this stage "
                "that carries its loop axis"
            )
        if acc.shift is not None and (acc.kind != "sum" or acc.shift not in self.maxima):
            raise _error(
                f"accumulator {acc.out}: only a sum has a shift, "
                "and it is a maximum of the same stage"
            )
        if self.shifted.get(acc.arg) != acc.shift:
            raise _error(
                f"accumulator {acc.out} has shift {acc.shift}, its argument depends on "
                f"the running maximum {self.shifted.get(acc.arg)}"
            )
        if acc.out not in self.shifted:  # a maximum that the body reads is defined already
            self.check.define(acc.out, self._accumulated_axes(acc))
        if acc.axes != self.carried[acc.out]:
            raise _error(f"accumulator {acc.out} carries {self.carried[acc.out]}, not {acc.axes}")
        if acc.shift is not None:
            needed = set(self.carried[self.maxima[acc.shift].arg]) - {loop}
            if not needed <= set(acc.axes):
                raise _error(
                    f"accumulator {acc.out} does not carry the axes of its shift {acc.shift}"
                )

    def _accumulated_axes(self, acc: Accumulator) -> tuple[str, ...]:
        """Return the axes that an accumulator must carry."""
        axes, loop = self.carried[acc.arg], self.stage.loop
        return self.table.in_order(axes if loop is None else self.table.reduced(axes, loop))


def _check_fn(op: BlockOp) -> None:
    """Check that `fn` is a reduction of one value, or an elementwise op with fitting operands."""
    numbers = [a for a in op.args if not isinstance(a, str)]
    for a in numbers:
        if isinstance(a, bool) or not isinstance(a, (int, float)) or a != a:
            raise _error(f"{op.out}: {a!r} is neither a value's name nor a number")
    if op.over is not None:
        if op.fn not in ("sum", "max") or len(op.args) != 1 or numbers or op.attrs:
            raise _error(
                f"{op.out}: a reduction over {op.over} is the sum or max of one value, "
                f"not {op.fn} of {op.args}"
            )
        return
    entry = table.lookup(op.fn)
    if entry.kind != "elementwise":
        raise _error(f"{op.out}: {op.fn} is not elementwise; in a block graph it is spelled out")
    if len(op.args) != entry.arity[0] or len(numbers) == len(op.args):
        raise _error(
            f"{op.out}: {op.fn} takes {entry.arity[0]} operands, one a value at least; "
            f"got {op.args}"
        )
    table.check_attrs(op.fn, dict(op.attrs))
