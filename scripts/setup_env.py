"""Make the virtual environment that `make demo` and `make test` use. Standard library only; any Python from 3.10 runs it.

    python3 scripts/setup_env.py run             the package, built in place, and what it needs
    python3 scripts/setup_env.py dev             and the tools that the tests need
    python3 scripts/setup_env.py compat 5.4.0    another transformers beside it, in .compat/5.4.0

Which torch it takes is decided when the environment is made, in this order:
  1. TORCH_INDEX_URL, where the user names an index to take torch from;
  2. this Python's own torch: with SYSTEM=1, or by itself on a GPU machine whose torch has CUDA (no network needed then);
  3. with an NVIDIA driver, the package index's default build;
  4. without one, a CPU build where the package index in use offers one, else the default build, saying so.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts" if os.name == "nt" else "bin") / "python"
CONSTRAINTS = ("-c", str(ROOT / ".ci" / "constraints.txt"))
TORCH = "torch>=2.8"
TESTED_CPU_TORCH = "torch==2.13.0+cpu"
CPU_TRITON = "triton==3.6.*"
"""A CPU build of torch asks for no triton; this one fits the CPU builds from 2.11 to 2.13."""
BUILD_TOOLS = ("scikit-build-core>=0.10,<2", "pybind11>=2.13,<4", "cmake>=3.20", "ninja>=1.5")
"""pyproject's build requirements, and what scikit-build-core asks for on top: in the environment, so that builds are incremental."""


def say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


def stop(text: str) -> None:
    sys.exit(f"set-up: {text}")


def pip(*args: str, capture: bool = False) -> subprocess.CompletedProcess[str]:
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *args]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=capture, check=False)


def install(*args: str, quiet: bool = False) -> bool:
    # Python compiles what is imported: compiling all of torch and transformers takes longer than installing them
    return pip("install", "-qq", "--no-compile", *args, capture=quiet).returncode == 0


# -- what the machine has ---------------------------------------------------------------------------------------------


def has_driver() -> bool:
    if shutil.which("nvidia-smi") or Path("/proc/driver/nvidia/version").exists():
        return True
    try:
        ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return False
    return True


def base_torch() -> tuple[str, bool] | None:
    """This Python's torch, if it is one we can use: its version and whether it has CUDA."""
    if importlib.util.find_spec("torch") is None:
        return None
    code = "import torch; print(torch.__version__, bool(torch.version.cuda))"
    seen = subprocess.run(
        [sys.executable, "-c", code], text=True, capture_output=True, check=False
    ).stdout.split()
    if len(seen) != 2 or tuple(int(n) for n in re.findall(r"\d+", seen[0])[:2]) < (2, 8):
        return None
    return seen[0], seen[1] == "True"


def check_python() -> None:
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        stop(
            f"Python {sys.version.split()[0]} is not supported; run `make PYTHON=python3.11` with one from 3.10 to 3.13"
        )
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        stop(
            f"{sys.executable} has no header files (Python.h), which building the C++ core needs; install python3-dev, "
            "or give another Python: `make PYTHON=…`"
        )
    if (
        not any(shutil.which(c) for c in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if c)
        and os.name != "nt"
    ):
        stop("no C++ compiler found; install g++ (with C++20, so 10 or newer), or name one in CXX")


# -- the environment --------------------------------------------------------------------------------------------------


def make_venv(system: str) -> str:
    """Create .venv and put torch into it. Returns the plan: "index", "system", "cuda" or "cpu"."""
    check_python()
    index, driver, own = os.environ.get("TORCH_INDEX_URL"), has_driver(), base_torch()
    if system == "1" and own is None:
        stop(
            f"SYSTEM=1, but {sys.executable} has no torch of version 2.8 or newer; leave SYSTEM out, or give that Python: `make PYTHON=…`"
        )
    if index:
        plan = "index"
    elif system == "1" or (system == "auto" and driver and own is not None and own[1]):
        plan = "system"
    else:
        plan = "cuda" if driver else "cpu"
    shutil.rmtree(VENV, ignore_errors=True)
    if plan == "system":
        say(f"using this Python's torch {own[0] if own else ''} and whatever else it has that fits")
        create_venv("--without-pip" if importlib.util.find_spec("pip") else "--upgrade-deps")
        share_packages()
        return plan
    create_venv()
    if index:
        say("taking torch from TORCH_INDEX_URL")
        if not install("--index-url", index, TORCH):
            stop(
                f"no {TORCH} for Python {sys.version.split()[0]} in TORCH_INDEX_URL; correct it, or unset it"
            )
    elif plan == "cuda" or sys.platform == "darwin":
        say(f"installing {TORCH}, the default build")
        if not install(TORCH):
            stop(
                f"could not install {TORCH}; see pip's message above. On a machine without a network, give a Python that has torch: "
                "`make SYSTEM=1 PYTHON=…`"
            )
    else:
        install_cpu_torch()
    return plan


def install_cpu_torch() -> None:
    say("no NVIDIA driver here: looking for a CPU build of torch")
    if install(TESTED_CPU_TORCH, CPU_TRITON, quiet=True):
        return
    listed = re.findall(
        r"\b(\d+)\.(\d+)\.(\d+)\+cpu\b", pip("index", "versions", "torch", capture=True).stdout
    )
    builds = sorted(
        {tuple(map(int, v)) for v in listed if tuple(map(int, v)) >= (2, 8)}, reverse=True
    )
    if builds and install("torch=={}.{}.{}+cpu".format(*builds[0]), CPU_TRITON):
        return
    say(
        "the package index in use offers no CPU build of torch for this Python: taking the default build, which may bring gigabytes of "
        "CUDA libraries. To avoid that, interrupt, set TORCH_INDEX_URL to PyTorch's CPU wheel index, and run make again"
    )
    if not install(TORCH):
        stop(
            f"could not install {TORCH}; see pip's message above. On a machine without a network, give a Python that has torch: "
            "`make SYSTEM=1 PYTHON=…`"
        )


def create_venv(*options: str) -> None:
    if subprocess.run([sys.executable, "-m", "venv", *options, str(VENV)], check=False).returncode:
        stop(
            f"{sys.executable} cannot make virtual environments; install python3-venv, or give another Python: `make PYTHON=…`"
        )


def share_packages() -> None:
    """Let the environment see this Python's packages after its own, also where this Python is itself an environment's."""
    found = {
        str(Path(str(metadata.distribution("torch").locate_file(""))).resolve()),
        *site.getsitepackages(),
    }
    own = Path(
        subprocess.run(
            [str(PYTHON), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            text=True,
            capture_output=True,
            check=True,
        ).stdout.strip()
    )
    lines = [
        f"import site; site.addsitedir({folder!r})"
        for folder in sorted(found)
        if Path(folder).is_dir()
    ]
    (own / "zz_base_packages.pth").write_text("\n".join(lines) + "\n")


def build(extra: str, plan: str) -> None:
    """Install the package in place, with its requirements and those of `extra`."""
    package = f"{ROOT}[{extra}]" if extra else str(ROOT)
    if plan != "system":
        if not (
            install(*BUILD_TOOLS) and install("--no-build-isolation", *CONSTRAINTS, "-e", package)
        ):
            stop("could not build the package or install its requirements; see pip's message above")
        return
    os.environ |= {"PIP_RETRIES": "1", "PIP_DEFAULT_TIMEOUT": "15"}  # there may be no network
    if not install(*BUILD_TOOLS, quiet=True):
        stop(
            f"this Python lacks one of {', '.join(BUILD_TOOLS)}, and no package index can be reached; install them into it"
        )
    if install("--no-build-isolation", "-e", package, quiet=True):
        return
    if not install("--no-build-isolation", "--no-deps", "--no-index", "-e", str(ROOT)):
        stop("could not build the package; see pip's message above")
    missing = [
        line
        for line in pip("check", capture=True).stdout.splitlines()
        if re.match(r"mirage[-_]hf\b", line)
    ]
    if missing:
        stop(
            "no package index can be reached, and this Python does not have all that is needed:\n  "
            + "\n  ".join(missing)
        )
    if extra:
        say(
            f"no package index can be reached: of the [{extra}] tools only those that this Python has will be used"
        )


def add_transformers(version: str, plan: str) -> None:
    """Put transformers `version`, and what it needs that .venv has in other versions, into .compat/<version>."""
    folder = ROOT / ".compat" / version
    shutil.rmtree(folder, ignore_errors=True)
    target = ("--no-deps", "--target", str(folder))
    if not install(*target, f"transformers=={version}", quiet=plan == "system"):
        if plan == "system":
            return say(f"no package index can be reached: transformers {version} is not tested")
        stop(f"could not fetch transformers {version}; see pip's message above")
    code = (
        "import sys; from importlib import metadata as m\n"
        "try: from packaging.requirements import Requirement\n"
        "except ImportError: from pip._vendor.packaging.requirements import Requirement\n"
        "d, = m.distributions(path=[sys.argv[1]])\n"
        "for r in map(Requirement, d.requires or []):\n"
        "    wanted = r.marker is None or r.marker.evaluate({'extra': ''})\n"
        "    if wanted and m.version(r.name) not in r.specifier: print(str(r).split(';')[0])"
    )
    others = subprocess.run(
        [str(PYTHON), "-c", code, str(folder)], text=True, capture_output=True, check=True
    ).stdout.split("\n")
    needed = [r.strip() for r in others if r.strip()]
    if needed and not install(*target, *needed):
        stop(
            f"could not fetch what transformers {version} needs: {', '.join(needed)}; see pip's message above"
        )
    (folder / ".ready").write_text(
        f"transformers {version}, with {', '.join(needed) or 'nothing else'}\n"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "dev", "compat"))
    parser.add_argument("version", nargs="?", help="for compat: the version of transformers")
    parser.add_argument(
        "--system", default="auto", choices=("auto", "0", "1"), help="use this Python's own torch"
    )
    args = parser.parse_args(argv)
    note = VENV / "torch-plan"
    plan = note.read_text().strip() if note.exists() and PYTHON.exists() else ""
    if not plan:
        plan = make_venv(args.system)
        note.write_text(plan + "\n")
    if args.what == "compat":
        if not args.version:
            stop("compat needs a version of transformers, such as 5.4.0")
        add_transformers(args.version, plan)
    else:
        build("dev" if args.what == "dev" else "", plan)


if __name__ == "__main__":
    main()
