"""A kernel for every part of every match: equal blocks are resolved once (zoo, cache, search, verify, tune)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from mirage_hf.errors import CodegenError, Rejected, SearchError, VerificationError
from mirage_hf.graph.effects import APPEND
from mirage_hf.layers.compose import Part
from mirage_hf.patterns.attention import for_long_caches
from mirage_hf.patterns.schema import PatternBlock
from mirage_hf.pipeline import layer_choice, resolver, torch_op

BlockKernels = Mapping[tuple[PatternBlock, int], Any]
"""(block, rows) to what `resolver.resolve` gave, or Rejected."""


def find_kernels(
    layers: Sequence[tuple[Part, ...]],
    rows: Sequence[int],
    *,
    device: torch.device,
    backend: str,
    zoo: Any,
    tune: str,
    progress: Callable[..., Any] | None,
) -> BlockKernels:
    """Resolve each distinct block of the parts, those that run one after another together, at each number of rows. A block without
    a kernel is a "no" with its reason."""
    found: dict[tuple[PatternBlock, int], Any] = {}
    blocks = dict.fromkeys(part.block for parts in layers for part in parts)
    long = (
        sum(block.pattern.searched_at is not None for block in blocks)
        if device.type == "cuda"
        else 0
    )
    total, begun = len(rows) * (len(blocks) + long), itertools.count(1)

    def resolved(block: PatternBlock, rows: int, progress: Callable[..., Any] | None) -> Any:
        if progress is not None:
            progress("kernel", (next(begun), total, block.pattern.name))
        try:
            return resolver.resolve(
                block.program(rows),
                device=device,
                backend=backend,
                zoo=zoo,
                tune=tune,
                pattern=block.pattern.name,
                progress=progress,
                like=block.searched(rows),
                next_may_launch_early=block.pattern.next_may_launch_early,
            )
        except (SearchError, VerificationError, CodegenError) as e:
            return Rejected(f"no kernel: {e}")

    for r in rows:
        for parts_of in layers:
            layer = [(part.block, r) for part in parts_of]
            new = [wanted for wanted in dict.fromkeys(layer) if wanted not in found]
            for block, _ in new:
                found[block, r] = resolved(block, r, progress)
            there = [
                wanted for wanted in dict.fromkeys(layer) if not isinstance(found[wanted], Rejected)
            ]
            for block, _ in new:
                if (
                    block.pattern.searched_at is not None
                    and device.type == "cuda"
                    and not isinstance(found[block, r], Rejected)
                ):
                    found[for_long_caches(block), r] = resolved(for_long_caches(block), r, progress)
            if new:  # what an earlier layer chose stays
                parts = [found[w] if w in new else replace(found[w], outcome=None) for w in there]
                found |= zip(
                    there, layer_choice.for_layer(parts, device=device, zoo=zoo), strict=True
                )
    for kernel in found.values():
        if not isinstance(kernel, Rejected) and not any(
            op.name == APPEND for op in kernel.ugraph.program.ops
        ):  # the op mutates nothing
            torch_op.register(kernel.digest, kernel.ugraph, kernel.run, device.type)
    return found
