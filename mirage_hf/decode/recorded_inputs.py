"""The tensors that a step reads and writes, by the names that recordings give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mirage_hf.decode.cache_block import CacheBlock
from mirage_hf.decode.control import Control
from mirage_hf.decode.rings import Ring
from mirage_hf.trace.record import Recording
from mirage_hf.trace.sizes import Sizes

#: The name of the mask that has a number for each slot.
PLAIN_MASK = "plain"


def mask_inputs(masks: Any, ring_slots: Mapping[Ring, Tensor]) -> dict[str, Tensor]:
    """Return the masks of a step and the slots in rings by the names that recordings have."""
    named = masks if isinstance(masks, dict) else {"": masks}
    inputs = {f"mask.{kind}": x for kind, x in named.items() if x is not None}
    return inputs | {f"ring_slot.{ring.window}": slot for ring, slot in ring_slots.items()}


def plain_mask(control: Control) -> Tensor:
    """Return a mask (batch, slots): 1 for the tokens in the cache and the new one, else 0."""
    return ((control.slots <= control.length) & (control.slots >= control.lowest)).long()


def sizes_of(block: CacheBlock) -> Sizes:
    """Return the sizes of a block that integers in recordings depend on."""
    return block.capacity, block.source_slots


def tensors_of(control: Control) -> dict[str, Tensor]:
    """Return the tensors of a control by the names that recordings have."""
    return {name: x for name, x in vars(control).items() if isinstance(x, Tensor)}


def step_inputs(block: CacheBlock) -> dict[str, Tensor]:
    """Return the tensors that a step reads and writes, by the names that recordings have."""
    inputs = tensors_of(block.control)
    for layer, keys in block.keys.items():
        inputs |= {f"keys.{layer}": keys, f"values.{layer}": block.values[layer]}
    inputs |= {f"indexer_keys.{layer}": x for layer, x in block.indexer_keys.items()}
    inputs |= {f"{name}.{layer}": x for (layer, name), x in block.states.items()}
    for number, (_, slab) in enumerate(block.ring_slabs):
        inputs[f"ring.{number}"] = slab
    return inputs | block.sources | {"logits": block.logits}


def state_names(recording: Recording) -> list[str]:
    """Return the names of the states besides keys and values."""
    return [name for name in recording.inputs if name.startswith(("conv.", "recurrent."))]
