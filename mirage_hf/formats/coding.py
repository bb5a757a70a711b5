"""How the codes of a container become a weight, as inputs and ops of a tensor program."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from mirage_hf.formats.stored import Bits, Number, Stored, inputs_by_role, lowest_bits
from mirage_hf.graph import coded
from mirage_hf.graph.kernel import KernelGraph, new_kernel_graph
from mirage_hf.graph.tensors import DTensor
from mirage_hf.ops.dtypes import CODE_DTYPES, CODES_PER_WORD, dtype_name


@dataclass(frozen=True)
class Coding:
    """How codes become a weight: (codes − zeros − zero) · scales + shifts. Hashable, no tensors.

    If there is a table, each code is the index of an entry, which replaces it. If there are
    divisors or factors, the scales are first divided or multiplied by them. If there are minima,
    their products with their factors are subtracted last.

    The weight is decoded in the dtype of the scales, and then cast to `dtype`. It is decoded in
    float32 if the scales are codes too, if there are divisors or shifts, or if `wide` says so.

    Attributes:
        rows: The rows of the weight: outputs of the linear.
        columns: Its columns: inputs of the linear.
        dtype: The dtype of the decoded weight, in which the module computes.
        codes: The codes. Their dims, in row-major order, are those of the weight (rows, columns).
        scales: The scales, as codes or floats. Their dims broadcast to those of the codes.
        zeros: The zero points, as codes or floats. None if all are equal.
        zero: A zero point of all codes.
        shifts: What is added to the scaled codes, as floats. None if nothing is.
        table: What each code stands for. None if codes stand for themselves.
        divisors: What the scales are divided by, as floats. None if nothing divides them.
        wide: True if the weight is decoded in float32, whatever the dtype of the scales.
        order: The group of each column, as whole numbers. Scales and zero points have a last dim of
            groups, which the dims of the order replace. These are the last dims of the codes. None
            if the dims of the scales broadcast to those of the codes.
        factors: What the scales are multiplied by, as floats. None if nothing multiplies them.
        minima: What is subtracted from the scaled codes, times `minimum_factors`. None if nothing
            is.
        minimum_factors: What the minima are multiplied by, as floats.
    """

    rows: int
    columns: int
    dtype: torch.dtype
    codes: Number
    scales: Number
    zeros: Stored | None = None
    zero: float = 0.0
    shifts: Stored | None = None
    table: tuple[float, ...] | None = None
    divisors: Stored | None = None
    wide: bool = False
    order: Stored | None = None
    factors: Stored | None = None
    minima: Number | None = None
    minimum_factors: Stored | None = None

    @property
    def stored(self) -> tuple[Stored, ...]:
        """The inputs of a program, in order."""
        return tuple(self.roles.values())

    @property
    def roles(self) -> dict[str, Stored]:
        """The inputs of a program by the names of their attributes, in order."""
        numbers = {
            "codes": self.codes,
            "scales": self.scales,
            "divisors": self.divisors,
            "factors": self.factors,
            "zeros": self.zeros,
            "shifts": self.shifts,
            "minima": self.minima,
            "minimum factors": self.minimum_factors,
            "order": self.order,
        }
        return {
            role: stored
            for name, number in numbers.items()
            for role, stored in inputs_by_role(name, number).items()
        }

    @property
    def codes_dims(self) -> tuple[int, ...]:
        """The dims of the codes."""
        return lowest_bits(self.codes).dims

    @property
    def computes(self) -> torch.dtype:
        """The dtype in which the weight is decoded."""
        scales = lowest_bits(self.scales).dtype
        is_wide = self.wide or scales in CODE_DTYPES or bool(self.divisors or self.shifts)
        return torch.float32 if is_wide else scales

    def write(self, graph: KernelGraph) -> tuple[list[DTensor], DTensor]:
        """Add the inputs that hold the weight, and the ops that decode it.

        Returns:
            The inputs in order, and the decoded weight as a tensor (columns, rows).
        """
        return write_joined([self], graph)

    def part(self, length: int) -> Coding:
        """Return the coding of so many elements along the first dim of the codes."""
        dims = self.codes_dims
        of_groups = dims[: len(dims) - len(self.order.dims) + 1] if self.order else dims
        return replace(
            self,
            rows=self.rows // dims[0] * length,
            codes=self.codes.in_part(dims, length),
            scales=self.scales.in_part(of_groups, length),
            zeros=self.zeros and self.zeros.in_part(of_groups, length),
            shifts=self.shifts and self.shifts.in_part(dims, length),
            divisors=self.divisors and self.divisors.in_part(dims, length),
            factors=self.factors and self.factors.in_part(dims, length),
            minima=self.minima and self.minima.in_part(dims, length),
            minimum_factors=self.minimum_factors and self.minimum_factors.in_part(dims, length),
        )

    def joins(self, other: Coding) -> bool:
        """Return whether the rows of another weight may follow those of this one in one tensor."""
        if (self.columns, self.dtype, self.zero) != (other.columns, other.dtype, other.zero):
            return False
        if self.table != other.table or self.wide != other.wide:
            return False
        if self.roles.keys() != other.roles.keys() or self.order:
            return False  # each weight has an order of its own
        codes = lowest_bits(self.codes)
        if coded.is_packed(codes.dtype) and abs(codes.strides[0]) < CODES_PER_WORD:
            return False  # the rows of one weight share words
        return all(
            x.dtype is y.dtype and x.dims[0] > 1 and y.dims[0] > 1 and x.dims[1:] == y.dims[1:]
            for x, y in zip(self.stored, other.stored, strict=True)
        )

    def describe(self) -> str:
        """Return a short text for reports, such as "uint4 in groups of 128, zero points"."""
        codes, scales = lowest_bits(self.codes), lowest_bits(self.scales)
        shared = self.rows * self.columns // math.prod(scales.dims)
        order = " in an order of their own" if self.order else ""
        if scales.dims.count(1) == len(scales.dims):
            where = "one scale"
        elif shared == self.columns:
            where = "a scale for each row"
        elif math.prod(scales.dims) % self.rows == 0:
            where = f"groups of {shared}{order}"
        else:
            where = f"blocks of {shared} codes"
        zeros = ", zero points" if self.zeros or self.shifts else ", minima" if self.minima else ""
        table = " by table" if self.table else ""
        bits = " and more bits" if isinstance(self.codes, Bits) else ""
        return f"{dtype_name(codes.dtype)}{bits}{table}, {where}{zeros}"


def write_joined(codings: Sequence[Coding], graph: KernelGraph) -> tuple[list[DTensor], DTensor]:
    """Add the inputs of weights that join, and the ops that decode them as one weight.

    Args:
        codings: The codings. Each one `joins` the first.
        graph: The program.

    Returns:
        The inputs of each coding in order, and the decoded weight as a tensor (columns, all rows).
    """
    first = codings[0]
    inputs = [
        {
            role: graph.new_input(s.dims, s.dtype, s.strides, constant=True)
            for role, s in coding.roles.items()
        }
        for coding in codings
    ]
    whole = {}
    for role in first.roles:
        same = [each[role] for each in inputs]
        if role != "order":
            same = [as_dtype(graph, x, first.computes) for x in same]
        whole[role] = same[0] if len(same) == 1 else graph.concat(same, 0)
    shape = sum(coding.rows for coding in codings), first.columns
    w = write_decoded(first, graph, whole, shape)
    return [x for each in inputs for x in each.values()], graph.permute(w, (1, 0))


def write_decoded(
    coding: Coding, graph: KernelGraph, tensors: Mapping[str, DTensor], shape: tuple[int, ...]
) -> DTensor:
    """Add the ops that decode a weight.

    Args:
        coding: The coding.
        graph: The program.
        tensors: The inputs by role, as floats. Dims may come before those of the coding.
        shape: The shape of the weight: the dims that come before, rows, columns.
    """
    whole = {**tensors}
    if coding.order:
        for role in whole.keys() & {"scales", "zeros"}:
            whole[role] = graph.take(whole[role], whole["order"], -1)
    w, scales = (_value(graph, whole, x, getattr(coding, x)) for x in ("codes", "scales"))
    if coding.table:
        w = graph.apply("lookup", [w], {"values": coding.table})
    if coding.zeros:
        w = graph.sub(w, whole["zeros"])
    if coding.zero:
        w = graph.sub(w, coding.zero)
    if coding.divisors:
        scales = graph.div(scales, whole["divisors"])
    if coding.factors:
        scales = graph.mul(scales, whole["factors"])
    w = graph.mul(w, scales)
    if coding.shifts:
        w = graph.add(w, whole["shifts"])
    if coding.minima:
        minima = _value(graph, whole, "minima", coding.minima)
        w = graph.sub(w, graph.mul(minima, whole["minimum factors"]))
    w = as_dtype(graph, w, coding.dtype)
    return w if w.dims == shape else graph.reshape(w, shape)


def _value(
    graph: KernelGraph, tensors: Mapping[str, DTensor], name: str, number: Number
) -> DTensor:
    """Add the ops that make a number from its inputs, by role."""
    if isinstance(number, Stored):
        return tensors[name]
    if isinstance(number, Bits):
        low = _value(graph, tensors, name, number.low)
        high = _value(graph, tensors, f"high bits of {name}", number.high)
        return graph.add(low, graph.mul(high, float(1 << number.places)))
    start = tensors.get(f"starts of {name}", 0.0)
    return graph.apply("bits", [tensors[name], start], {"count": number.count})


@dataclass(frozen=True, eq=False)
class CodedWeight:
    """A weight in codes.

    Attributes:
        coding: How the codes become the weight.
        tensors: What the inputs of `coding.write` read, in their order. They are views of the
            module's own memory.
        bias: The module's bias.
        quantizes_activations: True if the module also rounds its input to codes. Programs of
            `coding` do not, so they are closer to the product with the decoded weight.
    """

    coding: Coding
    tensors: tuple[Tensor, ...]
    bias: Tensor | None = None
    quantizes_activations: bool = False


def view_as(coding: Coding, held: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return views of the tensors of a container with the dims and strides that programs read.

    Args:
        coding: The coding.
        held: The container's row-major tensors, in the order of the program's inputs. Words of
            codes are viewed as the dtype that the program reads.
    """
    return tuple(
        t.detach().as_strided((t.numel(),), (1,)).view(s.dtype).as_strided(s.dims, s.strides)
        for t, s in zip(held, storages(coding), strict=True)
    )


@lru_cache(maxsize=256)
def storages(coding: Coding) -> tuple[coded.Storage, ...]:
    """Return how the inputs of a program that reads a weight are stored."""
    inputs, _ = coding.write(new_kernel_graph())
    return tuple(map(coded.storage, inputs))


def as_dtype(graph: KernelGraph, x: DTensor, dtype: torch.dtype) -> DTensor:
    """Return x in a dtype. No op is added if it has that dtype."""
    assert dtype not in CODE_DTYPES
    return x if x.dtype is dtype else graph.cast(x, dtype)
