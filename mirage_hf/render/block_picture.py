"""The picture of one block graph: tensors, tiles, stages and maps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from mirage_hf.graph.block import (
    Accumulator,
    Axis,
    BlockGraph,
    BlockInput,
    BlockOp,
    Contraction,
    Role,
    Stage,
)
from mirage_hf.graph.kernel import DTensor, KernelOp
from mirage_hf.graph.maps import TensorMap, maps_of
from mirage_hf.render.drawing import LayerFrame, Panel, label_width
from mirage_hf.render.labels import number_text, tensor_type

_SIGNS = {"sum": "Σ", "max": "max"}
_INFIX = {"add": "+", "sub": "−", "mul": "×", "div": "÷"}

#: Second lines of an accumulator's box.
_RUNNING, _RESCALED = "running maximum", "rescaled as {} grows"

#: The second line of the box of a reduction over the cluster axis.
_AMONG_BLOCKS = "among the blocks of a cluster"


def block_panel(number: int, op: KernelOp, schedule: Any = None) -> Panel:
    """Return a panel with the drawing of a kernel's block graph.

    Args:
        number: The kernel's number.
        op: The op that runs the block graph.
        schedule: The codegen schedule of the kernel, or None. With one, the number of trips of the
            loop is shown.
    """
    assert op.block is not None
    return _BlockPicture(number, op, op.block, schedule).panel


class _BlockPicture:
    """Draws a block graph from top to bottom: stage after stage, then the outputs."""

    def __init__(self, number: int, op: KernelOp, block: BlockGraph, schedule: Any) -> None:
        self.op, self.block, self.schedule = op, block, schedule
        self.panel = Panel(f"Kernel {number}: block graph", _facts(block, schedule))
        self.maps = maps_of(block)
        self.readers = _readers(block)
        #: The box that holds each value.
        self.node: dict[str, str] = {}
        #: The tensors of inputs that are drawn already.
        self.sources: set[str] = set()
        #: The next free layer.
        self.layer = 0
        for n, (stage, inputs) in enumerate(_loads(block)):
            self._draw_stage(n, stage, inputs)
        for n in range(len(block.outputs)):
            self._draw_output(n)

    def _draw_stage(self, number: int, stage: Stage, inputs: Sequence[BlockInput]) -> None:
        """Draw a stage and the tiles that it loads."""
        source_layer = self.layer
        first = source_layer + bool(inputs)
        for i in inputs:
            self._draw_load(number, i, source_layer, first)
        boxes = _StageBoxes(self, number, stage, first if inputs else first - 1)
        last = boxes.draw()
        if last >= first:  # a stage may be empty
            lines = _frame_lines(self.block, stage, self.schedule)
            self.panel.frames.append(LayerFrame(first, last, lines))
        self.layer = last + 1

    def _draw_load(self, stage: int, i: BlockInput, source_layer: int, layer: int) -> None:
        """Draw the tile of an input, and its tensors if they are not drawn yet."""
        label = _map_lines(self.maps.inputs[self.block.inputs.index(i)])
        source, load = f"source {i.name}", f"load {stage} {i.name}"
        if i.name not in self.sources:
            self.sources.add(i.name)
            tensors = [t for k in i.sources if isinstance(t := self.op.inputs[k], DTensor)]
            names = _joined([t.name for t in tensors])
            types = _joined([tensor_type(t) for t in tensors])
            lines = [(text, "bold") for text in names] + [(text, "small") for text in types]
            self.panel.add(source, lines, "tensor", source_layer)
        text = f"{i.name} {_axes(self.block.input_axes(i))}"
        self.panel.add(load, ((text, "plain"),), "load", layer, label_width(label))
        self.panel.join(source, load, label)
        self.node[i.name] = load

    def _draw_output(self, n: int) -> None:
        o, t = self.block.outputs[n], self.op.outputs[n]
        label = _map_lines(self.maps.outputs[n])
        name = t.name if t.name == o.value else f"{t.name} = {o.value}"
        lines = ((name, "bold"), (tensor_type(t), "small"))
        self.panel.add(f"store {n}", lines, "tensor", self.layer, label_width(label))
        self.panel.join(self.node[o.value], f"store {n}", label)


class _StageBoxes:
    """The boxes of one stage. Chains of elementwise ops share a box."""

    def __init__(self, picture: _BlockPicture, number: int, stage: Stage, floor: int) -> None:
        """Prepare to draw below the layer `floor`."""
        self.picture, self.number, self.stage, self.floor = picture, number, stage, floor
        self.node, self.contractions = picture.node, picture.block.contractions
        self.layer: dict[str, int] = {}
        self.styles: dict[str, str] = {}
        self.texts: dict[str, list[tuple[str, str]]] = {}
        self.axes: dict[str, tuple[str, ...]] = {}
        self.edges: list[tuple[str, str]] = []
        #: Boxes of elementwise ops, which may be continued.
        self.chains: set[str] = set()
        read = {a for op in stage.body for a in op.args}
        #: Maxima that the body reads while they grow.
        self.running = {acc.out: acc for acc in stage.accumulators if acc.out in read}

    def draw(self) -> int:
        """Add the boxes to the panel, and return the last layer."""
        products = {c.product for c in self.contractions.values()}
        for op in self.stage.body:
            if op.out not in products:
                self._add_op(op)
        ends = [self._add_accumulator(a) for a in self.stage.accumulators if not self._has(a)]
        last = max(self.layer.values(), default=self.floor)
        self.layer |= dict.fromkeys(ends, last)
        panel = self.picture.panel
        for key, texts in self.texts.items():
            lines = [*texts, (_axes(self.axes[key]), "small")]
            panel.add(key, lines, self.styles[key], self.layer[key])
        for start, end in self.edges:
            panel.join(start, end)
        return last

    def _add_op(self, op: BlockOp) -> None:
        values = [a for a in op.args if isinstance(a, str)]
        for a in values:  # a running maximum stands above the ops that read it
            if a in self.running and not self._has(self.running[a]):
                self._add_accumulator(self.running[a])
        if op.over is not None:
            product = self.contractions.get(op.out)
            text = _reduction_text(op.out, op.fn, op.over, str(op.args[0]), product)
            texts = [(text, "plain")]
            reads = [product.a, product.b] if product else values
            style = "product" if product else "sum"
            if self.picture.block.role(op.over) is Role.CLUSTER:
                style = "exchange"
                texts.append((_AMONG_BLOCKS, "small"))
            self._put(f"sum {self.number} {op.out}", reads, texts, style, op)
            return
        chained = [
            self.node[v]
            for v in values
            if self.node.get(v) in self.chains and self.picture.readers[v] == 1
        ]
        before = {self.node[v] for v in values if v in self.node and self.node[v] in self.layer}
        if len(chained) == 1 and before == set(chained):
            self._append(chained[0], values, op)
        else:
            key = f"thread {self.number} {op.out}"
            self._put(key, values, [(_op_text(op), "plain")], "thread", op)
            self.chains.add(key)

    def _accumulator_key(self, acc: Accumulator) -> str:
        return f"accumulate {self.number} {acc.out}"

    def _has(self, acc: Accumulator) -> bool:
        return self._accumulator_key(acc) in self.layer

    def _add_accumulator(self, acc: Accumulator) -> str:
        key = self._accumulator_key(acc)
        product = self.contractions.get(acc.out)
        text = _reduction_text(acc.out, acc.kind, str(self.stage.loop), acc.arg, product)
        texts = [(text, "plain")]
        style = "product" if product else "sum"
        if acc.shift is not None:
            texts.append((_RESCALED.format(acc.shift), "small"))
            style = "rescaled"
        if acc.out in self.running:
            texts.append((_RUNNING, "small"))
        self._put(key, [product.a, product.b] if product else [acc.arg], texts, style, acc)
        return key

    def _put(
        self,
        key: str,
        values: Sequence[str],
        texts: Sequence[tuple[str, str]],
        style: str,
        made: BlockOp | Accumulator,
    ) -> None:
        """Add a box that reads `values` and makes a value."""
        read = [self.node[v] for v in values if v in self.node]
        above = [self.layer[k] + 1 for k in read if k in self.layer]
        self.layer[key] = max([self.floor + 1, *above])
        self.texts[key], self.styles[key], self.axes[key] = list(texts), style, made.axes
        self.edges.extend((k, key) for k in dict.fromkeys(read))
        self.node[made.out] = key

    def _append(self, key: str, values: Sequence[str], op: BlockOp) -> None:
        """Add an op as a line to the box `key`, if nothing else reads the result of that box."""
        read = [self.node[v] for v in values if v in self.node]
        for k in dict.fromkeys(k for k in read if k not in self.layer):
            if (k, key) not in self.edges:
                self.edges.append((k, key))
        self.texts[key].append((_op_text(op), "plain"))
        self.axes[key], self.node[op.out] = op.axes, key


# -- readers of values -----------------------------------------------------------------------------


def _loads(b: BlockGraph) -> list[tuple[Stage, list[BlockInput]]]:
    """Return each stage with the inputs that it reads. The first stage has unread inputs too."""
    stages = b.stages or (Stage(None, ()),)
    reads = [
        {a for op in s.body for a in op.args} | {acc.arg for acc in s.accumulators} for s in stages
    ]
    unread = [i for i in b.inputs if not any(i.name in r for r in reads)]
    return [
        (stage, [i for i in b.inputs if i.name in r or (n == 0 and i in unread)])
        for n, (stage, r) in enumerate(zip(stages, reads, strict=True))
    ]


def _readers(b: BlockGraph) -> Counter[str]:
    """Return how many ops, accumulators and outputs read each value."""
    readers = Counter(a for op in b.ops() for a in set(op.args) if isinstance(a, str))
    readers.update(acc.arg for stage in b.stages for acc in stage.accumulators)
    readers.update(o.value for o in b.outputs)
    return readers


# -- texts -----------------------------------------------------------------------------------------


def _facts(b: BlockGraph, schedule: Any) -> list[str]:
    """Return the lines below the title: axes by role, and the schedule."""

    def axis(a: Axis) -> str:
        text = f"{a.name} = {a.size}"
        if a.split_axis:
            text += f" in {b.num_splits(a.name)} splits of {b.split_size(a.name)}"
        if whole := b.axis_split_by(a.name):
            text += f" (split of {whole})"
        return text

    widest = max((len(a.role.value) for a in b.axes), default=0) + 1
    facts = [
        f"{role.value:<{widest}} " + ",  ".join(map(axis, b.named(role)))
        for role in Role
        if b.named(role)
    ]
    return facts if schedule is None else [*facts, repr(schedule)]


def _frame_lines(b: BlockGraph, stage: Stage, schedule: Any) -> tuple[str, ...]:
    """Return the text at the left of a stage: how often it runs."""
    if stage.loop is None:
        return ("once per block",)
    a, n = b.axis(stage.loop), b.split_size(stage.loop)
    lines = [f"for {a.name} in {n}"]
    if a.split_axis:
        lines.append(f"split {a.split_axis} of {a.size}")
    if schedule is not None:
        tile = schedule.tiles[a.name]
        trips = -(-n // tile)
        lines += [f"{tile} at a time:", f"{trips} trip{'s' if trips != 1 else ''}"]
    return tuple(lines)


def _map_lines(m: TensorMap) -> tuple[str, ...]:
    """Return a tensor's maps without braces, empty ones left out."""
    lines = str(m).replace(", fmap", "\nfmap").replace("{", "").replace("}", "").split("\n")
    return tuple(line for line in lines if line.strip() not in ("imap", "omap"))


def _joined(words: Sequence[str]) -> list[str]:
    """Return words with a bar after each, except for the last."""
    return [*(f"{w} |" for w in words[:-1]), *words[-1:]]


def _axes(axes: Sequence[str]) -> str:
    return f"[{', '.join(axes)}]"


def _reduction_text(out: str, kind: str, over: str, arg: str, product: Contraction | None) -> str:
    summed = f"{product.a} × {product.b}" if product else arg
    return f"{out} = {_SIGNS[kind]}[{over}] {summed}"


def _op_text(op: BlockOp) -> str:
    args = [a if isinstance(a, str) else number_text(float(a)) for a in op.args]
    if op.fn in _INFIX:
        return f"{op.out} = " + f" {_INFIX[op.fn]} ".join(args)
    attrs = [f"{name}={number_text(value)}" for name, value in op.attrs]
    return f"{op.out} = {op.fn}({', '.join(args + attrs)})"
