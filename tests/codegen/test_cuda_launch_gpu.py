"""CUDA kernels on a GPU: compiled by NVRTC, launched through the driver, compared with float64."""

import threading

import pytest
import torch

from mirage_hf import errors
from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.tune.cuda_schedules import cuda_schedules
from tests.codegen.test_cuda_gpu import CASES
from tests.helpers import random_clusters, thorough
from tests.helpers import ugraphs as u
from tests.helpers.cuda_schedules import random_schedules, with_constants
from tests.helpers.random_block_graphs import random_cases

pytestmark = pytest.mark.gpu

#: Random block graphs of each kind.
COUNT = thorough.count(250, 48)


def needs(ugraph):
    if ugraph.is_clustered and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("clusters need sm_90")


def run_of(ugraph, schedules=None):
    """Return the function that runs a µGraph by CUDA kernels, by default at the first schedules."""
    if schedules is None:
        schedules = [cuda_schedules(op)[0] for op in place_kernels(ugraph)]
    program = triton.generate(ugraph, schedules)
    assert all(launch.cuda for launch in program.launches)
    return compiler.load(program.source, program.digest).run


def on_gpu(inputs):
    """Return inputs on the GPU, with the same strides."""
    found = []
    for x in inputs:
        reach = 1 + sum((d - 1) * s for d, s in zip(x.shape, x.stride(), strict=True))
        flat = x.as_strided((reach,), (1,)).cuda()
        found.append(flat.as_strided(x.shape, x.stride()))
    return found


def check(got, graph, inputs, what=""):
    """Compare results with the executor in float64."""
    want, plain = run_kernel_graph(graph, inputs, torch.float64), run_kernel_graph(graph, inputs)
    for y, exact, eager in zip(got, want, plain, strict=True):
        finite = exact.isfinite() & eager.isfinite()
        if not finite.any():
            continue
        eager_error = (eager.double() - exact)[finite].abs().max()
        error = (y.cpu().double() - exact)[finite].abs().max()
        ulp = torch.finfo(y.dtype).eps if y.is_floating_point() else 0.0
        allowed = 4 * eager_error + 4 * ulp * exact[finite].abs().max()
        assert error <= allowed, f"{what} max error {error:.3g}, allowed {allowed:.3g}"


@pytest.mark.parametrize("name", CASES)
def test_a_named_kernel_computes_what_its_graph_does(name):
    ugraph = CASES[name]()
    needs(ugraph)
    inputs = u.random_inputs(ugraph.program, 0)
    run, device_inputs = run_of(ugraph), on_gpu(inputs)
    first = run(device_inputs)
    check(first, ugraph.kernels, inputs)
    for _ in range(8):
        for x, y in zip(first, run(device_inputs), strict=True):
            assert torch.equal(x.view(torch.uint8), y.view(torch.uint8)), "results differ"


@pytest.mark.parametrize("name", CASES)
def test_a_chain_in_a_cuda_graph_computes_the_same(name):
    """Launches in a graph overlap, and read constants before they wait."""
    ugraph = with_constants(CASES[name](), ("w", "gate", "up", "gamma", "a", "b", "k", "v"))
    needs(ugraph)
    inputs = on_gpu(u.random_inputs(ugraph.program, 0))
    run = run_of(ugraph)
    want = run(inputs)
    hot = [
        x
        if t.constant
        else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        for x, t in zip(inputs, ugraph.program.inputs, strict=True)
    ]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            found = []
            for _ in range(20):
                for x, y in zip(hot, inputs, strict=True):
                    if x is not y:
                        x.copy_(y)  # the kernel must wait for it
                found.append(run(hot))
    for _ in range(3):
        for x, y in zip(hot, inputs, strict=True):
            if x is not y and x.is_floating_point():
                x.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for got in found:
            for x, y in zip(got, want, strict=True):
                assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def cases():
    plain = [(seed, graph) for seed, graph, _ in random_cases(COUNT)]
    return [*plain, *random_clusters.graphs(COUNT)]


@pytest.mark.parametrize("case", range(2 * COUNT))
def test_random_block_graphs_at_random_schedules(case, request):
    every = request.config.stash.setdefault(_STASH, None) or cases()
    request.config.stash[_STASH] = every
    seed, graph = every[case]
    ugraph = with_constants(UGraph(graph, graph), None if seed % 2 else ())
    needs(ugraph)
    inputs = u.random_inputs(ugraph.program, seed)
    try:
        run = run_of(ugraph, random_schedules(ugraph, seed))
    except errors.CodegenError as e:
        assert "shared memory" in str(e)
        return
    check(run(on_gpu(inputs)), ugraph.kernels, inputs, f"seed {seed}:")


_STASH = pytest.StashKey()


def test_several_streams_and_threads():
    ugraph = u.rms_norm_linear(1, 2048, 512, transposed=True)
    inputs = on_gpu(u.random_inputs(ugraph.program, 0))
    run = run_of(ugraph)
    want = run(inputs)[0]
    failures = []

    def work():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(50):
                if not torch.equal(run(inputs)[0], want):
                    failures.append("wrong")
        stream.synchronize()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_inputs_at_any_address_and_given_outputs():
    ugraph = u.rms_norm_linear(1, 256, 64, transposed=True)
    inputs = on_gpu(u.random_inputs(ugraph.program, 0))
    run = run_of(ugraph)
    want = run(inputs)[0]
    moved = []
    for x in inputs:
        reach = 1 + sum((d - 1) * s for d, s in zip(x.shape, x.stride(), strict=True))
        memory = torch.empty(reach + 1, dtype=x.dtype, device="cuda")[1:]
        memory.copy_(x.as_strided((reach,), (1,)))
        moved.append(memory.as_strided(x.shape, x.stride()))
    assert torch.equal(run(moved)[0], want)
    out = torch.empty(want.numel() + 1, dtype=want.dtype, device="cuda")[1:].view(want.shape)
    assert run(inputs, [out])[0] is out and torch.equal(out, want)
