"""Random configurations of decoding attention, and their results in stock torch.

The tests on a CPU and those on a GPU share them.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from mirage_hf import errors
from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.graph import symbolic
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.ops import table
from mirage_hf.patterns import ATTENTION
from mirage_hf.patterns.attention import LONG_FROM, LONG_SLOTS, NORMS, ROPES
from mirage_hf.search.engine import search
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.search.split_appends import split_appends
from mirage_hf.tune import space
from mirage_hf.verify.accept import accept

SMALL = dict(
    head_dim=(64, 80),
    kv_heads=(1, 2),
    group=(1, 2, 3),
    rows=(1, 2),
    queries=(1, 1, 2, 3),
    slots=(24, 40, 65),
    dtype=(torch.float16,),
)
LARGE = dict(
    head_dim=(64, 80, 96, 128, 192, 256),
    kv_heads=(1, 2, 3, 8),
    group=(1, 2, 4, 5, 7, 8, 16),
    rows=(1, 2, 3, 8, 16, 64),
    queries=(1, 1, 1, 2, 3, 4, 8, 16),
    slots=(64, 130, 300, 1024, 4096, 16384, 131072),
    dtype=(torch.float16, torch.bfloat16),
)
#: Most elements of the keys of all heads of a batch.
MOST_ELEMENTS = 1 << 27


@dataclass(frozen=True)
class Kind:
    """All sizes and options that a µGraph is searched for, except the number of cache slots."""

    rows: int
    sizes: tuple[tuple[str, Any], ...]

    def __getitem__(self, name: str) -> Any:
        sizes = dict(self.sizes)
        return (
            sizes[name]
            if name in sizes
            else inspect.signature(ATTENTION.build).parameters[name].default
        )

    def program(self, slots: int) -> KernelGraph:
        return ATTENTION.block(**dict(self.sizes)).program(self.rows, slots=slots)

    def __str__(self) -> str:
        return f"rows={self.rows} " + " ".join(f"{name}={value}" for name, value in self.sizes)


def kind(number: int, grid: dict) -> Kind:
    draw = random.Random(f"kind {number}")
    d, queries = draw.choice(grid["head_dim"]), draw.choice(grid["queries"])
    rope = draw.choice((*ROPES, "halves"))
    sizes = dict(
        kv_heads=draw.choice(grid["kv_heads"]),
        group=draw.choice(grid["group"]),
        head_dim=d,
        scale=draw.choice((d**-0.5, 0.1)),
        norm=draw.choice(NORMS),
        eps=draw.choice((1e-6, 1e-5)),
        dtype=draw.choice(grid["dtype"]),
        queries=queries,
        rope=rope,
        rotary=draw.choice((None, None, d // 2, d // 4)) if rope else None,
        bias=draw.random() < 0.3,
        softcap=draw.choice((None, None, 5.0, 30.0)),
        sinks=draw.random() < 0.3,
        mask=draw.random() < 0.3,
        window=queries > 1 and draw.random() < 0.5,
    )
    return Kind(draw.choice(grid["rows"]), tuple(sorted(sizes.items())))


@functools.cache
def searched(k: Kind, slots: int, checked_at: int, width: int = 1) -> tuple[Any, ...]:
    """Return candidates with schedules for a number of slots, proven and checked at fewer slots."""
    without = split_appends(k.program(slots))
    assert without is not None, k
    found, _ = search(without.graph, SearchOptions(time_limit=20, threads=1, max_width=width))
    few, joined = k.program(checked_at), ((f, without.join(f.ugraph)) for f in found)
    usable = itertools.islice(
        ((f, u) for f, u in joined if not space.obstacle(place_kernels(u))),
        6 if width == 1 else None,
    )
    return accept(
        [replace(f, ugraph=symbolic.for_program(u, few)) for f, u in usable], keep=2
    ).candidates


def chosen(
    k: Kind, slots: int, draw: random.Random, reference: int, limit: int, blocks: int = 1 << 31
) -> tuple[UGraph, list[Schedule]]:
    """Return one candidate at a number of slots, with a schedule for each of its kernels.

    A schedule has at most `blocks` blocks. Its loop may be shared among blocks.
    """
    options: list[
        tuple[UGraph, list[list[Schedule]]]
    ] = []  # short keys that cannot be held whole are walked
    short = () if slots >= LONG_FROM else ((reference, 1),)
    for searched_at, width in (*short, (LONG_SLOTS, 1), (LONG_SLOTS, 2)):
        for c in () if options else searched(k, searched_at, reference, width):
            u = symbolic.for_program(c.ugraph, k.program(slots))
            if not space.obstacle(place_kernels(u)):
                fits = [
                    [
                        s
                        for s in space.schedules(op, limit=limit)
                        if c.allows(s.mma) and plan_kernel(op, s).grid <= blocks
                    ]
                    for op in place_kernels(u)
                ]
                options += [(u, fits)] if all(fits) else []
    assert options, f"{k}: no candidate has schedules of {blocks} blocks"
    u, fitting = draw.choice(options)
    schedules, other = [draw.choice(f) for f in fitting], []
    for op, s in zip(place_kernels(u), schedules, strict=True):
        loop = next((a.name for a in op.block.axes if a.role == "loop"), None)
        other.append(
            s
            if loop is None
            else replace(
                s, tiles=dict(s.tiles) | {loop: 16}, cooperating_blocks=draw.choice((1, 2, 4))
            )
        )
    try:
        triton.generate(u, other)
        return u, other
    except errors.CodegenError:  # for example, too few steps to share
        return u, schedules


def inputs_of(
    k: Kind, g: KernelGraph, draw: random.Random, device: str = "cpu"
) -> list[torch.Tensor]:
    """Return random inputs. Each row has its own bounds, among them empty and full ones."""
    generator = torch.Generator(device).manual_seed(draw.randrange(1 << 30))
    t, slots = k["queries"], next(x.dims[-2] for x in g.inputs if x.name == "keys")
    room = slots - t
    slot = [
        draw.choice((0, 1, room // 2, room - 1, room, draw.randint(0, room))) for _ in range(k.rows)
    ]
    lo = [draw.choice((0, 0, n, n // 2, max(n - 1, 0))) for n in slot]
    window = draw.choice((1, t, slots // 3 + 1, slots))
    query = torch.arange(t)
    whole = {
        "lo": torch.tensor(lo),
        "slot": torch.tensor(slot),
        "new_last": query + 1,
        "new_first": torch.zeros(t),
    }
    if k["window"]:
        seen = (torch.tensor(slot)[:, None] + query + 1 - window).clamp(min=0)
        whole |= {
            "first": seen,
            "last": torch.full((k.rows, t), slots),
            "new_first": (query + 1 - window).clamp(min=0).expand(k.rows, t),
            "new_last": (query + 1).expand(k.rows, t),
        }
    rotary = k["rotary"] or k["head_dim"]
    angles = torch.rand(k.rows, 1, t, rotary // 2) * 6.0
    angles = (
        torch.cat((angles, angles), -1)
        if k["rope"] == "halves"
        else angles.repeat_interleave(2, -1)
    )
    whole |= {"cos": angles.cos(), "sin": angles.sin()}
    inputs = []
    for x in g.inputs:
        y = torch.empty_strided(x.dims, x.strides, dtype=x.dtype, device=device)
        if x.name in whole:
            y.copy_(whole[x.name].reshape(x.dims))
        else:
            y.normal_(generator=generator)
        if x.name.endswith("mask"):
            y.mul_(2.0).masked_fill_(
                torch.rand(y.shape, generator=generator, device=device) < 0.2,
                torch.finfo(y.dtype).min,
            )
        if x.name == "new_mask":
            y.diagonal(dim1=-2, dim2=-1).zero_()
        inputs.append(y)
    return inputs


def stock(k: Kind, g: KernelGraph, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return what torch computes in the dtype of the inputs, followed by both caches.

    This is SDPA, or with a softcap the eager attention of transformers.
    """
    x = {t.name: y for t, y in zip(g.inputs, inputs, strict=True)}
    rows, kv, group, t, d = k.rows, k["kv_heads"], k["group"], k["queries"], k["head_dim"]
    slots, heads = x["keys"].shape[-2], kv * group
    q, key, value = (x[n].reshape(rows, -1, t, d) for n in ("q", "new_keys", "new_values"))
    if k["bias"]:
        q, key, value = (
            y + x[n].reshape(1, -1, 1, d)
            for y, n in ((q, "q_bias"), (key, "k_bias"), (value, "v_bias"))
        )
    if k["norm"]:
        q, key = (
            _normed(k, y, x[n], x.get(f"{n}_bias")) for y, n in ((q, "q_norm"), (key, "k_norm"))
        )
    if k["rope"]:
        cos, sin = (x[n].reshape(rows, 1, t, -1) for n in ("cos", "sin"))
        q, key = (
            table.lookup("rope").oracle(y, cos, sin, interleaved=k["rope"] == "pairs")
            for y in (q, key)
        )
    caches = [x[n].reshape(rows, kv, slots, d) for n in ("keys", "values")]
    keys, values = (
        torch.cat(pair, 2).repeat_interleave(group, 1)
        for pair in zip(caches, (key, value), strict=True)
    )

    def inside(lo: str, hi: str, size: int) -> torch.Tensor:
        at = torch.arange(size, device=q.device)
        return (at >= x[lo].reshape(x[lo].shape[0], 1, -1, 1)) & (
            at < x[hi].reshape(x[hi].shape[0], 1, -1, 1)
        )

    old, new = (
        inside("lo", "slot", slots).expand(rows, 1, t, slots),
        torch.ones(rows, 1, t, t, dtype=torch.bool, device=q.device),
    )
    old = old & inside("first", "last", slots) if k["window"] else old
    new = new & inside("new_first", "new_last", t) if t > 1 else new
    bias = torch.zeros(rows, 1, t, slots + t, dtype=q.dtype, device=q.device)
    if k["mask"]:
        bias = torch.cat([x[n].reshape(rows, 1, t, -1) for n in ("mask", "new_mask")], -1)
    bias = bias.masked_fill(~torch.cat([old, new], -1), float("-inf")).expand(
        rows, heads, t, slots + t
    )
    if k["sinks"]:  # a key whose score is the sink, and whose value is 0
        bias = torch.cat([bias, x["sinks"].reshape(1, heads, 1, 1).expand(rows, heads, t, 1)], -1)
        keys, values = (F.pad(y, (0, 0, 0, 1)) for y in (keys, values))
    if k["softcap"] is None:
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias, scale=k["scale"])
    else:
        scores = (
            torch.tanh(q @ keys.transpose(-1, -2) * k["scale"] / k["softcap"]) * k["softcap"] + bias
        )
        y = (
            scores.softmax(-1, dtype=torch.promote_types(torch.float32, q.dtype)).to(q.dtype)
            @ values
        )
    for cache, made in zip(caches, (key, value), strict=True):
        for row, at in enumerate(x["slot"].flatten().tolist()):
            cache[row, :, at : at + t] = made[row]
    shapes = [o.dims for o in g.outputs]
    of_tokens = y.transpose(1, 2)
    return [y.reshape(s) for y, s in zip((of_tokens, *caches), shapes, strict=True)]


def _normed(
    k: Kind, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    rows, heads, t, d = x.shape
    if k["norm"] == "rms":
        return table.lookup("rms_norm").oracle(x, weight, k["eps"])
    if k["norm"] == "layer":
        y = F.layer_norm(x, (d,), eps=k["eps"]) * weight.reshape(1, heads, 1, d)
        return y if bias is None else y + bias.reshape(1, heads, 1, d)
    token = x.transpose(1, 2).reshape(rows, t, heads * d)
    return (
        table.lookup("rms_norm")
        .oracle(token, weight.reshape(-1), k["eps"])
        .reshape(rows, t, heads, d)
        .transpose(1, 2)
    )


def copied(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors and keep their strides."""
    return [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
        for x in inputs
    ]


def both(
    k: Kind, g: KernelGraph, inputs: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the results of stock torch and those in float64."""
    return (
        stock(k, g, [x.clone() for x in inputs]),
        stock(k, g, [x.double() if x.is_floating_point() else x for x in inputs]),
    )


def untouched(
    k: Kind, g: KernelGraph, before: list[torch.Tensor], after: list[torch.Tensor]
) -> bool:
    """Return whether the caches are unchanged in every slot except those of the new rows."""
    slot = (
        next(x for t, x in zip(g.inputs, before, strict=True) if t.name == "slot")
        .flatten()
        .tolist()
    )
    for t, x, y in zip(g.inputs, before, after, strict=True):
        if t.name in ("keys", "values"):
            for row, at in enumerate(slot):
                if not (
                    torch.equal(x[row][..., :at, :], y[row][..., :at, :])
                    and torch.equal(
                        x[row][..., at + k["queries"] :, :], y[row][..., at + k["queries"] :, :]
                    )
                ):
                    return False
    return True
