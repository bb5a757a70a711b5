"""The only door to the C++ core: a lowered program in, block graphs and a report out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol

from mirage_hf import _core, errors
from mirage_hf.errors import Rejected
from mirage_hf.graph import json_format
from mirage_hf.graph.block import Role
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.search.emit import OPS, ROLES, ugraph_of
from mirage_hf.search.map_restriction import MapRestriction
from mirage_hf.search.search_report import Counters, SearchReport
from mirage_hf.search.spec import Spec, Term, lower, small_rational
from mirage_hf.settings import settings


@dataclass(frozen=True)
class SearchOptions:
    """What bounds a search. time_limit: seconds of wall time; max_width: how many monomials a product may be multiplied out to
    (1, 2, 4 … are searched in turn); max_kernels: kernels of one µGraph, max_cuts: values it keeps in device memory in between;
    max_variants: algebraic variants that are cut into kernels; max_forms: normal forms held in memory (about 0.4 KB each);
    roles: axes (by name) that must have a role; maps: how kernels may cut their tensors."""

    time_limit: float = 60.0
    max_width: int = 2
    max_kernels: int = 4
    max_cuts: int = 3
    max_variants: int = 48
    max_candidates: int = 24
    max_block_ops: int = 64
    max_forms: int = 4_000_000
    threads: int = 0
    roles: tuple[tuple[str, Role], ...] = ()
    maps: MapRestriction | None = None


@dataclass(frozen=True)
class RankedUGraph:
    """One candidate µGraph for the whole program, with the cost model's estimate in µs."""

    ugraph: UGraph
    cost_us: float
    width: int


SearchProgress = Callable[[Counters], bool | None]


class SearchJournal(Protocol):
    """Where finished steps of a search are kept, by key, so that a search that was killed can go on."""

    def load(self, key: str) -> Any | None: ...
    def save(self, key: str, step: Any) -> None: ...


def search(
    graph: KernelGraph,
    options: SearchOptions | None = None,
    progress: SearchProgress | None = None,
    journal: SearchJournal | None = None,
    *,
    lowered: Spec | Rejected | None = None,
) -> tuple[list[RankedUGraph], SearchReport]:
    """Search for µGraphs equivalent to `graph`, best first. An empty list is an answer: the report says why.

    A step is one width searched to the end; those that `journal` has are not searched again.
    `lowered` is what `lower(graph)` returned, if the caller has it already.
    Errors: SearchError for roles of axes that the program does not have, and for maps that no kernel keeps to.
    """
    options = options or SearchOptions()
    if options.maps is not None:
        options.maps.check(graph)
    spec = lower(graph) if lowered is None else lowered
    if isinstance(spec, Rejected):
        return [], SearchReport(Counters(), stop="not lowerable", reason=spec.reason)
    for what, count, most in (
        ("axes", len(spec.sizes), _core.max_axes),
        ("terms", len(spec.terms), _core.max_nodes),
    ):
        if count > most:
            return [], SearchReport(
                Counters(),
                stop="not lowerable",
                reason=f"{count} {what}; the search takes up to {most}",
            )
    names = list(spec.sizes)
    program, functions = _program(spec, names), list(_symbols(spec).values())
    start = time.perf_counter()
    own = json_format.digest(json_format.graph_to_dict(graph))
    total, stop = Counters(), ""
    found: dict[str, RankedUGraph] = {}
    width = 1
    while width <= options.max_width:
        for forced in _roles(options, spec):
            key = f"{own} width {width}" + (f" roles {forced}" if options.maps is not None else "")
            step = _read_step(journal.load(key), graph) if journal else None
            if step is None:
                limits = _limits(
                    replace(options, roles=forced),
                    names,
                    width,
                    options.time_limit - (time.perf_counter() - start),
                )
                result = _core.search(program, limits, partial(_told, progress, total))
                made = [
                    (ugraph_of(c, spec, names, functions, graph), c.cost_us)
                    for c in result.candidates
                ]
                some_in_range = any(
                    m is not None and m[1] for m, _ in made
                )  # then what is not would only be refused by numbers
                step = _Step(
                    result.stop,
                    _counters(result.stats, width if result.stop == "exhausted" else 0),
                    tuple(
                        RankedUGraph(m[0], cost, width)
                        for m, cost in made
                        if m is not None and (m[1] or not some_in_range)
                    ),
                )
                if journal and step.stop == "exhausted":
                    journal.save(key, _write_step(step))
            stop, total = step.stop, total + step.counters
            for f in step.found:
                found.setdefault(str(f.ugraph.kernels), f)
            if stop != "exhausted":
                break
        if stop != "exhausted":
            break
        width *= 2
    best = sorted(found.values(), key=lambda f: f.cost_us)
    if options.maps is not None and best:
        kept: dict[str, RankedUGraph] = {}
        for f in best:
            if (u := options.maps.keep(f.ugraph)) is not None:
                kept.setdefault(str(u), replace(f, ugraph=u))
        if not kept:
            raise options.maps.refusal(best[0].ugraph, stop)
        best = list(kept.values())[: options.max_candidates]
    return best, SearchReport(total, stop, "" if best else _why_none(stop, options))


_WITH_MAPS = 256
"""Candidates that the core is asked for when most may be left out."""


def _roles(options: SearchOptions, spec: Spec) -> list[tuple[tuple[str, Role], ...]]:
    """Forced roles to search with, in turn: those asked for, then those that a restriction on maps suggests."""
    more = options.maps.roles(spec) if options.maps is not None else []
    return [
        options.roles,
        *(
            (*options.roles, *r)
            for r in more
            if not {a for a, _ in r} & {a for a, _ in options.roles}
        ),
    ]


@dataclass(frozen=True)
class _Step:
    stop: str
    counters: Counters
    found: tuple[RankedUGraph, ...]


def _write_step(step: _Step) -> dict[str, Any]:
    return {
        "stop": step.stop,
        "counters": asdict(step.counters),
        "found": [
            {
                "kernels": json_format.graph_to_dict(f.ugraph.kernels),
                "cost_us": f.cost_us,
                "width": f.width,
            }
            for f in step.found
        ],
    }


def _read_step(data: Any, graph: KernelGraph) -> _Step | None:
    if data is None:
        return None
    return _Step(
        data["stop"],
        Counters(**data["counters"]),
        tuple(
            RankedUGraph(
                UGraph(graph, json_format.graph_from_dict(f["kernels"], "checkpoint")),
                f["cost_us"],
                f["width"],
            )
            for f in data["found"]
        ),
    )


def _told(progress: SearchProgress | None, before: Counters, now: _core.Statistics) -> bool:
    """Tell of the counters so far; whether to stop."""
    return bool(progress(before + _counters(now, 0))) if progress else False


def _limits(
    options: SearchOptions, names: Sequence[str], width: int, seconds: float
) -> _core.Limits:
    limits = _core.Limits()
    limits.seconds, limits.width = seconds, width
    for name in (
        "max_kernels",
        "max_cuts",
        "max_variants",
        "max_candidates",
        "max_block_ops",
        "max_forms",
    ):
        setattr(limits, name, getattr(options, name))
    if options.maps is not None:
        limits.max_candidates = max(options.max_candidates, _WITH_MAPS)
    limits.threads = options.threads or settings().threads
    limits.forced = _forced(options.roles, names)
    return limits


def _why_none(stop: str, options: SearchOptions) -> str:
    if stop != "exhausted":
        return f"no kernel found before the search stopped ({stop})"
    if options.roles:
        return "no kernels with axis roles " + ", ".join(
            f"{name} {role.value}" for name, role in options.roles
        )
    most = "a kernel" if options.max_kernels == 1 else f"{options.max_kernels} kernels"
    return (
        f"not computed by {most} or fewer: an output is an input, a number or the same along one of its dims, "
        "or a block would need more than it can hold"
    )


def _forced(roles: Iterable[tuple[str, Role]], names: Sequence[str]) -> list[int]:
    forced = [0, 0, 0]
    for name, role in roles:
        if name not in names:
            raise errors.SearchError(
                f"axis {name!r} is not an axis of this program; it has {', '.join(names)}"
            )
        forced[list(ROLES).index(role)] |= 1 << names.index(name)
    return forced if any(forced) else []


def _counters(s: _core.Statistics, width: int) -> Counters:
    return Counters(
        width=width,
        **{name: getattr(s, name) for name in Counters.__dataclass_fields__ if name != "width"},
    )


def _symbol(term: Term) -> tuple[object, ...]:
    return (term.fn, term.attrs, term.value)


def _symbols(spec: Spec) -> dict[tuple[object, ...], Term]:
    """What the core knows by number only: opaque functions with their attributes, and constants that are no small rational."""
    return {
        _symbol(t): t
        for t in spec.terms
        if t.op == "opaque" or (t.op == "constant" and small_rational(t.value) is None)
    }


def _program(spec: Spec, names: Sequence[str]) -> _core.Program:
    program = _core.Program()
    program.axes = [_core.AxisInfo(a, spec.sizes[a]) for a in names]
    symbols = {key: number for number, key in enumerate(_symbols(spec))}
    nodes = []
    for term in spec.terms:
        n = _core.Node()
        n.op, n.args = OPS[term.op], list(term.args)
        if term.op == "input":
            i = spec.inputs[term.source]
            n.symbol, n.index = (
                term.source,
                [-1 if a is None else names.index(a) for a in term.index],
            )
            n.bytes = i.itemsize
            for d in i.dims:
                n.bytes *= d
        elif term.op == "constant":
            f = small_rational(term.value)
            if f is None:
                n.symbol = symbols[_symbol(term)]
            else:
                n.num, n.den = f.numerator, f.denominator
        elif term.op == "opaque":
            n.symbol = symbols[_symbol(term)]
        elif term.op in ("sum", "max"):
            n.axis = names.index(term.axis)
        nodes.append(n)
    program.nodes = nodes
    program.outputs = [t for t, _, _ in spec.outputs]
    return program
