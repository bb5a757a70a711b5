"""Launches of cubins, over a driver that records them; and what is compiled instead."""

from __future__ import annotations

import hashlib
import logging
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mirage_hf import files
from mirage_hf.codegen import (
    ahead,
    cubin_launch,
    cubins,
    early,
    kernel_launch,
    loaded_cubin,
    triton,
)
from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen.cubin_launch import CubinLauncher
from mirage_hf.codegen.cubins import Cubin, CubinError, TooLargeError
from mirage_hf.codegen.generated_program import POINTER_TYPES
from mirage_hf.codegen.loaded_cubin import LoadedCubin
from mirage_hf.decode.kernels import sampling
from mirage_hf.zoo.store import Store, packaged_store
from scripts import build_cubins
from tests.helpers.fake_driver import FakeDriver, Status
from tests.helpers.ugraphs import rms_norm_linear

IMAGE = b"\x7fELF image"

#: What the fake compiler gives.
COMPILED = b"\x7fELF compiled"


def cubin(**changed) -> Cubin:
    known = {
        "digest": "a" * 64,
        "kernel": "mirage_0",
        "num_pointers": 3,
        "num_warps": 4,
        "shared": 1024,
        "launch_pdl": True,
        "size": len(IMAGE),
        "sha256": hashlib.sha256(IMAGE).hexdigest(),
    }
    return Cubin(**(known | changed))


@pytest.fixture
def driver():
    driver = FakeDriver()
    driver.num_arguments = 5
    return driver


def test_a_launch_passes_what_tritons_launcher_passes(driver):
    loaded = LoadedCubin(cubin(), IMAGE, 0, driver)
    loaded.launch(33, 0xAB, [16, 32, 2**63 + 48], is_dependent=True)
    loaded.launch(7, 0, [48, 32, 16], is_dependent=False)
    first, second = driver.launches
    assert first == SimpleNamespace(
        function="mirage_0",
        grid=(33, 1, 1),
        block=(128, 1, 1),
        shared=1024,
        stream=0xAB,
        overlaps=[1],
        arguments=[16, 32, 2**63 + 48, 0, 0],
    )
    assert second.grid == (7, 1, 1) and second.stream == 0
    assert second.overlaps == [] and second.arguments == [48, 32, 16, 0, 0]
    assert driver.images == [IMAGE] and driver.asked_shared == []


def test_a_kernel_that_does_not_wait_never_starts_early(driver):
    LoadedCubin(cubin(launch_pdl=False), IMAGE, 0, driver).launch(1, 2, [16, 32, 48], True)
    assert driver.launches[0].overlaps == []


def test_much_shared_memory_is_asked_for(driver):
    LoadedCubin(cubin(shared=200_000), IMAGE, 0, driver)
    assert driver.asked_shared == [232448 - 16]


def test_a_thread_without_a_context_gets_the_devices_own(driver):
    driver.context = 0
    LoadedCubin(cubin(), IMAGE, 0, driver)
    assert driver.context == 77


def test_threads_do_not_share_arguments(driver):
    loaded = LoadedCubin(cubin(), IMAGE, 0, driver)
    barrier = threading.Barrier(4)

    def launch(number):
        barrier.wait()
        for _ in range(200):
            loaded.launch(number, number, [16 * number] * 3, is_dependent=True)

    threads = [threading.Thread(target=launch, args=(n,)) for n in range(1, 5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(driver.launches) == 800
    for launch_made in driver.launches:
        number = launch_made.stream
        assert launch_made.grid[0] == number
        assert launch_made.arguments == [16 * number] * 3 + [0, 0]


@pytest.mark.parametrize(
    "function",
    [
        "cuDeviceGet",
        "cuCtxGetCurrent",
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuFuncGetAttribute",
        "cuFuncSetCacheConfig",
        "cuFuncSetAttribute",
        "cuDeviceGetAttribute",
    ],
)
def test_a_driver_that_refuses_is_named(driver, function):
    driver.failing = function, 209
    with pytest.raises(CubinError, match=f"{function}: CUDA_ERROR_209"):
        LoadedCubin(cubin(shared=100_000), IMAGE, 0, driver)


def test_a_gpu_with_too_little_is_refused(driver):
    driver.max_shared = 101_376
    with pytest.raises(CubinError, match="shared memory"):
        LoadedCubin(cubin(shared=150_000), IMAGE, 0, driver)
    driver.max_threads = 64
    with pytest.raises(CubinError, match="threads"):
        LoadedCubin(cubin(), IMAGE, 0, driver)


def test_a_launch_that_fails_raises(driver):
    loaded = LoadedCubin(cubin(), IMAGE, 0, driver)
    driver.failing = "cuLaunchKernelEx", 700
    with pytest.raises(CubinError, match="CUDA_ERROR_700"):
        loaded.launch(1, 0, [16, 32, 48], is_dependent=False)
    driver.failing = "", 0
    loaded.launch(1, 0, [16, 32, 48], is_dependent=False)
    driver.failing = "cuLaunchKernelEx", 700
    with pytest.raises(RuntimeError, match="CUDA_ERROR_700"):
        loaded.launch(1, 0, [16, 32, 48], is_dependent=False)


def test_bindings_that_cannot_be_imported_are_a_reason(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    with pytest.raises(CubinError, match="cuda-bindings"):
        loaded_cubin.bindings()


# -- the launcher of a generated file --------------------------------------------------------------


class FakeTensor(SimpleNamespace):
    """A tensor on GPU 0 at an address."""

    def __init__(self, address: int, dtype: torch.dtype):
        super().__init__(device=SimpleNamespace(index=0), dtype=dtype, address=address)

    def data_ptr(self) -> int:
        return self.address


@pytest.fixture
def gpu(monkeypatch, driver):
    """Fake a GPU with sm_90 and bindings of its driver."""
    now = SimpleNamespace(
        driver=driver, capturing=False, capability=(9, 0), compiled=[], by_triton=[]
    )

    def compile_kernel(kernel, signature, num_warps, num_stages, sm, constants):
        now.compiled.append((kernel.__name__, signature, num_stages, sm, dict(constants)))
        parameters = ", ".join([".param .u64 p"] * (len(signature) + cubins.SCRATCH_POINTERS))
        metadata = SimpleNamespace(
            name=kernel.__name__,
            global_scratch_size=0,
            num_ctas=1,
            num_warps=num_warps,
            shared=0,
            launch_pdl=sm >= 90,
        )
        asm = {"cubin": COMPILED, "ptx": f".visible .entry {kernel.__name__}({parameters})"}
        return SimpleNamespace(asm=asm, metadata=metadata)

    monkeypatch.setattr(ahead, "compile_kernel", compile_kernel)
    monkeypatch.setattr(cubin_launch, "_loaded", {})
    monkeypatch.setattr(cubin_launch, "_logged", set())
    monkeypatch.setattr(loaded_cubin, "bindings", lambda: driver)
    monkeypatch.setattr(cubin_launch, "bindings", lambda: driver)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.capturing)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: now.capability)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 9, raising=False)
    cubin_launch.obstacle.cache_clear()
    yield now
    cubin_launch.obstacle.cache_clear()


@pytest.fixture(scope="module")
def program():
    """Return the program of a packaged kernel."""
    entry = next(e for e in packaged_store().entries() if e.pattern == "gated_mlp")
    return entry.generate()


def launch_first(program, gpu, **changed):
    """Call the launcher of a program as its file does, for its first kernel."""
    launch = program.launches[0]
    dtype_of = {POINTER_TYPES[dtype]: dtype for dtype in (torch.bfloat16, torch.float16)}
    dtypes = [dtype_of[kind] for _, kind in launch.signature]
    tensors = [
        FakeTensor(changed.get("first", 256) + 256 * n, changed.get("dtype", dtype))
        for n, dtype in enumerate(dtypes)
    ]
    gpu.driver.num_arguments = len(tensors) + 2
    digest = changed.get("digest", program.digest)
    launcher = CubinLauncher(digest, lambda *given: gpu.by_triton.append(given))
    warps = changed.get("num_warps", launch.num_warps)
    names = [name for name, _ in launch.signature]
    kernel = SimpleNamespace(__name__=launch.kernel, arg_names=[*names, "overlaps"])
    for _ in range(2):
        launcher(kernel, launch.grid, tensors, warps, launch.num_stages)
    return launch, tensors


def test_a_packaged_kernel_is_loaded_once_and_not_compiled(gpu, program):
    gpu.capturing = True
    launch, tensors = launch_first(program, gpu)
    assert not gpu.compiled and len(gpu.driver.images) == 1
    first, second = gpu.driver.launches
    assert first == second
    assert first.grid == (launch.grid, 1, 1) and first.block == (32 * launch.num_warps, 1, 1)
    assert first.stream == 9 and first.overlaps == [1]
    assert first.arguments == [t.address for t in tensors] + [0, 0]


def test_launches_overlap_in_captures_only(gpu, program):
    launch_first(program, gpu)
    assert [made.overlaps for made in gpu.driver.launches] == [[], []]


@pytest.mark.parametrize(
    "changed",
    [{"digest": "0" * 64}, {"dtype": torch.float16}, {"num_warps": 32}],
    ids=["another source", "another dtype", "other warps"],
)
def test_a_kernel_that_differs_in_anything_is_compiled(gpu, program, changed):
    gpu.capturing = True
    launch, tensors = launch_first(program, gpu, **changed)
    types = [POINTER_TYPES[x.dtype] for x in tensors]
    names = [name for name, _ in launch.signature]
    signature = list(zip(names, types, strict=True))
    assert gpu.compiled == [(launch.kernel, signature, launch.num_stages, 90, {})]
    assert gpu.driver.images == [COMPILED] and not gpu.by_triton
    first, second = gpu.driver.launches
    assert first == second and first.overlaps == [1]
    assert first.block == (32 * changed.get("num_warps", launch.num_warps), 1, 1)
    assert first.arguments == [t.address for t in tensors] + [0, 0]


@pytest.mark.parametrize(
    "changed", [{"dtype": torch.complex64}, {"first": 264}], ids=["an unknown dtype", "unaligned"]
)
def test_triton_launches_what_is_no_cubin(gpu, program, changed):
    launch_first(program, gpu, **changed)
    assert len(gpu.by_triton) == 2 and not gpu.compiled
    assert not gpu.driver.launches and not gpu.driver.images


def test_a_kernel_that_needs_scratch_memory_is_launched_by_triton(gpu, program, monkeypatch):
    compile_kernel = ahead.compile_kernel

    def needing_scratch(*given):
        made = compile_kernel(*given)
        made.metadata.global_scratch_size = 128
        return made

    monkeypatch.setattr(ahead, "compile_kernel", needing_scratch)
    launch_first(program, gpu, digest="0" * 64)
    assert len(gpu.compiled) == 1 and len(gpu.by_triton) == 2 and not gpu.driver.images


def test_an_error_of_the_compiler_is_raised(gpu, program, monkeypatch):
    def fail(*given):
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(ahead, "compile_kernel", fail)
    with pytest.raises(RuntimeError, match="PassManager"):
        launch_first(program, gpu, digest="0" * 64)
    assert not gpu.by_triton


def test_a_cubin_that_is_not_packaged_is_looked_for_once(gpu, program, monkeypatch):
    asked, packaged = [], cubin_launch.packaged
    monkeypatch.setattr(
        cubin_launch, "packaged", lambda *given: asked.append(given) or packaged(*given)
    )
    launch_first(program, gpu, digest="0" * 64)
    assert len(asked) == 1 and len(gpu.compiled) == 1


def test_another_gpu_compiles_and_the_reason_is_told_once(gpu, program, caplog):
    gpu.capability = (8, 0)
    with caplog.at_level(logging.DEBUG, "mirage_hf"):
        launch_first(program, gpu)
        launch_first(program, gpu)  # another module with the same text
    assert len(gpu.compiled) == 1 and gpu.driver.images == [COMPILED] and not gpu.by_triton
    assert [r.message for r in caplog.records].count(
        "a cubin is not used: the package has no cubins for sm_80"
    ) == 1


@pytest.mark.parametrize(
    "function", ["cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernelEx"]
)
def test_what_the_driver_refuses_is_launched_by_triton(gpu, program, caplog, function):
    gpu.driver.failing = function, 200
    with caplog.at_level(logging.DEBUG, "mirage_hf"):
        launch_first(program, gpu)
    assert len(gpu.by_triton) == 2 and f"{function}: CUDA_ERROR_200" in caplog.text


def test_without_bindings_triton_launches(gpu, program, monkeypatch):
    def missing():
        raise CubinError("cuda-bindings cannot be imported")

    monkeypatch.setattr(loaded_cubin, "bindings", missing)
    monkeypatch.setattr(cubin_launch, "bindings", missing)
    launch_first(program, gpu)
    assert len(gpu.by_triton) == 2 and not gpu.compiled
    assert cubin_launch.obstacle(90) and not cubin_launch.has_all(program, 90)
    assert not loaded_cubin.can_launch()


def test_a_damaged_package_compiles(gpu, program, monkeypatch, tmp_path, caplog):
    path = tmp_path / "sm_90.safetensors"
    content = bytearray(cubins.packaged_path(90).read_bytes())
    content[-1000:] = bytes(1000)
    del content[-1:]
    path.write_bytes(content)
    monkeypatch.setattr(cubins, "packaged_path", lambda sm: path)
    cubins.packaged.cache_clear()
    try:
        with caplog.at_level(logging.DEBUG, "mirage_hf"):
            launch_first(program, gpu)
    finally:
        cubins.packaged.cache_clear()
    assert len(gpu.compiled) == 1 and gpu.driver.images == [COMPILED]
    assert "cannot be read" in caplog.text


def test_a_packaged_cubin_that_cannot_be_unpacked_is_compiled(gpu, program, monkeypatch, caplog):
    monkeypatch.setattr(cubins, "lzma", None)
    with caplog.at_level(logging.DEBUG, "mirage_hf"):
        launch_first(program, gpu)
    assert len(gpu.compiled) == 1 and gpu.driver.images == [COMPILED] and not gpu.by_triton
    assert len(gpu.driver.launches) == 2 and "without the module lzma" in caplog.text


def test_a_kernel_that_needs_more_than_the_gpu_has_is_an_error(gpu, program):
    """Triton could not launch it either."""
    gpu.driver.max_threads = 32
    with pytest.raises(TooLargeError, match=r"needs \d+ threads a block, and may have 32"):
        launch_first(program, gpu, digest="0" * 64)
    assert not gpu.by_triton


def test_cubins_of_users_are_never_opened(gpu, monkeypatch, tmp_path):
    """A zoo of a user with a file of cubins for its kernel: the kernel is compiled."""
    generated = triton.generate(rms_norm_linear(rows=3))
    launch = generated.launches[0]
    kinds = [kind for _, kind in launch.signature]
    digest = cubins.digest_of(
        generated.digest, launch.kernel, kinds, launch.num_warps, launch.num_stages, 90
    )
    evil = cubin(digest=digest, num_pointers=len(kinds), num_warps=launch.num_warps)
    zoo, cache = tmp_path / "zoo", tmp_path / "cache"
    opened = []
    real_open = cubins.safe_open
    monkeypatch.setattr(
        cubins, "safe_open", lambda path, **how: opened.append(path) or real_open(path, **how)
    )
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    for folder in (zoo, zoo / "p" / "s-00000000" / "sm_90", cache, cache / "zoo", tmp_path):
        folder.mkdir(parents=True, exist_ok=True)
        cubins.write(folder / "sm_90.safetensors", 90, {}, [(evil, IMAGE)])
    list(Store(zoo).verify())
    cubins.packaged.cache_clear()
    assert not cubin_launch.has_all(generated, 90)
    launch_first(generated, gpu)
    assert len(gpu.compiled) == 1 and gpu.driver.images == [COMPILED]
    assert set(opened) == {files.packaged_zoo() / "sm_90.safetensors"}


# -- hand-written kernels -------------------------------------------------------------------------


def test_hand_written_kernels_are_loaded_too(gpu):
    """The choice of a greedy token of Llama-3.2-1B."""
    what = replace(sampling.argmax_launch(1, 128256))
    kinds = [torch.bfloat16, *[torch.int64] * 4, torch.uint8, *[torch.int64] * 4, torch.int32]
    tensors = [FakeTensor(256 * n, dtype) for n, dtype in enumerate([*kinds, torch.int64], 1)]
    gpu.driver.num_arguments = len(tensors) + 2
    what.launcher(what.kernel, what.grid, tensors, what.num_warps, what.num_stages)
    (made,) = gpu.driver.launches
    assert made.function == "argmax_kernel" and made.block == (256, 1, 1)
    assert made.arguments == [256 * n for n in range(1, len(tensors) + 1)] + [0, 0]


def test_a_hand_written_kernel_is_compiled_with_its_sizes(gpu):
    what = replace(sampling.argmax_launch(1, 1000))
    kinds = [torch.bfloat16, *[torch.int64] * 4, torch.uint8, *[torch.int64] * 4, torch.int32]
    tensors = [FakeTensor(256 * n, dtype) for n, dtype in enumerate([*kinds, torch.int64], 1)]
    gpu.driver.num_arguments = len(tensors) + 2
    what.launcher(what.kernel, what.grid, tensors, what.num_warps, what.num_stages)
    ((name, signature, _, sm, constants),) = gpu.compiled
    assert (name, sm, constants) == ("argmax_kernel", 90, dict(what.constants))
    assert [n for n, _ in signature] == what.kernel.arg_names[: len(tensors)]
    assert gpu.driver.images == [COMPILED] and len(gpu.driver.launches) == 1


def test_the_source_of_a_hand_written_kernel_is_its_text_its_callees_and_its_sizes(monkeypatch):
    what = sampling.argmax_launch(1, 128256)
    assert what.source == replace(what).source
    assert what.source != sampling.argmax_launch(1, 128257).source
    assert what.source != sampling.argmax_launch(1, 128256, advances=False).source
    shown = list(kernel_launch._texts(what.kernel.fn, set()))
    assert any("def total_order(" in text for text in shown)
    monkeypatch.setattr(
        kernel_launch, "_texts", lambda *given: [*shown[:-1], shown[-1].replace("0", "1", 1)]
    )
    assert what.source != replace(what).source


# -- where it is put in place ----------------------------------------------------------------------


def test_loaded_files_launch_by_cubins_on_builds_for_cuda_only(gpu, program, monkeypatch, tmp_path):
    monkeypatch.setattr(compiler, "_loaded", {})
    assert isinstance(compiler.load(program.source, program.digest).launch, CubinLauncher)
    monkeypatch.setattr(compiler, "_loaded", {})
    monkeypatch.setattr(torch.version, "cuda", None)
    assert not isinstance(compiler.load(program.source, program.digest).launch, CubinLauncher)


def test_no_worker_compiles_what_has_cubins(gpu, program, monkeypatch, tmp_path):
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))
    monkeypatch.setenv("MIRAGE_HF_THREADS", "4")
    monkeypatch.setattr(compiler, "_loaded", {})
    asked = []
    monkeypatch.setattr(early, "_compile", lambda *given: asked.append(given))
    assert early.begin(program, 90) is None and not asked
    assert early.begin(program, 80) is not None and len(asked) == 1


def test_the_package_brings_its_cubins():
    """Wheels take the folder of the zoo whole. `Store` sees no entry in the file."""
    path = cubins.packaged_path(90)
    assert path.parent == packaged_store().root and path.is_file()


# -- CUDA kernels ---------------------------------------------------------------------------------


@pytest.fixture
def cuda_module(gpu, monkeypatch, tmp_path):
    """Return the file of a packaged CUDA kernel, its launch, and what NVRTC was asked for."""
    programs = (e.generate() for e in packaged_store().entries() if "def compiled_cuda" in e.kernel)
    program = next(p for p in programs if p.launches[0].cuda)
    path = tmp_path / "kernel.py"
    path.write_text(program.source)
    module = ahead.import_text(program.source, str(path), "mirage_hf_test_of_cuda_cubins")
    asked = []
    monkeypatch.setattr(module, "cuda_bindings", lambda: (gpu.driver, None, (13, 0)))
    monkeypatch.setattr(
        module, "_compile_cuda", lambda *given: asked.append(given[1]) or (b"_Z3run", COMPILED)
    )
    return module, program, asked


def load_first(module, program, source=None):
    """Let a file use packaged cubins, and load its first kernel as its launcher does."""
    cubin_launch.install(module, source or program.digest)
    launch = program.launches[0]
    text = getattr(module, launch.kernel)
    return module.cuda_function(launch.kernel, text, 0, launch.shared)


def test_a_packaged_cuda_kernel_is_loaded_and_not_compiled(gpu, cuda_module):
    module, program, asked = cuda_module
    found = cubins.packaged(90)
    digest = cubins.digest_of_launch(program, program.launches[0], 90)
    assert load_first(module, program) == (1, found.cubins[digest].kernel.encode())
    assert gpu.driver.images == [found.image(digest)] and not asked
    assert cubin_launch.has_all(program, 90)


def test_a_cuda_kernel_that_the_driver_refuses_is_compiled(gpu, cuda_module, caplog):
    module, program, asked = cuda_module
    load, refused = gpu.driver.cuModuleLoadData, []

    def refuse_first(image):
        if not refused:
            refused.append(image)
            return (Status(200),)
        return load(image)

    gpu.driver.cuModuleLoadData = refuse_first
    with caplog.at_level(logging.DEBUG, "mirage_hf"):
        load_first(module, program)
        launch = program.launches[0]
        module.cuda_function(launch.kernel, getattr(module, launch.kernel), 1, launch.shared)
    assert gpu.driver.images == [COMPILED] * 2 and asked == [launch.kernel] and len(refused) == 1
    assert "CUDA_ERROR_200" in caplog.text


def test_an_error_of_a_compiled_cuda_kernel_is_raised(gpu, cuda_module):
    module, program, asked = cuda_module
    gpu.driver.failing = "cuModuleLoadData", 200
    with pytest.raises(RuntimeError, match="CUDA_ERROR_200"):
        load_first(module, program)
    assert asked == [program.launches[0].kernel]
    gpu.driver.failing = "", 0
    module.cuda_function(asked[0], getattr(module, asked[0]), 0, program.launches[0].shared)
    assert gpu.driver.images != [COMPILED]  # nothing was wrong with the packaged cubin


def test_files_of_cubins_are_built_by_nvrtc(cuda_module):
    module, program, _ = cuda_module
    own = module.compiled_cuda
    assert build_cubins.nvrtc_of(module) is own
    cubin_launch.install(module, program.digest)
    assert module.compiled_cuda != own and build_cubins.nvrtc_of(module) is own


@pytest.mark.parametrize("changed", ["another GPU", "another text", "no lzma"])
def test_a_cuda_kernel_without_a_cubin_is_compiled(gpu, cuda_module, monkeypatch, changed):
    module, program, asked = cuda_module
    if changed == "another GPU":
        gpu.capability = (10, 0)
    elif changed == "no lzma":
        monkeypatch.setattr(cubins, "lzma", None)
    load_first(module, program, source="0" * 64 if changed == "another text" else None)
    assert gpu.driver.images == [COMPILED] and asked == [program.launches[0].kernel]
