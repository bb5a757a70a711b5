"""Values as mantissa · e^shift, so that exponentials stay in range.

A plan is exact algebra and knows no rounding. An exponential that a later division cancels, as in
softmax, is emitted as a *scaled value*: a mantissa and a shift that stand for mantissa · e^shift.

- exp(s) is the mantissa 1 with shift s. Products add shifts, divisions subtract them, and a
  division of two values of the same shift has none left.
- A sum over an axis that the shift carries first takes the maximum of the shift over that axis,
  over the loop a running one. The mantissa takes up the difference, which is at most e^0 = 1.
- Values of different shifts are added at the larger shift.

So online softmax and the combination of split attention need no rule of their own. A program that
writes out its own shift by a maximum gets the same kernels as one that does not.

Masks are 0/1 values of bounds. A scaled value keeps them beside its mantissa through products, in
whatever order the algebra gives them. `select` applies them where a sum over their axis takes the
value up, or where it is stored. They are applied to the exponential if there is one, so that a
multiplication with it stays a matrix product, and the maximum of the shift is taken of the scores
inside the bounds only. So nothing outside the bounds, not even NaN, reaches a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mirage_hf.search.block_writer import BlockWriter, EmissionFormError

#: The maximum of no scores at all. It is finite, so rows without any score have a finite shift, and
#: it is below any score that matters.
FLOOR = -1e30


@dataclass(frozen=True)
class Shift:
    """A value of the block graph that is an exponent.

    Attributes:
        name: The value.
        origin: The nodes of the program that it is a bound of.
        is_max: True if it is the maximum of its origin over an axis.
        over: The shifts of which it is the larger one.
    """

    name: str
    origin: tuple[object, ...]
    is_max: bool = False
    over: tuple[Shift, ...] = ()


@dataclass(frozen=True)
class ScaledValue:
    """mantissa · e^(Σ plus − Σ minus), and 0 where a mask is 0.

    Attributes:
        mantissa: A value of the block graph, or a number.
        plus: Shifts that are added in the exponent.
        minus: Shifts that are subtracted in the exponent.
        masks: Block inputs that are 0 or 1.
    """

    mantissa: str | float
    plus: tuple[Shift, ...] = ()
    minus: tuple[Shift, ...] = ()
    masks: tuple[str, ...] = ()

    @property
    def has_shift(self) -> bool:
        """True unless the value is its mantissa, apart from masks."""
        return bool(self.plus or self.minus)

    @property
    def is_plain(self) -> bool:
        """True if the value is its mantissa."""
        return not self.has_shift and not self.masks

    @property
    def shifts(self) -> tuple[Shift, ...]:
        """All shifts in the exponent."""
        return (*self.plus, *self.minus)


class ScaledArithmetic:
    """Ops on scaled values, written into a block graph.

    Raises:
        EmissionFormError: If a value would leave the range of floats because nothing cancels its
            exponential.
    """

    def __init__(self, writer: BlockWriter, division: str):
        self.writer = writer
        #: "div", or "ratio" if a division by 0 gives 0.
        self.division = division
        #: The nodes of the program that each mask is, by the mask's name.
        self.mask_origin: dict[str, object] = {}

    def axes_of(self, x: ScaledValue) -> set[str]:
        """Return the axes that a value, its shifts or its masks carry."""
        return self.writer.axes_of((x.mantissa, *(s.name for s in x.shifts), *x.masks))

    # -- shifts ------------------------------------------------------------------------------------

    def exponent(self, x: ScaledValue) -> Shift:
        """Return the shift of a value as one value."""
        if len(x.plus) == 1 and not x.minus:
            return x.plus[0]
        if not x.plus:
            raise EmissionFormError("a negative exponent alone")
        name = x.plus[0].name
        for s in x.plus[1:]:
            name = self.writer.op("add", (name, s.name))
        for s in x.minus:
            name = self.writer.op("sub", (name, s.name))
        up = tuple(o for s in x.plus for o in s.origin)
        down = tuple(o for s in x.minus for o in s.origin)
        return Shift(name, (*up, "-", *down))

    def is_at_most_one(self, x: ScaledValue) -> bool:
        """True if e^shift is at most 1: the shift is an exponent minus its maximum."""
        if len(x.plus) != 1 or len(x.minus) != 1:
            return False
        return self._is_at_least(x.minus[0], x.plus[0], x.masks)

    def _is_at_least(self, high: Shift, low: Shift, masks: Sequence[str]) -> bool:
        """True if `high` is known to be at least `low` wherever the masks are 1."""
        if high.name == low.name:
            return True
        carried = self.writer.carried
        masked_origin = (*low.origin, *(self.mask_origin[m] for m in masks))
        if (
            high.is_max
            and high.origin in (low.origin, masked_origin)
            and set(carried[high.name]) <= set(carried[low.name])
        ):
            return True
        if any(self._is_at_least(s, low, masks) for s in high.over):
            return True
        return bool(low.over) and all(self._is_at_least(high, s, masks) for s in low.over)

    def _inside(self, shift: Shift, masks: Sequence[str]) -> Shift:
        """Return a shift whose maximum is that of the scores inside the bounds."""
        if not masks:
            return shift
        name = str(self.writer.select(masks, shift.name, FLOOR))
        return Shift(name, (*shift.origin, *(self.mask_origin[m] for m in masks)))

    # -- values ------------------------------------------------------------------------------------

    def plain(self, x: ScaledValue) -> str | float:
        """Return the value itself, which must be in range."""
        if not x.has_shift:
            return self.writer.select(x.masks, x.mantissa)
        if not self.is_at_most_one(x):
            raise EmissionFormError("an exponential that nothing cancels")
        exponential = self.writer.op("exp", (self.exponent(x).name,))
        return self.writer.times(self.writer.select(x.masks, exponential), x.mantissa)

    def unmasked(self, x: ScaledValue) -> ScaledValue:
        """Return the value without masks: its mantissa 0 outside the bounds, its shift finite."""
        if not x.masks:
            return x
        if x.minus or len(x.plus) > 1:
            x = ScaledValue(x.mantissa, (self.exponent(x),), masks=x.masks)
        mantissa = self.writer.select(x.masks, x.mantissa)
        return ScaledValue(mantissa, tuple(self._inside(s, x.masks) for s in x.plus))

    def sum(self, x: ScaledValue, axis: str) -> ScaledValue:
        """Return the sum over a tile axis."""
        if self.is_at_most_one(x):
            x = ScaledValue(self.plain(x))
        x, masks = self._without_masks_along(x, axis)
        if axis not in self.writer.axes_of(s.name for s in x.shifts):
            masked = self.writer.select(masks, x.mantissa)
            return replace(x, mantissa=self.writer.op("sum", (masked,), over=axis))
        shift = self.exponent(x)
        inside = self._inside(shift, masks)
        top = Shift(self.writer.op("max", (inside.name,), over=axis), inside.origin, True)
        terms = self._at_shift(shift, top, masks, x.mantissa)
        return ScaledValue(self.writer.op("sum", (terms,), over=axis), (top,), masks=x.masks)

    def accumulate(self, kind: str, x: ScaledValue) -> ScaledValue:
        """Return the sum or the maximum over the loop."""
        if kind == "max" or self.is_at_most_one(x):
            x = ScaledValue(self.plain(x))
        loop = str(self.writer.loop)
        x, masks = self._without_masks_along(x, loop)
        if loop not in self.writer.axes_of(s.name for s in x.shifts):
            masked = self.writer.select(masks, x.mantissa)
            return replace(x, mantissa=self.writer.accumulate(kind, masked))
        shift = self.exponent(x)
        inside = self._inside(shift, masks)
        top = Shift(self.writer.accumulate("max", inside.name), inside.origin, True)
        # The terms read the running maximum, so they hold in this stage only.
        terms = self._at_shift(shift, top, masks, x.mantissa)
        total = self.writer.accumulate("sum", terms, top.name)
        return ScaledValue(total, (top,), masks=x.masks)

    def _without_masks_along(
        self, x: ScaledValue, axis: str
    ) -> tuple[ScaledValue, tuple[str, ...]]:
        """Return the value without the masks that carry an axis, and those masks."""
        along = tuple(m for m in x.masks if axis in self.writer.carried[m])
        return replace(x, masks=tuple(m for m in x.masks if m not in along)), along

    def _at_shift(
        self, shift: Shift, top: Shift, masks: Sequence[str], mantissa: str | float
    ) -> str | float:
        """Return the mantissa at a larger shift, 0 where a mask is 0."""
        difference = self.writer.op("sub", (shift.name, top.name))
        exponential = self.writer.op("exp", (difference,))
        return self.writer.times(self.writer.select(masks, exponential), mantissa)

    def product(self, a: ScaledValue, b: ScaledValue) -> ScaledValue:
        """Return a · b."""
        mantissa = self.writer.times(a.mantissa, b.mantissa)
        return _with_shifts(mantissa, a, b, b.plus, b.minus)

    def quotient(self, a: ScaledValue, b: ScaledValue) -> ScaledValue:
        """Return a / b."""
        b = self.unmasked(b)  # outside its bounds b is 0, and a ratio with it is 0
        mantissa = a.mantissa
        if b.mantissa != 1.0:
            mantissa = self.writer.op(self.division, (a.mantissa, b.mantissa))
        return _with_shifts(mantissa, a, b, b.minus, b.plus)

    def add(self, fn: str, a: ScaledValue, b: ScaledValue) -> ScaledValue:
        """Return the sum (`fn` "add") or the difference ("sub") of two values."""
        if (a.plus, a.minus, a.masks) == (b.plus, b.minus, b.masks):
            return replace(a, mantissa=self.writer.op(fn, (a.mantissa, b.mantissa)))
        if any(x.has_shift and not self.is_at_most_one(x) for x in (a, b)):
            return self._add_at_larger_shift(fn, a, b)
        return ScaledValue(self.writer.op(fn, (self.plain(a), self.plain(b))))

    def _add_at_larger_shift(self, fn: str, a: ScaledValue, b: ScaledValue) -> ScaledValue:
        a, b = self.unmasked(a), self.unmasked(b)
        no_shift = Shift("", ("zero",))
        shifts = tuple(self.exponent(x) if x.has_shift else no_shift for x in (a, b))
        names = tuple(s.name or 0.0 for s in shifts)
        origin = ("max", *(s.origin for s in shifts))
        top = Shift(self.writer.op("max", names), origin, over=shifts)
        terms = []
        for name, x in zip(names, (a, b), strict=True):
            exponential = self.writer.op("exp", (self.writer.op("sub", (name, top.name)),))
            terms.append(self.writer.times(exponential, x.mantissa))
        return ScaledValue(self.writer.op(fn, (terms[0], terms[1])), (top,))


def _with_shifts(
    mantissa: str | float,
    a: ScaledValue,
    b: ScaledValue,
    plus: tuple[Shift, ...],
    minus: tuple[Shift, ...],
) -> ScaledValue:
    """Return a mantissa with the shifts of `a` and the given ones, equal ones cancelled."""
    up, down = [*a.plus, *plus], [*a.minus, *minus]
    for s in tuple(up):
        if s in down:
            up.remove(s)
            down.remove(s)
    masks = (*a.masks, *(m for m in b.masks if m not in a.masks))
    return ScaledValue(mantissa, tuple(up), tuple(down), masks)
