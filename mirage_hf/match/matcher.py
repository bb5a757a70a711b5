"""Find the blocks of a model: by structure first, then by a probe of every kind of module.

A module that looks like a block and is none is a `Rejected` with its reason, not an exception.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from mirage_hf.errors import Rejected
from mirage_hf.layers.operands import submodule
from mirage_hf.layers.part import Part
from mirage_hf.match.adapters import is_lora, match_adapter
from mirage_hf.match.causal import match_causal
from mirage_hf.match.layer import layer_layouts, match_layer
from mirage_hf.match.matches import CausalMatch, Match, Matches, RejectedModule
from mirage_hf.match.mlp import match_first_half, mlp_layout
from mirage_hf.match.module_probes import probe_module
from mirage_hf.match.probe import Probes
from mirage_hf.patterns import GATED_MLP, IN_STEPS, LORA
from mirage_hf.patterns.schema import MlpLayout


def match(
    model: nn.Module, patterns: Sequence[str], generating: nn.Module | None = None
) -> Matches:
    """Find the blocks of a model. Nothing is changed.

    Args:
        model: The model.
        patterns: The names of the patterns to look for.
        generating: The causal LM in `model` whose `generate` decodes, or None.

    Returns:
        The matched modules, the rejected ones, and the causal LM, or why kernels cannot run its
        steps.
    """
    matches: list[Match] = []
    rejected: list[RejectedModule] = []
    probes = Probes()
    # MLPs and adapted linears of matched layers. The match of the layer includes them.
    included: set[int] = set()
    for name, module in model.named_modules():
        outcome, label = _match_module(model, name, module, patterns, probes, included)
        if isinstance(outcome, Rejected):
            rejected.append(RejectedModule(name, label, outcome.reason))
        elif outcome is not None:
            matches.append(outcome)
            rejected += [
                RejectedModule(name, pattern, no.reason) for pattern, no in outcome.rejected
            ]
            included |= _included_in(outcome)
    causal = _match_causal(generating, matches, patterns, probes)
    return Matches(matches, rejected, causal)


def _match_module(
    model: nn.Module,
    name: str,
    module: nn.Module,
    patterns: Sequence[str],
    probes: Probes,
    included: set[int],
) -> tuple[Match | Rejected | None, str]:
    """Return the match or rejection of a module, and the block's name. None: it is no block."""
    if layouts := layer_layouts(module):
        return match_layer(model, name, module, layouts, patterns, probes), "decoder_layer"
    if id(module) in included:
        return None, ""
    mlp = mlp_layout(module)
    if mlp is not None and mlp.gate and GATED_MLP.name in patterns:
        return _match_mlp(name, module, mlp, probes), GATED_MLP.name
    if LORA.name in patterns and is_lora(module):
        return _match_lora(name, module, probes), LORA.name
    return None, ""


def _included_in(match: Match) -> set[int]:
    """Return the ids of the modules that a layer's match includes."""
    if match.kind != "layer":
        return set()
    mlp = match.module._modules[match.layer_layout.mlp]
    linears = [submodule(match.module, path) for path in match.adapters]
    return {id(mlp), *map(id, linears)}


def _match_causal(
    generating: nn.Module | None,
    matches: Sequence[Match],
    patterns: Sequence[str],
    probes: Probes,
) -> CausalMatch | Rejected:
    if IN_STEPS.isdisjoint(patterns):
        return Rejected("no pattern asked for")
    layers = {id(match.module): match for match in matches if match.kind == "layer"}
    return match_causal(generating, layers, probes)


def _match_mlp(name: str, mlp: nn.Module, layout: MlpLayout, probes: Probes) -> Match | Rejected:
    """Match a gated MLP on its own."""
    if "forward" in mlp.__dict__:
        return Rejected(
            "the MLP has a forward of its own on the instance, "
            "which would hide the forward of a swapped class"
        )
    known = (layout.gate, layout.up, layout.down, layout.activation)
    if others := [child for child in mlp._modules if child not in known]:
        return Rejected(f"the MLP has {', '.join(others)} too, which its layout does not name")
    parts = match_first_half(mlp, layout, probes)
    if isinstance(parts, Rejected):
        return parts
    candidate = Match(name, "mlp", mlp, parts, mlp_layout=layout)
    return probe_module(probes, candidate) or candidate


def _match_lora(name: str, module: nn.Module, probes: Probes) -> Match | Rejected:
    """Match a PEFT linear on its own."""
    adapter, base = match_adapter(module), module._modules["base_layer"]
    if isinstance(adapter, Rejected):
        return adapter
    assert isinstance(base, nn.Linear)
    block = LORA.block(
        k=base.in_features,
        n=base.out_features,
        r=adapter.rank,
        bias=base.bias is not None,
        dtype=base.weight.dtype,
        adapter_dtype=adapter.lora_a.weight.dtype,
    )
    paths = ("base_layer", f"lora_A.{adapter.name}", f"lora_B.{adapter.name}")
    base_names = ("weight",) if base.bias is None else ("weight", "bias")
    weights = [("base_layer", parameter) for parameter in base_names]
    weights += [(path, "weight") for path in paths[1:]]
    part = Part(
        "lora",
        block,
        tuple(weights),
        bypassed=(*paths, f"lora_dropout.{adapter.name}"),
        adapters=("",),
        scalings=(adapter.scaling,),
    )
    candidate = Match(name, "lora", module, (part,))
    return probe_module(probes, candidate) or candidate
