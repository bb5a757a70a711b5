"""Kernels of other libraries stay out of recordings."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.integrations import hub_kernels

from mirage_hf.trace.record import TraceError
from mirage_hf.trace.torch_functions import torch_functions_only

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = pytest.mark.models


@triton.jit
def doubled(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr) * 2)


def test_a_triton_kernel_is_not_launched_on_fake_tensors():
    usual = triton.runtime.jit.JITFunction.run
    with torch_functions_only(), FakeTensorMode():
        x = torch.ones(4)
        with pytest.raises(TraceError, match="runs the Triton kernel doubled"):
            doubled[(1,)](x)
    assert triton.runtime.jit.JITFunction.run is usual


def test_distributions_read_nothing_on_the_host(monkeypatch):
    # torch.compile, run by an earlier test, switches the check off for good
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    with torch_functions_only():
        assert not torch.distributions.Normal(0, 1)._validate_args
    assert torch.distributions.Normal(0, 1)._validate_args


def test_other_threads_may_launch_kernels(monkeypatch):
    launched = []
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", lambda *_, **__: launched.append(1))
    with torch_functions_only():
        thread = threading.Thread(target=lambda: doubled[(1,)](torch.ones(4)))
        thread.start()
        thread.join()
    assert launched == [1]


@pytest.mark.skipif(
    not hasattr(hub_kernels, "use_kernel_func_from_hub_with_fallback"),
    reason="this transformers has no torch functions beside library kernels",
)
def test_models_run_their_torch_functions(monkeypatch):
    library = SimpleNamespace(rule=lambda x: "library")
    monkeypatch.setitem(hub_kernels.importlib.sys.modules, "made_up_library", library)
    choose = hub_kernels.use_kernel_func_from_hub_with_fallback("rule", "made_up_library")
    rule = choose(lambda x: "torch")
    assert rule(x=1) == "library"
    with torch_functions_only():
        assert rule(x=1) == "torch"
    assert rule(x=1) == "library"
