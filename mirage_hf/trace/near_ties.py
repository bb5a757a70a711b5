"""Let a step take the choices that stock's step has taken, where scores nearly tie.

A router chooses experts by the greatest scores. If two scores nearly tie, rounding decides, and
other experts give other logits. So a comparison of logits needs equal choices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mirage_hf.trace.routers.op import route

_TOP_K, _ROUTE = torch.ops.aten.topk.default, torch.ops.mirage_hf.route.default


class KeepChoices(TorchDispatchMode):
    """Keeps the places of each top-k.

    Attributes:
        places: The places, in the order of the calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op."""
        result = func(*args, **(kwargs or {}))
        if func is _TOP_K:
            self.places.append(result[1])
        return result


class TakeChoices(TorchDispatchMode):
    """Lets each top-k of one dimension take kept places, if their scores are near its own.

    Args:
        kept: The places that another run has taken.
        tolerance: How far scores may be from those of the own places, in units of the largest.
    """

    def __init__(self, kept: KeepChoices, tolerance: float):
        super().__init__()
        self.places, self.tolerance = iter(kept.places), tolerance

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op."""
        if func is _ROUTE:
            with self:  # each top-k of its steps comes here
                return route(*args)
        result = func(*args, **(kwargs or {}))
        if func is not _TOP_K or (places := next(self.places, None)) is None:
            return result
        return self._near(result, places, args, kwargs or {})

    def _near(
        self,
        own: tuple[Tensor, Tensor],
        places: Tensor,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> tuple[Tensor, Tensor]:
        scores = args[0]
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        if places.shape != own[1].shape or (places >= scores.shape[dim]).any():
            return own
        values = scores.gather(dim, places)
        finite = scores[scores.isfinite()]
        most = finite.abs().max() if finite.numel() else 0.0
        difference = (values.sort(dim)[0] - own[0].sort(dim)[0]).nan_to_num(0.0)
        is_near = bool((difference.abs() <= self.tolerance * most).all())
        return (values, places) if is_near else own
