"""Find the blocks of a model: structure first, then a probe of every kind of module. "No" is a value with a reason."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from mirage_hf.errors import Rejected
from mirage_hf.match import plain, probe
from mirage_hf.match.compose import Composition, LayerComposition, LoraComposition, MlpComposition, Part
from mirage_hf.match.pattern import LayerLayout, MlpLayout
from mirage_hf.match.step import CausalMatch, has_all, match_causal
from mirage_hf.ops import table
from mirage_hf.patterns import (
    ATTENTION,
    GATED_MLP,
    IN_STEPS,
    LINEAR_RESIDUAL,
    LORA,
    MLA,
    MLA_APPEND,
    MLA_QUERY,
    RMS_NORM_LINEAR,
    decoder_layer,
    gated_mlp,
)


@dataclass(frozen=True)
class Match:
    """A module of which some parts can be kernels. `kind` is "layer", "mlp" or "lora"; `refused` are its other parts."""

    name: str
    kind: str
    module: nn.Module
    parts: tuple[Part, ...]
    refused: tuple[tuple[str, Rejected], ...] = ()
    layouts: tuple[Any, ...] = ()

    def compose(self, module: nn.Module | None = None) -> Composition:
        """The module's forward with these parts, over `module` (its own, or a twin of it)."""
        kinds = {"layer": LayerComposition, "mlp": MlpComposition, "lora": LoraComposition}
        return kinds[self.kind](self.module if module is None else module, self.parts, *self.layouts)


@dataclass(frozen=True)
class Refusal:
    """A module that looks like a block and is not one, by pattern."""

    name: str
    pattern: str
    reason: str


class Matches(NamedTuple):
    """What can be swapped, outermost modules first, what looked like it but cannot, with reasons, and the whole model for steps of
    decoding, or why its steps run its own forward."""

    modules: list[Match]
    refusals: list[Refusal]
    causal: CausalMatch | Rejected


def match(model: nn.Module, patterns: Sequence[str], generating: nn.Module | None = None) -> Matches:
    """Find the blocks of a model. `generating`: the causal LM in it whose `generate` decodes."""
    matches: list[Match] = []
    refusals: list[Refusal] = []
    probes = probe.Probes()
    within: set[int] = set()  # MLPs of matched layers, which are the layer's business
    for name, module in model.named_modules():
        found: Match | Rejected | None = None
        if layout := _layer_layout(module):
            found, label = _match_layer(name, module, layout, patterns, probes), "decoder_layer"
            if isinstance(found, Match):
                within.add(id(child_of(module, layout.mlp)))
        elif "gated_mlp" in patterns and id(module) not in within and (mlp := _mlp_layout(module)):
            found, label = _match_mlp(name, module, mlp, probes), "gated_mlp"
        elif "lora" in patterns and _is_lora(module):
            found, label = _match_lora(name, module, probes), "lora"
        if isinstance(found, Match):
            matches.append(found)
            refusals += [Refusal(name, pattern, no.reason) for pattern, no in found.refused]
        elif found is not None:
            refusals.append(Refusal(name, label, found.reason))
    layers = {id(m.module): m for m in matches if m.kind == "layer"}
    asked = layers and not IN_STEPS.isdisjoint(patterns)
    causal = match_causal(generating, layers, _eps, probes) if asked else Rejected("no pattern asked for")
    return Matches(matches, refusals, causal)


def child_of(module: nn.Module, name: str) -> nn.Module | None:
    return module._modules.get(name)


# -- the decoder layer --------------------------------------------------------------------------------------------------

def _layer_layout(module: nn.Module) -> LayerLayout | None:
    rows = [row for row in decoder_layer.LAYOUTS if child_of(module, row.attention) and child_of(module, row.mlp)]
    return next((row for row in rows if all(child_of(module._modules[row.attention], n) for n in row.projections)),  # type: ignore[arg-type]
                next(iter(rows), None))


def _match_layer(name: str, layer: nn.Module, row: LayerLayout, patterns: Sequence[str], probes: probe.Probes) -> Match | Rejected:
    no = _layer_structure(layer, row)
    if no is not None:
        return no
    attention, mlp = layer._modules[row.attention], layer._modules[row.mlp]
    if row.latent is not None:
        given = probes.complex_rope(layer, row)
        if isinstance(given, Rejected):
            return given
        row = replace(row, complex_rope=given)
    mlp_row = _mlp_layout(mlp)
    assumed = mlp_row or gated_mlp.LAYOUTS[0]
    found: list[Part | Rejected | None] = [
        _qkv(layer, attention, row, probes) if "rms_norm_linear" in patterns else None,
        _residual(attention, row.attention, row.output, "out") if "linear_residual" in patterns else None,
        _gated(layer, mlp, assumed, row, probes) if "gated_mlp" in patterns else None,
        _residual(mlp, row.mlp, assumed.down, "down") if "linear_residual" in patterns else None]
    labels = ("rms_norm_linear", "linear_residual", "gated_mlp", "linear_residual")
    parts = tuple(p for p in found if isinstance(p, Part))
    refused = tuple((label, p) for label, p in zip(labels, found, strict=True) if isinstance(p, Rejected))
    if not parts:
        return Rejected("; ".join(dict.fromkeys(r.reason for _, r in refused)) or "no pattern asked for")
    candidate = Match(name, "layer", layer, parts, refused, (row, mlp_row))
    pattern = (ATTENTION if row.latent is None else MLA).name
    if pattern in patterns and not has_all(parts, mlp_row, but="attention"):  # without the other parts nobody asks for attention's
        whole = _whole(candidate, _attention(attention, row, probes), probes)
        candidate = replace(candidate, refused=(*refused, (pattern, whole))) if isinstance(whole, Rejected) else whole
    differs = probes.layer(candidate)
    return Rejected("; ".join([differs.reason, *(f"{label}: {r.reason}" for label, r in candidate.refused)])) if differs else candidate


def _whole(candidate: Match, kinds: list[tuple[Part, ...]] | Rejected, probes: probe.Probes) -> Match | Rejected:
    """A layer with all other parts and the first of `kinds` of attention whose step is the layer's."""
    if isinstance(kinds, Rejected):
        return kinds
    first, *others = candidate.parts
    refusals = []
    for kind in kinds:
        whole = replace(candidate, parts=(first, *kind, *others))
        no = probes.step(whole)
        if no is None:
            return whole
        refusals.append(no)
    return refusals[0]


def _layer_structure(layer: nn.Module, row: LayerLayout) -> Rejected | None:
    containers = ((layer, n, plain.CONTAINER) for n in (row.attention, row.mlp))
    norms = [(layer, n, ()) for n in (row.norm, row.mlp_norm)]
    no = plain.first_refusal(*containers, *norms)
    if no is not None:
        return no
    if "forward" in layer.__dict__:
        return Rejected("the layer has a forward of its own on the instance, which a class swap would not replace")
    known = {row.norm, row.attention, row.mlp_norm, row.mlp}
    extra = [n for n, m in layer._modules.items() if n not in known and not isinstance(m, (nn.Dropout, nn.Identity))]
    if extra:
        hint = next((f": {text}" for key, text in decoder_layer.HINTS.items() if key in extra), "")
        return Rejected(f"has {', '.join(extra)} too{hint}")
    return None


def _eps(norm: nn.Module) -> float:
    values = [norm.__dict__[n] for n in decoder_layer.EPS_NAMES if isinstance(norm.__dict__.get(n), float)]
    return values[0] if values else 1e-6


def _qkv(layer: nn.Module, attention: nn.Module, row: LayerLayout, probes: probe.Probes) -> Part | Rejected:
    checks = [(attention, n, plain.LINEAR) for n in row.projections]
    no = plain.first_refusal((layer, row.norm, plain.NORM), *checks) or probes.norm(row.norm, layer._modules[row.norm])
    if no is not None:
        return no
    norm, linears = layer._modules[row.norm], [attention._modules[n] for n in row.projections]
    k, biases = norm.weight.shape[0], {m.bias is not None for m in linears}
    if any(m.in_features != k for m in linears) or len(biases) > 1:
        return Rejected(f"{', '.join(row.projections)} differ in input size or bias")
    weight = linears[0].weight
    if no := plain.same_weights([norm, *linears], weight.dtype, weight.device):
        return no
    block = RMS_NORM_LINEAR.block(k=k, n=tuple(m.out_features for m in linears), bias=biases.pop(), eps=_eps(norm), dtype=weight.dtype)
    paths = [f"{row.attention}.{n}" for n in row.projections]
    weights = [(row.norm, "weight"), *((p, "weight") for p in paths)]
    if dict(block.sizes)["bias"]:
        weights += [(p, "bias") for p in paths]
    return Part("qkv", block, tuple(weights), (row.norm, row.attention, *paths))


def _attention(attention: Any, row: LayerLayout, probes: probe.Probes) -> list[tuple[Part, ...]] | Rejected:
    """What lies between the projections and the output projection, for one token of each sequence: what it may be, as parts."""
    if row.latent is not None:
        return _latent_attention(attention, row, probes)
    inner = attention._modules
    has = [n for n in row.head_norms if inner.get(n) is not None]
    known = {*row.projections, row.output, *has}
    if extra := [n for n, m in inner.items() if n not in known and m is not None and not isinstance(m, (nn.Dropout, nn.Identity))]:
        return Rejected(f"attention has {', '.join(extra)} too")
    no = plain.first_refusal(*((attention, n, plain.LINEAR) for n in row.projections), *((attention, n, plain.NORM) for n in has))
    if no := no or next((r for n in has if (r := probes.norm(n, inner[n]))), None):
        return no
    d, scale = getattr(attention, "head_dim", None), getattr(attention, "scaling", None)
    if not isinstance(d, int) or not isinstance(scale, float) or d % 2:
        return Rejected(f"attention has no head_dim and scaling, or odd ones ({d}, {scale})")
    heads, *kv = (inner[n].out_features // d for n in row.projections)
    if any(inner[n].out_features % d for n in row.projections) or kv[0] != kv[1] or heads % kv[0]:
        return Rejected(f"{', '.join(row.projections)} are no whole heads of {d}")
    norms, dtype = [inner[n] for n in has], inner[row.projections[0]].weight.dtype
    if len(norms) == 1 or any(n.weight.shape[0] != d for n in norms) or len({_eps(n) for n in norms}) > 1:
        return Rejected(f"{' and '.join(has)} are no two norms of one head each")
    if no := plain.same_weights(norms, dtype, inner[row.projections[0]].weight.device):
        return no
    block = ATTENTION.block(kv_heads=kv[0], group=heads // kv[0], head_dim=d, scale=scale, norm="rms" if norms else "",
                            eps=_eps(norms[0]) if norms else 1e-6, dtype=dtype)
    paths = [f"{row.attention}.{n}" for n in has]
    return [(Part("attention", block, tuple((p, "weight") for p in paths), (row.attention, *paths)),)]


def _latent_attention(attention: Any, row: LayerLayout, probes: probe.Probes) -> list[tuple[Part, ...]] | Rejected:
    """The same where the cache holds latents, for each way in which RoPE may turn."""
    inner, names = attention._modules, row.latent
    assert names is not None
    norms = [n for n in (names.q_norm, names.norm) if n]
    linears = [n for n in (*row.projections, names.q_expand, names.expand, row.output) if n]
    known = {*norms, *linears}
    if extra := [n for n, m in inner.items() if n not in known and m is not None and not isinstance(m, (nn.Dropout, nn.Identity))]:
        return Rejected(f"attention has {', '.join(extra)} too")
    no = plain.first_refusal(*((attention, n, plain.LINEAR) for n in linears), *((attention, n, plain.NORM) for n in norms))
    if no := no or next((r for n in norms if (r := probes.norm(n, inner[n]))), None):
        return no
    query, latents, expand = inner[names.q_expand or row.projections[0]], inner[row.projections[1]], inner[names.expand]
    if biased := [n for n in (names.q_expand, names.expand) if n and inner[n].bias is not None]:
        return Rejected(f"{biased[0]} has a bias")
    if no := plain.same_weights([inner[n] for n in (*norms, *linears)], expand.weight.dtype, expand.weight.device):
        return no
    latent, scale = inner[names.norm].weight.shape[0], getattr(attention, "scaling", None)
    rope, given = latents.out_features - latent, inner[row.output].in_features
    # q has heads · (nope + rope) elements, keys and values expanded heads · (nope + value), what is given heads · value
    heads = (query.out_features + given - expand.out_features) // rope if rope > 0 else 0
    sizes = [n // heads for n in (query.out_features, given)] if heads > 0 else [0, 0]
    nope, value = sizes[0] - rope, sizes[1]
    exact = heads > 0 and nope > 0 and rope % 2 == 0 and isinstance(scale, float) and expand.in_features == latent and \
        (query.out_features, given, expand.out_features) == (heads * (nope + rope), heads * value, heads * (nope + value))
    if not exact:
        return Rejected(f"{', '.join(linears)} are no whole heads over latents of {latent}, or attention has no scaling ({scale})")
    rank = inner[names.q_norm].weight.shape[0] if names.q_norm else None
    if rank is not None and (query.in_features, inner[row.projections[0]].out_features) != (rank, rank):
        return Rejected(f"{names.q_expand} does not read what {names.q_norm} gives")
    shape = dict(heads=heads, latent=latent, nope=nope, rope=rope, q_rank=rank, dtype=expand.weight.dtype)
    path = f"{row.attention}.{{}}".format
    first: tuple[Part, ...] = ()
    if rank is not None:
        block = MLA_QUERY.block(rank=rank, row=rank + latent + rope, n=query.out_features, eps=_eps(inner[names.q_norm]),
                                dtype=expand.weight.dtype)
        paths = (path(names.q_norm), path(names.q_expand))
        first = (Part("query", block, tuple((p, "weight") for p in paths), (row.attention, *paths)),)
    return [(*first,
             Part("append", MLA_APPEND.block(**shape, eps=_eps(inner[names.norm]), ropes=ropes,
                                             rope_dtype=torch.float32 if row.complex_rope else shape["dtype"]),
                  ((path(names.norm), "weight"),), (row.attention, path(names.norm))),
             Part("attention", MLA.block(**shape, value=value, scale=scale, ropes=ropes), ((path(names.expand), "weight"),),
                  (row.attention, path(names.expand))))
            for ropes in (("pairs",) if row.complex_rope else ("parted pairs", "halves", "pairs"))]


def _residual(parent: nn.Module, path: str, name: str, role: str) -> Part | Rejected:
    no = plain.refuse(parent, name, plain.LINEAR)
    if no is not None:
        return no
    linear = parent._modules[name]
    weight, bias = linear.weight, linear.bias is not None
    if no := plain.same_weights([linear], weight.dtype, weight.device):
        return no
    block = LINEAR_RESIDUAL.block(k=linear.in_features, n=linear.out_features, bias=bias, dtype=weight.dtype)
    weights = ((f"{path}.{name}", "weight"), *(((f"{path}.{name}", "bias"),) if bias else ()))
    return Part(role, block, weights, (path, f"{path}.{name}"))


# -- the gated MLP ------------------------------------------------------------------------------------------------------

def _mlp_layout(module: nn.Module) -> MlpLayout | None:
    return next((r for r in gated_mlp.LAYOUTS if all(child_of(module, n) for n in (r.gate, r.up, r.down, r.activation))), None)


def _gated(layer: nn.Module | None, mlp: nn.Module, row: MlpLayout, layer_row: LayerLayout | None,
           probes: probe.Probes) -> Part | Rejected:
    """The gate/up part of an MLP: with the norm before it when `layer` is given and its norm is an RMSNorm."""
    checks = ((mlp, row.gate, plain.LINEAR), (mlp, row.up, plain.LINEAR), (mlp, row.activation, plain.ACTIVATION))
    no = plain.first_refusal(*checks)
    if no is not None:
        return no
    gate, up = mlp._modules[row.gate], mlp._modules[row.up]
    activation = probes.activation(mlp._modules[row.activation], gated_mlp.ACTIVATIONS)
    if isinstance(activation, Rejected):
        return Rejected(f"{row.activation} {activation.reason}")
    if gate.weight.shape != up.weight.shape or (gate.bias is None) != (up.bias is None):
        return Rejected(f"{row.gate} and {row.up} differ in size or bias")
    if no := plain.same_weights([gate, up], gate.weight.dtype, gate.weight.device):
        return no
    bias = gate.bias is not None
    prefix = f"{layer_row.mlp}." if layer_row else ""
    weights = [(f"{prefix}{n}", p) for n in (row.gate, row.up) for p in (("weight", "bias") if bias else ("weight",))]
    bypassed = [f"{prefix}{n}" for n in (row.gate, row.up, row.activation)]
    sizes: dict[str, Any] = dict(k=gate.in_features, n=gate.out_features, activation=activation, bias=bias, dtype=gate.weight.dtype)
    if layer is None or layer_row is None:
        return Part("gated", GATED_MLP.block(**sizes, norm=False, eps=1e-6), tuple(weights), tuple(bypassed))
    bypassed.append(layer_row.mlp)
    name, norm = layer_row.mlp_norm, layer._modules[layer_row.mlp_norm]
    foreign = plain.refuse(layer, name, plain.NORM) or probes.norm(name, norm)
    if foreign or plain.same_weights([norm], gate.weight.dtype, gate.weight.device):
        return Part("gated", GATED_MLP.block(**sizes, norm=False, eps=1e-6), tuple(weights), tuple(bypassed))
    block = GATED_MLP.block(**sizes, norm=True, eps=_eps(norm))
    return Part("gated", block, ((name, "weight"), *weights), (name, *bypassed))


def _match_mlp(name: str, mlp: nn.Module, row: MlpLayout, probes: probe.Probes) -> Match | Rejected:
    if "forward" in mlp.__dict__:
        return Rejected("the MLP has a forward of its own on the instance, which a class swap would not replace")
    if extra := [n for n in mlp._modules if n not in (row.gate, row.up, row.down, row.activation)]:
        return Rejected(f"has {', '.join(extra)} too")
    part = _gated(None, mlp, row, None, probes)
    if isinstance(part, Rejected):
        return part
    candidate = Match(name, "mlp", mlp, (part,), (), (row,))
    return probes.module(candidate) or candidate


# -- PEFT's lora.Linear -------------------------------------------------------------------------------------------------

def _is_lora(module: nn.Module) -> bool:
    return type(module).__name__ == "Linear" and type(module).__module__ == "peft.tuners.lora.layer"


def _lora_state(m: Any, active: list[str]) -> Iterator[str | None]:
    """What PEFT's forward would do other than base + one adapter; the first text is the reason."""
    yield "has a forward of its own on the instance" if "forward" in m.__dict__ else None
    yield "has its adapters disabled" if m._disable_adapters else None
    yield f"has adapters merged into its weight ({', '.join(m.merged_adapters)})" if m.merged_adapters else None
    yield f"has {len(active)} active adapters ({', '.join(active)}); kernels take one" if len(active) != 1 else None
    yield f"has no weights for the active adapter {active[0]}" if active and active[0] not in m.lora_A else None
    variants = {**getattr(m, "lora_variant", {}), **{k: "DoRA" for k, on in getattr(m, "use_dora", {}).items() if on}}
    yield "uses a LoRA variant (DoRA, aLoRA or another)" if active and active[0] in variants else None
    yield "stores its weight as (in, out)" if getattr(m, "fan_in_fan_out", False) else None
    yield "has input casting disabled" if not getattr(m, "cast_input_dtype_enabled", True) else None


def _match_lora(name: str, module: nn.Module, probes: probe.Probes) -> Match | Rejected:
    m: Any = module
    active = [m._active_adapter] if isinstance(m._active_adapter, str) else list(m._active_adapter)
    if reason := next((r for r in _lora_state(m, active) if r), None):
        return Rejected(f"the layer {reason}")
    adapter = active[0]
    no = plain.first_refusal((m, "base_layer", plain.LINEAR), (m.lora_A, adapter, plain.LINEAR), (m.lora_B, adapter, plain.LINEAR))
    if no is not None:
        return no
    base, a, b = m.base_layer, m.lora_A[adapter], m.lora_B[adapter]
    if a.bias is not None or b.bias is not None:
        return Rejected(f"adapter {adapter} has a bias (lora_bias)")
    device = base.weight.device
    if no := plain.same_weights([a, b], a.weight.dtype, device) or plain.same_weights([base], base.weight.dtype, device):
        return no
    if torch.promote_types(base.weight.dtype, a.weight.dtype) not in (base.weight.dtype, a.weight.dtype):
        return Rejected(f"mixes {table.dtype_name(base.weight.dtype)} and {table.dtype_name(a.weight.dtype)}")
    block = LORA.block(k=base.in_features, n=base.out_features, r=a.out_features, bias=base.bias is not None,
                       scaling=float(m.scaling[adapter]), dtype=base.weight.dtype, adapter_dtype=a.weight.dtype)
    paths = ("base_layer", f"lora_A.{adapter}", f"lora_B.{adapter}")
    weights = [("base_layer", "weight"), *([("base_layer", "bias")] if base.bias is not None else []), *((p, "weight") for p in paths[1:])]
    part = Part("lora", block, tuple(weights), (*paths, f"lora_dropout.{adapter}"))
    candidate = Match(name, "lora", module, (part,))
    return probes.module(candidate) or candidate
