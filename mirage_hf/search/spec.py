"""Lowering: a kernel graph as a program over named axes, the form the search and the proofs work on.

Tensors become functions of axes: a dim of size 1 has none, permute renames, matmul is a product summed over an axis,
composites are expanded. Every dim of every tensor belongs to a class of dims that must range over the same axis; an index
that would clash with one in use (X·Xᵀ) is a copy of its class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial

from mirage_hf.errors import Rejected
from mirage_hf.graph.block import (
    SIGN_HALVES,
    SIGN_PAIRS,
    SWAP_HALVES,
    SWAP_PAIRS,
    BlockInput,
    Rotation,
)
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph, KernelOp
from mirage_hf.graph.symbolic import Dim
from mirage_hf.ops import table
from mirage_hf.search import inline

_SMALL = 10**9
"""Constants whose numerator and denominator stay below this are exact rationals, others named constants. It is below the
primes of the proofs, so that no such number is zero there and each has an inverse."""


@dataclass(frozen=True)
class Term:
    """One node: op "input", "constant", "add", "sub", "mul", "div", "exp", "opaque", "sum" or "max", args earlier terms."""

    op: str
    args: tuple[int, ...] = ()
    axes: tuple[str, ...] = ()
    source: int = -1  # input: which of `Spec.inputs`
    index: tuple[str | None, ...] = ()  # input: the axis of each dim
    value: float = 0.0  # constant
    fn: str = ""  # opaque: op of the table
    attrs: tuple[tuple[str, float], ...] = ()
    axis: str = ""  # sum, max


@dataclass(frozen=True)
class SpecInput:
    """A value read from device memory: one graph input, or several that lie end to end along dim `joined`, or the 0/1 mask
    whose bounds (lo, hi) along dim `bounds`, of size 1 in `dims`, are two graph inputs."""

    sources: tuple[int, ...]
    dims: tuple[int, ...]
    joined: int | None = None
    sizes: tuple[int, ...] = ()
    itemsize: int = 2
    bounds: int | None = None
    rotation: tuple[int, str, int | None] | None = None  # a dim, how it is read, and how much of it
    padding: tuple[int, float] | None = (
        None  # a dim that is shorter than its axis, and what is behind it
    )


@dataclass(frozen=True)
class Spec:
    """A lowered program. `outputs` are (term, axis per dim, dtype); `ratios`: its divisions give 0 where the divisor is 0."""

    sizes: dict[str, int]
    inputs: tuple[SpecInput, ...]
    terms: tuple[Term, ...]
    outputs: tuple[tuple[int, tuple[str | None, ...], str], ...]
    ratios: bool = False


def expand(graph: KernelGraph) -> KernelGraph:
    """Return the same program with composites written out in other ops of the table."""
    out = KernelGraph()
    new: dict[int, DTensor] = {}
    for t in graph.inputs:
        new[t.index] = out.new_input(t.dims, t.dtype, t.strides, constant=t.constant)
    for op in graph.ops:
        args = [new[x.index] if isinstance(x, DTensor) else x for x in op.inputs]
        row = table.OPS.get(op.name)
        if row is None:
            results = out.customized(args, op.block)  # type: ignore[arg-type]
        elif row.expand is not None:
            results = [row.expand(out, *args, **dict(op.attrs))]
        else:
            results = [out._apply(op.name, *args, **dict(op.attrs))]
        for t, r in zip(op.outputs, results, strict=True):
            new[t.index] = r
    out.mark_output(*(new[t.index] for t in graph.outputs))
    return out


class _Unsupported(Exception):
    pass


_COMPUTED = "rope with a sine that is computed ends a kernel (of a part of a dim a cosine too): the search takes one that is an input"


def lower(graph: KernelGraph) -> Spec | Rejected:
    """Lower a program, or say which op ends a kernel."""
    try:
        return _Lowering(expand(graph)).run()
    except _Unsupported as e:
        return Rejected(str(e))


_Place = tuple[int, int]  # tensor index, dim


@dataclass(frozen=True)
class _Padded:
    """A dim indexed by a longer axis, behind whose end lies `value`."""

    inner: str | Rotation
    value: float


Place = str | Rotation | _Padded | None
"""What a dim of a tensor is indexed by: an axis, one on which partners are swapped or signed, one that is longer, or nothing (size 1)."""
Index = tuple[Place, ...]


def _inner(place: Place) -> str | Rotation | None:
    return place.inner if isinstance(place, _Padded) else place


def _named(index: Iterable[Place]) -> tuple[str | None, ...]:
    """The axes of an index."""
    return tuple(a.axis if isinstance(a, Rotation) else a for a in map(_inner, index))


def _rotated(axis: Place, how: str, width: int | None) -> Rotation:
    """An axis of an index, rotated."""
    if not isinstance(axis, str):
        raise _Unsupported("rope of a rotated dim, or of one of size 1, ends a kernel")
    return Rotation(axis, how, width)


def _is_of_input(place: Place) -> bool:
    """Whether only an input may be read so, as an op on what is read would give something else."""
    return isinstance(place, _Padded) or (isinstance(place, Rotation) and not place.swaps)


@dataclass
class _Lowering:
    graph: KernelGraph
    parent: dict[_Place, _Place] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    terms: list[Term] = field(default_factory=list)
    inputs: list[SpecInput] = field(default_factory=list)
    known: dict[Term, int] = field(default_factory=dict)
    memo: dict[tuple[int, Index], int] = field(default_factory=dict)
    names: dict[_Place, str] = field(default_factory=dict)

    def run(self) -> Spec:
        g = self.graph
        self.made: dict[int, KernelOp] = {t.index: op for op in g.ops for t in op.outputs}
        for op in g.ops:
            self._unify(op)
        self.symbolic = {
            self._find((t.index, k)): d.name
            for t in g.inputs
            for k, d in enumerate(t.dims)
            if isinstance(d, Dim)
        }
        self._name_classes()
        outputs = []
        for t in g.outputs:
            index: list[str | None] = []
            for d in range(len(t.dims)):
                index.append(self._axis(t, d, index) if t.dims[d] > 1 else None)
            outputs.append((self.lower(t, tuple(index)), tuple(index), table.dtype_name(t.dtype)))
        ratios = any(
            op.name == "ratio"
            or (op.block is not None and any(b.fn == "ratio" for b in op.block.ops()))
            for op in g.ops
        )
        spec = Spec(dict(self.sizes), tuple(self.inputs), tuple(self.terms), tuple(outputs), ratios)
        return spec if all(t.op != "partial" for t in self.terms) else _without_partials(spec)

    # -- classes of dims ------------------------------------------------------------------------------------------------

    def _find(self, d: _Place) -> _Place:
        while self.parent.get(d, d) != d:
            d = self.parent[d]
        return d

    def _join(self, a: DTensor, i: int, b: DTensor, j: int) -> None:
        if a.dims[i] == b.dims[j] > 1:
            self.parent[self._find((a.index, i))] = self._find((b.index, j))

    def _unify(self, op: KernelOp) -> None:
        if op.name == CUSTOMIZED:
            first: dict[str, tuple[DTensor, int]] = {}
            for axis, t, d in inline.places(op):
                self._join(t, d, *first.setdefault(axis, (t, d)))
            return
        out, tensors = op.outputs[0], [x for x in op.inputs if isinstance(x, DTensor)]
        rank, kind = len(out.dims), table.OPS[op.name].kind if op.name in table.OPS else op.name
        attrs = dict(op.attrs)
        if kind in ("elementwise", "bounds"):
            for t in tensors:
                for k in range(1, len(t.dims) + 1):
                    self._join(t, len(t.dims) - k, out, rank - k)
        elif kind == "contract":
            a, b = tensors
            self._join(a, len(a.dims) - 1, b, len(b.dims) - 2)
            self._join(a, len(a.dims) - 2, out, rank - 2)
            self._join(b, len(b.dims) - 1, out, rank - 1)
            for t in tensors:
                for k in range(3, len(t.dims) + 1):
                    self._join(t, len(t.dims) - k, out, rank - k)
        elif kind == "reduce":
            for k in range(rank):
                if k != attrs["dim"] % rank:
                    self._join(tensors[0], k, out, k)
        elif op.name == "permute":
            for k, o in enumerate(attrs["order"]):
                self._join(tensors[0], o, out, k)
        elif op.name == "reshape":
            for i, k in self._reshape_pairs(tensors[0].dims, out.dims):
                self._join(tensors[0], i, out, k)
        elif op.name == "concat":
            for t in tensors:
                for k in range(rank):
                    if k != attrs["dim"]:
                        self._join(t, k, out, k)
        elif op.name == "rope":
            for t in tensors:
                for k in range(1, len(t.dims) + 1):
                    self._join(t, len(t.dims) - k, out, rank - k)
        else:
            raise _Unsupported(f"{op.name} ends a kernel: the search does not fuse it yet")

    @staticmethod
    def _reshape_pairs(old: Sequence[int], new: Sequence[int]) -> list[tuple[int, int]]:
        a, b = [i for i, d in enumerate(old) if d > 1], [i for i, d in enumerate(new) if d > 1]
        if [old[i] for i in a] != [new[i] for i in b]:
            raise _Unsupported(
                "reshape that splits or merges axes ends a kernel: the search does not fuse it yet"
            )
        return list(zip(a, b, strict=True))

    def _name_classes(self) -> None:
        """Names a reader knows: k for what a matmul sums, m and n for rows and columns of the outputs, b for batches."""
        pools = {
            "sum": iter("krstuv"),
            "row": iter("mij"),
            "column": iter("nopq"),
            "batch": iter("bhgf"),
        }

        def give(t: DTensor, d: int, pool: str) -> None:
            root = self._find((t.index, d))
            if t.dims[d] > 1 and root not in self.names:
                self.names[root] = next(pools[pool], None) or f"a{len(self.names)}_"

        for op in self.graph.ops:
            if op.name == "matmul":
                give(op.inputs[0], len(op.inputs[0].dims) - 1, "sum")  # type: ignore[arg-type, union-attr]
            elif op.name == CUSTOMIZED and op.block is not None:
                stored = {a for o in op.block.outputs for a in o.axes}
                for axis, t, d in inline.places(op):
                    if axis not in stored:
                        give(t, d, "sum")
        for op in self.graph.ops:
            if op.name == "reduction":
                give(op.inputs[0], dict(op.attrs)["dim"] % len(op.inputs[0].dims), "sum")  # type: ignore[arg-type, union-attr]
        for t in [*self.graph.outputs, *self.graph.inputs]:
            rank = len(t.dims)
            for d in range(rank):
                give(t, d, "column" if d == rank - 1 else "row" if d == rank - 2 else "batch")

    def _axis(self, t: DTensor, d: int, taken: Iterable[Place]) -> str:
        root = self._find((t.index, d))
        base = name = self.names.setdefault(root, f"a{len(self.names)}_")
        copy, used = 0, _named(taken)
        while name in used:
            copy += 1
            name = f"{base}{copy}"
        self.sizes[name] = t.dims[d]
        return name

    # -- terms ----------------------------------------------------------------------------------------------------------

    def _term(self, term: Term) -> int:
        if term not in self.known:
            self.known[term] = len(self.terms)
            self.terms.append(term)
        return self.known[term]

    def _op(self, op: str, *args: int, **more: object) -> int:
        first = self.terms[args[0]] if args else None
        if (
            first is not None
            and first.op == "partial"
            and first.fn == op
            and more.get("axis") == first.index[0]
        ):
            return self._op(op, *first.args, axis=first.axis)  # partial results combined
        axes = {a for i in args for a in self.terms[i].axes} - {more.get("axis")}
        return self._term(Term(op, args, tuple(sorted(axes)), **more))  # type: ignore[arg-type]

    def _constant(self, value: float) -> int:
        return self._term(Term("constant", value=float(value)))

    def _input(self, spec: SpecInput, given: Index) -> int:
        rotations = [
            (d, a.how, a.width) for d, a in enumerate(map(_inner, given)) if isinstance(a, Rotation)
        ]
        if len(rotations) > 1 or (
            rotations and (spec.bounds is not None or spec.joined == rotations[0][0])
        ):
            raise _Unsupported(
                "an input that is rotated along two dims, or along that of its sources, ends a kernel"
            )
        padded = [(d, a.value) for d, a in enumerate(given) if isinstance(a, _Padded)]
        if len(padded) > 1 or (padded and (spec.bounds is not None or len(spec.sources) > 1)):
            raise _Unsupported(
                "an input that is padded along two dims, or lies in several tensors, ends a kernel"
            )
        spec, index = (
            replace(
                spec,
                rotation=rotations[0] if rotations else None,
                padding=padded[0] if padded else None,
            ),
            _named(given),
        )
        if spec not in self.inputs:
            self.inputs.append(spec)
        axes = tuple(sorted(a for a in index if a))
        return self._term(Term("input", (), axes, self.inputs.index(spec), index))

    def lower(self, t: DTensor, index: Index) -> int:
        key = (t.index, index)
        if key not in self.memo:
            self.memo[key] = self._lower(t, index)
        return self.memo[key]

    def _lower(self, t: DTensor, index: Index) -> int:
        op = self.made.get(t.index)
        if op is None:
            source = [x.index for x in self.graph.inputs].index(t.index)
            if t.dtype not in table.COMPUTE_DTYPES:
                raise _Unsupported(
                    f"{t.name} is {table.dtype_name(t.dtype)}: kernels compute with floating-point numbers only"
                )
            return self._input(SpecInput((source,), t.dims, itemsize=t.dtype.itemsize), index)
        attrs = dict(op.attrs)
        if op.name == CUSTOMIZED:
            return self._inlined(op, t, index)
        row = table.OPS[op.name]
        if row.kind == "elementwise":
            return self._elementwise(op, index)
        if op.name not in ("permute", "reshape", "concat") and any(map(_is_of_input, index)):
            raise _Unsupported(_COMPUTED)
        x = op.inputs[0]
        assert isinstance(x, DTensor)
        if op.name == "matmul":
            y = op.inputs[1]
            assert isinstance(y, DTensor)
            k = None if x.dims[-1] == 1 else self._axis(x, len(x.dims) - 1, index)
            left = self.lower(x, self._batch(x, index) + (index[-2] if x.dims[-2] > 1 else None, k))
            right = self.lower(
                y, self._batch(y, index) + (k, index[-1] if y.dims[-1] > 1 else None)
            )
            product = self._op("mul", left, right)
            return product if k is None else self._op("sum", product, axis=k)
        if op.name == "reduction":
            d = attrs["dim"] % len(x.dims)
            if x.dims[d] == 1:
                return self.lower(x, index)
            k = self._axis(x, d, index)
            arg = self.lower(x, (*index[:d], k, *index[d + 1 :]))
            if attrs["kind"] == "max":
                return self._op("max", arg, axis=k)
            if attrs["kind"] == "mean" and (root := self._find((x.index, d))) in self.symbolic:
                raise _Unsupported(
                    f"the mean over dim {self.symbolic[root]}, whose size is not fixed, divides by another number for "
                    "every size; give the dim a size, or sum and multiply by an input"
                )
            total = self._op("sum", arg, axis=k)
            return (
                total
                if attrs["kind"] == "sum"
                else self._op("mul", total, self._constant(1.0 / x.dims[d]))
            )
        if op.name == "rope":
            return self._rope(op, index)
        if op.name == "permute":
            inner: list[Place] = [None] * len(x.dims)
            for o, i in enumerate(attrs["order"]):
                inner[i] = index[o]
            return self.lower(x, tuple(inner))
        if op.name == "reshape":
            inner = [None] * len(x.dims)
            for i, o in self._reshape_pairs(x.dims, t.dims):
                inner[i] = index[o]
            return self.lower(x, tuple(inner))
        if op.name == "concat":
            return self._concat(op, t, index)
        if op.name == "within":
            lo, hi = op.inputs[1:]
            assert isinstance(lo, DTensor) and isinstance(hi, DTensor)
            rank, dim = len(index), attrs["dim"] % len(index)
            places = [k for k in range(rank - len(lo.dims), rank)]
            own = tuple(index[k] if lo.dims[k - rank] > 1 else None for k in places)
            along = index[dim]
            if along is not None and not isinstance(along, str):
                raise _Unsupported("bounds along the dim that rope rotates end a kernel")
            return self._op(
                "mul",
                self.lower(x, index),
                self._bounds(lo, hi, own, along, dim - (rank - len(lo.dims))),
            )
        raise _Unsupported(f"{op.name} ends a kernel: the search does not fuse it yet")

    def _rope(self, op: KernelOp, index: Index) -> int:
        """x · cos + swapped x · signed sin. Where they are narrower than x, the cosine goes on as 1 and the sine as 0."""
        x, cos, sin = (t for t in op.inputs if isinstance(t, DTensor))
        narrow = cos.dims[-1] < x.dims[-1]
        swap, sign = (
            (SWAP_PAIRS, SIGN_PAIRS)
            if dict(op.attrs)["interleaved"]
            else (SWAP_HALVES, SIGN_HALVES)
        )
        *outer, last = index

        def own(t: DTensor, along: str | Rotation, behind: float) -> Index:
            place = _Padded(along, behind) if narrow else along
            return tuple(
                a if d > 1 else None
                for a, d in zip((*outer, place)[len(index) - len(t.dims) :], t.dims, strict=True)
            )

        swapped, signed = (
            _rotated(last, swap, cos.dims[-1] if narrow else None),
            _rotated(last, sign, None),
        )
        straight = self._op(
            "mul", self.lower(x, index), self.lower(cos, own(cos, signed.axis, 1.0))
        )
        crossed = self._op(
            "mul", self.lower(x, (*outer, swapped)), self.lower(sin, own(sin, signed, 0.0))
        )
        return self._op("add", straight, crossed)

    def _bounds(self, lo: DTensor, hi: DTensor, index: Index, axis: str | None, dim: int) -> int:
        """The 0/1 mask of bounds along `axis`, which is dim `dim` of lo and hi (negative: they lack it)."""
        if axis is None:
            raise _Unsupported("bounds of a dim of size 1 end a kernel")
        if lo.index in self.made or hi.index in self.made:
            raise _Unsupported(
                "bounds that are computed end a kernel: the search fuses only those that are inputs"
            )
        inputs = [t.index for t in self.graph.inputs]
        dims = lo.dims
        if dim < 0:
            dims, index, dim = (1, *dims), (None, *index), 0
        spec = SpecInput(
            (inputs.index(lo.index), inputs.index(hi.index)),
            dims,
            itemsize=lo.dtype.itemsize * 2,
            bounds=dim,
        )
        return self._input(spec, (*index[:dim], axis, *index[dim + 1 :]))

    @staticmethod
    def _batch(t: DTensor, index: Index) -> Index:
        """The index of t's batch dims, aligned at the right with the output's."""
        n = len(t.dims) - 2
        outer = index[:-2]
        return tuple(outer[len(outer) - n + i] if t.dims[i] > 1 else None for i in range(n))

    def _elementwise(self, op: KernelOp, index: Index) -> int:
        if op.name != "cast" and any(map(_is_of_input, index)):
            raise _Unsupported(_COMPUTED)
        args = []
        for x in op.inputs:
            if not isinstance(x, DTensor):
                args.append(self._constant(x))
                continue
            own = index[len(index) - len(x.dims) :]
            args.append(
                self.lower(x, tuple(a if d > 1 else None for a, d in zip(own, x.dims, strict=True)))
            )
        return self._scalar(op.name, args, op.attrs)

    def _scalar(self, fn: str, args: Sequence[int], given: tuple[tuple[str, float], ...]) -> int:
        """An elementwise op of the table, of terms."""
        row, attrs = table.OPS[fn], dict(given)
        if fn == "cast":
            if table.as_dtype(attrs["dtype"]) not in table.COMPUTE_DTYPES:  # type: ignore[arg-type]
                raise _Unsupported(
                    f"cast to {attrs['dtype']} ends a kernel: it rounds to whole numbers"
                )
            return args[0]
        exponent = self.terms[args[1]] if fn == "pow" else None
        if exponent is not None and exponent.op == "constant" and exponent.value in (2.0, 3.0, 4.0):
            out = args[0]
            for _ in range(int(exponent.value) - 1):
                out = self._op("mul", out, args[0])
            return out
        if row.opaque or fn == "select":
            return self._op("opaque", *args, fn=fn, attrs=given)
        if fn == "ratio":
            return self._op("div", *args)
        algebra: dict[str, Callable[..., int]] = {
            name: partial(self._op, name) for name in ("add", "sub", "mul", "div", "exp")
        }
        algebra["neg"] = lambda a: self._op("mul", self._constant(-1.0), a)
        return row.program(**attrs).evaluate(algebra, args, self._constant)

    def _inlined(self, op: KernelOp, t: DTensor, given: Index) -> int:
        """A value that a kernel of the program stores, spelled out in the axes of `index` and fresh ones for what it reduces."""
        block, index = op.block, _named(given)
        assert block is not None
        if index != given:
            raise _Unsupported(
                "rope of what a kernel of the program stores: the search does not look into that"
            )
        made = inline.definitions(block)
        out = block.outputs[op.outputs.index(t)]
        names: dict[str, str | None] = {
            a: i for a, i in zip(out.axes, index, strict=True) if a is not None
        }
        parts = {a.name: a.split_axis for a in block.axes if a.split_axis is not None}
        for axis, x, d in [*inline.places(op)]:
            if axis not in names:
                names[axis] = (
                    None if block.axis(axis).size == 1 else self._axis(x, d, tuple(names.values()))
                )
        for a in block.axes:
            if a.name not in names and a.name not in parts.values() and a.size > 1:
                raise _Unsupported(
                    f"axis {a.name} of a kernel is that of joined inputs alone: the search does not fuse it yet"
                )
        known: dict[str, int] = {}

        def term(arg: str | float) -> int:
            if not isinstance(arg, str):
                return self._constant(arg)
            if arg not in known:
                how = made[arg]
                if isinstance(how, BlockInput):
                    known[arg] = self._loaded(op, how, inline.renamed(how.axes, names))
                elif isinstance(how, inline.Reduction):
                    known[arg] = self._reduced(
                        how.kind,
                        term(how.arg),
                        names.get(how.axis),
                        how.axis,
                        names.get(parts.get(how.axis, "")),
                    )
                else:
                    known[arg] = self._scalar(how.fn, [term(x) for x in how.args], how.attrs)
            return known[arg]

        return term(out.value)

    def _reduced(self, kind: str, arg: int, axis: str | None, name: str, part: str | None) -> int:
        """Over `axis`, or over the part of it that `part` numbers: a placeholder that a sum over the parts resolves."""
        if axis is None:
            return arg
        if part is None:
            return self._op(kind, arg, axis=axis)
        axes = tuple(sorted({*self.terms[arg].axes, part} - {axis}))
        return self._term(Term("partial", (arg,), axes, fn=kind, axis=axis, index=(part, name)))

    def _loaded(self, op: KernelOp, i: BlockInput, index: tuple[str | None, ...]) -> int:
        tensors = [op.inputs[s] for s in i.sources]
        if i.bounds is not None:
            raise _Unsupported(
                "bounds that a kernel of the program reads: the search does not look into that"
            )
        if i.rotation is not None or i.padding is not None:
            raise _Unsupported(
                "an input that a kernel of the program rotates or pads: the search does not look into that"
            )
        if len(tensors) == 1:
            assert isinstance(tensors[0], DTensor)
            own = tuple(a if d > 1 else None for a, d in zip(index, tensors[0].dims, strict=True))
            return self.lower(tensors[0], own)
        assert i.joined is not None
        return self._end_to_end(tensors, i.axes.index(i.joined), index)

    def _concat(self, op: KernelOp, t: DTensor, index: Index) -> int:
        return self._end_to_end(op.inputs, dict(op.attrs)["dim"], index)

    def _end_to_end(self, tensors: Sequence[object], d: int, index: Index) -> int:
        """A concat along `d` of graph inputs (permuted or not, all alike) is one input with several sources."""
        roots: list[tuple[int, tuple[int, ...]]] = []
        xs = [x for x in tensors if isinstance(x, DTensor)]
        whole = tuple(sum(x.dims[k] for x in xs) if k == d else n for k, n in enumerate(xs[0].dims))
        for x in xs:
            order = tuple(range(len(x.dims)))
            while (made := self.made.get(x.index)) is not None:
                if made.name != "permute":
                    raise _Unsupported(
                        "concat of computed tensors ends a kernel: the search fuses only concats of inputs"
                    )
                inner = dict(made.attrs)["order"]
                order = tuple(inner[o] for o in order)
                inner_x = made.inputs[0]
                assert isinstance(inner_x, DTensor)
                x = inner_x
            roots.append((x.index, order))
        if len({order for _, order in roots}) > 1:
            raise _Unsupported("concat of inputs in different dim orders ends a kernel")
        order = roots[0][1]
        by_index = {x.index: k for k, x in enumerate(self.graph.inputs)}
        # index of the source tensors' dims: dim order[j] of a source is dim j of the result
        inner_index: list[Place] = [None] * len(order)
        dims = [0] * len(order)
        for j, o in enumerate(order):
            inner_index[o], dims[o] = index[j], whole[j]
        sizes = tuple(x.dims[d] for x in xs)
        if any(i not in by_index for i, _ in roots):
            raise _Unsupported(
                "concat of computed tensors ends a kernel: the search fuses only concats of inputs"
            )
        spec = SpecInput(
            tuple(by_index[i] for i, _ in roots), tuple(dims), order[d], sizes, xs[0].dtype.itemsize
        )
        if index[d] is None:
            raise _Unsupported("concat to a dim of size 1")
        return self._input(spec, tuple(inner_index))


def _without_partials(spec: Spec) -> Spec:
    """The same program without the placeholders of partial results, all of which were combined, and what only they used."""
    used: set[int] = set()
    waiting = [t for t, _, _ in spec.outputs]
    while waiting:
        n = waiting.pop()
        term = spec.terms[n]
        if term.op == "partial":
            raise _Unsupported(
                f"a kernel of the program stores the {term.fn} over parts of axis {term.index[1]}, and they are not "
                f"combined by a {term.fn} over the parts alone: the search does not look into that"
            )
        if n not in used:
            used.add(n)
            waiting += term.args
    kept = {n: k for k, n in enumerate(sorted(used))}
    terms = tuple(
        replace(spec.terms[n], args=tuple(kept[a] for a in spec.terms[n].args)) for n in kept
    )
    named = {a for t in terms for a in (*t.axes, t.axis)} | {
        a for _, index, _ in spec.outputs for a in index
    }
    outputs = tuple((kept[t], index, dtype) for t, index, dtype in spec.outputs)
    return Spec(
        {a: n for a, n in spec.sizes.items() if a in named},
        spec.inputs,
        terms,
        outputs,
        spec.ratios,
    )


def small_rational(value: float) -> Fraction | None:
    """The exact fraction of a float, or of the simple fraction that rounds to it; None when neither is small."""
    if not math.isfinite(value):
        return None
    for f in (Fraction(value), Fraction(value).limit_denominator(_SMALL - 1)):
        if abs(f.numerator) < _SMALL and f.denominator < _SMALL and float(f) == value:
            return f
    return None
