"""Run kernel graphs with torch: as the CPU backend, and as references for numeric checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mirage_hf.graph.algebra import TorchAlgebra
from mirage_hf.graph.coded import unpacked
from mirage_hf.graph.execute_block import run_block_graph
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph, KernelOp
from mirage_hf.ops import table


def run_kernel_graph(
    graph: KernelGraph,
    inputs: Sequence[torch.Tensor],
    wide: torch.dtype | None = None,
    as_on_gpu: bool = False,
    err: Callable[[KernelOp, torch.Tensor], torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Run a kernel graph: each op by its oracle in the op's dtype, block graphs in float32.

    Args:
        graph: The kernel graph.
        inputs: Its inputs.
        wide: A dtype (float64) that inputs are converted to and that everything is computed in, as
            the reference for numeric checks. None: each op has its own dtype.
        as_on_gpu: True to compute 16-bit matmuls on a CPU in float32 and round once, as tensor
            cores do. Torch's own 16-bit matmuls take 25 times as long there.
        err: A function of an op and its result that returns the result to go on with. It imitates
            rounding errors.

    Returns:
        The outputs.
    """
    stored = {t.index: (t, x) for t, x in zip(graph.inputs, inputs, strict=True)}
    values: dict[int, torch.Tensor] = {}  # each is held from its first to its last use

    def value(t: DTensor) -> torch.Tensor:
        """Return the value of a tensor. An input is converted when it is first used."""
        x = values.get(t.index)
        if x is None:
            x = unpacked(*stored[t.index])
            if wide is not None and x.is_floating_point():
                x = x.to(wide)
            values[t.index] = x
        return x

    for op, ended in zip(graph.ops, graph.last_uses, strict=True):
        args = [value(x) if isinstance(x, DTensor) else x for x in op.inputs]
        results = _run_op(op, args, wide, as_on_gpu)
        del args
        for t, y in zip(op.outputs, results, strict=True):
            values[t.index] = y if err is None else err(op, y)
        del results
        for index in ended:
            values.pop(index, None)
    return [value(t) for t in graph.outputs]


def _run_op(
    op: KernelOp, args: list[Any], wide: torch.dtype | None, as_on_gpu: bool
) -> list[torch.Tensor]:
    if op.name == CUSTOMIZED:
        assert op.block is not None
        algebra = TorchAlgebra(wide or torch.float32, device=args[0].device)
        results = run_block_graph(op.block, args, algebra)
        # row-major, as kernels store them
        stored = zip(op.outputs, results, strict=True)
        return [y.to(wide or t.dtype).contiguous() for t, y in stored]
    if op.name == "matmul" and as_on_gpu:
        a, b = args
        if a.device.type == "cpu" and a.dtype.itemsize == 2:
            return [table.lookup("matmul").oracle(a.float(), b.float()).to(a.dtype)]
    if op.name == "cast" and wide is not None:
        to_float = op.outputs[0].dtype in table.COMPUTE_DTYPES
        return [args[0].to(wide) if to_float else args[0]]
    return [run_library(op, args, wide)]


def run_library(
    op: KernelOp, args: Sequence[torch.Tensor | float], wide: torch.dtype | None = None
) -> torch.Tensor:
    """Run one op of the table by its oracle.

    Args:
        op: The op.
        args: Its operands: tensors and numbers.
        wide: The dtype of the result. None: that of the op's output.
    """
    oracle, attrs = table.lookup(op.name).oracle, dict(op.attrs)
    if all(isinstance(a, torch.Tensor) for a in args):
        return oracle(*args, **attrs)
    if op.name == "mul" and not isinstance(args[0], torch.Tensor):
        # torch rounds the first factor to the second one's dtype
        args = args[::-1]
    # Like a Python number, a float64 tensor without dims takes part at full precision and does not
    # change the result's dtype. Only `select` may have numbers alone to choose from, so its result
    # is converted.
    tensors = [
        a if isinstance(a, torch.Tensor) else torch.tensor(a, dtype=torch.float64, device="cpu")
        for a in args
    ]
    return oracle(*tensors, **attrs).to(wide or op.outputs[0].dtype)
