"""Read the imaps, omaps and fmaps that users write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mirage_hf.errors import SearchError
from mirage_hf.graph.tiles import GRID_DIMS

#: Sorted pairs of a grid dim (0 for x) and the tensor dim that it cuts. Other grid dims are
#: replicas.
GridMap = tuple[tuple[int, int], ...]


def read_grid_maps(name: str, given: Any) -> tuple[GridMap, ...]:
    """Return a list of imaps or omaps, without repeats.

    Args:
        name: "imaps" or "omaps", for errors.
        given: A list of dicts such as {"x": 0, "y": None}, or of tuples such as (0, -1, -1).

    Raises:
        SearchError: If it is not such a list, or empty.
    """
    return tuple(dict.fromkeys(_grid_map(name, m) for m in _nonempty_list(name, given)))


def read_loop_dims(name: str, given: Any) -> tuple[int | None, ...]:
    """Return a list of fmaps: tensor dims that the loop may walk, None for a replica.

    Raises:
        SearchError: If it is not a list of dims, or empty.
    """
    return tuple(dict.fromkeys(_dim(name, d) for d in _nonempty_list(name, given)))


def maps_text(name: str, allowed: Sequence[Any]) -> str:
    """Return allowed maps as a user would write them for the option `name`."""
    if name == "fmaps":
        return str(list(allowed))
    maps = (", ".join(f"{GRID_DIMS[g]}→{d}" for g, d in m) for m in allowed)
    return "[" + ", ".join("{" + m + "}" for m in maps) + "]"


def _nonempty_list(name: str, given: Any) -> list[Any]:
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
        raise SearchError(f"{name}: {given!r} is not a list of maps; leave it None to allow any")
    maps = list(given)
    if not maps:
        raise SearchError(
            f"{name}: the list is empty, so nothing would be allowed; leave it None to allow any"
        )
    return maps


def _dim(name: str, d: Any) -> int | None:
    if d is None or (d == -1 and not isinstance(d, (bool, float))):
        return None
    if isinstance(d, bool) or not isinstance(d, int) or d < 0:
        raise SearchError(
            f"{name}: {d!r} is not a tensor dim; use 0, 1, …, or None (or -1) for a replica"
        )
    return d


def _grid_map(name: str, given: Any) -> GridMap:
    if isinstance(given, Mapping):
        unknown = [g for g in given if g not in GRID_DIMS]
        if unknown:
            raise SearchError(
                f"{name}: {given!r} names the grid dim {unknown[0]!r}; they are x, y and z"
            )
        pairs = [(GRID_DIMS.index(g), _dim(name, d)) for g, d in given.items()]
    elif _is_tuple_map(given):
        pairs = [(g, _dim(name, d)) for g, d in enumerate(given)]
    else:
        raise SearchError(
            f"{name}: {given!r} is not a map; "
            "give a dict like {'x': 0, 'y': None} or a tuple like (0, -1, -1)"
        )
    cut = [d for _, d in pairs if d is not None]
    if len(set(cut)) < len(cut):
        raise SearchError(
            f"{name}: {given!r} sends two grid dims to one tensor dim; a dim is cut by one of them"
        )
    return tuple(sorted((g, d) for g, d in pairs if d is not None))


def _is_tuple_map(given: Any) -> bool:
    is_sequence = isinstance(given, Sequence) and not isinstance(given, str)
    return is_sequence and 1 <= len(given) <= len(GRID_DIMS)
