"""Forwards of linears whose weights are codes, for prompts and other calls without a kernel.

Some libraries decode all weights of a model at its first forward, or need kernels that must be
fetched. While such a model is optimized, each of its linears decodes its own weight by a kernel,
and multiplies with torch's product. The decoded weight lives as long as the call.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mirage_hf.formats import CodedWeight, Coding, coded_weight, held_tensors
from mirage_hf.formats.containers import STOCK_CLASS
from mirage_hf.graph.kernel import KernelGraph, new_kernel_graph

#: The entry of a module's dictionary that holds its binding.
CODES_KEY = "_mirage_hf_codes"

#: Runs a program on its inputs.
Run = Callable[[list[Tensor]], list[Tensor]]


def decoding_program(coding: Coding) -> KernelGraph:
    """Return the program that decodes a weight: (rows, columns) as nn.Linear stores it."""
    graph = new_kernel_graph()
    _, weight = coding.write(graph)
    graph.mark_output(graph.permute(weight, (1, 0)))
    return graph


@dataclass(eq=False)
class CodedBinding:
    """How a linear runs while its model is optimized.

    Attributes:
        weight: Its codes.
        decode: Runs its decoding program.
        own: The forward on the instance that ours hides, None if there is none.
        facts: What tells whether the module still has these codes.
    """

    weight: CodedWeight
    decode: Run
    own: Any = None
    facts: tuple[Any, ...] = ()

    def run(self, module: nn.Module, x: Tensor) -> Tensor:
        """Return what the linear makes of `x`, with the codes that it has now."""
        facts = _facts(module)
        if facts != self.facts:
            now = coded_weight(module, self.weight.coding.dtype)
            if not isinstance(now, CodedWeight) or now.coding != self.weight.coding:
                raise RuntimeError(
                    f"the codes of this {type(module).__name__} were replaced by another format "
                    "after optimize(); call optimize() again"
                )
            self.weight, self.facts = now, facts
        weight = self.decode(list(self.weight.tensors))[0]
        return F.linear(x.to(weight.dtype), weight, self.weight.bias).to(x.dtype)


def _facts(module: nn.Module) -> tuple[Any, ...]:
    """Return which memory holds a linear's codes and bias. To read a container takes longer."""
    held = (*held_tensors(module), getattr(module, "bias", None))
    return tuple([(id(t), t.data_ptr()) for t in held if t is not None])


def bind_codes(module: nn.Module, binding: CodedBinding) -> Callable[[], None]:
    """Let a linear decode its own weight. Return what puts it back."""
    stock: Any = type(module)
    binding.own = module.__dict__.pop("forward", None)
    module.__dict__[CODES_KEY] = binding
    module.__class__ = decoding_class(stock)

    def undo() -> None:
        module.__dict__.pop(CODES_KEY, None)
        if binding.own is not None and "forward" not in module.__dict__:
            module.__dict__["forward"] = binding.own
        if type(module) is decoding_class(stock):
            module.__class__ = stock

    return undo


@cache
def decoding_class(stock: Any) -> Any:
    """Return the subclass of `stock` whose forward decodes the weight. There is one for each.

    It has the names of the stock class. Copies and pickles of its modules are stock modules.
    """

    @wraps(stock.forward)
    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        binding = self.__dict__.get(CODES_KEY)
        if binding is None:
            return stock.forward(self, x, *args, **kwargs)
        return binding.run(self, x)

    def reduce_as_stock(self: Any, protocol: Any) -> tuple[Any, ...]:
        make, args, state, *rest = super(decoding, self).__reduce_ex__(protocol)
        if isinstance(state, dict):
            binding = state.get(CODES_KEY)
            state = {key: value for key, value in state.items() if key != CODES_KEY}
            if binding is not None and binding.own is not None:
                state["forward"] = binding.own
        if make is copyreg.__newobj__ and args == (decoding,):  # type: ignore[attr-defined]
            return (copyreg._reconstructor, (stock, object, None), state, *rest)  # type: ignore[attr-defined]
        return (make, tuple(stock if arg is decoding else arg for arg in args), state, *rest)

    members = {
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
        "forward": forward,
        "__reduce_ex__": reduce_as_stock,
        STOCK_CLASS: stock,
    }
    decoding: Any = type(stock.__name__, (stock,), members)
    return decoding
