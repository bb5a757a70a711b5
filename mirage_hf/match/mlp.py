"""The first half of an MLP: its linears up to the activation, and the gate if it has one."""

from __future__ import annotations

from typing import Any

from torch import nn

from mirage_hf.errors import Rejected
from mirage_hf.layers.part import Part, norm_parameters
from mirage_hf.match import plain
from mirage_hf.match.adapters import (
    Linear,
    adapter_sizes,
    lora_b_parameters,
    match_linears,
    with_adapters,
)
from mirage_hf.match.module_probes import probe_activation
from mirage_hf.match.norms import NO_NORM, match_norm
from mirage_hf.match.probe import Probes
from mirage_hf.patterns import GATED_MLP, MLP_UP, gated_mlp, mlp_up
from mirage_hf.patterns.fragments import activations
from mirage_hf.patterns.schema import LayerLayout, MlpLayout, Pattern


def mlp_layout(module: nn.Module) -> MlpLayout | None:
    """Return the first layout that names children of an MLP, or None."""
    for layout in (*gated_mlp.LAYOUTS, *mlp_up.LAYOUTS):
        names = (*layout.linears, layout.down, layout.activation)
        if all(module._modules.get(name) is not None for name in names):
            return layout
    return None


def first_half_pattern(layout: MlpLayout) -> Pattern:
    """Return the pattern of an MLP's first half."""
    return GATED_MLP if layout.gate else MLP_UP


def match_first_half(
    mlp: nn.Module,
    layout: MlpLayout,
    probes: Probes,
    *,
    layer: nn.Module | None = None,
    layer_layout: LayerLayout | None = None,
    allow_adapters: bool = False,
) -> tuple[Part, ...] | Rejected:
    """Return the parts of an MLP's first half, with the norm before it if that is known.

    Args:
        mlp: The MLP.
        layout: The names of its children.
        probes: The outcomes of probes so far.
        layer: The layer that it is in, or None for an MLP on its own.
        layer_layout: The names of that layer's children.
        allow_adapters: Whether the linears may be PEFT linears.
    """
    prefix = f"{layer_layout.mlp}." if layer_layout else ""
    packed = layout.packed_gate_up
    linears = match_linears(mlp, prefix, layout.linears, allow_adapters and not packed)
    if isinstance(linears, Rejected):
        return linears
    if no := plain.check_child(mlp, layout.activation, plain.ACTIVATION):
        return no
    adapters = adapter_sizes(linears, packed=False)
    if isinstance(adapters, Rejected):
        return adapters
    activation = probe_activation(probes, mlp._modules[layout.activation], activations())
    if isinstance(activation, Rejected):
        return Rejected(f"{layout.activation} {activation.reason}")
    if no := _check_linears(layout, linears):
        return no
    norm, norm_sizes = "", NO_NORM
    if layer is not None and layer_layout is not None:
        norm, norm_sizes = _norm_before(layer, layer_layout, linears, probes)
    first = linears[0].base
    block = first_half_pattern(layout).block(
        k=first.in_features,
        n=first.out_features // (2 if packed else 1),
        activation=activation,
        bias=first.bias is not None,
        dtype=first.weight.dtype,
        **adapters,
        **norm_sizes,
    )
    part = Part(
        layout.first,
        block,
        weights=(
            *norm_parameters(norm, norm_sizes),
            *(weight for linear in linears for weight in linear.weights),
            *lora_b_parameters(linears),
        ),
        bypassed=(
            *((norm,) if norm else ()),
            *(path for linear in linears for path in linear.bypassed),
            f"{prefix}{layout.activation}",
            *((layer_layout.mlp,) if layer_layout else ()),
        ),
        packed_gate_up=packed,
    )
    return with_adapters(part, linears, norm, norm_sizes)


def _check_linears(layout: MlpLayout, linears: list[Linear]) -> Rejected | None:
    """Check that gate and up are alike, or that the halves of one linear can be read."""
    gate, up = linears[0].base, linears[-1].base
    if layout.packed_gate_up:
        width = gate.out_features // 2
        offsets = [p[width:].storage_offset() * p.itemsize for p in gate.parameters()]
        if gate.out_features % 2:
            return Rejected(f"{layout.gate} has an odd number of outputs, so no two halves")
        if any(offset % plain.ALIGNMENT for offset in offsets):
            return Rejected(
                f"the second half of {layout.gate} is not {plain.ALIGNMENT}-byte aligned"
            )
    if gate.weight.shape != up.weight.shape or (gate.bias is None) != (up.bias is None):
        return Rejected(f"{layout.gate} and {layout.up} differ in size or bias")
    return plain.check_same_weights([gate, up], gate.weight.dtype, gate.weight.device)


def _norm_before(
    layer: nn.Module, layout: LayerLayout, linears: list[Linear], probes: Probes
) -> tuple[str, dict[str, Any]]:
    """Return the norm before the MLP and its sizes, or no norm if a kernel cannot compute it."""
    name, weight = layout.mlp_norm, linears[0].base.weight
    if not name or plain.check_same_weights([layer._modules[name]], weight.dtype, weight.device):
        return "", NO_NORM
    sizes = match_norm(layer, name, probes)
    return ("", NO_NORM) if isinstance(sizes, Rejected) else (name, sizes)
