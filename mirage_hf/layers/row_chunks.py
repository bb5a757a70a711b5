"""Run a program that treats every row alike for many numbers of rows, in chunks of a few sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from mirage_hf.codegen.compile import Compilation
from mirage_hf.codegen.cubin_launch import has_all
from mirage_hf.errors import MirageError
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.patterns.schema import PatternBlock
from mirage_hf.pipeline.resolver import Resolved
from mirage_hf.tune.measure import random_inputs

#: The least and the most rows of a chunk. Chunks are powers of two, so that seven kernels serve
#: every multiple of MIN_CHUNK_ROWS.
MIN_CHUNK_ROWS = 64
MAX_CHUNK_ROWS = 4096

#: A new kernel is compared with torch at most so many rows at a time, to save memory.
CHECKED_ROWS = 512


def row_chunk_sizes(rows: int) -> list[int]:
    """Return the sizes of the chunks of a multiple of MIN_CHUNK_ROWS rows, the largest first."""
    remainder = rows % MIN_CHUNK_ROWS
    assert not remainder, f"{rows} rows: the last {remainder} would be left out"
    sizes = [MAX_CHUNK_ROWS] * (rows // MAX_CHUNK_ROWS)
    size = MAX_CHUNK_ROWS // 2
    while size >= MIN_CHUNK_ROWS:
        if rows & size:
            sizes.append(size)
        size //= 2
    return sizes


@dataclass(frozen=True)
class _ChunkKernel:
    """A kernel for one number of rows."""

    kernel: Resolved
    graph: KernelGraph
    #: For each input, whether it has a row for each row of the chunk.
    has_rows: tuple[bool, ...]

    def rows_of(self, inputs: Sequence[Tensor], first: int, size: int) -> list[Tensor]:
        """Return rows [first, first + size) of inputs with rows, and the others whole."""
        chunk = slice(first, first + size)
        return [x[chunk] if rows else x for x, rows in zip(inputs, self.has_rows, strict=True)]

    def run(
        self, inputs: Sequence[Tensor], first: int, size: int, outputs: Sequence[Tensor]
    ) -> None:
        """Run rows [first, first + size) of `inputs` into those of `outputs`."""
        given = self.rows_of(inputs, first, size)
        into = [y[first : first + size] for y in outputs]
        if self.kernel.runs_kernel and into[0].is_cuda:
            self.kernel.run(given, into)  # type: ignore[call-arg]
            return
        for y, made in zip(into, self.kernel.run(given), strict=True):
            y.copy_(made)


@dataclass(eq=False)
class RowChunks:
    """Runs a block's program for many numbers of rows, with the kernels that were prepared."""

    block: PatternBlock
    device: torch.device
    #: Returns the kernel of a program.
    resolve: Callable[[KernelGraph], Resolved]
    #: The kernels made so far, by number of rows (see `prepare_row_chunks`).
    made: dict[int, _ChunkKernel] = field(default_factory=dict)

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the program's outputs for a multiple of MIN_CHUNK_ROWS rows.

        Chunks are of several sizes, which `prepare_row_chunks` has prepared.
        """
        sizes = row_chunk_sizes(inputs[0].shape[0])
        return self._run(inputs, [*zip(accumulate(sizes, initial=0), sizes, strict=False)])

    def with_overlap(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the program's outputs for at least as many rows as the smallest chunk has.

        All chunks are of the largest size that fits. The last one ends with the last row. So it
        may compute rows again, with the same results.
        """
        rows = inputs[0].shape[0]
        size = max(size for size in self.made if size <= rows)
        starts = (*range(0, rows - size, size), rows - size)
        return self._run(inputs, [(start, size) for start in starts])

    def _run(self, inputs: Sequence[Tensor], chunks: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Return the program's outputs, computed in chunks of (first row, number of rows)."""
        if len(chunks) == 1:
            return self.made[chunks[0][1]].kernel.run(list(inputs))
        rows = inputs[0].shape[0]
        tensors = self.made[chunks[0][1]].graph.outputs
        outputs = [inputs[0].new_empty((rows, *t.dims[1:]), dtype=t.dtype) for t in tensors]
        for first, size in chunks:
            self.made[size].run(inputs, first, size, outputs)
        return outputs


def prepare_row_chunks(programs: Iterable[RowChunks], rows: int) -> None:
    """Make the kernels that `rows` rows take, as `prepare_chunk_sizes` does."""
    prepare_chunk_sizes(programs, dict.fromkeys(row_chunk_sizes(rows)))


def prepare_chunk_sizes(programs: Iterable[RowChunks], sizes: Collection[int]) -> None:
    """Make the kernels for chunks of some sizes, if they are missing.

    On a GPU they are compiled in parallel, and each is compared with torch.

    Raises:
        MirageError: If a kernel cannot be made, or gives other numbers than torch.
    """
    missing = [(chunks, size) for chunks in programs for size in sizes if size not in chunks.made]
    graphs = [chunks.block.program(size) for chunks, size in missing]
    kernels = [chunks.resolve(graph) for (chunks, _), graph in zip(missing, graphs, strict=True)]
    generated = [
        n
        for n, (chunks, _) in enumerate(missing)
        if chunks.device.type == "cuda" and kernels[n].runs_kernel
    ]
    if generated:
        _compile([kernels[n] for n in generated], missing[0][0].device)
    for n, ((chunks, size), graph) in enumerate(zip(missing, graphs, strict=True)):
        has_rows = tuple(t.dims[0] == size for t in graph.inputs)
        made = _ChunkKernel(kernels[n], graph, has_rows)
        if n in generated:
            _check(made, chunks)
        chunks.made[size] = made


def _compile(kernels: Sequence[Resolved], device: torch.device) -> None:
    """Compile the generated kernels that have no cubin, in parallel."""
    major, minor = torch.cuda.get_device_capability(device)
    sm = 10 * major + minor
    programs = [kernel.entry.generate() for kernel in kernels]
    with closing(Compilation([p for p in programs if not has_all(p, sm)], sm)) as compilation:
        for _ in compilation:
            pass  # a kernel that cannot be compiled raises when it is run


def _check(made: _ChunkKernel, chunks: RowChunks) -> None:
    """Compare a generated kernel with torch on the GPU. It was not tuned, so it has never run.

    Torch runs few rows at once, because it keeps what it computes between ops.

    Raises:
        MirageError: If it gives other numbers.
    """
    inputs = random_inputs(made.graph, chunks.device)
    outputs = made.kernel.run(inputs)
    rows = made.graph.inputs[0].dims[0]
    size = math.gcd(rows, CHECKED_ROWS)
    few = chunks.block.program(size)
    for first in range(0, rows, size):
        want = run_kernel_graph(few, made.rows_of(inputs, first, size))
        for y, x in zip(outputs, want, strict=True):
            # Compare each row by itself, because one of thousands may be wrong.
            difference = (y[first : first + size].float() - x.float()).flatten(1).norm(dim=1)
            norm = x.float().flatten(1).norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
            distance = float((difference / norm).max())
            if not distance <= math.sqrt(torch.finfo(x.dtype).eps):
                names = ", ".join(t.name for t in made.graph.inputs)
                raise MirageError(
                    f"the kernel of {names} for {rows} rows gives other numbers than torch: off "
                    f"by {distance:.2g}"
                )
