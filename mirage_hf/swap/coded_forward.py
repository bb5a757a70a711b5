"""Forwards of linears in codes, for prompts and other calls without a kernel.

Some libraries decode all weights of a model at its first forward, or need kernels that must be
fetched. While such a model is optimized, each of its linears decodes its own weight by a kernel,
and multiplies with torch's product. A decoded weight lives as long as its product. Large weights
are decoded part by part.
"""

from __future__ import annotations

from collections.abc import Callable
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
from mirage_hf.formats.coding import as_dtype
from mirage_hf.formats.parts import RowPart, in_parts
from mirage_hf.formats.stored import Stored
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph, new_kernel_graph
from mirage_hf.swap.own_forward import Binding, is_plain_call
from mirage_hf.trace.experts.decoded import Decoder

#: The largest relative difference between our result and the library's: if the library rounds the
#: input to codes, and if it does not.
_ROUNDED, _CLOSE = 0.15, 0.02

#: Rows of the input that both are compared on.
_COMPARED_ROWS = 4

#: The most rows of a prompt that one kernel multiplies. With more rows, products take much longer
#: than to decode the weight into memory.
PRODUCT_ROWS = 128

#: The most bytes of a weight that are decoded at once. Heads and MLPs of models of 8B have more.
#: For a prefill of 256 to 2,048 tokens, the GPU takes up to 6% longer with such parts than with
#: whole weights. With parts of 32 MiB, it takes 4 to 11% longer in int8 (Llama-3.1-8B, H200).
DECODED_BYTES = 1 << 26

#: Runs a program on its inputs.
Run = Callable[[list[Tensor]], list[Tensor]]


def decoding_program(coding: Coding) -> KernelGraph:
    """Return the program that decodes a weight: (rows, columns) as nn.Linear stores it."""
    graph = new_kernel_graph()
    _, weight = coding.write(graph)
    graph.mark_output(graph.permute(weight, (1, 0)))
    return graph


def product_program(coding: Coding, dtype: torch.dtype, has_bias: bool) -> KernelGraph:
    """Return the program of a linear in codes. Its inputs are rows, codes, and the bias."""
    graph = new_kernel_graph()
    x = graph.new_input((PRODUCT_ROWS, coding.columns), dtype)
    _, weight = coding.write(graph)
    y = graph.matmul(x, as_dtype(graph, weight, dtype))
    if has_bias:
        y = graph.add(y, graph.new_input((1, coding.rows), dtype, constant=True))
    graph.mark_output(y)
    return graph


def has_reversed_columns(coding: Coding) -> bool:
    """Return whether the codes of neighbouring columns lie in reverse order, as in bitsandbytes.

    For NF4 and 128 rows, the search finds no single kernel that multiplies them on tensor cores.
    The others are slower than decoding the weight first (docs/decisions/025).
    """
    codes = coding.codes
    return isinstance(codes, Stored) and codes.strides[-1] < 0


@dataclass(frozen=True)
class Decoding:
    """How weights of one coding are decoded.

    Attributes:
        parts: The parts of a weight, in order.
        runs: What decodes each part.
    """

    parts: tuple[RowPart, ...]
    runs: tuple[Decoder, ...]

    @staticmethod
    def by_torch(coding: Coding) -> Decoding:
        """Decode weights by torch's ops."""
        parts = in_parts(coding, DECODED_BYTES)
        programs = [decoding_program(part.coding) for part in parts]
        return Decoding(parts, tuple(partial(run_kernel_graph, program) for program in programs))

    def linear(self, x: Tensor, weight: CodedWeight, bias: Tensor | None) -> Tensor:
        """Return what a linear makes of `x`.

        Only one decoded part is held at a time, unless gradients need all of them.
        """
        rows = [part.coding.rows for part in self.parts]
        biases = [None] * len(rows) if bias is None else bias.split(rows)
        if len(rows) == 1 or not is_plain_call(x):
            results = [
                F.linear(x, self._decoded(number, weight, x.dtype), own)
                for number, own in enumerate(biases)
            ]
            return results[0] if len(rows) == 1 else torch.cat(results, -1)
        y = x.new_empty(*x.shape[:-1], sum(rows))
        given, results = x.reshape(-1, x.shape[-1]), y.view(-1, sum(rows)).split(rows, 1)
        for number, (own, result) in enumerate(zip(biases, results, strict=True)):
            _multiply(given, self._decoded(number, weight, x.dtype).t(), own, result)
        return y

    def _decoded(self, number: int, weight: CodedWeight, dtype: torch.dtype) -> Tensor:
        """Return a part of a weight."""
        return self.runs[number](self.parts[number].tensors(weight.tensors))[0].to(dtype)


def _multiply(x: Tensor, w: Tensor, bias: Tensor | None, result: Tensor) -> None:
    """Write a product into a tensor."""
    if bias is None:
        torch.mm(x, w, out=result)
    else:
        torch.addmm(bias, x, w, out=result)


@dataclass(frozen=True)
class RowsProduct:
    """A kernel of linears of one coding, for up to PRODUCT_ROWS rows.

    Attributes:
        run: Runs `product_program`.
        dtype: The dtype of the rows.
        has_bias: Whether it adds a bias.
    """

    run: Run
    dtype: torch.dtype
    has_bias: bool

    def takes(self, x: Tensor, weight: CodedWeight, bias: Tensor | None) -> bool:
        """Return whether the kernel may run for an input, a weight and a bias."""
        columns = weight.coding.columns
        if x.dtype is not self.dtype or not x.is_cuda or (bias is not None) != self.has_bias:
            return False
        is_shaped = (
            x.dim() > 0 and x.shape[-1] == columns and 0 < x.numel() <= PRODUCT_ROWS * columns
        )
        return is_shaped and x.device == weight.tensors[0].device and is_plain_call(x)

    def __call__(self, x: Tensor, weight: CodedWeight, bias: Tensor | None) -> Tensor:
        """Return what the linear makes of an input."""
        given = x.reshape(-1, x.shape[-1])
        rows = len(given)
        given = (
            F.pad(given, (0, 0, 0, PRODUCT_ROWS - rows))
            if rows < PRODUCT_ROWS
            else given.contiguous()
        )
        inputs = [given, *weight.tensors, *(() if bias is None else (bias[None],))]
        return self.run(inputs)[0][:rows].view(*x.shape[:-1], weight.coding.rows)


@dataclass(eq=False, kw_only=True)
class CodedBinding(Binding):
    """How a linear runs while its model is optimized.

    Attributes:
        weight: Its codes.
        decoding: How it is decoded.
        product: Multiplies few rows without decoding the weight into memory. None if it is decoded
            for any number of rows.
    """

    weight: CodedWeight
    decoding: Decoding
    product: RowsProduct | None = None

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
        bias = None if self.weight.bias is None else self.weight.bias.to(x.dtype)
        is_as_made = _reading(self.weight) == self._made_for  # not if the model was cast or moved
        if self.product is not None and is_as_made and self.product.takes(x, self.weight, bias):
            return self.product(x, self.weight, bias)
        decoding = self.decoding if is_as_made else Decoding.by_torch(self.weight.coding)
        return decoding.linear(x, self.weight, bias)

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
