"""Pairs of a stock model and its optimized twin, whose steps of generate are compared."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, repeat_kv

from mirage_hf.api import optimize
from mirage_hf.patterns import PATTERNS
from tests.helpers.generate_comparison import assert_same, our_numbers
from tests.helpers.tiny_models import tiny, twin_of

#: Options of calls of generate, with everything that stock can return.
FULL = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "do_sample": False,
}

#: Options of short calls.
GREEDY = {"do_sample": False, "max_new_tokens": 12}

#: Options with which optimize() traces no steps: it does so only if no patterns are named.
UNTRACED = {"patterns": [*PATTERNS]}

#: What the report counts: steps by kernels, and steps of a model that has changed.
KERNELS, CHANGED = "all by kernels", "the model has changed since optimize()"


def no_kernels(batch: int) -> str:
    """Return what the report counts for a batch size that optimize() was not given."""
    return f"no kernels for a batch of {batch}; optimize(batch_sizes=…) makes them"


def pair(
    make: str | Callable[[], Any] = "llama", batch_sizes: tuple[int, ...] = (1, 3), **options: Any
) -> tuple[Any, Any]:
    """Return a stock model and its optimized copy.

    optimize() does not compare its modules with stock's unless a test asks for it, because the
    `resolved` fixture runs the programs themselves.
    """
    stock = tiny(make) if isinstance(make, str) else make()
    return stock, optimize(twin_of(stock), batch_sizes=batch_sizes, **{"verify": False, **options})


def shared(make: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """Let a function that makes pairs return the same pair for the same arguments.

    Tests that only call generate may share a pair. The counts of its report begin at 0 in each.
    """
    made = functools.cache(make)

    @functools.wraps(make)
    def pair_of(*args: Any, **options: Any) -> tuple[Any, Any]:
        stock, ours = made(*args, **options)
        runner = ours.generate.runner
        for counter in (runner.counts, runner.prefills, runner.selections, runner.drafts):
            counter.clear()
        return stock, ours

    return pair_of


def generated(model: Any, arguments: Any, seed: int = 5) -> Any:
    """Call generate with a seed. `arguments` may be a function that returns new ones."""
    torch.manual_seed(seed)
    return model.generate(**(arguments() if callable(arguments) else arguments))


def agree(stock: Any, ours: Any, arguments: Any, seed: int = 5, rounding: float = 2e-5) -> Any:
    """Assert that both models generate the same with one seed, and return our result."""
    with our_numbers():
        want = generated(stock, arguments, seed)
    got = generated(ours, arguments, seed)
    assert_same(want, got, rounding)
    return got


def steps(model: Any) -> dict[str, int]:
    """Return how the steps of calls ran so far, and how many calls ran them in this way."""
    return {
        what.removeprefix("step: "): n
        for what, n in model.mirage.report.decode.items()
        if what.startswith("step: ")
    }


def stocks(model: Any) -> list[str]:
    """Return the reasons for which calls ran stock."""
    return [what for what in model.mirage.report.decode if what.startswith("stock: ")]


class ScaledEmbedding(nn.Embedding):
    """An embedding that multiplies its rows by 3."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(ids)


class Capped(LlamaAttention):
    """Attention with a softcap on its scores."""

    def forward(
        self,
        hidden_states: Any,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> Any:
        batch, length, _width = hidden_states.shape
        q, k, v = (
            p(hidden_states).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        scores = 0.5 * torch.tanh(
            q @ repeat_kv(k, self.num_key_value_groups).transpose(2, 3) * self.scaling / 0.5
        )
        if attention_mask is None:
            attention_mask = torch.ones(length, k.shape[2], dtype=torch.bool).tril(
                k.shape[2] - length
            )
        kept = attention_mask.dtype == torch.bool
        weights = (
            scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
            if kept
            else scores + attention_mask
        ).softmax(-1)
        out = (
            (weights @ repeat_kv(v, self.num_key_value_groups))
            .transpose(1, 2)
            .reshape(batch, length, -1)
        )
        return self.o_proj(out), weights
