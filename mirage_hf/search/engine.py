"""The only door to the C++ core: a lowered program in, block graphs and a report out."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mirage_hf import _core, errors
from mirage_hf.graph.block import Accumulator, Axis, BlockGraph, BlockInput, BlockOp, BlockOutput, Role, Stage
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.search.report import Counters, SearchReport
from mirage_hf.search.spec import NotLowerable, Spec, Term, lower, small_rational
from mirage_hf.settings import settings

_ROLES = {Role.GRID: _core.Role.grid, Role.LOOP: _core.Role.loop, Role.TILE: _core.Role.tile}
_OPS = {"input": _core.Op.input, "constant": _core.Op.constant, "add": _core.Op.add, "sub": _core.Op.sub, "mul": _core.Op.mul,
        "div": _core.Op.div, "exp": _core.Op.exp, "opaque": _core.Op.opaque, "sum": _core.Op.sum, "max": _core.Op.max}
_NAMES = {v: k for k, v in _OPS.items()}


@dataclass(frozen=True)
class SearchOptions:
    """What bounds a search. `roles` forces axes (by name) to a role; seconds of wall time; width: how many monomials a
    product may be multiplied out to; max_forms: normal forms held in memory (about 0.4 KB each)."""

    time_limit: float = 60.0
    max_width: int = 2
    max_candidates: int = 16
    max_block_ops: int = 64
    max_forms: int = 4_000_000
    threads: int = 0
    roles: tuple[tuple[str, Role], ...] = ()


@dataclass(frozen=True)
class Found:
    """One candidate kernel for the whole program, with the cost model's estimate in µs."""

    ugraph: UGraph
    cost_us: float
    width: int


Progress = Callable[[Counters], bool | None]


def search(graph: KernelGraph, options: SearchOptions | None = None, progress: Progress | None = None) -> tuple[list[Found], SearchReport]:
    """Search for single kernels equivalent to `graph`, best first. An empty list is an answer: the report says why.

    Errors: SearchError for roles of axes that the program does not have.
    """
    options = options or SearchOptions()
    spec = lower(graph)
    if isinstance(spec, NotLowerable):
        return [], SearchReport(Counters(), stop="not lowerable", reason=spec.reason)
    for what, count, most in (("axes", len(spec.sizes), _core.max_axes), ("terms", len(spec.terms), _core.max_nodes)):
        if count > most:
            return [], SearchReport(Counters(), stop="not lowerable", reason=f"{count} {what}; the search takes up to {most}")
    names = list(spec.sizes)
    limits = _core.Limits()
    limits.seconds, limits.max_width = options.time_limit, options.max_width
    limits.max_candidates, limits.max_block_ops = options.max_candidates, options.max_block_ops
    limits.max_forms = options.max_forms
    limits.threads = options.threads or settings().threads
    limits.forced = _forced(options.roles, names)
    poll = (lambda s: bool(progress(_counters(s)))) if progress else (lambda s: False)
    result = _core.search(_program(spec, names), limits, poll)
    found = []
    for c in result.candidates:
        block = _block_graph(c, spec, names, [t.name for t in graph.inputs])
        if block is not None:
            found.append(Found(_ugraph(graph, block), c.cost_us, c.width))
    reason = "" if found else _why_none(result, options)
    return found, SearchReport(_counters(result.stats), result.stop, reason)


def _why_none(result: _core.SearchResult, options: SearchOptions) -> str:
    if result.candidates:
        return "no single kernel: an output is an input, a number, or the same along one of its dims"
    if result.stop != "exhausted":
        return f"no kernel found before the search stopped ({result.stop})"
    if options.roles:
        return "no single kernel with axis roles " + ", ".join(f"{name} {role.value}" for name, role in options.roles)
    return "no single kernel: an output would need a value from another block"


def _forced(roles: Iterable[tuple[str, Role]], names: Sequence[str]) -> list[int]:
    forced = [0, 0, 0]
    for name, role in roles:
        if name not in names:
            raise errors.SearchError(f"axis {name!r} is not an axis of this program; it has {', '.join(names)}")
        forced[list(_ROLES).index(role)] |= 1 << names.index(name)
    return forced if any(forced) else []


def _counters(s: _core.Statistics) -> Counters:
    return Counters(**{name: getattr(s, name) for name in Counters.__dataclass_fields__})


def _symbol(term: Term) -> tuple[object, ...]:
    return (term.fn, term.attrs, term.value)


def _symbols(spec: Spec) -> dict[tuple[object, ...], Term]:
    """What the core knows by number only: opaque functions with their attributes, and constants that are no small rational."""
    return {_symbol(t): t for t in spec.terms if t.op == "opaque" or (t.op == "constant" and small_rational(t.value) is None)}


def _program(spec: Spec, names: Sequence[str]) -> _core.Program:
    program = _core.Program()
    program.axes = [_core.AxisInfo(a, spec.sizes[a]) for a in names]
    symbols = {key: number for number, key in enumerate(_symbols(spec))}
    nodes = []
    for term in spec.terms:
        n = _core.Node()
        n.op, n.args = _OPS[term.op], list(term.args)
        if term.op == "input":
            i = spec.inputs[term.source]
            n.symbol, n.index = term.source, [-1 if a is None else names.index(a) for a in term.index]
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


def _block_graph(c: _core.Candidate, spec: Spec, names: Sequence[str], tensors: Sequence[str]) -> BlockGraph | None:
    roles = {name: next(r for r, core in _ROLES.items() if core == c.roles[i]) for i, name in enumerate(names) if c.axes >> i & 1}
    seen = [a for _, index, _ in spec.outputs for a in index if a]
    rank = {Role.GRID: 0, Role.TILE: 1, Role.LOOP: 2}
    order = sorted(roles, key=lambda a: (rank[roles[a]], seen.index(a) if a in seen else len(seen), names.index(a)))
    axes = tuple(Axis(a, spec.sizes[a], roles[a]) for a in order)

    def carried(mask: int) -> tuple[str, ...]:
        return tuple(a for a in order if mask >> names.index(a) & 1)

    value: dict[int, str | float] = {}
    inputs: list[BlockInput] = []
    for leaf in c.leaves:
        term = spec.terms[leaf.node]
        if term.op == "constant":
            value[leaf.value] = term.value
            continue
        i = spec.inputs[term.source]
        several = len(i.sources) > 1
        base = "_".join(tensors[source] for source in i.sources)
        reads = sum(t.op == "input" and t.source == term.source for t in spec.terms)
        name = base if reads == 1 else f"{base}_{term.index[0] or len(inputs)}_{len(inputs)}"
        value[leaf.value] = name
        joined = term.index[i.joined] if several and i.joined is not None else None
        inputs.append(BlockInput(name, i.sources, term.index, joined, i.sizes if several else ()))
    functions = list(_symbols(spec).values())

    depends: dict[int, set[str]] = {}
    count = 0

    def fresh(prefix: str) -> str:
        nonlocal count
        count += 1
        name = f"{prefix}{count}"
        return name if all(i.name != name for i in inputs) else fresh(prefix)

    stages = []
    for s in c.stages:
        body, accumulators = [], []
        depends.update((f.out, set(carried(f.axes))) for f in (*s.body, *s.accumulators))
        for f in s.body:
            args = tuple(value[a] for a in f.args)
            name = _NAMES[f.op]
            over: str | None = None
            attrs: tuple[tuple[str, float], ...] = ()
            if name == "opaque":
                name, attrs = functions[f.symbol].fn, functions[f.symbol].attrs
            elif name in ("sum", "max"):
                over = names[f.axis]
            out = fresh("v")
            body.append(BlockOp(out, name, args, carried(f.axes), attrs, over))
            value[f.out] = out
        for f in s.accumulators:
            out = fresh("acc")
            accumulators.append(Accumulator(out, str(value[f.args[0]]), _NAMES[f.op], carried(f.axes)))
            value[f.out] = out
        stages.append(Stage(None if s.loop < 0 else names[s.loop], tuple(body), tuple(accumulators)))
    outputs = []
    for o, (_, index, dtype) in zip(c.outputs, spec.outputs, strict=True):
        if o not in depends or depends[o] != {a for a in index if a}:
            return None  # an input, a number, or a value that would have to be repeated along an axis
        outputs.append(BlockOutput(str(value[o]), index, dtype))
    return BlockGraph(axes, tuple(inputs), tuple(stages), tuple(outputs))


def _ugraph(program: KernelGraph, block: BlockGraph) -> UGraph:
    kernels = KernelGraph()
    tensors = [kernels.new_input(t.dims, t.dtype, t.strides, t.name) for t in program.inputs]
    kernels.mark_output(*kernels.customized(tensors, block))
    return UGraph(program, kernels)
