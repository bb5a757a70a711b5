"""Objects that act as a module does, except for some of its children."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def stand_in(module: nn.Module, replacements: Mapping[str, Any]) -> Any:
    """Return an object of the module's class that shares its state, except for `replacements`.

    The class's constructor is not called, because it would need the arguments of foreign classes
    and would make new weights. Dynamo can trace this, but not `copy.copy`.

    Args:
        module: The module whose methods and state the result has.
        replacements: Entries of the instance dictionary that differ. A child may be replaced by
            any callable here, because instance attributes hide `module._modules`.
    """
    other = object.__new__(type(module))
    other.__dict__.update(module.__dict__)
    other.__dict__.update(replacements)
    return other


class MlpStandIn(nn.Module):
    """Stands for an MLP that runs its own forward while the rest of its layer is compared.

    A mixture of experts would be large to copy, and it chooses other experts if scores are close.
    """

    def __init__(self, returns_tuple: bool = False):
        """Return a tuple if the MLP that this stands for returns one, for its router's scores."""
        super().__init__()
        self.returns_tuple = returns_tuple

    def forward(self, x: Tensor) -> Any:
        """Return a simple function of x, which shows what comes before and after the MLP."""
        y = 0.5 * x + 0.25
        return (y, None) if self.returns_tuple else y
