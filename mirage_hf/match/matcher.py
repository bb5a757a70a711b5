"""Find the blocks of a model: structure first, then a probe of every kind of module. "No" is a value with a reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn

from mirage_hf.errors import Rejected
from mirage_hf.layers.compose import (
    Composition,
    LayerComposition,
    LoraComposition,
    MlpComposition,
    MlpStandIn,
    Part,
    any_norm,
    child,
    multiplier,
    norm_parameters,
    runs_own_mlp,
)
from mirage_hf.layers.step import NO_ROPE, Rope
from mirage_hf.match import plain, probe
from mirage_hf.match.adapters import (
    adapter_of,
    adapter_parameters,
    is_lora,
    linears_of,
    ups_of,
    with_adapters,
)
from mirage_hf.match.causal import CausalMatch, has_all, match_causal
from mirage_hf.patterns import (
    ATTENTION,
    GATED_MLP,
    IN_STEPS,
    LINEAR_RESIDUAL,
    LORA,
    MLA,
    MLA_APPEND,
    MLA_QUERY,
    MLP_UP,
    RMS_NORM_LINEAR,
    causal_lm,
    decoder_layer,
    gated_mlp,
    mlp_up,
)
from mirage_hf.patterns.attention import PACKINGS
from mirage_hf.patterns.parts import ACTIVATIONS
from mirage_hf.patterns.schema import LayerLayout, MlpLayout


@dataclass(frozen=True)
class Match:
    """A module of which some parts can be kernels. `kind` is "layer", "mlp" or "lora"; `refused` are its other parts. `rope`: what
    RoPE a layer is given. `aside`: what stands for an MLP that runs its own forward where the rest of a layer is compared."""

    name: str
    kind: str
    module: nn.Module
    parts: tuple[Part, ...]
    refused: tuple[tuple[str, Rejected], ...] = ()
    layouts: tuple[Any, ...] = ()
    rope: Rope = NO_ROPE
    aside: MlpStandIn | None = None

    def compose(self, module: nn.Module | None = None) -> Composition:
        """The module's forward with these parts, over `module` (its own, or a twin of it)."""
        kinds = {"layer": LayerComposition, "mlp": MlpComposition, "lora": LoraComposition}
        return kinds[self.kind](
            self.module if module is None else module, self.parts, *self.layouts
        )

    @property
    def bypassed(self) -> tuple[str, ...]:
        """The children, by path, whose forward is not called, or not with what stock gives it: those of the parts, dropouts beside them."""
        paths = dict.fromkeys(path for part in self.parts for path in part.bypassed)
        beside = {
            f"{path}.{n}".removeprefix("."): m
            for path in ("", *paths)
            for n, m in child(self.module, path)._modules.items()
        }
        return tuple(
            dict.fromkeys(
                (*paths, *(path for path, m in beside.items() if isinstance(m, plain.IDLE)))
            )
        )

    @property
    def adapters(self) -> tuple[str, ...]:
        """The PEFT linears, by path, whose state the parts were made for; "" is the module itself."""
        return tuple(dict.fromkeys(path for part in self.parts for path in part.adapters))


@dataclass(frozen=True)
class RejectedModule:
    """A module that looks like a block and is not one, by pattern."""

    name: str
    pattern: str
    reason: str


class Matches(NamedTuple):
    """What can be swapped, outermost modules first, what looked like it but cannot, with reasons, and the whole model for steps of
    decoding, or why its steps run its own forward."""

    modules: list[Match]
    refusals: list[RejectedModule]
    causal: CausalMatch | Rejected


def match(
    model: nn.Module, patterns: Sequence[str], generating: nn.Module | None = None
) -> Matches:
    """Find the blocks of a model. `generating`: the causal LM in it whose `generate` decodes."""
    matches: list[Match] = []
    refusals: list[RejectedModule] = []
    probes = probe.Probes()
    within: set[int] = (
        set()
    )  # MLPs and adapted linears of matched layers, which are the layer's business
    for name, module in model.named_modules():
        found: Match | Rejected | None = None
        if layouts := _layer_layouts(module):
            each = (
                _match_layer(
                    name, module, row, patterns, probes, _rope(model, name, module, row, probes)
                )
                for row in layouts
            )
            found, label = _first(each), "decoder_layer"
            if isinstance(found, Match):
                within |= {
                    id(child_of(module, found.layouts[0].mlp)),
                    *(id(child(module, path)) for path in found.adapters),
                }
        elif (
            "gated_mlp" in patterns
            and id(module) not in within
            and (mlp := _mlp_layout(module))
            and mlp.gate
        ):
            found, label = _match_mlp(name, module, mlp, probes), "gated_mlp"
        elif "lora" in patterns and id(module) not in within and is_lora(module):
            found, label = _match_lora(name, module, probes), "lora"
        if isinstance(found, Match):
            matches.append(found)
            refusals += [RejectedModule(name, pattern, no.reason) for pattern, no in found.refused]
        elif found is not None:
            refusals.append(RejectedModule(name, label, found.reason))
    layers = {id(m.module): m for m in matches if m.kind == "layer"}
    asked = not IN_STEPS.isdisjoint(patterns)
    causal = (
        match_causal(generating, layers, partial(_normed, probes=probes), probes)
        if asked
        else Rejected("no pattern asked for")
    )
    return Matches(matches, refusals, causal)


def _first(outcomes: Iterator[Match | Rejected]) -> Match | Rejected:
    """The first match, the first "no" where there is none."""
    no = None
    for outcome in outcomes:
        if isinstance(outcome, Match):
            return outcome
        no = no or outcome
    assert no is not None
    return no


def child_of(module: nn.Module, name: str) -> nn.Module | None:
    return module._modules.get(name)


# -- the decoder layer --------------------------------------------------------------------------------------------------


def _layer_layouts(module: nn.Module) -> list[LayerLayout]:
    """The rows that a module may be a layer of."""
    rows = [
        row
        for row in decoder_layer.LAYOUTS
        if child_of(module, row.attention) and child_of(module, row.mlp)
    ]
    linear = [
        r
        for r in rows
        if all(child_of(module._modules[r.attention], n) for n in (*r.projections, r.output))
    ]  # type: ignore[arg-type]
    whole = [
        r for r in linear if all(child_of(module, n) for n in r.norms) and not _others(module, r)
    ]
    return whole or (linear or rows)[:1]


def _others(layer: nn.Module, row: LayerLayout) -> list[str]:
    """The children of a layer that a row does not name."""
    known = {row.attention, row.mlp, *row.norms}
    return [
        n
        for n, m in layer._modules.items()
        if m is not None and n not in known and not isinstance(m, plain.IDLE)
    ]


def _rope(
    model: nn.Module, name: str, layer: nn.Module, row: LayerLayout, probes: probe.Probes
) -> Rope:
    """The RoPE that a layer is given: that of the nearest module around it that has one; else of whole heads."""
    dtype = next((p.dtype for p in layer.parameters()), torch.float32)
    around = name.split(".")[:-1]
    owners: list[Any] = [
        model.get_submodule(".".join(around[:n])) for n in range(len(around), -1, -1)
    ]
    found = next(
        ((o, m) for o in owners for r in causal_lm.LAYOUTS if (m := child_of(o, r.rotary))), None
    )
    given = None
    if row.latent is not None:
        given = probes.latent_rope(layer, row, dtype)
    elif found is not None:
        given = probes.rotary(found[1], getattr(found[0], "config", None), dtype)
    return (
        given
        if isinstance(given, Rope)
        else Rope(_head_dim(layer._modules[row.attention]) or 0, dtype)
    )


def _head_dim(attention: Any) -> int | None:
    return next(
        (d for n in decoder_layer.HEAD_DIMS if isinstance(d := getattr(attention, n, None), int)),
        None,
    )


def _match_layer(
    name: str,
    layer: nn.Module,
    row: LayerLayout,
    patterns: Sequence[str],
    probes: probe.Probes,
    rope: Rope,
) -> Match | Rejected:
    no = _layer_structure(layer, row)
    if no is not None:
        return no
    attention, mlp = layer._modules[row.attention], layer._modules[row.mlp]
    mlp_row = _mlp_layout(mlp)
    assumed = mlp_row or gated_mlp.LAYOUTS[0]
    lora = "lora" in patterns
    found: list[tuple[Part, ...] | Rejected | None] = [
        _qkv(layer, attention, row, probes, lora) if "rms_norm_linear" in patterns else None,
        _residual(layer, (row.attention, row.output, row.after), "out", probes, lora)
        if "linear_residual" in patterns
        else None,
        _first_half(layer, mlp, assumed, row, probes, lora)
        if pattern_of(assumed) in patterns
        else None,
        _residual(layer, (row.mlp, assumed.down, row.mlp_after), "down", probes, lora)
        if "linear_residual" in patterns
        else None,
    ]
    labels = ("rms_norm_linear", "linear_residual", pattern_of(assumed), "linear_residual")
    parts = tuple(part for each in found if isinstance(each, tuple) for part in each)
    refused = tuple(
        (label, p) for label, p in zip(labels, found, strict=True) if isinstance(p, Rejected)
    )
    if not parts:
        unasked = (
            "attention's kernels run in steps of generate that are all by kernels; ask for the other patterns, too"
            if {ATTENTION.name, MLA.name} & set(patterns)
            else "no pattern asked for"
        )
        return Rejected("; ".join(dict.fromkeys(r.reason for _, r in refused)) or unasked)
    aside = probes.passing(mlp, any_norm(layer, row)) if runs_own_mlp(parts) else None
    if isinstance(aside, Rejected):
        return aside
    candidate = Match(name, "layer", layer, parts, refused, (row, mlp_row), rope, aside)
    pattern = (ATTENTION if row.latent is None else MLA).name
    if pattern in patterns and not has_all(
        parts, row, mlp_row, but="attention"
    ):  # without the other parts nobody asks for attention's
        whole = _whole(candidate, _attention(attention, row, probes, rope, lora), probes)
        candidate = (
            replace(candidate, refused=(*refused, (pattern, whole)))
            if isinstance(whole, Rejected)
            else whole
        )
    differs = probes.layer(candidate)
    return (
        Rejected(
            "; ".join([differs.reason, *(f"{label}: {r.reason}" for label, r in candidate.refused)])
        )
        if differs
        else candidate
    )


def _whole(
    candidate: Match, kinds: list[tuple[Part, ...]] | Rejected, probes: probe.Probes
) -> Match | Rejected:
    """A layer with all other parts and the first of `kinds` of attention whose step is the layer's."""
    if isinstance(kinds, Rejected):
        return kinds
    behind = 1 + next(n for n, part in enumerate(candidate.parts) if part.role == "qkv")
    refusals = []
    for kind in kinds:
        whole = replace(
            candidate, parts=(*candidate.parts[:behind], *kind, *candidate.parts[behind:])
        )
        no = probes.step(whole)
        if no is None:
            return whole
        refusals.append(no)
    return refusals[0]


def _layer_structure(layer: nn.Module, row: LayerLayout) -> Rejected | None:
    containers = ((layer, n, plain.CONTAINER) for n in (row.attention, row.mlp))
    norms = [(layer, n, ()) for n in row.norms]
    no = plain.first_refusal(*containers, *norms)
    if no is not None:
        return no
    if "forward" in layer.__dict__:
        return Rejected(
            "the layer has a forward of its own on the instance, which a class swap would not replace"
        )
    if extra := _others(layer, row):
        return Rejected(f"has {', '.join(extra)} too")
    return None


def _eps(norm: nn.Module) -> float:
    values = [
        norm.__dict__[n] for n in decoder_layer.EPS_NAMES if isinstance(norm.__dict__.get(n), float)
    ]
    return values[0] if values else 1e-6


def _qkv(
    layer: nn.Module, attention: nn.Module, row: LayerLayout, probes: probe.Probes, lora: bool
) -> tuple[Part, ...] | Rejected:
    found = linears_of(attention, f"{row.attention}.", row.projections, lora)
    if isinstance(found, Rejected):
        return found
    normed = _norm(layer, row.norm, probes)
    if isinstance(normed, Rejected):
        return normed
    ups = ups_of(found, packed=len(found) > 1)
    if isinstance(ups, Rejected):
        return ups
    norms, linears = [layer._modules[n] for n in (row.norm,) if n], [m.base for m in found]
    k, biases = linears[0].in_features, {m.bias is not None for m in linears}
    if any(m.in_features != k for m in linears) or len(biases) > 1:
        return Rejected(f"{', '.join(row.projections)} differ in input size or bias")
    weight = linears[0].weight
    if no := plain.same_weights([*norms, *linears], weight.dtype, weight.device):
        return no
    block = RMS_NORM_LINEAR.block(
        k=k,
        n=tuple(m.out_features for m in linears),
        bias=biases.pop(),
        **normed,
        **ups,
        dtype=weight.dtype,
    )
    before = [row.norm] if row.norm else []
    weights = [*norm_parameters(row.norm, normed), *((m.weights, "weight") for m in found)]
    if dict(block.sizes)["bias"]:
        weights += [(m.weights, "bias") for m in found]
    part = Part(
        "qkv",
        block,
        (*weights, *adapter_parameters(found)),
        (*before, row.attention, *(p for m in found for p in m.paths)),
    )
    return with_adapters(part, found, row.norm, normed)


NO_NORM: dict[str, Any] = {
    "norm": False,
    "eps": 1e-6,
    "offset": 0.0,
    "centred": False,
    "norm_bias": False,
}
"""The sizes of a block without a norm."""


def _norm(
    layer: nn.Module,
    name: str,
    probes: probe.Probes,
    rules: tuple[plain.ModuleRule, ...] = plain.NORM,
) -> dict[str, Any] | Rejected:
    """A layer's norm as sizes of the block that it is part of; `name` is "" where there is none."""
    if not name:
        return dict(NO_NORM)
    return plain.refuse(layer, name, rules) or _normed(name, layer._modules[name], probes)  # type: ignore[arg-type]


def _normed(name: str, norm: nn.Module, probes: probe.Probes) -> dict[str, Any] | Rejected:
    found = probes.norm(name, norm, _eps(norm), decoder_layer.OFFSETS)
    if isinstance(found, Rejected):
        return found
    centred, offset = found
    return {
        "norm": True,
        "eps": _eps(norm),
        "offset": offset,
        "centred": centred,
        "norm_bias": norm._parameters.get("bias") is not None,
    }


def _attention(
    attention: Any, row: LayerLayout, probes: probe.Probes, rope: Rope, lora: bool
) -> list[tuple[Part, ...]] | Rejected:
    """What lies between the projections and the output projection, for one token of each sequence: what it may be, as parts."""
    owners = (attention, getattr(attention, "config", None))
    if clips := [
        f"{n} {v}"
        for owner in owners
        for n in decoder_layer.CLIPS
        if (v := getattr(owner, n, None)) is not None
    ]:
        return Rejected(f"attention clips what its projections give ({clips[0]})")
    if row.latent is not None:
        return _latent_attention(attention, row, probes, rope)
    inner = attention._modules
    has = [n for n in row.head_norms if inner.get(n) is not None]
    known = {*row.projections, row.output, *has}
    if extra := [
        n
        for n, m in inner.items()
        if n not in known and m is not None and not isinstance(m, plain.IDLE)
    ]:
        return Rejected(f"attention has {', '.join(extra)} too")
    linears = linears_of(attention, "", row.projections, lora)
    if isinstance(linears, Rejected):
        return linears
    normed = [_norm(attention, n, probes, plain.HEAD_NORM) for n in has]
    if no := next((r for r in normed if isinstance(r, Rejected)), None):
        return no
    d, scale = _head_dim(attention), getattr(attention, "scaling", None)
    if d is None or not isinstance(scale, float) or d % 2:
        return Rejected(f"attention has no head_dim and scaling, or odd ones ({d}, {scale})")
    if rope.width > d:
        return Rejected(f"RoPE turns {rope.width} elements of heads of {d}")
    heads = _heads(attention, [m.base.out_features for m in linears], d)
    if heads is None:
        return Rejected(f"{', '.join(row.projections)} are no whole heads of {d}")
    (kv_heads, group), norms, weight = heads, [inner[n] for n in has], linears[0].base.weight
    heads_of, of_heads = kv_heads * group, dict(normed[0] if normed else NO_NORM)  # type: ignore[arg-type]
    kinds = {
        (): "",
        ((d,), (d,)): "rms",
        ((heads_of * d,), (kv_heads * d,)): "rms of all heads",
        ((heads_of, d), (kv_heads, d)): "layer",
    }
    kind = kinds.get(tuple(tuple(n.weight.shape) for n in norms))
    if kind is None or any(n != normed[0] for n in normed):
        return Rejected(f"{' and '.join(has)} are no two norms of one head each, or of all")
    if of_heads["norm_bias"] or of_heads["centred"] != (kind == "layer"):
        return Rejected(
            f"{' and '.join(has)} are neither RMSNorm nor LayerNorm with weights of each head, or add a bias"
        )
    sinks = attention._parameters.get(decoder_layer.SINKS)
    if no := plain.same_weights([*norms, attention], weight.dtype, weight.device):
        return no
    sizes = {
        "eps": of_heads["eps"],
        "offset": of_heads["offset"],
        "norm": kind,
        "kv_heads": kv_heads,
        "group": group,
        "head_dim": d,
        "norm_bias": False,
        "scale": scale,
        "dtype": weight.dtype,
        "rotary": rope.width,
        "rope_dtype": rope.dtype,
    }
    if kind not in ("", "rms") and sizes["offset"]:
        return Rejected(f"{' and '.join(has)} add {sizes['offset']:g} to weights of all heads")
    softcap = probe.softcap_of(attention)
    for what, given in (("softcap is", softcap), ("sinks are", sinks)):
        if (
            given is not None
            and getattr(attention.config, "_attn_implementation", "eager") not in probe.MASKED
        ):
            return Rejected(
                f"whether the {what} used with {attention.config._attn_implementation} attention is not probed"
            )
    paths = [f"{row.attention}.{n}" for n in has]
    packings = PACKINGS if len(row.projections) == 1 and group == 1 else PACKINGS[:1]
    variants = product(
        ("halves", "pairs", ""),
        dict.fromkeys((softcap, None)),
        dict.fromkeys((sinks is not None, False)),
        packings,
    )
    weights = tuple((p, "weight") for p in paths)
    return [
        (
            Part(
                "attention",
                ATTENTION.block(**sizes, rope=rope_kind, softcap=cap, sinks=sunk, packing=packing),
                (*weights, (row.attention, decoder_layer.SINKS)) if sunk else weights,
                (row.attention, *paths),
            ),
        )
        for rope_kind, cap, sunk, packing in variants
    ]


def _latent_attention(
    attention: Any, row: LayerLayout, probes: probe.Probes, given_rope: Rope
) -> list[tuple[Part, ...]] | Rejected:
    """The same where the cache holds latents, for each way in which RoPE may turn."""
    inner, names = attention._modules, row.latent
    assert names is not None
    norms = [n for n in (names.q_norm, names.norm) if n]
    linears = [n for n in (*row.projections, names.q_expand, names.expand, row.output) if n]
    known = {*norms, *linears}
    if extra := [
        n
        for n, m in inner.items()
        if n not in known and m is not None and not isinstance(m, plain.IDLE)
    ]:
        return Rejected(f"attention has {', '.join(extra)} too")
    if no := plain.first_refusal(*((attention, n, plain.LINEAR) for n in linears)):
        return no
    normed = {n: _norm(attention, n, probes) for n in norms}
    if no := next((r for r in normed.values() if isinstance(r, Rejected)), None):
        return no
    if others := [n for n, r in normed.items() if r["offset"] or r["centred"] or r["norm_bias"]]:  # type: ignore[index]
        return Rejected(f"{others[0]} adds to its weight, takes the mean off, or adds a bias")
    query, latents, expand = (
        inner[names.q_expand or row.projections[0]],
        inner[row.projections[1]],
        inner[names.expand],
    )
    if biased := [n for n in (names.q_expand, names.expand) if n and inner[n].bias is not None]:
        return Rejected(f"{biased[0]} has a bias")
    if no := plain.same_weights(
        [inner[n] for n in (*norms, *linears)], expand.weight.dtype, expand.weight.device
    ):
        return no
    latent, scale = inner[names.norm].weight.shape[0], getattr(attention, "scaling", None)
    rope, given = latents.out_features - latent, inner[row.output].in_features
    # q has heads · (nope + rope) elements, keys and values expanded heads · (nope + value), what is given heads · value
    heads = (query.out_features + given - expand.out_features) // rope if rope > 0 else 0
    sizes = [n // heads for n in (query.out_features, given)] if heads > 0 else [0, 0]
    nope, value = sizes[0] - rope, sizes[1]
    exact = (
        heads > 0
        and nope > 0
        and rope % 2 == 0
        and isinstance(scale, float)
        and expand.in_features == latent
        and (query.out_features, given, expand.out_features)
        == (heads * (nope + rope), heads * value, heads * (nope + value))
    )
    if not exact:
        return Rejected(
            f"{', '.join(linears)} are no whole heads over latents of {latent}, or attention has no scaling ({scale})"
        )
    rank = inner[names.q_norm].weight.shape[0] if names.q_norm else None
    if rank is not None and (query.in_features, inner[row.projections[0]].out_features) != (
        rank,
        rank,
    ):
        return Rejected(f"{names.q_expand} does not read what {names.q_norm} gives")
    shape = dict(
        heads=heads, latent=latent, nope=nope, rope=rope, q_rank=rank, dtype=expand.weight.dtype
    )
    path = f"{row.attention}.{{}}".format
    first: tuple[Part, ...] = ()
    if rank is not None:
        block = MLA_QUERY.block(
            rank=rank,
            row=rank + latent + rope,
            n=query.out_features,
            eps=_eps(inner[names.q_norm]),
            dtype=expand.weight.dtype,
        )
        paths = (path(names.q_norm), path(names.q_expand))
        first = (
            Part("query", block, tuple((p, "weight") for p in paths), (row.attention, *paths)),
        )
    return [
        (
            *first,
            Part(
                "append",
                MLA_APPEND.block(
                    **shape,
                    eps=_eps(inner[names.norm]),
                    ropes=ropes,
                    rope_dtype=torch.float32 if given_rope.is_complex else shape["dtype"],
                ),
                ((path(names.norm), "weight"),),
                (row.attention, path(names.norm)),
            ),
            Part(
                "attention",
                MLA.block(**shape, value=value, scale=scale, ropes=ropes),
                ((path(names.expand), "weight"),),
                (row.attention, path(names.expand)),
            ),
        )
        for ropes in (("pairs",) if given_rope.is_complex else ("parted pairs", "halves", "pairs"))
    ]


def _heads(attention: Any, widths: list[int], d: int) -> tuple[int, int] | None:
    """Heads of keys, and of queries for each of them, by the widths of the projections; None where these are no whole heads."""
    if len(widths) == 1:  # q, k and v in one, which does not say where they end
        group = getattr(attention, "num_key_value_groups", 1)
        kv = widths[0] // (d * (group + 2))
        widths = [kv * group * d, kv * d, widths[0] - kv * (group + 1) * d]
    heads, *kvs = (w // d for w in widths)
    whole = all(w % d == 0 for w in widths) and kvs[0] == kvs[1] > 0 and heads % kvs[0] == 0
    return (kvs[0], heads // kvs[0]) if whole else None


def _residual(
    layer: nn.Module, names: tuple[str, str, str], role: str, probes: probe.Probes, lora: bool
) -> tuple[Part, ...] | Rejected:
    """The linear of (module, its linear, the layer's norm after it), and what it is added to."""
    path, name, after = names
    parent: Any = layer._modules[path]
    found = linears_of(parent, f"{path}.", (name,), lora)
    if isinstance(found, Rejected):
        return found
    normed = _norm(layer, after, probes)
    if isinstance(normed, Rejected):
        return normed
    ups = ups_of(found, packed=False)
    if isinstance(ups, Rejected):
        return ups
    linear, norms = found[0].base, [layer._modules[n] for n in (after,) if n]
    weight, bias = linear.weight, linear.bias is not None
    if no := plain.same_weights([linear, *norms], weight.dtype, weight.device):  # type: ignore[list-item]
        return no
    block = LINEAR_RESIDUAL.block(
        k=linear.in_features,
        n=linear.out_features,
        bias=bias,
        dtype=weight.dtype,
        **normed,
        **ups,
        scale=multiplier(layer),
    )
    weights = (
        [(found[0].weights, p) for p in (("weight", "bias") if bias else ("weight",))]
        + adapter_parameters(found)
        + norm_parameters(after, normed)
    )
    part = Part(role, block, tuple(weights), (path, *found[0].paths, *((after,) if after else ())))
    return with_adapters(part, found, "", NO_NORM)


# -- the MLP ------------------------------------------------------------------------------------------------------------


def _mlp_layout(module: nn.Module) -> MlpLayout | None:
    rows = (*gated_mlp.LAYOUTS, *mlp_up.LAYOUTS)
    return next(
        (r for r in rows if all(child_of(module, n) for n in (*r.linears, r.down, r.activation))),
        None,
    )


def pattern_of(row: MlpLayout) -> str:
    """The pattern of an MLP's first half."""
    return (GATED_MLP if row.gate else MLP_UP).name


def _first_half(
    layer: nn.Module | None,
    mlp: nn.Module,
    row: MlpLayout,
    layer_row: LayerLayout | None,
    probes: probe.Probes,
    lora: bool,
) -> tuple[Part, ...] | Rejected:
    """The part of an MLP up to its activation, and the gate where it has one: with the norm before it when `layer` is given and its norm
    is known."""
    prefix = f"{layer_row.mlp}." if layer_row else ""
    linears = linears_of(mlp, prefix, row.linears, lora and row.gate != row.up)
    if isinstance(linears, Rejected):
        return linears
    if no := plain.refuse(mlp, row.activation, plain.ACTIVATION):
        return no
    ups = ups_of(linears, packed=False)
    if isinstance(ups, Rejected):
        return ups
    gate, up = linears[0].base, linears[-1].base
    activation = probes.activation(mlp._modules[row.activation], ACTIVATIONS)
    if isinstance(activation, Rejected):
        return Rejected(f"{row.activation} {activation.reason}")
    halves, width = row.gate == row.up, gate.out_features // (2 if row.gate == row.up else 1)
    if halves and (
        gate.out_features % 2
        or any(p[width:].storage_offset() * p.itemsize % plain.ALIGNMENT for p in gate.parameters())
    ):
        return Rejected(
            f"{row.gate} has no two halves, or a second one at an address that is no multiple of {plain.ALIGNMENT}"
        )
    if gate.weight.shape != up.weight.shape or (gate.bias is None) != (up.bias is None):
        return Rejected(f"{row.gate} and {row.up} differ in size or bias")
    if no := plain.same_weights([gate, up], gate.weight.dtype, gate.weight.device):
        return no
    bias = gate.bias is not None
    weights = [
        (m.weights, p) for m in linears for p in (("weight", "bias") if bias else ("weight",))
    ] + adapter_parameters(linears)
    bypassed = [*(p for m in linears for p in m.paths), f"{prefix}{row.activation}"]
    pattern = GATED_MLP if row.gate else MLP_UP
    sizes: dict[str, Any] = dict(
        k=gate.in_features,
        n=width,
        activation=activation,
        bias=bias,
        dtype=gate.weight.dtype,
        **ups,
    )
    name, normed = layer_row.mlp_norm if layer_row else "", None
    if layer is not None and layer_row is not None:
        bypassed.append(layer_row.mlp)
        foreign = name and plain.same_weights(
            [layer._modules[name]], gate.weight.dtype, gate.weight.device
        )  # type: ignore[list-item]
        normed = None if foreign else _norm(layer, name, probes)
    if not name or normed is None or isinstance(normed, Rejected):
        name, normed = "", NO_NORM
    before = (name,) if name else ()
    part = Part(
        row.first,
        pattern.block(**sizes, **normed),
        (*norm_parameters(name, normed), *weights),
        (*before, *bypassed),
        halves,
    )
    return with_adapters(part, linears, name, normed)


def _match_mlp(name: str, mlp: nn.Module, row: MlpLayout, probes: probe.Probes) -> Match | Rejected:
    if "forward" in mlp.__dict__:
        return Rejected(
            "the MLP has a forward of its own on the instance, which a class swap would not replace"
        )
    if extra := [n for n in mlp._modules if n not in (row.gate, row.up, row.down, row.activation)]:
        return Rejected(f"has {', '.join(extra)} too")
    parts = _first_half(None, mlp, row, None, probes, lora=False)
    if isinstance(parts, Rejected):
        return parts
    candidate = Match(name, "mlp", mlp, parts, (), (row,))
    return probes.module(candidate) or candidate


# -- PEFT's lora.Linear -------------------------------------------------------------------------------------------------


def _match_lora(name: str, module: nn.Module, probes: probe.Probes) -> Match | Rejected:
    adapter, base = adapter_of(module), module._modules["base_layer"]
    if isinstance(adapter, Rejected):
        return adapter
    assert isinstance(base, nn.Linear)
    block = LORA.block(
        k=base.in_features,
        n=base.out_features,
        r=adapter.a.out_features,
        bias=base.bias is not None,
        dtype=base.weight.dtype,
        adapter_dtype=adapter.a.weight.dtype,
    )
    paths = ("base_layer", f"lora_A.{adapter.name}", f"lora_B.{adapter.name}")
    weights = [
        ("base_layer", "weight"),
        *([("base_layer", "bias")] if base.bias is not None else []),
        *((p, "weight") for p in paths[1:]),
    ]
    part = Part(
        "lora",
        block,
        tuple(weights),
        (*paths, f"lora_dropout.{adapter.name}"),
        adapters=("",),
        scalings=(adapter.scaling,),
    )
    candidate = Match(name, "lora", module, (part,))
    return probes.module(candidate) or candidate
