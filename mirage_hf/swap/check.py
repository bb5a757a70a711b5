"""The last check of a swapped module: against the module it replaces, with its own weights, in its own dtype."""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mirage_hf.errors import Rejected
from mirage_hf.match.compose import one_norm
from mirage_hf.match.matcher import Match
from mirage_hf.match.probe import MASKED, ProbeCache, calls, twin
from mirage_hf.match.step import At
from mirage_hf.patterns.attention import REFERENCE_SLOTS
from mirage_hf.swap.guard import KEY, Binding
from mirage_hf.swap.steps import LayerKernels, Steps

FACTOR = 1.25
"""How far from the wide reference a swapped module may be, in units of stock's own distance (plus one ulp)."""
LAYER_FACTOR_FLOAT32, LAYER_ULPS_FLOAT32 = 4.0, 3.0
"""The same for a layer, or its whole step, in float32: of two right orders of five sums in a row one is luckier than the other. Over 72
layers of tiny models the ratio was 2.4 at most for 8 calls, 0.7 to 1.6 for 512."""


SLICE = 8192
"""Outputs of a head that are computed at a time in the wide dtype."""

SAMPLES = 8
"""Calls that are compared for each number of rows: the largest error of one is a matter of luck in a small module."""


@dataclass(frozen=True)
class Checked:
    """Largest distances from a float32 (of float32 modules: float64) reference, ours and stock's, and what ours may be."""

    error: float
    stock_error: float
    allowed: float


@contextmanager
def _mlp_aside(match: Match) -> Iterator[None]:
    """Put something simple in the place of an MLP that runs its own forward."""
    children: dict[str, Any] = match.module.__dict__["_modules"]
    if match.aside is None:
        yield
        return
    name = match.layouts[0].mlp
    own, children[name] = children[name], match.aside
    try:
        yield
    finally:
        children[name] = own


def check(match: Match, binding: Binding) -> Checked | Rejected:
    """Run a swapped module through its guard, for each number of rows that it has kernels for, beside stock and a wide twin."""
    wide = torch.float64 if binding.dtype == torch.float32 else torch.float32
    binding.forget()
    outcome = Checked(0.0, 0.0, 0.0)
    try:
        with torch.no_grad(), torch.autocast(binding.device_type, enabled=False), _mlp_aside(match):
            reference = twin(match.module, lambda _, p: p.to(wide))
            run = _layer_outputs if match.kind == "layer" else _module_outputs
            for rows in binding.kernels:
                ours, stock, exact = run(match, binding, reference, rows, wide)
                if binding.fallbacks:
                    return Rejected(f"its guard refuses it: {', '.join(binding.fallbacks)}")
                seen = _compare(ours, stock, exact, binding.dtype, layer=match.kind == "layer")
                if not seen.error <= seen.allowed:
                    return Rejected(f"off by {seen.error:.2g} with {rows} rows, stock by {seen.stock_error:.2g}; "
                                    f"{seen.allowed:.2g} is allowed")
                outcome = max(outcome, seen, key=lambda c: c.error)
    except Exception as e:  # a module that cannot be checked is not kept, whatever its code or its wide twin raises
        return Rejected(f"the check could not run ({type(e).__name__}: {(str(e).splitlines() or [''])[0]})")
    return outcome


def _compare(ours: Tensor, stock: Tensor, exact: Tensor, dtype: torch.dtype, layer: bool = False) -> Checked:
    error, stock_error = (float((y.to(exact.dtype) - exact).abs().max()) for y in (ours, stock))
    scale = float(exact.abs().max())
    ulp = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(scale)) if 0 < scale < math.inf else 0.0
    factor, ulps = (LAYER_FACTOR_FLOAT32, LAYER_ULPS_FLOAT32) if layer and dtype == torch.float32 else (FACTOR, 1.0)
    return Checked(error, stock_error, factor * stock_error + ulps * ulp)


def _stock(match: Match, binding: Binding) -> Callable[..., Any]:
    return lambda *args, **kwargs: binding.stock.forward(match.module, *args, **kwargs)


def _layer_outputs(match: Match, binding: Binding, reference: Any, rows: int, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    layer: Any = match.module
    row = match.layouts[0]
    masked = getattr(layer._modules[row.attention].config, "_attn_implementation", "eager") in MASKED
    stock = _stock(match, binding)
    outputs = []
    for sample in range(SAMPLES):
        start, decode = calls(rows, one_norm(layer, row).weight, match.rope, (5, 1), torch.Generator().manual_seed(rows + 1000 * sample),
                              binding.dtype, masked=masked)
        cache = ProbeCache()
        stock(start.x, **start.kwargs(layer, cache))
        w = decode.to(wide)
        outputs.append((layer.forward(decode.x, **decode.kwargs(layer, cache.to(binding.dtype))),
                        stock(decode.x, **decode.kwargs(layer, cache.to(binding.dtype))),
                        reference.forward(w.x, **w.kwargs(layer, cache.to(wide)))))
    return _joined(outputs)


def _joined(outputs: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor, Tensor]:
    ours, stock, exact = (torch.cat(x) for x in zip(*outputs, strict=True))
    return ours, stock, exact


def check_step(layer: LayerKernels, rows: int) -> Checked | Rejected:
    """Run a layer's step by kernels beside stock and a wide twin, on a cache that stock has filled. Attention is that of the slots
    that its kernels were found for."""
    module, row = layer.match.module, layer.match.layouts[0]
    parts = dict(layer.step.parts["attention"].block.sizes)
    dtype, wide = parts["dtype"], torch.float64 if parts["dtype"] == torch.float32 else torch.float32
    like = one_norm(module, row).weight
    device = like.device
    stock = module.__dict__[KEY].stock.forward if KEY in module.__dict__ else type(module).forward
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False), _mlp_aside(layer.match):
            reference = twin(module, lambda _, p: p.to(wide))
            lo = torch.zeros(rows, dtype=torch.int32, device=device)
            lo[0] = 2  # as the probe's mask
            outputs, kernels = [], {role: found.run for role, found in layer.found[rows].items()}
            for sample in range(SAMPLES):
                generator = torch.Generator().manual_seed(rows + 1000 * sample)
                start, decode = calls(rows, like, layer.match.rope, (5, 1), generator, dtype)
                cache = ProbeCache()
                stock(module, start.x, **start.kwargs(module, cache))
                assert cache.keys is not None and cache.values is not None
                room = [torch.nn.functional.pad(x, (0, 0, 0, REFERENCE_SLOTS - 5)).contiguous() for x in (cache.keys, cache.values)]
                cos, sin = layer.step.tables(*(x.flatten(0, 1) for x in (decode.cos, decode.sin)))
                at = At(cos, sin, room[0], room[1], lo, torch.full_like(lo, 5), torch.full_like(lo, 6))
                w = decode.to(wide)
                outputs.append((layer.step(kernels, decode.x[:, 0].contiguous(), at),
                                stock(module, decode.x, **decode.kwargs(module, cache.to(dtype)))[:, 0],
                                reference.forward(w.x, **w.kwargs(module, cache.to(wide)))[:, 0]))
            seen = _compare(*_joined(outputs), dtype, layer=True)
    except Exception as e:  # as in check
        return Rejected(f"the check could not run ({type(e).__name__}: {(str(e).splitlines() or [''])[0]})")
    if not seen.error <= seen.allowed:
        return Rejected(f"off by {seen.error:.2g} with {rows} rows, stock by {seen.stock_error:.2g}; {seen.allowed:.2g} is allowed")
    return seen


def check_head(steps: Steps, causal: Any, rows: int) -> Checked | Rejected:
    """The last norm and head by kernels beside the model's own modules and a wide reference."""
    dtype, device = steps.embedding.dtype, steps.embedding.device
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            generator, outputs = torch.Generator().manual_seed(rows), []
            for _ in range(SAMPLES):
                x = torch.randn(rows, steps.embedding.shape[1], generator=generator).to(device, dtype)
                ours = torch.empty(rows, steps.vocab, dtype=dtype, device=device)
                steps.head(rows, x, ours)
                outputs.append((x, ours, causal.own_head(x)))
            x, ours, theirs = _joined(outputs)
            exact = causal.own_head(x.to(wide), lambda module: _InSlices(module, wide) if type(module) is nn.Linear
                                    else twin(module, lambda _, p: p.to(wide)))
            seen = _compare(ours, theirs, exact, dtype)
    except Exception as e:  # as in check
        return Rejected(f"the check could not run ({type(e).__name__}: {(str(e).splitlines() or [''])[0]})")
    if not seen.error <= seen.allowed:
        return Rejected(f"off by {seen.error:.2g} with {rows} rows, stock by {seen.stock_error:.2g}; {seen.allowed:.2g} is allowed")
    return seen


class _InSlices(nn.Module):
    """A linear in a wider dtype, some of its outputs at a time: a head's whole weight would be gigabytes."""

    def __init__(self, linear: nn.Linear, wide: torch.dtype):
        super().__init__()
        self.linear, self.wide = linear, wide

    def forward(self, x: Tensor) -> Tensor:
        biases = [None] * -(-len(self.linear.weight) // SLICE) if self.linear.bias is None else self.linear.bias.to(self.wide).split(SLICE)
        return torch.cat([F.linear(x, w.to(self.wide), b) for w, b in zip(self.linear.weight.split(SLICE), biases, strict=True)], -1)


def _module_outputs(match: Match, binding: Binding, reference: Any, rows: int, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    weight = next(match.module.parameters())
    module: Any = match.module
    generator, outputs = torch.Generator().manual_seed(rows), []
    for _ in range(SAMPLES):
        x = torch.randn(rows, 1, binding.width, generator=generator).to(weight.device, binding.dtype)
        outputs.append((module.forward(x), _stock(match, binding)(x), reference.forward(x.to(wide))))
    return _joined(outputs)
