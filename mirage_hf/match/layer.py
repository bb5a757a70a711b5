"""Decoder layers: their layouts, their parts, and the probes that confirm them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from mirage_hf.errors import Rejected
from mirage_hf.layers.compose import any_norm, residual_multiplier
from mirage_hf.layers.part import Part, norm_parameters, runs_own_mlp
from mirage_hf.layers.rope import Rope
from mirage_hf.layers.step import STEP_ROLES
from mirage_hf.match import plain
from mirage_hf.match.adapters import (
    adapter_sizes,
    lora_b_parameters,
    match_linears,
    with_adapters,
)
from mirage_hf.match.attention import Variant, head_dim, match_attention
from mirage_hf.match.latent_attention import match_latent_attention
from mirage_hf.match.layer_probes import probe_latent_rope, probe_layer, probe_step
from mirage_hf.match.matches import Match
from mirage_hf.match.mlp import first_half_pattern, match_first_half, mlp_layout
from mirage_hf.match.module_probes import make_mlp_stand_in, probe_rotary
from mirage_hf.match.norms import NO_NORM, match_norm
from mirage_hf.match.probe import Probes
from mirage_hf.patterns import (
    ATTENTION,
    LINEAR_RESIDUAL,
    MLA,
    RMS_NORM_LINEAR,
    causal_lm,
    decoder_layer,
    gated_mlp,
)
from mirage_hf.patterns.schema import LayerLayout, MlpLayout

Parts = tuple[Part, ...]


# -- layouts ---------------------------------------------------------------------------------------


def layer_layouts(module: nn.Module) -> list[LayerLayout]:
    """Return the layouts by which a module may be a decoder layer.

    These are all layouts that name every child. If there are none, return one layout, for a useful
    reason in the rejection. It is the first that names attention, its linears and the MLP, or else
    the first that names attention and the MLP.
    """
    children = module._modules
    named = [
        layout
        for layout in decoder_layer.LAYOUTS
        if children.get(layout.attention) is not None and children.get(layout.mlp) is not None
    ]
    with_linears = [layout for layout in named if _names_linears(module, layout)]
    complete = [
        layout
        for layout in with_linears
        if all(children.get(norm) is not None for norm in layout.norms)
        and _check_children(module, layout) is None
    ]
    return complete or (with_linears or named)[:1]


def _names_linears(layer: nn.Module, layout: LayerLayout) -> bool:
    attention: Any = layer._modules[layout.attention]
    names = (*layout.projections, layout.output)
    return all(attention._modules.get(name) is not None for name in names)


def _check_children(layer: nn.Module, layout: LayerLayout) -> Rejected | None:
    return plain.check_no_others(layer, {layout.attention, layout.mlp, *layout.norms}, "the layer ")


def _check_structure(layer: nn.Module, layout: LayerLayout) -> Rejected | None:
    containers = ((layer, name, plain.CONTAINER) for name in (layout.attention, layout.mlp))
    # Norms are checked in detail with the part that they belong to.
    norms = ((layer, name, ()) for name in layout.norms)
    if no := plain.check_children(*containers, *norms):
        return no
    if "forward" in layer.__dict__:
        return Rejected(
            "the layer has a forward of its own on the instance, "
            "which would hide the forward of a swapped class"
        )
    return _check_children(layer, layout)


def missing_part(
    parts: Sequence[Part], layout: LayerLayout, mlp: MlpLayout | None, except_role: str = ""
) -> Rejected | None:
    """Return why a layer with these parts has no decoding step by kernels, or None.

    Args:
        parts: The parts that were matched.
        layout: The names of the layer's children.
        mlp: The names of the MLP's children, or None if it runs its own forward.
        except_role: A role that may be missing.
    """
    by_role = {part.role: part for part in parts}
    of_mlp = (mlp.first, "down") if mlp is not None else ()
    wanted = [*STEP_ROLES, *of_mlp]
    wanted.sort(key=lambda role: role == "attention")
    for role in wanted:
        if role not in by_role and role != except_role:
            return Rejected(f"the layer's {role} is not matched")
    if mlp is not None and layout.mlp_norm and not dict(by_role[mlp.first].block.sizes)["norm"]:
        return Rejected("the norm before the MLP is neither RMSNorm nor LayerNorm")
    return None


# -- the layer -------------------------------------------------------------------------------------


def match_layer(
    model: nn.Module,
    name: str,
    layer: nn.Module,
    layouts: Sequence[LayerLayout],
    patterns: Sequence[str],
    probes: Probes,
) -> Match | Rejected:
    """Return the match by the first layout that passes the probes, or the first rejection."""
    first_no: Rejected | None = None
    for layout in layouts:
        rope = layer_rope(model, name, layer, layout, probes)
        outcome = _match_by_layout(name, layer, layout, patterns, probes, rope)
        if isinstance(outcome, Match):
            return outcome
        first_no = first_no or outcome
    assert first_no is not None
    return first_no


def _match_by_layout(
    name: str,
    layer: nn.Module,
    layout: LayerLayout,
    patterns: Sequence[str],
    probes: Probes,
    rope: Rope,
) -> Match | Rejected:
    if no := _check_structure(layer, layout):
        return no
    mlp = layer._modules[layout.mlp]
    mlp_names = mlp_layout(mlp)  # type: ignore[arg-type]
    parts, rejected = _match_parts(layer, layout, mlp_names, patterns, probes)
    if not parts:
        return Rejected(_why_no_parts([no for _, no in rejected], patterns))
    mlp_stand_in = None
    if runs_own_mlp(parts):
        made = make_mlp_stand_in(probes, mlp, any_norm(layer, layout))
        if isinstance(made, Rejected):
            return made
        mlp_stand_in = made
    candidate = Match(name, "layer", layer, parts, rejected, layout, mlp_names, rope, mlp_stand_in)
    pattern = (ATTENTION if layout.latent is None else MLA).name
    # Attention's kernels run only in steps whose other parts have kernels, too.
    if pattern in patterns and not missing_part(parts, layout, mlp_names, except_role="attention"):
        candidate = _with_attention(candidate, pattern, probes, "lora" in patterns)
    if differs := probe_layer(probes, candidate):
        others = [f"{label}: {no.reason}" for label, no in candidate.rejected]
        return Rejected("; ".join([differs.reason, *others]))
    return candidate


def _match_parts(
    layer: nn.Module,
    layout: LayerLayout,
    mlp_names: MlpLayout | None,
    patterns: Sequence[str],
    probes: Probes,
) -> tuple[Parts, tuple[tuple[str, Rejected], ...]]:
    """Return the parts of a layer except attention, and the rejected ones by pattern."""
    mlp: Any = layer._modules[layout.mlp]
    # Without a layout the reason names the children of a gated MLP.
    names = mlp_names or gated_mlp.LAYOUTS[0]
    adapters = "lora" in patterns
    out = (layout.attention, layout.output, layout.after)
    down = (layout.mlp, names.down, layout.mlp_after)
    first_half = partial(
        match_first_half,
        mlp,
        names,
        probes,
        layer=layer,
        layer_layout=layout,
        allow_adapters=adapters,
    )
    looked_for: tuple[tuple[str, Callable[[], Parts | Rejected]], ...] = (
        (RMS_NORM_LINEAR.name, lambda: _match_qkv(layer, layout, probes, adapters)),
        (LINEAR_RESIDUAL.name, lambda: _match_residual(layer, out, "out", probes, adapters)),
        (first_half_pattern(names).name, first_half),
        (LINEAR_RESIDUAL.name, lambda: _match_residual(layer, down, "down", probes, adapters)),
    )
    parts: list[Part] = []
    rejected = []
    for pattern, find in looked_for:
        if pattern not in patterns:
            continue
        outcome = find()
        if isinstance(outcome, Rejected):
            rejected.append((pattern, outcome))
        else:
            parts += outcome
    return tuple(parts), tuple(rejected)


def _why_no_parts(rejected: Sequence[Rejected], patterns: Sequence[str]) -> str:
    if rejected:
        return "; ".join(dict.fromkeys(no.reason for no in rejected))
    if {ATTENTION.name, MLA.name} & set(patterns):
        return (
            "attention's kernels run only in steps of generate whose other parts have kernels; "
            "ask for the other patterns, too"
        )
    return "no pattern asked for"


def _with_attention(candidate: Match, pattern: str, probes: Probes, allow_adapters: bool) -> Match:
    """Add the first variant of attention whose step passes the probe, or its rejection."""
    layout = candidate.layer_layout
    attention = candidate.module._modules[layout.attention]
    if layout.latent is None:
        variants = match_attention(attention, layout, probes, candidate.rope, allow_adapters)
    else:
        variants = match_latent_attention(attention, layout, probes, candidate.rope)
    if isinstance(variants, Rejected):
        return replace(candidate, rejected=(*candidate.rejected, (pattern, variants)))
    first_no: Rejected | None = None
    for variant in variants:
        whole = _insert_attention(candidate, variant)
        no = probe_step(probes, whole)
        if no is None:
            return whole
        first_no = first_no or no
    assert first_no is not None
    return replace(candidate, rejected=(*candidate.rejected, (pattern, first_no)))


def _insert_attention(candidate: Match, variant: Variant) -> Match:
    """Return a match with attention's parts after qkv."""
    roles = [part.role for part in candidate.parts]
    after = roles.index("qkv") + 1
    parts = (*candidate.parts[:after], *variant, *candidate.parts[after:])
    return replace(candidate, parts=parts)


# -- RoPE ------------------------------------------------------------------------------------------


def layer_rope(
    model: nn.Module, name: str, layer: nn.Module, layout: LayerLayout, probes: Probes
) -> Rope:
    """Return the RoPE that a layer is given.

    It is that of the nearest enclosing module with a RoPE module. Otherwise whole heads rotate.
    """
    dtype = next((p.dtype for p in layer.parameters()), torch.float32)
    rope: Rope | Rejected | None = None
    if layout.latent is not None:
        rope = probe_latent_rope(probes, layer, layout, dtype)
    else:
        for owner in _enclosing(model, name):
            rotary = _rotary_of(owner)
            if rotary is not None:
                rope = probe_rotary(probes, rotary, getattr(owner, "config", None), dtype)
                break
    if isinstance(rope, Rope):
        return rope
    return Rope(head_dim(layer._modules[layout.attention]) or 0, dtype)


def _enclosing(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """Yield the modules around the module `name`, innermost first, and the model last."""
    around = name.split(".")[:-1]
    for length in range(len(around), -1, -1):
        yield model.get_submodule(".".join(around[:length]))


def _rotary_of(module: nn.Module) -> nn.Module | None:
    children = (module._modules.get(layout.rotary) for layout in causal_lm.LAYOUTS)
    return next((child for child in children if child is not None), None)


# -- parts -----------------------------------------------------------------------------------------


def _match_qkv(
    layer: nn.Module, layout: LayerLayout, probes: Probes, allow_adapters: bool
) -> Parts | Rejected:
    """Return the projections of attention with the norm before them."""
    attention: Any = layer._modules[layout.attention]
    prefix = f"{layout.attention}."
    linears = match_linears(attention, prefix, layout.projections, allow_adapters)
    if isinstance(linears, Rejected):
        return linears
    norm_sizes = match_norm(layer, layout.norm, probes)
    if isinstance(norm_sizes, Rejected):
        return norm_sizes
    adapters = adapter_sizes(linears, packed=len(linears) > 1)
    if isinstance(adapters, Rejected):
        return adapters
    bases = [linear.base for linear in linears]
    first = bases[0]
    has_bias = first.bias is not None
    alike = all(
        base.in_features == first.in_features and (base.bias is not None) == has_bias
        for base in bases
    )
    if not alike:
        return Rejected(f"{', '.join(layout.projections)} differ in input size or bias")
    norms = [layout.norm] if layout.norm else []
    modules = [*(layer._modules[norm] for norm in norms), *bases]
    if no := plain.check_same_weights(modules, first.weight.dtype, first.weight.device):
        return no
    block = RMS_NORM_LINEAR.block(
        k=first.in_features,
        n=tuple(base.out_features for base in bases),
        bias=has_bias,
        dtype=first.weight.dtype,
        **norm_sizes,
        **adapters,
    )
    names = ("weight", "bias") if has_bias else ("weight",)
    part = Part(
        "qkv",
        block,
        weights=(
            *norm_parameters(layout.norm, norm_sizes),
            *((linear.base_path, name) for name in names for linear in linears),
            *lora_b_parameters(linears),
        ),
        bypassed=(
            *norms,
            layout.attention,
            *(path for linear in linears for path in linear.bypassed),
        ),
    )
    return with_adapters(part, linears, layout.norm, norm_sizes)


def _match_residual(
    layer: nn.Module,
    names: tuple[str, str, str],
    role: str,
    probes: Probes,
    allow_adapters: bool,
) -> Parts | Rejected:
    """Return a linear and the residual that it is added to.

    Args:
        layer: The layer.
        names: The module, its linear, and the layer's norm after it or "".
        role: The role of the part.
        probes: The outcomes of probes so far.
        allow_adapters: Whether the linear may be a PEFT linear.
    """
    path, name, after = names
    parent: Any = layer._modules[path]
    linears = match_linears(parent, f"{path}.", (name,), allow_adapters)
    if isinstance(linears, Rejected):
        return linears
    norm_sizes = match_norm(layer, after, probes)
    if isinstance(norm_sizes, Rejected):
        return norm_sizes
    adapters = adapter_sizes(linears, packed=False)
    if isinstance(adapters, Rejected):
        return adapters
    (linear,) = linears
    norms, weight = [after] if after else [], linear.base.weight
    modules = [linear.base, *(layer._modules[norm] for norm in norms)]
    if no := plain.check_same_weights(modules, weight.dtype, weight.device):
        return no
    block = LINEAR_RESIDUAL.block(
        k=linear.base.in_features,
        n=linear.base.out_features,
        bias=linear.base.bias is not None,
        dtype=weight.dtype,
        scale=residual_multiplier(layer),
        **norm_sizes,
        **adapters,
    )
    part = Part(
        role,
        block,
        weights=(
            *linear.weights,
            *lora_b_parameters(linears),
            *norm_parameters(after, norm_sizes),
        ),
        bypassed=(path, *linear.bypassed, *norms),
    )
    return with_adapters(part, linears, "", NO_NORM)
