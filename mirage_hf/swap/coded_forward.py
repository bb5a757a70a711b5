"""Forwards of linears and experts in codes, for prompts and other calls without a kernel.

Some libraries decode all weights of a model at its first forward, or need kernels that must be
fetched. While such a model is optimized, each of its linears decodes its own weight by a kernel,
and multiplies with torch's product. Experts do so for a few at a time. A decoded weight lives as
long as its product.
"""

from __future__ import annotations

import copyreg
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mirage_hf.errors import Rejected
from mirage_hf.formats import (
    CodedWeight,
    Coding,
    coded_weight,
    copied_facts,
    held_tensors,
    memory_of,
    runs_codes,
)
from mirage_hf.formats.containers import STOCK_CLASS, stock_class
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph, new_kernel_graph
from mirage_hf.trace.experts.decoded import Decoder, Decoders, run_decoded
from mirage_hf.trace.experts.form import form_of
from mirage_hf.trace.experts.op import as_node

#: The entry of a module's dictionary that holds its binding.
CODES_KEY = "_mirage_hf_codes"

#: The largest relative difference between our result and the library's: if the library rounds the
#: input to codes, and if it does not.
_ROUNDED, _CLOSE = 0.15, 0.02

#: Rows of the input that both are compared on.
_COMPARED_ROWS = 4


def decoding_program(coding: Coding) -> KernelGraph:
    """Return the program that decodes a weight: (rows, columns) as nn.Linear stores it."""
    graph = new_kernel_graph()
    _, weight = coding.write(graph)
    graph.mark_output(graph.permute(weight, (1, 0)))
    return graph


@dataclass(eq=False, kw_only=True)
class Binding(ABC):
    """How a module with weights in codes runs while its model is optimized.

    Attributes:
        own: The forward on the instance that ours hides, None if there is none.
        models: How many optimized models have the module.
    """

    own: Any = None
    models: int = 0

    @abstractmethod
    def run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return what the module makes of its inputs, with the weights that it has now."""

    def put_back(self, module: nn.Module) -> None:
        """Give a module its library's forward."""
        if module.__dict__.get(CODES_KEY) is not self:
            return
        del module.__dict__[CODES_KEY]
        if self.own is not None:
            module.__dict__.setdefault("forward", self.own)
        stock = stock_class(module)
        if type(module) is decoding_class(stock):
            module.__class__ = stock


@dataclass(eq=False, kw_only=True)
class ExpertsBinding(Binding):
    """How experts run while their model is optimized.

    Attributes:
        decoders: Runs the decoding programs.
    """

    decoders: Decoders

    def run(  # type: ignore[override]
        self, module: nn.Module, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """Return the sum of the chosen experts: as one node of a recorded step, or decoded."""
        node = as_node(module, x, top_k_index, top_k_weights)
        if node is not None:
            return node  # type: ignore[no-any-return]
        form = form_of(module, x.dtype)
        if isinstance(form, Rejected) or not form.is_coded:  # such as experts of another dtype
            self.put_back(module)
            return module.forward(x, top_k_index, top_k_weights)  # type: ignore[no-any-return]
        return run_decoded(form, x, top_k_index, top_k_weights, self.decoders)


@dataclass(eq=False, kw_only=True)
class CodedBinding(Binding):
    """How a linear runs while its model is optimized.

    Attributes:
        weight: Its codes.
        decode: Runs its decoding program.
    """

    weight: CodedWeight
    decode: Decoder

    def __post_init__(self) -> None:
        self._made_for = _reading(self.weight)
        self._facts: tuple[Any, ...] = ()

    def run(  # type: ignore[override]
        self, module: nn.Module, x: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Return what the linear makes of `x`, with the weight that it has now."""
        facts = _facts(module)
        if facts != self._facts:
            now = coded_weight(module, self.weight.coding.dtype)
            if not isinstance(now, CodedWeight):  # such as a plain weight
                self.put_back(module)
                return module.forward(x)  # type: ignore[no-any-return]
            self.weight, self._facts = now, facts
        decode = self.decode
        if _reading(self.weight) != self._made_for:  # the model was cast or moved
            decode = partial(run_kernel_graph, decoding_program(self.weight.coding))
        decoded, bias = decode(list(self.weight.tensors))[0], self.weight.bias
        return F.linear(x, decoded.to(x.dtype), None if bias is None else bias.to(x.dtype))

    def difference(self, module: nn.Module) -> float | None:
        """Return how far our result is from the library's, relative to its size, if it is too far.

        None if they agree, or if the library's forward does not run as the module is.
        """
        if not runs_codes(module) or "forward" in module.__dict__:
            return None
        weight = self.weight
        device = weight.tensors[0].device
        draw = torch.Generator(device).manual_seed(0)
        shape = _COMPARED_ROWS, weight.coding.columns
        x = torch.randn(shape, generator=draw, device=device, dtype=weight.coding.dtype)
        with torch.no_grad():
            try:
                theirs = module.forward(x).float()
            except Exception:  # it needs another device, or a library that is not installed
                return None
            distance = (self.run(module, x).float() - theirs).norm() / theirs.norm().clamp_min(1e-9)
        found = distance.item()
        allowed = _ROUNDED if weight.quantizes_activations else _CLOSE
        return found if found > allowed else None  # not NaN, which weights may hold


def _reading(weight: CodedWeight) -> tuple[Coding, torch.device]:
    """Return what the kernel that decodes a weight depends on."""
    return weight.coding, weight.tensors[0].device


def _facts(module: nn.Module) -> tuple[Any, ...]:
    """Return which memory holds a linear's codes and bias. To read a container takes longer."""
    held = (*module._parameters.values(), *held_tensors(module), getattr(module, "bias", None))
    facts = [(id(t), memory_of(t), _writes(t)) for t in held if isinstance(t, Tensor)]
    return (*facts, *copied_facts(module))


def _writes(t: Tensor) -> int:
    """Return how often integers were written. Readers look at zero points and orders of groups."""
    return 0 if t.is_floating_point() or t.is_inference() else t._version


def bind_codes(module: nn.Module, binding: Binding) -> Callable[[], None]:
    """Let a module decode its own weights. Return what puts it back.

    A module of two optimized models keeps the binding of the first until both are put back.
    """
    binding = module.__dict__.setdefault(CODES_KEY, binding)
    if not binding.models:
        kind: Any = type(module)
        binding.own = module.__dict__.pop("forward", None)
        module.__class__ = decoding_class(kind)
    binding.models += 1

    def undo() -> None:
        binding.models -= 1
        if not binding.models:
            binding.put_back(module)

    return undo


def use_class_forward(module: nn.Module) -> Callable[[], None]:
    """Let a mixture run the forward of its class. Return what puts its library's back."""
    library = module.__dict__.pop("forward")
    return lambda: module.__dict__.__setitem__("forward", library)


@cache
def decoding_class(stock: Any) -> Any:
    """Return the subclass of `stock` whose forward decodes the weight. There is one for each.

    It has the names of the stock class. Copies and pickles of its modules are stock modules.
    """

    @wraps(stock.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        binding = self.__dict__.get(CODES_KEY)
        if binding is None:
            return stock.forward(self, *args, **kwargs)
        return binding.run(self, *args, **kwargs)

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
