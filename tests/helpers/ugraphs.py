"""Hand-written µGraphs: small programs with block graphs, each showing one feature of the IR."""

from __future__ import annotations

import math

import torch

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
from mirage_hf.ops import table

GRID, LOOP, TILE = Role.GRID, Role.LOOP, Role.TILE


def fuse(program: KernelGraph, block: BlockGraph) -> UGraph:
    """Return the µGraph that runs `block` as the only kernel of `program`."""
    kernels = KernelGraph()
    made = kernels.customized(
        [kernels.new_input(t.dims, t.dtype, t.strides, t.name) for t in program.inputs], block
    )
    kernels.mark_output(*made)
    return UGraph(program, kernels)


def rms_norm_linear(rows=3, k=64, n=48, dtype="float16", transposed=False) -> UGraph:
    """Divide after the matmul: two accumulators in one loop, then an epilogue."""
    g = KernelGraph()
    x, gamma = g.new_input((rows, k), dtype, name="x"), g.new_input((1, k), dtype, name="gamma")
    w = g.new_input((k, n), dtype, strides=(1, k) if transposed else None, name="w")
    g.mark_output(g.matmul(g.rms_norm(x, gamma), w))
    block = BlockGraph(
        (Axis("m", rows, GRID), Axis("n", n, GRID), Axis("k", k, LOOP)),
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
                (Accumulator("s", "x2", "sum", ("m",)), Accumulator("y", "p", "sum", ("m", "n"))),
            ),
            Stage(
                None,
                (
                    BlockOp("mean", "mul", ("s", 1 / k), ("m",)),
                    BlockOp("safe", "add", ("mean", 1e-6), ("m",)),
                    BlockOp("inv", "rsqrt", ("safe",), ("m",)),
                    BlockOp("o", "mul", ("y", "inv"), ("m", "n")),
                ),
            ),
        ),
        (BlockOutput("o", ("m", "n"), dtype),),
    )
    return fuse(g, block)


def gated_mlp_block(rows: int, k: int, n: int, dtype) -> BlockGraph:
    """Return the block graph of silu(x · gate) * (x · up)."""
    return BlockGraph(
        (Axis("m", rows, GRID), Axis("n", n, GRID), Axis("k", k, LOOP)),
        (
            BlockInput("x", (0,), ("m", "k")),
            BlockInput("gate", (1,), ("k", "n")),
            BlockInput("up", (2,), ("k", "n")),
        ),
        (
            Stage(
                "k",
                (
                    BlockOp("pg", "mul", ("x", "gate"), ("m", "n", "k")),
                    BlockOp("pu", "mul", ("x", "up"), ("m", "n", "k")),
                ),
                (
                    Accumulator("g", "pg", "sum", ("m", "n")),
                    Accumulator("u", "pu", "sum", ("m", "n")),
                ),
            ),
            Stage(
                None,
                (
                    BlockOp("a", "silu", ("g",), ("m", "n")),
                    BlockOp("o", "mul", ("a", "u"), ("m", "n")),
                ),
            ),
        ),
        (BlockOutput("o", ("m", "n"), dtype),),
    )


def gated_mlp(rows=4, k=32, n=40, dtype="float16") -> UGraph:
    """Compute two contractions that read x once."""
    g = KernelGraph()
    x = g.new_input((rows, k), dtype, name="x")
    gate, up = (g.new_input((k, n), dtype, name=name) for name in ("gate", "up"))
    g.mark_output(g.mul(g.silu(g.matmul(x, gate)), g.matmul(x, up)))
    return fuse(g, gated_mlp_block(rows, k, n, dtype))


def lora(rows=4, k=32, n=40, r=4, dtype="float16") -> UGraph:
    """Read x once for x·W and x·A, and sum over a tile axis in the epilogue."""
    g = KernelGraph()
    x, w = g.new_input((rows, k), dtype, name="x"), g.new_input((k, n), dtype, name="w")
    a, b = g.new_input((k, r), dtype, name="a"), g.new_input((r, n), dtype, name="b")
    g.mark_output(g.add(g.matmul(x, w), g.matmul(g.matmul(x, a), b)))
    block = BlockGraph(
        (Axis("m", rows, GRID), Axis("n", n, GRID), Axis("r", r, TILE), Axis("k", k, LOOP)),
        (
            BlockInput("x", (0,), ("m", "k")),
            BlockInput("w", (1,), ("k", "n")),
            BlockInput("a", (2,), ("k", "r")),
            BlockInput("b", (3,), ("r", "n")),
        ),
        (
            Stage(
                "k",
                (
                    BlockOp("pw", "mul", ("x", "w"), ("m", "n", "k")),
                    BlockOp("pa", "mul", ("x", "a"), ("m", "r", "k")),
                ),
                (
                    Accumulator("xw", "pw", "sum", ("m", "n")),
                    Accumulator("xa", "pa", "sum", ("m", "r")),
                ),
            ),
            Stage(
                None,
                (
                    BlockOp("pb", "mul", ("xa", "b"), ("m", "n", "r")),
                    BlockOp("xab", "sum", ("pb",), ("m", "n"), (), "r"),
                    BlockOp("o", "add", ("xw", "xab"), ("m", "n")),
                ),
            ),
        ),
        (BlockOutput("o", ("m", "n"), dtype),),
    )
    return fuse(g, block)


def attention(heads=2, q=3, keys=24, d=8, dtype="float16") -> UGraph:
    """Compute softmax attention: a max accumulator in a first loop, two sums in a second."""
    g = KernelGraph()
    Q, K, V = (
        g.new_input(dims, dtype, name=name)
        for name, dims in (("q", (heads, q, d)), ("k", (heads, keys, d)), ("v", (heads, keys, d)))
    )
    scores = g.mul(g.matmul(Q, g.permute(K, (0, 2, 1))), 1 / math.sqrt(d))
    g.mark_output(g.matmul(g.softmax(scores), V))

    def score(i: int) -> tuple[BlockOp, ...]:
        return (
            BlockOp(f"p{i}", "mul", ("q", "k"), ("h", "i", "c", "j")),
            BlockOp(f"s{i}", "sum", (f"p{i}",), ("h", "i", "j"), (), "c"),
            BlockOp(f"z{i}", "mul", (f"s{i}", 1 / math.sqrt(d)), ("h", "i", "j")),
        )

    block = BlockGraph(
        (
            Axis("h", heads, GRID),
            Axis("i", q, GRID),
            Axis("c", d, TILE),
            Axis("e", d, TILE),
            Axis("j", keys, LOOP),
        ),
        (
            BlockInput("q", (0,), ("h", "i", "c")),
            BlockInput("k", (1,), ("h", "j", "c")),
            BlockInput("v", (2,), ("h", "j", "e")),
        ),
        (
            Stage("j", score(0), (Accumulator("top", "z0", "max", ("h", "i")),)),
            Stage(
                "j",
                (
                    *score(1),
                    BlockOp("shifted", "sub", ("z1", "top"), ("h", "i", "j")),
                    BlockOp("w", "exp", ("shifted",), ("h", "i", "j")),
                    BlockOp("wv", "mul", ("w", "v"), ("h", "i", "e", "j")),
                ),
                (
                    Accumulator("l", "w", "sum", ("h", "i")),
                    Accumulator("acc", "wv", "sum", ("h", "i", "e")),
                ),
            ),
            Stage(None, (BlockOp("o", "div", ("acc", "l"), ("h", "i", "e")),)),
        ),
        (BlockOutput("o", ("h", "i", "e"), dtype),),
    )
    return fuse(g, block)


def qkv(rows=3, k=32, sizes=(24, 8, 8), dtype="float16") -> UGraph:
    """Read three weights in the order of nn.Linear as one joined input, with a pointer each."""
    g = KernelGraph()
    x = g.new_input((rows, k), dtype, name="x")
    ws = [g.new_input((s, k), dtype, name=f"w{i}") for i, s in enumerate(sizes)]
    g.mark_output(g.matmul(x, g.permute(g.concat(ws, 0), (1, 0))))
    block = BlockGraph(
        (Axis("m", rows, GRID), Axis("n", sum(sizes), GRID), Axis("k", k, LOOP)),
        (
            BlockInput("x", (0,), ("m", "k")),
            BlockInput("w", (1, 2, 3), ("n", "k"), "n", tuple(sizes)),
        ),
        (
            Stage(
                "k",
                (BlockOp("p", "mul", ("x", "w"), ("m", "n", "k")),),
                (Accumulator("o", "p", "sum", ("m", "n")),),
            ),
        ),
        (BlockOutput("o", ("m", "n"), dtype),),
    )
    return fuse(g, block)


def softmax_rows(rows=3, n=40, dtype="float16") -> UGraph:
    """Store outputs that carry the loop axis.

    One loop computes the sum, another one stores tile by tile. A second output has size 1.
    """
    g = KernelGraph()
    x = g.new_input((rows, n), dtype, name="x")
    g.mark_output(g.softmax(x), g.reduction(g.exp(x), 1))
    block = BlockGraph(
        (Axis("m", rows, GRID), Axis("j", n, LOOP)),
        (BlockInput("x", (0,), ("m", "j")),),
        (
            Stage(
                "j",
                (BlockOp("e", "exp", ("x",), ("m", "j")),),
                (Accumulator("l", "e", "sum", ("m",)),),
            ),
            Stage(
                "j",
                (
                    BlockOp("e2", "exp", ("x",), ("m", "j")),
                    BlockOp("o", "div", ("e2", "l"), ("m", "j")),
                ),
            ),
        ),
        (BlockOutput("o", ("m", "j"), dtype), BlockOutput("l", ("m", None), dtype)),
    )
    return fuse(g, block)


def ntrans(rows=3, n=40, dtype="float16") -> UGraph:
    """Hold everything whole in a block: stages without a loop, sums over a tile axis."""
    g = KernelGraph()
    x, y, a = (g.new_input((rows, n), dtype, name=name) for name in "xya")

    def norm(z):
        return g.div(z, g.sqrt(g.reduction(g.square(z), 1)))

    g.mark_output(norm(g.add(x, g.mul(a, g.sub(norm(y), x)))))

    def normed(z: str, i: int) -> tuple[BlockOp, ...]:
        return (
            BlockOp(f"sq{i}", "square", (z,), ("m", "n")),
            BlockOp(f"s{i}", "sum", (f"sq{i}",), ("m",), (), "n"),
            BlockOp(f"r{i}", "sqrt", (f"s{i}",), ("m",)),
            BlockOp(f"u{i}", "div", (z, f"r{i}"), ("m", "n")),
        )

    block = BlockGraph(
        (Axis("m", rows, GRID), Axis("n", n, TILE)),
        tuple(BlockInput(name, (i,), ("m", "n")) for i, name in enumerate("xya")),
        (
            Stage(
                None,
                (
                    *normed("y", 0),
                    BlockOp("d", "sub", ("u0", "x"), ("m", "n")),
                    BlockOp("ad", "mul", ("a", "d"), ("m", "n")),
                    BlockOp("z", "add", ("x", "ad"), ("m", "n")),
                    *normed("z", 1),
                ),
            ),
        ),
        (BlockOutput("u1", ("m", "n"), dtype),),
    )
    return fuse(g, block)


def split_k_linear(rows=2, k=24, n=20, parts=4, dtype="float16") -> UGraph:
    """Use two kernels: float32 partial sums over a grid axis, and a kernel that adds them."""
    g = KernelGraph()
    x, w = g.new_input((rows, k), dtype, name="x"), g.new_input((k, n), dtype, name="w")
    g.mark_output(g.matmul(x, w))
    first = BlockGraph(
        (
            Axis("s", parts, GRID),
            Axis("m", rows, GRID),
            Axis("n", n, GRID),
            Axis("k", k // parts, LOOP),
        ),
        (BlockInput("x", (0,), ("m", "s", "k")), BlockInput("w", (1,), ("s", "k", "n"))),
        (
            Stage(
                "k",
                (BlockOp("p", "mul", ("x", "w"), ("s", "m", "n", "k")),),
                (Accumulator("part", "p", "sum", ("s", "m", "n")),),
            ),
        ),
        (BlockOutput("part", ("s", "m", "n"), "float32"),),
    )
    second = BlockGraph(
        (Axis("s", parts, TILE), Axis("m", rows, GRID), Axis("n", n, GRID)),
        (BlockInput("part", (0,), ("s", "m", "n")),),
        (Stage(None, (BlockOp("o", "sum", ("part",), ("m", "n"), (), "s"),)),),
        (BlockOutput("o", ("m", "n"), dtype),),
    )
    kernels = KernelGraph()
    x, w = kernels.new_input((rows, k), dtype, name="x"), kernels.new_input((k, n), dtype, name="w")
    x3, w3 = (
        kernels.reshape(x, (rows, parts, k // parts)),
        kernels.reshape(w, (parts, k // parts, n)),
    )
    (part,) = kernels.customized([x3, w3], first)
    kernels.mark_output(*kernels.customized([part], second))
    return UGraph(g, kernels)


def every_op() -> UGraph:
    """Apply every elementwise op in one kernel."""
    g = KernelGraph()
    x, y = (g.new_input((3, 40), "float32", name=name) for name in "xy")
    ops, total, outs = [], None, []
    for op in table.OPS.values():
        if op.kind != "elementwise":
            continue
        attrs = {
            "cast": {"dtype": "float32"},
            "clamp": {"min": -0.25, "max": 0.5},
            "lookup": {"values": (0.5, -1.5, 2.0)},
            "bits": {"count": 2},
        }.get(op.name, {})
        pair = (
            ("positive", "y")
            if op.name == "pow"
            else ("x", "y")
            if op.arity[0] == 2
            else ("positive" if "sqrt" in op.name else "x",)
        )
        pair = ("x", "y", "positive") if op.arity[0] == 3 else pair
        ops.append(BlockOp(f"v_{op.name}", op.name, pair, ("m", "n"), tuple(sorted(attrs.items()))))
        outs.append((op.name, pair, attrs))
    positive = g.add(g.square(x), 0.5)
    values = {"x": x, "y": y, "positive": positive}
    for i, (name, pair, attrs) in enumerate(outs):
        v = g.apply(name, [values[p] for p in pair], attrs)
        scaled = g.mul(v, 2.0 ** -(i % 3))
        total = scaled if total is None else g.add(total, scaled)
        ops += [BlockOp(f"w{i}", "mul", (f"v_{name}", 2.0 ** -(i % 3)), ("m", "n"))]
        ops += (
            [BlockOp(f"sum{i}", "add", (f"sum{i - 1}", f"w{i}"), ("m", "n"))]
            if i
            else [BlockOp("sum0", "mul", ("w0", 1.0), ("m", "n"))]
        )
    g.mark_output(total)
    first = (
        BlockOp("sq", "square", ("x",), ("m", "n")),
        BlockOp("positive", "add", ("sq", 0.5), ("m", "n")),
    )
    block = BlockGraph(
        (Axis("m", 3, GRID), Axis("n", 40, GRID)),
        tuple(BlockInput(v, (i,), ("m", "n")) for i, v in enumerate("xy")),
        (Stage(None, (*first, *ops)),),
        (BlockOutput(f"sum{len(outs) - 1}", ("m", "n"), "float32"),),
    )
    return fuse(g, block)


ALL = {
    f.__name__: f
    for f in (
        rms_norm_linear,
        gated_mlp,
        lora,
        attention,
        qkv,
        softmax_rows,
        ntrans,
        split_k_linear,
    )
}


def random_inputs(graph: KernelGraph, seed: int = 0) -> list[torch.Tensor]:
    """Return normal random inputs with the dims, dtypes and strides of `graph`."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for t in graph.inputs:
        reach = 1 + sum((d - 1) * s for d, s in zip(t.dims, t.strides, strict=True))
        stored = torch.randn(reach, generator=generator, dtype=torch.float64).to(t.dtype)
        found.append(stored.as_strided(t.dims, t.strides))
    return found
