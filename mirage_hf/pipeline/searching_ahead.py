"""Search for several programs at once, in worker processes, before their kernels are asked for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace

from mirage_hf.codegen import workers
from mirage_hf.pipeline import search_worker
from mirage_hf.pipeline.request import Request
from mirage_hf.pipeline.search_and_verify import VerifiedCandidates
from mirage_hf.pipeline.search_worker import SearchAnswer, SearchTask, from_line, to_line
from mirage_hf.settings import settings
from mirage_hf.tune import space

#: Workers search if there are at least this many threads and programs. For fewer, starting them
#: takes longer than they save.
THREADS_FROM, PROGRAMS_FROM = 4, 2

#: Most worker processes. They share what they import.
MOST_PROCESSES = 8


class _Search:
    """A search that a worker does, unless this process begins it before a worker is ready."""

    def __init__(self, task: SearchTask):
        self._task = task
        self._is_taken = threading.Lock()
        self.answer: Future[SearchAnswer | None] = Future()

    @property
    def is_known(self) -> bool:
        """Whether the search was done for other sizes."""
        return self._task.known is not None

    def begins(self) -> bool:
        """Return True to the first who asks, who then does the search."""
        return self._is_taken.acquire(blocking=False)

    def ask(self, pool: workers.Workers) -> None:
        """Let a worker do the search if nobody else does, and keep its answer."""
        answer: SearchAnswer | None = None
        try:
            line = pool.ask(lambda: to_line(self._task) if self.begins() else None)
            answer = None if line is None else from_line(line)
        except (workers.WorkerError, OSError):
            pass
        finally:
            self.answer.set_result(answer)


_begun: dict[str, _Search] = {}


@contextlib.contextmanager
def ready_to_search() -> Iterator[None]:
    """Let workers be ready sooner for searches that begin in this block.

    The process that forks them takes seconds to import torch.
    """
    threads = settings().threads
    if threads < THREADS_FROM:
        yield
        return
    with workers.at_work(min(threads, MOST_PROCESSES), search_worker.__name__) as pool:
        pool.start()
        yield


@contextlib.contextmanager
def searching(requests: Sequence[Request]) -> Iterator[None]:
    """Search for the programs of requests in other processes, until the block ends.

    `take` gives what was found. Searches that nobody took are dropped. A block within another one
    does not begin the searches of the outer one again.

    The process that forks workers takes a second or more to import torch. Until then this process
    does the searches that it needs first.
    """
    tasks = {name_of(request): _task(request) for request in requests}
    tasks = {name: task for name, task in tasks.items() if name not in _begun}
    threads = settings().threads
    if threads < THREADS_FROM or len(tasks) < PROGRAMS_FROM:
        yield
        return
    count = min(threads, MOST_PROCESSES, len(tasks))
    share = threads // count
    tasks = {
        name: replace(task, options=replace(task.options, threads=share))
        for name, task in tasks.items()
    }
    with workers.at_work(min(threads, MOST_PROCESSES), search_worker.__name__) as pool:
        mine = {name: _Search(task) for name, task in tasks.items()}
        asking = [pool.threads.submit(search.ask, pool) for search in mine.values()]
        _begun.update(mine)
        try:
            yield
        finally:
            for name, search in mine.items():
                if _begun.pop(name, None) is not None:
                    search.begins()  # so that no worker begins it any more
            for future in asking:
                future.cancel()


def has_answer(name: str) -> bool:
    """Return whether a worker has done the search of a name, so that `take` gives candidates."""
    search = _begun.get(name)
    return search is not None and search.answer.done() and search.answer.result() is not None


def is_under_way(name: str) -> bool:
    """Return whether the search of a name is still for a worker to do."""
    search = _begun.get(name)
    return search is not None and not search.answer.done()


def take(
    request: Request, meanwhile: Callable[[], object] = lambda: None
) -> VerifiedCandidates | None:
    """Return the candidates that a worker finds for a request.

    Args:
        request: The request.
        meanwhile: Called if a worker is not done yet. It does what the caller needs afterwards.

    Returns:
        None if no worker was asked or is ready yet, or if it failed. Then the caller searches, and
        meets the error. None also if a worker is still at work with a search that was done for
        other sizes. To prove and check its results takes about a second here, and a worker's first
        search may take longer.
    """
    search = _begun.pop(name_of(request), None)
    if search is None or search.begins():
        return None
    if not search.answer.done():
        if search.is_known:
            return None
        meanwhile()
    if (answer := search.answer.result()) is None:
        return None
    space.remember_ranked(answer.ranked)
    return answer.verified


def _task(request: Request) -> SearchTask:
    early = request.key.next_may_launch_early
    ranks = request.runs_generated and not request.all_candidates
    return SearchTask(
        request.program,
        request.like,
        request.known,
        request.options,
        request.seed,
        request.keep,
        early,
        ranks,
    )


def name_of(request: Request) -> str:
    """Return a name for all that decides the outcome of a request's search."""
    task = _task(request)
    graphs = str(task.program), str(task.like)
    return repr((graphs, task.options, task.seed, task.keep, task.next_may_launch_early))
