"""Find a kernel for every part of every match. Equal blocks are resolved once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mirage_hf.errors import CodegenError, Rejected, SearchError, VerificationError
from mirage_hf.graph.effects import APPEND
from mirage_hf.layers.part import Part, StepShape, block_at
from mirage_hf.patterns.attention import for_long_caches
from mirage_hf.patterns.schema import PatternBlock
from mirage_hf.pipeline import layer_choice, resolver, torch_op
from mirage_hf.pipeline.resolver import Resolved

#: Maps (block, rows) to its kernel, or to `Rejected` with a reason.
BlockKernels = Mapping[tuple[PatternBlock, int], Resolved | Rejected]


@dataclass
class _Resolver:
    """Resolves blocks with the options of one optimize()."""

    device: torch.device
    backend: str
    zoo: Any
    tune: str
    progress: Callable[..., Any] | None
    #: The number of blocks, for the progress report.
    total: int
    begun: int = 0
    found: dict[tuple[PatternBlock, int], Resolved | Rejected] = field(default_factory=dict)

    def resolve(self, block: PatternBlock, rows: int) -> None:
        """Find the kernel of a block, or the reason why it has none."""
        self.begun += 1
        if self.progress is not None:
            self.progress("kernel", (self.begun, self.total, block.pattern.name))
        try:
            self.found[block, rows] = resolver.resolve(
                block.program(rows),
                device=self.device,
                backend=self.backend,
                zoo=self.zoo,
                tune=self.tune,
                pattern=block.pattern.name,
                progress=self.progress,
                like=block.searched(rows),
                next_may_launch_early=block.pattern.next_may_launch_early,
            )
        except (SearchError, VerificationError, CodegenError) as error:
            self.found[block, rows] = Rejected(f"no kernel: {error}")

    def resolve_layer(self, parts: Sequence[Part], shape: StepShape) -> None:
        """Find the kernels of parts that run one after another."""
        wanted = _blocks_of(parts, shape)
        new = [each for each in wanted if each not in self.found]
        for each in new:
            self.resolve(*each)
        available = {
            each: kernel for each in wanted if not isinstance(kernel := self.found[each], Rejected)
        }
        for block, rows in new:
            if (block, rows) in available and _is_tuned_for_long_caches(block, self.device):
                self.resolve(for_long_caches(block), rows)
        if not new:
            return
        # The kernels that an earlier layer chose stay.
        chain = [
            kernel if each in new else replace(kernel, outcome=None)
            for each, kernel in available.items()
        ]
        chosen = layer_choice.chosen_for_layer(chain, device=self.device, zoo=self.zoo)
        for each, kernel in zip(available, chosen, strict=True):
            self.found[each] = kernel


def find_kernels(
    layers: Sequence[tuple[Part, ...]],
    shapes: Sequence[StepShape],
    *,
    device: torch.device,
    backend: str,
    zoo: Any,
    tune: str,
    progress: Callable[..., Any] | None,
) -> BlockKernels:
    """Resolve each distinct block of the parts for steps of each shape.

    Args:
        layers: The parts of each layer. The kernels of one layer are chosen together.
        shapes: The shapes of steps.
        device: The device of the model.
        backend: "triton" or "cpu".
        zoo: A kernel zoo besides the packaged one, or None.
        tune: As in `optimize`.
        progress: As in `optimize`, or None.
    """
    wanted = {each for shape in shapes for parts in layers for each in _blocks_of(parts, shape)}
    long = sum(_is_tuned_for_long_caches(block, device) for block, _ in wanted)
    resolver = _Resolver(device, backend, zoo, tune, progress, total=len(wanted) + long)
    for shape in shapes:
        for parts in layers:
            resolver.resolve_layer(parts, shape)
    for kernel in resolver.found.values():
        if not isinstance(kernel, Rejected) and not _appends(kernel):
            torch_op.register(kernel.digest, kernel.ugraph, kernel.run, device.type)
    return resolver.found


def _blocks_of(parts: Sequence[Part], shape: StepShape) -> list[tuple[PatternBlock, int]]:
    """Return each distinct block of parts in steps of a shape, with its rows."""
    at = (block_at(part.block, shape) for part in parts)
    return list(dict.fromkeys(each for each in at if not isinstance(each, Rejected)))


def _is_tuned_for_long_caches(block: PatternBlock, device: torch.device) -> bool:
    return block.pattern.searched_at is not None and device.type == "cuda"


def _appends(kernel: Resolved) -> bool:
    """Return whether a kernel writes into its inputs. `torch_op` must not call such a kernel."""
    return any(op.name == APPEND for op in kernel.ugraph.program.ops)
