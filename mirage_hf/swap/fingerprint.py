"""The full fingerprint of a model: all that swapped forwards, and CUDA graphs captured over them, depend on."""
from __future__ import annotations

from typing import Any

from torch import nn

from mirage_hf.match.plain import foreign_hook
from mirage_hf.swap.guard import KEY

_TUNER = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling", "lora_variant", "use_dora", "fan_in_fan_out",
          "cast_input_dtype_enabled")
"""Instance attributes of PEFT's tuner layers that decide what their forward does."""


def fingerprint(model: nn.Module) -> tuple[Any, ...]:
    """Return a value that changes when a captured forward may no longer be right.

    It holds each module's identity, class, mode, hooks and own forward, each tensor's address and dtype, PEFT's active and
    merged adapters, switches and scalings, which swapped modules have given up, and the epsilons their kernels were made for.
    Forwards are kept themselves, since the id of one that is gone may come back as another's. About 0.5 µs per module and tensor.
    """
    found: list[Any] = []
    stack: list[nn.Module] = [model]
    while stack:
        module = stack.pop()
        d = module.__dict__
        kind = type(module)
        found += (id(module), kind, kind.forward, d.get("forward"), d["training"])
        if (d["_forward_hooks"] or d["_forward_pre_hooks"]) and (hook := foreign_hook(module)):
            found.append(hook)  # HF's own output capture, which stays installed after one use, does not count
        for tensors in (d["_parameters"], d["_buffers"]):
            for t in tensors.values():
                if t is not None:
                    found += (t.data_ptr(), t.dtype)
        if "merged_adapters" in d:
            found.append(repr([d.get(name) for name in _TUNER]))
        if (bound := d.get(KEY)) is not None:
            found += (id(bound), bound.retired, *(inner.get(name) for inner, name, _ in bound.constants))
        stack.extend(m for m in d["_modules"].values() if m is not None)
    return tuple(found)
