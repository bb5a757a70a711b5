"""Count the instructions of compiled kernels."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.graph.ugraph import UGraph


def instructions_of_a_thread(
    ugraph: UGraph, schedule: Schedule, trips: int, folder: Path, sm: int = 90
) -> int:
    """Return the instructions that a thread of a µGraph's only kernel executes.

    Args:
        ugraph: The µGraph.
        schedule: The schedule of its kernel.
        trips: How often the longest loop in the machine code runs.
        folder: Where to write the machine code.
        sm: The compute capability.
    """
    from triton import knobs

    [compiled] = compiler.ahead_of_time(triton.generate(ugraph, (schedule,)), sm)
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    command = [knobs.nvidia.nvdisasm.path, "-c", str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    labels: dict[str, int] = {}
    instructions: list[str] = []
    longest = 0
    for line in text.splitlines():
        if label := re.match(r"^(\.L_\w+):", line):
            labels[label[1]] = len(instructions)
        if found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(found[1])
            target = re.search(r"BRA.*?(\.L_\w+)", found[1])
            if target and target[1] in labels:
                longest = max(longest, len(instructions) - labels[target[1]])
    executed = sum(i != "NOP" for i in instructions)
    return executed + (trips - 1) * longest
