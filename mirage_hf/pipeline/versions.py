"""The versions that decide whether an earlier result still counts."""

from __future__ import annotations

import hashlib
import importlib.util
from functools import cache
from importlib import metadata
from pathlib import Path

#: Files of the package whose text decides which µGraphs are found and accepted.
_DECIDING = (
    "ops/*.py",
    "graph/*.py",
    "search/*.py",
    "verify/*.py",
    "pipeline/search_and_verify.py",
    "pipeline/window_paths.py",
    "pipeline/windows.py",
)


@cache
def package_version() -> str:
    """Return the version of the installed package, or "unknown"."""
    try:
        return metadata.version("mirage_hf")
    except metadata.PackageNotFoundError:
        return "unknown"


@cache
def search_version() -> str:
    """Return a digest of the compiled core and of the Python files around it.

    Results of another build count as results of another search.
    """
    package = Path(__file__).resolve().parent.parent
    files = sorted(f for pattern in _DECIDING for f in package.glob(pattern))
    # only located, not imported: the core belongs to search/
    core = importlib.util.find_spec("mirage_hf._core")
    if core and core.origin:
        files.append(Path(core.origin))
    digest = hashlib.sha256()
    for f in files:
        digest.update(f.name.encode() + b"\0" + f.read_bytes() + b"\0")
    return digest.hexdigest()
