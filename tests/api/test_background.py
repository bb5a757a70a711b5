"""optimize(tune="background"): a model runs at once, and gets better kernels between its calls.

The tuner is a real process whose GPU timings are made up (tests/helpers/fake_tuner.py). The kernels
run by the cpu backend.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from mirage_hf.api import optimize, restore
from mirage_hf.errors import OptimizeError, Rejected
from mirage_hf.pipeline import background, resolver, torch_op
from mirage_hf.swap import replacement
from mirage_hf.swap.guard import BINDING_KEY
from tests.helpers import fake_tuner
from tests.helpers.fake_tuner import LIBRARY_US
from tests.helpers.tiny_models import prompt, tiny, twin_of

# Our own processes and caches, which do not depend on the version of transformers: not `models`.
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="tuners share memory on Linux"),
]
GREEDY: dict[str, Any] = dict(do_sample=False, max_new_tokens=6)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MIRAGE_HF_THREADS", "2")


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the tuner of the next optimize() be the fake one, with these options."""

    def use(**what: Any) -> None:
        monkeypatch.setenv("FAKE_TUNER", fake_tuner.asked(**what))
        monkeypatch.setattr(background, "START", fake_tuner.START)
        monkeypatch.setattr(resolver, "can_measure", lambda device, backend: True)

    return use


@pytest.fixture(scope="module")
def tuned_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the cache that the fake tuner leaves for a model of `models`."""
    folder = tmp_path_factory.mktemp("tuned")
    with fake_tuner.tuning_into(folder) as patch:
        patch.setattr(resolver, "can_measure", lambda device, backend: True)
        model = optimize(tiny("llama", num_hidden_layers=2), tune="background")
        assert "6 of 6 kernels are tuned" in tuned(model)
        restore(model)
    return folder


@pytest.fixture
def replayed(fake_gpu: Callable[..., None], tuned_cache: Path, monkeypatch: Any) -> None:
    """Let the tuner of the next optimize() leave what the fake one left before."""
    fake_gpu()
    monkeypatch.setenv("FAKE_TUNER_CACHE", str(tuned_cache))
    monkeypatch.setattr(background, "START", fake_tuner.REPLAY)


@pytest.fixture
def models() -> Iterator[Callable[..., tuple[Any, Any]]]:
    """Return a stock model and its twin. Every tuner ends with the test."""
    made = []

    def pair(**sizes: Any) -> tuple[Any, Any]:
        stock = tiny("llama", num_hidden_layers=2, **sizes)
        made.append(twin_of(stock))
        return stock, made[-1]

    yield pair
    for model in made:
        restore(model)


def tuned(model: Any, seconds: float = 120.0) -> str:
    """Wait until the tuner has ended, and return what the report says."""
    assert model.mirage.tuning.wait(seconds), model.mirage.report
    return model.mirage.report.tuning


def assert_same_tokens(stock: Any, model: Any) -> None:
    ids = prompt()
    assert torch.equal(model.generate(ids, **GREEDY), stock.generate(ids, **GREEDY))


def test_a_model_runs_at_once_and_gets_measured_kernels_between_calls(fake_gpu, models):
    fake_gpu()
    stock, model = models()
    optimize(model, tune="background")
    handle, generate = model.mirage, model.generate
    before = handle.report
    assert before.tuning.startswith("tuning in the background goes on")
    assert {row.time_us for row in before.rows} == {None}
    assert_same_tokens(stock, model)
    assert handle.runner.counts["step: all by kernels"] == 1

    status = tuned(model)
    assert "is done: 6 of 6 kernels are tuned" in status and "wait for the next call" in status
    steps = handle.runner.model_kernels
    registered = dict(torch_op._known)
    assert_same_tokens(stock, model)
    assert handle.runner.model_kernels is not steps
    after = handle.report
    assert "6 of 6 kernels are tuned, 6 blocks run new ones" in after.tuning
    assert after.tuning in str(after) and after.to_dict()["tuning"] == after.tuning
    assert {row.source for row in after.rows} == {"cache"}
    for old, new in zip(before.rows, after.rows, strict=True):
        assert (old.module, old.pattern, old.status) == (new.module, new.pattern, new.status)
        times = asdict(new)
        assert times["time_us"] < times["library_us"] == LIBRARY_US
        assert new.error is not None and new.error <= 2e-6
        if new.pattern != "attention":  # graphs of torch.compile run the new kernels, too
            assert torch_op._known[new.digest].run is not registered[new.digest].run
    # what counted before still does, and users may hold what they got
    assert handle.runner.counts["step: all by kernels"] == 2
    assert model.mirage is handle and model.generate is generate
    assert handle.tuning._replace is None  # nothing holds the model any more

    restore(model)
    optimize(model)  # with `auto`, everything is in the cache
    assert {(row.source, row.time_us) for row in model.mirage.report.rows} == {
        (row.source, row.time_us) for row in after.rows
    }


def test_forwards_without_generate_get_measured_kernels_too(replayed, models):
    stock, model = models()
    optimize(model.model, tune="background", patterns=["gated_mlp", "linear_residual"])
    handle = model.model.mirage
    assert handle.tuning.wait(120), handle.report
    x = prompt(1, 1)
    binding = model.model.layers[0].__dict__[BINDING_KEY]
    kernels = binding.kernels
    with torch.no_grad():
        assert torch.allclose(model(x).logits, stock(x).logits, atol=1e-5)
    assert binding.kernels is not kernels
    assert all(row.time_us for row in handle.report.swapped)
    assert binding.calls == 1 and not binding.fallbacks


def test_a_block_whose_library_path_was_measured_faster_runs_the_library(fake_gpu, models):
    fake_gpu(library_us=1.0)
    stock, model = models()
    optimize(model, tune="background")
    tuned(model)
    assert_same_tokens(stock, model)
    rows = {(row.module, row.pattern): row for row in model.mirage.report.rows}
    for (_, pattern), row in rows.items():
        if pattern == "attention":  # the library cannot read our caches
            assert row.kernel == "1 kernel" and row.status == "swapped"
        else:
            assert row.kernel == "library" and "library path was measured faster" in row.reason
    assert_same_tokens(stock, model)


@pytest.mark.parametrize("checked", ["check", "check_step", "check_head"])
def test_kernels_that_fail_a_check_are_not_used(replayed, models, monkeypatch, checked):
    stock, model = models()
    optimize(model, tune="background")
    tuned(model)
    monkeypatch.setattr(replacement, checked, lambda *_: Rejected("off by 3"))
    handle = model.mirage
    steps, layers = handle.runner.model_kernels, model.model.layers
    kernels = [layer.__dict__[BINDING_KEY].kernels for layer in layers]
    assert_same_tokens(stock, model)
    assert "0 blocks run new ones; measured kernels were not put in place: " in (
        handle.report.tuning
    )
    assert "off by 3" in handle.report.tuning
    assert handle.runner.model_kernels is steps
    now = [layer.__dict__[BINDING_KEY].kernels for layer in layers]
    assert all(a is b for a, b in zip(now, kernels, strict=True))
    assert {row.time_us for row in handle.report.rows} == {None}


def test_a_model_that_was_changed_keeps_its_kernels_and_says_why(replayed, models):
    stock, model = models()
    optimize(model, tune="background")
    tuned(model)
    for one in (stock, model):
        one.model.layers[1].mlp.down_proj.weight.data *= 0.5
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *a: None)
    assert_same_tokens(stock, model)
    assert "layers.0: its guard refuses it: forward hook on up_proj" in model.mirage.report.tuning


def test_a_killed_tuner_and_a_full_disk_leave_the_model_running(fake_gpu, models):
    fake_gpu(full_disk_after=2)
    stock, model = models()
    optimize(model, tune="background")
    assert "No space left on device" in tuned(model)
    assert_same_tokens(stock, model)
    fake_gpu(seconds=60.0)
    optimize(model, tune="background")
    os.kill(model.mirage.tuning._process.pid, signal.SIGKILL)
    assert "killed by signal 9" in tuned(model, 30)
    assert_same_tokens(stock, model)


@pytest.mark.parametrize("how", ["restore", "optimize", "delete"])
def test_the_tuner_ends_with_the_model(fake_gpu, models, how):
    fake_gpu(seconds=60.0)
    _, model = models()
    optimize(model, tune="background")
    process = model.mirage.tuning._process
    assert process.poll() is None
    if how == "restore":
        restore(model)
    elif how == "optimize":
        optimize(model, tune="never")
        assert model.mirage.tuning is None
    else:
        weak = weakref.ref(model)
        models.__closure__[0].cell_contents.clear()
        del model
        gc.collect()
        assert weak() is None
    limit = time.monotonic() + 30
    while process.poll() is None:
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_without_a_gpu_and_without_anything_to_measure_no_process_starts(fake_gpu, models):
    _, model = models()
    patterns = ["gated_mlp"]
    optimize(model.model, tune="background", patterns=patterns)
    report = str(model.model.mirage.report)
    assert "nothing is tuned in the background: kernels are measured on a GPU only" in report
    fake_gpu()
    optimize(model.model, tune="background", patterns=patterns)
    assert model.model.mirage.tuning.wait(120)
    optimize(model.model, tune="background", patterns=patterns)
    assert model.model.mirage.tuning is None
    assert "all kernels were measured before" in str(model.model.mirage.report)
    restore(model.model)


def test_the_option_is_checked():
    with pytest.raises(OptimizeError, match=r"tune is 'backgroud' \(did you mean"):
        optimize(tiny("llama"), tune="backgroud")
