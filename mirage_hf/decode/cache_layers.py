"""The cache layers that Hugging Face's forward sees: they write into a block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin

from mirage_hf.decode.cache_block import CacheBlock
from mirage_hf.decode.control import Control
from mirage_hf.decode.rings import Ring
from mirage_hf.errors import MirageError
from mirage_hf.trace.attention import for_each_token

#: HF's layers that keep states of convolutions and recurrences, in versions that have them.
LinearLayer: Any = getattr(cache_utils, "LinearAttentionLayer", None)
STATE_LAYERS = tuple(
    getattr(cache_utils, name)
    for name in (
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
    )
    if hasattr(cache_utils, name)
)

#: HF's layers that keep nothing, in versions that have them: those without
#: attention, and those that read the keys of other layers.
EMPTY_LAYERS: tuple[Any, ...] = tuple(
    getattr(cache_utils, name) for name in ("DummyLayer",) if hasattr(cache_utils, name)
)

#: HF's layers whose indexer has keys of its own, in versions that have them.
INDEXED_LAYERS: tuple[Any, ...] = tuple(
    getattr(cache_utils, name) for name in ("DynamicIndexedLayer",) if hasattr(cache_utils, name)
)


class UpdatedTwiceError(MirageError):
    """A forward that runs a layer twice.

    Stock's cache adds keys each time, but a block has a slot for one key.
    """


class _BlockLayer(CacheLayerMixin):
    """What the layers of both phases share. HF's decoding calls only `update` and the sizes."""

    #: If it were True, generate would prepare 4D masks for the prefill, as for static caches.
    is_compileable = False

    def __init__(self, block: CacheBlock, index: int, is_sliding: bool):
        super().__init__()
        self.block, self.index, self.is_sliding = block, index, is_sliding
        self.is_initialized = True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the block allocates."""

    def get_max_length(self) -> int:
        """Return the capacity of the block."""
        return self.block.capacity

    get_max_cache_shape = get_max_length  # its name before transformers 5.10 or so


class PrefillLayer(_BlockLayer):
    """Writes a whole prompt into the block's first slots.

    Attention sees the prompt's own keys, as with a fresh DynamicLayer.
    """

    def __init__(self, block: CacheBlock, index: int, is_sliding: bool):
        super().__init__(block, index, is_sliding)
        self.seen = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the states and return them."""
        if self.seen:
            raise UpdatedTwiceError(
                "decode: a layer of the prefill was updated twice in one forward; "
                "call the stock method with type(model).generate(model, ...)"
            )
        self.seen = key_states.shape[-2]
        self.block.store(self.index, key_states, value_states, self.seen)
        return key_states, value_states

    def update_indexer(self, key_states: Tensor) -> Tensor:
        """Store an indexer's keys and return them."""
        self.block.store_indexer(self.index, key_states)
        return key_states

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Return the number of keys after the update, and the offset of the first one."""
        return self.seen + int(query_length), 0

    def get_seq_length(self) -> int:
        """Return the number of tokens seen."""
        return self.seen


class StepLayer(_BlockLayer):
    """Writes one key and value of each row at its length on the device, or at the ring's slot.

    It returns all slots; the mask hides those that a query must not see.
    """

    def __init__(
        self,
        block: CacheBlock,
        index: int,
        is_sliding: bool,
        ring_slots: Mapping[Ring, Tensor],
        control: Control,
    ):
        super().__init__(block, index, is_sliding)
        self.ring_slots, self.control = ring_slots, control
        #: The number of tokens in the cache, as the model reads it: one for all rows.
        self.seen: Any = block.control.length
        #: The order in which the model gets slots (slots,), None if it gets them as they are.
        self.order: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the new states and return the whole memory."""
        block, ring, length = self.block, self.block.rings[self.index], self.control.length
        keys, values = block.keys[self.index], block.values[self.index]
        if length.dim() == 2:  # rows are tokens of fewer texts
            slots = length.view(block.batch, -1)
            append, tokens = torch.ops.mirage_hf.append_tokens, slots.shape[1]
            keys = for_each_token(append(keys, 2, slots, key_states), tokens)
            values = for_each_token(append(values, 2, slots, value_states), tokens)
        elif ring is None:
            keys.index_copy_(2, length, key_states)
            values.index_copy_(2, length, value_states)
        else:
            slots = self.ring_slots[ring][:, :, None, None]
            keys.scatter_(2, slots.expand_as(key_states), key_states)
            values.scatter_(2, slots.expand_as(value_states), value_states)
        if self.order is not None:
            return keys.index_select(2, self.order), values.index_select(2, self.order)
        return keys, values

    def update_indexer(self, key_states: Tensor) -> Tensor:
        """Store an indexer's new key and return all slots."""
        memory, length = self.block.indexer_keys[self.index], self.control.length
        if length.dim() == 1:
            return memory[:, 0].index_copy_(1, length, key_states)
        slots = length.view(self.block.batch, -1)
        memory = torch.ops.mirage_hf.append_tokens(memory, 2, slots, key_states[:, None])
        return for_each_token(memory, slots.shape[1])[:, 0]

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Return the number of slots, and the offset of the first one."""
        return self.block.num_slots(self.index), 0

    def get_seq_length(self) -> Any:
        """Return the number of tokens in the cache: a device tensor, as StaticLayer's."""
        return self.seen


def states_of(layer: Any) -> dict[str, Tensor]:
    """Return the states of one of HF's layers by name, empty if it keeps keys and values only."""
    if not isinstance(layer, STATE_LAYERS):
        return {}
    named = {f"conv.{n}": x for n, x in layer.conv_states.items()}
    named |= {f"recurrent.{n}": x for n, x in layer.recurrent_states.items()}
    return {name: x for name, x in named.items() if x is not None}


def _set_states(layer: Any, states: Mapping[str, Tensor]) -> None:
    """Let one of HF's state layers read and write these states in place."""
    numbers = {int(name.partition(".")[2]) for name in states}
    LinearLayer.__init__(layer, number_of_states=max(numbers) + 1)
    for name, state in states.items():
        kind, _, number = name.partition(".")
        getattr(layer, f"{kind}_states")[int(number)] = state
        getattr(layer, f"is_{kind}_states_initialized")[int(number)] = True
        layer.has_previous_state[int(number)] = True
        if kind == "conv":
            layer.conv_kernel_size[int(number)] = state.shape[-1]
        layer.dtype, layer.device = state.dtype, state.device


def _with_states(
    block: CacheBlock, index: int, ring_slots: Mapping[Ring, Tensor], control: Control
) -> Any:
    """Return a step's layer that keeps states, and keys and values if the block has some for it."""
    states = {name: x for (layer, name), x in block.states.items() if layer == index}
    if index not in block.keys:
        layer = LinearLayer()
    else:
        is_sliding = block.windows[index] is not None
        layer = _StepStateLayer(block, index, is_sliding, ring_slots, control)
    _set_states(layer, states)
    return layer


if LinearLayer is not None:

    class _StepStateLayer(StepLayer, LinearLayer):  # type: ignore[misc]
        """A step's layer with keys, values and states."""

        def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
            """Do nothing: the block allocates."""


def prefill_cache(block: CacheBlock) -> Cache:
    """Return a cache that takes a prompt's keys and values into a block."""
    block.written.clear()
    return Cache(
        layers=[PrefillLayer(block, n, w is not None) for n, w in enumerate(block.windows)]
    )


def step_cache(block: CacheBlock, ring_slots: Mapping[Ring, Tensor], control: Control) -> Cache:
    """Return the cache that the step's forward sees.

    Args:
        block: Memory of the call.
        ring_slots: `Ring.slot` of this step.
        control: The rows of the step.
    """
    with_states = {layer for layer, _ in block.states}
    return Cache(
        layers=[
            _with_states(block, n, ring_slots, control)
            if n in with_states
            else StepLayer(block, n, w is not None, ring_slots, control)
            for n, w in enumerate(block.windows)
        ]
    )
