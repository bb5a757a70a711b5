"""Find kernels that rotate q and k of a model, and use them in prompts where they are faster."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from mirage_hf.errors import Rejected
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.match.probe import TOLERANCE, Probes
from mirage_hf.patterns.attention import ROPES
from mirage_hf.patterns.prompt import PROMPT_ROTATION
from mirage_hf.patterns.schema import PatternBlock
from mirage_hf.pipeline.resolver import KernelFinder
from mirage_hf.swap.ledger import Ledger
from mirage_hf.swap.own_forward import FORWARD_KEY, bind_forward
from mirage_hf.swap.prompt_kernels import finder_for_prompts, is_better
from mirage_hf.swap.rotation_forward import (
    ROTATION,
    Rotate,
    RotationBinding,
    RotationKernels,
    RotationSizes,
    table_rows,
)
from mirage_hf.swap.row_kernels import KERNEL_ROWS, chunks_of_kernels

_log = logging.getLogger("mirage_hf")

#: The tokens for which kernels must be faster: 128, 2,048, which take two launches, and 4,096,
#: which one launch of the largest kernel takes. More tokens take more memory.
_TIMED = (128, 2 * KERNEL_ROWS[-2], KERNEL_ROWS[-1])

#: The sequences and the tokens of each on which a function is compared with programs.
_PROBED = 2, 5

#: What kernels depend on: the function of the model's file, and its sizes.
_Kind = tuple[Rotate, RotationSizes]


@dataclass(frozen=True)
class _Form:
    """What a function computes for each token.

    Attributes:
        block: The program.
        order: As in `RotationKernels`.
        by_heads: Likewise.
    """

    block: PatternBlock
    order: str
    by_heads: bool


def bind_rotations(model: nn.Module, ledger: Ledger) -> int:
    """Let attention note what it calls the function with that rotates q and k.

    Args:
        model: The model.
        ledger: Takes what undoes it.

    Returns:
        How many modules were bound.
    """
    count = 0
    for module in model.modules():
        binding = None if "forward" in module.__dict__ else RotationBinding.of(module)
        if binding is not None:
            ledger.undos.append(bind_forward(module, binding))
            count += 1
    return count


def find_rotation_kernels(model: nn.Module, finder: KernelFinder) -> list[str]:
    """Give attention kernels that rotate q and k, where these are faster.

    It must have run since it was bound. Without a GPU nothing is done.

    Args:
        model: The model. Its prompts run its own forward.
        finder: Finds kernels, as in `find_prompt_kernels`.

    Returns:
        Notes for the report.
    """
    bindings = [m.__dict__.get(FORWARD_KEY) for m in model.modules()]
    kind_of = {
        binding: (binding.function, sizes)
        for binding in bindings
        if isinstance(binding, RotationBinding) and (sizes := binding.called_with) is not None
    }
    if finder.gpu is None or not kind_of:
        return []
    kinds = dict.fromkeys(kind_of.values())
    kernels = _kernels_of(kinds, finder_for_prompts(finder))
    for binding, kind in kind_of.items():
        binding.kernels = kernels.get(kind)
    return [f"prompts: {len(kernels)} of {len(kinds)} kinds of RoPE run by kernels"]


def _kernels_of(kinds: Iterable[_Kind], finder: KernelFinder) -> dict[_Kind, RotationKernels]:
    """Return the kernels that give stock's results in less time."""
    probes, forms = Probes(), {}
    for kind in kinds:
        found = probes.once(kind, partial(_probe, *kind))
        if isinstance(found, Rejected):
            _log.info("RoPE: no kernels: %s", found.reason)
        else:
            forms[kind] = found
    devices = {form.block: sizes.device for (_, sizes), form in forms.items()}
    chunks = chunks_of_kernels(devices, finder)
    better = {}
    for (function, sizes), form in forms.items():
        if form.block in chunks and chunks[form.block].device == sizes.device:
            kernels = RotationKernels(sizes, chunks[form.block], form.order, form.by_heads)
            if _are_better(kernels, function):
                better[function, sizes] = kernels
    return better


def _probe(function: Rotate, sizes: RotationSizes) -> _Form | Rejected:
    """Return what a function computes for each token. It may raise anything."""
    if sizes.dtype.itemsize != 2 or sizes.heads % sizes.kv_heads:
        return Rejected("q is no 16-bit float, or heads of keys have different numbers of queries")
    cpu, float32 = torch.device("cpu"), torch.float32
    plain = replace(sizes, dtype=float32, table_dtype=float32, device=cpu)
    given = _random_inputs(plain, *_PROBED)
    rows = [x.transpose(1, 2).flatten(0, 1) for x in given[:2]]
    stock = [x.transpose(1, 2).flatten(0, 1) for x in function(*given)]
    by_heads = all(x.is_contiguous() for x in function(*_random_inputs(sizes, *_PROBED)))
    batch, tokens = _PROBED
    orders = [(rope, order) for rope in filter(None, ROPES) for order in ("once", rope)]
    for rope, order in orders:
        tables = [table_rows(x, batch, order) for x in given[2:]]
        rotary = tables[0].shape[-1]
        if rotary > sizes.head_dim:
            continue
        program = _rotation(plain, rope, rotary).program(batch * tokens)
        pairs = [*zip(run_kernel_graph(program, [*rows, *tables]), stock, strict=True)]
        if all(x.shape == y.shape and (x - y).abs().max() < TOLERANCE for x, y in pairs):
            return _Form(_rotation(sizes, rope, rotary), order, by_heads)
    return Rejected(f"{ROTATION} is no RoPE that a program computes")


def _rotation(sizes: RotationSizes, rope: str, rotary: int) -> PatternBlock:
    return PROMPT_ROTATION.block(
        kv_heads=sizes.kv_heads,
        group=sizes.heads // sizes.kv_heads,
        head_dim=sizes.head_dim,
        norm="",
        eps=0.0,
        dtype=sizes.dtype,
        rope=rope,
        rotary=None if rotary == sizes.head_dim else rotary,
        rope_dtype=None if sizes.table_dtype is sizes.dtype else sizes.table_dtype,
        packing="",
    )


def _random_inputs(sizes: RotationSizes, batch: int, tokens: int) -> list[Tensor]:
    """Return q, k, cos and sin as attention has them."""
    draw = torch.Generator(sizes.device).manual_seed(0)

    def random(*dims: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(dims, generator=draw, device=sizes.device, dtype=dtype)

    heads = sizes.heads, sizes.kv_heads
    dims = (batch, tokens)
    q, k = (random(*dims, n, sizes.head_dim, dtype=sizes.dtype).transpose(1, 2) for n in heads)
    cos, sin = (random(*dims, sizes.rotary, dtype=sizes.table_dtype) for _ in range(2))
    return [q, k, cos, sin]


def _are_better(kernels: RotationKernels, function: Rotate) -> bool:
    """Return whether kernels give stock's results in less time, for few tokens and for many."""
    for tokens in _TIMED:
        given = _random_inputs(kernels.sizes, 1, tokens)
        what = f"RoPE of {tokens} tokens"
        if not is_better(what, kernels, function, given):
            return False
        # one after the other, since results of many tokens are large
        ours, stock = ([x.stride() for x in run(*given)] for run in (kernels, function))
        if ours != stock:
            _log.info("%s: kernels' results lie otherwise in memory than stock's", what)
            return False
        del given
    return True
