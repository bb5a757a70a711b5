"""A decoder layer's step for one token of each sequence by kernels, what it reads, and its RoPE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.layers.compose import (
    Composition,
    Kernel,
    Part,
    added,
    first_half,
    multiplier,
    normed,
    own_mlp,
)
from mirage_hf.patterns.schema import LayerLayout

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
        return x[..., ::2] if self.order == "pairs" else x[..., : x.shape[-1] // 2]


NO_ROPE = Rope(0, torch.float32)
"""What modules are given that are no layers."""


def in_order(x: Tensor, order: str) -> Tensor:
    """Numbers of pairs (…, n) as layers or kernels read them: once, or twice (…, 2 n), in order of halves (a b a b) or pairs (a a b b)."""
    return (
        x
        if order == "once"
        else torch.cat([x, x], -1)
        if order == "halves"
        else x.repeat_interleave(2, -1)
    )


@dataclass(frozen=True)
class StepInputs:
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

    def __call__(self, kernels: Mapping[str, Kernel], x: Tensor, at: StepInputs) -> Tensor:  # type: ignore[override]
        """x (b, width) to the layer's output (b, width); the new keys and values are appended."""
        out = self._attended(kernels, self._run(kernels, "qkv", x), at)
        h = self._run(kernels, "out", out.view(x.shape[0], -1), x)
        names = self.layout
        x = x if names.parallel else h
        if self.first:
            return self._run(kernels, "down", self._run(kernels, self.first, x), h)
        y = own_mlp(
            self.children, names.mlp, normed(self.children, names.mlp_norm, x[:, None])
        ).reshape(h.shape)
        return added(self.children, names.mlp_after, self.multiplier, h, y)

    @property
    def taking(self) -> str:
        """The order in which kernels read RoPE's cos and sin: layers that are given the same ones and take them alike share a table."""
        return self.sizes["rope"] or "halves"

    def tables(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """RoPE's cos and sin as the model gives them, as the kernels of attention read them."""
        cos, sin = (in_order(self.rope.of_pairs(x), self.taking).contiguous() for x in (cos, sin))
        return cos, sin

    def _attended(self, kernels: Mapping[str, Kernel], packed: Tensor, at: StepInputs) -> Tensor:
        s, kv_heads, d = self.sizes, self.sizes["kv_heads"], self.sizes["head_dim"]
        q, k, v = (y.unflatten(1, (kv_heads, -1)) for y in heads_of(packed, s))
        every, given = (packed.shape[0], 1, 1, -1), self.parameters["attention"]
        norms, sinks = (given[:-1], given[-1:]) if s["sinks"] else (given, [])
        weights = [
            *(p[None] if s["norm"] == "rms" else p.view(1, kv_heads, -1, d) for p in norms),
            *(p.view(1, kv_heads, -1, 1) for p in sinks),
        ]
        tables = [at.cos.view(every), at.sin.view(every)] if s["rope"] else []
        return kernels["attention"](
            [q, k, v, *tables, at.keys, at.values, at.lo.view(every), at.slot.view(every), *weights]
        )[0]


def heads_of(packed: Tensor, sizes: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """q (…, heads, d), k and v (…, kv_heads, d) in packed projections, without a copy; `sizes`: of attention."""
    kv_heads, group, d = (int(sizes[n]) for n in ("kv_heads", "group", "head_dim"))
    if sizes["packing"] == "heads":
        q, k, v = packed.unflatten(-1, (kv_heads, 3, d)).unbind(-2)
    else:
        q, k, v = (
            y.unflatten(-1, (-1, d))
            for y in packed.split([n * kv_heads * d for n in (group, 1, 1)], -1)
        )
    return q, k, v


class LatentStep(LayerStep):
    """The same for attention whose cache holds latents as keys, and keys rotated by RoPE as values."""

    @property
    def taking(self) -> str:
        return "once" if self.sizes["ropes"] == "parted pairs" else str(self.sizes["ropes"])

    def _attended(self, kernels: Mapping[str, Kernel], packed: Tensor, at: StepInputs) -> Tensor:
        s, batch = self.sizes, packed.shape[0]
        heads, latent, nope, rope, value = (
            int(s[n]) for n in ("heads", "latent", "nope", "rope", "value")
        )
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
        rotated = kernels["append"](
            [
                *pairs(q_rope),
                *pairs(k_rope.view(every)),
                new.view(every),
                self.parameters["append"][0][None],
                at.cos.view(every),
                at.sin.view(every),
                at.keys,
                *keys,
                at.slot.view(every),
            ]
        )[: len(keys)]
        weight = (
            self.parameters["attention"][0].view(1, heads, nope + value, latent).transpose(2, 3)
        )
        return kernels["attention"](
            [
                q,
                *rotated,
                at.keys,
                *keys,
                at.lo.view(every),
                at.end.view(every),
                weight[..., :nope],
                weight[..., nope:],
            ]
        )[0]


def layer_step(
    layer: nn.Module, parts: Sequence[Part], layout: LayerLayout, rope: Rope
) -> LayerStep:
    """The step of a layer that has all of its parts."""
    return (LayerStep if layout.latent is None else LatentStep)(layer, parts, layout, rope)


def cos_and_sin(given: Any) -> tuple[Tensor, Tensor]:
    """RoPE's cos and sin, whether a model gives them or one complex tensor."""
    return (given.real, given.imag) if isinstance(given, Tensor) else (given[0], given[1])
