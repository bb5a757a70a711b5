"""The class of a swapped module: a subclass of its stock class, guard in front, which copies and pickles as the stock one."""

from __future__ import annotations

import copyreg
from functools import cache, wraps
from typing import Any

import torch

from mirage_hf.swap.guard import BINDING_KEY
from mirage_hf.swap.traced import shared

_compiling = torch.compiler.is_compiling


@cache
def swapped_class(stock: Any) -> Any:
    """Return the subclass of `stock` that runs kernels where its guard allows. One per class, with the class's own names."""

    # stock.forward is looked up at each call: patches of the class made later hold here too
    @wraps(stock.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _compiling():
            return _traced(stock, self, args, kwargs)
        state = self.__dict__
        bound = state.get(BINDING_KEY)
        if bound is None:
            return stock.forward(self, *args, **kwargs)
        kernels = bound.choose(state, args, kwargs)
        if type(kernels) is str:
            bound.fallbacks[kernels] += 1
            return stock.forward(self, *args, **kwargs)
        bound.calls += 1
        return bound.composition(kernels, args[0], kwargs)

    def __reduce_ex__(self: Any, protocol: Any) -> tuple[Any, ...]:
        return _as_stock(super(swapped, self).__reduce_ex__(protocol), swapped, stock)

    names = {
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
    }
    swapped: Any = type(
        stock.__name__, (stock,), {**names, "forward": forward, "__reduce_ex__": __reduce_ex__}
    )
    return swapped


def _traced(stock: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The forward that torch.compile and torch.export see."""
    bound = module.__dict__.get(BINDING_KEY)
    if bound is not None and bound.traced:
        traced = shared[bound.traced]
        if (kernels := traced.choose(module, args, kwargs)) is not None:
            return traced.over(module)(kernels, args[0], kwargs)
    return stock.forward(module, *args, **kwargs)


def _as_stock(reduced: Any, swapped: type, stock: type) -> Any:
    """A reduction that rebuilds the stock module, without what we keep in it: a copy must not run on the original's weights."""
    make, args, state, *rest = reduced
    if isinstance(state, dict):
        state = {k: v for k, v in state.items() if k != BINDING_KEY}
    if make is copyreg.__newobj__ and args == (swapped,):  # type: ignore[attr-defined]
        # pickle refuses this maker for an object of another class; the older one says the same without that check
        return (copyreg._reconstructor, (stock, object, None), state, *rest)  # type: ignore[attr-defined]
    return (make, tuple(stock if a is swapped else a for a in args), state, *rest)
