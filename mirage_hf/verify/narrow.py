"""The same µGraph with its grid axes cut short, for numeric checks that should not move gigabytes."""

from __future__ import annotations

from mirage_hf import errors
from mirage_hf.graph.block import Role
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.ops import table
from mirage_hf.verify.shrink import Classes, Key, Misfit, small_block

_WIDE_AXIS = 32
"""Grid axes are narrowed to this many elements: more columns of the same matrix product show nothing new."""
_WIDE_BATCH = 2


def narrowed(ugraph: UGraph) -> UGraph | None:
    """The µGraph with the dims that its program reduces nowhere cut short, through program and kernels alike; None where that does
    not apply. Axes that anything is reduced over and numbers of parts keep their sizes."""
    if not ugraph.block_ops:
        return None
    try:
        classes = Classes(ugraph.program, ugraph.kernels)
        sizes = _sizes(classes, ugraph.program)
        graphs = [
            _rebuilt(classes, side, graph, sizes)
            for side, graph in (("program", ugraph.program), ("kernels", ugraph.kernels))
        ]
    except (Misfit, errors.MirageError):
        return None  # dims that do not meet, or an op that names the full sizes
    program, kernels = graphs
    if [(t.dims, t.dtype) for t in program.outputs] != [(t.dims, t.dtype) for t in kernels.outputs]:
        return None
    return UGraph(program, kernels)


def _sizes(classes: Classes, program: KernelGraph) -> dict[Key, int]:
    """A size per class, by what the program does with it, so that all candidates of a program share one reference. Errors: Misfit."""
    full = classes.roots()
    wide: dict[Key, int] = {}
    kept = {
        classes.find(k)
        for k in (
            *classes.reduced,
            *classes.fixed,
            *(key for pair in classes.dealt for key in pair),
        )
    }
    for number, op in enumerate(program.ops):
        if op.name == "matmul":
            a, b = (t for t in op.inputs if isinstance(t, DTensor))
            kept |= {
                classes.find(("program", a.index, len(a.dims) - 1)),
                classes.find(("program", b.index, len(b.dims) - 2)),
            }
            for t in (a, b, *op.outputs):
                wide |= {
                    classes.find(("program", t.index, d)): _WIDE_BATCH
                    for d in range(len(t.dims) - 2)
                }
        if op.block is not None:
            kept |= {
                classes.find(("program", number, x.name))
                for x in op.block.axes
                if x.role is not Role.GRID
            }
    sizes = {
        root: n if root in kept else min(n, wide.get(root, _WIDE_AXIS)) for root, n in full.items()
    }
    for r in (
        classes.rules
    ):  # a dim that is joined is as long as its parts; what is split or cut keeps its size
        total, parts = classes.find(r.total), [classes.find(p) for p in r.parts]
        if r.kind == "sum" and total not in kept and not kept & set(parts):
            for p in parts:
                sizes[p] = min(full[p], max(wide.get(total, _WIDE_AXIS) // 2, 1))
            sizes[total] = sum(sizes[p] for p in parts)
        else:
            kept |= {total, *parts}
            sizes |= {root: full[root] for root in (total, *parts)}
    for r in classes.rules:
        if r.kind == "sum" and sizes[classes.find(r.total)] != sum(
            sizes[classes.find(p)] for p in r.parts
        ):
            raise Misfit("a dim is joined in two ways")
        if r.kind == "product" and any(
            sizes[root] != full[root] for root in map(classes.find, (r.total, *r.parts))
        ):
            raise Misfit("a dim is split")
    return sizes


def _rebuilt(classes: Classes, side: str, graph: KernelGraph, sizes: dict[Key, int]) -> KernelGraph:
    """The graph at other sizes, all tensors row-major. Errors: GraphError where an op names the full sizes, Misfit."""
    small = KernelGraph()

    def dims(t: DTensor) -> tuple[int, ...]:
        return tuple(sizes[classes.find((side, t.index, d))] for d in range(len(t.dims)))

    new = {t.index: small.new_input(dims(t), t.dtype, name=t.name) for t in graph.inputs}
    for number, op in enumerate(graph.ops):
        args = [new[x.index] if isinstance(x, DTensor) else x for x in op.inputs]
        attrs = dict(op.attrs)
        if op.name == "slice" and dims(op.inputs[0]) != op.inputs[0].dims:  # type: ignore[union-attr, arg-type]
            raise Misfit("a slice names full sizes")
        if op.name == "reshape":
            attrs["dims"] = dims(op.outputs[0])
        if op.name == CUSTOMIZED:
            made = small.customized(args, small_block(classes, side, number, op, sizes))  # type: ignore[arg-type]
        else:
            made = [small.apply(table.lookup(op.name).name, args, attrs)]
        new |= {t.index: y for t, y in zip(op.outputs, made, strict=True)}
    small.mark_output(*(new[t.index] for t in graph.outputs))
    return small
