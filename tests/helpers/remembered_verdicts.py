"""Prove and check each µGraph once in the tests of a process.

A verdict depends on the µGraph and the seed only. Tests of searches, caches and options search the
same programs again and again, and most of their time is spent on verdicts that are known. The tests
of verify/ do not use this.
"""

from __future__ import annotations

from typing import Any

import pytest

from mirage_hf.graph import json_format
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.verify import accept
from mirage_hf.verify.field_proof import prove
from mirage_hf.verify.numeric import judge_by_torch
from mirage_hf.verify.verdict import Verdict

_verdicts: dict[tuple[Any, ...], Verdict] = {}


def _key(ugraph: UGraph) -> tuple[str, ...]:
    program, kernels = ugraph.program, ugraph.kernels
    return tuple(json_format.digest(json_format.graph_to_dict(g)) for g in (program, kernels))


def forget() -> None:
    """Prove and check all again, from now on."""
    _verdicts.clear()


def remember(patch: pytest.MonkeyPatch) -> None:
    """Let `accept` and `examine` take verdicts that are known."""

    def remembered_proof(ugraph: UGraph, *, seed: int = 0) -> Verdict:
        key = ("proof", *_key(ugraph), seed)
        if key not in _verdicts:
            _verdicts[key] = prove(ugraph, seed=seed)
        return _verdicts[key]

    def remembered_check(ugraph: UGraph, checks: Any, tensor_cores: bool) -> Verdict:
        key = ("check", *_key(ugraph), tensor_cores)
        if key not in _verdicts:
            _verdicts[key] = judge_by_torch(ugraph, checks, tensor_cores)
        return _verdicts[key]

    patch.setattr(accept, "prove", remembered_proof)
    patch.setattr(accept, "judge_by_torch", remembered_check)
