"""Random block graphs as CUDA on a GPU, compared with the executor in float64."""

import ctypes
import math
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mirage_hf.codegen import cuda
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.ugraph import UGraph
from tests.helpers.random_block_graphs import random_cases
from tests.helpers.ugraphs import random_inputs

NVCC = shutil.which("nvcc")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NVCC is None, reason="needs nvcc, which is not on PATH"),
]
COUNT = 64


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """Yield random graphs, `COUNT` of them, each with its shared library."""
    folder = tmp_path_factory.mktemp("cuda")

    def build(case):
        seed, graph, _ = case
        source, library = folder / f"k{seed}.cu", folder / f"k{seed}.so"
        source.write_text(cuda.kernels_source(UGraph(graph, graph)), encoding="utf-8")
        subprocess.run(
            [
                NVCC,
                "-std=c++17",
                "-O2",
                "-arch=native",
                "-shared",
                "-Xcompiler",
                "-fPIC",
                str(source),
                "-o",
                str(library),
            ],
            check=True,
            capture_output=True,
        )
        return seed, graph, ctypes.CDLL(str(library))

    with ThreadPoolExecutor() as pool:
        return list(pool.map(build, random_cases(COUNT)))


@pytest.mark.parametrize("case", range(COUNT))
def test_random_block_graph(case, libraries):
    seed, graph, library = libraries[case]
    inputs = random_inputs(graph, seed)
    want, plain = run_kernel_graph(graph, inputs, torch.float64), run_kernel_graph(graph, inputs)
    on_device = [
        x.as_strided(
            (1 + sum((d - 1) * s for d, s in zip(x.shape, x.stride(), strict=True)),), (1,)
        ).cuda()
        for x in inputs
    ]
    outputs = [torch.full(t.dims, math.nan, dtype=t.dtype, device="cuda") for t in graph.outputs]
    library.workspace_bytes.restype = ctypes.c_size_t
    workspace = torch.empty(library.workspace_bytes() + 16, dtype=torch.uint8, device="cuda")
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (*on_device, *outputs, workspace)]
    assert library.launch(*pointers, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)) == 0
    torch.cuda.synchronize()
    for got, exact, eager in zip(outputs, want, plain, strict=True):
        finite = exact.isfinite() & eager.isfinite()
        if not finite.any():
            continue
        eager_error = (eager.double() - exact)[finite].abs().max()
        error = (got.cpu().double() - exact)[finite].abs().max()
        allowed = 4 * eager_error + 4 * torch.finfo(got.dtype).eps * exact[finite].abs().max()
        assert error <= allowed, f"seed {seed}: max error {error:.3g}, allowed {allowed:.3g}"
