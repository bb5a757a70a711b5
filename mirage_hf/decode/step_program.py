"""The step program: a whole step of decoding as one chain of kernels, from embedding to token.

Only the kernels at its two ends are hand-written (kernels/). Those of the layers and of the head
were searched, proven and tuned for the model's own parts. All are captured in one CUDA graph. There
each kernel may begin while the one before it ends (programmatic dependent launch).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mirage_hf.decode.cache_block import CacheBlock
from mirage_hf.decode.call_plan import CallPlan
from mirage_hf.decode.drafts import Drafts
from mirage_hf.decode.kernels.embedding import EmbeddingOutput, embed
from mirage_hf.decode.kernels.ring import turn_rings
from mirage_hf.decode.kernels.sizes import MAX_ROWS, MAX_VOCAB
from mirage_hf.decode.kernels.total_order import FLOATS
from mirage_hf.decode.masks import MaskPlan
from mirage_hf.decode.sampler import Sampler, sampler_of
from mirage_hf.decode.step import Step
from mirage_hf.layers.compose import Kernel
from mirage_hf.layers.model_kernels import ModelKernels
from mirage_hf.layers.part import StepShape
from mirage_hf.layers.step import StepInputs, TokenBounds

CHANGED = "the model has changed since optimize()"


@dataclass(frozen=True)
class _Buffers:
    """The memory of a block's steps besides the block and the model, at fixed addresses.

    Attributes:
        embedded: The inputs of the layers besides weights and keys.
        sampler: Chooses tokens.
        cos: Rotary table (tables, capacity, width).
        sin: Likewise.
        kernels: The kernels of each layer's parts, by role.
        windows: For each layer the index of its window in `embedded`.
        bounds: For each window what each token sees, None if a row has one new token.
    """

    embedded: EmbeddingOutput
    sampler: Sampler
    cos: Tensor
    sin: Tensor
    kernels: tuple[dict[str, Kernel], ...]
    windows: tuple[int, ...]
    bounds: tuple[TokenBounds | None, ...]


class StepProgram(Step):
    """Every layer's kernels in a chain, for steps of a shape in `ModelKernels.shapes`."""

    by_kernels = True

    def __init__(
        self,
        model_kernels: ModelKernels,
        block: CacheBlock,
        masks: MaskPlan,
        shape: StepShape,
        drafts: Drafts | None = None,
        *,
        graphs: bool,
        graph_key: object,
    ):
        super().__init__(block, graphs, graph_key)
        self.model_kernels, self.masks = model_kernels, masks
        #: The step feeds `drafts.tokens` if there are drafts, otherwise `control.ids`.
        self.shape, self.drafts = shape, drafts
        steps = (layer.step for layer in model_kernels.layers)
        self.runs_modules = any(step.runs_own_mlp(shape.rows) for step in steps)
        self._buffers: _Buffers | None = None

    @property
    def logits(self) -> Tensor:
        """The logits that the step leaves."""
        return self.block.logits if self.drafts is None else self.drafts.logits

    def held(self) -> Any:
        """Return what a captured graph reads and writes besides the block and the model."""
        return self._buffers

    def _ready_buffers(self) -> _Buffers:
        if self._buffers is None:
            self._buffers = self._allocate()
        return self._buffers

    def _allocate(self) -> _Buffers:
        model_kernels, block = self.model_kernels, self.block
        embedding = model_kernels.embedding
        window_of_kind = dict(self.masks.windows)
        windows = [
            ring or window_of_kind[self.masks.kind_of(n)] for n, ring in enumerate(block.rings)
        ]
        distinct = list(dict.fromkeys(windows))
        cos, sin = model_kernels.rotary_tables(block.capacity)
        tables, _, width = cos.shape
        embedded = EmbeddingOutput.allocate(
            block.batch,
            embedding.shape[1],
            width,
            distinct,
            embedding.dtype,
            block.device,
            cos.dtype,
            tables,
            self.shape.tokens,
        )
        kernels = tuple(
            model_kernels.kernels(layer, self.shape, block.num_slots(n))
            for n, layer in enumerate(model_kernels.layers)
        )
        indices = tuple(distinct.index(window) for window in windows)
        bounds: tuple[TokenBounds | None, ...] = (None,) * len(distinct)
        if embedded.firsts:
            pairs = zip(embedded.firsts, distinct, strict=True)  # there are no rings
            bounds = tuple(
                TokenBounds.of(first, window, block.capacity, self.shape.windowed)  # type: ignore[arg-type]
                for first, window in pairs
            )
        return _Buffers(embedded, sampler_of(block), cos, sin, kernels, indices, bounds)

    def _forward(self) -> None:
        buffers, block, model_kernels = self._ready_buffers(), self.block, self.model_kernels
        embedded, by_kernel = buffers.embedded, buffers.sampler.by_kernels
        layer_inputs = (
            StepInputs(
                embedded.cos[layer.rope_table],
                embedded.sin[layer.rope_table],
                block.keys[n],
                block.values[n],
                embedded.lows[window],
                embedded.slots[window],
                embedded.ends[window],
                buffers.bounds[window],
            )
            for n, (layer, window) in enumerate(
                zip(model_kernels.layers, buffers.windows, strict=True)
            )
        )
        with torch.no_grad():
            embed(
                block.control,
                model_kernels.embedding,
                buffers.cos,
                buffers.sin,
                embedded,
                model_kernels.embedding_scale,
                by_kernel=by_kernel,
                drafts=self.drafts,
            )
            for low, slot, bounds in zip(
                embedded.lows, embedded.slots, buffers.bounds, strict=True
            ):
                if bounds is not None:
                    model_kernels.layers[0].step.set_bounds(low, slot, bounds)
            model_kernels.run_step(buffers.kernels, embedded.x, layer_inputs, self.logits)
            turn_rings(block.control, block.ring_slabs, by_kernel=by_kernel)


def why_no_step_program(
    model_kernels: ModelKernels | None,
    plan: CallPlan,
    block: CacheBlock,
    made_for: object,
    shape: StepShape | None = None,
) -> str:
    """Return why a call's steps must run the model's own forward, or "" if kernels run them.

    Args:
        model_kernels: The model's kernels, if it has any.
        plan: Plan of the call.
        block: Memory of the call.
        made_for: `ModelFingerprint.facts` of the model that the kernels were made for.
        shape: The shape of the steps. None: one token of each row.
    """
    shape = shape or StepShape(block.batch)
    if model_kernels is None:
        return "not every layer has all of its kernels"
    if shape not in model_kernels.shapes:
        return f"no kernels for a batch of {block.batch}; optimize(batch_sizes=…) makes them"
    if changed := model_kernels.changed():
        return changed
    fingerprint = plan.fingerprint
    # before the fingerprints are compared: beyond its reach the forward itself sets new frequencies
    rope = fingerprint.rope
    if rope is not None and plan.most_slots > rope.reach:
        return rope.reason
    if fingerprint.facts != made_for:
        return CHANGED
    embedding = model_kernels.embedding
    if shape.rows > MAX_ROWS or model_kernels.vocab > MAX_VOCAB or embedding.dtype not in FLOATS:
        return (
            f"the embedding and sampling kernels take up to {MAX_ROWS} rows, a vocabulary of up to "
            f"{MAX_VOCAB}, and float16, bfloat16 or float32"
        )
    if fingerprint.no_graph is not None:
        return fingerprint.no_graph
    if plan.prompt.has_unusual_positions:
        return "positions outside the slots of the cache"
    logits = block.logits
    has_vocab = logits.dim() == 2 and logits.shape[1] == model_kernels.vocab
    if not has_vocab or logits.dtype is not embedding.dtype:
        return f"logits of {tuple(logits.shape)}, {logits.dtype}"
    slots = tuple(block.num_slots(n) for n in range(len(model_kernels.layers)))
    return model_kernels.obstacle(shape, slots)
