"""A router as steps: calls of torch ops on tensors of a few numbers for each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Local:
    """Output number `output` of step number `step`. The inputs are those of step -1."""

    step: int
    output: int = 0


@dataclass(frozen=True)
class Form:
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Step:
    """One call of a torch op. Tensors among its arguments are `Local`s."""

    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[Form, ...]


@dataclass(frozen=True)
class Router:
    """The steps of a router. It is hashable and holds no tensor.

    Attributes:
        rows: The rows.
        inputs: The forms of its inputs.
        is_weight: For each input, whether all rows share its one row.
        steps: What is computed, in order.
        results: What is returned.
    """

    rows: int
    inputs: tuple[Form, ...]
    is_weight: tuple[bool, ...]
    steps: tuple[Step, ...]
    results: tuple[Local, ...]
