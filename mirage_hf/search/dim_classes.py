"""Find the dims of a program's tensors that must range over the same axis, and name the axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from mirage_hf.graph.dim import Dim
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph, KernelOp
from mirage_hf.ops import table
from mirage_hf.search.block_definitions import axis_uses
from mirage_hf.search.lowered_program import NotLowerableError
from mirage_hf.search.tensor_index import SplitDim, axes_of

#: A dim of a tensor: the tensor's index and the dim.
_TensorDim = tuple[int, int]

#: The usual names of axes, by their use. A matmul sums over k. Outputs have rows m and columns n.
#: Batches are b.
_NAMES = {"sum": "krstuv", "row": "mij", "column": "nopq", "batch": "bhgf"}


class DimClasses:
    """Union-find over all dims of all tensors of an expanded program.

    Two dims are in one class if they must range over the same axis. An example is the rows of a
    matmul's left operand and of its result. Each class has the name of an axis. An index may need
    an axis twice, as in X·Xᵀ. The second one is a copy of the class with a number appended.

    Raises:
        NotLowerableError: If an op cannot be part of a fused kernel.
    """

    def __init__(self, graph: KernelGraph):
        self.graph = graph
        #: The axes that were handed out, with their sizes.
        self.sizes: dict[str, int] = {}
        self._parent: dict[_TensorDim, _TensorDim] = {}
        self._names: dict[_TensorDim, str] = {}
        #: Dims that a reshape splits or merges, each with its parts.
        self._splits: list[tuple[_TensorDim, tuple[_TensorDim, ...]]] = []
        tensors = (*graph.inputs, *(t for op in graph.ops for t in op.outputs))
        self._tensors = {t.index: t for t in tensors}
        self._decoded = _decoded(graph)
        for op in graph.ops:
            self._unify(op)
        self._parts = self._unify_parts()
        self._symbols = {
            self._find((t.index, d)): size.name
            for t in graph.inputs
            for d, size in enumerate(t.dims)
            if isinstance(size, Dim)
        }
        if not self._symbols.keys().isdisjoint(self._parts):
            raise NotLowerableError("a reshape that splits or merges a symbolic dim ends a kernel")
        self._name_classes()

    def place(self, tensor: DTensor, dim: int, taken: Iterable[str | None]) -> str | SplitDim:
        """Return the axis of a dim, or the axes of its parts if a reshape splits or merges it."""
        parts = self._parts.get(self._find((tensor.index, dim)))
        if parts is None:
            return self.axis(tensor, dim, taken)
        used, places = list(taken), list[str | SplitDim]()
        for index, part in parts:
            places.append(self.place(self._tensors[index], part, used))
            used += axes_of(places[-1:])
        return SplitDim(tuple(places))

    def part_dims(self, tensor: DTensor) -> tuple[int, ...]:
        """Return the dims of a tensor with each split dim replaced by its parts."""
        return tuple(n for d in range(len(tensor.dims)) for n in self._sizes_of((tensor.index, d)))

    def _sizes_of(self, dim: _TensorDim) -> tuple[int, ...]:
        parts = self._parts.get(self._find(dim)) if self._size(dim) > 1 else None
        if parts is None:
            return (self._size(dim),)
        return tuple(n for part in parts for n in self._sizes_of(part))

    def axis(self, tensor: DTensor, dim: int, taken: Iterable[str | None]) -> str:
        """Return the axis of a dim, or a copy of it if `taken` has it already.

        Raises:
            NotLowerableError: If a reshape splits or merges the dim.
        """
        if self._find((tensor.index, dim)) in self._parts:
            raise NotLowerableError("a dim that a reshape splits or merges ends a kernel here")
        root = self._find((tensor.index, dim))
        base = name = self._names.setdefault(root, self._unnamed())
        used = list(taken)
        copy = 0
        while name in used:
            copy += 1
            name = f"{base}{copy}"
        self.sizes[name] = tensor.dims[dim]
        return name

    def is_split(self, tensor: DTensor, dim: int) -> bool:
        """Return True if a reshape splits or merges a dim."""
        return self._find((tensor.index, dim)) in self._parts

    def symbol(self, tensor: DTensor, dim: int) -> str | None:
        """Return the name of the symbolic size of a dim, or None if its size is fixed."""
        return self._symbols.get(self._find((tensor.index, dim)))

    # -- classes -----------------------------------------------------------------------------------

    def _find(self, dim: _TensorDim) -> _TensorDim:
        root = dim
        while self._parent.get(root, root) != root:
            root = self._parent[root]
        while dim != root:  # shorten the way for the next look-up
            self._parent[dim], dim = root, self._parent[dim]
        return root

    def _join(self, a: DTensor, i: int, b: DTensor, j: int) -> None:
        """Put two dims into one class, unless one of them is broadcast."""
        if a.dims[i] == b.dims[j] > 1:
            self._parent[self._find((a.index, i))] = self._find((b.index, j))

    def _join_from_right(self, t: DTensor, out: DTensor, first: int = 1) -> None:
        """Join dims by their distance from the last one, starting with the `first` last."""
        for k in range(first, len(t.dims) + 1):
            self._join(t, len(t.dims) - k, out, len(out.dims) - k)

    def _unify(self, op: KernelOp) -> None:
        """Join the dims that an op makes range over the same axis."""
        kind = table.OPS[op.name].kind if op.name in table.OPS else op.name
        rule = _UNIFY.get(op.name) or _UNIFY.get(kind)
        if rule is None:
            raise NotLowerableError(f"{op.name} ends a kernel: the search does not fuse it yet")
        rule(self, op)

    def _unify_customized(self, op: KernelOp) -> None:
        first: dict[str, tuple[DTensor, int]] = {}
        for use in axis_uses(op):
            self._join(use.tensor, use.dim, *first.setdefault(use.axis, (use.tensor, use.dim)))

    def _unify_elementwise(self, op: KernelOp) -> None:
        for t in tensors_of(op):
            self._join_from_right(t, op.outputs[0])

    def _unify_matmul(self, op: KernelOp) -> None:
        (a, b), out = tensors_of(op), op.outputs[0]
        rank = len(out.dims)
        self._join(a, len(a.dims) - 1, b, len(b.dims) - 2)
        self._join(a, len(a.dims) - 2, out, rank - 2)
        self._join(b, len(b.dims) - 1, out, rank - 1)
        for t in (a, b):
            self._join_from_right(t, out, first=3)

    def _unify_all_but_one(self, op: KernelOp) -> None:
        """Join all dims except the one that a reduction reduces or a concat joins."""
        out = op.outputs[0]
        rank = len(out.dims)
        dim = dict(op.attrs)["dim"] % rank
        for t in tensors_of(op):
            for k in range(rank):
                if k != dim:
                    self._join(t, k, out, k)

    def _unify_permute(self, op: KernelOp) -> None:
        (x,) = tensors_of(op)
        for k, source in enumerate(dict(op.attrs)["order"]):
            self._join(x, source, op.outputs[0], k)

    def _unify_take(self, op: KernelOp) -> None:
        """Join all dims except the one whose elements the index chooses."""
        (x, index), out = tensors_of(op), op.outputs[0]
        dim, rank = dict(op.attrs)["dim"] % len(x.dims), len(index.dims)
        for k in range(rank):
            self._join(index, k, out, dim + k)
        for k in range(len(x.dims)):
            if k != dim:
                self._join(x, k, out, k if k < dim else k + rank - 1)

    def _unify_reshape(self, op: KernelOp) -> None:
        (x,), out = tensors_of(op), op.outputs[0]
        for before, after in reshape_runs(x.dims, out.dims):
            old, new = [(x.index, d) for d in before], [(out.index, d) for d in after]
            if len(old) == len(new):
                self._join(x, before[0], out, after[0])
            elif x.index not in self._decoded:
                # Windows of long programs end where heads are split, so that q, k and v are joined.
                raise NotLowerableError(
                    "reshape that splits or merges axes ends a kernel: the search fuses only those "
                    "of weights in codes"
                )
            elif len(old) == 1:
                self._splits.append((old[0], tuple(new)))
            else:
                self._splits.append((new[0], tuple(old)))

    def _unify_parts(self) -> dict[_TensorDim, tuple[_TensorDim, ...]]:
        """Return the parts of each class that reshapes split, after joining parts alike.

        Raises:
            NotLowerableError: If one class is split in two ways.
        """
        changed = True
        while changed:
            changed, parts_of = False, dict[_TensorDim, tuple[_TensorDim, ...]]()
            for whole, parts in self._splits:
                known = parts_of.setdefault(self._find(whole), parts)
                if list(map(self._size, known)) != list(map(self._size, parts)):
                    raise NotLowerableError("a dim that reshapes split in two ways ends a kernel")
                for a, b in zip(known, parts, strict=True):
                    if self._find(a) != self._find(b):
                        self._parent[self._find(a)] = self._find(b)
                        changed = True
        return parts_of

    def _size(self, dim: _TensorDim) -> int:
        return self._tensors[dim[0]].dims[dim[1]]

    # -- names -------------------------------------------------------------------------------------

    def _unnamed(self) -> str:
        return f"a{len(self._names)}_"

    def _name_classes(self) -> None:
        """Name the classes, those that are summed over first."""
        pools = {kind: iter(names) for kind, names in _NAMES.items()}
        for kind, whole, whole_dim in self._dims_in_naming_order():
            for index, dim in self._leaves((whole.index, whole_dim)):
                self._name_class(pools[kind], self._tensors[index], dim)

    def _leaves(self, dim: _TensorDim) -> list[_TensorDim]:
        """Return the parts of a dim that no reshape splits further."""
        parts = self._parts.get(self._find(dim))
        return [dim] if parts is None else [leaf for part in parts for leaf in self._leaves(part)]

    def _name_class(self, names: Iterator[str], tensor: DTensor, dim: int) -> None:
        root = self._find((tensor.index, dim))
        if tensor.dims[dim] > 1 and root not in self._names:
            self._names[root] = next(names, None) or self._unnamed()

    def _dims_in_naming_order(self) -> Iterator[tuple[str, DTensor, int]]:
        for op in self.graph.ops:
            if op.name == "matmul":
                left = tensors_of(op)[0]
                yield "sum", left, len(left.dims) - 1
            elif op.name == CUSTOMIZED and op.block is not None:
                stored = {axis for output in op.block.outputs for axis in output.axes}
                for use in axis_uses(op):
                    if use.axis not in stored:
                        yield "sum", use.tensor, use.dim
        for op in self.graph.ops:
            if op.name == "reduction":
                x = tensors_of(op)[0]
                yield "sum", x, dict(op.attrs)["dim"] % len(x.dims)
        for t in (*self.graph.outputs, *self.graph.inputs):
            rank = len(t.dims)
            for d in range(rank):
                kind = "column" if d == rank - 1 else "row" if d == rank - 2 else "batch"
                yield kind, t, d


_UNIFY: dict[str, Callable[[DimClasses, KernelOp], None]] = {
    CUSTOMIZED: DimClasses._unify_customized,
    "elementwise": DimClasses._unify_elementwise,
    "bounds": DimClasses._unify_elementwise,
    "contract": DimClasses._unify_matmul,
    "reduce": DimClasses._unify_all_but_one,
    "concat": DimClasses._unify_all_but_one,
    "permute": DimClasses._unify_permute,
    "reshape": DimClasses._unify_reshape,
    "take": DimClasses._unify_take,
    "rope": DimClasses._unify_elementwise,
}


def tensors_of(op: KernelOp) -> list[DTensor]:
    """Return the operands of an op that are tensors."""
    return [x for x in op.inputs if isinstance(x, DTensor)]


def _decoded(graph: KernelGraph) -> set[int]:
    """Return the tensors that elementwise and layout ops compute from codes, by index."""
    found = {t.index for t in graph.inputs if t.dtype in table.CODE_DTYPES}
    for op in graph.ops:
        kind = table.OPS[op.name].kind if op.name in table.OPS else op.name
        reads_codes = any(t.index in found for t in tensors_of(op))
        if kind in ("elementwise", "layout") and reads_codes:
            found |= {t.index for t in op.outputs}
    return found


def reshape_runs(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return the shortest runs of dims that a reshape turns into each other, before and after.

    Dims of one element are left out. One of the two runs of a pair has a single dim.

    Raises:
        NotLowerableError: If the reshape mixes several dims into several others.
    """
    before = [d for d, size in enumerate(old) if size > 1]
    after = [d for d, size in enumerate(new) if size > 1]
    runs = []
    while before and after:
        left, right = [before.pop(0)], [after.pop(0)]
        while (a := math.prod(old[d] for d in left)) != (b := math.prod(new[d] for d in right)):
            if a < b:
                left.append(before.pop(0))
            else:
                right.append(after.pop(0))
        if len(left) > 1 and len(right) > 1:
            raise NotLowerableError(
                "reshape that mixes several axes ends a kernel: the search fuses those that split "
                "or merge"
            )
        runs.append((left, right))
    return runs
