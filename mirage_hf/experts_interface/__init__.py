"""`experts_implementation="mirage"`: experts that transformers' models ask for by name.

Up to 16 tokens run searched kernels, which read the weights of the chosen experts where they lie.
Everything else runs transformers' grouped products. Each reason is counted.
"""

from __future__ import annotations

from mirage_hf.experts_interface.experts import MOST_TOKENS, NAME, Experts, ExpertsReport

__all__ = ["MOST_TOKENS", "NAME", "Experts", "ExpertsReport", "experts_report"]

_experts = Experts()
_experts.register(NAME)


def experts_report() -> ExpertsReport:
    """Return what ran the experts of models with `experts_implementation="mirage"`.

    It counts the calls of this process so far.
    """
    return _experts.report()
