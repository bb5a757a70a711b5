"""Hand-written µGraphs of several kernels, and of kernels with a running maximum.

They cover split-K, split-KV, online softmax and a norm in two kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mirage_hf.graph.block import (
    Accumulator,
    Axis,
    BlockGraph,
    BlockInput,
    BlockOp,
    BlockOutput,
    Role,
    Stage,
)
from mirage_hf.graph.kernel import DTensor, KernelGraph
from mirage_hf.graph.ugraph import UGraph
from tests.helpers.ugraphs import gated_mlp_block

GRID, LOOP, TILE = Role.GRID, Role.LOOP, Role.TILE


def started(program: KernelGraph) -> tuple[KernelGraph, list[DTensor]]:
    kernels = KernelGraph()
    return kernels, [kernels.new_input(t.dims, t.dtype, t.strides, t.name) for t in program.inputs]


def finished(program: KernelGraph, kernels: KernelGraph, outputs: Sequence[DTensor]) -> UGraph:
    kernels.mark_output(*outputs)
    return UGraph(program, kernels)


def split_k(rows=3, k=50, n=20, parts=4, dtype="float16") -> UGraph:
    """Compute partial sums over splits of k, and add them in a second kernel."""
    g = KernelGraph()
    g.mark_output(
        g.matmul(g.new_input((rows, k), dtype, name="x"), g.new_input((k, n), dtype, name="w"))
    )
    first = BlockGraph(
        (
            Axis("m", rows, GRID),
            Axis("n", n, GRID),
            Axis("s", parts, GRID),
            Axis("k", k, LOOP, "s"),
        ),
        (BlockInput("x", (0,), ("m", "k")), BlockInput("w", (1,), ("k", "n"))),
        (
            Stage(
                "k",
                (BlockOp("p", "mul", ("x", "w"), ("m", "n", "k")),),
                (Accumulator("part", "p", "sum", ("m", "n", "s")),),
            ),
        ),
        (BlockOutput("part", ("s", "m", "n"), "float32"),),
    )
    second = BlockGraph(
        (Axis("m", rows, GRID), Axis("n", n, GRID), Axis("s", parts, LOOP)),
        (BlockInput("part", (0,), ("s", "m", "n")),),
        (Stage("s", (), (Accumulator("o", "part", "sum", ("m", "n")),)),),
        (BlockOutput("o", ("m", "n"), dtype),),
    )
    kernels, inputs = started(g)
    return finished(g, kernels, kernels.customized(kernels.customized(inputs, first), second))


def _attention(heads: int, q: int, keys: int, d: int, dtype: str) -> KernelGraph:
    g = KernelGraph()
    Q, K, V = (
        g.new_input((heads, n, d), dtype, name=name)
        for name, n in (("q", q), ("k", keys), ("v", keys))
    )
    g.mark_output(
        g.matmul(g.softmax(g.mul(g.matmul(Q, g.permute(K, (0, 2, 1))), 1 / math.sqrt(d))), V)
    )
    return g


def _online(d: int, parts: str | None) -> Stage:
    """Compute scores, their running maximum, and two sums that follow it, in one loop over keys."""
    s = (parts,) if parts else ()
    return Stage(
        "j",
        (
            BlockOp("p", "mul", ("q", "k"), ("h", "i", "c", "j")),
            BlockOp("x", "sum", ("p",), ("h", "i", "j"), (), "c"),
            BlockOp("z", "mul", ("x", 1 / math.sqrt(d)), ("h", "i", "j")),
            BlockOp("y", "sub", ("z", "m"), ("h", "i", *s, "j")),
            BlockOp("w", "exp", ("y",), ("h", "i", *s, "j")),
            BlockOp("wv", "mul", ("w", "v"), ("h", "i", *s, "e", "j")),
        ),
        (
            Accumulator("m", "z", "max", ("h", "i", *s)),
            Accumulator("l", "w", "sum", ("h", "i", *s), "m"),
            Accumulator("acc", "wv", "sum", ("h", "i", *s, "e"), "m"),
        ),
    )


_QKV = (
    BlockInput("q", (0,), ("h", "i", "c")),
    BlockInput("k", (1,), ("h", "j", "c")),
    BlockInput("v", (2,), ("h", "j", "e")),
)


def flash(heads=2, q=3, keys=24, d=8, dtype="float16") -> UGraph:
    """Compute attention in one kernel with one loop over the keys."""
    g = _attention(heads, q, keys, d, dtype)
    block = BlockGraph(
        (
            Axis("h", heads, GRID),
            Axis("i", q, GRID),
            Axis("c", d, TILE),
            Axis("e", d, TILE),
            Axis("j", keys, LOOP),
        ),
        _QKV,
        (_online(d, None), Stage(None, (BlockOp("o", "div", ("acc", "l"), ("h", "i", "e")),))),
        (BlockOutput("o", ("h", "i", "e"), dtype),),
    )
    kernels, inputs = started(g)
    return finished(g, kernels, kernels.customized(inputs, block))


def split_attention(heads=2, q=3, keys=50, d=8, parts=4, dtype="float16") -> UGraph:
    """Split the keys in one kernel, and combine the splits in another."""
    g = _attention(heads, q, keys, d, dtype)
    first = BlockGraph(
        (
            Axis("h", heads, GRID),
            Axis("i", q, GRID),
            Axis("s", parts, GRID),
            Axis("c", d, TILE),
            Axis("e", d, TILE),
            Axis("j", keys, LOOP, "s"),
        ),
        _QKV,
        (_online(d, "s"),),
        (
            BlockOutput("m", ("s", "h", "i"), "float32"),
            BlockOutput("l", ("s", "h", "i"), "float32"),
            BlockOutput("acc", ("s", "h", "i", "e"), "float32"),
        ),
    )
    second = BlockGraph(
        (Axis("h", heads, GRID), Axis("i", q, GRID), Axis("e", d, TILE), Axis("s", parts, LOOP)),
        (
            BlockInput("mp", (0,), ("s", "h", "i")),
            BlockInput("lp", (1,), ("s", "h", "i")),
            BlockInput("ap", (2,), ("s", "h", "i", "e")),
        ),
        (
            Stage(
                "s",
                (
                    BlockOp("y", "sub", ("mp", "m"), ("h", "i", "s")),
                    BlockOp("w", "exp", ("y",), ("h", "i", "s")),
                    BlockOp("wa", "mul", ("w", "ap"), ("h", "i", "e", "s")),
                    BlockOp("wl", "mul", ("w", "lp"), ("h", "i", "s")),
                ),
                (
                    Accumulator("m", "mp", "max", ("h", "i")),
                    Accumulator("l", "wl", "sum", ("h", "i"), "m"),
                    Accumulator("acc", "wa", "sum", ("h", "i", "e"), "m"),
                ),
            ),
            Stage(None, (BlockOp("o", "div", ("acc", "l"), ("h", "i", "e")),)),
        ),
        (BlockOutput("o", ("h", "i", "e"), dtype),),
    )
    kernels, inputs = started(g)
    return finished(g, kernels, kernels.customized(kernels.customized(inputs, first), second))


def softmax_two_passes(rows=3, n=40, dtype="float16") -> UGraph:
    """Compute maximum and sum in one loop, and the quotients in another.

    The second loop reads only the sum of the exponentials from the first.
    """
    g = KernelGraph()
    x = g.new_input((rows, n), dtype, name="x")
    g.mark_output(g.softmax(x), g.reduction(x, 1, "max"))
    block = BlockGraph(
        (Axis("m", rows, GRID), Axis("j", n, LOOP)),
        (BlockInput("x", (0,), ("m", "j")),),
        (
            Stage(
                "j",
                (
                    BlockOp("y", "sub", ("x", "top"), ("m", "j")),
                    BlockOp("e", "exp", ("y",), ("m", "j")),
                ),
                (
                    Accumulator("top", "x", "max", ("m",)),
                    Accumulator("l", "e", "sum", ("m",), "top"),
                ),
            ),
            Stage(
                "j",
                (
                    BlockOp("y2", "sub", ("x", "top"), ("m", "j")),
                    BlockOp("e2", "exp", ("y2",), ("m", "j")),
                    BlockOp("o", "div", ("e2", "l"), ("m", "j")),
                ),
            ),
        ),
        (BlockOutput("o", ("m", "j"), dtype), BlockOutput("top", ("m", None), dtype)),
    )
    kernels, inputs = started(g)
    return finished(g, kernels, kernels.customized(inputs, block))


def norm_in_two(rows=3, k=64, n=48, parts=4, eps=1e-5, dtype="float16") -> UGraph:
    """Compute RMSNorm and two projections: split sums of squares, then both products, scaled.

    A library op adds the partial sums at the end.
    """
    g = KernelGraph()
    x, gamma = g.new_input((rows, k), dtype, name="x"), g.new_input((1, k), dtype, name="gamma")
    w, u = (g.new_input((k, n), dtype, name=name) for name in "wu")
    y = g.rms_norm(x, gamma, eps)
    g.mark_output(g.matmul(y, w), g.silu(g.matmul(y, u)))
    first = BlockGraph(
        (Axis("m", rows, GRID), Axis("s", parts, GRID), Axis("k", k, TILE, "s")),
        (BlockInput("x", (0,), ("m", "k")),),
        (
            Stage(
                None,
                (
                    BlockOp("sq", "square", ("x",), ("m", "k")),
                    BlockOp("part", "sum", ("sq",), ("m", "s"), (), "k"),
                ),
            ),
        ),
        (BlockOutput("part", ("m", "s"), "float32"),),
    )
    second = BlockGraph(
        (Axis("m", rows, GRID), Axis("n", n, GRID), Axis("k", k, LOOP)),
        (
            BlockInput("x", (0,), ("m", "k")),
            BlockInput("gamma", (1,), (None, "k")),
            BlockInput("w", (2,), ("k", "n")),
            BlockInput("u", (3,), ("k", "n")),
            BlockInput("squares", (4,), ("m", None)),
        ),
        (
            Stage(
                "k",
                (
                    BlockOp("xg", "mul", ("x", "gamma"), ("m", "k")),
                    BlockOp("pw", "mul", ("xg", "w"), ("m", "n", "k")),
                    BlockOp("pu", "mul", ("xg", "u"), ("m", "n", "k")),
                ),
                (
                    Accumulator("a", "pw", "sum", ("m", "n")),
                    Accumulator("b", "pu", "sum", ("m", "n")),
                ),
            ),
            Stage(
                None,
                (
                    BlockOp("mean", "mul", ("squares", 1 / k), ("m",)),
                    BlockOp("safe", "add", ("mean", eps), ("m",)),
                    BlockOp("inv", "rsqrt", ("safe",), ("m",)),
                    BlockOp("o", "mul", ("a", "inv"), ("m", "n")),
                    BlockOp("bi", "mul", ("b", "inv"), ("m", "n")),
                    BlockOp("o2", "silu", ("bi",), ("m", "n")),
                ),
            ),
        ),
        (BlockOutput("o", ("m", "n"), dtype), BlockOutput("o2", ("m", "n"), dtype)),
    )
    kernels, (x, gamma, w, u) = started(g)
    squares = kernels.reduction(*kernels.customized([x], first), 1)
    return finished(g, kernels, kernels.customized([x, gamma, w, u, squares], second))


def library_between(rows=4, k=32, n=24, dtype="float16") -> UGraph:
    """Put a library matmul with a permuted weight between two kernels: a gated MLP."""
    g = KernelGraph()
    x, gate, up = (
        g.new_input((rows, k), dtype, name="x"),
        *(g.new_input((k, n), dtype, name=name) for name in ("gate", "up")),
    )
    down, r = g.new_input((k, n), dtype, name="down"), g.new_input((rows, k), dtype, name="r")
    g.mark_output(
        g.add(
            g.matmul(g.mul(g.silu(g.matmul(x, gate)), g.matmul(x, up)), g.permute(down, (1, 0))), r
        )
    )
    first = gated_mlp_block(rows, k, n, dtype)
    last = BlockGraph(
        (Axis("m", rows, GRID), Axis("k", k, GRID)),
        (BlockInput("y", (0,), ("m", "k")), BlockInput("r", (1,), ("m", "k"))),
        (Stage(None, (BlockOp("o", "add", ("y", "r"), ("m", "k")),)),),
        (BlockOutput("o", ("m", "k"), dtype),),
    )
    kernels, (x, gate, up, down, r) = started(g)
    y = kernels.matmul(*kernels.customized([x, gate, up], first), kernels.permute(down, (1, 0)))
    return finished(g, kernels, kernels.customized([y, r], last))


def split_maximum(rows=3, n=50, parts=4, dtype="float16") -> UGraph:
    """Compute a maximum of maxima, and a sum of sums."""
    g = KernelGraph()
    x = g.new_input((rows, n), dtype, name="x")
    g.mark_output(g.reduction(x, 1, "max"), g.reduction(x, 1))
    first = BlockGraph(
        (Axis("m", rows, GRID), Axis("s", parts, GRID), Axis("j", n, LOOP, "s")),
        (BlockInput("x", (0,), ("m", "j")),),
        (
            Stage(
                "j",
                (),
                (
                    Accumulator("top", "x", "max", ("m", "s")),
                    Accumulator("l", "x", "sum", ("m", "s")),
                ),
            ),
        ),
        (BlockOutput("top", ("m", "s"), "float32"), BlockOutput("l", ("m", "s"), "float32")),
    )
    second = BlockGraph(
        (Axis("m", rows, GRID), Axis("s", parts, TILE)),
        (BlockInput("a", (0,), ("m", "s")), BlockInput("b", (1,), ("m", "s"))),
        (
            Stage(
                None,
                (
                    BlockOp("top", "max", ("a",), ("m",), (), "s"),
                    BlockOp("l", "sum", ("b",), ("m",), (), "s"),
                ),
            ),
        ),
        (BlockOutput("top", ("m", None), dtype), BlockOutput("l", ("m", None), dtype)),
    )
    kernels, inputs = started(g)
    return finished(g, kernels, kernels.customized(kernels.customized(inputs, first), second))


ALL = {
    f.__name__: f
    for f in (
        split_k,
        flash,
        split_attention,
        softmax_two_passes,
        norm_in_two,
        library_between,
        split_maximum,
    )
}
