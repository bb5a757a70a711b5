"""`superoptimize()`: search for faster kernels that are proven equivalent to a program."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mirage_hf import errors
from mirage_hf.graph import conveniences, json_format, symbolic
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.pipeline import checkpoint as checkpoints
from mirage_hf.pipeline import superoptimizer_options, versions
from mirage_hf.pipeline.checkpoint import CheckpointFile
from mirage_hf.pipeline.find_outcome import NewOutcome, find_outcome, with_notes
from mirage_hf.pipeline.memory import ResultMemory
from mirage_hf.pipeline.request import Request
from mirage_hf.pipeline.results import NoResults, Results, ZooResults
from mirage_hf.pipeline.search_result import SearchResult, result_of
from mirage_hf.pipeline.windows import ProgressCallback
from mirage_hf.search import counter_labels
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.search.search_report import Counters, StopReason
from mirage_hf.tune.launch_restriction import LaunchRestriction
from mirage_hf.zoo.key import ANY_TARGET, key_of
from mirage_hf.zoo.store import ZooPath, user_store

_memory: ResultMemory[SearchResult] = ResultMemory()


@conveniences.superoptimize.register
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
    clusters: bool = False,
    checkpoint: str | Path | None = None,
    seed: int = 0,
    verbose: bool = False,
    save_codes: bool | str | Path = False,
    progress: ProgressCallback | None = None,
    cache: bool = True,
) -> SearchResult:
    """Search for faster kernels that are proven equivalent to `graph`.

    Args:
        graph: The tensor program.
        config: A preset of restrictions: "attention", "lora" or "mlp".
        backend: "auto" and "triton" measure candidates if there is a GPU. "cuda" does so with
            kernels in CUDA C++ only, which need the packages cuda-bindings and nvidia-cuda-nvrtc.
            "cpu" never measures; the cost model ranks candidates. Results run where their inputs
            are.
        griddims: Allowed numbers of blocks per grid dim. Every kernel of a result keeps to them.
        blockdims: Allowed numbers of threads per dim of a block.
        imaps: Allowed maps of every tensor that a kernel reads. A map says which tensor dim each
            grid dim cuts, as a dict like {"x": 0, "y": None} or a tuple like (0, -1, -1).
        omaps: The same for every tensor that a kernel stores.
        fmaps: Allowed tensor dims that the loop may walk in a tensor that a kernel reads. None
            among them allows a tensor that the loop does not walk.
        franges: Allowed numbers of loop trips.
        max_kernels: The most kernels of a result.
        max_block_ops: The most ops in one kernel.
        time_limit: The most seconds of the search. Default: MIRAGE_HF_SEARCH_SECONDS, else 60.
        clusters: Also find kernels whose blocks form thread-block clusters (sm_90) and add up
            splits of an axis among each other. They are CUDA C++. So `backend` must be "cpu" or
            "cuda", or "auto" on a GPU: then Triton and CUDA kernels are measured side by side.
        checkpoint: A file to load the result from, or to keep it in. It is used instead of the
            cache.
        seed: The seed of the proofs' random inputs.
        verbose: Write progress and the report to stderr.
        save_codes: Also write every result's Triton program to a folder. True: to mirage_codes.
        progress: Called as progress("search", Counters), ("verify", Accepted or Rejected) and
            ("tune", (done, total, what)). A true result for Counters ends the search.
        cache: Use and keep results of earlier calls, in this process and in the user's cache on
            disk. The report of a result from disk says that it was loaded. False searches anew.

    Returns:
        The µGraphs found, never empty.

    Raises:
        SearchError: An option has an impossible value, or no kernel keeps to the restrictions.
        GraphError: The graph has no ops.
        FormatError: The checkpoint is damaged, for something else, or holds a µGraph that is not
            proven again.
    """
    superoptimizer_options.check_graph(graph)
    superoptimizer_options.check_types(
        seed=seed,
        verbose=verbose,
        clusters=clusters,
        cache=cache,
        checkpoint=checkpoint,
        save_codes=save_codes,
        progress=progress,
    )
    symbolic.check(graph)
    options, restriction = superoptimizer_options.search_options(
        config=config,
        backend=backend,
        griddims=griddims,
        blockdims=blockdims,
        franges=franges,
        maps={"imaps": imaps, "omaps": omaps, "fmaps": fmaps},
        max_kernels=max_kernels,
        max_block_ops=max_block_ops,
        time_limit=time_limit,
        clusters=clusters,
    )
    if (clusters or backend == "cuda") and symbolic.dims_of(graph):
        option = "clusters=True" if clusters else "backend='cuda'"
        raise errors.SearchError(
            f"superoptimize: the program has symbolic dims, which {option} does not support; give "
            "each its size"
        )
    if checkpoint is not None:
        superoptimizer_options.check_checkpoint(Path(checkpoint))
    folder = superoptimizer_options.codes_folder(save_codes)
    request = _request(graph, options, restriction, seed, backend, clusters)
    progress = progress or (_printer() if verbose else None)
    if checkpoint is not None:
        file = CheckpointFile(Path(checkpoint), checkpoints.identity(request))
        result = _searched(request, file, max_kernels, progress)
    elif cache:
        result = _cached(request, backend, max_kernels, progress)
    else:
        result = _searched(request, NoResults(), max_kernels, progress)
    if verbose:
        print(result.report, file=sys.stderr)
    if folder is not None:
        for number, ugraph in enumerate(result):
            _save_code(ugraph, folder / f"ugraph_{number}")
    return result


def _save_code(ugraph: UGraph, path: Path) -> None:
    """Write a µGraph's kernels as CUDA C++ if all are CUDA kernels, else as a Python file.

    Warns:
        UserWarning: There is no file for them.
    """
    schedules = ugraph.schedules or ()
    try:
        if ugraph.is_clustered or any(s.cuda for s in schedules):
            with contextlib.suppress(errors.CodegenError):  # a library call, or a Triton kernel
                ugraph.generate_cuda_program(path.with_suffix(".cu"))
                return
        ugraph.generate_triton_program(path.with_suffix(".py"))
    except errors.CodegenError as e:
        warnings.warn(f"superoptimize: save_codes: no code for {path.name}: {e}", stacklevel=3)


def _request(
    graph: KernelGraph,
    options: SearchOptions,
    restriction: LaunchRestriction | None,
    seed: int,
    backend: str,
    clusters: bool,
) -> Request:
    graph = graph.copy()  # the caller may add ops to theirs
    device = None
    if backend != "cpu" and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    request = Request(
        graph,
        key_of(graph, ANY_TARGET),
        options,
        seed=seed,
        restriction=restriction,
        device=device,
        all_candidates=True,
        generators=superoptimizer_options.generators(backend, clusters),
    )
    return replace(request, key=key_of(graph, ANY_TARGET, _options_digest(request)))


def _options_digest(request: Request) -> str:
    """Return a digest of everything except the target that decides which µGraphs are found."""
    content = {
        "identity": checkpoints.identity(request),
        "package": versions.package_version(),
        "search": versions.search_version(),
    }
    return json_format.digest(content)


def _cached(
    request: Request, backend: str, max_kernels: int | None, progress: ProgressCallback | None
) -> SearchResult:
    """Return the result in this process's memory, or in the user's cache, or search."""
    memory_key = (request.key.digest, backend, max_kernels, request.device)
    remembered = _memory.get(memory_key)
    if remembered is not None:
        return remembered.of(request.program)
    result = _searched(request, ZooResults(ZooPath((user_store(),))), max_kernels, progress)
    is_finished = result.report.stop != StopReason.INTERRUPTED
    if is_finished and any(u.is_fused for u in result):
        _memory.put(memory_key, result)
    return result


def _searched(
    request: Request, results: Results, max_kernels: int | None, progress: ProgressCallback | None
) -> SearchResult:
    new = find_outcome(request, results, progress)
    assert isinstance(new, NewOutcome)  # a stored kernel is never looked up for all candidates
    outcome = new.outcome
    if new.unkept:
        outcome = with_notes(outcome, f"the result was not kept: {new.unkept}")
    return result_of(outcome, max_kernels)


def _printer() -> ProgressCallback:
    """Return a `progress` that writes a line to stderr whenever it changes."""
    last = ""

    def show(stage: str, detail: object) -> None:
        nonlocal last
        line = stage
        if isinstance(detail, Counters):
            rows = counter_labels.rows(detail)
            shown = [f"{number} {label}" for group, label, number in rows if group != "pruned"]
            line = f"{stage}: {', '.join(shown)}"
        if line != last:
            print(line, file=sys.stderr)
            last = line

    return show
