"""Products of one tensor with several weights as one product with the weights end to end: q, k and v read their row once.

The search takes a concat of inputs as one input with several sources, and moves no weight. The results are slices of the
joined product, which are views, so this applies to products that a window returns and does not use itself. x·[V W] = [x·V x·W]
is why the joined program equals the given one.
"""

from __future__ import annotations

from dataclasses import dataclass

from mirage_hf.graph.kernel import DTensor, KernelGraph, KernelOp, inline
from mirage_hf.graph.ugraph import UGraph


@dataclass(frozen=True)
class Joined:
    """`graph` returns joined products; each output of `program` is (an output of `graph`, its columns or None for all of it)."""

    program: KernelGraph
    graph: KernelGraph
    outputs: tuple[tuple[int, tuple[int, int] | None], ...]

    def split(self, ugraph: UGraph) -> UGraph:
        """The µGraph of `program` for one of `graph`: the same kernels, and a view for each slice."""
        kernels = KernelGraph()
        made = inline(kernels, ugraph.kernels, [kernels.input_like(t) for t in self.program.inputs])
        kernels.mark_output(
            *(
                made[n] if at is None else kernels.slice(made[n], len(made[n].dims) - 1, *at)
                for n, at in self.outputs
            )
        )
        return UGraph(self.program, kernels)


def join(graph: KernelGraph) -> Joined | None:
    """Join the products of one tensor with weights that `graph` only returns; None where there are no two."""
    made = {t.index: op for op in graph.ops for t in op.outputs}
    read = {x.index for op in graph.ops for x in op.inputs if isinstance(x, DTensor)}
    groups: dict[tuple[object, ...], list[KernelOp]] = {}
    for t in dict.fromkeys(graph.outputs):
        op = made.get(t.index)
        if op is None or op.name != "matmul" or t.index in read:
            continue
        left, right = op.inputs
        assert isinstance(left, DTensor) and isinstance(right, DTensor)
        by = made.get(right.index)  # a weight: an input, or an input permuted
        is_weight = by is None or (
            by.name == "permute"
            and not any(isinstance(x, DTensor) and x.index in made for x in by.inputs)
        )
        if len(right.dims) == 2 and is_weight:
            groups.setdefault((left.index, by.name if by else ""), []).append(op)
    joins = [ops for ops in groups.values() if len(ops) > 1]
    if not joins:
        return None
    out = KernelGraph()
    new = {t.index: out.input_like(t) for t in graph.inputs}
    apart = [op for ops in joins for op in ops]
    for op in graph.ops:
        if op.block is not None:
            return None
        if op not in apart:
            args = [new[x.index] if isinstance(x, DTensor) else x for x in op.inputs]
            new[op.outputs[0].index] = out.apply(op.name, args, dict(op.attrs))
    returned: list[DTensor] = []
    place: dict[int, tuple[int, tuple[int, int] | None]] = {}
    for ops in joins:
        weights = [new[x.index] for op in ops for x in op.inputs[1:] if isinstance(x, DTensor)]
        left = ops[0].inputs[0]
        assert isinstance(left, DTensor)
        start = 0
        for op, w in zip(ops, weights, strict=True):
            place[op.outputs[0].index] = (len(returned), (start, start + w.dims[1]))
            start += w.dims[1]
        returned.append(out.matmul(new[left.index], out.concat(weights, 1)))
    for t in graph.outputs:
        if t.index not in place:
            place[t.index] = (len(returned), None)
            returned.append(new[t.index])
    out.mark_output(*returned)
    return Joined(graph, out, tuple(place[t.index] for t in graph.outputs))
