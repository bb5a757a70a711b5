"""Probes: a twin of a module with random weights is compared with the pattern's program.

This file keeps the outcomes. The probes themselves are in three files:

- module_probes.py: norms, activations, RoPE, MLPs and LoRA linears;
- layer_probes.py: decoder layers and their steps;
- causal_probe.py: whole models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from mirage_hf.errors import Rejected, described

#: The largest difference that passes, relative to the largest output. Float32 sums pass in any
#: order, in TF32 too. Another formula does not pass.
TOLERANCE = 1e-3

T = TypeVar("T")


@dataclass
class Probes:
    """The outcomes of the probes of one model, by kind of module. None means a pass."""

    outcomes: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: Any, probe: Callable[[], T]) -> T | Rejected:
        """Return what `probe` returns, and run it only once for equal keys."""
        if key not in self.outcomes:
            try:
                with torch.no_grad():
                    self.outcomes[key] = probe()
            except Exception as error:
                # Foreign code may raise anything on made-up inputs. Each error is a rejection.
                self.outcomes[key] = Rejected(f"could not be run on a probe ({described(error)})")
        return self.outcomes[key]  # type: ignore[no-any-return]
