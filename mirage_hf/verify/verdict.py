"""The verdict on a µGraph: accepted with an error bound, or rejected with a reason."""

from __future__ import annotations

from dataclasses import dataclass

from mirage_hf.errors import Rejected


@dataclass(frozen=True)
class Accepted:
    """The µGraph computes its program.

    Attributes:
        bound: The probability that the proof accepts functions that differ is at most this.
        detail: What was measured, in words.
    """

    bound: float = 0.0
    detail: str = ""


#: What a proof or a numeric check returns.
Verdict = Accepted | Rejected
