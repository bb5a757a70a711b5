"""The package's docstring guides to all of its files."""

from __future__ import annotations

import re
from pathlib import Path

from mirage_hf import trace


def test_the_docstring_lists_every_file_once() -> None:
    listed = re.findall(r"`(\w+)`", trace.__doc__ or "")
    files = [path.stem for path in Path(trace.__file__).parent.glob("*.py")]
    assert sorted(listed) == sorted(set(files) - {"__init__"})
