"""Hand-written µGraphs whose blocks form clusters and reduce values among each other."""

from __future__ import annotations

import math

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
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from tests.helpers.ugraphs import fuse

GRID, CLUSTER, LOOP, TILE = Role.GRID, Role.CLUSTER, Role.LOOP, Role.TILE


def _once(*ops: BlockOp) -> Stage:
    return Stage(None, ops)


def split_linear(rows=3, k=64, n=48, blocks=4, dtype="float16") -> UGraph:
    """Compute x · w: each block of a cluster sums over a part of k, then they add up."""
    g = KernelGraph()
    x, w = g.new_input((rows, k), dtype, name="x"), g.new_input((k, n), dtype, name="w")
    g.mark_output(g.matmul(x, w))
    block = BlockGraph(
        (
            Axis("m", rows, GRID),
            Axis("n", n, GRID),
            Axis("c", blocks, CLUSTER),
            Axis("k", k, LOOP, "c"),
        ),
        (BlockInput("x", (0,), ("m", "k")), BlockInput("w", (1,), ("k", "n"))),
        (
            Stage(
                "k",
                (BlockOp("p", "mul", ("x", "w"), ("m", "n", "k")),),
                (Accumulator("part", "p", "sum", ("m", "n", "c")),),
            ),
            _once(BlockOp("y", "sum", ("part",), ("m", "n"), (), "c")),
        ),
        (BlockOutput("y", ("m", "n"), dtype),),
    )
    return fuse(g, block)


def rms_norm_linear(rows=3, k=64, n=48, blocks=4, dtype="float16", transposed=False) -> UGraph:
    """Compute RMSNorm and x · w with k split over a cluster, and divide after the product."""
    g = KernelGraph()
    x, gamma = g.new_input((rows, k), dtype, name="x"), g.new_input((1, k), dtype, name="gamma")
    w = g.new_input((k, n), dtype, strides=(1, k) if transposed else None, name="w")
    g.mark_output(g.matmul(g.rms_norm(x, gamma), w))
    block = BlockGraph(
        (
            Axis("m", rows, GRID),
            Axis("n", n, GRID),
            Axis("c", blocks, CLUSTER),
            Axis("k", k, LOOP, "c"),
        ),
        (
            BlockInput("x", (0,), ("m", "k")),
            BlockInput("gamma", (1,), (None, "k")),
            BlockInput("w", (2,), ("k", "n")),
        ),
        (
            Stage(
                "k",
                (
                    BlockOp("x2", "mul", ("x", "x"), ("m", "k")),
                    BlockOp("xg", "mul", ("x", "gamma"), ("m", "k")),
                    BlockOp("p", "mul", ("xg", "w"), ("m", "n", "k")),
                ),
                (
                    Accumulator("s_part", "x2", "sum", ("m", "c")),
                    Accumulator("y_part", "p", "sum", ("m", "n", "c")),
                ),
            ),
            _once(
                BlockOp("s", "sum", ("s_part",), ("m",), (), "c"),
                BlockOp("y", "sum", ("y_part",), ("m", "n"), (), "c"),
                BlockOp("mean", "mul", ("s", 1 / k), ("m",)),
                BlockOp("safe", "add", ("mean", 1e-6), ("m",)),
                BlockOp("inv", "rsqrt", ("safe",), ("m",)),
                BlockOp("o", "mul", ("y", "inv"), ("m", "n")),
            ),
        ),
        (BlockOutput("o", ("m", "n"), dtype),),
    )
    return fuse(g, block)


def rms_norm(rows=5, k=96, blocks=4, dtype="float16") -> UGraph:
    """Normalise rows: a cluster holds one row, and its blocks add up their sums of squares."""
    g = KernelGraph()
    x, gamma = g.new_input((rows, k), dtype, name="x"), g.new_input((1, k), dtype, name="gamma")
    g.mark_output(g.rms_norm(x, gamma))
    block = BlockGraph(
        (Axis("m", rows, GRID), Axis("c", blocks, CLUSTER), Axis("k", k, TILE, "c")),
        (BlockInput("x", (0,), ("m", "k")), BlockInput("gamma", (1,), (None, "k"))),
        (
            _once(
                BlockOp("x2", "mul", ("x", "x"), ("m", "k")),
                BlockOp("part", "sum", ("x2",), ("m", "c"), (), "k"),
                BlockOp("s", "sum", ("part",), ("m",), (), "c"),
                BlockOp("mean", "mul", ("s", 1 / k), ("m",)),
                BlockOp("safe", "add", ("mean", 1e-6), ("m",)),
                BlockOp("inv", "rsqrt", ("safe",), ("m",)),
                BlockOp("xg", "mul", ("x", "gamma"), ("m", "k")),
                BlockOp("o", "mul", ("xg", "inv"), ("m", "k")),
            ),
        ),
        (BlockOutput("o", ("m", "k"), dtype),),
    )
    return fuse(g, block)


def softmax_rows(rows=3, n=100, blocks=8, dtype="float16") -> UGraph:
    """Compute a softmax: a maximum and a sum among the blocks that each walk a part of a row."""
    g = KernelGraph()
    g.mark_output(g.softmax(g.new_input((rows, n), dtype, name="x")))
    block = BlockGraph(
        (Axis("m", rows, GRID), Axis("c", blocks, CLUSTER), Axis("n", n, LOOP, "c")),
        (BlockInput("x", (0,), ("m", "n")),),
        (
            Stage("n", (), (Accumulator("top_part", "x", "max", ("m", "c")),)),
            _once(BlockOp("top", "max", ("top_part",), ("m",), (), "c")),
            Stage(
                "n",
                (
                    BlockOp("z", "sub", ("x", "top"), ("m", "n")),
                    BlockOp("e", "exp", ("z",), ("m", "n")),
                ),
                (Accumulator("l_part", "e", "sum", ("m", "c")),),
            ),
            _once(BlockOp("l", "sum", ("l_part",), ("m",), (), "c")),
            Stage(
                "n",
                (
                    BlockOp("z2", "sub", ("x", "top"), ("m", "n")),
                    BlockOp("e2", "exp", ("z2",), ("m", "n")),
                    BlockOp("o", "div", ("e2", "l"), ("m", "n")),
                ),
            ),
        ),
        (BlockOutput("o", ("m", "n"), dtype),),
    )
    return fuse(g, block)


def sum_over_heads(heads=4, rows=5, d=24, n=40, dtype="float16") -> UGraph:
    """Project heads and add them up: each block of a cluster holds one head."""
    g = KernelGraph()
    a = g.new_input((heads, rows, d), dtype, name="a")
    w = g.new_input((heads, d, n), dtype, name="w")
    g.mark_output(g.reduction(g.matmul(a, w), 0))
    block = BlockGraph(
        (
            Axis("h", heads, CLUSTER),
            Axis("m", rows, GRID),
            Axis("n", n, GRID),
            Axis("d", d, LOOP),
        ),
        (BlockInput("a", (0,), ("h", "m", "d")), BlockInput("w", (1,), ("h", "d", "n"))),
        (
            Stage(
                "d",
                (BlockOp("p", "mul", ("a", "w"), ("h", "m", "n", "d")),),
                (Accumulator("part", "p", "sum", ("h", "m", "n")),),
            ),
            _once(BlockOp("y", "sum", ("part",), ("m", "n"), (), "h")),
        ),
        (BlockOutput("y", (None, "m", "n"), dtype),),
    )
    return fuse(g, block)


def small_mlp(rows=2, k=32, hidden=48, n=20, blocks=4, dtype="float16") -> UGraph:
    """Compute both halves of an MLP: each block of a cluster holds a part of the hidden layer."""
    g = KernelGraph()
    x = g.new_input((rows, k), dtype, name="x")
    up = g.new_input((k, hidden), dtype, name="up")
    down = g.new_input((hidden, n), dtype, name="down")
    g.mark_output(g.matmul(g.silu(g.matmul(x, up)), down))
    block = BlockGraph(
        (
            Axis("m", rows, GRID),
            Axis("c", blocks, CLUSTER),
            Axis("f", hidden, TILE, "c"),
            Axis("n", n, TILE),
            Axis("k", k, LOOP),
        ),
        (
            BlockInput("x", (0,), ("m", "k")),
            BlockInput("up", (1,), ("k", "f")),
            BlockInput("down", (2,), ("f", "n")),
        ),
        (
            Stage(
                "k",
                (BlockOp("p", "mul", ("x", "up"), ("m", "f", "k")),),
                (Accumulator("u", "p", "sum", ("m", "f")),),
            ),
            _once(
                BlockOp("a", "silu", ("u",), ("m", "f")),
                BlockOp("q", "mul", ("a", "down"), ("m", "f", "n")),
                BlockOp("part", "sum", ("q",), ("m", "c", "n"), (), "f"),
                BlockOp("y", "sum", ("part",), ("m", "n"), (), "c"),
            ),
        ),
        (BlockOutput("y", ("m", "n"), dtype),),
    )
    return fuse(g, block)


def attention(heads=2, rows=3, keys=50, d=8, blocks=4, dtype="float16") -> UGraph:
    """Compute attention: each block follows the maximum of its keys, then a cluster combines."""
    g = KernelGraph()
    q, k, v = (
        g.new_input((heads, size, d), dtype, name=name)
        for name, size in (("q", rows), ("k", keys), ("v", keys))
    )
    scores = g.mul(g.matmul(q, g.permute(k, (0, 2, 1))), 1 / math.sqrt(d))
    g.mark_output(g.matmul(g.softmax(scores), v))
    block = BlockGraph(
        (
            Axis("h", heads, GRID),
            Axis("i", rows, GRID),
            Axis("s", blocks, CLUSTER),
            Axis("c", d, TILE),
            Axis("e", d, TILE),
            Axis("j", keys, LOOP, "s"),
        ),
        (
            BlockInput("q", (0,), ("h", "i", "c")),
            BlockInput("k", (1,), ("h", "j", "c")),
            BlockInput("v", (2,), ("h", "j", "e")),
        ),
        (
            Stage(
                "j",
                (
                    BlockOp("p", "mul", ("q", "k"), ("h", "i", "c", "j")),
                    BlockOp("x", "sum", ("p",), ("h", "i", "j"), (), "c"),
                    BlockOp("z", "mul", ("x", 1 / math.sqrt(d)), ("h", "i", "j")),
                    BlockOp("y", "sub", ("z", "m"), ("h", "i", "s", "j")),
                    BlockOp("w", "exp", ("y",), ("h", "i", "s", "j")),
                    BlockOp("wv", "mul", ("w", "v"), ("h", "i", "s", "e", "j")),
                ),
                (
                    Accumulator("m", "z", "max", ("h", "i", "s")),
                    Accumulator("l", "w", "sum", ("h", "i", "s"), "m"),
                    Accumulator("acc", "wv", "sum", ("h", "i", "s", "e"), "m"),
                ),
            ),
            _once(
                BlockOp("top", "max", ("m",), ("h", "i"), (), "s"),
                BlockOp("gap", "sub", ("m", "top"), ("h", "i", "s")),
                BlockOp("scale", "exp", ("gap",), ("h", "i", "s")),
                BlockOp("l_scaled", "mul", ("l", "scale"), ("h", "i", "s")),
                BlockOp("a_scaled", "mul", ("acc", "scale"), ("h", "i", "s", "e")),
                BlockOp("l_total", "sum", ("l_scaled",), ("h", "i"), (), "s"),
                BlockOp("a_total", "sum", ("a_scaled",), ("h", "i", "e"), (), "s"),
                BlockOp("o", "div", ("a_total", "l_total"), ("h", "i", "e")),
            ),
        ),
        (BlockOutput("o", ("h", "i", "e"), dtype),),
    )
    return fuse(g, block)


ALL = {
    "split_linear": split_linear,
    "rms_norm_linear": rms_norm_linear,
    "rms_norm": rms_norm,
    "softmax_rows": softmax_rows,
    "sum_over_heads": sum_over_heads,
    "small_mlp": small_mlp,
    "attention": attention,
}
