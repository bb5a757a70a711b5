"""Read recorded torch ops as terms.

A term is one op over row-wise tensors: (rows, width), (rows, 1), or a weight. Views that keep this
form and casts between floats are no ops here. An op without a term runs as the torch op that it is.
"""

from __future__ import annotations

from collections.abc import Collection

from mirage_hf.trace.lowerings import lower
from mirage_hf.trace.record import Held, Input, Node, Recording, Value, readers_of
from mirage_hf.trace.sizes import fixed_shape
from mirage_hf.trace.term import NORMS, Term, Weight, is_coded, is_product, weight_and_offset
from mirage_hf.trace.term_operands import ColumnSlice, TermOperands
from mirage_hf.trace.torch_ops import SAME_TENSOR

__all__ = ["Term", "Terms", "Weight"]

#: Ops whose results are columns of their operand, if they work along its last dim.
_SLICES = ("aten.slice", "aten.narrow")
_SPLITS = ("aten.split", "aten.split_with_sizes")


class Terms:
    """The terms of a recording.

    Args:
        recording: The recording.
        rows: The rows of row-wise tensors.
        repeating: Nodes whose programs compute a norm that they read again (`repeated_norm`).

    Attributes:
        made: The tensor that holds a term's result as torch made it.
    """

    def __init__(self, recording: Recording, rows: int, repeating: Collection[int] = ()):
        self.recording, self.rows = recording, rows
        self._repeating = repeating
        self.made: dict[Term, Value] = {}
        self._operands = TermOperands(recording, rows)
        for number, node in enumerate(recording.nodes):
            self._read(number, node)
        self._needed = self._find_needed()

    @property
    def of_value(self) -> dict[Value, Term]:
        """The term of each tensor that has one. Several tensors may have one term."""
        return self._operands.of_value

    @property
    def constant(self) -> set[int]:
        """The nodes that are views of weights."""
        return self._operands.constant

    def all(self) -> list[Term]:
        """Return every computed term, in the order of the recording."""
        return [*self._needed]

    def repeated_norm(self, x: object) -> Term | None:
        """Return the norm that makes a tensor, if every reader computes it itself.

        None if a reader needs the stored norm.
        """
        term = self.of_value.get(x) if isinstance(x, Value) else None
        return term if term is not None and _may_be_repeated(term) and not term.escapes else None

    # -- nodes

    def _read(self, number: int, node: Node) -> None:
        if number in self.constant or node.written:
            return
        if node.name in SAME_TENSOR:
            self._read_view(number, node)
        elif node.name in _SLICES or node.name in _SPLITS:
            self._read_slices(number, node)
        else:
            self._read_op(number, node)

    def _read_op(self, number: int, node: Node) -> None:
        """Note the term of an op, if it has one and gives a row-wise tensor."""
        meta = node.outputs[0] if node.outputs else None
        if meta is None or not meta.dtype.is_floating_point:
            return
        if meta.storage in self.recording.changing:
            return
        term, shape = lower(self._operands, node), fixed_shape(meta)
        if term is None or shape is None:
            return
        if self._operands.row_form(shape) != term.dims and not term.is_constant:
            return
        term.node, term.dtype = number, meta.dtype
        for operand in term.terms:  # the product inside addmm
            if operand.is_op and operand.node < 0:
                operand.node = number
        value = Value(number)
        self.of_value[value], self.made[term] = term, value

    def _read_view(self, number: int, node: Node) -> None:
        """Give a view the term of its operand, if it keeps the form of rows."""
        source, meta = node.args[0], node.outputs[0]
        if not isinstance(source, (Value, Held, Input)) or meta is None:
            return
        shape = fixed_shape(meta)
        if shape is None or not meta.dtype.is_floating_point:
            return
        if isinstance(source, Input) and meta.dtype != self.recording.meta(source).dtype:
            return
        slices, dims = self._operands.slices, self._operands.row_form(shape)
        if source in slices and dims is not None:
            if shape[-1] == slices[source].width:
                slices[Value(number)] = slices[source]
            return
        known = self.of_value.get(source) if isinstance(source, Value) else None
        if known is None and (dims is not None or node.name == "aten._to_copy"):
            known = self._operands.operand(source)
        if known is not None and (known.is_constant or dims == known.dims):
            self.of_value[Value(number)] = known

    def _read_slices(self, number: int, node: Node) -> None:
        """Note which columns of a product each result is."""
        source = node.args[0]
        term = self.of_value.get(source) if isinstance(source, Value) else None
        if term is None or not is_product(term) or is_coded(term):
            return
        shape = fixed_shape(self.recording.meta(source))
        if shape is None:
            return
        if node.name in _SLICES:
            dim = node.args[1] if len(node.args) > 1 else 0
            start = node.args[2] if len(node.args) > 2 else 0
            if len(node.args) > 4 and node.args[4] != 1:
                return
        else:
            dim, start = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0), 0
        if dim not in (-1, len(shape) - 1) or not isinstance(start, int):
            return
        start = start + shape[-1] if start < 0 else start
        for output, meta in enumerate(node.outputs):
            assert meta is not None
            width = meta.shape[-1]
            if self._operands.row_form(meta.shape) is None:
                return
            self._operands.slices[Value(number, output)] = ColumnSlice(term, start, start + width)
            start += width

    # -- which terms are needed

    def _find_needed(self) -> list[Term]:
        """Return the terms that something else needs, and note the users of each term."""
        reads = _OtherReads(self._operands, self._repeating)
        # later values first, so that the recursion stays flat
        for value in reversed(self.of_value):
            reads.escapes(value)
        for term, value in [*self.made.items()]:
            if not reads.escapes(value):
                continue
            slices = reads.only_slices(value)
            if slices is None:
                term.escapes = True
                continue
            for one, x in slices.items():
                one.escapes = True
                self.made[one] = x
        needed: dict[Term, None] = {}

        def need(term: Term) -> None:
            if term.is_op and term not in needed:
                for operand in term.terms:
                    need(operand)
                    operand.users.append(term)
                needed[term] = None

        for term in self.made:
            if term.escapes:
                need(term)
        return sorted(needed, key=_place)


class _OtherReads:
    """Which tensors are read by something that is no term."""

    def __init__(self, operands: TermOperands, repeating: Collection[int]):
        self._operands, self._nodes = operands, operands.recording.nodes
        self._repeating = repeating
        self._readers = readers_of(self._nodes)
        self._known: dict[Value, bool] = {}

    def escapes(self, value: Value) -> bool:
        """Return whether something that is no term reads a tensor, or a view of it."""
        if value not in self._known:
            readers = self._readers.get(value, ())
            term = self._operands.of_value.get(value)
            if term is not None and _may_be_repeated(term):
                readers = [n for n in readers if n not in self._repeating]
            self._known[value] = any(map(self._passes_on, readers))
        return self._known[value]

    def _passes_on(self, number: int) -> bool:
        """Return whether a reader is no term, or a view that something else reads."""
        of_value, slices, node = self._operands.of_value, self._operands.slices, self._nodes[number]
        outputs = [Value(number, n) for n, meta in enumerate(node.outputs) if meta is not None]
        if any(value in slices for value in outputs) or node.name in SAME_TENSOR:
            known = [v for v in outputs if v in slices or v in of_value]
            return len(known) < len(outputs) or any(map(self.escapes, known))
        return not any(value in of_value for value in outputs)

    def only_slices(self, value: Value) -> dict[Term, Value] | None:
        """Return the slices of a product that escape, if only terms read all others.

        Args:
            value: What holds a term, and escapes.

        Returns:
            The tensor of each slice that escapes. None if all columns of the product do.
        """
        of_value, slices = self._operands.of_value, self._operands.slices
        whole, waiting = of_value[value], [value]
        found: list[Value] = []
        while waiting:
            for number in self._readers.get(waiting.pop(), ()):
                outputs = self._nodes[number].outputs
                for x in (Value(number, n) for n in range(len(outputs))):
                    if of_value.get(x) is whole:
                        waiting.append(x)  # a view
                    elif x in slices:
                        found.append(x)
                    else:
                        return None
        escaping = {self._operands.slice_of(x): x for x in found if self.escapes(x)}
        columns = {n for x in escaping.values() for n in range(slices[x].start, slices[x].stop)}
        if len(escaping) < sum(map(self.escapes, found)) or len(columns) == whole.dims[1]:
            return None
        return escaping


def _may_be_repeated(term: Term) -> bool:
    """Return whether a term is a norm of what is computed, by weights, maybe plus a number."""
    if term.op not in NORMS:
        return False
    x, *weights = term.operands
    has_weights = all(weight_and_offset(w)[0].weight is not None for w in weights)
    return has_weights and not x.is_constant


def _place(term: Term) -> tuple[int, int]:
    """Return where a term comes: slices of one product in the order of their columns."""
    weights = [x.weight for x in term.terms if x.weight is not None and x.weight.columns]
    return term.node, weights[0].columns[0] if weights and weights[0].columns else 0
