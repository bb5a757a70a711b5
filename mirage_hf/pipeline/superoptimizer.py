"""The superoptimizer's pipeline: search → verify → tune, and what comes out: a sequence of µGraphs that can be called."""

from __future__ import annotations

import operator
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from mirage_hf import errors
from mirage_hf.codegen import compile as compiled
from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.graph import json_format, symbolic
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph, check_inputs, check_tensors, library_ugraph
from mirage_hf.pipeline import checkpoint as checkpoints
from mirage_hf.pipeline import instances, labels, results, torch_op
from mirage_hf.pipeline.checkpoint import CheckpointJournal, Kept
from mirage_hf.pipeline.instances import Family
from mirage_hf.pipeline.search_and_verify import search_and_verify
from mirage_hf.pipeline.windows import ProgressCallback
from mirage_hf.render import html_report
from mirage_hf.search.engine import SearchOptions
from mirage_hf.search.map_restriction import MapRestriction
from mirage_hf.search.search_report import Counters, SearchReport
from mirage_hf.settings import settings
from mirage_hf.tune import space
from mirage_hf.tune.launch_restriction import LaunchRestriction
from mirage_hf.tune.tuner import TuneResult, tune
from mirage_hf.verify.numeric import NumericCheck, judge_on_cpu
from mirage_hf.verify.verdict import Accepted

BACKENDS = ("auto", "triton", "cpu")

PRESETS: dict[str, dict[str, Any]] = {
    # width 1: multiplying sums out found nothing for attention, and skipping it takes qk_norm_attention from 0.82 s to 0.25 s and
    # mla_decode from 0.31 s to 0.16 s. The best mla_decode has 3 kernels and is among the first 48 variants (16 lose it: 12 → 46 µs)
    "attention": {
        "max_block_ops": 48,
        "max_width": 1,
        "max_kernels": 3,
        "max_cuts": 3,
        "max_variants": 48,
    },
    # x·(W + A·B) is two monomials, so width 2. One kernel is best, one more is for ranks whose products do not fit: 16 ms → 10 ms
    "lora": {
        "max_block_ops": 32,
        "max_width": 2,
        "max_kernels": 2,
        "max_cuts": 2,
        "max_variants": 16,
    },
    # one kernel is best with and without the norm, two are the fallback, so one cut: norm_gated_mlp 21 ms → 6 ms
    "mlp": {
        "max_block_ops": 48,
        "max_width": 1,
        "max_kernels": 2,
        "max_cuts": 1,
        "max_variants": 16,
    },
}
"""What each config restricts (see `SearchOptions`); seconds on one core for the programs of tests/programs.py, H200 cost model."""


class SearchResult(Sequence[UGraph]):
    """µGraphs equivalent to `program`, best first; the library path is the last unless it was measured to be faster.

    `report` says why the search stopped and what was refused; `tuned` holds measured times (None without a GPU).
    """

    def __init__(
        self,
        program: KernelGraph,
        ugraphs: Sequence[UGraph],
        report: SearchReport,
        tuned: TuneResult | None = None,
        families: Sequence[Family] = (),
    ):
        self.program, self.report, self.tuned = program, report, tuned
        self._ugraphs, self._families = tuple(ugraphs), tuple(families)
        self._dims = symbolic.dims_of(program)
        self._instances: dict[tuple[int, ...], SearchResult] = {}

    def __len__(self) -> int:
        return len(self._ugraphs)

    def __getitem__(self, i: Any) -> Any:
        return self._ugraphs[i]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the best µGraph; inputs and outputs are lists in the order of `program.inputs` and `program.outputs`. Symbolic dims
        have the sizes that the inputs have."""
        if self._dims:
            check_tensors(self.program, inputs)
            if (
                torch.compiler.is_compiling()
            ):  # a graph is for one size, which index() makes a constant
                shapes = tuple([tuple([operator.index(d) for d in x.shape]) for x in inputs])
                return torch_op.run(inputs, _registered_at(self, shapes))  # type: ignore[no-any-return]
            return self.at(**symbolic.sizes_of(self.program, [x.shape for x in inputs]))._ugraphs[
                0
            ](inputs)
        return self._ugraphs[0](inputs)  # type: ignore[no-any-return]

    def at(self, **sizes: int) -> SearchResult:
        """The results for one size of each symbolic dim (those left out at their maximum), ranked anew; no search, no new proof.

        Errors: GraphError for unknown dims and sizes out of range.
        """
        sizes = symbolic.check_sizes(self.program, sizes)
        key = tuple(sizes.values())
        if key not in self._instances:
            program = symbolic.at(self.program, sizes)
            ugraphs = (*instances.at(self._families, sizes), library_ugraph(program))
            self._instances[key] = SearchResult(program, ugraphs, self.report)
        return self._instances[key]

    def to_html(self, path: str | Path) -> Path:
        """Write one self-contained page: program, report, results with their pictures, text and generated code. Returns the path."""
        return html_report.write(self, path)

    def of(self, program: KernelGraph) -> SearchResult:
        """The same result for an equal program; nothing of it is shared with this one's program, to which ops may be added."""
        return SearchResult(
            program,
            [replace(u, program=program) if u.is_fused else library_ugraph(program) for u in self],
            self.report,
            self.tuned,
            [replace(f, ugraph=replace(f.ugraph, program=program)) for f in self._families],
        )

    def __repr__(self) -> str:
        best = self[0].num_kernels
        return f"<SearchResult: {len(self)} µGraphs, best with {best} kernel{'s' * (best > 1)}, {self.report.stop}>"


def superoptimize(
    graph: KernelGraph,
    config: str | None = None,
    *,
    backend: str = "auto",
    griddims: Iterable[Sequence[int]] | None = None,
    blockdims: Iterable[Sequence[int]] | None = None,
    imaps: Any = None,
    omaps: Any = None,
    fmaps: Any = None,
    franges: Iterable[int] | None = None,
    max_kernels: int | None = None,
    max_block_ops: int | None = None,
    time_limit: float | None = None,
    checkpoint: str | Path | None = None,
    seed: int = 0,
    verbose: bool = False,
    save_codes: bool | str | Path = False,
    progress: ProgressCallback | None = None,
    cache: bool = True,
) -> SearchResult:
    """Search for faster kernels that are proven equivalent to `graph`.

    config: a preset of restrictions ("attention", "lora", "mlp").
    backend: where a GPU is, "auto" and "triton" measure on it; "cpu", and all of them without a GPU, take the cost model's word. Results
    run where their inputs are, whichever it is.
    griddims, blockdims, franges: allowed numbers of blocks per grid dim, of threads per dim, and of loop trips; every kernel of a result
    keeps to them.
    imaps, omaps, fmaps: allowed maps of every tensor that a kernel reads, stores, or walks: the first two as tensor dims by grid dim, in
    dicts like {"x": 0, "y": None} or tuples like (0, -1, -1), the last as tensor dims; see search/map_restriction.py.
    max_kernels, max_block_ops, time_limit: the most kernels of a result, ops in one kernel, and seconds of the search.
    checkpoint: a file to load the result from, or to keep it in.
    seed: of the proofs' random inputs.
    verbose: tell stderr what is reached, and the report.
    save_codes: also write every result's Triton program into a folder; True: into mirage_codes.
    progress: called as progress("search", Counters), ("verify", Accepted or Rejected) and ("tune", (done, of how many, what)); the search
    ends where it returns something true for Counters.
    cache: use, and keep, results of earlier calls in this process and of earlier processes (the latter report stop "loaded"); False
    searches anew, and a checkpoint takes the cache's place.
    Returns a `SearchResult`, never empty.
    Errors: SearchError for impossible options, GraphError for a graph without ops, FormatError for a foreign checkpoint.
    """
    if not isinstance(graph, KernelGraph):
        raise errors.SearchError(
            f"superoptimize: expected a graph made by mi.new_kernel_graph(), got {type(graph).__name__}"
        )
    if not graph.ops:
        raise errors.GraphError(
            "superoptimize: the graph has no ops; add some, for example graph.matmul(x, w)"
        )
    _check_types(
        seed=seed,
        verbose=verbose,
        cache=cache,
        checkpoint=checkpoint,
        save_codes=save_codes,
        progress=progress,
    )
    symbolic.check(graph)
    options, restriction = options_of(
        config,
        backend,
        griddims,
        blockdims,
        franges,
        {"imaps": imaps, "omaps": omaps, "fmaps": fmaps},
        max_kernels,
        max_block_ops,
        time_limit,
    )
    if checkpoint is not None:
        _check_checkpoint(Path(checkpoint))
    folder = Path("mirage_codes" if save_codes is True else save_codes) if save_codes else None
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise errors.SearchError(
                f"superoptimize: save_codes: the folder {folder} cannot be made ({e.strerror}); name another"
            ) from e
    graph = graph.copy()  # the caller may go on with theirs
    identity = checkpoints.identity(graph, options, restriction, seed)
    use_cache = cache and checkpoint is None
    progress = progress or (_printer() if verbose else None)
    here = (
        results.key_of(identity),
        backend,
        max_kernels,
        torch.cuda.current_device() if torch.cuda.is_available() else None,
    )
    result = _memory.get(here) if use_cache else None
    if result is not None:
        result = result.of(graph)
    else:
        kept, allows = _kept(graph, options, seed, progress, checkpoint, identity, use_cache)
        result = _finished(graph, kept, allows, backend, restriction, max_kernels, progress)
        if use_cache and checkpoints.finished(kept.ugraphs, kept.report):
            _memory.put(here, result)
    if verbose:
        print(result.report, file=sys.stderr)
    if folder is not None:
        for n, u in enumerate(result):
            u.generate_triton_program(folder / f"ugraph_{n}.py")
    return result


_memory = results.Memory()

Allows = Callable[[UGraph, bool], bool]
"""Called as allows(ugraph, mma): whether its rounding was found to hold on tensor cores, or with multiply-adds."""


def _kept(
    graph: KernelGraph,
    options: SearchOptions,
    seed: int,
    progress: ProgressCallback | None,
    checkpoint: str | Path | None,
    identity: str,
    use_cache: bool,
) -> tuple[Kept, Allows]:
    """What is known of this program from a checkpoint or the cache on disk, else what a search finds, kept there."""
    key = results.key_of(identity)
    loaded: Kept | CheckpointJournal | errors.Rejected | None = None
    if checkpoint is not None:
        loaded = checkpoints.load(checkpoint, graph, identity)
    elif use_cache:
        loaded = results.load(key, graph, seed)
    if isinstance(loaded, Kept):
        return loaded, _judged()
    journal = loaded if isinstance(loaded, CheckpointJournal) else None
    searched = search_and_verify(graph, options, progress, seed=seed, journal=journal)
    kept = Kept(searched.ugraphs(), searched.report)
    notes = [f"{loaded.reason}; searched anew"] if isinstance(loaded, errors.Rejected) else []
    if journal is not None and journal.loaded:
        notes.append(f"went on from {journal.loaded} finished steps of {checkpoint}")
    if checkpoint is not None and kept.report.stop != "interrupted":
        checkpoints.write(checkpoint, kept, identity)
    elif use_cache and checkpoints.finished(kept.ugraphs, kept.report):
        refused = results.store(key, kept)
        notes += [refused.reason] if refused is not None else []
    known = {id(c.ugraph): c for c in searched.candidates}
    return replace(
        kept, report=replace(kept.report, notes=(*kept.report.notes, *notes))
    ), lambda u, mma: known[id(u)].allows(mma)


def _finished(
    graph: KernelGraph,
    kept: Kept,
    allows: Allows,
    backend: str,
    restriction: LaunchRestriction | None,
    max_kernels: int | None,
    progress: ProgressCallback | None,
) -> SearchResult:
    """Candidates with schedules: measured where a GPU is, else by the cost model; and the library path."""
    found, report, tuned = kept.ugraphs, kept.report, None
    obstacles = {u: why for u in found if (why := space.obstacle(place_kernels(u)))}
    found = tuple(u for u in found if u not in obstacles)
    left_out = [
        f"a µGraph of {u.num_kernels} kernels was left out: {why}" for u, why in obstacles.items()
    ]
    report = replace(report, notes=(*report.notes, *left_out))
    if restriction is not None:
        found = restriction.scheduled(found)
    ugraphs: tuple[UGraph, ...] = (*found, library_ugraph(graph))
    if found and backend != "cpu" and torch.cuda.is_available():
        tuned = tune(
            found,
            device=torch.device("cuda", torch.cuda.current_device()),
            progress=(lambda *detail: progress("tune", detail)) if progress else None,
            schedules=restriction.schedules
            if restriction
            else space.permitted((u, _kinds(u, allows)) for u in found),
            regroup=restriction is None,
        )
        ugraphs = tuned.ugraphs()
    elif restriction is None:
        ugraphs = (*(_scheduled(u, allows) for u in found), library_ugraph(graph))
    if max_kernels is not None:
        ugraphs = tuple(u for u in ugraphs if u.num_kernels <= max_kernels)
        if not ugraphs:
            why = report.reason or "; ".join(r.reason for r in report.rejected) or report.stop
            raise errors.SearchError(
                f"superoptimize: no µGraph of at most {max_kernels} kernels was found ({why}); "
                "allow more with max_kernels"
            )
    families = [instances.family(u, allows) for u in found] if symbolic.dims_of(graph) else []
    return SearchResult(graph, ugraphs, report, tuned, families)


def _kinds(u: UGraph, allows: Allows) -> set[bool]:
    return {mma for mma in (False, True) if allows(u, mma)}


def _judged() -> Allows:
    """For µGraphs from a file, whose verdicts are not in it."""
    checks: dict[object, NumericCheck] = {}
    return lambda u, mma: isinstance(judge_on_cpu(u, checks, mma), Accepted)


def _scheduled(u: UGraph, allows: Allows) -> UGraph:
    """The µGraph with the cost model's first choice among schedules whose rounding holds: nothing is compiled and checked where
    there is no GPU, so the code that is generated must not be one that the numbers refused."""
    may = _kinds(u, allows)
    schedules = tuple(space.chosen(op, may) for op in place_kernels(u))
    return replace(u, schedules=schedules) if None not in schedules else u


def options_of(
    config: str | None,
    backend: str,
    griddims: Any,
    blockdims: Any,
    franges: Any,
    maps: dict[str, Any],
    max_kernels: int | None,
    max_block_ops: int | None,
    time_limit: float | None,
) -> tuple[SearchOptions, LaunchRestriction | None]:
    """Return what `superoptimize`'s options ask of the search and of schedules. Errors: SearchError for impossible ones."""
    if config is not None and (not isinstance(config, str) or config not in PRESETS):
        raise errors.SearchError(
            f"superoptimize: unknown config {config!r}{errors.suggest(str(config), PRESETS)}; "
            f"configs are {', '.join(PRESETS)}, or None"
        )
    if backend == "cuda":
        raise errors.SearchError(
            "superoptimize: CUDA C++ is generated but not launched in this version; search with backend='triton', "
            "then call generate_cuda_program on a result"
        )
    if backend not in BACKENDS:
        raise errors.SearchError(
            f"superoptimize: unknown backend {backend!r}; backends are {', '.join(BACKENDS)}"
        )
    for name, value in (
        ("max_kernels", max_kernels),
        ("max_block_ops", max_block_ops),
        ("time_limit", time_limit),
    ):
        kinds = (int, float) if name == "time_limit" else (int,)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < 1e9
        ):
            what = "a number of seconds" if name == "time_limit" else "an integer"
            raise errors.SearchError(
                f"superoptimize: {name} must be positive, {what} below 1e9; it is {value!r}"
            )
    preset = dict(PRESETS[config]) if config else {}
    preset["maps"] = MapRestriction.of(**maps)
    if max_kernels is not None:
        preset["max_kernels"] = min(
            max_kernels, preset.get("max_kernels", SearchOptions.max_kernels)
        )
    if max_block_ops is not None:
        preset["max_block_ops"] = min(max_block_ops, preset.get("max_block_ops", max_block_ops))
    restriction = (
        LaunchRestriction.of(griddims, blockdims, franges)
        if any(x is not None for x in (griddims, blockdims, franges))
        else None
    )
    return SearchOptions(time_limit=time_limit or settings().search_seconds, **preset), restriction


_TYPES: dict[str, tuple[str, Any]] = {
    "seed": ("an integer", int),
    "verbose": ("True or False", bool),
    "cache": ("True or False", bool),
    "checkpoint": ("a path", (str, Path, type(None))),
    "save_codes": ("True, False or a folder", (bool, str, Path)),
    "progress": ("a function of stage and detail", (Callable, type(None))),
}


def _check_checkpoint(path: Path) -> None:
    """Errors: SearchError for one that could not be written: said now, not after minutes of search."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise errors.SearchError(
            f"superoptimize: checkpoint {path} cannot be kept, there is no folder {folder}; make it first"
        )
    if path.is_dir():
        raise errors.SearchError(f"superoptimize: checkpoint {path} is a folder; name a file")
    if not path.exists() and not os.access(folder, os.W_OK):
        raise errors.SearchError(
            f"superoptimize: checkpoint {path} cannot be kept, {folder} cannot be written to; name another folder"
        )


def _check_types(**given: Any) -> None:
    """Errors: SearchError for an option that is of another type than it has."""
    for name, value in given.items():
        what, kinds = _TYPES[name]
        if (
            not isinstance(value, kinds)
            or (name == "seed" and isinstance(value, bool))
            or value == ""
        ):
            raise errors.SearchError(f"superoptimize: {name} must be {what}, it is {value!r}")


def _printer() -> ProgressCallback:
    last = [""]

    def show(stage: str, detail: object) -> None:
        line = stage
        if isinstance(detail, Counters):
            line = f"{stage}: " + ", ".join(
                f"{number} {label}"
                for group, label, number in labels.rows(detail)
                if group != "pruned"
            )
        if line != last[0]:
            print(line, file=sys.stderr)
            last[0] = line

    return show


# -- running --------------------------------------------------------------------------------------------------------------

_lock = threading.Lock()


@lru_cache(maxsize=512)
def _runner(
    ugraph: UGraph, schedules: tuple[Any, ...] | None
) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    program = triton.generate(
        ugraph, schedules
    )  # they are part of the key: µGraphs that differ in them alone are equal
    return compiled.load(program.source, program.digest).run  # type: ignore[no-any-return]


def run_ugraph(ugraph: UGraph, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a µGraph where its inputs are: generated kernels on a GPU, torch on a CPU. Errors: InputError."""
    if torch.compiler.is_compiling():
        return torch_op.run(inputs, _registered(ugraph.uid))  # type: ignore[no-any-return]
    check_inputs(ugraph.kernels, inputs)
    return _run_unchecked(ugraph, inputs)


@torch.compiler.assume_constant_result
def _registered(uid: int) -> str:
    """Make a µGraph known to the op `mirage_hf::run`; returns its digest there. By number: dynamo of torch 2.11 cannot hand on a
    frozen dataclass."""
    ugraph = UGraph.numbered(uid)
    digest = json_format.digest(json_format.ugraph_to_dict(ugraph))
    torch_op.register(digest, ugraph, partial(_run_unchecked, ugraph), None)
    return digest


@torch.compiler.assume_constant_result
def _registered_at(result: SearchResult, shapes: tuple[tuple[int, ...], ...]) -> str:
    return _registered(result.at(**symbolic.sizes_of(result.program, shapes))[0].uid)  # type: ignore[no-any-return]


def _run_unchecked(ugraph: UGraph, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if not inputs or inputs[0].device.type == "cpu":
        return run_kernel_graph(ugraph.kernels, inputs)
    if inputs[0].device.type != "cuda":
        raise errors.InputError(
            f"inputs are on {inputs[0].device}; kernels run on CUDA devices and on the CPU"
        )
    with _lock:
        run = _runner(ugraph, ugraph.schedules)
    return run(inputs)
