"""Cut the terms of a recording into groups. Each group becomes one program.

A group starts from the products with weights that read one tensor. It has the norm that makes this
tensor, if only products read it. It also has what follows the products up to one result, such as a
bias, an activation, a gate or a residual.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from mirage_hf.trace.record import Value
from mirage_hf.trace.term import NORMS, Term

#: How many terms may follow a product in one group.
MOST_AFTER = 24


#: A product runs beside one that has so many times as many columns.
NARROW = 16


@dataclass(eq=False)
class Group:
    """Terms that run together.

    Attributes:
        products: Products with weights, in order.
        before: Terms that the products read.
        after: Terms that read the products.
    """

    products: list[Term]
    before: list[Term] = field(default_factory=list)
    after: list[Term] = field(default_factory=list)

    @property
    def terms(self) -> list[Term]:
        """All terms, operands first."""
        return [*self.before, *self.products, *self.after]

    @property
    def results(self) -> list[Term]:
        """The terms that others read, in the order of the products."""
        own = set(self.terms)
        found = [t for t in self.after if t.escapes or any(u not in own for u in t.users)]
        return found + [t for t in self.products if t.escapes or any(u not in own for u in t.users)]


def is_bias(term: Term) -> bool:
    """Return whether a term adds a bias to a product."""
    if term.op != "add":
        return False
    x, y = term.operands
    return isinstance(x, Term) and x.op == "matmul" and isinstance(y, Term) and y.op == "weight"


def groups_of(terms: Sequence[Term], ancestors: Sequence[int]) -> list[Group]:
    """Cut terms into groups. Terms that are in no group run as torch ops.

    Args:
        terms: Computed terms, operands first.
        ancestors: For each node those that must run before it (`order.ancestors`).
    """
    return _Cutter(terms, ancestors).groups


class _Cutter:
    def __init__(self, terms: Sequence[Term], ancestors: Sequence[int]):
        self.ancestors = ancestors
        self.taken: set[Term] = set()
        self.groups: list[Group] = []
        by_input: dict[Term, list[Term]] = {}
        for term in terms:
            if term.op == "matmul":
                by_input.setdefault(term.operands[0], []).append(term)
        for alike in by_input.values():
            self._cut(alike)
        self.groups.sort(key=lambda group: group.products[0].node)
        for group in self.groups:
            group.before = self._before(group)

    def _cut(self, alike: list[Term]) -> None:
        """Make groups of the products of one tensor."""
        plain: list[Term] = []
        riding = {p for p in alike if self._rides_along(p, alike)}
        while alike:
            first, *others = alike
            group = None
            if first not in riding:
                group = self._with_gate(first, others) or self._alone(first)
            if group is None:
                plain.append(first)
            else:
                self._add(group)
            alike = [p for p in others if group is None or p not in group.products]
        while plain:
            group = self._side_by_side(plain, riding)
            self._add(group)
            plain = [p for p in plain if p not in group.products]

    def _add(self, group: Group) -> None:
        self.groups.append(group)
        self.taken.update(group.terms)

    def _alone(self, product: Term) -> Group | None:
        """Return the group of a product with what follows it, None if only a bias does."""
        after = self._after([product])
        if all(is_bias(t) for t in after):
            return None
        return Group([product], after=after)

    def _rides_along(self, product: Term, alike: Sequence[Term]) -> bool:
        """Return whether a product is computed beside another one, whose result torch ops read.

        A narrow product is, because its own kernel would take as long as a launch. A part of a
        product is, if torch ops read the other part. The ops that follow go to those who read them.
        """
        return any(
            (product.dims[1] * NARROW <= other.dims[1] or product.node == other.node)
            and other is not product
            and other.dtype == product.dtype
            and _join(other, product)
            and other.escapes
            and not self._needs(product, other)
            and not self._after([other])
            for other in alike
        )

    def _with_gate(self, product: Term, others: Iterable[Term]) -> Group | None:
        """Return the group of two products of one tensor that one result joins (a gated MLP)."""
        for other in others:
            pair = [product, other]
            if after := self._after(pair):
                return Group(pair, after=after)
        return None

    def _side_by_side(self, alike: Sequence[Term], riding: Collection[Term]) -> Group:
        """Return the group of products of one tensor that nothing but biases follows.

        What follows those that ride along is left out.
        """
        first = alike[0]
        biases = {p: [] if p in riding else self._after([p]) for p in alike}
        same = [
            p
            for p in alike
            if p.dtype == first.dtype
            and len(biases[p]) == len(biases[first])
            and (p is first or _join(first, p))
        ]
        # a product that depends on another one cannot run beside it
        same = [p for p in same if not any(self._needs(p, q) for q in same if q is not p)] or [
            first
        ]
        return Group(same, after=[t for p in same for t in biases[p]])

    def _needs(self, term: Term, other: Term) -> bool:
        return bool(self.ancestors[term.node] >> other.node & 1)

    def _after(self, products: Sequence[Term]) -> list[Term]:
        """Return the terms that follow products up to one result; nothing else of them is read.

        A norm that starts from the result belongs to those who read it.
        """
        region = self._region(products)
        within: dict[Term, set[Term]] = {p: {p} for p in products}
        best: list[Term] = []
        for last in region:
            members = {last}.union(*(within[x] for x in last.terms if x in within))
            within[last] = members
            if not members.issuperset(products):
                continue
            if any(t.escapes or not members.issuperset(t.users) for t in members - {last}):
                continue
            inside = [t for t in region if t in members]
            starts_norm = any(_reduces_rows(t) for t in inside if t not in best)
            if starts_norm and _only_products_read(last):
                continue
            best = inside
        return best

    def _region(self, products: Sequence[Term]) -> list[Term]:
        """Return the terms after products that could run with them, operands first."""
        own = 0
        for p in products:
            own |= 1 << p.node
        inside = dict.fromkeys(products)
        region: list[Term] = []
        waiting = sorted({u for p in products for u in p.users}, key=lambda t: t.node)
        while waiting and len(region) < MOST_AFTER:
            term = waiting.pop(0)
            if term in inside or term.op == "matmul" or term in self.taken:
                continue
            if not all(x in inside or not self._depends(x, own) for x in term.terms):
                continue
            inside[term] = None
            region.append(term)
            waiting = sorted({*waiting, *term.users}, key=lambda t: t.node)
        return region

    def _depends(self, term: Term, own: int) -> bool:
        """Return whether a term depends on one of the nodes `own`."""
        node = term.node
        if not term.is_op:
            node = term.source.node if isinstance(term.source, Value) else -1
        return node >= 0 and bool((self.ancestors[node] | 1 << node) & own)

    def _before(self, group: Group) -> list[Term]:
        """Return the terms that only products read, in order. Other groups may compute them too."""
        found: dict[Term, None] = {}
        waiting = [group.products[0].operands[0]]
        while waiting:
            term = waiting.pop(0)
            if (
                term not in found
                and term not in self.taken
                and term.is_op
                and not term.is_constant
                and not term.escapes
                and all(u in found or self._feeds_products(u) for u in term.users)
            ):
                found[term] = None
                waiting += term.terms
        return sorted(found, key=lambda t: t.node)

    def _feeds_products(self, term: Term) -> bool:
        """Return whether a term is a product, or in no group and read by such terms alone."""
        if term.op == "matmul":
            return True
        is_free = term not in self.taken and not term.escapes
        return is_free and all(self._feeds_products(u) for u in term.users)


def _join(product: Term, other: Term) -> bool:
    """Return whether the weights of two products may be read as one."""
    weights = [p.operands[1].weight for p in (product, other)]
    codings = [w.coded.weight.coding for w in weights if w.coded is not None]
    return not codings or (len(codings) == 2 and codings[0].joins(codings[1]))


def _only_products_read(term: Term) -> bool:
    return not term.escapes and all(u.op == "matmul" for u in term.users)


def _reduces_rows(term: Term) -> bool:
    return term.op in ("reduction", *NORMS)
