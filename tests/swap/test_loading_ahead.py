"""Libraries that load in threads while kernels are searched."""

import threading

import pytest
import torch

from mirage_hf.swap import loading_ahead


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_a_gpu_loads_while_the_block_runs(backend, monkeypatch):
    """An error is left to whoever needs what could not be loaded. Nothing waits for Triton."""
    loaded, may_load, is_over, prepared = [], *(threading.Event() for _ in range(3))

    def attend(device, dtypes):
        may_load.wait(60)
        loaded.append((device.type, dtypes))
        raise RuntimeError("no cuDNN")

    monkeypatch.setattr(loading_ahead, "_attend", attend)

    def prepare():
        is_over.wait(60)
        prepared.set()

    monkeypatch.setattr(loading_ahead, "_prepare_triton", prepare)
    model = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    model.register_parameter(
        "codes", torch.nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
    )
    with loading_ahead.loading_ahead(model, torch.device("cuda"), backend):
        assert not loaded
        may_load.set()
    assert loaded == [("cuda", {torch.bfloat16, torch.float32})] and not prepared.is_set()
    is_over.set()
    assert prepared.wait(60 if backend == "triton" else 0) == (backend == "triton")


def test_a_cpu_loads_nothing(monkeypatch):
    monkeypatch.setattr(loading_ahead.threading, "Thread", None)
    with loading_ahead.loading_ahead(torch.nn.Linear(2, 2), torch.device("cpu"), "cpu"):
        pass


@pytest.mark.gpu
def test_attention_and_triton_load_without_an_error():
    loading_ahead._attend(torch.device("cuda"), {torch.bfloat16, torch.float32})
    loading_ahead._prepare_triton()
