"""`mirage-hf doctor`: what works on this machine, what is missing, and the way out.

Each check returns findings. A check that itself fails is a finding, too, so one broken part hides
no other.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from mirage_hf import errors
from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import cubin_launch, loaded_cubin, triton
from mirage_hf.errors import MirageError, Rejected, described
from mirage_hf.gpus import DEVICES, device_named
from mirage_hf.graph.kernel import KernelGraph, new_kernel_graph
from mirage_hf.pipeline.superoptimizer import superoptimize
from mirage_hf.settings import settings
from mirage_hf.tune import tuner
from mirage_hf.zoo.key import target_of
from mirage_hf.zoo.machine import this_machine
from mirage_hf.zoo.store import Store, packaged_store, user_store
from mirage_hf_command import LIMIT, OK, PROBLEM, Finding, requirements

#: The least compute capability that kernels are made for.
LEAST_SM = 80

#: Free bytes: fewer are a problem, or a limit. A model's kernels take some MB in both caches.
TOO_FEW_BYTES, FEW_BYTES = 100 << 20, 2 << 30

#: Free bytes of GPU memory below which tuning may run out of it.
FEW_GPU_BYTES = 2 << 30

#: What each extra of the package is for.
EXTRAS = {
    "peft": "LoRA adapters run by kernels",
    "formats": "quantized checkpoints are loaded by these libraries",
}


def findings() -> Iterator[Finding]:
    """Yield what every check finds, in the order in which to repair things."""
    for check in (
        _versions,
        _settings,
        _gpus,
        _compilers,
        _kernel,
        _folders,
        _zoos,
        _extras,
    ):
        yield from _result_of(check)


def _result_of(check: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return check()
    except Exception as e:  # whatever a broken installation leads to
        name = check.__name__.strip("_")
        return [Finding(PROBLEM, name, f"could not be checked: {described(e)}")]


def _versions() -> list[Finding]:
    return [Finding(OK, "Python", platform.python_version()), *requirements()]


def _settings() -> list[Finding]:
    try:
        in_force = settings()
    except MirageError as e:
        return [Finding(PROBLEM, "environment", str(e))]
    if in_force.interpret:
        way_out = "unset TRITON_INTERPRET"
        text = "TRITON_INTERPRET is set, so kernels are interpreted, thousands of times slower"
        return [Finding(LIMIT, "environment", text, way_out)]
    return []


# -- the GPU ---------------------------------------------------------------------------------------


def _gpus() -> list[Finding]:
    if not torch.cuda.is_available():
        return [_why_no_gpu()]
    return [_of_gpu(torch.device("cuda", n)) for n in range(torch.cuda.device_count())]


def _why_no_gpu() -> Finding:
    """Return why torch sees no GPU."""
    has_driver = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi")
    if not has_driver:
        text = "none, so kernels run as torch code: right results, slower than stock"
        return Finding(LIMIT, "GPU", text, "use a machine with an NVIDIA GPU, sm_80 or newer")
    if torch.version.cuda is None:
        text = f"there is an NVIDIA driver, but torch {torch.__version__} is a build without CUDA"
        return Finding(PROBLEM, "GPU", text, "install torch's CUDA build (pytorch.org says how)")
    if os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        shown = os.environ["CUDA_VISIBLE_DEVICES"]
        text = f"torch sees none, CUDA_VISIBLE_DEVICES is {errors.printable(shown)!r}"
        return Finding(PROBLEM, "GPU", text, "unset it, or name a GPU that nvidia-smi lists")
    text = f"torch, built for CUDA {torch.version.cuda}, sees none, though there is a driver"
    return Finding(PROBLEM, "GPU", text, "update the driver, or install torch for an older CUDA")


def _of_gpu(device: torch.device) -> Finding:
    properties = torch.cuda.get_device_properties(device)
    sm = 10 * properties.major + properties.minor
    free = torch.cuda.mem_get_info(device)[0]
    driver = this_machine()["driver"]
    text = f"{properties.name}, sm_{sm}, driver {driver}, {free / 2**30:.1f} GiB free"
    name = f"GPU {device.index}"
    if sm < LEAST_SM:
        way_out = f"use a GPU with sm_{LEAST_SM} or newer, or the model on the CPU"
        return Finding(PROBLEM, name, f"{text}: kernels need sm_{LEAST_SM}", way_out)
    if free < FEW_GPU_BYTES:
        return Finding(LIMIT, name, f"{text}: tuning may run out of memory", "end other programs")
    if not any(properties.name.startswith(known.name) for known in DEVICES):
        like = device_named(properties.name, sm).name
        return Finding(LIMIT, name, f"{text}: its rates are unknown, estimates are for {like}")
    if not packaged_store().folders_of(target_of(device)):
        way_out = "none needed: the first optimize() takes minutes, later ones seconds"
        return Finding(LIMIT, name, f"{text}: no packaged kernels for sm_{sm}", way_out)
    why_compiled = cubin_launch.obstacle(sm)
    if why_compiled:
        way_out = (
            "none needed: first uses take seconds more; torch 2.10 and newer bring the bindings"
        )
        return Finding(
            LIMIT, name, f"{text}: packaged kernels are compiled, {why_compiled}", way_out
        )
    return Finding(OK, name, text)


def _compilers() -> list[Finding]:
    """Return what Triton's launchers need at run time: a C compiler and Python's headers.

    Kernels are launched without Triton if the bindings of the driver are there.
    """
    if importlib.util.find_spec("triton") is None:
        return []  # the requirements say so
    needs_launchers = torch.cuda.is_available() and not loaded_cubin.can_launch()
    missing = PROBLEM if needs_launchers else LIMIT
    launchers = "builds launchers with it, if torch brings no bindings of the driver"
    found = []
    named = os.environ.get("CC")
    compiler_path = shutil.which(named) if named else shutil.which("gcc") or shutil.which("clang")
    if compiler_path:
        found.append(Finding(OK, "C compiler", compiler_path))
    else:
        text = f"CC is {named!r}, which is not there" if named else "there is no gcc or clang"
        way_out = "install gcc (apt install gcc), or name a compiler in CC"
        text += f"; Triton {launchers}"
        found.append(Finding(missing, "C compiler", errors.printable(text), way_out))
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.exists():
        found.append(Finding(OK, "Python's headers", str(header)))
    else:
        way_out = "install python3-dev, or use a Python that has them"
        text = f"there is no {header}; Triton {launchers}"
        found.append(Finding(missing, "Python's headers", text, way_out))
    return found


# -- a kernel, from search to numbers --------------------------------------------------------------


def _kernel() -> list[Finding]:
    """Search, prove and compile a small kernel. On a GPU, also run it and check its numbers."""
    found = superoptimize(_small_program(), cache=False, backend="cpu", time_limit=10)
    best = found[0]
    if not best.is_fused or best.schedules is None:
        return [Finding(PROBLEM, "search", f"found no kernel: {found.report.reason}")]
    searched = Finding(OK, "search and proof", "a kernel was found and proven by the C++ core")
    if settings().interpret:
        return [searched]
    if torch.cuda.is_available():
        verdict = tuner.check_compiled(best, best.schedules, torch.device("cuda"))
        if isinstance(verdict, Rejected):
            return [searched, Finding(PROBLEM, "kernels", verdict.reason)]
        text = "a kernel was compiled and run on the GPU, and its numbers are right"
        return [searched, Finding(OK, "kernels", text)]
    try:
        compiler.ahead_of_time(triton.generate(best, best.schedules), 90)
    except MirageError as e:
        reason = str(e).splitlines()[0]
        return [searched, Finding(LIMIT, "kernels", f"cannot be compiled: {reason}")]
    text = "a kernel was compiled for sm_90; there is no GPU to run it on"
    return [searched, Finding(OK, "kernels", text)]


def _small_program() -> KernelGraph:
    graph = new_kernel_graph()
    x, w = graph.new_input((1, 64)), graph.new_input((64, 64))
    graph.mark_output(graph.matmul(graph.rms_norm(x), w))
    return graph


# -- folders and zoos ------------------------------------------------------------------------------


def _folders() -> list[Finding]:
    in_force = settings()
    own_triton = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    return [
        _of_folder("cache", in_force.cache_dir, "set MIRAGE_HF_CACHE to another folder"),
        _of_folder("state", in_force.state_dir, "set XDG_STATE_HOME to another folder"),
        _of_folder("Triton's cache", Path(own_triton), "set TRITON_CACHE_DIR to another folder"),
    ]


def _of_folder(name: str, folder: Path, way_out: str) -> Finding:
    """Return whether a folder can be written, and how much room it has."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as f:
            f.write(b"x")
            f.flush()
        free = shutil.disk_usage(folder).free
    except OSError as e:
        text = f"{folder} cannot be written ({e.strerror})"
        return Finding(PROBLEM, name, f"{text}, so kernels are made again each time", way_out)
    text = f"{folder}, {free / 2**30:.1f} GiB free"
    if free < TOO_FEW_BYTES:
        return Finding(PROBLEM, name, f"{text}: too few for new kernels", way_out)
    if free < FEW_BYTES:
        return Finding(LIMIT, name, f"{text}: tuning may fill it", way_out)
    return Finding(OK, name, text)


def _zoos() -> list[Finding]:
    way_out = "install the package again"
    packaged = _of_zoo("packaged zoo", packaged_store(), way_out)
    if packaged.status == OK and not packaged_store().root.is_dir():
        packaged = Finding(PROBLEM, "packaged zoo", f"{packaged_store().root} is missing", way_out)
    own = _of_zoo("zoo in your cache", user_store(), "`mirage-hf zoo verify` says which and why")
    return [packaged, own]


def _of_zoo(name: str, store: Store, way_out: str) -> Finding:
    """Return whether the files of a zoo's entries have the digests that the entries name."""
    entries = [entry for _, entry in store.verify()]
    bad = [entry.reason for entry in entries if isinstance(entry, Rejected)]
    if not bad:
        return Finding(OK, name, f"{len(entries)} entries, all whole")
    status = PROBLEM if store.is_trusted else LIMIT
    text = f"{len(bad)} of {len(entries)} entries are damaged, and are never used"
    return Finding(status, name, text, way_out)


def _extras() -> list[Finding]:
    found = []
    for extra, purpose in EXTRAS.items():
        for finding in requirements(extra):
            text = finding.text if finding.status == OK else f"{finding.text} ({purpose})"
            found.append(Finding(finding.status, finding.name, text, finding.way_out))
    return found
