"""Choose a schedule for a kernel that is generated without one. `tune/space.py` registers how."""

from __future__ import annotations

from mirage_hf.codegen.placement import PlacedOp
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.graph.conveniences import Convenience

#: Returns the cost model's first choice of a schedule for an op.
choose_schedule: Convenience[[PlacedOp], Schedule] = Convenience(
    "generating code without schedules", "mirage_hf.tune.space"
)
