"""optimize() and restore(): match, find kernels, swap, check, decode.

If optimize() fails, a stock model stays as it was, and an optimized one may be stock again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from mirage_hf import decode as decoding
from mirage_hf.default_device import on_the_cpu
from mirage_hf.errors import OptimizeError
from mirage_hf.garbage import sparing_old_objects
from mirage_hf.layers.part import StepShape
from mirage_hf.match.eligible import check_model, chosen_backend, generating, single_device
from mirage_hf.match.matcher import match
from mirage_hf.match.options import check_draft_tokens, check_options
from mirage_hf.pipeline import resolver
from mirage_hf.pipeline.progress_bar import bar_unless
from mirage_hf.pipeline.searching_ahead import ready_to_search
from mirage_hf.swap.background import TuningOfModel
from mirage_hf.swap.coded_modules import bind_coded_modules
from mirage_hf.swap.handle import Handle, attach, detach
from mirage_hf.swap.kernels import ModelBlocks, find_kernels
from mirage_hf.swap.live_model import locked, release_cached_memory
from mirage_hf.swap.loading_ahead import likely_to_search, loading_ahead
from mirage_hf.swap.norm_kernels import bind_norms
from mirage_hf.swap.optimization import Optimization
from mirage_hf.swap.prompt_kernels import bind_plain_experts, find_prompt_kernels
from mirage_hf.swap.rotation_kernels import bind_rotations, find_rotation_kernels
from mirage_hf.swap.undos import put_back_all
from mirage_hf.zoo.store import zoo_path

Model = TypeVar("Model", bound=nn.Module)


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
    tuning = None
    if tune == "background":
        tune = "never"  # until the tuner has measured
        tuning = TuningOfModel(device=device, backend=backend, zoo=zoo, verify=verify)
    zoo_path(zoo)  # an unusable zoo fails before anything is restored or searched
    searches = not dry_run and backend == "triton" and likely_to_search(model, device, zoo)
    with (
        locked(model),
        on_the_cpu(),
        sparing_old_objects(),
        ready_to_search() if searches else nullcontext(),
    ):
        if not dry_run:
            _restore_stock(model)
        inner = generating(model)
        matches = match(model, names, inner)
        traces = (
            decoding.Traces.NONE if patterns is not None else decoding.wanted_traces(inner, matches)
        )
        # without a step program, steps that verify drafts are traced too
        shapes = _step_shapes(rows, () if traces is decoding.Traces.STEPS else drafts, inner)
        optimization = Optimization(model, backend, shapes, matches)
        optimization.report_rejected(on_unsupported)
        if dry_run:
            if traces is not decoding.Traces.NONE:
                optimization.add_traced((), decoding.WOULD_BE_TRACED)
            return optimization.dry_run_report()
        with (
            bar_unless(progress, "optimize") as note,
            _undone_if_it_fails(optimization),
            loading_ahead(model, device, backend),
        ):
            blocks = ModelBlocks(optimization.wanted, shapes, device)
            made = find_kernels(
                blocks,
                device=device,
                backend=backend,
                zoo=zoo,
                tune=tune,
                progress=note,
            )
            kernels = blocks.by_key(made)
            noting = tuning.note if tuning is not None else None
            finder = resolver.KernelFinder(device, backend, zoo, tune, noting)
            optimization.resolve = finder.resolve
            if patterns is None:
                optimization.traces_halves = True
                bind_plain_experts(model, optimization.ledger)
            rotations = bind_rotations(model, optimization.ledger) if patterns is None else 0
            traced = _trace(inner, traces, optimization, finder, rows, drafts, note)
            of_rows: list[str] = []
            if _prompts_run_forward(optimization, traced, rotations):
                of_rows += bind_norms(model, optimization.ledger, finder)
                of_rows += find_rotation_kernels(model, finder)
            else:
                put_back_all(optimization.ledger.undos)
        optimization.warn_of_unstored(kernels)
        try:
            handle, report = optimization.swap(kernels, verify=verify)
            if handle is None:
                optimization.undo()
                optimization.nothing_done(on_unsupported, report)
                return model
            for text in (*find_prompt_kernels(model, finder), *of_rows):
                handle.add_note(text)
            attach(model, handle)
            _install_decoding(model, handle, optimization, decode, max_cache_len, traced)
            if drafts:
                _note_drafts(handle)
            if tuning is not None:
                tuning.start(model, handle, optimization, blocks, made)
        except BaseException:
            optimization.undo()
            _restore_stock(model)
            raise
        finally:
            release_cached_memory(device)
    return model


def _trace(
    inner: Any,
    traces: decoding.Traces,
    optimization: Optimization,
    finder: resolver.KernelFinder,
    batch_sizes: Sequence[int],
    draft_tokens: Sequence[int],
    progress: Callable[..., Any] | None,
) -> decoding.TracedSteps | None:
    """Return the traced steps of a model, None without any. Tell the report why."""
    if traces is decoding.Traces.NONE:
        return None
    # kernels that decode weights have good estimates, and checks of their results take long
    bind_coded_modules(optimization.model, optimization.ledger, finder.measuring_few().resolve)
    is_known = traces is decoding.Traces.EXPERTS
    traced, rows, why = decoding.trace_steps(
        inner, batch_sizes, finder, progress, whole=is_known, draft_tokens=draft_tokens
    )
    if is_known and traced is None:
        why = f"each mixture of experts is traced by itself: {why}"
    optimization.add_traced(rows, why)
    return traced


def _prompts_run_forward(
    optimization: Optimization, traced: decoding.TracedSteps | None, rotations: int
) -> bool:
    """Return whether prompts run HF's forward because kernels cannot run them whole.

    That is so for traced steps, experts, and weights in codes. The last two have entries in the
    ledger, besides those of modules that rotate q and k.
    """
    return traced is not None or len(optimization.ledger.undos) > rotations


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
    with locked(model):
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
