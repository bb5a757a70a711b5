"""The schedule of a kernel that is generated without one. `tune/space.py` registers the choice."""

from __future__ import annotations

from mirage_hf.codegen.placement import PlacedOp
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.graph.conveniences import Convenience

#: Return the cost model's first choice of a schedule for an op.
choose_schedule: Convenience[[PlacedOp], Schedule] = Convenience(
    "generating code without schedules", "mirage_hf.tune.space"
)
