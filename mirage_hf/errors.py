"""The exceptions of the package, and wording that they share.

A message says what is wrong, where, and how to mend it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches


class MirageError(Exception):
    """Base of all exceptions that the package raises on purpose. Catch it to catch them all."""


class GraphError(MirageError, ValueError):
    """A graph that cannot be built.

    Shapes or axes do not fit, or a tensor belongs to another graph. Change the call that the
    message names.
    """


class UnknownOpError(GraphError, AttributeError):
    """An op name that the op table does not have. The message lists the names that it has."""


class DTypeError(GraphError, TypeError):
    """A dtype that an op or a backend does not support. Convert with `graph.cast`."""


class FormatError(MirageError, ValueError):
    """A file or text that is damaged, of another kind, or of a newer version.

    Write the file again with `to_json()`, or read it with the loader that the message names.
    """


class InputError(MirageError, ValueError):
    """A tensor that differs from what a kernel was built for.

    Convert the tensor, or build the graph for its shape, dtype and strides.
    """


class SearchError(MirageError, ValueError):
    """Search options that are impossible, or a program that the search cannot take.

    Change the option or the op that the message names.
    """


class VerificationError(MirageError):
    """A µGraph that does not compute its program, or that rounds worse than stock.

    Correct the µGraph. One that the search found is never rejected here.
    """


class CodegenError(MirageError):
    """A block graph or schedule without a kernel that can be generated or compiled.

    Choose another schedule, or leave the choice to the tuner.
    """


class SamplingError(MirageError, RuntimeError):
    """Scores from which no token can be drawn, because they hold NaN or no finite number.

    It is a RuntimeError because stock transformers raises one.
    """


class DistributionError(MirageError, ValueError):
    """Scores that make no probability distribution.

    A ValueError, as stock raises for top_h and eta_cutoff.
    """


class ZooError(MirageError):
    """A kernel zoo that cannot be read or written.

    Name a folder or Hub repo that exists. A single bad entry is no error; it is skipped with a
    reason.
    """


class SettingsError(MirageError, ValueError):
    """An environment variable with a value that it cannot have. Correct it, or unset it."""


class OptimizeError(MirageError, ValueError):
    """A model that `optimize()` must not change. The message says how to change the model first."""


class OptimizeWarning(UserWarning):
    """A warning that `optimize()` changed less than may be expected. Its report says why."""


@dataclass(frozen=True)
class Rejected:
    """The verdict that something cannot be used, with the reason.

    It is returned, not raised. Reports show it.
    """

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


def printable(text: str, *, lines: bool = False) -> str:
    """Return text of others without what controls a terminal; each such character as its escape.

    Args:
        text: The text.
        lines: True to keep line breaks and tabs.
    """
    kept = "\n\t" if lines else ""
    return "".join(
        c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text
    )


def shape(dims: Sequence[object]) -> str:
    """Return dims as text, like (2, 3)."""
    return "(" + ", ".join(str(d) for d in dims) + ")"


def suggest(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean …?)" with the known names that are close. Empty if none is."""
    close = get_close_matches(name, list(known), n=3)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def inner_sizes_differ(a_name: str, a: Sequence[int], b_name: str, b: Sequence[int]) -> GraphError:
    """Return the error of a matmul whose inner sizes differ."""
    hint = ""
    if len(b) >= 2 and a[-1] == b[-1]:
        hint = (
            f"; the sizes fit if {b_name} is transposed (graph.permute, or strides=(1, {b[-1]}) at "
            "new_input)"
        )
    return GraphError(
        f"matmul: inner sizes differ, {a_name} {shape(a)} and {b_name} {shape(b)}: "
        f"{a_name} has {a[-1]} columns, {b_name} has {b[-2] if len(b) > 1 else b[0]} rows{hint}"
    )


#: The names and calls here for ops that have another name in torch.
_FROM_TORCH = {
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
    hint = f"; here it is {_FROM_TORCH[name]}" if name in _FROM_TORCH else suggest(name, known)
    return UnknownOpError(f"unknown op {name!r}{hint}. Known ops: {', '.join(known)}")


def unknown_dtype(dtype: object, known: Iterable[str]) -> DTypeError:
    """Return the error of a dtype that is not supported."""
    return DTypeError(f"unsupported dtype {dtype!r}; supported: {', '.join(known)}")
