"""The device of tensors that are made without one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def on_the_cpu() -> AbstractContextManager[Any]:
    """Within it tensors are made on the CPU, whatever default a user has set. Where none is set it does nothing: it would make torch go
    through Python at each call, a fifth of the time that optimize() takes."""
    return (
        nullcontext() if torch.empty(0).device.type == "cpu" else torch.device("cpu")
    )  # asked so: old kinds of defaults are no devices
