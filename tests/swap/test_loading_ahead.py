"""Libraries that load in threads while kernels are searched."""

import threading

import pytest
import torch
from transformers import LlamaConfig

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


@pytest.mark.parametrize(
    "width, is_likely", [(2048, False), (960, True), (1248, True), (None, False)]
)
def test_workers_start_early_if_no_kernel_of_the_width_is_stored(
    width, is_likely, monkeypatch, tmp_path
):
    """The digest of a packaged kernel ends with 960."""
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))
    monkeypatch.setattr(loading_ahead, "target_of", lambda device: "sm_90")
    model = torch.nn.Linear(2, 2)
    model.config = LlamaConfig(hidden_size=width) if width else None
    assert loading_ahead.likely_to_search(model, torch.device("cuda"), None) == is_likely


def test_a_config_of_several_models_starts_nothing_early(monkeypatch):
    class Config:
        def get_text_config(self, **options):
            raise ValueError("Multiple valid text configs were found")

    monkeypatch.setattr(loading_ahead, "target_of", lambda device: "sm_90")
    model = torch.nn.Linear(2, 2)
    model.config = Config()
    assert not loading_ahead.likely_to_search(model, torch.device("cuda"), None)


@pytest.mark.gpu
def test_attention_and_triton_load_without_an_error():
    loading_ahead._attend(torch.device("cuda"), {torch.bfloat16, torch.float32})
    loading_ahead._prepare_triton()
