"""Attention over a cache: what is recognized, and where its queries, keys and values come from."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import mirage_hf.trace.attention  # noqa: F401 (defines the op)
from mirage_hf.trace.cached_attention import CachedAttention, find_attention
from mirage_hf.trace.record import Recording, Value
from tests.helpers.traced_functions import normal, recorded

HEADS, KV_HEADS, DIM, SLOTS = 4, 2, 8, 16
NORM = torch.ones(DIM)


def heads(x: Tensor, count: int) -> Tensor:
    return x.view(x.shape[0], 1, count, DIM).transpose(1, 2)


def normed(x: Tensor) -> Tensor:
    return NORM * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = torch.cat((-x[..., DIM // 2 :], x[..., : DIM // 2]), -1)
    return x * cos[:, None] + turned * sin[:, None]


def rope_of_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * cos[:, None] + turned * sin[:, None]


def attend(q: Tensor, k: Tensor, v: Tensor, **given: Tensor) -> Tensor:
    """Append to the cache and attend, as a recorded step does."""
    keys = given["keys.0"].index_copy_(2, given["length"], k)
    values = given["values.0"].index_copy_(2, given["length"], v)
    return torch.ops.mirage_hf.cached_attention(q, keys, values, given["mask.full"], None)


def plain(q: Tensor, k: Tensor, v: Tensor, **given: Tensor) -> Tensor:
    return attend(heads(q, HEADS), heads(k, KV_HEADS), heads(v, KV_HEADS), **given)


def rotated(q: Tensor, k: Tensor, v: Tensor, **given: Tensor) -> Tensor:
    table = given["cos"], given["sin"]
    q, k = rope(heads(q, HEADS), *table), rope(heads(k, KV_HEADS), *table)
    return attend(q, k, heads(v, KV_HEADS), **given)


def keys_are_multiplied(q: Tensor, k: Tensor, v: Tensor, **given: Tensor) -> Tensor:
    """As in Falcon-H1."""
    table = given["cos"], given["sin"]
    q, k = rope(heads(q, HEADS), *table), rope(heads(k, KV_HEADS) * 0.5, *table)
    return attend(q, k, heads(v, KV_HEADS), **given)


def queries_have_gates(q: Tensor, k: Tensor, v: Tensor, **given: Tensor) -> Tensor:
    """As in Qwen3.5: each head of q lies beside the gate of that head."""
    table = given["cos"], given["sin"]
    both = torch.cat((q, q), -1).view(q.shape[0], 1, HEADS, 2 * DIM)
    own, gate = both.chunk(2, -1)
    q = normed(own).transpose(1, 2)
    k = normed(k.view(k.shape[0], 1, KV_HEADS, DIM)).transpose(1, 2)
    y = attend(rope(q, *table), rope(k, *table), heads(v, KV_HEADS), **given)
    return y * gate.transpose(1, 2).sigmoid()


def pairs_are_rotated(q: Tensor, k: Tensor, v: Tensor, **given: Tensor) -> Tensor:
    table = given["cos"], given["sin"]
    q, k = (rope_of_pairs(heads(x, n), *table) for x, n in ((q, HEADS), (k, KV_HEADS)))
    return attend(q, k, heads(v, KV_HEADS), **given)


def only_queries_are_rotated(q: Tensor, k: Tensor, v: Tensor, **given: Tensor) -> Tensor:
    q = rope(heads(q, HEADS), given["cos"], given["sin"])
    return attend(q, heads(k, KV_HEADS), heads(v, KV_HEADS), **given)


def another_dtype(q: Tensor, k: Tensor, v: Tensor, **given: Tensor) -> Tensor:
    """Rows are float32, and what is appended is not. The rows cannot be the kernel's input."""
    q, k, v = (x.float() for x in (q, k, v))
    parts = ((q, HEADS), (k, KV_HEADS), (v, KV_HEADS))
    return attend(*(heads(x, n).to(torch.bfloat16) for x, n in parts), **given)


def found(function: Callable[..., Tensor], rows: int, dtype=torch.float32) -> CachedAttention:
    """Return the attention of a function."""
    return attention_of(step_of(function, rows, dtype), rows)


def attention_of(recording: Recording, rows: int) -> CachedAttention:
    (one,) = find_attention(recording, rows)
    assert (one.q.heads, one.k.heads, one.v.heads) == (HEADS, KV_HEADS, KV_HEADS)
    return one


def step_of(function: Callable[..., Tensor], rows: int, dtype=torch.float32) -> Recording:
    """Record a function as a step."""
    inputs = {
        "q": normal(rows, 1, HEADS * DIM, dtype=dtype),
        "k": normal(rows, 1, KV_HEADS * DIM, seed=1, dtype=dtype),
        "v": normal(rows, 1, KV_HEADS * DIM, seed=2, dtype=dtype),
        "cos": normal(rows, 1, DIM, seed=3, dtype=dtype),
        "sin": normal(rows, 1, DIM, seed=4, dtype=dtype),
        "keys.0": torch.zeros(rows, KV_HEADS, SLOTS, DIM, dtype=dtype),
        "values.0": torch.zeros(rows, KV_HEADS, SLOTS, DIM, dtype=dtype),
        "length": torch.tensor([3]),
        "mask.full": torch.zeros(rows, 1, 1, SLOTS, dtype=dtype),
    }

    def step(**given: Tensor) -> Tensor:
        # the kernel's rows are results of products, no inputs
        made = {name: given.pop(name) * 1.0 for name in ("q", "k", "v")}
        return function(**made, **given)

    return recorded(step, inputs)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("function", "has_rope", "has_norm"),
    [
        (plain, False, False),
        (rotated, True, False),
        (keys_are_multiplied, True, False),
        (queries_have_gates, True, True),
        (pairs_are_rotated, False, False),
        (only_queries_are_rotated, False, False),
    ],
)
def test_attention_begins_where_it_can(
    function: Callable[..., Tensor], rows: int, has_rope: bool, has_norm: bool
) -> None:
    one = found(function, rows)
    assert [x.cos is not None for x in (one.q, one.k)] == [has_rope] * 2
    assert [x.norm is not None for x in (one.q, one.k)] == [has_norm] * 2


def test_rows_have_the_dtype_of_the_cache() -> None:
    one = found(another_dtype, 3, torch.bfloat16)
    assert one.dtype == torch.bfloat16 and one.q.cos is None


def test_layers_that_share_keys_are_left_to_torch() -> None:
    """As in Gemma 3n: a kernel appends the keys that it reads, and these were appended before."""

    def twice(q: Tensor, k: Tensor, v: Tensor, **given: Tensor) -> Tensor:
        q, k, v = heads(q, HEADS), heads(k, KV_HEADS), heads(v, KV_HEADS)
        keys = given["keys.0"].index_copy_(2, given["length"], k)
        values = given["values.0"].index_copy_(2, given["length"], v)
        for _ in range(2):
            q = torch.ops.mirage_hf.cached_attention(q, keys, values, given["mask.full"], None)
        return q

    one = found(twice, 1)  # `found` takes no more than one
    assert isinstance(one.q.rows, Value) and one.q.rows.node < min(one.appends)


def test_attention_over_keys_that_were_read_is_left_to_torch() -> None:
    def early(q: Tensor, k: Tensor, v: Tensor, **given: Tensor) -> Tensor:
        keys = given["keys.0"].index_copy_(2, given["length"], heads(k, KV_HEADS))
        values = given["values.0"].index_copy_(2, given["length"], heads(v, KV_HEADS))
        q = heads(q + keys.mean(), HEADS)
        return torch.ops.mirage_hf.cached_attention(q, keys, values, given["mask.full"], None)

    with pytest.raises(ValueError, match="not enough values"):
        found(early, 1)


def test_a_copy_of_what_changes_is_not_looked_through() -> None:
    def changed(q: Tensor, k: Tensor, v: Tensor, **given: Tensor) -> Tensor:
        base = heads(k, KV_HEADS) * 2.0
        copy = base.clone()
        base.mul_(7)
        return attend(heads(q, HEADS), copy, heads(v, KV_HEADS), **given) + base.sum()

    recording = step_of(changed, 3)
    assert recording.nodes[attention_of(recording, 3).k.rows.node].name == "aten.clone"
