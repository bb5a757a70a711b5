"""Packaged cubins on a GPU: they give what Triton's launches of the same kernels give."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch

from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import cubin_launch, cubins
from mirage_hf.codegen.cubin_launch import CubinLauncher
from mirage_hf.codegen.cubins import CubinError
from mirage_hf.tune.measure import random_inputs
from mirage_hf.verify.case_inputs import copied
from mirage_hf.zoo.store import packaged_store
from scripts.configs import random_model

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def has_cubins():
    major, minor = torch.cuda.get_device_capability()
    if isinstance(cubins.packaged(10 * major + minor), CubinError):
        pytest.skip("the package has no cubins for this GPU")


def entries(pattern):
    """Return the entry of a pattern with the fewest rows, and that with the most stages."""
    found = [e for e in packaged_store().entries() if e.pattern == pattern]
    stages = max(found, key=lambda e: max(s.num_stages for s in e.schedules))
    return [min(found, key=lambda e: e.ugraph.program.inputs[0].dims[0]), stages]


def both(entry):
    """Return the module of an entry, and inputs. Its bounds and positions lie in the caches."""
    program = entry.generate()
    module = compiler.load(program.source, program.digest)
    assert isinstance(module.launch, CubinLauncher)
    return module, random_inputs(entry.ugraph.program, DEVICE)


@pytest.fixture
def by_triton(monkeypatch):
    """Return a function that runs a module without cubins."""

    def run(module, inputs):
        with monkeypatch.context() as patch:
            patch.setattr(module, "launch", module.launch.by_triton)
            return module.run(inputs)

    return run


def test_bindings_are_installed():
    """torch's CUDA builds bring them from 2.10 on."""
    major, minor = torch.cuda.get_device_capability()
    assert cubin_launch.obstacle(10 * major + minor) == ""


@pytest.mark.parametrize("which", [0, 1], ids=["fewest rows", "most stages"])
@pytest.mark.parametrize(
    "pattern", ["attention", "gated_mlp", "linear_residual", "lora_down", "rms_norm_linear"]
)
def test_a_cubin_gives_what_triton_gives(pattern, which, by_triton):
    """Bit for bit, called and in a CUDA graph with PDL: both have the same instructions."""
    entry = entries(pattern)[which]
    module, inputs = both(entry)
    want = by_triton(module, copied(inputs))
    got = module.run(copied(inputs))
    loaded = [k for k in module.launch._ready.values() if k is not None]
    assert len(loaded) == len(entry.generate().launches), "a kernel was compiled"
    for x, y in zip(want, got, strict=True):
        torch.testing.assert_close(y, x, rtol=0, atol=0, equal_nan=True)

    captured = copied(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = module.run(captured)
        outputs = module.run(captured)  # a second launch, which may start early
    for x, y in zip(captured, inputs, strict=True):
        x.copy_(y)
    graph.replay()
    torch.cuda.synchronize()
    for x, y in zip(want, outputs, strict=True):
        torch.testing.assert_close(y, x, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("has_clusters", [False, True])
def test_the_cubin_of_a_cuda_kernel_gives_what_nvrtc_gives(has_clusters, monkeypatch):
    """Bit for bit. A packaged kernel is not compiled."""
    found = [e for e in packaged_store().entries() if "def compiled_cuda" in e.kernel]
    found = [e for e in found if ("__cluster_dims__" in e.kernel) == has_clusters]
    entry = min(found, key=lambda e: len(e.kernel))
    program = entry.generate()
    module = compiler.load(program.source, program.digest)
    packaged = module.compiled_cuda.__self__
    inputs = random_inputs(entry.ugraph.program, DEVICE)

    def outputs():
        module._functions.clear()
        return module.run(copied(inputs))

    with monkeypatch.context() as patch:
        patch.setattr(packaged, "by_nvrtc", None)  # calling it would fail
        got = outputs()
    packaged._refused.update(launch.kernel for launch in program.launches)
    try:
        want = outputs()
    finally:
        packaged._refused.clear()
        module._functions.clear()
    for x, y in zip(want, got, strict=True):
        torch.testing.assert_close(y, x, rtol=0, atol=0, equal_nan=True)


def test_launching_takes_the_host_no_longer_than_triton(by_triton):
    """Steps are replayed, so this counts in first calls and captures only."""
    entry = next(e for e in packaged_store().entries() if e.pattern == "linear_residual")
    module, inputs = both(entry)

    def microseconds(run):
        best = float("inf")
        for _ in range(5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(200):
                run()
            best = min(best, time.perf_counter() - begin)
        return best / 200 * 1e6

    module.run(inputs)
    cubin = microseconds(lambda: module.run(inputs))
    launcher, module.launch = module.launch, module.launch.by_triton
    try:
        module.run(inputs)
        triton = microseconds(lambda: module.run(inputs))
    finally:
        module.launch = launcher
    print(f"{cubin:.1f} µs by cubin, {triton:.1f} µs by Triton's launcher")
    assert cubin < 1.5 * triton + 2


def test_a_first_generate_of_a_packaged_model_compiles_nothing(monkeypatch, tmp_path):
    """Two layers of Llama-3.2-1B, greedy, in a cache of 256 slots."""
    from triton import knobs

    import mirage_hf as mi

    compiled = []
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))
    monkeypatch.setattr(knobs.compilation, "listener", lambda **what: compiled.append(what["src"]))
    model = random_model("llama-3.2-1b", DEVICE, layers=2)
    mi.optimize(model)
    prompt = torch.randint(0, 1000, (1, 100), device=DEVICE)
    model.generate(prompt, max_new_tokens=20, min_new_tokens=20, do_sample=False)
    assert not compiled


NEW_MODEL = """
import torch, mirage_hf
from transformers import LlamaConfig, LlamaForCausalLM

sizes = dict(hidden_size=320, intermediate_size=832, num_hidden_layers=2, vocab_size=512)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=5)).bfloat16().cuda().eval()
mirage_hf.optimize(model, tune="never")
prompt = torch.randint(0, 500, (1, 20), device="cuda")
for sampling in ({"do_sample": False}, {"do_sample": True, "top_p": 0.9, "top_k": 20}):
    for _ in range(3):
        model.generate(prompt, max_new_tokens=40, min_new_tokens=40, pad_token_id=0, **sampling)
assert "6 calls with all steps by kernels" in str(model.mirage.report), model.mirage.report
"""


def test_a_model_without_packaged_kernels_needs_no_c_compiler(tmp_path):
    """CC names a program that fails, in a process with empty caches."""
    empty = {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "MIRAGE_HF_CACHE": str(tmp_path)}
    subprocess.run(
        [sys.executable, "-c", NEW_MODEL],
        env={**os.environ, **empty, "CC": "/bin/false"},
        check=True,
        timeout=300,
    )
    assert any((tmp_path / "triton").rglob("*.cubin"))
