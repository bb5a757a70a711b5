"""Write readable JSON files atomically, and compute digests of JSON data."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from mirage_hf import files

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
        files.write_text(Path(path), text)
    return text


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
