"""The limits and restrictions of a search."""

from __future__ import annotations

from dataclasses import dataclass

from mirage_hf.gpus import H200, Device
from mirage_hf.graph.block import Role
from mirage_hf.search.map_restriction import MapRestriction


@dataclass(frozen=True)
class SearchOptions:
    """Limits and restrictions of one search.

    The search is complete within its limits. Every limit trades the size of the searched space for
    time, and `SearchReport.stop` says which one was hit first. With the defaults, an attention
    block or a gated MLP is searched to the end within seconds.

        >>> options = SearchOptions(time_limit=10, max_kernels=1)
        >>> ranked, report = search(graph, options)
        >>> report.stop
        <StopReason.EXHAUSTED: 'exhausted'>
    """

    #: Wall time in seconds. A search that hits it returns what it has found so far.
    time_limit: float = 60.0
    #: The number of monomials that a product may be multiplied out to. Widths 1, 2, 4, … up to this
    #: one are searched in turn, and each takes several times as long as the one before.
    max_width: int = 2
    #: The number of kernels of one µGraph.
    max_kernels: int = 4
    #: The number of values that one µGraph keeps in device memory between its kernels.
    max_cuts: int = 3
    #: The number of algebraic variants of the program that are cut into kernels.
    max_variants: int = 48
    #: The number of µGraphs that each width returns, cheapest first.
    max_candidates: int = 24
    #: The number of ops in one block graph.
    max_block_ops: int = 64
    #: True: also find kernels whose blocks form clusters and add up splits of an axis. They are
    #: written as CUDA C++ only.
    clusters: bool = False
    #: The number of normal forms held in memory, at about 0.4 KB each.
    max_forms: int = 4_000_000
    #: The number of threads. 0 takes `MIRAGE_HF_THREADS`, or all cores.
    threads: int = 0
    #: Axes by name, each with the role that it must have in every kernel that uses it.
    roles: tuple[tuple[str, Role], ...] = ()
    #: Allowed imaps, omaps and fmaps, or None to allow any.
    maps: MapRestriction | None = None
    #: The GPU whose rates rank the results.
    gpu: Device = H200
