"""A request to the pipeline: a program, and everything that decides which kernels it gets."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mirage_hf.codegen.generated_program import TRITON
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.tune.launch_restriction import LaunchRestriction
from mirage_hf.tune.tuner import PATIENCE
from mirage_hf.verify.accept import KEEP
from mirage_hf.zoo.key import Key
from mirage_hf.zoo.known_search import KnownSearch


@dataclass(frozen=True)
class Effort:
    """How much is measured on a GPU."""

    #: The most µGraphs that are measured. None: all.
    graphs: int | None
    #: Schedules of each µGraph.
    schedules: int
    #: The most rounds of candidates one step away from the fastest.
    rounds: int
    #: A round ends after so many candidates in a row that are no better.
    patience: int


#: For `superoptimize()`, whose results are all shown.
EVERY_GRAPH = Effort(graphs=None, schedules=24, rounds=3, patience=PATIENCE)
#: For `optimize(tune="auto")`.
QUICK = Effort(graphs=5, schedules=16, rounds=2, patience=16)
#: For kernels of prompts, which `optimize(tune="auto")` makes beside those of steps.
FEW = Effort(graphs=2, schedules=8, rounds=0, patience=0)
#: For `optimize(tune="full")`.
FULL = Effort(graphs=8, schedules=48, rounds=6, patience=48)


@dataclass(frozen=True)
class Request:
    """A program, and everything that decides which kernels are found for it.

    Attributes:
        program: The tensor program.
        key: What the result is stored under.
        options: The limits of the search.
        pattern: The block that the program is, or "program".
        seed: The seed of the proofs' random inputs.
        like: A program that differs in the sizes of some dims. The larger of both is searched, and
            rounding is checked at the smaller.
        keep: How many verified candidates are kept.
        restriction: Allowed numbers of blocks, threads and loop trips.
        device: The GPU that candidates are measured on. None: the cost model ranks them.
        effort: How much is measured.
        runs_on: The GPU that the kernels will run on, if it is known.
        runs_generated: True if generated kernels will run. Their schedules must then have accepted
            rounding. False on a CPU, which runs no schedule.
        all_candidates: True if every accepted µGraph is wanted, as in `superoptimize()`. False if
            only the kernel to run is wanted.
        known: A search of the program's structure for other sizes, which saves a new one. None: the
            stores are asked for it.
        generators: Which generators may write the kernels.
    """

    program: KernelGraph
    key: Key
    options: SearchOptions
    pattern: str = "program"
    seed: int = 0
    like: KernelGraph | None = None
    keep: int = KEEP
    restriction: LaunchRestriction | None = None
    device: torch.device | None = None
    effort: Effort = EVERY_GRAPH
    runs_on: torch.device | None = None
    runs_generated: bool = True
    all_candidates: bool = False
    known: KnownSearch | None = None
    generators: tuple[str, ...] = (TRITON,)
