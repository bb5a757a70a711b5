"""A decoder layer for whole prompts.

Matrix products and attention stay in the library. Kernels run what lies between them: norms, RoPE
and activations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mirage_hf.layers.compose import Kernel, PartRunner
from mirage_hf.layers.operands import OperandTable, adapter_scales
from mirage_hf.layers.part import Part, adapter_role, first_mlp_role, num_norm_weights
from mirage_hf.layers.step import split_heads
from mirage_hf.layers.window_attention import WindowAttention
from mirage_hf.patterns.prompt import (
    PROMPT_ACTIVATION,
    PROMPT_ADDED,
    PROMPT_GATE,
    PROMPT_NORM,
    PROMPT_ROTATION,
)
from mirage_hf.patterns.schema import LayerLayout, PatternBlock

#: The rows that the MLP takes at once, because it holds several times the width of x meanwhile.
#: It is a multiple of the rows of every kernel's chunk. So the last rows need no kernels of their
#: own. Products of more rows are probably no faster, which was not measured.
MOST_ROWS = 1 << 16

_NORM_SIZES = ("eps", "offset", "centred", "norm_bias", "dtype")
_ROTATION_SIZES = (
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


@dataclass(frozen=True)
class PromptInputs:
    """What a layer reads of prompts besides x. b is the number of sequences."""

    #: RoPE's cos and sin (b · tokens, 1, d).
    cos: Tensor
    sin: Tensor
    #: The layer's cache (b, heads, slots, d), which the prompt's keys and values go to.
    keys: Tensor
    values: Tensor
    #: For each of the first n slots, which token's key goes there (b, n). None: token n to slot n.
    sources: Tensor | None = None
    #: Attention through a sliding window, or None if each token sees all tokens before it.
    window: WindowAttention | None = None


@dataclass(frozen=True)
class _LinearWeights:
    """The weights of the linears of a part, and of what comes with them."""

    weights: Sequence[Tensor]
    #: One for each linear, or none.
    biases: Sequence[Tensor]
    #: The lora_B weights of the linears that have an adapter.
    adapter_ups: Sequence[Tensor]
    #: The weight of the part's norm, and its bias if it has one.
    norm: Sequence[Tensor]

    @property
    def widths(self) -> list[int]:
        return [w.shape[0] for w in self.weights]


class LayerPrefill(PartRunner):
    """A decoder layer for whole prompts. Each row starts with its own first token."""

    def __init__(self, operands: OperandTable, layout: LayerLayout):
        """Run the layer whose parts are in `operands`."""
        super().__init__(operands)
        self.sizes = {role: dict(part.block.sizes) for role, part in self.parts.items()}
        self.first = first_mlp_role(self.parts)
        self.parallel = layout.parallel
        #: What kernels compute, by name, for any number of rows.
        self.blocks = self._blocks()

    def _blocks(self) -> dict[str, PatternBlock]:
        attention, mlp = self.sizes["attention"], self.sizes[self.first]
        gate = PROMPT_GATE if self.first == "gated" else PROMPT_ACTIVATION
        blocks = {"gate": gate.block(**_chosen(mlp, ("n", "activation", "dtype")))}
        if attention["norm"] or attention["rope"]:
            blocks["rotation"] = PROMPT_ROTATION.block(**_chosen(attention, _ROTATION_SIZES))
        for name, role in (("norm", "qkv"), ("mlp_norm", self.first)):
            sizes = self.sizes[role]
            if sizes["norm"]:
                blocks[name] = PROMPT_NORM.block(**_chosen(sizes, ("k", *_NORM_SIZES)))
        for role in ("out", "down"):
            sizes = self.sizes[role]
            if sizes["norm"]:
                chosen = _chosen(sizes, ("scale", *_NORM_SIZES))
                blocks[role] = PROMPT_ADDED.block(k=sizes["n"], **chosen)
        return blocks

    def __call__(self, kernels: Mapping[str, Kernel], x: Tensor, inputs: PromptInputs) -> Tensor:
        """Return the layer's output (b · tokens, width), and fill the first slots of the cache.

        Args:
            kernels: What runs each of `blocks`, by name.
            x: The hidden states (b · tokens, width). Their memory may be written over.
            inputs: What the layer reads besides them.
        """
        batch = inputs.keys.shape[0]
        tokens = x.shape[0] // batch
        packed = self._products(kernels.get("norm"), "qkv", x).view(batch, tokens, -1)
        q, k, v = split_heads(packed, self.sizes["attention"])
        mlp_products = None
        if self.parallel:
            mlp_products = self._products(kernels.get("mlp_norm"), self.first, x)
        if "rotation" in kernels:
            q, k = self._rotated(kernels["rotation"], q, k, inputs)
        y = self._attention(q, *_into_cache(k, v, inputs), inputs.window)
        x = self._add(kernels.get("out"), "out", y.reshape(batch * tokens, -1), x)
        if mlp_products is not None:
            return self._mlp(kernels, x, mlp_products)
        if x.shape[0] <= MOST_ROWS:
            return self._mlp(kernels, x)
        for rows in x.split(MOST_ROWS):
            made = self._mlp(kernels, rows)
            if made is not rows:
                rows.copy_(made)
        return x

    def _rotated(
        self, kernel: Kernel, q: Tensor, k: Tensor, inputs: PromptInputs
    ) -> tuple[Tensor, Tensor]:
        """Return q and k (b, tokens, heads, d), normalised if heads have norms, and rotated."""
        sizes = self.sizes["attention"]
        norms = self.operands.parameters("attention")
        of_one_head = sizes["norm"] == "rms"
        norms = [p[None] if of_one_head else p.view(1, -1, sizes["head_dim"]) for p in norms]
        tables = [inputs.cos, inputs.sin] if sizes["rope"] else []
        rotated_q, rotated_k = kernel([q.flatten(0, 1), k.flatten(0, 1), *tables, *norms])
        return rotated_q.unflatten(0, q.shape[:2]), rotated_k.unflatten(0, k.shape[:2])

    def _attention(
        self, q: Tensor, keys: Tensor, values: Tensor, window: WindowAttention | None
    ) -> Tensor:
        """Return the library's attention (b, tokens, heads, d)."""
        sizes = self.sizes["attention"]
        q = q.transpose(1, 2)
        if window is not None:
            return window.attend(q, keys, values, sizes["scale"])
        y = F.scaled_dot_product_attention(
            q,
            keys,
            values,
            is_causal=True,
            scale=sizes["scale"],
            enable_gqa=sizes["group"] > 1,
        )
        return y.transpose(1, 2)

    def _mlp(
        self, kernels: Mapping[str, Kernel], x: Tensor, products: Tensor | None = None
    ) -> Tensor:
        """Return the residual x after the MLP.

        Args:
            kernels: What runs each of `blocks`, by name.
            x: The residual after attention.
            products: What gate and up give, if they read something else than x.
        """
        if products is None:
            products = self._products(kernels.get("mlp_norm"), self.first, x)
        (inner,) = kernels["gate"](products.split(self.sizes[self.first]["n"], -1))
        return self._add(kernels.get("down"), "down", inner, x)

    def _products(self, norm: Kernel | None, role: str, x: Tensor) -> Tensor:
        """Return the part's products with x, side by side. `norm` normalises x first, if given."""
        linears = self._linear_weights(role, norm_first=True)
        if norm is not None:
            (x,) = norm([x, *(p[None] for p in linears.norm)])
        packed = x.new_empty(x.shape[0], sum(linears.widths))
        biases = linears.biases or [None] * len(linears.weights)
        outputs = packed.split(linears.widths, -1)
        for y, weight, bias in zip(outputs, linears.weights, biases, strict=True):
            if bias is None:
                torch.mm(x, weight.t(), out=y)
            else:
                torch.addmm(bias, x, weight.t(), out=y)
        return self._add_adapters(role, x, linears, packed)

    def _add(self, add: Kernel | None, role: str, y: Tensor, residual: Tensor) -> Tensor:
        """Return the residual plus the part's product with y.

        It is written into the residual's memory, unless the kernel `add` normalises the product.
        """
        linears = self._linear_weights(role, norm_first=False)
        (weight,) = linears.weights
        if add is not None:
            if linears.biases:
                product = torch.addmm(*linears.biases, y, weight.t())
            else:
                product = torch.mm(y, weight.t())
            product = self._add_adapters(role, y, linears, product)
            return add([product, *(p[None] for p in linears.norm), residual])[0]
        scale = self.sizes[role]["scale"]
        residual.addmm_(y, weight.t(), alpha=scale)
        if linears.biases:
            residual.add_(*linears.biases, alpha=scale)
        return self._add_adapters(role, y, linears, residual, scale)

    def _linear_weights(self, role: str, norm_first: bool) -> _LinearWeights:
        """Sort a part's parameters. The norm's come first if `norm_first`, and last otherwise."""
        parameters: Sequence[Tensor] = self.operands.parameters(role)
        count = num_norm_weights(self.sizes[role])
        cut = count if norm_first else len(parameters) - count
        first, second = parameters[:cut], parameters[cut:]
        norm, linears = (first, second) if norm_first else (second, first)
        ups = sum(r > 0 for r in self.adapters[role][0].ranks) if role in self.adapters else 0
        plain = linears[: len(linears) - ups]
        return _LinearWeights(
            weights=[p for p in plain if p.dim() == 2],
            biases=[p for p in plain if p.dim() == 1],
            adapter_ups=linears[len(linears) - ups :],
            norm=norm,
        )

    def _add_adapters(
        self, role: str, x: Tensor, linears: _LinearWeights, y: Tensor, scale: float = 1.0
    ) -> Tensor:
        """Add the adapters' products with x, times `scale`, to the outputs y of their linears.

        This takes few launches, because each launch takes longer than its work.
        """
        if not linears.adapter_ups:
            return y
        ranks = self.adapters[role][0].ranks
        down = self.parts[adapter_role(role)]
        lora_a = self.operands.parameters(down.role)[num_norm_weights(dict(down.block.sizes)) :]
        stacked = torch.cat(list(lora_a)) if len(lora_a) > 1 else lora_a[0]
        low = x.to(lora_a[0].dtype) @ stacked.t()
        scaling = down.scalings[0]
        if any(s != scaling for s in down.scalings):
            low, scaling = (low * adapter_scales(down, lora_a)).to(low.dtype), 1.0
        deltas = low.new_empty(y.shape) if all(ranks) else low.new_zeros(y.shape)
        each = deltas.split(linears.widths, -1)
        adapted = [delta for delta, rank in zip(each, ranks, strict=True) if rank]
        lows = low.split([a.shape[0] for a in lora_a], -1)
        for delta, x_low, lora_b in zip(adapted, lows, linears.adapter_ups, strict=True):
            torch.mm(x_low, lora_b.t(), out=delta)
        return y.add_(deltas, alpha=scaling * scale)


def _chosen(sizes: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: sizes[name] for name in names}


def _into_cache(k: Tensor, v: Tensor, inputs: PromptInputs) -> tuple[Tensor, Tensor]:
    """Write a prompt's keys and values (b, tokens, heads, d) to the cache.

    Returns:
        Keys and values (b, heads, tokens, d) for attention. They are views of the cache if token n
        is in slot n.
    """
    sources, tokens = inputs.sources, k.shape[1]
    if sources is None:
        keys, values = (x[:, :, :tokens] for x in (inputs.keys, inputs.values))
        keys.copy_(k.transpose(1, 2))
        values.copy_(v.transpose(1, 2))
        return keys, values
    for cache, new in ((inputs.keys, k), (inputs.values, v)):
        index = sources[:, :, None, None].expand(-1, -1, *new.shape[2:])
        cache[:, :, : sources.shape[1]].copy_(new.gather(1, index).transpose(1, 2))
    return k.transpose(1, 2), v.transpose(1, 2)


def why_no_prefill(parts: Sequence[Part], layout: LayerLayout) -> str:
    """Return why a layer's prompts run its own forward, or "" if kernels run them."""
    sizes = {part.role: dict(part.block.sizes) for part in parts}
    if layout.latent is not None:
        return "attention is over latents"
    if not first_mlp_role(sizes):
        return "a layer's MLP runs its own forward"
    if sizes["attention"]["sinks"]:
        return "the library's attention has no sinks"
    if sizes["attention"]["softcap"] is not None:
        return "the library's attention has no softcap"
    return ""


def layer_prefill(
    operands: OperandTable, parts: Sequence[Part], layout: LayerLayout
) -> LayerPrefill | None:
    """Return what runs prompts through a layer by kernels, or None if its own forward does."""
    return None if why_no_prefill(parts, layout) else LayerPrefill(operands, layout)
