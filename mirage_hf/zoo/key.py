"""Keys of kernel zoos: which program, for which hardware, in which versions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from mirage_hf.codegen import schedule
from mirage_hf.graph import json_format
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.ops import table

#: The version of how kernels are called. It is raised when older kernels can no longer be called.
KERNEL_FORMAT = 1

#: The target of results that hold on every device: all µGraphs of a search.
ANY_TARGET = "any"


@dataclass(frozen=True)
class Key:
    """The key under which a result is stored. Programs with equal keys may share a kernel.

    Attributes:
        program: The canonical program as JSON text, without names, with exact shapes, strides and
            dtypes.
        target: "sm_90", "sm_80", … for a GPU, "cpu", or `ANY_TARGET`.
        title: For people: the shapes of the first input and of the outputs, and the dtype. Not part
            of the digest.
        schedule_version: The version of schedules and of the kernels generated from them.
        kernel_format: The version of how kernels are called.
        options: A digest of everything else that decides the result. Empty for the kernels of
            `optimize()`, because nothing else decides them.
        next_may_launch_early: The promise that the kernel relies on, see
            `placement.place_kernels`.
    """

    program: str
    target: str
    title: str
    schedule_version: int = schedule.VERSION
    kernel_format: int = KERNEL_FORMAT
    options: str = ""
    next_may_launch_early: bool = False

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of everything except the title, in hex."""
        content: dict[str, Any] = {
            "program": json.loads(self.program),
            "target": self.target,
            "schedule_version": self.schedule_version,
            "kernel_format": self.kernel_format,
        }
        if self.options:
            content["options"] = self.options
        if self.next_may_launch_early:
            content["next_may_launch_early"] = True
        return json_format.digest(content)


def key_of(
    program: KernelGraph, target: str, options: str = "", next_may_launch_early: bool = False
) -> Key:
    """Return the key of `program` on `target`. The arguments are fields of `Key`."""
    shapes = ["x".join(str(int(d)) for d in t.dims) for t in program.inputs[:1]]
    shapes += ["x".join(str(int(d)) for d in t.dims) for t in program.outputs]
    title = f"{shapes[0]}-to-{'-'.join(shapes[1:])}" if program.inputs else "-".join(shapes)
    text = json.dumps(canonical(program), sort_keys=True, separators=(",", ":"), allow_nan=False)
    dtype = table.dtype_name(program.outputs[0].dtype)
    return Key(
        text,
        target,
        f"{title}-{dtype}",
        options=options,
        next_may_launch_early=next_may_launch_early,
    )


def target_of(device: torch.device) -> str:
    """Return the zoo's name of a device: "sm_90" …, or "cpu"."""
    if device.type != "cuda":
        return "cpu"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def canonical(program: KernelGraph) -> dict[str, Any]:
    """Return the program's JSON with inputs first and tensors named by position.

    It is the same however the program was built and named.
    """
    data = json_format.graph_to_dict(program)
    inputs = [node for node in data["nodes"] if node["op"] == "input"]
    others = [node for node in data["nodes"] if node["op"] != "input"]
    names = [node["name"] for node in inputs]
    names += [t["name"] for node in others for t in node["outputs"]]
    position = {name: f"t{i}" for i, name in enumerate(names)}

    def operand(x: Any) -> Any:
        return position[x] if isinstance(x, str) else x

    nodes = [node | {"name": position[node["name"]]} for node in inputs]
    for node in others:
        outputs = [t | {"name": position[t["name"]]} for t in node["outputs"]]
        nodes.append(node | {"inputs": [operand(x) for x in node["inputs"]], "outputs": outputs})
    return data | {"nodes": nodes, "outputs": [position[name] for name in data["outputs"]]}
