"""Put the kernels of a model's blocks together, so that they run its steps and its prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mirage_hf.errors import Rejected
from mirage_hf.layers.model_kernels import (
    LayerKernels,
    ModelKernels,
    WatchedNumber,
    comparable,
)
from mirage_hf.layers.operands import OperandTable, submodule
from mirage_hf.layers.part import LONG_CACHES_ROLE, Part, StepShape, block_at
from mirage_hf.layers.prefill import layer_prefill, why_no_prefill
from mirage_hf.layers.rope import length_rope
from mirage_hf.layers.step import LayerStep, layer_step
from mirage_hf.match.attention import softcap_of
from mirage_hf.match.matches import CausalMatch, Match
from mirage_hf.patterns.attention import for_long_caches
from mirage_hf.patterns.causal_lm import (
    LOGITS_DIVISOR,
    LOGITS_MULTIPLIER,
    LOGITS_SOFTCAP,
    OF_LAYERS,
)
from mirage_hf.patterns.decoder_layer import CLIPS, MULTIPLIERS, SOFTCAPS, SWITCHES
from mirage_hf.pipeline.resolver import Resolved
from mirage_hf.swap.kernels import BlockKernels


def assemble_model_kernels(
    causal: CausalMatch | Rejected,
    matches: Sequence[Match],
    shapes: Sequence[StepShape],
    found: BlockKernels,
) -> ModelKernels | Rejected:
    """Return the kernels of a whole model, for the shapes of steps that every part has.

    Args:
        causal: The causal LM, or why it has no steps by kernels.
        matches: The matched modules of the model.
        shapes: The shapes of steps that were asked for.
        found: The kernels that were found.
    """
    if isinstance(causal, Rejected):
        return causal
    by_name = {match.name: match for match in matches}
    layers = [by_name[name] for name in causal.layers]
    reasons = {shape: _missing_kernel(causal, layers, shape, found) for shape in shapes}
    usable = [shape for shape in shapes if not reasons[shape]]
    # drafts are verified after a step of one token
    batches = {shape.batch for shape in usable if shape.tokens == 1}
    usable = [shape for shape in usable if shape.batch in batches]
    if not usable:
        return Rejected("; ".join(f"{s}: {reason}" for s, reason in reasons.items() if reason))
    steps = [layer_step(m.module, m.operands, m.layer_layout, m.rope) for m in layers]
    tables = _rope_tables(causal, steps)
    kinds = list(tables)
    layer_kernels = tuple(
        LayerKernels(
            name=match.name,
            step=step,
            prefill=layer_prefill(match.operands, match.parts, match.layer_layout),
            rope_table=kinds.index((kind, step.rope_order)),
            found={shape: _kernels_by_role(match, shape, found) for shape in usable},
        )
        for match, step, kind in zip(layers, steps, causal.rope_kinds, strict=True)
    )
    no_prefill = (why_no_prefill(match.parts, match.layer_layout) for match in layers)
    return ModelKernels(
        shapes=tuple(usable),
        layers=layer_kernels,
        heads={shape.rows: _kernel(causal.head, shape, found) for shape in usable},
        head_operands=OperandTable(causal.model, [causal.head]),
        vocab=dict(causal.head.block.sizes)["n"][0],
        embedding=causal.embedding,
        embedding_scale=causal.embedding_scale(causal.embedding.dtype),
        rotary=causal.rotary,
        rope=length_rope(getattr(causal.backbone, "config", None)),
        ropes=tuple((kind, step) for (kind, _), step in tables.items()),
        no_prefill=next((reason for reason in no_prefill if reason), ""),
        watched=tuple(
            WatchedNumber(owner, name, comparable(value))
            for owner, name, value in _watched_numbers(causal, layers)
        ),
    )


def with_kernels(
    kernels: ModelKernels,
    causal: CausalMatch,
    matches: Sequence[Match],
    found: BlockKernels,
) -> ModelKernels | Rejected:
    """Return the kernels of a model with others for the same steps.

    Args:
        kernels: The present kernels. Those of prompts stay.
        causal: The causal LM.
        matches: The matched modules of the model.
        found: The kernels of all parts, the new ones included.
    """
    by_name = {match.name: match for match in matches}
    layers = [by_name[layer.name] for layer in kernels.layers]
    for shape in kernels.shapes:
        if reason := _missing_kernel(causal, layers, shape, found):
            return Rejected(f"{shape}: {reason}")
    return replace(
        kernels,
        layers=tuple(
            replace(layer, found={s: _kernels_by_role(match, s, found) for s in kernels.shapes})
            for layer, match in zip(kernels.layers, layers, strict=True)
        ),
        heads={shape.rows: _kernel(causal.head, shape, found) for shape in kernels.shapes},
        _obstacles={},
    )


def _missing_kernel(
    causal: CausalMatch, layers: Sequence[Match], shape: StepShape, found: BlockKernels
) -> str:
    """Return which part has no kernel for steps of a shape and why, or ""."""
    parts = [part for match in layers for part in match.parts]
    for part in (*parts, causal.head):
        kernel = kernel_at(part, shape, found)
        # Attention over our cache has no library path.
        needs_kernel = part.block.pattern.over_cache
        if isinstance(kernel, Rejected) or (needs_kernel and not kernel.runs_kernel):
            return f"{part.pattern}: {kernel.reason}"
    return ""


def _rope_tables(
    causal: CausalMatch, steps: Sequence[LayerStep]
) -> dict[tuple[str, str], LayerStep]:
    """Return a layer's step for each RoPE table: each (kind of RoPE, order of cos and sin)."""
    tables: dict[tuple[str, str], LayerStep] = {}
    for kind, step in zip(causal.rope_kinds, steps, strict=True):
        tables.setdefault((kind, step.rope_order), step)
    return tables


def kernel_at(part: Part, shape: StepShape, found: BlockKernels) -> Resolved | Rejected:
    """Return the kernel of a part in steps of a shape, or why it has none."""
    at = block_at(part.block, shape)
    return at if isinstance(at, Rejected) else found[at]


def _kernel(part: Part, shape: StepShape, found: BlockKernels) -> Resolved:
    """Return the kernel of a part that has one."""
    kernel = kernel_at(part, shape, found)
    assert not isinstance(kernel, Rejected), "shapes with a missing kernel are not used"
    return kernel


def _kernels_by_role(match: Match, shape: StepShape, found: BlockKernels) -> dict[str, Resolved]:
    """Return a layer's kernels, with those for long caches if there are any."""
    kernels = {part.role: _kernel(part, shape, found) for part in match.parts}
    attention = next((part for part in match.parts if part.role == "attention"), None)
    at = None if attention is None else block_at(attention.block, shape)
    if at is not None and not isinstance(at, Rejected):
        block, rows = at
        long = found.get((for_long_caches(block), rows))
        if long is not None and not isinstance(long, Rejected) and long.runs_kernel:
            kernels[LONG_CACHES_ROLE] = long
    return kernels


# -- numbers that kernels were made for ------------------------------------------------------------

#: Where a number is kept: a dictionary of attributes or buffers, its name there, and its value.
_Number = tuple[Mapping[str, Any], str, Any]


def _watched_numbers(causal: CausalMatch, layers: Sequence[Match]) -> Iterator[_Number]:
    """Yield the numbers of a model that its kernels were made for."""
    backbone: Any = causal.backbone._modules
    layout = causal.layout
    for match in layers:
        yield from _layer_numbers(match)
    yield from _floats_of(backbone[layout.norm])
    yield from _floats_of(causal.rotary)
    yield backbone[layout.embedding].__dict__, "max_norm", None
    yield from causal.embedding_factors
    config = getattr(causal.backbone, "config", None)
    yield from _named(getattr(config, "__dict__", {}), OF_LAYERS)
    yield from _named(causal.model.config.__dict__, (LOGITS_DIVISOR, LOGITS_SOFTCAP))
    yield from _named(causal.model.__dict__, (LOGITS_MULTIPLIER,))


def _layer_numbers(match: Match) -> Iterator[_Number]:
    yield from _named(match.module.__dict__, (*MULTIPLIERS, *SWITCHES))
    attention: Any = match.module._modules[match.layer_layout.attention]
    yield from _named(attention.__dict__, SOFTCAPS)
    if hasattr(attention, "config"):
        for name in CLIPS:
            yield attention.config.__dict__, name, None
    if softcap_of(attention) is not None:
        # Another attention backend may treat the softcap in another way.
        yield from _named(attention.config.__dict__, ("_attn_implementation_internal",))
    for path in dict.fromkeys(path for part in match.parts for path in part.bypassed):
        yield from _floats_of(submodule(match.module, path))


def _floats_of(module: Any) -> Iterator[_Number]:
    state = module.__dict__
    return ((state, name, value) for name, value in state.items() if type(value) is float)


def _named(state: Mapping[str, Any], names: Sequence[str]) -> Iterator[_Number]:
    return ((state, name, state[name]) for name in names if name in state)
