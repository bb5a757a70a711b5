"""The verdict on a µGraph: accepted with an error bound, or rejected with a reason."""

from __future__ import annotations

from dataclasses import dataclass

from mirage_hf.errors import Rejected


@dataclass(frozen=True)
class Accepted:
    """The verdict that a µGraph computes its program.

    Attributes:
        bound: An upper bound on the probability that the proof accepts kernels that compute
            something else.
        detail: What was measured, in words.
    """

    bound: float = 0.0
    detail: str = ""


#: What a proof or a numeric check returns.
Verdict = Accepted | Rejected
