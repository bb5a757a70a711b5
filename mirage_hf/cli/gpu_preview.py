"""A preview of an H200 without a GPU: kernels compiled ahead of time, and predicted times."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from triton import knobs

from mirage_hf.cli import show
from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.errors import CodegenError, described
from mirage_hf.gpus import H200
from mirage_hf.graph.ugraph import UGraph, library_ugraph
from mirage_hf.tune import space
from mirage_hf.tune.cost import estimate, library_us

#: H100 and H200.
SM = 90


@dataclass(frozen=True)
class KernelPreview:
    """One block as an H200 would run it.

    Attributes:
        name: The block.
        launches: Kernel launches of the unfused program.
        kernels: Kernel launches of the best µGraph.
        registers: Registers a thread, of each generated kernel. Empty if they are unknown.
        shared_bytes: Shared memory of a block of threads, of each generated kernel.
        predicted_us: The cost model's estimate.
        bytes_us: The time to move the kernels' bytes, at the bandwidth of device memory.
        failure: Why kernels could not be compiled. Empty if they were.
    """

    name: str
    launches: int
    kernels: int
    registers: tuple[int, ...]
    shared_bytes: tuple[int, ...]
    predicted_us: float
    bytes_us: float
    failure: str = ""

    @property
    def memory_bound_share(self) -> float:
        """The share of the predicted time that moving the bytes alone would take."""
        return self.bytes_us / self.predicted_us if self.predicted_us else 0.0


def preview(name: str, ugraph: UGraph) -> KernelPreview:
    """Compile a µGraph's kernels for sm_90, which needs no GPU, and predict their time."""
    ops = place_kernels(ugraph)
    schedules = tuple(ugraph.schedules or (space.default_schedule(op) for op in ops))
    costs = [estimate(plan_kernel(op, s), H200) for op, s in zip(ops, schedules, strict=True)]
    rest_us = sum(library_us(op, H200) for op in ugraph.kernels.ops if op.block is None)
    moved = sum(cost.bytes for cost in costs)
    registers: list[int] = []
    shared: list[int] = []
    failure = ""
    try:
        program = triton.generate(ugraph, schedules or None)
        for kernel in compiler.ahead_of_time(program, SM):
            shared.append(kernel.shared)
            registers += _registers(kernel.asm["cubin"])
    except (CodegenError, OSError, subprocess.SubprocessError) as e:
        failure = described(e)
    return KernelPreview(
        name,
        library_ugraph(ugraph.program).num_kernels,
        ugraph.num_kernels,
        tuple(registers),
        tuple(shared),
        sum(cost.us for cost in costs) + rest_us,
        moved / H200.bandwidth * 1e6,
        failure,
    )


def _registers(cubin: bytes) -> list[int]:
    """Return the registers a thread of each kernel in a cubin, by Triton's own cuobjdump."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        shown = subprocess.run(command, text=True, capture_output=True, timeout=60, check=True)
    return [int(n) for n in re.findall(r"\bREG:(\d+)", shown.stdout)]


def print_previews(previews: list[KernelPreview]) -> None:
    """Print a table with a row for each block."""
    table = Table(box=None, pad_edge=False)
    table.add_column("program")
    for column in (
        "torch launches",
        "kernels",
        "registers",
        "shared KB",
        "µs",
        "memory-bound share",
    ):
        table.add_column(column, justify="right")
    for p in previews:
        table.add_row(
            p.name,
            str(p.launches),
            str(p.kernels),
            ", ".join(map(str, p.registers)) or "-",
            ", ".join(f"{n / 1024:.1f}" for n in p.shared_bytes) or "-",
            f"{p.predicted_us:.1f}",
            f"{p.memory_bound_share:.0%}" if p.bytes_us else "-",
        )
    show.console.print(table)
    show.plain(
        "Compiled here for sm_90. torch launches: kernels that torch launches for the program. "
        "registers: of a thread. shared KB: of a block.\n"
        "µs: predicted for an H200, not measured. memory-bound share: the share of the predicted "
        "time that moving the bytes alone would take. Launch and latency are the rest, so it is "
        "small for small models."
    )
    for p in previews:
        if p.failure:
            show.plain(f"{p.name} was not compiled: {p.failure}")
