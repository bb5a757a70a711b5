"""Find kernels for the experts of prompts, and use them where they are faster."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.errors import CodegenError, GraphError, SearchError, VerificationError
from mirage_hf.pipeline.resolver import KernelFinder
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
from mirage_hf.trace.experts.row_blocks import (
    BlocksProgram,
    RowBlocks,
    blocks_programs,
    most_tokens,
)
from mirage_hf.trace.record import TraceError
from mirage_hf.tune.measure import GLANCE, time_run

_log = logging.getLogger("mirage_hf")

#: The largest difference of both results, relative to their size: a few roundings to bfloat16.
_CLOSE = 0.02

#: Computes experts: tokens, chosen experts, routing weights.
Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


def bind_plain_experts(model: nn.Module, ledger: Ledger) -> None:
    """Let experts with plain weights run through a binding, which may get kernels later.

    Args:
        model: The model.
        ledger: Takes what undoes it.
    """
    dtype = dtype_of(model)
    for module in model.modules():
        if "forward" in module.__dict__ or FORWARD_KEY in module.__dict__:
            continue
        form = form_of(module, dtype)
        if isinstance(form, ExpertsForm) and not form.is_coded:
            ledger.undos.append(bind_forward(module, PlainExpertsBinding()))


def find_prompt_kernels(model: nn.Module, finder: KernelFinder) -> None:
    """Give the experts of a model kernels of blocks of rows, where these are faster.

    The experts must have run since they were bound, which tells how many experts a token chooses.
    Without a GPU nothing is done.
    """
    dtype = dtype_of(model)
    found: dict[Any, tuple[RowBlocks, int] | None] = {}
    if finder.gpu is None or dtype.itemsize != 2:
        return
    for module in model.modules():
        binding = module.__dict__.get(FORWARD_KEY)
        if not isinstance(binding, ExpertsBinding) or binding.called_with is None:
            continue
        form, (chosen, weights_dtype) = form_of(module, dtype), binding.called_with
        if not isinstance(form, ExpertsForm):
            continue
        try:
            programs = blocks_programs(form, dtype, weights_dtype)
        except (GraphError, TraceError):
            continue
        key = chosen, *(str(program.graph) for program in programs)
        if key not in found:
            blocks = _resolved(programs, dtype, weights_dtype, finder)
            stock = partial(binding.run_otherwise, module)
            most = 0 if blocks is None else faster_up_to(blocks, form, chosen, stock)
            found[key] = None if blocks is None or not most else (blocks, most)
        if (kernels := found[key]) is not None:
            binding.kernels = BlocksOfModule(*kernels, facts_of(module, form))


def _resolved(
    programs: tuple[BlocksProgram, BlocksProgram],
    dtype: torch.dtype,
    weights_dtype: torch.dtype,
    finder: KernelFinder,
) -> RowBlocks | None:
    """Return kernels of both programs. None if one has no kernel.

    The library would copy the weights of each block.
    """
    try:
        kernels = [finder.resolve(program.graph, pattern="experts") for program in programs]
    except (SearchError, VerificationError, CodegenError):
        return None
    if not all(kernel.runs_kernel for kernel in kernels):
        return None
    first, second = (kernel.run for kernel in kernels)
    return RowBlocks(programs, (first, second), dtype, weights_dtype, skips_blocks=True)


def faster_up_to(blocks: RowBlocks, form: ExpertsForm, chosen: int, stock: Forward) -> int:
    """Return up to how many tokens kernels are faster than what runs without them.

    0 if they are never faster for more tokens than a step has, or if they give other results.

    Args:
        blocks: The kernels.
        form: The experts.
        chosen: How many experts a token chooses.
        stock: What runs without kernels.
    """
    tokens = most_tokens(form, chosen)
    while tokens > MOST_TOKENS:
        given = _random_tokens(blocks, form, chosen, tokens)
        ours, theirs = (run(*given).float() for run in (partial(blocks.run, form), stock))
        if not (ours - theirs).norm() <= _CLOSE * theirs.norm():
            return 0
        ours_us, stock_us = _us(partial(blocks.run, form), given), _us(stock, given)
        _log.info(
            "experts of %d tokens: %.1f µs by kernels, %.1f without", tokens, ours_us, stock_us
        )
        if ours_us < stock_us:
            return tokens
        tokens //= 2
    return 0


def _us(run: Forward, given: tuple[Tensor, Tensor, Tensor]) -> float:
    """Return the GPU time of a call in a CUDA graph."""
    return time_run(lambda tensors: run(*tensors), [given], replays=GLANCE).us


def _random_tokens(
    blocks: RowBlocks, form: ExpertsForm, chosen: int, tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random tokens, their experts and routing weights."""
    device, experts = form.first.tensors[0].device, len(form.first.tensors[0])
    draw = torch.Generator(device).manual_seed(0)
    x = torch.randn(tokens, form.first.columns, generator=draw, device=device)
    scores = torch.rand(tokens, experts, generator=draw, device=device)
    weights, index = scores.topk(chosen)
    return (
        x.to(blocks.dtype),
        index,
        (weights / weights.sum(-1, keepdim=True)).to(blocks.weights_dtype),
    )
