"""Models that optimize() must not touch, and arguments it cannot take: what, where, and the way out. Nothing is changed here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mirage_hf import errors
from mirage_hf.errors import OptimizeError
from mirage_hf.patterns import PATTERNS

CHOICES = {
    "backend": ("auto", "triton", "cpu"),
    "tune": ("auto", "never", "full"),
    "on_unsupported": ("skip", "warn", "error"),
    "decode": ("graph", "eager"),
    "verify": (True, False),
    "dry_run": (True, False),
}

MOST_ROWS = 1024
"""Sequences of a batch: one new token each makes products of so many rows, for which libraries are at home, and the memory that
checking a layer takes grows with them."""


def check_options(
    patterns: Iterable[str] | None,
    batch_sizes: Sequence[int],
    max_cache_len: int | None,
    zoo: Any,
    progress: Any,
    **choices: Any,
) -> tuple[list[str], tuple[int, ...]]:
    """Return the patterns' names and the batch sizes. Errors: OptimizeError for an option with another value than it can have."""
    for name, value in choices.items():
        if not any(value is c or (isinstance(c, str) and value == c) for c in CHOICES[name]):
            close = errors.suggest(str(value), [c for c in CHOICES[name] if isinstance(c, str)])
            raise OptimizeError(
                f"optimize: {name} is {value!r}{close}; choose {' or '.join(map(repr, CHOICES[name]))}"
            )
    if isinstance(patterns, str):
        raise OptimizeError(
            f"optimize: patterns is the text {patterns!r}; give a list of names, as patterns=[{patterns!r}]"
        )
    try:
        names = list(PATTERNS if patterns is None else patterns)
    except TypeError:
        raise OptimizeError(
            f"optimize: patterns is {patterns!r}; give a list of names of {', '.join(PATTERNS)}, or None for all"
        ) from None
    for name in names:
        if name not in PATTERNS:
            close = errors.suggest(str(name), PATTERNS)
            raise OptimizeError(
                f"optimize: unknown pattern {name!r}{close}; known patterns: {', '.join(PATTERNS)}"
            )
    if isinstance(batch_sizes, int) and not isinstance(batch_sizes, bool):
        raise OptimizeError(
            f"optimize: batch_sizes is the number {batch_sizes}; give a sequence, as batch_sizes=({batch_sizes},)"
        )
    try:
        sizes = tuple(batch_sizes)
    except TypeError:
        way_out = "give a sequence of positive integers, as batch_sizes=(1, 4)"
        raise OptimizeError(f"optimize: batch_sizes is {batch_sizes!r}; {way_out}") from None
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
            raise OptimizeError(
                f"optimize: batch_sizes has {size!r}; batch sizes are positive integers, as batch_sizes=(1, 4)"
            )
        if size > MOST_ROWS:
            raise OptimizeError(
                f"optimize: batch_sizes has {size}; kernels are for {MOST_ROWS} sequences at most, larger batches run "
                "the model's own forward"
            )
    if not sizes:
        raise OptimizeError(
            "optimize: batch_sizes is empty; name the batch sizes to make kernels for, as batch_sizes=(1,)"
        )
    if max_cache_len is not None and (
        isinstance(max_cache_len, bool) or not isinstance(max_cache_len, int) or max_cache_len < 1
    ):
        raise OptimizeError(
            f"optimize: max_cache_len is {max_cache_len!r}; give a positive number of tokens, or None for no limit"
        )
    if progress is not None and not callable(progress):
        raise OptimizeError(
            f"optimize: progress is {progress!r}; give a function that is called with what was reached, or None"
        )
    if (
        zoo is not None
        and not isinstance(zoo, (str, Path))
        and not (isinstance(zoo, Sequence) and all(isinstance(z, (str, Path)) for z in zoo))
    ):
        raise OptimizeError(
            f'optimize: zoo is {zoo!r}; give a folder, a Hub repo as "user/name", or a list of them'
        )
    return names, tuple(dict.fromkeys(map(int, sizes)))


def check_model(model: Any) -> None:
    """Errors: OptimizeError for what is not a PyTorch model in eval mode with plain weights on one device, free of hooks."""
    if not isinstance(model, nn.Module):
        inner = getattr(model, "model", None)
        load = "load one with AutoModelForCausalLM.from_pretrained"
        hint = "pass its model: optimize(it.model)" if isinstance(inner, nn.Module) else load
        kind = (
            f"the class {model.__name__}"
            if isinstance(model, type)
            else f"a {type(model).__module__}.{type(model).__qualname__}"
        )
        raise OptimizeError(
            f"optimize: expected a PyTorch model (torch.nn.Module), got {kind}; {hint}"
        )
    name = type(model).__name__
    # what torch.compiler.disable keeps from being compiled says what it wraps as well
    wraps = hasattr(model.forward, "_torchdynamo_orig_callable") and not hasattr(
        model.forward, "_torchdynamo_disable"
    )
    if (
        hasattr(model, "_orig_mod")
        or wraps
        or any(getattr(m, "_compiled_call_impl", None) is not None for m in model.modules())
    ):
        raise OptimizeError(
            f"optimize: this {name} is compiled by torch.compile, which would not see the swapped modules; "
            "pass the model as it was before compiling, and compile what optimize returns"
        )
    _check_quantized(model, name)
    for path, module in model.named_modules():
        if "_hf_hook" in module.__dict__:
            raise OptimizeError(
                f"optimize: {name} has accelerate hooks (at {path or 'the model itself'}), which replace forwards and "
                "move weights; load it on one device without offloading, or remove them with "
                "accelerate.hooks.remove_hook_from_module(model, recurse=True)"
            )
    if model.training:
        raise OptimizeError(
            f"optimize: {name} is in training mode, kernels are for inference; call model.eval() first"
        )
    single_device(model)


def _check_quantized(model: nn.Module, name: str) -> None:
    way_out = "kernels read float16, bfloat16 or float32 weights: load the model without quantization_config"
    quantizer, config = getattr(model, "hf_quantizer", None), getattr(model, "config", None)
    if (
        quantizer is not None
        or getattr(model, "is_quantized", False) is True
        or getattr(config, "quantization_config", None) is not None
    ):
        kind = (
            type(quantizer).__name__ if quantizer is not None else "see config.quantization_config"
        )
        raise OptimizeError(f"optimize: {name} is quantized ({kind}); {way_out}")
    for path, p in model.named_parameters():
        if type(p) is not nn.Parameter and type(p).__name__ != "DTensor":
            raise OptimizeError(
                f"optimize: {name} is quantized or wrapped: {path} is a {type(p).__name__}; {way_out}"
            )
        if not p.is_floating_point():
            raise OptimizeError(f"optimize: {name} is quantized: {path} has {p.dtype}; {way_out}")


def single_device(model: nn.Module) -> torch.device:
    """Return where all weights are. Errors: OptimizeError for meta tensors, several devices, or a device kernels cannot run on."""
    places: dict[torch.device, str] = {}
    for path, p in model.named_parameters():
        places.setdefault(p.device, path)
    name = type(model).__name__
    if not places:
        return torch.device("cpu")
    if (meta := next((path for d, path in places.items() if d.type == "meta"), None)) is not None:
        raise OptimizeError(
            f"optimize: {name} has weights on the meta device ({meta}); load them first, with from_pretrained "
            "or load_state_dict(assign=True)"
        )
    if len(places) > 1:
        where = ", ".join(f"{path} on {d}" for d, path in places.items())
        raise OptimizeError(
            f"optimize: {name} is spread over {len(places)} devices ({where}); load it on one, as device_map='cuda:0'"
        )
    device = next(iter(places))
    if device.type not in ("cpu", "cuda"):
        raise OptimizeError(
            f"optimize: {name} is on {device}; kernels run on NVIDIA GPUs and on the CPU: "
            "use model.to('cuda') or model.to('cpu')"
        )
    return device


def chosen_backend(backend: str, device: torch.device) -> str:
    """Return the backend for a device. Errors: OptimizeError when the one asked for cannot run there."""
    if backend == "auto":
        return "triton" if device.type == "cuda" else "cpu"
    if (backend == "cpu") != (device.type == "cpu"):
        way_out = (
            "backend='auto'"
            if device.type == "cuda"
            else "model.to('cuda') first, or backend='cpu'"
        )
        raise OptimizeError(
            f"optimize: backend {backend!r} does not run on {device}, where the model is; use {way_out}"
        )
    return backend


def generating(model: nn.Module) -> nn.Module | None:
    """Return the model whose `generate` decodes (of a PeftModel its base model), or None."""
    from transformers import GenerationMixin

    inner: Any = model
    if type(model).__module__.startswith("peft.") and hasattr(model, "get_base_model"):
        inner = model.get_base_model()  # type: ignore[operator]
    if not isinstance(inner, GenerationMixin):
        return None
    with contextlib.suppress(AttributeError, TypeError):
        return inner if inner.can_generate() and not inner.config.is_encoder_decoder else None  # type: ignore[attr-defined]
    return None
