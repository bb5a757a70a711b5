"""optimize() and restore(): match, find kernels, swap, check, decode. A failure anywhere leaves the model as it was."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

from mirage_hf import decode as decoding
from mirage_hf.default_device import on_the_cpu
from mirage_hf.errors import OptimizeError
from mirage_hf.match.eligible import (
    check_model,
    check_options,
    chosen_backend,
    generating,
    single_device,
)
from mirage_hf.match.matcher import match
from mirage_hf.pipeline.progress_bar import bar_unless
from mirage_hf.swap.handle import attach, detach
from mirage_hf.swap.kernels import find_kernels
from mirage_hf.swap.optimization import Optimization
from mirage_hf.zoo.store import zoo_path

Model = TypeVar("Model", bound=nn.Module)

_one_at_a_time = threading.Lock()
_locks: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


@contextmanager
def _locked(model: nn.Module) -> Iterator[None]:
    """Threads that optimize or restore one model take turns: a module swapped twice is never quite put back."""
    with _one_at_a_time:
        lock = _locks.setdefault(model, threading.RLock())
    with lock:
        yield


def optimize(
    model: Model,
    patterns: Iterable[str] | None = None,
    batch_sizes: Sequence[int] = (1,),
    backend: str = "auto",
    zoo: Any = None,
    tune: str = "auto",
    verify: bool = True,
    on_unsupported: str = "skip",
    decode: str = "graph",
    max_cache_len: int | None = None,
    dry_run: bool = False,
    progress: Callable[..., Any] | None = None,
) -> Any:
    """Make a model's forward and generate use searched kernels, in place, and return it. `model.mirage.report` says what was done.
    Where nothing could be done a warning says why, the model stays as it was, and there is no `model.mirage`.

    patterns: names of the blocks to look for (None: all). batch_sizes: batches to make decoding kernels for, up to 1,024.
    backend: "triton" on a GPU, "cpu" elsewhere; "auto" chooses. zoo: a kernel zoo beside the packaged one.
    tune: a block without a stored kernel is searched for. On a GPU, "auto" measures what was found, "never" trusts the cost model instead,
    and "full" measures all blocks anew, and more candidates of each. verify: check each swapped module against the one it replaces.
    on_unsupported: what is done about a module that looks like a block and cannot be replaced: nothing ("skip"), a warning, or an error.
    decode: steps of generate are replayed CUDA graphs where they can be, or called ("eager"). max_cache_len: the most cache slots (prompt
    and new tokens together) that a call of generate may use; longer ones run stock, None sets no limit. dry_run: change nothing and
    return the Report of what would be done. progress: called with what was reached, as progress("kernel", (1, 9, "attention")), and during
    a search as `superoptimize` calls it; without it a terminal shows a bar. An optimized model is restored first, then optimized anew.
    Errors: OptimizeError for a model or option it cannot take, ZooError for a zoo that cannot be had; the model is then untouched. One that
    was optimized before stays so where an option or the zoo is at fault, and is as restore() leaves it behind other errors.
    Warns: OptimizeWarning.
    """
    names, rows = check_options(
        patterns,
        batch_sizes,
        max_cache_len,
        zoo,
        progress,
        backend=backend,
        tune=tune,
        decode=decode,
        on_unsupported=on_unsupported,
        verify=verify,
        dry_run=dry_run,
    )
    check_model(model)
    device = single_device(model)
    backend = chosen_backend(backend, device)
    zoo_path(zoo)  # one that cannot be had is said before anything is taken back or searched
    with _locked(model), on_the_cpu():
        if not dry_run:
            _take_back(model)
        matches = match(model, names, generating(model))
        optimization = Optimization(model, backend, rows, matches)
        optimization.complain(on_unsupported)
        if dry_run:
            return optimization.plan()
        with bar_unless(progress, "optimize") as note:
            found = find_kernels(
                optimization.wanted,
                rows,
                device=device,
                backend=backend,
                zoo=zoo,
                tune=tune,
                progress=note,
            )
        optimization.complain_of_unkept(found)
        try:
            handle, report = optimization.swap(found, verify=verify)
            if handle is None:
                optimization.nothing_done(on_unsupported, report)
                return model
            attach(model, handle)
            if (inner := generating(model)) is not None:
                try:
                    handle.runner = decoding.install(
                        inner, mode=decode, max_cache_len=max_cache_len, steps=optimization.steps
                    )
                except (
                    decoding.DecodeError
                ) as e:  # someone else's generate is kept; forwards are faster all the same
                    handle.add_note(f"generate is not replaced: {e}")
        except BaseException:
            optimization.undo()
            _take_back(model)
            raise
    return model


def restore(model: Model) -> Model:
    """Make a model exactly what it was before optimize(), and return it. One that is not optimized stays as it is."""
    if not isinstance(model, nn.Module):
        raise OptimizeError(
            f"restore: expected the model given to optimize(), got a {type(model).__name__}"
        )
    with _locked(model):
        _take_back(model)
    return model


def _take_back(model: nn.Module) -> None:
    try:
        detach(model)
    finally:  # Ctrl-C in between left a generate of ours without the modules that it ran
        for module in model.modules():
            decoding.uninstall(module)


@contextmanager
def optimized(model: Model, **options: Any) -> Iterator[Model]:
    """`with optimized(model):` optimizes for the block and restores after it. Options are those of optimize()."""
    done = optimize(model, **options)  # if this fails, the model is as it was
    try:
        yield done
    finally:
        restore(model)
