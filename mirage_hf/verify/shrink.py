"""Which dims of a µGraph must have one size, and the µGraph at other sizes: proofs run on a few elements per axis.

Every dim of every tensor, of the program and of the kernels, and every axis of every block graph belongs to a class. Classes
follow each other where dims are joined (concat), split (reshape, rope) or cut (slice), and an axis that is dealt out in parts
is sized by the number of its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from mirage_hf import errors
from mirage_hf.errors import Rejected
from mirage_hf.graph.block import BlockGraph
from mirage_hf.graph.effects import APPEND, parts_of
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph, KernelOp, ragged
from mirage_hf.ops import table
from mirage_hf.verify.evaluate import SmallGraph

Key = Hashable
"""A dim: (side, tensor index, dim). An axis: (side, op number, axis name). Anonymous parts of a slice: any other tuple."""


class Misfit(Exception):
    """Why dims cannot be resized together."""


@dataclass(frozen=True)
class Rule:
    """A dim that is the sum or the product of others, in order."""

    kind: str
    total: Key
    parts: tuple[Key, ...]


@dataclass
class Classes:
    """Union-find over dims and axes of a program and the kernels that compute it. Errors: Misfit."""

    program: KernelGraph
    kernels: KernelGraph
    parent: dict[Key, Key] = field(default_factory=dict)
    full: dict[Key, int] = field(default_factory=dict)
    rules: list[Rule] = field(default_factory=list)
    dealt: list[tuple[Key, Key]] = field(default_factory=list)
    """(axis, the number of its parts)"""
    reduced: set[Key] = field(default_factory=set)
    """Dims that library ops or the program reduce or normalise along; not those that matmuls sum over."""
    fixed: set[Key] = field(default_factory=set)

    def __post_init__(self) -> None:
        for side, graph in (("program", self.program), ("kernels", self.kernels)):
            for t in (*graph.inputs, *(t for op in graph.ops for t in op.outputs)):
                self.full |= {(side, t.index, d): n for d, n in enumerate(t.dims)}
            for number, op in enumerate(graph.ops):
                self._op(side, number, op)
        for mine, theirs in (
            (self.program.inputs, self.kernels.inputs),
            (self.program.outputs, self.kernels.outputs),
        ):
            for a, b in zip(mine, theirs, strict=True):
                for d in range(len(a.dims)):
                    self.join(("program", a.index, d), ("kernels", b.index, d))
        for _ in self.rules:  # what lies at the same place of the same dim has the same size, and equal lists are the same dim
            for x, y in combinations(self.rules, 2):
                if x.kind == y.kind and [self.full[p] for p in x.parts] == [
                    self.full[p] for p in y.parts
                ]:
                    same_parts = [self.find(p) for p in x.parts] == [self.find(p) for p in y.parts]
                    if same_parts or self.find(x.total) == self.find(y.total):
                        for p, q in zip((x.total, *x.parts), (y.total, *y.parts), strict=True):
                            self.join(p, q)

    def find(self, key: Key) -> Key:
        while (above := self.parent.get(key, key)) != key:
            key = above
        return key

    def join(self, a: Key, b: Key) -> None:
        if self.full[a] != self.full[b]:
            raise Misfit(f"axes of sizes {sorted((self.full[a], self.full[b]))} meet in one dim")
        self.parent[self.find(a)] = self.find(b)

    def roots(self) -> dict[Key, int]:
        """Full size by class."""
        return {self.find(key): n for key, n in self.full.items()}

    # -- rules per op ---------------------------------------------------------------------------------------------------------

    def _op(self, side: str, number: int, op: KernelOp) -> None:
        if op.name == CUSTOMIZED:
            return self._block(side, number, op)
        kind, attrs, out = table.OPS[op.name].kind, dict(op.attrs), op.outputs[0]
        tensors = [x for x in op.inputs if isinstance(x, DTensor)]
        x, rank = tensors[0], len(out.dims)
        bounds = (*ragged(op.name, op.inputs), *(parts_of(op)[2:] if op.name == APPEND else ()))
        if any(t.dtype not in table.COMPUTE_DTYPES for t in (*tensors, out) if t not in bounds):
            raise Misfit(
                f"{op.name} works on whole numbers: proofs are about floating-point tensors"
            )

        def key(t: DTensor, d: int) -> Key:
            return (side, t.index, d)

        if kind in ("elementwise", "composite", "bounds"):
            for t in tensors:
                for k in range(1, len(t.dims) + 1):
                    if t.dims[-k] == out.dims[-k]:
                        self.join(key(t, len(t.dims) - k), key(out, rank - k))
            if kind != "elementwise":
                self.reduced.add(key(x, attrs.get("dim", -1) % rank))
        elif kind == "contract":
            a, b = tensors
            self.join(key(a, len(a.dims) - 1), key(b, len(b.dims) - 2))
            self.join(key(a, len(a.dims) - 2), key(out, rank - 2))
            self.join(key(b, len(b.dims) - 1), key(out, rank - 1))
            for t in tensors:
                for k in range(3, len(t.dims) + 1):
                    if t.dims[-k] == out.dims[-k]:
                        self.join(key(t, len(t.dims) - k), key(out, rank - k))
        elif kind == "reduce":
            self.reduced.add(key(x, attrs["dim"] % rank))
            for k in range(rank):
                if k != attrs["dim"] % rank:
                    self.join(key(x, k), key(out, k))
        elif op.name == "permute":
            for k, o in enumerate(attrs["order"]):
                self.join(key(x, o % rank), key(out, k))
        elif op.name == "reshape":
            self._reshape(
                [(key(x, d), n) for d, n in enumerate(x.dims) if n > 1],
                [(key(out, d), n) for d, n in enumerate(out.dims) if n > 1],
            )
        elif op.name in ("concat", "slice"):
            dim = attrs["dim"] % rank
            for t in tensors:
                for k in range(rank):
                    if k != dim:
                        self.join(key(t, k), key(out, k))
            if op.name == "concat":
                self._rule("sum", key(out, dim), [key(t, dim) for t in tensors])
            else:
                before, after = attrs["start"], x.dims[dim] - attrs["stop"]
                cut = [
                    *([self._part(side, out, "before", before)] if before else []),
                    key(out, dim),
                    *([self._part(side, out, "after", after)] if after else []),
                ]
                self._rule("sum", key(x, dim), cut)
        elif op.name == "rope":
            self._rope(side, op, key)
        elif op.name == APPEND:
            cache, rows, position = parts_of(op)
            for k in range(rank):
                self.join(key(cache, k), key(out, k))
                if k != rank - 2:
                    self.join(key(rows, k), key(out, k))
            rest = cache.dims[-2] - rows.dims[-2]
            self._rule(
                "sum",
                key(out, rank - 2),
                [key(rows, rank - 2), *([self._part(side, out, "rest", rest)] if rest else [])],
            )
            if position.dims[0] == cache.dims[0]:
                self.join(key(position, 0), key(out, 0))
        else:
            raise Misfit(f"{op.name} cannot be proven yet")

    def _rope(self, side: str, op: KernelOp, key: Callable[[DTensor, int], Key]) -> None:
        x, cos, sin = (t for t in op.inputs if isinstance(t, DTensor))
        out, last = op.outputs[0], len(x.dims) - 1
        for t in (cos, sin, out):
            for k in range(2, len(t.dims) + 1):
                if t.dims[-k] == x.dims[-k]:
                    self.join(key(t, len(t.dims) - k), key(x, len(x.dims) - k))
        self.join(key(x, last), key(out, last))
        width = key(cos, len(cos.dims) - 1)
        self.join(width, key(sin, len(sin.dims) - 1))
        two, half = (
            self._part(side, out, "two", 2),
            self._part(side, out, "half", cos.dims[-1] // 2),
        )
        self.fixed.add(two)
        self._rule("product", width, [two, half])
        self.reduced |= {width, key(x, last)}
        if cos.dims[-1] == x.dims[-1]:
            self.join(width, key(x, last))
        else:
            self._rule(
                "sum",
                key(x, last),
                [width, self._part(side, out, "rest", x.dims[-1] - cos.dims[-1])],
            )

    def _part(self, side: str, t: DTensor, name: str, size: int) -> Key:
        """A part of a dim that no tensor has as a dim."""
        self.full[side, t.index, name] = size
        return (side, t.index, name)

    def _cut(self, total: Key, first: Key, rest: Key) -> None:
        """A dim whose first elements are a dim of their own; `rest` stands for the others."""
        self.full[rest] = self.full[total] - self.full[first]
        self._rule("sum", total, [first, rest])

    def _rule(self, kind: str, total: Key, parts: Sequence[Key]) -> None:
        if len(parts) == 1:
            self.join(total, parts[0])
        else:
            self.rules.append(Rule(kind, total, tuple(parts)))

    def _reshape(self, old: list[tuple[Key, int]], new: list[tuple[Key, int]]) -> None:
        """Pair runs of dims with equal products, the shortest runs first."""
        while old and new:
            left, right = [old.pop(0)], [new.pop(0)]
            a, b = left[0][1], right[0][1]
            while a != b:
                if a < b:
                    left.append(old.pop(0))
                    a *= left[-1][1]
                else:
                    right.append(new.pop(0))
                    b *= right[-1][1]
            if len(left) > 1 and len(right) > 1:
                raise Misfit("a reshape mixes dims that have no common factors")
            total, parts = (left, right) if len(left) == 1 else (right, left)
            self._rule("product", total[0][0], [k for k, _ in parts])

    def _block(self, side: str, number: int, op: KernelOp) -> None:
        block = op.block
        assert block is not None
        self.full |= {(side, number, a.name): a.size for a in block.axes}
        for i in block.inputs:
            for d, a in enumerate(i.axes):
                keys = [(side, op.inputs[s].index, d) for s in i.sources]  # type: ignore[union-attr]
                if a is not None and a == i.joined:
                    self._rule("sum", (side, number, a), keys)
                elif a is not None and i.padding is not None and a == i.padding.axis:
                    self._cut((side, number, a), keys[0], (side, number, i.name, "behind"))
                elif a is not None:
                    for k in keys:
                        self.join((side, number, a), k)
            if i.rotation is not None and i.rotation.width is not None:
                rotated = (side, number, i.name, "rotated")
                self.full[rotated] = i.rotation.width
                self._cut(
                    (side, number, i.rotation.axis), rotated, (side, number, i.name, "straight")
                )
        for t, o in zip(op.outputs, block.outputs, strict=True):
            for d, a in enumerate(o.axes):
                if a is not None:
                    self.join((side, t.index, d), (side, number, a))
        self.dealt += [
            ((side, number, a.name), (side, number, a.split_axis))
            for a in block.axes
            if a.split_axis is not None
        ]

    # -- sizes ----------------------------------------------------------------------------------------------------------------

    def few(self, sizes: Sequence[int], parts: int) -> dict[Key, int]:
        """A small size for every class: `sizes` in turn, and axes dealt out in `parts` parts of as many elements, none empty and
        the last one short where there are more than two. What is shorter in full stays so."""
        full = self.roots()
        follows = {self.find(r.total): r for r in self.rules}
        for r in self.rules:
            if {self.find(r.total)} & {self.find(p) for p in r.parts}:
                raise Misfit("a dim is joined from or split into itself")
        numbers = {self.find(p) for _, p in self.dealt}
        dealt = {self.find(a): self.find(p) for a, p in self.dealt}
        fixed = {self.find(k) for k in self.fixed}
        turn: Iterator[int] = iter(range(len(full)))
        small: dict[Key, int] = {}

        def settle(root: Key, trail: tuple[Key, ...] = ()) -> int:
            if root in small:
                return small[root]
            if root in trail:
                raise Misfit("dims are made of each other")
            if root in follows:
                factors = [settle(self.find(p), (*trail, root)) for p in follows[root].parts]
                n = sum(factors)
                if follows[root].kind == "product":
                    n = 1
                    for f in factors:
                        n *= f
            elif root in fixed:
                n = full[root]
            elif root in dealt:
                number = settle(dealt[root], (*trail, root))
                n = min(number * parts - (number > 2), full[root])
                while (number - 1) * -(-n // number) >= n:
                    n -= 1
            elif root in numbers:
                n = min(parts, full[root])
            else:
                n = min(sizes[next(turn) % len(sizes)], full[root])
            small[root] = n
            return n

        for root in full:
            if full[root] > 1:
                settle(root)
            else:
                small.setdefault(root, 1)
        for r in self.rules:
            factors = [small[self.find(p)] for p in r.parts]
            total = sum(factors) if r.kind == "sum" else 1
            for f in factors if r.kind == "product" else ():
                total *= f
            if total != small[self.find(r.total)]:
                raise Misfit(
                    "a dim is joined, split or cut in two ways that do not shrink together"
                )
        return small


def small_block(
    classes: Classes, side: str, number: int, op: KernelOp, sizes: dict[Key, int]
) -> BlockGraph:
    """A block graph at other sizes. Errors: GraphError where it cannot have them."""
    block = op.block
    assert block is not None

    def size(*key: Hashable) -> int:
        return sizes[classes.find(key)]

    inputs = []
    for i in block.inputs:
        if i.joined is not None:
            d = i.axes.index(i.joined)
            i = replace(i, sizes=tuple(size(side, op.inputs[s].index, d) for s in i.sources))  # type: ignore[union-attr]
        if i.padding is not None:
            there = size(side, op.inputs[i.sources[0]].index, i.axes.index(i.padding.axis))  # type: ignore[union-attr]
            i = replace(i, padding=replace(i.padding, size=there))
        if i.rotation is not None and i.rotation.width is not None:
            i = replace(
                i, rotation=replace(i.rotation, width=size(side, number, i.name, "rotated"))
            )
        inputs.append(i)
    return replace(
        block,
        axes=tuple(replace(a, size=size(side, number, a.name)) for a in block.axes),
        inputs=tuple(inputs),
    )


def small_graph(classes: Classes, side: str, sizes: dict[Key, int]) -> SmallGraph:
    """The program or the kernels at other sizes, to be evaluated. Errors: GraphError, Misfit."""
    graph = classes.program if side == "program" else classes.kernels
    tensors = (*graph.inputs, *(t for op in graph.ops for t in op.outputs))
    dims = {
        t.index: tuple(sizes[classes.find((side, t.index, d))] for d in range(len(t.dims)))
        for t in tensors
    }
    blocks = {
        n: small_block(classes, side, n, op, sizes)
        for n, op in enumerate(graph.ops)
        if op.name == CUSTOMIZED
    }
    starts = {
        n: sizes[classes.find((side, op.outputs[0].index, "before"))]
        if dict(op.attrs)["start"]
        else 0
        for n, op in enumerate(graph.ops)
        if op.name == "slice"
    }
    return SmallGraph(graph, dims, blocks, starts)


def shrink(
    classes: Classes, sizes: Sequence[int], parts: int
) -> tuple[SmallGraph, SmallGraph] | Rejected:
    """Program and kernels at a few elements per axis."""
    try:
        small = classes.few(sizes, parts)
        return small_graph(classes, "program", small), small_graph(classes, "kernels", small)
    except Misfit as e:
        return Rejected(str(e))
    except errors.GraphError as e:
        return Rejected(f"it cannot be shrunk: {e}")
