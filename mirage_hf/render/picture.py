"""Draw µGraphs as plain SVG.

A picture shows the kernels and the tensors between them. Below, it shows the block graph of each
kernel with its maps on the edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mirage_hf import errors, files
from mirage_hf.graph import conveniences
from mirage_hf.graph.block import Role
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph, KernelOp
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.render.block_picture import block_panel
from mirage_hf.render.drawing import Panel, page
from mirage_hf.render.labels import number_text, tensor_type

#: Roles whose axes are named in the box of a kernel.
_SHOWN_ROLES = (Role.GRID, Role.CLUSTER, Role.LOOP)

#: Library ops that move no data.
_VIEWS = ("permute", "reshape", "slice")

#: Characters after which a list of operands continues in the next line.
_WRAP = 44


@conveniences.write_svg.register
def write_svg(ugraph: UGraph, path: str | Path) -> Path:
    """Draw a µGraph as an SVG file.

    Args:
        ugraph: The µGraph.
        path: The file, which ends in .svg or has no ending.

    Returns:
        The path.

    Raises:
        GraphError: If the path ends in something else.
    """
    path = Path(path)
    if path.suffix.lower() not in ("", ".svg"):
        raise errors.GraphError(
            f"visualize: {path.name} ends in {path.suffix}, and what is written is SVG; "
            f"name it {path.stem}.svg"
        )
    files.write_text(path, svg(ugraph))
    return path


def svg(ugraph: UGraph) -> str:
    """Return the picture of a µGraph as text.

    It can be put into an HTML page, because it refers to nothing outside itself and has no ids.
    """
    schedules: Sequence[Any] = ugraph.schedules or (None,) * len(ugraph.block_ops)
    blocks = [
        block_panel(number, op, schedule)
        for number, (op, schedule) in enumerate(zip(ugraph.block_ops, schedules, strict=True), 1)
    ]
    counts = (
        (len(blocks), "searched kernel"),
        (ugraph.num_kernels - len(blocks), "library call"),
    )
    counted = [f"{n} {what}{'s' if n != 1 else ''}" for n, what in counts if n]
    title = "µGraph: " + " and ".join(counted or ["no kernel"])
    return page(title, [_kernel_panel(ugraph.kernels), *blocks])


# -- kernel level ----------------------------------------------------------------------------------


def _kernel_panel(graph: KernelGraph) -> Panel:
    panel = Panel("Kernel level")
    layer = _layers(graph)
    outputs = {t.index for t in graph.outputs}
    number = 0

    def add_tensor(t: DTensor) -> None:
        name = f"{t.name} (output)" if t.index in outputs else t.name
        lines = ((name, "bold"), (tensor_type(t), "small"))
        panel.add(f"tensor {t.index}", lines, "tensor", layer[t.index])

    for t in graph.inputs:
        add_tensor(t)
    for op in graph.ops:
        first = op.outputs[0].index
        key, style = f"op {first}", "library"
        if op.name == CUSTOMIZED:
            number, style = number + 1, "block"
        elif op.name in _VIEWS:
            style = "view"
        panel.add(key, _kernel_lines(op, number), style, layer[first] - 1)
        for x in op.inputs:
            if isinstance(x, DTensor):
                panel.join(f"tensor {x.index}", key)
        for t in op.outputs:
            add_tensor(t)
            panel.join(key, f"tensor {t.index}")
    return panel


def _layers(graph: KernelGraph) -> dict[int, int]:
    """Return the layer of each tensor: results below operands, inputs right above their op."""
    layer: dict[int, int] = {}
    for op in graph.ops:
        operands = [layer.get(x.index, 0) for x in op.inputs if isinstance(x, DTensor)]
        layer |= {t.index: 2 + max(operands, default=0) for t in op.outputs}
    for t in graph.inputs:
        readers = [layer[op.outputs[0].index] for op in graph.ops if t in op.inputs]
        layer[t.index] = min(readers, default=2) - 2
    return layer


def _kernel_lines(op: KernelOp, number: int) -> list[tuple[str, str]]:
    """Return the text of a kernel (number, axes) or of a library call (operands)."""
    if op.block is not None:
        names = {role: ", ".join(a.name for a in op.block.named(role)) for role in _SHOWN_ROLES}
        axes = [(f"{role.value} {text}", "small") for role, text in names.items() if text]
        return [(f"kernel {number}", "bold"), *axes]
    words = [x.name if isinstance(x, DTensor) else number_text(x) for x in op.inputs]
    for name, value in op.attrs:
        text = errors.shape(value) if isinstance(value, tuple) else number_text(value)
        words.append(f"{name}={text}")
    return [(line, "plain") for line in _wrapped(op.name + "(", words, ")")]


def _wrapped(head: str, words: Sequence[str], tail: str) -> list[str]:
    """Return words between head and tail, in lines of about _WRAP characters."""
    lines = [head]
    for n, word in enumerate(words):
        word += tail if n == len(words) - 1 else ", "
        if n and len(lines[-1] + word) > _WRAP:
            lines[-1] = lines[-1].rstrip()
            lines.append("")
        lines[-1] += word
    return lines
