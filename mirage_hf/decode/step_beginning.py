"""The kernel that begins a traced step: rows of the embedding and of RoPE's tables, and bounds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mirage_hf.decode.cache_block import CacheBlock
from mirage_hf.decode.kernels.embedding import MAX_KINDS, EmbeddingOutput, Window, embed
from mirage_hf.decode.kernels.total_order import FLOATS
from mirage_hf.decode.sampler import sampler_of
from mirage_hf.trace.record import Value
from mirage_hf.trace.sizes import fixed_shape
from mirage_hf.trace.step_plan import StepPlan


@dataclass(frozen=True, eq=False)
class StepBeginning:
    """What the kernel that begins a step reads and writes.

    Attributes:
        embedding: The embedding of the tokens.
        tables: What the step's ops of positions give: (2, tables, positions, width).
        out: What the kernel writes.
        by_kernel: Whether it is launched. Otherwise torch runs.
        given: The tensors of the step among what it writes.
        left_out: The nodes that need not run.
    """

    embedding: Tensor
    tables: Tensor
    out: EmbeddingOutput
    by_kernel: bool
    given: Mapping[Value, Tensor]
    left_out: Collection[int]

    @classmethod
    def of(
        cls, plan: StepPlan, block: CacheBlock, windows: Collection[Window]
    ) -> StepBeginning | None:
        """Return the beginning of a plan's steps over a block, None if torch ops begin them.

        Its rows are not those that the ops give if a position lies beyond the block's slots.

        Args:
            plan: The plan. Its steps take one token of each row.
            block: Memory of a call.
            windows: What layers see, each window and each ring once.
        """
        positions, embedding = plan.position_ops, plan.embedding()
        by_kernel = sampler_of(block).by_kernels
        is_slow = block.device.type == "cuda" and not by_kernel
        if positions is None or embedding is None or len(windows) > MAX_KINDS or is_slow:
            return None
        value, weight = embedding
        dtypes = {plan.recording.meta(x).dtype for x in positions.results}
        if not (weight.dtype in FLOATS and weight.is_contiguous() and dtypes <= {*FLOATS}):
            return None
        with torch.inference_mode(False), torch.no_grad():
            found = positions.tables(block.capacity, block.batch, block.device)
            if found is None or len({(x.shape, x.dtype) for x in found}) > 1:
                return None
            halves = -(-len(found) // 2)
            found += found[: 2 * halves - len(found)]
            tables = torch.stack(found).unflatten(0, (2, halves))
        out = EmbeddingOutput.allocate(
            block.batch,
            weight.shape[1],
            tables.shape[-1],
            tuple(windows),
            weight.dtype,
            block.device,
            tables.dtype,
            halves,
        )
        rows = [*out.cos, *out.sin]
        given = dict(zip(positions.results, rows, strict=False)) | {value: out.x}
        shapes = {x: fixed_shape(plan.recording.meta(x)) for x in given}
        return cls(
            weight,
            tables,
            out,
            by_kernel,
            {x: given[x].view(shape) for x, shape in shapes.items() if shape is not None},
            positions.nodes | {value.node},
        )

    def run(self, block: CacheBlock) -> None:
        """Fill what the step reads for the tokens in `block.control`."""
        first, second = self.tables
        embed(block.control, self.embedding, first, second, self.out, by_kernel=self.by_kernel)

    def bounds(self, window: Window) -> dict[str, Tensor]:
        """Return the first slot that rows see, and the slot of the new key: (batch, 1) int32."""
        kind = self.out.windows.index(window)
        return {"lo": self.out.lows[kind][:, None], "slot": self.out.slots[kind][:, None]}
