"""How far logits may be from stock's because of rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

#: How far logits may be from stock's, in units of the largest, by the dtype of the model.
_TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}
#: Layers up to which `_TOLERANCE` holds. Errors of rounding add up as a random walk does, so the
#: logits of deeper models may be further from stock's, by the root of the depth.
_LAYERS = 8


def tolerance_of(model: Any) -> float:
    """Return how far logits may be apart if only rounding differs, in units of the largest."""
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    return _TOLERANCE.get(model.dtype, 0.0) * math.sqrt(max(1, layers / _LAYERS))


@contextmanager
def rounded_otherwise(model: Any, seed: int) -> Iterator[None]:
    """Move each element that a linear, a norm or an embedding gives by one unit in the last place.

    Args:
        model: The model.
        seed: Which elements are moved up, and which ones down.
    """

    def move(module: Any, inputs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        ups = torch.randint(0, 2, output.shape, generator=generator, device=output.device)
        return output * (1 + torch.finfo(output.dtype).eps * (2 * ups - 1)).to(output.dtype)

    generator = torch.Generator(model.device).manual_seed(seed)
    leaves = [m for m in model.modules() if not any(True for _ in m.children())]
    hooks = [m.register_forward_hook(move) for m in leaves]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
