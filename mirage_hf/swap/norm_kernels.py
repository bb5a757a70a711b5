"""Find kernels for the norms of a model, and use them in prompts where they are faster."""

from __future__ import annotations

import inspect
from functools import partial

import torch
from torch import nn

from mirage_hf.errors import Rejected
from mirage_hf.formats.containers import stock_forward
from mirage_hf.match import plain
from mirage_hf.match.norms import norm_sizes
from mirage_hf.match.probe import Probes
from mirage_hf.patterns.prompt import PROMPT_NORM
from mirage_hf.patterns.schema import PatternBlock
from mirage_hf.pipeline.resolver import KernelFinder
from mirage_hf.swap.ledger import Ledger
from mirage_hf.swap.norm_forward import NormBinding, NormKernels
from mirage_hf.swap.own_forward import bind_forward
from mirage_hf.swap.prompt_kernels import finder_for_prompts, is_better
from mirage_hf.swap.row_kernels import KERNEL_ROWS, chunks_of_kernels

#: The dims of inputs before the last one, for which kernels must be faster: those of 128 tokens, of
#: 32 heads of 128 tokens, which one launch of the largest kernel takes, and of 2,048 tokens, which
#: take two launches. More rows take more memory.
_TIMED = ((1, 128), (1, 128, 32), (1, 2 * KERNEL_ROWS[-2]))


def bind_norms(model: nn.Module, ledger: Ledger, finder: KernelFinder) -> list[str]:
    """Let norms of a model run by kernels in prompts, where these are faster.

    Without a GPU nothing is done.

    Args:
        model: The model. Its prompts run its own forward.
        ledger: Takes what undoes it.
        finder: Finds kernels, as in `find_prompt_kernels`.

    Returns:
        Notes for the report.
    """
    if finder.gpu is None:
        return []
    probes = Probes()
    norms = [(m, block) for m in model.modules() if (block := _norm_block(m, probes)) is not None]
    examples = {block: norm for norm, block in reversed(norms)}
    kernels = _kernels_of(examples, finder_for_prompts(finder))
    for norm, block in norms:
        if block in kernels:
            ledger.undos.append(bind_forward(norm, NormBinding.of(norm, kernels[block])))
    if not examples:
        return []
    return [f"prompts: {len(kernels)} of {len(examples)} kinds of norms run by kernels"]


def _norm_block(module: nn.Module, probes: Probes) -> PatternBlock | None:
    """Return what a module computes for each row, or None if it is no norm that kernels may run."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1 or any(rule(module) for rule in plain.CALLED_NORM):
        return None
    if weight.dtype.itemsize != 2 or weight.nbytes % plain.ALIGNMENT:
        return None
    if plain.check_same_weights([module], weight.dtype, weight.device) is not None:
        return None
    # ours hides the signature of a norm that another optimized model has bound
    try:
        parameters = inspect.signature(stock_forward(type(module))).parameters
    except ValueError:  # of a builtin
        return None
    if len(parameters) > 2:
        return None
    sizes = norm_sizes("a norm", module, probes)
    if isinstance(sizes, Rejected):
        return None
    chosen = {name: value for name, value in sizes.items() if name != "norm"}
    return PROMPT_NORM.block(k=len(weight), dtype=weight.dtype, **chosen)


def _kernels_of(
    examples: dict[PatternBlock, nn.Module], finder: KernelFinder
) -> dict[PatternBlock, NormKernels]:
    """Return the kernels of blocks that give stock's results in less time.

    Args:
        examples: A norm of each block.
        finder: Finds kernels.
    """
    devices = {block: norm._parameters["weight"].device for block, norm in examples.items()}  # type: ignore[union-attr]
    chunks = chunks_of_kernels(devices, finder)
    return {
        block: kernels
        for block, norm in examples.items()
        if block in chunks and _are_better(kernels := NormKernels(chunks[block]), norm)
    }


def _are_better(kernels: NormKernels, norm: nn.Module) -> bool:
    """Return whether kernels give stock's results in less time, for few rows and for many."""
    parameters = kernels.parameters_of(norm)
    if parameters is None:
        return False
    ours = partial(kernels, parameters=parameters)
    stock = partial(stock_forward(type(norm)), norm)
    device = kernels.chunks.device
    draw = torch.Generator(device).manual_seed(0)
    for dims in _TIMED:
        x = torch.randn(*dims, kernels.width, generator=draw, device=device, dtype=kernels.dtype)
        what = f"{type(norm).__name__} of {x.numel() // kernels.width} rows of {kernels.width}"
        if not is_better(what, ours, stock, (x,)):
            return False
    return True
