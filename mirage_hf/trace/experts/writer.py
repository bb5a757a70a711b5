"""Write products with the weights of chosen experts as ops of a program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mirage_hf.formats.coding import Coding, as_dtype, write_decoded
from mirage_hf.formats.stored import Stored
from mirage_hf.graph.kernel import DTensor, KernelGraph
from mirage_hf.trace.experts.form import Linear, viewed
from mirage_hf.trace.program import alike
from mirage_hf.trace.record import TraceError


@dataclass(frozen=True, eq=False)
class ParameterPart:
    """A slice of a parameter of experts along one dim, as a program reads it.

    Attributes:
        dim: The dim that is sliced.
        columns: The slice of that dim.
        stored: How a program reads a tensor of a container. None for plain parameters.
    """

    dim: int
    columns: slice
    stored: Stored | None = None

    def of(self, x: Tensor) -> Tensor:
        """Return this part of a parameter, as a view."""
        x = x if self.stored is None else viewed(x, self.stored)
        return x[(slice(None),) * self.dim + (self.columns,)]


@dataclass(frozen=True, eq=False)
class ExpertsWriter:
    """Writes products with the weights of chosen experts.

    Attributes:
        graph: The program.
        index: The chosen experts (rows, chosen), an input of the program.
        note: Called with a parameter, and with the part of it that becomes an input of the program.
    """

    graph: KernelGraph
    index: DTensor
    note: Callable[[Tensor, ParameterPart], None]

    def linear(self, x: DTensor, linear: Linear, part: slice = slice(None)) -> DTensor:
        """Return some outputs of a linear of the chosen experts, bias included.

        Args:
            x: (rows, chosen or 1, n, inputs). The n are inputs that share a choice.
            linear: The linear.
            part: Which outputs.

        Raises:
            TraceError: These outputs are not whole blocks of the codes.
        """
        if linear.coding is not None:
            weight = self._decoded(linear, linear.coding, part)
        else:
            dim = 2 if linear.is_transposed else 1
            weight = self._chosen(linear.tensors[0], dim, part)
        if not linear.is_transposed:
            weight = self.graph.permute(weight, (0, 1, 3, 2))
        y = self.graph.matmul(x, weight)
        if linear.bias is None:
            return y
        chosen = self._chosen(linear.bias, 1, part)
        bias = self.graph.reshape(chosen, (*self.index.dims, 1, y.dims[-1]))
        return self.graph.add(*alike(self.graph, [y, bias]))

    def _decoded(self, linear: Linear, coding: Coding, part: slice) -> DTensor:
        """Return some rows of the chosen weights, decoded after they are chosen.

        Raises:
            TraceError: These rows are not whole blocks of the codes.
        """
        rows = range(linear.rows)[part]
        tensors = {}
        for role, tensor, stored in zip(coding.roles, linear.tensors, linear.stacked, strict=True):
            block = linear.rows // stored.dims[1]
            blocks = slice(None)
            if stored.dims[1] > 1:
                if block > 1 and (rows.step != 1 or rows.start % block or len(rows) % block):
                    raise TraceError("experts whose gate takes parts of blocks of codes")
                blocks = slice(rows.start // block, -(-rows.stop // block), rows.step)
            tensors[role] = self._chosen(tensor, 1, blocks, stored, coding.computes)
        shape = (*self.index.dims, len(rows), linear.columns)
        return write_decoded(coding, self.graph, tensors, shape)

    def _chosen(
        self,
        tensor: Tensor,
        dim: int,
        columns: slice,
        stored: Stored | None = None,
        dtype: torch.dtype | None = None,
    ) -> DTensor:
        """Return the chosen experts' part of a parameter, codes as floats of a dtype."""
        part = ParameterPart(dim, columns, stored)
        if stored is None:
            given = part.of(tensor.detach())
            x = self.graph.new_input(
                given.shape, given.dtype, strides=given.stride(), constant=True
            )
        else:
            dims, strides = [*stored.dims], [*stored.strides]
            dims[dim] = len(range(dims[dim])[columns])
            strides[dim] *= columns.step or 1
            x = self.graph.new_input(dims, stored.dtype, strides=strides, constant=True)
        self.note(tensor, part)
        return self.graph.take(x if dtype is None else as_dtype(self.graph, x, dtype), self.index)
