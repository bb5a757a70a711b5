"""Choose kernels by measuring: searched µGraphs × ranked schedules, and always the library path.

Candidates compile in parallel, are timed on cold inputs, and are checked if they are fast.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch

from mirage_hf import errors
from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.generated_program import TRITON
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.errors import Rejected
from mirage_hf.gpus import device_named
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.tune import measure, space
from mirage_hf.tune.candidates import MEASURED, TOO_SLOW, ScheduledCandidate, TuneResult, fastest
from mirage_hf.tune.cuda_schedules import cuda_schedules
from mirage_hf.tune.measure import Run
from mirage_hf.tune.neighbours import neighbours
from mirage_hf.tune.ranking import Schedules, rank_by_estimate
from mirage_hf.tune.turns import undisturbed
from mirage_hf.verify.numeric import NumericCheck
from mirage_hf.verify.verdict import Verdict

#: Called as progress(done, total, what).
TuneProgress = Callable[[int, int, str], Any]

Result = TypeVar("Result")

#: A generator that yields its compilation before it waits for a result, and returns something.
Steps: TypeAlias = Generator[compiler.Compilation, None, Result]

#: A round of measurements ends after this many candidates in a row that are no better.
PATIENCE = 24

#: Least relative gain that counts as better.
LEAST_GAIN = 0.005

#: The fewest candidates that are compiled ahead. Those that are measured in any case are, too.
LEAST_UNDER_WAY = 4

#: Measuring a candidate stops at this many times the fastest's time.
SLOW = 1.3

#: How many of the fastest are improved step by step.
CLIMBERS = 3

#: The most candidates that are also measured in a chain. Kernels that hold their weights while they
#: wait gain in a chain, so the order changes.
CHAINED = 16

#: A candidate that takes more than this many times the best time is neither checked nor measured in
#: a chain. A check takes longer than timing.
NEARLY = 1.06

#: The same for checks of kernels that stream codes. One that is slower by itself may be the best of
#: a layer, because it leaves room on a multiprocessor (see `layer.NEARLY`).
NEARLY_OF_STREAMS = 1.35

#: A library path that takes more than this many times the best time is not measured in a chain. It
#: may take milliseconds, for example if it decodes a weight.
HOPELESS = 3.0

#: Fewest calls whose results are compared with those of an earlier one.
_REPEATS = 16


class Tuning:
    """Measures candidates for one program on a GPU, in steps that end where the compiler is needed.

    `finish` does all of them. Between two steps, another program may be tuned in the same thread.

    Attributes:
        progress: Called as progress(done, total, what).
        result: The result, None until the last step is done.
    """

    def __init__(
        self,
        ugraphs: Sequence[UGraph],
        *,
        device: torch.device | str = "cuda",
        progress: TuneProgress | None = None,
        per_graph: int = 24,
        replays: int = 15,
        schedules: Schedules = space.schedules,
        rounds: int = 3,
        resplit: bool = True,
        next_may_launch_early: bool = False,
        patience: int = PATIENCE,
        checks_slow: bool = True,
        generators: Sequence[str] = (TRITON,),
        in_cuda: Schedules = cuda_schedules,
    ):
        """Take the candidates. Nothing is done yet.

        Args:
            ugraphs: µGraphs of the same program.
            device: The GPU. Without one, the cost model ranks.
            progress: Called as progress(done, total, what).
            per_graph: Schedules of each µGraph to try.
            replays: Replays of each timing.
            schedules: The schedules of Triton kernels to try for an op, best first. By default all.
            rounds: The most rounds of candidates one step away from the fastest, tried afterwards.
            resplit: Also try other numbers of splits.
            next_may_launch_early: See `placement.place_kernels`.
            patience: End a round after so many candidates in a row that were no better; 0 measures
                all. In the first round it counts for each generator.
            checks_slow: Also check the numbers of candidates that are too slow to be chosen. If
                not, and without rounds, candidates are checked from the fastest on, until one is
                right.
            generators: Which generators write the kernels: "triton", "cuda" or both.
            in_cuda: The schedules of CUDA kernels to try for an op, best first.

        Raises:
            CodegenError: There is no µGraph. A candidate that fails is rejected with a reason,
                never raised.
        """
        if not ugraphs:
            raise errors.CodegenError(
                "tune: no µGraph given; search first, or pass library_ugraph(program)"
            )
        self.progress: TuneProgress = progress or (lambda done, total, what: None)
        self.result: TuneResult | None = None
        self._device = torch.device(device)
        self._ranking: Callable[..., list[ScheduledCandidate]] = partial(
            rank_by_estimate,
            ugraphs,
            per_graph=per_graph,
            schedules=schedules,
            next_may_launch_early=next_may_launch_early,
            generators=generators,
            in_cuda=in_cuda,
        )
        self._schedules, self._resplit = schedules, resplit
        self._rounds, self._patience, self._replays = rounds, patience, replays
        self._first_patience, self._checks_slow = patience * len(generators), checks_slow
        self._checks_last = rounds == 0 and not checks_slow
        self._compilation: compiler.Compilation | None = None
        self._steps = self._measured() if self._device.type == "cuda" else self._estimated()

    @property
    def is_waiting(self) -> bool:
        """Whether the next step would wait for the compiler."""
        return self._compilation is not None and self._compilation.is_waiting

    def step(self) -> None:
        """Go on until a result of the compiler is needed, or until the end.

        Raises:
            CodegenError: An earlier step failed, or the tuning was closed.
        """
        is_gpu = self._device.type == "cuda"
        on_device = torch.cuda.device(self._device) if is_gpu else contextlib.nullcontext()
        with on_device, torch.no_grad():
            try:
                self._compilation = next(self._steps)
            except StopIteration as end:
                self._compilation, self.result = None, end.value
                if self.result is None:
                    raise errors.CodegenError("tune: it ended early; begin anew") from None

    def finish(self) -> TuneResult:
        """Do all steps that are left, and return the result."""
        try:
            while self.result is None:
                self.step()
        finally:
            self.close()
        return self.result

    def close(self) -> None:
        """Give up what is not done."""
        self._steps.close()

    def _estimated(self) -> Steps[TuneResult]:
        yield from ()
        return TuneResult.of("cost model (no GPU)", self._ranking())

    def _measured(self) -> Steps[TuneResult]:
        device = self._device
        properties = torch.cuda.get_device_properties(device)
        sm = 10 * properties.major + properties.minor
        gpu = device_named(properties.name, sm)
        candidates = self._ranking(gpu=gpu)
        program = candidates[0].ugraph.program
        with compiler.passing() as load:
            cold = measure.cold_inputs(program, device)
            bench = _Bench(
                sm=sm,
                check=NumericCheck(program, device),
                sets=cold,
                chain=measure.Chain(program, cold),
                replays=self._replays,
                checks_slow=self._checks_slow,
                checks_last=self._checks_last,
                progress=lambda *done: self.progress(*done),
                load=load,
            )
            tried = yield from bench.measure(candidates, self._first_patience)
            if self._checks_last:
                tried = bench.with_one_checked(tried)
            for _ in range(self._rounds):
                best_us = _best_us(tried)
                climbers = fastest(tried, CLIMBERS)
                near = neighbours(climbers, tried, gpu, self._schedules, self._resplit)
                tried += yield from bench.measure(near, self._patience, best_us)
                if best_us == math.inf or _best_us(tried) > best_us * (1 - LEAST_GAIN):
                    break
            return TuneResult.of(properties.name, bench.chained(tried))


def tune(ugraphs: Sequence[UGraph], **options: Any) -> TuneResult:
    """Return the result of a `Tuning` with these arguments."""
    return Tuning(ugraphs, **options).finish()


def _best_us(candidates: Sequence[ScheduledCandidate]) -> float:
    """Return the time of the fastest generated kernels, or infinity if none were measured."""
    return min((c.us for c in fastest(candidates, 1)), default=math.inf)


@dataclass(frozen=True)
class _Bench:
    """The means to check and time candidates of one program on one GPU.

    Attributes:
        sm: Compute capability, as 90.
        check: The numeric check of compiled kernels.
        sets: Cold inputs.
        chain: The chain of dependent calls.
        replays: Replays of each timing.
        checks_slow: As in `Tuning`.
        checks_last: Whether candidates are checked once all are timed.
        progress: Called with progress.
        load: Imports sources for as long as they are tried.
    """

    sm: int
    check: NumericCheck
    sets: Sequence[list[torch.Tensor]]
    chain: measure.Chain
    replays: int
    checks_slow: bool
    checks_last: bool
    progress: TuneProgress
    load: compiler.Load

    def measure(
        self, candidates: Sequence[ScheduledCandidate], patience: int, known_us: float = math.inf
    ) -> Steps[list[ScheduledCandidate]]:
        """Time and check candidates in order while later ones compile. The library is timed first.

        Args:
            candidates: The likely fastest first.
            patience: Stop after so many in a row that were no better; 0 never stops.
            known_us: The fastest other time.
        """
        tried: list[ScheduledCandidate] = []
        order = sorted(candidates, key=lambda c: not c.is_library)
        programs: dict[int, triton.GeneratedProgram] = {}

        def written(n: int) -> triton.GeneratedProgram:
            programs[n] = order[n].generate()
            return programs[n]

        best_us, since_best = known_us, 0
        makers = [partial(written, n) for n in range(len(order))]
        outcomes = compiler.Compilation(makers, self.sm, load=self.load)
        try:
            for n, c in enumerate(order):
                yield outcomes
                outcome = next(outcomes)
                self.progress(n, len(candidates), "measuring")
                done = undisturbed(partial(self.try_one, c, programs.get(n), outcome, best_us))
                tried.append(done)
                if done.is_library or n not in programs:
                    continue
                if done.status == MEASURED and done.us < best_us * (1 - LEAST_GAIN):
                    best_us, since_best = done.us, 0
                else:
                    since_best += 1
                if patience and best_us < math.inf:
                    if since_best >= patience:
                        break
                    outcomes.most_under_way = max(patience - since_best, LEAST_UNDER_WAY)
        finally:
            outcomes.close()
        self.progress(len(candidates), len(candidates), "done")
        return tried

    def try_one(
        self,
        candidate: ScheduledCandidate,
        program: triton.GeneratedProgram | None,
        outcome: errors.CodegenError | None,
        fast_us: float,
    ) -> ScheduledCandidate:
        """Time one compiled candidate, and check it unless it is too slow or checks come last.

        Args:
            candidate: The candidate.
            program: Its generated program, None if it could not be written.
            outcome: The error if it does not compile.
            fast_us: The fastest time so far.
        """
        if outcome is not None:
            return candidate.rejected(str(outcome).splitlines()[0])
        assert program is not None
        try:
            run = measure.run_of(program, self.load)
            if candidate.is_library:
                timing = measure.time_run(run, self.sets, self.replays, math.inf)
                return replace(candidate, status=MEASURED, timing=timing)
            timing = measure.time_run(run, self.sets, self.replays, SLOW * fast_us)
            done = replace(candidate, status=MEASURED, timing=timing)
            if self.checks_last:  # the fastest so far may be wrong
                return done
            if timing.us > _nearly(candidate) * fast_us and not self.checks_slow:
                return replace(done, status=TOO_SLOW)
            return self._checked(done, run)
        except Exception as e:  # for example out of shared memory, which is known only at launch
            torch.cuda.synchronize()
            return candidate.rejected(errors.described(e))

    def with_one_checked(
        self, candidates: Sequence[ScheduledCandidate]
    ) -> list[ScheduledCandidate]:
        """Return all candidates, with the fastest ones checked until one is right.

        Those that are slower count as too slow.
        """
        found = {id(c): c for c in candidates}
        is_done = False
        for c in fastest(candidates, len(candidates)):
            if is_done:
                found[id(c)] = replace(c, status=TOO_SLOW)
                continue
            found[id(c)] = undisturbed(partial(self._checked_anew, c))
            is_done = found[id(c)].status == MEASURED
        return [found[id(c)] for c in candidates]

    def _checked_anew(self, candidate: ScheduledCandidate) -> ScheduledCandidate:
        """Check a candidate whose kernels are loaded again."""
        try:
            return self._checked(candidate, measure.run_of(candidate.generate(), self.load))
        except Exception as e:
            torch.cuda.synchronize()
            return candidate.rejected(errors.described(e))

    def _checked(self, candidate: ScheduledCandidate, run: Run) -> ScheduledCandidate:
        """Check a candidate. Return it if it is right, else as rejected with the reason."""
        verdict = self.check.judge(run)
        if isinstance(verdict, Rejected):
            return candidate.rejected(verdict.reason)
        if not _repeats(run, self.sets):
            return candidate.rejected(
                "gives different results for the same inputs, so it has a race"
            )
        return candidate

    def chained(self, candidates: Sequence[ScheduledCandidate]) -> list[ScheduledCandidate]:
        """Return all candidates, the fastest few and the library measured in a chain as well."""
        fast = fastest(candidates, CHAINED)
        best_us = fast[0].us if fast else math.inf
        fast = [c for c in fast if c.us <= NEARLY * best_us]
        found = []
        for c in candidates:
            is_rival = c.is_library and c.us <= HOPELESS * best_us
            if c.status == MEASURED and (c in fast or is_rival):
                run = measure.run_of(c.generate(), self.load)
                c = replace(c, chain=undisturbed(partial(self.chain.time, run, self.replays)))
            found.append(c)
        return found


def _nearly(candidate: ScheduledCandidate) -> float:
    """Return how many times as long as the fastest kernel a candidate may take to be checked."""
    streams = any(s.persistent_blocks for s in candidate.schedules)
    return NEARLY_OF_STREAMS if streams else NEARLY


def check_compiled(
    ugraph: UGraph,
    schedules: Sequence[Schedule],
    device: torch.device,
    next_may_launch_early: bool = False,
) -> Verdict:
    """Compile a µGraph's kernels and check their numbers on a GPU, without timing them.

    Args:
        ugraph: The µGraph.
        schedules: One schedule for each of its block graphs.
        device: The GPU.
        next_may_launch_early: See `placement.place_kernels`.
    """
    program = triton.generate(ugraph, schedules, next_may_launch_early=next_may_launch_early)
    with torch.cuda.device(device), torch.no_grad(), compiler.passing() as load:
        return _checked(program, ugraph.program, device, load)


def _checked(
    program: triton.GeneratedProgram, graph: KernelGraph, device: torch.device, load: compiler.Load
) -> Verdict:
    """Compile a generated program and check its numbers."""
    properties = torch.cuda.get_device_properties(device)
    try:
        compiler.ahead_of_time(program, 10 * properties.major + properties.minor, load)
        run = measure.run_of(program, load)
        verdict = NumericCheck(graph, device).judge(run)
        if isinstance(verdict, Rejected):
            return verdict
        if not _repeats(run, measure.cold_inputs(graph, device)):
            return Rejected("different results for the same inputs, so it has a race")
        return verdict
    except Exception as e:  # for example out of shared memory, which is known only at launch
        torch.cuda.synchronize()
        return Rejected(errors.described(e))


def _repeats(run: Run, sets: Sequence[list[torch.Tensor]]) -> bool:
    """Return whether equal inputs give equal bits in every one of many calls on cold caches.

    Generated kernels have a fixed order of sums. A kernel that does not repeat has a race, which
    one check may miss. Sets are copies of the same inputs, except for indices.
    """
    alike = [next(k for k, x in enumerate(sets) if _has_equal_indices(x, s)) for s in sets]
    known: dict[int, list[torch.Tensor]] = {}
    for n in range(len(set(alike)) + max(_REPEATS, len(sets))):
        results = [y.view(torch.uint8) for y in run(sets[n % len(sets)])]  # NaN equals itself
        first = known.setdefault(alike[n % len(sets)], results)
        if not all(map(torch.equal, results, first)):
            return False
        del results  # before the next call makes others
    return True


def _has_equal_indices(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """Return whether the integers of two sets of inputs are equal. Some of them are indices."""
    pairs = zip(a, b, strict=True)
    return all(x is y or x.is_floating_point() or torch.equal(x, y) for x, y in pairs)
