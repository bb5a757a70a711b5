"""Find the dims of a program's tensors that must range over the same axis, and name the axes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from mirage_hf.graph.dim import Dim
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph, KernelOp
from mirage_hf.ops import table
from mirage_hf.search.block_definitions import axis_uses
from mirage_hf.search.lowered_program import NotLowerableError

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
        for op in graph.ops:
            self._unify(op)
        self._symbols = {
            self._find((t.index, d)): size.name
            for t in graph.inputs
            for d, size in enumerate(t.dims)
            if isinstance(size, Dim)
        }
        self._name_classes()

    def axis(self, tensor: DTensor, dim: int, taken: Iterable[str | None]) -> str:
        """Return the axis of a dim, or a copy of it if `taken` has it already."""
        root = self._find((tensor.index, dim))
        base = name = self._names.setdefault(root, self._unnamed())
        used = list(taken)
        copy = 0
        while name in used:
            copy += 1
            name = f"{base}{copy}"
        self.sizes[name] = tensor.dims[dim]
        return name

    def symbol(self, tensor: DTensor, dim: int) -> str | None:
        """Return the name of the symbolic size of a dim, or None if its size is fixed."""
        return self._symbols.get(self._find((tensor.index, dim)))

    # -- classes -----------------------------------------------------------------------------------

    def _find(self, dim: _TensorDim) -> _TensorDim:
        while self._parent.get(dim, dim) != dim:
            dim = self._parent[dim]
        return dim

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

    def _unify_reshape(self, op: KernelOp) -> None:
        (x,), out = tensors_of(op), op.outputs[0]
        for i, k in reshape_pairs(x.dims, out.dims):
            self._join(x, i, out, k)

    # -- names -------------------------------------------------------------------------------------

    def _unnamed(self) -> str:
        return f"a{len(self._names)}_"

    def _name_classes(self) -> None:
        """Name the classes, those that are summed over first."""
        pools = {kind: iter(names) for kind, names in _NAMES.items()}
        for kind, tensor, dim in self._dims_in_naming_order():
            root = self._find((tensor.index, dim))
            if tensor.dims[dim] > 1 and root not in self._names:
                self._names[root] = next(pools[kind], None) or self._unnamed()

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
    "rope": DimClasses._unify_elementwise,
}


def tensors_of(op: KernelOp) -> list[DTensor]:
    """Return the operands of an op that are tensors."""
    return [x for x in op.inputs if isinstance(x, DTensor)]


def reshape_pairs(old: Sequence[int], new: Sequence[int]) -> list[tuple[int, int]]:
    """Return the dims of more than one element that a reshape keeps, as (before, after).

    Raises:
        NotLowerableError: If the reshape splits or merges dims.
    """
    before = [i for i, size in enumerate(old) if size > 1]
    after = [i for i, size in enumerate(new) if size > 1]
    if [old[i] for i in before] != [new[i] for i in after]:
        raise NotLowerableError(
            "reshape that splits or merges axes ends a kernel: the search does not fuse it yet"
        )
    return list(zip(before, after, strict=True))
