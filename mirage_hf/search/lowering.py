"""Lower a kernel graph to a program over named axes, or say which op cannot be part of a kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mirage_hf.errors import Rejected
from mirage_hf.graph.block import SIGN_HALVES, SIGN_PAIRS, SWAP_HALVES, SWAP_PAIRS, Rotation
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph, KernelOp
from mirage_hf.ops import table
from mirage_hf.ops.dtypes import element_bytes
from mirage_hf.search.dim_classes import DimClasses, reshape_runs, tensors_of
from mirage_hf.search.expand import expand
from mirage_hf.search.lower_customized import lower_customized
from mirage_hf.search.lowered_program import (
    LoweredInput,
    LoweredOutput,
    LoweredProgram,
    NotLowerableError,
)
from mirage_hf.search.tensor_index import (
    Index,
    PaddedAxis,
    Place,
    SplitDim,
    TakenDim,
    aligned,
    axes_of,
    flat,
    only_inputs_have,
    rotated,
)
from mirage_hf.search.terms import TermBuilder, without_partials

#: For each run of dims that a reshape changes: the dims before and after it.
Runs = Sequence[tuple[list[int], list[int]]]

_COMPUTED_SINE = (
    "rope whose sine is computed ends a kernel (of a part of a dim, one whose cosine is computed "
    "too): the search takes a sine that is an input"
)
_COMPUTED_CONCAT = (
    "concat of computed tensors ends a kernel: the search fuses only concats of inputs"
)


def lower(graph: KernelGraph) -> LoweredProgram | Rejected:
    """Lower a program.

    Returns:
        The program over named axes, or the reason why an op of it cannot be part of a fused kernel.
        Then library calls run the program, or that part of it.
    """
    try:
        return Lowering(expand(graph)).run()
    except NotLowerableError as e:
        return Rejected(str(e))
    except RecursionError:
        return Rejected(f"its {len(graph.ops)} ops build on one another too deeply")


class Lowering:
    """Lowers an expanded program to terms.

    Methods return a term by its number. They take the index under which the tensor is read: the
    axis of each dim.

    Raises:
        NotLowerableError: If an op cannot be part of a fused kernel.
    """

    def __init__(self, graph: KernelGraph):
        self.graph = graph
        self.classes = DimClasses(graph)
        self.terms = TermBuilder()
        self._made = {t.index: op for op in graph.ops for t in op.outputs}
        self._positions = {t.index: n for n, t in enumerate(graph.inputs)}
        self._lowered: dict[tuple[int, Index], int] = {}

    def run(self) -> LoweredProgram:
        """Lower the outputs and all ops that they need."""
        outputs = []
        for t in self.graph.outputs:
            index: list[Place] = []
            for d, size in enumerate(t.dims):
                index.append(self.classes.place(t, d, axes_of(index)) if size > 1 else None)
            term = self.tensor(t, tuple(index))
            outputs.append(LoweredOutput(term, axes_of(index), table.dtype_name(t.dtype)))
        program = LoweredProgram(
            dict(self.classes.sizes),
            tuple(self.terms.inputs),
            tuple(self.terms.terms),
            tuple(outputs),
            _has_ratios(self.graph),
        )
        return without_partials(program)

    def tensor(self, t: DTensor, index: Index) -> int:
        """Return the term of a tensor under an index."""
        key = (t.index, index)
        if key not in self._lowered:
            op = self._made.get(t.index)
            self._lowered[key] = self._input(t, index) if op is None else self._op(op, t, index)
        return self._lowered[key]

    def _input(self, t: DTensor, index: Index) -> int:
        if t.dtype not in (*table.COMPUTE_DTYPES, *table.CODE_DTYPES):
            raise NotLowerableError(
                f"{t.name} is {table.dtype_name(t.dtype)}: "
                "kernels compute with floating-point numbers only"
            )
        dims = self.classes.part_dims(t)
        source = LoweredInput((self._positions[t.index],), dims, itemsize=element_bytes(t.dtype))
        return self.terms.read(source, flat(index))

    def _op(self, op: KernelOp, t: DTensor, index: Index) -> int:
        if op.name == CUSTOMIZED:
            return lower_customized(self, op, t, index)
        if table.OPS[op.name].kind == "elementwise":
            return self._elementwise(op, index)
        if op.name not in _LAYOUT and any(map(only_inputs_have, index)):
            raise NotLowerableError(_COMPUTED_SINE)
        rule = _RULES.get(op.name)
        if rule is None:
            raise NotLowerableError(f"{op.name} ends a kernel: the search does not fuse it yet")
        return rule(self, op, index)

    # -- ops that compute --------------------------------------------------------------------------

    def _elementwise(self, op: KernelOp, index: Index) -> int:
        if op.name != "cast" and any(map(only_inputs_have, index)):
            raise NotLowerableError(_COMPUTED_SINE)
        args = [
            self.tensor(x, aligned(index, x.dims))
            if isinstance(x, DTensor)
            else self.terms.constant(x)
            for x in op.inputs
        ]
        return self.terms.elementwise(op.name, args, op.attrs)

    def _matmul(self, op: KernelOp, index: Index) -> int:
        x, y = tensors_of(op)
        *batch, row, column = index
        k = None
        if x.dims[-1] > 1:
            k = self.classes.place(x, len(x.dims) - 1, axes_of(index))
        rows = (row if x.dims[-2] > 1 else None, k)
        columns = (k, column if y.dims[-1] > 1 else None)
        left = self.tensor(x, aligned(tuple(batch), x.dims[:-2]) + rows)
        right = self.tensor(y, aligned(tuple(batch), y.dims[:-2]) + columns)
        product = self.terms.op("mul", left, right)
        return product if k is None else self._reduced("sum", product, k)

    def _reduced(self, kind: str, arg: int, place: Place) -> int:
        """Return the "sum" or "max" of a term over all axes of a place."""
        for axis in reversed(axes_of([place])):
            arg = self.terms.reduce(kind, arg, str(axis))
        return arg

    def _reduction(self, op: KernelOp, index: Index) -> int:
        (x,), attrs = tensors_of(op), dict(op.attrs)
        kind, dim = attrs["kind"], attrs["dim"] % len(x.dims)
        if x.dims[dim] == 1:
            return self.tensor(x, index)
        place = self.classes.place(x, dim, axes_of(index))
        arg = self.tensor(x, (*index[:dim], place, *index[dim + 1 :]))
        if kind == "max":
            return self._reduced("max", arg, place)
        symbol = self.classes.symbol(x, dim)
        if kind == "mean" and symbol is not None:
            raise NotLowerableError(
                f"the mean over dim {symbol}, whose size is not fixed, divides by another number "
                "for every size; give the dim a size, or sum and multiply by an input"
            )
        total = self._reduced("sum", arg, place)
        if kind == "sum":
            return total
        return self.terms.op("mul", total, self.terms.constant(1.0 / x.dims[dim]))

    def _rope(self, op: KernelOp, index: Index) -> int:
        """Return x · cos + swapped x · signed sin.

        If cos and sin are narrower than x, cos is padded with 1 and sin with 0.
        """
        x, cos, sin = tensors_of(op)
        interleaved = dict(op.attrs)["interleaved"]
        swap, sign = (SWAP_PAIRS, SIGN_PAIRS) if interleaved else (SWAP_HALVES, SIGN_HALVES)
        narrow = cos.dims[-1] < x.dims[-1]
        *outer, last = index
        swapped = rotated(last, swap, cos.dims[-1] if narrow else None)
        signed = rotated(last, sign, None)

        def factor(t: DTensor, along: str | Rotation, after: float) -> int:
            place: Place = PaddedAxis(along, after) if narrow else along
            return self.tensor(t, aligned((*outer, place), t.dims))

        straight = self.terms.op("mul", self.tensor(x, index), factor(cos, signed.axis, 1.0))
        crossed = self.terms.op("mul", self.tensor(x, (*outer, swapped)), factor(sin, signed, 0.0))
        return self.terms.op("add", straight, crossed)

    def _within(self, op: KernelOp, index: Index) -> int:
        """Return x times the 0/1 mask of its bounds."""
        x, lo, hi = tensors_of(op)
        dim = dict(op.attrs)["dim"] % len(index)
        axis = index[dim]
        if axis is not None and not isinstance(axis, str):
            raise NotLowerableError("bounds along the dim that rope rotates end a kernel")
        bounded_dim = dim - (len(index) - len(lo.dims))  # a dim of lo, negative if lo lacks it
        value = self.tensor(x, index)
        mask = self._mask(lo, hi, aligned(index, lo.dims), axis, bounded_dim)
        return self.terms.op("mul", value, mask)

    def _mask(self, lo: DTensor, hi: DTensor, index: Index, axis: str | None, dim: int) -> int:
        if axis is None:
            raise NotLowerableError("bounds of a dim of size 1 end a kernel")
        if lo.index in self._made or hi.index in self._made:
            raise NotLowerableError(
                "bounds that are computed end a kernel: the search fuses only those that are inputs"
            )
        dims = lo.dims
        if dim < 0:
            dims, index, dim = (1, *dims), (None, *index), 0
        source = LoweredInput(
            (self._positions[lo.index], self._positions[hi.index]),
            dims,
            itemsize=lo.dtype.itemsize * 2,
            bounds=dim,
        )
        return self.terms.read(source, (*index[:dim], axis, *index[dim + 1 :]))

    # -- layout ops --------------------------------------------------------------------------------

    def _permute(self, op: KernelOp, index: Index) -> int:
        (x,) = tensors_of(op)
        inner: list[Place] = [None] * len(x.dims)
        for place, source in zip(index, dict(op.attrs)["order"], strict=True):
            inner[source] = place
        return self.tensor(x, tuple(inner))

    def _reshape(self, op: KernelOp, index: Index) -> int:
        """Return the operand's term, with the result's index moved to the operand's dims."""
        (x,) = tensors_of(op)
        return self.tensor(x, self._reshaped(x, reshape_runs(x.dims, op.outputs[0].dims), index))

    def _reshaped(self, x: DTensor, runs: Runs, index: Index) -> Index:
        """Return the index of the operand of a reshape for an index of its result."""
        inner: list[Place] = [None] * len(x.dims)
        for before, after in runs:
            if len(after) > 1:
                inner[before[0]] = SplitDim(tuple(index[d] for d in after))
            elif len(before) > 1:
                whole = index[after[0]]
                if not isinstance(whole, SplitDim):
                    raise NotLowerableError("rope of a dim that a reshape merges ends a kernel")
                for d, part in zip(before, whole.parts, strict=True):
                    inner[d] = part
            else:
                inner[before[0]] = index[after[0]]
        return tuple(inner)

    def _take(self, op: KernelOp, index: Index) -> int:
        """Return the operand's term: a dim of it is read at what an index says."""
        x, chooser = tensors_of(op)
        return self.tensor(x, self._taken(x, chooser, dict(op.attrs)["dim"] % len(x.dims), index))

    def _taken(self, x: DTensor, chooser: DTensor, dim: int, index: Index) -> Index:
        """Return the index of the operand of a take for an index of its result."""
        if self.classes.is_split(x, dim):
            raise NotLowerableError("take along a dim that a reshape splits or merges")
        rank = len(chooser.dims)
        place = self.taken_dim(chooser, index[dim : dim + rank])
        return (*index[:dim], place, *index[dim + rank :])

    def taken_dim(self, chooser: DTensor, places: Index) -> TakenDim:
        """Return the place of a dim whose elements an index chooses.

        Args:
            chooser: The index, a tensor of the program.
            places: The place of each dim of it.
        """
        if chooser.index in self._made:
            raise NotLowerableError(
                "an index that is computed ends a kernel: the search fuses only those that are "
                "inputs"
            )
        axes = axes_of(places)
        if axes != places:
            raise NotLowerableError("take by an index of which rope rotates a dim ends a kernel")
        return TakenDim(self._positions[chooser.index], axes, chooser.dims)

    def _concat(self, op: KernelOp, index: Index) -> int:
        return self.joined(tensors_of(op), dict(op.attrs)["dim"], index)

    def joined(self, tensors: Sequence[DTensor], dim: int, index: Index) -> int:
        """Return the term that reads tensors end to end along `dim`.

        It reads one input with several sources, the graph inputs that the tensors are. Each may be
        permuted, all in the same way. If the same ops compute each tensor, as they decode weights,
        the operands of these ops are joined.
        """
        behind = list(map(self._input_behind, tensors))
        if None in behind:
            return self._joined_ops([self._made.get(t.index) for t in tensors], dim, index)
        inputs, orders = zip(*(x for x in behind if x is not None), strict=True)
        if len(set(orders)) > 1:
            raise NotLowerableError("concat of inputs in different dim orders ends a kernel")
        if index[dim] is None:
            raise NotLowerableError("concat to a dim of size 1")
        if flat(index) != index:
            raise NotLowerableError("concat of dims that a reshape splits or merges ends a kernel")
        sizes = tuple(t.dims[dim] for t in tensors)
        whole = [sum(sizes) if d == dim else n for d, n in enumerate(tensors[0].dims)]
        # Dim order[d] of a source is dim d of the result.
        order = orders[0]
        source_dims = [0] * len(order)
        source_index: list[Place] = [None] * len(order)
        for d, source_dim in enumerate(order):
            source_dims[source_dim], source_index[source_dim] = whole[d], index[d]
        source = LoweredInput(
            tuple(self._positions[t.index] for t in inputs),
            tuple(source_dims),
            order[dim],
            sizes,
            element_bytes(inputs[0].dtype),
        )
        return self.terms.read(source, tuple(source_index))

    def _joined_ops(self, ops: Sequence[KernelOp | None], dim: int, index: Index) -> int:
        """Return the term of results of like ops, end to end along `dim`."""
        first = ops[0]
        if first is None or not all(op is not None and _are_alike(first, op) for op in ops):
            raise NotLowerableError(_COMPUTED_CONCAT)
        operands = zip(*(op.inputs for op in ops if op is not None), strict=True)
        if first.name == "permute":
            order = dict(first.attrs)["order"]
            places = dict(zip(order, index, strict=True))
            inner = tuple(places[d] for d in range(len(order)))
            return self.joined(next(operands), order[dim], inner)  # type: ignore[arg-type]
        if first.name == "take":
            return self._joined_takes([op for op in ops if op is not None], dim, index)
        if first.name == "reshape":
            return self._joined_reshapes([op for op in ops if op is not None], dim, index)
        if table.OPS[first.name].kind != "elementwise":
            raise NotLowerableError(_COMPUTED_CONCAT)
        args = [self._joined_operand(each, dim - len(index), index) for each in operands]
        return self.terms.elementwise(first.name, args, first.attrs)

    def _joined_operand(self, given: Sequence[DTensor | float], dim: int, index: Index) -> int:
        """Return the term of one operand of like ops. `dim` counts from the last dim."""
        tensors = [x for x in given if isinstance(x, DTensor)]
        if not tensors and len(set(given)) == 1:
            return self.terms.constant(given[0])  # type: ignore[arg-type]
        if len(tensors) < len(given):
            raise NotLowerableError(_COMPUTED_CONCAT)
        x = tensors[0]
        inner = aligned(index, x.dims)
        if len(x.dims) + dim >= 0 and x.dims[dim] > 1:
            return self.joined(tensors, len(x.dims) + dim, inner)
        if any(t.index != x.index for t in tensors):
            raise NotLowerableError(_COMPUTED_CONCAT)
        return self.tensor(x, inner)

    def _joined_takes(self, ops: Sequence[KernelOp], dim: int, index: Index) -> int:
        """Return the term of takes by one index, end to end along a dim that it does not choose."""
        tensors, choosers = zip(*map(tensors_of, ops), strict=True)
        x, chooser = tensors[0], choosers[0]
        taken, rank = dict(ops[0].attrs)["dim"] % len(x.dims), len(chooser.dims)
        if any(t.index != chooser.index for t in choosers) or taken <= dim < taken + rank:
            raise NotLowerableError(_COMPUTED_CONCAT)
        kept = dim if dim < taken else dim - rank + 1
        return self.joined(tensors, kept, self._taken(x, chooser, taken, index))

    def _joined_reshapes(self, ops: Sequence[KernelOp], dim: int, index: Index) -> int:
        """Return the term of reshapes, end to end along a dim that they keep."""
        tensors = [tensors_of(op)[0] for op in ops]
        runs, *others = [
            reshape_runs(x.dims, op.outputs[0].dims) for x, op in zip(tensors, ops, strict=True)
        ]
        kept = {after[0]: before[0] for before, after in runs if len(before) == len(after) == 1}
        if dim not in kept or any(other != runs for other in others):
            raise NotLowerableError("concat of dims that a reshape splits or merges ends a kernel")
        return self.joined(tensors, kept[dim], self._reshaped(tensors[0], runs, index))

    def _input_behind(self, t: DTensor) -> tuple[DTensor, tuple[int, ...]] | None:
        """Return the graph input that `t` permutes or decodes, and its dim for each dim of `t`.

        Return None if other ops compute it.
        """
        order = tuple(range(len(t.dims)))
        while (op := self._made.get(t.index)) is not None:
            if op.name == "cast" and tensors_of(op)[0].dtype in table.CODE_DTYPES:
                (t,) = tensors_of(op)
                continue
            if op.name != "permute":
                return None
            inner = dict(op.attrs)["order"]
            order = tuple(inner[d] for d in order)
            (t,) = tensors_of(op)
        return t, order


def _are_alike(op: KernelOp, other: KernelOp) -> bool:
    """Return True if two ops compute the same of their operands, except for sizes."""
    if op.name != other.name or len(op.inputs) != len(other.inputs):
        return False
    if len(op.outputs[0].dims) != len(other.outputs[0].dims):
        return False
    return op.name == "reshape" or op.attrs == other.attrs


_LAYOUT = ("permute", "reshape", "concat", "take")

_RULES: dict[str, Callable[[Lowering, KernelOp, Index], int]] = {
    "matmul": Lowering._matmul,
    "reduction": Lowering._reduction,
    "rope": Lowering._rope,
    "within": Lowering._within,
    "permute": Lowering._permute,
    "reshape": Lowering._reshape,
    "concat": Lowering._concat,
    "take": Lowering._take,
}


def _has_ratios(graph: KernelGraph) -> bool:
    """True if an op of the program or of its block graphs gives 0 for a division by 0."""
    names = {op.name for op in graph.ops}
    names |= {b.fn for op in graph.ops if op.block is not None for b in op.block.ops()}
    return "ratio" in names
