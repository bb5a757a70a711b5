"""A whole step of decoding by kernels: every layer of a model with all of its parts, and the model around its layers.

What is proven here for one token of each sequence is what `decode/chain.py` captures: embedding, layers, last norm and head.
"""
from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import skip_init

from mirage_hf.errors import Rejected
from mirage_hf.match import plain
from mirage_hf.match.compose import (
    Composition,
    Kernel,
    Part,
    added,
    executor,
    first_half,
    multiplier,
    norm_weights,
    normed,
    own_mlp,
    stand_in,
)
from mirage_hf.match.pattern import Block, CausalLayout, LayerLayout, MlpLayout
from mirage_hf.patterns import RMS_NORM_LINEAR, causal_lm
from mirage_hf.patterns.prompt import PROMPT_ACTIVATION, PROMPT_ADDED, PROMPT_GATE, PROMPT_NORM, PROMPT_ROTATION

ROLES = ("qkv", "attention", "out")
"""The parts of a layer whose kernels make up its step, beside the halves of its MLP. One of another kind, as a mixture of experts, runs
its own forward."""


@dataclass(frozen=True)
class Rope:
    """The RoPE that layers are given: how many elements of a head it turns, the dtype of its cos and sin, and how these hold the number of
    each pair of elements (`in_order`). They may come as one complex tensor."""

    width: int
    dtype: torch.dtype
    order: str = "halves"
    is_complex: bool = False

    def of_pairs(self, x: Tensor) -> Tensor:
        """cos or sin (…, as given) to one number for each pair (…, width / 2)."""
        if self.order == "once":
            return x
        return x[..., ::2] if self.order == "pairs" else x[..., :x.shape[-1] // 2]


NO_ROPE = Rope(0, torch.float32)
"""What modules are given that are no layers."""


def in_order(x: Tensor, order: str) -> Tensor:
    """Numbers of pairs (…, n) as layers or kernels read them: once, or twice (…, 2 n), in order of halves (a b a b) or pairs (a a b b)."""
    return x if order == "once" else torch.cat([x, x], -1) if order == "halves" else x.repeat_interleave(2, -1)


@dataclass(frozen=True)
class At:
    """What a layer's step reads besides x: RoPE's cos and sin (b, d) as `LayerStep.tables` makes them, a layer's keys and values (b, heads,
    slots, d), the first slot that a row sees, the slot that its new key goes to, and the one after it (b,), int32."""

    cos: Tensor
    sin: Tensor
    keys: Tensor
    values: Tensor
    lo: Tensor
    slot: Tensor
    end: Tensor


class LayerStep(Composition):
    """A decoder layer for one token of each sequence by kernels, but for an MLP that has none. Errors: KeyError where a role has none."""

    def __init__(self, layer: nn.Module, parts: Sequence[Part], layout: LayerLayout, rope: Rope):
        super().__init__(layer, parts)
        self.layout, self.multiplier, self.rope = layout, multiplier(layer), rope
        self.sizes, self.first = dict(self.parts["attention"].block.sizes), first_half(self.parts)

    def __call__(self, kernels: Mapping[str, Kernel], x: Tensor, at: At) -> Tensor:  # type: ignore[override]
        """x (b, width) to the layer's output (b, width); the new keys and values are appended."""
        out = self._attended(kernels, self._run(kernels, "qkv", x), at)
        h = self._run(kernels, "out", out.view(x.shape[0], -1), x)
        names = self.layout
        x = x if names.parallel else h
        if self.first:
            return self._run(kernels, "down", self._run(kernels, self.first, x), h)
        y = own_mlp(self.children, names.mlp, normed(self.children, names.mlp_norm, x[:, None])).reshape(h.shape)
        return added(self.children, names.mlp_after, self.multiplier, h, y)

    @property
    def taking(self) -> str:
        """The order in which kernels read RoPE's cos and sin: layers that are given the same ones and take them alike share a table."""
        return self.sizes["rope"] or "halves"

    def tables(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """RoPE's cos and sin as the model gives them, as the kernels of attention read them."""
        cos, sin = (in_order(self.rope.of_pairs(x), self.taking).contiguous() for x in (cos, sin))
        return cos, sin

    def _attended(self, kernels: Mapping[str, Kernel], packed: Tensor, at: At) -> Tensor:
        s, kv_heads, d = self.sizes, self.sizes["kv_heads"], self.sizes["head_dim"]
        q, k, v = (y.unflatten(1, (kv_heads, -1)) for y in heads_of(packed, s))
        every, given = (packed.shape[0], 1, 1, -1), self.parameters["attention"]
        norms, sinks = (given[:-1], given[-1:]) if s["sinks"] else (given, [])
        weights = [*(p[None] if s["norm"] == "rms" else p.view(1, kv_heads, -1, d) for p in norms),
                   *(p.view(1, kv_heads, -1, 1) for p in sinks)]
        tables = [at.cos.view(every), at.sin.view(every)] if s["rope"] else []
        return kernels["attention"]([q, k, v, *tables, at.keys, at.values, at.lo.view(every), at.slot.view(every), *weights])[0]


def heads_of(packed: Tensor, sizes: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """q (…, heads, d), k and v (…, kv_heads, d) in packed projections, without a copy; `sizes`: of attention."""
    kv_heads, group, d = (int(sizes[n]) for n in ("kv_heads", "group", "head_dim"))
    if sizes["packing"] == "heads":
        q, k, v = packed.unflatten(-1, (kv_heads, 3, d)).unbind(-2)
    else:
        q, k, v = (y.unflatten(-1, (-1, d)) for y in packed.split([n * kv_heads * d for n in (group, 1, 1)], -1))
    return q, k, v


class LatentStep(LayerStep):
    """The same for attention whose cache holds latents as keys, and keys turned by RoPE as values."""

    @property
    def taking(self) -> str:
        return "once" if self.sizes["ropes"] == "parted pairs" else str(self.sizes["ropes"])

    def _attended(self, kernels: Mapping[str, Kernel], packed: Tensor, at: At) -> Tensor:
        s, batch = self.sizes, packed.shape[0]
        heads, latent, nope, rope, value = (int(s[n]) for n in ("heads", "latent", "nope", "rope", "value"))
        first, new, k_rope = packed.split([packed.shape[1] - latent - rope, latent, rope], -1)
        if "query" in self.parts:
            norm, expand = self.parameters["query"]
            first = kernels["query"]([first, norm[None], expand.t()])[0]
        q, q_rope = first.view(batch, heads, 1, nope + rope).split([nope, rope], -1)
        parted = s["ropes"] == "parted pairs"
        every = (batch, 1, 1, -1)

        def pairs(x: Tensor) -> list[Tensor]:
            return [x[..., ::2], x[..., 1::2]] if parted else [x]

        keys = list(at.values.chunk(2, -1)) if parted else [at.values]
        turned = kernels["append"]([*pairs(q_rope), *pairs(k_rope.view(every)), new.view(every), self.parameters["append"][0][None],
                                    at.cos.view(every), at.sin.view(every), at.keys, *keys, at.slot.view(every)])[:len(keys)]
        weight = self.parameters["attention"][0].view(1, heads, nope + value, latent).transpose(2, 3)
        return kernels["attention"]([q, *turned, at.keys, *keys, at.lo.view(every), at.end.view(every),
                                     weight[..., :nope], weight[..., nope:]])[0]


def layer_step(layer: nn.Module, parts: Sequence[Part], layout: LayerLayout, rope: Rope) -> LayerStep:
    """The step of a layer that has all of its parts."""
    return (LayerStep if layout.latent is None else LatentStep)(layer, parts, layout, rope)


def cos_and_sin(given: Any) -> tuple[Tensor, Tensor]:
    """RoPE's cos and sin, whether a model gives them or one complex tensor."""
    return (given.real, given.imag) if isinstance(given, Tensor) else (given[0], given[1])


@dataclass(frozen=True)
class Prompt:
    """What a layer reads of prompts besides x: RoPE's cos and sin (tokens, d), a layer's keys and values (b, heads, slots, d), and zeros
    (b,), int32: the slot that keys go to from."""

    cos: Tensor
    sin: Tensor
    keys: Tensor
    values: Tensor
    slot: Tensor


class LayerPrompt(Composition):
    """A decoder layer for whole prompts without padding: products and attention by the library, what lies between them by kernels."""

    def __init__(self, layer: nn.Module, parts: Sequence[Part], layout: LayerLayout):
        super().__init__(layer, parts)
        self.sizes = {role: dict(p.block.sizes) for role, p in self.parts.items()}
        self.first, self.parallel = first_half(self.parts), layout.parallel

    def blocks(self, batch: int, tokens: int, slots: int) -> dict[str, tuple[Block, int]]:
        """What is done by kernels, by name: a block and its number of rows."""
        attention, first = self.sizes["attention"], self.sizes[self.first]
        shared = ("kv_heads", "group", "head_dim", "eps", "dtype", "norm", "offset", "rope", "rotary", "rope_dtype", "packing")
        taken = {name: attention[name] for name in shared}
        rows, kind = batch * tokens, ("eps", "offset", "centred", "norm_bias", "dtype")
        gate = PROMPT_GATE if self.first == "gated" else PROMPT_ACTIVATION
        found = {"gate": (gate.block(**{name: first[name] for name in ("n", "activation", "dtype")}), rows)}
        if attention["norm"] or attention["rope"]:
            found["rotation"] = PROMPT_ROTATION.block(**taken, tokens=tokens, slots=slots), batch
        for name, role in (("norm", "qkv"), ("mlp_norm", self.first)):
            s = self.sizes[role]
            if s["norm"]:
                found[name] = PROMPT_NORM.block(**{n: s[n] for n in ("k", *kind)}), rows
        for role in ("out", "down"):
            s = self.sizes[role]
            if s["norm"]:
                found[role] = PROMPT_ADDED.block(k=s["n"], **{n: s[n] for n in ("scale", *kind)}), rows
        return found

    def __call__(self, kernels: Mapping[str, Kernel], x: Tensor, at: Prompt) -> Tensor:  # type: ignore[override]
        """x (b · tokens, width), whose memory may be written over, to the layer's output; keys and values go to the first slots."""
        a = self.sizes["attention"]
        batch, tokens, d = at.keys.shape[0], at.cos.shape[0], a["head_dim"]
        q, k, v = heads_of(self._products(kernels.get("norm"), "qkv", x).view(batch, tokens, -1), a)
        packed = self._products(kernels.get("mlp_norm"), self.first, x) if self.parallel else None
        norms = [p[None] if a["norm"] == "rms" else p.view(1, 1, -1, d) for p in self.parameters["attention"]]
        if a["norm"] not in ("", "rms"):
            norms[1] = norms[1].transpose(1, 2)
        tables = [at.cos[None, None], at.sin[None, None]] if a["rope"] else []
        if "rotation" in kernels:
            q = kernels["rotation"]([q, k.transpose(1, 2), *tables, at.keys, at.slot.view(batch, 1, 1, 1), *norms])[0]
        else:
            at.keys[:, :, :tokens].copy_(k.transpose(1, 2))
        at.values[:, :, :tokens].copy_(v.transpose(1, 2))
        y = F.scaled_dot_product_attention(q.transpose(1, 2), at.keys[:, :, :tokens], at.values[:, :, :tokens], is_causal=True,
                                           scale=a["scale"], enable_gqa=a["group"] > 1)
        x = self._added(kernels.get("out"), "out", y.transpose(1, 2).reshape(batch * tokens, -1), x)
        packed = self._products(kernels.get("mlp_norm"), self.first, x) if packed is None else packed
        return self._added(kernels.get("down"), "down", kernels["gate"](packed.split(self.sizes[self.first]["n"], -1))[0], x)

    def _products(self, norm: Kernel | None, role: str, x: Tensor) -> Tensor:
        """x, normalised where there is a norm, times the part's weights, side by side."""
        given: Sequence[Tensor] = self.parameters[role]
        if norm is not None:
            of_norm = norm_weights(self.sizes[role])
            x, given = norm([x, *(p[None] for p in given[:of_norm])])[0], given[of_norm:]
        weights, biases = [p for p in given if p.dim() == 2], [p for p in given if p.dim() == 1]
        packed = x.new_empty(x.shape[0], sum(w.shape[0] for w in weights))
        for y, w, b in zip(packed.split([w.shape[0] for w in weights], -1), weights, biases or [None] * len(weights), strict=True):
            torch.mm(x, w.t(), out=y) if b is None else torch.addmm(b, x, w.t(), out=y)
        return packed

    def _added(self, added: Kernel | None, role: str, y: Tensor, residual: Tensor) -> Tensor:
        """The residual and the part's product with y: in the residual's memory, but where a norm comes between them."""
        (weight, *rest), s = self.parameters[role], self.sizes[role]
        biases, of_norm = (rest[:1], rest[1:]) if s["bias"] else ([], rest)
        if added is not None:
            product = torch.addmm(*biases, y, weight.t()) if biases else torch.mm(y, weight.t())
            return added([product, *(p[None] for p in of_norm), residual])[0]
        residual.addmm_(y, weight.t(), alpha=s["scale"])
        return residual.add_(*biases, alpha=s["scale"]) if biases else residual


def no_prompt(parts: Sequence[Part], layout: LayerLayout) -> str:
    """Why a layer has no prompts by kernels, "" where it has."""
    roles = {p.role: dict(p.block.sizes) for p in parts}
    if layout.latent is not None:
        return "attention is over latents"
    if not first_half(roles):
        return "a layer's MLP runs its own forward"
    if roles["attention"]["sinks"]:
        return "the library's attention has no sinks"
    return "the library's attention has no softcap" if roles["attention"]["softcap"] is not None else ""


def layer_prompt(layer: nn.Module, parts: Sequence[Part], layout: LayerLayout) -> LayerPrompt | None:
    """What runs prompts through a layer by kernels, None where that is the layer's own forward."""
    return None if no_prompt(parts, layout) else LayerPrompt(layer, parts, layout)


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
        places = ((embedding._buffers, causal_lm.EMBEDDING_BUFFER),  # type: ignore[union-attr]
                  (backbone.__dict__, causal_lm.EMBEDDING_MULTIPLIER))
        return tuple((inner, name, inner[name]) for inner, name in places if inner.get(name) is not None)

    def embedding_scale(self, dtype: torch.dtype) -> float:
        """What embeddings of a dtype are multiplied by."""
        return math.prod(float(v.to(dtype)) if isinstance(v, Tensor) else float(v) for *_, v in self.embedding_scales)

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
    return cos_and_sin(rotary(x, positions, kind) if kind else rotary(x, positions))


def rotary_kinds(rotary: Any, config: Any, layers: int) -> tuple[str, ...]:
    """The kind of RoPE that each layer has, "" where a rotary module knows one only."""
    kinds = tuple(getattr(config, "layer_types", None) or ())
    takes_kind = "layer_type" in inspect.signature(type(rotary).forward).parameters
    return kinds[:layers] if takes_kind and len(kinds) >= layers else ("",) * layers


def has_all(parts: Sequence[Part], layout: LayerLayout, mlp: MlpLayout | None, but: str = "") -> Rejected | None:
    """Why a layer with these parts has no step of its own, or None; the role `but` is not asked for. mlp: None where it runs its own
    forward."""
    roles = {p.role: p for p in parts}
    wanted = (*ROLES, *((mlp.first, "down") if mlp is not None else ()))
    missing = [r for r in sorted(wanted, key=lambda r: r == "attention") if r not in roles and r != but]
    if missing:
        return Rejected(f"the layer's {missing[0]} is not matched")
    if mlp is not None and layout.mlp_norm and not dict(roles[mlp.first].block.sizes)["norm"]:
        return Rejected("the norm before the MLP is neither RMSNorm nor LayerNorm")
    return None


def match_causal(model: nn.Module | None, layers: Mapping[int, Any], norm_of: Callable[[str, nn.Module], dict[str, Any] | Rejected],
                 probes: Any) -> CausalMatch | Rejected:
    """Match a causal LM around its layers' matches (by id). `norm_of`: sizes of a norm, or why it is none."""
    row = next((r for r in causal_lm.LAYOUTS if model is not None and _has(model, r)), None)
    if model is None or row is None:
        return Rejected("it is no causal language model of a known layout")
    if no := plain.first_refusal((model, row.backbone, plain.CONTAINER)):
        return no
    backbone: Any = model._modules[row.backbone]
    no = plain.first_refusal((backbone, row.embedding, plain.EMBEDDING), (backbone, row.norm, plain.NORM), (model, row.head, plain.LINEAR),
                             (backbone, row.rotary, plain.CONTAINER))
    normed = no or norm_of(row.norm, backbone._modules[row.norm])
    if isinstance(normed, Rejected):
        return normed
    extra = [n for parent, known in ((model, (row.backbone, row.head)), (backbone, (row.embedding, row.layers, row.norm, row.rotary)))
             for n, m in parent._modules.items() if m is not None and n not in known and not isinstance(m, plain.IDLE)]
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
    if len(ropes) > 1 or len(given) > 1:
        return Rejected("its layers do not all read RoPE's numbers in the same way")
    norm, head, embedding = backbone._modules[row.norm], model._modules[row.head], backbone._modules[row.embedding]
    if no := plain.same_weights([norm, head, embedding], head.weight.dtype, head.weight.device):
        return no
    block = RMS_NORM_LINEAR.block(k=head.in_features, n=(head.out_features,), bias=head.bias is not None, **normed,
                                  **logits_sizes(model), dtype=head.weight.dtype)
    path = f"{row.backbone}.{row.norm}"
    weights = [*((path, n) for n in ("weight", "bias")[:norm_weights(normed)]),
               *((row.head, n) for n in ("weight", "bias")[:1 + (head.bias is not None)])]
    part = Part("head", block, tuple(weights), (path, row.head))
    rotary = backbone._modules[row.rotary]
    causal = CausalMatch(model, row, tuple(names), part, rotary_kinds(rotary, getattr(backbone, "config", None), len(names)),
                         given.pop())
    return probes.causal(causal) or causal


def logits_sizes(model: Any) -> dict[str, Any]:
    """What a model and its config say is done with logits, as sizes of `rms_norm_linear`."""
    divisor, softcap = (getattr(model.config, n, None) for n in (causal_lm.LOGITS_DIVISOR, causal_lm.LOGITS_SOFTCAP))
    factor = model.__dict__.get(causal_lm.LOGITS_MULTIPLIER)
    scale = (1.0 if factor is None else float(factor)) / (1.0 if divisor is None else float(divisor))
    return {"scale": scale, "softcap": None if softcap is None else float(softcap)}


def _has(model: nn.Module, row: CausalLayout) -> bool:
    backbone = model._modules.get(row.backbone)
    inside = (row.embedding, row.layers, row.norm, row.rotary)
    return backbone is not None and model._modules.get(row.head) is not None and all(backbone._modules.get(n) is not None for n in inside)


@dataclass(frozen=True)
class Hollow:
    """A model whose layers only say what they are given, with a small random embedding and head.

    seen: for each layer called, what it was given and what it gave: (x, cos, sin, y). weights: those of the last norm and the head.
    """

    model: Any
    embedding: Tensor
    weights: list[Tensor]
    seen: list[tuple[Tensor, Tensor, Tensor, Tensor]]


def hollow(found: CausalMatch, vocab: int, twin: Callable[[nn.Module], Any], generator: torch.Generator) -> Hollow:
    """Empty the layers of a copy of a model that shares everything else with it."""
    row, model, backbone = found.layout, found.model, found.backbone
    seen: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def forward(hidden_states: Tensor, *args: Any, position_embeddings: Any, **kwargs: Any) -> Tensor:
        y = 1.25 * hidden_states + 0.5
        seen.append((hidden_states, *cos_and_sin(position_embeddings), y))
        return y

    embedding, head = backbone._modules[row.embedding], model._modules[row.head]
    # without initialising: torch's global random state is the user's
    small_head = skip_init(nn.Linear, head.in_features, vocab, bias=head.bias is not None, dtype=torch.float32)  # type: ignore[union-attr]
    for p in small_head.parameters():
        p.requires_grad_(False).copy_(torch.randn(p.shape, generator=generator))
    weight: Tensor = embedding.weight  # type: ignore[union-attr, assignment]
    small = nn.Parameter(torch.randn(vocab, weight.shape[1], generator=generator).to(weight.device, torch.float32), requires_grad=False)
    small_embedding = stand_in(embedding, {"_parameters": {"weight": small}, "padding_idx": None})  # type: ignore[arg-type]
    norm = twin(backbone._modules[row.norm])  # type: ignore[arg-type]
    hollowed = emptied(found, forward, {row.embedding: small_embedding, row.norm: norm}, {row.head: small_head.to(weight.device)})
    return Hollow(hollowed, small, [*norm.parameters(), *small_head.parameters()], seen)


def emptied(found: CausalMatch, forward: Callable[..., Tensor], inner: Mapping[str, Any], outer: Mapping[str, Any]) -> Any:
    """A stand-in of a model with `forward` in place of that of its layers; `inner` and `outer` replace children of its backbone and its
    own."""
    row, model, backbone = found.layout, found.model, found.backbone
    layers: Any = stand_in(backbone._modules[row.layers], {})  # type: ignore[arg-type]
    layers.__dict__["_modules"] = {n: stand_in(layer, {"forward": forward}) for n, layer in layers._modules.items()}
    inside = stand_in(backbone, {"_modules": {**backbone._modules, row.layers: layers, **inner}})
    return stand_in(model, {"_modules": {**model._modules, row.backbone: inside, **outer}})


def head_of(part: Part, weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """The logits of hidden states (rows, k) by the head's program, op by op."""
    sizes = {**dict(part.block.sizes), "n": tuple(w.shape[0] for w in weights if w.dim() == 2)}
    small = Part(part.role, part.block.pattern.block(**sizes), part.weights, part.bypassed)
    views = [w.t() if w.dim() == 2 else w[None] for w in weights]
    return executor([small], x.shape[0], x.dtype)["head"]([x, *views])[0]
