"""The kernel zoo: keys, entries and stores; damage, races and kills."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

import mirage_hf as mi
from mirage_hf import errors
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.errors import Rejected
from mirage_hf.gpus import H200
from mirage_hf.graph import json_format
from mirage_hf.tune import stream_schedules
from mirage_hf.tune.cost import estimate
from mirage_hf.tune.cuda_schedules import cuda_schedules
from mirage_hf.tune.ranking import rank_by_estimate
from mirage_hf.tune.schedule_cost import estimated_us
from mirage_hf.tune.space import REGISTER_BUDGET
from mirage_hf.zoo import hub, store
from mirage_hf.zoo.entry import ENTRY, KERNEL, UGRAPH, Entry, Measurement
from mirage_hf.zoo.entry_reader import read_entry
from mirage_hf.zoo.key import key_of
from mirage_hf.zoo.store import Store, ZooPath, packaged_store
from tests.helpers.fake_hub import FakeHub
from tests.helpers.thorough import count
from tests.helpers.ugraphs import gated_mlp, rms_norm_linear

SCHEDULE = Schedule(tiles={"m": 1, "n": 16, "k": 64})


def entry(rows: int = 3, kernel: str = "# a kernel\nprint('µ')\n", target: str = "sm_90") -> Entry:
    ugraph = rms_norm_linear(rows=rows)
    return Entry(
        key_of(ugraph.program, target),
        "rms_norm_linear",
        ugraph,
        kernel,
        (SCHEDULE,),
        (
            Measurement("searched", 9.5, 9.1, 10.2, 100),
            Measurement("library", 20.25, 19.0, 22.5, 100),
        ),
        2.0**-60,
        {"candidates": 812, "seconds": 0.31, "stop": "exhausted"},
    )


@pytest.fixture
def zoo(tmp_path: Path) -> Store:
    return Store(tmp_path / "zoo", writable=True)


# -- keys -----------------------------------------------------------------------------------------


def program(
    k: int = 64,
    strides: tuple[int, int] | None = None,
    eps: float = 1e-6,
    dtype=None,
    names=("a", "b"),
    late: bool = False,
):
    g = mi.new_kernel_graph()
    dtype = dtype or mi.float16
    x = g.new_input((2, k), dtype, name=names[0])
    w = None if late else g.new_input((k, 32), dtype, strides, names[1])
    n = g.rms_norm(x, eps=eps)
    if w is None:
        w = g.new_input((k, 32), dtype, strides, names[1])
    g.mark_output(g.matmul(n, w))
    return g


@pytest.mark.parametrize("other", [dict(names=("x", "w")), dict(late=True), dict(strides=(32, 1))])
def test_programs_that_are_the_same_have_one_key(other):
    assert key_of(program(**other), "sm_90") == key_of(program(), "sm_90")


@pytest.mark.parametrize(
    "other", [dict(k=65), dict(strides=(1, 64)), dict(eps=1e-5), dict(dtype=mi.bfloat16)]
)
def test_programs_that_differ_have_other_keys(other):
    assert key_of(program(**other), "sm_90").digest != key_of(program(), "sm_90").digest


def test_target_versions_and_promise_are_part_of_the_key():
    key = key_of(program(), "sm_90")
    others = [
        key_of(program(), "sm_80"),
        key_of(program(), "sm_90", next_may_launch_early=True),
        replace(key, schedule_version=key.schedule_version + 1),
        replace(key, kernel_format=99),
    ]
    assert len({key.digest, *(o.digest for o in others)}) == 5


# -- entries and stores ---------------------------------------------------------------------------


def test_a_stored_entry_is_read_back(zoo):
    e = entry()
    folder = zoo.put(e)
    assert folder == zoo.root / e.folder and {p.name for p in folder.iterdir()} == {
        KERNEL,
        UGRAPH,
        ENTRY,
    }
    assert zoo.get(e.key) == e
    assert list(zoo.entries()) == [e]
    assert e.fastest == "searched"
    assert (folder / KERNEL).read_text(encoding="utf-8") == e.kernel


def test_a_second_entry_replaces_the_first_whatever_its_pattern(zoo):
    zoo.put(entry())
    newer = replace(entry(kernel="# newer\n"), pattern="program")
    zoo.put(newer)
    assert list(zoo.entries()) == [newer]


def test_a_miss_says_where_it_looked(zoo):
    zoo.put(entry(rows=3))
    found = zoo.get(entry(rows=4).key)
    assert isinstance(found, Rejected) and str(zoo.root) in found.reason
    assert isinstance(zoo.get(entry(target="sm_80").key), Rejected)


@pytest.mark.parametrize(
    "change",
    [
        dict(pattern="../up"),
        dict(pattern=""),
        dict(search={"x": {1}}),
        dict(error_bound=float("nan")),
    ],
)
def test_an_entry_that_cannot_be_stored_is_refused(change):
    with pytest.raises(errors.ZooError):
        replace(entry(), **change)


def test_chain_asks_in_order_and_writes_to_the_first_that_it_can(tmp_path):
    packaged, user = Store(tmp_path / "packaged"), Store(tmp_path / "user", writable=True)
    both = ZooPath((packaged, user))
    e = entry()
    found = both.get(e.key)
    assert isinstance(found, Rejected) and "packaged" in found.reason and "user" in found.reason
    assert both.put(e) == user.root / e.folder
    assert both.get(e.key) == e
    assert all(
        isinstance(z.put(e), Rejected) for z in (packaged, ZooPath((packaged,)), ZooPath(()))
    )


def test_every_entry_of_the_packaged_zoo_is_usable():
    found = dict(packaged_store().verify())
    assert found and not {
        folder.name: e.reason for folder, e in found.items() if isinstance(e, Rejected)
    }
    assert all(e.timings and e.key.target.startswith("sm_") for e in found.values())


def test_kernels_of_the_packaged_zoo_are_what_is_generated_now(monkeypatch):
    """If they are not, raise schedule.VERSION and build the zoo again."""
    monkeypatch.setattr(
        "mirage_hf.codegen.plan.pipelining.WGMMA_TAKES_8_COLUMNS", False
    )  # as with the Triton that they were tuned with
    assert not [
        str(e.folder) for e in packaged_store().entries() if e.generate().source != e.kernel
    ]


def test_packaged_kernels_are_in_the_space_and_estimates_of_attention_are_near_their_times(
    monkeypatch,
):
    monkeypatch.setattr(
        "mirage_hf.codegen.plan.pipelining.WGMMA_TAKES_8_COLUMNS", False
    )  # as with the Triton that they were tuned with
    for e in packaged_store().entries():
        if any(s.cuda for s in e.schedules):
            continue
        estimates = [
            estimate(plan_kernel(op, s))
            for op, s in zip(
                place_kernels(e.ugraph, e.key.next_may_launch_early), e.schedules, strict=True
            )
        ]
        assert all(
            x.registers <= REGISTER_BUDGET and x.shared <= H200.shared_bytes for x in estimates
        ), e.folder
        if e.pattern == "attention":  # the caches that it appends to are read once, and not written
            us = next(t.median_us for t in e.timings if t.name == "searched kernel")
            best = next(c for c in rank_by_estimate([e.ugraph], H200) if not c.is_library)
            assert us / 2 < best.estimate_us < 2 * us and sum(x.us for x in estimates) < 2 * us, (
                e.folder,
                us,
                best.estimate_us,
            )


def test_packaged_kernels_that_stream_codes_are_listed_for_their_ops(monkeypatch):
    monkeypatch.setattr(stream_schedules, "can_stream", lambda: True)
    entries = [e for e in packaged_store().entries() if any(s.cuda for s in e.schedules)]
    assert len(entries) >= 11
    for e in entries:
        ops = place_kernels(e.ugraph, e.key.next_may_launch_early)
        for op, schedule in zip(ops, e.schedules, strict=True):
            assert not schedule.cuda or schedule.tiles in [s.tiles for s in cuda_schedules(op)]
        us = next(t.median_us for t in e.timings if t.name == "searched kernel")
        assert us / 1.3 < sum(map(estimated_us, ops, e.schedules)) < 1.3 * us, e.folder


@pytest.fixture
def fake_hub(tmp_path, monkeypatch):
    found = FakeHub(tmp_path / "hub")
    found.install(monkeypatch)
    hub.fetched.cache_clear()
    yield found
    hub.fetched.cache_clear()


def test_a_named_zoo_is_a_folder(tmp_path):
    assert store.named_store(tmp_path).root == tmp_path
    assert store.named_store(str(tmp_path)).root == tmp_path
    assert not store.named_store(tmp_path).is_trusted


@pytest.mark.parametrize(
    "name, reason",
    [
        ("", "is an empty name"),
        ("  ", "is an empty name"),
        ("missing", "neither a folder nor a Hub repo"),
        ("/a/missing/folder", "neither a folder nor a Hub repo"),
        ("a/b/c", "neither a folder nor a Hub repo"),
        ("./a/b", "neither a folder nor a Hub repo"),
        ("zoos/missing", "the folder zoos has no missing.*hf://zoos/missing"),
        (Path("someone/zoo"), "neither a folder nor a Hub repo"),
        ("~nouser/x", "no folder that can be read"),
        ("x" * 5000, "no folder that can be read"),
        ("x\0y/z", "neither a folder nor a Hub repo|no folder that can be read"),
        ("someone/zoo@../../x y", "neither a folder nor a Hub repo"),
        ("\x1b[2J/x", "neither a folder nor a Hub repo"),
    ],
)
def test_a_name_that_is_no_zoo_is_an_error_and_the_hub_is_not_asked(
    tmp_path, monkeypatch, fake_hub, name, reason
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zoos").mkdir()
    with pytest.raises(errors.ZooError, match=reason):
        store.named_store(name)
    assert not fake_hub.calls


def test_a_zoo_of_the_hub_is_fetched_once(tmp_path, monkeypatch, fake_hub, zoo):
    made = entry()
    shutil.copytree(zoo.put(made).parents[2], fake_hub.repo("someone/zoo"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone").mkdir()  # hf:// says that it is no folder
    found = [store.named_store("hf://someone/zoo@v1") for _ in range(3)]
    assert fake_hub.calls == ["download"] and not found[0].is_trusted
    assert found[0].get(made.key) == made  # its files are links to the Hub's cache
    (tmp_path / "someone").rmdir()
    with pytest.raises(errors.ZooError, match=r"could not be fetched.*404.*local copy"):
        store.named_store("someone/missing")


# -- damage ---------------------------------------------------------------------------------------


def edit(folder: Path, **changes) -> None:
    data = json.loads((folder / ENTRY).read_text())
    (folder / ENTRY).write_text(json.dumps(data | changes))


@pytest.mark.parametrize(
    "spoil, reason",
    [
        (lambda f: (f / KERNEL).write_text("import os\n"), "kernel.py: is not the file"),
        (lambda f: (f / UGRAPH).write_text("{}"), "ugraph.json: is not the file"),
        (lambda f: (f / ENTRY).write_text("{"), "damaged"),
        (lambda f: (f / ENTRY).write_text("[]"), "damaged"),
        (lambda f: (f / ENTRY).write_bytes(b"\xff\xfe"), "not UTF-8"),
        (lambda f: (f / KERNEL).unlink(), "cannot be read"),
        (lambda f: edit(f, error_bound=0.0), "own digest"),
        (lambda f: edit(f, version=99), "version 99"),
        (lambda f: edit(f, format="other"), "is other version"),
    ],
)
def test_damage_is_refused_with_a_reason_and_can_be_rebuilt(zoo, spoil, reason):
    e = entry()
    spoil(zoo.put(e))
    found = zoo.get(e.key)
    assert isinstance(found, Rejected) and reason in found.reason
    assert list(zoo.entries()) == [] and len(list(zoo.verify())) == 1
    zoo.put(e)
    assert zoo.get(e.key) == e


def test_nothing_is_written_through_a_link_that_leads_out_of_the_zoo(zoo, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    zoo.root.mkdir()
    (zoo.root / entry().pattern).symlink_to(tmp_path / "elsewhere")
    said = zoo.put(entry())
    assert isinstance(said, Rejected) and "leads out of it" in said.reason
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("level", [0, 1, 2])
def test_nothing_is_read_through_a_folder_that_leads_out_of_the_zoo(zoo, tmp_path, level):
    folder = zoo.put(entry())
    moved = folder if level == 0 else folder.parents[level - 1]
    moved.rename(tmp_path / "elsewhere")
    moved.symlink_to(tmp_path / "elsewhere")
    found = zoo.get(entry().key)
    assert isinstance(found, Rejected) and "leads out of" in found.reason


def test_a_part_of_an_entry_needs_no_kernel_text(zoo):
    e = entry()
    folder = zoo.put(e)
    (folder / KERNEL).write_text("# another\n")
    assert isinstance(read_entry(folder), Rejected)
    part = read_entry(folder, whole=False)
    assert part == replace(e, kernel="", record=None)
    (folder / UGRAPH).write_text("{}")
    assert isinstance(read_entry(folder, whole=False), Rejected)


def test_a_consistent_entry_under_the_wrong_key_is_refused(zoo):
    """Somebody may move a valid entry to the folder of another program."""
    three, four = entry(rows=3), entry(rows=4)
    shutil.copytree(zoo.put(three), zoo.root / four.folder)
    found = zoo.get(four.key)
    assert isinstance(found, Rejected) and "another program" in found.reason


def test_an_entry_that_lies_about_its_program_is_refused(zoo):
    e = entry()
    lying = replace(e, ugraph=gated_mlp())
    found = read_entry(zoo.put(lying))
    assert isinstance(found, Rejected) and "key is not that of its program" in found.reason


def test_fuzzed_files_never_raise_and_never_pass(zoo):
    e = entry()
    folder = zoo.put(e)
    rng = random.Random(0)
    for name in (ENTRY, UGRAPH, KERNEL):
        original = (folder / name).read_bytes()
        for _ in range(150):
            raw = bytearray(original)
            kind = rng.randrange(3)
            at = rng.randrange(len(raw))
            if kind == 0:
                raw[at] = rng.randrange(256)
            elif kind == 1:
                del raw[at : at + rng.randrange(1, 50)]
            else:
                raw[at:at] = bytes(
                    rng.choice(b'{}[]",:0123456789ntf') for _ in range(rng.randrange(1, 9))
                )
            (folder / name).write_bytes(raw)
            found = zoo.get(e.key)
            assert found == e or isinstance(
                found, Rejected
            )  # white space between JSON values does not matter
            if name != ENTRY and bytes(raw) != original:
                assert isinstance(found, Rejected)
        (folder / name).write_bytes(original)
    assert zoo.get(e.key) == e


# -- processes ------------------------------------------------------------------------------------

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["mirage_hf.zoo.store"])  # imported once for all processes


def _write_many(root: str, worker: int) -> int:
    zoo = Store(Path(root), writable=True)
    done = 0
    for i in range(12):
        done += isinstance(
            zoo.put(entry(rows=1 + i % 3, kernel=f"# by {worker}, {i}\n" * 200)), Path
        )
        found = zoo.get(entry(rows=1 + i % 3).key)
        done += isinstance(found, (Entry, Rejected))
    return done


def test_concurrent_writers_leave_whole_entries(zoo):
    workers = count(8, 3)
    with FORKED.Pool(workers) as pool:
        done = pool.starmap(_write_many, [(str(zoo.root), w) for w in range(workers)])
    assert done == [24] * workers
    found = list(zoo.verify())
    assert len(found) == 3 and all(isinstance(e, Entry) for _, e in found)
    assert [p.name for p in zoo.root.iterdir() if p.name.startswith(".partial")] == []


def _write_and_wait(root: str, stop_at: int, waiting) -> None:
    """Write an entry, and stop before the change of a file number `stop_at`."""

    def stopping(real):
        def change(*args, **options):
            nonlocal stop_at
            if stop_at == 0:
                waiting.set()
                time.sleep(600)
            stop_at -= 1
            return real(*args, **options)

        return change

    store.os.replace = stopping(os.replace)
    store.os.mkdir = stopping(os.mkdir)
    store.shutil.rmtree = stopping(shutil.rmtree)
    store.Path.write_text = stopping(Path.write_text)
    Store(Path(root), writable=True).put(entry(kernel="# newer\n"))
    waiting.set()


def test_a_writer_killed_in_the_middle_leaves_the_old_entry_the_new_one_or_none(zoo):
    e, newer = entry(), entry(kernel="# newer\n")
    seen = []
    for stop_at in range(20):  # before each change of a file
        zoo.put(e)
        waiting = FORKED.Event()
        writer = FORKED.Process(target=_write_and_wait, args=(str(zoo.root), stop_at, waiting))
        writer.start()
        assert waiting.wait(60)
        writer.join(0.2)
        ended = not writer.is_alive()
        writer.kill()
        writer.join()
        found = zoo.get(e.key)
        is_missing = isinstance(found, store.NotStored)
        assert is_missing or found.kernel in (e.kernel, newer.kernel)
        seen.append("none" if is_missing else found.kernel)
        started = time.monotonic()
        assert isinstance(zoo.put(e), Path) and time.monotonic() - started < store.LOCK_SECONDS / 2
        assert zoo.get(e.key) == e
        assert [p.name for p in zoo.root.iterdir() if p.name.startswith(".partial")] == []
        if ended:
            break
    assert ended and len(seen) >= 8
    assert list(dict.fromkeys(seen)) == [e.kernel, "none", newer.kernel]


def test_a_root_that_cannot_be_written_is_a_reason_not_a_crash(tmp_path):
    (tmp_path / "file").write_text("")
    e = entry()
    blocked = Store(tmp_path / "file" / "zoo", writable=True)
    said = blocked.put(e)
    assert isinstance(said, Rejected) and "MIRAGE_HF_CACHE" in said.reason
    assert isinstance(blocked.get(e.key), Rejected)


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere"
)
def test_a_read_only_root(zoo):
    e = entry()
    zoo.put(e)
    zoo.root.chmod(0o500)
    try:
        assert zoo.get(e.key) == e
        assert "MIRAGE_HF_CACHE" in str(zoo.put(entry(rows=4)))
    finally:
        zoo.root.chmod(0o700)


def test_a_locked_zoo_gives_up_with_a_reason(zoo, monkeypatch):
    from filelock import FileLock

    zoo.root.mkdir()
    monkeypatch.setattr(store, "LOCK_SECONDS", 0.1)
    with FileLock(zoo.root / ".lock"):
        said = zoo.put(entry())
    assert isinstance(said, Rejected) and "locked by another process" in said.reason


def test_a_file_system_without_locks_is_a_reason_not_a_crash(zoo, monkeypatch):
    def no_lock(*_, **__):
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(store, "FileLock", no_lock)
    said = zoo.put(entry())
    assert (
        isinstance(said, Rejected)
        and "cannot be written (FileSystem does not appear to support flock)" in said.reason
    )


def test_a_root_that_cannot_be_read_is_a_reason_not_a_crash(tmp_path):
    """Every look-up raises OSError for a name that is too long.

    For users other than root, a folder without permission does the same.
    """
    blocked = Store(tmp_path / ("x" * 300), writable=True)
    found = blocked.get(entry().key)
    assert isinstance(found, Rejected) and "cannot be read" in found.reason
    ((_, said),) = blocked.verify()
    assert isinstance(said, Rejected) and isinstance(blocked.put(entry()), Rejected)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("search", None),
        ("search", {"candidates": "many"}),
        ("created", None),
        ("schedules", []),
        ("timings", [{"name": "library", "median_us": "9", "low_us": 1, "high_us": 2, "runs": 3}]),
    ],
)
def test_an_edited_entry_with_a_digest_of_its_own_is_rejected(zoo, field, value):
    folder = zoo.put(entry())
    data = {
        k: v for k, v in json.loads((folder / "entry.json").read_text()).items() if k != "digest"
    } | {field: value}
    (folder / "entry.json").write_text(
        json_format.save_json(data | {"digest": json_format.digest(data)})
    )
    found = zoo.get(entry().key)
    assert isinstance(found, Rejected) and (
        "was edited" in found.reason or "the timing 'library' has" in found.reason
    )
