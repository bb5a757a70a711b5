"""Refuse models that optimize() must not touch. An error says what is wrong, where, and what to do.

Nothing is changed here.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin

from mirage_hf.errors import OptimizeError, Rejected
from mirage_hf.formats import CodedWeight, coded_weight
from mirage_hf.formats.experts import CodedExperts, coded_experts

#: The most integers of a parameter that only notes sizes, as containers of codes do. It may lie on
#: any device.
_SIZES = 8


def check_model(model: Any) -> None:
    """Check that a model can be optimized.

    Raises:
        OptimizeError: If it is not a PyTorch model in eval mode with plain weights on one device.
            Also if it is compiled or has accelerate's hooks.
    """
    if not isinstance(model, nn.Module):
        raise OptimizeError(_not_a_model(model))
    name = type(model).__name__
    if _is_compiled(model):
        raise OptimizeError(
            f"optimize: this {name} is compiled by torch.compile, which would not see the swapped "
            "modules; pass the model as it was before compiling, and compile what optimize returns"
        )
    _check_quantized(model, name)
    for path, module in model.named_modules():
        if "_hf_hook" in module.__dict__:
            raise OptimizeError(
                f"optimize: {name} has accelerate hooks (at {path or 'the model itself'}), which "
                "replace forwards and move weights; load it on one device without offloading, or "
                "remove them with accelerate.hooks.remove_hook_from_module(model, recurse=True)"
            )
    if model.training:
        raise OptimizeError(
            f"optimize: {name} is in training mode, kernels are for inference; "
            "call model.eval() first"
        )
    single_device(model)


def _not_a_model(thing: Any) -> str:
    module, name = type(thing).__module__, type(thing).__qualname__
    kind = f"a {name}" if module == "builtins" else f"a {module}.{name}"
    if isinstance(thing, type):
        kind = f"the class {thing.__name__}"
    way_out = "load one with AutoModelForCausalLM.from_pretrained"
    if isinstance(getattr(thing, "model", None), nn.Module):
        way_out = "pass its model: optimize(it.model)"
    return f"optimize: expected a PyTorch model (torch.nn.Module), got {kind}; {way_out}"


def _is_compiled(model: nn.Module) -> bool:
    """Return whether a model, its forward or any of its modules is compiled."""
    if hasattr(model, "_orig_mod"):
        return True
    # A forward under torch.compiler.disable has the attribute of the one that it wraps as well.
    wraps = hasattr(model.forward, "_torchdynamo_orig_callable")
    if wraps and not hasattr(model.forward, "_torchdynamo_disable"):
        return True
    return any(getattr(m, "_compiled_call_impl", None) is not None for m in model.modules())


def _check_quantized(model: nn.Module, name: str) -> None:
    """Check that the weights of a model are plain, or codes that kernels can read.

    Raises:
        OptimizeError: No linear and no experts of a quantized model have codes that kernels can
            read. Or another module has weights that are not floating-point numbers.
    """
    readings = {
        path: coded_weight(module) or coded_experts(module)
        for path, module in model.named_modules()
    }
    if any(isinstance(x, (CodedWeight, CodedExperts)) for x in readings.values()):
        return
    way_out = (
        "kernels read float16, bfloat16 and float32 weights, and codes of the formats in "
        "docs/quantized.md: load the model without quantization_config, or in such a format"
    )
    for path, weight in readings.items():
        if isinstance(weight, Rejected):
            raise OptimizeError(
                f"optimize: {name} is quantized, and {path} {weight.reason}; {way_out}"
            )
    quantizer = getattr(model, "hf_quantizer", None)
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if quantizer is not None or config is not None or getattr(model, "is_quantized", False) is True:
        kind = "see config.quantization_config" if quantizer is None else type(quantizer).__name__
        raise OptimizeError(f"optimize: {name} is quantized ({kind}); {way_out}")
    for path, p in model.named_parameters():
        # The rules of each module reject a DTensor, with the module's name.
        if type(p) is not nn.Parameter and type(p).__name__ != "DTensor":
            kind = type(p).__name__
            raise OptimizeError(
                f"optimize: {name} is quantized or wrapped: {path} is a {kind}; {way_out}"
            )
        if not p.is_floating_point():
            raise OptimizeError(f"optimize: {name} is quantized: {path} has {p.dtype}; {way_out}")


def single_device(model: nn.Module) -> torch.device:
    """Return the device of all weights.

    Raises:
        OptimizeError: If weights are on the meta device or on several devices, or if kernels cannot
            run on their device.
    """
    first_path: dict[torch.device, str] = {}
    for path, p in model.named_parameters():
        if p.is_floating_point() or p.numel() > _SIZES:
            first_path.setdefault(p.device, path)
    name = type(model).__name__
    if not first_path:
        return torch.device("cpu")
    for device, path in first_path.items():
        if device.type == "meta":
            raise OptimizeError(
                f"optimize: {name} has weights on the meta device ({path}); load them first, with "
                "from_pretrained or load_state_dict(assign=True)"
            )
    if len(first_path) > 1:
        where = ", ".join(f"{path} on {device}" for device, path in first_path.items())
        raise OptimizeError(
            f"optimize: {name} is spread over {len(first_path)} devices ({where}); "
            "load it on one, as device_map='cuda:0'"
        )
    (device,) = first_path
    if device.type not in ("cpu", "cuda"):
        raise OptimizeError(
            f"optimize: {name} is on {device}; kernels run on NVIDIA GPUs and on the CPU: "
            "use model.to('cuda') or model.to('cpu')"
        )
    return device


def chosen_backend(backend: str, device: torch.device) -> str:
    """Return the backend for a device: "triton" or "cpu".

    Raises:
        OptimizeError: If the backend that was asked for cannot run there.
    """
    if backend == "auto":
        return "triton" if device.type == "cuda" else "cpu"
    if (backend == "cpu") != (device.type == "cpu"):
        way_out = "model.to('cuda') first, or backend='cpu'"
        if device.type == "cuda":
            way_out = "backend='auto'"
        raise OptimizeError(
            f"optimize: backend {backend!r} does not run on {device}, where the model is; "
            f"use {way_out}"
        )
    return backend


def generating(model: nn.Module) -> nn.Module | None:
    """Return the model whose `generate` decodes, or None.

    Of a PeftModel it is the base model. Of a model that lets one of its modules generate, as BLIP-2
    does, it is that module.
    """
    inner: Any = model
    if type(model).__module__.startswith("peft.") and hasattr(model, "get_base_model"):
        inner = model.get_base_model()  # type: ignore[operator]
    if not _can_generate(inner):
        return None
    return _module_that_generates(inner) or inner  # type: ignore[no-any-return]


def _can_generate(model: Any) -> bool:
    with contextlib.suppress(AttributeError, TypeError):
        return isinstance(model, GenerationMixin) and bool(model.can_generate())  # type: ignore[attr-defined]
    return False


def _module_that_generates(model: Any) -> nn.Module | None:
    """Return the one child whose `generate` a model's own calls in place of the inherited one."""
    method = inspect.unwrap(type(model).generate)
    if not method.__module__.startswith("transformers.models."):
        return None
    names = method.__code__.co_names
    if "generate" not in names or "__class__" in method.__code__.co_freevars:  # as super() needs
        return None
    children = [m for name, m in model.named_children() if name in names and _can_generate(m)]
    return children[0] if len(children) == 1 else None
