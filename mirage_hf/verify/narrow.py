"""The same µGraph with its grid axes cut short, so that numeric checks do not move gigabytes."""

from __future__ import annotations

import functools
import math

from mirage_hf import errors
from mirage_hf.graph.block import Role
from mirage_hf.graph.indices import indices_of
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.ops import table
from mirage_hf.verify.shrink import Sizes, resized_block, resized_dims
from mirage_hf.verify.size_classes import SizeClasses
from mirage_hf.verify.size_relations import (
    KERNELS,
    PROGRAM,
    BlockAxis,
    Key,
    ResizeError,
    SizeRule,
    TensorDim,
)

#: Grid axes are cut to this many elements. Further columns of a matrix product show nothing new.
_WIDE_AXIS = 32

#: Batch dims of matrix products are cut to this many elements.
_WIDE_BATCH = 2

#: Dims from which an index chooses are cut to this many elements.
_CHOICES = 4

#: Dims are cut further if an output has more elements, as the state of 16 sequences has. So many
#: show what rounding does.
_MOST_ELEMENTS = 1 << 16


@functools.lru_cache(maxsize=1)  # a candidate is judged twice, with and without tensor cores
def narrowed(ugraph: UGraph) -> UGraph | None:
    """Return the µGraph with the dims that its program does not reduce cut short.

    Program and kernels are cut alike. Reduced axes and numbers of splits keep their sizes.

    Returns:
        The smaller µGraph with row-major tensors, or None if its dims cannot be cut.
    """
    if not ugraph.block_ops:
        return None
    try:
        classes = SizeClasses(ugraph.program, ugraph.kernels)
        sizes = _NarrowSizes(classes).run()
        program = resized(classes, PROGRAM, sizes)
        kernels = resized(classes, KERNELS, sizes)
    except (ResizeError, errors.MirageError):
        return None  # dims that contradict each other, or an op that names the full sizes
    outputs, wanted = ([(t.dims, t.dtype) for t in g.outputs] for g in (kernels, program))
    return UGraph(program, kernels) if outputs == wanted else None


class _NarrowSizes:
    """A size for each class, by what the program does with it.

    Kernels do not matter here, so all candidates of a program share one reference.
    """

    def __init__(self, classes: SizeClasses):
        self.classes = classes
        self.full = classes.roots()
        #: Classes that keep their size.
        self.kept = {classes.find(key) for key in keys_to_keep(classes)}
        #: The sizes of classes that are cut to something other than `_WIDE_AXIS`.
        self.wide = {classes.find(key): _WIDE_BATCH for key in self._batch_dims()}
        self.wide |= {classes.find(key): _CHOICES for key in chosen_dims(self.classes)}

    def run(self) -> dict[Key, int]:
        """Return the sizes.

        Raises:
            ResizeError: They contradict each other.
        """
        while True:
            self._keep_whole_rules()
            sizes = {
                root: n if root in self.kept else min(n, self._limit(root))
                for root, n in self.full.items()
            }
            self._apply_rules(sizes)
            self._cut_outputs(sizes)
            broken = [rule for rule in self.classes.rules if not self._holds(rule, sizes)]
            if not broken:
                return sizes
            kept = {root for rule in broken for root in self._classes_of(rule)}
            if kept <= self.kept:
                raise ResizeError("the full sizes contradict each other")
            self.kept |= kept  # such as a dim that is split in two ways

    def _cut_outputs(self, sizes: dict[Key, int]) -> None:
        """Halve the longest dims of outputs that have too many elements."""
        fixed = set(self.kept)
        for rule in self.classes.rules:
            total, parts = self._roots_of(rule)
            fixed |= {total, *parts}
        for t in self.classes.program.outputs:
            roots = [self.classes.find(TensorDim(PROGRAM, t.index, d)) for d in range(len(t.dims))]
            free = [root for root in roots if root not in fixed]
            while math.prod(sizes[root] for root in roots) > _MOST_ELEMENTS:
                longest = max(free, key=sizes.__getitem__, default=None)
                if longest is None or sizes[longest] <= _WIDE_BATCH:
                    break
                sizes[longest] //= 2

    def _limit(self, root: Key) -> int:
        return self.wide.get(root, _WIDE_AXIS)

    def _batch_dims(self) -> list[Key]:
        return [
            TensorDim(PROGRAM, t.index, d)
            for op in self.classes.program.ops
            if op.name == "matmul"
            for t in (*op.inputs, *op.outputs)
            if isinstance(t, DTensor)
            for d in range(len(t.dims) - 2)
        ]

    def _keep_whole_rules(self) -> None:
        """Keep the sizes of a dim and of all its parts if results depend on one of them."""
        before = -1
        while before < len(self.kept):
            before = len(self.kept)
            for rule in self.classes.rules:
                roots = self._classes_of(rule)
                if not self.kept.isdisjoint(roots):
                    self.kept |= {*roots}

    def _apply_rules(self, sizes: dict[Key, int]) -> None:
        """Cut dims and their parts alike.

        A part may have parts of its own, as a dim of joined blocks has. So limits go from totals to
        parts first. Then sizes go from parts to totals. No total is smaller than its parts, so the
        order is that of full sizes. A part may be as large as its total: `run` checks all sizes.
        """
        limits = {root: self._limit(root) for root in sizes}
        rules = [r for r in self.classes.rules if self.kept.isdisjoint(self._classes_of(r))]
        rules.sort(key=lambda rule: -self.classes.full[rule.total])
        for rule in rules:
            self._cut_parts(rule, sizes, limits)
        for rule in reversed(rules):
            total, parts = self._roots_of(rule)
            sizes[total] = rule.value([sizes[p] for p in parts])

    def _cut_parts(self, rule: SizeRule, sizes: dict[Key, int], limits: dict[Key, int]) -> None:
        """Choose the sizes of the parts of a dim, and the limits of parts that are totals.

        The sizes of the parts of a joined dim are added, and those of a dim that is split are
        multiplied.
        """
        total, parts = self._roots_of(rule)
        if rule.kind == "sum":
            for p in parts:
                limits[p] = max(limits[total] // 2, 1)
                sizes[p] = min(self.full[p], limits[p])
        else:
            left = limits[total]
            for n, p in reversed([*enumerate(parts)]):
                limits[p] = max(left // 2 if n else left, _WIDE_BATCH)
                sizes[p] = min(self.full[p], limits[p])
                left = max(left // sizes[p], 1)

    def _holds(self, rule: SizeRule, sizes: dict[Key, int]) -> bool:
        total, parts = self._roots_of(rule)
        return sizes[total] == rule.value([sizes[p] for p in parts])

    def _classes_of(self, rule: SizeRule) -> list[Key]:
        total, parts = self._roots_of(rule)
        return [total, *parts]

    def _roots_of(self, rule: SizeRule) -> tuple[Key, list[Key]]:
        find = self.classes.find
        return find(rule.total), [find(p) for p in rule.parts]


def chosen_dims(classes: SizeClasses) -> list[Key]:
    """Return the dims of a program's tensors along which an index chooses elements."""
    uses = indices_of(classes.program).values()
    return [TensorDim(PROGRAM, t.index, dim) for chosen in uses for t, dim in chosen]


def keys_to_keep(classes: SizeClasses) -> list[Key]:
    """Return the dims and axes of a program along which its results depend on each other."""
    keys: list[Key] = [*classes.reduced, *classes.fixed]
    keys += [key for pair in classes.splits for key in pair]
    for number, op in enumerate(classes.program.ops):
        if op.name == "matmul":
            a, b = (t for t in op.inputs if isinstance(t, DTensor))
            keys.append(TensorDim(PROGRAM, a.index, len(a.dims) - 1))
            keys.append(TensorDim(PROGRAM, b.index, len(b.dims) - 2))
        if op.block is not None:
            held = [a.name for a in op.block.axes if a.role is not Role.GRID]
            keys += [BlockAxis(PROGRAM, number, name) for name in held]
    return keys


def resized(
    classes: SizeClasses, side: str, sizes: Sizes, *, keep_strides: bool = False
) -> KernelGraph:
    """Return the program or the kernels (`side`) at other sizes.

    Inputs are row-major, or keep the strides that they have.

    Raises:
        GraphError: If an op names the full sizes.
        ResizeError: If a slice does.
    """
    graph = classes.program if side == PROGRAM else classes.kernels
    small = KernelGraph()

    def dims(t: DTensor) -> tuple[int, ...]:
        return resized_dims(classes, side, t, sizes)

    new = {
        t.index: small.new_input(
            dims(t),
            t.dtype,
            t.strides if keep_strides else None,
            name=t.name,
            constant=t.constant,
        )
        for t in graph.inputs
    }
    for number, op in enumerate(graph.ops):
        tensors = [x for x in op.inputs if isinstance(x, DTensor)]
        attrs = dict(op.attrs)
        if op.name == "slice" and dims(tensors[0]) != tensors[0].dims:
            raise ResizeError("a slice names full sizes")
        if op.name == "reshape":
            attrs["dims"] = dims(op.outputs[0])
        if op.name == CUSTOMIZED:
            block = resized_block(classes, side, number, op, sizes)
            made = small.customized([new[t.index] for t in tensors], block)
        else:
            args = [new[x.index] if isinstance(x, DTensor) else x for x in op.inputs]
            made = [small.apply(table.lookup(op.name).name, args, attrs)]
        new |= {t.index: y for t, y in zip(op.outputs, made, strict=True)}
    small.mark_output(*(new[t.index] for t in graph.outputs))
    return small
