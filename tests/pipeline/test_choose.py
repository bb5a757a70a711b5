"""The order in which the tuner tries the candidates of a search."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mirage_hf.pipeline import choose


def ordered(monkeypatch: pytest.MonkeyPatch, *named: tuple[str, int, float]) -> list[str]:
    """Return candidates in the order to tune them, given kinds, numbers of kernels and estimates.

    The name of a candidate is its kind and the rank of its estimate.
    """
    candidates: list[Any] = [
        SimpleNamespace(
            name=f"{kind}{n}", ugraph=SimpleNamespace(kind=kind, num_kernels=kernels), us=us
        )
        for n, (kind, kernels, us) in enumerate(named)
    ]

    def placed(ugraph: Any, early: bool) -> list[Any]:
        (op,) = (c for c in candidates if c.ugraph is ugraph)
        return [op]

    def schedules(op: Any, device: Any) -> list[Any]:
        return [] if op.us == float("inf") else [op]

    monkeypatch.setattr(choose, "place_kernels", placed)
    monkeypatch.setattr(choose.space, "obstacle", lambda ops: "")
    monkeypatch.setattr(choose, "permitted", lambda usable, streams: schedules)
    monkeypatch.setattr(choose, "replace", lambda schedule, trigger_early: schedule)
    monkeypatch.setattr(choose.schedule_cost, "estimated_us", lambda op, schedule: op.us)
    monkeypatch.setattr(choose, "kind_of", lambda ugraph: ugraph.kind)
    return [c.name for c in choose.promising(candidates)]  # type: ignore[attr-defined]


def test_a_single_kernel_of_another_kind_comes_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that loops, where the first ones hold all columns in registers."""
    held = [("held", 1, 37.6), ("held", 1, 37.7), ("held", 1, 37.8)]
    assert ordered(monkeypatch, *held, ("loop", 1, 37.9)) == ["held0", "loop3", "held1", "held2"]
    assert ordered(monkeypatch, held[0], ("loop", 1, 37.7), held[2]) == ["held0", "loop1", "held2"]
    none = float("inf")
    assert ordered(monkeypatch, *held, ("loop", 1, none)) == ["held0", "held1", "held2", "loop3"]


def test_pairs_of_three_kinds_come_fifth_at_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    single = [("held", 1, 10.0), ("loop", 1, 11.0), ("held", 1, 12.0), ("held", 1, 13.0)]
    pairs = [("a", 2, 20.0), ("b", 2, 21.0), ("a", 2, 22.0), ("c", 2, 23.0)]
    found = ordered(monkeypatch, *single, *pairs)
    assert found == ["held0", "loop1", "a4", "b5", "c7", "held2", "held3", "a6"]
