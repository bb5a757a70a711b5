"""Read how modules store quantized weights, without copying them.

`coded_weight` reads one module. Each library has a file here. None of these files imports its
library.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.errors import Rejected
from mirage_hf.formats import (
    awq,
    bitsandbytes,
    compressed_tensors,
    fp8,
    gguf,
    gptq,
    hqq,
    torchao,
    unread,
)
from mirage_hf.formats.coding import CodedWeight, Coding
from mirage_hf.formats.compressed_tensors import decoding_hooks
from mirage_hf.formats.containers import memory_of

__all__ = [
    "CodedWeight",
    "Coding",
    "coded_weight",
    "copied_facts",
    "decoding_hooks",
    "held_tensors",
    "holds_codes",
    "loose_facts",
    "memory_of",
    "runs_codes",
]

#: The readers. Each tells whether a module is of its library, reads it, and names its tensors.
_READERS = (compressed_tensors, fp8, torchao, hqq, gptq, awq, bitsandbytes, gguf, unread)

#: The readers whose modules are not run for a comparison: they change the model, or need a kernel.
#:
#: - compressed-tensors first decodes the whole model.
#: - transformers may fetch a kernel for FP8, and needs a fetched one for GGUF.
#: - bitsandbytes may reorder the codes on a CPU.
_NOT_RUN = (bitsandbytes, compressed_tensors, fp8, gguf, unread)


def coded_weight(
    module: nn.Module, dtype: torch.dtype = torch.bfloat16
) -> CodedWeight | Rejected | None:
    """Return how a linear stores its weight in codes.

    Args:
        module: The module. It is not changed, and no code of its weight is copied.
        dtype: The dtype of the activations. Only containers without a dtype of their own need it,
            such as `FP8Linear`.

    Returns:
        The weight, or why it cannot be read. None if it is no quantized linear that we know, such
        as a plain nn.Linear.
    """
    for reader in _READERS:
        if reader.recognizes(module):
            return reader.read(module, dtype)
    return None


def runs_codes(module: nn.Module) -> bool:
    """Return whether a library runs the codes of a linear without changing the model."""
    reader = next((r for r in _READERS if r.recognizes(module)), None)
    return reader is not None and reader not in _NOT_RUN


def holds_codes(kind: type) -> bool:
    """Return whether a class of parameters holds codes. Its parameters are read by a reader."""
    return kind.__module__.partition(".")[0] == "torchao" or bitsandbytes.is_parameter(kind)


def held_tensors(module: nn.Module) -> tuple[Tensor, ...]:
    """Return the tensors on which `coded_weight(module)` depends, without the bias.

    A guard must notice if one is replaced or written. Empty if no reader recognizes the module.
    """
    for reader in _READERS:
        if reader.recognizes(module):
            return tuple(t for t in reader.tensors(module) if isinstance(t, Tensor))
    return ()


def loose_facts(state: dict[str, Any]) -> tuple[Any, ...]:
    """Return facts of the tensors of a container that are neither parameters nor buffers.

    Args:
        state: The instance dictionary of a module. Plain modules have none of these tensors.
    """
    loose = tuple([memory_of(t) for t in hqq.loose_tensors(state)])
    return loose + bitsandbytes.loose_facts(state)


def copied_facts(module: nn.Module) -> tuple[Any, ...]:
    """Return facts that change if numbers are written that the weight of a module is a copy of."""
    return bitsandbytes.copied_facts(module) if bitsandbytes.recognizes(module) else ()
