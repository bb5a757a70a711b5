"""Load the libraries that first launches and the first prompt need, in threads beside a search."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mirage_hf.codegen import ahead, loaded_cubin
from mirage_hf.ops import table
from mirage_hf.zoo.key import target_of
from mirage_hf.zoo.store import zoo_path


@contextlib.contextmanager
def loading_ahead(model: nn.Module, device: torch.device, backend: str) -> Iterator[None]:
    """Load what the first launches on a GPU need while the block runs.

    The end of the block waits for what launches on the GPU, because nothing may do so beside the
    capture of a CUDA graph. Triton's preparation goes on, because packaged kernels do not need it.
    Errors are ignored here. The launch or the prompt that needs a library raises its error again.

    Args:
        model: The model.
        device: Its device. Nothing is loaded for a CPU.
        backend: "triton" or "cpu".
    """
    if device.type != "cuda":
        yield
        return
    dtypes = {p.dtype for p in model.parameters()} & set(table.COMPUTE_DTYPES)
    attending = _started(partial(_attend, device, {*dtypes, torch.float32}))
    if backend == "triton":
        _started(_prepare_triton)
    try:
        yield
    finally:
        attending.join()


def likely_to_search(model: nn.Module, device: torch.device, zoo: Any) -> bool:
    """Return whether no kernel of the model's width is stored for a device.

    This is known before the model is matched, which takes a second or more.
    """
    width = None
    with contextlib.suppress(Exception):  # whatever a config of several models leads to
        config: Any = model.config
        width = config.get_text_config(decoder=True).hidden_size
    if not isinstance(width, int):
        return False
    of_width = re.compile(rf"x{width}\b")
    target = target_of(device)
    folders = [folder for store in zoo_path(zoo).stores for folder in store.folders_of(target)]
    return not any(of_width.search(folder.parent.name) for folder in folders)


def _started(task: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=_attempt, args=(task,), daemon=True)
    thread.start()
    return thread


def _attempt(task: Callable[[], None]) -> None:
    with contextlib.suppress(Exception):
        task()


def _attend(device: torch.device, dtypes: Iterable[torch.dtype]) -> None:
    """Call torch's attention, with a mask and without.

    The first call loads cuDNN and other libraries, which takes up to two seconds. Otherwise the
    first prompt would wait for it.
    """
    with torch.no_grad(), torch.cuda.device(device):
        for dtype in dtypes:
            x = torch.zeros(1, 2, 16, 64, dtype=dtype, device=device)
            mask = torch.zeros(1, 1, 16, 16, dtype=dtype, device=device)
            F.scaled_dot_product_attention(x, x, x, is_causal=True)
            F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def _prepare_triton() -> None:
    """Let Triton hash its files. If it launches kernels itself, let it build what that needs."""
    if not loaded_cubin.can_launch():
        from triton.runtime import driver

        driver.active.get_current_device()
    ahead.hash_triton()
