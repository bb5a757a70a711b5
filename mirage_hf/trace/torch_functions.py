"""Keep the kernels of other libraries out of recordings.

A fake tensor has no memory. A Triton kernel that is launched on one reads address 0, and then the
GPU refuses all further work of the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributions import Distribution

from mirage_hf.trace.record import TraceError


@contextmanager
def torch_functions_only() -> Iterator[None]:
    """Let models run their torch functions in place of library kernels, such as those of fla.

    transformers does that while it exports a model, because such kernels cannot be exported.

    Raises:
        TraceError: A Triton kernel is launched.
    """
    from transformers.integrations import hub_kernels

    exporting = "is_torchdynamo_exporting"  # transformers 5.4 does not ask
    with (
        _replaced(hub_kernels, exporting, lambda: True),
        _replaced(_jit_function(), "run", _refuse),
        _distributions_unchecked(),
    ):
        yield


@contextmanager
def _distributions_unchecked() -> Iterator[None]:
    """Let torch's distributions not read their arguments on the host to check them."""
    checked = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(checked)


def _jit_function() -> Any:
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        return None
    return JITFunction


def _refuse(kernel: Any, *args: Any, **options: Any) -> None:
    name = getattr(kernel, "__name__", "of a library")
    raise TraceError(f"it runs the Triton kernel {name}, which cannot be recorded")


@contextmanager
def _replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace a function of a module or class, if it has it, for calls of this thread."""
    usual = getattr(owner, name, None)
    if usual is None:
        yield
        return
    thread = threading.get_ident()

    def chosen(*args: Any, **options: Any) -> Any:
        run = function if threading.get_ident() == thread else usual
        return run(*args, **options)

    setattr(owner, name, chosen)
    try:
        yield
    finally:
        setattr(owner, name, usual)
