"""Check the arguments of optimize(), before anything is done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from mirage_hf import errors
from mirage_hf.errors import OptimizeError
from mirage_hf.patterns import PATTERNS

#: The values that options with a choice may have.
CHOICES = {
    "backend": ("auto", "triton", "cpu"),
    "tune": ("auto", "never", "full", "background"),
    "on_unsupported": ("skip", "warn", "error"),
    "decode": ("graph", "eager"),
    "verify": (True, False),
    "dry_run": (True, False),
}

#: The most drafted tokens of a sequence that one step verifies.
MOST_DRAFTS = 15

#: The most sequences of a batch. Their steps are products of as many rows, which libraries compute
#: well. The memory for checking a layer grows with them, too.
MOST_ROWS = 1024


def check_options(
    patterns: Iterable[str] | None,
    batch_sizes: Sequence[int],
    max_cache_len: int | None,
    zoo: Any,
    progress: Any,
    **choices: Any,
) -> tuple[list[str], tuple[int, ...]]:
    """Return the names of the patterns and the batch sizes, each once.

    The arguments are those of `optimize`.

    Raises:
        OptimizeError: If an option has a value that it cannot have.
    """
    for name, value in choices.items():
        _check_choice(name, value)
    names = _pattern_names(patterns)
    sizes = _batch_sizes(batch_sizes)
    _check_max_cache_len(max_cache_len)
    if progress is not None and not callable(progress):
        raise OptimizeError(
            f"optimize: progress is {progress!r}; "
            "give a function that is called with what was reached, or None"
        )
    _check_zoo(zoo)
    return names, sizes


def _check_choice(name: str, value: Any) -> None:
    allowed = CHOICES[name]
    # `value == choice` would take 1 for True.
    if any(value is c or (isinstance(c, str) and value == c) for c in allowed):
        return
    close = errors.suggest(str(value), [c for c in allowed if isinstance(c, str)])
    raise OptimizeError(
        f"optimize: {name} is {value!r}{close}; choose {' or '.join(map(repr, allowed))}"
    )


def _pattern_names(patterns: Iterable[str] | None) -> list[str]:
    if isinstance(patterns, str):
        raise OptimizeError(
            f"optimize: patterns is the text {patterns!r}; "
            f"give a list of names, as patterns=[{patterns!r}]"
        )
    try:
        names = list(PATTERNS if patterns is None else patterns)
    except TypeError:
        raise OptimizeError(
            f"optimize: patterns is {patterns!r}; "
            f"give a list of names of {', '.join(PATTERNS)}, or None for all"
        ) from None
    for name in names:
        if name not in PATTERNS:
            close = errors.suggest(str(name), PATTERNS)
            raise OptimizeError(
                f"optimize: unknown pattern {name!r}{close}; known patterns: {', '.join(PATTERNS)}"
            )
    return names


def _batch_sizes(batch_sizes: Any) -> tuple[int, ...]:
    if isinstance(batch_sizes, int) and not isinstance(batch_sizes, bool):
        raise OptimizeError(
            f"optimize: batch_sizes is the number {batch_sizes}; "
            f"give a sequence, as batch_sizes=({batch_sizes},)"
        )
    try:
        sizes = tuple(batch_sizes)
    except TypeError:
        raise OptimizeError(
            f"optimize: batch_sizes is {batch_sizes!r}; "
            "give a sequence of positive integers, as batch_sizes=(1, 4)"
        ) from None
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, Integral) or int(size) < 1:
            raise OptimizeError(
                f"optimize: batch_sizes has {size!r}; "
                "batch sizes are positive integers, as batch_sizes=(1, 4)"
            )
        if int(size) > MOST_ROWS:
            raise OptimizeError(
                f"optimize: batch_sizes has {size}; kernels are for {MOST_ROWS} sequences at most, "
                "larger batches run the model's own forward"
            )
    if not sizes:
        raise OptimizeError(
            "optimize: batch_sizes is empty; "
            "name the batch sizes to make kernels for, as batch_sizes=(1,)"
        )
    return tuple(dict.fromkeys(map(int, sizes)))


def check_draft_tokens(draft_tokens: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of drafted tokens, each once.

    Raises:
        OptimizeError: If they are not numbers from 1 to MOST_DRAFTS.
    """
    try:
        counts: tuple[Any, ...] = tuple(draft_tokens)
    except TypeError:
        counts = (draft_tokens,)
    for count in counts:
        is_number = isinstance(count, Integral) and not isinstance(count, bool)
        if not is_number or not 1 <= int(count) <= MOST_DRAFTS:
            raise OptimizeError(
                f"optimize: draft_tokens is {draft_tokens!r}; "
                f"give numbers of drafted tokens from 1 to {MOST_DRAFTS}, as draft_tokens=(3, 7)"
            )
    return tuple(dict.fromkeys(map(int, counts)))


def _check_max_cache_len(max_cache_len: Any) -> None:
    if max_cache_len is None:
        return
    is_number = isinstance(max_cache_len, int) and not isinstance(max_cache_len, bool)
    if not is_number or max_cache_len < 1:
        raise OptimizeError(
            f"optimize: max_cache_len is {max_cache_len!r}; "
            "give a positive number of tokens, or None for no limit"
        )


def _check_zoo(zoo: Any) -> None:
    if zoo is None or isinstance(zoo, (str, Path)):
        return
    if isinstance(zoo, Sequence) and all(isinstance(each, (str, Path)) for each in zoo):
        return
    raise OptimizeError(
        f'optimize: zoo is {zoo!r}; give a folder, a Hub repo as "user/name", or a list of them'
    )
