"""Give modules of an optimized model another forward, and put their own back.

The class of such a module is a subclass of its stock class with the same names. Copies and pickles
of the module are stock modules.
"""

from __future__ import annotations

import copyreg
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from mirage_hf.formats.containers import STOCK_CLASS, stock_class
from mirage_hf.swap.undos import put_back_all

#: The entry of a module's dictionary that holds its binding.
FORWARD_KEY = "_mirage_hf_forward"


def is_plain_call(x: Tensor) -> bool:
    """Return whether a call gets a plain tensor, and nothing records or changes what it does."""
    return not (
        type(x) is not Tensor
        or torch.is_grad_enabled()
        or torch.is_autocast_enabled(x.device.type)
        or torch.compiler.is_compiling()
        or (torch._C._len_torch_dispatch_stack() and not _all_modes_allow_kernels())
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _all_modes_allow_kernels() -> bool:
    """Return whether no dispatch mode records or changes what a call does to plain tensors."""
    modes = _get_current_dispatch_mode_stack()
    return all(getattr(mode, "allows_kernels", False) for mode in modes)


@dataclass(eq=False, kw_only=True)
class Binding(ABC):
    """How a module runs while its model is optimized, in calls that no kernel of a step takes.

    Attributes:
        own: The forward on the instance that ours hides, None if there is none.
        models: How many optimized models have the module.
        undos: What puts back other changes that the binding needs, once no model has the module.
    """

    own: Any = None
    models: int = 0
    undos: list[Callable[[], None]] = field(default_factory=list)

    @abstractmethod
    def run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return what the module makes of its inputs, with the weights that it has now."""

    def put_back(self, module: nn.Module) -> None:
        """Give a module its library's forward."""
        if module.__dict__.get(FORWARD_KEY) is not self:
            return
        del module.__dict__[FORWARD_KEY]
        if self.own is not None:
            module.__dict__.setdefault("forward", self.own)
        stock = stock_class(module)
        if type(module) is bound_class(stock):
            module.__class__ = stock


def bind_forward(module: nn.Module, binding: Binding) -> Callable[[], None]:
    """Let a module run as a binding says. Return what puts it back.

    A module of two optimized models keeps the binding of the first until both are put back.
    """
    binding = module.__dict__.setdefault(FORWARD_KEY, binding)
    if not binding.models:
        kind: Any = type(module)
        binding.own = module.__dict__.pop("forward", None)
        module.__class__ = bound_class(kind)
    binding.models += 1

    has_module = True

    def undo() -> None:
        nonlocal has_module
        if has_module:  # it may be called again after a failure
            binding.models -= 1
            has_module = False
        if not binding.models:
            binding.put_back(module)
            put_back_all(binding.undos)

    return undo


@cache
def bound_class(stock: Any) -> Any:
    """Return the subclass of `stock` whose forward asks the binding. There is one for each class.

    It has the names of the stock class. Copies and pickles of its modules are stock modules.
    """

    @wraps(stock.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        binding = self.__dict__.get(FORWARD_KEY)
        if binding is None:
            return stock.forward(self, *args, **kwargs)
        return binding.run(self, *args, **kwargs)

    def reduce_as_stock(self: Any, protocol: Any) -> tuple[Any, ...]:
        make, args, state, *rest = super(bound, self).__reduce_ex__(protocol)
        if isinstance(state, dict):
            binding = state.get(FORWARD_KEY)
            state = {key: value for key, value in state.items() if key != FORWARD_KEY}
            if binding is not None and binding.own is not None:
                state["forward"] = binding.own
        if make is copyreg.__newobj__ and args == (bound,):  # type: ignore[attr-defined]
            return (copyreg._reconstructor, (stock, object, None), state, *rest)  # type: ignore[attr-defined]
        return (make, tuple(stock if arg is bound else arg for arg in args), state, *rest)

    members = {
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
        "forward": forward,
        "__reduce_ex__": reduce_as_stock,
        STOCK_CLASS: stock,
    }
    bound: Any = type(stock.__name__, (stock,), members)
    return bound
