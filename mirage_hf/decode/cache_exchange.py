"""Exchange of keys and values between a block and the caches that users hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from mirage_hf.decode.cache_block import CacheBlock
from mirage_hf.decode.cache_layers import (
    EMPTY_LAYERS,
    INDEXED_LAYERS,
    STATE_LAYERS,
    states_of,
)
from mirage_hf.decode.not_covered import NotCoveredError


def of_self_attention(cache: Any) -> Any:
    """Return the part of one of stock's caches that grows with the text."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


@contextmanager
def put_back_unless_covered(cache: Any) -> Iterator[None]:
    """Put a cache back as it was if stock must serve the call after all."""
    parts = [cache]
    if isinstance(cache, EncoderDecoderCache):
        parts += [cache.self_attention_cache, cache.cross_attention_cache]
    lists = [(part, list(part.layers)) for part in parts if hasattr(part, "layers")]
    states = [(layer, dict(vars(layer))) for _, layers in lists for layer in layers]
    is_updated = dict(getattr(cache, "is_updated", {}))
    try:
        yield
    except NotCoveredError:
        for part, layers in lists:
            part.layers = layers
        for layer, state in states:
            vars(layer).clear()
            vars(layer).update(state)
        if is_updated or isinstance(cache, EncoderDecoderCache):
            cache.is_updated = is_updated
        raise


def reserve(block: CacheBlock, cache: Any) -> None:
    """Allocate memory in a block for what a user's cache holds."""
    for n, layer in enumerate(of_self_attention(cache).layers):
        if has_keys(layer):
            block.claim(n, layer.keys, layer.values)


def held_tokens(cache: Any) -> int | str:
    """Return how many tokens one of stock's caches holds, or why that is unknown."""
    layers = list(of_self_attention(cache).layers)
    if not layers or any(isinstance(layer, CacheLayerMixin) for layer in layers):
        return int(cache.get_seq_length())
    if any(states_of(layer) for layer in layers):
        return "a cache of states, which does not know its length"
    return 0


def read_cache(block: CacheBlock, cache: Any, length: int | None = None) -> int:
    """Copy one of stock's caches into a block and return its length.

    What a sliding layer still holds goes to the slots that it stands for.

    Args:
        block: The block.
        cache: The cache.
        length: Its length, None if the cache knows it. One that holds only states does not.
    """
    length = int(cache.get_seq_length()) if length is None else length
    block.written.clear()
    for n, layer in enumerate(of_self_attention(cache).layers):
        if has_keys(layer):
            block.store(n, layer.keys, layer.values, length)
        if isinstance(layer, INDEXED_LAYERS) and layer.indexer_keys is not None:
            block.store_indexer(n, layer.indexer_keys)
        for name, state in states_of(layer).items():
            block.store_state(n, name, state)
    return length


def has_keys(layer: Any) -> bool:
    """Return whether a layer holds keys and values."""
    keys = getattr(layer, "keys", None)
    return bool(getattr(layer, "is_initialized", False)) and keys is not None


def write_cache(block: CacheBlock, cache: Any, length: int) -> None:
    """Make a cache what stock would have left there after `length` tokens.

    It gets fresh tensors, never memory of the pool. Keys of cross-attention are there already.
    """
    cache = of_self_attention(cache)
    for (n, name), state in block.states.items():
        if n < len(cache.layers) and name in (known := states_of(cache.layers[n])):
            known[name].copy_(state)
    for n in range(len(block.rings)):
        if n not in block.written:
            continue
        while n >= len(cache.layers):
            # DynamicCache() without a config makes its layers as they come
            cache.layers.append(DynamicLayer())
        layer = cache.layers[n]
        keys, values = _kept_states(block, n, layer, length)
        if not layer.is_initialized:
            layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys.clone(), values.clone()
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = length
        if isinstance(layer, INDEXED_LAYERS) and n in block.indexer_keys:
            indexer_keys = block.indexer_keys[n][:, 0, :length].clone()
            if not layer.is_indexer_initialized:
                layer.lazy_initialization_indexer(indexer_keys)
            layer.indexer_keys = indexer_keys


def _kept_states(
    block: CacheBlock, index: int, layer: CacheLayerMixin, length: int
) -> tuple[Tensor, Tensor]:
    """Return the keys and values that stock's cache layer keeps of a text of `length` tokens."""
    ring = block.rings[index]
    memories = block.keys[index], block.values[index]
    if ring is not None:
        keys, values = (ring.read(memory, length, block.lowest) for memory in memories)
        return keys, values
    first = 0
    if isinstance(layer, DynamicSlidingWindowLayer):
        first = max(length - (layer.sliding_window - 1), 0)
    keys, values = (memory[:, :, first:length] for memory in memories)
    return keys, values


def cached_layers(config: Any) -> int:
    """Return how many layers have keys of their own. Gemma 3n's last layers read those of others.

    Args:
        config: The config of a decoder.
    """
    return config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)


def windows_of(cache: Cache, config: Any) -> tuple[int | None, ...] | str:
    """Return the windows of the layers of a cache, None for layers that keep all keys.

    Args:
        cache: The cache.
        config: The config of its decoder.

    Returns:
        The windows, or why the cache cannot be exchanged with a block.
    """
    count = cached_layers(config)
    cache = of_self_attention(cache)
    if type(cache) is not DynamicCache:
        return f"cache type {type(cache).__name__}"
    if getattr(cache, "offloading", False):
        return "offloaded cache"
    if not cache.layers:
        return (None,) * count
    layers = list(cache.layers)
    while len(layers) > count and isinstance(layers[-1], EMPTY_LAYERS):
        layers.pop()  # it reads the keys of another layer
    if len(layers) != count:
        return f"a cache of {len(layers)} layers for {count} decoder layers"
    known = DynamicLayer, DynamicSlidingWindowLayer, *STATE_LAYERS, *INDEXED_LAYERS, *EMPTY_LAYERS
    for layer in layers:
        if type(layer) not in known:
            return f"cache layer type {type(layer).__name__}"
        if getattr(layer, "record_past", False):
            return "a cache that records its past"
        if isinstance(layer, DynamicSlidingWindowLayer) and layer.sliding_window == 1:
            return "a sliding window of 1, for which stock's cache keeps every key"
    why_uneven = _why_uneven([layer for layer in layers if has_keys(layer)])
    if why_uneven is not None:
        return why_uneven
    return tuple(
        layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        for layer in layers
    )


def _why_uneven(layers: Sequence[CacheLayerMixin]) -> str | None:
    """Return why layers do not hold one text, or None.

    A reset cache has zeros for keys, and its sliding layers forget how many there were.
    """
    lengths = {int(layer.get_seq_length()) for layer in layers}
    if len(lengths) > 1:
        return f"a cache whose layers hold {min(lengths)} to {max(lengths)} tokens"
    for layer in layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            held = layer.keys.shape[-2] if layer.keys.numel() else 0
            length, window = layer.get_seq_length(), layer.sliding_window
            if held != min(length, window - 1):
                return f"a cache that has {held} keys of {length} tokens in a window of {window}"
    return None
