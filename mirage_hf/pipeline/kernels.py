"""Kernels for programs: from the user's cache, the packaged zoo or a named one; else searched, verified, tuned and kept."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.plan import WGMMA_TAKES_8_COLUMNS, plan_kernel
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.errors import CodegenError, Rejected, ZooError
from mirage_hf.graph import symbolic
from mirage_hf.graph.block import Role
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph, KernelOp
from mirage_hf.graph.ugraph import UGraph, library_ugraph
from mirage_hf.pipeline import torch_op
from mirage_hf.pipeline.results import search_version
from mirage_hf.pipeline.search_and_verify import search_and_verify
from mirage_hf.pipeline.torch_op import Run
from mirage_hf.pipeline.windows import ProgressCallback
from mirage_hf.search.engine import SearchOptions
from mirage_hf.settings import settings
from mirage_hf.tune import space
from mirage_hf.tune.cost import H200, Device, estimate
from mirage_hf.tune.measure import Timing
from mirage_hf.tune.tuner import MOST_PARTS, MeasuredCandidate, TuneResult, together
from mirage_hf.tune.tuner import tune as measure
from mirage_hf.verify.accept import KEEP, Candidate, kind_of
from mirage_hf.zoo.entry import Entry, Measurement
from mirage_hf.zoo.key import Key, key_of
from mirage_hf.zoo.store import Chain, Store, chain, packaged_store, user_store

SEARCHED, CACHE, ZOO = "searched", "cache", "packaged zoo"
OURS, LIBRARY = "searched kernel", "library"
CHAINED = ", in a chain of dependent kernels"


@dataclass(frozen=True)
class Resolved:
    """A program's kernel: how to run it, where it came from, and the evidence.

    `is_fused` says whether the searched kernel runs; where the library was measured to be faster (or nothing was found) it
    does not, `reason` says so, and `run` is the library path. Times are µs, cold, None where nothing was measured.
    """

    run: Run
    source: str
    ugraph: UGraph
    is_fused: bool
    reason: str
    seconds: float
    time_us: float | None
    library_us: float | None
    error_bound: float
    digest: str
    candidates: int
    entry: Entry
    made: _Made | None = None
    """What was found, where it was not looked up."""
    unkept: str = ""
    """Why what was made could not be kept, so that it is made again next time."""


def target_of(device: torch.device) -> str:
    """The zoo's name of a device: "sm_90" …, or "cpu"."""
    if device.type != "cuda":
        return "cpu"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def resolve(
    program: KernelGraph,
    *,
    device: torch.device | str,
    backend: str = "auto",
    zoo: str | Path | Sequence[str | Path] | None = None,
    tune: str = "auto",
    pattern: str = "program",
    progress: ProgressCallback | None = None,
    like: KernelGraph | None = None,
) -> Resolved:
    """Return the kernel of `program` on `device`: looked up (user's cache, packaged zoo, then `zoo`), else made and kept.

    backend: "cpu" takes the torch executor, "triton" generated kernels, "auto" by device. tune: "auto" measures what was
    never measured, "never" takes the cost model's word, "full" measures anew and more. like: a program that differs in the sizes of
    some dims only: the larger of both is searched, numbers are checked at the smaller; a µGraph serves every size. Errors: ZooError.
    """
    start = time.perf_counter()
    device = torch.device(device)
    on_gpu = device.type == "cuda" and backend != "cpu"
    key = key_of(program, target_of(device) if on_gpu else "cpu")
    stores = chain(zoo)
    if tune != "full":
        for store in stores.stores:
            entry = store.get(key)
            if isinstance(entry, Entry) and _serves(entry, on_gpu, tune):
                return _resolved(entry, _source(store), on_gpu, time.perf_counter() - start)
    made = _make(program, key, device, on_gpu, tune, pattern, progress, like)
    return replace(_kept(made.entry(), stores, on_gpu, start), made=made)


def _serves(entry: Entry, on_gpu: bool, tune: str) -> bool:
    """Whether an entry's kernel was timed, where it must have been, and is one that is safe with the Triton that is installed: its text is
    what is generated here. That there is none is for this version of the search to say."""
    if not entry.ugraph.is_fused:
        return entry.search.get("version") == search_version()
    if not on_gpu:
        return True
    if tune != "never" and not entry.timings:
        return False
    if not WGMMA_TAKES_8_COLUMNS:  # as when the packaged ones were made
        return True
    try:
        return triton.generate(entry.ugraph, entry.schedules).source == entry.kernel
    except CodegenError:
        return False


def _kept(entry: Entry, stores: Chain, on_gpu: bool, start: float) -> Resolved:
    if entry.failed:
        kept: Path | Rejected = Rejected(
            "every candidate failed on this GPU, which may pass; the next call tries again"
        )
    else:
        kept = stores.put(entry)
    return _resolved(
        entry,
        SEARCHED,
        on_gpu,
        time.perf_counter() - start,
        kept.reason if isinstance(kept, Rejected) else "",
    )


def at_size(resolved: Resolved, program: KernelGraph, device: torch.device) -> Run:
    """What runs the kernels found for a program on one that differs in the sizes of some dims: the same µGraph, its proof holds for
    every size, with schedules cut to the sizes. Errors: CodegenError, GraphError."""
    if not resolved.is_fused:
        return partial(run_kernel_graph, program)
    if device.type != "cuda":
        return partial(run_kernel_graph, symbolic.for_program(resolved.ugraph, program).kernels)
    try:
        ugraph, schedules = cut_to(
            resolved.ugraph, resolved.ugraph.schedules or resolved.entry.schedules, program
        )
    except CodegenError as e:
        raise CodegenError(f"{resolved.entry.pattern}: {e}") from e
    return torch_op.launcher(triton.generate(ugraph, schedules).source)


def cut_to(
    ugraph: UGraph, schedules: Sequence[Schedule], program: KernelGraph
) -> tuple[UGraph, list[Schedule]]:
    """A µGraph and its schedules for a program that differs from its own in the sizes of some dims. Errors: CodegenError, GraphError."""
    resized = _same_parts(ugraph, symbolic.for_program(ugraph, program))
    chosen = [
        space.recut(s, old, op)
        for s, old, op in zip(schedules, place_kernels(ugraph), place_kernels(resized), strict=True)
    ]
    return resized, chosen


def _same_parts(old: UGraph, new: UGraph) -> UGraph:
    """With axes that blocks hold a part of dealt out in as many parts as keep the parts as long as they were."""
    for op in old.block_ops:
        assert op.block is not None
        for a in op.block.named(Role.TILE):
            same = next(
                o.block for o in new.block_ops if o.block and o.block.stages == op.block.stages
            )
            size = same.axis(a.name).size
            if a.split_axis is not None and size > a.size:
                new = symbolic.with_num_splits(
                    new, a.split_axis, min(MOST_PARTS, -(-size // op.block.split_size(a.name)))
                )
    return new


def for_layer(
    layer: Sequence[Resolved],
    *,
    device: torch.device | str,
    zoo: str | Path | Sequence[str | Path] | None = None,
) -> list[Resolved]:
    """Choose again among the kernels that were just tuned, by the time of all of `layer` one after another, and keep the choice.

    `layer`: what `resolve` gave for the programs that a layer runs, in order. What was looked up, or runs the library, stays.
    """
    start = time.perf_counter()
    if not any(r.made and r.made.tuned for r in layer):
        return list(layer)
    chosen = _together([r.made or r.entry for r in layer], device)
    if isinstance(chosen, Rejected):
        return [
            replace(r, reason="; ".join(x for x in (r.reason, chosen.reason) if x)) if r.made else r
            for r in layer
        ]
    found = list(layer)
    for n, entry in chosen.items():
        kept = _kept(entry, chain(zoo), True, start)
        found[n] = replace(kept, made=layer[n].made, seconds=layer[n].seconds + kept.seconds)
    return found


def make_entries(
    layer: Sequence[Entry | tuple[KernelGraph, str, KernelGraph | None]],
    device: torch.device,
    tune: str = "auto",
    progress: ProgressCallback | None = None,
) -> list[Entry]:
    """Search, verify and tune programs on `device` without looking anything up (what building a zoo does).

    layer: (program, pattern, like as in `resolve`) of what is to be made and entries of what is there, in the order in which a layer runs
    them. Where a GPU times them, the new kernels are chosen for the layer as a whole. Errors: ZooError where that cannot be timed.
    """
    on_gpu = device.type == "cuda"
    parts = [
        x
        if isinstance(x, Entry)
        else _make(
            x[0], key_of(x[0], target_of(device)), device, on_gpu, tune, x[1], progress, x[2]
        )
        for x in layer
    ]
    chosen = _together(parts, device)
    if isinstance(chosen, Rejected):
        raise ZooError(
            f"build a zoo: {chosen.reason}; free memory on {device}, or build on another GPU"
        )
    return [chosen.get(n) or m.entry() for n, m in enumerate(parts) if not isinstance(m, Entry)]


def _together(
    parts: Sequence[_Made | Entry], device: torch.device | str
) -> dict[int, Entry] | Rejected:
    """Entries of the parts that were just made, by position, chosen by the time of all parts that run kernels of ours; none where
    there is no choice."""
    choices = {
        n: c
        for n, p in enumerate(parts)
        if (c := p.contenders() if isinstance(p, _Made) else _as_it_is(p))
    }
    if len(choices) < 2 or not any(isinstance(parts[n], _Made) for n in choices):
        return {}
    failed = ""
    try:
        found, whole = together(list(choices.values()), device=device)
    except RuntimeError as e:  # out of memory among them
        failed = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
    torch.cuda.empty_cache()  # what was timed is as large as a few layers
    if failed:
        return Rejected(f"chosen on its own, as the whole layer could not be timed ({failed})")
    return {
        n: p.entry(c, whole.us)
        for n, c in zip(choices, found, strict=True)
        if isinstance(p := parts[n], _Made)
    }


def _as_it_is(entry: Entry) -> tuple[MeasuredCandidate, ...]:
    """The kernel of an entry as the only choice; none where the library runs."""
    return (
        (MeasuredCandidate(entry.ugraph, entry.schedules, 0.0),)
        if entry.ugraph.is_fused and entry.timings and not _library_wins(entry)
        else ()
    )


def _source(store: Store) -> str:
    known = {user_store().root: CACHE, packaged_store().root: ZOO}
    return known.get(store.root, f"zoo {store.root.name}")


@dataclass(frozen=True)
class _Made:
    """What came of a search: the µGraph to run and, where they were timed, candidates with searched kernels, best first."""

    key: Key
    pattern: str
    ugraph: UGraph
    error_bound: float
    search: dict[str, Any]
    tuned: tuple[MeasuredCandidate, ...] = ()
    library: MeasuredCandidate | None = None

    def contenders(self) -> tuple[MeasuredCandidate, ...]:
        """The candidates that are faster than the library, best first, by each kind of time that both have."""
        library = self.library
        if library is None:
            return self.tuned

        def slower(mine: Timing | None, theirs: Timing | None) -> bool:
            return mine is not None and theirs is not None and mine.us > theirs.us

        chained = [
            c
            for c in self.tuned
            if c.chain and library.chain and not slower(c.chain, library.chain)
        ]
        others = [
            c
            for c in self.tuned
            if not (c.chain and library.chain) and not slower(c.timing, library.timing)
        ]
        return (*chained, *others)

    def entry(
        self, chosen: MeasuredCandidate | None = None, layer_us: float | None = None
    ) -> Entry:
        """With the best or the chosen candidate; `layer_us`: the time of the layer that it was chosen for."""
        best = chosen or next(iter(self.tuned), None)
        ugraph = replace(best.ugraph, schedules=best.schedules) if best else self.ugraph
        timings = (
            (*_timings(OURS, best), *_timings(LIBRARY, self.library))
            if best and self.library
            else ()
        )
        search = self.search | ({"layer_us": round(layer_us, 3)} if layer_us else {})
        generated = triton.generate(ugraph, ugraph.schedules)
        return Entry(
            self.key,
            self.pattern,
            ugraph,
            generated.source,
            tuple(ugraph.schedules or ()),
            timings,
            self.error_bound,
            search,
        )


def _make(
    program: KernelGraph,
    key: Key,
    device: torch.device,
    on_gpu: bool,
    tune: str,
    pattern: str,
    progress: ProgressCallback | None,
    like: KernelGraph | None = None,
) -> _Made:
    options, keep = (
        SearchOptions(time_limit=settings().search_seconds),
        KEEP if on_gpu else 1,
    )  # what nobody times is not worth a proof
    searched = search_and_verify(program, options, progress, like=like, keep=keep)
    report, counters = searched.report, searched.report.counters
    ranked = promising(searched.candidates)

    def made(ugraph: UGraph, reason: str = report.reason, tuned: TuneResult | None = None) -> _Made:
        """`reason`: why the library runs, where it does."""
        tried = {} if tuned is None else {"tried": len(tuned.candidates)}
        stats = {
            "stop": report.stop,
            "reason": reason,
            "seconds": counters.seconds,
            "width": counters.width,
            "examined": counters.examined,
            "values": counters.values,
            "kernels": counters.kernels,
            "candidates": report.found,
            "refused": [r.reason for r in report.rejected],
            "version": search_version(),
            **tried,
        }
        best, library = (
            (tuned.searched, tuned.library) if tuned is not None and tuned.searched else ((), None)
        )
        return _Made(key, pattern, ugraph, report.error_bound or 0.0, stats, best, library)

    if not ranked:
        return made(
            library_ugraph(program),
            next(
                (space.obstacle(place_kernels(c.ugraph)) for c in searched.candidates),
                report.reason,
            ),
        )
    ugraph = _unmeasured(ranked[0], on_gpu)
    if not ugraph.is_fused:
        return made(ugraph, "the numbers of every candidate were refused for all of its schedules")
    if on_gpu and tune != "never":
        graphs, schedules, rounds = _FULL if tune == "full" else _QUICK
        result = measure(
            [c.ugraph for c in ranked[:graphs]],
            device=device,
            per_graph=schedules,
            rounds=rounds,
            schedules=permitted(ranked),
            progress=(lambda *detail: progress("tune", detail)) if progress else None,
        )
        if not result.searched:
            return made(
                library_ugraph(program),
                next((c.reason for c in result.candidates if c.reason), ""),
                result,
            )
        return made(ugraph, tuned=result)
    return made(ugraph)


_QUICK, _FULL = (5, 16, 2), (8, 48, 6)
"""µGraphs, schedules of each, and rounds of steps from the fastest that are measured."""


def permitted(candidates: Sequence[Candidate]) -> Callable[[KernelOp, Device], list[Schedule]]:
    """Schedules whose rounding is known to hold: on tensor cores only where the numbers allow it."""
    return space.permitted(
        (c.ugraph, {mma for mma in (False, True) if c.allows(mma)}) for c in candidates
    )


def promising(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that have a kernel, in the order in which to tune them: by the cost model's estimate of a permitted schedule
    (without one a candidate comes last), but the best of two kernels, of three kinds, third to fifth at the latest: where launches
    overlap a second one costs less than the model says, and what is best kept in between is known when it is measured."""
    usable = [c for c in candidates if not space.obstacle(place_kernels(c.ugraph))]
    schedules_of = permitted(usable)

    def us(c: Candidate) -> float:
        ranked = ((op, schedules_of(op, H200)) for op in place_kernels(c.ugraph))
        return sum(
            estimate(plan_kernel(op, replace(schedules[0], trigger_early=True))).us
            if schedules
            else math.inf
            for op, schedules in ranked
        )

    ordered = sorted(usable, key=us)
    pairs: dict[object, Candidate] = {}
    for c in ordered:
        if c.ugraph.num_kernels == 2:
            pairs.setdefault(kind_of(c.ugraph), c)
    for place, pair in enumerate(list(pairs.values())[:3], 2):
        if ordered.index(pair) > place:
            ordered.remove(pair)
            ordered.insert(place, pair)
    return ordered


def _unmeasured(c: Candidate, on_gpu: bool) -> UGraph:
    """The candidate at its first permitted schedule; the library path on a GPU where it has none (a CPU runs no schedule)."""
    allowed = permitted([c])
    ops = place_kernels(c.ugraph)
    if on_gpu and not all(allowed(op, H200) for op in ops):
        return library_ugraph(c.ugraph.program)
    return replace(
        c.ugraph,
        schedules=tuple((allowed(op, H200) or space.schedules(op, limit=1))[0] for op in ops),
    )


def _timings(name: str, c: MeasuredCandidate) -> tuple[Measurement, ...]:
    """Those that there are: the library path may have failed, as for want of memory."""
    return tuple(
        Measurement(name + how, t.us, t.low, t.high, t.replays)
        for how, t in (("", c.timing), (CHAINED, c.chain))
        if t is not None
    )


def _library_wins(entry: Entry) -> str:
    """Why the library runs instead of an entry's kernel; empty where the kernel does."""
    times = {t.name: t.median_us for t in entry.timings}
    if LIBRARY not in times:
        return ""
    how = CHAINED if all(name + CHAINED in times for name in (OURS, LIBRARY)) else ""
    ours, library = times[OURS + how], times[LIBRARY + how]
    return (
        f"the library path was measured faster ({library:.1f} µs, searched {ours:.1f} µs)"
        if ours > library
        else ""
    )


def _resolved(
    entry: Entry, source: str, on_gpu: bool, seconds: float, unkept: str = ""
) -> Resolved:
    times = {t.name: t.median_us for t in entry.timings}
    fused, reason = entry.ugraph.is_fused, ""
    if not fused:
        why = (
            entry.search.get("reason")
            or "; ".join(dict.fromkeys(entry.search.get("refused", ())))
            or entry.search.get("stop")
        )
        reason = f"no single kernel was found: {why}"
    elif reason := _library_wins(entry):
        fused = False
    if fused and on_gpu:
        run = torch_op.launcher(entry.kernel)
    else:
        run = partial(run_kernel_graph, entry.ugraph.kernels if fused else entry.ugraph.program)
    return Resolved(
        run,
        source,
        entry.ugraph,
        fused,
        "; ".join(filter(None, (reason, unkept and f"not kept: {unkept}"))),
        seconds,
        times.get(OURS),
        times.get(LIBRARY),
        entry.error_bound,
        entry.key.digest,
        int(entry.search.get("candidates", 0)),
        entry,
        unkept=unkept,
    )
