"""Programs whose weights an index chooses, as mixtures of experts do, and their kernels' errors."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

import mirage_hf as mi
from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.errors import CodegenError
from mirage_hf.graph import strided
from mirage_hf.graph.block import Role
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import DTensor, KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.search.engine import search
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.tune.measure import random_inputs
from mirage_hf.tune.space import schedules

SEARCH = SearchOptions(threads=1)


@dataclass(frozen=True)
class Mixture:
    """The sizes of a mixture of experts, and how its weights lie in memory."""

    tokens: int
    chosen: int
    experts: int
    width: int
    inner: int
    dtype: str = "float32"
    index: str = "int32"

    #: How gate and up of one expert lie in memory: "apart"; "packed" as rows (2 · inner, width),
    #: gate first; or "interleaved" as columns (width, 2 · inner).
    layout: str = "packed"

    #: Whether the linears of experts have biases.
    biases: bool = False

    #: Whether an RMSNorm comes before gate and up.
    norm: bool = False


#: Qwen3-30B-A3B and gpt-oss-20b.
QWEN = Mixture(1, 8, 128, 2048, 768, "bfloat16")
GPT_OSS = Mixture(1, 4, 32, 2880, 2880, "bfloat16", layout="interleaved", biases=True)


def gate_up(m: Mixture) -> KernelGraph:
    """Return act(x · gate[e]) · (x · up[e]) for each token and each expert e that it chose."""
    g = mi.new_graph()
    x = g.new_input((m.tokens, 1, 1, m.width), m.dtype, name="x")
    e = g.new_input((m.tokens, m.chosen), m.index, name="e")
    g.mark_output(_gate_up(g, m, x, e))
    return g


def gate_alone(m: Mixture) -> KernelGraph:
    """Return x · gate[e] alone, of a gate that lies in every second column."""
    g = mi.new_graph()
    x = g.new_input((m.tokens, 1, 1, m.width), m.dtype, name="x")
    e = g.new_input((m.tokens, m.chosen), m.index, name="e")
    strides = (2 * m.width * m.inner, 2 * m.inner, 2)
    w = g.new_input((m.experts, m.width, m.inner), m.dtype, strides, "gate", constant=True)
    g.mark_output(g.matmul(x, g.take(w, e)))
    return g


def down(m: Mixture) -> KernelGraph:
    """Return residual + the sum over chosen experts e of weight · (h · down[e])."""
    g = mi.new_graph()
    h = g.new_input((m.tokens, m.chosen, 1, m.inner), m.dtype, name="h")
    e = g.new_input((m.tokens, m.chosen), m.index, name="e")
    g.mark_output(_down(g, m, h, e))
    return g


def down_and_shared(m: Mixture, shared: int) -> KernelGraph:
    """Return `down` plus the down projection of an expert of width `shared` that all tokens use."""
    g = mi.new_graph()
    h = g.new_input((m.tokens, m.chosen, 1, m.inner), m.dtype, name="h")
    e = g.new_input((m.tokens, m.chosen), m.index, name="e")
    y = _down(g, m, h, e)
    all_use = g.new_input((m.tokens, 1, 1, shared), m.dtype, name="h_shared")
    w = g.new_input((m.width, shared), m.dtype, name="down_shared", constant=True)
    g.mark_output(g.add(y, g.matmul(all_use, g.permute(w, (1, 0)))))
    return g


def whole(m: Mixture) -> KernelGraph:
    """Return the chosen experts of each token from its input to the residual."""
    g = mi.new_graph()
    x = g.new_input((m.tokens, 1, 1, m.width), m.dtype, name="x")
    e = g.new_input((m.tokens, m.chosen), m.index, name="e")
    g.mark_output(_down(g, m, _gate_up(g, m, x, e), e))
    return g


def _gate_up(g: KernelGraph, m: Mixture, x: DTensor, e: DTensor) -> DTensor:
    if m.layout == "interleaved":
        dims = (m.experts, m.width, m.inner)
        strides = (2 * m.width * m.inner, 2 * m.inner, 2)
    else:
        dims = (m.experts, m.inner, m.width)
        rows = 2 * m.inner if m.layout == "packed" else m.inner
        strides = (rows * m.width, m.width, 1)

    if m.norm:
        x = g.rms_norm(x, g.new_input((1, m.width), m.dtype, name="gamma", constant=True))

    def linear(name: str) -> DTensor:
        w = g.take(g.new_input(dims, m.dtype, strides, name, constant=True), e)
        y = g.matmul(x, w if m.layout == "interleaved" else g.permute(w, (0, 1, 3, 2)))
        interleaved = (2 * m.inner, 2) if m.layout == "interleaved" else None
        return _with_bias(g, m, y, e, f"{name}_bias", interleaved)

    gate, up = linear("gate"), linear("up")
    if not m.biases:
        return g.mul(g.silu(gate), up)
    gate, up = g.clamp(gate, max=7.0), g.clamp(up, min=-7.0, max=7.0)  # as gpt-oss does
    return g.mul(g.add(up, 1.0), g.mul(gate, g.sigmoid(g.mul(gate, 1.702))))


def _down(g: KernelGraph, m: Mixture, h: DTensor, e: DTensor) -> DTensor:
    weights = g.new_input((m.tokens, m.chosen, 1, 1), m.dtype, name="weights")
    residual = g.new_input((m.tokens, 1, 1, m.width), m.dtype, name="residual")
    if m.layout == "interleaved":
        dims = (m.experts, m.inner, m.width)
        w = g.take(g.new_input(dims, m.dtype, name="down", constant=True), e)
    else:
        dims = (m.experts, m.width, m.inner)
        w = g.take(g.new_input(dims, m.dtype, name="down", constant=True), e)
        w = g.permute(w, (0, 1, 3, 2))
    y = _with_bias(g, m, g.matmul(h, w), e, "down_bias")
    return g.add(residual, g.reduction(g.mul(y, weights), 1))


def _with_bias(
    g: KernelGraph,
    m: Mixture,
    y: DTensor,
    e: DTensor,
    name: str,
    strides: tuple[int, ...] | None = None,
) -> DTensor:
    if not m.biases:
        return y
    bias = g.new_input((m.experts, y.dims[-1]), m.dtype, strides, name, constant=True)
    return g.add(y, g.reshape(g.take(bias, e), (m.tokens, m.chosen, 1, y.dims[-1])))


def rows_of_table(tokens: int, size: int, width: int) -> KernelGraph:
    """Return norms of rows of a table, as an embedding gives them."""
    g = mi.new_graph()
    table = g.new_input((size, width), "float32", name="table", constant=True)
    ids = g.new_input((tokens,), "int64", name="ids")
    g.mark_output(g.rms_norm(g.take(table, ids)))
    return g


def columns(rows: int, size: int, chosen: int) -> KernelGraph:
    """Return the sum of chosen columns of a matrix, each times a number."""
    g = mi.new_graph()
    x = g.new_input((rows, size), "float32", name="x")
    at = g.new_input((chosen,), "int32", name="at")
    w = g.new_input((1, chosen), "float32", name="w")
    g.mark_output(g.reduction(g.mul(g.take(x, at, dim=1), w), 1))
    return g


def coded(tokens: int, chosen: int, columns: int, width: int, group: int) -> KernelGraph:
    """Return products with chosen weights in codes of 4 bits, in groups with a scale each."""
    g = mi.new_graph()
    x = g.new_input((tokens, 1, 1, width), "float16", name="x")
    e = g.new_input((tokens, chosen), "int32", name="e")
    groups = width // group
    codes = g.new_input((5, columns, groups, group), "uint4", name="codes", constant=True)
    scales = g.new_input((5, columns, groups, 1), "float16", name="scales", constant=True)
    w = g.mul(g.sub(g.cast(codes, "float16"), 8.0), scales)
    w = g.take(g.reshape(w, (5, columns, width)), e)
    g.mark_output(g.matmul(x, g.permute(w, (0, 1, 3, 2))))
    return g


def joined(tokens: int, chosen: int, widths: tuple[int, ...], width: int) -> KernelGraph:
    """Return products with chosen weights that lie in several tensors, joined by columns."""
    g = mi.new_graph()
    x = g.new_input((tokens, 1, 1, width), "float32", name="x")
    e = g.new_input((tokens, chosen), "int32", name="e")
    weights = [g.new_input((3, n, width), "float32", constant=True) for n in widths]
    w = g.concat([g.take(w, e) for w in weights], 2)
    g.mark_output(g.matmul(x, g.permute(w, (0, 1, 3, 2))))
    return g


def random_mixture(r: random.Random) -> Mixture:
    """Return a small mixture of random sizes."""
    experts = r.randint(1, 9)
    return Mixture(
        tokens=r.randint(1, 5),
        chosen=r.randint(1, min(4, experts)),
        experts=experts,
        width=r.choice((8, 20, 32, 48)),
        inner=r.choice((4, 12, 16, 40)),
        dtype=r.choice(("float32", "float16", "bfloat16")),
        index=r.choice(("int32", "int64")),
        layout=r.choice(("apart", "packed", "interleaved")),
        biases=r.random() < 0.4,
        norm=r.random() < 0.3,
    )


def inputs_of(g: KernelGraph, seed: int) -> list[torch.Tensor]:
    """Return random inputs of a program. Its indices are random numbers, or one number alone."""
    r = random.Random(seed)
    inputs = random_inputs(g, "cpu", seed)
    for t, x in zip(g.inputs, inputs, strict=True):
        if not t.dtype.is_floating_point:
            size = g.inputs[0].dims[1]
            if t.name != "at":
                size = next(w.dims[0] for w in g.inputs if w.constant)
            kind = r.choice(("random", "random", "one"))
            x.random_(0, size, generator=torch.Generator().manual_seed(seed))
            if kind == "one":
                x.fill_(r.randrange(size))
    return inputs


def error_of(
    u: UGraph, choice: list[Schedule], inputs: list[torch.Tensor]
) -> tuple[float, float] | None:
    """Return the error of kernels, and that of eager. None: no kernel has these schedules."""
    try:
        program = triton.generate(u, choice)
    except CodegenError:
        return None
    exact = run_kernel_graph(u.program, inputs, torch.float64)[0]
    eager = run_kernel_graph(u.program, inputs)[0]
    largest = max(float(exact.abs().max()), 1e-3)
    (y,) = compiler.load(program.source, program.digest).run([strided.copied(x) for x in inputs])
    return tuple(float((z.double() - exact).abs().max()) / largest for z in (y, eager))


def tried(g: KernelGraph, seed: int, ugraphs: int = 2) -> Iterator[tuple[str, float, float]]:
    """Yield (what ran, error, eager's error) for some µGraphs and schedules of a program."""
    r = random.Random(seed)
    found, _ = search(g, SEARCH)
    inputs = inputs_of(g, seed)
    for ranked in r.sample(found, min(ugraphs, len(found))):
        ops = place_kernels(ranked.ugraph)
        choice = [_few_blocks(r.choice(schedules(op, limit=24)), op) for op in ops]
        error = error_of(ranked.ugraph, choice, inputs)
        if error is not None:
            yield f"{ranked.ugraph.kernels} {choice}", *error


def _few_blocks(s: Schedule, op) -> Schedule:
    """Return a schedule with longer tiles, because the interpreter takes 1 ms for each block."""
    tiles = dict(s.tiles)
    for a in op.block.axes:
        if a.role.value == "grid" and op.block.axis_split_by(a.name) is None and a.size > 8:
            tiles[a.name] = max(tiles[a.name], 4)
    return replace(s, tiles=tiles)


def loops_over_choices() -> list[list[float]]:
    """Return (error, eager's error) of kernels that walk the chosen experts, some in each step."""
    m = Mixture(2, 4, 6, 16, 24)
    g = down(m)
    inputs = inputs_of(g, 0)
    results = []
    for ranked in search(g, SEARCH)[0]:
        if ranked.ugraph.num_kernels > 1:
            continue
        (block,) = (op.block for op in ranked.ugraph.block_ops)
        (w,) = [i for i in block.inputs if i.taken is not None]
        if not any(a is not None and block.role(a) is Role.LOOP for a in w.taken.axes):
            continue
        for step, blocks in ((1, 1), (2, 1), (1, 2)):
            tiles = {a.name: {2: 1, 16: 8, 24: 32, 4: step}[a.size] for a in block.axes}
            schedule = Schedule(tiles, num_warps=1, cooperating_blocks=blocks)
            found = error_of(ranked.ugraph, [schedule], inputs)
            results += [list(found)] if found is not None else []
    return results


def out_of_range() -> list[float]:
    """Return the errors of kernels for indices of which some are out of range.

    Such an index gives nothing: 0, or nothing that is added.
    """
    results = []
    for make in (gate_up, down):
        for index in ("int32", "int64"):
            m = Mixture(3, 2, 4, 16, 8, index=index)
            g = make(m)
            inputs = inputs_of(g, 0)
            at = next(n for n, t in enumerate(g.inputs) if t.name == "e")
            numbers = torch.tensor([[0, -1], [4, 3], [2**31 - 1, -(2**31)]])
            if index == "int64":
                numbers[2] = torch.tensor([2**32, -(2**33)])  # 0 in 32 bits
            inputs[at] = numbers.to(inputs[at].dtype)
            u = search(g, SEARCH)[0][0].ugraph
            program = triton.generate(u)
            (y,) = compiler.load(program.source, program.digest).run([*inputs])
            inside = (numbers >= 0) & (numbers < 4)
            inputs[at] = torch.where(inside, numbers, 0).to(inputs[at].dtype)
            if make is gate_up:
                (want,) = run_kernel_graph(g, inputs, torch.float64)
                want = torch.where(inside[..., None, None], want, 0.0)
            else:  # an expert that is not read adds nothing
                weights = next(n for n, t in enumerate(g.inputs) if t.name == "weights")
                inputs[weights] = inputs[weights] * inside[..., None, None]
                (want,) = run_kernel_graph(g, inputs, torch.float64)
            results.append(float((y - want).abs().max()))
    return results


def main(count: int, seed: int) -> None:
    """Print what is wrong with the kernels of random programs, as JSON."""
    ran, wrong = 0, []
    for n in range(seed, seed + count):
        r = random.Random(n)
        m = random_mixture(r)
        make = r.choice((gate_up, down, whole, None))
        if make is None:
            g = r.choice(
                (
                    rows_of_table(r.randint(1, 5), r.randint(1, 9), 24),
                    columns(r.randint(1, 9), r.randint(2, 9), r.randint(2, 5)),
                    joined(r.randint(1, 3), r.randint(1, 3), r.choice(((8, 8), (16, 24))), 16),
                    coded(r.randint(1, 3), r.randint(1, 3), 16, 128, 32),
                )
            )
        else:
            g = make(m)
        for what, error, eager in tried(g, n):
            ran += 1
            (y,) = g.outputs
            ulps = 8 if y.dtype is torch.float32 else 1
            if not error <= 2 * eager + ulps * torch.finfo(y.dtype).eps:
                wrong.append([n, str(m), what, error, eager])
    print(json.dumps({"ran": ran, "wrong": wrong}))
