"""Contents of a kernel zoo or a checkpoint are checked before they run.

The checks cover an entry's text, its µGraph and its rounding.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mirage_hf as mi
from mirage_hf import errors
from mirage_hf.codegen import cuda_text, triton
from mirage_hf.errors import Rejected
from mirage_hf.graph import json_format
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.pipeline import layer_choice, proof_record, resolver, torch_op, trust
from mirage_hf.pipeline.checkpoint import CheckpointJournal
from mirage_hf.pipeline.results import StoredEntry, ZooResults
from mirage_hf.verify.verdict import Accepted
from mirage_hf.zoo.entry import ENTRY, KERNEL
from mirage_hf.zoo.store import Store, ZooPath, user_store
from tests.helpers import programs
from tests.helpers.streamed_graphs import CASES, schedule_of, streamed

pytestmark = pytest.mark.usefixtures("remembered_verdicts")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(trust, "_proven", {})


def program():
    return programs.rms_norm_linear(mi, rows=1, k=64, n=256)


def request_for(target: str):
    return resolver.kernel_request(program(), target=target, tune="never")


def entry_for(target: str):
    return layer_choice.make_outcome(request_for(target)).entry()


def wrong(ugraph: UGraph) -> UGraph:
    """Return the same kernels with sqrt instead of rsqrt."""
    data = json_format.ugraph_to_dict(ugraph)
    kernels = json.dumps(data["kernels"])
    assert '"rsqrt"' in kernels
    data["kernels"] = json.loads(kernels.replace('"rsqrt"', '"sqrt"'))
    return json_format.ugraph_from_dict(data)


def wrong_entry(target: str):
    """Return an entry with consistent files whose µGraph computes something else."""
    entry = entry_for(target)
    ugraph = wrong(entry.ugraph)
    return replace(
        entry,
        ugraph=ugraph,
        kernel=triton.generate(ugraph, entry.schedules).source,
        error_bound=0.0,
    )


def sign(folder: Path) -> None:
    """Write the digests of the present files into entry.json."""
    data = json.loads((folder / ENTRY).read_text())
    for name in data["sha256"]:
        data["sha256"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    del data["digest"]
    (folder / ENTRY).write_text(json.dumps(data | {"digest": json_format.digest(data)}))


def looked_up(root: Path, target: str, is_trusted: bool = False):
    store = Store(root, is_trusted=is_trusted)
    return ZooResults(ZooPath((store,))).load(request_for(target))


@pytest.mark.parametrize("is_trusted", [False, True])
def test_an_edited_kernel_with_digests_of_its_own_is_rejected(tmp_path, is_trusted):
    folder = Store(tmp_path, writable=True).put(entry_for("sm_90"))
    assert isinstance(looked_up(tmp_path, "sm_90", is_trusted), StoredEntry)
    with (folder / KERNEL).open("a") as f:
        f.write("import os\n")
    sign(folder)
    assert isinstance(Store(tmp_path).get(request_for("sm_90").key), type(entry_for("sm_90")))
    rejected = looked_up(tmp_path, "sm_90", is_trusted)
    assert isinstance(rejected, Rejected) and "is not what is generated here" in rejected.reason


@pytest.mark.parametrize("target", ["sm_90", "cpu"])
def test_a_wrong_ugraph_with_matching_text_and_digests_is_rejected(tmp_path, target):
    Store(tmp_path, writable=True).put(wrong_entry(target))
    rejected = looked_up(tmp_path, target)
    assert isinstance(rejected, Rejected) and "not proven again" in rejected.reason
    assert looked_up(tmp_path, target) == rejected  # the verdict is remembered


def test_a_bound_is_that_of_the_new_proof(tmp_path):
    Store(tmp_path, writable=True).put(replace(entry_for("sm_90"), error_bound=0.0))
    found = looked_up(tmp_path, "sm_90")
    assert isinstance(found, StoredEntry) and 0 < found.entry.error_bound < 1e-6


def test_a_schedule_whose_rounding_does_not_hold_is_rejected(tmp_path, monkeypatch):
    entry = entry_for("sm_90")
    Store(tmp_path, writable=True).put(entry)
    real = trust.examine
    (schedule,) = entry.schedules

    def examine(ugraph, **options):
        no = Rejected("too coarse")
        yes = Accepted(1e-9)
        verdicts = (yes, no) if schedule.mma else (no, yes)
        return replace(real(ugraph, **options), scalar=verdicts[0], tensor_cores=verdicts[1])

    monkeypatch.setattr(trust, "examine", examine)
    rejected = looked_up(tmp_path, "sm_90")
    assert isinstance(rejected, Rejected) and "too coarse" in rejected.reason


def test_only_the_store_whose_entry_is_rejected_is_named(tmp_path, caplog):
    for name in ("wrong", "empty"):
        (tmp_path / name).mkdir()
    Store(tmp_path / "wrong", writable=True).put(wrong_entry("cpu"))
    stores = tuple(Store(tmp_path / name) for name in ("wrong", "empty"))
    assert isinstance(ZooResults(ZooPath(stores)).load(request_for("cpu")), Rejected)
    assert "zoo wrong: an entry was not used" in caplog.text and "zoo empty" not in caplog.text


def test_a_named_zoo_with_a_wrong_ugraph_is_searched_anew(tmp_path, caplog):
    Store(tmp_path / "zoo", writable=True).put(wrong_entry("cpu"))
    kernel = resolver.resolve(program(), device="cpu", zoo=tmp_path / "zoo")
    assert kernel.source == "searched" and "not proven again" in caplog.text
    inputs = [torch.randn(t.dims).to(t.dtype) for t in program().inputs]
    want = mi.superoptimize(program(), backend="cpu", cache=False)[-1](inputs)[0]
    assert torch.allclose(kernel.run(inputs)[0], want, rtol=2e-2, atol=2e-2)


def test_a_checkpoint_with_a_wrong_ugraph_is_rejected(tmp_path):
    path = tmp_path / "checkpoint.json"
    mi.superoptimize(program(), backend="cpu", checkpoint=path)
    data = json.loads(path.read_text())
    record = data["record"]
    for u in record["ugraphs"]:
        u["kernels"] = json.loads(json.dumps(u["kernels"]).replace('"rsqrt"', '"sqrt"'))
    digest = json_format.digest([record, data["steps"]])
    path.write_text(json.dumps(data | {"record": record, "digest": digest}))
    with pytest.raises(errors.FormatError, match=r"µGraph 0 was left out, it was not proven again"):
        mi.superoptimize(program(), backend="cpu", checkpoint=path)


def edit_checkpoint(path: Path, change) -> None:
    """Change a checkpoint and give it the digest of its new content."""
    data = json.loads(path.read_text())
    change(data)
    data["digest"] = json_format.digest([data["record"], data["steps"]])
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    "field, value", [("notes", None), ("counters", {}), ("counters", {"values": "x"}), ("stop", 3)]
)
def test_a_report_of_another_form_is_a_damaged_checkpoint(tmp_path, field, value):
    path = tmp_path / "checkpoint.json"
    mi.superoptimize(program(), backend="cpu", checkpoint=path)

    def change(data):
        if value == {}:
            del data["record"]["report"][field]
        else:
            data["record"]["report"][field] = value

    edit_checkpoint(path, change)
    with pytest.raises(errors.FormatError, match="is damaged or not a checkpoint"):
        mi.superoptimize(program(), backend="cpu", checkpoint=path)


def unfinished(path: Path) -> None:
    """Write a checkpoint of a search with finished steps and no result."""
    saved: list[str] = []
    real = CheckpointJournal.save

    def save(self, key, step):
        real(self, key, step)
        saved.append(path.read_text())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointJournal, "save", save)
        mi.superoptimize(program(), backend="cpu", checkpoint=path)
    path.write_text(saved[0])


def test_a_step_of_a_checkpoint_with_a_wrong_ugraph_is_not_taken(tmp_path):
    path = tmp_path / "checkpoint.json"
    unfinished(path)

    def change(data):
        text = json.dumps(data["steps"])
        assert '"rsqrt"' in text
        data["steps"] = json.loads(text.replace('"rsqrt"', '"sqrt"'))

    edit_checkpoint(path, change)
    result = mi.superoptimize(program(), backend="cpu", checkpoint=path)
    inputs = [torch.randn(t.dims).to(t.dtype) for t in program().inputs]
    want = mi.superoptimize(program(), backend="cpu", cache=False)[-1](inputs)[0]
    assert all(torch.allclose(u(inputs)[0], want, rtol=2e-2, atol=2e-2) for u in result)


@pytest.mark.parametrize(
    "step", [None, 3, {}, {"found": [{}]}, {"stop": "x"}, {"found": "kernels"}]
)
def test_a_step_of_another_form_is_a_damaged_checkpoint(tmp_path, step):
    path = tmp_path / "checkpoint.json"
    unfinished(path)

    def change(data):
        data["steps"] = {
            key: data["steps"][key] | step if isinstance(step, dict) and step else step
            for key in data["steps"]
        }

    edit_checkpoint(path, change)
    if step is None:  # the step counts as missing
        assert mi.superoptimize(program(), backend="cpu", checkpoint=path)[0].is_fused
        return
    with pytest.raises(errors.FormatError, match="checkpoint"):
        mi.superoptimize(program(), backend="cpu", checkpoint=path)


# -- the user's own cache and the record of proofs -------------------------------------------------


@pytest.mark.parametrize("target", ["sm_90", "cpu"])
def test_the_own_cache_is_proven_like_any_other_zoo(target):
    own = user_store()
    assert isinstance(own.put(wrong_entry(target)), Path)
    rejected = ZooResults(ZooPath((own,))).load(request_for(target))
    assert isinstance(rejected, Rejected) and "not proven again" in rejected.reason


@pytest.fixture
def proofs(monkeypatch):
    """Count the proofs of entries."""
    counted: list[UGraph] = []
    real = trust.examine
    monkeypatch.setattr(
        trust,
        "examine",
        lambda ugraph, **options: counted.append(ugraph) or real(ugraph, **options),
    )
    return counted


def in_a_new_process(monkeypatch) -> None:
    monkeypatch.setattr(trust, "_proven", {})


def test_what_this_machine_made_is_not_proven_again(proofs, monkeypatch):
    made = resolver.resolve(program(), device="cpu")
    in_a_new_process(monkeypatch)
    loaded = resolver.resolve(program(), device="cpu")
    assert (made.source, loaded.source) == ("searched", "cache") and not proofs
    assert loaded.error_bound == made.error_bound


def test_what_this_machine_has_proven_is_not_proven_again(tmp_path, proofs, monkeypatch):
    Store(tmp_path / "zoo", writable=True).put(entry_for("sm_90"))
    for _ in range(2):
        assert isinstance(looked_up(tmp_path / "zoo", "sm_90"), StoredEntry)
        in_a_new_process(monkeypatch)
    assert len(proofs) == 1


def test_a_copied_cache_brings_no_proofs_along(tmp_path, proofs, monkeypatch):
    resolver.resolve(program(), device="cpu")
    shutil.copytree(tmp_path / "cache", tmp_path / "copy")
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path / "copy"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another machine"))
    in_a_new_process(monkeypatch)
    assert resolver.resolve(program(), device="cpu").source == "cache" and len(proofs) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda e: replace(e, ugraph=wrong(e.ugraph)),
        lambda e: replace(e, schedules=(replace(e.schedules[0], num_warps=2),)),
        lambda e: replace(e, key=replace(e.key, next_may_launch_early=True)),
    ],
)
def test_a_proof_is_for_one_entry(change):
    entry = entry_for("sm_90")
    assert trust._digest(entry, False) != trust._digest(change(entry), False)


def test_a_proof_is_for_one_version(monkeypatch):
    entry = entry_for("sm_90")
    before = trust._digest(entry, False)
    monkeypatch.setattr(trust.versions, "search_version", lambda: "another")
    assert trust._digest(entry, False) != before


DIGEST = "a" * 64


@pytest.fixture
def record(tmp_path):
    proof_record.add(DIGEST, 1e-20)
    assert proof_record.bound_of(DIGEST) == 1e-20
    return tmp_path / "state" / "mirage_hf" / "proven"


def test_a_damaged_line_of_the_record_does_not_count(record):
    proof_record.add("b" * 64, 1e-9)
    lines = record.read_text().splitlines()
    for text in (
        lines[0][:-1],
        lines[0].replace("1e-20", "1e-30"),
        lines[0][:70] + lines[1],
        "\xff",
    ):
        record.write_text(text + "\n" + lines[1] + "\n", encoding="latin-1")
        assert proof_record.bound_of(DIGEST) is None and proof_record.bound_of("b" * 64) == 1e-9


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this system has no permissions")
def test_a_record_that_others_may_write_does_not_count(record):
    for path in (record, record.parent):
        mode = path.stat().st_mode
        path.chmod(0o777)
        assert proof_record.bound_of(DIGEST) is None
        path.chmod(mode)
    assert proof_record.bound_of(DIGEST) == 1e-20
    elsewhere = record.with_name("elsewhere")
    record.rename(elsewhere)
    record.symlink_to(elsewhere)
    assert proof_record.bound_of(DIGEST) is None


def test_a_record_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    proof_record.add(DIGEST, 1e-20)
    assert proof_record.bound_of(DIGEST) is None


def test_a_long_record_is_started_anew(record, monkeypatch):
    monkeypatch.setattr(proof_record, "_MOST_BYTES", 200)
    for letter in "bcdef":
        proof_record.add(letter * 64, 1e-9)
    assert record.stat().st_size < 400 and proof_record.bound_of("f" * 64) == 1e-9


# -- CUDA kernels ----------------------------------------------------------------------------------


@pytest.fixture
def cuda_request(tmp_path):
    """Store an entry with a CUDA schedule, and return the request that it answers."""
    case = CASES["int8, residual"]
    request = resolver.kernel_request(case.program, target="sm_90", tune="never")
    ugraph, _, products = streamed(case)
    schedules = (schedule_of(case, products),)
    source = triton.generate(ugraph, schedules).source
    entry = layer_choice.make_outcome(request).entry()
    entry = replace(entry, ugraph=ugraph, schedules=schedules, kernel=source)
    Store(tmp_path, writable=True).put(entry)
    return request


@pytest.mark.parametrize("is_trusted", [False, True])
def test_a_cuda_kernel_that_cannot_be_compiled_here_is_not_served(
    tmp_path, monkeypatch, cuda_request, is_trusted
):
    monkeypatch.setattr(cuda_text, "missing_tools", lambda: "no cuda.bindings here")
    store = Store(tmp_path, is_trusted=is_trusted)
    entry = store.get(cuda_request.key)
    assert trust.obstacle(entry, True, False) == "no cuda.bindings here"
    rejected = ZooResults(ZooPath((store,))).load(cuda_request)
    assert isinstance(rejected, Rejected) and rejected.reason.endswith(": no cuda.bindings here")
    # kernels without CUDA, and entries whose text does not run, need no such tools
    assert not trust.obstacle(entry_for("sm_90"), True, False)
    assert not trust.obstacle(entry, False, False)


@pytest.mark.parametrize("is_trusted", [False, True])
def test_a_cuda_kernel_is_compared_by_text_if_no_tool_is_missing(
    tmp_path, monkeypatch, cuda_request, is_trusted
):
    monkeypatch.setattr(cuda_text, "missing_tools", lambda: "")
    store = Store(tmp_path, is_trusted=is_trusted)
    entry = store.get(cuda_request.key)
    assert not trust.obstacle(entry, True, False)
    assert isinstance(ZooResults(ZooPath((store,))).load(cuda_request), StoredEntry)
    Store(tmp_path, writable=True).put(replace(entry, kernel=entry.kernel + "import os\n"))
    rejected = ZooResults(ZooPath((store,))).load(cuda_request)
    assert isinstance(rejected, Rejected) and "is not what is generated here" in rejected.reason


# -- saved graphs ----------------------------------------------------------------------------------


def test_a_saved_graph_runs_no_ugraph_that_is_not_proven(monkeypatch, caplog):
    entry = wrong_entry("cpu")
    user_store().put(entry)
    monkeypatch.setattr(torch_op, "_known", {})
    inputs = [torch.randn(t.dims).to(t.dtype) for t in program().inputs]
    (got,) = torch_op.run(inputs, entry.key.digest)
    want = mi.superoptimize(program(), backend="cpu", cache=False)[-1](inputs)[0]
    assert torch.allclose(got, want, rtol=2e-2, atol=2e-2) and "not proven again" in caplog.text


def test_an_entry_without_block_graphs_runs_its_program(monkeypatch):
    """Whatever library calls it lists, nothing has proven them."""
    entry = entry_for("cpu")
    kernels = KernelGraph()
    inputs = [kernels.input_like(t) for t in program().inputs]
    product = kernels.matmul(inputs[0], inputs[-1])  # without the norm
    kernels.mark_output(product)
    swapped = UGraph(entry.ugraph.program, kernels)
    search = dict(entry.search) | {"version": trust.versions.search_version()}
    user_store().put(replace(entry, ugraph=swapped, schedules=(), search=search))
    monkeypatch.setattr(torch_op, "_known", {})
    given = [torch.randn(t.dims).to(t.dtype) for t in program().inputs]
    want = mi.superoptimize(program(), backend="cpu", cache=False)[-1](given)[0]
    kernel = resolver.resolve(program(), device="cpu")
    assert kernel.source == "cache" and torch.equal(kernel.run(given)[0], want)
    assert torch.equal(torch_op.run(given, entry.key.digest)[0], want)
