"""Name containers that are known but not read, with the reason."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.errors import Rejected
from mirage_hf.formats import containers

#: Reasons by the first words of a class's module and name.
_REASONS = {
    "bitsandbytes.nn.modules.Linear8bitLt": "bitsandbytes: outliers are computed in float16",
    "gptqmodel.nn_modules.qlinear.": (
        "GPTQ and AWQ: this class of GPT-QModel has an order of words of its own; load GPTQ with "
        'GPTQConfig(backend="gptq_triton") or "gptq_torch", AWQ with AwqConfig(backend="gemm")'
    ),
    "auto_gptq.nn_modules.qlinear.": "GPTQ: classes of AutoGPTQ are not read; use GPT-QModel",
    "awq.modules.linear.": "AWQ: only the GEMM layout of AutoAWQ is read",
    "optimum.quanto.": "quanto: its packing is not read",
}


def recognizes(module: nn.Module) -> bool:
    """Return whether a module is one of these containers."""
    return containers.qualified_name(module).startswith(tuple(_REASONS))


def tensors(module: Any) -> tuple[Tensor | None, ...]:
    """Return no tensors, because none are read."""
    return ()


def read(module: Any, dtype: torch.dtype) -> Rejected:
    """Return why the module is not read."""
    name = containers.qualified_name(module)
    return Rejected(next(why for start, why in _REASONS.items() if name.startswith(start)))
