"""The step program: a whole step of decoding as one chain of kernels, embedding to token, over a cache block.

Of its kernels only the two ends (decode/kernels) are written by hand; those of the layers and of the head were searched, proven and
tuned for the model's own parts. They are captured in one CUDA graph, in which each may begin while the one before it ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mirage_hf.decode.cache import CacheBlock
from mirage_hf.decode.call_plan import CallPlan
from mirage_hf.decode.kernels.embedding import EmbeddingOutput, embed
from mirage_hf.decode.kernels.kernel_launch import MAX_ROWS, MAX_VOCAB
from mirage_hf.decode.kernels.ring import turn_rings
from mirage_hf.decode.kernels.sampling import Sampler, sampler_of
from mirage_hf.decode.kernels.total_order import FLOATS
from mirage_hf.decode.program import Chooser, MaskPlan, Step, move_on
from mirage_hf.layers.compose import Kernel
from mirage_hf.layers.model_kernels import ModelKernels
from mirage_hf.layers.step import StepInputs


@dataclass(frozen=True)
class _Buffers:
    """What a block's steps write besides its cache and control, at fixed addresses."""

    inputs: EmbeddingOutput
    sampler: Sampler
    cos: Tensor
    sin: Tensor
    #: What runs the parts of each layer.
    kernels: tuple[dict[str, Kernel], ...]
    #: Which of the inputs' windows each layer has.
    windows: tuple[int, ...]


class StepProgram(Step):
    """Every layer's kernels in a chain. For blocks of as many rows as there are kernels for (`ModelKernels.rows`)."""

    by_kernels = True

    def __init__(
        self,
        steps: ModelKernels,
        block: CacheBlock,
        masks: MaskPlan,
        *,
        graphs: bool,
        graph_key: object,
    ):
        super().__init__(block, graphs, graph_key)
        self.steps, self.masks = steps, masks
        self._buffers: _Buffers | None = None

    def _ready(self) -> _Buffers:
        if self._buffers is None:
            steps, block, windows = self.steps, self.block, dict(self.masks.windows)
            kinds = [self.masks.kind_of(n) for n in range(len(steps.layers))]
            cos, sin = steps.rotary_tables(block.capacity)
            seen = [ring or windows[kind] for ring, kind in zip(block.rings, kinds, strict=True)]
            each = list(dict.fromkeys(seen))
            tables, _, width = cos.shape
            inputs = EmbeddingOutput.allocate(
                block.batch,
                steps.embedding.shape[1],
                width,
                each,
                steps.embedding.dtype,
                block.device,
                cos.dtype,
                tables,
            )
            kernels = tuple(
                steps.kernels(layer, block.batch, block.slots_of(n))
                for n, layer in enumerate(steps.layers)
            )
            indices = tuple(each.index(window) for window in seen)
            self._buffers = _Buffers(inputs, sampler_of(block), cos, sin, kernels, indices)
        return self._buffers

    def held(self) -> Any:
        """What a captured graph reads and writes besides the block and the model."""
        return self._buffers

    def _forward(self) -> None:
        ready, block, steps = self._ready(), self.block, self.steps
        inputs = ready.inputs
        with torch.no_grad():
            embed(
                block.control,
                steps.embedding,
                ready.cos,
                ready.sin,
                inputs,
                steps.embedding_scale,
                by_kernel=ready.sampler.by_kernels,
            )
            layer_inputs = (
                StepInputs(
                    inputs.cos[layer.rope_table],
                    inputs.sin[layer.rope_table],
                    block.keys[n],
                    block.values[n],
                    inputs.lows[window],
                    inputs.slots[window],
                    inputs.ends[window],
                )
                for n, (layer, window) in enumerate(zip(steps.layers, ready.windows, strict=True))
            )
            steps.run_step(ready.kernels, inputs.x, layer_inputs, block.logits)
            turn_rings(block.control, block.turning, by_kernel=ready.sampler.by_kernels)

    def _to_logits(self) -> None:
        self._forward()
        move_on(self.block.control, self.block.control.alive.any())

    def _to_token(self, chooser: Chooser) -> None:
        self._forward()
        chooser.choose(self.block.control, self.block.logits)


CHANGED = "the model has changed since optimize()"


def obstacle(
    steps: ModelKernels | None, plan: CallPlan, block: CacheBlock, valid_for: object
) -> str:
    """Why a call's steps run the model's own forward instead, "" where they need not. `valid_for`: what the model was for the steps."""
    if steps is None:
        return "not every layer has all of its kernels"
    if block.batch not in steps.rows:
        return f"no kernels for a batch of {block.batch}; optimize(batch_sizes=…) makes them"
    if changed := steps.changed():
        return changed
    rope = (
        plan.fingerprint.rope
    )  # before the next: beyond its reach the forward itself sets new frequencies
    if rope is not None and plan.most_slots > rope.reach:
        return rope.reason
    if plan.fingerprint.model != valid_for:
        return CHANGED
    if block.batch > MAX_ROWS or steps.vocab > MAX_VOCAB or steps.embedding.dtype not in FLOATS:
        return f"the ends of a step are for {MAX_ROWS} rows, a vocabulary of {MAX_VOCAB} and dtypes of up to 32 bits"
    if plan.fingerprint.no_graph is not None:
        return plan.fingerprint.no_graph
    if plan.prompt.odd_positions:
        return "positions outside the slots of the cache"
    shape = block.logits.shape
    if (
        len(shape) != 2
        or shape[1] != steps.vocab
        or block.logits.dtype is not steps.embedding.dtype
    ):
        return f"logits of {tuple(shape)}, {block.logits.dtype}"
    return steps.obstacle(block.batch, tuple(block.slots_of(n) for n in range(len(steps.layers))))
