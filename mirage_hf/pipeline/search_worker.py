"""Search for kernels on behalf of another process.

A question and its answer are lines: pickled objects as base64.
"""

from __future__ import annotations

import base64
import itertools
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mirage_hf.codegen.schedule import Schedule
    from mirage_hf.gpus import Device
    from mirage_hf.graph.kernel import KernelGraph, KernelOp
    from mirage_hf.pipeline.search_and_verify import VerifiedCandidates
    from mirage_hf.search.search_options import SearchOptions
    from mirage_hf.zoo.known_search import KnownSearch


@dataclass(frozen=True)
class SearchTask:
    """What decides the outcome of a search. The attributes are those of a `Request`.

    Attributes:
        program: The tensor program.
        like: The same program at other sizes, or None.
        known: A search of the program's structure for other sizes, or None.
        options: The limits of the search.
        seed: The seed of the proofs' random inputs.
        keep: How many candidates are kept.
        next_may_launch_early: See `placement.place_kernels`.
        ranks: True if schedules are wanted, too.
    """

    program: KernelGraph
    like: KernelGraph | None
    known: KnownSearch | None
    options: SearchOptions
    seed: int
    keep: int
    next_may_launch_early: bool
    ranks: bool


@dataclass(frozen=True)
class SearchAnswer:
    """What a worker found.

    Attributes:
        verified: The candidates.
        ranked: The schedules of their kernels, best estimate first.
    """

    verified: VerifiedCandidates
    ranked: dict[tuple[KernelOp, Device], tuple[Schedule, ...]]


def to_line(x: Any) -> str:
    """Return an object as a line of text, without the end of the line."""
    return base64.b64encode(pickle.dumps(x)).decode()


def from_line(line: str) -> Any:
    """Return the object of a line that a process of this package wrote."""
    return pickle.loads(base64.b64decode(line))


def work(task: SearchTask) -> SearchAnswer:
    """Search for a program's kernels, prove and check them, and rank their schedules.

    Raises:
        MirageError: As `search_and_verify`.
    """
    from mirage_hf.codegen.placement import place_kernels
    from mirage_hf.pipeline.reuse import reused
    from mirage_hf.pipeline.search_and_verify import search_and_verify
    from mirage_hf.tune import space

    verified = None
    if task.known is not None:
        verified = reused(
            task.known,
            task.program,
            like=task.like,
            keep=task.keep,
            seed=task.seed,
            next_may_launch_early=task.next_may_launch_early,
        )
    verified = verified or search_and_verify(
        task.program, task.options, seed=task.seed, like=task.like, keep=task.keep
    )
    if not task.ranks:
        return SearchAnswer(verified, {})
    placed = (place_kernels(c.ugraph, task.next_may_launch_early) for c in verified.candidates)
    return SearchAnswer(verified, space.rankings_of(itertools.chain.from_iterable(placed)))


def prepare() -> None:
    """Import what `answer` needs."""
    import torch

    from mirage_hf.codegen import placement  # noqa: F401
    from mirage_hf.pipeline import reuse  # noqa: F401

    torch.set_num_threads(1)  # there is a worker for each core


def answer(asked: str) -> str:
    """Return the `SearchAnswer` to a `SearchTask`, or None if the search raised an error."""
    from mirage_hf.errors import MirageError

    try:
        return to_line(work(from_line(asked)))
    except MirageError:
        return to_line(None)
