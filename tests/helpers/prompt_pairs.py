"""Pairs of a stock model and its optimized twin, whose prompts are compared."""

from __future__ import annotations

from typing import Any

import pytest

from mirage_hf.api import optimize
from tests.helpers import generate_comparison, tiny_models
from tests.helpers.generate_comparison import assert_same, left_padded, prompt

#: Options of calls of generate: six tokens, with everything that stock can return.
FULL = {**generate_comparison.FULL, "max_new_tokens": 6}

#: Changes of a config that make every layer of three attend to all keys.
EVERY: dict[str, Any] = dict(layer_types=["full_attention"] * 3)

#: Models whose prompts run by kernels: a family, and changes of its config.
PROMPTED: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": EVERY,
    "llama, biases": dict(attention_bias=True, mlp_bias=True),
    "llama, gelu": dict(hidden_act="gelu"),
    "qwen3, eager": dict(**EVERY, attn_implementation="eager"),
    **{
        family: dict(num_hidden_layers=2)
        for family in ("granite", "gemma", "olmo2", "phi3", "smollm3", "glm4")
    },
    "gemma3": dict(layer_types=["full_attention"] * 2, num_hidden_layers=2),
}

#: Families whose layers are like another's. Only `make thorough` tries them everywhere.
ALIKE = ("granite", "gemma", "phi3", "smollm3", "glm4")

#: The names of PROMPTED, with those of ALIKE marked as thorough.
FEW = [
    pytest.param(name, marks=pytest.mark.thorough) if name in ALIKE else name for name in PROMPTED
]


def optimized(name: str, changes: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """Return a stock model and its optimized copy.

    Args:
        name: A family. What follows a comma is not read.
        changes: Changes of the family's config.
        options: Options of optimize().
    """
    model = tiny_models.tiny(name.partition(",")[0], **changes)
    given = {"batch_sizes": (1, 3), "verify": False, **options}
    return model, optimize(tiny_models.twin_of(model), **given)


def agree(stock: Any, ours: Any, batch: int, length: int) -> None:
    """Assert that both generate the same for a random prompt."""
    given = {"inputs": prompt(batch, length, seed=length), **FULL}
    assert_same(stock.generate(**given), ours.generate(**given))


def agree_padded(stock: Any, ours: Any, *lengths: int, **more: Any) -> None:
    """Assert that both generate the same for random prompts of these lengths, padded on the left.

    Args:
        stock: The stock model.
        ours: Its optimized copy.
        lengths: The number of tokens of each row.
        more: Further arguments of generate.
    """
    given = {**left_padded(lengths, seed=lengths[-1]), **FULL, **more}
    assert_same(stock.generate(**given), ours.generate(**given))
