"""A step op, which runs as one in a step: a torch op, or a kernel in place of several of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mirage_hf.trace.cached_attention import CachedAttention
from mirage_hf.trace.program import GroupProgram
from mirage_hf.trace.record import Node, Value
from mirage_hf.trace.regions import Region
from mirage_hf.trace.term import Term
from mirage_hf.trace.terms import Terms

#: Runs a program on its inputs. Outputs may be given: `run(inputs, out)`.
Run = Callable[..., list[Tensor]]

#: Returns what runs a layer's attention, given the number of cache slots. That takes the heads of
#: q, k and v, RoPE's tables, the cached keys and values, bounds, and norms.
AttentionOfSlots = Callable[[int], Callable[..., Tensor]]

#: A tensor of a step: one that torch would make, or the result of a term.
Key = Value | Term


@dataclass(frozen=True)
class RegionRun:
    """What runs a region.

    Attributes:
        run: Runs its program.
        is_in_place: Whether the next state may be written over the state that it updates.
        takes_outputs: Whether it may be given a tensor to write the next state into.
    """

    run: Run
    is_in_place: bool = False
    takes_outputs: bool = False


@dataclass(eq=False)
class StepOp:
    """What runs as one: a torch op, a group by its kernel, or attention by its kernel.

    Attributes:
        nodes: The numbers of its nodes.
        node: The torch op, None for kernels.
        program: The program of a group.
        run: Runs the group's program.
        attention: The attention of a layer, with its appends.
        region: Nodes without products.
    """

    nodes: tuple[int, ...]
    node: Node | None = None
    program: GroupProgram | None = None
    run: Run | None = None
    attention: CachedAttention | None = None
    region: Region | None = None


def source_of(term: Term, terms: Terms) -> Any:
    """Return the recorded tensor that holds what a term stands for."""
    return terms.made[term] if term.is_op else term.source


def is_unmade(term: Term, terms: Terms) -> bool:
    """Return whether no recorded tensor holds the result of a term, as for slices of products."""
    return term.is_op and term not in terms.made


def reads(step_op: StepOp, terms: Terms) -> list[Key]:
    """Return the tensors that a step op reads, inputs and held tensors left out."""
    sources: list[Any]
    if step_op.node is not None:
        sources = [*step_op.node.operands]
    elif (one := step_op.attention) is not None:
        sources = [one.q.rows, one.k.rows, one.v.rows, one.q.cos, one.q.sin]
    elif step_op.region is not None:
        sources = [x.source for x in step_op.region.inputs]
    else:
        assert step_op.program is not None
        sources = []
        for term in step_op.program.inputs:
            if term.weight is not None:
                sources.append(term.weight.source)
            elif is_unmade(term, terms):
                sources.append(term)
            else:
                sources += [term, source_of(term, terms)]
    return [x for x in sources if isinstance(x, (Value, Term))]


def kernel_results(step_op: StepOp, terms: Terms) -> list[Key]:
    """Return what a kernel makes. It may be dropped at once, if nothing reads it."""
    if step_op.region is not None:
        return [result.value for result in step_op.region.results]
    if step_op.program is None:
        return []
    results = [term for term, _, _ in step_op.program.results]
    return [*results, *(terms.made[t] for t in results if t in terms.made)]
