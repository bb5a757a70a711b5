"""Recognize attention over a cache in a recording, as the pattern `attention` computes it.

A layer's attention is recognized if it appends its new key and value to the cache. The kernel then
also computes the norm of heads and RoPE, if the model has them and they are of a known form. Others
are left to torch, and the kernel begins with the appends. Attention with biases stays torch's op.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mirage_hf.trace.order import needed_nodes
from mirage_hf.trace.record import Held, Input, Meta, Node, Recording, Value, readers_of
from mirage_hf.trace.sizes import fixed_shape
from mirage_hf.trace.term import Term
from mirage_hf.trace.terms import Terms

#: The op that attention is recorded as (trace/attention.py).
ATTENTION_OP = "mirage_hf.cached_attention"
_APPENDS = ("aten.index_copy_", "aten.scatter_", "mirage_hf.append_tokens")
_VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "view",
        "_unsafe_view",
        "unsqueeze",
        "squeeze",
        "transpose",
        "permute",
        "clone",
        "alias",
        "detach",
        "expand",
        "_to_copy",
    )
)


@dataclass(frozen=True)
class HeadNorm:
    """RMSNorm of each head.

    Attributes:
        weight: Its weight (d,).
        eps: Its epsilon.
        offset: What is added to the weight.
    """

    weight: Tensor
    eps: float
    offset: float


@dataclass(frozen=True)
class Projected:
    """Where q, k or v comes from.

    Attributes:
        rows: The tensor of all heads: (…, heads · d), or (…, heads, d) with dims of one element.
        heads: How many heads it has.
        norm: The norm of each head, if there is one.
        cos: RoPE's cos, if there is RoPE.
        sin: Likewise.
        rotary: How many elements of a head it rotates.
    """

    rows: Value
    heads: int
    norm: HeadNorm | None = None
    cos: Value | Input | None = None
    sin: Value | Input | None = None
    rotary: int = 0


@dataclass(frozen=True, eq=False)
class CachedAttention:
    """Attention of one layer: two appends, and what reads the cache.

    Attributes:
        layer: The number of the layer, whose cache is the inputs `keys.N` and `values.N`.
        appends: The nodes that append the new key and the new value.
        node: The node of attention.
        mask: The name of the input that is its mask.
        q: Where the query comes from.
        k: Where the new key comes from.
        v: Where the new value comes from.
        scale: What scores are multiplied by.
        head_dim: The elements of a head.
        dtype: The dtype of q, k and v.
        rope_dtype: The dtype of cos and sin.
        tokens: New tokens of each text. Each is a row.
    """

    layer: int
    appends: tuple[int, int]
    node: int
    mask: str
    q: Projected
    k: Projected
    v: Projected
    scale: float
    head_dim: int
    dtype: torch.dtype
    rope_dtype: torch.dtype
    tokens: int = 1

    @property
    def bounds(self) -> tuple[str, ...]:
        """The names of the bounds that it is given."""
        of_tokens = ("first", "last", "new_first", "new_last")
        return ("lo", "slot") if self.tokens == 1 else ("lo", "slot", *of_tokens)

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes of the block of the pattern `attention`."""
        norm = self.q.norm
        return {
            "kv_heads": self.k.heads,
            "group": self.q.heads // self.k.heads,
            "head_dim": self.head_dim,
            "scale": self.scale,
            "dtype": self.dtype,
            "norm": "rms" if norm else "",
            "eps": norm.eps if norm else 1e-6,
            "offset": norm.offset if norm else 0.0,
            "norm_bias": False,
            "rotary": self.q.rotary or self.head_dim,
            "rope_dtype": self.rope_dtype,
            "rope": "halves" if self.q.cos is not None else "",
            "softcap": None,
            "sinks": False,
            "packing": "parts",
        }


def find_attention(recording: Recording, rows: int) -> list[CachedAttention]:
    """Return the attention of each layer that the pattern `attention` computes.

    A kernel appends the keys that it reads. So attention over keys that something read before it,
    such as those of another layer, is left to torch.
    """
    finder = _Finder(recording, rows)
    readers, needed = readers_of(recording.nodes), needed_nodes(recording)
    found: list[CachedAttention] = []
    for number in range(len(recording.nodes)):
        one = finder.read(number)
        if one is None:
            continue
        of_keys = [[n for n in readers[Value(x)] if n in needed] for x in one.appends]
        if all(numbers[:1] == [number] for numbers in of_keys):
            found.append(one)
    return found


class _Finder:
    def __init__(self, recording: Recording, rows: int):
        self.recording, self.rows = recording, rows
        self._terms: dict[int, Terms] = {}

    def read(self, number: int) -> CachedAttention | None:
        """Return the attention that a node is, None if it is none or an unknown one."""
        node = self.recording.nodes[number]
        if node.name != ATTENTION_OP:
            return None
        query, keys, values, mask, scale = node.args
        appends = [self._append(x) for x in (keys, values)]
        mask_name = self._mask(mask)
        if None in appends or mask_name is None or not isinstance(query, Value):
            return None
        (key_node, layer, new_key), (value_node, value_layer, new_value) = appends  # type: ignore[misc]
        shape = fixed_shape(self._meta(query))
        key_shape, value_shape = (fixed_shape(self._meta(x)) for x in (new_key, new_value))
        if shape is None or key_shape is None or value_shape is None or layer != value_layer:
            return None
        heads, d = shape[1], shape[3]
        if d % 2 or key_shape != value_shape or key_shape[3] != d or heads % key_shape[1]:
            return None
        parts = [(query, heads), (new_key, key_shape[1]), (new_value, key_shape[1])]
        dtype = self._meta(query).dtype
        made = self._together([self._projected(x, count, d) for x, count in parts], dtype)
        made = made or self._together([self._as_it_is(x, count, d) for x, count in parts], dtype)
        if made is None:
            return None
        q, k, v = made
        rope_dtype = dtype if q.cos is None else self._meta(q.cos).dtype
        return CachedAttention(
            layer,
            (key_node, value_node),
            number,
            mask_name,
            q,
            k,
            v,
            float(d**-0.5 if scale is None else scale),
            d,
            dtype,
            rope_dtype,
            self._tokens(key_node),
        )

    def _meta(self, x: Any) -> Meta:
        return self.recording.meta(x)

    def _node(self, x: Any) -> Node | None:
        return self.recording.nodes[x.node] if isinstance(x, Value) else None

    def _append(self, x: Any) -> tuple[int, int, Value] | None:
        """Return the node that appends to a layer's cache, the layer, and what is appended."""
        node = self._node(x)
        if node is None or node.name not in _APPENDS or node.args[1] != 2:
            return None
        memory, new = node.args[0], node.args[3]
        if not isinstance(memory, Input) or not isinstance(new, Value):
            return None
        kind, _, layer = memory.name.partition(".")
        return (x.node, int(layer), new) if kind in ("keys", "values") else None

    def _tokens(self, append: int) -> int:
        """Return how many new tokens of each text are appended."""
        node = self.recording.nodes[append]
        if node.name != "mirage_hf.append_tokens":
            return 1
        return int(self._meta(node.args[2]).shape[1])

    def _mask(self, x: Any) -> str | None:
        """Return the name of the mask that a tensor is a view of."""
        while isinstance(x, Value):
            node = self.recording.nodes[x.node]
            same = self._meta(x).shape == self._meta(node.operands[0]).shape
            if not (node.name in _VIEWS or (node.name == "aten.slice" and same)):
                return None
            x = node.operands[0]
        return x.name if isinstance(x, Input) and x.name.startswith("mask.") else None

    # -- q, k and v

    def _projected(self, x: Value, heads: int, d: int) -> Projected | None:
        """Return where the tensor (b, heads, 1, d) comes from."""
        x = self._same(x)
        cos: Any = None
        sin: Any = None
        rotary = 0
        if (rotated := self._rope(x, d)) is not None:
            x, cos, sin, rotary = rotated
            x = self._same(x)
        norm = self._head_norm(x, heads, d)
        if norm is not None:
            x, head_norm = norm
            x = self._same(x)
        else:
            head_norm = None
        rows = self._rows_of(x, heads, d)
        if rows is not None:
            return Projected(rows, heads, head_norm, cos, sin, rotary)
        plain = self._as_it_is(x, heads, d)
        return plain and replace(plain, norm=head_norm, cos=cos, sin=sin, rotary=rotary)

    def _together(
        self, made: Sequence[Projected | None], dtype: torch.dtype
    ) -> tuple[Projected, Projected, Projected] | None:
        """Return q, k and v, None if one kernel cannot begin with them."""
        q, k, v = made
        if q is None or k is None or v is None or not _agree(q, k, v):
            return None
        same = all(self._meta(x.rows).dtype == dtype for x in (q, k, v))
        return (q, k, v) if same else None

    def _as_it_is(self, x: Any, heads: int, d: int) -> Projected | None:
        """Return a tensor of heads that torch makes, None if its dims are in another order."""
        if not isinstance(x, Value):
            return None
        shape = fixed_shape(self._meta(x))
        in_order = shape is not None and _squeezed(shape) == _squeezed((self.rows, heads, d))
        return Projected(x, heads) if in_order else None

    def _same(self, x: Any) -> Any:
        """Return the first tensor that has the same elements in the same order, by heads."""
        while isinstance(x, Value):
            node = self.recording.nodes[x.node]
            if node.name not in _VIEWS or not isinstance(node.args[0], (Value, Input)):
                return x
            if not self._keeps_order(node, x):
                return x
            copies = node.name in ("aten.clone", "aten._to_copy")
            if copies and self._meta(node.args[0]).storage in self.recording.changing:
                return x
            x = node.args[0]
        return x

    def _keeps_order(self, node: Node, x: Value) -> bool:
        """Return whether a view only adds, drops or moves dims of size 1."""
        source, shape = fixed_shape(self._meta(node.args[0])), fixed_shape(self._meta(x))
        if source is None or shape is None or _squeezed(source) != _squeezed(shape):
            return False
        if node.name == "aten.transpose":
            first, second = (dim % len(source) for dim in node.args[1:3])
            between = range(min(first, second), max(first, second) + 1)
            return sum(source[n] != 1 for n in between) <= 1
        if node.name == "aten.permute":
            kept = [n % len(source) for n in node.args[1] if source[n] != 1]
            return kept == sorted(kept)
        return True

    def _rope(self, x: Any, d: int) -> tuple[Any, Any, Any, int] | None:
        """Return what RoPE rotates, its cos and sin, and how many elements it rotates."""
        node = self._node(x)
        if node is None:
            return None
        if node.name == "aten.cat" and len(node.args[0]) == 2:  # the other elements stay
            rotated, rest = (self._same(t) for t in node.args[0])
            inner = self._rope(rotated, d)
            if inner is None:
                return None
            part, cos, sin, rotary = inner
            first, last = self._slice(part), self._slice(rest)
            if first is None or last is None or self._same(first[0]) != self._same(last[0]):
                return None
            if first[1:] != (0, rotary) or last[1] != rotary or last[2] < d:
                return None
            return first[0], cos, sin, rotary
        if node.name != "aten.add" or node.kwargs.get("alpha", 1) != 1:
            return None
        terms = [self._node(self._same(t)) for t in node.args[:2]]
        if any(t is None or t.name != "aten.mul" for t in terms):
            return None
        for straight, turned in (terms, terms[::-1]):
            assert straight is not None and turned is not None
            for n, m in ((0, 1), (1, 0)):
                for p, q in ((0, 1), (1, 0)):
                    source = self._half_turned(self._same(turned.args[p]))
                    if source is None or self._same(source) != self._same(straight.args[n]):
                        continue
                    cos, sin = self._same(straight.args[m]), self._same(turned.args[q])
                    width = self._width(straight.args[n])
                    if all(self._is_table(t, width) for t in (cos, sin)):
                        return straight.args[n], cos, sin, width
        return None

    def _width(self, x: Any) -> int:
        shape = fixed_shape(self._meta(x))
        return shape[-1] if shape else 0

    def _is_table(self, x: Any, width: int) -> bool:
        """Return whether a tensor has a number for each row and element of a head."""
        if not isinstance(x, (Value, Input)):
            return False
        shape = fixed_shape(self._meta(x))
        return shape is not None and shape[-1] == width and math.prod(shape) == self.rows * width

    def _slice(self, x: Any) -> tuple[Any, int, int] | None:
        """Return what a slice of the last dim is of, its start and its stop."""
        x = self._same(x)
        node = self._node(x)
        if node is None or node.name != "aten.slice" or len(node.args) < 4:
            return None
        source, dim, start, stop = node.args[:4]
        shape = fixed_shape(self._meta(source))
        if shape is None or dim not in (-1, len(shape) - 1) or len(node.args) > 4:
            return None
        return source, start or 0, min(stop, shape[-1])

    def _half_turned(self, x: Any) -> Any:
        """Return y if x is [−y's second half, y's first half]."""
        node = self._node(x)
        if node is None or node.name != "aten.cat" or len(node.args[0]) != 2:
            return None
        negative = self._node(self._same(node.args[0][0]))
        if negative is None or negative.name != "aten.neg":
            return None
        second, first = self._slice(negative.args[0]), self._slice(node.args[0][1])
        if second is None or first is None or self._same(second[0]) != self._same(first[0]):
            return None
        width = self._width(first[0])
        halves = (0, width // 2), (width // 2, width)
        return first[0] if (first[1:], second[1:]) == halves else None

    def _head_norm(self, x: Any, heads: int, d: int) -> tuple[Any, HeadNorm] | None:
        """Return what a norm of heads is of, and the norm."""
        if not isinstance(x, Value) or self._rows_of(x, heads, d) is not None:
            return None
        rows = self.rows * heads
        if rows not in self._terms:
            self._terms[rows] = Terms(self.recording, rows)
        term = self._terms[rows].of_value.get(x)
        if term is None or term.op != "rms_norm" or len(term.operands) != 2:
            return None
        source, weight = term.operands
        offset = 0.0
        if weight.op == "add":
            weight, offset = weight.operands
        if source.source is None or not isinstance(weight, Term) or weight.weight is None:
            return None
        held = weight.weight.source
        if not isinstance(held, Held) or held.tensor.shape != (d,):
            return None
        return source.source, HeadNorm(held.tensor, term.attrs["eps"], float(offset))

    def _rows_of(self, x: Any, heads: int, d: int) -> Value | None:
        """Return the tensor (…, heads · d) that x (…, heads, d) is a view of."""
        node = self._node(x)
        if node is None or node.name not in ("aten.view", "aten._unsafe_view"):
            return None
        source = node.args[0]
        shape = fixed_shape(self._meta(source)) if isinstance(source, Value) else None
        if shape is None or shape[-1] != heads * d or math.prod(shape[:-1]) != self.rows:
            return None
        return source  # type: ignore[no-any-return]


def _squeezed(shape: Any) -> list[int]:
    return [n for n in shape if n != 1]


def _agree(q: Projected, k: Projected, v: Projected) -> bool:
    """Return whether q and k have the same RoPE and kind of norm, and v has neither."""
    if v.cos is not None or v.norm is not None or (q.norm is None) != (k.norm is None):
        return False
    if q.norm is not None and k.norm is not None:
        of_q, of_k = ((x.eps, x.offset) for x in (q.norm, k.norm))
        if of_q != of_k:
            return False
    return (q.cos, q.sin, q.rotary) == (k.cos, k.sin, k.rotary)
