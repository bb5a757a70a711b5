"""How far logits may be from stock's because of rounding."""

from __future__ import annotations

import math
import threading
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
def perturbed(model: Any, seed: int) -> Iterator[None]:
    """Change what linears, norms and other innermost modules give by half of its last place.

    Then each element is rounded to the module's dtype. It stays as it is, or moves by one unit in
    the last place. Only calls of this thread are changed.

    Args:
        model: The model.
        seed: Which elements become larger, and which ones smaller.
    """
    thread, device = threading.get_ident(), model.device
    generator = torch.Generator(device).manual_seed(seed)

    def change(module: Any, inputs: Any, output: Any) -> Any:
        is_ours = threading.get_ident() == thread
        if not is_ours or not isinstance(output, Tensor) or output.dtype not in _TOLERANCE:
            return output
        if any(output is x for x in inputs):  # such as Identity
            return output
        signs = torch.randint(0, 2, output.shape, generator=generator, device=device) * 2 - 1
        factors = 1 + torch.finfo(output.dtype).eps / 2 * signs.double()
        return (output * factors.to(output.device)).to(output.dtype)

    innermost = [m for m in model.modules() if not any(True for _ in m.children())]
    hooks = [m.register_forward_hook(change) for m in innermost]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
