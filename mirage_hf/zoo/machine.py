"""The machine a measurement was made on: GPU, driver and versions, as plain text."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib import metadata

import torch


@cache
def this_machine() -> dict[str, str]:
    """Return the GPU and driver of this process, and the versions that a kernel may depend on."""
    libc = " ".join(platform.libc_ver())
    system = f"{platform.system()} {platform.machine()}, {libc}".strip(", ")
    machine = {
        "gpu": "none",
        "driver": "none",
        "python": platform.python_version(),
        "platform": system,
    }
    for package in ("mirage_hf", "torch", "triton", "transformers"):
        try:
            machine[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            machine[package] = "none"
    if torch.cuda.is_available():
        machine |= {
            "gpu": torch.cuda.get_device_name(),
            "driver": _driver(),
            "cuda": torch.version.cuda or "none",
        }
    return machine


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        shown = subprocess.run(command, text=True, capture_output=True, timeout=10, check=True)
        return shown.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"
