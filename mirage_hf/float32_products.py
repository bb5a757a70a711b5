"""Tell how torch rounds the factors of float32 products on a GPU."""

from __future__ import annotations

import torch


def precision() -> str:
    """Return the switch: "highest", "high" or "medium", or a value of `fp32_precision`.

    The older switch raises an error if the newer one, `fp32_precision`, was set.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return str(torch.backends.cuda.matmul.fp32_precision)


def are_exact() -> bool:
    """Return whether factors are not rounded, to TF32 for example."""
    return precision() in ("highest", "ieee")
