"""Short prompts in a CUDA graph: HF's own forward over a bucket of tokens, so that its host work is done once for many prompts.

A prompt is filled up on the right: what is causal does not see later tokens, and the logits are those of its own last token. Keys of
the filling are cleared. The first prompt of a bucket runs HF's forward as it is, which costs less than a capture.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mirage_hf.decode.cache import Block
from mirage_hf.decode.graphs import capture

GRAIN = 64
"""Buckets are multiples of it."""
MOST_TOKENS = 2048
"""Tokens of a batch beyond which HF's forward runs as it is. Measured at 128 only (Llama-3.2-1B, H200: the prefill's kernels take about
2 ms, the first token 9.6 ms without a graph and 5.6 with one); where the GPU takes as long as the host is an estimate."""


@dataclass(frozen=True)
class PrefillGraph:
    """A captured prefill and what it reads: ids (batch, bucket) and the index of the last token of the prompt."""

    graph: Any
    ids: Tensor
    last: Tensor
    positions: Tensor

    def run(self, input_ids: Tensor) -> None:
        """Prefill a prompt (batch, length) into the block that the graph was captured for, logits included."""
        length = input_ids.shape[1]
        self.ids[:, :length].copy_(input_ids)
        self.last.fill_(length - 1)
        self.graph.replay()


def bucket_of(batch: int, length: int, block: Block, windows: tuple[tuple[str, int | None], ...]) -> int | None:
    """The bucket of a prompt, or None where it has none: too many tokens, or more than a sliding window."""
    bucket = -(-length // GRAIN) * GRAIN
    fits = batch * bucket <= MOST_TOKENS and bucket <= block.capacity
    return bucket if fits and all(window is None or bucket <= window for _, window in windows) else None


def capture_prefill(model: Any, block: Block, batch: int, bucket: int) -> PrefillGraph:
    """Capture HF's forward over `bucket` tokens into a block that has held a prompt. Errors: RuntimeError where it cannot be."""
    with torch.inference_mode(False):
        ids = torch.zeros(batch, bucket, dtype=torch.long, device=block.device)
        last = torch.zeros(1, dtype=torch.long, device=block.device)
        positions = torch.arange(bucket, device=block.device)[None].expand(batch, -1).contiguous()
    kept = block.logits.clone()

    def run() -> None:
        outputs = model(input_ids=ids, position_ids=positions, past_key_values=block.prefill_cache(), use_cache=True, attention_mask=None,
                        return_dict=True, logits_to_keep=last)
        logits = outputs.logits[:, -1]
        if (logits.shape, logits.dtype) != (block.logits.shape, block.logits.dtype):
            raise RuntimeError(f"logits of {tuple(logits.shape)}, {logits.dtype}, for a block that held {tuple(block.logits.shape)}")
        block.logits.copy_(logits)

    graph, block.graph_pool = capture(run, block.device, block.graph_pool)
    block.logits.copy_(kept)
    return PrefillGraph(graph, ids, last, positions)
