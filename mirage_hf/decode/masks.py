"""The attention masks that a model's forward takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mirage_hf.decode.control import Control
from mirage_hf.decode.rings import Ring

#: By the type of a layer, in configs of transformers: the kind of its attention, None if it has
#: none, and whether it keeps a state besides keys and values.
_LAYER_TYPES = {
    "full_attention": ("full_attention", False),
    "sliding_attention": ("sliding_attention", False),
    "chunked_attention": ("chunked_attention", False),
    "deepseek_sparse_attention": ("deepseek_sparse_attention", False),
    "indexed_attention": ("indexed_attention", False),
    "linear_attention": (None, True),
    "conv": (None, True),
    "mlp": (None, False),
    "moe": (None, False),
    "hybrid": ("full_attention", True),
    "hybrid_sliding": ("sliding_attention", True),
}


@dataclass(frozen=True)
class MaskPlan:
    """The masks that a model's forward takes: one, or one for each type of layer.

    Four attributes are about windows:

    - `MaskPlan.windows`: which tokens attention hides from later ones.
    - `CacheBlock.windows`: which keys stock's cache drops, and ours if the caller will hold it.
    - `CacheBlock.rings`: which layers have about as many slots as their window, to save memory.
    - `PromptShape.windows`: which windows are shorter than the prompt.

    Attributes:
        windows: Names of the kinds of layers and their windows, None if a query sees all keys
            before it.
        by_layer_type: Whether the forward takes a mask for each kind, by name.
        layers: The kind of each layer's attention, if there are kinds, "" if it has none.
        types: The types of layers that are not named as their kind, and their kinds.
        states: The types of layers that keep a state besides keys and values, as models name their
            masks. Steps need no mask for it.
        chunk: Tokens of a chunk of attention, None without chunks. Texts within the first chunk are
            covered, where it is full attention.
    """

    windows: tuple[tuple[str, int | None], ...]
    by_layer_type: bool
    layers: tuple[str, ...] = ()
    types: tuple[tuple[str, str], ...] = ()
    states: tuple[str, ...] = ()
    chunk: int | None = None

    @classmethod
    def of(cls, config: Any) -> MaskPlan | str:
        """Read a text config as HF's create_masks_for_generate does.

        Returns:
            The plan, or why the pool cannot serve the model.
        """
        layer_types = getattr(config, "layer_types", None)
        window = getattr(config, "sliding_window", None)
        if layer_types is not None:
            unknown = sorted(set(layer_types) - set(_LAYER_TYPES))
            if unknown:
                return f"layers of an unknown type, {unknown[0]}"
            layers = tuple(_LAYER_TYPES[kind][0] or "" for kind in layer_types)
            chunk = config.attention_chunk_size if "chunked_attention" in layers else None
            known = {"sliding_attention": window, "chunked_attention": chunk}
            windows = tuple((kind, known.get(kind)) for kind in sorted(set(layers) - {""}))
            states = _state_kinds(layer_types)
            types = tuple(
                {(t, k) for t, k in zip(layer_types, layers, strict=True) if k and t != k}
            )
            return cls(windows, True, layers, types, states, chunk)
        chunk = None if window is not None else getattr(config, "attention_chunk_size", None)
        return cls((("", window),), by_layer_type=False, chunk=chunk)

    def kind_of(self, layer: int) -> str:
        """Return the kind of a layer, a name in `windows`."""
        return self.layers[layer] if self.by_layer_type else ""

    def windows_within(self, tokens: int, layers: int) -> tuple[int | None, ...]:
        """Return each layer's window, or None if a text of `tokens` tokens does not exceed it."""
        by_kind = dict(self.windows)
        windows = [by_kind.get(self.kind_of(n)) for n in range(layers)]
        return tuple(w if w is not None and w < tokens else None for w in windows)

    def mismatch(self, cache_windows: Sequence[int | None]) -> str | None:
        """Return why a cache does not fit this model, or None.

        Each kind of layers must drop the keys that it does not see, or none.

        Args:
            cache_windows: For each layer the window that its cache slides over.
        """
        for kind, window in self.windows:
            dropping = {w for n, w in enumerate(cache_windows) if self.kind_of(n) == kind}
            if not (dropping <= {window} or dropping <= {None}):
                return "a cache that slides over other windows than the model's layers"
        return None

    def by_names(self, masks: Any) -> Any:
        """Return the masks of `build` by all names under which a model may look for them."""
        return masks | {t: masks[k] for t, k in self.types} if isinstance(masks, dict) else masks

    def build(
        self, control: Control, dtype: torch.dtype, in_rings: Mapping[str, tuple[Ring, Tensor]]
    ) -> Tensor | dict[str, Tensor | None] | None:
        """Return additive (batch, 1, 1, slots) masks of 0 and −inf, None without attention.

        Every layer would turn a boolean mask into an additive one.

        Args:
            control: State of the call.
            dtype: Dtype of the masks.
            in_rings: Kinds whose keys lie in a ring, and the slots (batch, 1) of the new keys.
        """
        if not self.windows:
            return None
        masks: dict[str, Tensor | None] = dict.fromkeys(self.states)
        seen = (control.slots <= control.length) & (control.slots >= control.lowest)
        for kind, window in self.windows:
            if kind in in_rings:
                ring, slot = in_rings[kind]
                visible = control.slots[:, : ring.slots] <= slot
            elif window is None:
                visible = seen
            else:
                visible = seen & (control.slots > control.length - window)
            mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
            masks[kind] = mask.masked_fill_(~visible, float("-inf"))[:, None, None, :]
        return masks if self.by_layer_type else masks[""]


def has_windows(config: Any) -> bool:
    """Return whether attention of a model with this config hides tokens outside of a window."""
    masks = MaskPlan.of(config.get_text_config(decoder=True))
    return isinstance(masks, MaskPlan) and any(window for _, window in masks.windows)


def _state_kinds(layer_types: Sequence[str]) -> tuple[str, ...]:
    """Return the names that models give the masks of layers with a state."""
    # the mask of a hybrid layer's state has the name of a layer that has only a state
    kinds = (
        k.replace("hybrid_sliding", "hybrid").replace("hybrid", "linear_attention")
        for k in layer_types
        if _LAYER_TYPES[k][1]
    )
    return tuple(sorted(set(kinds)))
