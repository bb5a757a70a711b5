"""A decoder layer for whole prompts: products and attention by the library, what lies between them by kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mirage_hf.layers.compose import (
    Composition,
    Kernel,
    Part,
    adapter_role,
    first_half,
    num_norm_weights,
)
from mirage_hf.layers.step import heads_of
from mirage_hf.patterns.prompt import (
    PROMPT_ACTIVATION,
    PROMPT_ADDED,
    PROMPT_GATE,
    PROMPT_NORM,
    PROMPT_ROTATION,
)
from mirage_hf.patterns.schema import LayerLayout, PatternBlock

MOST_ROWS = 1 << 16
"""That the half behind attention takes at once: what it holds meanwhile is several times as wide as x. That products of more rows
are no faster is an estimate. A multiple of the rows of every kernel's piece, so that what is left over needs no kernels of its own."""
ROUND = 64
"""What a run of tokens sees before it is a multiple of so many: fused attention wants masks whose rows begin at multiples of 16 bytes."""
LEAST_RUN = 512
"""Tokens that attention through a window takes at once, or as many as the window has: fewer are more launches, more are more scores that
nobody sees."""


@dataclass(frozen=True, eq=False)
class WindowAttention:
    """Causal attention of a prompt through a sliding window, by runs of tokens: its cost grows with the length, not with its square."""

    mask: Tensor
    """(run, back + run) numbers that are added to scores: token n of a run may see `back` tokens before the run, and the run's."""

    @classmethod
    def of(cls, window: int, tokens: int, like: Tensor) -> WindowAttention:
        """For a window and a number of tokens; `like`: whose dtype and device queries have."""
        back = -(-window // ROUND) * ROUND
        run = min(max(back, LEAST_RUN), tokens)
        with torch.inference_mode(False):
            token, seen = (
                torch.arange(run, device=like.device)[:, None],
                torch.arange(-back, run, device=like.device),
            )
            mask = torch.zeros(run, back + run, dtype=like.dtype, device=like.device)
            return cls(mask.masked_fill_((seen > token) | (seen <= token - window), -math.inf))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q (b, heads, tokens, d), k and v (b, kv_heads, tokens, d), each head's of which its group of q's sees: (b, tokens, heads, d)."""
        run, group = self.mask.shape[0], q.shape[1] // k.shape[1]
        back, made = self.mask.shape[1] - run, []
        for first in range(0, q.shape[2], run):
            here, before = q[:, :, first : first + run], min(back, first)
            # fused attention takes a mask only where there are as many heads of keys as of queries
            keys, values = (
                x[:, :, first - before : first + run].repeat_interleave(group, 1) for x in (k, v)
            )
            mask = self.mask[: here.shape[2], back - before :][:, : keys.shape[2]]
            made.append(
                F.scaled_dot_product_attention(
                    here, keys, values, attn_mask=mask, scale=scale
                ).transpose(1, 2)
            )
        return torch.cat(made, 1)


@dataclass(frozen=True)
class PromptInputs:
    """What a layer reads of prompts besides x: RoPE's cos and sin (b · tokens, 1, d), a layer's keys and values (b, heads, slots, d)."""

    cos: Tensor
    sin: Tensor
    keys: Tensor
    values: Tensor
    sources: Tensor | None = None
    """(b, n): of each of the first n slots the token whose key goes there; None: token n's goes to slot n."""
    band: WindowAttention | None = None
    """What attention sees through a window; None: all tokens before a token, and itself."""


class LayerPrefill(Composition):
    """A decoder layer for whole prompts, each row from its own first token on: products and attention by the library, what lies between
    them by kernels."""

    def __init__(self, layer: nn.Module, parts: Sequence[Part], layout: LayerLayout):
        super().__init__(layer, parts)
        self.sizes = {role: dict(p.block.sizes) for role, p in self.parts.items()}
        self.first, self.parallel = first_half(self.parts), layout.parallel
        self.blocks = self._blocks()
        """What is done by kernels, by name, for any number of rows."""

    def _blocks(self) -> dict[str, PatternBlock]:
        attention, first = self.sizes["attention"], self.sizes[self.first]
        shared = (
            "kv_heads",
            "group",
            "head_dim",
            "eps",
            "dtype",
            "norm",
            "offset",
            "rope",
            "rotary",
            "rope_dtype",
            "packing",
        )
        taken = {name: attention[name] for name in shared}
        kind = "eps", "offset", "centred", "norm_bias", "dtype"
        gate = PROMPT_GATE if self.first == "gated" else PROMPT_ACTIVATION
        found = {"gate": gate.block(**{name: first[name] for name in ("n", "activation", "dtype")})}
        if attention["norm"] or attention["rope"]:
            found["rotation"] = PROMPT_ROTATION.block(**taken)
        for name, role in (("norm", "qkv"), ("mlp_norm", self.first)):
            s = self.sizes[role]
            if s["norm"]:
                found[name] = PROMPT_NORM.block(**{n: s[n] for n in ("k", *kind)})
        for role in ("out", "down"):
            s = self.sizes[role]
            if s["norm"]:
                found[role] = PROMPT_ADDED.block(k=s["n"], **{n: s[n] for n in ("scale", *kind)})
        return found

    def __call__(self, kernels: Mapping[str, Kernel], x: Tensor, at: PromptInputs) -> Tensor:  # type: ignore[override]
        """x (b · tokens, width), whose memory may be written over, to the layer's output; keys and values go to the first slots."""
        a = self.sizes["attention"]
        batch, d = at.keys.shape[0], a["head_dim"]
        tokens = x.shape[0] // batch
        q, k, v = heads_of(self._products(kernels.get("norm"), "qkv", x).view(batch, tokens, -1), a)
        packed = self._products(kernels.get("mlp_norm"), self.first, x) if self.parallel else None
        if "rotation" in kernels:
            norms = [
                p[None] if a["norm"] == "rms" else p.view(1, -1, d)
                for p in self.parameters["attention"]
            ]
            rotated = kernels["rotation"](
                [q.flatten(0, 1), k.flatten(0, 1), *([at.cos, at.sin] if a["rope"] else []), *norms]
            )
            q, k = (y.unflatten(0, (batch, tokens)) for y in rotated)
        slots = [
            memory[:, :, : tokens if at.sources is None else at.sources.shape[1]]
            for memory in (at.keys, at.values)
        ]
        for memory, new in zip(slots, (k, v), strict=True):
            to = (
                new
                if at.sources is None
                else new.gather(1, at.sources[:, :, None, None].expand(-1, -1, *new.shape[2:]))
            )
            memory.copy_(to.transpose(1, 2))
        q = q.transpose(1, 2)
        k, v = slots if at.sources is None else (k.transpose(1, 2), v.transpose(1, 2))
        if at.band is not None:
            y = at.band.attend(q, k, v, a["scale"])
        else:
            y = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=a["scale"], enable_gqa=a["group"] > 1
            ).transpose(1, 2)
        x = self._added(kernels.get("out"), "out", y.reshape(batch * tokens, -1), x)
        if packed is not None:
            return self._mlp(kernels, x, packed)
        if x.shape[0] <= MOST_ROWS:
            return self._mlp(kernels, x)
        for rows in x.split(MOST_ROWS):
            made = self._mlp(kernels, rows)
            if made is not rows:
                rows.copy_(made)
        return x

    def _mlp(
        self, kernels: Mapping[str, Kernel], x: Tensor, packed: Tensor | None = None
    ) -> Tensor:
        """The half behind attention; `packed`: its first products, where they are of something else than x."""
        packed = (
            self._products(kernels.get("mlp_norm"), self.first, x) if packed is None else packed
        )
        return self._added(
            kernels.get("down"),
            "down",
            kernels["gate"](packed.split(self.sizes[self.first]["n"], -1))[0],
            x,
        )

    def _products(self, norm: Kernel | None, role: str, x: Tensor) -> Tensor:
        """x, normalised where there is a norm, times the part's weights, side by side."""
        given: Sequence[Tensor] = self.parameters[role]
        if norm is not None:
            norm_parameters = num_norm_weights(self.sizes[role])
            x, given = (
                norm([x, *(p[None] for p in given[:norm_parameters])])[0],
                given[norm_parameters:],
            )
        own, given = self._apart(role, given)
        weights, biases = [p for p in given if p.dim() == 2], [p for p in given if p.dim() == 1]
        widths = [w.shape[0] for w in weights]
        packed = x.new_empty(x.shape[0], sum(widths))
        for y, w, b in zip(
            packed.split(widths, -1), weights, biases or [None] * len(weights), strict=True
        ):
            torch.mm(x, w.t(), out=y) if b is None else torch.addmm(b, x, w.t(), out=y)
        return self._adapted(role, x, own, packed, widths)

    def _apart(
        self, role: str, given: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Of weights and biases of linears, those of adapters behind them, and the others."""
        count = sum(r > 0 for r in self.ups[role][0].ranks) if role in self.ups else 0
        return given[len(given) - count :], given[: len(given) - count]

    def _adapted(
        self,
        role: str,
        x: Tensor,
        own: Sequence[Tensor],
        y: Tensor,
        widths: Sequence[int],
        scale: float = 1.0,
    ) -> Tensor:
        """y, side by side what linears gave of x, to which what their adapters make of x, times `scale`, is added: in few launches, as each
        takes as long as its work."""
        if not own:
            return y
        ups, low = self.ups[role][0], self.parts[adapter_role(role)]
        downs = self.parameters[low.role][num_norm_weights(dict(low.block.sizes)) :]
        made = x.to(own[0].dtype) @ (torch.cat(list(downs)) if len(downs) > 1 else downs[0]).t()
        scaling = low.scalings[0]
        if any(s != scaling for s in low.scalings):
            made, scaling = (made * low.operands(downs)[-1]).to(made.dtype), 1.0
        deltas = made.new_empty(y.shape) if all(ups.ranks) else made.new_zeros(y.shape)
        each = (d for d, r in zip(deltas.split(list(widths), -1), ups.ranks, strict=True) if r)
        for delta, low_rank, b in zip(
            each, made.split([a.shape[0] for a in downs], -1), own, strict=True
        ):
            torch.mm(low_rank, b.t(), out=delta)
        return y.add_(deltas, alpha=scaling * scale)

    def _added(self, added: Kernel | None, role: str, y: Tensor, residual: Tensor) -> Tensor:
        """The residual and the part's product with y: in the residual's memory, but where a norm comes between them."""
        s, given = self.sizes[role], self.parameters[role]
        behind = len(given) - num_norm_weights(s)
        (own, (weight, *biases)), norm_parameters = (
            self._apart(role, given[:behind]),
            given[behind:],
        )
        if added is not None:
            product = torch.addmm(*biases, y, weight.t()) if biases else torch.mm(y, weight.t())
            return added(
                [
                    self._adapted(role, y, own, product, weight.shape[:1]),
                    *(p[None] for p in norm_parameters),
                    residual,
                ]
            )[0]
        residual.addmm_(y, weight.t(), alpha=s["scale"])
        if biases:
            residual.add_(*biases, alpha=s["scale"])
        return self._adapted(role, y, own, residual, weight.shape[:1], s["scale"])


def why_no_prefill(parts: Sequence[Part], layout: LayerLayout) -> str:
    """Why a layer has no prompts by kernels, "" where it has."""
    roles = {p.role: dict(p.block.sizes) for p in parts}
    if layout.latent is not None:
        return "attention is over latents"
    if not first_half(roles):
        return "a layer's MLP runs its own forward"
    if roles["attention"]["sinks"]:
        return "the library's attention has no sinks"
    return (
        "the library's attention has no softcap"
        if roles["attention"]["softcap"] is not None
        else ""
    )


def layer_prefill(
    layer: nn.Module, parts: Sequence[Part], layout: LayerLayout
) -> LayerPrefill | None:
    """What runs prompts through a layer by kernels, None where that is the layer's own forward."""
    return None if why_no_prefill(parts, layout) else LayerPrefill(layer, parts, layout)
