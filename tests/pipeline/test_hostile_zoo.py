"""A zoo of hostile entries: none is executed, none gives wrong numbers, each has a reason."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

import mirage_hf as mi
from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.errors import Rejected
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.pipeline import layer_choice, resolver, trust, zoo_exchange
from mirage_hf.pipeline.results import StoredEntry, ZooResults
from mirage_hf.zoo.entry import Entry
from mirage_hf.zoo.store import Store, ZooPath
from tests.helpers import hostile_entries, programs
from tests.helpers.hostile_entries import KINDS
from tests.helpers.thorough import count

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no FIFOs")

TARGETS = ("sm_90", "cpu")

#: The most seconds of one look-up, on a machine that is busy.
SECONDS = 20.0


def program():
    return programs.rms_norm_linear(mi, rows=1, k=64, n=256)


def request_for(target: str):
    return resolver.kernel_request(program(), target=target, tune="never")


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """Return the folder of a valid entry in a zoo, for each target."""
    found = {}
    for target in TARGETS:
        root = tmp_path_factory.mktemp(target)
        entry = layer_choice.make_outcome(request_for(target)).entry()
        found[target] = Store(root, writable=True).put(entry)
    return found


@pytest.fixture
def executed(monkeypatch):
    """Fail if a text becomes a module."""

    def import_text(text, *_):
        raise AssertionError(f"executed: {text[:200]}")

    monkeypatch.setattr(compiler.ahead, "import_text", import_text)


def is_right(ugraph) -> bool:
    """Return whether a µGraph computes the program on random inputs."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(t.dims, generator=generator).to(t.dtype) for t in program().inputs]
    (want,), (got,) = (run_kernel_graph(g, inputs) for g in (program(), ugraph.kernels))
    return torch.allclose(got.float(), want.float(), rtol=2e-2, atol=2e-2)


def test_no_hostile_entry_runs_or_is_wrong(valid, tmp_path, monkeypatch, executed):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    marker = tmp_path / "executed"
    payload = f"open({str(marker)!r}, 'w').close()"
    outcomes: Counter[str] = Counter()
    shown: list[str] = []
    for number in range(count(1000, 100)):
        rng = random.Random(number)
        make, target = KINDS[number % len(KINDS)], rng.choice(TARGETS)
        root = tmp_path / "zoo"
        folder = root / valid[target].relative_to(valid[target].parents[2])
        shutil.copytree(valid[target], folder)
        make(folder, payload, rng)
        started = time.monotonic()
        case = f"{make.__name__} {number}"
        found = ZooResults(ZooPath((Store(root),))).load(request_for(target))
        if isinstance(found, StoredEntry):
            assert target == "cpu" or found.entry.generate().source == found.entry.kernel, case
            assert is_right(found.entry.ugraph), case
            assert all(isinstance(s, Schedule) for s in found.entry.schedules)
            outcomes[f"{make.__name__}: harmless"] += 1
        else:
            # None: no folder has the key that was asked for
            assert found is None or (isinstance(found, Rejected) and found.reason), case
            outcomes[f"{make.__name__}: rejected"] += 1
            shown.append(found.reason if found else "")
        for _, verdict in zoo_exchange.verified(Store(root)):
            assert isinstance(verdict, Entry) or verdict.reason, case
            shown.append(getattr(verdict, "reason", ""))
        assert (
            not isinstance(found, StoredEntry)
            or make is not hostile_entries.edited_kernel
            or (target == "cpu")
        ), case
        assert time.monotonic() - started < SECONDS, case
        shutil.rmtree(root)
        trust._proven.clear()
    assert not marker.exists()
    assert all(reason.isprintable() for reason in shown)
    rejected = sum(n for what, n in outcomes.items() if what.endswith("rejected"))
    assert rejected > 0.75 * outcomes.total(), outcomes


def test_what_is_shown_of_an_edited_kernel_on_a_cpu_is_not_its_text(valid, tmp_path, executed):
    """A CPU runs the µGraph, so the text does not decide. It is not executed either."""
    folder = tmp_path / valid["cpu"].relative_to(valid["cpu"].parents[2])
    shutil.copytree(valid["cpu"], folder)
    hostile_entries.edited_kernel(folder, "raise SystemExit", random.Random(0))
    found = ZooResults(ZooPath((Store(tmp_path),))).load(request_for("cpu"))
    assert isinstance(found, StoredEntry) and is_right(found.entry.ugraph)
    ((_, verdict),) = zoo_exchange.verified(Store(Path(tmp_path)))
    assert isinstance(verdict, Rejected) and "is not what is generated here" in verdict.reason
