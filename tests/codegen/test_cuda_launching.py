"""CUDA kernels in generated files: compiled by NVRTC without a GPU, launched on a fake driver."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import mirage_hf as mi
from mirage_hf import errors
from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import cuda_launching, triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.tune.cuda_schedules import cuda_schedules
from tests.helpers import cluster_ugraphs, multi_kernel_ugraphs, ugraphs
from tests.helpers.cuda_schedules import with_constants
from tests.helpers.fake_driver import FakeDriver


def nvrtc_version():
    try:
        return cuda_launching.cuda_bindings()[2]
    except RuntimeError:
        return None


needs_nvrtc = pytest.mark.skipif(
    nvrtc_version() is None, reason="needs NVRTC: pip install cuda-bindings nvidia-cuda-nvrtc"
)

CASES = {
    **ugraphs.ALL,
    "every_op": ugraphs.every_op,
    "rms_norm_linear 1 x 2048": lambda: ugraphs.rms_norm_linear(1, 2048, 512, transposed=True),
    "rms_norm_linear bfloat16": lambda: ugraphs.rms_norm_linear(3, 129, 77, "bfloat16"),
    "split_k": multi_kernel_ugraphs.split_k,
    "flash": multi_kernel_ugraphs.flash,
    **{f"cluster {name}": make for name, make in cluster_ugraphs.ALL.items()},
}


def first_schedules(ugraph: UGraph) -> list[Schedule]:
    return [cuda_schedules(op)[0] for op in place_kernels(ugraph)]


def generated(ugraph: UGraph) -> triton.GeneratedProgram:
    return triton.generate(ugraph, first_schedules(ugraph))


@needs_nvrtc
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sm", [80, 90])
def test_kernels_compile_without_headers(name, sm):
    ugraph = with_constants(CASES[name]())
    if sm < 90 and ugraph.is_clustered:
        pytest.skip("clusters need sm_90")
    program = generated(ugraph)
    compiled = compiler.ahead_of_time(program, sm)
    assert len(compiled) == len(program.launches)
    assert all(c.asm["cubin"].startswith(b"\x7fELF") for c in compiled)


@needs_nvrtc
def test_constants_are_read_before_the_wait_in_machine_code(tmp_path):
    """The compiler moves some kinds of loads past the wait."""
    from triton import knobs

    ugraph = with_constants(ugraphs.rms_norm_linear(1, 2048, 512, transposed=True), ("w",))
    program = generated(ugraph)
    assert program.launches[0].cuda
    [compiled] = compiler.ahead_of_time(program, 90)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    command = [knobs.nvidia.nvdisasm.path, "-c", str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    before, _, after = text.partition("ACQBULK")
    assert "LDG.E.NA.128" in before and "LDG.E.NA.128" not in after
    assert "LDG.E.128" not in before and "LDG.E.128" in after
    assert "STL" not in text and "LDL" not in text  # nothing is spilled


@needs_nvrtc
def test_cubins_are_kept_on_disk_and_a_damaged_one_is_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))
    program = generated(ugraphs.rms_norm_linear(1, 192, 40))
    [first] = compiler.ahead_of_time(program, 90)
    module = compiler.load(program.source, program.digest)
    [kept] = (Path(module.__file__).parent / "__pycache__").glob("*.cubin")
    data = kept.read_bytes()
    assert data.endswith(first.asm["cubin"])
    for damaged in (data[:-1], b"", b"a\nb\n" + data):
        kept.write_bytes(damaged)
        module._cubins.clear()
        [again] = compiler.ahead_of_time(program, 90)
        assert again.asm["cubin"] == first.asm["cubin"] and kept.read_bytes() == data


@needs_nvrtc
def test_what_the_compiler_says_is_shown():
    with pytest.raises(RuntimeError, match=r"bad: NVRTC: .*identifier .nonsense. is undefined"):
        cuda_launching.compiled_cuda(
            "bad", "namespace bad { __global__ void run() { nonsense; } }", 90
        )


def test_missing_bindings_say_the_way_out(monkeypatch):
    monkeypatch.setattr(cuda_launching, "_bindings", [])
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(
        RuntimeError, match=r"cuda-bindings and nvidia-cuda-nvrtc.*backend='triton'"
    ):
        cuda_launching.cuda_bindings()


# -- launches -------------------------------------------------------------------------------------


class FakeNvrtc:
    """A compiler that never runs."""


@pytest.fixture
def launched(monkeypatch):
    """Return a function that runs a program on a fake driver, and the driver."""
    driver = FakeDriver()
    capturing = SimpleNamespace(on=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing.on)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda d: 77, raising=False)

    def launch(module: ModuleType, name: str, tensors, **options):
        module._bindings[:] = [(driver, FakeNvrtc, (13, 0))]
        source = getattr(module, name)
        module._cubins[name, source, 90] = b"mangled", b"cubin of " + name.encode()
        driver.num_arguments = len(tensors)
        module.launch_cuda(name, source, 5, tensors, num_outputs=1, **options)
        return driver.launches[-1]

    return launch, driver, capturing


class OnGpu:
    """A tensor that says that it is on a GPU, at an address."""

    def __init__(self, address: int):
        self.address, self.device = address, SimpleNamespace(index=0)
        self.shape, self.strides = (4, 2), (2, 1)

    def data_ptr(self):
        return self.address

    def stride(self):
        return self.strides

    def as_strided(self, dims, strides):
        assert (dims, strides) == ((8,), (1,))
        return self

    def clone(self):
        return OnGpu(0x9000)


def module_of(ugraph):
    program = generated(ugraph)
    return compiler.load(program.source, program.digest), program


def test_a_launch_passes_what_the_kernel_needs(launched):
    launch, driver, capturing = launched
    module, program = module_of(ugraphs.rms_norm_linear(1, 256, 64))
    tensors = [OnGpu(0x1000), OnGpu(0x2000), OnGpu(0x3008)]
    seen = launch(module, "mirage_0", tensors, num_warps=4, shared=100)
    assert seen.function == "mangled" and seen.grid == (5, 1, 1) and seen.block == (128, 1, 1)
    assert seen.shared == 100 and seen.stream == 77 and seen.overlaps == []
    assert seen.arguments == [0x1000, 0x2000, 0x3008]  # outputs may be at any address
    assert driver.images == [b"cubin of mirage_0"] and driver.asked_shared == []
    capturing.on = True
    assert launch(module, "mirage_0", tensors, num_warps=4, shared=100).overlaps == [1]
    assert len(driver.images) == 1 and program.launches[0].num_outputs == 1


def test_inputs_that_are_not_aligned_are_copied(launched):
    launch, _, _ = launched
    module, _ = module_of(ugraphs.rms_norm_linear(1, 256, 72))
    seen = launch(module, "mirage_0", [OnGpu(0x1002), OnGpu(0x2000)], num_warps=1, shared=0)
    assert seen.arguments == [0x9000, 0x2000]


def test_much_shared_memory_is_asked_for(launched):
    launch, driver, _ = launched
    module, _ = module_of(ugraphs.rms_norm_linear(1, 256, 80))
    launch(module, "mirage_0", [OnGpu(0x1000), OnGpu(0x2000)], num_warps=1, shared=100_000)
    assert driver.asked_shared == [100_000]


@pytest.mark.parametrize("function", ["cuModuleLoadData", "cuLaunchKernelEx"])
def test_what_the_driver_refuses_is_named(function, launched):
    launch, driver, _ = launched
    module, _ = module_of(ugraphs.rms_norm_linear(1, 256, 88))
    module._functions.clear()
    driver.failing = function, 1
    with pytest.raises(RuntimeError, match=f"{function}: CUDA_ERROR_1"):
        launch(module, "mirage_0", [OnGpu(0x1000), OnGpu(0x2000)], num_warps=1, shared=0)


def test_inputs_on_the_cpu_are_refused():
    module, _ = module_of(ugraphs.rms_norm_linear(1, 256, 96))
    inputs = ugraphs.random_inputs(ugraphs.rms_norm_linear(1, 256, 96).program, 0)
    with pytest.raises(
        RuntimeError, match="mirage_0 is a CUDA kernel, but its inputs are on the CPU"
    ):
        module.run(inputs)


# -- generated files ------------------------------------------------------------------------------


def test_a_file_of_cuda_kernels_needs_neither_triton_nor_this_package():
    source = generated(multi_kernel_ugraphs.split_k()).source
    assert "import triton" not in source and "mirage_hf import" not in source
    assert source.count("launch_cuda(") == 3  # its definition and two launches
    assert source.count("struct cluster_group") == 1
    assert (
        hashlib.sha256(source.encode()).hexdigest()
        == generated(multi_kernel_ugraphs.split_k()).digest
    )


def test_a_file_may_have_kernels_of_both_generators():
    ugraph = multi_kernel_ugraphs.split_k()
    first, second = place_kernels(ugraph)
    schedules = [triton.choose_schedule(first), cuda_schedules(second)[0]]
    program = triton.generate(ugraph, schedules)
    assert [launch.cuda for launch in program.launches] == [False, True]
    assert "@triton.jit" in program.source and "launch_cuda(" in program.source
    compile(program.source, "file", "exec")


def test_schedules_of_cuda_kernels_are_stored_like_others():
    schedule = first_schedules(ugraphs.rms_norm_linear(1, 512, 64))[0]
    assert schedule.cuda and "cuda=True" in repr(schedule)
    assert Schedule.from_dict(schedule.to_dict()) == schedule


def test_constants_are_loaded_before_the_wait_and_others_after_it():
    ugraph = with_constants(ugraphs.rms_norm_linear(1, 2048, 512, transposed=True), ("w",))
    text = generated(ugraph).source
    before, _, after = text.partition("  wait_for_previous_kernel();\n")
    assert "load_constant(w_at" in before and "load_plain(x_at" in after
    assert "w_ptr" in before and "const half* __restrict__ w_ptr" in before
    assert "const half* x_ptr" in before  # a compiler may move loads of restricted pointers


@pytest.mark.parametrize("change", [dict(mma=True), dict(cooperating_blocks=2)])
def test_schedules_that_only_triton_has_are_refused(change):
    ugraph = ugraphs.rms_norm_linear(1, 256, 64)
    tiles = first_schedules(ugraph)[0].tiles
    with pytest.raises(errors.CodegenError, match="no cooperating blocks unless they stream codes"):
        triton.generate(ugraph, [Schedule(tiles, cuda=True, **change)])


def test_backend_cuda_needs_a_gpu_and_nvrtc(monkeypatch):
    g = mi.new_kernel_graph()
    g.mark_output(g.rms_norm(g.new_input((4, 64), mi.float32)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(errors.SearchError, match="there is no GPU; search with backend='cpu'"):
        mi.superoptimize(g, backend="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(cuda_launching, "_bindings", [])
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    missing = "superoptimize: .*cannot be used.*install the packages cuda-bindings and nvidia-.*"
    with pytest.raises(errors.SearchError, match=rf"{missing} \(backend='triton'\)$"):
        mi.superoptimize(g, backend="cuda")
    # Triton has no clusters
    for backend in "cuda", "auto":
        with pytest.raises(
            errors.SearchError, match=rf"{missing}. Triton kernels .* leave out clusters=True$"
        ):
            mi.superoptimize(g, backend=backend, clusters=True)
