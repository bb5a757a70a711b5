"""What a child must be so that a kernel may read its weights in its place: a plain nn.Linear, norm or activation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mirage_hf.errors import Rejected
from mirage_hf.ops import table

CAPTURE_MODULE = "transformers.utils.output_capturing"
IDLE = (nn.Dropout, nn.Identity)
"""Modules that do nothing outside training: layers and models may have any of them, and kernels leave them out."""
ALIGNMENT = 16
"""Bytes. Kernels are compiled for addresses that are multiples of it."""


def foreign_hook(module: nn.Module) -> str | None:
    """Name a forward hook that is not HF's own output capture (which stays installed and does nothing while unused)."""
    for kind in ("_forward_pre_hooks", "_forward_hooks"):
        for hook in module.__dict__[kind].values():
            if getattr(hook, "__module__", None) != CAPTURE_MODULE:
                return getattr(hook, "__qualname__", type(hook).__name__)
    return None


def _own_forward(m: nn.Module) -> str | None:
    return (
        "has a forward of its own on the instance (kernelize, Liger, tensor parallel)"
        if "forward" in m.__dict__
        else None
    )


def _hooked(m: nn.Module) -> str | None:
    return f"has a forward hook ({foreign_hook(m)})" if foreign_hook(m) else None


def _training(m: nn.Module) -> str | None:
    return "is in training mode" if m.training else None


def _exact_linear(m: nn.Module) -> str | None:
    if type(m) is nn.Linear:
        return None
    kind = f"{type(m).__module__.split('.')[0]}'s {type(m).__qualname__}"
    return f"is {'an adapter layer, ' if hasattr(m, 'base_layer') else ''}{kind}, not a plain nn.Linear"


def _plain_weights(m: nn.Module) -> str | None:
    for name, p in m._parameters.items():
        if p is None:
            continue
        if type(p) is not nn.Parameter:
            return f"has a {name} of type {type(p).__name__} (quantized or distributed)"
        if p.dtype not in table.COMPUTE_DTYPES:
            return f"has a {name} of {table.dtype_name(p.dtype)}; kernels take float16, bfloat16 and float32"
        if not p.is_contiguous():
            return f"has a {name} that is not contiguous"
        if p.device.type == "meta":
            return f"has a {name} on the meta device"
        if p.device.type == "cuda" and p.data_ptr() % ALIGNMENT:
            return f"has a {name} at an address that is no multiple of {ALIGNMENT}, so that it cannot be read in whole vectors"
    return None


def _norm_weights(m: nn.Module, dims: int = 1) -> str | None:
    given = {n: p for n, p in m._parameters.items() if p is not None}
    if (
        m._modules
        or m._buffers
        or not {"weight"} <= given.keys() <= {"weight", "bias"}
        or any(p.dim() > dims for p in given.values())
    ):
        return f"is {type(m).__name__}, not a norm with one weight vector, and at most a bias"
    return None


def _head_norm_weights(m: nn.Module) -> str | None:
    return _norm_weights(m, 2)


def _one_embedding(m: nn.Module) -> str | None:
    if not isinstance(m, nn.Embedding) or m._modules or list(m._parameters) != ["weight"]:
        return f"is {type(m).__module__.split('.')[0]}'s {type(m).__qualname__}, not an nn.Embedding with one weight"
    return "renormalises its rows (max_norm)" if m.max_norm is not None else None


def _no_state(m: nn.Module) -> str | None:
    return "has parameters or children" if m._modules or m._parameters or m._buffers else None


ModuleRule = Callable[[nn.Module], "str | None"]
_ANY: tuple[ModuleRule, ...] = (_own_forward, _hooked, _training)
LINEAR: tuple[ModuleRule, ...] = (_exact_linear, *_ANY, _plain_weights)
NORM: tuple[ModuleRule, ...] = (*_ANY, _norm_weights, _plain_weights)
HEAD_NORM: tuple[ModuleRule, ...] = (*_ANY, _head_norm_weights, _plain_weights)
EMBEDDING: tuple[ModuleRule, ...] = (_one_embedding, _own_forward, _hooked, _plain_weights)
ACTIVATION: tuple[ModuleRule, ...] = (*_ANY, _no_state)
CONTAINER: tuple[ModuleRule, ...] = _ANY


def refuse(parent: nn.Module, name: str, rules: tuple[ModuleRule, ...]) -> Rejected | None:
    """Return why the child `name` of `parent` may not be bypassed, or None."""
    m = parent._modules.get(name)
    if m is None:
        others = [n for n in parent._modules if n != name]
        return Rejected(f"has no {name} (it has {', '.join(others) or 'no children'})")
    for rule in rules:
        if reason := rule(m):
            return Rejected(f"{name} {reason}")
    return None


def first_refusal(*checks: tuple[nn.Module, str, tuple[ModuleRule, ...]]) -> Rejected | None:
    """The first refusal among (parent, child name, rules)."""
    return next((r for check in checks if (r := refuse(*check)) is not None), None)


def same_weights(modules: list[nn.Module], of: torch.dtype, on: torch.device) -> Rejected | None:
    """Refuse modules whose weights differ from `of` and `on`."""
    for m in modules:
        for p in m._parameters.values():
            if p is not None and (p.dtype != of or p.device != on):
                return Rejected(
                    f"a weight is {table.dtype_name(p.dtype)} on {p.device}, others are {table.dtype_name(of)} on {on}"
                )
    return None


def scalars(module: nn.Module) -> tuple[Any, ...]:
    """What a module's forward may depend on besides its weights: plain attributes of it, its layer number left out."""
    kinds = (int, float, str, bool, type(None), tuple)
    return tuple(
        sorted(
            (k, repr(v))
            for k, v in module.__dict__.items()
            if k not in ("layer_idx", "training") and (isinstance(v, kinds) or callable(v))
        )
    )
