"""The rules for a child whose weights a kernel may read instead of calling the child.

Each kind of child has a tuple of rules. A rule returns why a module breaks it, or None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mirage_hf.errors import Rejected
from mirage_hf.formats import CodedWeight, coded_weight
from mirage_hf.formats.experts import replaced_forward
from mirage_hf.ops import table

#: The module of HF's output capture. Its hooks stay installed and do nothing while unused.
CAPTURE_MODULE = "transformers.utils.output_capturing"

#: Modules that do nothing outside training. Kernels leave them out.
IDLE = (nn.Dropout, nn.Identity)

#: Kernels are compiled for addresses that are multiples of this many bytes.
ALIGNMENT = 16


def foreign_hook(module: nn.Module) -> str | None:
    """Return the name of a forward hook that is not HF's own output capture, or None."""
    for kind in ("_forward_pre_hooks", "_forward_hooks"):
        for hook in module.__dict__[kind].values():
            if getattr(hook, "__module__", None) != CAPTURE_MODULE:
                return getattr(hook, "__qualname__", type(hook).__name__)
    return None


def library_of(module: nn.Module) -> str:
    """Return the package and class of a module, such as "peft's Linear"."""
    return f"{type(module).__module__.split('.')[0]}'s {type(module).__qualname__}"


# -- rules -----------------------------------------------------------------------------------------


def _own_forward(m: nn.Module) -> str | None:
    # a mixture in MXFP4 has its library's forward, and runs as a whole with it or without
    if "forward" not in m.__dict__ or replaced_forward(m):
        return None
    return "has a forward of its own on the instance (from kernelize, Liger or tensor parallelism)"


def _hooked(m: nn.Module) -> str | None:
    hook = foreign_hook(m)
    return f"has a forward hook ({hook})" if hook else None


def _training(m: nn.Module) -> str | None:
    return "is in training mode; call eval() on it" if m.training else None


def _coded(m: nn.Module) -> str | None:
    weight = coded_weight(m)
    if isinstance(weight, CodedWeight):
        return f"has a weight in codes ({weight.coding.describe()}), which traced steps read"
    return None if weight is None else f"has a weight in codes ({weight.reason})"


def _exact_linear(m: nn.Module) -> str | None:
    if type(m) is nn.Linear:
        return None
    adapter = "an adapter layer, " if hasattr(m, "base_layer") else ""
    return f"is {adapter}{library_of(m)}, not a plain nn.Linear"


def _plain_weights(m: nn.Module) -> str | None:
    for name, p in m._parameters.items():
        if p is None:
            continue
        if type(p) is not nn.Parameter:
            return f"has a {name} of type {type(p).__name__} (quantized or distributed)"
        if p.dtype not in table.COMPUTE_DTYPES:
            dtype = table.dtype_name(p.dtype)
            return f"has a {name} of {dtype}; kernels take float16, bfloat16 and float32"
        if not p.is_contiguous():
            return f"has a {name} that is not contiguous"
        if p.device.type == "meta":
            return f"has a {name} on the meta device; load the weights first"
        if p.device.type == "cuda" and p.data_ptr() % ALIGNMENT:
            return f"has a {name} that is not {ALIGNMENT}-byte aligned, as vector loads need it"
    return None


def _norm_weights(m: nn.Module, dims: int = 1) -> str | None:
    weights = {name: p for name, p in m._parameters.items() if p is not None}
    is_norm = (
        not m._modules
        and not m._buffers
        and {"weight"} <= weights.keys() <= {"weight", "bias"}
        and all(p.dim() <= dims for p in weights.values())
    )
    if is_norm:
        return None
    return f"is {type(m).__name__}, not a norm with one weight vector and at most a bias"


def _head_norm_weights(m: nn.Module) -> str | None:
    return _norm_weights(m, dims=2)


def _one_embedding(m: nn.Module) -> str | None:
    if not isinstance(m, nn.Embedding) or m._modules or list(m._parameters) != ["weight"]:
        return f"is {library_of(m)}, not an nn.Embedding with one weight"
    return "renormalises its rows (max_norm)" if m.max_norm is not None else None


def _no_state(m: nn.Module) -> str | None:
    return "has parameters or children" if m._modules or m._parameters or m._buffers else None


#: Returns why a module breaks the rule, or None.
ModuleRule = Callable[[nn.Module], "str | None"]

CONTAINER: tuple[ModuleRule, ...] = (_own_forward, _hooked, _training)
LINEAR: tuple[ModuleRule, ...] = (_coded, _exact_linear, *CONTAINER, _plain_weights)
NORM: tuple[ModuleRule, ...] = (*CONTAINER, _norm_weights, _plain_weights)
#: For a norm that is called. Its hooks run, and it computes the same in training mode.
CALLED_NORM: tuple[ModuleRule, ...] = (_own_forward, _norm_weights, _plain_weights)
HEAD_NORM: tuple[ModuleRule, ...] = (*CONTAINER, _head_norm_weights, _plain_weights)
EMBEDDING: tuple[ModuleRule, ...] = (_one_embedding, _own_forward, _hooked, _plain_weights)
ACTIVATION: tuple[ModuleRule, ...] = (*CONTAINER, _no_state)


# -- checks ----------------------------------------------------------------------------------------


def check_child(parent: nn.Module, name: str, rules: tuple[ModuleRule, ...]) -> Rejected | None:
    """Return why the child `name` of `parent` may not be bypassed, or None."""
    child = parent._modules.get(name)
    if child is None:
        others = [other for other in parent._modules if other != name]
        return Rejected(f"has no {name} (it has {', '.join(others) or 'no children'})")
    for rule in rules:
        if reason := rule(child):
            return Rejected(f"{name} {reason}")
    return None


def check_children(*children: tuple[nn.Module, str, tuple[ModuleRule, ...]]) -> Rejected | None:
    """Return the first rejection among (parent, child name, rules), or None."""
    return next((no for child in children if (no := check_child(*child)) is not None), None)


def check_no_others(parent: nn.Module, known: set[str], prefix: str) -> Rejected | None:
    """Reject a module with children that are neither known nor idle.

    Args:
        parent: The module.
        known: The names of its known children.
        prefix: How the reason names the module, such as "attention ".
    """
    others = [
        name
        for name, child in parent._modules.items()
        if child is not None and name not in known and not isinstance(child, IDLE)
    ]
    if not others:
        return None
    return Rejected(f"{prefix}has {', '.join(others)} too, which its layout does not name")


def check_same_weights(
    modules: list[Any], dtype: torch.dtype, device: torch.device
) -> Rejected | None:
    """Reject modules that have a weight of another dtype or on another device."""
    for module in modules:
        for p in module._parameters.values():
            if p is not None and (p.dtype != dtype or p.device != device):
                return Rejected(
                    f"a weight is {table.dtype_name(p.dtype)} on {p.device}, "
                    f"others are {table.dtype_name(dtype)} on {device}"
                )
    return None


def own_attributes(module: nn.Module) -> tuple[Any, ...]:
    """Return what a module's forward may depend on besides its weights.

    These are its plain attributes, except for its layer number.
    """
    kinds = (int, float, str, bool, type(None), tuple)
    return tuple(
        sorted(
            (name, repr(value))
            for name, value in module.__dict__.items()
            if name not in ("layer_idx", "training")
            and (isinstance(value, kinds) or callable(value))
        )
    )
