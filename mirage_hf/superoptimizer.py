"""The superoptimizer's pipeline: search → verify → tune, and what comes out: a sequence of µGraphs that can be called."""
from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from mirage_hf import errors
from mirage_hf.codegen import compile as compiled
from mirage_hf.codegen import triton
from mirage_hf.graph import json_format
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph, check_inputs, library_ugraph
from mirage_hf.search.engine import SearchOptions
from mirage_hf.search.report import Counters, SearchReport
from mirage_hf.settings import settings
from mirage_hf.tune import space
from mirage_hf.tune.restrict import Restriction
from mirage_hf.tune.tuner import TuneResult, tune
from mirage_hf.verify.accept import Progress, search_and_verify
from mirage_hf.verify.numeric import NumericCheck, judge_on_cpu
from mirage_hf.verify.verdict import Accepted

BACKENDS = ("auto", "triton", "cuda", "cpu")

PRESETS: dict[str, dict[str, Any]] = {
    "attention": {"max_block_ops": 48, "max_width": 1},
    "lora": {"max_block_ops": 32, "max_width": 2},
    "mlp": {"max_block_ops": 48, "max_width": 1},
}
"""What each config restricts: sums are not multiplied out where the block has none worth it."""

class SearchResult(Sequence[UGraph]):
    """µGraphs equivalent to `program`, best first; the library path is the last unless it was measured to be faster.

    `report` says why the search stopped and what was refused; `tuned` holds measured times (None without a GPU).
    """

    def __init__(self, program: KernelGraph, ugraphs: Sequence[UGraph], report: SearchReport, tuned: TuneResult | None = None):
        self.program, self.report, self.tuned = program, report, tuned
        self._ugraphs = tuple(ugraphs)

    def __len__(self) -> int:
        return len(self._ugraphs)

    def __getitem__(self, i: Any) -> Any:
        return self._ugraphs[i]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the best µGraph; inputs and outputs are lists in the order of `program.inputs` and `program.outputs`."""
        return self._ugraphs[0](inputs)

    def __repr__(self) -> str:
        return f"<SearchResult: {len(self)} µGraphs, best with {self[0].num_kernels} kernels, {self.report.stop}>"


def superoptimize(graph: KernelGraph, config: str | None = None, *, backend: str = "auto",
                  griddims: Iterable[Sequence[int]] | None = None, blockdims: Iterable[Sequence[int]] | None = None,
                  imaps: Any = None, omaps: Any = None, fmaps: Any = None, franges: Iterable[int] | None = None,
                  max_kernels: int | None = None, max_block_ops: int | None = None, time_limit: float | None = None,
                  checkpoint: str | Path | None = None, seed: int = 0, verbose: bool = False,
                  save_codes: bool | str | Path = False, progress: Progress | None = None) -> SearchResult:
    """Search for faster kernels that are proven equivalent to `graph`.

    config: a preset of restrictions ("attention", "lora", "mlp"). backend: "triton", "cuda", "cpu" or "auto" (triton where a
    GPU is). griddims, blockdims, franges: allowed numbers of blocks per grid dim, threads per dim, and loop trips.
    max_kernels: most kernels of a result; max_block_ops: ops in one kernel; time_limit: seconds; checkpoint: a file to load
    the result from, or to keep it in. save_codes: also write every result's Triton program into a folder.
    Returns a `SearchResult`, never empty.
    Errors: SearchError for impossible options, GraphError for a graph without ops, FormatError for a foreign checkpoint.
    """
    if not isinstance(graph, KernelGraph):
        raise errors.SearchError(f"superoptimize: expected a graph made by mi.new_kernel_graph(), got {type(graph).__name__}")
    if not graph.ops:
        raise errors.GraphError("superoptimize: the graph has no ops; add some, for example graph.matmul(x, w)")
    options, restriction = _options(config, backend, griddims, blockdims, franges, {"imaps": imaps, "omaps": omaps, "fmaps": fmaps},
                                    max_kernels, max_block_ops, time_limit)
    identity = _identity(graph, options, restriction, seed)
    loaded = _load_checkpoint(checkpoint, graph, identity)
    if loaded is not None:
        found, report = loaded.ugraphs, loaded.report
        allows = _judged()
    else:
        searched = search_and_verify(graph, options, progress or (_printer() if verbose else None), seed=seed)
        found, report = searched.ugraphs(), searched.report
        known = {id(c.ugraph): c for c in searched.candidates}
        allows = lambda u, mma: known[id(u)].allows(mma)  # noqa: E731
        if checkpoint is not None:
            _save_checkpoint(Path(checkpoint), found, report, identity)
    if restriction is not None:
        found = restriction.scheduled(found)
    ugraphs, tuned = (*found, library_ugraph(graph)), None
    if found and backend != "cpu" and torch.cuda.is_available():
        tuned = tune(found, device=torch.device("cuda", torch.cuda.current_device()),
                     schedules=restriction.schedules if restriction else None)
        ugraphs = tuned.ugraphs()
    elif restriction is None:
        ugraphs = (*(_scheduled(u, allows) for u in found), library_ugraph(graph))
    if max_kernels is not None:
        ugraphs = tuple(u for u in ugraphs if u.num_kernels <= max_kernels)
        if not ugraphs:
            why = report.reason or "; ".join(r.reason for r in report.refused) or report.stop
            raise errors.SearchError(f"superoptimize: no µGraph of at most {max_kernels} kernels was found ({why}); "
                                     "allow more with max_kernels")
    result = SearchResult(graph, ugraphs, report, tuned)
    if verbose:
        print(report, file=sys.stderr)
    if save_codes:
        folder = Path("mirage_codes" if save_codes is True else save_codes)
        folder.mkdir(parents=True, exist_ok=True)
        for n, u in enumerate(result):
            u.generate_triton_program(folder / f"ugraph_{n}.py")
    return result


Allows = Callable[[UGraph, bool], bool]
"""Called as allows(ugraph, mma): whether its rounding was found to hold on tensor cores, or with multiply-adds."""


def _judged() -> Allows:
    """For µGraphs from a file, whose verdicts are not in it."""
    checks: dict[object, NumericCheck] = {}
    return lambda u, mma: isinstance(judge_on_cpu(u, checks, mma), Accepted)


def _scheduled(u: UGraph, allows: Allows) -> UGraph:
    """The µGraph with the cost model's first choice among schedules whose rounding holds: nothing is compiled and checked where
    there is no GPU, so the code that is generated must not be one that the numbers refused."""
    may = {mma: allows(u, mma) for mma in (False, True)}
    chosen = tuple(next((s for s in (*space.schedules(op), space.smallest(op)) if may[s.mma]), None) for op in u.block_ops)
    return replace(u, schedules=chosen) if None not in chosen else u


def _options(config: str | None, backend: str, griddims: Any, blockdims: Any, franges: Any, maps: dict[str, Any],
             max_kernels: int | None, max_block_ops: int | None, time_limit: float | None) -> tuple[SearchOptions, Restriction | None]:
    if config is not None and config not in PRESETS:
        raise errors.SearchError(f"superoptimize: unknown config {config!r}{errors.suggest(config, PRESETS)}; "
                                 f"configs are {', '.join(PRESETS)}, or None")
    if backend not in BACKENDS:
        raise errors.SearchError(f"superoptimize: unknown backend {backend!r}; backends are {', '.join(BACKENDS)}")
    if backend == "cuda":
        raise errors.SearchError("superoptimize: CUDA C++ is generated but not launched in this version; search with backend='triton', "
                                 "then call generate_cuda_program on a result")
    given = [name for name, value in maps.items() if value is not None]
    if given:
        raise errors.SearchError(f"superoptimize: {given[0]} cannot be restricted in this version; "
                                 "leave it None (griddims, blockdims and franges can)")
    for name, value in (("max_kernels", max_kernels), ("max_block_ops", max_block_ops), ("time_limit", time_limit)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
            raise errors.SearchError(f"superoptimize: {name} must be positive, it is {value!r}")
    preset = dict(PRESETS[config]) if config else {}
    if max_block_ops is not None:
        preset["max_block_ops"] = min(max_block_ops, preset.get("max_block_ops", max_block_ops))
    restriction = Restriction.of(griddims, blockdims, franges) if any(x is not None for x in (griddims, blockdims, franges)) else None
    return SearchOptions(time_limit=time_limit or settings().search_seconds, **preset), restriction


def _printer() -> Progress:
    last = [""]

    def show(stage: str, detail: object) -> None:
        line = stage
        if isinstance(detail, Counters):
            line = f"{stage}: {detail.values} values, {detail.kernels} kernels, {detail.seconds:.1f} s"
        if line != last[0]:
            print(line, file=sys.stderr)
            last[0] = line
    return show


# -- checkpoints ----------------------------------------------------------------------------------------------------------

CHECKPOINT = "mirage_hf.checkpoint"
CHECKPOINT_VERSION = 1


@dataclass(frozen=True)
class _Checkpoint:
    ugraphs: tuple[UGraph, ...]
    report: SearchReport


def _identity(graph: KernelGraph, options: SearchOptions, restriction: Restriction | None, seed: int) -> str:
    return json_format.digest({"program": json_format.graph_to_dict(graph), "options": repr(replace(options, threads=0)),
                               "restriction": repr(restriction), "seed": seed, "version": CHECKPOINT_VERSION})


def _load_checkpoint(path: str | Path | None, graph: KernelGraph, identity: str) -> _Checkpoint | None:
    if path is None or not Path(path).exists():
        return None
    where = f"checkpoint {path}"
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        kind, version, owner = data["format"], data["version"], data["identity"]
        intact = data["digest"] == json_format.digest([data["ugraphs"], data["report"]])
        readable = (kind, version) == (CHECKPOINT, CHECKPOINT_VERSION) and intact
        kernels = [json_format.ugraph_from_dict(u, where) for u in data["ugraphs"]] if readable else []
        report = SearchReport(Counters(**data["report"]["counters"]), "loaded", f"from {path}", len(kernels),
                              error_bound=data["report"]["error_bound"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise errors.FormatError(f"{where}: is damaged or not a checkpoint ({e}); delete it, or name another file") from e
    if kind != CHECKPOINT or version != CHECKPOINT_VERSION:
        raise errors.FormatError(f"{where}: is {kind!r} version {version!r}, "
                                 f"this version reads {CHECKPOINT!r} version {CHECKPOINT_VERSION}; name another file")
    if not intact:
        raise errors.FormatError(f"{where}: is damaged, its content does not have the digest that it names; "
                                 "delete it, or name another file")
    if owner != identity:
        raise errors.FormatError(f"{where}: belongs to another program, other options or another version; name another file")
    return _Checkpoint(tuple(UGraph(graph, u.kernels) for u in kernels), report)


def _save_checkpoint(path: Path, ugraphs: Sequence[UGraph], report: SearchReport, identity: str) -> None:
    content = json.loads(json.dumps([[json_format.ugraph_to_dict(u) for u in ugraphs], report.to_dict()]))
    json_format.save_json({"format": CHECKPOINT, "version": CHECKPOINT_VERSION, "identity": identity, "digest": json_format.digest(content),
                           "ugraphs": content[0], "report": content[1]}, path)


# -- running --------------------------------------------------------------------------------------------------------------

_lock = threading.Lock()


@lru_cache(maxsize=512)
def _runner(ugraph: UGraph) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    program = triton.generate(ugraph)
    return compiled.load(program.source, program.digest).run  # type: ignore[no-any-return]


def run_ugraph(ugraph: UGraph, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a µGraph where its inputs are: generated kernels on a GPU, torch on a CPU. Errors: InputError."""
    check_inputs(ugraph.kernels, inputs)
    if not inputs or inputs[0].device.type == "cpu":
        return run_kernel_graph(ugraph.kernels, inputs)
    if inputs[0].device.type != "cuda":
        raise errors.InputError(f"inputs are on {inputs[0].device}; kernels run on CUDA devices and on the CPU")
    with _lock:
        run = _runner(ugraph)
    with torch.cuda.device(inputs[0].device):
        return run(inputs)
