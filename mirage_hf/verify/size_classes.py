"""Which dims of a program and its kernels must have one size, and how sizes follow from others.

Proofs run on a few elements per axis. For that every dim of every tensor and every axis of every
block graph belongs to a class, and all of a class get one small size. The size of some classes
follows from others: where dims are joined (concat), split (reshape, rope) or cut (slice). The size
of a split axis follows from the number of its splits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from mirage_hf.graph.effects import APPEND, parts_of
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph, KernelOp
from mirage_hf.graph.operands import bound_operands
from mirage_hf.ops import table

PROGRAM, KERNELS = "program", "kernels"


class ResizeError(Exception):
    """The dims of a program and its kernels cannot be resized together. The message says why."""


@dataclass(frozen=True)
class TensorDim:
    """A dim of a tensor of the program or of the kernels (`side`)."""

    side: str
    tensor: int
    dim: int


@dataclass(frozen=True)
class BlockAxis:
    """An axis of the block graph of an op, by the op's number."""

    side: str
    op: int
    axis: str


@dataclass(frozen=True)
class TensorPart:
    """A part of a dim that no tensor has as a dim of its own, such as the rest of a slice."""

    side: str
    tensor: int
    name: str


@dataclass(frozen=True)
class InputPart:
    """A part of an axis of a block graph's input: the padding, or what a rotation moves."""

    side: str
    op: int
    input: str
    name: str


Key = TensorDim | BlockAxis | TensorPart | InputPart


@dataclass(frozen=True)
class SizeRule:
    """The size of `total` is the "sum" or the "product" of the sizes of `parts`, in order."""

    kind: str
    total: Key
    parts: tuple[Key, ...]

    def value(self, sizes: Sequence[int]) -> int:
        """Return the size of the total for given sizes of the parts."""
        return sum(sizes) if self.kind == "sum" else math.prod(sizes)


class SizeClasses:
    """Union-find over the dims and axes of a program and the kernels that should compute it.

    Both graphs must have the same inputs and outputs, and composites written out.

    Raises:
        ResizeError: If an op cannot be proven, or sizes contradict each other.

    Attributes:
        program: The program.
        kernels: The kernels.
        full: The full size of every dim, axis and part.
        rules: Sizes that follow from others.
        splits: Pairs of a split axis and the axis that numbers its splits.
        reduced: Dims that an op reduces or normalises along, except those that matmuls sum over.
        fixed: Parts that keep their size.
    """

    def __init__(self, program: KernelGraph, kernels: KernelGraph):
        self.program, self.kernels = program, kernels
        self.full: dict[Key, int] = {}
        self.rules: list[SizeRule] = []
        self.splits: list[tuple[BlockAxis, BlockAxis]] = []
        self.reduced: set[Key] = set()
        self.fixed: set[Key] = set()
        self._parent: dict[Key, Key] = {}
        for side, graph in ((PROGRAM, program), (KERNELS, kernels)):
            for t in (*graph.inputs, *(t for op in graph.ops for t in op.outputs)):
                self.full |= {TensorDim(side, t.index, d): n for d, n in enumerate(t.dims)}
            for number, op in enumerate(graph.ops):
                self._add_op(side, number, op)
        self._join_interface()
        self._join_equal_rules()

    def find(self, key: Key) -> Key:
        """Return the representative of a class."""
        while (above := self._parent.get(key, key)) != key:
            key = above
        return key

    def join(self, a: Key, b: Key) -> None:
        """Put two dims or axes into one class."""
        if self.full[a] != self.full[b]:
            sizes = sorted((self.full[a], self.full[b]))
            raise ResizeError(f"axes of sizes {sizes} meet in one dim")
        self._parent[self.find(a)] = self.find(b)

    def roots(self) -> dict[Key, int]:
        """Return the full size of each class."""
        return {self.find(key): n for key, n in self.full.items()}

    def _join_interface(self) -> None:
        for mine, theirs in (
            (self.program.inputs, self.kernels.inputs),
            (self.program.outputs, self.kernels.outputs),
        ):
            for a, b in zip(mine, theirs, strict=True):
                for d in range(len(a.dims)):
                    self.join(TensorDim(PROGRAM, a.index, d), TensorDim(KERNELS, b.index, d))

    def _join_equal_rules(self) -> None:
        """Join parts at the same place of the same dim, and dims with the same parts."""
        for _ in self.rules:
            for x, y in combinations(self.rules, 2):
                full_x, full_y = ([self.full[p] for p in rule.parts] for rule in (x, y))
                if x.kind != y.kind or full_x != full_y:
                    continue
                same_parts = [self.find(p) for p in x.parts] == [self.find(p) for p in y.parts]
                if same_parts or self.find(x.total) == self.find(y.total):
                    for p, q in zip((x.total, *x.parts), (y.total, *y.parts), strict=True):
                        self.join(p, q)

    def _add_rule(self, kind: str, total: Key, parts: Sequence[Key]) -> None:
        if len(parts) == 1:
            self.join(total, parts[0])
        else:
            self.rules.append(SizeRule(kind, total, tuple(parts)))

    def _part(self, side: str, t: DTensor, name: str, size: int) -> TensorPart:
        part = TensorPart(side, t.index, name)
        self.full[part] = size
        return part

    # -- ops ---------------------------------------------------------------------------------------

    def _add_op(self, side: str, number: int, op: KernelOp) -> None:
        if op.name == CUSTOMIZED:
            self._add_block(side, number, op)
            return
        _check_dtypes(op)
        rule = _RULES.get(op.name) or _RULES.get(table.OPS[op.name].kind)
        if rule is None:
            raise ResizeError(f"{op.name} cannot be proven yet")
        rule(self, side, op)

    def _add_elementwise(self, side: str, op: KernelOp) -> None:
        out = op.outputs[0]
        for t in _tensors(op):
            self._join_from_right(side, t, out)

    def _join_from_right(self, side: str, t: DTensor, other: DTensor, first: int = 1) -> None:
        """Join equal sizes by their distance from the last dim, starting with the `first` last."""
        for k in range(first, len(t.dims) + 1):
            if t.dims[-k] == other.dims[-k]:
                mine = TensorDim(side, t.index, len(t.dims) - k)
                self.join(mine, TensorDim(side, other.index, len(other.dims) - k))

    def _add_along_dim(self, side: str, op: KernelOp) -> None:
        """Add a composite, or an op with bounds: elementwise except along one dim."""
        self._add_elementwise(side, op)
        x = _tensors(op)[0]
        dim = dict(op.attrs).get("dim", -1) % len(op.outputs[0].dims)
        self.reduced.add(TensorDim(side, x.index, dim))

    def _add_matmul(self, side: str, op: KernelOp) -> None:
        (a, b), out = _tensors(op), op.outputs[0]
        rank = len(out.dims)
        for t, dim, other, other_dim in (
            (a, len(a.dims) - 1, b, len(b.dims) - 2),
            (a, len(a.dims) - 2, out, rank - 2),
            (b, len(b.dims) - 1, out, rank - 1),
        ):
            self.join(TensorDim(side, t.index, dim), TensorDim(side, other.index, other_dim))
        for t in (a, b):
            self._join_from_right(side, t, out, first=3)

    def _add_reduction(self, side: str, op: KernelOp) -> None:
        (x,), out = _tensors(op), op.outputs[0]
        dim = dict(op.attrs)["dim"] % len(out.dims)
        self.reduced.add(TensorDim(side, x.index, dim))
        self._join_all_except(side, x, out, dim)

    def _join_all_except(self, side: str, t: DTensor, out: DTensor, dim: int) -> None:
        for k in range(len(out.dims)):
            if k != dim:
                self.join(TensorDim(side, t.index, k), TensorDim(side, out.index, k))

    def _add_permute(self, side: str, op: KernelOp) -> None:
        (x,), out = _tensors(op), op.outputs[0]
        for k, source in enumerate(dict(op.attrs)["order"]):
            mine = TensorDim(side, x.index, source % len(out.dims))
            self.join(mine, TensorDim(side, out.index, k))

    def _add_concat(self, side: str, op: KernelOp) -> None:
        out = op.outputs[0]
        dim = dict(op.attrs)["dim"] % len(out.dims)
        for t in _tensors(op):
            self._join_all_except(side, t, out, dim)
        parts = [TensorDim(side, t.index, dim) for t in _tensors(op)]
        self._add_rule("sum", TensorDim(side, out.index, dim), parts)

    def _add_slice(self, side: str, op: KernelOp) -> None:
        (x,), out, attrs = _tensors(op), op.outputs[0], dict(op.attrs)
        dim = attrs["dim"] % len(out.dims)
        self._join_all_except(side, x, out, dim)
        parts: list[Key] = [TensorDim(side, out.index, dim)]
        if before := attrs["start"]:
            parts.insert(0, self._part(side, out, "before", before))
        if after := x.dims[dim] - attrs["stop"]:
            parts.append(self._part(side, out, "after", after))
        self._add_rule("sum", TensorDim(side, x.index, dim), parts)

    def _add_reshape(self, side: str, op: KernelOp) -> None:
        """Pair runs of dims with equal products, the shortest runs first."""
        (x,), out = _tensors(op), op.outputs[0]
        old, new = ([d for d, n in enumerate(t.dims) if n > 1] for t in (x, out))
        while old and new:
            before, after = [old.pop(0)], [new.pop(0)]
            while (a := _product(x, before)) != (b := _product(out, after)):
                if a < b:
                    before.append(old.pop(0))
                else:
                    after.append(new.pop(0))
            if len(before) > 1 and len(after) > 1:
                raise ResizeError("a reshape mixes dims that have no common factors")
            left = [TensorDim(side, x.index, d) for d in before]
            right = [TensorDim(side, out.index, d) for d in after]
            total, parts = (left, right) if len(left) == 1 else (right, left)
            self._add_rule("product", total[0], parts)

    def _add_rope(self, side: str, op: KernelOp) -> None:
        (x, cos, sin), out = _tensors(op), op.outputs[0]
        for t in (cos, sin, out):
            self._join_from_right(side, t, x, first=2)
        last = TensorDim(side, x.index, len(x.dims) - 1)
        self.join(last, TensorDim(side, out.index, len(out.dims) - 1))
        width = TensorDim(side, cos.index, len(cos.dims) - 1)
        self.join(width, TensorDim(side, sin.index, len(sin.dims) - 1))
        two = self._part(side, out, "two", 2)
        half = self._part(side, out, "half", cos.dims[-1] // 2)
        self.fixed.add(two)
        self._add_rule("product", width, [two, half])
        self.reduced |= {width, last}
        if cos.dims[-1] == x.dims[-1]:
            self.join(width, last)
        else:
            rest = self._part(side, out, "rest", x.dims[-1] - cos.dims[-1])
            self._add_rule("sum", last, [width, rest])

    def _add_append(self, side: str, op: KernelOp) -> None:
        cache, rows, position = parts_of(op)
        out = op.outputs[0]
        slots = len(out.dims) - 2
        self._join_all_except(side, cache, out, -1)
        self._join_all_except(side, rows, out, slots)
        parts: list[Key] = [TensorDim(side, rows.index, slots)]
        if rest := cache.dims[slots] - rows.dims[slots]:
            parts.append(self._part(side, out, "rest", rest))
        self._add_rule("sum", TensorDim(side, out.index, slots), parts)
        if position.dims[0] == cache.dims[0]:
            self.join(TensorDim(side, position.index, 0), TensorDim(side, out.index, 0))

    # -- block graphs ------------------------------------------------------------------------------

    def _add_block(self, side: str, number: int, op: KernelOp) -> None:
        block = op.block
        assert block is not None
        self.full |= {BlockAxis(side, number, a.name): a.size for a in block.axes}
        for i in block.inputs:
            sources = [x for s in i.sources if isinstance(x := op.inputs[s], DTensor)]
            for d, name in enumerate(i.axes):
                if name is None:
                    continue
                axis = BlockAxis(side, number, name)
                dims = [TensorDim(side, t.index, d) for t in sources]
                if name == i.joined:
                    self._add_rule("sum", axis, dims)
                elif i.padding is not None and name == i.padding.axis:
                    self._cut(axis, dims[0], InputPart(side, number, i.name, "padding"))
                else:
                    for dim in dims:
                        self.join(axis, dim)
            if i.rotation is not None and i.rotation.width is not None:
                rotated = rotated_part(side, number, i.name)
                self.full[rotated] = i.rotation.width
                straight = InputPart(side, number, i.name, "straight")
                self._cut(BlockAxis(side, number, i.rotation.axis), rotated, straight)
        for t, output in zip(op.outputs, block.outputs, strict=True):
            for d, name in enumerate(output.axes):
                if name is not None:
                    self.join(TensorDim(side, t.index, d), BlockAxis(side, number, name))
        for a in block.axes:
            if a.split_axis is not None:
                pair = (BlockAxis(side, number, a.name), BlockAxis(side, number, a.split_axis))
                self.splits.append(pair)

    def _cut(self, total: Key, first: Key, rest: Key) -> None:
        """Cut a dim.

        Its first elements are a dim of their own, and `rest` stands for the others.
        """
        self.full[rest] = self.full[total] - self.full[first]
        self._add_rule("sum", total, [first, rest])

    # -- sizes -------------------------------------------------------------------------------------

    def small_sizes(self, sizes: Sequence[int], split_size: int) -> dict[Key, int]:
        """Return a small size for every class.

        Args:
            sizes: Sizes of the classes that nothing else determines, used in turn.
            split_size: The number of splits of a split axis, and the elements of each split. No
                split is empty. If there are more than two, the last one is shorter.

        Raises:
            ResizeError: If the rules contradict each other at small sizes.
        """
        return _SmallSizes(self, sizes, split_size).run()


def rotated_part(side: str, number: int, name: str) -> InputPart:
    """Return the part of a block graph's input that a rotation of limited width moves."""
    return InputPart(side, number, name, "rotated")


_RULES: dict[str, Callable[[SizeClasses, str, KernelOp], None]] = {
    "elementwise": SizeClasses._add_elementwise,
    "composite": SizeClasses._add_along_dim,
    "bounds": SizeClasses._add_along_dim,
    "contract": SizeClasses._add_matmul,
    "reduce": SizeClasses._add_reduction,
    "permute": SizeClasses._add_permute,
    "reshape": SizeClasses._add_reshape,
    "concat": SizeClasses._add_concat,
    "slice": SizeClasses._add_slice,
    "rope": SizeClasses._add_rope,
    APPEND: SizeClasses._add_append,
}


def _tensors(op: KernelOp) -> list[DTensor]:
    return [x for x in op.inputs if isinstance(x, DTensor)]


def _product(t: DTensor, dims: Sequence[int]) -> int:
    return math.prod(t.dims[d] for d in dims)


def _check_dtypes(op: KernelOp) -> None:
    """Raise ResizeError if an op computes with integers. Bounds and positions are no values."""
    indices = bound_operands(op.name, op.inputs)
    if op.name == APPEND:
        indices = (*indices, parts_of(op)[2])
    values = [t for t in (*_tensors(op), op.outputs[0]) if t not in indices]
    if any(t.dtype not in table.COMPUTE_DTYPES for t in values):
        raise ResizeError(
            f"{op.name} works on whole numbers: proofs are about floating-point tensors"
        )


class _SmallSizes:
    """A small size for every class, found class by class."""

    def __init__(self, classes: SizeClasses, sizes: Sequence[int], split_size: int):
        self.classes, self.sizes, self.split_size = classes, sizes, split_size
        find = classes.find
        self.full = classes.roots()
        self.rule_of = {find(rule.total): rule for rule in classes.rules}
        self.number_of_splits = {find(axis): find(number) for axis, number in classes.splits}
        self.numbers = {find(number) for _, number in classes.splits}
        self.fixed = {find(key) for key in classes.fixed}
        self.small: dict[Key, int] = {}
        self._turn: Iterator[int] = iter(range(len(self.full)))

    def run(self) -> dict[Key, int]:
        find = self.classes.find
        for rule in self.classes.rules:
            if find(rule.total) in {find(p) for p in rule.parts}:
                raise ResizeError("a dim is joined from or split into itself")
        for root, size in self.full.items():
            if size > 1:
                self._settle(root, ())
            else:
                self.small.setdefault(root, 1)
        for rule in self.classes.rules:
            parts = [self.small[find(p)] for p in rule.parts]
            if rule.value(parts) != self.small[find(rule.total)]:
                raise ResizeError(
                    "a dim is joined, split or cut in two ways that do not shrink together"
                )
        return self.small

    def _settle(self, root: Key, above: tuple[Key, ...]) -> int:
        """Return the small size of a class, and of those it follows from first."""
        if root not in self.small:
            if root in above:
                raise ResizeError("dims are made of each other")
            self.small[root] = self._size(root, (*above, root))
        return self.small[root]

    def _size(self, root: Key, above: tuple[Key, ...]) -> int:
        full = self.full[root]
        if root in self.rule_of:
            rule = self.rule_of[root]
            return rule.value([self._settle(self.classes.find(p), above) for p in rule.parts])
        if root in self.fixed:
            return full
        if root in self.number_of_splits:
            count = self._settle(self.number_of_splits[root], above)
            size = min(count * self.split_size - (count > 2), full)
            while (count - 1) * -(-size // count) >= size:  # the last split would be empty
                size -= 1
            return size
        if root in self.numbers:
            return min(self.split_size, full)
        return min(self.sizes[next(self._turn) % len(self.sizes)], full)
