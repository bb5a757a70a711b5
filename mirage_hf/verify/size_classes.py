"""Group the dims of a program and its kernels by size, and choose a small size for each group.

Proofs run on a few elements per axis. Every dim of every tensor and every axis of every block graph
belongs to a class. All members of a class get the same small size. The size of some classes follows
from others, because dims are joined (concat), split (reshape, rope) or cut (slice). The size of a
split axis follows from the number of its splits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.verify.op_sizes import relate_sizes
from mirage_hf.verify.size_relations import (
    KERNELS,
    PROGRAM,
    Key,
    ResizeError,
    SizeRelations,
    SizeRule,
    TensorDim,
)


class SizeClasses(SizeRelations):
    """The size relations of a program and the kernels that should compute it.

    Both graphs must have the same inputs and outputs, and composites written out.

    Raises:
        ResizeError: If an op cannot be proven, or sizes contradict each other.

    Attributes:
        program: The program.
        kernels: The kernels.
    """

    def __init__(self, program: KernelGraph, kernels: KernelGraph):
        super().__init__()
        self.program, self.kernels = program, kernels
        for side, graph in ((PROGRAM, program), (KERNELS, kernels)):
            for t in (*graph.inputs, *(t for op in graph.ops for t in op.outputs)):
                self.full |= {TensorDim(side, t.index, d): n for d, n in enumerate(t.dims)}
            for number, op in enumerate(graph.ops):
                relate_sizes(self, side, number, op)
        self._join_interface()
        self._join_equal_rules()

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
        joined = True
        while joined:
            joined = False
            seen: dict[object, SizeRule] = {}
            for rule in self.rules:
                sizes = tuple(self.full[p] for p in rule.parts)
                for known in (tuple(map(self.find, rule.parts)), self.find(rule.total)):
                    other = seen.setdefault((rule.kind, sizes, known), rule)
                    for p, q in zip(
                        (other.total, *other.parts), (rule.total, *rule.parts), strict=True
                    ):
                        if self.find(p) != self.find(q):
                            self.join(p, q)
                            joined = True

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
