"""Find a kernel for every part of every match. Equal blocks are resolved once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from mirage_hf.errors import Rejected
from mirage_hf.graph.effects import APPEND
from mirage_hf.layers.part import Part, StepShape, block_at
from mirage_hf.patterns.attention import for_long_caches
from mirage_hf.patterns.schema import PatternBlock
from mirage_hf.pipeline import torch_op
from mirage_hf.pipeline.layer_choice import BlockToMake, LayerResolver
from mirage_hf.pipeline.resolver import Resolved

#: Maps (block, rows) to its kernel, or to `Rejected` with a reason.
BlockKernels = Mapping[tuple[PatternBlock, int], Resolved | Rejected]


class ModelBlocks:
    """The distinct blocks of a model's layers, in steps of each shape.

    Attributes:
        layers: The blocks of each layer and shape, in the order in which they run.
    """

    def __init__(
        self, layers: Sequence[tuple[Part, ...]], shapes: Sequence[StepShape], device: torch.device
    ):
        """List the blocks.

        Args:
            layers: The parts of each layer. The kernels of one layer are chosen together.
            shapes: The shapes of steps.
            device: The device of the model.
        """
        self._is_on_gpu = device.type == "cuda"
        self._keys: dict[tuple[PatternBlock, int], BlockToMake] = {}
        self.layers = [
            tuple(self._block(block, rows) for block, rows in _blocks_of(parts, shape))
            for shape in shapes
            for parts in layers
        ]

    def _block(self, block: PatternBlock, rows: int, *, may_be_cut: bool = True) -> BlockToMake:
        """Return a block at a number of rows, the same object each time."""
        key = block, rows
        if key not in self._keys:
            long = None
            if may_be_cut and block.pattern.searched_at is not None and self._is_on_gpu:
                long = self._block(for_long_caches(block), rows, may_be_cut=False)
            self._keys[key] = BlockToMake(
                block.program(rows),
                block.pattern.name,
                block.searched(rows),
                block.pattern.next_may_launch_early,
                long,
            )
        return self._keys[key]

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._keys)

    def by_key(self, found: Mapping[BlockToMake, Resolved | Rejected]) -> BlockKernels:
        """Return kernels by the pattern's block and the number of rows."""
        return {key: found[block] for key, block in self._keys.items() if block in found}

    def keys_of(
        self, kernels: Mapping[BlockToMake, Resolved]
    ) -> dict[tuple[PatternBlock, int], Resolved]:
        """Return the kernels of these blocks by key. Blocks of other programs are left out."""
        return {key: kernels[block] for key, block in self._keys.items() if block in kernels}

    def unmeasured_layers(
        self, found: Mapping[BlockToMake, Resolved | Rejected]
    ) -> list[tuple[BlockToMake, ...]]:
        """Return the distinct layers that run a kernel which was never measured."""
        unmeasured = {
            block
            for block, kernel in found.items()
            if not isinstance(kernel, Rejected) and not kernel.is_measured
        }
        return [
            layer
            for layer in dict.fromkeys(self.layers)
            if any({block, block.for_long_caches} & unmeasured for block in layer)
        ]


def find_kernels(
    blocks: ModelBlocks,
    *,
    device: torch.device,
    backend: str,
    zoo: Any,
    tune: str,
    progress: Callable[..., Any] | None,
) -> dict[BlockToMake, Resolved | Rejected]:
    """Resolve each block of a model.

    Args:
        blocks: The blocks.
        device: The device of the model.
        backend: "triton" or "cpu".
        zoo: A kernel zoo besides the packaged one, or None.
        tune: As in `optimize`.
        progress: As in `optimize`, or None.
    """
    resolver = LayerResolver(
        device=device,
        backend=backend,
        zoo=zoo,
        tune=tune,
        progress=progress,
        total=len(blocks),
    )
    with resolver.searching(blocks.layers):
        for layer in blocks.layers:
            resolver.resolve_layer(layer)
    register(resolver.found.values(), device)
    return resolver.found


def register(kernels: Iterable[Resolved | Rejected], device: torch.device) -> None:
    """Let compiled graphs call kernels, also in place of earlier ones for the same programs."""
    for kernel in kernels:
        if not isinstance(kernel, Rejected) and not _appends(kernel):
            torch_op.register(kernel.digest, kernel.ugraph, kernel.run, device.type)


def _blocks_of(parts: Sequence[Part], shape: StepShape) -> list[tuple[PatternBlock, int]]:
    """Return each distinct block of parts in steps of a shape, with its rows."""
    at = (block_at(part.block, shape) for part in parts)
    return list(dict.fromkeys(each for each in at if not isinstance(each, Rejected)))


def _appends(kernel: Resolved) -> bool:
    """Return whether a kernel writes into its inputs. `torch_op` must not call such a kernel."""
    return any(op.name == APPEND for op in kernel.ugraph.program.ops)
