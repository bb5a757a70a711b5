"""Checks of a prefill on random prompts, before it is captured or called."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mirage_hf.decode.cache_block import CacheBlock
from mirage_hf.decode.prefill_runs import forward_run
from mirage_hf.decode.prompts import BucketedPrompts
from mirage_hf.errors import MirageError

#: Up to this many layers the root of the dtype's precision bounds the differences by rounding. In
#: bfloat16 the root is 8.8%. With 32 layers and random adapters the difference was 9.2% of the size
#: (Llama-3.1-8B, H200).
FEW_LAYERS = 16


def random_prompts(model: Any, block: CacheBlock, tokens: int) -> Tensor:
    """Return prompts (batch, tokens) of tokens that the model's embedding has.

    A wider head may give other tokens. An embedding kernel that reads beyond its table ends the
    process.
    """
    generator = torch.Generator().manual_seed(tokens)
    rows = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(rows, (block.batch, tokens), generator=generator, device="cpu")
    return ids.to(block.device)


def check_kernels(
    model: Any, block: CacheBlock, prompts: BucketedPrompts, run: Callable[[], None]
) -> None:
    """Check that a prefill by kernels gives what HF's forward gives.

    Args:
        model: The model.
        block: Where both write.
        prompts: What `run` reads. Its rows are padded on the left if it has room for that.
        run: The prefill by kernels.

    Raises:
        MirageError: Logits, keys or values differ by more than rounding explains.
    """
    tokens, left_padding, kept = prompts.ids.shape[1], None, block.lowest
    if prompts.sources is not None:
        rows = torch.arange(block.batch, device=block.device)[:, None]
        left_padding = (1 + 7 * rows) % (tokens // 2)
    ids = random_prompts(model, block, tokens)
    last = torch.full((1,), tokens - 1, device=block.device)
    forward = forward_run(model, block, ids, last, left_padding)
    block.begin(left_padding)
    try:
        prompts.take(ids, left_padding)
        difference, allowed = _difference(forward.run, run, block, tokens)
    finally:
        block.begin(kept)
    if not difference <= allowed:
        raise MirageError(
            f"prefill: logits, keys or values differ by {difference:.2g} of their size "
            f"from those of the model's own forward; {allowed:.2g} is allowed"
        )


def check_causal(
    forward: Callable[[], None], block: CacheBlock, prompts: BucketedPrompts, ids: Tensor
) -> None:
    """Check that no token sees a later one.

    Models may look ahead because of their config, or because is_causal of their attention was set.

    Args:
        forward: HF's forward, which reads `prompts`.
        block: Where it writes.
        prompts: Gets `ids`.
        ids: (batch, bucket).

    Raises:
        MirageError: Other tokens in the second half change results of the first half.
    """
    prompts.ids.copy_(ids)
    tokens = ids.shape[1]
    length = tokens // 2
    prompts.last.fill_(length - 1)

    def with_other_tokens_after() -> None:
        prompts.ids[:, length:] = prompts.ids[:, :1]
        forward()

    difference, _ = _difference(forward, with_other_tokens_after, block, length)
    prompts.last.fill_(tokens - 1)
    # The same kernels on the same shapes round alike, except that experts get other numbers of
    # tokens.
    if not difference <= torch.finfo(block.logits.dtype).eps:
        raise MirageError(
            "prefill: tokens see what comes after them: logits, keys or values change by "
            f"{difference:.2g} of their size"
        )


def check_without_mask(
    with_mask: Callable[[], None], without: Callable[[], None], block: CacheBlock, tokens: int
) -> None:
    """Check that stock's prefill gives the same with a mask of ones and without a mask.

    Args:
        with_mask: The prefill with a mask. Its results are in the block afterwards.
        without: The same prefill without one.
        block: Where both write.
        tokens: Tokens of the prompt.

    Raises:
        MirageError: They differ by more than rounding explains.
    """
    difference, allowed = _difference(with_mask, without, block, tokens)
    if not difference <= allowed:
        raise MirageError(
            f"prefill: without a mask, results differ by {difference:.2g} of their size; "
            f"{allowed:.2g} is allowed"
        )


def _difference(
    first: Callable[[], None], second: Callable[[], None], block: CacheBlock, tokens: int
) -> tuple[float, float]:
    """Return how far the results of two prefills are from each other, relative to the first one's.

    Args:
        first: A prefill into the block. Its results are there afterwards.
        second: Another one.
        block: Where both write.
        tokens: Tokens that count. Left padding does not.

    Returns:
        The greatest relative difference of logits, keys and values, and the most that rounding may
        explain.
    """
    first()
    results, hidden = _results(block, tokens)
    # on the host, because 16 prompts of 128 tokens have results of 268 MB (Llama-3.1-8B)
    wanted = [x.to("cpu", copy=True) for x in results]
    try:
        for x in results:  # elements that are not written count as wrong
            x.fill_(math.nan)
        second()
        differences = torch.stack(
            [
                _relative_difference(x, want.to(x.device), unseen)
                for x, want, unseen in zip(results, wanted, hidden, strict=True)
            ]
        )
    finally:  # no NaN may stay: attention weighs slots that it does not see with 0
        for x, want in zip(results, wanted, strict=True):
            x.copy_(want)
    # Rounding in another order adds up like a random walk, layer after layer. A wrong formula is
    # off by as much as the numbers themselves.
    eps = torch.finfo(block.logits.dtype).eps
    allowed = math.sqrt(eps * max(1.0, len(block.keys) / FEW_LAYERS))
    return float(differences.max()), allowed


def _results(block: CacheBlock, tokens: int) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the results of the last prefill, and for each tensor the parts that are masked."""
    results: list[Tensor] = [block.logits, *block.states.values()]
    hidden: list[Tensor | None] = [None] * len(results)
    for memory in (block.keys, block.values):
        for layer in sorted(block.written & memory.keys()):
            ring, states = block.rings[layer], memory[layer]
            x = states[:, :, : tokens if ring is None else min(tokens, ring.length)]
            unseen = None
            if block.lowest is not None:
                slots = torch.arange(x.shape[2], device=block.device)
                # a ring has no padding but slots that hold nothing
                is_unseen = slots < block.lowest if ring is None else slots >= tokens - block.lowest
                unseen = is_unseen[:, None, :, None]
            results.append(x)
            hidden.append(unseen)
    return results, hidden


def _relative_difference(x: Tensor, wanted: Tensor, unseen: Tensor | None) -> Tensor:
    x, wanted = x.float(), wanted.float()
    if unseen is not None:
        x, wanted = x.masked_fill(unseen, 0), wanted.masked_fill(unseen, 0)
    return (x - wanted).norm() / wanted.norm().clamp_min(torch.finfo(torch.float32).tiny)
