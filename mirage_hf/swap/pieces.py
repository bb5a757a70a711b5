"""Kernels of one number of rows each, put together for many numbers: what treats every row alike is done in pieces."""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mirage_hf.errors import MirageError
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.kernels import Resolved
from mirage_hf.match.pattern import Block
from mirage_hf.tune.measure import random_inputs

LEAST, MOST = 64, 4096
"""Rows of a piece: powers of two in between, so that seven kernels serve every multiple of LEAST."""


def pieces(rows: int) -> list[int]:
    """Deal out a multiple of LEAST, the largest first."""
    found = [MOST] * (rows // MOST)
    return found + [size for n in reversed(range(MOST.bit_length() - 1)) if (size := 1 << n) >= LEAST and rows & size]


@dataclass(frozen=True)
class _Piece:
    """A kernel of so many rows; which of its inputs have a row each, and what its outputs are."""

    kernel: Resolved
    graph: KernelGraph
    by_rows: tuple[bool, ...]

    def __call__(self, inputs: Sequence[Tensor], first: int, size: int, outputs: Sequence[Tensor] | None) -> list[Tensor]:
        given = list(inputs)
        if outputs is None:
            return self.kernel.run(given)
        part = slice(first, first + size)
        given = [x[part] if is_row else x for x, is_row in zip(inputs, self.by_rows, strict=True)]
        into = [y[part] for y in outputs]
        if self.kernel.is_fused and into[0].is_cuda:
            return self.kernel.run(given, into)  # type: ignore[call-arg]
        return [y.copy_(made) for y, made in zip(into, self.kernel.run(given), strict=True)]


@dataclass(eq=False)
class InPieces:
    """A block's program for those multiples of LEAST rows that it was made ready for. `resolve` gives the kernel of a program."""

    block: Block
    device: torch.device
    resolve: Callable[[KernelGraph], Resolved]
    _made: dict[int, _Piece] = field(default_factory=dict)

    def ready(self, rows: int) -> InPieces:
        """Make the kernels that so many rows take, where they are not there. Errors: MirageError."""
        for size in set(pieces(rows)) - self._made.keys():
            graph = self.block.program(size)
            kernel = self.resolve(graph)
            if kernel.is_fused and self.device.type == "cuda":
                _check(kernel, graph, self.device)
            self._made[size] = _Piece(kernel, graph, tuple(t.dims[0] == size for t in graph.inputs))
        return self

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        rows = inputs[0].shape[0]
        first, sizes = 0, pieces(rows)
        if len(sizes) == 1:
            return self._made[rows](inputs, 0, rows, None)
        like = self._made[sizes[0]].graph.outputs
        outputs = [inputs[0].new_empty((rows, *t.dims[1:]), dtype=t.dtype) for t in like]
        for size in sizes:
            self._made[size](inputs, first, size, outputs)
            first += size
        return outputs


def _check(kernel: Resolved, graph: KernelGraph, device: torch.device) -> None:
    """See that a generated kernel gives on the GPU what the program gives in torch: nobody has timed it, so nobody has run it.

    Errors: MirageError.
    """
    inputs = random_inputs(graph, device)
    want = run_kernel_graph(graph, inputs)
    for y, x in zip(kernel.run(inputs), want, strict=True):
        far = float((y.float() - x.float()).norm() / x.float().norm().clamp_min(torch.finfo(torch.float32).tiny))
        if not far <= math.sqrt(torch.finfo(x.dtype).eps):
            of = ", ".join(t.name for t in graph.inputs)
            raise MirageError(f"the kernel of {of} for {graph.inputs[0].dims[0]} rows gives other numbers than torch: off by {far:.2g}")
