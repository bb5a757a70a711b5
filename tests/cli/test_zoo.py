"""`mirage-hf zoo`: show, verify and exchange entries, with a Hub that is a folder."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from mirage_hf.codegen import triton
from mirage_hf.pipeline import trust, zoo_exchange
from mirage_hf.pipeline.outcome import CHAINED, LIBRARY, OURS
from mirage_hf.zoo import hub
from mirage_hf.zoo.entry import ENTRY, KERNEL, UGRAPH, Entry, Measurement
from mirage_hf.zoo.store import Store, user_store
from tests.cli.test_cli import capture, own_cache  # noqa: F401
from tests.helpers.fake_hub import FakeHub
from tests.helpers.hostile_entries import edit, sign
from tests.zoo.test_zoo import entry as any_entry


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(trust, "_proven", {})


@pytest.fixture
def fake_hub(tmp_path, monkeypatch):
    found = FakeHub(tmp_path / "hub")
    found.install(monkeypatch)
    hub.fetched.cache_clear()
    yield found
    hub.fetched.cache_clear()


def entry(us: float | None = 9.0, gpu: str = "A", rows: int = 3, library: float = 20.0) -> Entry:
    """Return a valid entry that took `us`, or that was not measured."""
    made = any_entry(rows=rows)
    timings = () if us is None else (timing(OURS, us), timing(LIBRARY, library))
    source = triton.generate(made.ugraph, made.schedules).source
    machine = dict(made.machine) | {"gpu": gpu}
    return replace(made, kernel=source, timings=timings, machine=machine)


def timing(name: str, us: float) -> Measurement:
    return Measurement(name, us, us, us, 100)


def zoo_of(root: Path, *entries: Entry) -> Store:
    store = Store(root, writable=True)
    for e in entries:
        assert isinstance(store.put(e), Path)
    return store


def us_of(store: Store, like: Entry) -> float | None:
    found = store.get(like.key)
    assert isinstance(found, Entry)
    return next((t.median_us for t in found.timings if t.name == OURS), None)


# -- the better measured ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "new, present, is_better",
    [
        (dict(us=8.0), dict(us=9.0), True),
        (dict(us=9.0), dict(us=8.0), False),
        (dict(us=9.0), dict(us=9.0), False),
        (dict(us=9.0), dict(us=None), True),
        (dict(us=None), dict(us=9.0), False),
        (dict(us=None), dict(us=None), False),
        (dict(us=5.0, gpu="B", library=6.0), dict(us=9.0), False),  # 1.2 and 2.2 times as fast
        (dict(us=9.0, gpu="B", library=30.0), dict(us=5.0, library=10.0), True),
    ],
)
def test_the_better_measured_is_known(new, present, is_better):
    assert zoo_exchange.is_better(entry(**new), entry(**present)) == is_better


def test_times_in_a_chain_decide_if_both_have_them():
    chained = [timing(OURS + CHAINED, 4.0), timing(LIBRARY + CHAINED, 9.0)]
    slow = replace(entry(8.0), timings=(timing(OURS, 8.0), timing(LIBRARY, 20.0), *chained))
    chained[0] = timing(OURS + CHAINED, 3.0)
    fast = replace(entry(9.0), timings=(timing(OURS, 9.0), timing(LIBRARY, 20.0), *chained))
    assert zoo_exchange.is_better(fast, slow) and not zoo_exchange.is_better(slow, fast)


# -- add, export, pull, push -----------------------------------------------------------------------


def test_add_keeps_the_better_measured(capture, tmp_path):  # noqa: F811
    source = zoo_of(tmp_path / "zoo", entry(9.0), entry(9.0, rows=4))
    out, _ = capture("zoo", "add", source.root)
    assert "2 added, 0 replaced, 0 kept, 0 rejected" in out
    zoo_of(source.root, entry(7.0), entry(11.0, rows=4))
    out, _ = capture("zoo", "add", source.root)
    assert "0 added, 1 replaced, 1 kept, 0 rejected" in out
    assert us_of(user_store(), entry()) == 7.0 and us_of(user_store(), entry(rows=4)) == 9.0


def test_add_rejects_what_is_edited_and_copies_no_file(capture, tmp_path):  # noqa: F811
    source = zoo_of(tmp_path / "zoo", entry(9.0), entry(9.0, rows=4))
    good, bad = sorted(f.parent for f in source.root.glob(f"*/*/*/{KERNEL}"))
    with (bad / KERNEL).open("a") as f:
        f.write("import os\n")
    sign(bad)
    for folder in (good, bad):
        (folder / "extra.py").write_text("import os")
    out, _ = capture("zoo", "add", source.root, "--to", tmp_path / "other", code=1)
    assert "1 added" in out and "1 rejected" in out and "is not what is generated here" in out
    (added,) = (tmp_path / "other").glob(f"*/*/*/{ENTRY}")
    assert {p.name for p in added.parent.iterdir()} == {ENTRY, KERNEL, UGRAPH}


def test_export_takes_one_target(capture, tmp_path):  # noqa: F811
    made = entry(9.0)
    other = replace(made, key=replace(made.key, target="sm_80"))
    zoo_of(user_store().root, made, other)
    out, _ = capture("zoo", "export", tmp_path / "out", "--target", "sm_80")
    assert "1 added" in out
    assert [p.parent.name for p in (tmp_path / "out").glob(f"*/*/*/{ENTRY}")] == ["sm_80"]
    assert isinstance(Store(tmp_path / "out").get(other.key), Entry)


def test_push_uploads_what_is_better_and_pull_brings_it(capture, tmp_path, fake_hub, monkeypatch):  # noqa: F811
    zoo_of(user_store().root, entry(9.0), entry(9.0, rows=4))
    out, _ = capture("zoo", "push", "me/zoo")
    assert "https://huggingface.co/me/zoo: 2 added" in out
    out, _ = capture("zoo", "push", "me/zoo")
    assert "nothing to upload" in out and fake_hub.calls.count("upload") == 1
    zoo_of(user_store().root, entry(7.0))
    out, _ = capture("zoo", "push", "me/zoo")
    assert "1 added, 0 replaced, 1 kept" in out and fake_hub.calls.count("upload") == 2
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path / "another"))
    out, _ = capture("zoo", "pull", "me/zoo")
    assert "2 added" in out and us_of(user_store(), entry()) == 7.0
    out, _ = capture("zoo", "list", "hf://me/zoo")
    assert "2 entries" in out


def test_pull_of_a_hostile_repo(capture, tmp_path, fake_hub, monkeypatch):  # noqa: F811
    repo = zoo_of(fake_hub.repo("evil/zoo"), entry(9.0))
    (folder,) = (f.parent for f in repo.root.glob(f"*/*/*/{ENTRY}"))
    (folder / KERNEL).write_text("import os")
    sign(folder)
    out, _ = capture("zoo", "pull", "evil/zoo", code=1)
    assert "0 added" in out and "1 rejected" in out and "is not what is generated here" in out
    hub.fetched.cache_clear()
    monkeypatch.setitem(hub.MOST_BYTES, KERNEL, 4)
    _, err = capture("zoo", "pull", "evil/zoo", code=1)
    assert "which no entry has" in err and fake_hub.calls.count("download") == 1


@pytest.mark.parametrize("command", ["pull", "push"])
def test_a_hub_that_fails_is_one_line(capture, fake_hub, monkeypatch, command):  # noqa: F811
    def no_network(*_, **__):
        raise OSError("no network")

    zoo_of(user_store().root, entry(9.0))
    for call in ("snapshot_download", "model_info", "repo_exists", "create_repo"):
        monkeypatch.setattr(fake_hub, call, no_network)
    monkeypatch.setattr("huggingface_hub.snapshot_download", no_network)
    _, err = capture("zoo", command, "me/zoo", code=1)
    assert err.startswith("error: zoo 'me/zoo'") and "no network" in err and "check" in err


# -- show and verify -------------------------------------------------------------------------------


def test_show_says_all_about_one_entry(capture, tmp_path):  # noqa: F811
    zoo = zoo_of(tmp_path / "zoo", entry(9.0), entry(9.0, rows=4))
    picture = tmp_path / "picture.svg"
    out, _ = capture("zoo", "show", "3x64", zoo.root, "--svg", picture)
    for text in (OURS, LIBRARY, "20.00 µs", "proven here", "Schedule(tiles=", "rms_norm"):
        assert text in out
    assert picture.read_text().startswith("<svg")
    out, _ = capture("zoo", "show", entry(rows=4).key.digest[:12], zoo.root)
    assert "4x64" in out
    _, err = capture("zoo", "show", "rms_norm", zoo.root, code=1)
    assert "names 2 entries" in err
    _, err = capture("zoo", "show", "nothing", zoo.root, code=1)
    assert "no entry is called 'nothing'" in err


def test_verify_proves_entries(capture, tmp_path):  # noqa: F811
    made = entry(9.0)
    text = json.dumps(json.loads(made.ugraph.to_json())).replace('"rsqrt"', '"sqrt"')
    folder = zoo_of(tmp_path / "zoo", made).root / made.folder
    (folder / UGRAPH).write_text(text)
    from mirage_hf.graph import json_format

    ugraph = json_format.ugraph_from_dict(json.loads(text))
    (folder / KERNEL).write_text(triton.generate(ugraph, made.schedules).source)
    sign(folder)
    out, _ = capture("zoo", "verify", tmp_path / "zoo", code=1)
    assert "not proven again" in out and "0 entries are valid" in out
    out, _ = capture("zoo", "show", "3x64", tmp_path / "zoo")
    assert "not accepted here" in out


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no FIFOs")
def test_verify_ends_on_fifos_endless_files_and_links(capture, tmp_path):  # noqa: F811
    zoo = zoo_of(tmp_path / "zoo", entry(9.0))
    (folder,) = (f.parent for f in zoo.root.glob(f"*/*/*/{ENTRY}"))
    for name, spoil, reason in (
        (ENTRY, os.mkfifo, "not a regular file"),
        (KERNEL, os.mkfifo, "not a regular file"),
        (UGRAPH, lambda path: path.symlink_to("/dev/zero"), "leads out of"),
        (KERNEL, lambda path: path.symlink_to("/etc/passwd"), "leads out of"),
        (KERNEL, lambda path: path.write_text(" " * (5 << 20)), "more than"),
    ):
        before = (folder / name).read_bytes()
        (folder / name).unlink()
        spoil(folder / name)
        out, _ = capture("zoo", "verify", zoo.root, code=1)
        assert reason in out, (name, out)
        (folder / name).unlink()
        (folder / name).write_bytes(before)
    out, _ = capture("zoo", "verify", zoo.root)
    assert "1 entries are valid" in out


def test_nothing_of_an_entry_controls_the_terminal(capture, tmp_path):  # noqa: F811
    zoo = zoo_of(tmp_path / "zoo", entry(9.0))
    (folder,) = (f.parent for f in zoo.root.glob(f"*/*/*/{ENTRY}"))
    evil = "\x1b]0;owned\x07[red]\u202ex"
    edit(
        folder,
        machine={"gpu": evil},
        created=evil,
        timings=[dict(name=evil, median_us=1.0, low_us=1.0, high_us=1.0, runs=1)],
    )
    (zoo.root / "rms\x1b[2J" / "x" / "sm_90").mkdir(parents=True)
    for command, code in ((["list"], 0), (["verify"], 1), (["show", "3x64"], 0)):
        out, err = capture("zoo", *command, zoo.root, code=code)
        assert all(c.isprintable() or c == "\n" for c in out + err), repr(out)
    assert "[red]" in capture("zoo", "list", zoo.root)[0]
