"""Kernels of one number of rows each, put together for many numbers: what treats every row alike is done in pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mirage_hf.codegen.compile import compiling
from mirage_hf.errors import MirageError
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.patterns.schema import PatternBlock
from mirage_hf.pipeline.resolver import Resolved
from mirage_hf.tune.measure import random_inputs

MIN_CHUNK_ROWS, MAX_CHUNK_ROWS = 64, 4096
"""Rows of a piece: powers of two in between, so that seven kernels serve every multiple of MIN_CHUNK_ROWS."""


def row_chunk_sizes(rows: int) -> list[int]:
    """Deal out a multiple of MIN_CHUNK_ROWS, the largest first."""
    assert rows % MIN_CHUNK_ROWS == 0, (
        f"{rows} rows: the last {rows % MIN_CHUNK_ROWS} would be left out"
    )
    found = [MAX_CHUNK_ROWS] * (rows // MAX_CHUNK_ROWS)
    return found + [
        size
        for n in reversed(range(MAX_CHUNK_ROWS.bit_length() - 1))
        if (size := 1 << n) >= MIN_CHUNK_ROWS and rows & size
    ]


@dataclass(frozen=True)
class _ChunkKernel:
    """A kernel of so many rows; which of its inputs have a row each, and what its outputs are."""

    kernel: Resolved
    graph: KernelGraph
    by_rows: tuple[bool, ...]

    def __call__(
        self, inputs: Sequence[Tensor], first: int, size: int, outputs: Sequence[Tensor] | None
    ) -> list[Tensor]:
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
class RowChunks:
    """A block's program for those multiples of MIN_CHUNK_ROWS rows that it was made ready for (`prepare_row_chunks`). `resolve` gives the kernel of a
    program."""

    block: PatternBlock
    device: torch.device
    resolve: Callable[[KernelGraph], Resolved]
    made: dict[int, _ChunkKernel] = field(default_factory=dict)

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        rows = inputs[0].shape[0]
        first, sizes = 0, row_chunk_sizes(rows)
        if len(sizes) == 1:
            return self.made[rows](inputs, 0, rows, None)
        like = self.made[sizes[0]].graph.outputs
        outputs = [inputs[0].new_empty((rows, *t.dims[1:]), dtype=t.dtype) for t in like]
        for size in sizes:
            self.made[size](inputs, first, size, outputs)
            first += size
        return outputs


def prepare_row_chunks(each: Iterable[RowChunks], rows: int) -> None:
    """Make the kernels that so many rows take, where they are not there; on a GPU they are compiled side by side, and checked.

    Errors: MirageError.
    """
    sizes = row_chunk_sizes(rows)
    missing = [
        (kernel, size)
        for kernel in each
        for size in dict.fromkeys(sizes)
        if size not in kernel.made
    ]
    graphs = [kernel.block.program(size) for kernel, size in missing]
    found = [kernel.resolve(graph) for (kernel, _), graph in zip(missing, graphs, strict=True)]
    on_gpu = [
        n
        for n, (kernel, _) in enumerate(missing)
        if kernel.device.type == "cuda" and found[n].is_fused
    ]
    if on_gpu:
        programs = [found[n].entry.generate() for n in on_gpu]
        major, minor = torch.cuda.get_device_capability(missing[0][0].device)
        for _ in compiling(
            programs, 10 * major + minor
        ):  # one that cannot be says so when it is run
            pass
    for n, ((kernel, size), graph) in enumerate(zip(missing, graphs, strict=True)):
        if n in on_gpu:
            _check(found[n], graph, kernel.device)
        kernel.made[size] = _ChunkKernel(
            found[n], graph, tuple(t.dims[0] == size for t in graph.inputs)
        )


def _check(kernel: Resolved, graph: KernelGraph, device: torch.device) -> None:
    """See that a generated kernel gives on the GPU what the program gives in torch: nobody has timed it, so nobody has run it.

    Errors: MirageError.
    """
    inputs = random_inputs(graph, device)
    want = run_kernel_graph(graph, inputs)
    for y, x in zip(kernel.run(inputs), want, strict=True):
        apart, size = (
            (z.flatten(1).norm(dim=1)) for z in (y.float() - x.float(), x.float())
        )  # of each row: one of thousands may be wrong
        far = float((apart / size.clamp_min(torch.finfo(torch.float32).tiny)).max())
        if not far <= math.sqrt(torch.finfo(x.dtype).eps):
            of = ", ".join(t.name for t in graph.inputs)
            raise MirageError(
                f"the kernel of {of} for {graph.inputs[0].dims[0]} rows gives other numbers than torch: off by {far:.2g}"
            )
