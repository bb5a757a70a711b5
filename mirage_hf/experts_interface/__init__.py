"""`experts_implementation="mirage"`: experts that transformers' models ask for by name.

Up to 16 tokens run searched kernels, which read the weights of the chosen experts where they lie.
Everything else runs transformers' grouped products. Each reason is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mirage_hf.experts_interface.experts import NAME, Experts, ExpertsReport, Resolve
from mirage_hf.trace.experts.op import MOST_TOKENS

__all__ = [
    "MOST_TOKENS",
    "NAME",
    "Experts",
    "ExpertsReport",
    "Resolve",
    "experts_by_kernels",
    "experts_report",
    "parts_with_default_experts",
]

_experts = Experts()
_experts.register(NAME)


@contextmanager
def experts_by_kernels(model: Any, tokens: int, resolve: Resolve | None = None) -> Iterator[bool]:
    """Let a model's experts run kernels, unless the user chose how they run.

    Args:
        model: The model.
        tokens: The tokens of each call. For more than kernels take, nothing changes.
        resolve: Finds the kernel of a program. None: as by name.

    Yields:
        Whether kernels may run.
    """
    own = parts_with_default_experts(model)
    if not own or tokens > MOST_TOKENS or model.device.type != _experts.device_type:
        yield False
        return
    chosen: dict[str, str] = model.get_experts_implementation()
    model.set_experts_implementation({**chosen, **dict.fromkeys(own, NAME)})
    try:
        with _experts.resolved_by(resolve):
            yield True
    finally:
        model.set_experts_implementation(chosen)


def parts_with_default_experts(model: Any) -> list[str]:
    """Return the parts of a model, by name in its config, whose experts no user has chosen."""
    chosen: dict[str, str] = getattr(model, "get_experts_implementation", dict)()
    return [name for name, kind in chosen.items() if kind in ("grouped_mm", "batched_mm")]


def experts_report() -> ExpertsReport:
    """Return what ran the experts of models with `experts_implementation="mirage"`.

    It counts the calls of this process so far.
    """
    return _experts.report()
