"""Block graphs: what one kernel does, as stages over named axes. Frozen values; the schedule decides tile sizes.

Every axis has one role. GRID axes are cut among thread blocks, the LOOP axis is walked by the stages that name it, TILE
axes are held whole in a block. A LOOP or TILE axis may be dealt out in parts, numbered by a GRID axis of its own (split-K,
split-KV): a block sees one part, and what it reduces over the axis is a partial result that carries the number of its part.
A value carries a set of axes; its tensors have one dim per carried axis, in the order of `BlockGraph.axes`. Mirage's imap,
fmap and omap follow from the roles (see graph/maps.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from mirage_hf import errors
from mirage_hf.ops import table


class Role(str, Enum):
    GRID = "grid"
    LOOP = "loop"
    TILE = "tile"


@dataclass(frozen=True)
class Axis:
    """`parts` names the GRID axis that numbers the parts in which a LOOP or TILE axis is dealt out to blocks: part p holds
    elements [p·n, (p+1)·n) with n = ceil(size / parts), and none is empty."""

    name: str
    size: int
    role: Role
    split_axis: str | None = None


SWAP_HALVES, SWAP_PAIRS, SIGN_HALVES, SIGN_PAIRS = (
    "swap halves",
    "swap pairs",
    "sign halves",
    "sign pairs",
)
ROTATIONS = (SWAP_HALVES, SWAP_PAIRS, SIGN_HALVES, SIGN_PAIRS)


@dataclass(frozen=True)
class Rotation:
    """How an input is read along an axis of even size whose elements are partners, i and i + size/2 (halves) or 2i and 2i + 1
    (pairs): each in its partner's place (swap), or the first of two negated (sign). A rotation of x by an angle (RoPE) is
    x · cos + swapped x · signed sin. With a `width` only so many elements, the first ones, have partners; the others stay."""

    axis: str
    how: str
    width: int | None = None

    @property
    def swaps(self) -> bool:
        return self.how in (SWAP_HALVES, SWAP_PAIRS)

    @property
    def pairs(self) -> bool:
        return self.how in (SWAP_PAIRS, SIGN_PAIRS)

    def __post_init__(self) -> None:
        if self.how not in ROTATIONS:
            raise errors.GraphError(
                f"rotation of axis {self.axis}: {self.how!r} is none of {', '.join(ROTATIONS)}"
            )


@dataclass(frozen=True)
class Padding:
    """An input that is shorter than one of its axes: its source has `size` elements along it, and `value` is what lies behind them."""

    axis: str
    size: int
    value: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise errors.GraphError(f"padding of axis {self.axis}: {self.value} is not finite")


@dataclass(frozen=True)
class BlockInput:
    """A value loaded from device memory.

    `sources` are positions in the kernel's operand list; more than one means that they lie end to end along `joined`
    (weights of q, k and v read through one pointer each, selected by row block). `axes` names the axis of each dim of the
    source tensors, None for a dim of size 1; `sizes` are the sources' extents along `joined`, in order.

    With `bounds`, an axis that is not among `axes`, the sources are two int32 tensors lo and hi, and the value is 1 where
    lo ≤ index along that axis < hi, else 0. `rotation`: how it is read along one of its axes. `padding`: what is behind the end
    of its source, whose elements alone are rotated.
    """

    name: str
    sources: tuple[int, ...]
    axes: tuple[str | None, ...]
    joined: str | None = None
    sizes: tuple[int, ...] = ()
    bounds: str | None = None
    rotation: Rotation | None = None
    padding: Padding | None = None

    @property
    def carried(self) -> tuple[str, ...]:
        """The axes of the value, in no order that means anything."""
        return (
            *(a for a in self.axes if a is not None),
            *([self.bounds] if self.bounds is not None else []),
        )

    def __post_init__(self) -> None:
        if not self.sources:
            raise errors.GraphError(
                f"block input {self.name}: has no source; name the operand it reads"
            )
        if self.rotation is not None and (
            self.bounds is not None
            or self.rotation.axis not in self.axes
            or self.rotation.axis == self.joined
        ):
            raise errors.GraphError(
                f"block input {self.name}: cannot be rotated along {self.rotation.axis}; it must be an axis of its source"
            )
        if self.padding is not None and (
            self.bounds is not None or len(self.sources) > 1 or self.padding.axis not in self.axes
        ):
            raise errors.GraphError(
                f"block input {self.name}: cannot be padded along {self.padding.axis}; it must be an axis of its only "
                "source"
            )
        if self.bounds is not None:
            if (
                len(self.sources) != 2
                or self.joined is not None
                or self.sizes
                or self.bounds in self.axes
            ):
                raise errors.GraphError(
                    f"block input {self.name}: bounds of axis {self.bounds} are two tensors, lo and hi, which are "
                    "not joined and do not have that axis themselves"
                )
            return
        joins = len(self.sources) > 1 or bool(self.sizes)
        if joins and (
            self.joined is None
            or self.joined not in self.axes
            or len(self.sizes) != len(self.sources)
        ):
            raise errors.GraphError(
                f"block input {self.name}: {len(self.sources)} sources need a joined axis and a size each"
            )


@dataclass(frozen=True)
class BlockOp:
    """`out = fn(args)`, elementwise with broadcasting by axis name, or fn "sum"/"max" over the TILE axis `over`.

    `fn` is the name of an elementwise op of the table; an argument is the name of a value or a number. `axes` are those
    that `out` carries.
    """

    out: str
    fn: str
    args: tuple[str | float, ...]
    axes: tuple[str, ...]
    attrs: tuple[tuple[str, float], ...] = ()
    over: str | None = None


@dataclass(frozen=True)
class Accumulator:
    """`out` = "sum" or "max" of `arg` over the stage's loop axis; usable from the next stage on.

    A max is also usable in its own stage, where it is the running maximum, by what flows into sums whose `shift` it is: such a
    sum is multiplied by e^(old − new) whenever the maximum grows (online softmax), so it ends as if the shift had been final
    from the start.
    """

    out: str
    arg: str
    kind: str
    axes: tuple[str, ...]
    shift: str | None = None


@dataclass(frozen=True)
class Stage:
    """A body, run once, or once per tile of the axis `loop` with accumulators. Inputs are loaded where they are first read."""

    loop: str | None
    body: tuple[BlockOp, ...]
    accumulators: tuple[Accumulator, ...] = ()


@dataclass(frozen=True)
class BlockOutput:
    """A value stored to device memory: `axes` names the axis of each dim of the tensor (None: size 1); `dtype` by name."""

    value: str
    axes: tuple[str | None, ...]
    dtype: str


@dataclass(frozen=True)
class Contraction:
    """A sum of products of two values: what a schedule may give to FMAs or to tensor cores."""

    out: str
    a: str
    b: str
    over: str
    product: str


@dataclass(frozen=True)
class BlockGraph:
    """One kernel. Construction checks names, axes and the order of definition. Errors: GraphError."""

    axes: tuple[Axis, ...]
    inputs: tuple[BlockInput, ...]
    stages: tuple[Stage, ...]
    outputs: tuple[BlockOutput, ...]

    def __post_init__(self) -> None:
        _Check(self).all()

    # -- looking things up ----------------------------------------------------------------------------------------------

    @cached_property
    def _axes(self) -> dict[str, Axis]:
        return {a.name: a for a in self.axes}

    def axis(self, name: str) -> Axis:
        return self._axes[name]

    def role(self, name: str) -> Role:
        return self._axes[name].role

    def named(self, role: Role) -> tuple[Axis, ...]:
        return tuple(a for a in self.axes if a.role is role)

    def reduced(self, axes: Iterable[str], over: str) -> set[str]:
        """What is carried after reducing over an axis: the number of its parts in its place, if it has any."""
        parts = self.axis(over).split_axis
        return set(axes) - {over} | ({parts} if parts is not None else set())

    def split_size(self, name: str) -> int:
        """Elements of an axis that a block sees as a loop or tile axis: its part, or all."""
        a = self.axis(name)
        return a.size if a.split_axis is None else -(-a.size // self.axis(a.split_axis).size)

    def axis_split_by(self, name: str) -> str | None:
        """The loop or tile axis whose parts an axis numbers."""
        return next((a.name for a in self.axes if a.split_axis == name), None)

    def extent(self, i: BlockInput, axis: str) -> int:
        """How many elements the source of an input has along an axis that its sources are not joined along."""
        return (
            i.padding.size
            if i.padding is not None and i.padding.axis == axis
            else self.axis(axis).size
        )

    def rotation_width(self, i: BlockInput) -> int:
        """How many elements of an input that is rotated have partners."""
        assert i.rotation is not None
        return self.extent(i, i.rotation.axis) if i.rotation.width is None else i.rotation.width

    def input_axes(self, i: BlockInput) -> tuple[str, ...]:
        """The axes an input carries, in the graph's order."""
        carried = i.carried
        return tuple(a.name for a in self.axes if a.name in carried)

    @cached_property
    def carried(self) -> dict[str, tuple[str, ...]]:
        """Axes carried by each value, inputs included."""
        found = {i.name: self.input_axes(i) for i in self.inputs}
        for stage in self.stages:
            found |= {op.out: op.axes for op in stage.body} | {
                a.out: a.axes for a in stage.accumulators
            }
        return found

    def ops(self) -> Iterator[BlockOp]:
        for stage in self.stages:
            yield from stage.body

    def output_dims(self, output: BlockOutput) -> tuple[int, ...]:
        return tuple(1 if a is None else self.axis(a).size for a in output.axes)

    @cached_property
    def contractions(self) -> dict[str, Contraction]:
        """Sums (accumulators, or sums over a tile axis) of a product that nothing else reads, by name of the sum.

        Only products whose factors each carry the summed axis count, so the sum is a matrix product over it.
        """
        uses: dict[str, int] = {}
        for op in self.ops():
            for a in op.args:
                if isinstance(a, str):
                    uses[a] = uses.get(a, 0) + 1
        for stage in self.stages:
            for acc in stage.accumulators:
                uses[acc.arg] = uses.get(acc.arg, 0) + 1
        for o in self.outputs:
            uses[o.value] = uses.get(o.value, 0) + 1
        products = {
            op.out: op
            for op in self.ops()
            if op.fn == "mul"
            and op.over is None
            and all(isinstance(a, str) for a in op.args)
            and uses.get(op.out) == 1
        }
        sums: list[tuple[Stage, str, str, str | None]]
        sums = [
            (stage, op.out, str(op.args[0]), op.over)
            for stage in self.stages
            for op in stage.body
            if op.fn == "sum" and op.over
        ]
        sums += [
            (stage, acc.out, acc.arg, stage.loop)
            for stage in self.stages
            for acc in stage.accumulators
            if acc.kind == "sum"
        ]
        found = {}
        for stage, out, arg, over in sums:
            product = products.get(arg)  # type: ignore[arg-type]
            if product is None or over is None or product not in stage.body:
                continue
            a, b = product.args
            if a != b and over in self.carried[a] and over in self.carried[b]:  # type: ignore[index]
                found[out] = Contraction(out, str(a), str(b), over, product.out)
        return found


# -- what construction checks -----------------------------------------------------------------------------------------------


def _fail(text: str) -> errors.GraphError:
    return errors.GraphError(f"block graph: {text}")


class _Check:
    """The checks of one block graph, in the order of definition: each value is defined before anything reads it."""

    def __init__(self, graph: BlockGraph) -> None:
        self.graph = graph
        self.sizes = {a.name: a.size for a in graph.axes}
        self.loops = [a.name for a in graph.named(Role.LOOP)]
        self.carried: dict[str, tuple[str, ...]] = {}  # of every value defined so far
        self.visible: set[str] = set()  # the values that the next stage may read

    def all(self) -> None:
        self._axes()
        if not self.graph.outputs:
            raise _fail("there is no output; a kernel stores at least one value")
        for i in self.graph.inputs:
            self._input(i)
        self.visible = set(self.carried)
        for stage in self.graph.stages:
            _StageCheck(self, stage).all()
        computed = {op.out for op in self.graph.ops()} | {
            a.out for stage in self.graph.stages for a in stage.accumulators
        }
        for o in self.graph.outputs:
            self._output(o, o.value in computed)

    def define(self, name: str, axes: tuple[str, ...]) -> None:
        if not name.isidentifier():
            raise _fail(f"value name {name!r} is not an identifier")
        if name in self.carried:
            raise _fail(f"{name} is defined twice")
        if any(a not in self.sizes for a in axes):
            raise _fail(f"{name} carries an unknown axis among {axes}")
        if tuple(a.name for a in self.graph.axes if a.name in axes) != axes:
            raise _fail(f"{name}: axes {axes} are not in the graph's order")
        self.carried[name] = axes

    def _axes(self) -> None:
        graph = self.graph
        if len(self.sizes) != len(graph.axes) or len(self.loops) > 1:
            raise _fail("axis names must be unique and at most one axis loops")
        for a in graph.axes:
            if not a.name.isidentifier() or a.size < 1:
                raise _fail(
                    f"axis {a.name!r} of size {a.size} must be an identifier and have a positive size"
                )
            if a.split_axis is None:
                continue
            parts = graph._axes.get(a.split_axis)
            if (
                a.role is Role.GRID
                or parts is None
                or parts.role is not Role.GRID
                or parts.split_axis is not None
            ):
                raise _fail(
                    f"axis {a.name}: only a loop or tile axis has parts, and a grid axis of its own numbers them"
                )
            if [b.split_axis for b in graph.axes].count(a.split_axis) > 1 or any(
                a.split_axis in i.carried for i in graph.inputs
            ):
                raise _fail(
                    f"axis {a.split_axis} numbers the parts of {a.name}; no other axis and no input may name it"
                )
            if (parts.size - 1) * -(-a.size // parts.size) >= a.size:
                raise _fail(
                    f"axis {a.name} of size {a.size} cannot be dealt out in {parts.size} parts of which none is empty"
                )

    def _input(self, i: BlockInput) -> None:
        sizes = self.sizes
        if len(set(i.carried)) != len(i.carried) or any(a not in sizes for a in i.carried):
            raise _fail(f"input {i.name}: axes {i.axes} repeat or are unknown")
        if i.sizes and (min(i.sizes) < 1 or sum(i.sizes) != sizes[str(i.joined)]):
            raise _fail(
                f"input {i.name}: sizes {i.sizes} along {i.joined} must be positive and sum to {sizes[str(i.joined)]}"
            )
        if i.padding is not None and not 0 < i.padding.size < sizes[i.padding.axis]:
            raise _fail(
                f"input {i.name}: {i.padding.size} elements are no part of axis {i.padding.axis} of {sizes[i.padding.axis]}"
            )
        if i.rotation is not None:
            there, width = self.graph.extent(i, i.rotation.axis), self.graph.rotation_width(i)
            if width % 2 or not 0 < width <= there:
                raise _fail(
                    f"input {i.name}: {width} of the {there} elements along axis {i.rotation.axis} cannot be partners; their number "
                    "must be even"
                )
        self.define(i.name, self.graph.input_axes(i))

    def _output(self, o: BlockOutput, computed: bool) -> None:
        """`computed`: in a stage, so the output is no input."""
        named = [a for a in o.axes if a is not None]
        in_loop = any(a in self.loops for a in named)
        if not o.axes:
            raise _fail(f"output {o.value} has no dims; give it one of size 1 (None)")
        if o.value not in self.carried or sorted(self.carried[o.value]) != sorted(named):
            raise _fail(f"output {o.value} does not carry the axes {o.axes}")
        if any(
            a.split_axis is not None and a.name in named and a.split_axis in named
            for a in self.graph.axes
        ):
            raise _fail(
                f"output {o.value} carries an axis and the number of its parts; reduce over the axis first"
            )
        if o.value not in self.visible and not (computed and in_loop):
            raise _fail(f"output {o.value} is not available after its stage")
        if in_loop and not computed:
            raise _fail(
                f"output {o.value} is an input along the loop axis; copy it in a stage of the loop (cast)"
            )
        table.as_dtype(o.dtype)


class _StageCheck:
    """The checks of one stage."""

    def __init__(self, check: _Check, stage: Stage) -> None:
        self.check, self.graph, self.stage, self.carried = check, check.graph, stage, check.carried
        self.local = set(check.visible)  # the values that can be read at this place
        self.maxima = {
            acc.out: acc for acc in stage.accumulators if acc.kind == "max" and acc.shift is None
        }
        self.shifted: dict[str, str] = {}  # values that depend on a running maximum, and on which

    def all(self) -> None:
        stage, check = self.stage, self.check
        if stage.loop is not None and stage.loop not in check.loops:
            raise _fail(f"a stage loops over {stage.loop}, which is not the loop axis")
        for op in stage.body:
            self._op(op)
        for acc in stage.accumulators:
            self._accumulator(acc)
        check.visible |= {
            op.out for op in stage.body if stage.loop not in op.axes and op.out not in self.shifted
        }
        check.visible |= {acc.out for acc in stage.accumulators}
        unstored = [
            o.value
            for o in self.graph.outputs
            if o.value in self.shifted and o.value not in self.maxima
        ]
        if unstored:
            raise _fail(
                f"output {unstored[0]} depends on a running maximum; only what is summed with that shift may"
            )

    def _op(self, op: BlockOp) -> None:
        used = [a for a in op.args if isinstance(a, str)]
        _check_fn(op)
        for name in used:
            if (
                name in self.maxima
                and name not in self.local
                and self.maxima[name].arg in self.local
            ):  # read while it grows
                self.check.define(name, self._accumulated(self.maxima[name]))
                self.local.add(name)
                self.shifted[name] = name
        shifts = {self.shifted[a] for a in used if a in self.shifted}
        if len(shifts) > 1:
            raise _fail(f"{op.out} depends on two running maxima, {' and '.join(sorted(shifts))}")
        if shifts:
            self.shifted[op.out] = shifts.pop()
        missing = [a for a in used if a not in self.local]
        if missing:
            raise _fail(f"{op.out} reads {missing[0]}, which is not available there")
        union = {x for a in used for x in self.carried[a]}
        if op.over is not None and op.over in union:
            union = self.graph.reduced(union, op.over)
        if union != set(op.axes):
            raise _fail(f"{op.out} carries {op.axes}, its arguments give {tuple(union)}")
        if self.stage.loop is None and any(x in self.check.loops for x in op.axes):
            raise _fail(f"{op.out} carries the loop axis outside a loop")
        if op.over is not None and (
            op.over not in self.carried[used[0]] or self.graph.role(op.over) is not Role.TILE
        ):
            raise _fail(
                f"{op.out} reduces over {op.over}, which must be a tile axis that {used[0]} carries"
            )
        self.check.define(op.out, op.axes)
        self.local.add(op.out)

    def _accumulator(self, acc: Accumulator) -> None:
        loop = self.stage.loop
        if (
            acc.arg not in self.local
            or loop not in self.carried[acc.arg]
            or acc.kind not in ("sum", "max")
        ):
            raise _fail(
                f"accumulator {acc.out} must sum or max a value of this stage that carries its loop axis"
            )
        if acc.shift is not None and (acc.kind != "sum" or acc.shift not in self.maxima):
            raise _fail(
                f"accumulator {acc.out}: only a sum has a shift, and it is a maximum of the same stage"
            )
        if self.shifted.get(acc.arg) != acc.shift:
            raise _fail(
                f"accumulator {acc.out} has shift {acc.shift}, its argument depends on the running maximum "
                f"{self.shifted.get(acc.arg)}"
            )
        if acc.out not in self.shifted:  # a maximum that the body reads is defined already
            self.check.define(acc.out, self._accumulated(acc))
        if acc.axes != self.carried[acc.out]:
            raise _fail(f"accumulator {acc.out} carries {self.carried[acc.out]}, not {acc.axes}")
        if acc.shift is not None and not set(self.carried[self.maxima[acc.shift].arg]) - {
            loop
        } <= set(acc.axes):
            raise _fail(f"accumulator {acc.out} does not carry the axes of its shift {acc.shift}")

    def _accumulated(self, acc: Accumulator) -> tuple[str, ...]:
        """The axes that an accumulator must carry."""
        axes, loop = self.carried[acc.arg], self.stage.loop
        left = axes if loop is None else self.graph.reduced(axes, loop)
        return tuple(a.name for a in self.graph.axes if a.name in left)


def _check_fn(op: BlockOp) -> None:
    """Errors: GraphError unless `fn` is an elementwise row given its operands and attributes, or a reduction of one value."""
    numbers = [a for a in op.args if not isinstance(a, str)]
    if any(isinstance(a, bool) or not isinstance(a, (int, float)) or a != a for a in numbers):
        raise _fail(f"{op.out}: {numbers[0]!r} is neither a value's name nor a number")
    if op.over is not None:
        if op.fn not in ("sum", "max") or len(op.args) != 1 or numbers or op.attrs:
            raise _fail(
                f"{op.out}: a reduction over {op.over} is the sum or max of one value, not {op.fn} of {op.args}"
            )
        return
    row = table.lookup(op.fn)
    if row.kind != "elementwise":
        raise _fail(f"{op.out}: {op.fn} is not elementwise; in a block graph it is spelled out")
    if len(op.args) != row.arity[0] or len(numbers) == len(op.args):
        raise _fail(
            f"{op.out}: {op.fn} takes {row.arity[0]} operands, one a value at least; got {op.args}"
        )
    table.check_attrs(op.fn, dict(op.attrs))
