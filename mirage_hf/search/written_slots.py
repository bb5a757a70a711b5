"""Decide whether a program's results can depend on the cache slots that it writes.

A decoding step appends a row to a cache. It reads the cache within bounds that end where the append
begins, so it does not matter whether the row is there yet. This module follows each cache through
the program, dim by dim, to check that every read has such bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mirage_hf.graph.effects import APPEND, parts_of
from mirage_hf.graph.kernel import DTensor, KernelGraph, KernelOp
from mirage_hf.ops import table
from mirage_hf.search.dim_classes import tensors_of

#: Pairs of a tensor (by index) and a dim of the tensor that is marked.
_Pairs = frozenset[tuple[int, int]]

_NONE: _Pairs = frozenset()


@dataclass(frozen=True)
class _Marks:
    """The known properties of the dims of one tensor.

    Attributes:
        reads: Pairs (cache, dim). Along this dim the tensor depends on the slots of the cache,
            also on those that are written.
        zero: Pairs (position, dim). Along this dim the tensor is 0 from that position on.
    """

    reads: _Pairs = _NONE
    zero: _Pairs = _NONE


class WrittenSlots:
    """Follows cache slots that a program writes through its ops.

    Args:
        program: The program with its appends.
        ends: The position at which the append to each cache begins, by index of the cache.
    """

    def __init__(self, program: KernelGraph, ends: Mapping[int, int]):
        self.program, self.ends = program, ends
        self._marks: dict[int, _Marks] = {}

    def are_unread(self) -> bool:
        """Return True if no output of the program depends on a slot that it writes."""
        for t in self.program.inputs:
            is_cache = t.index in self.ends
            slots = frozenset([(t.index, len(t.dims) - 2)]) if is_cache else _NONE
            self._marks[t.index] = _Marks(reads=slots)
        for op in self.program.ops:
            marks = self._append(op) if op.name == APPEND else self._op(op)
            if marks is None:
                return False
            self._marks[op.outputs[0].index] = marks
        return not any(self._reads(t) for t in self.program.outputs)

    def _reads(self, t: DTensor) -> _Pairs:
        return self._marks[t.index].reads

    def _zero(self, t: DTensor) -> _Pairs:
        return self._marks[t.index].zero

    def _append(self, op: KernelOp) -> _Marks | None:
        _, rows, _ = parts_of(op)
        return None if self._reads(rows) else _Marks()

    def _op(self, op: KernelOp) -> _Marks | None:
        """Return the marks of an op's output, or None if all of it may depend on a written slot."""
        rule = _RULES.get(op.name) or _RULES.get(table.OPS[op.name].kind)
        tensors = tensors_of(op)
        if rule is not None:
            return rule(self, op, tensors, len(op.outputs[0].dims))
        return None if any(self._reads(t) for t in tensors) else _Marks()

    def _renamed(self, t: DTensor, dims: Mapping[int, int]) -> _Marks | None:
        """Return a tensor's marks with its dims renamed.

        `dims` maps old dims to new ones. The result is None if the tensor reads written slots along
        a dim that is not in `dims`.
        """
        marks = self._marks[t.index]
        for cache, dim in marks.reads:
            if dim not in dims and (self.ends[cache], dim) not in marks.zero:
                return None
        return _Marks(_moved(marks.reads, dims), _moved(marks.zero, dims))

    # -- rules: the op, its tensors, and the rank of its output ------------------------------------

    def _matmul(self, op: KernelOp, tensors: Sequence[DTensor], rank: int) -> _Marks | None:
        a, b = tensors
        summed = ((a, len(a.dims) - 1), (b, len(b.dims) - 2))
        ends = {self.ends[cache] for t, d in summed for cache, dim in self._reads(t) if dim == d}
        zero = {position for t, d in summed for position, dim in self._zero(t) if dim == d}
        if not ends <= zero:
            return None
        moved = []
        for t, d in summed:
            left = [k for k in range(len(t.dims)) if k != d]
            dims = {k: rank - len(t.dims) + k for k in left}
            moved.append(_Marks(_moved(self._reads(t), dims), _moved(self._zero(t), dims)))
        return _Marks(_union(m.reads for m in moved), _union(m.zero for m in moved))

    def _permute(self, op: KernelOp, tensors: Sequence[DTensor], rank: int) -> _Marks | None:
        (x,) = tensors
        order = [o % rank for o in dict(op.attrs)["order"]]
        if order[0] and self._reads(x):  # a position counts along dim 0 of its cache
            return None
        return self._renamed(x, {source: d for d, source in enumerate(order)})

    def _within(self, op: KernelOp, tensors: Sequence[DTensor], rank: int) -> _Marks | None:
        x, _, hi = tensors
        return self._bounded(x, hi, dict(op.attrs)["dim"] % rank, self._zero(x))

    def _softmax(self, op: KernelOp, tensors: Sequence[DTensor], rank: int) -> _Marks | None:
        x, dim = tensors[0], dict(op.attrs)["dim"] % rank
        # A softmax of zeros is not zero, so nothing stays zero along other dims.
        if len(tensors) == 3:
            return self._bounded(x, tensors[2], dim, _NONE)
        return None if any(d == dim for _, d in self._reads(x)) else _Marks(self._reads(x))

    def _bounded(self, x: DTensor, hi: DTensor, dim: int, zero: _Pairs) -> _Marks:
        """Return the marks of a value that is 0 along a dim from the bound `hi` on."""
        reads = frozenset(
            (cache, d) for cache, d in self._reads(x) if (d, self.ends[cache]) != (dim, hi.index)
        )
        return _Marks(reads, zero | {(hi.index, dim)})

    def _reduce(self, op: KernelOp, tensors: Sequence[DTensor], rank: int) -> _Marks | None:
        dim = dict(op.attrs)["dim"] % rank
        return self._renamed(tensors[0], {d: d for d in range(rank) if d != dim})

    def _elementwise(self, op: KernelOp, tensors: Sequence[DTensor], rank: int) -> _Marks | None:
        moved = []
        for t in tensors:
            dims = {d: rank - len(t.dims) + d for d in range(len(t.dims))}
            moved.append(_Marks(_moved(self._reads(t), dims), _moved(self._zero(t), dims)))
        reads = _union(m.reads for m in moved)
        if op.name == "mul":
            return _Marks(reads, _union(m.zero for m in moved))
        if op.name in ("cast", "neg") or (op.name == "div" and isinstance(op.inputs[0], DTensor)):
            return _Marks(reads, moved[0].zero)
        if op.name in ("add", "sub") and len(tensors) == len(op.inputs):
            return _Marks(reads, frozenset.intersection(*(m.zero for m in moved)))
        return _Marks(reads)

    def _along_last(self, op: KernelOp, tensors: Sequence[DTensor], rank: int) -> _Marks | None:
        """Return the marks of a norm or rope, which mix the elements of the last dim."""
        x, *others = tensors
        mixed = any(d == rank - 1 for _, d in self._reads(x))
        if mixed or any(self._reads(t) for t in others):
            return None
        return _Marks(self._reads(x))


_RULES: dict[str, Callable[[WrittenSlots, KernelOp, Sequence[DTensor], int], _Marks | None]] = {
    "matmul": WrittenSlots._matmul,
    "permute": WrittenSlots._permute,
    "within": WrittenSlots._within,
    "softmax": WrittenSlots._softmax,
    "rms_norm": WrittenSlots._along_last,
    "layer_norm": WrittenSlots._along_last,
    "rope": WrittenSlots._along_last,
    "reduce": WrittenSlots._reduce,
    "elementwise": WrittenSlots._elementwise,
}


def _moved(pairs: _Pairs, dims: Mapping[int, int]) -> _Pairs:
    return frozenset((index, dims[d]) for index, d in pairs if d in dims)


def _union(sets: Iterable[_Pairs]) -> _Pairs:
    return _NONE.union(*sets)
