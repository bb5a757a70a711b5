"""The files that make and pip take from the repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

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


def test_a_wheel_takes_the_package_the_command_and_what_the_demo_reads() -> None:
    """The wheel itself is built and run by `make thorough` only, because that takes minutes."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    packages = tomllib.loads(text)["tool"]["scikit-build"]["wheel"]["packages"]
    for name, file in {
        "mirage_hf": "__init__.py",
        "mirage_hf_command": "__init__.py",
        "mirage_hf/patterns": "decoder_layer.py",
        "mirage_hf/tiny_llama": "model.safetensors",
    }.items():
        assert (ROOT / packages[name] / file).is_file(), (name, packages[name])
    entries = (ROOT / packages["mirage_hf/kernel_zoo"]).rglob("entry.json")
    assert next(entries, None) is not None
