"""Calls of decoder layers with made-up inputs, as a model's forward would call them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.layers.rope import Rope, in_order
from mirage_hf.patterns import decoder_layer

#: The distance between the positions of a call's sequences. If a layer uses positions for more than
#: RoPE, so large a distance shows it.
POSITION_STEP = 1 << 20

#: The first tokens of row 0 that are padding, and the window of the third call and later ones.
PADDING = 2
WINDOW = 4


class ProbeCache:
    """The smallest cache that a layer accepts. It concatenates keys and values of one layer."""

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None):
        """Hold keys and values (b, heads, length, d), or nothing yet."""
        self.keys, self.values = keys, values

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values, and return all of them."""
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], -2)
        self.values = values if self.values is None else torch.cat([self.values, values], -2)
        return self.keys, self.values

    def get_seq_length(self, *_: Any) -> int:
        """Return how many keys a sequence has."""
        return 0 if self.keys is None else self.keys.shape[-2]

    def to(self, dtype: torch.dtype) -> ProbeCache:
        """Return a copy in another dtype."""
        if self.keys is None or self.values is None:
            return ProbeCache()
        return ProbeCache(self.keys.to(dtype), self.values.to(dtype))

    def part(self, rows: slice) -> ProbeCache:
        """Return the cache of some sequences, in memory of its own."""
        keys, values = (None if x is None else x[rows].clone() for x in (self.keys, self.values))
        return ProbeCache(keys, values)


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer for b sequences of s new tokens. All but positions are in one dtype."""

    #: The hidden states (b, s, width).
    x: Tensor
    #: RoPE's cos and sin, as the model gives them.
    cos: Tensor
    sin: Tensor
    #: Added to scores (b, 1, s, keys), or None.
    mask: Tensor | None
    #: The positions (b, s).
    positions: Tensor
    rope: Rope

    def to(self, dtype: torch.dtype) -> LayerCall:
        """Return the call in another dtype."""
        mask = None if self.mask is None else _additive_mask(self.mask != 0, dtype)
        x, cos, sin = (t.to(dtype) for t in (self.x, self.cos, self.sin))
        return replace(self, x=x, cos=cos, sin=sin, mask=mask)

    def part(self, rows: slice) -> LayerCall:
        """Return the call of some sequences, in memory of its own.

        Slices would do, but kernels have other variants for addresses that are not aligned.
        """
        names = ("x", "cos", "sin", "positions")
        tensors = {name: getattr(self, name)[rows].clone() for name in names}
        mask = None if self.mask is None else self.mask[rows].clone()
        return replace(self, mask=mask, **tensors)

    def kwargs(self, layer: nn.Module, cache: Any) -> dict[str, Any]:
        """Return the keyword arguments that a model's forward would give to `layer`."""
        rope: Any = (self.cos, self.sin)
        if self.rope.is_complex:
            rope = torch.complex(*(x.to(torch.promote_types(x.dtype, torch.float32)) for x in rope))
        known = inspect.signature(type(layer).forward).parameters
        names = (name for name in decoder_layer.CACHES if name in known)
        cache_name = next(names, decoder_layer.CACHES[0])
        return {
            "attention_mask": self.mask,
            "position_ids": self.positions,
            "use_cache": cache is not None,
            "position_embeddings": rope,
            cache_name: cache,
        }


def layer_calls(
    batch: int,
    like: Tensor,
    rope: Rope,
    lengths: Sequence[int],
    generator: torch.Generator,
    dtype: torch.dtype,
    *,
    scale: float = 1.0,
    masked: bool = True,
    samples: int = 1,
) -> Iterator[LayerCall]:
    """Yield calls of a layer that extend sequences, one call for each of `lengths`.

    Row 0 is padded on the left, and from the third call on attention sees a window.

    Args:
        batch: The number of sequences.
        like: The weight of one of the layer's norms. It has the layer's width and device.
        rope: The form of cos and sin.
        lengths: How many tokens each call adds.
        generator: Makes the inputs.
        dtype: The dtype of the hidden states and the mask.
        scale: The factor of the hidden states.
        masked: Whether calls have a mask.
        samples: How many samples of such a batch come as one batch.
    """
    rows, batch = batch, batch * samples
    past, device = 0, like.device
    for number, length in enumerate(lengths):
        # Scaled and rounded on the GPU, if there is one. On a CPU this would wait for threads.
        x = scale * torch.randn(batch, length, like.shape[0], generator=generator).to(device)
        of_pairs = 6.0 * torch.rand(batch, length, rope.width // 2, generator=generator)
        angles = in_order(of_pairs, rope.order)
        tokens = torch.arange(past, past + length)
        mask = _hidden_keys(tokens, rows, batch, window=number >= 2)
        positions = tokens[None] + torch.arange(batch)[:, None] % rows * POSITION_STEP
        yield LayerCall(
            x.to(dtype),
            angles.cos().to(device, rope.dtype),
            angles.sin().to(device, rope.dtype),
            _additive_mask(mask[:, None].to(device), dtype) if masked else None,
            positions.to(device),
            rope,
        )
        past += length


def _hidden_keys(tokens: Tensor, rows: int, batch: int, window: bool) -> Tensor:
    """Return which keys each token does not see: (batch, tokens, keys)."""
    query, key = tokens[:, None], torch.arange(int(tokens[-1]) + 1)[None]
    hidden = (key > query) | ((key <= query - WINDOW) & window)
    mask = hidden.repeat(batch, 1, 1)
    mask[::rows] |= (key < PADDING) & (key < query)
    return mask


def _additive_mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill(hidden, torch.finfo(dtype).min)


def distance(a: Tensor, b: Tensor, base: Tensor | None = None) -> float:
    """Return the largest difference of a and b, relative to the largest |b| or |b - base|."""
    scale = (b if base is None else b - base).abs().max()
    return float((a - b).abs().max() / scale.clamp_min(torch.finfo(torch.float32).tiny))
