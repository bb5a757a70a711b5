"""How far logits may be from stock's because of rounding."""

from __future__ import annotations

import math
from typing import Any

import torch

#: How far logits may be from stock's, in units of the largest, by the dtype of the model.
_TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}
#: Layers up to which `_TOLERANCE` holds. Errors of rounding add up as a random walk does, so the
#: logits of deeper models may be further from stock's, by the root of the depth.
_LAYERS = 8


def tolerance_of(model: Any) -> float:
    """Return how far logits may be apart if only rounding differs, in units of the largest."""
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    return _TOLERANCE.get(model.dtype, 0.0) * math.sqrt(max(1, layers / _LAYERS))
