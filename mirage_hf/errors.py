"""The exceptions of the package, and wording that they share.

A message says what is wrong, where, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches


class MirageError(Exception):
    """Base of everything this package raises on purpose."""


class GraphError(MirageError, ValueError):
    """A tensor program that cannot be built: shapes, dtypes, axes or tensors of another graph."""


class UnknownOpError(GraphError, AttributeError):
    """An op name that the op table does not have."""


class DTypeError(GraphError, TypeError):
    """A dtype the op table or a backend does not support."""


class FormatError(MirageError, ValueError):
    """A file or text that is damaged, of another kind, or of a newer version."""


class InputError(MirageError, ValueError):
    """Tensors given to a kernel that differ from what it was built for."""


class SearchError(MirageError, ValueError):
    """Search options that are impossible, or a program the search cannot take."""


class VerificationError(MirageError):
    """A µGraph that is not equivalent to its program, or whose rounding is worse than stock."""


class CodegenError(MirageError):
    """A block graph or schedule for which no kernel can be generated or compiled."""


class SamplingError(MirageError, RuntimeError):
    """Scores from which no token can be drawn. A RuntimeError, as stock raises."""


class DistributionError(MirageError, ValueError):
    """Scores that make no probability distribution. A ValueError, as stock raises for top_h and eta_cutoff."""


class ZooError(MirageError):
    """A kernel zoo that cannot be read or written.

    A single bad entry is skipped with a reason instead.
    """


class SettingsError(MirageError, ValueError):
    """An environment variable with a value that it cannot have."""


class OptimizeError(MirageError, ValueError):
    """A model that `optimize()` must not touch."""


class OptimizeWarning(UserWarning):
    """`optimize()` changed less than the user may expect."""


@dataclass(frozen=True)
class Rejected:
    """A "no" with its reason: a value that stages return and reports show, not an exception."""

    reason: str


# -- wording shared by several stages --------------------------------------------------------------


def described(error: BaseException, *, whole: bool = False) -> str:
    """Return an exception as text: its class, and its message if it has one.

    Args:
        error: The exception.
        whole: True for the whole message, False for its first line.
    """
    lines = str(error).strip().splitlines()
    message = "\n".join(lines if whole else lines[:1])
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def shape(dims: Sequence[int]) -> str:
    """Return dims as text, like (2, 3)."""
    return "(" + ", ".join(str(d) for d in dims) + ")"


def suggest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean …?" with the known names that are close. Empty if none is."""
    close = get_close_matches(name, list(known), n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def inner_sizes_differ(a_name: str, a: Sequence[int], b_name: str, b: Sequence[int]) -> GraphError:
    """Return the error of a matmul whose inner sizes differ."""
    hint = ""
    if len(b) >= 2 and a[-1] == b[-1]:
        hint = (
            f"; the sizes fit if {b_name} is transposed "
            f"(graph.permute, or strides=(1, {b[-1]}) at new_input)"
        )
    return GraphError(
        f"matmul: inner sizes differ, {a_name} {shape(a)} and {b_name} {shape(b)}: "
        f"{a_name} has {a[-1]} columns, {b_name} has {b[-2] if len(b) > 1 else b[0]} rows{hint}"
    )


#: Ops by the names that they have in torch.
_ELSEWHERE = {
    "sum": 'reduction(x, dim, "sum")',
    "mean": 'reduction(x, dim, "mean")',
    "amax": 'reduction(x, dim, "max")',
    "transpose": "permute",
    "t": "permute",
    "mm": "matmul",
    "bmm": "matmul",
    "linear": "matmul",
    "swish": "silu",
    "where": "select",
    "cat": "concat",
    "view": "reshape",
    "to": "cast",
    "maximum": "max",
    "minimum": "min",
    "narrow": "slice",
}


def unknown_op(name: str, known: Iterable[str]) -> UnknownOpError:
    """Return the error of an op that the op table does not have, with what to write instead."""
    known = sorted(known)
    hint = (
        f"; here it is {_ELSEWHERE[name]}." if name in _ELSEWHERE else suggest(name, known) or "."
    )
    return UnknownOpError(f"unknown op {name!r}{hint} Known ops: {', '.join(known)}")


def unknown_dtype(dtype: object, known: Iterable[str]) -> DTypeError:
    """Return the error of a dtype that is not supported."""
    return DTypeError(f"unsupported dtype {dtype!r}; supported: {', '.join(known)}")
