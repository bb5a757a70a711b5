"""The types of attributes of ops, and a check of the attributes that an op is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mirage_hf import errors
from mirage_hf.ops.dtypes import as_dtype
from mirage_hf.ops.op import Op
from mirage_hf.ops.shapes import is_int


def _is_number(x: Any) -> bool:
    return (isinstance(x, float) and x == x) or (is_int(x) and abs(x) < 1 << 1023)


def _all_ints(least: int) -> Callable[[Any], bool]:
    def holds(x: Any) -> bool:
        if not isinstance(x, (tuple, list)) or not x:
            return False
        return all(is_int(i) and least <= i < 1 << 63 for i in x)

    return holds


def _are_numbers(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) > 1 and all(_is_number(v) for v in x)


#: The type of attributes by their name, in words and as a test. Any other attribute is a number.
_ATTRS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "dim": ("an integer", is_int),
    "start": ("an integer", is_int),
    "stop": ("an integer", is_int),
    "dims": ("positive integers", _all_ints(1)),
    "count": ("an integer from 1 to 8", lambda x: is_int(x) and 1 <= x <= 8),
    "values": ("a tuple of two or more numbers", _are_numbers),
    "order": ("integers", _all_ints(-(1 << 63))),
    "kind": ("a word", lambda x: isinstance(x, str)),
    "dtype": ("a dtype", lambda x: as_dtype(x) is not None),
    "interleaved": ("True or False", lambda x: isinstance(x, bool)),
}


def check(entry: Op, attrs: dict[str, Any]) -> None:
    """Check the attributes given to an op.

    Raises:
        GraphError: If the op does not take one, misses one, or takes another type of value.
    """
    op, takes = entry.name, ", ".join(entry.attrs) or "none"
    for name, value in attrs.items():
        if name not in entry.attrs:
            raise errors.GraphError(f"{op}: unknown argument {name!r}; it takes {takes}")
        wants, holds = _ATTRS.get(name, ("a number", _is_number))
        if not holds(value):
            raise errors.GraphError(f"{op}: {name} must be {wants}, it is {value!r}")
        if type(value) is int and abs(value) >= 1 << 63:
            raise errors.GraphError(
                f"{op}: {name} is an integer of {value.bit_length()} bits, of which 63 fit; "
                "give a float"
            )
    for name, default in entry.attrs.items():
        if default is None and name not in attrs:
            raise errors.GraphError(f"{op}: misses the argument {name!r}; it takes {takes}")
