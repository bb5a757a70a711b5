"""Wheels: for which Pythons they are built, and that one works without any compiler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from scripts import build_wheels

ROOT = Path(__file__).parents[2]
THIS = "{}.{}".format(*sys.version_info)


def fake_python(folder: Path, name: str, text: str) -> str:
    script = folder / name
    script.write_text(f"#!/bin/sh\necho '{text}'\n")
    script.chmod(0o755)
    return str(script)


def test_a_python_that_is_missing_or_has_no_headers_is_skipped_with_the_reason(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    fake_python(tmp_path, "python3.10", '["3.10", true]')
    fake_python(tmp_path, "python3.11", '["3.11", false]')
    fake_python(tmp_path, "python3.12", '["3.9", true]')
    other = fake_python(tmp_path, "other", '["3.14", true]')
    broken = fake_python(tmp_path, "broken", "no such library")
    pythons, skipped = build_wheels.usable([other, broken])
    assert pythons == [str(tmp_path / "python3.10")]
    assert skipped.keys() == {other, broken, "Python 3.11", "Python 3.12", "Python 3.13"}
    assert skipped["Python 3.11"].endswith("(Python.h); install python3.11-dev")
    assert skipped["Python 3.12"].endswith("is Python 3.9")
    assert skipped["Python 3.13"] == "there is no python3.13 on PATH"
    assert skipped[other].endswith("is Python 3.14") and "does not run" in skipped[broken]


def test_a_python_that_is_named_takes_the_place_of_that_on_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    fake_python(tmp_path, "python3.12", '["3.12", true]')
    own = fake_python(tmp_path, "own", '["3.12", true]')
    assert build_wheels.usable([own])[0] == [own]


def test_wheels_are_built_for_linux_systems_that_torch_supports():
    assert tuple(map(int, build_wheels.GLIBC.split("."))) <= (2, 28)


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The wheel for this Python. Building it takes two minutes, so `make thorough` does it."""
    if sys.platform != "linux" or shutil.which("make") is None:
        pytest.skip("wheels are built on Linux, by make")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        pytest.skip(f"{sys.executable} has no header files")
    tag = "cp{}{}".format(*sys.version_info)
    done = subprocess.run(["make", "wheel"], cwd=ROOT, text=True, capture_output=True, check=False)
    if "could not install" in done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = (ROOT / "dist").glob(f"mirage_hf-*-{tag}-{tag}-*.whl")
    return found


@pytest.mark.thorough
def test_the_wheel_is_for_linux_systems_that_torch_supports(wheel):
    tags = re.findall(r"manylinux_2_(\d+)_", wheel.name)
    assert tags and min(map(int, tags)) <= 28, wheel.name


@pytest.mark.thorough
def test_the_demo_runs_from_a_wheel_without_a_compiler(wheel, tmp_path):
    """The environment has the wheel alone, and takes its requirements from the one of the tests."""
    env = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", env], check=True)
    python = env / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps"]
    subprocess.run([*install, "--no-index", wheel], check=True)
    site = env / "lib" / f"python{THIS}" / "site-packages"
    # a folder that a .pth names adds no .pth files of its own, so not the package of the checkout
    folders = dict.fromkeys(p for p in sys.path if p.endswith(("site-packages", "dist-packages")))
    (site / "requirements.pth").write_text("\n".join(folders) + "\n")
    clean = {"PATH": str(env / "bin"), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    tools = ("cc", "gcc", "g++", "c++", "clang", "cmake", "ninja")
    assert not any(shutil.which(tool, path=clean["PATH"]) for tool in tools)

    def run(*command: str) -> str:
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**clean, **{k: v for k, v in os.environ.items() if k == "LD_LIBRARY_PATH"}},
            text=True,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = run(str(python), "-c", "import mirage_hf; print(mirage_hf.__file__)")
    assert Path(where.strip()).is_relative_to(site)
    out = run(str(env / "bin" / "mirage-hf"), "demo", "--tokens", "12", "--device", "cpu")
    assert "The same 12 greedy tokens before and after." in out
    assert "What a GPU would run" in out and "classes and weights are exactly" in out
