"""How a module computes if kernels do some of its parts.

Probes confirm these forwards, and swapped modules run them. Attention is never rewritten here. Its
stock forward runs on a stand-in for `self`, whose projections return what a kernel has computed. So
RoPE, q and k norms, cache, window, softcap and attention backend are those of the installed
version of transformers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from mirage_hf.layers.operands import LiveOperands, OperandTable, submodule
from mirage_hf.layers.part import adapter_role, first_mlp_role
from mirage_hf.layers.stand_in import stand_in
from mirage_hf.patterns import decoder_layer
from mirage_hf.patterns.lora import BlockAdapters
from mirage_hf.patterns.schema import LayerLayout, MlpLayout

#: Runs a part's program: operands in the program's order to outputs.
Kernel = Callable[[Sequence[Tensor]], list[Tensor]]

SomeComposition = TypeVar("SomeComposition", bound="PartRunner")


class PartRunner:
    """Runs parts of a live module. The base of whole modules, decoding steps and prefills.

    Children that stay stock are looked up at each call, because they may be replaced at any time.
    """

    def __init__(self, operands: OperandTable):
        """Run the parts whose weights are in `operands`."""
        self.operands: LiveOperands = operands
        self.parts = operands.parts
        #: The adapters in each part's linears, and the widths of packed linears.
        self.adapters: dict[str, tuple[BlockAdapters, tuple[int, ...]]] = {}
        for role, part in self.parts.items():
            sizes = dict(part.block.sizes)
            if sizes.get("lora") is not None:
                widths = sizes["n"] if isinstance(sizes["n"], tuple) else ()
                self.adapters[role] = sizes["lora"], widths

    def over(self: SomeComposition, operands: LiveOperands | None) -> SomeComposition:
        """Return the same computation over other operands. Dynamo can trace this."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.__dict__["operands"] = operands
        return other

    def run_part(
        self, kernels: Mapping[str, Kernel], role: str, x: Tensor, *rest: Tensor
    ) -> Tensor:
        """Run one part.

        Args:
            kernels: What runs the parts, by role.
            role: Which part.
            x: Its first operand (rows, k).
            rest: The operands that come after the weights, such as the residual.
        """
        x = x.contiguous()
        low: list[Tensor] = []
        if role in self.adapters:
            adapters, widths = self.adapters[role]
            low = adapters.low_operands(self.run_part(kernels, adapter_role(role), x), widths)
        return kernels[role]([x, *low, *self.operands.views(role), *rest])[0]


class Composition(PartRunner, ABC):
    """The whole forward of a module, with kernels for the parts that have one."""

    @abstractmethod
    def __call__(
        self, kernels: Mapping[str, Kernel], x: Tensor, kwargs: Mapping[str, Any]
    ) -> Tensor:
        """Return the module's output. Roles that `kernels` lacks run stock."""


# -- parts of a decoder layer that several forwards share ------------------------------------------


def residual_multiplier(layer: nn.Module) -> float:
    """Return the factor that a layer's attributes give for its additions to the residual, or 1."""
    values = (layer.__dict__.get(name) for name in decoder_layer.MULTIPLIERS)
    return float(next((v for v in values if isinstance(v, int | float)), 1.0))


def any_norm(layer: nn.Module, layout: LayerLayout) -> Any:
    """Return one of a layer's norms. Its weight has the layer's width, dtype and device."""
    return layer._modules[layout.norms[0]]


def apply_norm(children: Mapping[str, Any], norm: str, x: Tensor) -> Tensor:
    """Apply the norm of that name to x. Return x itself if the name is ""."""
    return children[norm](x) if norm else x  # type: ignore[no-any-return]


def apply_own_mlp(children: Mapping[str, Any], mlp: str, x: Tensor) -> Tensor:
    """Apply the MLP of that name to x. Drop the scores that an MLP with a router may return."""
    y = children[mlp](x)
    return y[0] if isinstance(y, tuple) else y


def add_to_residual(
    children: Mapping[str, Any], norm: str, multiplier: float, residual: Tensor, y: Tensor
) -> Tensor:
    """Return residual + multiplier · norm(y), where y is what attention or the MLP gave."""
    y = apply_norm(children, norm, y)
    return residual + (y if multiplier == 1 else y * multiplier)


def _identity(x: Tensor) -> Tensor:
    return x


# -- whole modules ---------------------------------------------------------------------------------


class LayerComposition(Composition):
    """A decoder layer (patterns/decoder_layer.py). Roles: qkv, out, gated or up, down.

    Attention always runs stock here. Its kernels serve decoding steps only (layers/step.py).
    """

    def __init__(
        self,
        layer: nn.Module,
        operands: OperandTable,
        layout: LayerLayout,
        mlp: MlpLayout | None,
    ):
        """Compose `layer` of the parts in `operands`. `mlp` is None if the MLP runs stock."""
        super().__init__(operands)
        self.layout = layout
        self.mlp_layout = mlp
        self.multiplier = residual_multiplier(layer)
        qkv = self.parts.get("qkv")
        self.qkv_widths = list(dict(qkv.block.sizes)["n"]) if qkv else []
        self.first = first_mlp_role(self.parts)
        self.fused_norm = bool(self.first) and dict(self.parts[self.first].block.sizes)["norm"]

    def __call__(
        self, kernels: Mapping[str, Kernel], x: Tensor, kwargs: Mapping[str, Any]
    ) -> Tensor:
        """Return the layer's output for x (batch, length, width)."""
        batch, length, width = x.shape
        flat = x.reshape(-1, width).contiguous()
        h = self._attention(kernels, x, flat, kwargs)
        mlp_input = flat if self.layout.parallel else h
        return self._mlp(kernels, mlp_input, h, batch, length).view(batch, length, width)

    def _attention(
        self, kernels: Mapping[str, Kernel], x: Tensor, flat: Tensor, kwargs: Mapping[str, Any]
    ) -> Tensor:
        """Return the residual after attention (rows, width)."""
        layout, children = self.layout, self.operands.children
        computed: dict[str, Any] = {}
        if "qkv" in kernels:
            packed = self.run_part(kernels, "qkv", flat).view(*x.shape[:-1], -1)
            projected = packed.split(self.qkv_widths, -1)
            for name, y in zip(layout.projections, projected, strict=True):
                computed[name] = lambda _, y=y: y
            inner = x  # attention reads only its shape
        else:
            inner = apply_norm(children, layout.norm, x)
        if "out" in kernels:
            computed[layout.output] = _identity
        out = self._own_attention(inner, computed, kwargs).reshape(flat.shape[0], -1)
        if "out" in kernels:
            return self.run_part(kernels, "out", out, flat)
        return add_to_residual(children, layout.after, self.multiplier, flat, out)

    def _own_attention(
        self, x: Tensor, computed: Mapping[str, Any], kwargs: Mapping[str, Any]
    ) -> Tensor:
        """Run the stock forward of attention, with `computed` in place of some of its linears."""
        attention = self.operands.children[self.layout.attention]
        kwargs = {"attention_mask": None, **kwargs}
        if not computed:
            return attention(hidden_states=x, **kwargs)[0]  # type: ignore[no-any-return]
        forward = type(attention).forward
        return forward(stand_in(attention, computed), hidden_states=x, **kwargs)[0]  # type: ignore[no-any-return]

    def _mlp(
        self, kernels: Mapping[str, Kernel], x: Tensor, h: Tensor, batch: int, length: int
    ) -> Tensor:
        """Return the layer's output, from the MLP's input x and the residual h (rows, width)."""
        layout, children = self.layout, self.operands.children
        mlp = children[layout.mlp]
        if self.first in kernels:
            normed = x if self.fused_norm else apply_norm(children, layout.mlp_norm, x)
            inner = self.run_part(kernels, self.first, normed)
            if "down" in kernels:
                return self.run_part(kernels, "down", inner, h)
            y = submodule(mlp, self.mlp_layout.down)(inner)  # type: ignore[union-attr]
            return add_to_residual(children, layout.mlp_after, self.multiplier, h, y)
        normed = apply_norm(children, layout.mlp_norm, x.view(batch, length, -1))
        if "down" in kernels and self.mlp_layout is not None:
            forward = type(mlp).forward
            inner = forward(stand_in(mlp, {self.mlp_layout.down: _identity}), normed)
            return self.run_part(kernels, "down", inner.reshape(h.shape[0], -1), h)
        y = apply_own_mlp(children, layout.mlp, normed).reshape(h.shape)
        return add_to_residual(children, layout.mlp_after, self.multiplier, h, y)


class MlpComposition(Composition):
    """A gated MLP on its own. Role: gated, without a norm. Its down projection stays stock."""

    def __init__(self, mlp: nn.Module, operands: OperandTable, layout: MlpLayout):
        """Compose `mlp` of the part in `operands`."""
        super().__init__(operands)
        self.down = layout.down

    def __call__(
        self, kernels: Mapping[str, Kernel], x: Tensor, kwargs: Mapping[str, Any]
    ) -> Tensor:
        """Return the MLP's output for x (…, width)."""
        inner = self.run_part(kernels, "gated", x.reshape(-1, x.shape[-1]))
        return self.operands.children[self.down](inner.view(*x.shape[:-1], -1))  # type: ignore[no-any-return]


class LoraComposition(Composition):
    """A PEFT linear with its adapter. Role: lora."""

    def __init__(self, linear: nn.Module, operands: OperandTable):
        """Compose `linear` of the part in `operands`."""
        super().__init__(operands)

    def __call__(
        self, kernels: Mapping[str, Kernel], x: Tensor, kwargs: Mapping[str, Any]
    ) -> Tensor:
        """Return the linear's output for x (…, width)."""
        y = self.run_part(kernels, "lora", x.reshape(-1, x.shape[-1]))
        return y.view(*x.shape[:-1], -1)
