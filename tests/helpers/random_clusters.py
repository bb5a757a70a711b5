"""Random block graphs whose blocks form clusters, made of random block graphs with splits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice

from mirage_hf.graph.block import BlockGraph, BlockOp, BlockOutput, Role, Stage
from mirage_hf.graph.kernel import KernelGraph
from tests.helpers.random_block_graphs import Unsuitable, random_graph


def graphs(number: int) -> list[tuple[int, KernelGraph]]:
    """Return seeds and kernel graphs of one block graph each."""
    return list(islice(_graphs(), number))


def _graphs() -> Iterator[tuple[int, KernelGraph]]:
    for seed in count():
        try:
            graph = random_graph(seed)
        except Unsuitable:
            continue
        block = graph.ops[0].block
        sizes = {a.name: a.size for a in block.axes}
        if sizes.get("p") not in (2, 4):
            continue
        clustered = _clustered(block, random.Random(seed))
        if clustered is not None:
            kernels = KernelGraph()
            operands = [kernels.input_like(t) for t in graph.ops[0].inputs]
            kernels.mark_output(*kernels.customized(operands, clustered))
            yield seed, kernels


def _clustered(block: BlockGraph, r: random.Random) -> BlockGraph | None:
    """Return a block graph whose splits are those of a cluster, which exchanges what it stored.

    None: it stores nothing that can be exchanged.
    """
    axes = tuple(replace(a, role=Role.CLUSTER) if a.name == "p" else a for a in block.axes)
    first, second = [], []
    outputs = []
    for n, o in enumerate(block.outputs):
        loops = any(a is not None and block.role(a) is Role.LOOP for a in o.axes)
        if "p" not in o.axes or loops or r.random() < 0.2:
            outputs.append(o)
            continue
        carried = block.carried[o.value]
        left = tuple(a for a in carried if a != "p")
        kept = tuple(None if a == "p" else a for a in o.axes)
        total = f"total{n}"
        first.append(BlockOp(total, r.choice(("sum", "max")), (o.value,), left, (), "p"))
        outputs.append(BlockOutput(total, kept, o.dtype))
        if r.random() < 0.5:  # a second exchange, of something that depends on the first
            second += [
                BlockOp(f"d{n}", "sub", (o.value, total), carried),
                BlockOp(f"t{n}", "tanh", (f"d{n}",), carried),
                BlockOp(f"again{n}", r.choice(("sum", "max")), (f"t{n}",), left, (), "p"),
                BlockOp(f"mixed{n}", "add", (f"again{n}", total), left),
            ]
            outputs.append(BlockOutput(r.choice((f"again{n}", f"mixed{n}")), kept, o.dtype))
            if r.random() < 0.5:
                outputs.append(BlockOutput(f"t{n}", o.axes, o.dtype))
    if not first:
        return None
    extra = [Stage(None, (*first, *second))]
    if second and r.random() < 0.5:
        extra = [Stage(None, tuple(first)), Stage(None, tuple(second))]
    return BlockGraph(axes, block.inputs, (*block.stages, *extra), tuple(outputs))
