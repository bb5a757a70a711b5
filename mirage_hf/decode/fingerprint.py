"""One walk over a model per `generate`: what its captured steps depend on, and what keeps it from the pool."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_TUNER = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling", "use_dora", "fan_in_fan_out")
"""Instance attributes of PEFT's tuner layers that decide what their forward does (FACTS: PEFT)."""

_SAME_IN_TRAINING = frozenset({nn.Linear, nn.Embedding, nn.Identity, nn.Sequential, nn.ModuleList, nn.ModuleDict,
                               nn.ParameterList, nn.ParameterDict})
"""Modules that do the same in both modes: resized embeddings and new adapters arrive in training mode."""


@dataclass(frozen=True)
class Survey:
    """What one walk found. Two surveys with equal keys describe models that run the same kernels on the same memory."""

    key: tuple[Any, ...]
    obstacle: str | None
    """Why the stock method must run, or None."""
    no_graph: str | None
    """Why the step must be called rather than replayed, or None."""


def survey(model: nn.Module) -> Survey:
    """Walk every module, parameter and buffer once. Cost: about a third of a microsecond per tensor and module."""
    key: list[Any] = []
    obstacle: str | None = None
    devices: set[torch.device] = set()
    stack: list[nn.Module] = [model]
    while stack:
        module = stack.pop()
        state = module.__dict__
        key.append(type(module))
        if state["training"] and type(module) not in _SAME_IN_TRAINING:
            obstacle = obstacle or f"training mode ({type(module).__name__})"
        for name in _HOOKS:
            if state[name] and (who := _foreign_hook(state[name])):
                obstacle = obstacle or f"forward hook {who} on {type(module).__name__}"
        if "_hf_hook" in state:
            obstacle = obstacle or "accelerate hooks"
        elif "forward" in state:
            key.append(state["forward"])  # not its id, which may come back as another's
        if "_active_adapter" in state or "merged_adapters" in state:
            key.append(repr([state.get(name) for name in _TUNER]))
        if state.get("_compiled_call_impl") is not None:
            obstacle = obstacle or "a compiled module"
        for tensor in state["_parameters"].values():
            if tensor is None:
                continue
            if type(tensor) is not nn.Parameter and type(tensor) is not Tensor:
                obstacle = obstacle or f"weights of type {type(tensor).__name__}"
                continue
            devices.add(tensor.device)
            key += (tensor.data_ptr(), tensor.dtype, tensor.shape)
        for buffer in state["_buffers"].values():
            if buffer is not None:
                key.append(buffer.data_ptr() if type(buffer) is Tensor else id(buffer))
        for child in state["_modules"].values():
            if child is not None:
                stack.append(child)
    if len(devices) > 1:
        obstacle = obstacle or "weights on several devices: " + ", ".join(sorted(map(str, devices)))
    device = next(iter(devices), torch.device("cpu"))
    if device.type not in ("cpu", "cuda"):
        obstacle = obstacle or f"device type {device.type}"
    config = getattr(model, "config", None)
    key += [device, getattr(config, "_attn_implementation", None), *_global_switches()]
    return Survey(tuple(key), obstacle or _global_obstacle(device), _no_graph(config))


def _foreign_hook(hooks: dict[int, Any]) -> str | None:
    """Return a hook that is not HF's own output capture, which does nothing while nobody collects."""
    for hook in hooks.values():
        if not (getattr(hook, "__module__", None) or "").startswith("transformers."):
            return getattr(hook, "__qualname__", type(hook).__name__)
    return None


def _global_obstacle(device: torch.device) -> str | None:
    every_module = nn.modules.module
    if every_module._global_forward_hooks or every_module._global_forward_pre_hooks:
        return "global forward hooks"
    if torch.is_autocast_enabled(device.type):
        return "autocast"
    if torch.compiler.is_compiling():
        return "inside torch.compile"
    return None


def _global_switches() -> tuple[Any, ...]:
    """Switches that choose kernels at capture time."""
    cuda = torch.backends.cuda
    return (torch.get_float32_matmul_precision(), cuda.matmul.allow_tf32, cuda.flash_sdp_enabled(), cuda.math_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled(), torch.are_deterministic_algorithms_enabled())


def _no_graph(config: Any) -> str | None:
    """A mode sees no ops of a replay; RoPE that follows the sequence length reads it on the host in every forward."""
    if torch._C._len_torch_dispatch_stack():
        return "a torch dispatch mode is active"
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    for part in (rope, *(v for v in rope.values() if isinstance(v, dict))):
        kind = part.get("rope_type", part.get("type", "default"))
        if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
            return f"RoPE of type {kind} reads the length on the host"
    return None
