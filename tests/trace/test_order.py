"""Which nodes must run before which, while groups of them run as one."""

from __future__ import annotations

import random

from mirage_hf.trace.order import Order


def reached(edges: dict[int, set[int]], start: int) -> set[int]:
    """Return what a node leads to, itself only if it is on a cycle."""
    found: set[int] = set()
    waiting = [*edges[start]]
    while waiting:
        n = waiting.pop()
        if n not in found:
            found.add(n)
            waiting += edges[n]
    return found


def test_groups_need_what_their_members_need() -> None:
    """Members of a group need each other. A walk along all needs finds what a node needs."""
    r = random.Random(0)
    for _ in range(300):
        size = r.randint(3, 30)
        before = [set(r.sample(range(n), min(n, r.randint(0, 3)))) for n in range(size)]
        order, edges = Order(before), {n: {*needs} for n, needs in enumerate(before)}
        free = [*range(size)]
        while free and r.random() < 0.8:
            begin = r.randrange(len(free))
            group = free[begin : begin + r.randint(1, 5)]
            del free[begin : begin + len(group)]
            order.run_together(group)
            for n in group:
                edges[n] |= {*group}
            found = [bits(needed) for needed in order.needed]
            assert found == [reached(edges, n) for n in range(size)]


def bits(needed: int) -> set[int]:
    return {n for n in range(needed.bit_length()) if needed >> n & 1}
