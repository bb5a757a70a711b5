"""Let experts run in a form that can be recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: The method that says how a model's experts run, in versions of transformers that have it.
_EXPERTS = "get_experts_implementation"


@contextmanager
def experts_of_fixed_shape(model: Any) -> Iterator[None]:
    """Let experts run in the form whose shapes do not depend on which experts are chosen.

    It is the one in which stock's generate runs steps on a GPU.
    """
    chosen = model.get_experts_implementation() if hasattr(model, _EXPERTS) else {}
    grouped = [name for name, kind in chosen.items() if kind == "grouped_mm"]
    if grouped:
        model.set_experts_implementation({**chosen, **dict.fromkeys(grouped, "batched_mm")})
    try:
        yield
    finally:
        if grouped:
            model.set_experts_implementation(chosen)
