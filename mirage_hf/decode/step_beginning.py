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
from mirage_hf.trace.position_ops import PositionOps
from mirage_hf.trace.record import Value
from mirage_hf.trace.sizes import fixed_shape
from mirage_hf.trace.step_plan import StepPlan


@dataclass(frozen=True, eq=False)
class StepBeginning:
    """What the kernel that begins a step reads and writes.

    Attributes:
        embedding: The embedding of the tokens.
        tables: What the step computes from positions: (2, tables, positions, width).
        out: What the kernel writes.
        by_kernel: Whether it is launched. Otherwise torch runs.
        given: The memory that the kernel fills, by the recorded tensor that it stands for.
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

        Args:
            plan: The plan. Its steps take one token of each row, at a position within the slots.
            block: Memory of a call.
            windows: What layers see, each window and each ring once.
        """
        ops, embedding = plan.position_ops, plan.embedding()
        by_kernel = sampler_of(block).by_kernels
        is_slow = block.device.type == "cuda" and not by_kernel
        if ops is None or embedding is None or len(windows) > MAX_KINDS or is_slow:
            return None
        value, weight = embedding
        is_on_device = weight.device == block.control.ids.device
        if weight.dtype not in FLOATS or not weight.is_contiguous() or not is_on_device:
            return None
        tables = _tables_of(ops, block)
        if tables is None:
            return None
        out = EmbeddingOutput.allocate(
            block.batch,
            weight.shape[1],
            tables.shape[-1],
            tuple(windows),
            weight.dtype,
            block.device,
            tables.dtype,
            tables.shape[1],
        )
        filled = dict(zip(ops.results, [*out.cos, *out.sin], strict=False)) | {value: out.x}
        shapes = {x: fixed_shape(plan.recording.meta(x)) for x in filled}
        given = {x: filled[x].view(shape) for x, shape in shapes.items() if shape is not None}
        return cls(weight, tables, out, by_kernel, given, ops.nodes | {value.node})

    def run(self, block: CacheBlock) -> None:
        """Fill what the step reads for the tokens in `block.control`."""
        first, second = self.tables
        embed(block.control, self.embedding, first, second, self.out, by_kernel=self.by_kernel)

    def bounds(self, window: Window) -> dict[str, Tensor]:
        """Return the first slot that rows see, and the slot of the new key: (batch, 1) int32."""
        kind = self.out.windows.index(window)
        return {"lo": self.out.lows[kind][:, None], "slot": self.out.slots[kind][:, None]}


def _tables_of(ops: PositionOps, block: CacheBlock) -> Tensor | None:
    """Return the tables of a block (2, tables, positions, width), None if there can be none.

    The kernel reads two tensors of as many tables. So the last table may be one that nothing reads.
    """
    if not ops.have_one_form or ops.dtype not in FLOATS:
        return None
    versions, tables = block.tables.get(ops, (None, None))
    if versions != ops.versions:
        halves = -(-len(ops.results) // 2)
        with torch.inference_mode(False), torch.no_grad():
            dims = 2 * halves, block.capacity, ops.width
            tables = torch.empty(dims, dtype=ops.dtype, device=block.device)
            tables = tables.unflatten(0, (2, halves)) if ops.fill(tables, block.batch) else None
        block.tables[ops] = ops.versions, tables
    return tables
