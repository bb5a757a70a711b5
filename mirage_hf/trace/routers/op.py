"""The op `mirage_hf::route`: a router, which chooses experts by the greatest scores.

A router applies functions to a row of scores, may hide groups of experts, chooses the greatest
scores, and makes weights of them. The op itself runs these steps as torch ops. In traced steps on a
GPU, one generated kernel runs them (text.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, library

from mirage_hf.trace.routers.steps import Local, Router

#: The op's name as nodes have it.
ROUTE = "mirage_hf.route"

library.define("mirage_hf::route", "(Tensor[] inputs, int number) -> Tensor[]")

#: The routers that nodes name by their numbers. Equal layers share one.
_routers: dict[Router, int] = {}
_by_number: list[Router] = []


def router_of(number: int) -> Router:
    """Return the router that a node names."""
    return _by_number[number]


def number_of(router: Router) -> int:
    """Return the number by which nodes name a router."""
    if router not in _routers:
        _by_number.append(router)
        _routers[router] = len(_by_number) - 1
    return _routers[router]


def route(inputs: Sequence[Tensor], number: int) -> list[Tensor]:
    """Run the steps of a router by torch, as the model does."""
    router = router_of(number)
    made: dict[Local, Tensor] = {Local(-1, n): x for n, x in enumerate(inputs)}

    for n, step in enumerate(router.steps):
        args = [_given(x, made) for x in step.args]
        result = step.op(*args, **{name: _given(x, made) for name, x in step.kwargs})
        results = result if isinstance(result, (tuple, list)) else [result]
        made |= {Local(n, k): x for k, x in enumerate(results)}
    return [made[x] for x in router.results]


def _given(x: Any, made: Mapping[Local, Tensor]) -> Any:
    """Return an argument of a step with tensors in place of their names."""
    if isinstance(x, Local):
        return made[x]
    return [_given(each, made) for each in x] if isinstance(x, tuple) else x


library.impl("mirage_hf::route", "CompositeExplicitAutograd", route)
