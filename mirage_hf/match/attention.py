"""Attention of a decoder layer: what lies between its projections and its output projection.

The structure alone does not show how attention rotates, packs and bounds. So these functions return
every variant that the structure allows. match/layer.py takes the first one that passes the probe of
a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn

from mirage_hf.errors import Rejected
from mirage_hf.layers.part import Part
from mirage_hf.layers.rope import Rope
from mirage_hf.match import plain
from mirage_hf.match.adapters import match_linears
from mirage_hf.match.norms import NO_NORM, match_norm
from mirage_hf.match.probe import Probes
from mirage_hf.match.twins import takes_float_mask
from mirage_hf.patterns import ATTENTION, decoder_layer
from mirage_hf.patterns.attention import PACKINGS
from mirage_hf.patterns.schema import LayerLayout

#: The parts of one variant of attention.
Variant = tuple[Part, ...]


@dataclass(frozen=True)
class Heads:
    """How the rows of the projections are divided."""

    kv_heads: int
    #: The heads of queries for each head of keys.
    group: int
    head_dim: int


@dataclass(frozen=True)
class HeadNorms:
    """The norms of q and k."""

    #: Their names in attention.
    names: tuple[str, ...]
    #: One of `patterns.attention.NORMS`.
    kind: str
    eps: float
    offset: float


def head_dim(attention: Any) -> int | None:
    """Return the width of a head by attention's own attribute, or None."""
    values = (getattr(attention, name, None) for name in decoder_layer.HEAD_DIMS)
    return next((value for value in values if isinstance(value, int)), None)


def softcap_of(attention: nn.Module) -> float | None:
    """Return the softcap among attention's attributes, or None. A probe shows if it is used."""
    values = (attention.__dict__.get(name) for name in decoder_layer.SOFTCAPS)
    return next((float(value) for value in values if isinstance(value, int | float)), None)


def check_no_clipping(attention: Any) -> Rejected | None:
    """Reject attention that clips its projections. A probe might not reach the bound."""
    for owner in (attention, getattr(attention, "config", None)):
        for name in decoder_layer.CLIPS:
            value = getattr(owner, name, None)
            if value is not None:
                return Rejected(f"attention clips what its projections give ({name} {value})")
    return None


def match_attention(
    attention: Any, layout: LayerLayout, probes: Probes, rope: Rope, allow_adapters: bool
) -> list[Variant] | Rejected:
    """Return the variants of attention, for one token of each sequence.

    Args:
        attention: The module.
        layout: The names of the layer's children.
        probes: The outcomes of probes so far.
        rope: The RoPE that the layer is given.
        allow_adapters: Whether the projections may be PEFT linears.
    """
    norm_names = [n for n in layout.head_norms if attention._modules.get(n) is not None]
    known = {*layout.projections, layout.output, *norm_names}
    no = check_no_clipping(attention) or plain.check_no_others(attention, known, "attention ")
    if no is not None:
        return no
    linears = match_linears(attention, "", layout.projections, allow_adapters)
    if isinstance(linears, Rejected):
        return linears
    weight = linears[0].base.weight
    widths = [linear.base.out_features for linear in linears]
    heads = _match_heads(attention, layout, widths, rope)
    if isinstance(heads, Rejected):
        return heads
    width = heads.kv_heads * heads.group * heads.head_dim
    read = getattr(attention._modules[layout.output], "in_features", width)
    if read != width:
        return Rejected(f"its queries have {width} elements, but {layout.output} reads {read}")
    norms = _match_head_norms(attention, norm_names, heads, probes)
    if isinstance(norms, Rejected):
        return norms
    modules = [*(attention._modules[n] for n in norm_names), attention]
    if no := plain.check_same_weights(modules, weight.dtype, weight.device):
        return no
    if no := _check_probed(attention):
        return no
    return _variants(attention, layout, heads, norms, rope, weight.dtype)


def _match_heads(
    attention: Any, layout: LayerLayout, widths: list[int], rope: Rope
) -> Heads | Rejected:
    d, scale = head_dim(attention), getattr(attention, "scaling", None)
    if d is None or not isinstance(scale, float) or d % 2:
        return Rejected(
            f"attention has no even head_dim and float scaling (they are {d} and {scale})"
        )
    if rope.width > d:
        return Rejected(f"RoPE rotates {rope.width} elements, but heads have {d}")
    heads = _heads_by_width(attention, widths, d)
    if heads is None:
        names = ", ".join(layout.projections)
        return Rejected(f"the widths of {names} ({widths}) are not whole heads of {d}")
    return heads


def _heads_by_width(attention: Any, widths: list[int], d: int) -> Heads | None:
    """Return the heads by the widths of the projections, or None if these are not whole heads."""
    if len(widths) == 1:  # q, k and v are one linear, which does not say where they end
        group = getattr(attention, "num_key_value_groups", 1)
        kv_heads = widths[0] // (d * (group + 2))
        v_width = widths[0] - kv_heads * (group + 1) * d
        widths = [kv_heads * group * d, kv_heads * d, v_width]
    heads, k_heads, v_heads = (width // d for width in widths)
    whole = all(width % d == 0 for width in widths)
    if not whole or k_heads != v_heads or k_heads == 0 or heads % k_heads:
        return None
    return Heads(k_heads, heads // k_heads, d)


def _match_head_norms(
    attention: Any, names: list[str], heads: Heads, probes: Probes
) -> HeadNorms | Rejected:
    """Return which norms of heads attention has."""
    each: list[dict[str, Any]] = []
    for name in names:
        sizes = match_norm(attention, name, probes, plain.HEAD_NORM)
        if isinstance(sizes, Rejected):
            return sizes
        each.append(sizes)
    query_heads, kv_heads, d = heads.kv_heads * heads.group, heads.kv_heads, heads.head_dim
    kind_by_shapes: dict[tuple[tuple[int, ...], ...], str] = {
        (): "",
        ((d,), (d,)): "rms",
        ((query_heads * d,), (kv_heads * d,)): "rms of all heads",
        ((query_heads, d), (kv_heads, d)): "layer",
    }
    shapes = tuple(tuple(attention._modules[n].weight.shape) for n in names)
    kind = kind_by_shapes.get(shapes)
    both = " and ".join(names)
    if kind is None or any(sizes != each[0] for sizes in each):
        return Rejected(f"{both} are not two alike norms of each head, or of all heads")
    sizes = each[0] if each else NO_NORM
    if sizes["norm_bias"] or sizes["centred"] != (kind == "layer"):
        return Rejected(
            f"{both} are neither RMSNorm nor LayerNorm with weights for each head, or add a bias"
        )
    if kind not in ("", "rms") and sizes["offset"]:
        return Rejected(f"{both} add {sizes['offset']:g} to the weights of all heads")
    return HeadNorms(tuple(names), kind, sizes["eps"], sizes["offset"])


def _check_probed(attention: Any) -> Rejected | None:
    """Reject softcaps and sinks if a probe cannot tell whether the attention backend uses them."""
    sinks = attention._parameters.get(decoder_layer.SINKS)
    for what, value in (("softcap is", softcap_of(attention)), ("sinks are", sinks)):
        if value is not None and not takes_float_mask(attention):
            backend = attention.config._attn_implementation
            return Rejected(
                f"a probe cannot tell whether the {what} used with {backend} attention; "
                "load the model with attn_implementation='sdpa'"
            )
    return None


def _variants(
    attention: Any,
    layout: LayerLayout,
    heads: Heads,
    norms: HeadNorms,
    rope: Rope,
    dtype: torch.dtype,
) -> list[Variant]:
    """Return every variant that the structure allows."""
    paths = [f"{layout.attention}.{name}" for name in norms.names]
    norm_weights = tuple((path, "weight") for path in paths)
    sink_weights = (*norm_weights, (layout.attention, decoder_layer.SINKS))
    has_sinks = attention._parameters.get(decoder_layer.SINKS) is not None
    one_linear = len(layout.projections) == 1 and heads.group == 1
    choices = product(
        ("halves", "pairs", ""),
        dict.fromkeys((softcap_of(attention), None)),
        dict.fromkeys((has_sinks, False)),
        PACKINGS if one_linear else PACKINGS[:1],
    )
    variants: list[Variant] = []
    for rope_order, softcap, sinks, packing in choices:
        block = ATTENTION.block(
            kv_heads=heads.kv_heads,
            group=heads.group,
            head_dim=heads.head_dim,
            scale=attention.scaling,
            dtype=dtype,
            norm=norms.kind,
            eps=norms.eps,
            offset=norms.offset,
            norm_bias=False,
            rotary=rope.width,
            rope_dtype=rope.dtype,
            rope=rope_order,
            softcap=softcap,
            sinks=sinks,
            packing=packing,
        )
        weights = sink_weights if sinks else norm_weights
        variants.append((Part("attention", block, weights, (layout.attention, *paths)),))
    return variants
