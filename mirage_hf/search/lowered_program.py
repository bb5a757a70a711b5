"""A program over named axes: the form that the search and its core work on.

A tensor becomes a function of axes. A dim of size 1 has no axis, a permutation only renames axes,
and a matmul is a product summed over an axis. Composites such as softmax are written out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

#: Numerators and denominators of exact constants stay below this. The primes of the proofs are
#: larger, so no such constant is zero there and each has an inverse.
_LARGEST_EXACT = 10**9


class NotLowerableError(Exception):
    """An error: an op cannot be part of a fused kernel. The message says which op, and why."""


@dataclass(frozen=True)
class Term:
    """One node of a lowered program.

    `op` is "input", "constant", "add", "sub", "mul", "div", "exp", "opaque", "sum" or "max". While
    a program is being lowered it may also be "partial": a reduction over one split of an axis.
    """

    op: str
    #: Earlier terms, by number.
    args: tuple[int, ...] = ()
    #: The axes that the value depends on, sorted by name.
    axes: tuple[str, ...] = ()
    #: Of an input: its number among `LoweredProgram.inputs`.
    source: int = -1
    #: Of an input: the axis of each dim, None for a dim of size 1.
    index: tuple[str | None, ...] = ()
    #: Of a constant: its value.
    value: float = 0.0
    #: Of an opaque function: the op of the table.
    fn: str = ""
    #: Of an opaque function: the attributes of that op.
    attrs: tuple[tuple[str, float], ...] = ()
    #: Of a sum or a maximum: the axis that is reduced.
    axis: str = ""


@dataclass(frozen=True)
class LoweredInput:
    """A value that is read from device memory.

    It is one graph input, or several graph inputs that lie end to end along one dim. It may also be
    a 0/1 mask, made of two inputs that hold lower and upper bounds.
    """

    #: The graph inputs, by number: lo and hi for a mask.
    sources: tuple[int, ...]
    #: The sizes of all sources together. A dim that a reshape splits is given by its parts.
    dims: tuple[int, ...]
    #: The dim along which several sources lie end to end.
    joined: int | None = None
    #: The size of each source along `joined`.
    sizes: tuple[int, ...] = ()
    #: Bytes of an element. For a mask, these are the bytes of lo and hi together.
    itemsize: float = 2
    #: Of a mask: the dim that it bounds, which has size 1 in `dims`.
    bounds: int | None = None
    #: The dim that is read with its halves or pairs swapped or signed (RoPE). With it come one of
    #: `block_parts.ROTATIONS`, and the number of first elements that have partners (None for all).
    rotation: tuple[int, str, int | None] | None = None
    #: The dim that is shorter than its axis, and the value read after its end.
    padding: tuple[int, float] | None = None
    #: The dim whose elements an index chooses, the index's number among the graph inputs, and its
    #: dims. In the `index` of a term, the axes of the index replace the dim.
    taken: tuple[int, int, tuple[int, ...]] | None = None

    @property
    def read_dims(self) -> tuple[int, ...]:
        """The sizes of what is read: the dims of an index replace the dim that it chooses from."""
        if self.taken is None:
            return self.dims
        dim, _, index = self.taken
        return (*self.dims[:dim], *index, *self.dims[dim + 1 :])

    def source_dim(self, at: int) -> int:
        """Return the dim of the sources for a place in the `index` of a term."""
        if self.taken is None:
            return at
        dim, _, index = self.taken
        return at if at < dim else max(dim, at - len(index) + 1)

    @property
    def num_elements(self) -> int:
        """The most elements that are read. An index may choose one of them several times."""
        return min(math.prod(self.dims), math.prod(self.read_dims))


@dataclass(frozen=True)
class LoweredOutput:
    """An output of the program: its term, the axis of each dim (None for size 1), and its dtype."""

    term: int
    index: tuple[str | None, ...]
    dtype: str


@dataclass(frozen=True)
class LoweredProgram:
    """A program as terms over named axes.

    Attributes:
        sizes: Axes by name, with their sizes.
        inputs: What is read from device memory.
        terms: The nodes, each after its arguments.
        outputs: The results, in the program's order.
        ratios: True if a division gives 0 where its divisor is 0.
    """

    sizes: dict[str, int]
    inputs: tuple[LoweredInput, ...]
    terms: tuple[Term, ...]
    outputs: tuple[LoweredOutput, ...]
    ratios: bool = False


def small_rational(value: float) -> Fraction | None:
    """Return the exact value of a constant as a small fraction, or None if there is none.

    If a simple fraction rounds to the float, as 1/10 does to 0.1, the float stands for it.
    """
    if not math.isfinite(value):
        return None
    for fraction in (
        Fraction(value),
        Fraction(value).limit_denominator(_LARGEST_EXACT - 1),
    ):
        small = max(abs(fraction.numerator), fraction.denominator) < _LARGEST_EXACT
        if small and float(fraction) == value:
            return fraction
    return None
