"""Draw µGraphs: kernels and tensors, then the block graph of each kernel with its maps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mirage_hf import errors
from mirage_hf.graph import conveniences
from mirage_hf.graph.block import Accumulator, Axis, BlockGraph, BlockOp, Role, Stage
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph, KernelOp
from mirage_hf.graph.maps import TensorMap, maps_of
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.ops import table
from mirage_hf.render.drawing import Frame, Panel, label_width, page

_SIGNS = {"sum": "Σ", "max": "max"}
_INFIX = {"add": "+", "sub": "−", "mul": "×", "div": "÷"}
_VIEWS = ("permute", "reshape", "slice")
#: Characters after which a list of operands continues in the next line.
_WRAP = 44


@conveniences.write_svg.register
def write_svg(ugraph: UGraph, path: str | Path) -> Path:
    """Draw a µGraph as SVG, with its kernels, stages and maps, and return the path.

    Raises:
        GraphError: The path does not end in .svg.
    """
    path = Path(path)
    if path.suffix.lower() not in ("", ".svg"):
        raise errors.GraphError(
            f"visualize: {path.name} ends in {path.suffix}, and what is written is SVG; name it "
            f"{path.stem}.svg"
        )
    path.write_text(svg(ugraph), encoding="utf-8")
    return path


def svg(ugraph: UGraph) -> str:
    """Return the picture as text.

    It can stand in an HTML page: it has no ids and names nothing outside itself.
    """
    schedules = ugraph.schedules or (None,) * len(ugraph.block_ops)
    blocks = [
        _block_panel(n + 1, op, s)
        for n, (op, s) in enumerate(zip(ugraph.block_ops, schedules, strict=True))
    ]
    count, calls = len(blocks), ugraph.num_kernels - len(blocks)
    counted = [
        f"{n} {what}{'s' if n != 1 else ''}"
        for n, what in ((count, "searched kernel"), (calls, "library call"))
        if n
    ]
    return page(
        "µGraph: " + " and ".join(counted or ["no kernel"]),
        [_kernel_panel(ugraph.kernels), *blocks],
    )


# -- kernel level ---------------------------------------------------------------------------------


def _kernel_panel(graph: KernelGraph) -> Panel:
    """Draw the kernels and tensors of a graph."""
    panel = Panel("Kernel level")
    layer: dict[int, int] = {}
    for op in graph.ops:
        depth = 2 + max(
            (layer[x.index] for x in op.inputs if isinstance(x, DTensor) and x.index in layer),
            default=0,
        )
        layer |= {t.index: depth for t in op.outputs}
    for t in graph.inputs:
        layer[t.index] = (
            min((layer[op.outputs[0].index] for op in graph.ops if t in op.inputs), default=2) - 2
        )
    returned = {t.index for t in graph.outputs}
    blocks = 0

    def tensor(t: DTensor) -> None:
        name = f"{t.name} (output)" if t.index in returned else t.name
        panel.add(
            f"tensor {t.index}", ((name, "bold"), (_type(t), "small")), "tensor", layer[t.index]
        )

    for t in graph.inputs:
        tensor(t)
    for op in graph.ops:
        key = f"op {op.outputs[0].index}"
        blocks += op.name == CUSTOMIZED
        lines = _kernel_lines(op, blocks)
        style = "block" if op.name == CUSTOMIZED else "view" if op.name in _VIEWS else "library"
        panel.add(key, lines, style, layer[op.outputs[0].index] - 1)
        for x in op.inputs:
            if isinstance(x, DTensor):
                panel.join(f"tensor {x.index}", key)
        for t in op.outputs:
            tensor(t)
            panel.join(key, f"tensor {t.index}")
    return panel


def _type(t: DTensor) -> str:
    """Return a tensor's dtype and dims."""
    return f"{table.dtype_name(t.dtype)} {errors.shape(t.dims)}"


def _kernel_lines(op: KernelOp, number: int) -> list[tuple[str, str]]:
    """Return a box's lines: a kernel's number and axes, or a library call and its operands."""
    if op.block is not None:
        roles = [
            (role.value, ", ".join(a.name for a in op.block.named(role)))
            for role in (Role.GRID, Role.LOOP)
        ]
        return [
            (f"kernel {number}", "bold"),
            *((f"{role} {names}", "small") for role, names in roles if names),
        ]
    operands = [x.name if isinstance(x, DTensor) else _number(x) for x in op.inputs]
    attrs = [f"{k}={errors.shape(v) if isinstance(v, tuple) else _number(v)}" for k, v in op.attrs]
    return [(line, "plain") for line in _wrapped(op.name + "(", [*operands, *attrs], ")")]


def _wrapped(head: str, words: Sequence[str], tail: str) -> list[str]:
    """Wrap a list of operands."""
    lines = [head]
    for n, word in enumerate(words):
        word += tail if n == len(words) - 1 else ", "
        if n and len(lines[-1] + word) > _WRAP:
            lines[-1] = lines[-1].rstrip()
            lines.append("")
        lines[-1] += word
    return lines


def _number(x: object) -> str:
    """Return a number without trailing zeros."""
    return f"{x:.4g}" if isinstance(x, float) else str(x)


# -- block level ----------------------------------------------------------------------------------


def _block_panel(number: int, op: KernelOp, schedule: Any = None) -> Panel:
    """Draw a block graph. With a codegen Schedule, trips of the loop are known."""
    b = op.block
    assert b is not None
    panel = Panel(f"Kernel {number}: block graph", _facts(b, schedule))
    maps = maps_of(b)
    node: dict[str, str] = {}
    sources: set[str] = set()
    at = 0
    reads = [
        {a for o in s.body for a in o.args} | {a.arg for a in s.accumulators} for s in b.stages
    ]
    for s, stage in enumerate(b.stages or (Stage(None, ()),)):
        used = [
            i
            for i in b.inputs
            if (reads and i.name in reads[s]) or (s == 0 and not any(i.name in r for r in reads))
        ]
        source_row, first = at, at + bool(used)
        for i in used:
            label = _map_lines(maps.inputs[b.inputs.index(i)])
            if i.name not in sources:
                sources.add(i.name)
                tensors = [t for k in i.sources if isinstance(t := op.inputs[k], DTensor)]
                names, shapes = (
                    [w + (" |" if n < len(tensors) - 1 else "") for n, w in enumerate(words)]
                    for words in ([t.name for t in tensors], [_type(t) for t in tensors])
                )
                panel.add(
                    f"source {i.name}",
                    [(w, "bold") for w in names] + [(w, "small") for w in shapes],
                    "tensor",
                    source_row,
                )
            node[i.name] = f"load {s} {i.name}"
            panel.add(
                node[i.name],
                ((_carrying(i.name, b.input_axes(i)), "plain"),),
                "load",
                first,
                label_width(label),
            )
            panel.join(f"source {i.name}", node[i.name], label)
        last = _stage_nodes(panel, b, s, stage, first if used else first - 1, node)
        if last >= first:  # a stage may be empty
            panel.frames.append(Frame(first, last, _band_lines(b, stage, schedule)))
        at = last + 1
    for n, o in enumerate(b.outputs):
        label = _map_lines(maps.outputs[n])
        t = op.outputs[n]
        name = t.name if t.name == o.value else f"{t.name} = {o.value}"
        panel.add(
            f"store {n}", ((name, "bold"), (_type(t), "small")), "tensor", at, label_width(label)
        )
        panel.join(node[o.value], f"store {n}", label)
    return panel


def _facts(b: BlockGraph, schedule: Any) -> list[str]:
    """Return facts about a block graph."""

    def axis(a: Axis) -> str:
        dealt = (
            f" in {b.axis(a.split_axis).size} parts of {b.split_size(a.name)}"
            if a.split_axis
            else ""
        )
        numbers = f" (part of {b.axis_split_by(a.name)})" if b.axis_split_by(a.name) else ""
        return f"{a.name} = {a.size}{dealt}{numbers}"

    facts = [
        f"{role.value:<5} " + ",  ".join(map(axis, b.named(role))) for role in Role if b.named(role)
    ]
    return facts + ([repr(schedule)] if schedule is not None else [])


def _band_lines(b: BlockGraph, stage: Stage, schedule: Any) -> tuple[str, ...]:
    """Return the text of a stage's frame."""
    if stage.loop is None:
        return ("once per block",)
    a, n = b.axis(stage.loop), b.split_size(stage.loop)
    lines = [f"for {a.name} in {n}"] + (
        [f"part {a.split_axis} of {a.size}"] if a.split_axis else []
    )
    if schedule is not None:
        tile = schedule.tiles[a.name]
        trips = -(-n // tile)
        lines += [f"{tile} at a time:", f"{trips} trip{'s' if trips != 1 else ''}"]
    return tuple(lines)


def _carrying(name: str, axes: Sequence[str]) -> str:
    """Return a name with its axes."""
    return f"{name} [{', '.join(axes)}]"


def _map_lines(m: TensorMap) -> tuple[str, ...]:
    """Return the maps of a tensor."""
    lines = str(m).replace(", fmap", "\nfmap").replace("{", "").replace("}", "").split("\n")
    return tuple(line for line in lines if line.strip() not in ("imap", "omap"))


class _Stage:
    """The boxes of one stage: layer, style, lines and values of each, and edges."""

    def __init__(self, floor: int, node: dict[str, str]):
        """Start below a layer."""
        self.floor, self.node = floor, node
        self.layer: dict[str, int] = {}
        self.styles: dict[str, str] = {}
        self.texts: dict[str, list[str]] = {}
        self.axes: dict[str, tuple[str, ...]] = {}
        self.edges: list[tuple[str, str]] = []

    def put(
        self,
        key: str,
        values: Sequence[str],
        texts: Sequence[str],
        style: str,
        out: str,
        axes: tuple[str, ...],
    ) -> None:
        """Add a box."""
        own = [self.node[v] for v in values if v in self.node]
        self.layer[key] = max(
            [self.floor + 1, *(self.layer[k] + 1 for k in own if k in self.layer)]
        )
        self.texts[key], self.styles[key], self.axes[key] = list(texts), style, axes
        self.edges.extend((k, key) for k in dict.fromkeys(own))
        self.node[out] = key

    def append(
        self, key: str, values: Sequence[str], text: str, out: str, axes: tuple[str, ...]
    ) -> None:
        """Add a line to a box, because the op reads only the box's result."""
        outside = [
            self.node[v] for v in values if v in self.node and self.node[v] not in self.layer
        ]
        self.edges.extend((k, key) for k in dict.fromkeys(outside) if (k, key) not in self.edges)
        self.texts[key].append(text)
        self.axes[key], self.node[out] = axes, key


def _stage_nodes(
    panel: Panel, b: BlockGraph, s: int, stage: Stage, floor: int, node: dict[str, str]
) -> int:
    """Add a stage's boxes below a layer and return its last layer. Elementwise chains share one."""
    products = {c.product: c for c in b.contractions.values()}
    readers = _readers(b)
    drawn = _Stage(floor, node)
    running = {
        acc.out: acc for acc in stage.accumulators if any(acc.out in op.args for op in stage.body)
    }
    chains: set[str] = set()

    def accumulate(acc: Accumulator) -> str:
        key = f"accumulate {s} {acc.out}"
        c = b.contractions.get(acc.out)
        texts = [
            f"{acc.out} = {_SIGNS[acc.kind]}[{stage.loop}] {f'{c.a} × {c.b}' if c else acc.arg}"
        ]
        if acc.shift is not None:
            texts.append(f"rescaled as {acc.shift} grows")
        if acc.out in running:
            texts.append("running maximum")
        style = "rescaled" if acc.shift is not None else "product" if c else "sum"
        drawn.put(key, [c.a, c.b] if c else [acc.arg], texts, style, acc.out, acc.axes)
        return key

    for op in stage.body:
        if op.out in products:
            continue
        values = [a for a in op.args if isinstance(a, str)]
        for a in values:  # a running maximum stands above its readers
            if a in running and f"accumulate {s} {a}" not in drawn.layer:
                accumulate(running[a])
        if op.over is not None:
            c = b.contractions.get(op.out)
            text = f"{op.out} = {_SIGNS[op.fn]}[{op.over}] {f'{c.a} × {c.b}' if c else op.args[0]}"
            drawn.put(
                f"sum {s} {op.out}",
                [c.a, c.b] if c else values,
                [text],
                "product" if c else "sum",
                op.out,
                op.axes,
            )
            continue
        chained = [node[v] for v in values if node.get(v) in chains and readers[v] == 1]
        before = {node[v] for v in values if v in node and node[v] in drawn.layer}
        if len(chained) == 1 and before == set(chained):
            drawn.append(chained[0], values, _op_text(op), op.out, op.axes)
        else:
            key = f"thread {s} {op.out}"
            drawn.put(key, values, [_op_text(op)], "thread", op.out, op.axes)
            chains.add(key)
    ends = [
        accumulate(acc)
        for acc in stage.accumulators
        if f"accumulate {s} {acc.out}" not in drawn.layer
    ]
    last = max(drawn.layer.values(), default=floor)
    drawn.layer |= dict.fromkeys(ends, last)
    for key, texts in drawn.texts.items():
        kinds = [
            "small" if t.startswith(("rescaled as", "running maximum")) else "plain" for t in texts
        ]
        panel.add(
            key,
            [*zip(texts, kinds, strict=True), (f"[{', '.join(drawn.axes[key])}]", "small")],
            drawn.styles[key],
            drawn.layer[key],
        )
    for a, z in drawn.edges:
        panel.join(a, z)
    return last


def _readers(b: BlockGraph) -> dict[str, int]:
    """Return how many ops, accumulators and outputs read each value."""
    read = [a for op in b.ops() for a in dict.fromkeys(op.args) if isinstance(a, str)]
    read += [acc.arg for stage in b.stages for acc in stage.accumulators] + [
        o.value for o in b.outputs
    ]
    return {v: read.count(v) for v in dict.fromkeys(read)}


def _op_text(op: BlockOp) -> str:
    """Return an op as text."""
    args = [a if isinstance(a, str) else _number(float(a)) for a in op.args]
    attrs = [f"{k}={_number(v)}" for k, v in op.attrs]
    return f"{op.out} = " + (
        f" {_INFIX[op.fn]} ".join(args)
        if op.fn in _INFIX
        else f"{op.fn}({', '.join(args + attrs)})"
    )
