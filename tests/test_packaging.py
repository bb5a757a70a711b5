"""The files that make and pip take from the repository."""

from __future__ import annotations

import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    "given, runs", [("PYTHON=", "python3"), ("PYTHON=python3.12", "python3.12")]
)
def test_an_empty_python_is_none_given(given: str, runs: str) -> None:
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", "setup", given],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=True,
    )
    assert done.stdout.startswith(f"{runs} scripts/setup_env.py")


def test_type_checkers_may_read_the_package() -> None:
    assert resources.files("mirage_hf").joinpath("py.typed").is_file()
