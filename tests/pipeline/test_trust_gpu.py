"""On a GPU, kernels of zoos of others are compiled and checked before they run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mirage_hf as mi
from mirage_hf.codegen import triton
from mirage_hf.errors import Rejected
from mirage_hf.pipeline import layer_choice, resolver, trust, zoo_exchange
from mirage_hf.pipeline.results import StoredEntry, ZooResults
from mirage_hf.zoo.key import target_of
from mirage_hf.zoo.store import Store, ZooPath
from tests.helpers import programs

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(trust, "_proven", {})


def request_for(device: torch.device):
    program = programs.rms_norm_linear(mi, rows=1, k=512, n=256)
    return resolver.kernel_request(program, target=target_of(device), device=device)


def looked_up(root: Path, device: torch.device):
    return ZooResults(ZooPath((Store(root),)), must_be_timed=False).load(request_for(device))


@pytest.fixture
def checked(monkeypatch):
    """Count the checks of compiled kernels."""
    found: list[object] = []
    real = trust.check_compiled

    def check(*args):
        found.append(real(*args))
        return found[-1]

    monkeypatch.setattr(trust, "check_compiled", check)
    return found


def test_compiled_kernels_are_checked_once(tmp_path, monkeypatch, checked):
    device = torch.device("cuda")
    entry = layer_choice.make_outcome(request_for(device)).entry()
    assert entry.ugraph.is_fused and entry.timings
    zoo = Store(tmp_path / "zoo", writable=True)
    zoo.put(entry)
    for _ in range(2):
        assert isinstance(looked_up(zoo.root, device), StoredEntry)
        monkeypatch.setattr(trust, "_proven", {})  # as in a new process
    assert len(checked) == 1
    ((_, verdict),) = zoo_exchange.verified(Store(zoo.root))
    assert verdict == replace(entry, error_bound=verdict.error_bound)


def test_a_schedule_that_does_not_fit_this_gpu_is_a_reason(tmp_path, checked):
    device = torch.device("cuda")
    entry = layer_choice.make_outcome(request_for(device)).entry()
    (schedule,) = entry.schedules
    tiles = {axis: 512 if axis in ("k", "n") else size for axis, size in schedule.tiles.items()}
    tiles = dict.fromkeys(tiles, 512) if tiles == dict(schedule.tiles) else tiles
    huge = replace(schedule, tiles=tiles, mma=False, num_stages=16, cooperating_blocks=1)
    early = entry.key.next_may_launch_early
    try:
        source = triton.generate(entry.ugraph, [huge], next_may_launch_early=early).source
    except mi.errors.CodegenError:
        pytest.skip("this schedule has no text")
    zoo = Store(tmp_path / "zoo", writable=True)
    zoo.put(replace(entry, schedules=(huge,), kernel=source))
    found = looked_up(zoo.root, device)
    if checked and not isinstance(checked[0], Rejected):
        assert isinstance(found, StoredEntry)  # it fits after all, and is right
    else:
        assert isinstance(found, Rejected) and found.reason


def test_what_this_machine_tuned_is_not_checked_again(monkeypatch, checked):
    program = request_for(torch.device("cuda")).program
    made = resolver.resolve(program, device="cuda")
    monkeypatch.setattr(trust, "_proven", {})
    again = resolver.resolve(program, device="cuda")
    assert (made.source, again.source) == ("searched", "cache") and not checked
