"""Find the kernel that runs a program: `optimize()`'s view of an outcome."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mirage_hf.errors import Rejected
from mirage_hf.gpus import current_gpu
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.pipeline import torch_op
from mirage_hf.pipeline.find_outcome import find_outcome
from mirage_hf.pipeline.outcome import LIBRARY, OURS, Outcome, library_wins
from mirage_hf.pipeline.request import FEW, FULL, QUICK, Effort, Request
from mirage_hf.pipeline.results import SEARCHED, StoredEntry, ZooResults
from mirage_hf.pipeline.searching_ahead import searching
from mirage_hf.pipeline.torch_op import Run
from mirage_hf.pipeline.tuning_ahead import tuning
from mirage_hf.pipeline.windows import ProgressCallback
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.settings import settings
from mirage_hf.verify.accept import KEEP
from mirage_hf.zoo.entry import Entry
from mirage_hf.zoo.key import key_of, target_of
from mirage_hf.zoo.store import zoo_path

#: Candidates that are kept for each kind of arithmetic if estimates decide. With fewer, the kernels
#: that are chosen are slower (docs/decisions/010-tuning.md).
KEEP_UNTUNED = 4


@dataclass(frozen=True)
class Resolved:
    """A program's kernel: how to run it, where it came from, and the evidence.

    Attributes:
        run: Runs the program on a list of inputs.
        source: "searched", "cache", "packaged zoo" or "zoo <name>".
        runs_kernel: True if a searched kernel runs. False if the library does.
        reason: Why the library runs, if it is known, and why a new kernel could not be stored.
        seconds: The time it took to look the kernel up or to make it.
        entry: The kernel with its evidence.
        outcome: The outcome of the search. None if the kernel was looked up.
        unkept: Why a new kernel could not be stored, so that it is made again next time.
        runs_generated: True if `run` runs a generated kernel, which takes outputs to write into.
    """

    run: Run
    source: str
    runs_kernel: bool
    reason: str
    seconds: float
    entry: Entry
    outcome: Outcome | None = None
    unkept: str = ""
    runs_generated: bool = False

    @property
    def why_library(self) -> str:
        """Why the library runs. Empty if a searched kernel does."""
        return "" if self.runs_kernel else self.reason or "the library path is faster here"

    @property
    def ugraph(self) -> UGraph:
        """The µGraph that was found."""
        return self.entry.ugraph

    @property
    def time_us(self) -> float | None:
        """The searched kernel's time with cold caches, or None if it was not measured."""
        return self._time(OURS)

    @property
    def library_us(self) -> float | None:
        """The library path's time with cold caches, or None if it was not measured."""
        return self._time(LIBRARY)

    @property
    def in_place(self) -> tuple[tuple[int, int], ...]:
        """The pairs (output, input), by position, that may share memory in `run(inputs, out)`."""
        return self.entry.generate().in_place if self.runs_generated else ()

    @property
    def is_measured(self) -> bool:
        """Whether the kernel was measured, or there is none."""
        return not self.entry.ugraph.is_fused or bool(self.entry.timings)

    def _time(self, name: str) -> float | None:
        return next((t.median_us for t in self.entry.timings if t.name == name), None)

    @property
    def error_bound(self) -> float:
        """The probability that the proof accepted a wrong µGraph."""
        return self.entry.error_bound

    @property
    def digest(self) -> str:
        """The digest of the entry's key, which names the kernel in compiled graphs."""
        return self.entry.key.digest

    @property
    def candidates(self) -> int:
        """How many candidates the search accepted."""
        return int(self.entry.search.get("candidates", 0))


#: What comes before the error of a search that found no kernel.
NO_KERNEL = "no kernel: "


def why_none(found: Iterable[Resolved | str]) -> str:
    """Return the end of a message: ": " and why there is no kernel. Empty if it is not known.

    Args:
        found: The kernels of the programs that compute the same, or the errors of their searches.
    """
    reasons = [x.removeprefix(NO_KERNEL) if isinstance(x, str) else x.why_library for x in found]
    return next((f": {reason}" for reason in reasons if reason), "")


def kernel_request(
    program: KernelGraph,
    *,
    target: str,
    pattern: str = "program",
    like: KernelGraph | None = None,
    next_may_launch_early: bool = False,
    tune: str = "auto",
    device: torch.device | None = None,
    effort: Effort | None = None,
    max_kernels: int = SearchOptions.max_kernels,
) -> Request:
    """Return the request for the one kernel that runs a program.

    Args:
        program: The tensor program.
        target: The zoo's name of the device that it will run on.
        pattern: The block that the program is.
        like: A program that differs in the sizes of some dims.
        next_may_launch_early: See `placement.place_kernels`.
        tune: "auto" or "full" measure, "never" trusts the cost model.
        device: The GPU that the kernel will run on, if there is one.
        effort: How much is measured. None: as `tune` says.
        max_kernels: The number of kernels of one µGraph.
    """
    runs_generated = target != "cpu"
    keep = KEEP if tune != "never" else KEEP_UNTUNED
    return Request(
        program,
        key_of(program, target, next_may_launch_early=next_may_launch_early),
        SearchOptions(
            time_limit=settings().search_seconds,
            max_kernels=max_kernels,
            gpu=current_gpu(device),
        ),
        pattern=pattern,
        like=like,
        keep=keep if runs_generated else 1,  # a CPU runs the first candidate
        device=device if tune != "never" else None,
        effort=effort or (FULL if tune == "full" else QUICK),
        runs_on=device,
        runs_generated=runs_generated,
    )


@dataclass(frozen=True)
class KernelFinder:
    """Finds kernels with the options of one `optimize()`.

    Attributes:
        device: Where they will run.
        backend: "cpu" runs µGraphs in torch, "triton" runs generated kernels, "auto" decides by
            device.
        zoo: Further kernel zoos. Their kernels are proven again before they run.
        tune: "auto" measures kernels that were never measured, "never" trusts the cost model,
            "full" measures anew, and more candidates.
        noting: Called with each program, its options, and the kernel that was found.
        effort: How much is measured. None: as `tune` says.
    """

    device: torch.device
    backend: str = "auto"
    zoo: str | Path | Sequence[str | Path] | None = None
    tune: str = "auto"
    noting: Callable[[KernelGraph, Mapping[str, Any], Resolved], None] | None = None
    effort: Effort | None = None

    @property
    def gpu(self) -> torch.device | None:
        """The GPU that generated kernels run on. None if torch runs µGraphs."""
        return self.device if self.device.type == "cuda" and self.backend != "cpu" else None

    @property
    def measures(self) -> bool:
        """Whether kernels are measured before one is chosen."""
        return self.tune != "never" and can_measure(self.device, self.backend)

    def measuring_few(self) -> KernelFinder:
        """Return a finder that measures few schedules, if this one would measure as usual."""
        return replace(self, effort=FEW) if self.tune == "auto" else self

    def request(self, program: KernelGraph, **options: Any) -> Request:
        """Return the request for the kernel of a program. The options are those of `resolve`."""
        target = target_of(self.gpu) if self.gpu else "cpu"
        device = self.device if self.measures else self.gpu
        return kernel_request(
            program, target=target, tune=self.tune, device=device, effort=self.effort, **options
        )

    def results(self) -> ZooResults:
        """Return where results are looked up and kept.

        Raises:
            ZooError: `zoo` is neither a folder nor a Hub repo that can be fetched.
        """
        return ZooResults(
            zoo_path(self.zoo),
            must_be_timed=self.measures,
            looks_up=self.tune != "full",
            device=self.gpu,
        )

    def resolve(
        self, program: KernelGraph, progress: ProgressCallback | None = None, **options: Any
    ) -> Resolved:
        """Return the kernel of a program. The arguments are those of `resolver.resolve`."""
        kernel = resolve(
            program,
            device=self.device,
            backend=self.backend,
            zoo=self.zoo,
            tune=self.tune,
            effort=self.effort,
            progress=progress,
            **options,
        )
        if self.noting is not None:
            self.noting(program, options, kernel)
        return kernel

    @contextlib.contextmanager
    def searching(self, wanted: Iterable[tuple[KernelGraph, Mapping[str, Any]]]) -> Iterator[None]:
        """Search in other processes for kernels that are not stored, until the block ends.

        If they are measured, they are measured in turns.

        Args:
            wanted: Programs that `resolve` will be asked for, and their options.

        Raises:
            ZooError: As `results`.
        """
        results = self.results()
        requests = (self.request(program, **options) for program, options in wanted)
        missing = [request for request in requests if not results.holds(request)]
        known = [replace(r, known=results.known_search(r)) for r in missing]
        with searching(known), tuning(known):
            yield


def resolve(
    program: KernelGraph,
    *,
    device: torch.device | str,
    backend: str = "auto",
    zoo: str | Path | Sequence[str | Path] | None = None,
    tune: str = "auto",
    effort: Effort | None = None,
    pattern: str = "program",
    progress: ProgressCallback | None = None,
    like: KernelGraph | None = None,
    next_may_launch_early: bool = False,
    max_kernels: int = SearchOptions.max_kernels,
) -> Resolved:
    """Return the kernel of `program` on `device`: looked up, else made and stored.

    The user's cache is asked first, then the packaged zoo, then `zoo`.

    Args:
        program: The tensor program.
        device: As for `KernelFinder`.
        backend: As for `KernelFinder`.
        zoo: As for `KernelFinder`.
        tune: As for `KernelFinder`.
        effort: As for `KernelFinder`.
        pattern: The block that the program is.
        progress: Called with a stage and its detail.
        like: A program that differs in the sizes of some dims only. The larger of both is searched,
            and rounding is checked at the smaller. A µGraph serves every size.
        next_may_launch_early: A promise about the kernel that is launched after this program, see
            `placement.place_kernels`.
        max_kernels: The number of kernels of one µGraph that is searched for. A kernel that is
            stored already may have more.

    Raises:
        ZooError: `zoo` is neither a folder nor a Hub repo that can be fetched.
    """
    started = time.perf_counter()
    finder = KernelFinder(torch.device(device), backend, zoo, tune, effort=effort)
    request = finder.request(
        program,
        pattern=pattern,
        like=like,
        next_may_launch_early=next_may_launch_early,
        max_kernels=max_kernels,
    )
    result = find_outcome(request, finder.results(), progress)
    seconds = time.perf_counter() - started
    if isinstance(result, StoredEntry):
        return resolved(result.entry, result.source, finder.gpu, seconds)
    entry = result.outcome.best_entry
    return resolved(entry, SEARCHED, finder.gpu, seconds, result.outcome, result.unkept)


def look_up(
    program: KernelGraph,
    *,
    device: torch.device | str,
    backend: str = "auto",
    zoo: str | Path | Sequence[str | Path] | None = None,
    next_may_launch_early: bool = False,
) -> Resolved | Rejected:
    """Return the measured kernel of `program` that a zoo has, or why none is used.

    Nothing is searched. The arguments are those of `resolve`.
    """
    started = time.perf_counter()
    finder = KernelFinder(torch.device(device), backend, zoo)
    request = finder.request(program, next_may_launch_early=next_may_launch_early)
    stored = finder.results().load(request)
    if isinstance(stored, StoredEntry):
        seconds = time.perf_counter() - started
        return resolved(stored.entry, stored.source, finder.gpu, seconds)
    return stored if isinstance(stored, Rejected) else Rejected("it is not stored")


def can_measure(device: torch.device, backend: str) -> bool:
    """Return whether kernels for a device are measured there."""
    return device.type == "cuda" and backend != "cpu"


def resolved(
    entry: Entry,
    source: str,
    gpu: torch.device | None,
    seconds: float,
    outcome: Outcome | None = None,
    unkept: str = "",
) -> Resolved:
    """Return the kernel of an entry, ready to run.

    On a GPU, workers begin to compile it. The other arguments are the fields of `Resolved`.
    """
    reason = library_wins(entry) if entry.ugraph.is_fused else _why_nothing_was_found(entry)
    runs_kernel = not reason
    runs_generated = runs_kernel and gpu is not None
    if runs_generated:
        run = torch_op.launcher(entry.generate(), gpu)
    else:
        graph = entry.ugraph.kernels if runs_kernel else entry.ugraph.program
        run = partial(run_kernel_graph, graph)
    not_kept = f"not kept: {unkept}" if unkept else ""
    all_reasons = "; ".join(filter(None, (reason, not_kept)))
    return Resolved(
        run, source, runs_kernel, all_reasons, seconds, entry, outcome, unkept, runs_generated
    )


def _why_nothing_was_found(entry: Entry) -> str:
    statistics = entry.search
    rejections = "; ".join(dict.fromkeys(statistics.get("refused", ())))
    why = statistics.get("reason") or rejections or statistics.get("stop")
    return f"no single kernel was found: {why}"
