"""The last check of kernels: against the modules that they replace, with the model's own weights.

Each check runs kernels, the stock module and a wide twin on the same inputs. The kernels may be
about as far from the wide twin as stock is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mirage_hf.cudnn_attention import without_cudnn
from mirage_hf.errors import Rejected, described
from mirage_hf.layers.compose import any_norm
from mirage_hf.layers.model_kernels import LayerKernels, ModelKernels
from mirage_hf.layers.part import StepShape
from mirage_hf.layers.step import StepInputs, TokenBounds
from mirage_hf.match.layer_calls import PADDING, LayerCall, ProbeCache, layer_calls
from mirage_hf.match.matches import CausalMatch, Match
from mirage_hf.match.twins import takes_float_mask, twin
from mirage_hf.patterns.attention import REFERENCE_SLOTS
from mirage_hf.swap.guard import BINDING_KEY, Binding


@dataclass(frozen=True)
class Allowance:
    """How far kernels may be from a wide reference."""

    #: In units of stock's own distance, and in units in the last place of the largest output.
    factor: float
    ulps: float


MODULE_ALLOWANCE = Allowance(factor=1.25, ulps=1.0)

#: For a layer or its step in float32. Five sums in a row may be taken in two right orders, and one
#: is nearer to the reference by chance. Over 72 layers of tiny models the ratio was 2.4 at most for
#: 8 calls, and 0.7 to 1.6 for 512.
FLOAT32_LAYER_ALLOWANCE = Allowance(factor=4.0, ulps=3.0)

#: How many outputs of a head are computed at a time in the wide dtype.
SLICE = 8192

#: How many calls are compared for each number of rows. In a small module the largest error of a
#: single call varies much.
SAMPLES = 8

#: The tokens that the cache holds before the compared call.
PAST = 5


@dataclass(frozen=True)
class Checked:
    """The largest distances from a reference in float32, or in float64 for float32 modules."""

    #: The distance of the kernels, and of the stock module.
    error: float
    stock_error: float
    #: How large `error` may be.
    allowed: float


def check(match: Match, binding: Binding) -> Checked | Rejected:
    """Run a swapped module through its guard, for each number of rows that it has kernels for."""
    wide = _wider(binding.dtype)
    binding.forget()
    worst = Checked(0.0, 0.0, 0.0)
    run = _layer_outputs if match.kind == "layer" else _module_outputs
    allowance = _allowance(match, binding.dtype)
    try:
        with _checking(binding.device_type), _with_mlp_stand_in(match):
            reference = twin(match.module, lambda _, p: p.to(wide))
            for rows in binding.kernels:
                outputs = run(match, binding, reference, rows, wide)
                if binding.fallbacks:
                    return Rejected(f"its guard refuses it: {', '.join(binding.fallbacks)}")
                checked = _compare(outputs, binding.dtype, allowance)
                if not checked.error <= checked.allowed:
                    return _too_far(checked, rows)
                worst = max(worst, checked, key=lambda c: c.error)
    except Exception as error:
        return _could_not_run(error)
    return worst


def check_step(match: Match, layer: LayerKernels, shape: StepShape) -> Checked | Rejected:
    """Run a layer's step by kernels, over a cache that stock has filled.

    Attention has the number of slots that its kernels were found for.
    """
    module: Any = match.module
    dtype = dict(layer.step.parts["attention"].block.sizes)["dtype"]
    device = next(module.parameters()).device
    wide = _wider(dtype)
    swapped = module.__dict__.get(BINDING_KEY)
    stock_class = type(module) if swapped is None else swapped.stock
    kernels = {role: kernel.run for role, kernel in layer.found[shape].items()}
    try:
        with _checking(device.type), _with_mlp_stand_in(match):
            reference = twin(module, lambda _, p: p.to(wide))
            stock = partial(stock_class.forward, module)
            sampled = _sample(
                match, stock, reference, shape.batch, dtype, wide, masked=True, tokens=shape.tokens
            )
            ours = [
                _step_output(layer, kernels, call, cache, shape)
                for call, cache in sampled.each_sample()
            ]
            by_stock, exact = sampled.stock.flatten(0, 1), sampled.exact.flatten(0, 1)
            outputs = _Outputs(torch.cat(ours), by_stock, exact)
            checked = _compare(outputs, dtype, _allowance(match, dtype))
    except Exception as error:
        return _could_not_run(error)
    return checked if checked.error <= checked.allowed else _too_far(checked, shape.rows)


def check_head(kernels: ModelKernels, causal: CausalMatch, rows: int) -> Checked | Rejected:
    """Run the last norm and head by kernels, and the model's own modules."""
    dtype, device = kernels.embedding.dtype, kernels.embedding.device
    wide = _wider(dtype)

    def widened(module: nn.Module) -> Any:
        if type(module) is nn.Linear:
            return _InSlices(module, wide)
        return twin(module, lambda _, p: p.to(wide))

    try:
        with _checking(device.type):
            generator = torch.Generator().manual_seed(rows)
            x = torch.randn(SAMPLES * rows, kernels.embedding.shape[1], generator=generator)
            x = x.to(device, dtype)
            ours = []
            for sample in x.split(rows):
                logits = torch.empty(rows, kernels.vocab, dtype=dtype, device=device)
                kernels.head(rows, sample.clone(), logits)
                ours.append(logits)
            exact = causal.own_head(x.to(wide), widened)
            outputs = _Outputs(torch.cat(ours), causal.own_head(x), exact)
            checked = _compare(outputs, dtype, MODULE_ALLOWANCE)
    except Exception as error:
        return _could_not_run(error)
    return checked if checked.error <= checked.allowed else _too_far(checked, rows)


# -- comparing -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Outputs:
    """The outputs of the kernels, the stock module and the wide reference."""

    ours: Tensor
    stock: Tensor
    exact: Tensor


def _wider(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float32 else torch.float32


def _allowance(match: Match, dtype: torch.dtype) -> Allowance:
    of_layer = match.kind == "layer" and dtype == torch.float32
    return FLOAT32_LAYER_ALLOWANCE if of_layer else MODULE_ALLOWANCE


def _compare(outputs: _Outputs, dtype: torch.dtype, allowance: Allowance) -> Checked:
    exact = outputs.exact
    distances = [(y.to(exact.dtype) - exact).abs().max() for y in (outputs.ours, outputs.stock)]
    error, stock_error = map(float, distances)
    largest = float(exact.abs().max())
    ulp = 0.0
    if 0 < largest < math.inf:
        ulp = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(largest))
    return Checked(error, stock_error, allowance.factor * stock_error + allowance.ulps * ulp)


def _too_far(checked: Checked, rows: int) -> Rejected:
    return Rejected(
        f"off by {checked.error:.2g} with {rows} rows, stock by {checked.stock_error:.2g}; "
        f"{checked.allowed:.2g} is allowed"
    )


def _could_not_run(error: Exception) -> Rejected:
    """Reject a module whose check raised an error, in its own code or in its wide twin."""
    return Rejected(f"the check could not run ({described(error)})")


@contextmanager
def _checking(device_type: str) -> Iterator[None]:
    with torch.no_grad(), torch.autocast(device_type, enabled=False), without_cudnn():
        yield


@contextmanager
def _with_mlp_stand_in(match: Match) -> Iterator[None]:
    """Put the stand-in in the place of an MLP that runs its own forward."""
    if match.mlp_stand_in is None:
        yield
        return
    children: dict[str, Any] = match.module.__dict__["_modules"]
    name = match.layer_layout.mlp
    own, children[name] = children[name], match.mlp_stand_in
    try:
        yield
    finally:
        children[name] = own


# -- running layers --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sampled:
    """SAMPLES times `rows` sequences with a filled cache and new tokens, as one batch."""

    rows: int
    call: LayerCall
    cache: ProbeCache
    #: What stock and the wide twin give.
    stock: Tensor
    exact: Tensor

    def each_sample(self) -> Iterator[tuple[LayerCall, ProbeCache]]:
        """Yield the call and the cache of each sample."""
        for n in range(SAMPLES):
            sequences = slice(n * self.rows, (n + 1) * self.rows)
            yield self.call.part(sequences), self.cache.part(sequences)


def _sample(
    match: Match,
    stock: Callable[..., Any],
    reference: Any,
    rows: int,
    dtype: torch.dtype,
    wide: torch.dtype,
    masked: bool,
    tokens: int = 1,
) -> _Sampled:
    layer: Any = match.module
    like = any_norm(layer, match.layer_layout).weight
    prompt, call = layer_calls(
        rows,
        like,
        match.rope,
        (PAST, tokens),
        torch.Generator().manual_seed(rows),
        dtype,
        masked=masked,
        samples=SAMPLES,
    )
    cache = ProbeCache()
    stock(prompt.x, **prompt.kwargs(layer, cache))
    wide_call = call.to(wide)
    by_stock = stock(call.x, **call.kwargs(layer, cache.to(dtype)))
    exact = reference.forward(wide_call.x, **wide_call.kwargs(layer, cache.to(wide)))
    return _Sampled(rows, call, cache, by_stock, exact)


def _layer_outputs(
    match: Match, binding: Binding, reference: Any, rows: int, wide: torch.dtype
) -> _Outputs:
    layer: Any = match.module
    dtype = binding.dtype
    masked = takes_float_mask(layer._modules[match.layer_layout.attention])
    stock = partial(binding.stock.forward, layer)
    sampled = _sample(match, stock, reference, rows, dtype, wide, masked)
    ours = [
        layer.forward(call.x, **call.kwargs(layer, cache.to(dtype)))
        for call, cache in sampled.each_sample()
    ]
    return _Outputs(torch.cat(ours), sampled.stock, sampled.exact)


def _step_output(
    layer: LayerKernels,
    kernels: dict[str, Any],
    call: LayerCall,
    cache: ProbeCache,
    shape: StepShape,
) -> Tensor:
    """Return what a layer's step by kernels gives for one call."""
    assert cache.keys is not None and cache.values is not None
    padding = (0, 0, 0, REFERENCE_SLOTS - PAST)
    keys, values = (F.pad(x, padding).contiguous() for x in (cache.keys, cache.values))
    cos, sin = layer.step.tables(*(x.flatten(0, 1) for x in (call.cos, call.sin)))
    lo = torch.zeros(shape.batch, dtype=torch.int32, device=keys.device)
    lo[0] = PADDING
    slot, end = torch.full_like(lo, PAST), torch.full_like(lo, PAST + 1)
    bounds = None
    if shape.tokens > 1:
        bounds = _causal_bounds(shape, keys.device)
        layer.step.set_bounds(lo, slot, bounds)
    inputs = StepInputs(cos, sin, keys, values, lo, slot, end, bounds)
    return layer.step(kernels, call.x.flatten(0, 1).contiguous(), inputs)


def _causal_bounds(shape: StepShape, device: torch.device) -> TokenBounds:
    """Return the bounds of new tokens that see every cached key."""
    number = torch.arange(shape.tokens, dtype=torch.int32, device=device)
    number = number.repeat(shape.batch, 1)
    first, new_first = torch.zeros_like(number), torch.zeros_like(number)
    all_cached = torch.full_like(number, PAST)
    return TokenBounds(first, all_cached, new_first, number + 1, shape.windowed)


# -- running other modules -------------------------------------------------------------------------


def _module_outputs(
    match: Match, binding: Binding, reference: Any, rows: int, wide: torch.dtype
) -> _Outputs:
    module: Any = match.module
    device = next(module.parameters()).device
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(SAMPLES * rows, 1, binding.width, generator=generator)
    x = x.to(device, binding.dtype)
    ours = torch.cat([module.forward(sample.clone()) for sample in x.split(rows)])
    return _Outputs(ours, binding.stock.forward(module, x), reference.forward(x.to(wide)))


class _InSlices(nn.Module):
    """A linear in a wider dtype, some outputs at a time. A head's weight would be gigabytes."""

    def __init__(self, linear: nn.Linear, wide: torch.dtype):
        """Compute `linear` in the dtype `wide`."""
        super().__init__()
        self.linear, self.wide = linear, wide

    def forward(self, x: Tensor) -> Tensor:
        """Return the linear's outputs."""
        weights = self.linear.weight.split(SLICE)
        biases: Sequence[Tensor | None] = [None] * len(weights)
        if self.linear.bias is not None:
            biases = self.linear.bias.to(self.wide).split(SLICE)
        outputs = [F.linear(x, w.to(self.wide), b) for w, b in zip(weights, biases, strict=True)]
        return torch.cat(outputs, -1)
