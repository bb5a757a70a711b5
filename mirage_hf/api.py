"""optimize() and restore(): match, find kernels, swap, check, decode.

If optimize() fails, a stock model stays as it was, and an optimized one may be stock again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from mirage_hf import decode as decoding
from mirage_hf.default_device import on_the_cpu
from mirage_hf.errors import OptimizeError, Rejected
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.layers.part import StepShape
from mirage_hf.match.eligible import (
    check_model,
    chosen_backend,
    generating,
    single_device,
)
from mirage_hf.match.matcher import match
from mirage_hf.match.matches import Matches
from mirage_hf.match.options import check_draft_tokens, check_options
from mirage_hf.pipeline import resolver
from mirage_hf.pipeline.background import BackgroundTuning
from mirage_hf.pipeline.layer_choice import BlockToMake
from mirage_hf.pipeline.progress_bar import bar_unless
from mirage_hf.pipeline.resolver import Resolved
from mirage_hf.swap.handle import HANDLE_NAME, Handle, attach, detach
from mirage_hf.swap.kernels import ModelBlocks, find_kernels, register
from mirage_hf.swap.optimization import Optimization
from mirage_hf.swap.replacement import replace_kernels
from mirage_hf.zoo.store import zoo_path

Model = TypeVar("Model", bound=nn.Module)

_one_at_a_time = threading.Lock()
_locks: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


@contextmanager
def _locked(model: nn.Module) -> Iterator[None]:
    """Let threads that optimize or restore one model take turns.

    A module that two threads swap at the same time could not be put back.
    """
    with _one_at_a_time:
        lock = _locks.setdefault(model, threading.RLock())
    with lock:
        yield


@torch.inference_mode(False)  # under inference mode, torch hides which ops a model runs
@torch.no_grad()
def optimize(
    model: Model,
    patterns: Iterable[str] | None = None,
    batch_sizes: Sequence[int] = (1,),
    draft_tokens: Sequence[int] = (),
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
    """Make a model's forward and generate use searched kernels, in place.

    `model.mirage.report` then says what was done. A model that is optimized already is restored
    first. If nothing could be replaced, a warning says why, or with `on_unsupported="error"` an
    error. Then the model is stock, and there is no `model.mirage`.

    For example::

        model = AutoModelForCausalLM.from_pretrained(name, dtype="bfloat16").cuda()
        mirage_hf.optimize(model)
        model.generate(**inputs)
        print(model.mirage.report)

    Args:
        model: The model, or a part of one, on one device.
        patterns: The names of the blocks to look for. None: all.
        batch_sizes: The numbers of sequences to make decoding kernels for, up to 1,024.
        draft_tokens: The numbers of drafted tokens, from 1 to 15, that a step of generate verifies
            at once. Without it, calls with drafts (`prompt_lookup_num_tokens`, `assistant_model`)
            run stock.
        backend: "triton" on a GPU, "cpu" elsewhere. "auto" decides by device.
        zoo: Further kernel zoos, as folders or Hub repos. Their kernels are proven again.
        tune: What is measured on a GPU when kernels are made. "auto" measures the results of a
            search, for blocks without a stored and measured kernel. "never" measures nothing, and
            the cost model chooses. "full" makes all kernels again, with more candidates of each.
            "background" begins as "never" does, and measures in a second process between calls.
        verify: Check each swapped module against the one that it replaces.
        on_unsupported: What to do about a module that looks like a block and cannot be replaced.
            "skip" ignores it, "warn" warns, and "error" raises an `OptimizeError`. "error" also
            raises one if nothing was replaced.
        decode: "graph" replays the steps of generate from CUDA graphs if they can be captured.
            "eager" launches their kernels one by one.
        max_cache_len: The most cache slots, of prompt and new tokens together, that a call of
            generate may use. Longer calls run stock. None: no limit.
        dry_run: Change nothing, and return the report of what would be done.
        progress: Called as progress("kernel", (number, total, pattern)), and during a search as
            `superoptimize` calls it. Without it a terminal shows a bar.

    Returns:
        The model, or with `dry_run` the report.

    Raises:
        OptimizeError: The model cannot be optimized, or an option has an impossible value.
        ZooError: A zoo cannot be read or fetched.

    After an error, a model that was not optimized is as it was. An optimized model stays optimized
    if an option, the zoo, the device or the model's state (such as training mode) is at fault.
    After other errors it is as `restore` leaves it.

    Warns:
        OptimizeWarning: Nothing was replaced. Or, with `on_unsupported="warn"`, blocks cannot be
            replaced. Or new kernels could not be stored, so the next call makes them again.
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
    drafts = check_draft_tokens(draft_tokens)
    check_model(model)
    device = single_device(model)
    backend = chosen_backend(backend, device)
    tune_now = "never" if tune == "background" else tune
    zoo_path(zoo)  # an unusable zoo fails before anything is restored or searched
    with _locked(model), on_the_cpu():
        if not dry_run:
            _restore_stock(model)
        inner = generating(model)
        matches = match(model, names, inner)
        traces = _Traces.NONE if patterns is not None else _wanted_traces(inner, matches)
        # without a step program, steps that verify drafts are traced too
        shapes = _step_shapes(rows, () if traces is _Traces.STEPS else drafts, inner)
        optimization = Optimization(model, backend, shapes, matches)
        optimization.report_rejected(on_unsupported)
        if dry_run:
            if traces is not _Traces.NONE:
                optimization.add_traced((), decoding.WOULD_BE_TRACED)
            return optimization.plan()
        with bar_unless(progress, "optimize") as note, _undone_if_it_fails(optimization):
            blocks = ModelBlocks(optimization.wanted, shapes, device)
            made = find_kernels(
                blocks,
                device=device,
                backend=backend,
                zoo=zoo,
                tune=tune_now,
                progress=note,
            )
            kernels = blocks.by_key(made)
            untuned: list[BlockToMake] = []
            noting = partial(_note_untuned, untuned) if tune == "background" else None
            finder = resolver.KernelFinder(device, backend, zoo, tune_now, noting)
            optimization.resolve = finder.resolve
            optimization.traces_halves = patterns is None
            traced = _trace(inner, traces, optimization, finder, rows, drafts, note)
        optimization.warn_of_unstored(kernels)
        try:
            handle, report = optimization.swap(kernels, verify=verify)
            if handle is None:
                optimization.undo()
                optimization.nothing_done(on_unsupported, report)
                return model
            attach(model, handle)
            _install_decoding(model, handle, optimization, decode, max_cache_len, traced)
            if drafts:
                _note_drafts(handle)
            if tune == "background":
                layers = [*blocks.unmeasured_layers(made), *([block] for block in untuned)]
                options = dict(device=device, backend=backend, zoo=zoo, verify=verify)
                _tune_in_background(model, handle, optimization, blocks, made, layers, **options)
        except BaseException:
            optimization.undo()
            _restore_stock(model)
            raise
        finally:
            _release_cached_memory(device)
    return model


class _Traces(Enum):
    """Which steps are traced."""

    NONE = auto()
    #: Steps of a model without a step program.
    STEPS = auto()
    #: Steps of a known model, because kernels may then run all of its experts. If they cannot, each
    #: mixture is traced by itself. A whole trace also joins experts with the sums that follow.
    EXPERTS = auto()


def _wanted_traces(inner: Any, matches: Matches) -> _Traces:
    """Return which steps to trace of the model that generates, if there is one."""
    if inner is None:
        return _Traces.NONE
    if decoding.wants_trace(inner, matches.causal):
        return _Traces.STEPS
    has_experts = decoding.wants_experts(inner, matches.modules)
    return _Traces.EXPERTS if has_experts else _Traces.NONE


def _trace(
    inner: Any,
    traces: _Traces,
    optimization: Optimization,
    finder: resolver.KernelFinder,
    batch_sizes: Sequence[int],
    draft_tokens: Sequence[int],
    progress: Callable[..., Any] | None,
) -> decoding.TracedSteps | None:
    """Return the traced steps of a model, None without any. Tell the report why."""
    if traces is _Traces.NONE:
        return None
    optimization.bind_codes(finder.resolve)
    is_known = traces is _Traces.EXPERTS
    traced, rows, why = decoding.trace_steps(
        inner, batch_sizes, finder, progress, whole=is_known, draft_tokens=draft_tokens
    )
    if is_known and traced is None:
        why = f"each mixture of experts is traced by itself: {why}"
    optimization.add_traced(rows, why)
    return traced


def _note_untuned(
    untuned: list[BlockToMake], program: KernelGraph, options: Mapping[str, Any], kernel: Resolved
) -> None:
    """Note a program whose kernel was not measured."""
    if not kernel.is_measured:
        pattern, like = options.get("pattern", "program"), options.get("like")
        early = options.get("next_may_launch_early", False)
        untuned.append(BlockToMake(program, pattern, like, early))


def _tune_in_background(
    model: nn.Module,
    handle: Handle,
    optimization: Optimization,
    blocks: ModelBlocks,
    made: Mapping[BlockToMake, Resolved | Rejected],
    layers: Sequence[Sequence[BlockToMake]],
    *,
    device: torch.device,
    backend: str,
    zoo: Any,
    verify: bool,
) -> None:
    """Start a tuner for layers, which puts better kernels in place between calls of the model."""
    if not resolver.can_measure(device, backend):
        handle.add_note("nothing is tuned in the background: kernels are measured on a GPU only")
        return
    if not layers:
        handle.add_note("nothing is tuned in the background: all kernels were measured before")
        return
    found, of_model = blocks.by_key(made), weakref.ref(model)

    def replace(new: Mapping[BlockToMake, Resolved]) -> int | Rejected:
        nonlocal found
        owner = of_model()
        if owner is None:
            return Rejected("the model was deleted")
        with _locked(owner), on_the_cpu(), _on(device):
            if owner.__dict__.get(HANDLE_NAME) is not handle:
                return Rejected("the model was restored")
            outcome = replace_kernels(
                optimization, handle, found, blocks.keys_of(new), verify=verify
            )
            if isinstance(outcome, Rejected):
                return outcome
            found, count = outcome
            register(new.values(), device)
            if count and handle.runner is not None and optimization.steps is not None:
                handle.runner.use_kernels(optimization.steps)
            return count

    handle.tuning = BackgroundTuning(
        layers, device=device, backend=backend, zoo=zoo, replace=replace
    )
    if handle.runner is not None:
        handle.runner.tuning = handle.tuning
    handle.let_tuner_see_forwards()
    handle.tuning.start()


@contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """Make a GPU the current one. Wait for what the body launches on it, and free its memory."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        try:
            yield
        finally:
            torch.cuda.current_stream(device).synchronize()
            _release_cached_memory(device)


def _step_shapes(
    batch_sizes: Sequence[int], draft_tokens: Sequence[int], inner: Any
) -> list[StepShape]:
    """Return the shapes of steps to make kernels for. Without a model that generates: one token."""
    shapes = [StepShape(batch) for batch in batch_sizes]
    if inner is not None:
        windowed = decoding.has_windows(inner.config)
        tokens = [1 + drafts for drafts in draft_tokens]
        shapes += [StepShape(batch, n, windowed) for batch in batch_sizes for n in tokens]
    return shapes


def _note_drafts(handle: Handle) -> None:
    """Note why calls with drafts will run stock, if they will."""
    runner = handle.runner
    if runner is None:
        return
    kernels = runner.model_kernels
    if runner.traced is not None:
        return  # the note of the trace says which shapes it lacks
    if kernels is None:
        why = "steps are not all by kernels"
    elif all(shape.tokens == 1 for shape in kernels.shapes):
        why = "no step of several tokens has all of its kernels"
    else:
        return
    handle.add_note(f"draft_tokens: calls with drafts run stock, because {why}")


def _release_cached_memory(device: torch.device) -> None:
    """Give back what tuning and checks allocated, so that others can use it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def _undone_if_it_fails(optimization: Optimization) -> Iterator[None]:
    """Put back what was changed so far if the body raises."""
    try:
        yield
    except BaseException:
        optimization.undo()
        raise


def _install_decoding(
    model: nn.Module,
    handle: Handle,
    optimization: Optimization,
    mode: str,
    max_cache_len: int | None,
    traced: decoding.TracedSteps | None,
) -> None:
    """Give a model that generates our `generate`. A foreign one on it is kept, with a note."""
    inner = generating(model)
    if inner is None:
        return
    try:
        handle.runner = decoding.install(
            inner,
            mode=mode,
            max_cache_len=max_cache_len,
            model_kernels=None if traced is not None else optimization.steps,
            traced=traced,
        )
    except decoding.DecodeError as e:  # forwards are faster all the same
        handle.add_note(f"generate is not replaced: {e}")


def restore(model: Model) -> Model:
    """Make a model exactly what it was before optimize().

    A model that is not optimized stays as it is.

    Returns:
        The model.

    Raises:
        OptimizeError: `model` is not a torch module.
    """
    if not isinstance(model, nn.Module):
        raise OptimizeError(
            f"restore: expected the model given to optimize(), got a {type(model).__name__}"
        )
    with _locked(model):
        _restore_stock(model)
    return model


def _restore_stock(model: nn.Module) -> None:
    """Undo all swaps in a model, and give it back its class's `generate`."""
    try:
        detach(model)
    finally:  # after Ctrl-C in between, generate must not stay without the modules that it runs
        for module in model.modules():
            decoding.uninstall(module)


@contextmanager
def optimized(model: Model, **options: Any) -> Iterator[Model]:
    """Optimize a model for the length of a `with` block, and restore it afterwards.

    Args:
        model: The model.
        options: The options of `optimize`.

    Yields:
        The optimized model.
    """
    done = optimize(model, **options)  # if this fails, the model is as it was
    try:
        yield done
    finally:
        restore(model)
