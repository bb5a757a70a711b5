"""Run a µGraph where its inputs are: generated kernels on a GPU, torch on a CPU."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from mirage_hf import errors
from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.graph import conveniences, json_format
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.indices import check_range, indices_of
from mirage_hf.graph.inputs import check_inputs
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.pipeline import torch_op
from mirage_hf.pipeline.torch_op import Run
from mirage_hf.settings import settings

_lock = threading.Lock()


@conveniences.run_ugraph.register
def run_ugraph(ugraph: UGraph, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a µGraph where its inputs are.

    Raises:
        InputError: The inputs differ from what the µGraph was built for. Or an index is out of
            range, and the inputs are on a CPU or MIRAGE_HF_CHECK_INDICES is set.
    """
    if torch.compiler.is_compiling():
        return torch_op.run(inputs, registered(ugraph.uid))  # type: ignore[no-any-return]
    check_inputs(ugraph.kernels, inputs)
    if _reads_indices(ugraph) and settings().check_indices:
        check_range(ugraph.program, inputs)
    return _run_unchecked(ugraph, inputs)


@lru_cache(maxsize=512)
def _reads_indices(ugraph: UGraph) -> bool:
    return bool(indices_of(ugraph.program))


@torch.compiler.assume_constant_result
def registered(uid: int) -> str:
    """Make a µGraph known to the op `mirage_hf::run`, and return its digest there.

    The µGraph is given by number, because dynamo of torch 2.11 cannot pass on a frozen dataclass.
    """
    ugraph = UGraph.numbered(uid)
    digest = json_format.digest(json_format.ugraph_to_dict(ugraph))
    torch_op.register(digest, ugraph, partial(_run_unchecked, ugraph), None)
    return digest


def _run_unchecked(ugraph: UGraph, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if not inputs or inputs[0].device.type == "cpu":
        return run_kernel_graph(ugraph.kernels, inputs)
    if inputs[0].device.type != "cuda":
        raise errors.InputError(
            f"inputs are on {inputs[0].device}; kernels run on CUDA devices and on the CPU"
        )
    with _lock:
        run = _runner(ugraph, ugraph.schedules)
    return run(inputs)


@lru_cache(maxsize=512)
def _runner(ugraph: UGraph, schedules: tuple[Any, ...] | None) -> Run:
    # Schedules are part of the cache key, because µGraphs with other schedules are equal.
    program = triton.generate(ugraph, schedules)
    return compiler.load(program.source, program.digest).run  # type: ignore[no-any-return]
