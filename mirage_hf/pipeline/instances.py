"""A search's results for one size of their symbolic dims: rebuilt, scheduled and ranked again in milliseconds.

The µGraphs and their proofs hold for every size. Their schedules were chosen at the maximum: for another size each keeps its
kind (multiply-adds or tensor cores) and its tiles as far as the axes reach, and the cost model ranks what comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mirage_hf import errors
from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.graph import symbolic
from mirage_hf.graph.kernel import CUSTOMIZED
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.tune import space
from mirage_hf.tune.cost import H200, Device, estimate, library_us
from mirage_hf.tune.space import fitted


@dataclass(frozen=True)
class Family:
    """A µGraph of a program with symbolic dims, and schedules for its block graphs at the maximum: one tuple per kind."""

    ugraph: UGraph
    kinds: tuple[tuple[Schedule, ...], ...]


FEW = 64
"""A dim of at most this size counts rows: what suits one row is kept beside what suits the maximum."""


def family(ugraph: UGraph, allows: Callable[[UGraph, bool], bool]) -> Family:
    """The best schedules of each kind whose rounding holds, at the maximum and with one row."""
    may = [mma for mma in (False, True) if allows(ugraph, mma)]
    kinds = []
    for sizes in (
        {},
        {name: 1 for name, d in symbolic.dims_of(ugraph.program).items() if d <= FEW},
    ):
        ops = symbolic.ugraph_at(ugraph, sizes).block_ops
        ranked = [[s for s in space.schedules(op) if s.mma in may] for op in ops]
        if all(ranked):
            kinds += [
                tuple(
                    next((s for s in schedules if s.mma == mma), schedules[0])
                    for schedules in ranked
                )
                for mma in may
            ]
    return Family(ugraph, tuple(dict.fromkeys(kinds)))


def at(
    families: Sequence[Family], sizes: Mapping[str, int], device: Device = H200
) -> tuple[UGraph, ...]:
    """Each family's µGraph at `sizes`, best estimate first. Errors: GraphError for sizes that the dims cannot have."""
    ranked: list[tuple[float, UGraph]] = []
    for f in families:
        ugraph = symbolic.ugraph_at(f.ugraph, sizes)
        options = [_scheduled(ugraph, kind, device) for kind in f.kinds]
        ranked.append(
            min(
                (o for o in options if o is not None),
                key=lambda o: o[0],
                default=(float("inf"), ugraph),
            )
        )
    return tuple(u for _, u in sorted(ranked, key=lambda r: r[0]))


def _scheduled(
    ugraph: UGraph, kind: Sequence[Schedule], device: Device
) -> tuple[float, UGraph] | None:
    schedules, us = [], 0.0
    for op, schedule in zip(ugraph.block_ops, kind, strict=True):
        assert op.block is not None
        schedules.append(fitted(schedule, op.block))
        try:
            us += estimate(plan_kernel(op, schedules[-1]), device).us
        except errors.CodegenError:
            return None  # an axis is too short for this kind
    us += sum(library_us(op, device) for op in ugraph.kernels.ops if op.name != CUSTOMIZED)
    return us, replace(ugraph, schedules=tuple(schedules))
