"""The environment variables that the package reads. Nothing else reads `os.environ`."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from mirage_hf.errors import SettingsError


@dataclass(frozen=True)
class Settings:
    """The settings in force, read from the environment at every call of `settings()`."""

    #: The folder of searched and tuned kernels: MIRAGE_HF_CACHE, else the platform's user cache.
    cache_dir: Path
    #: The folder of what this machine has proven: the platform's user state. It is not part of the
    #: cache, so a cache that is copied brings no proofs along.
    state_dir: Path
    #: Threads of the C++ search: MIRAGE_HF_THREADS, else all cores that this process may use.
    threads: int
    #: The default time limit of one search in seconds: MIRAGE_HF_SEARCH_SECONDS, else 60.
    search_seconds: float
    #: True if Triton interprets kernels instead of compiling them: TRITON_INTERPRET.
    interpret: bool
    #: True if each call checks that its indices are in range, for which it waits for the GPU:
    #: MIRAGE_HF_CHECK_INDICES. CPUs always check.
    check_indices: bool


def _number(name: str, default: str, kind: type) -> float:
    text = os.environ.get(name) or default
    try:
        value = kind(text)
    except ValueError:
        what = "an integer" if kind is int else "a number"
        raise SettingsError(
            f"environment variable {name} must be {what}, it is {text!r}; unset it for {default}"
        ) from None
    if not 0 < value < math.inf:
        raise SettingsError(
            f"environment variable {name} must be positive and finite, it is {text!r}; "
            f"unset it for {default}"
        )
    return value


def _flag(name: str) -> bool:
    return os.environ.get(name, "0").lower() in ("1", "true", "on", "y", "yes")


def _cache_dir() -> Path:
    given = os.environ.get("MIRAGE_HF_CACHE")
    if not given:
        return Path(platformdirs.user_cache_dir("mirage_hf"))
    try:
        return Path(given).expanduser()
    except RuntimeError:  # a user that is not known
        raise SettingsError(
            f"environment variable MIRAGE_HF_CACHE is {given!r}, a home folder that is not known; "
            "give the folder in full, or unset it for the default"
        ) from None


def settings() -> Settings:
    """Return the settings in force.

    Raises:
        SettingsError: A variable does not parse.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    )
    return Settings(
        cache_dir=_cache_dir(),
        state_dir=Path(platformdirs.user_state_dir("mirage_hf")),
        threads=int(_number("MIRAGE_HF_THREADS", str(cores), int)),
        search_seconds=_number("MIRAGE_HF_SEARCH_SECONDS", "60", float),
        interpret=_flag("TRITON_INTERPRET"),
        check_indices=_flag("MIRAGE_HF_CHECK_INDICES"),
    )
