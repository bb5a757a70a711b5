"""Attention of a decoding step as one recorded node.

While a step is recorded, transformers' "sdpa" attention calls the op `mirage_hf::cached_attention`
in place of repeating the keys of each group of heads. Calls of other threads run as before.

In a step of several tokens of each text, each token is a row of its own. The op
`mirage_hf::append_tokens` appends the keys of all rows of a text to its one memory. The op
`mirage_hf::for_each_token` gives the model a row of that memory for each token, and likewise of
what an encoder gave. The recorded attention reads the memory itself, so nothing is copied.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_recording = threading.local()
_lock = threading.Lock()

library.define(
    "mirage_hf::cached_attention",
    "(Tensor query, Tensor keys, Tensor values, Tensor? mask, float? scale) -> Tensor",
)


def _attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Return attention (rows, heads, 1, d) of one query in each row.

    Keys and values have a row for each row, or for each text. The mask has one for either, or one
    for all. The rows of a text's tokens follow each other. Its tokens, and the heads that share
    keys, are taken for the queries of one head, so no key is copied.
    """
    rows, heads, _, width = query.shape
    texts, kv_heads = keys.shape[:2]
    tokens, group = rows // texts, heads // kv_heads
    grouped = query.reshape(texts, tokens, kv_heads, group, width).transpose(1, 2).flatten(2, 3)
    if mask is not None and tokens > 1 and len(mask) == rows:
        of_tokens = mask.unflatten(0, (texts, tokens)).transpose(1, 2)
        mask = of_tokens.expand(-1, -1, -1, group, -1).flatten(2, 3)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    out = out.unflatten(2, (tokens, group)).transpose(1, 2)
    return out.reshape(rows, heads, 1, values.shape[-1])


library.impl("mirage_hf::cached_attention", "CompositeExplicitAutograd", _attention)


@library.register_fake("mirage_hf::cached_attention")
def _fake(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    return query.new_empty((*query.shape[:-1], values.shape[-1]))


library.define(
    "mirage_hf::append_tokens",
    "(Tensor(a!) memory, int dim, Tensor slots, Tensor new) -> Tensor(a!)",
)


def append_tokens(memory: Tensor, dim: int, slots: Tensor, new: Tensor) -> Tensor:
    """Append the keys of several tokens of each text, and return the memory.

    Args:
        memory: Keys of all texts (texts, heads, slots, d).
        dim: The dim of slots, 2.
        slots: The slot of each token (texts, tokens).
        new: Their keys, a row for each token (texts · tokens, heads, 1, d).
    """
    texts, tokens = slots.shape
    states = new.squeeze(dim).unflatten(0, (texts, tokens)).transpose(1, 2)
    return memory.scatter_(dim, slots[:, None, :, None].expand_as(states), states)


library.impl("mirage_hf::append_tokens", "CompositeExplicitAutograd", append_tokens)


@library.register_fake("mirage_hf::append_tokens")
def _fake_append(memory: Tensor, dim: int, slots: Tensor, new: Tensor) -> Tensor:
    return memory


library.define("mirage_hf::for_each_token", "(Tensor x, int tokens) -> Tensor")
library.impl(
    "mirage_hf::for_each_token",
    "CompositeExplicitAutograd",
    lambda x, tokens: x.repeat_interleave(tokens, 0),
)


@library.register_fake("mirage_hf::for_each_token")
def _fake_for_each_token(x: Tensor, tokens: int) -> Tensor:
    return x.new_empty((len(x) * tokens, *x.shape[1:]))


def for_each_token(x: Tensor, tokens: int) -> Tensor:
    """Return a tensor (texts, …) with a row for each of so many tokens of a text.

    While a step is recorded, attention finds what the rows of a text share.
    """
    if tokens == 1:
        return x
    rows: Tensor = torch.ops.mirage_hf.for_each_token(x, tokens)
    if getattr(_recording, "active", False):
        _recording.of_texts[id(rows)] = rows, x  # ids stay unique while the objects live
        masks, storage = _recording.masks, x.untyped_storage()._cdata
        if storage in masks:
            mask = masks[storage]
            if id(mask) not in _recording.of_rows:
                _recording.of_rows[id(mask)] = mask, for_each_token(mask, tokens)
            masks[rows.untyped_storage()._cdata] = _recording.of_rows[id(mask)][1]
    return rows


def _shared(x: Any) -> Any:
    """Return what rows of a text share, if `x` has it for each of them, else `x`."""
    return _recording.of_texts.get(id(x), (x, x))[1]


def _traced_sdpa(stock: Any) -> Any:
    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call the op while this thread records a step, else what was registered before."""
        if not getattr(_recording, "active", False):
            return stock(module, query, key, value, attention_mask, *args, **kwargs)
        given = _recording.masks.get(key.untyped_storage()._cdata, attention_mask)
        mask = _with_bias(given, kwargs.get("position_bias"))
        extra = any(kwargs.get(name) is not None for name in ("softcap", "s_aux"))
        one_mask = mask is None or (mask.dim() == 4 and mask.shape[1] in (1, key.shape[1]))
        by_heads = mask is not None and mask.shape[1] > 1 and key.shape[1] != query.shape[1]
        unknown = args or extra or not one_mask or by_heads or kwargs.get("dropout")
        if unknown or query.shape[2] != 1:
            return stock(module, query, key, value, given, *args, **kwargs)
        shared = _shared(key), _shared(value)
        if all(len(x) < len(query) for x in shared):
            key, value, mask = *shared, _shared(mask)
        out = torch.ops.mirage_hf.cached_attention(query, key, value, mask, kwargs.get("scaling"))
        return out.transpose(1, 2).contiguous(), None

    # other threads' calls of generate ask whether the function is transformers' own
    attention.__module__ = stock.__module__
    return attention


def _with_bias(mask: Any, bias: Tensor | None) -> Any:
    """Return a mask with a bias on scores, made once for all layers that share both."""
    if bias is None:
        return mask
    made = _recording.with_bias
    if (id(mask), id(bias)) not in made:
        if mask is None:
            both = bias
        elif mask.dtype == torch.bool:
            both = torch.where(mask, bias, torch.finfo(bias.dtype).min)
        else:
            both = bias + mask
        made[id(mask), id(bias)] = both, mask, bias  # ids stay unique while the objects live
    return made[id(mask), id(bias)][0]


@contextmanager
def masked_keys(keys: Sequence[Tensor], mask: Tensor | None) -> Iterator[None]:
    """Let attention over these keys take this mask, while this thread records a step.

    A model may be given fewer keys than there are slots, and then makes no mask for the others.
    """
    _recording.masks = {x.untyped_storage()._cdata: mask for x in keys}
    try:
        yield
    finally:
        _recording.masks = {}


@contextmanager
def attention_as_one_node() -> Iterator[None]:
    """Let this thread's calls of "sdpa" attention be one op each."""
    with _lock:  # one recording at a time, or the functions would be put back in a wrong order
        own = ALL_ATTENTION_FUNCTIONS._local_mapping
        stock, was_own = ALL_ATTENTION_FUNCTIONS["sdpa"], "sdpa" in own
        own["sdpa"] = _traced_sdpa(stock)
        _recording.active, _recording.masks, _recording.with_bias = True, {}, {}
        _recording.of_texts, _recording.of_rows = {}, {}
        try:
            yield
        finally:
            _recording.active, _recording.with_bias = False, {}
            _recording.of_texts, _recording.of_rows = {}, {}
            if was_own:
                own["sdpa"] = stock
            else:  # else it would hide what is registered later
                del own["sdpa"]
