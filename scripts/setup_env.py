"""Make the virtual environment that `make demo` and `make test` use.

    python3 scripts/setup_env.py run             the package, built in place, and its requirements
    python3 scripts/setup_env.py dev             the same, and the tools of the tests
    python3 scripts/setup_env.py compat 5.4.0    another transformers, in .compat/5.4.0
    python3 scripts/setup_env.py formats         libraries of quantized weights, in .compat/formats

The script needs only the standard library of Python 3.10 or newer. It chooses torch once, when it
makes the environment, in this order:

1. From TORCH_INDEX_URL, if it is set.
2. This Python's own torch, if SYSTEM=1, or if the machine has a GPU and that torch has CUDA. Needs
   no network.
3. The package index's default build, if there is an NVIDIA driver.
4. A CPU build, if the package index has one. Otherwise the default build, and the script says so.
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
#: CPU builds of torch do not require triton. This version fits the CPU builds 2.11 to 2.13.
CPU_TRITON = "triton==3.6.*"
#: The build requirements of pyproject.toml and of scikit-build-core. They stay installed, so builds
#: are incremental.
BUILD_TOOLS = ("scikit-build-core>=0.10,<2", "pybind11>=2.13,<4", "cmake>=3.20", "ninja>=1.5")


#: The libraries whose containers of weights are tested, as in pyproject.toml, and what they need
#: besides torch and transformers.
FORMATS = (
    "compressed-tensors>=0.20,<1",
    "torchao>=0.18,<1",
    "hqq>=0.2.8,<1",
    "bitsandbytes>=0.49,<1",
)
FORMATS_NEED = ("loguru", "pydantic>=2", "psutil", "einops", "termcolor")


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"set-up: {text}", flush=True)


def stop(text: str) -> None:
    """Exit with an error."""
    sys.exit(f"set-up: {text}")


def pip(*args: str, capture: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the environment's pip."""
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *args]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=capture, check=False)


def install(*args: str, quiet: bool = False) -> bool:
    """Install packages. Return whether pip succeeded."""
    # Byte-compiling all of torch and transformers would take longer than installing them.
    return pip("install", "-qq", "--no-compile", *args, capture=quiet).returncode == 0


# -- what the machine has -------------------------------------------------------------------------


def has_driver() -> bool:
    """Return whether the machine has an NVIDIA driver."""
    if shutil.which("nvidia-smi") or Path("/proc/driver/nvidia/version").exists():
        return True
    try:
        ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return False
    return True


def base_torch() -> tuple[str, bool] | None:
    """Return this Python's torch version and whether it has CUDA, or None if it is too old."""
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
    """Stop if this Python or its compiler cannot build the package."""
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        stop(
            f"Python {sys.version.split()[0]} is not supported; name one from 3.10 to 3.13: "
            "`make PYTHON=python3.11`"
        )
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        stop(
            f"{sys.executable} has no header files (Python.h), and the C++ core needs them; "
            "install python3-dev, or name another Python: `make PYTHON=…`"
        )
    if (
        not any(shutil.which(c) for c in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if c)
        and os.name != "nt"
    ):
        stop("no C++ compiler found; install g++ (with C++20, so 10 or newer), or name one in CXX")


# -- the environment ------------------------------------------------------------------------------


def make_venv(system: str) -> str:
    """Create .venv and install torch.

    Returns:
        Where torch came from: "index", "system", "cuda" or "cpu".
    """
    check_python()
    index, driver, own = os.environ.get("TORCH_INDEX_URL"), has_driver(), base_torch()
    if system == "1" and own is None:
        stop(
            f"SYSTEM=1, but {sys.executable} has no torch 2.8 or newer; leave SYSTEM out, or name "
            "a Python that has it: `make PYTHON=…`"
        )
    if index:
        plan = "index"
    elif system == "1" or (system == "auto" and driver and own is not None and own[1]):
        plan = "system"
    else:
        plan = "cuda" if driver else "cpu"
    shutil.rmtree(VENV, ignore_errors=True)
    if plan == "system":
        say(f"using this Python's torch {own[0] if own else ''} and its other packages that fit")
        create_venv("--without-pip" if importlib.util.find_spec("pip") else "--upgrade-deps")
        share_packages()
        return plan
    create_venv()
    if index:
        say("taking torch from TORCH_INDEX_URL")
        if not install("--index-url", index, TORCH):
            stop(
                f"TORCH_INDEX_URL has no {TORCH} for Python {sys.version.split()[0]}; correct it, "
                "or unset it"
            )
    elif plan == "cuda" or sys.platform == "darwin":
        say(f"installing {TORCH}, the default build")
        if not install(TORCH):
            stop(
                f"could not install {TORCH}; see pip's message above. On a machine without a "
                "network, give a Python that has torch: `make SYSTEM=1 PYTHON=…`"
            )
    else:
        install_cpu_torch()
    return plan


def install_cpu_torch() -> None:
    """Install a CPU build of torch, or the default build if the index has none."""
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
        "the package index has no CPU build of torch for this Python: installing the default "
        "build, which may bring gigabytes of CUDA libraries. To avoid that, interrupt, set "
        "TORCH_INDEX_URL to PyTorch's CPU wheel index, and run make again"
    )
    if not install(TORCH):
        stop(
            f"could not install {TORCH}; see pip's message above. On a machine without a network, "
            "give a Python that has torch: `make SYSTEM=1 PYTHON=…`"
        )


def create_venv(*options: str) -> None:
    """Create .venv with this Python."""
    if subprocess.run([sys.executable, "-m", "venv", *options, str(VENV)], check=False).returncode:
        stop(
            f"{sys.executable} cannot make virtual environments; install python3-venv, or name "
            "another Python: `make PYTHON=…`"
        )


def share_packages() -> None:
    """Let the environment see this Python's packages after its own."""
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
    """Install the package in place, with its requirements and those of the extra."""
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
            f"this Python lacks one of {', '.join(BUILD_TOOLS)}, and no package index can be "
            "reached; install them into this Python"
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
            "no package index can be reached, and this Python lacks requirements:\n  "
            + "\n  ".join(missing)
        )
    if extra:
        say(
            f"no package index can be reached: using only those [{extra}] tools that this Python "
            "has"
        )


def add_transformers(version: str, plan: str) -> None:
    """Install another transformers into .compat/<version>.

    Requirements that .venv has in an unsuitable version go there too.
    """
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
            f"could not install the requirements of transformers {version}: {', '.join(needed)}; "
            "see pip's message above"
        )
    (folder / ".ready").write_text(
        f"transformers {version}, with {', '.join(needed) or 'nothing else'}\n"
    )


def add_formats(plan: str) -> None:
    """Install the libraries of quantized weights into .compat/formats.

    In .venv they would make each import of transformers seconds slower.
    """
    folder = ROOT / ".compat" / "formats"
    shutil.rmtree(folder, ignore_errors=True)
    target = ("--target", str(folder))
    quiet = plan == "system"
    # with their requirements they would bring another torch
    if not install("--no-deps", *CONSTRAINTS, *target, *FORMATS, quiet=quiet) or not install(
        *target, *FORMATS_NEED, quiet=quiet
    ):
        if quiet:
            return say("no package index can be reached: libraries of formats are not tested")
        stop("could not fetch the libraries of formats; see pip's message above")
    (folder / ".ready").write_text("".join(f"{name}\n" for name in FORMATS))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that the module's docstring describes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "dev", "compat", "formats"))
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
    elif args.what == "formats":
        add_formats(plan)
    else:
        build("dev" if args.what == "dev" else "", plan)


if __name__ == "__main__":
    main()
