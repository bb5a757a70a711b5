"""PEFT's LoRA linears: one plain unmerged adapter of each, as operands of the blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from mirage_hf.errors import Rejected
from mirage_hf.layers.part import Part, adapter_role, norm_parameters
from mirage_hf.match import plain
from mirage_hf.ops import table
from mirage_hf.patterns.lora import LORA_DOWN, BlockAdapters

#: For scalings that are tensors, the version that was read and its number. Reading a tensor on a
#: GPU waits for everything that runs there.
_read_scalings: Any = WeakIdKeyDictionary()


def scaling_of(scaling: float | Tensor) -> float:
    """Return an adapter's scaling as a number.

    PEFT's preparation for hot-swapping makes tensors of scalings, which it writes in place. A
    tensor is read once, and again after each write.
    """
    if not isinstance(scaling, Tensor):
        return float(scaling)
    version = None if scaling.is_inference() else scaling._version
    known = _read_scalings.get(scaling)
    if known is None or version is None or known[0] != version:
        known = _read_scalings[scaling] = version, float(scaling)
    return known[1]  # type: ignore[no-any-return]


class Adapter(NamedTuple):
    """The one active adapter of a PEFT linear."""

    name: str
    lora_a: nn.Linear
    lora_b: nn.Linear
    scaling: float

    @property
    def rank(self) -> int:
        """The rank of the adapter."""
        return self.lora_a.out_features


class Linear(NamedTuple):
    """A linear of a layer, with or without an adapter."""

    #: The path of the module in the layer.
    path: str
    #: The nn.Linear: the module itself, or PEFT's base layer in it.
    base: nn.Linear
    adapter: Adapter | None

    @property
    def base_path(self) -> str:
        """The path of the nn.Linear."""
        return self.path if self.adapter is None else f"{self.path}.base_layer"

    @property
    def bypassed(self) -> tuple[str, ...]:
        """The modules that are bypassed with the linear, except for the lora_A of its adapter."""
        if self.adapter is None:
            return (self.path,)
        return self.path, self.base_path, f"{self.path}.lora_B.{self.adapter.name}"

    @property
    def weights(self) -> list[tuple[str, str]]:
        """The weight of the nn.Linear, and its bias if it has one."""
        names = ["weight"] if self.base.bias is None else ["weight", "bias"]
        return [(self.base_path, name) for name in names]


def match_linears(
    parent: nn.Module, prefix: str, names: Sequence[str], allow_adapters: bool
) -> list[Linear] | Rejected:
    """Return the linears `names` of a module in a layer.

    Args:
        parent: The module.
        prefix: Its path in the layer, with a dot at the end, or "".
        names: The names of the linears.
        allow_adapters: Whether they may be PEFT linears.
    """
    linears = []
    for name in names:
        module: Any = parent._modules.get(name)
        if not allow_adapters or not is_lora(module):
            if no := plain.check_child(parent, name, plain.LINEAR):
                return no
            linears.append(Linear(prefix + name, module, None))
            continue
        adapter = plain.check_child(parent, name, plain.CONTAINER) or match_adapter(module)
        if isinstance(adapter, Rejected):
            return Rejected(f"{name}: {adapter.reason}")
        linears.append(Linear(prefix + name, module.base_layer, adapter))
    return linears


def adapter_sizes(linears: Sequence[Linear], packed: bool) -> dict[str, Any] | Rejected:
    """Return the adapters of linears that read one x, as a size of their block.

    Args:
        linears: The linears of the block. The result is empty if none has an adapter.
        packed: Whether the block packs the outputs of the linears into one row.
    """
    adapters = [linear.adapter for linear in linears if linear.adapter is not None]
    if not adapters:
        return {}
    dtypes = {adapter.lora_a.weight.dtype for adapter in adapters}
    ranks = {adapter.rank for adapter in adapters}
    if len(dtypes) > 1 or (packed and len(ranks) > 1):
        names = ", ".join(linear.path.rpartition(".")[2] for linear in linears)
        return Rejected(f"adapters of {names} differ in rank or dtype")
    each = tuple(0 if linear.adapter is None else linear.adapter.rank for linear in linears)
    return {"lora": BlockAdapters(each, dtypes.pop(), packed)}


def with_adapters(
    part: Part, linears: Sequence[Linear], norm: str, norm_sizes: Mapping[str, Any]
) -> tuple[Part, ...]:
    """Return a part, preceded by the part that computes x · Aᵀ of its linears' LoRA adapters.

    If no linear has an adapter, the part is returned alone.

    Args:
        part: The part.
        linears: Its linears.
        norm: The path of the norm before them, or "".
        norm_sizes: The sizes of that norm.
    """
    adapted = [(linear, linear.adapter) for linear in linears if linear.adapter is not None]
    if not adapted:
        return (part,)
    first, first_adapter = adapted[0]
    block = LORA_DOWN.block(
        k=first.base.in_features,
        r=tuple(adapter.rank for _, adapter in adapted),
        **norm_sizes,
        dtype=first.base.weight.dtype,
        adapter_dtype=first_adapter.lora_a.weight.dtype,
    )
    downs = [f"{linear.path}.lora_A.{adapter.name}" for linear, adapter in adapted]
    dropouts = [f"{linear.path}.lora_dropout.{adapter.name}" for linear, adapter in adapted]
    paths = tuple(linear.path for linear, _ in adapted)
    norms = (norm,) if norm else ()
    down_part = Part(
        adapter_role(part.role),
        block,
        weights=(*norm_parameters(norm, norm_sizes), *((path, "weight") for path in downs)),
        bypassed=(*norms, *downs, *dropouts),
        adapters=paths,
        scalings=tuple(adapter.scaling for _, adapter in adapted),
    )
    return down_part, replace(part, adapters=paths)


def lora_b_parameters(linears: Sequence[Linear]) -> list[tuple[str, str]]:
    """Return the adapter weights that the block of the linears reads."""
    return [
        (f"{linear.path}.lora_B.{linear.adapter.name}", "weight")
        for linear in linears
        if linear.adapter is not None
    ]


def is_lora(module: nn.Module | None) -> bool:
    """Return whether a module is PEFT's LoRA linear."""
    return type(module).__name__ == "Linear" and type(module).__module__ == "peft.tuners.lora.layer"


# -- the state of a PEFT linear --------------------------------------------------------------------


def active_adapters(linear: Any) -> list[str]:
    """Return the names of a PEFT linear's active adapters."""
    active = linear._active_adapter
    return [active] if isinstance(active, str) else list(active)


def _merged(m: Any) -> str | None:
    if not m.merged_adapters:
        return None
    return f"has adapters merged into its weight ({', '.join(m.merged_adapters)})"


def _not_one_active(m: Any) -> str | None:
    active = active_adapters(m)
    if len(active) == 1:
        return None
    return f"has {len(active)} active adapters ({', '.join(active)}); kernels take one"


def _no_adapter_weights(m: Any) -> str | None:
    (active,) = active_adapters(m)
    return None if active in m.lora_A else f"has no weights for the active adapter {active}"


def _is_variant(m: Any) -> str | None:
    (active,) = active_adapters(m)
    is_dora = getattr(m, "use_dora", {}).get(active)
    if active in getattr(m, "lora_variant", {}) or is_dora:
        return "uses a LoRA variant (DoRA, aLoRA or another)"
    return None


#: Rules for a PEFT forward that is the base layer plus one adapter. The first one that is broken
#: gives the reason. The rules after `_not_one_active` rely on it.
_LORA_RULES: tuple[Callable[[Any], str | None], ...] = (
    lambda m: "has a forward of its own on the instance" if "forward" in m.__dict__ else None,
    lambda m: "has its adapters disabled" if m._disable_adapters else None,
    _merged,
    _not_one_active,
    _no_adapter_weights,
    _is_variant,
    lambda m: "stores its weight as (in, out)" if getattr(m, "fan_in_fan_out", False) else None,
    lambda m: (
        None if getattr(m, "cast_input_dtype_enabled", True) else "has input casting disabled"
    ),
)


def match_adapter(linear: Any) -> Adapter | Rejected:
    """Return the one plain adapter that a PEFT linear runs with, unmerged."""
    for rule in _LORA_RULES:
        if reason := rule(linear):
            return Rejected(f"the layer {reason}")
    (name,) = active_adapters(linear)
    no = plain.check_children(
        (linear, "base_layer", plain.LINEAR),
        (linear.lora_A, name, plain.LINEAR),
        (linear.lora_B, name, plain.LINEAR),
    )
    if no is not None:
        return no
    base, lora_a, lora_b = linear.base_layer, linear.lora_A[name], linear.lora_B[name]
    if lora_a.bias is not None or lora_b.bias is not None:
        return Rejected(f"adapter {name} has a bias (lora_bias)")
    base_dtype, dtype, device = base.weight.dtype, lora_a.weight.dtype, base.weight.device
    no = plain.check_same_weights([lora_a, lora_b], dtype, device) or plain.check_same_weights(
        [base], base_dtype, device
    )
    if no is not None:
        return no
    if torch.promote_types(base_dtype, dtype) not in (base_dtype, dtype):
        return Rejected(
            f"mixes {table.dtype_name(base_dtype)} weights and a {table.dtype_name(dtype)} adapter"
        )
    return Adapter(name, lora_a, lora_b, scaling_of(linear.scaling[name]))
