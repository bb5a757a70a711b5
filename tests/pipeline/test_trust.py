"""Contents of a kernel zoo or a checkpoint are checked before they run.

The checks cover an entry's text, its µGraph and its rounding.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mirage_hf as mi
from mirage_hf import errors
from mirage_hf.codegen import triton
from mirage_hf.errors import Rejected
from mirage_hf.graph import json_format
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.pipeline import layer_choice, resolver, results
from mirage_hf.pipeline.results import StoredEntry, ZooResults
from mirage_hf.verify.verdict import Accepted
from mirage_hf.zoo.entry import ENTRY, KERNEL
from mirage_hf.zoo.store import Store, ZooPath
from tests.helpers import programs


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(results, "_proven", {})


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
    real = results.examine
    (schedule,) = entry.schedules

    def examine(ugraph, **options):
        no = Rejected("too coarse")
        yes = Accepted(1e-9)
        verdicts = (yes, no) if schedule.mma else (no, yes)
        return replace(real(ugraph, **options), scalar=verdicts[0], tensor_cores=verdicts[1])

    monkeypatch.setattr(results, "examine", examine)
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
