"""Launches that overlap, blocks that share a loop, and outputs written over inputs, on a GPU.

Other launches, streams and threads run beside them.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.tune import measure
from tests.codegen import test_append
from tests.helpers import kernel_cases

pytestmark = pytest.mark.gpu

SLOW = '''
import copy, threading
import torch
import triton
import triton.language as tl


@triton.jit
def slow_copy(x_ptr, y_ptr, cycles_ptr, overlaps: tl.constexpr):
    """Lets the next launch begin at once, then takes its time before it writes."""
    if overlaps:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    n = tl.program_id(0) * 256 + tl.arange(0, 256)
    cycles = tl.load(cycles_ptr + tl.program_id(0))
    begin = tl.inline_asm_elementwise(
        "mov.u32 $0, %clock;", "=r", [], tl.int32, is_pure=False, pack=1
    )
    passed = begin * 0
    while passed < cycles:
        now = tl.inline_asm_elementwise(
            "mov.u32 $0, %clock;", "=r", [], tl.int32, is_pure=False, pack=1
        )
        passed = now - begin
    tl.store(y_ptr + n, tl.load(x_ptr + n + (passed < 0).to(tl.int32)))
'''


def program_of(ugraph, **schedule):
    tiles = {a: schedule.pop(a) for a in list(schedule) if len(a) == 1}
    return triton.generate(ugraph, [Schedule(tiles, **schedule)])


def attention(kernels: int, slots: int = 1024, *, early: bool = False):
    """Return a searched step of attention that reads its cache early and appends to it."""
    g = test_append.attention(1, 8, 4, slots=slots, d=64, norm=True, dtype="bfloat16")
    ugraph = next(
        c.ugraph for c in test_append.searched(g).candidates if c.ugraph.num_kernels == kernels
    )
    schedules = [
        replace(
            test_append.early_schedule(op, load_cached_early=early),
            trigger_early=op.next_may_launch_early,
        )
        for op in place_kernels(ugraph)
    ]
    assert any(s.prefetch_steps for s in schedules)
    assert any(s.load_cached_early for s in schedules) == early
    return g, triton.generate(ugraph, schedules)


def block(ugraph, **schedule):
    return ugraph.program, program_of(ugraph, **schedule)


def squares_first():
    """Return two kernels. The second may begin before the first has waited for the producer."""
    ugraph = kernel_cases.squares_then_linear(16, 1024, 1024, 8)
    first, second = dict(m=4, p=1, k=128), dict(m=16, n=64, k=64, p=8)
    program = triton.generate(
        ugraph,
        [
            Schedule(first, num_warps=1, trigger_early=True),
            Schedule(second, mma=True, num_stages=4, cooperating_blocks=2, prefetch_steps=2),
        ],
    )
    assert program.source.index("gdc_launch_dependents()") < program.source.index("gdc_wait()")
    return ugraph.program, program


SPLIT = dict(m=1, n=16, k=256, cooperating_blocks=4, prefetch_steps=1)
MMA_SPLIT = dict(m=16, n=64, k=64, mma=True, num_stages=4, cooperating_blocks=4, prefetch_steps=2)
KINDS = {
    "one trip": lambda: block(kernel_cases.rms_norm_linear(1, 1024, 1024), m=1, n=4, k=1024),
    "walking": lambda: block(
        kernel_cases.rms_norm_linear(1, 1024, 1024, residual=True),
        m=1,
        n=8,
        k=256,
        prefetch_steps=2,
    ),
    "split": lambda: block(kernel_cases.rms_norm_linear(1, 1024, 1024), **SPLIT),
    "mma split": lambda: block(
        kernel_cases.rms_norm_linear(16, 1024, 1024, dtype=torch.bfloat16), **MMA_SPLIT
    ),
    "squares, then mma split": squares_first,
    "attention": lambda: attention(1),
    "attention, two kernels": lambda: attention(2),
    "attention, rows before the wait": lambda: attention(1, 256, early=True),
    "attention, two kernels, rows before the wait": lambda: attention(2, early=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_results_hold_whatever_the_producers_take(kind, tmp_path):
    """Replay slow producer → kernel → slow producer → kernel 1,000 times.

    Delays and data are random each time.
    """
    from mirage_hf.codegen import compile as compiler
    from mirage_hf.codegen import launching

    graph_of, program = KINDS[kind]()
    run = measure.run_of(program)
    source = SLOW + "\n\n" + launching.text(with_counters=False)
    slow = compiler.load(source, triton.GeneratedProgram(source, ()).digest)
    inputs = measure.random_inputs(graph_of, "cuda")
    x = inputs[0]
    staged = [torch.zeros(x.numel() + 1, dtype=x.dtype, device="cuda") for _ in range(2)]
    flowing = torch.zeros_like(x)
    blocks_of_x = x.numel() // 256
    cycles = torch.zeros(blocks_of_x, dtype=torch.int32, device="cuda")

    def producer(source):
        slow.launch(
            slow.slow_copy, blocks_of_x, [source, flowing, cycles], num_warps=1, num_stages=1
        )

    def steps():
        results = []
        for source in staged:
            producer(source)
            results.append(run([flowing, *inputs[1:]])[0])
        return results

    steps()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = steps()
    wrong = 0
    samples = [torch.randn_like(x) for _ in range(7)]
    expected = [run([s, *inputs[1:]])[0].clone() for s in samples]
    generator = torch.Generator().manual_seed(0)
    for n in range(1000):
        a, b = n % 7, (n * 3 + 1) % 7
        for place, s in zip(staged, (a, b), strict=True):
            place[:-1].copy_(samples[s].flatten())
        cycles.copy_(
            torch.randint(0, 20_000, (blocks_of_x,), generator=generator).to(torch.int32)
            * (n % 3 > 0)
        )
        for y in captured:
            y.zero_()
        graph.replay()
        wrong += not (
            torch.equal(captured[0], expected[a]) and torch.equal(captured[1], expected[b])
        )
    assert not wrong, f"{wrong} of 1000 replays differ"


@pytest.mark.parametrize("kind", ["split", "mma split"])
def test_shared_loops_on_several_streams_threads_and_graphs_at_once(kind):
    graph_of, program = KINDS[kind]()
    run = measure.run_of(program)
    inputs = measure.random_inputs(graph_of, "cuda")
    expected = run(inputs)[0].clone()
    streams = [torch.cuda.Stream() for _ in range(4)]
    graphs = []
    for _ in range(3):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = [run(inputs)[0] for _ in range(8)]
        graphs.append((graph, outputs))
    torch.cuda.synchronize()
    for _ in range(100):
        for stream, (graph, _) in zip(streams, graphs, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(streams[3]):
            eager = [run(inputs)[0] for _ in range(4)]
    torch.cuda.synchronize()
    assert all(
        torch.equal(y, expected) for y in [*eager, *(y for _, outputs in graphs for y in outputs)]
    )
    wrong = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            found = [run(inputs)[0] for _ in range(200)]
            torch.cuda.current_stream().synchronize()
            wrong.extend(n for n, y in enumerate(found) if not torch.equal(y, expected))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_first_in_a_graph_after_a_copy_and_after_another_stream():
    graph_of, program = KINDS["split"]()
    run = measure.run_of(program)
    inputs = measure.random_inputs(graph_of, "cuda")
    expected, other = run(inputs)[0].clone(), torch.randn_like(inputs[0])
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    x = other.clone()
    with torch.cuda.graph(graph):
        (first,) = run(inputs)
        x.copy_(inputs[0])
        (after_copy,) = run([x, *inputs[1:]])
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = inputs[0] * 1
            (on_side,) = run([y, *inputs[1:]])
        (beside,) = run(inputs)
        torch.cuda.current_stream().wait_stream(side)
        (joined,) = run([y, *inputs[1:]])
    for _ in range(20):
        x.copy_(other)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(z, expected) for z in (first, after_copy, on_side, beside, joined))


@pytest.mark.parametrize(
    "schedule",
    [
        dict(m=1, n=8, k=1024),
        dict(m=1, n=2, k=256, num_warps=8),
        dict(m=1, n=16, k=256, cooperating_blocks=4),
    ],
)
def test_outputs_over_inputs(schedule):
    ugraph = kernel_cases.rms_norm_linear(1, 1024, 1024, residual=True)
    program = program_of(ugraph, **schedule)
    assert program.in_place == ((0, 3),)
    run = measure.run_of(program)
    inputs = measure.random_inputs(ugraph.program, "cuda")
    expected = run(inputs)[0].clone()
    for _ in range(200):
        r = inputs[3].clone()
        (y,) = run([*inputs[:3], r], [r])
        assert y is r and torch.equal(r, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_on_a_device_that_is_not_the_current_one():
    graph_of, program = KINDS["split"]()
    run = measure.run_of(program)
    inputs = measure.random_inputs(graph_of, "cuda:0")
    there = [x.to("cuda:1") for x in inputs]
    assert (
        torch.equal(run(there)[0].cpu(), run(inputs)[0].cpu()) and torch.cuda.current_device() == 0
    )


def test_a_busy_host_does_not_change_what_is_measured():
    """The tuner measures while its threads compile."""
    ugraph = kernel_cases.rms_norm_linear(1, 4096, 4096)
    run = measure.run_of(program_of(ugraph, m=1, n=8, k=1024))
    sets, stop = measure.cold_inputs(ugraph.program, "cuda"), threading.Event()

    def burn():
        while not stop.is_set():
            sum(range(1000))

    quiet = measure.time_run(run, sets)
    threads = [threading.Thread(target=burn) for _ in range(4)]
    for t in threads:
        t.start()
    try:
        busy = measure.time_run(run, sets)
    finally:
        stop.set()
        for t in threads:
            t.join()
    assert 0.8 < busy.us / quiet.us < 1.3, (quiet, busy)
