"""Forwards of linears in codes, for prompts and other calls without a kernel.

Some libraries decode all weights of a model at its first forward, or need kernels that must be
fetched. While such a model is optimized, each of its linears decodes its own weight by a kernel,
and multiplies with torch's product. A decoded weight lives as long as its product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mirage_hf.formats import (
    CodedWeight,
    Coding,
    coded_weight,
    copied_facts,
    held_tensors,
    memory_of,
    runs_codes,
)
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph, new_kernel_graph
from mirage_hf.swap.own_forward import Binding
from mirage_hf.trace.experts.decoded import Decoder

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
