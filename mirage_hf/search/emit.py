"""From plans to µGraphs: the core's kernels as block graphs, with exponentials kept in range.

A plan is exact algebra and knows no rounding. An exponential that a later division cancels (softmax) is emitted as a *scaled*
value: a mantissa and a shift, standing for mantissa · e^shift. exp(s) is the mantissa 1 with shift s; products add shifts;
before a sum over an axis that the shift carries, the shift becomes its maximum over that axis (over the loop: a running one,
which makes the sum rescaled), and the mantissa takes up the difference, which is at most 1. Values of different shifts are added
at the larger one. A division of two values of the same shift has none left. So online softmax and the combining of split
attention need no rule of their own, and a program that spells out its own shift by a maximum has the same kernels as one that
does not.

Masks (0/1 values of bounds) are a third part of a scaled value. They stay beside the mantissa through products, whatever order
the algebra gives them, and are applied by `select` where a sum over their axis takes the value up, or where it is stored: on the
exponential if there is one, so that what is multiplied by it stays a matrix product; and the shift's maximum is taken of the
scores inside only. So nothing outside the bounds, not even NaN, reaches a result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mirage_hf import _core
from mirage_hf.graph.block import (
    Accumulator,
    Axis,
    BlockGraph,
    BlockInput,
    BlockOp,
    BlockOutput,
    Padding,
    Role,
    Rotation,
    Stage,
)
from mirage_hf.graph.kernel import DTensor, KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.ops import table
from mirage_hf.search.spec import Spec, Term

ROLES = {Role.GRID: _core.Role.grid, Role.LOOP: _core.Role.loop, Role.TILE: _core.Role.tile}
OPS = {
    "input": _core.Op.input,
    "constant": _core.Op.constant,
    "add": _core.Op.add,
    "sub": _core.Op.sub,
    "mul": _core.Op.mul,
    "div": _core.Op.div,
    "exp": _core.Op.exp,
    "opaque": _core.Op.opaque,
    "sum": _core.Op.sum,
    "max": _core.Op.max,
}
_ROLE_OF = {core: role for role, core in ROLES.items()}
_NAMES = {core: name for name, core in OPS.items()}
_RANK = {Role.GRID: 0, Role.TILE: 1, Role.LOOP: 2}


FLOOR = -1e30
"""The maximum of no scores at all: finite, so that rows without any have a finite shift, and below any score that matters."""


class _Refused(Exception):
    """This plan has no block graphs in this form."""


class _Impossible(Exception):
    """This plan has no block graphs in any form."""


@dataclass(frozen=True)
class _Shift:
    """The name of a value that is an exponent, what it is a bound of (nodes of the variant), whether it is a maximum over an axis, and
    the shifts of which it is the largest."""

    name: str
    origin: tuple[object, ...]
    is_max: bool = False
    over: tuple[_Shift, ...] = ()


@dataclass(frozen=True)
class _Scaled:
    """mantissa · e^(Σ plus − Σ minus), and 0 where one of `masks`, names of inputs that are 0 or 1, is 0."""

    mantissa: str | float
    plus: tuple[_Shift, ...] = ()
    minus: tuple[_Shift, ...] = ()
    masks: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        return not self.plus and not self.minus and not self.masks


@dataclass(frozen=True)
class _Stored:
    """A value in device memory: the axis of each dim of `mantissa`, and its shift's tensor, if it has one."""

    mantissa: DTensor
    axes: tuple[str | None, ...]
    shift: DTensor | None = None
    shift_axes: tuple[str | None, ...] = ()
    origin: tuple[object, ...] = ()


def ugraph_of(
    plan: _core.Candidate,
    spec: Spec,
    names: Sequence[str],
    functions: Sequence[Term],
    program: KernelGraph,
) -> tuple[UGraph, bool] | None:
    """The µGraph of a plan, and whether all its exponentials are kept in range, which they are where they cancel inside a kernel
    or between two; None where a kernel would store an input, a number, or a value that repeats along an axis."""
    for scaled in (True, False):
        try:
            return _Plan(plan, spec, names, functions, program, scaled).build(), scaled
        except _Refused:
            continue
        except _Impossible:
            return None
    return None


class _Plan:
    """One plan on its way to a µGraph."""

    def __init__(
        self,
        plan: _core.Candidate,
        spec: Spec,
        names: Sequence[str],
        functions: Sequence[Term],
        program: KernelGraph,
        scaled: bool,
    ):
        self.plan, self.spec, self.names, self.functions, self.program, self.scaled = (
            plan,
            spec,
            names,
            functions,
            program,
            scaled,
        )
        self.kernels = KernelGraph()
        self.inputs = [self.kernels.input_like(t) for t in program.inputs]
        self.stored: dict[int, _Stored] = {}
        self.results: dict[int, DTensor] = {}
        self.of_exp: set[int] = (
            set()
        )  # nodes computed from an exponential: an exponential of these is opaque to proofs, and stays whole

    def build(self) -> UGraph:
        for kernel in self.plan.kernels:
            _Kernel(self, kernel).build()
        self.kernels.mark_output(*(self.results[n] for n in range(len(self.spec.outputs))))
        return UGraph(self.program, self.kernels)

    def storage(self, stored: int, axes: Sequence[str]) -> tuple[tuple[str, ...], str]:
        """Order of dims and dtype of a value that later kernels read: what they sum comes last, factors of products with a
        16-bit input are kept in its dtype, everything else in float32."""
        summed: set[str] = set()
        dtypes = set()
        for kernel in self.plan.kernels:
            leaves = {leaf.value: leaf for leaf in kernel.leaves}
            if not any(v == stored and leaf.node < 0 for v, leaf in leaves.items()):
                continue
            for stage in kernel.stages:
                ops = [*stage.body, *stage.accumulators]
                for f in ops:
                    if _NAMES[f.op] == "sum":
                        summed.add(self.names[f.axis])
                    if _NAMES[f.op] == "mul" and stored in f.args:
                        others = [
                            leaves[a]
                            for a in f.args
                            if a != stored and a in leaves and leaves[a].node >= 0
                        ]
                        dtypes |= {
                            self.spec.terms[o.node].source
                            for o in others
                            if self.spec.terms[o.node].op == "input"
                        }
        dtypes = {s for s in dtypes if self.spec.inputs[s].bounds is None}
        order = sorted(axes, key=lambda a: (a in summed, list(axes).index(a)))
        halves = {
            table.dtype_name(self.program.inputs[self.spec.inputs[s].sources[0]].dtype)
            for s in dtypes
        }
        dtype = halves.pop() if len(halves) == 1 else "float32"
        return tuple(order), dtype


class _Kernel:
    """One kernel of a plan on its way to a block graph."""

    def __init__(self, plan: _Plan, found: _core.FoundKernel):
        self.plan, self.found = plan, found
        spec, names = plan.spec, plan.names
        self.loop = next(
            (
                names[i]
                for i, r in enumerate(found.roles)
                if r == _core.Role.loop and found.axes >> i & 1
            ),
            None,
        )
        axes = {
            name: Axis(name, spec.sizes[name], _ROLE_OF[found.roles[i]])
            for i, name in enumerate(names)
            if found.axes >> i & 1
        }
        self.split_axis: str | None = None
        if found.split >= 0:
            self.split_axis = self._fresh_axis(f"{names[found.split]}_split", axes)
            axes[self.split_axis] = Axis(self.split_axis, found.parts, Role.GRID)
            axes[names[found.split]] = replace(axes[names[found.split]], split_axis=self.split_axis)
        self.combined: dict[
            tuple[str, int], str
        ] = {}  # a stored tensor's parts axis and its size: what it is called here
        for leaf in found.leaves:
            if leaf.partial >= 0:
                stored = plan.stored[leaf.value]
                theirs = (str(stored.axes[0]), stored.mantissa.dims[0])
                if theirs not in self.combined:
                    self.combined[theirs] = self._fresh_axis(theirs[0], axes)
                    axes[self.combined[theirs]] = Axis(self.combined[theirs], theirs[1], Role.TILE)
        seen = [a for _, index, _ in spec.outputs for a in index if a]
        self.axes = tuple(
            sorted(
                axes.values(),
                key=lambda a: (
                    _RANK[a.role],
                    seen.index(a.name) if a.name in seen else len(seen),
                    names.index(a.name) if a.name in names else -1,
                ),
            )
        )
        self.order = [a.name for a in self.axes]
        self.carried: dict[str, tuple[str, ...]] = {}
        self.inputs: list[BlockInput] = []
        self.operands: list[DTensor] = list(plan.inputs) if len(plan.plan.kernels) == 1 else []
        self.read: dict[str, DTensor] = {}  # block inputs and the tensors behind them
        self.masked: dict[
            str, tuple[object, ...]
        ] = {}  # masks, and the nodes of the program that they are
        self.value: dict[int, _Scaled] = {}
        self.waiting: dict[
            int, tuple[_Scaled, str, str]
        ] = {}  # partial results that nothing has read yet
        self.stages: list[Stage] = []
        self.body: list[BlockOp] = []
        self.accumulators: list[Accumulator] = []
        self.known: dict[tuple[object, ...], str] = {}
        self.computed: set[str] = set()
        self.local: set[str] = (
            set()
        )  # values of this stage only: they change along the loop, or read a running maximum
        self.gone: set[str] = set()  # those of earlier stages
        self.count = 0

    @staticmethod
    def _fresh_axis(name: str, axes: Iterable[str]) -> str:
        while name in axes:
            name += "_"
        return name

    def _fresh(self, prefix: str) -> str:
        self.count += 1
        name = f"{prefix}{self.count}"
        return name if name not in self.carried else self._fresh(prefix)

    def _sorted(self, axes: Iterable[str]) -> tuple[str, ...]:
        wanted = set(axes)
        return tuple(a for a in self.order if a in wanted)

    # -- leaves -----------------------------------------------------------------------------------------------------------

    def _source(self, tensor: DTensor) -> int:
        if tensor not in self.operands:
            self.operands.append(tensor)
        return self.operands.index(tensor)

    def _load(
        self,
        name: str,
        sources: Sequence[DTensor],
        axes: tuple[str | None, ...],
        joined: str | None = None,
        sizes: tuple[int, ...] = (),
        bounds: str | None = None,
        rotation: Rotation | None = None,
        padding: Padding | None = None,
    ) -> str:
        while name in self.carried or name in self.order:
            name += "_"
        self.inputs.append(
            BlockInput(
                name,
                tuple(map(self._source, sources)),
                axes,
                joined,
                sizes,
                bounds,
                rotation,
                padding,
            )
        )
        self.carried[name] = self._sorted(self.inputs[-1].carried)
        if len(sources) == 1:
            self.read[name] = sources[0]
        return name

    def _here(self, axes: tuple[str | None, ...], tensor: DTensor) -> tuple[str | None, ...]:
        """The axes of a stored tensor as this kernel calls them."""
        return tuple(
            self.combined.get((str(a), n), a) for a, n in zip(axes, tensor.dims, strict=True)
        )

    def _leaf(self, leaf: _core.FoundLeaf) -> None:
        spec = self.plan.spec
        if leaf.node < 0:
            stored = self.plan.stored[leaf.value]
            axes = self._here(stored.axes, stored.mantissa)
            x = _Scaled(self._load(stored.mantissa.name, [stored.mantissa], axes))
            if stored.shift is not None:
                shift = next((n for n, t in self.read.items() if t is stored.shift), None)
                if shift is None:
                    shift = self._load(
                        stored.shift.name,
                        [stored.shift],
                        self._here(stored.shift_axes, stored.shift),
                    )
                x = replace(x, plus=(_Shift(shift, stored.origin, True),))
            if leaf.partial >= 0:
                self.waiting[leaf.value] = (x, str(axes[0]), _NAMES[leaf.combine])
            else:
                self.value[leaf.value] = x
            return
        term = spec.terms[leaf.node]
        if (
            term.op != "input"
        ):  # a constant, or a maximum that cancels out of every output: the core reads 0 for it, its term's value
            self.value[leaf.value] = _Scaled(term.value)
            return
        i = spec.inputs[term.source]
        several = len(i.sources) > 1
        base = "_".join(self.plan.program.inputs[s].name for s in i.sources)
        reads = sum(t.op == "input" and t.source == term.source for t in spec.terms)
        name = (
            base if reads == 1 else f"{base}_{term.index[0] or len(self.inputs)}_{len(self.inputs)}"
        )
        if i.bounds is not None:
            lo, hi = (self.plan.inputs[s] for s in i.sources)
            own = [None if d == i.bounds else a for d, a in enumerate(term.index)]
            mask = self._load(
                name, [lo, hi], tuple(own[len(own) - len(lo.dims) :]), bounds=term.index[i.bounds]
            )
            self.masked[mask] = ("within", term.source, term.index)
            self.value[leaf.value] = _Scaled(1.0, masks=(mask,))
            return
        joined = term.index[i.joined] if several and i.joined is not None else None
        sources = [self.plan.inputs[s] for s in i.sources]
        rotation = Rotation(str(term.index[i.rotation[0]]), *i.rotation[1:]) if i.rotation else None
        padding = (
            Padding(str(term.index[i.padding[0]]), i.dims[i.padding[0]], i.padding[1])
            if i.padding
            else None
        )
        self.value[leaf.value] = _Scaled(
            self._load(
                name,
                sources,
                term.index,
                joined,
                i.sizes if several else (),
                None,
                rotation,
                padding,
            )
        )

    def _get(self, value: int) -> _Scaled:
        if value in self.waiting:
            x, axis, kind = self.waiting[value]
            combined = (
                self._sum(x, axis)
                if kind == "sum"
                else _Scaled(self._op("max", (self._plain(x),), over=axis))
            )
            if self.loop in self._axes_of(combined):
                return combined  # of this tile of the loop
            self.value[value] = combined
            del self.waiting[value]
        return self.value[value]

    # -- ops --------------------------------------------------------------------------------------------------------------

    def _op(
        self,
        fn: str,
        args: tuple[str | float, ...],
        attrs: tuple[tuple[str, float], ...] = (),
        over: str | None = None,
    ) -> str:
        key = (fn, args, attrs, over)
        if key in self.known:
            return self.known[key]
        self._readable(args)
        axes = {a for x in args if isinstance(x, str) for a in self.carried[x]}
        if not any(isinstance(x, str) for x in args):
            raise _Refused("an op of numbers alone")
        if over is not None:
            axes = axes - {over} | (
                {self.split_axis} if self.split_axis and self._is_split(over) else set()
            )
        out = self._fresh("v")
        self.carried[out] = self._sorted(axes)
        self.body.append(BlockOp(out, fn, args, self.carried[out], attrs, over))
        self.known[key] = out
        self.computed.add(out)
        if self.loop in axes or any(a in self.local for a in args):
            self.local.add(out)
        return out

    def _readable(self, values: Iterable[str | float]) -> None:
        if any(v in self.gone for v in values):
            raise _Refused("a value that changes along the loop is read after it")

    def _is_split(self, axis: str) -> bool:
        return self.found.split >= 0 and self.plan.names[self.found.split] == axis

    def _axes_of(self, x: _Scaled) -> set[str]:
        values = [x.mantissa, *(s.name for s in (*x.plus, *x.minus)), *x.masks]
        return {a for v in values if isinstance(v, str) for a in self.carried[v]}

    def _times(self, a: str | float, b: str | float) -> str | float:
        if isinstance(a, float) and isinstance(b, float):
            return a * b
        if 1.0 in (a, b):
            return b if a == 1.0 else a
        return self._op("mul", (a, b))

    def _select(self, masks: Sequence[str], x: str | float, other: float = 0.0) -> str | float:
        """x inside the bounds, `other` outside."""
        for m in masks:
            x = m if (x, other) == (1.0, 0.0) else self._op("select", (m, x, other))
        return x

    def _inside(self, shift: _Shift, masks: Sequence[str]) -> _Shift:
        """A shift whose maximum is that of the scores inside the bounds."""
        if not masks:
            return shift
        return _Shift(
            str(self._select(masks, shift.name, FLOOR)),
            (*shift.origin, *(self.masked[m] for m in masks)),
        )

    def _unmasked(self, x: _Scaled) -> _Scaled:
        """The value without masks: its mantissa 0 outside, its shift finite there."""
        if not x.masks:
            return x
        if x.minus or len(x.plus) > 1:
            shift = self._exponent(x)
            x = _Scaled(x.mantissa, (shift,), masks=x.masks)
        return _Scaled(
            self._select(x.masks, x.mantissa), tuple(self._inside(s, x.masks) for s in x.plus)
        )

    def _exponent(self, x: _Scaled) -> _Shift:
        """The shift of a scaled value as one value."""
        if len(x.plus) == 1 and not x.minus:
            return x.plus[0]
        if not x.plus:
            raise _Refused("a negative exponent alone")
        name = x.plus[0].name
        for s in x.plus[1:]:
            name = self._op("add", (name, s.name))
        for s in x.minus:
            name = self._op("sub", (name, s.name))
        return _Shift(
            name,
            (*(o for s in x.plus for o in s.origin), "-", *(o for s in x.minus for o in s.origin)),
        )

    def _bounded(self, x: _Scaled) -> bool:
        """Whether e^shift is at most 1: the difference of an exponent and its maximum."""
        if len(x.plus) != 1 or len(x.minus) != 1:
            return False
        (up,), (down,) = x.plus, x.minus
        return self._covers(down, up, x.masks)

    def _covers(self, down: _Shift, up: _Shift, masks: Sequence[str]) -> bool:
        """Whether `down` is at least `up` wherever the masks are 1."""
        if down.name == up.name:
            return True
        origins = (up.origin, (*up.origin, *(self.masked[m] for m in masks)))
        if (
            down.is_max
            and down.origin in origins
            and set(self.carried[down.name]) <= set(self.carried[up.name])
        ):
            return True
        return any(self._covers(s, up, masks) for s in down.over) or (
            bool(up.over) and all(self._covers(down, s, masks) for s in up.over)
        )

    def _plain(self, x: _Scaled) -> str | float:
        """The value itself, where that keeps it in range."""
        if not x.plus and not x.minus:
            return self._select(x.masks, x.mantissa)
        if not self._bounded(x):
            raise _Refused("an exponential that nothing cancels")
        return self._times(
            self._select(x.masks, self._op("exp", (self._exponent(x).name,))), x.mantissa
        )

    def _split(self, x: _Scaled, axis: str) -> tuple[_Scaled, tuple[str, ...]]:
        """The value without the masks that carry an axis, and those."""
        here = tuple(m for m in x.masks if axis in self.carried[m])
        return replace(x, masks=tuple(m for m in x.masks if m not in here)), here

    def _sum(self, x: _Scaled, axis: str) -> _Scaled:
        """Σ over a tile axis."""
        if self._bounded(x):
            x = _Scaled(self._plain(x))
        x, here = self._split(x, axis)
        if axis not in {a for s in (*x.plus, *x.minus) for a in self.carried[s.name]}:
            return replace(
                x, mantissa=self._op("sum", (self._select(here, x.mantissa),), over=axis)
            )
        shift = self._exponent(x)
        inside = self._inside(shift, here)
        top = _Shift(self._op("max", (inside.name,), over=axis), inside.origin, True)
        e = self._select(here, self._op("exp", (self._op("sub", (shift.name, top.name)),)))
        return _Scaled(
            self._op("sum", (self._times(e, x.mantissa),), over=axis), (top,), masks=x.masks
        )

    def _compute(self, f: _core.FoundOp) -> _Scaled:
        name, args = _NAMES[f.op], [self._get(a) for a in f.args]
        nested = any(a % self.plan.plan.nodes in self.plan.of_exp for a in f.args)
        if name == "exp" or nested:
            self.plan.of_exp.add(f.out % self.plan.plan.nodes)
        if name == "exp" and self.plan.scaled and not nested:
            arg = self._plain(args[0])
            if isinstance(arg, float):
                raise _Refused("exp of a number")
            return _Scaled(1.0, (_Shift(arg, (f.args[0] % self.plan.plan.nodes,)),))
        if name in ("mul", "div") and not all(a.is_plain for a in args):
            a, b = args
            if name == "div":
                b = self._unmasked(b)  # a ratio: 0 where the divisor is
            plus, minus = (b.plus, b.minus) if name == "mul" else (b.minus, b.plus)
            up, down = list(a.plus + plus), list(a.minus + minus)
            for s in tuple(up):
                if s in down:
                    up.remove(s)
                    down.remove(s)
            mantissa = (
                self._times(a.mantissa, b.mantissa)
                if name == "mul"
                else a.mantissa
                if b.mantissa == 1.0
                else self._op(self.division, (a.mantissa, b.mantissa))
            )
            return _Scaled(
                mantissa,
                tuple(up),
                tuple(down),
                (*a.masks, *(m for m in b.masks if m not in a.masks)),
            )
        if name in ("add", "sub") and not all(a.is_plain for a in args):
            a, b = args
            if (a.plus, a.minus, a.masks) == (b.plus, b.minus, b.masks):
                return replace(a, mantissa=self._op(name, (a.mantissa, b.mantissa)))
            if any((x.plus or x.minus) and not self._bounded(x) for x in args):
                return self._aligned(name, a, b)
        if name == "sum":
            return self._sum(args[0], self.plan.names[f.axis])
        plain = tuple(self._plain(a) for a in args)
        if name == "max":
            return _Scaled(self._op("max", plain, over=self.plan.names[f.axis]))
        if name == "opaque":
            function = self.plan.functions[f.symbol]
            return _Scaled(self._op(function.fn, plain, function.attrs))
        return _Scaled(self._op(self.division if name == "div" else name, plain))

    def _aligned(self, name: str, a: _Scaled, b: _Scaled) -> _Scaled:
        """The sum or difference of two values of different shifts, brought to the larger one."""
        a, b = self._unmasked(a), self._unmasked(b)
        shifts = tuple(
            self._exponent(x) if x.plus or x.minus else _Shift("", ("zero",)) for x in (a, b)
        )
        names = tuple(s.name or 0.0 for s in shifts)
        top = _Shift(self._op("max", names), ("max", *(s.origin for s in shifts)), over=shifts)
        parts = [
            self._times(self._op("exp", (self._op("sub", (n, top.name)),)), x.mantissa)
            for n, x in zip(names, (a, b), strict=True)
        ]
        return _Scaled(self._op(name, (parts[0], parts[1])), (top,))

    @property
    def division(self) -> str:
        return "ratio" if self.plan.spec.ratios else "div"

    def _accumulate(self, f: _core.FoundOp) -> _Scaled:
        loop = str(self.loop)
        x, kind = self._get(f.args[0]), _NAMES[f.op]
        if kind == "max" or self._bounded(x):
            x = _Scaled(self._plain(x))
        x, here = self._split(x, loop)
        if loop not in {a for s in (*x.plus, *x.minus) for a in self.carried[s.name]}:
            return replace(x, mantissa=self._accumulator(kind, self._select(here, x.mantissa)))
        shift = self._exponent(x)
        inside = self._inside(shift, here)
        top = _Shift(self._accumulator("max", inside.name), inside.origin, True)
        # reads the running maximum, so it holds in this stage only
        difference = self._op("sub", (shift.name, top.name))
        e = self._select(here, self._op("exp", (difference,)))
        return _Scaled(
            self._accumulator("sum", self._times(e, x.mantissa), top.name), (top,), masks=x.masks
        )

    def _accumulator(self, kind: str, arg: str | float, shift: str | None = None) -> str:
        key = ("accumulate", kind, arg, shift)
        if key in self.known:
            return self.known[key]
        if not isinstance(arg, str) or self.loop not in self.carried[arg]:
            raise _Refused("a sum of something that does not change along the loop")
        self._readable((arg,))
        out = self._fresh("acc")
        left = set(self.carried[arg]) - {self.loop} | (
            {self.split_axis} if self.split_axis and self._is_split(str(self.loop)) else set()
        )
        self.carried[out] = self._sorted(a for a in left if a)
        self.accumulators.append(Accumulator(out, arg, kind, self.carried[out], shift))
        self.known[key] = out
        self.computed.add(out)
        self.local.add(out)
        return out

    # -- the whole ----------------------------------------------------------------------------------------------------------

    def build(self) -> None:
        for leaf in self.found.leaves:
            self._leaf(leaf)
        stored_whole = {o.value for o in self.found.outputs if o.output >= 0}
        finished: dict[
            int, _Scaled
        ] = {}  # sums of partial results that change along the loop: stored in its first pass
        for stage in self.found.stages:
            for f in stage.body:
                x = self.value[f.out] = self._compute(f)
                if f.out in stored_whole and not x.is_plain:
                    self.value[f.out] = _Scaled(
                        self._plain(x)
                    )  # here: what changes along the loop is stored in its stage
            for f in stage.accumulators:
                self.value[f.out] = self._accumulate(f)
                self.plan.of_exp |= (
                    {f.out} if f.args[0] % self.plan.plan.nodes in self.plan.of_exp else set()
                )
            if stage.loop >= 0:
                for n in sorted(stored_whole & self.waiting.keys() - finished.keys()):
                    x = self._get(n)
                    if self.loop in self._axes_of(x):
                        finished[n] = _Scaled(self._plain(x))
            self._close(self.loop if stage.loop >= 0 else None)
        outputs: list[tuple[BlockOutput, int]] = []
        stored: dict[
            int, tuple[int, int | None, tuple[object, ...]]
        ] = {}  # value: its output, its shift's, what that bounds

        def output(
            name: str | float, axes: tuple[str | None, ...], dtype: str, program_output: int
        ) -> int:
            if name not in self.computed or sorted(self.carried[str(name)]) != sorted(
                a for a in axes if a
            ):
                raise _Refused(
                    "a kernel would store an input, a number, or a value that repeats along an axis"
                )
            stored_as = (BlockOutput(str(name), axes or (None,), dtype), program_output)
            if stored_as not in outputs:
                outputs.append(stored_as)
            return outputs.index(stored_as)

        for o in sorted(self.found.outputs, key=lambda o: (o.output < 0, o.output)):
            x = finished[o.value] if o.value in finished else self._get(o.value)
            if o.output >= 0:
                _, index, dtype = self.plan.spec.outputs[o.output]
                stored[o.stored] = (output(self._plain(x), index, dtype, o.output), None, ())
                continue
            if self._bounded(x):
                x = _Scaled(self._plain(x))
            x = self._unmasked(x)
            carried = self.carried[x.mantissa] if isinstance(x.mantissa, str) else ()
            order, dtype = self.plan.storage(o.stored, [a for a in carried if a != self.split_axis])
            lead = (self.split_axis,) if self.split_axis in carried else ()
            at = output(
                x.mantissa, (*lead, *order), dtype if x.is_plain and not lead else "float32", -1
            )
            shift: int | None = None
            origin: tuple[object, ...] = ()
            if not x.is_plain:
                s = self._exponent(x)
                theirs = self.carried[s.name]
                if any(a.role is Role.GRID and a.name not in theirs for a in self.axes):
                    raise _Impossible("blocks that share a shift would all store it")
                tops = (
                    *((self.split_axis,) if self.split_axis in theirs else ()),
                    *(a for a in order if a in theirs),
                )
                shift, origin = output(s.name, tops, "float32", -1), s.origin
            stored[o.stored] = (at, shift, origin)
        self._close(None)
        block = BlockGraph(
            self.axes, tuple(self.inputs), tuple(self.stages), tuple(o for o, _ in outputs)
        )
        made = self.plan.kernels.customized(self.operands, block)
        for (_, p), t in zip(outputs, made, strict=True):
            if p >= 0:
                self.plan.results[p] = t
        for value, (at, shift, origin) in stored.items():
            has = None if shift is None else made[shift]
            # later kernels read partial results as such, even where another kernel than this one has made them whole meanwhile
            self.plan.stored.setdefault(
                value,
                _Stored(
                    made[at],
                    outputs[at][0].axes,
                    has,
                    () if shift is None else outputs[shift][0].axes,
                    origin,
                ),
            )

    def _close(self, loop: str | None) -> None:
        """End a stage: what holds only in it is forgotten."""
        if loop is None and any(self.loop in op.axes for op in self.body):
            raise _Refused("a value that changes along the loop is made outside of it")
        if self.body or self.accumulators:
            self.stages.append(Stage(loop, tuple(self.body), tuple(self.accumulators)))
        self.gone |= {op.out for op in self.body if op.out in self.local}
        self.body, self.accumulators = [], []
        self.known = {k: v for k, v in self.known.items() if v not in self.local}
        self.local = set()
