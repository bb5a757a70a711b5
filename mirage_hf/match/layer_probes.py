"""Probes of decoder layers: their forward, their decoding step and their prefill."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.errors import Rejected
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.layers.compose import Kernel, any_norm
from mirage_hf.layers.operands import OperandTable
from mirage_hf.layers.prefill import LayerPrefill, PromptInputs, layer_prefill
from mirage_hf.layers.rope import Rope
from mirage_hf.layers.stand_in import MlpStandIn, stand_in
from mirage_hf.layers.step import LayerStep, StepInputs, layer_step
from mirage_hf.layers.torch_kernels import program_in_dtype, torch_kernels
from mirage_hf.match.layer_calls import (
    PADDING,
    WINDOW,
    LayerCall,
    ProbeCache,
    distance,
    layer_calls,
)
from mirage_hf.match.matches import Match
from mirage_hf.match.module_probes import parts_key
from mirage_hf.match.probe import TOLERANCE, Probes
from mirage_hf.match.twins import kind_of, lora_scalings, random_weights, twin
from mirage_hf.patterns.schema import LayerLayout

#: The new tokens of each call: a prompt, then decoding steps within and beyond the window.
CALL_LENGTHS = (6, 1, 1, 1)

#: The sequences of each call, and the slots of their cache.
BATCH = 2
SLOTS = 12


def probe_layer(probes: Probes, candidate: Match) -> Rejected | None:
    """Compare a decoder layer with its parts done by their programs."""
    layer = candidate.module

    def probe() -> Rejected | None:
        generator = torch.Generator().manual_seed(1)
        other = _layer_twin(candidate, seed=1)
        composed = candidate.compose(other)
        like = any_norm(other, candidate.layer_layout).weight
        rope = replace(candidate.rope, dtype=torch.float32)
        for scale in (1.0, 1e-3):
            stock_cache, cache = ProbeCache(), ProbeCache()
            for call in layer_calls(
                BATCH, like, rope, CALL_LENGTHS, generator, torch.float32, scale=scale
            ):
                want = other.forward(call.x, **call.kwargs(layer, stock_cache))
                rows = call.x.shape[0] * call.x.shape[1]
                kernels = torch_kernels(candidate.parts, rows, torch.float32)
                got = composed(kernels, call.x, call.kwargs(layer, cache))
                if not isinstance(want, Tensor):
                    return Rejected(f"the layer returns a {type(want).__name__}, not a tensor")
                difference = max(
                    distance(got, want, call.x),
                    distance(cache.keys, stock_cache.keys),  # type: ignore[arg-type]
                    distance(cache.values, stock_cache.values),  # type: ignore[arg-type]
                )
                if not difference < TOLERANCE:
                    return Rejected(_layer_differs(candidate.layer_layout, difference))
        return None

    return probes.once(("layer", *_candidate_key(candidate)), probe)


def probe_step(probes: Probes, candidate: Match) -> Rejected | None:
    """Compare a decoder layer's tokens with the programs of all its parts.

    Attention and its cache are included, and prompts if kernels run them.
    """
    layer, layout = candidate.module, candidate.layer_layout

    def probe() -> Rejected | None:
        generator = torch.Generator().manual_seed(3)
        other = _layer_twin(candidate, seed=3)
        operands = OperandTable(other, candidate.parts)
        step = layer_step(other, operands, layout, candidate.rope)
        prefill = layer_prefill(operands, candidate.parts, layout)
        like = any_norm(other, layout).weight
        rope = replace(candidate.rope, dtype=torch.float32)
        cache = ProbeCache()
        for number, call in enumerate(
            layer_calls(BATCH, like, rope, CALL_LENGTHS, generator, torch.float32)
        ):
            before = ProbeCache(cache.keys, cache.values)
            want = other.forward(call.x, **call.kwargs(layer, cache))
            if number == 0:
                if layout.latent is not None and (no := _caches_expanded(candidate, cache)):
                    return no
                difference = 0.0
                if prefill is not None:
                    difference = _prefill_distance(prefill, step, call, want, cache)
            else:
                windowed = number >= 2
                kernels = torch_kernels(candidate.parts, BATCH, torch.float32, SLOTS)
                difference = _step_distance(kernels, step, call, want, before, cache, windowed)
            if not difference < TOLERANCE:
                return Rejected(_step_differs(layout, difference))
        return None

    return probes.once(("step", *_candidate_key(candidate)), probe)


def _candidate_key(candidate: Match) -> tuple[Any, ...]:
    layouts = candidate.layout, candidate.mlp_layout
    return parts_key(candidate), layouts, candidate.rope, kind_of(candidate.module)


def _layer_twin(candidate: Match, seed: int) -> Any:
    """Return a twin with random weights, and with the stand-in of an MLP that runs stock."""
    layer = candidate.module
    children = dict(layer._modules)
    if candidate.mlp_stand_in is not None:
        children[candidate.layer_layout.mlp] = candidate.mlp_stand_in
    hollow = stand_in(layer, {"_modules": children})
    return twin(hollow, random_weights(seed, lora_scalings(layer)))


def _step_distance(
    kernels: dict[str, Kernel],
    step: LayerStep,
    call: LayerCall,
    want: Tensor,
    before: ProbeCache,
    after: ProbeCache,
    windowed: bool,
) -> float:
    """Return how far a step is from stock's call, the new keys and values included.

    Args:
        kernels: What runs the parts.
        step: The layer's step.
        call: The call.
        want: What stock gives.
        before: The cache that stock was given.
        after: The cache that stock left.
        windowed: Whether attention sees a window.
    """
    assert before.keys is not None and before.values is not None
    past = before.keys.shape[-2]
    padding = (0, 0, 0, SLOTS - past)
    room = [nn.functional.pad(x, padding) for x in (before.keys, before.values)]
    lo = torch.tensor([PADDING, 0]).clamp_min(past - WINDOW + 1 if windowed else 0)
    bounds = (lo, torch.full((BATCH,), past), torch.full((BATCH,), past + 1))
    on_device = (x.to(call.x.device, torch.int32) for x in bounds)
    inputs = StepInputs(*step.tables(call.cos, call.sin), *room, *on_device)
    got = step(kernels, call.x[:, 0], inputs)
    keys, values = (x[:, :, : past + 1] for x in room)
    return max(
        distance(got, want[:, 0], call.x[:, 0]),
        distance(keys, after.keys),  # type: ignore[arg-type]
        distance(values, after.values),  # type: ignore[arg-type]
    )


def _prefill_distance(
    prefill: LayerPrefill, step: LayerStep, call: LayerCall, want: Tensor, cache: ProbeCache
) -> float:
    """Return how far the prefill of the last row is from stock's call, keys and values included.

    Row 0 has padding, which the prefill does not take.
    """
    assert cache.keys is not None and cache.values is not None
    tokens, x = call.x.shape[1], call.x[-1]
    keys, values = (
        y.new_zeros(1, y.shape[1], SLOTS, y.shape[3]) for y in (cache.keys, cache.values)
    )
    kernels: dict[str, Kernel] = {
        name: partial(run_kernel_graph, program_in_dtype(block, tokens, torch.float32))
        for name, block in prefill.blocks.items()
    }
    cos, sin = (t[:, None] for t in step.tables(call.cos[-1], call.sin[-1]))
    got = prefill(kernels, x.clone(), PromptInputs(cos, sin, keys, values))
    return max(
        distance(got, want[-1], x),
        distance(keys[0, :, :tokens], cache.keys[-1]),
        distance(values[0, :, :tokens], cache.values[-1]),
    )


def _caches_expanded(candidate: Match, cache: ProbeCache) -> Rejected | None:
    """Reject latent attention that caches anything except latents and rotated keys.

    Transformers 5.4 caches expanded keys and values.
    """
    attention = next(part for part in candidate.parts if part.role == "attention")
    sizes = dict(attention.block.sizes)
    seen = [None if x is None else (x.shape[1], x.shape[3]) for x in (cache.keys, cache.values)]
    if seen == [(1, sizes["latent"]), (1, sizes["rope"])]:
        return None
    each = " and ".join("nothing" if s is None else f"{s[0]} heads of {s[1]}" for s in seen)
    return Rejected(
        f"attention caches {each}, not latents of {sizes['latent']} and rotated keys of "
        f"{sizes['rope']}; newer versions of transformers do"
    )


def _layer_differs(layout: LayerLayout, difference: float) -> str:
    formula = "x + attention(norm(x)), then h + mlp(norm(h))"
    if layout.parallel:
        formula = "x + attention(norm(x)) + mlp(norm(x))"
    return (
        f"the layer computes something else than {formula} with its layout's norms and "
        f"multipliers: off by {difference:.2g} on a probe"
    )


def _step_differs(layout: LayerLayout, difference: float) -> str:
    formula = "softmax(scale · rope(q) · rope(k)) · v"
    if layout.latent is not None:
        formula += " over latents"
    return f"attention is not {formula}: off by {difference:.2g} on a probe"


def probe_latent_rope(
    probes: Probes, layer: Any, layout: LayerLayout, dtype: torch.dtype
) -> Rope | Rejected:
    """Return the RoPE of a layer with latent attention.

    The layer is called with cos and sin first. If that fails, it takes one complex tensor.
    """

    def probe() -> Rope:
        assert layout.latent is not None
        attention = layer._modules[layout.attention]._modules
        latent_size = attention[layout.latent.norm].weight.shape[0]
        width = attention[layout.projections[1]].out_features - latent_size
        rope = Rope(width, dtype)
        as_complex = Rope(width, torch.float32, order="once", is_complex=True)
        children = {**layer._modules, layout.mlp: MlpStandIn()}
        other = twin(stand_in(layer, {"_modules": children}), random_weights(5))
        try:
            _call_once(other, layer, layout, rope)
        except (AttributeError, TypeError, ValueError, RuntimeError):
            _call_once(other, layer, layout, as_complex)
            return as_complex
        return rope

    return probes.once(("rope", dtype, kind_of(layer)), probe)


def _call_once(other: Any, layer: Any, layout: LayerLayout, rope: Rope) -> None:
    """Call a layer's twin with three sequences of four tokens, without a cache."""
    like = any_norm(other, layout).weight
    rope = replace(rope, dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    call = next(layer_calls(3, like, rope, (4,), generator, torch.float32))
    other.forward(call.x, **call.kwargs(layer, None))
