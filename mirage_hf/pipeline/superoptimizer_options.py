"""Check the options of `superoptimize()`, and turn them into limits of search and schedules."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from mirage_hf import errors
from mirage_hf.codegen import cuda_launching
from mirage_hf.codegen.generated_program import CUDA, TRITON
from mirage_hf.gpus import current_gpu
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.search.map_restriction import MapRestriction
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.settings import settings
from mirage_hf.tune.launch_restriction import LaunchRestriction

BACKENDS = ("auto", "triton", "cuda", "cpu")

#: The options that each config sets, see `SearchOptions`. Seconds are on one core, for the programs
#: of tests/helpers/programs.py, with the cost model's H200.
PRESETS: dict[str, dict[str, Any]] = {
    # Multiplying sums out (width 2) found nothing for attention. Width 1 takes qk_norm_attention
    # from 0.82 s to 0.25 s, and mla_decode from 0.31 s to 0.16 s. The best mla_decode has 3 kernels
    # and is among the first 48 variants. The best of the first 16 takes 46 µs instead of 12.
    "attention": {
        "max_block_ops": 48,
        "max_width": 1,
        "max_kernels": 3,
        "max_cuts": 3,
        "max_variants": 48,
    },
    # x·(W + A·B) is two monomials, so width 2. One kernel is best. The second is for ranks whose
    # products do not fit into one. The search takes 10 ms instead of 16.
    "lora": {
        "max_block_ops": 32,
        "max_width": 2,
        "max_kernels": 2,
        "max_cuts": 2,
        "max_variants": 16,
    },
    # One kernel is best with and without the norm, and two are the fallback, so one cut. The search
    # of norm_gated_mlp takes 6 ms instead of 21.
    "mlp": {
        "max_block_ops": 48,
        "max_width": 1,
        "max_kernels": 2,
        "max_cuts": 1,
        "max_variants": 16,
    },
}

#: What each option must be, in words and as types.
_TYPES: dict[str, tuple[str, Any]] = {
    "seed": ("an integer", int),
    "verbose": ("True or False", bool),
    "clusters": ("True or False", bool),
    "cache": ("True or False", bool),
    "checkpoint": ("a path", (str, Path, type(None))),
    "save_codes": ("True, False or a folder", (bool, str, Path)),
    "progress": ("a function of stage and detail", (Callable, type(None))),
}

_MOST = 1e9


def search_options(
    *,
    config: str | None = None,
    backend: str = "auto",
    griddims: Any = None,
    blockdims: Any = None,
    franges: Any = None,
    maps: Mapping[str, Any] | None = None,
    max_kernels: int | None = None,
    max_block_ops: int | None = None,
    time_limit: float | None = None,
    clusters: bool = False,
) -> tuple[SearchOptions, LaunchRestriction | None]:
    """Return the options of the search, and the restriction of launches if there is one.

    The arguments are those of `superoptimize()`; `maps` holds imaps, omaps and fmaps.

    Raises:
        SearchError: An option is impossible.
    """
    _check_config(config)
    _check_backend(backend)
    _check_count("max_kernels", max_kernels)
    _check_count("max_block_ops", max_block_ops)
    _check_seconds(time_limit)
    preset = dict(PRESETS[config]) if config else {}
    preset["maps"] = MapRestriction.of(**(maps or {}))
    if max_kernels is not None:
        most = preset.get("max_kernels", SearchOptions.max_kernels)
        preset["max_kernels"] = min(max_kernels, most)
    if max_block_ops is not None:
        preset["max_block_ops"] = min(max_block_ops, preset.get("max_block_ops", max_block_ops))
    restriction = None
    if any(x is not None for x in (griddims, blockdims, franges)):
        restriction = LaunchRestriction.of(griddims, blockdims, franges)
    if backend == "cuda" and restriction is not None:
        raise errors.SearchError(
            "superoptimize: allowed numbers of blocks, threads and trips hold for Triton kernels; "
            "leave them out with backend='cuda'"
        )
    if clusters:
        _check_clusters(backend, restricted=restriction is not None or preset["maps"] is not None)
        preset["clusters"] = True
    if CUDA in generators(backend, clusters):
        _check_bindings(clusters)
    limit = time_limit or settings().search_seconds
    options = SearchOptions(time_limit=limit, gpu=current_gpu(), **preset)
    return options, restriction


def _check_config(config: object) -> None:
    if config is not None and (not isinstance(config, str) or config not in PRESETS):
        raise errors.SearchError(
            f"superoptimize: unknown config {config!r}{errors.suggest(str(config), PRESETS)}; "
            f"configs are {', '.join(PRESETS)}, or None"
        )


def _check_backend(backend: object) -> None:
    if backend not in BACKENDS:
        raise errors.SearchError(
            f"superoptimize: unknown backend {backend!r}; backends are {', '.join(BACKENDS)}"
        )
    if backend == "cuda" and not torch.cuda.is_available():
        raise errors.SearchError(
            "superoptimize: backend 'cuda' measures kernels, and there is no GPU; search with "
            "backend='cpu', then call generate_cuda_program on a result"
        )


def _check_bindings(clusters: bool) -> None:
    """Check that CUDA kernels can be compiled and launched, before a search for them."""
    try:
        cuda_launching.cuda_bindings()
    except RuntimeError as e:
        more = ". Triton kernels have no clusters: leave out clusters=True" if clusters else ""
        raise errors.SearchError(f"superoptimize: {e}{more}") from e


def generators(backend: str, clusters: bool) -> tuple[str, ...]:
    """Return which generators write the kernels."""
    if backend == "cuda":
        return (CUDA,)
    return (TRITON, CUDA) if clusters and backend == "auto" else (TRITON,)


def _check_clusters(backend: str, restricted: bool) -> None:
    has_gpu = torch.cuda.is_available()
    if backend == "triton" or (backend == "auto" and not has_gpu):
        why = "which Triton does not have" if has_gpu else "and there is no GPU to run it"
        raise errors.SearchError(
            "superoptimize: kernels whose blocks form clusters are generated as CUDA C++, "
            f"{why}; pass backend='{'cuda' if has_gpu else 'cpu'}' with clusters=True"
        )
    if restricted:
        raise errors.SearchError(
            "superoptimize: allowed maps, blocks, threads and trips do not hold for clusters; "
            "leave them out with clusters=True"
        )
    if backend != "cpu" and torch.cuda.get_device_capability() < (9, 0):
        raise errors.SearchError(
            f"superoptimize: {torch.cuda.get_device_name()} has no clusters of thread blocks, "
            "which need compute capability 9.0; leave clusters=True out, or pass backend='cpu'"
        )


def _check_count(name: str, value: object) -> None:
    valid = isinstance(value, int) and not isinstance(value, bool) and 0 < value < _MOST
    if value is not None and not valid:
        raise errors.SearchError(
            f"superoptimize: {name} must be positive, an integer below 1e9; it is {value!r}"
        )


def _check_seconds(value: object) -> None:
    valid = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < _MOST
    if value is not None and not valid:
        raise errors.SearchError(
            "superoptimize: time_limit must be positive, a number of seconds below 1e9; "
            f"it is {value!r}"
        )


def check_graph(graph: object) -> None:
    """Check that there is a program to search for.

    Raises:
        SearchError: `graph` is no kernel graph.
        GraphError: It has no ops.
    """
    if not isinstance(graph, KernelGraph):
        raise errors.SearchError(
            "superoptimize: expected a graph made by mi.new_kernel_graph(), "
            f"got {type(graph).__name__}"
        )
    if not graph.ops:
        raise errors.GraphError(
            "superoptimize: the graph has no ops; add some, for example graph.matmul(x, w)"
        )


def check_types(**given: Any) -> None:
    """Check the types of options, by name.

    Raises:
        SearchError: An option has another type.
    """
    for name, value in given.items():
        what, kinds = _TYPES[name]
        is_bool_seed = name == "seed" and isinstance(value, bool)
        if not isinstance(value, kinds) or is_bool_seed or value == "":
            raise errors.SearchError(f"superoptimize: {name} must be {what}, it is {value!r}")


def check_checkpoint(path: Path) -> None:
    """Check that a checkpoint could be written, before minutes of search.

    Raises:
        SearchError: It could not.
    """
    folder = path.absolute().parent
    if not folder.is_dir():
        raise errors.SearchError(
            f"superoptimize: checkpoint {path} cannot be kept, there is no folder {folder}; "
            "make it first"
        )
    if path.is_dir():
        raise errors.SearchError(f"superoptimize: checkpoint {path} is a folder; name a file")
    if not path.exists() and not os.access(folder, os.W_OK):
        raise errors.SearchError(
            f"superoptimize: checkpoint {path} cannot be kept, {folder} cannot be written to; "
            "name another folder"
        )


def codes_folder(save_codes: bool | str | Path) -> Path | None:
    """Return the folder for generated code, made if it is missing, or None if none is wanted.

    Raises:
        SearchError: The folder cannot be made.
    """
    if not save_codes:
        return None
    folder = Path("mirage_codes" if save_codes is True else save_codes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise errors.SearchError(
            f"superoptimize: save_codes: the folder {folder} cannot be made ({e.strerror}); "
            "name another"
        ) from e
    return folder
