"""The model around its layers, whose whole step is by kernels: embedding, kinds of RoPE, last norm and head; and hollow models to probe it.

What is proven of it for one token of each sequence is what `decode/chain.py` captures.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from mirage_hf.errors import Rejected
from mirage_hf.layers.compose import Part, num_norm_weights, stand_in, torch_kernels
from mirage_hf.layers.step import ROLES, Rope, cos_and_sin
from mirage_hf.match import plain
from mirage_hf.patterns import RMS_NORM_LINEAR, causal_lm
from mirage_hf.patterns.schema import CausalLayout, LayerLayout, MlpLayout


@dataclass(frozen=True)
class CausalMatch:
    """A causal language model whose layers all have every part: `layers` names them in order, `head` is its last norm and head, `kinds`
    are the kinds of RoPE that the layers are given, "" where there is one only; `rope`: what all kinds have in common."""

    model: nn.Module
    layout: CausalLayout
    layers: tuple[str, ...]
    head: Part
    kinds: tuple[str, ...]
    rope: Rope

    @property
    def backbone(self) -> nn.Module:
        return self.model._modules[self.layout.backbone]  # type: ignore[return-value]

    @property
    def embedding(self) -> Tensor:
        return self.backbone._modules[self.layout.embedding].weight  # type: ignore[union-attr, return-value]

    @property
    def rotary(self) -> Any:
        return self.backbone._modules[self.layout.rotary]

    @property
    def embedding_scales(self) -> tuple[tuple[dict[str, Any], str, Any], ...]:
        """What embeddings are multiplied by, where modules keep it: a dictionary, a name, a value."""
        backbone, embedding = self.backbone, self.backbone._modules[self.layout.embedding]
        places = (
            (embedding._buffers, causal_lm.EMBEDDING_BUFFER),  # type: ignore[union-attr]
            (backbone.__dict__, causal_lm.EMBEDDING_MULTIPLIER),
        )
        return tuple(
            (inner, name, inner[name]) for inner, name in places if inner.get(name) is not None
        )

    def embedding_scale(self, dtype: torch.dtype) -> float:
        """What embeddings of a dtype are multiplied by."""
        return math.prod(
            float(v.to(dtype)) if isinstance(v, Tensor) else float(v)
            for *_, v in self.embedding_scales
        )

    def own_head(self, x: Tensor, convert: Callable[[nn.Module], Any] | None = None) -> Tensor:
        """The logits of hidden states (rows, width) by the model's own last norm and head and what it does with their result; by what
        `convert` makes of the two modules where it is given."""
        norm, head = self.backbone._modules[self.layout.norm], self.model._modules[self.layout.head]
        own = {} if convert is None else {self.layout.norm: convert(norm)}  # type: ignore[arg-type]
        outer = {} if convert is None else {self.layout.head: convert(head)}  # type: ignore[arg-type]
        model = emptied(self, lambda *args, **kwargs: x[:, None], own, outer)
        ids = torch.zeros(x.shape[0], 1, dtype=torch.long, device=x.device)
        return model.forward(input_ids=ids, use_cache=False).logits[:, 0]  # type: ignore[no-any-return]


def rotary_rows(rotary: Any, x: Tensor, positions: Tensor, kind: str = "") -> tuple[Tensor, Tensor]:
    """RoPE's cos and sin (…, positions, width) by a model's own module, for x of a dtype (some give float32 whatever it is)."""
    rotary = _apart(rotary)
    return cos_and_sin(rotary(x, positions, kind) if kind else rotary(x, positions))


def _apart(rotary: nn.Module) -> Any:
    """A RoPE module whose state is its own: some (dynamic, longrope) change theirs by the positions that they see, and the model's is to
    stay as it was."""
    return stand_in(rotary, {"_buffers": dict(rotary._buffers)})


@dataclass(frozen=True)
class LengthRope:
    """RoPE that depends on the length of the whole text, which its module reads on the host in every forward."""

    kind: str
    reach: int
    """Tokens of a text up to which its numbers are those of every shorter one; 0 where there is no such length."""

    @property
    def reason(self) -> str:
        """Why a forward with it cannot be captured."""
        return f"RoPE of type {self.kind} reads the length on the host"


def length_rope(config: Any) -> LengthRope | None:
    """The RoPE of a model's config if it depends on the length of the text, None where positions alone decide."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    found = None
    for part in (rope, *(v for v in rope.values() if isinstance(v, dict))):
        kind = part.get("rope_type", part.get("type", "default"))
        if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
            # what dynamic RoPE gives to a short text depends on the longest one before, too
            reach = part.get("original_max_position_embeddings") if kind == "longrope" else None
            found = LengthRope(kind, min(reach or 0, found.reach if found else reach or 0))
    return found


def rotary_kinds(rotary: Any, config: Any, layers: int) -> tuple[str, ...]:
    """The kind of RoPE that each layer has, "" where a rotary module knows one only."""
    kinds = tuple(getattr(config, "layer_types", None) or ())
    takes_kind = "layer_type" in inspect.signature(type(rotary).forward).parameters
    return kinds[:layers] if takes_kind and len(kinds) >= layers else ("",) * layers


def has_all(
    parts: Sequence[Part], layout: LayerLayout, mlp: MlpLayout | None, but: str = ""
) -> Rejected | None:
    """Why a layer with these parts has no step of its own, or None; the role `but` is not asked for. mlp: None where it runs its own
    forward."""
    roles = {p.role: p for p in parts}
    wanted = (*ROLES, *((mlp.first, "down") if mlp is not None else ()))
    missing = [
        r for r in sorted(wanted, key=lambda r: r == "attention") if r not in roles and r != but
    ]
    if missing:
        return Rejected(f"the layer's {missing[0]} is not matched")
    if mlp is not None and layout.mlp_norm and not dict(roles[mlp.first].block.sizes)["norm"]:
        return Rejected("the norm before the MLP is neither RMSNorm nor LayerNorm")
    return None


def match_causal(
    model: nn.Module | None,
    layers: Mapping[int, Any],
    norm_of: Callable[[str, nn.Module], dict[str, Any] | Rejected],
    probes: Any,
) -> CausalMatch | Rejected:
    """Match a causal LM around its layers' matches (by id). `norm_of`: sizes of a norm, or why it is none."""
    row = next((r for r in causal_lm.LAYOUTS if model is not None and _has(model, r)), None)
    if model is None or row is None:
        return Rejected("it is no causal language model of a known layout")
    if no := plain.first_refusal((model, row.backbone, plain.CONTAINER)):
        return no
    backbone: Any = model._modules[row.backbone]
    no = plain.first_refusal(
        (backbone, row.embedding, plain.EMBEDDING),
        (backbone, row.norm, plain.NORM),
        (model, row.head, plain.LINEAR),
        (backbone, row.rotary, plain.CONTAINER),
    )
    normed = no or norm_of(row.norm, backbone._modules[row.norm])
    if isinstance(normed, Rejected):
        return normed
    extra = [
        n
        for parent, known in (
            (model, (row.backbone, row.head)),
            (backbone, (row.embedding, row.layers, row.norm, row.rotary)),
        )
        for n, m in parent._modules.items()
        if m is not None and n not in known and not isinstance(m, plain.IDLE)
    ]
    if extra:
        return Rejected(f"has {', '.join(extra)} too")
    names, ropes, given = [], set(), set()
    for n, layer in backbone._modules[row.layers]._modules.items():
        if id(layer) not in layers:
            return Rejected(f"{row.layers}.{n} is not matched")
        found = layers[id(layer)]
        if no := has_all(found.parts, *found.layouts):
            return Rejected(f"{found.name}: {no.reason}")
        names.append(found.name)
        ropes |= {dict(p.block.sizes).get("ropes") for p in found.parts if p.role == "attention"}
        given.add(found.rope)
    if not names:
        return Rejected("it has no layers")
    if no := _out_of_place(backbone, list(backbone._modules[row.layers]._modules.values())):
        return no
    if len(ropes) > 1 or len(given) > 1:
        return Rejected("its layers do not all read RoPE's numbers in the same way")
    norm, head, embedding = (
        backbone._modules[row.norm],
        model._modules[row.head],
        backbone._modules[row.embedding],
    )
    if no := plain.same_weights([norm, head, embedding], head.weight.dtype, head.weight.device):
        return no
    block = RMS_NORM_LINEAR.block(
        k=head.in_features,
        n=(head.out_features,),
        bias=head.bias is not None,
        **normed,
        **logits_sizes(model),
        dtype=head.weight.dtype,
    )
    path = f"{row.backbone}.{row.norm}"
    weights = [
        *((path, n) for n in ("weight", "bias")[: num_norm_weights(normed)]),
        *((row.head, n) for n in ("weight", "bias")[: 1 + (head.bias is not None)]),
    ]
    part = Part("head", block, tuple(weights), (path, row.head))
    rotary = backbone._modules[row.rotary]
    causal = CausalMatch(
        model,
        row,
        tuple(names),
        part,
        rotary_kinds(rotary, getattr(backbone, "config", None), len(names)),
        given.pop(),
    )
    return probes.causal(causal) or causal


def _out_of_place(backbone: nn.Module, layers: Sequence[nn.Module]) -> Rejected | None:
    """Why a layer's place among the layers is not its place in the cache, or None: some may have been taken out or moved."""
    count = getattr(getattr(backbone, "config", None), "num_hidden_layers", len(layers))
    if count != len(layers):
        return Rejected(f"it has {len(layers)} layers, its config {count}")
    for n, layer in enumerate(layers):
        for module in layer.modules():
            if (index := module.__dict__.get("layer_idx", n)) != n:
                return Rejected(f"its layer {n} has the layer_idx {index}")
    return None


def logits_sizes(model: Any) -> dict[str, Any]:
    """What a model and its config say is done with logits, as sizes of `rms_norm_linear`."""
    divisor, softcap = (
        getattr(model.config, n, None) for n in (causal_lm.LOGITS_DIVISOR, causal_lm.LOGITS_SOFTCAP)
    )
    factor = model.__dict__.get(causal_lm.LOGITS_MULTIPLIER)
    scale = (1.0 if factor is None else float(factor)) / (
        1.0 if divisor is None else float(divisor)
    )
    return {"scale": scale, "softcap": None if softcap is None else float(softcap)}


def _has(model: nn.Module, row: CausalLayout) -> bool:
    backbone = model._modules.get(row.backbone)
    inside = (row.embedding, row.layers, row.norm, row.rotary)
    return (
        backbone is not None
        and model._modules.get(row.head) is not None
        and all(backbone._modules.get(n) is not None for n in inside)
    )


@dataclass(frozen=True)
class Hollow:
    """A model whose layers only say what they are given, with a small random embedding and head.

    seen: for each layer called, what it was given and what it gave: (x, cos, sin, y). weights: those of the last norm and the head.
    """

    model: Any
    embedding: Tensor
    weights: list[Tensor]
    seen: list[tuple[Tensor, Tensor, Tensor, Tensor]]


def hollow(
    found: CausalMatch, vocab: int, twin: Callable[[nn.Module], Any], generator: torch.Generator
) -> Hollow:
    """Empty the layers of a copy of a model that shares everything else with it."""
    row, model, backbone = found.layout, found.model, found.backbone
    seen: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def forward(
        hidden_states: Tensor, *args: Any, position_embeddings: Any, **kwargs: Any
    ) -> Tensor:
        y = 1.25 * hidden_states + 0.5
        seen.append((hidden_states, *cos_and_sin(position_embeddings), y))
        return y

    embedding, head = backbone._modules[row.embedding], model._modules[row.head]
    # without initialising: torch's global random state is the user's
    small_head = skip_init(
        nn.Linear, head.in_features, vocab, bias=head.bias is not None, dtype=torch.float32
    )  # type: ignore[union-attr]
    for p in small_head.parameters():
        p.requires_grad_(False).copy_(torch.randn(p.shape, generator=generator))
    weight: Tensor = embedding.weight  # type: ignore[union-attr, assignment]
    small = nn.Parameter(
        torch.randn(vocab, weight.shape[1], generator=generator).to(weight.device, torch.float32),
        requires_grad=False,
    )
    small_embedding = stand_in(embedding, {"_parameters": {"weight": small}, "padding_idx": None})  # type: ignore[arg-type]
    norm = twin(backbone._modules[row.norm])  # type: ignore[arg-type]
    hollowed = emptied(
        found,
        forward,
        {row.embedding: small_embedding, row.norm: norm},
        {row.head: small_head.to(weight.device)},
    )
    return Hollow(hollowed, small, [*norm.parameters(), *small_head.parameters()], seen)


def emptied(
    found: CausalMatch,
    forward: Callable[..., Tensor],
    inner: Mapping[str, Any],
    outer: Mapping[str, Any],
) -> Any:
    """A stand-in of a model with `forward` in place of that of its layers; `inner` and `outer` replace children of its backbone and its
    own."""
    row, model, backbone = found.layout, found.model, found.backbone
    layers: Any = stand_in(backbone._modules[row.layers], {})  # type: ignore[arg-type]
    layers.__dict__["_modules"] = {
        n: stand_in(layer, {"forward": forward}) for n, layer in layers._modules.items()
    }
    rotary = _apart(backbone._modules[row.rotary])  # type: ignore[arg-type]
    inside = stand_in(
        backbone,
        {"_modules": {**backbone._modules, row.layers: layers, row.rotary: rotary, **inner}},
    )
    return stand_in(model, {"_modules": {**model._modules, row.backbone: inside, **outer}})


def head_of(part: Part, weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """The logits of hidden states (rows, k) by the head's program, op by op."""
    sizes = {**dict(part.block.sizes), "n": tuple(w.shape[0] for w in weights if w.dim() == 2)}
    small = Part(part.role, part.block.pattern.block(**sizes), part.weights, part.bypassed)
    views = [w.t() if w.dim() == 2 else w[None] for w in weights]
    return torch_kernels([small], x.shape[0], x.dtype)["head"]([x, *views])[0]
