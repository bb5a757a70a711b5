"""What a measurement was made on: GPU, driver and versions, as plain text."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib import metadata

import torch


@cache
def this_machine() -> dict[str, str]:
    """Return what this process runs on: GPU, driver, and the versions that a kernel may depend on."""
    system = f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}".strip(
        ", "
    )
    found = {
        "gpu": "none",
        "driver": "none",
        "python": platform.python_version(),
        "platform": system,
    }
    for package in ("mirage_hf", "torch", "triton", "transformers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "none"
    if torch.cuda.is_available():
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "driver": _driver(),
            "cuda": torch.version.cuda or "none",
        }
    return found


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(
            command, text=True, capture_output=True, timeout=10, check=True
        ).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"
