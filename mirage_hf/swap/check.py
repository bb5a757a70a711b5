"""The last check of a swapped module: against the module it replaces, with its own weights, in its own dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mirage_hf.errors import Rejected, described
from mirage_hf.layers.compose import any_norm
from mirage_hf.layers.model_kernels import LayerKernels, ModelKernels
from mirage_hf.layers.step import StepInputs
from mirage_hf.match.matcher import Match
from mirage_hf.match.probe import MASKED, LayerCall, ProbeCache, layer_calls, twin
from mirage_hf.patterns.attention import REFERENCE_SLOTS
from mirage_hf.swap.guard import BINDING_KEY, Binding

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
                    return Rejected(
                        f"off by {seen.error:.2g} with {rows} rows, stock by {seen.stock_error:.2g}; "
                        f"{seen.allowed:.2g} is allowed"
                    )
                outcome = max(outcome, seen, key=lambda c: c.error)
    except Exception as e:  # a module that cannot be checked is not kept, whatever its code or its wide twin raises
        return Rejected(f"the check could not run ({described(e)})")
    return outcome


def _compare(
    ours: Tensor, stock: Tensor, exact: Tensor, dtype: torch.dtype, layer: bool = False
) -> Checked:
    error, stock_error = (float((y.to(exact.dtype) - exact).abs().max()) for y in (ours, stock))
    scale = float(exact.abs().max())
    ulp = (
        torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(scale))
        if 0 < scale < math.inf
        else 0.0
    )
    factor, ulps = (
        (LAYER_FACTOR_FLOAT32, LAYER_ULPS_FLOAT32)
        if layer and dtype == torch.float32
        else (FACTOR, 1.0)
    )
    return Checked(error, stock_error, factor * stock_error + ulps * ulp)


def _stock(match: Match, binding: Binding) -> Callable[..., Any]:
    return lambda *args, **kwargs: binding.stock.forward(match.module, *args, **kwargs)


@dataclass(frozen=True)
class _Sampled:
    """SAMPLES times `rows` sequences of five tokens and a call with one more, as one batch, of which stock and a wide twin made this."""

    rows: int
    decode: LayerCall
    cache: ProbeCache
    stock: Tensor
    exact: Tensor

    def parts(self) -> Iterator[tuple[LayerCall, ProbeCache]]:
        """A sample's call and cache after the other."""
        for n in range(SAMPLES):
            at = slice(n * self.rows, (n + 1) * self.rows)
            yield self.decode.part(at), self.cache.part(at)


def _sampled(
    match: Match,
    stock: Callable[..., Any],
    reference: Any,
    rows: int,
    dtype: torch.dtype,
    wide: torch.dtype,
    masked: bool,
) -> _Sampled:
    layer: Any = match.module
    like, generator = any_norm(layer, match.layouts[0]).weight, torch.Generator().manual_seed(rows)
    start, decode = layer_calls(
        rows, like, match.rope, (5, 1), generator, dtype, masked=masked, samples=SAMPLES
    )
    cache, w = ProbeCache(), decode.to(wide)
    stock(start.x, **start.kwargs(layer, cache))
    return _Sampled(
        rows,
        decode,
        cache,
        stock(decode.x, **decode.kwargs(layer, cache.to(dtype))),
        reference.forward(w.x, **w.kwargs(layer, cache.to(wide))),
    )


def _layer_outputs(
    match: Match, binding: Binding, reference: Any, rows: int, wide: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    layer: Any = match.module
    masked = (
        getattr(layer._modules[match.layouts[0].attention].config, "_attn_implementation", "eager")
        in MASKED
    )
    sampled = _sampled(match, _stock(match, binding), reference, rows, binding.dtype, wide, masked)
    ours = [
        layer.forward(call.x, **call.kwargs(layer, cache.to(binding.dtype)))
        for call, cache in sampled.parts()
    ]
    return torch.cat(ours), sampled.stock, sampled.exact


def check_step(layer: LayerKernels, rows: int) -> Checked | Rejected:
    """Run a layer's step by kernels beside stock and a wide twin, on a cache that stock has filled. Attention is that of the slots
    that its kernels were found for."""
    module = layer.match.module
    parts = dict(layer.step.parts["attention"].block.sizes)
    dtype, wide = (
        parts["dtype"],
        torch.float64 if parts["dtype"] == torch.float32 else torch.float32,
    )
    device = next(module.parameters()).device
    stock = partial(
        module.__dict__[BINDING_KEY].stock.forward
        if BINDING_KEY in module.__dict__
        else type(module).forward,
        module,
    )
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False), _mlp_aside(layer.match):
            sampled = _sampled(
                layer.match,
                stock,
                twin(module, lambda _, p: p.to(wide)),
                rows,
                dtype,
                wide,
                masked=True,
            )
            lo = torch.zeros(rows, dtype=torch.int32, device=device)
            lo[0] = 2  # as the probe's mask
            ours, kernels = [], {role: found.run for role, found in layer.found[rows].items()}
            for call, cache in sampled.parts():
                assert cache.keys is not None and cache.values is not None
                room = [
                    F.pad(x, (0, 0, 0, REFERENCE_SLOTS - 5)).contiguous()
                    for x in (cache.keys, cache.values)
                ]
                cos, sin = layer.step.tables(*(x.flatten(0, 1) for x in (call.cos, call.sin)))
                at = StepInputs(
                    cos, sin, room[0], room[1], lo, torch.full_like(lo, 5), torch.full_like(lo, 6)
                )
                ours.append(layer.step(kernels, call.x[:, 0].contiguous(), at))
            seen = _compare(
                torch.cat(ours), sampled.stock[:, 0], sampled.exact[:, 0], dtype, layer=True
            )
    except Exception as e:  # as in check
        return Rejected(f"the check could not run ({described(e)})")
    if not seen.error <= seen.allowed:
        return Rejected(
            f"off by {seen.error:.2g} with {rows} rows, stock by {seen.stock_error:.2g}; {seen.allowed:.2g} is allowed"
        )
    return seen


def check_head(steps: ModelKernels, causal: Any, rows: int) -> Checked | Rejected:
    """The last norm and head by kernels beside the model's own modules and a wide reference."""
    dtype, device = steps.embedding.dtype, steps.embedding.device
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            generator = torch.Generator().manual_seed(rows)
            x = torch.randn(SAMPLES * rows, steps.embedding.shape[1], generator=generator).to(
                device, dtype
            )
            ours = [
                torch.empty(rows, steps.vocab, dtype=dtype, device=device) for _ in range(SAMPLES)
            ]
            for sample, out in zip(x.split(rows), ours, strict=True):
                steps.head(rows, sample.clone(), out)
            exact = causal.own_head(
                x.to(wide),
                lambda module: (
                    _InSlices(module, wide)
                    if type(module) is nn.Linear
                    else twin(module, lambda _, p: p.to(wide))
                ),
            )
            seen = _compare(torch.cat(ours), causal.own_head(x), exact, dtype)
    except Exception as e:  # as in check
        return Rejected(f"the check could not run ({described(e)})")
    if not seen.error <= seen.allowed:
        return Rejected(
            f"off by {seen.error:.2g} with {rows} rows, stock by {seen.stock_error:.2g}; {seen.allowed:.2g} is allowed"
        )
    return seen


class _InSlices(nn.Module):
    """A linear in a wider dtype, some of its outputs at a time: a head's whole weight would be gigabytes."""

    def __init__(self, linear: nn.Linear, wide: torch.dtype):
        super().__init__()
        self.linear, self.wide = linear, wide

    def forward(self, x: Tensor) -> Tensor:
        biases = (
            [None] * -(-len(self.linear.weight) // SLICE)
            if self.linear.bias is None
            else self.linear.bias.to(self.wide).split(SLICE)
        )
        return torch.cat(
            [
                F.linear(x, w.to(self.wide), b)
                for w, b in zip(self.linear.weight.split(SLICE), biases, strict=True)
            ],
            -1,
        )


def _module_outputs(
    match: Match, binding: Binding, reference: Any, rows: int, wide: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    weight = next(match.module.parameters())
    module: Any = match.module
    x = torch.randn(
        SAMPLES * rows, 1, binding.width, generator=torch.Generator().manual_seed(rows)
    ).to(weight.device, binding.dtype)
    return (
        torch.cat([module.forward(sample.clone()) for sample in x.split(rows)]),
        _stock(match, binding)(x),
        reference.forward(x.to(wide)),
    )
