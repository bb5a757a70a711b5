"""Rotary position embeddings: how layers are given their cos and sin, and a model's own tables."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.layers.stand_in import stand_in


@dataclass(frozen=True)
class Rope:
    """The form in which a model gives cos and sin to its layers."""

    #: How many elements of a head it rotates.
    width: int
    #: The dtype of cos and sin.
    dtype: torch.dtype
    #: How cos and sin hold the number of each pair of elements (see `in_order`).
    order: str = "halves"
    #: True if cos and sin come as one complex tensor.
    is_complex: bool = False

    def of_pairs(self, x: Tensor) -> Tensor:
        """Return cos or sin as one number for each pair: (…, width / 2)."""
        if self.order == "once":
            return x
        return x[..., ::2] if self.order == "pairs" else x[..., : x.shape[-1] // 2]


#: The RoPE of modules that are not layers: none.
NO_ROPE = Rope(0, torch.float32)


def in_order(x: Tensor, order: str) -> Tensor:
    """Return numbers of pairs (…, n) in the order in which layers or kernels read them.

    Args:
        x: One number for each pair.
        order: "once" (a b), "halves" (a b a b) or "pairs" (a a b b).
    """
    if order == "once":
        return x
    return torch.cat([x, x], -1) if order == "halves" else x.repeat_interleave(2, -1)


def cos_and_sin(given: Any) -> tuple[Tensor, Tensor]:
    """Return RoPE's cos and sin. A model gives them as two tensors, or as one complex tensor."""
    return (given.real, given.imag) if isinstance(given, Tensor) else (given[0], given[1])


def rotary_rows(rotary: Any, x: Tensor, positions: Tensor, kind: str = "") -> tuple[Tensor, Tensor]:
    """Return RoPE's cos and sin (…, positions, width) by a model's own module.

    Args:
        rotary: The module, such as `LlamaRotaryEmbedding`.
        x: A tensor of the dtype and device to compute for. Some modules give float32 for any dtype.
        positions: The positions (…, positions).
        kind: The kind of layer, for modules that know several.
    """
    rotary = with_own_buffers(rotary)
    return cos_and_sin(rotary(x, positions, kind) if kind else rotary(x, positions))


def with_own_buffers(rotary: nn.Module) -> Any:
    """Return a RoPE module that acts as `rotary` does but keeps its state to itself.

    Dynamic RoPE and longrope change their buffers by the positions that they see. The model's
    module must stay as it was.
    """
    return stand_in(rotary, {"_buffers": dict(rotary._buffers)})


def rotary_kinds(rotary: Any, config: Any, layers: int) -> tuple[str, ...]:
    """Return the kind of RoPE of each layer, or "" for each if a module knows only one kind."""
    kinds = tuple(getattr(config, "layer_types", None) or ())
    takes_kind = "layer_type" in inspect.signature(type(rotary).forward).parameters
    return kinds[:layers] if takes_kind and len(kinds) >= layers else ("",) * layers


@dataclass(frozen=True)
class LengthRope:
    """RoPE that depends on the length of the whole text, which its module reads on the host."""

    #: The type of RoPE, as the config names it.
    kind: str
    #: The longest text whose numbers are those of every shorter text. 0: there is no such length.
    reach: int

    @property
    def reason(self) -> str:
        """Why a forward with this RoPE cannot be captured."""
        return f"RoPE of type {self.kind} reads the length on the host"


def length_rope(config: Any) -> LengthRope | None:
    """Return a model's RoPE if it depends on the text's length. None if positions decide alone."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    by_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    found = None
    for parameters in (rope, *by_layer_type):
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if not isinstance(kind, str) or not ("dynamic" in kind or kind == "longrope"):
            continue
        # Dynamic RoPE has no reach: a short text's numbers depend on the longest text before it.
        original = parameters.get("original_max_position_embeddings")
        reach = original or 0 if kind == "longrope" else 0
        found = LengthRope(kind, min(reach, found.reach) if found else reach)
    return found
