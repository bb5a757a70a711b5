"""The class of a swapped module.

It is a subclass of the stock class. Its forward asks the guard first. Copies and pickles of a
swapped module are stock modules.
"""

from __future__ import annotations

import copyreg
from functools import cache, wraps
from typing import Any

import torch

from mirage_hf.swap.guard import BINDING_KEY
from mirage_hf.swap.traced import shared

_is_compiling = torch.compiler.is_compiling


@cache
def swapped_class(stock: Any) -> Any:
    """Return the subclass of `stock` that runs kernels if its guard allows. There is one for each.

    It has the names of the stock class.
    """

    # stock.forward is looked up at each call, so that later patches of the class hold here, too.
    @wraps(stock.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_compiling():
            return _traced_forward(stock, self, args, kwargs)
        state = self.__dict__
        binding = state.get(BINDING_KEY)
        if binding is None:
            return stock.forward(self, *args, **kwargs)
        if binding.before_call is not None:
            binding.before_call()
        kernels = binding.choose(state, args, kwargs)
        if type(kernels) is str:
            binding.fallbacks[kernels] += 1
            return stock.forward(self, *args, **kwargs)
        binding.calls += 1
        return binding.composition(kernels, args[0], kwargs)

    def reduce_as_stock(self: Any, protocol: Any) -> tuple[Any, ...]:
        return _as_stock(super(swapped, self).__reduce_ex__(protocol), swapped, stock)

    members = {
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
        "forward": forward,
        "__reduce_ex__": reduce_as_stock,
    }
    swapped: Any = type(stock.__name__, (stock,), members)
    return swapped


def _traced_forward(stock: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the forward that torch.compile and torch.export see."""
    binding = module.__dict__.get(BINDING_KEY)
    if binding is not None and binding.traced:
        traced = shared[binding.traced]
        if (kernels := traced.choose(module, args, kwargs)) is not None:
            return traced.over(module)(kernels, args[0], kwargs)
    return stock.forward(module, *args, **kwargs)


def _as_stock(reduced: Any, swapped: type, stock: type) -> Any:
    """Return a reduction that rebuilds the stock module.

    The binding is left out, because a copy must not run on the original's weights.
    """
    make, args, state, *rest = reduced
    if isinstance(state, dict):
        state = {key: value for key, value in state.items() if key != BINDING_KEY}
    if make is copyreg.__newobj__ and args == (swapped,):  # type: ignore[attr-defined]
        # Pickle refuses `__newobj__` for an object of another class. The older `_reconstructor`
        # does the same without that check.
        return (copyreg._reconstructor, (stock, object, None), state, *rest)  # type: ignore[attr-defined]
    return (make, tuple(stock if arg is swapped else arg for arg in args), state, *rest)
