"""Read a router as one op: the choice of experts by the greatest scores.

Routers take softmax of the scores, choose the greatest ones, and normalize them, in some order.
These are up to eight torch ops on small tensors. `with_routers` puts the op `mirage_hf::route` in
their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library

from mirage_hf.trace.record import Input, Meta, Node, Readers, Recording, Value, readers_of
from mirage_hf.trace.sizes import fixed_shape

#: The op's name as nodes have it.
ROUTE = "mirage_hf.route"

#: What is done to all scores before the choice, or to the chosen ones after it.
NOTHING, SOFTMAX, NORMALIZE = 0, 1, 2

library.define(
    "mirage_hf::route",
    "(Tensor scores, int chosen, int first, int then, ScalarType dtype) -> (Tensor, Tensor)",
)


def route(
    scores: Tensor, chosen: int, first: int, then: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Choose experts, and return their weights and indices (rows, chosen).

    Args:
        scores: The scores (rows, experts).
        chosen: How many experts each row chooses.
        first: What is done to all scores: NOTHING or SOFTMAX.
        then: What is done to the chosen ones: NOTHING, SOFTMAX or NORMALIZE.
        dtype: The dtype of weights.
    """
    weights, index = torch.topk(before_choice(scores, first), chosen, -1)
    return after_choice(weights, then).to(dtype), index


def before_choice(scores: Tensor, first: int) -> Tensor:
    """Return what top-k chooses by: the scores in float32 (rows, experts), or their softmax."""
    return F.softmax(scores.float(), -1) if first == SOFTMAX else scores.float()


def after_choice(weights: Tensor, then: int) -> Tensor:
    """Return the weights of chosen experts (rows, chosen), from their scores."""
    if then == SOFTMAX:
        return F.softmax(weights, -1)
    return weights / weights.sum(-1, keepdim=True) if then == NORMALIZE else weights


library.impl("mirage_hf::route", "CompositeExplicitAutograd", route)


def with_routers(recording: Recording) -> Recording:
    """Return a recording in which each router is one op.

    The nodes keep their numbers. Those that the op replaces give its result, or nothing reads them.
    """
    nodes = [*recording.nodes]
    readers = readers_of(nodes)
    for number, node in enumerate(nodes):
        if node.name == "aten.topk" and (found := _router(recording, readers, number)):
            _replace(nodes, found)
    return replace(recording, nodes=nodes)


@dataclass(frozen=True)
class _Router:
    """The nodes of a router.

    Attributes:
        topk: Chooses.
        scores: What it chooses by, before `first`.
        chosen: How many it chooses.
        first: What is done to all scores.
        then: What is done to the chosen ones.
        same: Nodes whose result is that of the op, the last of which has its dtype.
        weights: What is known of the weights.
    """

    topk: int
    scores: Value | Input
    chosen: int
    first: int
    then: int
    same: tuple[int, ...]
    weights: Meta


def _router(recording: Recording, readers: Readers, topk: int) -> _Router | None:
    nodes = recording.nodes
    scores, chosen, *how = nodes[topk].args
    if nodes[topk].kwargs or how not in ([], [-1], [1], [-1, True], [1, True]):
        return None
    first, scores = _softmax_before(recording, readers, topk, scores)
    if len(fixed_shape(recording.meta(scores)) or ()) != 2:
        return None
    then, same = _after(nodes, readers, Value(topk))
    last = Value(same[-1]) if same else Value(topk)
    users = readers.get(last, [])
    if len(users) == 1 and nodes[users[0]].name == "aten._to_copy":
        same, last = (*same, *users), Value(users[0])
    if not recording.meta(last).dtype.is_floating_point:
        return None
    return _Router(topk, scores, chosen, first, then, same, recording.meta(last))


def _softmax_before(recording: Recording, readers: Readers, reader: int, x: Any) -> tuple[int, Any]:
    """Return whether softmax made what a node reads, and what that was made from."""
    if not isinstance(x, Value):
        return NOTHING, x
    node = recording.nodes[x.node]
    if node.name != "aten._softmax" or readers[x] != [reader] or node.args[1] not in (-1, 1):
        return NOTHING, x
    source = node.args[0]
    if recording.meta(x).dtype != torch.float32:
        return NOTHING, x
    made = recording.nodes[source.node] if isinstance(source, Value) else None
    if made is not None and made.name == "aten._to_copy" and readers[source] == [x.node]:
        source = made.args[0]
    return SOFTMAX, source


def _after(nodes: Sequence[Node], readers: Readers, chosen: Value) -> tuple[int, tuple[int, ...]]:
    """Return what is done to the chosen scores, and the nodes that do it."""
    users = readers.get(chosen, [])
    if len(users) == 1 and nodes[users[0]].name == "aten._softmax":
        return (SOFTMAX, tuple(users)) if nodes[users[0]].args[1] in (-1, 1) else (NOTHING, ())
    if len(users) != 2 or nodes[users[0]].name != "aten.sum":
        return NOTHING, ()
    total, division = users
    sums = nodes[total].args[1:] in (([-1], True), ([1], True)) and not nodes[total].kwargs
    divides = nodes[division].name in ("aten.div", "aten.div_")
    if not (sums and divides and nodes[division].args == (chosen, Value(total))):
        return NOTHING, ()
    if readers.get(Value(total)) != [division]:
        return NOTHING, ()
    return NORMALIZE, (division,)


def _replace(nodes: list[Node], found: _Router) -> None:
    """Put the op in the place of a router."""
    topk = nodes[found.topk]
    args = found.scores, found.chosen, found.first, found.then, found.weights.dtype
    op, where = torch.ops.mirage_hf.route.default, topk.where
    nodes[found.topk] = Node(op, args, {}, [found.weights, topk.outputs[1]], where)
    view = torch.ops.aten.alias.default
    for n in found.same:
        nodes[n] = Node(view, (Value(found.topk),), {}, [found.weights], nodes[n].where)
