"""Causal language models around their layers: embedding, kinds of RoPE, last norm and head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from mirage_hf.errors import Rejected
from mirage_hf.layers.part import Part, norm_parameters
from mirage_hf.layers.rope import Rope, rotary_kinds
from mirage_hf.match import plain
from mirage_hf.match.causal_probe import probe_causal
from mirage_hf.match.layer import missing_part
from mirage_hf.match.matches import CausalMatch, Match
from mirage_hf.match.norms import norm_sizes
from mirage_hf.match.probe import Probes
from mirage_hf.patterns import RMS_NORM_LINEAR, causal_lm
from mirage_hf.patterns.schema import CausalLayout


def match_causal(
    model: nn.Module | None, layers: Mapping[int, Match], probes: Probes
) -> CausalMatch | Rejected:
    """Match a causal LM around its layers.

    Args:
        model: The model whose `generate` decodes, or None if there is none.
        layers: The matches of its layers, by the id of their modules.
        probes: The outcomes of probes so far.
    """
    layout = next((x for x in causal_lm.LAYOUTS if model is not None and _fits(model, x)), None)
    if model is None or layout is None:
        return Rejected("it is no causal language model of a known layout")
    backbone: Any = model._modules[layout.backbone]
    if no := _check_structure(model, backbone, layout):
        return no
    found = _match_layers(backbone, layout, layers)
    if isinstance(found, Rejected):
        return found
    head = _match_head(model, backbone, layout, probes)
    if isinstance(head, Rejected):
        return head
    rotary, config = backbone._modules[layout.rotary], getattr(backbone, "config", None)
    kinds = rotary_kinds(rotary, config, len(found.names))
    causal = CausalMatch(model, layout, found.names, head, kinds, found.rope)
    return probe_causal(probes, causal) or causal


def _fits(model: nn.Module, layout: CausalLayout) -> bool:
    """Return whether a layout names children of a model and of its backbone."""
    backbone = model._modules.get(layout.backbone)
    if backbone is None or model._modules.get(layout.head) is None:
        return False
    names = (layout.embedding, layout.layers, layout.norm, layout.rotary)
    return all(backbone._modules.get(name) is not None for name in names)


def _check_structure(
    model: nn.Module, backbone: nn.Module, layout: CausalLayout
) -> Rejected | None:
    children = {layout.embedding, layout.layers, layout.norm, layout.rotary}
    return (
        plain.check_children(
            (model, layout.backbone, plain.CONTAINER),
            (backbone, layout.embedding, plain.EMBEDDING),
            (backbone, layout.norm, plain.NORM),
            (model, layout.head, plain.LINEAR),
            (backbone, layout.rotary, plain.CONTAINER),
        )
        or plain.check_no_others(model, {layout.backbone, layout.head}, "the model ")
        or plain.check_no_others(backbone, children, "the backbone ")
    )


# -- layers ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _MatchedLayers:
    names: tuple[str, ...]
    rope: Rope


def _match_layers(
    backbone: nn.Module, layout: CausalLayout, matches: Mapping[int, Match]
) -> _MatchedLayers | Rejected:
    """Return the layers in order, if each has every part and all read RoPE alike."""
    modules: Any = backbone._modules[layout.layers]._modules  # type: ignore[union-attr]
    names: list[str] = []
    orders: set[Any] = set()
    ropes: set[Rope] = set()
    for number, layer in modules.items():
        match = matches.get(id(layer))
        if match is None:
            return Rejected(f"{layout.layers}.{number} is not matched")
        if no := missing_part(match.parts, match.layer_layout, match.mlp_layout):
            return Rejected(f"{match.name}: {no.reason}")
        names.append(match.name)
        ropes.add(match.rope)
        attention = next(part for part in match.parts if part.role == "attention")
        orders.add(dict(attention.block.sizes).get("ropes"))
    if not names:
        return Rejected("it has no layers")
    if no := _check_places(backbone, list(modules.values())):
        return no
    if len(orders) > 1 or len(ropes) > 1:
        return Rejected("its layers do not all read RoPE's cos and sin in the same order")
    return _MatchedLayers(tuple(names), ropes.pop())


def _check_places(backbone: nn.Module, layers: Sequence[nn.Module]) -> Rejected | None:
    """Reject layers that were moved or taken out. Their number is not their place in the cache."""
    config = getattr(backbone, "config", None)
    count = getattr(config, "num_hidden_layers", len(layers))
    if count != len(layers):
        return Rejected(f"it has {len(layers)} layers, but its config says {count}")
    for number, layer in enumerate(layers):
        for module in layer.modules():
            index = module.__dict__.get("layer_idx", number)
            if index != number:
                return Rejected(f"its layer {number} has the layer_idx {index}")
    return None


# -- the head --------------------------------------------------------------------------------------


def _match_head(
    model: nn.Module, backbone: nn.Module, layout: CausalLayout, probes: Probes
) -> Part | Rejected:
    """Return the last norm and the head as one part."""
    norm: Any = backbone._modules[layout.norm]
    head: Any = model._modules[layout.head]
    embedding: Any = backbone._modules[layout.embedding]
    sizes = norm_sizes(layout.norm, norm, probes)
    if isinstance(sizes, Rejected):
        return sizes
    dtype, device = head.weight.dtype, head.weight.device
    if no := plain.check_same_weights([norm, head, embedding], dtype, device):
        return no
    block = RMS_NORM_LINEAR.block(
        k=head.in_features,
        n=(head.out_features,),
        bias=head.bias is not None,
        dtype=dtype,
        **sizes,
        **logits_options(model),
    )
    path = f"{layout.backbone}.{layout.norm}"
    names = ("weight", "bias") if head.bias is not None else ("weight",)
    weights = (*norm_parameters(path, sizes), *((layout.head, name) for name in names))
    return Part("head", block, weights, (path, layout.head))


def logits_options(model: Any) -> dict[str, Any]:
    """Return the scale and softcap of logits, by the model and its config, as sizes of the head."""
    divisor = getattr(model.config, causal_lm.LOGITS_DIVISOR, None)
    softcap = getattr(model.config, causal_lm.LOGITS_SOFTCAP, None)
    factor = model.__dict__.get(causal_lm.LOGITS_MULTIPLIER)
    scale = 1.0 if factor is None else float(factor)
    scale /= 1.0 if divisor is None else float(divisor)
    return {"scale": scale, "softcap": None if softcap is None else float(softcap)}
