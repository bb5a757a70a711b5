"""Values as mantissa · e^shift, so that exponentials stay in range.

A plan is exact algebra and ignores rounding. An exponential that a later division cancels, as in
softmax, is emitted as a *scaled value*. It is a mantissa and a shift, and means mantissa · e^shift.

- exp(s) is the mantissa 1 with shift s. Products add shifts, and divisions subtract them. If two
  values have the same shift, their quotient has none.
- A sum over an axis that the shift carries first takes the maximum of the shift over that axis.
  Over the loop it is a running maximum. The mantissa is multiplied by e^(shift − maximum), which is
  at most 1.
- Values of different shifts are added at the larger shift.

So online softmax and the combination of split attention need no rule of their own. A program that
subtracts a maximum itself gets the same kernels as one that does not.

Masks are 0/1 values of bounds. A scaled value keeps its masks apart from its mantissa through
products, in whatever order the algebra has them. `select` applies them where the value is summed
over their axis, or where it is stored. If there is an exponential, they are applied to it, so that
a multiplication with it stays a matrix product. The maximum of the shift is taken only over the
scores inside the bounds. So nothing outside the bounds, not even NaN, reaches a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mirage_hf.search.block_writer import BlockWriter, EmissionFormError

#: The maximum of no scores at all. It is finite, so that rows without a score have a finite shift.
#: It is below any score that matters.
FLOOR = -1e30


@dataclass(frozen=True)
class Shift:
    """A value of the block graph that is an exponent.

    Attributes:
        name: The name of the value.
        origin: The nodes of the program that the shift is a bound of.
        is_max: True if the shift is the maximum of its origin over an axis.
        over: The two shifts that it is the larger one of, if any.
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
        """True if the value has an exponent, so that it is not just its mantissa and masks."""
        return bool(self.plus or self.minus)

    @property
    def is_plain(self) -> bool:
        """True if the value is just its mantissa, without an exponent or masks."""
        return not self.has_shift and not self.masks

    @property
    def shifts(self) -> tuple[Shift, ...]:
        """All shifts in the exponent."""
        return (*self.plus, *self.minus)


class ScaledArithmetic:
    """Writes ops on scaled values into a block graph.

    Raises:
        EmissionFormError: If a value would leave the range of floats because nothing cancels its
            exponential.
    """

    def __init__(self, writer: BlockWriter, division: str):
        self.writer = writer
        #: "div", or "ratio" if a division by 0 gives 0.
        self.division = division
        #: The node of the program that each mask stands for, by the mask's name.
        self.mask_origin: dict[str, object] = {}

    def axes_of(self, x: ScaledValue) -> set[str]:
        """Return the axes that a value, its shifts or its masks carry."""
        return self.writer.axes_of((x.mantissa, *(s.name for s in x.shifts), *x.masks))

    # -- shifts ------------------------------------------------------------------------------------

    def exponent(self, x: ScaledValue) -> Shift:
        """Return the whole exponent of a value as one shift."""
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
        """Return True if e^shift is at most 1, because it is an exponent minus its maximum."""
        if len(x.plus) != 1 or len(x.minus) != 1:
            return False
        return self._is_at_least(x.minus[0], x.plus[0], x.masks)

    def _is_at_least(self, high: Shift, low: Shift, masks: Sequence[str]) -> bool:
        """Return True if `high` is known to be at least `low` wherever the masks are 1."""
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

    def _shift_inside(self, shift: Shift, masks: Sequence[str]) -> Shift:
        """Return a shift to take the maximum of: the shift inside the bounds, FLOOR outside."""
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

    def with_masks_applied(self, x: ScaledValue) -> ScaledValue:
        """Return the value with its masks applied: 0 outside the bounds, with a finite shift."""
        if not x.masks:
            return x
        if x.minus or len(x.plus) > 1:
            x = ScaledValue(x.mantissa, (self.exponent(x),), masks=x.masks)
        mantissa = self.writer.select(x.masks, x.mantissa)
        return ScaledValue(mantissa, tuple(self._shift_inside(s, x.masks) for s in x.plus))

    def sum(self, x: ScaledValue, axis: str) -> ScaledValue:
        """Return the sum over a tile axis."""
        if self.is_at_most_one(x):
            x = ScaledValue(self.plain(x))
        x, masks = self._without_masks_along(x, axis)
        if axis not in self.writer.axes_of(s.name for s in x.shifts):
            masked = self.writer.select(masks, x.mantissa)
            return replace(x, mantissa=self.writer.op("sum", (masked,), over=axis))
        shift = self.exponent(x)
        inside = self._shift_inside(shift, masks)
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
        inside = self._shift_inside(shift, masks)
        top = Shift(self.writer.accumulate("max", inside.name), inside.origin, True)
        # The terms read the running maximum, so they are valid only in this stage.
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
        b = self.with_masks_applied(b)  # outside its bounds b is 0, and so is the ratio
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
        a, b = self.with_masks_applied(a), self.with_masks_applied(b)
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
