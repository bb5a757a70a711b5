"""What PEFT puts in a layer's linears: one plain adapter of each, unmerged, as operands of the blocks that the linears are part of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from mirage_hf.errors import Rejected
from mirage_hf.layers.compose import Part, adapter_role, norm_parameters
from mirage_hf.match import plain
from mirage_hf.ops import table
from mirage_hf.patterns.lora import LORA_DOWN, BlockAdapters

_read: Any = WeakIdKeyDictionary()
"""Of scalings that are tensors their version and number: reading one from a GPU waits for all that runs there."""


def scaling_of(given: float | Tensor) -> float:
    """A scaling's number. PEFT's preparation for hot-swapping makes tensors of them, which it writes in place: one is read once, and again
    after each write."""
    if not isinstance(given, Tensor):
        return float(given)
    version = None if given.is_inference() else given._version
    known = _read.get(given)
    if known is None or version is None or known[0] != version:
        known = _read[given] = version, float(given)
    return known[1]  # type: ignore[no-any-return]


class Adapter(NamedTuple):
    """PEFT's one active adapter of a linear."""

    name: str
    a: nn.Linear
    b: nn.Linear
    scaling: float


class Linear(NamedTuple):
    """A linear of a layer: the module by its path, the nn.Linear in it, and its adapter."""

    path: str
    base: nn.Linear
    adapter: Adapter | None

    @property
    def weights(self) -> str:
        """The path of the nn.Linear."""
        return self.path if self.adapter is None else f"{self.path}.base_layer"

    @property
    def paths(self) -> tuple[str, ...]:
        """What is bypassed where the linear is, but for what multiplies x in its adapter."""
        return (
            (self.path,)
            if self.adapter is None
            else (self.path, self.weights, f"{self.path}.lora_B.{self.adapter.name}")
        )


def linears_of(
    parent: nn.Module, prefix: str, names: Sequence[str], lora: bool
) -> list[Linear] | Rejected:
    """Linears of a part of a layer, by name, `prefix` being the part's path. `lora`: they may have adapters."""
    found = []
    for name in names:
        module: Any = parent._modules.get(name)
        if not lora or not is_lora(module):
            if no := plain.refuse(parent, name, plain.LINEAR):
                return no
            found.append(Linear(prefix + name, module, None))
            continue
        adapter = plain.refuse(parent, name, plain.CONTAINER) or adapter_of(module)
        if isinstance(adapter, Rejected):
            return Rejected(f"{name}: {adapter.reason}")
        found.append(Linear(prefix + name, module.base_layer, adapter))
    return found


def ups_of(linears: Sequence[Linear], packed: bool) -> dict[str, Any] | Rejected:
    """The adapters of linears that read one x as a size of their block; none where they have none."""
    adapters = [m.adapter for m in linears if m.adapter is not None]
    if not adapters:
        return {}
    ranks = tuple(0 if m.adapter is None else m.adapter.a.out_features for m in linears)
    kinds = {(x.a.weight.dtype, x.a.out_features if packed else 0) for x in adapters}
    if len(kinds) > 1:
        return Rejected(
            f"adapters of {', '.join(m.path.rpartition('.')[2] for m in linears)} differ in rank or dtype"
        )
    return {"lora": BlockAdapters(ranks, adapters[0].a.weight.dtype, packed)}


def with_adapters(
    part: Part, linears: Sequence[Linear], norm: str, sizes: Mapping[str, Any]
) -> tuple[Part, ...]:
    """A part, and before it what its linears' adapters multiply x by, where they have any. `norm`: the path of the norm before them, with
    `sizes`."""
    has = [(m, m.adapter) for m in linears if m.adapter is not None]
    if not has:
        return (part,)
    ranks = tuple(adapter.a.out_features for _, adapter in has)
    block = LORA_DOWN.block(
        k=has[0][0].base.in_features,
        r=ranks,
        **sizes,
        dtype=has[0][0].base.weight.dtype,
        adapter_dtype=has[0][1].a.weight.dtype,
    )
    downs = [f"{m.path}.lora_A.{adapter.name}" for m, adapter in has]
    weights = (*norm_parameters(norm, dict(sizes)), *((path, "weight") for path in downs))
    idle = (f"{m.path}.lora_dropout.{adapter.name}" for m, adapter in has)
    paths = tuple(m.path for m, _ in has)
    return (
        Part(
            adapter_role(part.role),
            block,
            weights,
            (*((norm,) if norm else ()), *downs, *idle),
            adapters=paths,
            scalings=tuple(adapter.scaling for _, adapter in has),
        ),
        replace(part, adapters=paths),
    )


def adapter_parameters(linears: Sequence[Linear]) -> list[tuple[str, str]]:
    """The weights of adapters that a block reads besides those of its linears."""
    return [
        (f"{m.path}.lora_B.{m.adapter.name}", "weight") for m in linears if m.adapter is not None
    ]


def is_lora(module: nn.Module | None) -> bool:
    return type(module).__name__ == "Linear" and type(module).__module__ == "peft.tuners.lora.layer"


def _lora_state(m: Any, active: list[str]) -> Iterator[str | None]:
    """What PEFT's forward would do other than base + one adapter; the first text is the reason."""
    yield "has a forward of its own on the instance" if "forward" in m.__dict__ else None
    yield "has its adapters disabled" if m._disable_adapters else None
    yield (
        f"has adapters merged into its weight ({', '.join(m.merged_adapters)})"
        if m.merged_adapters
        else None
    )
    yield (
        f"has {len(active)} active adapters ({', '.join(active)}); kernels take one"
        if len(active) != 1
        else None
    )
    yield (
        f"has no weights for the active adapter {active[0]}"
        if active and active[0] not in m.lora_A
        else None
    )
    variants = {
        **getattr(m, "lora_variant", {}),
        **{k: "DoRA" for k, on in getattr(m, "use_dora", {}).items() if on},
    }
    yield (
        "uses a LoRA variant (DoRA, aLoRA or another)" if active and active[0] in variants else None
    )
    yield "stores its weight as (in, out)" if getattr(m, "fan_in_fan_out", False) else None
    yield "has input casting disabled" if not getattr(m, "cast_input_dtype_enabled", True) else None


def adapter_of(module: nn.Module) -> Adapter | Rejected:
    """The one plain adapter that a PEFT linear runs with, unmerged."""
    m: Any = module
    active = [m._active_adapter] if isinstance(m._active_adapter, str) else list(m._active_adapter)
    if reason := next((r for r in _lora_state(m, active) if r), None):
        return Rejected(f"the layer {reason}")
    adapter = active[0]
    no = plain.first_refusal(
        (m, "base_layer", plain.LINEAR),
        (m.lora_A, adapter, plain.LINEAR),
        (m.lora_B, adapter, plain.LINEAR),
    )
    if no is not None:
        return no
    base, a, b = m.base_layer, m.lora_A[adapter], m.lora_B[adapter]
    if a.bias is not None or b.bias is not None:
        return Rejected(f"adapter {adapter} has a bias (lora_bias)")
    device = base.weight.device
    if no := plain.same_weights([a, b], a.weight.dtype, device) or plain.same_weights(
        [base], base.weight.dtype, device
    ):
        return no
    if torch.promote_types(base.weight.dtype, a.weight.dtype) not in (
        base.weight.dtype,
        a.weight.dtype,
    ):
        return Rejected(
            f"mixes {table.dtype_name(base.weight.dtype)} and {table.dtype_name(a.weight.dtype)}"
        )
    return Adapter(adapter, a, b, scaling_of(m.scaling[adapter]))
