"""The inputs on which candidates are compared with torch eager: ordinary ones and hard ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """One set of inputs.

    The factor, the offset and constant rows apply to the first floating-point input, usually the
    activations. All others are random, scaled so that products keep their size.
    """

    #: What reasons call it.
    name: str
    #: The first input is multiplied by this.
    factor: float = 1.0
    #: Then this is added.
    offset: float = 0.0
    #: Every row of the first input is one number.
    constant_rows: bool = False
    #: Only infinities and NaN count. Most results are so near the largest number that they
    #: overflow, and the errors of the others are a matter of luck.
    range_only: bool = False
    #: The size that the arguments of exp should reach. The inputs `grown` are scaled for it.
    scores: float = 0.0
    #: The sign of the last input of `grown`. The others are made positive, so that products of them
    #: are far from 0 in every row.
    sign: int = 0
    #: The inputs that are scaled, numbered among the floating-point inputs.
    grown: tuple[int, ...] = ()
    #: The factor by which they are scaled.
    by: float = 1.0
    #: Inputs, by position, that are NaN wherever no row's bounds reach.
    garbage: tuple[int, ...] = ()
    #: No row's bounds reach the ends of their axis.
    outside: bool = False
    #: The input, by position, that is 0 throughout.
    zero: int | None = None
    #: Codes lie near the middle of their range, and so do their zero points. The products with both
    #: then cancel nearly all of each other.
    near_zero_points: bool = False

    @property
    def cancels(self) -> bool:
        """True if x − mean(x) is so small that the rounding of the mean shows."""
        return self.constant_rows or self.offset != 0


def cases(dtype: torch.dtype) -> tuple[Case, ...]:
    """Return the cases for outputs of a dtype."""
    is_half = dtype == torch.float16
    found = [
        Case("random"),
        Case("large", factor=300.0 if is_half else 1e4),
        Case("tiny", factor=1e-3),
        Case("constant rows", constant_rows=True),
        Case("mean far above spread", offset=1000.0),
        Case("huge positive scores", scores=3e4, sign=1, range_only=True),
        Case("huge negative scores", scores=3e4, sign=-1, range_only=True),
        Case("NaN out of bounds", outside=True),
        Case("codes near zero points", near_zero_points=True),
    ]
    if is_half:
        found.append(Case("nearly the largest", factor=12000.0, range_only=True))
    return tuple(found)
