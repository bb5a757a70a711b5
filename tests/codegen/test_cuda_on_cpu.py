"""Generated CUDA C++ run on the CPU: every thread is a fiber, in several orders.

tests/helpers/cuda_on_cpu.h says what that finds: wrong results, missing barriers, deadlocks.
"""

import ctypes
import subprocess

import pytest
import torch

import mirage_hf as mi
from mirage_hf import errors
from mirage_hf.codegen import cuda
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
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.ugraph import UGraph
from tests.helpers import (
    cluster_ugraphs,
    cuda_on_cpu,
    cuda_schedules,
    kernel_cases,
    multi_kernel_ugraphs,
    random_clusters,
    thorough,
    ugraphs,
)
from tests.helpers.cuda_on_cpu import CXX, ORDERS, Library
from tests.helpers.random_block_graphs import random_cases, random_graph

pytestmark = pytest.mark.skipif(CXX is None, reason="needs a C++ compiler, such as g++")

COUNT = thorough.count(128, 24)

NAMED = {
    **ugraphs.ALL,
    "every_op": ugraphs.every_op,
    "rms_norm_linear odd": lambda: ugraphs.rms_norm_linear(5, 67, 131),
    "rms_norm_linear transposed": lambda: ugraphs.rms_norm_linear(1, 300, 40, transposed=True),
    "rms_norm_linear bfloat16": lambda: ugraphs.rms_norm_linear(19, 129, 77, "bfloat16"),
    "rms_norm_linear float32": lambda: ugraphs.rms_norm_linear(2, 97, 80, "float32"),
    "attention odd": lambda: ugraphs.attention(3, 7, 45, 24, "bfloat16"),
    "softmax_rows long": lambda: ugraphs.softmax_rows(2, 5000),
    "split_k": multi_kernel_ugraphs.split_k,
    "split_k odd": lambda: multi_kernel_ugraphs.split_k(5, 131, 77, 7),
    "a short last split in steps of one": lambda: UGraph(random_graph(135), random_graph(135)),
    "split_maximum": multi_kernel_ugraphs.ALL["split_maximum"],
    "flash": multi_kernel_ugraphs.flash,
    "flash long": lambda: multi_kernel_ugraphs.flash(2, 5, 300, 24, "bfloat16"),
    "split_attention": multi_kernel_ugraphs.ALL["split_attention"],
    "online_attention": kernel_cases.online_attention,
    **{f"cluster {name}": make for name, make in cluster_ugraphs.ALL.items()},
    "cluster split_linear odd": lambda: cluster_ugraphs.split_linear(5, 70, 33, 8),
    "cluster rms_norm_linear odd": lambda: cluster_ugraphs.rms_norm_linear(5, 131, 67, 8),
    "cluster rms_norm_linear transposed": lambda: cluster_ugraphs.rms_norm_linear(
        3, 200, 40, 2, transposed=True
    ),
    "cluster rms_norm odd": lambda: cluster_ugraphs.rms_norm(3, 101, 8, "float32"),
    "cluster softmax_rows long": lambda: cluster_ugraphs.softmax_rows(2, 5001, 2),
    "cluster small_mlp odd": lambda: cluster_ugraphs.small_mlp(3, 33, 45, 21, 8),
    "cluster attention odd": lambda: cluster_ugraphs.attention(3, 5, 77, 12, 8, "bfloat16"),
    "cluster sum_over_heads odd": lambda: cluster_ugraphs.sum_over_heads(8, 3, 33, 21, "bfloat16"),
}


def wrong(library, n, graph, inputs, order):
    """Return what is wrong with the results of a kernel in an order of threads."""
    got = library.run(n, graph, inputs, order)
    if isinstance(got, str):
        return [got]
    want = run_kernel_graph(graph, inputs, torch.float64)
    return cuda_on_cpu.errors(got, want, run_kernel_graph(graph, inputs))


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """Return the library of the named µGraphs, and these."""
    built = {name: make() for name, make in NAMED.items()}
    texts = [cuda.kernels_source(u) for u in built.values()]
    return Library(texts, tmp_path_factory.mktemp("cuda")), built


@pytest.mark.parametrize("name", NAMED)
def test_a_named_kernel_computes_what_its_graph_does(name, named):
    library, built = named
    u, n = built[name], list(built).index(name)
    inputs = ugraphs.random_inputs(u.program, 0)
    for order in ORDERS:
        assert not wrong(library, n, u.kernels, inputs, order), f"order {order}"


def library_of(cases, folder):
    """Return the library of random block graphs, and their seeds and graphs."""
    return Library([cuda.kernels_source(UGraph(graph, graph)) for _, graph in cases], folder), cases


def check_random(kernels, case):
    """Compare a random block graph with the cpu backend, in three orders of threads."""
    library, cases = kernels
    seed, graph = cases[case]
    inputs = ugraphs.random_inputs(graph, seed)
    for order in ORDERS[:3]:
        assert not wrong(library, case, graph, inputs, order), f"seed {seed}, order {order}"


@pytest.fixture(scope="module")
def random_kernels(tmp_path_factory):
    cases = [(seed, graph) for seed, graph, _ in random_cases(COUNT)]
    return library_of(cases, tmp_path_factory.mktemp("cuda"))


@pytest.mark.slow
@pytest.mark.parametrize("case", range(COUNT))
def test_a_random_block_graph_computes_what_the_cpu_backend_does(case, random_kernels):
    check_random(random_kernels, case)


@pytest.fixture(scope="module")
def random_cluster_kernels(tmp_path_factory):
    return library_of(random_clusters.graphs(COUNT), tmp_path_factory.mktemp("cuda"))


@pytest.mark.slow
@pytest.mark.parametrize("case", range(COUNT))
def test_a_random_cluster_computes_what_the_cpu_backend_does(case, random_cluster_kernels):
    check_random(random_cluster_kernels, case)


def held_for_all_steps() -> UGraph:
    """Return a kernel that keeps an input, and a value made of it, for all steps of its loop."""
    axes = (Axis("k", 5, Role.LOOP), Axis("m", 4, Role.GRID), Axis("n", 3, Role.TILE))
    body = (
        BlockOp("positive", "relu", ("y",), ("k", "n")),
        BlockOp("row", "sum", ("positive",), ("k",), over="n"),
        BlockOp("larger", "max", ("x", "positive"), ("k", "m", "n")),
        BlockOp("product", "mul", ("x", "y"), ("k", "m", "n")),
        BlockOp("sum", "add", ("x", "y"), ("k", "m", "n")),
    )
    accumulators = (
        Accumulator("rows", "row", "sum", ()),
        Accumulator("total", "positive", "sum", ("n",)),
        Accumulator("dot", "product", "sum", ("m", "n")),
        Accumulator("top", "sum", "max", ("m", "n")),
        Accumulator("largest", "larger", "max", ("m", "n")),
    )
    both = ("m", "n")
    last = (
        BlockOp("a", "add", ("total", "largest"), both),
        BlockOp("b", "add", ("dot", "top"), both),
        BlockOp("c", "add", ("b", "rows"), both),
        BlockOp("o", "mul", ("a", "c"), both),
    )
    block = BlockGraph(
        axes,
        (BlockInput("x", (0,), ("k", "m")), BlockInput("y", (1,), ("n", "k"))),
        (Stage("k", body, accumulators), Stage(None, last)),
        (BlockOutput("o", both, "float32"),),
    )
    g = mi.new_kernel_graph()
    x, y = g.new_input((5, 4), "float32"), g.new_input((3, 5), "float32")
    g.mark_output(*g.customized([x, y], block))
    return UGraph(g, g)


@pytest.mark.parametrize("step", [1, 2, 8])
def test_values_that_are_held_for_all_steps_of_a_loop(step, tmp_path):
    u = held_for_all_steps()
    schedule = Schedule({"k": step, "m": 4, "n": 4}, num_warps=1, cuda=True)
    text = cuda.kernels_source(u, [schedule])
    assert "shared.y[i_n * 6" in text and "shared.positive[" in text, "they are not held"
    library, inputs = Library([text], tmp_path), ugraphs.random_inputs(u.program, 0)
    for order in ORDERS:
        assert not wrong(library, 0, u.kernels, inputs, order), f"order {order}"


def without_each(text: str, what: str) -> list[str]:
    """Return a text without the first `what`, without the second one, and so on."""
    parts = text.split(what)
    return [what.join(parts[:n]) + what.join(parts[n:]) for n in range(1, len(parts))]


def without_barriers_of_a_cluster(u: UGraph) -> list[str]:
    """Return texts that each lack a barrier of a cluster, and one where blocks wait alone."""
    text = cuda.kernels_source(u)
    alone = text.replace("cluster.sync();", "__syncthreads();")
    return [*without_each(text, "cluster.sync();"), alone]


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """Return the library of kernels whose barriers were changed, and the files of each case."""
    u = ugraphs.rms_norm_linear()
    text = cuda.kernels_source(u)
    different_lines = "if (tid) __syncthreads();\nelse __syncthreads();"
    cases = {
        "without a barrier": (u, without_each(text, "__syncthreads();")),
        "at different lines": (u, [text.replace("__syncthreads();", different_lines, 1)]),
        "for nobody": (u, [text.replace("__syncthreads();", "if (tid) __syncthreads();", 1)]),
    }
    for name, make in cluster_ugraphs.ALL.items():
        cases[f"cluster {name}"] = (u := make()), without_barriers_of_a_cluster(u)
    u = cluster_ugraphs.rms_norm_linear(3, 512, 48, 8)
    cases["as it was"] = u, [cuda.kernels_source(u)]
    texts, files = [], {}
    for name, (u, some) in cases.items():
        files[name] = u, range(len(texts), len(texts) + len(some))
        texts += some
    return Library(texts, tmp_path_factory.mktemp("cuda")), files


def found_in(changed, case: str) -> list[bool]:
    """Return for each file of a case whether an order of threads gives wrong results."""
    library, files = changed
    u, numbers = files[case]
    inputs = ugraphs.random_inputs(u.program, 0)
    return [any(wrong(library, n, u.kernels, inputs, order) for order in ORDERS) for n in numbers]


def test_a_missing_barrier_is_found(changed):
    """Every barrier stands between a writer and its reader."""
    assert found_in(changed, "without a barrier") == [True, True, True]


@pytest.mark.parametrize("name", cluster_ugraphs.ALL)
def test_a_missing_barrier_of_a_cluster_is_found(name, changed):
    """Blocks would read parts before they are there, or after their owner has ended."""
    found = found_in(changed, f"cluster {name}")
    assert found and all(found), found


def test_blocks_of_a_cluster_get_the_same_bits_in_every_order_of_threads(changed):
    library, files = changed
    u, (n,) = files["as it was"]
    inputs = ugraphs.random_inputs(u.program, 0)
    results = [library.run(n, u.kernels, inputs, order)[0] for order in ORDERS]
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("at different lines", "threads wait for each other at lines"),
        ("for nobody", "threads wait"),
    ],
)
def test_threads_that_wait_for_others_in_vain_are_found(case, error, changed):
    library, files = changed
    u, (n,) = files[case]
    inputs = ugraphs.random_inputs(u.program, 0)
    assert error in library.run(n, u.kernels, inputs, 0)


def run_check(text: str, folder) -> subprocess.CompletedProcess:
    """Compile a file with its own check, and run it."""
    source, check = folder / "check.cpp", folder / "check"
    header = cuda_on_cpu.__file__.replace(".py", ".h")
    body = cuda_on_cpu.as_cpp(text)
    source.write_text(f'#define MIRAGE_CHECK\n#include "{header}"\n{body}', encoding="utf-8")
    cuda_on_cpu.compile_cpp(source, check)
    return subprocess.run([check], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", ["rms_norm_linear", "split_k_linear"])
def test_a_file_passes_its_own_check(name, tmp_path):
    done = run_check(cuda.program_source(ugraphs.ALL[name]()), tmp_path)
    assert done.returncode == 0 and "ok" in done.stdout, done.stdout + done.stderr


def test_a_wrong_kernel_fails_its_own_check(tmp_path):
    text = cuda.program_source(ugraphs.rms_norm_linear()).replace(
        "const float o = y * inv;", "const float o = y * inv * 1.05f;"
    )
    done = run_check(text, tmp_path)
    assert done.returncode == 1 and "WRONG" in done.stdout


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_of_16_bits_are_converted_as_by_torch(dtype, tmp_path):
    """All 65,536 numbers, and as many floats around them, ties included."""
    kind, to, of = {
        torch.float16: ("half", "__half2float", "__float2half"),
        torch.bfloat16: ("__nv_bfloat16", "__bfloat162float", "__float2bfloat16"),
    }[dtype]
    text = f"""
extern "C" void launch(const {kind}* x, const float* y, float* wide, {kind}* narrow, int n) {{
  for (int i = 0; i < n; ++i) {{ wide[i] = {to}(x[i]); narrow[i] = {of}(y[i]); }}
}}"""
    library = Library([text], tmp_path).loaded
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    exact = x.float()
    following = torch.roll(exact, -1)
    y = torch.cat([exact, (exact + following) / 2, exact * 1.0001, following * 0.9999])
    x = x.repeat(4)
    wide, narrow = torch.empty_like(y), torch.empty_like(x)
    library.launch_0(*(ctypes.c_void_p(t.data_ptr()) for t in (x, y, wide, narrow)), len(y))
    torch.testing.assert_close(wide, x.float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(narrow, y.to(dtype), rtol=0, atol=0, equal_nan=True)


#: µGraphs whose inputs are read 16 bytes at a time, besides the named ones.
WIDE = {
    "rms_norm_linear 1": lambda: ugraphs.rms_norm_linear(1, 512, 48, transposed=True),
    "rms_norm_linear partial": lambda: ugraphs.rms_norm_linear(1, 520, 40, transposed=True),
    "rms_norm_linear columns": lambda: ugraphs.rms_norm_linear(1, 200, 64, "bfloat16"),
    "gated_mlp": lambda: ugraphs.gated_mlp(1, 256, 64),
    "attention": lambda: ugraphs.attention(2, 1, 208, 32),
    "online_attention": kernel_cases.online_attention,
    "qkv": lambda: ugraphs.qkv(1, 256, (32, 16, 16)),
    "split_k": lambda: multi_kernel_ugraphs.split_k(1, 512, 64, 4),
    "flash": lambda: multi_kernel_ugraphs.flash(2, 1, 320, 32, "bfloat16"),
    "cluster rms_norm_linear": lambda: cluster_ugraphs.rms_norm_linear(
        1, 1024, 32, 4, transposed=True
    ),
    "cluster attention": lambda: cluster_ugraphs.attention(2, 1, 264, 16, 4, "bfloat16"),
    "cluster small_mlp": lambda: cluster_ugraphs.small_mlp(1, 64, 64, 32, 4),
}

#: Random block graphs of each kind.
RANDOM = thorough.count(64, 8)

#: Random schedules of each µGraph, and orders of threads for each of them.
SCHEDULES, TRIED_ORDERS = thorough.count(16, 2), thorough.count(3, 1)


@pytest.fixture(scope="module")
def scheduled(tmp_path_factory):
    """Return a library of µGraphs at random schedules, and the µGraph of each of its files."""
    made = []
    graphs = [graph for _, graph, _ in random_cases(RANDOM)]
    graphs += [graph for _, graph in random_clusters.graphs(RANDOM)]
    cases = [*(make() for make in (*NAMED.values(), *WIDE.values()))]
    cases += [UGraph(graph, graph) for graph in graphs]
    for case in cases:
        for seed in range(SCHEDULES):
            u = cuda_schedules.with_constants(case, None if seed % 2 else ())
            try:
                text = cuda.kernels_source(u, cuda_schedules.random_schedules(u, seed))
            except errors.CodegenError as e:
                assert "shared memory" in str(e)
                continue
            made.append((u, text))
    library = Library([text for _, text in made], tmp_path_factory.mktemp("cuda"))
    return library, [u for u, _ in made]


@pytest.mark.slow
def test_kernels_at_random_schedules_compute_what_their_graphs_do(scheduled):
    library, built = scheduled
    assert len(built) > SCHEDULES * len(WIDE)
    for n, u in enumerate(built):
        inputs = ugraphs.random_inputs(u.program, 0)
        for order in [ORDERS[(n + k) % 3] for k in range(TRIED_ORDERS)]:  # in turn
            assert not wrong(library, n, u.kernels, inputs, order), f"number {n}, order {order}"
