"""Keys of the kernel zoo: which program on which hardware, in which versions. Equal keys may share a kernel."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mirage_hf.codegen import schedule
from mirage_hf.graph import json_format
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.ops import table

KERNEL_FORMAT = 1
"""Raised when kernels of an earlier form can no longer be called."""


@dataclass(frozen=True)
class Key:
    """A canonical program (its JSON without names; exact shapes, strides and dtypes), a target, and two versions.

    `target` is "sm_90", "sm_80", … or "cpu". `title` is for people: what comes in, what goes out, in which dtype.
    """

    program: str
    target: str
    title: str
    schedule_version: int = schedule.VERSION
    kernel_format: int = KERNEL_FORMAT

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything but the title, in hex."""
        return json_format.digest(
            {
                "program": json.loads(self.program),
                "target": self.target,
                "schedule_version": self.schedule_version,
                "kernel_format": self.kernel_format,
            }
        )


def key_of(program: KernelGraph, target: str) -> Key:
    """Return the key of `program` on `target`."""
    shapes = ["x".join(map(str, t.dims)) for t in (*program.inputs[:1], *program.outputs)]
    title = f"{shapes[0]}-to-{'-'.join(shapes[1:])}" if program.inputs else "-".join(shapes)
    text = json.dumps(canonical(program), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return Key(text, target, f"{title}-{table.dtype_name(program.outputs[0].dtype)}")


def canonical(program: KernelGraph) -> dict[str, Any]:
    """Return the program's JSON with inputs first and tensors named by position: the same however it was built and named."""
    data = json_format.graph_to_dict(program)
    inputs = [node for node in data["nodes"] if node["op"] == "input"]
    others = [node for node in data["nodes"] if node["op"] != "input"]
    made = [node["name"] for node in inputs] + [
        t["name"] for node in others for t in node["outputs"]
    ]
    position = {name: f"t{i}" for i, name in enumerate(made)}

    def operand(x: Any) -> Any:
        return position[x] if isinstance(x, str) else x

    nodes = [node | {"name": position[node["name"]]} for node in inputs]
    nodes += [
        node
        | {
            "inputs": [operand(x) for x in node["inputs"]],
            "outputs": [t | {"name": position[t["name"]]} for t in node["outputs"]],
        }
        for node in others
    ]
    return data | {"nodes": nodes, "outputs": [position[name] for name in data["outputs"]]}
