"""Schedule and rank the µGraphs of a search for one size of their symbolic dims.

The µGraphs and their proofs hold for every size. Their schedules were chosen at the maximum. For
another size, each schedule keeps its kind of product (multiply-adds or tensor cores). Tiles are
clipped to the axes, and the cost model ranks the results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mirage_hf import errors
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.gpus import H200, Device
from mirage_hf.graph import symbolic
from mirage_hf.graph.kernel import CUSTOMIZED
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.tune import space
from mirage_hf.tune.cost import library_us
from mirage_hf.tune.refit import clip
from mirage_hf.tune.schedule_cost import estimated_us
from mirage_hf.verify.accept import Candidate

#: A dim of at most this size counts rows. Schedules for one row are kept along with those for the
#: maximum.
FEW = 64


@dataclass(frozen=True)
class Family:
    """A µGraph of a program with symbolic dims, and the schedules that other sizes start from."""

    ugraph: UGraph
    #: One tuple for each kind of product and each size, with a schedule for each block graph.
    kinds: tuple[tuple[Schedule, ...], ...]


def family(candidate: Candidate) -> Family:
    """Return the best schedules of each kind whose rounding holds, at the maximum and one row."""
    ugraph = candidate.ugraph
    kinds_of_product = [mma for mma in (False, True) if candidate.allows(mma)]
    one_row = {name: 1 for name, d in symbolic.dims_of(ugraph.program).items() if d <= FEW}
    kinds: list[tuple[Schedule, ...]] = []
    for sizes in ({}, one_row):
        ops = symbolic.ugraph_at(ugraph, sizes).block_ops
        ranked = [[s for s in space.schedules(op) if s.mma in kinds_of_product] for op in ops]
        if not all(ranked):
            continue
        for mma in kinds_of_product:
            kinds.append(tuple(_first_of_kind(schedules, mma) for schedules in ranked))
    return Family(ugraph, tuple(dict.fromkeys(kinds)))


def _first_of_kind(schedules: Sequence[Schedule], mma: bool) -> Schedule:
    """Return the first schedule of the kind, or the first of all."""
    return next((s for s in schedules if s.mma == mma), schedules[0])


def at(
    families: Sequence[Family], sizes: Mapping[str, int], device: Device = H200
) -> tuple[UGraph, ...]:
    """Return each family's µGraph at `sizes`, best estimate first.

    Raises:
        GraphError: The dims cannot have these sizes.
    """
    ranked: list[tuple[float, UGraph]] = []
    for f in families:
        ugraph = symbolic.ugraph_at(f.ugraph, sizes)
        options = [_scheduled(ugraph, kind, device) for kind in f.kinds]
        fitting = [o for o in options if o is not None]
        ranked.append(min(fitting, key=lambda o: o[0], default=(math.inf, ugraph)))
    return tuple(u for _, u in sorted(ranked, key=lambda r: r[0]))


def _scheduled(
    ugraph: UGraph, kind: Sequence[Schedule], device: Device
) -> tuple[float, UGraph] | None:
    """Return the estimate in µs and the µGraph with schedules of this kind.

    Returns None if an axis is too short for the kind.
    """
    schedules, us = [], 0.0
    for op, schedule in zip(ugraph.block_ops, kind, strict=True):
        assert op.block is not None
        schedules.append(clip(schedule, op.block))
        try:
            us += estimated_us(op, schedules[-1], device)
        except errors.CodegenError:
            return None
    us += sum(library_us(op, device) for op in ugraph.kernels.ops if op.name != CUSTOMIZED)
    return us, replace(ugraph, schedules=tuple(schedules))
