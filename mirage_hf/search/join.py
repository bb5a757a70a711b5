"""Join products of one tensor with several weights, so that q, k and v read their row once.

The search takes a concat of inputs as one input with several sources, so no weight moves. The
results are slices of the joined product, which are views. So this applies only to products that a
window returns and does not use itself. Joining is correct because x·[V W] = [x·V x·W].
"""

from __future__ import annotations

from dataclasses import dataclass

from mirage_hf.graph.kernel import DTensor, KernelGraph, KernelOp
from mirage_hf.graph.rebuild import inline
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.search.dim_classes import tensors_of


@dataclass(frozen=True)
class JoinedOutput:
    """Where an output of the program is in the joined graph.

    It is an output of that graph, or the columns [start, stop) of one.
    """

    output: int
    columns: tuple[int, int] | None = None


@dataclass(frozen=True)
class JoinedProducts:
    """A program, and the same program with products joined.

    Attributes:
        program: The program as it is.
        graph: The program that returns joined products.
        outputs: Where each output of `program` is.
    """

    program: KernelGraph
    graph: KernelGraph
    outputs: tuple[JoinedOutput, ...]

    def split(self, ugraph: UGraph) -> UGraph:
        """Return the µGraph of `program` for one of `graph`: the same kernels and some views."""
        kernels = KernelGraph()
        inputs = [kernels.input_like(t) for t in self.program.inputs]
        made = inline(kernels, ugraph.kernels, inputs)
        outputs = []
        for place in self.outputs:
            t = made[place.output]
            if place.columns is not None:
                t = kernels.slice(t, len(t.dims) - 1, *place.columns)
            outputs.append(t)
        kernels.mark_output(*outputs)
        return UGraph(self.program, kernels)


def join(graph: KernelGraph) -> JoinedProducts | None:
    """Join the products of one tensor with weights that `graph` returns and does not use.

    Returns:
        Both programs, or None if there are no two such products.
    """
    groups = _products_to_join(graph)
    if not groups or any(op.block is not None for op in graph.ops):
        return None
    joined = KernelGraph()
    new = {t.index: joined.input_like(t) for t in graph.inputs}
    taken = [op for products in groups for op in products]
    for op in graph.ops:
        if op not in taken:
            args = [new[x.index] if isinstance(x, DTensor) else x for x in op.inputs]
            new[op.outputs[0].index] = joined.apply(op.name, args, dict(op.attrs))
    returned: list[DTensor] = []
    places: dict[int, JoinedOutput] = {}
    for products in groups:
        weights = [new[tensors_of(op)[1].index] for op in products]
        start = 0
        for op, weight in zip(products, weights, strict=True):
            stop = start + weight.dims[1]
            places[op.outputs[0].index] = JoinedOutput(len(returned), (start, stop))
            start = stop
        left = new[tensors_of(products[0])[0].index]
        returned.append(joined.matmul(left, joined.concat(weights, 1)))
    for t in graph.outputs:
        if t.index not in places:
            places[t.index] = JoinedOutput(len(returned))
            returned.append(new[t.index])
    joined.mark_output(*returned)
    return JoinedProducts(graph, joined, tuple(places[t.index] for t in graph.outputs))


def _products_to_join(graph: KernelGraph) -> list[list[KernelOp]]:
    """Return groups of two or more products of one tensor that the graph only returns."""
    made = {t.index: op for op in graph.ops for t in op.outputs}
    read = {x.index for op in graph.ops for x in tensors_of(op)}
    groups: dict[tuple[int, str], list[KernelOp]] = {}
    for t in dict.fromkeys(graph.outputs):
        op = made.get(t.index)
        if op is None or op.name != "matmul" or t.index in read:
            continue
        left, right = tensors_of(op)
        maker = made.get(right.index)
        # A weight is an input, or an input permuted.
        is_weight = maker is None or (
            maker.name == "permute" and tensors_of(maker)[0].index not in made
        )
        if is_weight and len(right.dims) == 2:
            groups.setdefault((left.index, maker.name if maker else ""), []).append(op)
    return [products for products in groups.values() if len(products) > 1]
