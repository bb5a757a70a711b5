"""Hand-written programs with block graphs that compute them, of the kinds that the search finds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mirage_hf.codegen.schedule import Schedule
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
from mirage_hf.graph.kernel import KernelGraph, new_kernel_graph
from mirage_hf.graph.ugraph import UGraph

EPS = 1e-6


class Body:
    """Build a stage. The axes of each op follow from its arguments."""

    def __init__(
        self,
        order: str,
        carried: dict[str, str],
        loop: str | None = None,
        parts: dict[str, str] | None = None,
    ):
        self.order, self.carried, self.loop, self.parts = order, carried, loop, parts or {}
        self.ops: list[BlockOp] = []
        self.accumulators: list[Accumulator] = []

    def op(
        self, out: str, fn: str, *args: str | float, over: str | None = None, **attrs: float
    ) -> str:
        union = {a for x in args if isinstance(x, str) for a in self.carried[x]}
        self.carried[out] = (
            self.reduced(union, over)
            if over in union
            else "".join(a for a in self.order if a in union)
        )
        self.ops.append(
            BlockOp(out, fn, args, tuple(self.carried[out]), tuple(sorted(attrs.items())), over)
        )
        return out

    def reduced(self, axes, over: str | None) -> str:
        return "".join(
            a for a in self.order if (a in axes and a != over) or a == self.parts.get(str(over))
        )

    def accumulate(self, out: str, arg: str, kind: str = "sum", shift: str | None = None) -> str:
        self.carried[out] = self.reduced(self.carried[arg], self.loop)
        self.accumulators.append(Accumulator(out, arg, kind, tuple(self.carried[out]), shift))
        return out

    def stage(self) -> Stage:
        return Stage(self.loop, tuple(self.ops), tuple(self.accumulators))


class Block:
    """Build a block graph whose axes have names of one letter.

    `splits` maps an axis to the grid axis that numbers its splits.
    """

    def __init__(
        self,
        grid: dict[str, int],
        loop: dict[str, int] | None = None,
        tile: dict[str, int] | None = None,
        parts: dict[str, str] | None = None,
    ):
        roles = ((Role.GRID, grid), (Role.LOOP, loop or {}), (Role.TILE, tile or {}))
        self.parts = parts or {}
        self.axes = tuple(
            Axis(a, n, role, self.parts.get(a)) for role, axes in roles for a, n in axes.items()
        )
        self.loop = next(iter(loop), None) if loop else None
        self.order = "".join(a.name for a in self.axes)
        self.carried: dict[str, str] = {}
        self.inputs: list[BlockInput] = []
        self.bodies: list[Body] = []
        self.outputs: list[BlockOutput] = []

    def load(
        self,
        name: str,
        axes: str,
        *sources: int,
        joined: str | None = None,
        sizes: tuple[int, ...] = (),
    ) -> str:
        """Add an input.

        `axes` has a letter for each dim of the tensor, and 1 for a dim of size 1.
        """
        self.inputs.append(
            BlockInput(name, sources, tuple(None if a == "1" else a for a in axes), joined, sizes)
        )
        self.carried[name] = "".join(a for a in self.order if a in axes)
        return name

    def stage(self, loop: bool = False) -> Body:
        self.bodies.append(Body(self.order, self.carried, self.loop if loop else None, self.parts))
        return self.bodies[-1]

    def store(self, value: str, axes: str, dtype: torch.dtype) -> None:
        self.outputs.append(
            BlockOutput(
                value,
                tuple(None if a == "1" else a for a in axes),
                str(dtype).removeprefix("torch."),
            )
        )

    def graph(self) -> BlockGraph:
        return BlockGraph(
            self.axes,
            tuple(self.inputs),
            tuple(b.stage() for b in self.bodies),
            tuple(self.outputs),
        )


def ugraph(program: KernelGraph, *blocks: Block) -> UGraph:
    """Return the µGraph that runs the blocks in order, each on all inputs of the program."""
    kernels = new_kernel_graph()
    inputs = [kernels.input_like(t) for t in program.inputs]
    for block in blocks:
        kernels.mark_output(*kernels.customized(inputs, block.graph()))
    return UGraph(program, kernels)


def chain(
    program: KernelGraph, *steps: tuple[Block, tuple[int, ...]] | tuple[str, int, dict]
) -> UGraph:
    """Return the µGraph that runs blocks and library ops in order.

    Each step names the tensors that it reads by number. The inputs of the program come first, then
    all results in order. The results of the last step are the outputs.
    """
    kernels = new_kernel_graph()
    tensors = [kernels.input_like(t) for t in program.inputs]
    for step in steps:
        if isinstance(step[0], Block):
            block, reads = step  # type: ignore[misc]
            made = kernels.customized([tensors[n] for n in reads], block.graph())  # type: ignore[union-attr]
        else:
            fn, at, attrs = step  # type: ignore[misc]
            made = [kernels.apply(fn, [tensors[at]], attrs)]
        tensors += made
    kernels.mark_output(*made)
    return UGraph(program, kernels)


def linear_weight(
    g: KernelGraph, k: int, n: int, dtype: torch.dtype, name: str, stored: str = "nk"
):
    return g.new_input((k, n), dtype, (1, k) if stored == "nk" else None, name=name, constant=True)


def scale(body: Body, square: str, size: int) -> str:
    """Add 1 / sqrt(mean + eps), computed from a sum of squares."""
    return body.op(
        "scale", "rsqrt", body.op("spread", "add", body.op("mean", "mul", square, 1 / size), EPS)
    )


def rms_norm_linear(
    rows: int = 1,
    k: int = 512,
    n: int = 64,
    weight: bool = True,
    dtype=torch.float16,
    stored: str = "nk",
    residual: bool = False,
) -> UGraph:
    g = new_kernel_graph()
    x = g.new_input((rows, k), dtype, name="x")
    gamma = g.new_input((1, k), dtype, name="gamma", constant=True) if weight else None
    w = linear_weight(g, k, n, dtype, "w", stored)
    y = g.matmul(g.rms_norm(x, gamma, eps=EPS), w)
    if residual:
        y = g.add(y, g.new_input((rows, n), dtype, name="r"))
    g.mark_output(y)
    b = Block({"m": rows, "n": n}, {"k": k})
    b.load("x", "mk", 0)
    if weight:
        b.load("gamma", "1k", 1)
    b.load("w", "kn", 1 + weight)
    if residual:
        b.load("r", "mn", 2 + weight)
    s = b.stage(loop=True)
    s.accumulate("squares", s.op("square", "mul", "x", "x"))
    s.accumulate(
        "sums", s.op("product", "mul", s.op("scaled", "mul", "x", "gamma") if weight else "x", "w")
    )
    e = b.stage()
    out = e.op("y", "mul", "sums", scale(e, "squares", k))
    b.store(e.op("z", "add", out, "r") if residual else out, "mn", dtype)
    return ugraph(g, b)


def norm_qkv(
    rows: int = 1,
    k: int = 512,
    sizes: tuple[int, ...] = (64, 32, 32),
    bias: bool = True,
    dtype=torch.float16,
) -> UGraph:
    g = new_kernel_graph()
    x, gamma = (
        g.new_input((rows, k), dtype, name="x"),
        g.new_input((1, k), dtype, name="gamma", constant=True),
    )
    ws = [linear_weight(g, k, n, dtype, f"w{i}") for i, n in enumerate(sizes)]
    bs = (
        [g.new_input((1, n), dtype, name=f"b{i}", constant=True) for i, n in enumerate(sizes)]
        if bias
        else []
    )
    h = g.rms_norm(x, gamma, eps=EPS)
    parts = [g.matmul(h, w) for w in ws]
    g.mark_output(
        g.concat([g.add(p, c) for p, c in zip(parts, bs, strict=True)] if bias else parts, 1)
    )
    b = Block({"m": rows, "n": sum(sizes)}, {"k": k})
    b.load("x", "mk", 0), b.load("gamma", "1k", 1)
    b.load("w", "kn", *range(2, 2 + len(sizes)), joined="n", sizes=sizes)
    if bias:
        b.load("bias", "1n", *range(2 + len(sizes), 2 + 2 * len(sizes)), joined="n", sizes=sizes)
    s = b.stage(loop=True)
    s.accumulate("squares", s.op("square", "mul", "x", "x"))
    s.accumulate("sums", s.op("product", "mul", s.op("scaled", "mul", "x", "gamma"), "w"))
    e = b.stage()
    y = e.op("y", "mul", "sums", scale(e, "squares", k))
    b.store(e.op("z", "add", y, "bias") if bias else y, "mn", dtype)
    return ugraph(g, b)


def gated_mlp(
    rows: int = 1,
    k: int = 512,
    n: int = 64,
    norm: bool = False,
    dtype=torch.float16,
    stored: str = "nk",
    act: str = "silu",
) -> UGraph:
    g = new_kernel_graph()
    x = g.new_input((rows, k), dtype, name="x")
    w1, w2 = (linear_weight(g, k, n, dtype, name, stored) for name in ("w1", "w2"))
    h = g.rms_norm(x, eps=EPS) if norm else x
    g.mark_output(g.mul(getattr(g, act)(g.matmul(h, w1)), g.matmul(h, w2)))
    b = Block({"m": rows, "n": n}, {"k": k})
    b.load("x", "mk", 0), b.load("w1", "kn", 1), b.load("w2", "kn", 2)
    s = b.stage(loop=True)
    if norm:
        s.accumulate("squares", s.op("square", "mul", "x", "x"))
    (
        s.accumulate("gate_sum", s.op("p1", "mul", "x", "w1")),
        s.accumulate("up_sum", s.op("p2", "mul", "x", "w2")),
    )
    e = b.stage()
    gate, up = "gate_sum", "up_sum"
    if norm:
        r = scale(e, "squares", k)
        gate, up = e.op("gate", "mul", gate, r), e.op("up", "mul", up, r)
    b.store(e.op("y", "mul", e.op("active", act, gate), up), "mn", dtype)
    return ugraph(g, b)


def lora(
    rows: int = 1, k: int = 512, n: int = 64, r: int = 16, dtype=torch.float16, scaling: float = 2.0
) -> UGraph:
    g = new_kernel_graph()
    x = g.new_input((rows, k), dtype, name="x")
    w, a, c = (
        linear_weight(g, i, o, dtype, name)
        for name, i, o in (("w", k, n), ("a", k, r), ("b", r, n))
    )
    g.mark_output(g.add(g.matmul(x, w), g.mul(g.matmul(g.matmul(x, a), c), scaling)))
    b = Block({"m": rows, "n": n}, {"k": k}, {"r": r})
    b.load("x", "mk", 0), b.load("w", "kn", 1), b.load("a", "kr", 2), b.load("b", "rn", 3)
    s = b.stage(loop=True)
    (
        s.accumulate("base", s.op("p1", "mul", "x", "w")),
        s.accumulate("down", s.op("p2", "mul", "x", "a")),
    )
    e = b.stage()
    up = e.op("up", "sum", e.op("p3", "mul", "down", "b"), over="r")
    b.store(e.op("y", "add", "base", e.op("delta", "mul", up, scaling)), "mn", dtype)
    return ugraph(g, b)


def softmax(rows: int = 3, n: int = 100, dtype=torch.float16, walk: bool = True) -> UGraph:
    """Compute softmax in three passes over the row (walk), or with the row held whole."""
    g = new_kernel_graph()
    g.mark_output(g.softmax(g.new_input((rows, n), dtype, name="x"), 1))
    b = Block({"m": rows}, {"n": n}) if walk else Block({"m": rows}, None, {"n": n})
    b.load("x", "mn", 0)
    if walk:
        b.stage(loop=True).accumulate("top", "x", "max")
        s = b.stage(loop=True)
        s.accumulate("total", s.op("e", "exp", s.op("shifted", "sub", "x", "top")))
        o = b.stage(loop=True)
        b.store(
            o.op("y", "div", o.op("e2", "exp", o.op("shifted2", "sub", "x", "top")), "total"),
            "mn",
            dtype,
        )
    else:
        s = b.stage()
        e = s.op("e", "exp", s.op("shifted", "sub", "x", s.op("top", "max", "x", over="n")))
        b.store(s.op("y", "div", e, s.op("total", "sum", e, over="n")), "mn", dtype)
    return ugraph(g, b)


def layer_norm(rows: int = 3, n: int = 896, dtype=torch.float16) -> UGraph:
    g = new_kernel_graph()
    x, w, c = (
        g.new_input(d, dtype, name=name)
        for name, d in (("x", (rows, n)), ("w", (1, n)), ("c", (1, n)))
    )
    g.mark_output(g.layer_norm(x, w, c, eps=EPS))
    b = Block({"m": rows}, None, {"n": n})
    b.load("x", "mn", 0), b.load("w", "1n", 1), b.load("c", "1n", 2)
    s = b.stage()
    centred = s.op(
        "centred", "sub", "x", s.op("mu", "mul", s.op("total", "sum", "x", over="n"), 1 / n)
    )
    r = scale(s, s.op("squares", "sum", s.op("square", "mul", centred, centred), over="n"), n)
    b.store(
        s.op("y", "add", s.op("weighted", "mul", s.op("normed", "mul", centred, r), "w"), "c"),
        "mn",
        dtype,
    )
    return ugraph(g, b)


def ntrans(rows: int = 2, n: int = 100, dtype=torch.float16, walk: bool = False) -> UGraph:
    g = new_kernel_graph()
    x, y, a = (g.new_input((rows, n), dtype, name=name) for name in ("x", "y", "a"))

    def norm(z):
        return g.div(z, g.sqrt(g.reduction(g.square(z), 1)))

    g.mark_output(norm(g.add(x, g.mul(a, g.sub(norm(y), x)))))
    b = Block({"m": rows}, {"n": n}) if walk else Block({"m": rows}, None, {"n": n})
    b.load("x", "mn", 0), b.load("y", "mn", 1), b.load("a", "mn", 2)

    def blend(s: Body, length: str, tag: str) -> str:
        step = s.op(f"step{tag}", "sub", s.op(f"unit{tag}", "div", "y", length), "x")
        return s.op(f"blend{tag}", "add", "x", s.op(f"move{tag}", "mul", "a", step))

    if not walk:
        s = b.stage()
        length = s.op("length", "sqrt", s.op("ys", "sum", s.op("y2", "square", "y"), over="n"))
        z = blend(s, length, "")
        b.store(
            s.op(
                "out",
                "div",
                z,
                s.op("size", "sqrt", s.op("zs", "sum", s.op("z2", "square", z), over="n")),
            ),
            "mn",
            dtype,
        )
        return ugraph(g, b)
    s = b.stage(loop=True)
    s.accumulate("ys", s.op("y2", "square", "y"))
    s = b.stage(loop=True)
    s.accumulate("zs", s.op("z2", "square", blend(s, s.op("length", "sqrt", "ys"), "1")))
    s = b.stage(loop=True)
    b.store(s.op("out", "div", blend(s, "length", "2"), s.op("size", "sqrt", "zs")), "mn", dtype)
    return ugraph(g, b)


def batched_matmul(
    batch: int = 3,
    rows: int = 5,
    k: int = 64,
    n: int = 37,
    dtype=torch.float16,
    act: str = "gelu_tanh",
) -> UGraph:
    g = new_kernel_graph()
    x, w = (
        g.new_input((batch, 1, rows, k), dtype, name="x"),
        g.new_input((batch, 2, k, n), dtype, name="w"),
    )
    y = g.matmul(x, w)
    g.mark_output(getattr(g, act)(y), g.relu(y))
    b = Block({"b": batch, "h": 2, "m": rows, "n": n}, {"k": k})
    b.load("x", "b1mk", 0), b.load("w", "bhkn", 1)
    s = b.stage(loop=True)
    s.accumulate("sums", s.op("p", "mul", "x", "w"))
    e = b.stage()
    b.store(e.op("y", act, "sums"), "bhmn", dtype)
    b.store(e.op("z", "relu", "sums"), "bhmn", dtype)
    return ugraph(g, b)


def attention_row(
    heads: int = 2, q: int = 4, keys: int = 100, d: int = 32, dtype=torch.float16
) -> UGraph:
    """Compute softmax attention without a maximum, in one pass over the keys."""
    g = new_kernel_graph()
    shapes = (("q", (heads, q, d)), ("key", (heads, d, keys)), ("v", (heads, keys, d)))
    Q, K, V = (g.new_input(dims, dtype, name=name) for name, dims in shapes)
    E = g.exp(g.mul(g.matmul(Q, K), 0.125))
    g.mark_output(g.matmul(g.div(E, g.reduction(E, 2)), V))
    b = Block({"h": heads, "m": q}, {"s": keys}, {"d": d, "e": d})
    b.load("q", "hmd", 0), b.load("key", "hds", 1), b.load("v", "hse", 2)
    s = b.stage(loop=True)
    e = s.op(
        "weights",
        "exp",
        s.op(
            "scaled", "mul", s.op("scores", "sum", s.op("qk", "mul", "q", "key"), over="d"), 0.125
        ),
    )
    s.accumulate("total", e), s.accumulate("mixed", s.op("pv", "mul", e, "v"))
    f = b.stage()
    b.store(f.op("y", "div", "mixed", "total"), "hme", dtype)
    return ugraph(g, b)


def grouped_attention(
    heads: int = 2,
    group: int = 3,
    q: int = 5,
    keys: int = 100,
    d: int = 32,
    dtype=torch.float16,
    online: bool = False,
) -> UGraph:
    """Compute attention of several queries and heads that share their keys.

    The exponentials are plain and not normalized, or follow a running maximum.
    """
    g = new_kernel_graph()
    shapes = (("q", (heads, group, q, d)), ("key", (heads, 1, d, keys)), ("v", (heads, 1, keys, d)))
    Q, K, V = (g.new_input(dims, dtype, name=name) for name, dims in shapes)
    scores = g.mul(g.matmul(Q, K), 0.125)
    g.mark_output(g.matmul(g.softmax(scores, 3) if online else g.exp(scores), V))
    b = Block({"h": heads}, {"s": keys}, {"g": group, "m": q, "d": d, "e": d})
    b.load("q", "hgmd", 0), b.load("key", "h1ds", 1), b.load("v", "h1se", 2)
    s = b.stage(loop=True)
    x = s.op("scaled", "mul", s.op("scores", "sum", s.op("qk", "mul", "q", "key"), over="d"), 0.125)
    top = s.accumulate("top", x, "max") if online else None
    e = s.op("weights", "exp", s.op("shifted", "sub", x, top) if online else x)
    s.accumulate("mixed", s.op("pv", "mul", e, "v"), shift=top)
    if not online:
        b.store("mixed", "hgme", dtype)
        return ugraph(g, b)
    s.accumulate("total", e, shift=top)
    b.store(b.stage().op("y", "div", "mixed", "total"), "hgme", dtype)
    return ugraph(g, b)


def online_attention(
    heads: int = 2,
    q: int = 4,
    keys: int = 100,
    d: int = 32,
    parts: int = 1,
    dtype=torch.float16,
    bias: bool = False,
    scaling: float = 0.125,
) -> UGraph:
    """Compute softmax attention with a running maximum in one pass over the keys.

    With `parts`, the keys are split and a second kernel combines the partial results.
    """
    g = new_kernel_graph()
    Q, K = (
        g.new_input((heads, q, d), dtype, name="q"),
        g.new_input((heads, d, keys), dtype, (keys * d, 1, d), name="key"),
    )
    V = g.new_input((heads, keys, d), dtype, name="v")
    scores = g.mul(g.matmul(Q, K), scaling)
    if bias:
        scores = g.add(scores, g.new_input((1, q, keys), dtype, name="bias"))
    g.mark_output(g.matmul(g.softmax(scores, 2), V))
    split = parts > 1
    b = Block(
        {"h": heads, "m": q} | ({"p": parts} if split else {}),
        {"s": keys},
        {"d": d},
        {"s": "p"} if split else None,
    )
    b.load("q", "hmd", 0), b.load("key", "hds", 1), b.load("v", "hsd", 2)
    if bias:
        b.load("bias", "1ms", 3)
    s = b.stage(loop=True)
    x = s.op(
        "scaled", "mul", s.op("scores", "sum", s.op("qk", "mul", "q", "key"), over="d"), scaling
    )
    x = s.op("biased", "add", x, "bias") if bias else x
    top = s.accumulate("top", x, "max")
    e = s.op("weights", "exp", s.op("shifted", "sub", x, top))
    s.accumulate("total", e, shift=top), s.accumulate("mixed", s.op("pv", "mul", e, "v"), shift=top)
    if not split:
        f = b.stage()
        b.store(f.op("y", "div", "mixed", "total"), "hmd", dtype)
        return ugraph(g, b)
    (
        b.store("top", "hmp", torch.float32),
        b.store("total", "phm", torch.float32),
        b.store("mixed", "hpmd", torch.float32),
    )
    c = Block({"h": heads, "m": q}, {"p": parts}, {"d": d})
    c.load("tops", "hmp", 0), c.load("totals", "phm", 1), c.load("mixes", "hpmd", 2)
    s = c.stage(loop=True)
    top = s.accumulate("top", "tops", "max")
    e = s.op("weights", "exp", s.op("shifted", "sub", "tops", top))
    (
        s.accumulate("total", s.op("t", "mul", e, "totals"), shift=top),
        s.accumulate("mixed", s.op("w", "mul", e, "mixes"), shift=top),
    )
    f = c.stage()
    c.store(f.op("y", "div", "mixed", "total"), "hmd", dtype)
    n = len(g.inputs)
    return chain(g, (b, tuple(range(n))), (c, (n, n + 1, n + 2)))


def split_matmul(
    rows: int = 3,
    k: int = 100,
    n: int = 37,
    parts: int = 3,
    dtype=torch.float16,
    held: bool = False,
    view: bool = False,
) -> UGraph:
    """Compute partial sums over splits of k, then add them.

    `held`: a split is one tile. `view`: the second kernel reads the partial sums transposed.
    """
    g = new_kernel_graph()
    x, w = g.new_input((rows, k), dtype, name="x"), linear_weight(g, k, n, dtype, "w")
    g.mark_output(g.gelu_tanh(g.matmul(x, w)))
    b = Block(
        {"m": rows, "p": parts, "n": n},
        None if held else {"k": k},
        {"k": k} if held else None,
        {"k": "p"},
    )
    b.load("x", "mk", 0), b.load("w", "kn", 1)
    s = b.stage(loop=not held)
    product = s.op("product", "mul", "x", "w")
    s.op("partial", "sum", product, over="k") if held else s.accumulate("partial", product)
    b.store("partial", "mpn" if view else "pmn", torch.float32)
    c = Block({"m": rows, "n": n}, None, {"p": parts})
    c.load("partials", "pmn", 0)
    s = c.stage()
    c.store(s.op("y", "gelu_tanh", s.op("sums", "sum", "partials", over="p")), "mn", dtype)
    return chain(
        g,
        (b, (0, 1)),
        *([("permute", 2, {"order": (1, 0, 2)}), (c, (3,))] if view else [(c, (2,))]),
    )


def squares_then_linear(
    rows: int = 3,
    k: int = 512,
    n: int = 64,
    parts: int = 4,
    dtype=torch.float16,
    scaled_before: bool = False,
) -> UGraph:
    """Compute RMSNorm + Linear as two kernels: sums of squares over splits of k, then the rest.

    With `scaled_before`, rows are scaled inside the loop, so the loop reads a value that is
    computed once before it. Otherwise only the epilogue reads it.
    """
    g = new_kernel_graph()
    x, gamma = (
        g.new_input((rows, k), dtype, name="x"),
        g.new_input((1, k), dtype, name="gamma", constant=True),
    )
    g.mark_output(g.matmul(g.rms_norm(x, gamma, eps=EPS), linear_weight(g, k, n, dtype, "w")))
    b = Block({"m": rows, "p": parts}, {"k": k}, parts={"k": "p"})
    b.load("x", "mk", 0)
    s = b.stage(loop=True)
    b.store(s.accumulate("partial", s.op("square", "mul", "x", "x")), "pm", torch.float32)
    c = Block({"m": rows, "n": n}, {"k": k}, {"p": parts})
    for name, axes, source in (
        ("x", "mk", 0),
        ("gamma", "1k", 1),
        ("w", "kn", 2),
        ("partials", "pm", 3),
    ):
        c.load(name, axes, source)
    s = c.stage()
    root = scale(s, s.op("squares", "sum", "partials", over="p"), k)
    s = c.stage(loop=True)
    scaled = s.op("scaled", "mul", "x", "gamma")
    sums = s.accumulate(
        "sums",
        s.op("product", "mul", s.op("rows", "mul", scaled, root) if scaled_before else scaled, "w"),
    )
    c.store(sums if scaled_before else c.stage().op("y", "mul", sums, root), "mn", dtype)
    return chain(g, (b, (0,)), (c, (0, 1, 2, 3)))


def split_softmax(
    rows: int = 3, n: int = 100, parts: int = 3, dtype=torch.float16, walk: bool = True
) -> UGraph:
    """Compute maximum and sum of each split of a row, then finish the split in every block.

    An output carries the axis that is split.
    """
    g = new_kernel_graph()
    g.mark_output(g.softmax(g.new_input((rows, n), dtype, name="x"), 1))
    grid, held = {"m": rows, "p": parts}, {"n": n}
    b = Block(grid, held if walk else None, None if walk else held, {"n": "p"})
    b.load("x", "mn", 0)
    s = b.stage(loop=walk)
    top = s.accumulate("top", "x", "max") if walk else s.op("top", "max", "x", over="n")
    e = s.op("e", "exp", s.op("shifted", "sub", "x", top))
    s.accumulate("total", e, shift=top) if walk else s.op("total", "sum", e, over="n")
    b.store("top", "mp", torch.float32), b.store("total", "mp", torch.float32)
    c = Block(
        grid, held if walk else None, {"t": parts} if walk else {"t": parts} | held, {"n": "p"}
    )
    c.load("x", "mn", 0), c.load("tops", "mt", 1), c.load("totals", "mt", 2)
    s = c.stage(loop=walk)
    top = s.op("top", "max", "tops", over="t")
    total = s.op(
        "total",
        "sum",
        s.op("part", "mul", s.op("share", "exp", s.op("lower", "sub", "tops", top)), "totals"),
        over="t",
    )
    c.store(
        s.op("y", "div", s.op("e", "exp", s.op("shifted", "sub", "x", top)), total), "mn", dtype
    )
    return chain(g, (b, (0,)), (c, (0, 1, 2)))


def row_maximum(walk: bool) -> UGraph:
    """Compute the maximum of each row, walked or held whole."""
    g = new_kernel_graph()
    g.mark_output(g.reduction(g.new_input((3, 100), torch.float16), 1, "max"))
    b = Block({"m": 3}, {"n": 100} if walk else None, None if walk else {"n": 100})
    b.load("x", "mn", 0)
    s = b.stage(loop=walk)
    b.store(
        s.accumulate("top", "x", "max") if walk else s.op("top", "max", "x", over="n"),
        "m1",
        torch.float16,
    )
    return ugraph(g, b)


def attention_inputs(
    name: str, dtype: torch.dtype, heads: int, q: int, keys: int, d: int
) -> list[torch.Tensor]:
    """Return q, k, v and a bias that are hard for softmax.

    Scores reach ±1e4. -inf hides some keys, and all keys of some rows. Some numbers make NaN in
    torch.
    """
    generator = torch.Generator().manual_seed(1)
    x, k, v = (
        torch.randn(dims, generator=generator).to(dtype)
        for dims in ((heads, q, d), (heads, keys, d), (heads, keys, d))
    )
    bias = torch.zeros(1, q, keys, dtype=dtype)
    if name == "huge scores":
        k[:, keys // 3] = 0.0
        bias = (torch.rand(1, q, keys, generator=generator) * 2e4 - 1e4).to(dtype)
    if name.startswith("masked"):
        bias[:, :, : keys // 2 + 3] = -math.inf  # the first tiles and the first splits
        bias[:, 0, -5:] = -math.inf
    if name == "masked rows":
        bias[:, 1] = -math.inf
    if name == "infinite":
        bias[:, 1, keys // 2] = math.inf
    if name == "one NaN":
        bias[:, 1, keys // 2] = math.nan
    return [x, k.transpose(1, 2), v, bias]


def elementwise(fn: str, n: int, attrs: dict[str, float] | None = None, arity: int = 1) -> UGraph:
    """Apply one op of the table to float32 rows."""
    g = new_kernel_graph()
    names = ("x", "y", "z")[:arity]
    g.mark_output(
        g.apply(fn, [g.new_input((n,), torch.float32, name=name) for name in names], attrs or {})
    )
    b = Block({"m": n})
    for at, name in enumerate(names):
        b.load(name, "m", at)
    b.store(b.stage().op("out", fn, *names, **(attrs or {})), "m", torch.float32)
    return ugraph(g, b)


@dataclass(frozen=True)
class Case:
    """A µGraph with its schedules.

    `interpreted` is False if Triton's interpreter cannot run it: it has no bfloat16 tensor cores.
    """

    name: str
    ugraph: UGraph
    schedules: tuple[Schedule, ...]
    interpreted: bool = True

    @property
    def schedule(self) -> Schedule:
        """Return the schedule of a µGraph of one kernel."""
        (schedule,) = self.schedules
        return schedule


def _case(
    name: str,
    u: UGraph,
    mma: bool = False,
    interpreted: bool = True,
    reduce_after_loop: bool = True,
    weights_first: bool = True,
    num_warps: int = 4,
    num_stages: int = 1,
    cooperating_blocks: int = 1,
    prefetch_steps: int = 0,
    **tiles: int,
) -> Case:
    schedule = Schedule(
        tiles,
        mma,
        weights_first,
        reduce_after_loop,
        num_warps=num_warps,
        num_stages=num_stages,
        cooperating_blocks=cooperating_blocks,
        prefetch_steps=prefetch_steps,
    )
    return Case(name, u, (schedule,), interpreted)


def _cases(name: str, u: UGraph, *schedules: dict, interpreted: bool = True) -> Case:
    """Return cases of several kernels, each with several tiles and other choices."""
    known = (
        "mma",
        "weights_first",
        "reduce_after_loop",
        "num_warps",
        "num_stages",
        "cooperating_blocks",
        "prefetch_steps",
        "trigger_early",
    )
    return Case(
        name,
        u,
        tuple(
            Schedule(
                {a: t for a, t in s.items() if a not in known},
                **{a: t for a, t in s.items() if a in known},
            )
            for s in schedules
        ),
        interpreted,
    )


BF16, FP32 = torch.bfloat16, torch.float32


def cases() -> list[Case]:
    return [
        _case("norm linear", rms_norm_linear(1), m=1, n=8, k=256),
        _case("norm linear, loop held whole", rms_norm_linear(1), m=1, n=8, k=512),
        _case(
            "norm linear no weight bf16, pipelined",
            rms_norm_linear(1, weight=False, dtype=BF16),
            reduce_after_loop=False,
            num_stages=3,
            m=1,
            n=8,
            k=256,
        ),
        _case("norm linear fp32", rms_norm_linear(1, dtype=FP32), m=1, n=8, k=128),
        _case("norm linear (K, N)", rms_norm_linear(1, stored="kn"), m=1, n=64, k=64),
        _case("norm linear 3 rows", rms_norm_linear(3), m=4, n=8, k=128),
        _case("norm linear 3 rows, no weight", rms_norm_linear(3, weight=False), m=1, n=8, k=128),
        _case(
            "norm linear 3 rows mma", rms_norm_linear(3), mma=True, m=16, n=64, k=128, num_stages=3
        ),
        _case(
            "norm linear 16 rows mma",
            rms_norm_linear(16, weight=False),
            mma=True,
            m=16,
            n=32,
            k=128,
            num_stages=4,
        ),
        _case(
            "norm linear 16 rows mma, rows first, bf16",
            rms_norm_linear(16, dtype=BF16),
            mma=True,
            weights_first=False,
            interpreted=False,
            m=16,
            n=64,
            k=128,
            num_stages=3,
        ),
        _case(
            "norm linear 16 rows mma (K, N)",
            rms_norm_linear(16, stored="kn"),
            mma=True,
            m=16,
            n=64,
            k=64,
        ),
        _case(
            "norm linear fp32 mma", rms_norm_linear(16, 128, dtype=FP32), mma=True, m=16, n=16, k=32
        ),
        _case("norm linear 1 row mma", rms_norm_linear(1), mma=True, m=16, n=32, k=64),
        _case(
            "norm linear 5 rows mma in 8 columns",
            rms_norm_linear(5),
            mma=True,
            m=8,
            n=16,
            k=64,
            num_stages=3,
        ),
        _case(
            "norm linear, loop split",
            rms_norm_linear(1),
            m=1,
            n=8,
            k=64,
            cooperating_blocks=4,
            prefetch_steps=2,
        ),
        _case(
            "norm linear 3 rows (K, N), loop split",
            rms_norm_linear(3, stored="kn"),
            m=2,
            n=64,
            k=32,
            cooperating_blocks=2,
            prefetch_steps=4,
        ),
        _case(
            "norm linear 16 rows mma, loop split",
            rms_norm_linear(16, dtype=BF16, residual=True),
            mma=True,
            interpreted=False,
            m=16,
            n=64,
            k=128,
            num_stages=3,
            cooperating_blocks=2,
            prefetch_steps=2,
        ),
        _case(
            "norm linear odd sizes mma, loop split unevenly",
            rms_norm_linear(3, 300, 37, residual=True),
            mma=True,
            m=16,
            n=16,
            k=32,
            num_stages=2,
            cooperating_blocks=4,
            prefetch_steps=8,
        ),
        _case("norm linear residual", rms_norm_linear(1, residual=True), m=1, n=8, k=256),
        _case("norm linear odd sizes", rms_norm_linear(3, 896, 37), m=4, n=16, k=256),
        _case(
            "norm linear odd sizes, each step reduced",
            rms_norm_linear(3, 896, 37, residual=True),
            m=2,
            n=16,
            k=256,
            reduce_after_loop=False,
        ),
        _case(
            "norm linear odd sizes mma",
            rms_norm_linear(3, 100, 37),
            mma=True,
            m=16,
            n=16,
            k=64,
            num_stages=2,
        ),
        _case("q, k, v with bias", norm_qkv(1), m=1, n=16, k=256),
        _case("q, k, v no bias, 3 rows", norm_qkv(3, bias=False), m=4, n=32, k=128),
        _case("q, k, v straddling tiles", norm_qkv(2, 512, (48, 24, 24)), m=2, n=32, k=256),
        _case(
            "q, k, v 16 rows mma",
            norm_qkv(16, dtype=BF16),
            mma=True,
            interpreted=False,
            m=16,
            n=32,
            k=128,
            num_stages=3,
        ),
        _case(
            "q, k, v straddling tiles mma",
            norm_qkv(16, 512, (48, 24, 24)),
            mma=True,
            m=16,
            n=64,
            k=128,
            num_stages=3,
        ),
        _case("gated mlp", gated_mlp(1), m=1, n=8, k=256),
        _case(
            "gated mlp, loop split, asked for early",
            gated_mlp(2),
            m=2,
            n=8,
            k=64,
            cooperating_blocks=2,
            prefetch_steps=1,
        ),
        _case("gated mlp 3 rows (K, N)", gated_mlp(3, stored="kn"), m=4, n=32, k=32),
        _case("gated mlp 16 rows mma", gated_mlp(16), mma=True, m=16, n=64, k=128, num_stages=3),
        _case("norm gated mlp", gated_mlp(1, norm=True, dtype=BF16), m=1, n=8, k=256),
        _case(
            "norm gated mlp gelu, odd sizes mma",
            gated_mlp(16, 100, 37, norm=True, act="gelu_tanh"),
            mma=True,
            m=16,
            n=32,
            k=64,
        ),
        _case("lora", lora(1), m=1, n=8, k=256, r=16),
        _case("lora 3 rows, odd sizes", lora(3, 100, 37, r=5), m=4, n=8, k=64, r=8),
        _case("lora 16 rows mma", lora(16), mma=True, m=16, n=64, k=128, r=16, num_stages=3),
        _case("lora odd sizes mma", lora(5, 100, 37, r=5), mma=True, m=16, n=32, k=32, r=16),
        _case("softmax, three passes", softmax(), m=1, n=32),
        _case(
            "softmax, three passes, two rows a block", softmax(), m=2, n=32, reduce_after_loop=False
        ),
        _case("softmax, loop held whole", softmax(), m=2, n=128),
        _case("softmax, row held whole", softmax(walk=False), m=2, n=128),
        _case("layer norm", layer_norm(), m=1, n=1024),
        _case("layer norm bf16", layer_norm(dtype=BF16), m=2, n=1024),
        _case("ntrans", ntrans(), m=1, n=128),
        _case("ntrans, three passes", ntrans(walk=True), m=2, n=32),
        _case("batched gelu and relu", batched_matmul(), b=1, h=1, m=4, n=32, k=32),
        _case(
            "batched gelu and relu, two heads a block",
            batched_matmul(act="gelu"),
            b=1,
            h=2,
            m=2,
            n=32,
            k=32,
            reduce_after_loop=False,
        ),
        _case(
            "batched mma",
            batched_matmul(act="tanh"),
            mma=True,
            b=1,
            h=1,
            m=16,
            n=32,
            k=32,
            num_stages=2,
        ),
        _case(
            "attention of few rows",
            attention_row(),
            h=1,
            m=4,
            s=32,
            d=32,
            e=32,
            reduce_after_loop=False,
        ),
        _case("attention mma", attention_row(q=16), mma=True, h=1, m=16, s=32, d=32, e=32),
        _case("online attention", online_attention(), h=1, m=4, s=32, d=32),
        _case("online attention, keys held whole", online_attention(keys=50), h=1, m=4, s=64, d=32),
        _case(
            "online attention, loop split",
            online_attention(bias=True),
            h=1,
            m=4,
            s=16,
            d=32,
            cooperating_blocks=2,
        ),
        _case(
            "online attention mma, loop split unevenly",
            online_attention(q=16, keys=150),
            mma=True,
            h=1,
            m=16,
            s=16,
            d=32,
            cooperating_blocks=4,
            num_stages=2,
        ),
        _case(
            "online attention with a bias fp32",
            online_attention(bias=True, dtype=FP32, d=20),
            h=1,
            m=2,
            s=16,
            d=32,
            reduce_after_loop=False,
        ),
        _case(
            "online attention mma",
            online_attention(q=16, bias=True),
            mma=True,
            h=1,
            m=16,
            s=32,
            d=32,
            num_stages=2,
        ),
        _case(
            "online attention mma, rows first",
            online_attention(q=5, d=64),
            mma=True,
            weights_first=False,
            h=1,
            m=16,
            s=32,
            d=64,
        ),
        _case(
            "online attention mma bf16",
            online_attention(q=16, d=64, dtype=BF16),
            mma=True,
            interpreted=False,
            h=1,
            m=16,
            s=64,
            d=64,
            num_stages=2,
        ),
        _case(
            "online attention mma in 8 columns",
            online_attention(q=5, keys=200, d=64),
            mma=True,
            h=1,
            m=8,
            s=64,
            d=64,
            num_stages=2,
            cooperating_blocks=2,
        ),
        _cases(
            "split attention",
            online_attention(parts=3),
            dict(h=1, m=4, p=1, s=16, d=32),
            dict(h=1, m=4, p=4, d=32),
        ),
        _cases(
            "split attention of one row bf16",
            online_attention(8, 1, 200, 64, 5, BF16),
            dict(h=1, m=1, p=1, s=32, d=64),
            dict(h=1, m=1, p=4, d=64),
        ),
        _cases(
            "split attention, parts held whole",
            online_attention(parts=7, bias=True),
            dict(h=1, m=4, p=1, s=16, d=32, trigger_early=True),
            dict(h=2, m=2, p=2, d=32, reduce_after_loop=False),
        ),
        _cases(
            "split attention mma",
            online_attention(q=5, parts=3, bias=True),
            dict(mma=True, h=1, m=16, p=1, s=32, d=32, num_stages=2),
            dict(h=1, m=4, p=4, d=32),
        ),
        _cases(
            "split attention mma, rows first",
            online_attention(q=16, keys=200, parts=4),
            dict(mma=True, weights_first=False, h=1, m=16, p=1, s=16, d=32, num_stages=2),
            dict(h=1, m=4, p=4, d=32),
        ),
        _cases(
            "split matmul, its loop split again",
            split_matmul(2, 500, 48, 3),
            dict(m=2, n=8, p=1, k=16, cooperating_blocks=4, prefetch_steps=2),
            dict(m=2, n=8, p=4),
        ),
        _cases("split matmul", split_matmul(), dict(m=4, n=8, p=1, k=16), dict(m=4, n=8, p=4)),
        _cases(
            "split matmul, parts are tiles",
            split_matmul(held=True, parts=7),
            dict(m=1, n=8, p=1, k=16),
            dict(m=4, n=8, p=8),
        ),
        _cases(
            "split matmul mma",
            split_matmul(16),
            dict(mma=True, m=16, n=16, p=1, k=16),
            dict(m=4, n=8, p=4),
        ),
        _cases(
            "split matmul mma, parts are tiles",
            split_matmul(16, parts=4, held=True),
            dict(mma=True, m=16, n=32, p=1, k=32),
            dict(m=4, n=8, p=4),
        ),
        _cases(
            "split matmul, read transposed",
            split_matmul(view=True, dtype=FP32),
            dict(m=2, n=8, p=1, k=16, reduce_after_loop=False),
            dict(m=4, n=8, p=4),
        ),
        _cases(
            "squares, then linear",
            squares_then_linear(),
            dict(m=4, p=1, k=64, trigger_early=True),
            dict(m=4, n=8, k=64, p=4, num_stages=2, prefetch_steps=1),
        ),
        _cases(
            "squares, then linear mma, loop split",
            squares_then_linear(16),
            dict(m=4, p=1, k=128, trigger_early=True),
            dict(
                mma=True,
                m=16,
                n=64,
                k=32,
                p=4,
                num_stages=3,
                cooperating_blocks=2,
                prefetch_steps=2,
            ),
        ),
        _cases(
            "squares, then linear of scaled rows mma",
            squares_then_linear(16, scaled_before=True),
            dict(m=4, p=1, k=128),
            dict(mma=True, m=16, n=32, k=32, p=4, num_stages=3),
        ),
        _cases("split softmax", split_softmax(), dict(m=2, p=1, n=16), dict(m=2, p=1, n=8, t=4)),
        _cases(
            "split softmax, one element at a time",
            split_softmax(2, 10, 4),
            dict(m=1, p=1, n=1),
            dict(m=1, p=1, n=1, t=4),
        ),
        _cases(
            "split softmax, parts are tiles",
            split_softmax(walk=False),
            dict(m=2, p=1, n=64),
            dict(m=2, p=1, n=64, t=4),
        ),
        _cases(
            "split softmax, parts of one element",
            split_softmax(2, 5, 5, walk=False),
            dict(m=1, p=1, n=1),
            dict(m=2, p=1, n=1, t=8),
        ),
        _case(
            "grouped attention mma",
            grouped_attention(),
            mma=True,
            h=1,
            g=4,
            m=8,
            s=32,
            d=32,
            e=32,
            num_stages=2,
        ),
        _case(
            "grouped attention mma, rows first",
            grouped_attention(group=2, q=2),
            mma=True,
            weights_first=False,
            h=1,
            g=4,
            m=4,
            s=16,
            d=32,
            e=32,
        ),
        _case(
            "grouped attention mma, keys held whole",
            grouped_attention(q=8, dtype=BF16),
            mma=True,
            h=1,
            g=4,
            m=8,
            s=128,
            d=32,
            e=32,
            interpreted=False,
        ),
        _case(
            "grouped attention mma, few of each axis",
            grouped_attention(group=4, q=4),
            mma=True,
            h=1,
            g=4,
            m=4,
            s=64,
            d=32,
            e=32,
            num_stages=2,
        ),
        _case(
            "grouped attention mma, 64 rows first",
            grouped_attention(group=8, q=8, online=True),
            mma=True,
            weights_first=False,
            h=1,
            g=8,
            m=8,
            s=16,
            d=32,
            e=32,
            num_stages=2,
            interpreted=False,
        ),
        _case(
            "attention mma, rows first",
            attention_row(q=16),
            mma=True,
            weights_first=False,
            h=1,
            m=16,
            s=32,
            d=32,
            e=32,
            num_stages=2,
        ),
    ]
