"""Write readable JSON files atomically, and compute digests of JSON data."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

Json = dict[str, Any]

#: Columns up to which a list or object stays on one line.
LINE = 120


def digest(data: Json | list[Any]) -> str:
    """Return the SHA-256 of the data's canonical JSON, in hex.

    The digest is the same for any order of keys and on any machine.
    """
    text = json.dumps(
        data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def save_json(data: Json, path: str | Path | None = None) -> str:
    """Return `data` as readable JSON and, if `path` is given, write it there.

    The file is written atomically: other processes see all of it or nothing.

    Raises:
        OSError: If the file cannot be written.
    """
    text = _pretty(data) + "\n"
    if path is not None:
        _write(text, Path(path))
    return text


def _write(text: str, path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder, name a file", str(path))
    try:
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    except OSError as e:  # it names the temporary file, which the user has never heard of
        raise type(e)(e.errno, e.strerror, str(path)) from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            f.write(text)
        os.chmod(partial, 0o666 & ~_umask())
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _pretty(value: Any, indent: str = "", key: str = "") -> str:
    """Return JSON that keeps each list or object on one line if it fits."""
    head = f"{json.dumps(key, ensure_ascii=False)}: " if key else ""
    line = head + json.dumps(value, ensure_ascii=False, allow_nan=False)
    if len(indent) + len(line) <= LINE or not isinstance(value, (dict, list)):
        return indent + line
    inner = indent + "  "
    if isinstance(value, dict):
        left, right = "{", "}"
        items = [_pretty(v, inner, k) for k, v in value.items()]
    else:
        left, right = "[", "]"
        items = [_pretty(v, inner) for v in value]
    return f"{indent}{head}{left}\n" + ",\n".join(items) + f"\n{indent}{right}"
