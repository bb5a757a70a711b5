"""The names of the parameters that groups read, for reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mirage_hf.trace.record import Held, Value
from mirage_hf.trace.step_plan import StepPlan
from mirage_hf.trace.term import Term


def weight_path(plan: StepPlan, weight: Term, paths: Mapping[int, str]) -> str:
    """Return the name of the parameter that a weight is, or is a view of."""
    assert weight.weight is not None
    if weight.weight.coded is not None:
        return weight.weight.coded.path
    source = weight.weight.source
    while isinstance(source, Value):
        (source,) = plan.recording.nodes[source.node].operands
    assert isinstance(source, Held)
    return paths.get(id(source.tensor), "a constant").removesuffix(".weight")


def common_module(names: Sequence[str]) -> tuple[str, str]:
    """Return the module that has all these parameters, and their names in it."""
    split = [name.split(".") for name in names]
    depth = 0
    while all(len(s) > depth + 1 and s[depth] == split[0][depth] for s in split):
        depth += 1
    parts = dict.fromkeys(".".join(s[depth:]) for s in split)
    return ".".join(split[0][:depth]), ", ".join(parts)
