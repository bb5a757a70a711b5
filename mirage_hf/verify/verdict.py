"""Verdicts: a candidate is accepted or refused, and it says why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Accepted:
    """`bound`: chance that unequal functions would pass the proof; `detail`: what was measured."""

    bound: float = 0.0
    detail: str = ""


@dataclass(frozen=True)
class Refused:
    """`reason` says which check failed, where and by how much."""

    reason: str


Verdict = Accepted | Refused
