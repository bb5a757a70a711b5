"""A decoder layer's decoding step by kernels: new tokens of each sequence, over a cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.layers.compose import (
    Kernel,
    PartRunner,
    add_to_residual,
    apply_norm,
    apply_own_mlp,
    residual_multiplier,
)
from mirage_hf.layers.operands import OperandTable
from mirage_hf.layers.part import first_mlp_role
from mirage_hf.layers.rope import Rope, in_order
from mirage_hf.layers.run_attention import run_attention
from mirage_hf.patterns.schema import LayerLayout

#: The parts that a layer's step needs besides the two halves of its MLP. An MLP of another kind,
#: such as a mixture of experts, runs as recorded (swap/traced_half.py) or by its own forward.
STEP_ROLES = ("qkv", "attention", "out")


@dataclass(frozen=True)
class TokenBounds:
    """Which keys each of several new tokens of a sequence sees. All are int32 (b, tokens).

    Attributes:
        first: The first cached key that it sees.
        last: The slot after the last one.
        new_first: The first new key that it sees, counted from the first new token.
        new_last: The one after the last one.
        windowed: Whether the kernels are those for windows, which read all four.
    """

    first: Tensor
    last: Tensor
    new_first: Tensor
    new_last: Tensor
    windowed: bool

    @classmethod
    def of(cls, first: Tensor, window: int | None, slots: int, windowed: bool) -> TokenBounds:
        """Return the bounds of tokens whose first cached keys are written in each step.

        Args:
            first: The first cached key that each token sees.
            window: The number of keys that a token sees, its own included, or None.
            slots: The slots of the cache. No cached key of a row lies after its new tokens.
            windowed: Whether the kernels are those for windows.
        """
        number = torch.arange(first.shape[1], dtype=torch.int32, device=first.device)
        number = number.repeat(len(first), 1)
        new_first = torch.zeros_like(number) if window is None else (number - window + 1).clamp_(0)
        return cls(first, torch.full_like(number, slots), new_first, number + 1, windowed)


@dataclass(frozen=True)
class StepInputs:
    """What a layer's step reads besides x. b is the number of sequences."""

    #: RoPE's cos and sin (tokens, d) of the new tokens, as `LayerStep.tables` makes them.
    cos: Tensor
    sin: Tensor
    #: The layer's cached keys and values (b, heads, slots, d).
    keys: Tensor
    values: Tensor
    #: The first slot that a row sees, the slot of its first new key, and the slot after it (b,),
    #: int32.
    lo: Tensor
    slot: Tensor
    end: Tensor
    #: What each token sees, if a sequence has several new ones.
    bounds: TokenBounds | None = None


class LayerStep(PartRunner):
    """A decoder layer for new tokens of each sequence. Kernels run it, and an unknown MLP by parts.

    Rows of hidden states are the tokens of the first sequence, then those of the second, and so on.
    """

    def __init__(self, layer: nn.Module, operands: OperandTable, layout: LayerLayout, rope: Rope):
        """Run `layer`, whose parts are in `operands`, with what a model gives it as `rope`."""
        super().__init__(operands)
        self.layout = layout
        self.multiplier = residual_multiplier(layer)
        self.rope = rope
        self.sizes = dict(self.parts["attention"].block.sizes)
        #: What runs `own_half`, by the number of rows.
        self.traced_halves: dict[int, Callable[[Tensor, Tensor], Tensor]] = {}
        self.first = first_mlp_role(self.parts)

    def __call__(self, kernels: Mapping[str, Kernel], x: Tensor, inputs: StepInputs) -> Tensor:
        """Return the layer's output (tokens, width), and append the new keys and values.

        Args:
            kernels: What runs the parts, by role.
            x: The hidden states (tokens, width) of the new tokens of all sequences.
            inputs: What the layer reads besides them.

        Raises:
            KeyError: If a role has no kernel.
        """
        out = self._attention(kernels, self.run_part(kernels, "qkv", x), inputs)
        h = self.run_part(kernels, "out", out.view(x.shape[0], -1), x)
        mlp_input = x if self.layout.parallel else h
        if self.first:
            return self.run_part(kernels, "down", self.run_part(kernels, self.first, mlp_input), h)
        traced = self.traced_halves.get(len(h))
        return (self.own_half if traced is None else traced)(mlp_input, h)

    def runs_own_mlp(self, rows: int) -> bool:
        """Return whether the MLP's own forward runs in steps of so many tokens."""
        return not self.first and rows not in self.traced_halves

    def own_half(self, x: Tensor, h: Tensor) -> Tensor:
        """Return the layer's output if its MLP is unknown, by the MLP's own forward.

        Args:
            x: What the norm before the MLP reads, (tokens, width).
            h: The residual stream. Unless attention and MLP lie side by side, it is x.
        """
        children, layout = self.operands.children, self.layout
        y = self.own_mlp(apply_norm(children, layout.mlp_norm, x[:, None])).reshape(h.shape)
        return add_to_residual(children, layout.mlp_after, self.multiplier, h, y)

    def own_mlp(self, x: Tensor) -> Tensor:
        """Return what the own forward of an unknown MLP gives for normed x (tokens, 1, width)."""
        return apply_own_mlp(self.operands.children, self.layout.mlp, x)

    @property
    def rope_order(self) -> str:
        """The order in which kernels read RoPE's cos and sin.

        Layers that are given the same cos and sin and read them in one order share a table.
        """
        return self.sizes["rope"] or "halves"

    def tables(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return RoPE's cos and sin in the order of attention's kernels, from the model's."""
        cos, sin = (
            in_order(self.rope.of_pairs(x), self.rope_order).contiguous() for x in (cos, sin)
        )
        return cos, sin

    def set_bounds(self, lo: Tensor, slot: Tensor, bounds: TokenBounds) -> None:
        """Write what depends on a step's slots in the bounds of several new tokens of a sequence.

        Layers with equal windows share bounds, so this is called once a step for all of them.

        Args:
            lo: The first slot that a row sees (b,).
            slot: The slot of its first new key (b,).
            bounds: The bounds. What windows need is there already.
        """

    def _attention(
        self, kernels: Mapping[str, Kernel], packed: Tensor, inputs: StepInputs
    ) -> Tensor:
        """Run attention on packed projections (tokens, q + k + v)."""
        sizes, kv_heads, d = self.sizes, self.sizes["kv_heads"], self.sizes["head_dim"]
        q, k, v = (y.unflatten(1, (kv_heads, -1)) for y in split_heads(packed, sizes))
        weights = self.operands.parameters("attention")
        norms, sinks = (weights[:-1], weights[-1:]) if sizes["sinks"] else (weights, [])
        of_one_head = sizes["norm"] == "rms"
        norms = [p[None] if of_one_head else p.view(1, kv_heads, -1, d) for p in norms]
        sinks = [p.view(1, kv_heads, -1, 1) for p in sinks]
        rope = [inputs.cos, inputs.sin] if sizes["rope"] else []
        bounds, memory = [inputs.lo, inputs.slot], [inputs.keys, inputs.values]
        windowed = False
        if (of_tokens := inputs.bounds) is not None:
            bounds += [of_tokens.first, of_tokens.last, of_tokens.new_first, of_tokens.new_last]
            windowed = of_tokens.windowed
        kernel = kernels["attention"]
        return run_attention(
            kernel, (q, k, v), rope, memory, bounds, norms, sinks, windowed=windowed
        )


def split_heads(packed: Tensor, sizes: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return q (…, heads, d), k and v (…, kv_heads, d) as views of packed projections.

    Args:
        packed: The projections (…, q + k + v).
        sizes: The sizes of attention's block.
    """
    kv_heads, group, d = (int(sizes[name]) for name in ("kv_heads", "group", "head_dim"))
    if sizes["packing"] == "heads":
        q, k, v = packed.unflatten(-1, (kv_heads, 3, d)).unbind(-2)
        return q, k, v
    widths = [n * kv_heads * d for n in (group, 1, 1)]
    q, k, v = (y.unflatten(-1, (-1, d)) for y in packed.split(widths, -1))
    return q, k, v


class LatentStep(LayerStep):
    """A layer's step with multi-head latent attention.

    The cache holds latents as keys, and keys that RoPE has rotated as values.
    """

    @property
    def rope_order(self) -> str:
        """The order in which kernels read RoPE's cos and sin."""
        return "once" if self.sizes["ropes"] == "parted pairs" else str(self.sizes["ropes"])

    def set_bounds(self, lo: Tensor, slot: Tensor, bounds: TokenBounds) -> None:
        """Write the slots that each token sees, from its sequence's first one up to its own."""
        bounds.first.copy_(lo[:, None].expand_as(bounds.first))
        torch.add(slot[:, None], bounds.new_last, out=bounds.last)

    def _attention(
        self, kernels: Mapping[str, Kernel], packed: Tensor, inputs: StepInputs
    ) -> Tensor:
        """Run attention on packed projections (tokens, q or its low rank + latent + rope)."""
        heads, latent, nope, rope, value = (
            int(self.sizes[name]) for name in ("heads", "latent", "nope", "rope", "value")
        )
        batch = inputs.slot.numel()
        query, new_latent, k_rope = packed.split(
            [packed.shape[1] - latent - rope, latent, rope], -1
        )
        if "query" in self.parts:
            norm, expand = self.operands.parameters("query")
            query = kernels["query"]([query, norm[None], expand.t()])[0]
        of_heads = query.view(batch, -1, heads, nope + rope).transpose(1, 2)
        q, q_rope = of_heads.split([nope, rope], -1)
        parted = self.sizes["ropes"] == "parted pairs"

        def by_token(x: Tensor) -> Tensor:
            """Return rows (tokens, n) of all sequences as (batch, 1, tokens of one, n)."""
            return x.view(batch, 1, -1, x.shape[-1])

        def evens_and_odds(x: Tensor) -> list[Tensor]:
            return [x[..., ::2], x[..., 1::2]] if parted else [x]

        keys = list(inputs.values.chunk(2, -1)) if parted else [inputs.values]
        (latent_norm,) = self.operands.parameters("append")
        rotated_q = kernels["append"](
            [
                *evens_and_odds(q_rope),
                *evens_and_odds(by_token(k_rope)),
                by_token(new_latent),
                latent_norm[None],
                by_token(inputs.cos),
                by_token(inputs.sin),
                inputs.keys,
                *keys,
                inputs.slot.view(batch, 1, 1, 1),
            ]
        )[: len(keys)]
        # if torch runs the program, results have the order of q in memory
        rotated_q = [x.contiguous() for x in rotated_q]
        (expand,) = self.operands.parameters("attention")
        weight = expand.view(1, heads, nope + value, latent).transpose(2, 3)
        of_tokens = inputs.bounds
        seen = (inputs.lo, inputs.end) if of_tokens is None else (of_tokens.first, of_tokens.last)
        bounds = [x.view(batch, 1, -1, 1) for x in seen]
        w_k, w_v = weight[..., :nope], weight[..., nope:]
        y = kernels["attention"]([q, *rotated_q, inputs.keys, *keys, *bounds, w_k, w_v])[0]
        return y if of_tokens is None else y.transpose(1, 2).reshape(len(packed), -1)


def layer_step(
    layer: nn.Module, operands: OperandTable, layout: LayerLayout, rope: Rope
) -> LayerStep:
    """Return the step of a layer that has all of its parts."""
    kind = LayerStep if layout.latent is None else LatentStep
    return kind(layer, operands, layout, rope)
