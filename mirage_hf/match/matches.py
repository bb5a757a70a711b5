"""The results of a match: matched modules, rejected ones, and the causal model around them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mirage_hf.errors import Rejected
from mirage_hf.layers.compose import (
    Composition,
    LayerComposition,
    LoraComposition,
    MlpComposition,
    any_norm,
)
from mirage_hf.layers.operands import OperandTable, submodule
from mirage_hf.layers.part import Part
from mirage_hf.layers.rope import NO_ROPE, Rope, with_own_buffers
from mirage_hf.layers.stand_in import MlpStandIn, stand_in
from mirage_hf.match import plain
from mirage_hf.patterns import causal_lm
from mirage_hf.patterns.schema import CausalLayout, LayerLayout, MlpLayout


@dataclass(frozen=True)
class Match:
    """A module with parts that kernels can run."""

    #: The module's name in the model.
    name: str
    kind: Literal["layer", "mlp", "lora"]
    module: nn.Module
    parts: tuple[Part, ...]
    #: The other parts that were looked for, as (pattern, reason).
    rejected: tuple[tuple[str, Rejected], ...] = ()
    #: The names of a layer's children.
    layout: LayerLayout | None = None
    #: The names of the MLP's children: of the layer's MLP, or of the module itself.
    mlp_layout: MlpLayout | None = None
    #: The RoPE that a layer is given.
    rope: Rope = NO_ROPE
    #: Stands for an MLP that runs its own forward, while the rest of its layer is compared.
    mlp_stand_in: MlpStandIn | None = None

    @cached_property
    def operands(self) -> OperandTable:
        """The weights of the parts. Everything that runs this module shares the table."""
        return OperandTable(self.module, self.parts)

    @property
    def layer_layout(self) -> LayerLayout:
        """The layout of a matched layer."""
        assert self.layout is not None, f"{self.name} is no layer"
        return self.layout

    def compose(self, twin: nn.Module | None = None) -> Composition:
        """Return the forward with these parts, of the module itself or of a twin of it."""
        module = self.module if twin is None else twin
        operands = self.operands if twin is None else OperandTable(twin, self.parts)
        if self.kind == "layer":
            return LayerComposition(module, operands, self.layer_layout, self.mlp_layout)
        if self.kind == "mlp":
            assert self.mlp_layout is not None
            return MlpComposition(module, operands, self.mlp_layout)
        return LoraComposition(module, operands)

    @property
    def width(self) -> int:
        """The size of the last dim of the module's input."""
        if self.kind == "layer":
            return int(any_norm(self.module, self.layer_layout).weight.shape[0])
        return int(dict(self.parts[0].block.sizes)["k"])

    @property
    def bypassed(self) -> tuple[str, ...]:
        """The children, by path, whose forward is not called, or is called with other inputs.

        These are the children that the parts bypass, and dropouts among their siblings.
        """
        paths = dict.fromkeys(path for part in self.parts for path in part.bypassed)
        idle = [
            f"{path}.{name}".removeprefix(".")
            for path in ("", *paths)
            for name, child in submodule(self.module, path)._modules.items()
            if isinstance(child, plain.IDLE)
        ]
        return tuple(dict.fromkeys((*paths, *idle)))

    @property
    def adapters(self) -> tuple[str, ...]:
        """The PEFT linears, by path, whose state the parts rely on. "" is the module itself."""
        return tuple(dict.fromkeys(path for part in self.parts for path in part.adapters))


@dataclass(frozen=True)
class CausalMatch:
    """A causal language model whose layers all have every part."""

    model: nn.Module
    layout: CausalLayout
    #: The names of the layers, in order.
    layers: tuple[str, ...]
    #: The last norm and the head.
    head: Part
    #: The kind of RoPE of each layer, or "" for each if there is only one kind.
    rope_kinds: tuple[str, ...]
    #: What all kinds of RoPE have in common.
    rope: Rope

    @property
    def backbone(self) -> nn.Module:
        """The model without its head, such as `LlamaModel`."""
        return self.model._modules[self.layout.backbone]  # type: ignore[return-value]

    @property
    def embedding(self) -> Tensor:
        """The weight of the embedding."""
        return self.backbone._modules[self.layout.embedding].weight  # type: ignore[union-attr, return-value]

    @property
    def rotary(self) -> Any:
        """The RoPE module."""
        return self.backbone._modules[self.layout.rotary]

    @property
    def embedding_factors(self) -> tuple[tuple[Mapping[str, Any], str, Any], ...]:
        """The factors of embeddings: for each the dictionary that keeps it, its name, its value."""
        embedding = self.backbone._modules[self.layout.embedding]
        places = (
            (embedding._buffers, causal_lm.EMBEDDING_BUFFER),  # type: ignore[union-attr]
            (self.backbone.__dict__, causal_lm.EMBEDDING_MULTIPLIER),
        )
        return tuple(
            (owner, name, owner[name]) for owner, name in places if owner.get(name) is not None
        )

    def embedding_scale(self, dtype: torch.dtype) -> float:
        """Return the factor of embeddings in a dtype."""
        return math.prod(
            float(value.to(dtype) if isinstance(value, Tensor) else value)
            for *_, value in self.embedding_factors
        )

    def own_head(self, x: Tensor, convert: Callable[[nn.Module], Any] | None = None) -> Tensor:
        """Return the logits of hidden states x (rows, width) by the model's own modules.

        Args:
            x: The hidden states that the last layer gives.
            convert: Makes replacements of the last norm and the head. None: the model's own.
        """
        layout = self.layout
        norm, head = self.backbone._modules[layout.norm], self.model._modules[layout.head]
        inner = {} if convert is None else {layout.norm: convert(norm)}  # type: ignore[arg-type]
        outer = {} if convert is None else {layout.head: convert(head)}  # type: ignore[arg-type]
        model = self.with_layer_forward(lambda *_, **__: x[:, None], inner, outer)
        ids = torch.zeros(x.shape[0], 1, dtype=torch.long, device=x.device)
        return model.forward(input_ids=ids, use_cache=False).logits[:, 0]  # type: ignore[no-any-return]

    def with_layer_forward(
        self,
        forward: Callable[..., Tensor],
        inner: Mapping[str, Any],
        outer: Mapping[str, Any],
    ) -> Any:
        """Return a stand-in of the model whose layers run `forward`.

        Args:
            forward: What each layer runs.
            inner: Replacements of children of the backbone.
            outer: Replacements of children of the model.
        """
        layout, backbone = self.layout, self.backbone
        layers: Any = stand_in(backbone._modules[layout.layers], {})  # type: ignore[arg-type]
        layers.__dict__["_modules"] = {
            name: stand_in(layer, {"forward": forward}) for name, layer in layers._modules.items()
        }
        rotary = with_own_buffers(self.rotary)
        children = {layout.layers: layers, layout.rotary: rotary, **inner}
        hollow = stand_in(backbone, {"_modules": {**backbone._modules, **children}})
        outer = {layout.backbone: hollow, **outer}
        return stand_in(self.model, {"_modules": {**self.model._modules, **outer}})


@dataclass(frozen=True)
class RejectedModule:
    """A module that looks like a block and is not one."""

    #: The module's name in the model.
    name: str
    #: The pattern that it looks like.
    pattern: str
    reason: str


class Matches(NamedTuple):
    """What was found in a model."""

    #: What can be swapped, outermost modules first.
    modules: list[Match]
    #: What looks like a block but cannot be swapped.
    rejected: list[RejectedModule]
    #: The whole model for decoding steps, or why steps run its own forward.
    causal: CausalMatch | Rejected
