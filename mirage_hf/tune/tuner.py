"""Choosing: searched µGraphs × ranked schedules, and always the library path, compiled in parallel, checked, timed."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mirage_hf import errors
from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.codegen.schedule import Schedule, next_power_of_two
from mirage_hf.errors import Rejected
from mirage_hf.gpus import H200, Device, device_named
from mirage_hf.graph import effects, symbolic
from mirage_hf.graph.block import Role
from mirage_hf.graph.kernel import KernelGraph, KernelOp
from mirage_hf.graph.ugraph import UGraph, library_ugraph
from mirage_hf.tune import measure, space
from mirage_hf.tune.cost import Cost, estimate, library_us
from mirage_hf.tune.measure import Run, Timing
from mirage_hf.verify.numeric import NumericCheck
from mirage_hf.verify.verdict import Accepted

TuneProgress = Callable[[int, int, str], Any]
"""Called as progress(done, total, what)."""

Schedules = Callable[[KernelOp, Device], Sequence[Schedule]]
"""The schedules to try for an op on a device, best first."""

HOPELESS = 3.0
"""Candidates estimated to take this many times the best estimate are not tried."""

PATIENCE = 24
"""Candidates in a row that are no better, in the order of their estimates, after which no more are tried."""

LEAST_GAIN = 0.005
"""What counts as better."""

LEAST_OF_LAYER = 0.002
"""What counts as better for a whole layer."""

SLOW, SLOW_LAYER = 1.3, 1.02
"""What is seen to take this many times the fastest's time, on its own or as a layer, is not measured to the end."""

CLIMBERS = 3
"""Of the fastest, how many are improved step by step."""

CHAINED, NEARLY = 16, 1.06
"""Candidates that are measured in a chain too: the fastest on their own, up to so many times the time of the first. In a chain the
order changes: kernels that hold their weights while they wait gain there."""

_REPEATS = 16
"""Calls at least whose results are compared with each other."""

RANKED, MEASURED, REFUSED = "ranked", "measured", "refused"


@dataclass(frozen=True)
class MeasuredCandidate:
    """A µGraph with a schedule for each of its block graphs, and what became of it.

    status: "ranked" (by the cost model only), "measured", or "refused" with a `reason` (does not compile, wrong numbers). timing:
    calls on their own; chain: in a chain of dependent kernels (measure.Chain), measured for the fastest only.
    """

    ugraph: UGraph
    schedules: tuple[Schedule, ...]
    estimate_us: float
    status: str = RANKED
    reason: str = ""
    timing: Timing | None = None
    chain: Timing | None = None

    @property
    def us(self) -> float:
        return self.chain.us if self.chain else self.timing.us if self.timing else self.estimate_us

    @property
    def is_library(self) -> bool:
        return not self.ugraph.is_fused

    def to_dict(self) -> dict[str, Any]:
        timing = (
            {"us": self.timing.us, "low": self.timing.low, "high": self.timing.high}
            if self.timing
            else {}
        )
        timing |= (
            {"chain_us": self.chain.us, "chain_low": self.chain.low, "chain_high": self.chain.high}
            if self.chain
            else {}
        )
        return {
            "kernels": self.ugraph.num_kernels,
            "schedules": [s.to_dict() for s in self.schedules],
            "status": self.status,
            "reason": self.reason,
            "estimate_us": round(self.estimate_us, 3),
            **timing,
        }


@dataclass(frozen=True)
class TuneResult:
    """What was tried for one program on one device, best first. Times in µs; estimates where nothing was measured."""

    device: str
    best: MeasuredCandidate
    best_searched: MeasuredCandidate | None
    """The best with a generated kernel, kept where the library wins too; None when every one was refused."""
    library: MeasuredCandidate
    candidates: tuple[MeasuredCandidate, ...]

    @property
    def measured(self) -> bool:
        return self.best.timing is not None

    @property
    def searched(self) -> tuple[MeasuredCandidate, ...]:
        """Measured candidates with generated kernels."""
        return tuple(c for c in self.candidates if c.status == MEASURED and not c.is_library)

    def ugraphs(self) -> tuple[UGraph, ...]:
        """Every µGraph that was not refused, once, at its best schedules, best first."""
        best: dict[int, UGraph] = {}
        for c in self.candidates:
            if c.status != REFUSED:
                best.setdefault(
                    id(c.ugraph.kernels),
                    replace(c.ugraph, schedules=c.schedules) if c.schedules else c.ugraph,
                )
        return tuple(best.values())

    def program(self) -> triton.GeneratedProgram:
        """The generated program of the winner."""
        return triton.generate(self.best.ugraph, self.best.schedules)

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "best_us": self.best.us,
            "best_is_library": self.best.is_library,
            "library_us": self.library.us,
            "searched_us": self.best_searched.us if self.best_searched else None,
            "candidates": [c.to_dict() for c in self.candidates],
        }


def rank(
    ugraphs: Sequence[UGraph],
    device: Device | None = None,
    per_graph: int = 32,
    schedules: Schedules | None = None,
) -> list[MeasuredCandidate]:
    """Candidates by the cost model alone, best estimate first, the library path among them; needs no GPU.

    Errors: CodegenError when a block graph has no kernel at all.
    """
    model = device or H200
    found = [_library(ugraphs[0].program, model)] if ugraphs else []
    for ugraph in ugraphs:
        if ugraph.is_fused:
            found += itertools.islice(
                _scheduled(ugraph, model, schedules or space.schedules), per_graph
            )
    best = min((c.estimate_us for c in found if not c.is_library), default=0.0)
    return sorted(
        (c for c in found if c.is_library or c.estimate_us <= HOPELESS * best),
        key=lambda c: c.estimate_us,
    )


def _library(program: KernelGraph, model: Device) -> MeasuredCandidate:
    library = library_ugraph(program)
    return MeasuredCandidate(library, (), sum(library_us(op, model) for op in library.kernels.ops))


def _scheduled(ugraph: UGraph, model: Device, schedules: Schedules) -> Iterator[MeasuredCandidate]:
    """Schedules in ranked order; the n-th best of every block graph together. Nothing when a block graph has no schedule."""
    ops = place_kernels(ugraph)
    ranked = [schedules(op, model) for op in ops]
    if not all(ranked):
        return
    stored = set(
        map(id, effects.stored(ugraph.kernels).values())
    )  # kernels write these rows themselves
    rest = sum(
        library_us(op, model)
        for op in ugraph.kernels.ops
        if op.block is None and id(op) not in stored
    )
    for n in range(max(map(len, ranked))):
        chosen = tuple(
            replace(r[min(n, len(r) - 1)], trigger_early=op.next_may_launch_early)
            for r, op in zip(ranked, ops, strict=True)
        )
        own = sum(estimate(plan_kernel(op, s), model).us for op, s in zip(ops, chosen, strict=True))
        yield MeasuredCandidate(ugraph, chosen, own + rest)


def tune(
    ugraphs: Sequence[UGraph],
    *,
    device: torch.device | str = "cuda",
    progress: TuneProgress | None = None,
    per_graph: int = 24,
    replays: int = 15,
    schedules: Schedules | None = None,
    rounds: int = 3,
    regroup: bool = True,
) -> TuneResult:
    """Measure candidates for one program on a GPU; `ugraphs` all compute the same program. `schedules` gives the ranked
    schedules of a block graph's op, by default the whole space. After those, `rounds` times at most, what is one step from the
    fastest, with `regroup` also other numbers of parts.

    Errors: CodegenError when there is no µGraph; a candidate that fails is refused with a reason, never raised.
    """
    if not ugraphs:
        raise errors.CodegenError(
            "tune: no µGraph given; search first, or pass library_ugraph(program)"
        )
    device = torch.device(device)
    if device.type != "cuda":
        candidates = rank(ugraphs, per_graph=per_graph, schedules=schedules)
        return _result("cost model (no GPU)", candidates)
    say = progress or (lambda done, total, what: None)
    with torch.cuda.device(device), torch.no_grad(), compiler.passing():
        properties = torch.cuda.get_device_properties(device)
        sm = 10 * properties.major + properties.minor
        model = device_named(properties.name, sm)
        candidates = rank(ugraphs, model, per_graph, schedules)
        program = candidates[0].ugraph.program
        sets = measure.cold_inputs(program, device)
        bench = _Bench(
            sm, NumericCheck(program, device), sets, measure.Chain(program, sets), replays, say
        )
        tried = bench.measure(candidates, PATIENCE)
        for _ in range(rounds):
            known = min((c.us for c in _fastest(tried, 1)), default=math.inf)
            tried += bench.measure(
                _around(
                    _fastest(tried, CLIMBERS), tried, model, schedules or space.schedules, regroup
                ),
                0,
                known,
            )
            if known == math.inf or _fastest(tried, 1)[0].us > known * (1 - LEAST_GAIN):
                break
        return _result(properties.name, bench.chained(tried))


TOGETHER, SWEEPS = 8, 2
"""Candidates of each program, and rounds over all programs at most, that are tried when choosing for several."""


def _diverse(found: Sequence[MeasuredCandidate]) -> list[MeasuredCandidate]:
    """The first of every µGraph and set of tiles, then the others; neighbours mind the tiles most."""
    seen: Counter[Any] = Counter()
    rank: list[int] = []
    for c in found:
        kind = id(c.ugraph.kernels), tuple(s.tiles for s in c.schedules)
        rank.append(seen[kind])
        seen[kind] += 1
    return [c for _, c in sorted(zip(rank, found, strict=True), key=lambda x: x[0])][:TOGETHER]


def together(
    choices: Sequence[Sequence[MeasuredCandidate]], *, device: torch.device | str, replays: int = 7
) -> tuple[list[MeasuredCandidate], Timing]:
    """One candidate of each program, chosen by the time of all programs one after another, as a layer runs them; and that time.

    `choices` holds measured candidates, best first, of each program in the order in which they run. Starting from the first of
    each, those of two neighbours are changed at a time, as long as that helps: how they overlap matters as much as either's time.
    """
    with torch.cuda.device(device), torch.no_grad(), compiler.passing():
        layer = measure.Layer([c[0].ugraph.program for c in choices], device)
        tried = [_diverse(found) for found in choices]
        runs = [[run_of(triton.generate(c.ugraph, c.schedules)) for c in found] for found in tried]

        def time(at: Sequence[int], worth: float = math.inf) -> Timing:
            return layer.time([run[k] for run, k in zip(runs, at, strict=True)], replays, worth)

        chosen = (0,) * len(choices)
        best = time(chosen)
        for _ in range(SWEEPS):
            before = chosen
            for n in range(len(chosen) if len(chosen) > 2 else 1):
                pair = n, (n + 1) % len(chosen)
                for both in itertools.product(*(range(len(runs[p])) for p in pair)):
                    other = tuple(
                        dict(zip(pair, both, strict=True)).get(p, k) for p, k in enumerate(chosen)
                    )
                    if other == chosen or time(other, best.us * SLOW_LAYER).us > best.us * (
                        1 - LEAST_OF_LAYER
                    ):
                        continue
                    again, t = (
                        time(chosen),
                        time(other),
                    )  # one lucky reading among many decides nothing
                    best = again
                    if t.us < again.us * (1 - LEAST_OF_LAYER):
                        chosen, best = other, t
            if chosen == before:
                break
        return [found[k] for found, k in zip(tried, chosen, strict=True)], best


@dataclass(frozen=True)
class _Bench:
    """What candidates of one program are measured with."""

    sm: int
    check: NumericCheck
    sets: Sequence[list[torch.Tensor]]
    chain: measure.Chain
    replays: int
    say: TuneProgress

    def measure(
        self, candidates: Sequence[MeasuredCandidate], patience: int, known: float = math.inf
    ) -> list[MeasuredCandidate]:
        """Check and time candidates in order while later ones compile; stop after `patience` in a row that were no better. known: what the
        fastest of others took, µs."""
        programs = [triton.generate(c.ugraph, c.schedules) for c in candidates]
        tried, best, since, worth = list[MeasuredCandidate](), math.inf, 0, known
        for n, outcome in enumerate(compiler.compiling(programs, self.sm)):
            self.say(n, len(candidates), "measuring")
            tried.append(
                _try(
                    candidates[n],
                    programs[n],
                    outcome,
                    self.check,
                    self.sets,
                    self.replays,
                    worth * SLOW,
                )
            )
            if tried[-1].is_library:
                continue
            improved = tried[-1].status == MEASURED and tried[-1].us < best * (1 - LEAST_GAIN)
            best, since = (tried[-1].us, 0) if improved else (best, since + 1)
            worth = min(worth, best)
            if (
                patience
                and since >= patience
                and best < math.inf
                and any(c.is_library for c in tried)
            ):
                break
        self.say(len(candidates), len(candidates), "done")
        return tried

    def chained(self, candidates: Sequence[MeasuredCandidate]) -> list[MeasuredCandidate]:
        """The fastest few and the library path measured again in a chain of dependent kernels."""
        fast = _fastest(candidates, CHAINED)
        fast = [c for c in fast if c.us <= NEARLY * fast[0].us]
        found = []
        for c in candidates:
            if c.status == MEASURED and (c in fast or c.is_library):
                program = triton.generate(c.ugraph, c.schedules)
                c = replace(
                    c,
                    chain=self.chain.time(
                        compiler.load(program.source, program.digest).run, self.replays
                    ),
                )
            found.append(c)
        return found


def _fastest(candidates: Sequence[MeasuredCandidate], count: int) -> list[MeasuredCandidate]:
    """The fastest searched ones that were measured."""
    return sorted(
        (c for c in candidates if c.status == MEASURED and not c.is_library), key=lambda c: c.us
    )[:count]


MOST_PARTS = 128
"""Parts that an axis is dealt out in at most."""


def _regrouped(start: MeasuredCandidate) -> Iterator[tuple[UGraph, tuple[Schedule, ...]]]:
    """A µGraph with an axis dealt out in half or twice as many parts, and its schedules cut anew for them."""
    numbers = {
        a.name: a.size
        for op in start.ugraph.block_ops
        if op.block
        for a in op.block.axes
        if op.block.axis_split_by(a.name) is not None
    }
    for axis, size in numbers.items():
        for number in (size // 2, size * 2):
            if not 2 <= number <= MOST_PARTS:
                continue
            try:
                other = symbolic.with_num_splits(start.ugraph, axis, number)
            except errors.GraphError:
                continue
            if other.kernels != start.ugraph.kernels:
                with contextlib.suppress(errors.CodegenError):
                    ops = zip(
                        start.schedules,
                        place_kernels(start.ugraph),
                        place_kernels(other),
                        strict=True,
                    )
                    yield other, tuple(space.recut(s, old, new) for s, old, new in ops)


def _fits(cost: Cost, model: Device) -> bool:
    """Whether a kernel has the shared memory and the registers for its tiles; one that has not may take minutes to compile."""
    return cost.shared <= model.shared_bytes and cost.registers <= space.REGISTER_BUDGET


def _around(
    starts: Sequence[MeasuredCandidate],
    tried: Sequence[MeasuredCandidate],
    model: Device,
    schedules: Schedules,
    regroup: bool = True,
) -> list[MeasuredCandidate]:
    """Candidates one step away from `starts` that were not tried: what the space samples coarsely or leaves to a rule of thumb."""
    known = {(id(c.ugraph), c.schedules) for c in tried}
    found = []
    have = {str(c.ugraph.kernels) for c in tried if c.ugraph.is_fused}
    for start in starts:
        for other, chosen in _regrouped(start) if regroup else ():
            if str(other.kernels) not in have:
                have.add(str(other.kernels))
                try:
                    costs = [
                        estimate(plan_kernel(op, s), model)
                        for op, s in zip(place_kernels(other), chosen, strict=True)
                    ]
                except errors.CodegenError:
                    continue
                if all(_fits(c, model) for c in costs):
                    found.append(MeasuredCandidate(other, chosen, sum(c.us for c in costs)))
    for start in starts:
        ops = place_kernels(start.ugraph)
        rest = start.estimate_us - sum(
            estimate(plan_kernel(op, s), model).us
            for op, s in zip(ops, start.schedules, strict=True)
        )
        allowed = [{s.mma for s in schedules(op, model)} for op in ops]
        for chosen in _steps(start):
            try:
                plans = [plan_kernel(op, s) for op, s in zip(ops, chosen, strict=True)]
            except errors.CodegenError:
                continue
            costs = [estimate(p, model) for p in plans]
            permitted = all(
                p.schedule.mma in a and (p.dots or not p.schedule.mma)
                for p, a in zip(plans, allowed, strict=True)
            )
            if (
                permitted
                and all(_fits(c, model) for c in costs)
                and (id(start.ugraph), chosen) not in known
            ):
                known.add((id(start.ugraph), chosen))
                found.append(
                    MeasuredCandidate(start.ugraph, chosen, sum(c.us for c in costs) + rest)
                )
    return found


def _steps(start: MeasuredCandidate) -> Iterator[tuple[Schedule, ...]]:
    for n, (s, op) in enumerate(zip(start.schedules, place_kernels(start.ugraph), strict=True)):
        assert op.block is not None
        changes: list[dict[str, Any]] = [
            {"prefetch_steps": p}
            for p in (0, s.prefetch_steps // 2, max(1, s.prefetch_steps * 2))
            if p != s.prefetch_steps
        ]
        changes += [
            {"num_stages": x}
            for x in (s.num_stages - 1, s.num_stages + 1, s.num_stages + 2)
            if x >= 1
        ]
        changes += [{"num_warps": x} for x in (s.num_warps // 2, s.num_warps * 2) if 1 <= x <= 16]
        changes += [
            {"cooperating_blocks": x}
            for x in (s.cooperating_blocks // 2, s.cooperating_blocks * 2)
            if x >= 1
        ]
        if s.mma:
            changes.append({"weights_first": not s.weights_first})
        if op.next_may_launch_early:
            changes.append({"trigger_early": not s.trigger_early})
        for axis in op.block.axes:
            tile = s.tiles[axis.name]
            if axis.role is not Role.TILE and op.block.axis_split_by(axis.name) is None:
                for x in (tile // 2, tile * 2):
                    if 1 <= x <= next_power_of_two(op.block.split_size(axis.name)):
                        changes.append({"tiles": dict(s.tiles) | {axis.name: x}})
                if (
                    axis.role is Role.LOOP and tile > 1
                ):  # half a step, twice as many in flight; half the steps for each of twice the blocks
                    changes.append(
                        {
                            "tiles": dict(s.tiles) | {axis.name: tile // 2},
                            "num_stages": 2 * s.num_stages,
                        }
                    )
                    changes.append(
                        {
                            "tiles": dict(s.tiles) | {axis.name: tile // 2},
                            "cooperating_blocks": 2 * s.cooperating_blocks,
                        }
                    )
        for change in changes:
            yield tuple(
                replace(x, **change) if k == n else x for k, x in enumerate(start.schedules)
            )


def _try(
    candidate: MeasuredCandidate,
    program: triton.GeneratedProgram,
    outcome: Any,
    check: NumericCheck,
    sets: Sequence[list[torch.Tensor]],
    replays: int,
    worth: float,
) -> MeasuredCandidate:
    if isinstance(outcome, errors.CodegenError):
        return replace(candidate, status=REFUSED, reason=str(outcome).splitlines()[0])
    run = compiler.load(program.source, program.digest).run
    try:
        verdict = Accepted() if candidate.is_library else check.judge(run)
        if isinstance(verdict, Rejected):
            return replace(candidate, status=REFUSED, reason=verdict.reason)
        timing = measure.time_run(run, sets, replays, math.inf if candidate.is_library else worth)
        if not candidate.is_library and not _repeats(run, sets):
            return replace(
                candidate,
                status=REFUSED,
                reason="not the same result for the same inputs each time: a race",
            )
        return replace(candidate, status=MEASURED, timing=timing)
    except Exception as e:  # out of registers or shared memory is known only at launch
        torch.cuda.synchronize()
        return replace(
            candidate,
            status=REFUSED,
            reason=errors.described(e),
        )


def _repeats(run: Run, sets: Sequence[list[torch.Tensor]]) -> bool:
    """Whether equal inputs give equal bits in every one of many calls on cold caches: generated kernels have a fixed order of
    sums, so one that does not is a race that a single check may miss. `sets` are copies of the same inputs."""

    def bits(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [y.view(torch.uint8) for y in run(inputs)]  # NaN equals itself

    first = bits(sets[0])
    return all(
        torch.equal(a, b)
        for n in range(max(_REPEATS, len(sets)))
        for a, b in zip(first, bits(sets[n % len(sets)]), strict=True)
    )


def _result(device: str, candidates: Sequence[MeasuredCandidate]) -> TuneResult:
    order = {MEASURED: 0, RANKED: 1, REFUSED: 2}
    ranked = tuple(sorted(candidates, key=lambda c: (order[c.status], c.chain is None, c.us)))
    usable = [c for c in ranked if c.status != REFUSED]
    library = next(c for c in ranked if c.is_library)
    searched = next((c for c in usable if not c.is_library), None)
    return TuneResult(device, usable[0] if usable else library, searched, library, ranked)


def run_of(program: triton.GeneratedProgram) -> Run:
    """The `run` function of a generated program."""
    return compiler.load(program.source, program.digest).run
