"""The docstrings of large folders guide to all of their files."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from mirage_hf import decode, trace
from mirage_hf.codegen import plan
from mirage_hf.trace import experts, routers

FOLDERS = [plan, trace, routers, experts, decode]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.__name__)
def test_the_docstring_lists_every_file_once(folder: ModuleType) -> None:
    guide = "\n" + (folder.__doc__ or "")
    items = re.findall(r"\n- (.*?):", guide, re.DOTALL)
    listed = re.findall(r"`(\w+)`", "".join(items))
    path = Path(folder.__file__ or "").parent
    files = [file.stem for file in path.glob("*.py")]
    folders = [file.parent.name for file in path.glob("*/__init__.py")]
    assert sorted(listed) == sorted({*files, *folders} - {"__init__"})
