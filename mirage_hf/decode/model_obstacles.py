"""Why a call cannot use the cache pool or CUDA graphs, because of the model or torch's state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

#: Modules that compute the same in both modes: resized embeddings and new adapters arrive in
#: training mode.
_SAME_IN_TRAINING = frozenset(
    {
        nn.Linear,
        nn.Embedding,
        nn.Identity,
        nn.Sequential,
        nn.ModuleList,
        nn.ModuleDict,
        nn.ParameterList,
        nn.ParameterDict,
    }
)


def model_obstacle(
    kinds: Sequence[type],
    states: Sequence[dict[str, Any]],
    training: Sequence[bool],
    hooked: Sequence[nn.Module],
    unusual_parameter: str | None,
    devices: set[torch.device],
) -> str | None:
    """Return why a model needs the stock method, or None.

    Args:
        kinds: Classes of the modules.
        states: Attribute dictionaries of the modules.
        training: Whether each module is in training mode.
        hooked: Modules with forward hooks.
        unusual_parameter: Class of a parameter that is neither a Parameter nor a Tensor, if any.
        devices: Devices of the parameters.
    """
    return (
        _in_training(kinds, training)
        or _hooked(hooked)
        or _wrapped(states)
        or (f"weights of type {unusual_parameter}" if unusual_parameter else None)
        or _on_devices(devices)
    )


def global_obstacle(device: torch.device) -> str | None:
    """Return why torch's state needs the stock method, or None."""
    every_module = nn.modules.module
    if every_module._global_forward_hooks or every_module._global_forward_pre_hooks:
        return "global forward hooks"
    if torch.is_autocast_enabled(device.type):
        return "autocast"
    if torch.compiler.is_compiling():
        return "inside torch.compile"
    return None


def why_no_graph() -> str | None:
    """Return why steps must be called, or None.

    A dispatch mode does not see the ops of a replay.
    """
    return "a torch dispatch mode is active" if torch._C._len_torch_dispatch_stack() else None


def _in_training(kinds: Sequence[type], training: Sequence[bool]) -> str | None:
    if not any(training):
        return None
    for kind, is_training in zip(kinds, training, strict=True):
        if is_training and kind not in _SAME_IN_TRAINING:
            return f"training mode ({kind.__name__})"
    return None


def _hooked(modules: Sequence[nn.Module]) -> str | None:
    for module in modules:
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            if name := _foreign_hook_name(hooks):
                return f"forward hook {name} on {type(module).__name__}"
    return None


def _foreign_hook_name(hooks: dict[int, Any]) -> str | None:
    """Return a hook that is not HF's own output capture, which is idle while unused."""
    for hook in hooks.values():
        if not (getattr(hook, "__module__", None) or "").startswith("transformers."):
            return getattr(hook, "__qualname__", type(hook).__name__)
    return None


def _wrapped(states: Sequence[dict[str, Any]]) -> str | None:
    for state in states:
        if "_hf_hook" in state:
            return "accelerate hooks"
        if state.get("_compiled_call_impl") is not None:
            return "a compiled module"
    return None


def layers_out_of_place(modules: Sequence[tuple[type, dict[str, Any]]]) -> str | None:
    """Return why layers are not numbered 0, 1, 2, … in their order, or None.

    If one number is used twice, every step adds two keys to one layer of stock's cache. A block has
    a slot for one. If layers were moved, or numbers are missing, masks go by place and caches by
    number. Without layer 0 stock takes every cache to be empty.
    """
    numbers: dict[type, list[int]] = {}
    for kind, state in modules:
        if isinstance(number := state.get("layer_idx"), int):
            numbers.setdefault(kind, []).append(number)
    for kind, own in numbers.items():
        if len(set(own)) < len(own):
            twice = next(number for n, number in enumerate(own) if number in own[:n])
            return f"more than one {kind.__name__} has the layer_idx {twice}"
        if own != sorted(own):
            return f"{kind.__name__}s that are not in the order of their layer_idx"
    present = {number for own in numbers.values() for number in own}
    for number in range(max(present, default=0)):
        if number not in present:
            return f"no layer with the layer_idx {number}"
    return None


def _on_devices(devices: set[torch.device]) -> str | None:
    if len(devices) > 1:
        return "weights on several devices: " + ", ".join(sorted(map(str, devices)))
    kind = next((device.type for device in devices), "cpu")
    return None if kind in ("cpu", "cuda") else f"device type {kind}"
