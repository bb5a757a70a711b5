"""Format tensors and numbers for pictures."""

from __future__ import annotations

from mirage_hf import errors
from mirage_hf.graph.tensors import DTensor
from mirage_hf.ops import table


def tensor_type(t: DTensor) -> str:
    """Return dtype and dims of a tensor."""
    return f"{table.dtype_name(t.dtype)} {errors.shape(t.dims)}"


def number_text(x: object) -> str:
    """Return a number with at most four digits, or the text of anything else."""
    return f"{x:.4g}" if isinstance(x, float) else str(x)
