"""The script that measures packaged entries again, with made-up times."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from mirage_hf.codegen.placement import PlacedOp, place_kernels
from mirage_hf.codegen.plan import pipelining, plan_kernel
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.codegen.triton_kernel import write_kernel
from mirage_hf.gpus import H200
from mirage_hf.tune import space, tuner
from mirage_hf.tune.candidates import MEASURED, TuneResult
from mirage_hf.tune.measure import timing
from mirage_hf.zoo.entry import ENTRY
from mirage_hf.zoo.entry_reader import read_entry
from scripts import refresh_zoo, retune_zoo


def packaged(pattern: str) -> Path:
    """Return the folder of a packaged entry, from the root of the repository."""
    return next(refresh_zoo.ROOT.glob(f"kernel_zoo/{pattern}/sm_90")).relative_to(refresh_zoo.ROOT)


OUTPUT, ATTENTION = packaged("linear_residual/1x2048-*"), packaged("attention/1x8x4x64-*")


@pytest.fixture
def zoo(tmp_path):
    """Return a zoo of a linear with a residual, and of attention."""
    for folder in (OUTPUT, ATTENTION):
        shutil.copytree(refresh_zoo.ROOT / folder, tmp_path / folder)
    return tmp_path / "kernel_zoo"


@pytest.fixture
def measured(monkeypatch):
    """Let the tuner give times without a GPU. A layer takes the first candidate of each program."""
    tune = tuner.tune

    def fake_tune(ugraphs, **options):
        ranked = tune(ugraphs, **{**options, "device": "cpu"})
        found = [
            replace(c, status=MEASURED, timing=timing([5.0 + n], 1))
            for n, c in enumerate(ranked.candidates)
        ]
        return TuneResult.of("a fake GPU", found)

    monkeypatch.setattr(retune_zoo.tuner, "tune", fake_tune)
    monkeypatch.setattr(retune_zoo, "need_gpu", lambda name: None)
    monkeypatch.setattr(
        retune_zoo,
        "choose_for_layer",
        lambda choices, device: ([found[0] for found in choices], timing([40.0], 1)),
    )


def make_stale(folder: Path) -> None:
    """Store another text of the kernel, as an older generator would have written it."""
    entry = replace(read_entry(folder), kernel="# older\n")
    refresh_zoo.write(entry, folder.parents[2], folder)


def run(monkeypatch, zoo: Path, *folders: Path, options: Sequence[str] = ()) -> None:
    names = " ".join(str(zoo.parent / folder) for folder in folders)
    arguments = ["retune_zoo", "--zoo", str(zoo), "--layer", names, *options]
    monkeypatch.setattr(sys, "argv", arguments)
    retune_zoo.main()


def test_an_entry_whose_text_is_out_of_date_is_written_anew(zoo, measured, monkeypatch):
    folder = zoo.parent / OUTPUT
    before = read_entry(folder)
    make_stale(folder)
    attention = (zoo.parent / ATTENTION / ENTRY).read_text()
    run(monkeypatch, zoo, ATTENTION, OUTPUT)
    after = read_entry(folder)
    assert after.key == before.key and after.kernel == after.generate().source
    assert after.schedules != before.schedules and after.search["layer_us"] == 40.0
    assert {t.name for t in after.timings} == {"searched kernel", "library"}
    assert str(after.ugraph.kernels) == str(before.ugraph.kernels)
    assert (zoo.parent / ATTENTION / ENTRY).read_text() == attention


def test_so_many_schedules_are_tried_as_an_option_says(zoo, measured, monkeypatch):
    make_stale(zoo.parent / OUTPUT)
    run(monkeypatch, zoo, OUTPUT, options=["--tried", "3"])
    assert read_entry(zoo.parent / OUTPUT).search["tried"] == 4  # and the library


def test_entries_of_a_pattern_get_new_schedules_and_no_others(zoo, measured, monkeypatch):
    make_stale(zoo.parent / OUTPUT)
    before = {folder: (zoo.parent / folder / ENTRY).read_text() for folder in (OUTPUT, ATTENTION)}
    run(monkeypatch, zoo, OUTPUT, ATTENTION, options=["--pattern", "attention", "--tried", "3"])
    assert (zoo.parent / OUTPUT / ENTRY).read_text() == before[OUTPUT]
    after = read_entry(zoo.parent / ATTENTION)
    assert after.search["layer_us"] == 40.0 and after.search["tried"] == 4
    assert after.kernel == after.generate().source


def test_schedules_that_another_triton_would_write_in_another_way_are_not_tried():
    entry = read_entry(refresh_zoo.ROOT / ATTENTION)
    (op,) = place_kernels(entry.ugraph, entry.key.next_may_launch_early)
    tried = set(retune_zoo.schedules_of(op, H200, entry.schedules[0])) - {entry.schedules[0]}
    older, newer = (texts_with(is_newer, op) for is_newer in (False, True))
    assert tried and all(s in older and older[s] == newer.get(s) for s in tried)
    assert older.keys() - newer.keys()


def texts_with(is_newer: bool, op: PlacedOp) -> dict[Schedule, str]:
    """Return the text of each schedule on tensor cores that a version of Triton has."""
    with (
        mock.patch.object(pipelining, "WGMMA_TAKES_8_COLUMNS", is_newer),
        mock.patch.object(space, "_known", {}),
    ):
        found = [s for s in space.schedules(op) if s.mma]
        return {s: write_kernel(plan_kernel(op, s), "kernel").source for s in found}


def test_a_pattern_that_no_entry_has_is_refused(zoo, measured, monkeypatch):
    before = (zoo.parent / ATTENTION / ENTRY).read_text()
    with pytest.raises(
        SystemExit, match=r"no entry of the layer has the pattern attentoin; it has"
    ):
        run(monkeypatch, zoo, ATTENTION, options=["--pattern", "attentoin"])
    assert (zoo.parent / ATTENTION / ENTRY).read_text() == before


def test_a_program_of_two_kernels_gets_new_schedules(zoo, measured, monkeypatch):
    two = packaged("attention/4x8x2x128-to-4x8x2x128-4x8x256x128-*")
    shutil.copytree(refresh_zoo.ROOT / two, zoo.parent / two, dirs_exist_ok=True)
    assert len(read_entry(zoo.parent / two).schedules) == 2
    run(monkeypatch, zoo, two, options=["--pattern", "attention", "--tried", "3"])
    after = read_entry(zoo.parent / two)
    assert len(after.schedules) == 2 and after.search["layer_us"] == 40.0


def test_entries_that_are_up_to_date_stay(zoo, measured, monkeypatch):
    before = (zoo.parent / OUTPUT / ENTRY).read_text()
    run(monkeypatch, zoo, OUTPUT, ATTENTION)
    assert (zoo.parent / OUTPUT / ENTRY).read_text() == before


def test_a_folder_of_another_zoo_is_refused(zoo, measured, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, zoo, refresh_zoo.ROOT / OUTPUT)
    assert "does not lie in" in capsys.readouterr().err


def test_nothing_is_written_if_no_kernel_is_right(zoo, measured, monkeypatch):
    folder = zoo.parent / OUTPUT
    make_stale(folder)
    before = (folder / ENTRY).read_text()
    monkeypatch.setattr(TuneResult, "searched", ())
    with pytest.raises(SystemExit, match="no kernel was right"):
        run(monkeypatch, zoo, OUTPUT)
    assert (folder / ENTRY).read_text() == before
