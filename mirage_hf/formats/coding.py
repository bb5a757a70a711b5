"""How the codes of a container become a weight, as inputs and ops of a tensor program."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mirage_hf.graph import coded
from mirage_hf.graph.kernel import KernelGraph, new_kernel_graph
from mirage_hf.graph.tensors import DTensor
from mirage_hf.ops.dtypes import CODE_DTYPES, CODES_PER_WORD, dtype_name


@dataclass(frozen=True)
class Stored:
    """A tensor of a container, as a program reads it. Dims and strides of uint4 are in codes."""

    dims: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(pairs: Sequence[tuple[int, int]], dtype: torch.dtype) -> Stored:
        """Return a tensor from the size and stride of each dim."""
        dims, strides = zip(*pairs, strict=True)
        return Stored(dims, strides, dtype)


@dataclass(frozen=True)
class Field:
    """Some bits of each of several bytes, as a program reads them. They are a whole number.

    Attributes:
        stored: The bytes.
        count: How many bits.
        starts: The first of these bits, as bytes. Their dims broadcast to those of the others. None
            if it is the lowest bit.
    """

    stored: Stored
    count: int
    starts: Stored | None = None


@dataclass(frozen=True)
class Bits:
    """A number whose bits lie in several places, the lowest ones first.

    Attributes:
        low: The lowest bits: codes of 4 bits, or a field.
        high: The bits above them.
    """

    low: Stored | Field
    high: Field

    @property
    def places(self) -> int:
        """How many bits are below those of `high`."""
        return self.low.count if isinstance(self.low, Field) else 4


#: A number of each element of a weight, or of a block of them.
Number = Stored | Field | Bits


def _stored(number: Number) -> Stored:
    """Return where the lowest bits of a number are stored."""
    while not isinstance(number, Stored):
        number = number.low if isinstance(number, Bits) else number.stored
    return number


def _roles(name: str, number: Number | None) -> dict[str, Stored]:
    """Return the inputs of a number by their roles. The lowest bits have its name."""
    if number is None:
        return {}
    if isinstance(number, Stored):
        return {name: number}
    if isinstance(number, Bits):
        return _roles(name, number.low) | _roles(f"high bits of {name}", number.high)
    return {name: number.stored} | _roles(f"starts of {name}", number.starts)


@dataclass(frozen=True)
class Split:
    """How the rows and columns of a weight are split into blocks, one for each scale.

    Attributes:
        rows: The rows of the weight: outputs of the linear.
        columns: Its columns: inputs of the linear.
        row_block: How many rows one block has. 1 does not split the rows.
        group: How many columns one block has. All columns do not split them.
    """

    rows: int
    columns: int
    row_block: int = 1
    group: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "group", self.group or self.columns)

    @property
    def groups(self) -> int:
        """The groups of a row."""
        return self.columns // self.group

    def codes(self, dtype: torch.dtype) -> Stored:
        """Return codes that are stored row by row."""
        return self._row_major(self._rows() + self._columns(self.group), dtype)

    def per_row(self, dtype: torch.dtype) -> Stored:
        """Return one value for each group of each row, stored row by row."""
        return self._row_major(self._rows() + self._columns(1), dtype)

    def per_block(self, dtype: torch.dtype) -> Stored:
        """Return one value for each block of rows and columns, stored row by row."""
        if self.row_block == 1:
            return self.per_row(dtype)
        dims = self._rows()[:-1] + (1,) + self._columns(1)
        return self._row_major(dims, dtype)

    def per_tensor(self, dtype: torch.dtype) -> Stored:
        """Return one value for the whole weight."""
        return self._row_major((1,) * (len(self._rows()) + len(self._columns(1))), dtype)

    def shared(self, dtype: torch.dtype) -> Stored:
        """Return one value for the whole weight that is read as one for each row.

        Weights with such values can be joined.
        """
        ones = (1,) * (len(self._rows()) + len(self._columns(1)) - 1)
        return Stored((self._rows()[0], *ones), (0, *ones), dtype)

    def packed_along_rows(self, dtype: torch.dtype, per_word: int) -> Stored:
        """Return one code for each group of each row, where words hold codes of successive rows.

        The words are stored as a row-major tensor (rows / per_word, groups), and `row_block` is
        `per_word`.
        """
        dims = self._rows() + self._columns(1)
        strides = (self.groups * per_word, 1, per_word, 1)[: len(dims)]
        return Stored(dims, strides, dtype)

    def _rows(self) -> tuple[int, ...]:
        if self.row_block == 1:
            return (self.rows,)
        return (self.rows // self.row_block, self.row_block)

    def _columns(self, group: int) -> tuple[int, ...]:
        if self.group == self.columns:
            return (group,)
        return (self.groups, group)

    def _row_major(self, dims: tuple[int, ...], dtype: torch.dtype) -> Stored:
        strides = tuple(math.prod(dims[d + 1 :]) for d in range(len(dims)))
        return Stored(dims, strides, dtype)


@dataclass(frozen=True)
class Coding:
    """How codes become a weight: (codes − zeros − zero) · scales + shifts. Hashable, no tensors.

    If there is a table, each code is the index of an entry, which takes its place. If there are
    divisors, the scales are divided by them first. If there are factors, the scales are multiplied
    by them first. If there are minima, their products with their factors are subtracted at last.

    The weight is decoded in the dtype of the scales. It is decoded in float32 if the scales are
    codes, too, if there are divisors or shifts, or if `wide` says so. Then it is cast to `dtype`.

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
        order: The group of each column, as whole numbers. Its dims are the last ones of the codes,
            and replace the last dim of the scales and zero points, which is that of the groups.
            None if the dims of the scales broadcast to those of the codes.
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
            for role, stored in _roles(name, number).items()
        }

    @property
    def computes(self) -> torch.dtype:
        """The dtype in which the weight is decoded."""
        scales = _stored(self.scales).dtype
        is_wide = self.wide or scales in CODE_DTYPES or bool(self.divisors or self.shifts)
        return torch.float32 if is_wide else scales

    def write(self, graph: KernelGraph) -> tuple[list[DTensor], DTensor]:
        """Add the inputs that hold the weight, and the ops that decode it.

        Returns:
            The inputs in order, and the decoded weight as a tensor (columns, rows).
        """
        return write_joined([self], graph)

    def joins(self, other: Coding) -> bool:
        """Return whether the rows of another weight may follow those of this one in one tensor."""
        if (self.columns, self.dtype, self.zero) != (other.columns, other.dtype, other.zero):
            return False
        if self.table != other.table or self.wide != other.wide:
            return False
        if self.roles.keys() != other.roles.keys() or self.order:
            return False  # each weight has an order of its own
        codes = _stored(self.codes)
        if coded.is_packed(codes.dtype) and abs(codes.strides[0]) < CODES_PER_WORD:
            return False  # the rows of one weight share words
        return all(
            x.dtype is y.dtype and x.dims[0] > 1 and y.dims[0] > 1 and x.dims[1:] == y.dims[1:]
            for x, y in zip(self.stored, other.stored, strict=True)
        )

    def describe(self) -> str:
        """Return a short text for reports, such as "uint4 in groups of 128, zero points"."""
        codes, scales = _stored(self.codes), _stored(self.scales)
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
        codings: The codings, each of which `joins` the first.
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
    inputs, _ = coding.write(new_kernel_graph())
    stored = [coded.storage(t) for t in inputs]
    return tuple(
        t.detach().as_strided((t.numel(),), (1,)).view(s.dtype).as_strided(s.dims, s.strides)
        for t, s in zip(held, stored, strict=True)
    )


def words_of(dtype: torch.dtype) -> int:
    """Return how many codes of a dtype an int32 word holds."""
    return CODES_PER_WORD if coded.is_packed(dtype) else 4 // dtype.itemsize


def as_dtype(graph: KernelGraph, x: DTensor, dtype: torch.dtype) -> DTensor:
    """Return x in a dtype. No op is added if it has that dtype."""
    assert dtype not in CODE_DTYPES
    return x if x.dtype is dtype else graph.cast(x, dtype)
