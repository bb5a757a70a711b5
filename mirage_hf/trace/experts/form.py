"""What the experts of a mixture compute: two linears of each expert, and a function between them.

The linears are read from transformers' modules, with plain weights or weights in codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.errors import Rejected
from mirage_hf.formats.coding import Coding
from mirage_hf.formats.experts import CodedStack, coded_experts, settings_of
from mirage_hf.formats.stored import Stored
from mirage_hf.graph import coded
from mirage_hf.graph.kernel import new_kernel_graph
from mirage_hf.ops.dtypes import COMPUTE_DTYPES


@dataclass(frozen=True, eq=False)
class Linear:
    """One of the linears that each expert has, with the weights of all experts.

    Attributes:
        tensors: The weights of all experts: one tensor (experts, outputs, inputs), or the tensors
            of a container.
        bias: The biases (experts, outputs), None without any.
        rows: The outputs of one expert.
        columns: The inputs of one expert.
        is_transposed: Whether the tensor is (experts, inputs, outputs).
        coding: How the codes of one expert become its weight. None if the weights are plain.
    """

    tensors: tuple[Tensor, ...]
    bias: Tensor | None
    rows: int
    columns: int
    is_transposed: bool = False
    coding: Coding | None = None

    @property
    def parameters(self) -> list[Tensor]:
        """The tensors that it reads."""
        return [*self.tensors] if self.bias is None else [*self.tensors, self.bias]

    @property
    def stacked(self) -> list[Stored]:
        """The inputs of programs for all experts: those of the coding, after a dim of experts."""
        assert self.coding is not None
        stacks = []
        for stored, held in zip(self.coding.stored, self.tensors, strict=True):
            elements = held.stride(0) * held.element_size() * 8 // _bits_of(stored.dtype)
            dims, strides = (len(held), *stored.dims), (elements, *stored.strides)
            stacks.append(Stored(dims, strides, stored.dtype))
        return stacks


def _bits_of(dtype: torch.dtype) -> int:
    return 4 if coded.is_packed(dtype) else 8 * dtype.itemsize


def viewed(x: Tensor, stored: Stored) -> Tensor:
    """Return a tensor of a container as a program reads it."""
    given = new_kernel_graph().new_input(stored.dims, stored.dtype, stored.strides)
    wanted = coded.storage(given)
    flat = x.detach().as_strided((x.numel(),), (1,)).view(wanted.dtype)
    return flat.as_strided(wanted.dims, wanted.strides)


@dataclass(frozen=True, eq=False)
class ExpertsForm:
    """What the experts of a module compute.

    Attributes:
        first: The first linear: gate and up, or up alone.
        second: The linear that follows the function.
        gate: The function between the two linears.
        scales_inputs: Whether routing weights scale the inputs of experts, and not their results.
    """

    first: Linear
    second: Linear
    gate: Callable[[Tensor], Tensor]
    scales_inputs: bool = False

    @property
    def is_coded(self) -> bool:
        """Whether the weights are codes."""
        return self.first.coding is not None

    @property
    def parameters(self) -> list[Tensor]:
        """The tensors that the experts read."""
        return self.first.parameters + self.second.parameters


OTHER_FORM = Rejected("experts whose weights are of another form")


def form_of(module: nn.Module, dtype: torch.dtype = torch.bfloat16) -> ExpertsForm | Rejected:
    """Return what the experts of a module compute, or why it is not known.

    Args:
        module: Any module.
        dtype: The dtype of the activations. Only experts in codes need it.
    """
    found = coded_experts(module, dtype)
    if isinstance(found, Rejected):
        return found
    if found is not None:
        if found.first.swizzled or found.second.swizzled:
            return Rejected("codes that are not yet in the plain order")
        return ExpertsForm(linear_of(found.first), linear_of(found.second), found.gate)
    settings = settings_of(module)
    if settings is None:
        return OTHER_FORM
    linears = []
    for name in settings.names:
        names = (name, f"{name}_bias")[: 1 + settings.has_bias]
        held = [module._parameters.get(n) for n in names]
        if not all(map(_is_plain, held, (3, 2))):
            return OTHER_FORM
        weight, *bias = held
        assert weight is not None
        is_transposed = settings.is_transposed
        rows, columns = reversed(weight.shape[1:]) if is_transposed else weight.shape[1:]
        linears.append(Linear((weight,), bias[0] if bias else None, rows, columns, is_transposed))
    gate: Any = module._apply_gate if settings.has_gate else module.act_fn
    return ExpertsForm(linears[0], linears[1], gate)


def linear_of(stack: CodedStack) -> Linear:
    """Return a linear whose weights are codes."""
    coding = stack.coding
    return Linear(stack.tensors, stack.bias, coding.rows, coding.columns, coding=coding)


def _is_plain(x: Any, dims: int) -> bool:
    """Return whether a parameter is plain weights of so many dims, stored row by row."""
    if type(x) is not nn.Parameter or x.dim() != dims or not x.is_contiguous():
        return False
    return x.dtype in COMPUTE_DTYPES
