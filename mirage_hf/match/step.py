"""A whole step of decoding by kernels: every layer of a model with all of its parts, and the model around its layers.

What is proven here for one token of each sequence is what `decode/chain.py` captures: embedding, layers, last norm and head.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import skip_init

from mirage_hf.errors import Rejected
from mirage_hf.match import plain
from mirage_hf.match.compose import Composition, Kernel, Part, executor, stand_in
from mirage_hf.match.pattern import Block, CausalLayout, LayerLayout, MlpLayout
from mirage_hf.patterns import RMS_NORM_LINEAR, causal_lm
from mirage_hf.patterns.prompt import PROMPT_GATE, PROMPT_NORM, PROMPT_ROTATION

ROLES = ("qkv", "attention", "out")
MLP_ROLES = ("gated", "down")
"""The parts of a layer whose kernels make up its step. An MLP that is no gated MLP, as a mixture of experts, runs its own forward."""


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

    def __init__(self, layer: nn.Module, parts: Sequence[Part], layout: LayerLayout):
        super().__init__(layer, parts)
        self.layout, self.sizes = layout, dict(self.parts["attention"].block.sizes)

    def __call__(self, kernels: Mapping[str, Kernel], x: Tensor, at: At) -> Tensor:  # type: ignore[override]
        """x (b, width) to the layer's output (b, width); the new keys and values are appended."""
        out = self._attended(kernels, self._run(kernels, "qkv", x), at)
        h = self._run(kernels, "out", out.view(x.shape[0], -1), x)
        if "gated" in self.parts:
            return self._run(kernels, "down", self._run(kernels, "gated", h), h)
        mlp, norm = self.children[self.layout.mlp], self.children[self.layout.mlp_norm]
        return h + mlp(norm(h[:, None])).reshape(h.shape)  # type: ignore[no-any-return]

    def tables(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """RoPE's cos and sin (…, d) as the model gives them, as the kernels of attention read them."""
        return cos, sin

    def _attended(self, kernels: Mapping[str, Kernel], packed: Tensor, at: At) -> Tensor:
        batch, (kv_heads, group, d) = packed.shape[0], (int(self.sizes[n]) for n in ("kv_heads", "group", "head_dim"))
        q, k, v = (y.view(batch, kv_heads, -1, d) for y in packed.split([n * kv_heads * d for n in (group, 1, 1)], -1))
        every = (batch, 1, 1, -1)
        norms = [p[None] for p in self.parameters["attention"]]
        return kernels["attention"]([q, k, v, at.cos.view(every), at.sin.view(every), at.keys, at.values, at.lo.view(every),
                                     at.slot.view(every), *norms])[0]


class LatentStep(LayerStep):
    """The same for attention whose cache holds latents as keys, and keys turned by RoPE as values."""

    def tables(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if self.sizes["ropes"] == "halves":
            return cos, sin
        each = [x[..., :self.sizes["rope"] // 2] for x in (cos, sin)]
        if self.sizes["ropes"] == "pairs":
            each = [x.repeat_interleave(2, -1) for x in each]
        return each[0].contiguous(), each[1].contiguous()

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


def layer_step(layer: nn.Module, parts: Sequence[Part], layout: LayerLayout) -> LayerStep:
    """The step of a layer that has all of its parts."""
    return (LayerStep if layout.latent is None else LatentStep)(layer, parts, layout)


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

    def __init__(self, layer: nn.Module, parts: Sequence[Part]):
        super().__init__(layer, parts)
        self.sizes = {role: dict(p.block.sizes) for role, p in self.parts.items()}

    def blocks(self, batch: int, tokens: int, slots: int) -> dict[str, tuple[Block, int]]:
        """What is done by kernels, by name: a block and its number of rows."""
        qkv, attention, gated = (self.sizes[role] for role in ("qkv", "attention", "gated"))
        taken = {name: attention[name] for name in ("kv_heads", "group", "head_dim", "eps", "dtype")} | {"norm": attention["norm"] == "rms"}
        norm, mlp_norm = (PROMPT_NORM.block(**{name: s[name] for name in ("k", "eps", "dtype")}) for s in (qkv, gated))
        gate = PROMPT_GATE.block(**{name: gated[name] for name in ("n", "activation", "dtype")})
        rows = batch * tokens
        return {"norm": (norm, rows), "rotation": (PROMPT_ROTATION.block(**taken, tokens=tokens, slots=slots), batch),
                "mlp_norm": (mlp_norm, rows), "gate": (gate, rows)}

    def __call__(self, kernels: Mapping[str, Kernel], x: Tensor, at: Prompt) -> Tensor:  # type: ignore[override]
        """x (b · tokens, width) to the layer's output, in the same memory; keys and values go to the first slots."""
        a, widths = self.sizes["attention"], self.sizes["qkv"]["n"]
        batch, (tokens, d) = at.keys.shape[0], at.cos.shape
        gamma, *projections = self.parameters["qkv"]
        packed = _products(kernels["norm"]([x, gamma[None]])[0], projections[:3], projections[3:] or (None,) * 3)
        q, k, v = (y.view(batch, tokens, -1, d) for y in packed.split(list(widths), -1))
        norms = [p[None] for p in self.parameters["attention"]]
        q = kernels["rotation"]([q, k.transpose(1, 2), at.cos[None, None], at.sin[None, None], at.keys, at.slot.view(batch, 1, 1, 1),
                                 *norms])[0]
        at.values[:, :, :tokens].copy_(v.transpose(1, 2))
        y = F.scaled_dot_product_attention(q.transpose(1, 2), at.keys[:, :, :tokens], at.values[:, :, :tokens], is_causal=True,
                                           scale=a["scale"], enable_gqa=a["group"] > 1)
        _add_product(x, y.transpose(1, 2).reshape(batch * tokens, -1), *self.parameters["out"])
        n, (gamma, *rest) = self.sizes["gated"]["n"], self.parameters["gated"]
        halves = (rest[:2], (None, None)) if len(rest) == 2 else (rest[::2], rest[1::2])
        packed = _products(kernels["mlp_norm"]([x, gamma[None]])[0], *halves)
        _add_product(x, kernels["gate"]([packed[:, :n], packed[:, n:]])[0], *self.parameters["down"])
        return x


def _products(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    """x times several (n, k) weights, side by side."""
    packed = x.new_empty(x.shape[0], sum(w.shape[0] for w in weights))
    for y, w, b in zip(packed.split([w.shape[0] for w in weights], -1), weights, biases, strict=True):
        torch.mm(x, w.t(), out=y) if b is None else torch.addmm(b, x, w.t(), out=y)
    return packed


def _add_product(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    x.addmm_(y, weight.t())
    if bias is not None:
        x.add_(bias)


@dataclass(frozen=True)
class CausalMatch:
    """A causal language model whose layers all have every part: `layers` names them in order, `head` is its last norm and head."""

    model: nn.Module
    layout: CausalLayout
    layers: tuple[str, ...]
    head: Part

    @property
    def backbone(self) -> nn.Module:
        return self.model._modules[self.layout.backbone]  # type: ignore[return-value]

    @property
    def embedding(self) -> Tensor:
        return self.backbone._modules[self.layout.embedding].weight  # type: ignore[union-attr, return-value]

    @property
    def rotary(self) -> Any:
        return self.backbone._modules[self.layout.rotary]


    def own_head(self, x: Tensor) -> Tensor:
        """The logits of hidden states by the model's own last norm and head."""
        head: Any = self.model._modules[self.layout.head]
        norm: Any = self.backbone._modules[self.layout.norm]
        return head(norm(x))  # type: ignore[no-any-return]


def layer_prompt(layer: nn.Module, parts: Sequence[Part], layout: LayerLayout) -> LayerPrompt | None:
    """What runs prompts through a layer by kernels, None where that is the layer's own forward."""
    return LayerPrompt(layer, parts) if layout.latent is None and "gated" in {p.role for p in parts} else None


def has_all(parts: Sequence[Part], mlp: MlpLayout | None, but: str = "") -> Rejected | None:
    """Why a layer with these parts has no step of its own, or None; the role `but` is not asked for. mlp: None where it is no gated MLP."""
    roles = {p.role: p for p in parts}
    wanted = (*ROLES, *(MLP_ROLES if mlp is not None else ()))
    missing = [r for r in sorted(wanted, key=lambda r: r == "attention") if r not in roles and r != but]
    if missing:
        return Rejected(f"the layer's {missing[0]} is not matched")
    if mlp is not None and not dict(roles["gated"].block.sizes)["norm"]:
        return Rejected("the norm before the MLP is no RMSNorm")
    return None


def match_causal(model: nn.Module | None, layers: Mapping[int, Any], eps_of: Callable[[nn.Module], float],
                 probes: Any) -> CausalMatch | Rejected:
    """Match a causal LM around its layers' matches (by id)."""
    row = next((r for r in causal_lm.LAYOUTS if model is not None and _has(model, r)), None)
    if model is None or row is None:
        return Rejected("it is no causal language model of a known layout")
    if no := plain.first_refusal((model, row.backbone, plain.CONTAINER)):
        return no
    backbone: Any = model._modules[row.backbone]
    no = plain.first_refusal((backbone, row.embedding, plain.EMBEDDING), (backbone, row.norm, plain.NORM), (model, row.head, plain.LINEAR),
                             (backbone, row.rotary, plain.CONTAINER)) or probes.norm(row.norm, backbone._modules[row.norm])
    if no is not None:
        return no
    extra = [n for parent, known in ((model, (row.backbone, row.head)), (backbone, (row.embedding, row.layers, row.norm, row.rotary)))
             for n in parent._modules if n not in known]
    if extra:
        return Rejected(f"has {', '.join(extra)} too")
    names, ropes = [], set()
    for n, layer in enumerate(backbone._modules[row.layers]):
        if id(layer) not in layers:
            return Rejected(f"{row.layers}.{n} is not matched")
        found = layers[id(layer)]
        if no := has_all(found.parts, found.layouts[1]):
            return Rejected(f"{found.name}: {no.reason}")
        names.append(found.name)
        ropes |= {dict(p.block.sizes).get("ropes") for p in found.parts if p.role == "attention"}
    if not names:
        return Rejected("it has no layers")
    if len(ropes) > 1:
        return Rejected("its layers do not all read RoPE's numbers in the same way")
    norm, head, embedding = backbone._modules[row.norm], model._modules[row.head], backbone._modules[row.embedding]
    if no := plain.same_weights([norm, head, embedding], head.weight.dtype, head.weight.device):
        return no
    block = RMS_NORM_LINEAR.block(k=head.in_features, n=(head.out_features,), bias=head.bias is not None, eps=eps_of(norm),
                                  dtype=head.weight.dtype)
    weights = [(f"{row.backbone}.{row.norm}", "weight"), (row.head, "weight"), *([(row.head, "bias")] if head.bias is not None else [])]
    part = Part("head", block, tuple(weights), (f"{row.backbone}.{row.norm}", row.head))
    causal = CausalMatch(model, row, tuple(names), part)
    return probes.causal(causal) or causal


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
    small_embedding = skip_init(nn.Embedding, vocab, embedding.embedding_dim)  # type: ignore[union-attr]
    small_head = skip_init(nn.Linear, head.in_features, vocab, bias=head.bias is not None)  # type: ignore[union-attr]
    for p in (*small_embedding.parameters(), *small_head.parameters()):
        p.requires_grad_(False).copy_(torch.randn(p.shape, generator=generator))
    device = found.embedding.device
    norm = twin(backbone._modules[row.norm])  # type: ignore[arg-type]
    layers: Any = stand_in(backbone._modules[row.layers], {})  # type: ignore[arg-type]
    layers.__dict__["_modules"] = {n: stand_in(layer, {"forward": forward}) for n, layer in layers._modules.items()}
    inner = {**backbone._modules, row.embedding: small_embedding.to(device), row.layers: layers, row.norm: norm}
    outer = {**model._modules, row.backbone: stand_in(backbone, {"_modules": inner}), row.head: small_head.to(device)}
    return Hollow(stand_in(model, {"_modules": outer}), small_embedding.weight, [norm.weight, *small_head.parameters()], seen)


def head_of(part: Part, weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """The logits of hidden states (rows, k) by the head's program, op by op."""
    sizes = {**dict(part.block.sizes), "n": (weights[1].shape[0],)}
    small = Part(part.role, part.block.pattern.block(**sizes), part.weights, part.bypassed)
    views = [w.t() if w.dim() == 2 else w[None] for w in weights]
    return executor([small], x.shape[0], x.dtype)["head"]([x, *views])[0]
