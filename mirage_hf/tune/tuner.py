"""Choose kernels by measuring: searched µGraphs × ranked schedules, and always the library path.

Candidates compile in parallel, are checked, and are timed on cold inputs.
"""

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
from mirage_hf.codegen.placement import PlacedOp, place_kernels
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

#: Called as progress(done, total, what).
TuneProgress = Callable[[int, int, str], Any]

#: The schedules to try for an op on a device, best first.
Schedules = Callable[[KernelOp, Device], Sequence[Schedule]]

#: Candidates estimated to take this many times the best estimate are not tried.
HOPELESS = 3.0

#: So many candidates in a row that are no better, in the order of estimates, end the measuring.
PATIENCE = 24

#: Least relative gain that counts as better.
LEAST_GAIN = 0.005

#: Least relative gain of a whole layer that counts as better.
LEAST_OF_LAYER = 0.002

#: Times the fastest's time, alone and as a layer, at which measuring a candidate stops.
SLOW, SLOW_LAYER = 1.3, 1.02

#: How many of the fastest are improved step by step.
CLIMBERS = 3

#: Candidates to measure in a chain as well: so many of the fastest, up to so many times the best
#: time. Kernels that hold their weights while they wait gain in a chain, so the order changes.
CHAINED, NEARLY = 16, 1.06

#: Fewest calls whose results are compared with each other.
_REPEATS = 16

RANKED, MEASURED, REFUSED = "ranked", "measured", "refused"


@dataclass(frozen=True)
class MeasuredCandidate:
    """A µGraph with a schedule for each of its block graphs, and what measuring it gave.

    Attributes:
        ugraph: The µGraph.
        schedules: One per block graph.
        estimate_us: The cost model's estimate.
        status: "ranked" (estimated only), "measured", or "refused".
        reason: Why it was refused: it does not compile, or its numbers are wrong.
        timing: The time of calls on their own.
        chain: The time in a chain of dependent kernels, measured for the fastest only.
    """

    ugraph: UGraph
    schedules: tuple[Schedule, ...]
    estimate_us: float
    status: str = RANKED
    reason: str = ""
    timing: Timing | None = None
    chain: Timing | None = None
    #: A promise about what is launched next, see `place_kernels`.
    next_may_launch_early: bool = False

    def placed(self) -> tuple[PlacedOp, ...]:
        """Return the kernels as they run."""
        return place_kernels(self.ugraph, self.next_may_launch_early)

    def generate(self) -> triton.GeneratedProgram:
        """Generate the candidate's kernels."""
        return triton.generate(
            self.ugraph, self.schedules, next_may_launch_early=self.next_may_launch_early
        )

    @property
    def us(self) -> float:
        """The best known time: in a chain, alone, or the estimate."""
        return self.chain.us if self.chain else self.timing.us if self.timing else self.estimate_us

    @property
    def is_library(self) -> bool:
        """Whether this is the library path."""
        return not self.ugraph.is_fused

    def to_dict(self) -> dict[str, Any]:
        """Return the candidate as plain data."""
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
    """What was tried for one program on one device: times in µs, or estimates without a GPU.

    Attributes:
        device: The GPU's name.
        best: The fastest candidate.
        best_searched: The fastest with a generated kernel, kept even if the library is faster. None
            if all were refused.
        library: The library path.
        candidates: All candidates, best first.
    """

    device: str
    best: MeasuredCandidate
    best_searched: MeasuredCandidate | None
    library: MeasuredCandidate
    candidates: tuple[MeasuredCandidate, ...]

    @property
    def measured(self) -> bool:
        """Whether anything was measured."""
        return self.best.timing is not None

    @property
    def searched(self) -> tuple[MeasuredCandidate, ...]:
        """Measured candidates with generated kernels."""
        return tuple(c for c in self.candidates if c.status == MEASURED and not c.is_library)

    def ugraphs(self) -> tuple[UGraph, ...]:
        """Return every µGraph that was not refused, once, with its best schedules, best first."""
        best: dict[int, UGraph] = {}
        for c in self.candidates:
            if c.status != REFUSED:
                best.setdefault(
                    id(c.ugraph.kernels),
                    replace(c.ugraph, schedules=c.schedules) if c.schedules else c.ugraph,
                )
        return tuple(best.values())

    def program(self) -> triton.GeneratedProgram:
        """Return the generated program of the fastest candidate."""
        return self.best.generate()

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data."""
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
    next_may_launch_early: bool = False,
) -> list[MeasuredCandidate]:
    """Return candidates and the library path by the cost model alone, best estimate first.

    Raises:
        CodegenError: A block graph has no kernel at all.
    """
    model = device or H200
    found = [_library(ugraphs[0].program, model)] if ugraphs else []
    for ugraph in ugraphs:
        if ugraph.is_fused:
            found += itertools.islice(
                _scheduled(ugraph, model, schedules or space.schedules, next_may_launch_early),
                per_graph,
            )
    best = min((c.estimate_us for c in found if not c.is_library), default=0.0)
    return sorted(
        (c for c in found if c.is_library or c.estimate_us <= HOPELESS * best),
        key=lambda c: c.estimate_us,
    )


def _library(program: KernelGraph, model: Device) -> MeasuredCandidate:
    """Return the library path as a candidate."""
    library = library_ugraph(program)
    return MeasuredCandidate(library, (), sum(library_us(op, model) for op in library.kernels.ops))


def _scheduled(
    ugraph: UGraph, model: Device, schedules: Schedules, next_may_launch_early: bool
) -> Iterator[MeasuredCandidate]:
    """Yield a µGraph with the n-th best schedule of every block graph, if all have one."""
    ops = place_kernels(ugraph, next_may_launch_early)
    ranked = [schedules(op, model) for op in ops]
    if not all(ranked):
        return
    # Kernels store these rows themselves.
    stored = set(map(id, effects.stored(ugraph.kernels).values()))
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
        yield MeasuredCandidate(
            ugraph, chosen, own + rest, next_may_launch_early=next_may_launch_early
        )


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
    next_may_launch_early: bool = False,
) -> TuneResult:
    """Measure candidates for one program on a GPU.

    Args:
        ugraphs: µGraphs of the same program.
        device: The GPU. Without one, the cost model ranks.
        progress: Called as progress(done, total, what).
        per_graph: Schedules of each µGraph to try.
        replays: Replays of each timing.
        schedules: The schedules to try for an op, best first. By default the whole space.
        rounds: Afterwards, so many rounds of candidates one step away from the fastest.
        regroup: Also try other numbers of splits.
        next_may_launch_early: See `placement.place_kernels`.

    Raises:
        CodegenError: There is no µGraph. A candidate that fails is refused with a reason, never
            raised.
    """
    if not ugraphs:
        raise errors.CodegenError(
            "tune: no µGraph given; search first, or pass library_ugraph(program)"
        )
    device = torch.device(device)
    if device.type != "cuda":
        candidates = rank(
            ugraphs,
            per_graph=per_graph,
            schedules=schedules,
            next_may_launch_early=next_may_launch_early,
        )
        return _result("cost model (no GPU)", candidates)
    say = progress or (lambda done, total, what: None)
    with torch.cuda.device(device), torch.no_grad(), compiler.passing():
        properties = torch.cuda.get_device_properties(device)
        sm = 10 * properties.major + properties.minor
        model = device_named(properties.name, sm)
        candidates = rank(ugraphs, model, per_graph, schedules, next_may_launch_early)
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


#: Candidates of each program to try, and most rounds over all programs, when choosing for a layer.
TOGETHER, SWEEPS = 8, 2


def _diverse(found: Sequence[MeasuredCandidate]) -> list[MeasuredCandidate]:
    """Return the first of every µGraph and set of tiles, then others.

    Tiles affect neighbours most.
    """
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
    """Choose one candidate of each program by the time of all programs run as one layer.

    Starting from the first of each, the candidates of two neighbours are changed at a time as long
    as that helps: how they overlap matters as much as either's time.

    Args:
        choices: Measured candidates of each program, best first, in the order in which the programs
            run.
        device: The GPU.
        replays: Replays of each timing.

    Returns:
        The chosen candidates, and the time of all programs.
    """
    with torch.cuda.device(device), torch.no_grad(), compiler.passing():
        layer = measure.Layer([c[0].ugraph.program for c in choices], device)
        tried = [_diverse(found) for found in choices]
        runs = [[run_of(c.generate()) for c in found] for found in tried]

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
                    # Measure both again, so that one lucky reading decides nothing.
                    again, t = time(chosen), time(other)
                    best = again
                    if t.us < again.us * (1 - LEAST_OF_LAYER):
                        chosen, best = other, t
            if chosen == before:
                break
        return [found[k] for found, k in zip(tried, chosen, strict=True)], best


@dataclass(frozen=True)
class _Bench:
    """What candidates of one program are measured with.

    Attributes:
        sm: Compute capability, as 90.
        check: The numeric check of compiled kernels.
        sets: Cold inputs.
        chain: The chain of dependent calls.
        replays: Replays of each timing.
        say: Called with progress.
    """

    sm: int
    check: NumericCheck
    sets: Sequence[list[torch.Tensor]]
    chain: measure.Chain
    replays: int
    say: TuneProgress

    def measure(
        self, candidates: Sequence[MeasuredCandidate], patience: int, known: float = math.inf
    ) -> list[MeasuredCandidate]:
        """Check and time candidates in order while later ones compile.

        Args:
            candidates: In the order of their estimates.
            patience: Stop after so many in a row that were no better; 0 never stops.
            known: The fastest other time, in µs.
        """
        programs = [c.generate() for c in candidates]
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
        """Return all candidates, the fastest few and the library measured in a chain as well."""
        fast = _fastest(candidates, CHAINED)
        fast = [c for c in fast if c.us <= NEARLY * fast[0].us]
        found = []
        for c in candidates:
            if c.status == MEASURED and (c in fast or c.is_library):
                program = c.generate()
                c = replace(
                    c,
                    chain=self.chain.time(
                        compiler.load(program.source, program.digest).run, self.replays
                    ),
                )
            found.append(c)
        return found


def _fastest(candidates: Sequence[MeasuredCandidate], count: int) -> list[MeasuredCandidate]:
    """Return the fastest searched candidates that were measured."""
    return sorted(
        (c for c in candidates if c.status == MEASURED and not c.is_library), key=lambda c: c.us
    )[:count]


#: Most splits of an axis.
MOST_PARTS = 128


def _regrouped(start: MeasuredCandidate) -> Iterator[tuple[UGraph, tuple[Schedule, ...]]]:
    """Yield a µGraph with half or twice as many splits of an axis, and its schedules refitted."""
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
                    resplit = place_kernels(other, start.next_may_launch_early)
                    ops = zip(start.schedules, start.placed(), resplit, strict=True)
                    yield other, tuple(space.recut(s, old, new) for s, old, new in ops)


def _fits(cost: Cost, model: Device) -> bool:
    """Return whether a kernel's tiles fit. Kernels that do not fit may take minutes to compile."""
    return cost.shared <= model.shared_bytes and cost.registers <= space.REGISTER_BUDGET


def _around(
    starts: Sequence[MeasuredCandidate],
    tried: Sequence[MeasuredCandidate],
    model: Device,
    schedules: Schedules,
    regroup: bool = True,
) -> list[MeasuredCandidate]:
    """Return untried candidates one step away, which the space samples only coarsely."""
    known = {(id(c.ugraph), c.schedules) for c in tried}
    found = []
    have = {str(c.ugraph.kernels) for c in tried if c.ugraph.is_fused}
    for start in starts:
        for other, chosen in _regrouped(start) if regroup else ():
            if str(other.kernels) not in have:
                have.add(str(other.kernels))
                ops = place_kernels(other, start.next_may_launch_early)
                try:
                    costs = [
                        estimate(plan_kernel(op, s), model)
                        for op, s in zip(ops, chosen, strict=True)
                    ]
                except errors.CodegenError:
                    continue
                if all(_fits(c, model) for c in costs):
                    us = sum(c.us for c in costs)
                    found.append(
                        MeasuredCandidate(
                            other, chosen, us, next_may_launch_early=start.next_may_launch_early
                        )
                    )
    for start in starts:
        ops = start.placed()
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
                p.schedule.mma in a and (p.layout.dots or not p.schedule.mma)
                for p, a in zip(plans, allowed, strict=True)
            )
            if (
                permitted
                and all(_fits(c, model) for c in costs)
                and (id(start.ugraph), chosen) not in known
            ):
                known.add((id(start.ugraph), chosen))
                us = sum(c.us for c in costs) + rest
                found.append(
                    MeasuredCandidate(
                        start.ugraph,
                        chosen,
                        us,
                        next_may_launch_early=start.next_may_launch_early,
                    )
                )
    return found


def _steps(start: MeasuredCandidate) -> Iterator[tuple[Schedule, ...]]:
    """Yield schedules that differ in one choice of one kernel."""
    for n, (s, op) in enumerate(zip(start.schedules, start.placed(), strict=True)):
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
                if axis.role is Role.LOOP and tile > 1:
                    # Half the tile, with twice the loads in flight or twice the blocks.
                    half = {"tiles": dict(s.tiles) | {axis.name: tile // 2}}
                    changes.append(half | {"num_stages": 2 * s.num_stages})
                    changes.append(half | {"cooperating_blocks": 2 * s.cooperating_blocks})
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
    """Check and time one compiled candidate."""
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
                reason="gives different results for the same inputs, so it has a race",
            )
        return replace(candidate, status=MEASURED, timing=timing)
    except Exception as e:  # for example out of shared memory, which is known only at launch
        torch.cuda.synchronize()
        return replace(
            candidate,
            status=REFUSED,
            reason=errors.described(e),
        )


def _repeats(run: Run, sets: Sequence[list[torch.Tensor]]) -> bool:
    """Return whether equal inputs give equal bits in every one of many calls on cold caches.

    Generated kernels have a fixed order of sums, so a kernel that does not repeat has a race that
    one check may miss. `sets` are copies of the same inputs.
    """

    def bits(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [y.view(torch.uint8) for y in run(inputs)]  # NaN equals itself

    first = bits(sets[0])
    return all(
        torch.equal(a, b)
        for n in range(max(_REPEATS, len(sets)))
        for a, b in zip(first, bits(sets[n % len(sets)]), strict=True)
    )


def _result(device: str, candidates: Sequence[MeasuredCandidate]) -> TuneResult:
    """Sort candidates and name the best ones."""
    order = {MEASURED: 0, RANKED: 1, REFUSED: 2}
    ranked = tuple(sorted(candidates, key=lambda c: (order[c.status], c.chain is None, c.us)))
    usable = [c for c in ranked if c.status != REFUSED]
    library = next(c for c in ranked if c.is_library)
    searched = next((c for c in usable if not c.is_library), None)
    return TuneResult(device, usable[0] if usable else library, searched, library, ranked)


def run_of(program: triton.GeneratedProgram) -> Run:
    """Return the `run` function of a generated program."""
    return compiler.load(program.source, program.digest).run
