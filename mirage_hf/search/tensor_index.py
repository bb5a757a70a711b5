"""What the dims of a tensor are indexed by while a program is lowered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mirage_hf.graph.block import Rotation
from mirage_hf.search.lowered_program import NotLowerableError


@dataclass(frozen=True)
class PaddedAxis:
    """A dim that is read along a longer axis: `value` is read after its end."""

    inner: str | Rotation
    value: float


#: The index of one dim: an axis, an axis along which partners are swapped or signed, a longer axis,
#: or None for a dim of size 1.
Place = str | Rotation | PaddedAxis | None

#: The index of a tensor: one place for each dim.
Index = tuple[Place, ...]


def unpadded(place: Place) -> str | Rotation | None:
    """Return a place without its padding."""
    return place.inner if isinstance(place, PaddedAxis) else place


def axes_of(index: Iterable[Place]) -> tuple[str | None, ...]:
    """Return the axis of each place, None for a dim of size 1."""
    places = map(unpadded, index)
    return tuple(p.axis if isinstance(p, Rotation) else p for p in places)


def aligned(index: Index, dims: Sequence[int]) -> Index:
    """Return the index of an operand whose last dims line up with those of `index`."""
    last = index[len(index) - len(dims) :]
    return tuple(place if size > 1 else None for place, size in zip(last, dims, strict=True))


def rotated(place: Place, how: str, width: int | None) -> Rotation:
    """Return an axis along which the first `width` elements (None: all) are swapped or signed.

    Raises:
        NotLowerableError: If the dim has no axis, or is rotated or padded already.
    """
    if not isinstance(place, str):
        raise NotLowerableError("rope of a rotated dim, or of one of size 1, ends a kernel")
    return Rotation(place, how, width)


def only_inputs_have(place: Place) -> bool:
    """True if only an input may be read so, because an op does not commute with reading it so.

    exp of padding is not the padding, and exp of a negated value is not the negated exp. A swap
    only moves elements, so any elementwise op commutes with it.
    """
    signed = isinstance(place, Rotation) and not place.swaps
    return signed or isinstance(place, PaddedAxis)
