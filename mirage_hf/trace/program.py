"""Write a group of terms as a tensor program, in the form that patterns have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mirage_hf.formats.coding import as_dtype, write_joined
from mirage_hf.graph.kernel import DTensor, KernelGraph, new_kernel_graph
from mirage_hf.trace.groups import Group, is_bias
from mirage_hf.trace.term import NORMS, Term, Weight, weight_and_offset


@dataclass(eq=False)
class GroupProgram:
    """A group's program, and which tensors it takes and gives.

    Attributes:
        graph: The program.
        inputs: The terms of its inputs, in order: values and weights.
        results: For each result its term, the index of an output, and the columns that it is.
    """

    graph: KernelGraph
    inputs: list[Term] = field(default_factory=list)
    results: list[tuple[Term, int, tuple[int, int]]] = field(default_factory=list)


def program_of(group: Group) -> GroupProgram | str:
    """Return the program of a group, or why there is none.

    Casts between floats are left out: kernels compute in float32 and round what they store.
    """
    return _Writer(group).write()


def alike(graph: KernelGraph, operands: Sequence[Any]) -> list[Any]:
    """Return operands in one dtype: float32 if they have several, as Mamba's residuals do."""
    if len({x.dtype for x in operands if isinstance(x, DTensor)}) < 2:
        return [*operands]
    return [as_dtype(graph, x, torch.float32) if isinstance(x, DTensor) else x for x in operands]


def given_operands(norm: Term) -> list[Term]:
    """Return the input of a norm and its weights, without a number that is added to a weight."""
    x, *weights = norm.operands
    return [x, *(weight_and_offset(w)[0] for w in weights)]


def write_norm(
    norm: Term, graph: KernelGraph, operands: Sequence[DTensor], dtype: torch.dtype
) -> DTensor:
    """Add the ops of a norm. A number is added to a weight in float32, as `fragments.normed` does.

    Args:
        norm: The norm.
        graph: The program.
        operands: The tensors of `given_operands`.
        dtype: The dtype of the program's weights.
    """
    offsets = [weight_and_offset(w)[1] for w in norm.operands[1:]]
    if not any(offsets):
        return graph.apply(norm.op, alike(graph, operands), dict(norm.attrs))
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    x, *weights = (as_dtype(graph, t, wide) for t in operands)
    pairs = zip(weights, offsets, strict=True)
    weights = [graph.add(w, offset) if offset else w for w, offset in pairs]
    y = graph.apply(norm.op, [x, *weights], dict(norm.attrs))
    return as_dtype(graph, y, dtype)


class _Writer:
    def __init__(self, group: Group):
        self.group = group
        self.dtype = group.products[0].dtype
        self.graph = new_kernel_graph()
        self.program = GroupProgram(self.graph)
        self.tensors: dict[Any, DTensor] = {}

    def write(self) -> GroupProgram | str:
        group, graph = self.group, self.graph
        own = set(group.terms)
        given = [x for t in group.terms for x in t.terms if x not in own]
        weights = [p.operands[1].weight for p in group.products]
        taken = {self.dtype, torch.float32, *(w.dtype for w in weights)}
        for term in given:
            if term.dtype not in taken and not term.is_constant:
                return f"an input of {term.dtype} beside weights of {self.dtype}"
        if any(p.dtype != self.dtype for p in group.products):
            return "weights of several dtypes"
        packed = len(group.products) > 1 and len(group.results) > 1
        if packed and any(t.dtype != self.dtype for t in group.results):
            return "results of another dtype than the weights"
        first = group.products[0].operands[0]
        source = group.before[0].terms[0] if group.before else first
        self._tensor(source)
        for term in group.before:
            self._compute(term)
        x = self._in(self.dtype, self._tensor(first))
        if packed:
            self._write_packed(x)
        else:
            for product in group.products:
                weight = self._tensor(product.operands[1])
                self.tensors[product] = graph.matmul(x, weight)
                for term in group.after:
                    if is_bias(term) and term.operands[0] is product:
                        self._compute(term)
            for term in group.after:
                if term not in self.tensors:
                    self._compute(term)
            for number, term in enumerate(group.results):
                if term.dtype not in (self.dtype, torch.float32):
                    return "a result of another dtype than the weights"
                graph.mark_output(self._in(term.dtype, self.tensors[term]))
                self.program.results.append((term, number, (0, term.dims[1])))
        return self.program

    def _in(self, dtype: torch.dtype, x: DTensor) -> DTensor:
        return as_dtype(self.graph, x, dtype)

    def _write_packed(self, x: DTensor) -> None:
        """Write products side by side as one, whose output holds all results."""
        group, graph = self.group, self.graph
        weights = [p.operands[1] for p in group.products]
        if weights[0].weight.coded is None:
            weight = graph.concat([self._tensor(w) for w in weights], dim=1)
        else:
            weight = self._decoded([w.weight for w in weights])
        y = graph.matmul(x, weight)
        if group.after:
            of = {t.operands[0]: t for t in group.after}
            biases = [self._tensor(of[p].operands[1]) for p in group.products]
            y = graph.add(*alike(graph, [y, graph.concat(alike(graph, biases), dim=1)]))
            y = self._in(self.dtype, y)
        graph.mark_output(y)
        start = 0
        ends = {t.operands[0]: t for t in group.after} if group.after else {}
        for product in group.products:
            stop = start + product.dims[1]
            self.program.results.append((ends.get(product, product), 0, (start, stop)))
            start = stop

    def _compute(self, term: Term) -> None:
        if term.op in NORMS:
            held = [self._tensor(w) for w in given_operands(term)]
            self.tensors[term] = write_norm(term, self.graph, held, self.dtype)
            return
        operands = list(term.operands)
        if term.op in ("add", "mul") and self._is_given(operands[0]):
            operands.reverse()  # as patterns write sums: what the group computes comes first
        operands = [self._tensor(x) if isinstance(x, Term) else x for x in operands]
        operands = alike(self.graph, operands)
        self.tensors[term] = self.graph.apply(term.op, operands, dict(term.attrs))

    def _is_given(self, x: Any) -> bool:
        return isinstance(x, Term) and x not in self.tensors

    def _tensor(self, term: Term) -> DTensor:
        """Return the tensor of a term. What the group does not compute becomes an input."""
        if term in self.tensors:
            return self.tensors[term]
        if term.is_op and term.is_constant:
            self._compute(term)
            return self.tensors[term]
        key = term.weight.key if term.weight is not None else term
        if key not in self.tensors and term.weight is not None and term.weight.coded is not None:
            self.tensors[key] = self._decoded([term.weight])
        if key not in self.tensors:
            self.tensors[key] = self._input(term)
            self.program.inputs.append(term)
        self.tensors[term] = self.tensors[key]
        return self.tensors[term]

    def _decoded(self, weights: Sequence[Weight]) -> DTensor:
        """Write weights in codes side by side. Each tensor of codes becomes an input."""
        codings = [w.coded.weight.coding for w in weights if w.coded is not None]
        inputs, decoded = write_joined(codings, self.graph)
        held = [codes for w in weights for codes in w.codes]
        for t, codes in zip(inputs, held, strict=True):
            given = codes.tensor
            part = Weight(codes, tuple(given.shape), tuple(given.stride()))
            dims = (given.shape[0], given.shape[-1])
            self.program.inputs.append(Term("weight", (), {}, dims, t.dtype, weight=part))
        return decoded

    def _input(self, term: Term) -> DTensor:
        if term.weight is None:
            return self.graph.new_input(term.dims, term.dtype)
        weight, dtype = term.weight, term.weight.dtype or term.dtype
        stored = self.graph.new_input(weight.shape, dtype, strides=weight.strides, constant=True)
        return as_dtype(self.graph, stored, term.dtype)
