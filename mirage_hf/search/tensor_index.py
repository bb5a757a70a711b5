"""The index of a tensor while a program is lowered: the axis of each dim, and how it is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mirage_hf.graph.block import Rotation
from mirage_hf.search.lowered_program import NotLowerableError


@dataclass(frozen=True)
class PaddedAxis:
    """A dim that is read along a longer axis. Past the end of the dim, `value` is read."""

    inner: str | Rotation
    value: float


@dataclass(frozen=True)
class SplitDim:
    """A dim that a reshape splits into several, or merges from several: the place of each part."""

    parts: tuple[Place, ...]


@dataclass(frozen=True)
class TakenDim:
    """A dim whose elements an index in device memory chooses."""

    #: The index's number among the program's inputs.
    number: int

    #: The axis of each dim of the index, None for a dim of size 1.
    places: tuple[str | None, ...]

    #: The dims of the index.
    sizes: tuple[int, ...]


#: The index of one dim: an axis, a rotated axis, an axis that is longer than the dim, the places of
#: its parts, or those of an index that chooses its elements. None: the dim has size 1.
Place = str | Rotation | PaddedAxis | SplitDim | TakenDim | None

#: The index of a tensor: one place for each dim.
Index = tuple[Place, ...]


def unpadded(place: Place) -> str | Rotation | SplitDim | TakenDim | None:
    """Return a place without its padding."""
    return place.inner if isinstance(place, PaddedAxis) else place


def axes_of(index: Iterable[Place]) -> tuple[str | None, ...]:
    """Return the axis of each place, None for a dim of size 1.

    A split dim has several, and so has a dim whose elements an index chooses.
    """
    axes: list[str | None] = []
    for place in flat(map(unpadded, index)):
        if isinstance(place, TakenDim):
            axes += place.places
        else:
            axes.append(place.axis if isinstance(place, Rotation) else place)  # type: ignore[arg-type]
    return tuple(axes)


def flat(index: Iterable[Place]) -> tuple[Place, ...]:
    """Return the places with each split dim replaced by its parts."""
    places: list[Place] = []
    for place in index:
        places += flat(place.parts) if isinstance(place, SplitDim) else (place,)
    return tuple(places)


def aligned(index: Index, dims: Sequence[int]) -> Index:
    """Return the index of an operand whose last dims line up with those of `index`."""
    last = index[len(index) - len(dims) :]
    return tuple(place if size > 1 else None for place, size in zip(last, dims, strict=True))


def rotated(place: Place, how: str, width: int | None) -> Rotation:
    """Return the rotation of a place: its first `width` elements (None: all) have partners.

    Raises:
        NotLowerableError: If the dim has no axis, or is rotated or padded already.
    """
    if not isinstance(place, str):
        raise NotLowerableError("rope of a rotated dim, or of one of size 1, ends a kernel")
    return Rotation(place, how, width)


def only_inputs_have(place: Place) -> bool:
    """Return True if a computed tensor cannot be read at this place, only an input.

    Ops do not commute with padding and signs. The exp of padding is not the padding, and the exp of
    a negated value is not the negated exp. Elementwise ops commute with a swap, which only moves
    elements.
    """
    signed = isinstance(place, Rotation) and not place.swaps
    return signed or isinstance(place, PaddedAxis)
