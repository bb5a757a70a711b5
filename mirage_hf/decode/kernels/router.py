"""The kernels of routers, which choose experts by the greatest scores (trace/routers/)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, library

from mirage_hf.codegen import launching
from mirage_hf.codegen.compile import load
from mirage_hf.codegen.optional_triton import HAS_TRITON
from mirage_hf.trace.routers.op import route, router_of
from mirage_hf.trace.routers.text import router_text


def route_by_kernel(inputs: Sequence[Tensor], number: int) -> list[Tensor]:
    """Choose experts by the kernel of a router."""
    router = router_of(number)
    if not HAS_TRITON:
        return route(inputs, number)
    steps = router.steps
    forms = [steps[x.step].outputs[x.output] for x in router.results]
    device = inputs[0].device
    results = [torch.empty(form.shape, dtype=form.dtype, device=device) for form in forms]
    tensors = [*(x.contiguous() for x in inputs), *results]
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _launch(number)(tensors)
    else:
        _launch(number)(tensors)
    return results


@cache
def _launch(number: int) -> Callable[[Sequence[Tensor]], Any]:
    """Return what launches the kernel of a router, one block for each row."""
    router = router_of(number)
    text = router_text(router)
    kernel = getattr(load(text.source, text.digest), text.name)

    def run(tensors: Sequence[Tensor]) -> None:
        launching.launch(kernel, router.rows, tensors, text.num_warps, 1)

    return run


library.impl("mirage_hf::route", "CUDA", route_by_kernel)
