"""Generated Triton: its results, its compiled code, and the file that holds it."""

import gc
import hashlib
import importlib.util
import inspect
import itertools
import linecache
import marshal
import math
import os
import re
import struct
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import mirage_hf as mi
from mirage_hf import errors
from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import torch_text, triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.codegen.plan.pipelining import WGMMA_TAKES_8_COLUMNS
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
from mirage_hf.graph.ugraph import UGraph, library_ugraph
from mirage_hf.ops import table
from tests.helpers import kernel_cases
from tests.helpers.triton_interpreter import run

pytest.importorskip("triton")
CASES = {c.name: c for c in kernel_cases.cases()}
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def interpreted() -> dict:
    """Return what Triton's interpreter computed."""
    return run("from tests.helpers import interpreted_cases; interpreted_cases.main()")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))


# -- numbers, through the interpreter -------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.interpreted])
def test_kernels_are_as_close_to_float64_as_torch(interpreted, name):
    result = interpreted["cases"][name]
    assert "raised" not in result, result
    for output in result["outputs"]:
        assert output["error"] <= output["allowed"] and output["from_block"] <= output["allowed"]


def test_schedules_of_the_space_agree(interpreted):
    found = {n: r for n, r in interpreted["cases"].items() if n.startswith("space:")}
    assert len(found) > 20
    wrong = {
        n: r
        for n, r in found.items()
        if "raised" in r or any(not o["error"] <= o["allowed"] for o in r["outputs"])
    }
    assert not wrong


def test_blocks_that_get_unequal_parts_of_a_loop_agree(interpreted):
    found = [r for n, r in interpreted["cases"].items() if n.startswith("uneven:")]
    assert len(found) >= 4
    for result in found:
        assert "raised" not in result, result
        assert all(o["error"] <= o["allowed"] for o in result["outputs"]), result


@pytest.mark.parametrize("fn", [n for n, row in table.OPS.items() if row.kind == "elementwise"])
def test_elementwise_text_on_hard_numbers(interpreted, fn):
    result = interpreted["ops"][fn]
    assert result["relative"] < 2e-5, result
    # torch gives gelu(inf) = NaN; a negative zero to an odd negative power is of the other sign
    # here
    allowed = {"gelu": 1, "pow": 2}.get(fn, 0)
    assert len(result["differs"]) <= allowed, result


@pytest.mark.parametrize(
    "name", ["huge scores", "masked tiles", "masked rows", "infinite", "one NaN"]
)
@pytest.mark.parametrize("kind", ["online", "online mma", "split", "split mma", "softmax"])
def test_running_maxima_on_hard_numbers(interpreted, kind, name):
    """inf and NaN appear only where torch has them.

    Results are as close to float64 as those of torch's float32 kernels.
    """
    result = interpreted["hard"][f"{kind}: {name}"]
    assert "raised" not in result and result["same_finite"], result
    assert result["error"] <= result["allowed"], result


def test_a_maximum_propagates_nan(interpreted):
    assert interpreted["nan"] == {
        "tile": [False, True, False],
        "loop": [False, True, False],
        "lazy loop": [False, True, False],
    }


# -- compilation without a GPU --------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, sm",  # test_overlap.py does this for sm_90
    [
        pytest.param(name, sm, marks=[pytest.mark.thorough] if (n + m) % 2 else [])
        for n, name in enumerate(CASES)
        for m, sm in enumerate((80, 100))
    ],
)
def test_compiles_ahead_of_time(name, sm):
    case = CASES[name]
    program = triton.generate(case.ugraph, case.schedules)
    for kernel in compiler.ahead_of_time(program, sm):
        assert (
            kernel.asm["cubin"] and f".target sm_{sm}" in kernel.ptx and kernel.shared <= 227 * 1024
        )
        assert not fused_with_other_threads(kernel.ptx)


def fused_with_other_threads(ptx: str) -> list[str]:
    """Return the multiply-adds whose addend comes from another thread.

    The two threads' sums then differ in their last bits.
    """
    given = set(re.findall(r"shfl\.sync\.bfly\.b32\s+(%r\d+)", ptx))
    return [
        line
        for line in re.findall(r"fma\.rn\.f32 .*;", ptx)
        if line.rstrip(";").split(", ")[-1] in given
    ]


@pytest.mark.parametrize("name", ["split matmul, read transposed", "ntrans"])
def test_products_are_rounded_before_threads_add_them_up(name):
    """Sums of several threads have the same bits only because addition commutes.

    A multiply-add does not commute.
    """
    program = triton.generate(CASES[name].ugraph, CASES[name].schedules)
    naive = re.sub(r"tl\.fma\((.*), (.*), 0\.0\)", r"\1 * \2", program.source)
    assert naive != program.source
    fused = [
        fused_with_other_threads(k.ptx)
        for k in compiler.ahead_of_time(replace(program, source=naive), 90)
    ]
    assert any(fused) and not any(
        fused_with_other_threads(k.ptx) for k in compiler.ahead_of_time(program, 90)
    )


def test_a_loop_of_one_element_leaves_a_product_to_be_rounded():
    """An accumulator of one element is the product itself.

    Threads may then add it up along another axis.
    """
    g = new_kernel_graph()
    x, w = (g.new_input((2, 1, 64), torch.float32, name=name) for name in "xw")
    g.mark_output(g.reduction(g.reduction(g.mul(x, w), dim=1), dim=2))
    b = kernel_cases.Block({"m": 2}, {"k": 1}, {"n": 64})
    b.load("x", "mkn", 0), b.load("w", "mkn", 1)
    walk = b.stage(loop=True)
    walk.accumulate("sums", walk.op("product", "mul", "x", "w"))
    b.store(b.stage().op("total", "sum", "sums", over="n"), "m11", torch.float32)
    program = triton.generate(kernel_cases.ugraph(g, b), [Schedule({"m": 1, "k": 1, "n": 64})])
    (kernel,) = compiler.ahead_of_time(program, 90)
    assert "shfl.sync.bfly" in kernel.ptx and not fused_with_other_threads(kernel.ptx)


@pytest.mark.parametrize("again", ["stored", "read"])
def test_a_product_that_not_only_sums_read_keeps_the_sign_of_its_zeros(again):
    g = new_kernel_graph()
    x, w = (g.new_input((2, 64), torch.float32, name=name) for name in "xw")
    product = g.mul(x, w)
    b = kernel_cases.Block({"m": 2}, None, {"n": 64})
    b.load("x", "mn", 0), b.load("w", "mn", 1)
    s = b.stage()
    b.store(s.op("sums", "sum", s.op("product", "mul", "x", "w"), over="n"), "m1", torch.float32)
    b.store(
        "product" if again == "stored" else s.op("other", "div", 1.0, "product"),
        "mn",
        torch.float32,
    )
    g.mark_output(
        g.reduction(product, dim=1), product if again == "stored" else g.div(1.0, product)
    )
    program = triton.generate(kernel_cases.ugraph(g, b), [Schedule({"m": 1, "n": 64})])
    assert "product = x * w\n" in program.source and "tl.sum(rounded(product)" in program.source
    (kernel,) = compiler.ahead_of_time(program, 90)
    assert not fused_with_other_threads(kernel.ptx)


@pytest.mark.parametrize("fn", ["exp", "square"])
def test_a_masked_value_is_rounded_only_if_it_may_be_a_product(fn):
    g = new_kernel_graph()
    x, keep = (g.new_input((2, 64), torch.float32, name=name) for name in ("x", "keep"))
    g.mark_output(g.reduction(g.mul(keep, getattr(g, fn)(x)), dim=1))  # the mask is 0 or 1
    b = kernel_cases.Block({"m": 2}, None, {"n": 64})
    b.load("x", "mn", 0), b.load("keep", "mn", 1)
    s = b.stage()
    b.store(
        s.op("sums", "sum", s.op("kept", "select", "keep", s.op("all", fn, "x"), 0.0), over="n"),
        "m1",
        torch.float32,
    )
    program = triton.generate(kernel_cases.ugraph(g, b), [Schedule({"m": 1, "n": 64})])
    assert ("tl.sum(rounded(kept)" in program.source) == (fn == "square"), program.source
    (kernel,) = compiler.ahead_of_time(program, 90)
    assert "shfl.sync.bfly" in kernel.ptx and not fused_with_other_threads(kernel.ptx)


@pytest.mark.parametrize(
    "name", ["norm linear", "gated mlp 16 rows mma", "split attention mma", "split softmax"]
)
def test_compiles_for_every_architecture(name):
    program = triton.generate(CASES[name].ugraph, CASES[name].schedules)
    assert set(compiler.ARCHITECTURES) == {
        k.sm for sm in compiler.ARCHITECTURES for k in compiler.ahead_of_time(program, sm)
    }


def loads(ugraph: UGraph, **schedule) -> str:
    tiles = {a: n for a, n in schedule.items() if len(a) == 1}
    rest = {a: n for a, n in schedule.items() if len(a) > 1}
    (kernel,) = compiler.ahead_of_time(triton.generate(ugraph, [Schedule(tiles, **rest)]), 90)
    return kernel.ptx


@pytest.mark.parametrize(
    "ugraph, tiles",
    [
        (kernel_cases.rms_norm_linear(1, 4096, 4096), dict(m=1, n=8, k=1024)),
        (kernel_cases.rms_norm_linear(1, 4096, 4096, stored="kn"), dict(m=1, n=64, k=64)),
        (kernel_cases.norm_qkv(1, 4096, (4096, 1024, 1024)), dict(m=1, n=8, k=1024)),
    ],
)
def test_weights_are_streamed_by_128_bit_loads(ugraph, tiles):
    ptx = loads(ugraph, **tiles)
    assert re.findall(r"ld\.global\S*evict_first\S*v4\.b32", ptx)
    assert not re.findall(r"ld\.global\S*evict_first\S*\.(?:b16|b32|v2\.b32)\b(?<!v4\.b32)", ptx)


@pytest.mark.parametrize("k, aligned", [(4096, True), (4100, False)])
def test_aligned_parts_are_streamed_by_128_bit_loads(k, aligned):
    ugraph = kernel_cases.split_matmul(1, k, 1024, 4)
    schedules = [
        Schedule({"m": 1, "n": 8, "p": 1, "k": 512}),
        Schedule({"m": 1, "n": 128, "p": 4}),
    ]
    ptx = compiler.ahead_of_time(triton.generate(ugraph, schedules), 90)[0].ptx
    assert bool(re.findall(r"ld\.global\S*evict_first\S*v4\.b32", ptx)) is aligned


def test_weights_first_uses_the_64_row_instruction_fed_asynchronously():
    ptx = loads(
        kernel_cases.rms_norm_linear(16, 4096, 4096), m=16, n=64, k=128, mma=True, num_stages=4
    )
    assert "wgmma.mma_async.sync.aligned.m64n16k16" in ptx and "cp.async.cg.shared.global" in ptx


def asked_for(u, schedule, **names) -> list[set[int]]:
    """Return the elements that each `prefetch` of a kernel asks for.

    They are counted from the tensor's first element. `names` gives the position of the block.
    """
    tl = SimpleNamespace(arange=np.arange, minimum=np.minimum, maximum=np.maximum)
    found = []
    for text in re.findall(
        r"(?m)^ +prefetch\(\w+_ptr \+ (.+)\)$", triton.generate(u, [schedule]).source
    ):
        found.append({int(x) for x in np.asarray(eval(text, {"tl": tl} | names)).flat})
    return found


def test_prefetches_stay_within_the_last_of_several_tensors():
    u = kernel_cases.norm_qkv(1, 256, (32, 20), bias=False)
    schedule = Schedule({"m": 1, "n": 16, "k": 64}, prefetch_steps=2)
    for begin, rows in ((32, range(16)), (48, range(16, 20))):  # the last tile reaches past the end
        n = begin + np.arange(16)
        _, first = asked_for(u, schedule, k0=0, n=n, w_at=n - 32)
        assert first == {256 * r + k for r in rows for k in (0, 64)}


def test_blocks_prefetch_their_own_range_of_contiguous_elements():
    g = new_kernel_graph()
    x = g.new_input((64, 1024), "float16", name="x", constant=True)
    axes = (Axis("p", 4, Role.GRID), Axis("r", 1024, Role.TILE, "p"), Axis("k", 64, Role.LOOP))
    looped = Stage(
        "k", (BlockOp("e", "exp", ("x",), ("r", "k")),), (Accumulator("a", "e", "sum", ("r",)),)
    )
    stages = (looped, Stage(None, (BlockOp("y", "mul", ("a", 0.5), ("r",)),)))
    inputs, outputs = (BlockInput("x", (0,), ("k", "r")),), (BlockOutput("y", ("r",), "float16"),)
    g.mark_output(*g.customized([x], BlockGraph(axes, inputs, stages, outputs)))
    schedule = Schedule({"p": 1, "r": 256, "k": 16}, prefetch_steps=1)
    for part in range(4):
        columns = range(256 * part, 256 * part + 256, 64)
        (first,) = asked_for(UGraph(g, g), schedule, k0=0, r_start=256 * part)
        assert first == {1024 * k + c for k in range(16) for c in columns}


def test_prefetch_offsets_in_long_tensors_have_64_bits():
    g = new_kernel_graph()
    x = g.new_input((4096, 1 << 20), "float16", name="x", constant=True)
    summed = Stage(
        "k", (BlockOp("e", "exp", ("x",), ("r", "k")),), (Accumulator("a", "e", "sum", ("r",)),)
    )
    block = BlockGraph(
        (Axis("r", 4096, Role.GRID), Axis("k", 1 << 20, Role.LOOP)),
        (BlockInput("x", (0,), ("r", "k")),),
        (summed,),
        (BlockOutput("a", ("r",), "float16"),),
    )
    g.mark_output(*g.customized([x], block))
    source = triton.generate(UGraph(g, g), [Schedule({"r": 1, "k": 1024}, prefetch_steps=1)]).source
    assert (
        re.findall(r"prefetch\(x_ptr.*", source)
        and "prefetch(x_ptr + r.to(tl.int64) * 1048576" in source
    )


def test_a_product_after_the_loop_is_asynchronous_only_if_the_loop_is_pipelined():
    schedule = Schedule({"m": 64, "n": 64, "k": 128, "r": 16}, True, num_stages=3)
    u = kernel_cases.lora(64, 512, 128)
    (kernel,) = compiler.ahead_of_time(triton.generate(u, [schedule]), 90)
    assert "wgmma.mma_async" in kernel.ptx
    with pytest.raises(
        errors.CodegenError, match="up multiplies what another product gives, with 64 rows"
    ):
        triton.generate(u, [replace(schedule, num_stages=1)])


def test_eight_columns_take_the_instruction_that_is_planned_for():
    """With Triton 3.6 this is the older instruction.

    It has read its factors before the next iteration begins.
    """
    for columns in (8, 16):
        u = kernel_cases.rms_norm_linear(5, 1024, 128)
        schedule = Schedule({"m": columns, "n": 64, "k": 128}, True, num_stages=3)
        program = triton.generate(u, [schedule])
        ptx = compiler.ahead_of_time(program, 90)[0].ptx
        new = "wgmma.mma_async" in ptx
        assert new != ("mma.sync.aligned.m16n8k16" in ptx) and new == (
            columns == 16 or WGMMA_TAKES_8_COLUMNS
        )
        planned = plan_kernel(place_kernels(u)[0], schedule)
        assert (
            all(planned.pipelining.is_asynchronous(d) == new for d in planned.layout.dots.values())
            and planned.layout.dots
        )
    fewer = replace(schedule, tiles=(("m", 4), ("n", 64), ("k", 128)))
    rows = replace(schedule, tiles=(("m", 8), ("n", 64), ("k", 128)), weights_first=False)
    assert (
        not plan_kernel(place_kernels(u)[0], fewer).layout.dots
        and not plan_kernel(place_kernels(u)[0], rows).layout.dots
    )  # rows would be padded to at least 16


# -- the file -------------------------------------------------------------------------------------


def test_file_stands_alone_and_checks_itself(tmp_path):
    path = kernel_cases.rms_norm_linear(2, 96, 48).generate_triton_program(tmp_path / "kernel.py")
    text = path.read_text()
    assert "import mirage_hf" not in text and "from mirage_hf" not in text
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-I", str(path)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0 and "allowed" in done.stdout, done.stderr[-2000:]


def _root(g, x):
    g.mark_output(g.sqrt(x))


def _pole(g, x):
    g.mark_output(g.div(1.0, g.relu(x)))


def _huge(g, x):
    g.mark_output(g.exp(g.mul(x, 1e4)))


def _nothing_finite(g, x):
    g.mark_output(g.add(x, float("inf")), x)


def _whole(g, x):
    g.mark_output(g.new_input((3,), "int64"), g.cast(x, "int32"))


def _narrow(g, x):
    g.mark_output(g.cast(g.mul(x, 1e5), mi.float16))


@pytest.mark.parametrize(
    "build",
    [_root, _pole, _huge, _nothing_finite, _whole, _narrow],
    ids=lambda f: f.__name__.strip("_"),
)
def test_files_check_programs_with_infinities_nan_and_whole_numbers(build):
    g = mi.new_kernel_graph()
    build(g, g.new_input((8, 16), mi.float32))
    written: dict[str, Any] = {"__name__": "written"}
    exec(triton.program_source(library_ugraph(g)), written)
    written["check"]("cpu")
    run = written["run"]
    written["run"] = lambda inputs: [2 * y + 3 for y in run(inputs)]
    with pytest.raises(AssertionError, match="further from float64"):
        written["check"]("cpu")


def test_a_program_that_is_itself_a_block_graph_has_no_check():
    kernels = CASES["lora"].ugraph.kernels
    source = triton.program_source(UGraph(kernels, kernels), [CASES["lora"].schedule])
    assert "def run(" in source and "def check(" not in source and "checks itself" not in source


def test_header_names_the_ugraph():
    ugraph = CASES["gated mlp"].ugraph
    source = triton.program_source(ugraph, [CASES["gated mlp"].schedule])
    assert all(line.strip() in source for line in str(ugraph.kernels).splitlines())
    assert "µGraph " in source and "# Schedule(tiles={'k': 256, 'm': 1, 'n': 8}" in source


def test_sources_are_deterministic_and_digests_are_checked():
    case = CASES["lora"]
    one, two = (triton.generate(case.ugraph, [case.schedule]) for _ in range(2))
    assert one == two
    module = compiler.load(one.source, one.digest)
    assert callable(module.run) and compiler.load(one.source, one.digest) is module
    with pytest.raises(errors.CodegenError, match="the file is damaged"):
        compiler.load(one.source + "# more\n", one.digest)


def test_a_damaged_file_in_the_cache_is_replaced(tmp_path, monkeypatch):
    program = triton.generate(CASES["ntrans"].ugraph, [CASES["ntrans"].schedule])
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / f"{program.digest}.py").write_text("raise SystemExit")
    monkeypatch.setattr(compiler, "_loaded", {})
    assert compiler.load(program.source, program.digest).run


def test_a_damaged_bytecode_cache_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    source = "def run(inputs):\n    return ['right']\n"
    digest = hashlib.sha256(source.encode()).hexdigest()
    path = tmp_path / "kernels" / f"{digest}.py"
    path.parent.mkdir()
    path.write_text(source, encoding="utf-8")
    header = importlib.util.MAGIC_NUMBER + struct.pack(
        "<III", 0, int(path.stat().st_mtime), path.stat().st_size
    )
    cached = Path(importlib.util.cache_from_source(str(path)))
    cached.parent.mkdir()
    cached.write_bytes(
        header + marshal.dumps(compile("def run(inputs):\n    return ['wrong']\n", "x", "exec"))
    )
    assert compiler.load(source, digest).run([]) == ["right"]


def test_the_number_of_schedules_must_fit():
    with pytest.raises(errors.CodegenError, match="2 schedules for 1 block graphs"):
        triton.generate(CASES["lora"].ugraph, [CASES["lora"].schedule] * 2)


def test_results_of_library_calls_become_row_major_and_views_keep_their_strides():
    """torch.exp keeps the order of strides.

    A kernel is generated for row-major strides, or for those that torch gives to a view.
    """
    g, m = new_kernel_graph(), new_kernel_graph()
    for graph in (g, m):
        graph.new_input((6, 4), torch.float32, name="x")
    g.mark_output(g.neg(g.permute(g.exp(g.slice(g.permute(g.inputs[0], (1, 0)), 1, 1, 5)), (1, 0))))
    b = kernel_cases.Block({"m": 4}, None, {"n": 4})
    b.load("y", "mn", 0)
    b.store(b.stage().op("z", "neg", "y"), "mn", torch.float32)
    y = m.permute(m.exp(m.slice(m.permute(m.inputs[0], (1, 0)), 1, 1, 5)), (1, 0))
    m.mark_output(*m.customized([y], b.graph()))
    source = triton.program_source(UGraph(g, m), [Schedule({"m": 1, "n": 4})])
    assert "= (torch.exp(t2)).contiguous()" in source and "y_ptr + m + n * 4)" in source, source


def test_names_that_python_or_the_file_needs_are_renamed():
    g = new_kernel_graph()
    first, second = (g.new_input((4, 32), torch.float32, name=n) for n in ("lambda", "tl"))
    g.mark_output(g.add(g.exp(first), second))
    b = kernel_cases.Block({"m": 4}, None, {"n": 32})
    b.load("lambda", "mn", 0), b.load("tl", "mn", 1)
    s = b.stage()
    b.store(s.op("n", "add", s.op("exp", "exp", "lambda"), "tl"), "mn", torch.float32)
    program = triton.generate(kernel_cases.ugraph(g, b), [Schedule({"m": 1, "n": 32})])
    compile(program.source, "generated", "exec")
    assert compiler.ahead_of_time(program, 90)


# -- library ops as torch expressions -------------------------------------------------------------


def test_library_path_is_the_program_in_plain_torch():
    g = new_kernel_graph()
    x, w, bias = (
        g.new_input(dims, torch.float32, name=n)
        for n, dims in (("x", (2, 4, 8)), ("w", (8, 6)), ("b", (1, 6)))
    )
    cos, sin = (g.new_input((4, 4), torch.float32, name=n) for n in ("cos", "sin"))
    y = g.add(g.matmul(g.rope(g.rms_norm(x), cos, sin), w), bias)
    y = g.layer_norm(g.clamp(g.gelu_tanh(g.silu(y)), min=-1.0), bias)
    y = g.concat(
        [y, g.mul(g.reduction(y, 2, "max"), 0.5), g.div(1.0, g.add(g.exp(g.reduction(y, 2)), 1.0))],
        2,
    )
    y = g.permute(g.reshape(g.slice(g.max(y, -2.0), 2, 0, 6), (8, 6)), (1, 0))
    g.mark_output(
        g.cast(g.softmax(g.pow(g.sigmoid(y), 1.5), 1), "float16"),
        g.min(g.gelu(g.relu(y)), 0.3),
        g.max(y, g.tanh(y)),
    )
    inputs = [torch.randn(t.dims) for t in g.inputs]
    source = triton.program_source(library_ugraph(g))
    assert "triton" not in source.split('"""')[2]
    module = compiler.load(source, triton.generate(library_ugraph(g)).digest)
    from mirage_hf.graph.execute import run_kernel_graph

    for ours, want in zip(module.run(inputs), run_kernel_graph(g, inputs), strict=True):
        assert ours.dtype == want.dtype and torch.equal(ours, want)
    assert all(y.isfinite().all() for y in module.program([x.double() for x in inputs]))


#: Operands (shapes, or numbers) and attributes of ops that are not elementwise.
CALLS_OF_OPS = {
    "cast": [(((4, 6),), dict(dtype="float16")), (((4, 6),), dict(dtype="int32"))],
    "clamp": [
        (((4, 6),), dict(min=-0.5, max=0.5)),
        (((4, 6),), dict(max=0.5)),
        (((4, 6),), dict(min=-0.5)),
    ],
    "lookup": [(((4, 6),), dict(values=(0.5, -1.5, 2.0)))],
    "bits": [(((4, 6), (1, 6)), dict(count=3)), (((4, 6), 4.0), dict(count=4))],
    "matmul": [(((2, 4, 6), (6, 3)), {})],
    "reduction": [(((4, 6),), dict(dim=1, kind=kind)) for kind in ("sum", "mean", "max")],
    "rms_norm": [(((4, 6),), {}), (((4, 6), (1, 6)), dict(eps=0.25))],
    "layer_norm": [(((4, 6),), {}), (((4, 6), (1, 6), (1, 6)), dict(eps=0.25))],
    "softmax": [(((4, 6),), dict(dim=0)), (((4, 6), "lo", "hi"), dict(dim=1))],
    "within": [(((4, 6), "lo", "hi"), dict(dim=1))],
    "concat": [(((4, 6), (4, 2), (4, 1)), dict(dim=1))],
    "slice": [(((4, 6),), dict(dim=1, start=2, stop=5))],
    "reshape": [(((4, 6),), dict(dims=(3, 8)))],
    "permute": [(((2, 4, 6),), dict(order=(2, 0, 1)))],
    "rope": [(((4, 6), (4, 4), (4, 4)), dict(interleaved=i)) for i in (False, True)],
    "cache_append": [(((2, 5, 6), (2, 2, 6), "position"), {})],
    "take": [(((4, 6), "index"), {"dim": dim}) for dim in (0, 1)],
    "sub": [(((4, 6), (1, 6)), {}), ((-2.0, (4, 6)), {}), (((4, 6), -2.0), {})],
    "pow": [(("positive", (4, 6)), {}), ((2.0, (4, 6)), {}), (("positive", 1.5), {})],
    "max": [(((4, 6), (4, 1)), {}), (((4, 6), -0.5), {}), ((0.5, (4, 6)), {})],
    "min": [(((4, 6), (4, 1)), {}), (((4, 6), -0.5), {}), ((0.5, (4, 6)), {})],
    "ratio": [(((4, 6), "zeros and ones"), {}), ((2.0, "zeros and ones"), {})],
    "select": [
        (("zeros and ones", (4, 6), (4, 6)), {}),
        (("zeros and ones", 2.0, (4, 6)), {}),
        (("zeros and ones", 2.0, -3.0), {}),
    ],
}
#: Operands that cannot be random numbers.
SPECIAL_OPERANDS = {
    "lo": lambda: torch.tensor([[0], [2], [3], [4]], dtype=torch.int32),
    "hi": lambda: torch.tensor([[6], [5], [3], [5]], dtype=torch.int32),
    "position": lambda: torch.tensor([1, 3]),
    "index": lambda: torch.tensor([[3, 0], [3, 1]]),
    "positive": lambda: torch.rand(4, 6) + 0.5,
    "zeros and ones": lambda: torch.eye(6)[:4],
}


def _value(operand: str | tuple[int, ...] | float) -> torch.Tensor | float:
    if isinstance(operand, str):
        return SPECIAL_OPERANDS[operand]()
    return torch.randn(operand) if isinstance(operand, tuple) else operand


@pytest.mark.parametrize("name", table.OPS)
def test_the_torch_expression_of_every_row_computes_what_its_oracle_does(name):
    row = table.lookup(name)
    assert row.kind == "elementwise" or name in CALLS_OF_OPS, f"{name} needs operands"
    calls = CALLS_OF_OPS.get(name) or [(((4, 6),) * row.arity[0], {})]
    for operands, attrs in calls:
        torch.manual_seed(0)
        values = [_value(x) for x in operands]
        inputs = [x for x in values if isinstance(x, torch.Tensor)]
        graph = new_kernel_graph()
        taken = [
            graph.new_input(x.shape, x.dtype) if isinstance(x, torch.Tensor) else x for x in values
        ]
        graph.mark_output(graph.apply(name, taken, attrs))

        module = {"torch": torch, "F": torch.nn.functional}
        exec("\n".join([*torch_text.functions(graph), torch_text.program(graph, "run")]), module)
        (got,) = module["run"]([x.clone() for x in inputs])

        as_tensors = [x.clone() if isinstance(x, torch.Tensor) else torch.tensor(x) for x in values]
        want = row.oracle(*as_tensors, **dict(graph.ops[-1].attrs))
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def _text_of_library(program):
    text = triton.generate(library_ugraph(program))
    module = {}
    exec(compile(text.source, "<generated>", "exec"), module)
    return module["run"]


def test_powers_of_and_by_numbers_run_in_the_interpreter(interpreted):
    assert len(interpreted["powers"]) == 4 and all(
        e < 1e-5 for e in interpreted["powers"].values()
    ), interpreted["powers"]


@pytest.mark.parametrize(
    "name", [n for n, row in table.OPS.items() if row.kind == "elementwise" and row.arity[0] > 1]
)
def test_library_ops_take_numbers_as_the_cpu_backend_does(name):
    """An operand may be any number, even one that the dtype cannot hold.

    The result has the dtype that the program says.
    """
    for dtype, numbers in itertools.product(
        ("float32", "float16"),
        itertools.product(
            (None, 2.0, -1.5, 0.0, math.inf, 70000.0), repeat=table.OPS[name].arity[0]
        ),
    ):
        if None not in numbers or all(n is None for n in numbers):
            continue
        g = KernelGraph()
        operands = [g.new_input((3, 5), dtype) if n is None else n for n in numbers]
        t = getattr(g, name)(*operands, **({"count": 2} if name == "bits" else {}))
        xs = [
            torch.randn(x.dims, generator=torch.Generator().manual_seed(n)).to(x.dtype)
            for n, x in enumerate(g.inputs)
        ]
        (want,) = library_ugraph(g)(xs)
        (got,) = _text_of_library(g)(xs)
        assert got.dtype == want.dtype == t.dtype, numbers
        finite = (
            want.isfinite() & got.isfinite()
        )  # torch divides a number by a tensor as reciprocal times the number
        torch.testing.assert_close(
            got[finite],
            want[finite],
            rtol=4 * torch.finfo(t.dtype).eps,
            atol=0,
            msg=f"{name} {numbers}",
        )
        assert torch.equal(got.isnan(), want.isnan()) or name in ("div", "ratio"), numbers


@pytest.mark.parametrize(
    "names", [("tl", "tl_"), ("torch_", "torch"), ("mirage_0", "mirage_0_"), ("float", "float_")]
)
def test_names_of_tensors_hide_nothing_and_stay_distinct(names):
    g = KernelGraph()
    x, y = (g.new_input((3, 5), "float32", name=n) for n in names)
    g.min(g.sub(g.exp(x), y), math.inf)
    xs = [torch.randn(3, 5), torch.randn(3, 5)]
    torch.testing.assert_close(_text_of_library(g)(xs), library_ugraph(g)(xs))
    assert len({torch_text.local(t) for t in g.inputs} | {"mirage_0", "float", "torch", "tl"}) == 6


def test_an_input_that_is_an_output_too_is_not_written_over():
    def written_over(returned):
        g = KernelGraph()
        x = g.new_input((8, 16), "float32")
        b = mi.new_block_graph((8,))
        b.new_output(b.exp(b.new_input(x, imap={"x": 0})), omap={"x": 0})
        g.mark_output(*g.customized([x], b), *([x] if returned else []))
        return triton.generate(UGraph(g, g)).in_place

    assert written_over(False) == ((0, 0),) and written_over(True) == ()


@pytest.mark.parametrize("in_this_process", [False, True])
def test_loaded_sources_are_forgotten_unless_someone_holds_them(
    in_this_process, tmp_path, monkeypatch
):
    """Triton holds what it compiles in this process."""
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "_loaded", {})
    before, tried, held, meanwhile = (
        triton.generate(
            kernel_cases.rms_norm_linear(1, 512, 64),
            [Schedule({"m": 1, "n": n, "k": 128}, cooperating_blocks=4)],
        )
        for n in (1, 2, 4, 8)
    )
    known = compiler.load(before.source, before.digest)
    gc.disable()  # so that nothing else frees them
    try:
        with compiler.passing() as load:
            assert load(before.source, before.digest) is known
            if in_this_process:
                compiler.ahead_of_time(tried, 90, load)
            passed = weakref.ref(load(tried.source, tried.digest).run)
            run = load(held.source, held.digest).run
            counters = run.__globals__["_zeros"]
            kept = compiler.load(meanwhile.source, meanwhile.digest)
    finally:
        gc.enable()
    assert compiler.load(meanwhile.source, meanwhile.digest) is kept
    assert passed() is None and f"mirage_hf_generated_{tried.digest[:16]}" not in sys.modules
    assert (
        compiler.load(before.source, before.digest) is known
        and sys.modules[known.__name__] is known
    )
    assert (
        run.__globals__["_zeros"] is counters
        and run.__globals__["mirage_0"].fn.__name__ == "mirage_0"
    )
    assert compiler.load(held.source, held.digest).run is not run


def test_the_text_of_a_loaded_kernel_outlives_its_file(tmp_path, monkeypatch):
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))
    program = triton.generate(kernel_cases.rms_norm_linear(1, 512, 48))
    module = compiler.load(program.source, program.digest)
    Path(module.__file__).unlink()
    linecache.checkcache()
    text = inspect.getsource(module.mirage_0.fn)
    assert text in program.source and "def mirage_0(" in text


def test_an_input_that_is_stored_as_it_is_is_not_written_over():
    """The input is read when it is stored, which may be after another output was stored."""
    block = BlockGraph(
        (Axis("n", 64, Role.GRID),),
        (BlockInput("x", (0,), ("n",)), BlockInput("z", (1,), ("n",))),
        (Stage(None, (BlockOp("y", "mul", ("z", 2.0), ("n",)),)),),
        (BlockOutput("y", ("n",), "float32"), BlockOutput("x", ("n",), "float32")),
    )
    g = KernelGraph()
    g.mark_output(
        *g.customized([g.new_input((64,), "float32"), g.new_input((64,), "float32")], block)
    )
    assert triton.generate(UGraph(g, g), [Schedule({"n": 16})]).in_place == ((0, 1), (1, 1))


def test_a_converted_factor_of_an_asynchronous_product_has_its_own_load():
    """One product takes x as it is stored, and another takes it converted.

    The second must not share the first's buffer.
    """

    def axes(*names):
        return names

    block = BlockGraph(
        (Axis("n", 128, Role.GRID), Axis("m", 64, Role.TILE), Axis("k", 256, Role.LOOP)),
        (
            BlockInput("x", (0,), axes("m", "k")),
            BlockInput("w", (1,), axes("k", "n")),
            BlockInput("u", (2,), axes("k", "n")),
        ),
        (
            Stage(
                "k",
                (
                    BlockOp("a", "mul", ("x", "w"), axes("n", "m", "k")),
                    BlockOp("b", "mul", ("x", "u"), axes("n", "m", "k")),
                ),
                (
                    Accumulator("p", "a", "sum", axes("n", "m")),
                    Accumulator("q", "b", "sum", axes("n", "m")),
                ),
            ),
            Stage(None, (BlockOp("o", "add", ("p", "q"), axes("n", "m")),)),
        ),
        (BlockOutput("o", axes("m", "n"), "float32"),),
    )
    schedule = Schedule({"n": 64, "m": 64, "k": 64}, mma=True, num_warps=4, num_stages=3)
    for dtype, again in ((torch.float16, False), (torch.float32, True)):
        g = new_kernel_graph()
        inputs = [
            g.new_input((64, 256), torch.float16),
            g.new_input((256, 128), torch.float16),
            g.new_input((256, 128), dtype),
        ]
        g.mark_output(*g.customized(inputs, block))
        source = triton.program_source(UGraph(g, g), [schedule])
        assert source.count("tl.dot(") == 2 and ("x_again" in source) == again


def test_a_tile_too_small_for_an_asynchronous_copy_is_loaded_a_step_ahead():
    """128 elements of γ are 2 bytes for each of 128 threads, and 4 bytes for each of 64.

    An asynchronous copy needs at least 4 bytes for each thread.
    """
    ugraph = kernel_cases.rms_norm_linear(16, 512, 64)
    for warps, stages, ahead in ((4, 3, True), (2, 3, False), (4, 1, False)):
        schedule = Schedule(
            {"m": 16, "n": 64, "k": 128}, mma=True, num_warps=warps, num_stages=stages
        )
        program = triton.generate(ugraph, [schedule])
        assert ("gamma_next" in program.source) == ahead
        (kernel,) = compiler.ahead_of_time(program, 90)
        copied = len(
            re.findall(r"cp\.async\.ca\.shared\.global", kernel.ptx)
        )  # the load of γ; x and w are copied past the L1
        assert (copied > 0) == (stages > 1 and not ahead)
