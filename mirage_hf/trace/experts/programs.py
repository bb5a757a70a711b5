"""The programs of recorded experts: gate, up and function, then down, routing weights and sums."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mirage_hf.errors import GraphError, Rejected
from mirage_hf.formats.coding import as_dtype
from mirage_hf.graph.kernel import DTensor, KernelGraph, new_kernel_graph
from mirage_hf.trace.experts.form import ExpertsForm, Linear
from mirage_hf.trace.experts.gate import gate
from mirage_hf.trace.experts.op import EXPERTS, MOST_TOKENS, form_named
from mirage_hf.trace.experts.writer import ExpertsWriter, ParameterPart
from mirage_hf.trace.fake_mode import FakeOnceMode
from mirage_hf.trace.program import alike, given_operands, write_norm
from mirage_hf.trace.record import Input, Readers, Recording, TraceError, Value, readers_of
from mirage_hf.trace.regions import Operand, Region, Result
from mirage_hf.trace.sizes import fixed_shape
from mirage_hf.trace.step_ops import is_unmade, source_of
from mirage_hf.trace.term import Term
from mirage_hf.trace.terms import Terms
from mirage_hf.trace.torch_ops import SAME_TENSOR

#: Sums that a program of experts may end with: a residual, and a shared expert.
MOST_ADDED = 2


@dataclass(frozen=True, eq=False, kw_only=True)
class ParameterSlice(Operand):
    """A part of a parameter of experts, as an input of a program. Nothing is copied.

    Attributes:
        part: The part.
    """

    part: ParameterPart

    def of(self, x: Tensor) -> Tensor:
        """Return the program's input."""
        return self.part.of(x)


def experts_with_programs(recording: Recording) -> list[int]:
    """Return the nodes of experts of at most MOST_TOKENS tokens."""
    return [
        number
        for number, node in enumerate(recording.nodes)
        if node.name == EXPERTS and recording.meta(node.args[0]).shape[0] <= MOST_TOKENS
    ]


def experts_that_repeat_norms(recording: Recording) -> list[int]:
    """Return the nodes of experts whose first program may begin with the norm before them.

    Experts in codes do not. With the norm in front, gate and up of gpt-oss in MXFP4 took 46.9 µs in
    place of 27.2 (H200).
    """
    return [
        number
        for number in experts_with_programs(recording)
        if isinstance(form := _form_of(recording, number), ExpertsForm) and not form.is_coded
    ]


def _form_of(recording: Recording, number: int) -> ExpertsForm | Rejected:
    x, *_, name = recording.nodes[number].args
    return form_named(name, recording.meta(x).dtype)


def find_experts(terms: Terms, ancestors: Sequence[int], taken: Collection[int]) -> list[Region]:
    """Return the programs of chosen experts, two for each of `experts_with_programs`.

    The first one begins with the norm before the experts, if they repeat it and nothing else reads
    this norm. It ends before the second linear of an expert. The second one ends with the sums that
    follow the experts. A search of both as one program would take a minute.

    Args:
        terms: The terms of a recording.
        ancestors: For each node the nodes that must run before it, as bits (`order.ancestors`).
        taken: Nodes that other kernels run.
    """
    recording = terms.recording
    readers = readers_of(recording.nodes)
    found = []
    with closing(FakeOnceMode()) as mode:
        for number in experts_with_programs(recording):
            sums = _sums_after(recording, ancestors, readers, number, taken)
            try:
                found += _Writer(terms, number, sums, mode).write()
            except (GraphError, TraceError):
                continue
    return found


class Sum(NamedTuple):
    """A sum that follows experts: its node, and what it adds."""

    node: int
    addend: Value | Input


def _sums_after(
    recording: Recording,
    ancestors: Sequence[int],
    readers: Readers,
    number: int,
    taken: Collection[int],
) -> list[Sum]:
    """Return the sums that follow experts, if nothing else reads what they add to."""
    found: list[Sum] = []
    value = Value(number)
    while len(found) < MOST_ADDED and len(users := readers.get(value, [])) == 1:
        (user,) = users
        node, result = recording.nodes[user], Value(user)
        if node.name in SAME_TENSOR:
            if not _are_alike(recording, value, result):
                break
        else:
            addend = _addend(recording, user, value)
            if addend is None or user in taken:
                break
            if isinstance(addend, Value):
                needed = ancestors[addend.node] | 1 << addend.node
                if needed >> number & 1:  # it is computed from the experts
                    break
            found.append(Sum(user, addend))
        value = result
    return found


def _addend(recording: Recording, number: int, value: Value) -> Value | Input | None:
    """Return what a node adds to a value, None if it is no sum of two like tensors."""
    node, meta = recording.nodes[number], recording.meta
    others = [x for x in node.args if x != value]
    if node.name != "aten.add" or node.kwargs or len(others) != 1:
        return None
    (other,) = others
    if not isinstance(other, (Value, Input)) or meta(other).storage in recording.changing:
        return None
    return other if _are_alike(recording, value, other, Value(number)) else None


def _are_alike(recording: Recording, *tensors: Value | Input) -> bool:
    """Return whether tensors have one dtype and one known number of elements."""
    metas = [recording.meta(x) for x in tensors]
    shapes = [fixed_shape(meta) for meta in metas]
    elements = {None if shape is None else math.prod(shape) for shape in shapes}
    return len({meta.dtype for meta in metas}) == len(elements) == 1 and None not in elements


class _Writer:
    """Writes the two programs of one node: experts, their weights, and the sums that follow."""

    def __init__(self, terms: Terms, number: int, sums: Sequence[Sum], mode: FakeOnceMode):
        recording = terms.recording
        self.terms, self.recording = terms, recording
        self.number, self.sums, self.mode = number, sums, mode
        node = recording.nodes[number]
        self.x, self.index, self.weights, self.parameters, _ = node.args
        form = _form_of(recording, number)
        if not isinstance(form, ExpertsForm):
            raise TraceError("the experts are gone, or have other weights now")
        self.form = form
        self.held = {id(x): held for x, held in zip(form.parameters, self.parameters, strict=True)}
        self.rows, self.width = recording.meta(self.x).shape
        self.chosen = recording.meta(self.index).shape[-1]
        self.dtype = recording.meta(self.x).dtype

    def write(self) -> list[Region]:
        """Return the two programs as regions.

        Raises:
            GraphError: Its shapes or dtypes do not fit.
            TraceError: The function between the two linears is of another form.
        """
        between = Value(self.number, 1)  # a result that the recorded node does not have
        return [self._first_program(between), self._second_program(between)]

    def _begin(self) -> None:
        """Begin a program."""
        self.graph: KernelGraph = new_kernel_graph()
        self.inputs: list[Operand] = []
        e = self._given(self.index, (self.rows, self.chosen), torch.int64)
        self.chosen_linears = ExpertsWriter(self.graph, e, self._note)

    def _first_program(self, between: Value) -> Region:
        self._begin()
        linear = self.form.first
        norm = self.terms.repeated_norm(self.x)
        if norm is not None and is_unmade(norm.operands[0], self.terms):
            norm = None  # of columns of a product, which torch ops norm
        dims = self.rows, 1, 1, self.width
        x = self._given(self.x, dims, self.dtype) if norm is None else self._normed(norm, dims)
        if self.form.scales_inputs:
            x = as_dtype(self.graph, self._weighed(x), self.dtype)
        columns = partial(self.chosen_linears.linear, x, linear)
        h = gate(self.form, self.dtype, self.graph, columns, self.mode)
        h = as_dtype(self.graph, h, self.dtype)
        self.graph.mark_output(h)
        return self._region((self.number,), between, h.dims, h.dims, linear)

    def _second_program(self, between: Value) -> Region:
        self._begin()
        graph, rows, meta, linear = self.graph, self.rows, self.recording.meta, self.form.second
        h = self._given(between, (rows, self.chosen, 1, linear.columns), self.dtype)
        y = self.chosen_linears.linear(h, linear)
        out = graph.reduction(y if self.form.scales_inputs else self._weighed(y), 1)
        for _, source in self.sums:
            addend = self._given(source, (rows, 1, 1, self.width), meta(source).dtype)
            out = graph.add(*alike(graph, [addend, out]))
        graph.mark_output(as_dtype(graph, out, self.dtype))
        nodes = (self.number, *(n for n, _ in self.sums))
        value = Value(nodes[-1])
        shape = tuple(fixed_shape(meta(value)) or ())
        return self._region(nodes, value, (rows, self.width), shape, linear)

    def _normed(self, norm: Term, dims: tuple[int, ...]) -> DTensor:
        """Return the norm before the experts, with its weights as inputs."""
        x, *weights = given_operands(norm)
        tensors = [self._given(source_of(x, self.terms), dims, x.dtype)]
        for weight in weights:
            assert weight.weight is not None
            row = 1, self.width
            self.inputs.append(Operand(weight.weight.source, row, (0, 1), row))
            tensors.append(self.graph.new_input(row, weight.dtype, constant=True))
        y = write_norm(norm, self.graph, tensors, self.dtype)
        return as_dtype(self.graph, y, self.dtype)

    def _weighed(self, x: DTensor) -> DTensor:
        """Return a tensor of each chosen expert times its weight."""
        dims, dtype = (self.rows, self.chosen, 1, 1), self.recording.meta(self.weights).dtype
        return self.graph.mul(*alike(self.graph, [x, self._given(self.weights, dims, dtype)]))

    def _region(
        self,
        nodes: tuple[int, ...],
        value: Value,
        sizes: tuple[int, ...],
        shape: tuple[int, ...],
        linear: Linear,
    ) -> Region:
        result = Result(value, sizes, tuple(range(len(sizes))), sizes, sizes, shape)
        whole = sum(x.nbytes for x in linear.parameters)
        experts = len(linear.tensors[0])
        reads = whole * min(self.rows * self.chosen, experts) // experts
        return Region(None, nodes, self.graph, self.inputs, [result], reads=reads)

    def _note(self, tensor: Tensor, part: ParameterPart) -> None:
        self.inputs.append(ParameterSlice(self.held[id(tensor)], (), (), (), part=part))

    def _given(self, source: Any, dims: tuple[int, ...], dtype: torch.dtype) -> DTensor:
        is_between = source == Value(self.number, 1)
        self.inputs.append(Operand(source, dims, tuple(range(len(dims))), dims, is_between))
        return self.graph.new_input(dims, dtype)
