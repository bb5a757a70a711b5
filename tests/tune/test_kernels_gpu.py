"""Generated kernels on a GPU: hand-written cases, every schedule of the space, the tuner.

Kernels also run in graphs and on other streams.
"""

from __future__ import annotations

import pytest
import torch

from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.gpus import device_named
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.search.engine import search
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.tune import candidates, measure, space, tuner
from mirage_hf.tune.layer import choose_for_layer
from tests.helpers import indexed_programs, kernel_cases
from tests.helpers.indexed_programs import Mixture

pytestmark = pytest.mark.gpu
CASES = {c.name: c for c in kernel_cases.cases()} if torch.cuda.is_available() else {}

SHAPES = {
    "norm linear 1 row": lambda: kernel_cases.rms_norm_linear(1, 2048, 2048),
    "norm linear 1 row (K, N) bf16": lambda: kernel_cases.rms_norm_linear(
        1, 2048, 2048, stored="kn", dtype=torch.bfloat16
    ),
    "norm linear 3 rows, odd": lambda: kernel_cases.rms_norm_linear(3, 896, 1234),
    "norm linear 16 rows bf16": lambda: kernel_cases.rms_norm_linear(
        16, 2048, 2048, dtype=torch.bfloat16
    ),
    "norm linear 64 rows": lambda: kernel_cases.rms_norm_linear(64, 1024, 1024, weight=False),
    "q, k, v 1 row": lambda: kernel_cases.norm_qkv(1, 2048, (2048, 512, 512), dtype=torch.bfloat16),
    "gated mlp 1 row bf16": lambda: kernel_cases.gated_mlp(1, 2048, 4096, dtype=torch.bfloat16),
    "norm gated mlp 16 rows": lambda: kernel_cases.gated_mlp(16, 1024, 2048, norm=True),
    "lora 1 row": lambda: kernel_cases.lora(1, 2048, 2048),
    "lora 16 rows": lambda: kernel_cases.lora(16, 1024, 1024, 8),
    "softmax": lambda: kernel_cases.softmax(64, 3000),
    "attention": lambda: kernel_cases.attention_row(8, 16, 1000, 64),
    "online attention": lambda: kernel_cases.online_attention(8, 100, 1000, 64, bias=True),
    "online attention fp32": lambda: kernel_cases.online_attention(
        4, 4, 500, 64, dtype=torch.float32
    ),
    "split attention 1 row": lambda: kernel_cases.online_attention(
        16, 1, 3001, 128, 7, torch.bfloat16
    ),
    "split attention 4 rows": lambda: kernel_cases.online_attention(8, 4, 4096, 128, 8),
    "split matmul 1 row": lambda: kernel_cases.split_matmul(1, 4096, 1000, 4),
    "split matmul 16 rows": lambda: kernel_cases.split_matmul(
        16, 2000, 1024, 3, torch.bfloat16, view=True
    ),
    "split softmax": lambda: kernel_cases.split_softmax(4, 50001, 8, torch.float32),
}


@pytest.fixture(autouse=True)
def exact_float32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


class Reference:
    """Float64 results on one set of inputs, and the error allowed for each output."""

    def __init__(self, program: KernelGraph):
        self.inputs = measure.random_inputs(program, "cuda")
        self.exact = run_kernel_graph(program, self.inputs, torch.float64)
        stock = run_kernel_graph(program, self.inputs)
        self.allowed = [
            1.25 * (y.double() - z).abs().max().item()
            + torch.finfo(y.dtype).eps * z.abs().max().item()
            for y, z in zip(stock, self.exact, strict=True)
        ]

    def complaint(self, outputs: list[torch.Tensor]) -> str:
        found = [
            (y.double() - z).abs().max().item() for y, z in zip(outputs, self.exact, strict=True)
        ]
        return (
            ""
            if all(e <= a for e, a in zip(found, self.allowed, strict=True))
            else f"errors {found}, allowed {self.allowed}"
        )


def run_of(ugraph: UGraph, *schedules: Schedule) -> measure.Run:
    return measure.run_of(triton.generate(ugraph, schedules or None))


@pytest.mark.parametrize("name", [c.name for c in kernel_cases.cases()])
def test_kernels_are_as_close_to_float64_as_torch(name):
    case = CASES[name]
    reference = Reference(case.ugraph.program)
    assert not reference.complaint(run_of(case.ugraph, *case.schedules)(reference.inputs))


@pytest.mark.parametrize("name", SHAPES)
def test_every_schedule_of_the_space(name):
    """Each compiles and computes the same, in any order and twice."""
    ugraph = SHAPES[name]()
    properties = torch.cuda.get_device_properties(0)
    sm = 10 * properties.major + properties.minor
    ranked = [
        space.schedules(op, device_named(properties.name, sm), limit=48)
        for op in place_kernels(ugraph)
    ]
    schedules = [[r[min(n, len(r) - 1)] for r in ranked] for n in range(max(map(len, ranked)))]
    programs = [triton.generate(ugraph, s) for s in schedules]
    compiled = list(compiler.Compilation(programs, sm))
    reference = Reference(ugraph.program)
    wrong = [
        f"{[*map(str, s)]}: {c}"
        for s, c in zip(schedules, compiled, strict=True)
        if isinstance(c, Exception)
    ]
    for schedule, program, outcome in zip(schedules, programs, compiled, strict=True):
        if isinstance(outcome, Exception):
            continue
        try:
            run = measure.run_of(program)
            first, second = run(reference.inputs), run(reference.inputs)
            complaint = reference.complaint(first) or (
                "" if all(map(torch.equal, first, second)) else "two runs differ"
            )
        except Exception as e:
            complaint = f"{type(e).__name__}: {e}"
        wrong += [f"{[*map(str, schedule)]}: {complaint}"] if complaint else []
    assert not wrong, f"{len(wrong)} of {len(schedules)}:\n" + "\n".join(wrong[:20])


@pytest.mark.parametrize("mma", [False, True])
@pytest.mark.parametrize("parts", [1, 5])
@pytest.mark.parametrize(
    "name", ["huge scores", "masked tiles", "masked rows", "infinite", "one NaN"]
)
def test_running_maxima_on_hard_numbers(name, parts, mma):
    shape = dict(heads=2, q=20, keys=300, d=64)
    dtype = torch.float16 if mma else torch.float32
    ugraph = kernel_cases.online_attention(
        **shape, parts=parts, dtype=dtype, bias=True, scaling=1.0
    )
    inputs = [x.cuda() for x in kernel_cases.attention_inputs(name, dtype, **shape)]
    tiles = dict(h=1, m=16, s=32, d=64) | ({"p": 1} if parts > 1 else {})
    schedules = [Schedule(tiles, mma=mma, num_stages=3)]
    schedules += [Schedule({"h": 1, "m": 4, "p": 8, "d": 64})] if parts > 1 else []
    (ours,) = run_of(ugraph, *schedules)(inputs)
    (exact,) = run_kernel_graph(ugraph.program, inputs, torch.float64)
    (stock,) = run_kernel_graph(ugraph.program, [x.float() for x in inputs], torch.float32)
    there = exact.isfinite()
    error, allowed = ((y.double() - exact)[there].abs().max().item() for y in (ours, stock))
    assert (
        torch.equal(ours.isfinite(), there)
        and error <= 2 * allowed + 4 * torch.finfo(dtype).eps * exact[there].abs().max().item()
    )


def test_a_maximum_propagates_nan():
    x = torch.randn(3, 100, dtype=torch.float16, device="cuda")
    x[1, 40] = torch.nan
    for walk, tiles, lazy in (
        (False, dict(m=2, n=128), True),
        (True, dict(m=2, n=16), True),
        (True, dict(m=2, n=16), False),
    ):
        (y,) = run_of(kernel_cases.row_maximum(walk), Schedule(tiles, reduce_after_loop=lazy))([x])
        assert y.isnan().flatten().tolist() == [False, True, False]


@pytest.mark.parametrize(
    "name",
    [
        "norm linear 1 row",
        "norm linear 16 rows bf16",
        "lora 1 row",
        "softmax",
        "split attention 4 rows",
    ],
)
def test_tuner_measures_and_keeps_the_library_path(name):
    seen = []
    result = tuner.tune(
        [SHAPES[name]()], per_graph=8, replays=5, progress=lambda *args: seen.append(args)
    )
    # On tensor cores float16 overflows if x·γ comes before the division. Those candidates are
    # rightly rejected.
    refused = [
        c.reason
        for c in result.candidates
        if c.status == candidates.REJECTED and not (c.schedules[0].mma and "inf or NaN" in c.reason)
    ]
    assert result.measured and result.library.timing and result.best_searched and not refused, (
        refused
    )
    assert (
        result.best.us == min(c.us for c in result.candidates if c.chain) and seen[-1][2] == "done"
    )
    assert any(not u.is_fused for u in result.ugraphs())
    print(
        f"{name}: searched {result.best_searched.us:.2f} µs, library {result.library.us:.2f} µs, "
        f"{result.best_searched.schedules[0]}"
    )


def test_kernels_of_chosen_experts_are_measured():
    program = indexed_programs.gate_up(Mixture(1, 4, 32, 512, 256, "bfloat16"))
    found, _ = search(program, SearchOptions(threads=1))
    ugraph = next(r.ugraph for r in found if r.ugraph.num_kernels == 1)
    result = tuner.tune([ugraph], per_graph=4, replays=5, rounds=0)
    rejected = [c.reason for c in result.candidates if c.status == candidates.REJECTED]
    assert not rejected and result.best_searched is not None


def test_kernels_of_a_layer_are_chosen_together():
    results = [
        tuner.tune([SHAPES[name]()], per_graph=4, replays=5, rounds=0)
        for name in ("norm linear 1 row", "lora 1 row")
    ]
    chosen, layer = choose_for_layer([r.searched for r in results], device="cuda", replays=5)
    assert all(c in r.searched for c, r in zip(chosen, results, strict=True))
    alone = sum(c.timing.us for c in chosen)
    assert 0.5 * alone < layer.us < 1.5 * alone


def test_the_jit_finds_what_was_compiled_ahead(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    program = triton.generate(
        kernel_cases.rms_norm_linear(1, 1024, 320),
        [Schedule({"m": 1, "n": 4, "k": 1024}, num_warps=8)],
    )
    major, minor = torch.cuda.get_device_capability()
    compiler.ahead_of_time(program, 10 * major + minor)

    def kernels() -> int:
        return len(list(tmp_path.rglob("mirage_0.cubin")))

    assert kernels() == 1
    measure.run_of(program)(
        measure.random_inputs(kernel_cases.rms_norm_linear(1, 1024, 320).program, "cuda")
    )
    assert kernels() == 1


def test_in_a_graph_and_on_another_stream():
    ugraph = kernel_cases.gated_mlp(1, 1024, 1024)
    reference, run = Reference(ugraph.program), run_of(ugraph)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        outputs = run(reference.inputs)
    stream.synchronize()
    assert not reference.complaint(outputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(reference.inputs)
    captured[0].zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert not reference.complaint(captured)


def test_large_strides_need_64_bit_offsets():
    rows = 3
    ugraph = kernel_cases.softmax(rows, 256, walk=False)
    block = ugraph.block_ops[0].block
    program, kernels = KernelGraph(), KernelGraph()
    far = (1 << 30) + 64
    for g in (program, kernels):
        g.new_input((rows, 256), torch.float16, (far, 1), name="x")
    program.mark_output(program.softmax(program.inputs[0], 1))
    kernels.mark_output(*kernels.customized(kernels.inputs, block))
    x = (
        torch.empty(2 * far + 256, dtype=torch.float16, device="cuda")
        .as_strided((rows, 256), (far, 1))
        .normal_()
    )
    (y,) = run_of(UGraph(program, kernels))([x])
    assert torch.allclose(y.float(), torch.softmax(x.float(), 1), atol=1e-3)


def test_a_launch_takes_what_was_compiled_for_the_dtypes_of_its_tensors():
    """A kernel compiled for other dtypes gives wrong numbers.

    Float32 tables were once read as the bfloat16 tables of an earlier launch and gave NaN.
    """
    program = triton.generate(
        kernel_cases.softmax(64, 300, dtype=torch.float16)
    )  # it widens loaded values of any dtype
    run = compiler.load(program.source, program.digest).run
    x = torch.randn(64, 300, device="cuda")
    for dtype in (torch.bfloat16, torch.float32, torch.float16, torch.bfloat16):
        torch.testing.assert_close(
            run([x.to(dtype)])[0].float(), x.to(dtype).float().softmax(-1), rtol=0, atol=5e-3
        )
