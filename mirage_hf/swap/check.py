"""The last check of a swapped module: against the module it replaces, with its own weights, in its own dtype."""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mirage_hf.errors import Rejected
from mirage_hf.match.matcher import Match
from mirage_hf.match.probe import MASKED, ProbeCache, calls, twin
from mirage_hf.swap.guard import Binding

FACTOR = 1.25
"""How far from the wide reference a swapped module may be, in units of stock's own distance (plus one ulp)."""


@dataclass(frozen=True)
class Checked:
    """Largest distances from a float32 (of float32 modules: float64) reference, ours and stock's, and what ours may be."""

    error: float
    stock_error: float
    allowed: float


def check(match: Match, binding: Binding) -> Checked | Rejected:
    """Run a swapped module through its guard, for each number of rows that it has kernels for, beside stock and a wide twin."""
    wide = torch.float64 if binding.dtype == torch.float32 else torch.float32
    binding.forget()
    outcome = Checked(0.0, 0.0, 0.0)
    try:
        with torch.no_grad(), torch.autocast(binding.device_type, enabled=False):
            reference = twin(match.module, lambda _, p: p.to(wide))
            run = _layer_outputs if match.kind == "layer" else _module_outputs
            for rows in binding.kernels:
                ours, stock, exact = run(match, binding, reference, rows, wide)
                if binding.fallbacks:
                    return Rejected(f"its guard refuses it: {', '.join(binding.fallbacks)}")
                seen = _compare(ours, stock, exact, binding.dtype)
                if not seen.error <= seen.allowed:
                    return Rejected(f"off by {seen.error:.2g} with {rows} rows, stock by {seen.stock_error:.2g}; "
                                    f"{seen.allowed:.2g} is allowed")
                outcome = max(outcome, seen, key=lambda c: c.error)
    except Exception as e:  # a module that cannot be checked is not kept, whatever its code or its wide twin raises
        return Rejected(f"the check could not run ({type(e).__name__}: {(str(e).splitlines() or [''])[0]})")
    return outcome


def _compare(ours: Tensor, stock: Tensor, exact: Tensor, dtype: torch.dtype) -> Checked:
    error, stock_error = (float((y.to(exact.dtype) - exact).abs().max()) for y in (ours, stock))
    scale = float(exact.abs().max())
    ulp = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(scale)) if 0 < scale < math.inf else 0.0
    return Checked(error, stock_error, FACTOR * stock_error + ulp)


def _stock(match: Match, binding: Binding) -> Callable[..., Any]:
    return lambda *args, **kwargs: binding.stock.forward(match.module, *args, **kwargs)


def _layer_outputs(match: Match, binding: Binding, reference: Any, rows: int, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    layer: Any = match.module
    attention, weight = layer._modules[match.layouts[0].attention], layer._modules[match.layouts[0].norm].weight
    masked = getattr(attention.config, "_attn_implementation", "eager") in MASKED
    stock = _stock(match, binding)
    start, decode = calls(rows, binding.width, attention.head_dim, (5, 1), torch.Generator().manual_seed(rows), weight.device,
                          binding.dtype, masked=masked)
    cache = ProbeCache()
    stock(start.x, **start.kwargs(cache))
    exact, w = reference, decode.to(wide)
    return (layer.forward(decode.x, **decode.kwargs(cache.to(binding.dtype))),
            stock(decode.x, **decode.kwargs(cache.to(binding.dtype))),
            exact.forward(w.x, **w.kwargs(cache.to(wide))))


def _module_outputs(match: Match, binding: Binding, reference: Any, rows: int, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    weight = next(match.module.parameters())
    x = torch.randn(rows, 1, binding.width, generator=torch.Generator().manual_seed(rows)).to(weight.device, binding.dtype)
    module: Any = match.module
    return module.forward(x), _stock(match, binding)(x), reference.forward(x.to(wide))
