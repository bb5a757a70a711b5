"""A search by brute force. It shares only the cost of one kernel with the core.

It rewrites expression DAGs breadth-first with a few textbook rules, to closure or up to a cap. That
gives ways to compute a program. For each way it tries all plans:

- every set of values that are stored, - every grouping of these into kernels, - for each kernel,
every choice of the stored values that it reads. It computes the others again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product

from mirage_hf import _core

LEAVES = ("input", "constant")


class Terms:
    """A table that holds each expression once.

    An expression is (op, its axis, leaf or function, arguments). Sums and products are unordered.
    """

    def __init__(self, core: _core.Program):
        self.core = core
        self.terms: list[tuple[str, int, tuple[int, ...]]] = []
        self.axes: list[int] = []
        self.number: list[bool] = []
        self.known: dict[tuple[str, int, tuple[int, ...]], int] = {}
        own: list[int] = []
        for k, n in enumerate(core.nodes):
            op = n.op.name
            what = (
                k
                if op in LEAVES
                else n.axis
                if op in ("sum", "max")
                else n.symbol
                if op == "opaque"
                else -1
            )
            own.append(self(op, what, *(own[a] for a in n.args)))
        self.start = tuple(own[o] for o in core.outputs)

    def __call__(self, op: str, what: int, *args: int) -> int:
        term = (op, what, tuple(sorted(args)) if op in ("add", "mul") else args)
        if term not in self.known:
            self.known[term] = len(self.terms)
            self.terms.append(term)
            axes = (
                sum(1 << a for a in {*self.core.nodes[what].index} if a >= 0)
                if op == "input"
                else 0
            )
            for a in args:
                axes |= self.axes[a]
            self.axes.append(axes & ~(1 << what) if op in ("sum", "max") else axes)
            self.number.append(op != "input" and all(self.number[a] for a in args))
        return self.known[term]

    # -- rules: what an expression equals ---------------------------------------------------------

    def equals(self, t: int) -> Iterator[int]:
        op, what, args = self.terms[t]
        make = self
        if op in ("add", "mul"):
            for a, b in (args, args[::-1]):
                inner, over, parts = self.terms[a]
                if inner == op:  # (c·d)·b = c·(d·b)
                    for c, d in (parts, parts[::-1]):
                        yield make(op, -1, c, make(op, -1, d, b))
                if inner == {"add": "sub", "mul": "div"}[op]:  # c/d·b = c·b/d = c·(b/d)
                    c, d = parts
                    yield make(inner, -1, make(op, -1, c, b), d)
                    yield make(op, -1, c, make(inner, -1, b, d))
                if op == "mul" and inner in ("add", "sub"):  # (c + d)·b = c·b + d·b
                    yield make(inner, -1, *(make("mul", -1, c, b) for c in parts))
                if op == "mul" and inner == "sum" and not self.axes[b] >> over & 1:
                    yield make("sum", over, make("mul", -1, parts[0], b))  # (Σ c)·b = Σ c·b
        if op in ("sub", "div"):
            a, b = args
            back = {"sub": "add", "div": "mul"}[op]
            (first, over, c), (second, _, d) = self.terms[a], self.terms[b]
            if first == back:  # c·d/b = c·(d/b)
                for x, y in (c, c[::-1]):
                    yield make(back, -1, x, make(op, -1, y, b))
            if first == op:  # c/d/b = c/(d·b) = c/b/d
                yield make(op, -1, c[0], make(back, -1, c[1], b))
                yield make(op, -1, make(op, -1, c[0], b), c[1])
            if second == back:  # a/(c·d) = a/c/d
                for x, y in (d, d[::-1]):
                    yield make(op, -1, make(op, -1, a, x), y)
            if second == op:  # a/(c/d) = a·d/c
                yield make(op, -1, make(back, -1, a, d[1]), d[0])
            if op == "div" and first in ("add", "sub"):  # (c + d)/b = c/b + d/b
                yield make(first, -1, *(make("div", -1, x, b) for x in c))
            if op == "div" and first == "sum" and not self.axes[b] >> over & 1:
                yield make("sum", over, make("div", -1, c[0], b))  # (Σ c)/b = Σ c/b
        if op in ("add", "sub"):
            (first, over, c), (second, other, d) = (self.terms[a] for a in args)
            if first == second == "mul":  # c·x + c·y = c·(x + y)
                for (x, y), (u, v) in product((c, c[::-1]), (d, d[::-1])):
                    if x == u:
                        yield make("mul", -1, x, make(op, -1, y, v))
            if first == second == "div" and c[1] == d[1]:
                yield make("div", -1, make(op, -1, c[0], d[0]), c[1])
            if first == second == "sum" and over == other:
                yield make("sum", over, make(op, -1, c[0], d[0]))
        if op == "sum":
            inner, over, parts = self.terms[args[0]]
            if inner == "mul":  # Σ c·b = (Σ c)·b where b does not carry the axis
                for c, b in (parts, parts[::-1]):
                    if not self.axes[b] >> what & 1:
                        yield make("mul", -1, make("sum", what, c), b)
            if inner == "div" and not self.axes[parts[1]] >> what & 1:
                yield make("div", -1, make("sum", what, parts[0]), parts[1])
            if inner == "sum":
                yield make("sum", over, make("sum", what, parts[0]))
            if inner in ("add", "sub") and all(self.axes[c] >> what & 1 for c in parts):
                yield make(inner, -1, *(make("sum", what, c) for c in parts))
        if op == "exp" and self.terms[args[0]][0] in ("add", "sub"):  # e^(c+d) = e^c·e^d
            inner, _, parts = self.terms[args[0]]
            yield make(
                {"add": "mul", "sub": "div"}[inner], -1, *(make("exp", -1, c) for c in parts)
            )
        if op in ("mul", "div") and all(self.terms[a][0] == "exp" for a in args):
            yield make(
                "exp",
                -1,
                make({"mul": "add", "div": "sub"}[op], -1, *(self.terms[a][2][0] for a in args)),
            )

    def below(self, roots: Sequence[int]) -> list[int]:
        """Return all terms that `roots` are computed from, arguments first."""
        found: dict[int, None] = {}

        def visit(t: int) -> None:
            if t not in found:
                for a in self.terms[t][2]:
                    visit(a)
                found[t] = None

        for r in roots:
            visit(r)
        return list(found)

    def replaced(self, roots: Sequence[int], old: int, new: int) -> tuple[int, ...]:
        changed = {old: new}
        for t in self.below(roots):
            op, what, args = self.terms[t]
            if t not in changed and any(changed.get(a, a) != a for a in args):
                changed[t] = self(op, what, *(changed.get(a, a) for a in args))
        return tuple(changed.get(r, r) for r in roots)

    def ways(self, cap: int) -> tuple[list[tuple[int, ...]], bool]:
        """Return ways to compute the outputs, and whether these are all.

        The program's own way comes first.
        """
        known = {self.start: None}
        queue = [self.start]
        for way in queue:
            for t in self.below(way):
                for other in self.equals(t):
                    new = self.replaced(way, t, other)
                    if new not in known:
                        if len(known) == cap:
                            return list(known), False
                        known[new] = None
                        queue.append(new)
        return list(known), True


@dataclass(frozen=True)
class Plan:
    """A plan: its cost in µs, its way to compute the outputs, and its kernels as text.

    The text of a kernel says what it reads and stores.
    """

    cost: float
    way: tuple[int, ...] = ()
    kernels: tuple[str, ...] = ()
    text: str = ""


class _Way:
    """One way to compute the outputs, as a program of the core."""

    def __init__(self, terms: Terms, way: tuple[int, ...], limits: _core.Limits):
        self.order = terms.below(way)
        at = {t: k for k, t in enumerate(self.order)}
        self.args = [tuple(at[a] for a in terms.terms[t][2]) for t in self.order]
        self.outputs = list(dict.fromkeys(at[t] for t in way))
        self.cuts = [
            k
            for k, t in enumerate(self.order)
            if terms.terms[t][0] not in LEAVES and not terms.number[t]
        ]
        self.limits, self.memo = limits, {}
        self.program = _core.Program()
        self.program.axes = terms.core.axes
        nodes = []
        for k, t in enumerate(self.order):
            op, what, _ = terms.terms[t]
            if op in LEAVES:
                nodes.append(terms.core.nodes[what])
                continue
            n = _core.Node()
            n.op, n.args = getattr(_core.Op, op), list(self.args[k])
            if op in ("sum", "max"):
                n.axis = what
            if op == "opaque":
                n.symbol = what
            nodes.append(n)
        self.program.nodes = nodes
        self.program.outputs = [at[t] for t in way]

    def reads(self, outputs: frozenset[int], stored: frozenset[int]) -> frozenset[int]:
        need = set(outputs)
        for k in range(len(self.order) - 1, -1, -1):
            if k in need and k not in stored:
                need |= {*self.args[k]}
        return frozenset(need & stored)

    def cost(
        self,
        outputs: frozenset[int],
        final: frozenset[int],
        stored: frozenset[int],
        in_parts: frozenset[int],
    ) -> float:
        key = (outputs, final, stored)
        if key not in self.memo:
            self.memo[key] = _core.kernel_costs(
                self.program, self.limits, sorted(outputs), sorted(final), sorted(stored)
            )
        return min((c for c, parts in self.memo[key] if in_parts <= {*parts}), default=float("inf"))

    def plans(
        self, best: float, least: float, max_kernels: int, max_cuts: int
    ) -> Iterator[tuple[float, tuple[str, ...]]]:
        """Yield plans that cost less than `best`, each cheaper than the one before.

        No kernel costs less than `least`.
        """
        most = min(max_kernels, int(best / least))
        finals = frozenset(self.outputs)
        for size in range(max_cuts + 1 if most > 1 else 1):
            for cuts in combinations(self.cuts, size):
                items = [(n, False) for n in cuts] + [(n, True) for n in self.outputs]
                for group in _groups(len(items), most):
                    count = max(group) + 1
                    if size == 0 and count > 1 and len(items) < 2:
                        continue
                    total, kernels = self._plan(cuts, finals, items, group, count, best, least)
                    if total < best:
                        best = total
                        yield total, kernels

    def _plan(self, cuts, finals, items, group, count, best, least):
        owner = {n: group[i] for i, (n, final) in enumerate(items) if not final}
        options = []
        for g in range(count):
            outputs = frozenset(n for i, (n, _) in enumerate(items) if group[i] == g)
            final = frozenset(n for i, (n, f) in enumerate(items) if group[i] == g and f)
            in_parts = frozenset(
                n
                for i, (n, f) in enumerate(items)
                if group[i] == g and not f and n in finals and n not in final
            )
            others = [n for n in cuts if owner[n] != g]
            mine = {}
            for chosen in (c for r in range(len(others) + 1) for c in combinations(others, r)):
                reads = self.reads(outputs, frozenset(chosen))
                if len(reads) == len(chosen):
                    mine[reads] = self.cost(outputs, final, reads, in_parts)
            options.append(
                sorted(((c, reads, outputs) for reads, c in mine.items()), key=lambda o: o[0])
            )
            if not mine or options[-1][0][0] + least * (count - 1) >= best:
                return float("inf"), ()
        found, kernels = float("inf"), ()
        for choice in product(*options):
            total = sum(c for c, _, _ in choice)
            if total >= min(best, found) or not {*cuts} <= frozenset().union(
                *(r for _, r, _ in choice)
            ):
                continue
            done: set[int] = set()
            while (
                more := {g for g in range(count) if all(owner[n] in done for n in choice[g][1])}
                - done
            ):
                done |= more
            if len(done) == count:
                found = total
                kernels = tuple(
                    f"{c:.2f}: stores {sorted(o)} reads {sorted(r)}" for c, r, o in choice
                )
        return found, kernels


def _groups(count: int, most: int) -> Iterator[tuple[int, ...]]:
    def grow(prefix: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(prefix) == count:
            yield prefix
            return
        for g in range(min(most, max(prefix, default=-1) + 2)):
            yield from grow((*prefix, g))

    return grow(())


def cheapest(
    core: _core.Program, limits: _core.Limits, below: float, least: float, ways: int
) -> tuple[Plan, int, bool]:
    """Return the cheapest plan of a program that costs less than `below`.

    Also return the number of ways tried, and whether these are all that the rules give. The cost is
    inf if there is no such plan.
    """
    terms = Terms(core)
    found, complete = terms.ways(ways)
    best = Plan(float("inf"))
    for way in found:
        made = _Way(terms, way, limits)
        for cost, kernels in made.plans(
            min(below, best.cost), least, limits.max_kernels, limits.max_cuts
        ):
            best = Plan(cost, way, kernels, made.program.text())
    return best, len(found), complete
