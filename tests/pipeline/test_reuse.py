"""Searches that serve programs of other sizes. Nothing in them is trusted."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import mirage_hf as mi
from mirage_hf import files
from mirage_hf.errors import Rejected
from mirage_hf.graph import json_format, symbolic
from mirage_hf.graph.ugraph import UGraph, library_ugraph
from mirage_hf.pipeline import find_outcome as pipeline
from mirage_hf.pipeline import resolver, reuse, searching_ahead
from mirage_hf.pipeline.choose import place_of_choice
from mirage_hf.pipeline.find_outcome import NewOutcome, find_outcome
from mirage_hf.pipeline.request import Request
from mirage_hf.pipeline.results import SEARCHED, ZooResults
from mirage_hf.pipeline.search_and_verify import search_and_verify
from mirage_hf.pipeline.trust import examined_ugraph
from mirage_hf.search.search_report import StopReason
from mirage_hf.verify.accept import Candidate, examine
from mirage_hf.verify.numeric import NumericChecks
from mirage_hf.zoo import known_search
from mirage_hf.zoo.store import Store, ZooPath
from tests.helpers import programs

pytestmark = pytest.mark.usefixtures("remembered_verdicts")


def program(n: int = 160, rows: int = 1) -> mi.KernelGraph:
    return programs.rms_norm_linear(mi, rows=rows, k=256, n=n)


def request(graph: mi.KernelGraph, **options: Any) -> Request:
    return resolver.kernel_request(graph, target="sm_90", tune="never", **options)


@pytest.fixture
def results(tmp_path: Path) -> ZooResults:
    return ZooResults(ZooPath((Store(tmp_path, writable=True),)))


@pytest.fixture
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a program was searched")

    monkeypatch.setattr(pipeline, "search_and_verify", refuse)


def found(request: Request, results: ZooResults) -> NewOutcome:
    outcome = find_outcome(request, results)
    assert isinstance(outcome, NewOutcome)
    return outcome


def test_a_program_of_other_sizes_is_not_searched(
    results: ZooResults, monkeypatch: pytest.MonkeyPatch
) -> None:
    found(request(program(160)), results)
    own = search_and_verify(program(224), request(program(224)).options, keep=4)
    best = pipeline.schedule_candidates(request(program(224)), own, lambda: ()).ugraphs[0]
    monkeypatch.setattr(pipeline, "search_and_verify", lambda *_, **__: pytest.fail("searched"))
    made = found(request(program(224)), results).outcome
    assert made.report.stop is StopReason.LOADED
    assert str(made.ugraphs[0].kernels) == str(best.kernels)
    assert made.ugraphs[0].schedules == best.schedules
    assert made.best_entry.error_bound > 0


def test_candidates_are_proven_for_the_new_sizes(
    results: ZooResults, monkeypatch: pytest.MonkeyPatch
) -> None:
    found(request(program(160)), results)
    new = program(224)
    examined = []

    def counted(ugraph: Any, *options: Any) -> Any:
        assert ugraph.program is new
        examined.append(ugraph)
        return examined_ugraph(ugraph, *options)

    monkeypatch.setattr(reuse, "examined_ugraph", counted)
    verified = found(request(new), results).outcome.verified
    assert 0 < len(verified.candidates) <= len(examined) <= known_search.MOST_KERNELS


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_only_what_is_chosen_is_proven(
    refused: int, results: ZooResults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the choice is refused, the next one is. What runs is what would run if all were proven."""
    found(request(program(160)), results)
    search = results.known_search(request(program(224)))
    assert search is not None
    examined: list[str] = []
    bad: list[str] = []

    def noted(ugraph: Any, *options: Any) -> Any:
        examined.append(str(ugraph.kernels))
        if len(bad) < refused and str(ugraph.kernels) not in bad:
            bad.append(str(ugraph.kernels))
        return Rejected("bad") if str(ugraph.kernels) in bad else examined_ugraph(ugraph, *options)

    monkeypatch.setattr(reuse, "examined_ugraph", noted)
    wanted = request(program(224))
    choose = partial(place_of_choice, request=wanted, tuned=lambda: ())
    options: dict[str, Any] = {"like": None, "keep": 4, "seed": 0, "next_may_launch_early": False}
    one = reuse.reused(search, program(224), choose=choose, **options)
    assert one is not None and len(one.candidates) == 1
    assert len(examined) == len(set(examined)) == refused + 1
    assert [r.reason for r in one.report.rejected] == ["bad"] * refused
    every = reuse.reused(search, program(224), **options)
    assert every is not None and len(every.candidates) > 1
    chosen = [
        pipeline.schedule_candidates(wanted, verified, lambda: ()).ugraphs[0]
        for verified in (one, every)
    ]
    assert str(chosen[0].kernels) == str(chosen[1].kernels) == examined[refused]
    assert chosen[0].schedules == chosen[1].schedules


def test_a_choice_is_made_again_if_its_rounding_forbids_it(
    results: ZooResults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 16 rows tensor cores would be chosen. Their rounding is refused for each candidate."""
    found(request(program(160, rows=16)), results)
    wanted = request(program(224, rows=16))
    search = results.known_search(wanted)
    assert search is not None

    def without_tensor_cores(ugraph: Any, *options: Any) -> Any:
        candidate = examined_ugraph(ugraph, *options)
        assert isinstance(candidate, Candidate)
        return replace(candidate, tensor_cores=Rejected("too inexact"))

    monkeypatch.setattr(reuse, "examined_ugraph", without_tensor_cores)
    choose = partial(place_of_choice, request=wanted, tuned=lambda: ())
    options: dict[str, Any] = {"like": None, "keep": 4, "seed": 0, "next_may_launch_early": False}
    chosen = []
    for option in ({"choose": choose}, {}):
        verified = reuse.reused(search, wanted.program, **option, **options)
        assert verified is not None
        chosen.append(pipeline.schedule_candidates(wanted, verified, lambda: ()).ugraphs[0])
    assert str(chosen[0].kernels) == str(chosen[1].kernels)
    assert chosen[0].schedules == chosen[1].schedules


def test_known_searches_are_checked_on_the_gpu_that_will_run_them(
    results: ZooResults, monkeypatch: pytest.MonkeyPatch
) -> None:
    found(request(program(160)), results)
    gpus: list[Any] = []

    def noted(gpu: Any = None) -> NumericChecks:
        gpus.append(gpu)
        return NumericChecks()

    monkeypatch.setattr(reuse, "NumericChecks", noted)
    found(replace(request(program(224)), runs_on=torch.device("cuda", 1)), results)
    assert gpus == [torch.device("cuda", 1)]


def test_kernels_that_compute_something_else_are_searched_anew(results: ZooResults) -> None:
    """The kernels in the file have a doubled constant. No size makes them right."""
    found(request(program(160)), results)
    (path,) = (results.zoos.stores[0].root / known_search.FOLDER).glob("*.json")
    data = json.loads(path.read_text())
    text = json.dumps(data["kernels"])
    mean = 1 / 256
    assert text.count(str(mean))
    data["kernels"] = json.loads(text.replace(str(mean), "0.25"))
    path.write_text(json.dumps(data))
    made = found(request(program(224)), results).outcome
    assert made.report.stop is not StopReason.LOADED
    assert isinstance(examine(made.ugraphs[0]), Candidate)


def test_kernels_that_are_the_program_itself_do_not_serve(tmp_path: Path) -> None:
    graph = program(160)
    search = known_search.KnownSearch(graph, (library_ugraph(graph).kernels,), "")
    assert reused(search, program(224)) is None


def test_what_runs_is_what_was_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of the larger program come from the proven ones, not from the file again."""
    search = reuse.search_to_keep(found_by_search(program(160)))
    assert search is not None
    proven: list[str] = []

    def noted(ugraph: Any, *options: Any) -> Any:
        candidate = examined_ugraph(ugraph, *options)
        proven.append(str(symbolic.for_program(ugraph, large).kernels))
        return candidate

    monkeypatch.setattr(reuse, "examined_ugraph", noted)
    # In another size the file gives kernels with a wrong constant.
    original, large, small = known_search.for_other_sizes, program(224), program(192)

    def damaged(ugraph: Any, wanted: Any) -> Any:
        moved = original(ugraph, wanted)
        if wanted is small:
            return moved
        text = json.dumps(json_format.graph_to_dict(moved.kernels))
        assert str(1 / 256) in text
        wrong = json.loads(text.replace(str(1 / 256), "0.25"))
        return UGraph(wanted, json_format.graph_from_dict(wrong))

    monkeypatch.setattr(known_search, "for_other_sizes", damaged)
    found = reuse.reused(search, large, like=small, keep=4, seed=0, next_may_launch_early=False)
    assert found is not None
    for candidate in found.candidates:
        assert candidate.ugraph.program is large
        assert str(candidate.ugraph.kernels) in proven
        assert isinstance(examine(candidate.ugraph), Candidate)


def test_kernels_that_would_take_too_much_memory_do_not_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = reuse.search_to_keep(found_by_search(program(160)))
    assert search is not None and reused(search, program(224)) is not None
    monkeypatch.setattr("mirage_hf.pipeline.trust._MOST_OPS", 2)
    assert reused(search, program(224)) is None


def reused(search: known_search.KnownSearch, graph: mi.KernelGraph) -> Any:
    return reuse.reused(search, graph, like=None, keep=4, seed=0, next_may_launch_early=False)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"version": 1', '"version": 99', 1),
        lambda text: text.replace("bfloat16", "float99").replace("float16", "float99"),
        lambda text: "[" * 100_000,
        lambda text: "\x00",
    ],
    ids=["cut", "another type", "version", "dtype", "deep", "binary"],
)
def test_damaged_files_are_not_used(results: ZooResults, damage: Any) -> None:
    found(request(program(160)), results)
    (path,) = (results.zoos.stores[0].root / known_search.FOLDER).glob("*.json")
    path.write_text(damage(path.read_text()))
    made = found(request(program(224)), results).outcome
    assert made.report.stop is StopReason.EXHAUSTED


def test_far_sizes_and_other_rows_are_searched(results: ZooResults) -> None:
    found(request(program(160)), results)
    for graph in (program(160 * 5), program(160, rows=2)):
        assert results.known_search(request(graph)) is None
    assert results.known_search(request(program(160 * 4))) is not None


def test_the_nearest_sizes_serve(results: ZooResults) -> None:
    for n in (64, 512):
        found(request(program(n)), results)
    for n, nearest in ((80, 64), (400, 512)):
        known = results.known_search(request(program(n)))
        assert known is not None
        assert known.program.outputs[0].dims[-1] == nearest


def test_searches_of_another_version_count_only_if_packaged(
    results: ZooResults, monkeypatch: pytest.MonkeyPatch
) -> None:
    found(request(program(160)), results)
    monkeypatch.setattr("mirage_hf.pipeline.versions.search_version", lambda: "another")
    assert results.known_search(request(program(224))) is None
    (store,) = results.zoos.stores
    packaged = ZooResults(ZooPath((replace(store, writable=False, is_trusted=True),)))
    assert packaged.known_search(request(program(224))) is not None
    foreign = ZooResults(ZooPath((replace(store, writable=False),)))
    assert foreign.known_search(request(program(224))) is None


def test_who_wants_all_candidates_or_a_new_tuning_searches(results: ZooResults) -> None:
    found(request(program(160)), results)
    wanted = request(program(224))
    assert results.known_search(replace(wanted, all_candidates=True)) is None
    assert results.known_search(replace(wanted, runs_generated=False)) is None
    assert replace(results, looks_up=False).known_search(wanted) is None


def test_a_search_that_was_cut_short_is_not_kept(results: ZooResults) -> None:
    outcome = found(request(program(160)), ZooResults(ZooPath(()))).outcome
    report = replace(outcome.verified.report, stop=StopReason.TIME)
    short = replace(outcome, verified=replace(outcome.verified, report=report))
    assert reuse.search_to_keep(short) is None
    assert reuse.search_to_keep(outcome) is not None


def test_a_folder_that_cannot_be_written_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / known_search.FOLDER).write_text("a file where the folder should be")
    results = ZooResults(ZooPath((Store(tmp_path, writable=True),)))
    assert found(request(program(160)), results).outcome.ugraphs[0].is_fused


def test_workers_get_known_searches(
    results: ZooResults, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_search: None
) -> None:
    known = reuse.search_to_keep(found_by_search(program(160)))
    assert known is not None
    monkeypatch.setenv("MIRAGE_HF_THREADS", str(searching_ahead.THREADS_FROM))
    wanted = [replace(request(program(n)), known=known) for n in (192, 224)]
    with searching_ahead.searching(wanted):
        for each in wanted:
            made = found(each, results)
            assert made.outcome.report.stop is StopReason.LOADED


def found_by_search(graph: mi.KernelGraph) -> Any:
    wanted = request(graph)
    verified = search_and_verify(graph, wanted.options, keep=wanted.keep)
    return pipeline.schedule_candidates(wanted, verified, lambda: ())


def test_a_packaged_search_serves_its_own_program() -> None:
    """One file of each structure would take minutes. The smallest ones are read."""
    paths = sorted((files.packaged_zoo() / known_search.FOLDER).glob("*.json"), key=_size)
    assert paths
    for path in paths[:4]:
        search = known_search.read(path)
        assert search is not None
        assert reused(search, search.program) is not None


def _size(path: Path) -> int:
    return path.stat().st_size


def test_resolved_kernels_of_other_sizes_are_stored_as_searched(
    results: ZooResults,
) -> None:
    found(request(program(160)), results)
    made = found(request(program(224)), results)
    assert not made.unkept
    stored = results.load(request(program(224)))
    assert getattr(stored, "source", SEARCHED) != SEARCHED
