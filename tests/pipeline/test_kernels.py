"""resolve(): a program is searched once and then looked up, also by another process.

Damaged entries are made anew, and the result says why it was not stored.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mirage_hf as mi
from mirage_hf.codegen.generated_program import GeneratedProgram
from mirage_hf.codegen.plan import pipelining
from mirage_hf.graph.ugraph import library_ugraph
from mirage_hf.pipeline import (
    find_outcome,
    layer_choice,
    outcome,
    resolver,
    results,
    torch_op,
    trust,
    versions,
)
from mirage_hf.tune import space
from mirage_hf.tune.candidates import MEASURED, REJECTED, ScheduledCandidate, TuneResult
from mirage_hf.tune.measure import timing
from mirage_hf.zoo.entry import Entry
from mirage_hf.zoo.store import packaged_store, user_store
from tests.helpers import programs

pytestmark = pytest.mark.usefixtures("remembered_verdicts")

ROOT = Path(__file__).parents[2]

FRESH = """
import torch, mirage_hf as mi
from tests.helpers import programs
from mirage_hf.pipeline import find_outcome, layer_choice, outcome, resolver, results, versions
def refuse(*args, **kwargs):
    raise AssertionError("searched")
find_outcome.search_and_verify = refuse
import mirage_hf.search.engine as engine
engine._core.search = refuse
r = resolver.resolve(programs.build(mi, "rms_norm_linear"), device="cpu")
print(r.source, r.runs_kernel, r.digest, r.ugraph.num_kernels)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def searches(monkeypatch):
    made = []
    real = find_outcome.search_and_verify

    def counted(*args, **kwargs):
        made.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(find_outcome, "search_and_verify", counted)
    return made


def tensors(graph):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(t.dims, generator=generator).to(t.dtype) for t in graph.inputs]


def test_searched_once_then_read_by_a_fresh_process(searches):
    g = programs.build(mi, "rms_norm_linear")
    first = resolver.resolve(g, device="cpu")
    assert (
        first.source == "searched"
        and first.runs_kernel
        and first.candidates > 0
        and len(searches) == 1
        and not first.reason
    )
    assert (
        resolver.resolve(programs.build(mi, "rms_norm_linear"), device="cpu").source == "cache"
        and len(searches) == 1
    )
    done = subprocess.run([sys.executable, "-c", FRESH], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["cache", "True", first.digest, "1"], done.stderr


def test_an_entry_that_does_not_fit_is_reported(monkeypatch):
    monkeypatch.setattr(space, "obstacle", lambda ops: "needs 9764 registers")
    r = resolver.resolve(programs.build(mi, "rms_norm_linear"), device="cpu")
    assert not r.runs_kernel and r.reason.startswith(
        "no single kernel was found: needs 9764 registers"
    ), r.reason


def test_resolved_kernels_are_right():
    for name in ("rms_norm_linear", "lora_paper", "gated_mlp", "attention_decode"):
        g = programs.build(mi, name)
        r = resolver.resolve(g, device="cpu")
        inputs = tensors(g)
        want = mi.superoptimize(g, backend="cpu")[-1](inputs)
        got = r.run(inputs)
        assert all(
            torch.allclose(a.float(), b.float(), rtol=2e-2, atol=2e-2)
            for a, b in zip(got, want, strict=True)
        ), name
        assert (
            r.time_us is None
            and r.library_us is None
            and (not r.runs_kernel or r.error_bound < 1e-9)
        )


def test_a_program_without_a_kernel_is_kept_too(searches, monkeypatch):
    """It is kept until another version of the search may find a kernel."""
    g = mi.new_kernel_graph()
    g.mark_output(g.cast(g.new_input((4, 8)), "int32"))
    for version in ("this", "another"):
        monkeypatch.setattr(versions, "search_version", lambda version=version: version)
        for source in ("searched", "cache"):
            r = resolver.resolve(g, device="cpu")
            assert r.source == source and not r.runs_kernel and "cast to int32" in r.reason
            assert r.run(tensors(g))[0].shape == (4, 8)
    assert len(searches) == 2


def test_other_shapes_and_dtypes_are_other_entries(searches):
    for sizes in (
        dict(rows=1, k=64, n=32),
        dict(rows=2, k=64, n=32),
        dict(rows=1, k=64, n=32, dtype=mi.bfloat16),
    ):
        assert (
            resolver.resolve(programs.rms_norm_linear(mi, **sizes), device="cpu").source
            == "searched"
        )
    assert len(searches) == 3


def test_a_damaged_entry_is_made_anew(cache, searches):
    g = programs.build(mi, "lora_paper")
    first = resolver.resolve(g, device="cpu")
    files = [p for p in cache.rglob("*") if p.is_file() and p.suffix in (".json", ".py")]
    assert files
    for n, path in enumerate(files, 1):
        good = path.read_bytes()
        path.write_bytes(good[: len(good) // 2])
        again = resolver.resolve(g, device="cpu")
        assert (
            again.source == "searched" and again.digest == first.digest and len(searches) == n + 1
        ), path.name
        assert resolver.resolve(g, device="cpu").source == "cache"
    assert torch.equal(
        first.run(tensors(g))[0], resolver.resolve(g, device="cpu").run(tensors(g))[0]
    )


def test_an_unwritable_cache_is_reported(tmp_path, monkeypatch, searches):
    blocker = tmp_path / "a_file"
    blocker.write_text("")
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(blocker / "cache"))
    g = programs.build(mi, "lora_paper")
    for _ in range(2):
        r = resolver.resolve(g, device="cpu")
        assert r.source == "searched" and r.runs_kernel and r.reason.startswith("not kept: ")
    assert len(searches) == 2 and r.run(tensors(g))[0].shape == (4, 40)


def test_a_named_zoo_and_a_full_search(tmp_path, monkeypatch, searches):
    g = programs.build(mi, "gated_mlp")
    resolver.resolve(g, device="cpu")
    zoo = Path(os.environ["MIRAGE_HF_CACHE"])
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path / "empty"))
    from mirage_hf.zoo.store import user_store

    root = user_store().root
    named = zoo / root.relative_to(tmp_path / "empty")
    assert (
        resolver.resolve(g, device="cpu", zoo=named).source.startswith("zoo") and len(searches) == 1
    )
    assert (
        resolver.resolve(g, device="cpu", zoo=named, tune="full").source == "searched"
        and len(searches) == 2
    )


def test_rounding_decides_which_schedule_is_taken():
    """x·γ in float16 may not go to tensor cores.

    For 16 rows a form is chosen that divides first, or one that multiplies γ by W.
    """
    r = resolver.resolve(programs.rms_norm_linear(mi, rows=16, k=512, n=256), device="cpu")
    (schedule,) = r.ugraph.schedules
    block = r.ugraph.block_ops[0].block
    x, gamma, _ = (i.name for i in block.inputs)
    assert r.runs_kernel and not (
        schedule.mma and any({x, gamma} == set(op.args) for op in block.ops())
    )


def test_kernels_of_another_triton_serve_where_they_are_safe(monkeypatch, caplog):
    """Newer versions of Triton read factors of 8 columns while the next ones are copied.

    Only packaged kernels that rely on the older instruction are made again.
    """
    found = [e for e in packaged_store().entries() if isinstance(e, Entry)]
    entries = [e for e in found if not any(s.cuda for s in e.schedules)]
    for newer in (False, True):
        monkeypatch.setattr(pipelining, "WGMMA_TAKES_8_COLUMNS", newer)
        unsafe = [e for e in entries if trust.obstacle(e, True, True)]
        few = {t for e in unsafe for s in e.schedules for t in s.tiles.items() if s.mma}
        assert len(entries) > 50 and bool(unsafe) == newer
        assert not newer or (17 * len(unsafe) < len(entries) and any(tile == 8 for _, tile in few))
        programs: list[GeneratedProgram] = []
        monkeypatch.setattr(torch_op, "launcher", programs.append)
        for e in unsafe:  # saved graphs name kernels by digest
            before = len(programs)
            torch_op.run_of_entry(e)
            runs_in_torch = f"program {e.key.digest[:12]}… runs in torch" in caplog.text
            assert len(programs) > before or runs_in_torch
        assert not {e.kernel for e in unsafe} & {p.source for p in programs}
        torch_op.run_of_entry(entries[0])
        assert programs[-1].source == entries[0].kernel
    untimed = replace(entries[0], timings=())
    assert trust.obstacle(untimed, True, True) and not trust.obstacle(untimed, True, False)


# -- kernels chosen for a layer -------------------------------------------------------------------


@functools.cache
def searched(program):
    request = resolver.kernel_request(
        program, target="sm_90", pattern="rms_norm_linear", tune="never"
    )
    return layer_choice.make_outcome(request)


def made(k: int, *us: float, library: float | None = 9.0) -> resolver.Resolved:
    """Return a program's outcome as if it was just tuned.

    It has a candidate for each of the times, best first. `library` is None if the library path
    failed.
    """
    program = programs.rms_norm_linear(mi, rows=1, k=k, n=256)
    found = searched(program)
    ugraph = found.ugraphs[0]
    (op,) = ugraph.block_ops
    schedules = space.schedules(op, limit=len(us))
    tuned = tuple(
        ScheduledCandidate(ugraph, (s,), 1.0, MEASURED, timing=timing([t], 1))
        for s, t in zip(schedules, us, strict=True)
    )
    theirs = (
        ScheduledCandidate(library_ugraph(program), (), 1.0, REJECTED, "OutOfMemoryError")
        if library is None
        else ScheduledCandidate(
            library_ugraph(program), (), 1.0, MEASURED, timing=timing([library], 1)
        )
    )
    tune_result = TuneResult("a GPU", tuned[0], tuned[0], theirs, (*tuned, theirs))
    found = replace(found, tuned=tune_result)
    return resolver.resolved(found.entry(), results.SEARCHED, True, 3.0, found)


@pytest.fixture
def offered(monkeypatch):
    """Return the choices that `choose_for_layer` gets. It takes the last of each."""
    asked = []
    monkeypatch.setattr(
        layer_choice,
        "choose_for_layer",
        lambda choices, device: (
            asked.append(choices) or ([c[-1] for c in choices], timing([7.5], 1))
        ),
    )
    return asked


def test_kernels_are_chosen_for_the_layer_and_kept(offered):
    layer = [made(512, 1.0, 2.0), made(1024, 3.0, 4.0, 5.0)]
    chosen = layer_choice.chosen_for_layer(layer, device="cpu")
    assert [len(c) for c in offered[0]] == [2, 3]
    for before, after in zip(layer, chosen, strict=True):
        assert (
            after.runs_kernel
            and after.entry.schedules
            == before.outcome.measured[-1].schedules
            != before.entry.schedules
        )
        assert (
            after.time_us == before.outcome.measured[-1].us
            and after.entry.search["layer_us"] == 7.5
        )
        assert after.seconds >= before.seconds
        assert (
            isinstance(user_store().find(before.digest), Entry)
            and user_store().find(before.digest).schedules == after.entry.schedules
        )


def test_kernels_slower_than_the_library_are_not_offered(offered):
    layer = [made(512, 1.0, 2.0, 30.0), made(768, 10.0, 11.0), made(1024, 3.0, 4.0)]
    chosen = layer_choice.chosen_for_layer(layer, device="cpu")
    assert [len(c) for c in offered[0]] == [2, 2]  # the second program runs the library
    assert (
        not chosen[1].runs_kernel
        and chosen[1].entry == layer[1].entry
        and "library path was measured faster" in chosen[1].reason
    )


def test_a_library_path_that_failed_does_not_compete(cache):
    """It may lack memory. Kernels without intermediate results need less memory."""
    resolved = made(512, 1.0, 2.0, library=None)
    found, entry = resolved.outcome, resolved.entry
    assert found.contenders() == found.measured
    assert [t.name for t in entry.timings] == [outcome.OURS] and not trust.obstacle(
        entry, True, True
    )
    assert resolved.runs_kernel and (resolved.time_us, resolved.reason) == (1.0, "")
    assert layer_choice.only_choice(entry)


def test_a_stored_kernel_stays_and_counts_in_the_layer(offered):
    there = replace(made(512, 1.0, 2.0), outcome=None)
    chosen = layer_choice.chosen_for_layer([there, made(1024, 3.0, 4.0)], device="cpu")
    assert [len(c) for c in offered[0]] == [1, 2] and offered[0][0][
        0
    ].schedules == there.entry.schedules
    assert chosen[0] is there and chosen[1].entry.search["layer_us"] == 7.5
    assert (
        layer_choice.chosen_for_layer([there, there], device="cpu") == [there, there]
        and len(offered) == 1
    )


def test_a_layer_that_cannot_be_timed_says_so(monkeypatch):
    def full(choices, device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(layer_choice, "choose_for_layer", full)
    layer = [made(512, 1.0), made(1024, 3.0)]
    for before, after in zip(
        layer, layer_choice.chosen_for_layer(layer, device="cpu"), strict=True
    ):
        assert (
            after.runs_kernel
            and after.entry == before.entry
            and "CUDA out of memory" in after.reason
        )
