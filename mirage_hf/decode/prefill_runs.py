"""The ways to run a prefill into a block: by kernels, by HF's forward, and by stock's prefill."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mirage_hf.decode.cache_block import CacheBlock
from mirage_hf.decode.cache_exchange import read_cache
from mirage_hf.decode.cache_layers import prefill_cache
from mirage_hf.decode.call_plan import CallInputs
from mirage_hf.decode.graphs import is_capturing
from mirage_hf.decode.prompts import BucketedPrompts, PromptShape
from mirage_hf.decode.routing import cache_name
from mirage_hf.decode.stock_masks import masks_as_in_calls
from mirage_hf.decode.summed_products import SummedProducts
from mirage_hf.layers.model_kernels import ModelKernels
from mirage_hf.layers.prefill import PromptInputs
from mirage_hf.layers.window_attention import WindowAttention


@dataclass(frozen=True)
class PrefillRun:
    """What runs a prefill into a block, logits included.

    Attributes:
        run: Runs it.
        held: What it reads besides the block, the prompts and the model.
    """

    run: Callable[[], None]
    held: Any


def make_room(block: CacheBlock, model_kernels: ModelKernels) -> None:
    """Allocate a block's layers and logits as a prompt's forward would.

    They are missing if the prompt is the first of its block, or if those before it raised midway.
    """
    embedding = model_kernels.embedding
    if len(block.values) < len(model_kernels.layers):
        for n, layer in enumerate(model_kernels.layers):
            assert layer.prefill is not None
            sizes = layer.prefill.sizes["attention"]
            shape = (block.batch, sizes["kv_heads"], 0, sizes["head_dim"])
            states = embedding.new_empty(shape, dtype=sizes["dtype"])
            block.claim(n, states, states)
    if not block.logits.numel():
        block.set_logits(embedding.new_zeros((block.batch, model_kernels.vocab)))


def kernel_run(
    model_kernels: ModelKernels, block: CacheBlock, prompts: BucketedPrompts, shape: PromptShape
) -> PrefillRun:
    """Return a prefill by kernels, with products and attention by the library.

    Raises:
        MirageError: There are no kernels for a part of a layer.
    """
    batch, tokens = prompts.ids.shape
    windowed = {
        window: WindowAttention.of(window, tokens, model_kernels.embedding)
        for window in shape.windows
        if window is not None
    }
    tables = model_kernels.rotary_tables(tokens)
    cos, sin = (table.repeat(1, batch, 1)[:, :, None] for table in tables)
    kernels = model_kernels.prefill_kernels(batch * tokens)

    def run() -> None:
        layer_inputs = (
            PromptInputs(
                cos[layer.rope_table],
                sin[layer.rope_table],
                block.keys[n],
                block.values[n],
                prompts.sources_of(block.rings[n]),
                None if (window := shape.windows[n]) is None else windowed[window],
            )
            for n, layer in enumerate(model_kernels.layers)
        )
        with torch.no_grad():
            model_kernels.run_prompt(kernels, prompts.ids, prompts.last, layer_inputs, block.logits)

    return PrefillRun(run, (cos, sin, kernels, windowed))


def stock_run(
    inputs: CallInputs, cache: Any, block: CacheBlock, ids: Tensor, *, with_mask: bool
) -> PrefillRun:
    """Return stock's own prefill: it fills a cache of stock's, which is copied into a block.

    Args:
        inputs: What stock's decoding method would get. Its prompt has no padding.
        cache: An empty cache as stock would fill it. It stays empty.
        block: Where keys, values, states and logits go. It has room for them.
        ids: (batch, tokens).
        with_mask: Whether the model gets a mask of ones, which some models read on the host.
    """
    with torch.inference_mode(False):
        held = {
            name: x.clone()
            for name, x in inputs.kwargs.items()
            if isinstance(x, Tensor) and (with_mask or name != "attention_mask")
        }
    model, config = inputs.model, inputs.config
    others = {name: x for name, x in inputs.kwargs.items() if not isinstance(x, Tensor)}

    def run() -> None:
        filled = copy.deepcopy(cache)
        with SummedProducts():
            outputs = model._prefill(ids, config, {**others, **held, cache_name(model): filled})
        read_cache(block, filled, ids.shape[1])
        block.logits.copy_(outputs.logits[:, -1])

    return PrefillRun(run, held)


def forward_run(
    model: Any, block: CacheBlock, ids: Tensor, last: Tensor, left_padding: Tensor | None = None
) -> PrefillRun:
    """Return a prefill by HF's forward, into a block that has room for it.

    Args:
        model: The model.
        block: Where keys, values and logits go.
        ids: (batch, tokens).
        last: (1,): the token whose logits count.
        left_padding: (batch, 1), None if no row has any.
    """
    batch, tokens = ids.shape
    with torch.inference_mode(False):
        positions = torch.arange(tokens, device=block.device).repeat(batch, 1)
        mask = None
        if left_padding is not None:
            mask = (positions >= left_padding).long()
            positions.sub_(left_padding).clamp_min_(0)
        if axes := len(block.control.offsets):
            positions = positions.expand(axes, -1, -1)

    def run() -> None:
        masks = masks_as_in_calls() if is_capturing(block.device) else contextlib.nullcontext()
        with masks:
            outputs = model(
                input_ids=ids,
                position_ids=positions,
                past_key_values=prefill_cache(block),
                use_cache=True,
                attention_mask=mask,
                return_dict=True,
                logits_to_keep=last,
            )
        logits = outputs.logits[:, -1]
        if (logits.shape, logits.dtype) != (block.logits.shape, block.logits.dtype):
            raise RuntimeError(
                f"logits of {tuple(logits.shape)}, {logits.dtype}, "
                f"for a block that held {tuple(block.logits.shape)}"
            )
        block.logits.copy_(logits)

    return PrefillRun(run, positions)
