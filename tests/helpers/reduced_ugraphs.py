"""µGraphs at reduced sizes, run in float64 with their axes cut in any way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from mirage_hf.graph.algebra import TorchAlgebra
from mirage_hf.graph.block import BlockGraph
from mirage_hf.graph.execute_block import run_block_graph
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.search.expand import expand

#: Number of splits of a reduced axis if the µGraph splits the full one.
PARTS = 2


def sizes(program: KernelGraph) -> dict[int, int]:
    """Map each size of the program's inputs to a reduced size.

    Different sizes stay different, and are long enough for several pieces.
    """
    given = sorted({d for t in program.inputs for d in t.dims if d > 1})
    return {1: 1} | {n: min(n, 3 + k) for k, n in enumerate(given)}


def program(graph: KernelGraph, small: Mapping[int, int]) -> KernelGraph:
    """Return the program with composites expanded, at reduced sizes.

    A mean still divides by the full size, as in its kernels.
    """
    whole, out = expand(graph), KernelGraph()
    new: dict[int, DTensor] = {
        t.index: out.new_input([small[d] for d in t.dims], t.dtype) for t in whole.inputs
    }
    for op in whole.ops:
        args = [new[x.index] if isinstance(x, DTensor) else x for x in op.inputs]
        attrs = dict(op.attrs)
        if op.name == "reshape":
            attrs["dims"] = tuple(small[d] for d in attrs["dims"])
        mean = attrs.get("kind") == "mean"
        y = out.apply(op.name, args, attrs | ({"kind": "sum"} if mean else {}))
        new[op.outputs[0].index] = out.mul(y, 1 / op.inputs[0].dims[attrs["dim"]]) if mean else y  # type: ignore[union-attr]
    out.mark_output(*(new[t.index] for t in whole.outputs))
    return out


def _block(block: BlockGraph, operands: Sequence[tuple[int, ...]]) -> BlockGraph:
    """Return a block graph whose axes are as long as the dims of its operands."""
    size: dict[str, int] = {a.split_axis: PARTS for a in block.axes if a.split_axis}
    inputs = []
    for i in block.inputs:
        for d, a in enumerate(i.axes):
            if a is not None:
                size[a] = (
                    sum(operands[s][d] for s in i.sources)
                    if a == i.joined
                    else operands[i.sources[0]][d]
                )
        inputs.append(
            replace(i, sizes=tuple(operands[s][i.axes.index(i.joined)] for s in i.sources))
            if i.joined
            else i
        )
    axes = tuple(replace(a, size=size.get(a.name, a.size)) for a in block.axes)
    return BlockGraph(axes, tuple(inputs), block.stages, block.outputs)


def ugraph(found: UGraph, small: Mapping[int, int]) -> KernelGraph:
    """Return the kernels of a found µGraph at reduced sizes."""
    out = KernelGraph()
    new = {
        t.index: out.new_input([small[d] for d in t.dims], t.dtype) for t in found.kernels.inputs
    }
    for op in found.kernels.ops:
        assert op.name == CUSTOMIZED and op.block is not None, (
            f"{op.name} is not a kernel that the search made"
        )
        operands = [new[x.index] for x in op.inputs if isinstance(x, DTensor)]
        made = out.customized(operands, _block(op.block, [t.dims for t in operands]))
        new |= {t.index: y for t, y in zip(op.outputs, made, strict=True)}
    out.mark_output(*(new[t.index] for t in found.kernels.outputs))
    return out


def run(kernels: KernelGraph, inputs: Sequence[torch.Tensor], pieces: int) -> list[torch.Tensor]:
    """Run block graphs one after another in float64, with grid and loop axes cut in `pieces`."""
    values = {t.index: x for t, x in zip(kernels.inputs, inputs, strict=True)}
    for op in kernels.ops:
        assert op.block is not None
        results = run_block_graph(
            op.block,
            [values[x.index] for x in op.inputs if isinstance(x, DTensor)],  # type: ignore[arg-type]
            TorchAlgebra(torch.float64),
            pieces,
        )
        values |= {t.index: y for t, y in zip(op.outputs, results, strict=True)}
    return [values[t.index] for t in kernels.outputs]


def distance(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """Return the largest error, relative to the scale of each output.

    It is inf if a result is not finite or has another shape.
    """
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        if a.shape != b.shape or not bool(torch.isfinite(a).all()):
            return math.inf
        worst = max(worst, float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)))
    return worst
