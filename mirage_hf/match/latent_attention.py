"""Multi-head latent attention of a decoder layer (DeepSeek-V2 and V3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mirage_hf.errors import Rejected
from mirage_hf.layers.part import Part
from mirage_hf.layers.rope import Rope
from mirage_hf.match import plain
from mirage_hf.match.attention import Variant, check_no_clipping
from mirage_hf.match.module_probes import norm_epsilon
from mirage_hf.match.norms import match_norm
from mirage_hf.match.probe import Probes
from mirage_hf.patterns import MLA, MLA_APPEND, MLA_QUERY
from mirage_hf.patterns.schema import LatentLayout, LayerLayout


@dataclass(frozen=True)
class LatentSizes:
    """The sizes of latent attention."""

    heads: int
    latent: int
    #: The elements of a head of q and k that RoPE does not rotate, and those that it rotates.
    nope: int
    rope: int
    #: The elements of a head of values.
    value: int
    #: The rank of the query's projection, or None if it has no low-rank projection.
    q_rank: int | None
    scale: float


def match_latent_attention(
    attention: Any, layout: LayerLayout, probes: Probes, rope: Rope
) -> list[Variant] | Rejected:
    """Return the variants of latent attention, one for each way in which RoPE may rotate.

    Args:
        attention: The module.
        layout: The names of the layer's children.
        probes: The outcomes of probes so far.
        rope: The RoPE that the layer is given.
    """
    names = layout.latent
    assert names is not None
    norms = [n for n in (names.q_norm, names.norm) if n]
    linears = [n for n in (*layout.projections, names.q_expand, names.expand, layout.output) if n]
    no = (
        check_no_clipping(attention)
        or plain.check_no_others(attention, {*norms, *linears}, "attention ")
        or plain.check_children(*((attention, n, plain.LINEAR) for n in linears))
        or _check_norms(attention, norms, probes)
        or _check_expansions(attention, names)
    )
    if no is not None:
        return no
    weight = attention._modules[names.expand].weight
    modules = [attention._modules[n] for n in (*norms, *linears)]
    if no := plain.check_same_weights(modules, weight.dtype, weight.device):
        return no
    sizes = _match_sizes(attention, layout, names, linears)
    if isinstance(sizes, Rejected):
        return sizes
    return _variants(attention, layout, names, sizes, rope, weight.dtype)


def _check_norms(attention: Any, norms: list[str], probes: Probes) -> Rejected | None:
    """Reject norms other than RMSNorm without an offset."""
    for name in norms:
        sizes = match_norm(attention, name, probes)
        if isinstance(sizes, Rejected):
            return sizes
        if sizes["offset"] or sizes["centred"] or sizes["norm_bias"]:
            return Rejected(f"{name} adds to its weight, subtracts the mean, or adds a bias")
    return None


def _check_expansions(attention: Any, names: LatentLayout) -> Rejected | None:
    """Reject biases of the weights that the search moves past attention."""
    for name in (names.q_expand, names.expand):
        if name and attention._modules[name].bias is not None:
            return Rejected(f"{name} has a bias")
    return None


def _match_sizes(
    attention: Any, layout: LayerLayout, names: LatentLayout, linears: list[str]
) -> LatentSizes | Rejected:
    """Return the sizes by the widths of the linears.

    q has heads · (nope + rope) elements, the expansion gives heads · (nope + value), and the output
    projection reads heads · value. So the number of heads follows from these and rope.
    """
    inner = attention._modules
    query = inner[names.q_expand or layout.projections[0]]
    latents, expand = inner[layout.projections[1]], inner[names.expand]
    latent, scale = inner[names.norm].weight.shape[0], getattr(attention, "scaling", None)
    rope, value_width = latents.out_features - latent, inner[layout.output].in_features
    heads = 0
    if rope > 0:
        heads = (query.out_features + value_width - expand.out_features) // rope
    nope = value = 0
    if heads > 0:
        nope, value = query.out_features // heads - rope, value_width // heads
    widths = query.out_features, value_width, expand.out_features
    whole = (
        heads > 0
        and nope > 0
        and rope % 2 == 0
        and expand.in_features == latent
        and widths == (heads * (nope + rope), heads * value, heads * (nope + value))
    )
    if not whole or not isinstance(scale, float):
        return Rejected(
            f"{', '.join(linears)} are not whole heads over latents of {latent}, "
            f"or attention has no scaling ({scale})"
        )
    q_rank = inner[names.q_norm].weight.shape[0] if names.q_norm else None
    if q_rank is not None:
        projected = inner[layout.projections[0]].out_features
        if (query.in_features, projected) != (q_rank, q_rank):
            return Rejected(f"{names.q_expand} does not read what {names.q_norm} gives")
    return LatentSizes(heads, latent, nope, rope, value, q_rank, scale)


def _variants(
    attention: Any,
    layout: LayerLayout,
    names: LatentLayout,
    sizes: LatentSizes,
    rope: Rope,
    dtype: torch.dtype,
) -> list[Variant]:
    """Return a variant for each order in which RoPE may rotate."""
    inner = attention._modules
    norm, expand = (f"{layout.attention}.{name}" for name in (names.norm, names.expand))
    shared = {
        "heads": sizes.heads,
        "latent": sizes.latent,
        "nope": sizes.nope,
        "rope": sizes.rope,
        "q_rank": sizes.q_rank,
        "dtype": dtype,
    }
    query = _query_part(attention, layout, names, sizes, dtype)
    variants: list[Variant] = []
    for order in ("pairs",) if rope.is_complex else ("parted pairs", "halves", "pairs"):
        append = MLA_APPEND.block(
            **shared,
            eps=norm_epsilon(inner[names.norm]),
            ropes=order,
            rope_dtype=torch.float32 if rope.is_complex else dtype,
        )
        block = MLA.block(**shared, value=sizes.value, scale=sizes.scale, ropes=order)
        variants.append(
            (
                *query,
                Part("append", append, ((norm, "weight"),), (layout.attention, norm)),
                Part("attention", block, ((expand, "weight"),), (layout.attention, expand)),
            )
        )
    return variants


def _query_part(
    attention: Any,
    layout: LayerLayout,
    names: LatentLayout,
    sizes: LatentSizes,
    dtype: torch.dtype,
) -> tuple[Part, ...]:
    """Return the part that norms and expands a low-rank query, if there is one."""
    if sizes.q_rank is None:
        return ()
    block = MLA_QUERY.block(
        rank=sizes.q_rank,
        row=sizes.q_rank + sizes.latent + sizes.rope,
        n=attention._modules[names.q_expand].out_features,
        eps=norm_epsilon(attention._modules[names.q_norm]),
        dtype=dtype,
    )
    paths = tuple(f"{layout.attention}.{name}" for name in (names.q_norm, names.q_expand))
    weights = tuple((path, "weight") for path in paths)
    return (Part("query", block, weights, (layout.attention, *paths)),)
