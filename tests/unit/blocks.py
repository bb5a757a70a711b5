"""µGraphs written by hand, of the kinds that the search finds: a program and one block graph that computes it."""
from __future__ import annotations

from dataclasses import dataclass

import torch

from mirage_hf.codegen.schedule import Schedule
from mirage_hf.graph.block import Accumulator, Axis, BlockGraph, BlockInput, BlockOp, BlockOutput, Role, Stage
from mirage_hf.graph.kernel import KernelGraph, new_kernel_graph
from mirage_hf.graph.ugraph import UGraph

EPS = 1e-6


class Body:
    """Builds a stage: each op's axes follow from its arguments."""

    def __init__(self, order: str, carried: dict[str, str], loop: str | None = None):
        self.order, self.carried, self.loop = order, carried, loop
        self.ops: list[BlockOp] = []
        self.accumulators: list[Accumulator] = []

    def op(self, out: str, fn: str, *args: str | float, over: str | None = None, **attrs: float) -> str:
        union = {a for x in args if isinstance(x, str) for a in self.carried[x]} - {over}
        self.carried[out] = "".join(a for a in self.order if a in union)
        self.ops.append(BlockOp(out, fn, args, tuple(self.carried[out]), tuple(sorted(attrs.items())), over))
        return out

    def accumulate(self, out: str, arg: str, kind: str = "sum") -> str:
        self.carried[out] = self.carried[arg].replace(str(self.loop), "")
        self.accumulators.append(Accumulator(out, arg, kind, tuple(self.carried[out])))
        return out

    def stage(self) -> Stage:
        return Stage(self.loop, tuple(self.ops), tuple(self.accumulators))


class Block:
    """Builds a block graph; axes have one letter."""

    def __init__(self, grid: dict[str, int], loop: dict[str, int] | None = None, tile: dict[str, int] | None = None):
        roles = ((Role.GRID, grid), (Role.LOOP, loop or {}), (Role.TILE, tile or {}))
        self.axes = tuple(Axis(a, n, role) for role, axes in roles for a, n in axes.items())
        self.loop = next(iter(loop), None) if loop else None
        self.order = "".join(a.name for a in self.axes)
        self.carried: dict[str, str] = {}
        self.inputs: list[BlockInput] = []
        self.bodies: list[Body] = []
        self.outputs: list[BlockOutput] = []

    def load(self, name: str, axes: str, *sources: int, joined: str | None = None, sizes: tuple[int, ...] = ()) -> str:
        """`axes`: a letter per dim of the tensor, 1 for a dim of size 1."""
        self.inputs.append(BlockInput(name, sources, tuple(None if a == "1" else a for a in axes), joined, sizes))
        self.carried[name] = "".join(a for a in self.order if a in axes)
        return name

    def stage(self, loop: bool = False) -> Body:
        self.bodies.append(Body(self.order, self.carried, self.loop if loop else None))
        return self.bodies[-1]

    def store(self, value: str, axes: str, dtype: torch.dtype) -> None:
        self.outputs.append(BlockOutput(value, tuple(None if a == "1" else a for a in axes), str(dtype).removeprefix("torch.")))

    def graph(self) -> BlockGraph:
        return BlockGraph(self.axes, tuple(self.inputs), tuple(b.stage() for b in self.bodies), tuple(self.outputs))


def ugraph(program: KernelGraph, *blocks: Block) -> UGraph:
    """The µGraph that runs the blocks, one after the other, each on all inputs of the program."""
    kernels = new_kernel_graph()
    inputs = [kernels.new_input(t.dims, t.dtype, t.strides, name=t.name) for t in program.inputs]
    for block in blocks:
        kernels.mark_output(*kernels.customized(inputs, block.graph()))
    return UGraph(program, kernels)


def linear_weight(g: KernelGraph, k: int, n: int, dtype: torch.dtype, name: str, stored: str = "nk"):
    return g.new_input((k, n), dtype, (1, k) if stored == "nk" else None, name=name)


def scale(body: Body, square: str, size: int) -> str:
    """1 / sqrt(mean + eps) from a sum of squares."""
    return body.op("scale", "rsqrt", body.op("spread", "add", body.op("mean", "mul", square, 1 / size), EPS))


def rms_norm_linear(rows: int = 1, k: int = 512, n: int = 64, weight: bool = True, dtype=torch.float16, stored: str = "nk",
                    residual: bool = False) -> UGraph:
    g = new_kernel_graph()
    x = g.new_input((rows, k), dtype, name="x")
    gamma = g.new_input((1, k), dtype, name="gamma") if weight else None
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
    s.accumulate("sums", s.op("product", "mul", s.op("scaled", "mul", "x", "gamma") if weight else "x", "w"))
    e = b.stage()
    out = e.op("y", "mul", "sums", scale(e, "squares", k))
    b.store(e.op("z", "add", out, "r") if residual else out, "mn", dtype)
    return ugraph(g, b)


def norm_qkv(rows: int = 1, k: int = 512, sizes: tuple[int, ...] = (64, 32, 32), bias: bool = True, dtype=torch.float16) -> UGraph:
    g = new_kernel_graph()
    x, gamma = g.new_input((rows, k), dtype, name="x"), g.new_input((1, k), dtype, name="gamma")
    ws = [linear_weight(g, k, n, dtype, f"w{i}") for i, n in enumerate(sizes)]
    bs = [g.new_input((1, n), dtype, name=f"b{i}") for i, n in enumerate(sizes)] if bias else []
    h = g.rms_norm(x, gamma, eps=EPS)
    parts = [g.matmul(h, w) for w in ws]
    g.mark_output(g.concat([g.add(p, c) for p, c in zip(parts, bs, strict=True)] if bias else parts, 1))
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


def gated_mlp(rows: int = 1, k: int = 512, n: int = 64, norm: bool = False, dtype=torch.float16, stored: str = "nk",
              act: str = "silu") -> UGraph:
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
    s.accumulate("gate_sum", s.op("p1", "mul", "x", "w1")), s.accumulate("up_sum", s.op("p2", "mul", "x", "w2"))
    e = b.stage()
    gate, up = "gate_sum", "up_sum"
    if norm:
        r = scale(e, "squares", k)
        gate, up = e.op("gate", "mul", gate, r), e.op("up", "mul", up, r)
    b.store(e.op("y", "mul", e.op("active", act, gate), up), "mn", dtype)
    return ugraph(g, b)


def lora(rows: int = 1, k: int = 512, n: int = 64, r: int = 16, dtype=torch.float16, scaling: float = 2.0) -> UGraph:
    g = new_kernel_graph()
    x = g.new_input((rows, k), dtype, name="x")
    w, a, c = (linear_weight(g, i, o, dtype, name) for name, i, o in (("w", k, n), ("a", k, r), ("b", r, n)))
    g.mark_output(g.add(g.matmul(x, w), g.mul(g.matmul(g.matmul(x, a), c), scaling)))
    b = Block({"m": rows, "n": n}, {"k": k}, {"r": r})
    b.load("x", "mk", 0), b.load("w", "kn", 1), b.load("a", "kr", 2), b.load("b", "rn", 3)
    s = b.stage(loop=True)
    s.accumulate("base", s.op("p1", "mul", "x", "w")), s.accumulate("down", s.op("p2", "mul", "x", "a"))
    e = b.stage()
    up = e.op("up", "sum", e.op("p3", "mul", "down", "b"), over="r")
    b.store(e.op("y", "add", "base", e.op("delta", "mul", up, scaling)), "mn", dtype)
    return ugraph(g, b)


def softmax(rows: int = 3, n: int = 100, dtype=torch.float16, walk: bool = True) -> UGraph:
    """In three passes over the row (walk), or with the row held whole."""
    g = new_kernel_graph()
    g.mark_output(g.softmax(g.new_input((rows, n), dtype, name="x"), 1))
    b = Block({"m": rows}, {"n": n}) if walk else Block({"m": rows}, None, {"n": n})
    b.load("x", "mn", 0)
    if walk:
        b.stage(loop=True).accumulate("top", "x", "max")
        s = b.stage(loop=True)
        s.accumulate("total", s.op("e", "exp", s.op("shifted", "sub", "x", "top")))
        o = b.stage(loop=True)
        b.store(o.op("y", "div", o.op("e2", "exp", o.op("shifted2", "sub", "x", "top")), "total"), "mn", dtype)
    else:
        s = b.stage()
        e = s.op("e", "exp", s.op("shifted", "sub", "x", s.op("top", "max", "x", over="n")))
        b.store(s.op("y", "div", e, s.op("total", "sum", e, over="n")), "mn", dtype)
    return ugraph(g, b)


def layer_norm(rows: int = 3, n: int = 896, dtype=torch.float16) -> UGraph:
    g = new_kernel_graph()
    x, w, c = (g.new_input(d, dtype, name=name) for name, d in (("x", (rows, n)), ("w", (1, n)), ("c", (1, n))))
    g.mark_output(g.layer_norm(x, w, c, eps=EPS))
    b = Block({"m": rows}, None, {"n": n})
    b.load("x", "mn", 0), b.load("w", "1n", 1), b.load("c", "1n", 2)
    s = b.stage()
    centred = s.op("centred", "sub", "x", s.op("mu", "mul", s.op("total", "sum", "x", over="n"), 1 / n))
    r = scale(s, s.op("squares", "sum", s.op("square", "mul", centred, centred), over="n"), n)
    b.store(s.op("y", "add", s.op("weighted", "mul", s.op("normed", "mul", centred, r), "w"), "c"), "mn", dtype)
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
        b.store(s.op("out", "div", z, s.op("size", "sqrt", s.op("zs", "sum", s.op("z2", "square", z), over="n"))), "mn", dtype)
        return ugraph(g, b)
    s = b.stage(loop=True)
    s.accumulate("ys", s.op("y2", "square", "y"))
    s = b.stage(loop=True)
    s.accumulate("zs", s.op("z2", "square", blend(s, s.op("length", "sqrt", "ys"), "1")))
    s = b.stage(loop=True)
    b.store(s.op("out", "div", blend(s, "length", "2"), s.op("size", "sqrt", "zs")), "mn", dtype)
    return ugraph(g, b)


def batched_matmul(batch: int = 3, rows: int = 5, k: int = 64, n: int = 37, dtype=torch.float16, act: str = "gelu_tanh") -> UGraph:
    g = new_kernel_graph()
    x, w = g.new_input((batch, 1, rows, k), dtype, name="x"), g.new_input((batch, 2, k, n), dtype, name="w")
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


def attention_row(heads: int = 2, q: int = 4, keys: int = 100, d: int = 32, dtype=torch.float16) -> UGraph:
    """Unshifted softmax attention in one pass over the keys."""
    g = new_kernel_graph()
    shapes = (("q", (heads, q, d)), ("key", (heads, d, keys)), ("v", (heads, keys, d)))
    Q, K, V = (g.new_input(dims, dtype, name=name) for name, dims in shapes)
    E = g.exp(g.mul(g.matmul(Q, K), 0.125))
    g.mark_output(g.matmul(g.div(E, g.reduction(E, 2)), V))
    b = Block({"h": heads, "m": q}, {"s": keys}, {"d": d, "e": d})
    b.load("q", "hmd", 0), b.load("key", "hds", 1), b.load("v", "hse", 2)
    s = b.stage(loop=True)
    e = s.op("weights", "exp", s.op("scaled", "mul", s.op("scores", "sum", s.op("qk", "mul", "q", "key"), over="d"), 0.125))
    s.accumulate("total", e), s.accumulate("mixed", s.op("pv", "mul", e, "v"))
    f = b.stage()
    b.store(f.op("y", "div", "mixed", "total"), "hme", dtype)
    return ugraph(g, b)


def elementwise(fn: str, n: int, attrs: dict[str, float] | None = None, arity: int = 1) -> UGraph:
    """One op of the table on float32 rows."""
    g = new_kernel_graph()
    names = ("x", "y")[:arity]
    g.mark_output(g.apply(fn, [g.new_input((n,), torch.float32, name=name) for name in names], attrs or {}))
    b = Block({"m": n})
    for at, name in enumerate(names):
        b.load(name, "m", at)
    b.store(b.stage().op("out", fn, *names, **(attrs or {})), "m", torch.float32)
    return ugraph(g, b)


@dataclass(frozen=True)
class Case:
    """A µGraph and a schedule for it. `interpreted`: Triton's interpreter can run it (it has no bfloat16 tensor cores)."""

    name: str
    ugraph: UGraph
    schedule: Schedule
    interpreted: bool = True


def _case(name: str, u: UGraph, mma: bool = False, interpreted: bool = True, lazy: bool = True, weights_first: bool = True,
          num_warps: int = 4, num_stages: int = 1, **tiles: int) -> Case:
    return Case(name, u, Schedule(tuple(tiles.items()), mma, weights_first, lazy, num_warps=num_warps, num_stages=num_stages), interpreted)


BF16, FP32 = torch.bfloat16, torch.float32


def cases() -> list[Case]:
    return [
        _case("norm linear", rms_norm_linear(1), m=1, n=8, k=256),
        _case("norm linear, loop held whole", rms_norm_linear(1), m=1, n=8, k=512),
        _case("norm linear no weight bf16, pipelined", rms_norm_linear(1, weight=False, dtype=BF16), lazy=False, num_stages=3, m=1, n=8,
              k=256),
        _case("norm linear fp32", rms_norm_linear(1, dtype=FP32), m=1, n=8, k=128),
        _case("norm linear (K, N)", rms_norm_linear(1, stored="kn"), m=1, n=64, k=64),
        _case("norm linear 3 rows", rms_norm_linear(3), m=4, n=8, k=128),
        _case("norm linear 3 rows, no weight", rms_norm_linear(3, weight=False), m=1, n=8, k=128),
        _case("norm linear 3 rows mma", rms_norm_linear(3), mma=True, m=16, n=64, k=128, num_stages=3),
        _case("norm linear 16 rows mma", rms_norm_linear(16, weight=False), mma=True, m=16, n=32, k=128, num_stages=4),
        _case("norm linear 16 rows mma, rows first, bf16", rms_norm_linear(16, dtype=BF16), mma=True, weights_first=False,
              interpreted=False, m=16, n=64, k=128, num_stages=3),
        _case("norm linear 16 rows mma (K, N)", rms_norm_linear(16, stored="kn"), mma=True, m=16, n=64, k=64),
        _case("norm linear fp32 mma", rms_norm_linear(16, 128, dtype=FP32), mma=True, m=16, n=16, k=32),
        _case("norm linear 1 row mma", rms_norm_linear(1), mma=True, m=16, n=32, k=64),
        _case("norm linear residual", rms_norm_linear(1, residual=True), m=1, n=8, k=256),
        _case("norm linear odd sizes", rms_norm_linear(3, 896, 37), m=4, n=16, k=256),
        _case("norm linear odd sizes, each step reduced", rms_norm_linear(3, 896, 37, residual=True), m=2, n=16, k=256, lazy=False),
        _case("norm linear odd sizes mma", rms_norm_linear(3, 100, 37), mma=True, m=16, n=16, k=64, num_stages=2),
        _case("q, k, v with bias", norm_qkv(1), m=1, n=16, k=256),
        _case("q, k, v no bias, 3 rows", norm_qkv(3, bias=False), m=4, n=32, k=128),
        _case("q, k, v straddling tiles", norm_qkv(2, 512, (48, 24, 24)), m=2, n=32, k=256),
        _case("q, k, v 16 rows mma", norm_qkv(16, dtype=BF16), mma=True, interpreted=False, m=16, n=32, k=128, num_stages=3),
        _case("q, k, v straddling tiles mma", norm_qkv(16, 512, (48, 24, 24)), mma=True, m=16, n=64, k=128, num_stages=3),
        _case("gated mlp", gated_mlp(1), m=1, n=8, k=256),
        _case("gated mlp 3 rows (K, N)", gated_mlp(3, stored="kn"), m=4, n=32, k=32),
        _case("gated mlp 16 rows mma", gated_mlp(16), mma=True, m=16, n=64, k=128, num_stages=3),
        _case("norm gated mlp", gated_mlp(1, norm=True, dtype=BF16), m=1, n=8, k=256),
        _case("norm gated mlp gelu, odd sizes mma", gated_mlp(16, 100, 37, norm=True, act="gelu_tanh"), mma=True, m=16, n=32, k=64),
        _case("lora", lora(1), m=1, n=8, k=256, r=16),
        _case("lora 3 rows, odd sizes", lora(3, 100, 37, r=5), m=4, n=8, k=64, r=8),
        _case("lora 16 rows mma", lora(16), mma=True, m=16, n=64, k=128, r=16, num_stages=3),
        _case("lora odd sizes mma", lora(5, 100, 37, r=5), mma=True, m=16, n=32, k=32, r=16),
        _case("softmax, three passes", softmax(), m=1, n=32),
        _case("softmax, three passes, two rows a block", softmax(), m=2, n=32, lazy=False),
        _case("softmax, loop held whole", softmax(), m=2, n=128),
        _case("softmax, row held whole", softmax(walk=False), m=2, n=128),
        _case("layer norm", layer_norm(), m=1, n=1024),
        _case("layer norm bf16", layer_norm(dtype=BF16), m=2, n=1024),
        _case("ntrans", ntrans(), m=1, n=128),
        _case("ntrans, three passes", ntrans(walk=True), m=2, n=32),
        _case("batched gelu and relu", batched_matmul(), b=1, h=1, m=4, n=32, k=32),
        _case("batched gelu and relu, two heads a block", batched_matmul(act="gelu"), b=1, h=2, m=2, n=32, k=32, lazy=False),
        _case("batched mma", batched_matmul(act="tanh"), mma=True, b=1, h=1, m=16, n=32, k=32, num_stages=2),
        _case("attention of few rows", attention_row(), h=1, m=4, s=32, d=32, e=32, lazy=False),
        _case("attention mma", attention_row(q=16), mma=True, h=1, m=16, s=32, d=32, e=32),
        _case("attention mma, rows first", attention_row(q=16), mma=True, weights_first=False, h=1, m=16, s=32, d=32, e=32, num_stages=2),
    ]
