"""Find kernels for linears in codes and experts of prompts, and use them where they are faster."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from mirage_hf.errors import (
    CodegenError,
    GraphError,
    SearchError,
    VerificationError,
    described,
)
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.pipeline.resolver import KernelFinder
from mirage_hf.swap.coded_forward import (
    PRODUCT_ROWS,
    CodedBinding,
    RowsProduct,
    Run,
    has_reversed_columns,
    product_program,
)
from mirage_hf.swap.coded_modules import dtype_of
from mirage_hf.swap.experts_forward import (
    BlocksOfModule,
    ExpertsBinding,
    PlainExpertsBinding,
    facts_of,
)
from mirage_hf.swap.ledger import Ledger
from mirage_hf.swap.own_forward import FORWARD_KEY, bind_forward
from mirage_hf.trace.experts.form import ExpertsForm, form_of
from mirage_hf.trace.experts.op import MOST_TOKENS
from mirage_hf.trace.experts.row_blocks import BlockSizes, RowBlocks, blocks_programs
from mirage_hf.trace.record import TraceError
from mirage_hf.tune.measure import GLANCE, time_run

_log = logging.getLogger("mirage_hf")

#: The largest difference of both results, relative to their size: a few roundings to bfloat16.
_CLOSE = 0.02

#: So many elements of both results are compared at once, to save memory.
COMPARED_AT_ONCE = 2**20

#: Kernels that take so many times as long as stock when they are called are not measured further.
#: With a bad schedule they may take a hundred times as long.
_HOPELESS = 3

#: What a module or a function computes.
Results: TypeAlias = Tensor | tuple[Tensor, ...]
Forward = Callable[..., Results]


def bind_plain_experts(model: nn.Module, ledger: Ledger) -> None:
    """Let experts with plain weights run through a binding, which may get kernels later.

    Args:
        model: The model.
        ledger: Takes what undoes it.
    """
    dtype = dtype_of(model)
    for module in model.modules():
        if "forward" in module.__dict__:
            continue
        form = form_of(module, dtype)
        if isinstance(form, ExpertsForm) and not form.is_coded:
            ledger.undos.append(bind_forward(module, PlainExpertsBinding()))


def find_prompt_kernels(model: nn.Module, finder: KernelFinder) -> list[str]:
    """Give modules of a model kernels for prompts, where these are faster.

    Linears in codes get a kernel that decodes them as it multiplies, and experts get kernels of
    blocks of rows. Experts must have run since they were bound, which tells how many of them a
    token chooses. Without a GPU nothing is done.

    Args:
        model: The model. Its modules are bound.
        finder: Finds kernels. With tune="auto" it measures few schedules of linears, and none of
            experts. To tune the experts of gpt-oss takes 90 s. For those of Qwen3-30B-A3B the tuner
            chooses the tiles that have the best estimate.

    Returns:
        Notes for the report.
    """
    dtype = dtype_of(model)
    if finder.gpu is None or dtype.itemsize != 2:
        return []
    for_linears, finder = finders_for_linears(finder), finder_for_prompts(finder)
    of_linears: dict[Any, RowsProduct | None] = {}
    of_experts: dict[Any, tuple[RowBlocks, range] | None] = {}
    for module in model.modules():
        binding = module.__dict__.get(FORWARD_KEY)
        if isinstance(binding, CodedBinding):
            _give_product(module, binding, dtype, for_linears, of_linears)
        elif isinstance(binding, ExpertsBinding) and binding.called_with is not None:
            _give_blocks(module, binding, dtype, finder, of_experts)
    return [*_notes_of_linears([*of_linears.values()]), *_notes_of_experts([*of_experts.values()])]


def finder_for_prompts(finder: KernelFinder) -> KernelFinder:
    """Return what finds kernels of prompts. They are tuned only with tune="full"."""
    return finder if finder.tune == "full" else replace(finder, tune="never", noting=None)


def finders_for_linears(finder: KernelFinder) -> list[KernelFinder]:
    """Return what finds kernels of linears for prompts, one after another.

    With tune="auto", the second one measures few schedules. The schedule with the best estimate
    takes up to 1.7 times as long as the fastest one.
    """
    finders = [finder_for_prompts(finder)]
    if finder.tune == "auto":
        finders.append(replace(finder.measuring_few(), noting=None))
    return finders


def _notes_of_linears(found: Sequence[RowsProduct | None]) -> list[str]:
    used = sum(product is not None for product in found)
    what = f"{used} of {len(found)} kinds of linears in codes"
    return [f"prompts of up to {PRODUCT_ROWS} tokens: {what} run by kernels"] if found else []


def _notes_of_experts(found: Sequence[tuple[RowBlocks, range] | None]) -> list[str]:
    if found and not any(found):
        why = "their kernels are slower than the library here, or failed, or there are none"
        return [f"prompts: experts run without kernels: {why}"]
    ranges = {(kernels[1][0], kernels[1][-1]) for kernels in found if kernels is not None}
    return [f"prompts of {a} to {b} tokens: experts run by kernels" for a, b in sorted(ranges)]


# -- linears in codes


def _give_product(
    module: nn.Module,
    binding: CodedBinding,
    dtype: torch.dtype,
    finders: Sequence[KernelFinder],
    found: dict[Any, RowsProduct | None],
) -> None:
    """Give a linear in codes a kernel for few rows. Linears of one coding share it.

    Args:
        module: The linear.
        binding: What runs it.
        dtype: The dtype of rows.
        finders: What finds a kernel, one after another. None follows if a kernel is hopeless.
        found: What linears have got so far.
    """
    coding, has_bias = binding.weight.coding, binding.weight.bias is not None
    key = coding, has_bias
    if key not in found:
        found[key], best = None, math.inf
        for finder in () if has_reversed_columns(coding) else finders:
            kernel = _kernel(product_program(coding, dtype, has_bias), "linear", finder)
            if kernel is None:
                break
            device = binding.weight.tensors[0].device
            x = torch.randn(PRODUCT_ROWS, coding.columns, device=device).to(dtype)
            product = RowsProduct(kernel, dtype, has_bias)
            stock = partial(binding.run, module)
            what = f"a linear {coding.columns}→{coding.rows} of {PRODUCT_ROWS} rows"
            bias = None if binding.weight.bias is None else binding.weight.bias.to(dtype)
            ours = partial(product, weight=binding.weight, bias=bias)
            times = compared(what, ours, stock, (x,))
            if times is not None and times[0] < min(times[1], best):
                found[key], best = product, times[0]
            if times is None or times[0] > _HOPELESS * times[1]:
                break
    binding.product = found[key]


# -- experts


def _give_blocks(
    module: nn.Module,
    binding: ExpertsBinding,
    dtype: torch.dtype,
    finder: KernelFinder,
    found: dict[Any, tuple[RowBlocks, range] | None],
) -> None:
    """Give experts kernels of blocks of rows. Experts with equal programs share them."""
    assert binding.called_with is not None
    form, (chosen, weights_dtype) = form_of(module, dtype), binding.called_with
    if not isinstance(form, ExpertsForm):
        return
    sizes = BlockSizes.of(form, chosen)
    try:
        programs = blocks_programs(form, sizes, dtype, weights_dtype)
    except (GraphError, TraceError):
        return
    key = tuple((str(p.graph), str(p.inputs)) for p in programs)
    if key not in found:
        found[key] = None
        first, second = (
            _kernel(program.graph, "experts", finder, max_kernels=1) for program in programs
        )
        if first is not None and second is not None:
            runs = first, second
            blocks = RowBlocks(sizes, programs, runs, dtype, weights_dtype, skips_blocks=True)
            tokens = faster_for(blocks, form, partial(binding.run_otherwise, module))
            found[key] = (blocks, tokens) if tokens else None
    if (kernels := found[key]) is not None:
        binding.kernels = BlocksOfModule(*kernels, facts_of(module, form))


def faster_for(blocks: RowBlocks, form: ExpertsForm, stock: Forward) -> range:
    """Return the numbers of tokens for which kernels are faster than stock.

    Only more tokens than a step has count. The most tokens are timed, and halves of them down to
    the first that is slower again.

    Args:
        blocks: The kernels.
        form: The experts.
        stock: What runs without kernels.
    """
    tokens, found = blocks.sizes.tokens, range(0)
    while tokens > MOST_TOKENS:
        given = _random_tokens(blocks, tokens, form.first.tensors[0].device)
        if is_better(f"experts of {tokens} tokens", partial(blocks.run, form), stock, given):
            found = range(max(MOST_TOKENS, tokens // 2) + 1, (found.stop or tokens + 1))
        elif found:
            break
        tokens //= 2
    return found


def _random_tokens(
    blocks: RowBlocks, tokens: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random tokens, their experts and routing weights."""
    width = blocks.programs[0].graph.inputs[1].dims[-1]
    draw = torch.Generator(device).manual_seed(0)
    x = torch.randn(tokens, width, generator=draw, device=device).to(blocks.dtype)
    scores = torch.rand(tokens, blocks.sizes.experts, generator=draw, device=device)
    weights, index = scores.topk(blocks.sizes.chosen)
    return x, index, (weights / weights.sum(-1, keepdim=True)).to(blocks.weights_dtype)


# -- both


def _kernel(program: KernelGraph, pattern: str, finder: KernelFinder, **limits: Any) -> Run | None:
    """Return a kernel of a program, None if there is none.

    The library is no kernel: it would decode weights, or copy those of each block. So would several
    kernels: those of gate and up of Qwen3-30B-A3B in float8 took 105 ms (H200).

    Args:
        program: The program.
        pattern: What it computes.
        finder: Finds the kernel.
        limits: Further options of `resolver.resolve`. Programs of experts have a structure of their
            own, so a search for one kernel alone, which takes half the time, serves no others.
    """
    try:
        kernel = finder.resolve(program, pattern=pattern, **limits)
    except (SearchError, VerificationError, CodegenError, torch.OutOfMemoryError):
        return None
    return kernel.run if kernel.runs_kernel and kernel.ugraph.num_kernels == 1 else None


def is_better(what: str, ours: Forward, stock: Forward, given: Sequence[Tensor]) -> bool:
    """Return whether kernels give stock's results in less time. The arguments are `compared`'s."""
    times = compared(what, ours, stock, given)
    return times is not None and times[0] < times[1]


def compared(
    what: str, ours: Forward, stock: Forward, given: Sequence[Tensor]
) -> tuple[float, float] | None:
    """Return the µs that kernels and stock take on some inputs, None if results differ.

    Args:
        what: What they compute, for the log.
        ours: Runs the kernels.
        stock: Runs without them. It may fail, for example for lack of memory.
        given: The inputs. Neither changes them.
    """
    try:
        expected = stock(*given)  # first, since it takes the most memory meanwhile
        if why := _difference(ours(*given), expected):
            _log.info("%s: %s", what, why)
            return None
        del expected
        ours_us, stock_us = (_us_called(run, given) for run in (ours, stock))
        if ours_us < _HOPELESS * stock_us:
            ours_us, stock_us = _us_captured((ours, stock), given)
    except Exception as error:  # whatever failed, stock runs as before
        _log.info("%s: no kernels, since a trial failed: %s", what, described(error))
        return None
    _log.info("%s: %.1f µs by kernels, %.1f without", what, ours_us, stock_us)
    return ours_us, stock_us


def _difference(ours: Results, stock: Results) -> str:
    """Return how our results differ from stock's, or "" if they are close."""
    ours, stock = ((x,) if isinstance(x, Tensor) else x for x in (ours, stock))
    return next((why for x, y in zip(ours, stock, strict=True) if (why := _distance(x, y))), "")


def _distance(ours: Tensor, stock: Tensor) -> str:
    """Return how our result differs from stock's, or "" if it is close."""
    if ours.dtype is not stock.dtype:
        return f"kernels give {ours.dtype}, stock gives {stock.dtype}"
    if ours.shape != stock.shape:
        return f"kernels give {tuple(ours.shape)}, stock gives {tuple(stock.shape)}"
    ours, stock = torch.atleast_1d(ours), torch.atleast_1d(stock)
    squared_difference, squared_size = torch.zeros(2, dtype=torch.float64, device=stock.device)
    dim = max(range(stock.dim()), key=stock.size)
    length = max(1, stock.shape[dim] * COMPARED_AT_ONCE // max(1, stock.numel()))
    for x, y in zip(ours.split(length, dim), stock.split(length, dim), strict=True):
        squared_difference += (x.float() - y.float()).square_().sum()
        squared_size += y.float().square().sum()
    difference = (squared_difference.sqrt() / squared_size.sqrt().clamp_min(1e-9)).item()
    # NaN is not close
    return "" if difference <= _CLOSE else f"kernels differ from stock by {difference:.2g}"


def _us_captured(runs: Sequence[Forward], given: Sequence[Tensor]) -> list[float]:
    """Return the µs that functions take: in CUDA graphs, or called if one cannot be captured."""
    try:
        calls = [partial(_called_on, run) for run in runs]
        return [time_run(call, [given], replays=GLANCE).us for call in calls]
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # stock's experts may read numbers of tokens on the host
        return [_us_called(run, given) for run in runs]


def _us_called(run: Forward, given: Sequence[Tensor]) -> float:
    """Return the µs between the begin and the end of a call, the host's work included."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples = []
    for _ in range(2 + GLANCE):
        torch.cuda.synchronize()
        start.record()
        run(*given)
        end.record()
        torch.cuda.synchronize()
        samples.append(1e3 * start.elapsed_time(end))
    return min(samples)


def _called_on(run: Forward, given: Sequence[Tensor]) -> Results:
    return run(*given)
