"""Ragged axes: which inputs of a program are bounds [lo, hi), and of what."""

from __future__ import annotations

from dataclasses import dataclass

from mirage_hf.graph.kernel import DTensor, KernelGraph, ragged


@dataclass(frozen=True)
class Bounds:
    """Inputs `lo` and `hi` (positions) of a program, which bound dim `dim` of `x`, or an axis of block graph number `op`."""

    lo: int
    hi: int
    x: DTensor | None = None
    dim: int = 0
    op: int = -1
    axis: str = ""


def bounds_of(graph: KernelGraph) -> list[Bounds]:
    """The bounds that the ops of a graph read."""
    at = {t.index: n for n, t in enumerate(graph.inputs)}
    found: list[Bounds] = []

    def add(lo: object, hi: object, **what: object) -> None:
        if (
            isinstance(lo, DTensor)
            and isinstance(hi, DTensor)
            and lo.index in at
            and hi.index in at
        ):
            found.append(Bounds(at[lo.index], at[hi.index], **what))  # type: ignore[arg-type]

    for number, op in enumerate(graph.ops):
        if op.block is not None:
            for i in op.block.inputs:
                if i.bounds is not None:
                    add(*(op.inputs[s] for s in i.sources), op=number, axis=i.bounds)
        elif pair := ragged(op.name, op.inputs):
            x = op.inputs[0]
            assert isinstance(x, DTensor)
            add(*pair, x=x, dim=dict(op.attrs)["dim"] % len(x.dims))
    return found


def extent(program: KernelGraph, b: Bounds) -> int:
    """The size of the axis that is bounded."""
    block = program.ops[b.op].block if b.x is None else None
    return (
        b.x.dims[b.dim] if b.x is not None else block.axis(b.axis).size if block is not None else 0
    )
