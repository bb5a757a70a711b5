"""superoptimize(): the example of the README, options, checked inputs, checkpoints, the cache."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import shutil
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock

import mirage_hf as mi
from mirage_hf import errors
from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.errors import Rejected
from mirage_hf.graph import json_format
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.pipeline import (
    find_outcome,
    html_report,
    run_ugraph,
    superoptimizer,
    superoptimizer_options,
    trust,
    versions,
)
from mirage_hf.pipeline.memory import ResultMemory
from mirage_hf.pipeline.search_and_verify import search_and_verify
from mirage_hf.pipeline.superoptimizer_options import search_options
from mirage_hf.search import counter_labels
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.search.search_report import Counters, RejectedCandidate
from mirage_hf.tune import space
from mirage_hf.verify.accept import examine
from mirage_hf.zoo import store
from mirage_hf.zoo.entry import ENTRY, SEARCH
from mirage_hf.zoo.store import user_store
from tests.helpers import programs

pytestmark = pytest.mark.usefixtures("remembered_verdicts")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Give each test an empty cache, so that it sees no other searches."""
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path / "user_cache"))
    superoptimizer._memory.clear()


def small(rows=4, k=64, n=48, dtype=None):
    return programs.rms_norm_linear(mi, rows=rows, k=k, n=n, dtype=dtype)


def tensors(graph, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(t.dims, generator=generator).to(t.dtype) for t in graph.inputs]


def test_the_example_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    g = mi.new_kernel_graph()
    X = g.new_input(dims=(16, 4096), dtype=mi.float16)
    G = g.new_input(dims=(1, 4096), dtype=mi.float16)
    W = g.new_input(dims=(4096, 4096), dtype=mi.float16)
    O = g.matmul(g.rms_norm(X, G), W)  # noqa: E741
    g.mark_output(O)
    found = g.superoptimize()
    torch.manual_seed(0)
    x, gamma, w = (
        torch.randn(16, 4096).half(),
        torch.randn(1, 4096).half(),
        (torch.randn(4096, 4096) / 64).half(),
    )
    (y,) = found([x, gamma, w])
    want = torch.nn.functional.rms_norm(x.float(), (4096,), gamma[0].float(), 1e-6) @ w.float()
    assert y.dtype == torch.float16 and (y.float() - want).abs().max() < 0.02
    source = found[0].generate_triton_program("kernel.py").read_text()
    assert "@triton.jit" in source and compile(source, "kernel.py", "exec")
    assert "__global__" in found[0].generate_cuda_program("kernel.cu").read_text()
    assert "<svg" in found[0].visualize("ugraph.svg").read_text()
    assert found[0].num_kernels == 1
    assert "exhausted" in str(found.report) and "at most" in str(found.report)
    g.to_json("program.json")
    found[0].to_json("ugraph.json")
    assert mi.load_graph("program.json") == g and mi.load_ugraph("ugraph.json") == found[0]
    assert len(found) >= 2 and all(isinstance(u, UGraph) for u in found)
    assert found[-1].num_kernels == 2 and not found[-1].is_fused
    assert list(found) == [found[n] for n in range(len(found))]


def test_outputs_need_no_mark_and_both_spellings_work():
    g = mi.new_graph()
    x, w = g.new_input((4, 32)), g.new_input((32, 16))
    g.silu(g.matmul(x, w))
    assert mi.superoptimize(g)[0].num_kernels == g.superoptimize()[0].num_kernels == 1


def test_numbers_of_a_result_are_the_programs():
    g = small(dtype=mi.float32)
    inputs = tensors(g)
    result = mi.superoptimize(g, backend="cpu")
    (want,) = result[-1](inputs)
    for u in result:
        torch.testing.assert_close(u(inputs)[0], want, rtol=1e-4, atol=1e-4)


# -- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [None, "attention", "lora", "mlp"])
def test_presets(config):
    g = programs.build(mi, "lora_paper")
    assert g.superoptimize(config=config)[0].num_kernels == 1
    assert mi.superoptimize(g, config)[0].num_kernels == 1


def test_without_a_gpu_no_code_is_generated_whose_rounding_was_refused(tmp_path, monkeypatch):
    """x·γ overflows float16 in the one-pass form.

    The cost model alone would run that form on tensor cores.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    g = programs.rms_norm_linear(mi, rows=16, k=512, n=512)
    for attempt in range(2):  # searched, then loaded
        found = mi.superoptimize(g, time_limit=5, checkpoint=tmp_path / "c.json")
        verdicts = {
            str(c.ugraph): c for c in search_and_verify(g, SearchOptions(time_limit=5)).candidates
        }
        assert any(not c.allows(True) for c in verdicts.values())
        for u in found:
            assert not u.is_fused or all(verdicts[str(u)].allows(s.mma) for s in u.schedules), (
                attempt
            )
        assert found.report.stop == ("loaded" if attempt else "exhausted")


def test_presets_restrict():
    seen = {c: search_options(config=c)[0] for c in superoptimizer_options.PRESETS}
    assert (
        seen["lora"].max_block_ops < seen["attention"].max_block_ops
        and seen["mlp"].max_width < seen["lora"].max_width
    )
    merged, _ = search_options(config="lora", max_block_ops=20, time_limit=3.0)
    assert (merged.max_block_ops, merged.time_limit) == (20, 3.0)


def test_griddims_blockdims_and_franges_change_the_schedule(tmp_path):
    g = small(rows=1, k=1024, n=256)

    def launch(**options):
        u = mi.superoptimize(g, backend="cpu", **options)[0]
        (schedule,) = u.schedules
        return (
            dict(schedule.tiles),
            schedule.num_warps,
            u.generate_triton_program(tmp_path / "k.py").read_text(),
        )

    tiles, _, source = launch(griddims=[(64, 1, 1)])
    assert 256 // tiles["n"] == 64 and "launch(mirage_0, 64, " in source
    _, warps, source = launch(blockdims=[(256, 1, 1)])
    assert warps == 8 and "num_warps=8" in source.replace(" ", "")
    tiles, _, _ = launch(franges=[16])
    assert 1024 // tiles["k"] == 16
    tiles, warps, _ = launch(griddims=[(32, 1, 1)], blockdims=[(128, 1, 1)], franges=[4, 8])
    assert 256 // tiles["n"] == 32 and warps == 4 and 1024 // tiles["k"] in (4, 8)


def test_the_papers_grid_dims_are_accepted():
    g = programs.attention(mi, heads=2, q=16, keys=64, d=16)
    assert mi.superoptimize(g, griddims=[(2, 16, 1), (2, 16, 4)])


@pytest.mark.parametrize(
    "options, says",
    [
        (dict(griddims=[(7, 1, 1)]), "allow other numbers"),
        (dict(griddims=[(0, 1, 1)]), "positive"),
        (dict(griddims=[(1, 2, 3, 4)]), "one to 3"),
        (dict(blockdims=[(100, 1, 1)]), "power of two"),
        (dict(franges=[-1]), "positive"),
        (dict(franges=[3]), "allow other numbers"),
        (dict(config="atention"), "did you mean attention"),
        (dict(backend="opencl"), "backends are"),
        (dict(time_limit=0), "time_limit must be positive"),
        (dict(max_block_ops=-1), "max_block_ops"),
        (dict(max_kernels=0), "max_kernels"),
        (dict(time_limit="long"), "time_limit"),
        (dict(max_kernels=True), "max_kernels"),
    ],
    ids=str,
)
def test_impossible_options_say_the_way_out(options, says):
    with pytest.raises(errors.SearchError, match=says):
        mi.superoptimize(small(rows=1, k=256, n=64), **options)


def test_unknown_options_and_things_that_are_not_programs():
    with pytest.raises(TypeError):
        mi.superoptimize(small(), griddim=[(1, 1, 1)])
    with pytest.raises(errors.SearchError, match=r"new_kernel_graph\(\), got Linear"):
        mi.superoptimize(torch.nn.Linear(2, 2))
    g = mi.new_kernel_graph()
    g.new_input((2, 2))
    with pytest.raises(errors.GraphError, match="has no ops"):
        mi.superoptimize(g)


def test_max_kernels_leaves_out_what_launches_more():
    assert all(u.num_kernels == 1 for u in mi.superoptimize(small(), backend="cpu", max_kernels=1))
    assert mi.superoptimize(small(), backend="cpu", max_kernels=2)[-1].num_kernels == 2
    g = mi.new_kernel_graph()
    x = g.new_input((4, 8))
    g.exp(g.rope(x, g.new_input((4, 4)), g.exp(g.new_input((4, 4)))))
    with pytest.raises(
        errors.SearchError,
        match=r"at most 1 kernels was found \(rope whose sine is computed.*max_kernels",
    ):
        mi.superoptimize(g, max_kernels=1)
    assert mi.superoptimize(g, max_kernels=2)[0].num_kernels == 2


def test_max_block_ops_and_time_limit():
    g = small()
    assert all(
        len(list(op.block.ops())) <= 3
        for u in mi.superoptimize(g, max_block_ops=3)
        for op in u.block_ops
    )
    assert mi.superoptimize(g, time_limit=5).report.counters.seconds < 5


def test_progress_and_verbose(capsys):
    stages = []
    mi.superoptimize(small(), progress=lambda stage, detail: stages.append(stage) and None)
    assert "verify" in stages
    mi.superoptimize(small(), verbose=True)
    assert "exhausted" in capsys.readouterr().err
    mi.superoptimize(small(), verbose=True, cache=False)
    assert "verify" in capsys.readouterr().err


def test_a_seed_gives_the_same_result():
    g = programs.build(mi, "norm_gated_mlp")
    first, again, other = (mi.superoptimize(g, seed=s) for s in (1, 1, 2))
    assert [str(u) for u in first] == [str(u) for u in again] == [str(u) for u in other]


@pytest.mark.parametrize("clustered", [False, True])
@pytest.mark.parametrize("refusing", ["", "cuda", "cuda and triton"])
def test_code_that_one_generator_refuses_is_written_by_the_other(
    refusing, clustered, tmp_path, recwarn
):
    """A search is not lost because a file cannot be written."""

    def write(generator):
        def to(path):
            if generator in refusing.split():
                raise errors.CodegenError("matmul is a library call")
            path.write_text(generator)

        return to

    ugraph = SimpleNamespace(
        is_clustered=clustered,
        schedules=None if clustered else (Schedule({"n": 1}, cuda=True),),
        generate_cuda_program=write("cuda"),
        generate_triton_program=write("triton"),
    )
    superoptimizer._save_code(ugraph, tmp_path / "ugraph_0")
    written = {p.suffix for p in tmp_path.iterdir()}
    assert written == {"": {".cu"}, "cuda": {".py"}, "cuda and triton": set()}[refusing]
    told = [str(w.message) for w in recwarn]
    assert bool(told) == (refusing == "cuda and triton")
    assert all("no code for ugraph_0: matmul is a library call" in text for text in told)


def test_save_codes(tmp_path):
    result = mi.superoptimize(small(), save_codes=tmp_path / "codes")
    files = sorted((tmp_path / "codes").iterdir())
    assert len(files) == len(result) and all(compile(f.read_text(), f.name, "exec") for f in files)


# -- wrong inputs ---------------------------------------------------------------------------------


def test_wrong_inputs_are_refused_with_the_way_out():
    g = small()
    result = mi.superoptimize(g, backend="cpu")
    x, gamma, w = tensors(g)
    for bad, says in (
        ([x, gamma], "list of 3 tensors"),
        (x, "got one tensor"),
        ([x[:2], gamma, w], r"input 0 .*\(4, 64\), got \(2, 64\)"),
        ([x, gamma, w.float()], "input 2 .*float16, got float32"),
        ([x, gamma, w.T.contiguous().T], r"strides \(48, 1\), got .*contiguous"),
        ([x, gamma, w.to("meta")], "input 2 .*is on meta"),
        ([x, gamma, 3], "expected a torch tensor, got int"),
        ([t.to("meta") for t in (x, gamma, w)], "CUDA devices and on the CPU"),
    ):
        for run in (result, *result):
            with pytest.raises(errors.InputError, match=says):
                run(bad)
    assert result([x, gamma, w])[0].shape == (4, 48)


# -- checkpoints ----------------------------------------------------------------------------------


@pytest.fixture
def no_search(monkeypatch):
    def start():
        def refuse(*args, **kwargs):
            raise AssertionError("searched although the result was known")

        monkeypatch.setattr(find_outcome, "search_and_verify", refuse)

    yield start
    monkeypatch.setattr(find_outcome, "search_and_verify", search_and_verify)


def test_a_checkpoint_is_loaded_without_searching(tmp_path, no_search):
    path, g = tmp_path / "c.json", small()
    first = mi.superoptimize(g, checkpoint=path)
    assert [p.name for p in tmp_path.iterdir()] == [
        "c.json"
    ]  # the cache on disk is not used either
    no_search()
    again = mi.superoptimize(small(), checkpoint=str(path))
    assert (
        list(again) == list(first)
        and again.report.stop == "loaded"
        and again.report.error_bound == first.report.error_bound
    )
    inputs = tensors(g)
    assert torch.equal(again(inputs)[0], first(inputs)[0])


def test_a_checkpoint_that_cannot_be_kept_is_refused_before_the_search(
    tmp_path, no_search, monkeypatch
):
    no_search()
    with pytest.raises(
        errors.SearchError, match=r"cannot be kept, there is no folder .*none; make it first"
    ):
        mi.superoptimize(small(), checkpoint=tmp_path / "none" / "c.json")
    with pytest.raises(errors.SearchError, match=r"checkpoint .* is a folder; name a file"):
        mi.superoptimize(small(), checkpoint=tmp_path)
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path) != tmp_path
    )  # the tests may run as root
    with pytest.raises(
        errors.SearchError, match=r"checkpoint .* cannot be kept, .* cannot be written to"
    ):
        mi.superoptimize(small(), checkpoint=tmp_path / "c.json")


def test_a_program_given_as_a_checkpoint_is_said_and_kept(tmp_path):
    written = small().to_json(tmp_path / "g.json")
    with pytest.raises(
        errors.FormatError, match=r"is 'mirage_hf.graph' version .*; name another file"
    ):
        mi.superoptimize(small(), checkpoint=tmp_path / "g.json")
    assert (tmp_path / "g.json").read_text(encoding="utf-8") == written


def test_a_foreign_or_damaged_checkpoint_is_refused(tmp_path):
    path, g = tmp_path / "c.json", small()
    mi.superoptimize(g, checkpoint=path)
    good = path.read_text()

    def refused(says, graph=g, **options):
        with pytest.raises(errors.FormatError, match=says):
            mi.superoptimize(graph, checkpoint=path, **options)

    refused("another program", small(rows=5))
    refused("another program, other options", seed=7)
    refused("other options", max_block_ops=9)
    path.write_text(good[: len(good) // 2])
    refused("damaged")
    path.write_text("[]")
    refused("damaged")
    path.write_bytes(b"\xff\xfe\x00")
    refused("damaged")
    for key in ("identity", "record", "steps", "digest"):
        data = json.loads(good)
        del data[key]
        path.write_text(json.dumps(data))
        refused("damaged")
    data = json.loads(good)
    data["record"]["report"]["counters"]["unheard_of"] = 1
    path.write_text(json.dumps(data))
    refused("damaged")
    changed = good.replace('"rsqrt"', '"sqrt"')
    assert changed != good
    path.write_text(changed)
    refused("damaged")
    path.write_text(json.dumps(json.loads(good) | {"version": 99}))
    refused("version 99")
    path.write_text(good)
    assert mi.superoptimize(g, checkpoint=path).report.stop == "loaded"


def test_a_search_that_was_killed_goes_on_from_its_checkpoint(tmp_path):
    def interrupt(stage, detail):
        raise KeyboardInterrupt

    path = tmp_path / "c.json"
    with pytest.raises(KeyboardInterrupt):  # while candidates are verified
        mi.superoptimize(small(), checkpoint=path, progress=interrupt)
    assert json.loads(path.read_text())["record"] is None and json.loads(path.read_text())["steps"]
    resumed = mi.superoptimize(small(), checkpoint=path)
    assert resumed.report.stop == "exhausted" and any(
        "went on from 2 finished steps" in note for note in resumed.report.notes
    )
    assert list(resumed) == list(mi.superoptimize(small(), cache=False))
    assert mi.superoptimize(small(), checkpoint=path).report.stop == "loaded"


# -- the cache ------------------------------------------------------------------------------------


DEFAULTS = dict(time_limit=20, seed=0)


def wide():
    return small(rows=1, k=64, n=256)


def anew():
    """Forget everything in memory, as in another process."""
    superoptimizer._memory.clear()


def kept():
    return sorted(user_store().root.glob("*/*/any"))


@pytest.fixture(scope="module")
def searched_before(tmp_path_factory):
    """Return a cache that keeps the results of `small()` and of `wide()`, as an earlier process."""
    folder = tmp_path_factory.mktemp("searched")
    anew()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIRAGE_HF_CACHE", str(folder))
        assert mi.superoptimize(small()).report.stop == "exhausted"
        assert mi.superoptimize(wide(), backend="cpu", **DEFAULTS).report.stop == "exhausted"
    return folder


@pytest.fixture
def small_is_kept(searched_before, own_cache, tmp_path):
    """Let the cache keep the results of `small()` and of `wide()`."""
    shutil.copytree(searched_before, tmp_path / "user_cache")
    anew()


@pytest.fixture
def searches(monkeypatch):
    """Return the programs searched so far."""
    seen = []

    def count(program, *args, **kwargs):
        seen.append(program)
        return search_and_verify(program, *args, **kwargs)

    monkeypatch.setattr(find_outcome, "search_and_verify", count)
    return seen


def test_the_second_call_searches_nothing(searches):
    first = mi.superoptimize(small())
    again = mi.superoptimize(small())
    assert len(searches) == 1 and list(again) == list(first) and again.report == first.report
    anew()
    loaded = mi.superoptimize(small())
    assert len(searches) == 1 and list(loaded) == list(first)
    assert (
        loaded.report.stop == "loaded"
        and "exhausted" in loaded.report.reason
        and loaded.report.counters == first.report.counters
    )
    assert (
        loaded.report.error_bound == first.report.error_bound
        and loaded.report.found == first.report.found
    )
    inputs = tensors(small())
    assert torch.equal(first(inputs)[0], loaded(inputs)[0])
    mi.superoptimize(small(), cache=False)
    assert len(searches) == 2


def test_results_belong_to_the_graph_they_are_asked_for():
    """Ops that are added to the first graph after its search change nothing."""
    g = small()
    first = mi.superoptimize(g)
    h = small()
    g.exp(g.outputs[0])
    again = mi.superoptimize(h)
    assert (
        again.program == h
        and all(u.program is again.program for u in again)
        and again.program is not first.program
    )
    assert [len(u.kernels.outputs[0].dims) for u in again] == [2] * len(again) and again[
        -1
    ].num_kernels == 2
    assert len(mi.superoptimize(g)[-1].kernels.ops) == 3 and len(first) == len(again)
    assert first.program == h and all(
        torch.equal(u(tensors(h))[0], v(tensors(h))[0]) for u, v in zip(first, again, strict=True)
    )


@pytest.mark.parametrize(
    "changed",
    [
        dict(time_limit=21),
        dict(seed=1),
        dict(config="mlp"),
        dict(griddims=[(16, 1, 1)]),
        *(
            pytest.param(changed, marks=pytest.mark.thorough)
            for changed in (
                dict(max_block_ops=20),
                dict(config="lora"),
                dict(blockdims=[(64, 1, 1)]),
                dict(franges=[2]),
            )
        ),
    ],
    ids=str,
)
def test_another_parameter_is_a_miss(small_is_kept, searches, changed):
    before = len(kept())
    for options in (DEFAULTS, DEFAULTS | changed):
        for _ in range(2):
            mi.superoptimize(wide(), backend="cpu", **options)
        assert len(searches) == len(kept()) - before == (options != DEFAULTS)


def test_results_of_other_options_are_kept_apart_in_memory():
    two, one = (
        mi.superoptimize(small(), backend="cpu"),
        mi.superoptimize(small(), backend="cpu", max_kernels=1),
    )
    assert len(one) < len(two) and mi.superoptimize(small(), backend="cpu")[-1].num_kernels == 2


@pytest.mark.parametrize(
    "other",
    [
        lambda: small(rows=5),
        lambda: small(n=32),
        lambda: small(dtype=mi.bfloat16),
        lambda: programs.gated_mlp(mi, rows=4, k=64, n=48),
    ],
)
def test_another_program_is_a_miss(small_is_kept, searches, other):
    before = len(kept())
    mi.superoptimize(small())
    assert not searches
    mi.superoptimize(other())
    assert len(searches) == len(kept()) - before == 1


@pytest.mark.parametrize("what", ["package_version", "search_version"])
def test_another_version_is_a_miss(small_is_kept, searches, monkeypatch, what):
    before = len(kept())
    mi.superoptimize(small())
    assert not searches
    monkeypatch.setattr(versions, what, lambda: "another")
    assert mi.superoptimize(small()).report.stop == "exhausted"
    assert len(searches) == len(kept()) - before == 1


def test_the_version_of_the_search_changes_with_the_text_of_each_deciding_file(
    tmp_path, monkeypatch
):
    package = Path(versions.__file__).parent.parent
    copy = tmp_path / "package"
    shutil.copytree(
        package, copy, ignore=shutil.ignore_patterns("kernel_zoo", "patterns", "__pycache__")
    )
    monkeypatch.setattr(versions, "__file__", str(copy / "pipeline" / "versions.py"))
    seen = {versions.search_version.__wrapped__()}
    for pattern in versions._DECIDING:
        file = next(copy.glob(pattern))
        file.write_text(file.read_text(encoding="utf-8") + "# changed", encoding="utf-8")
        seen.add(versions.search_version.__wrapped__())
    assert len(seen) == 1 + len(versions._DECIDING)


def _cut(folder):
    (folder / SEARCH).write_text((folder / SEARCH).read_text()[:-200])


def _signed(folder, **changes):
    """Edit entry.json, and sign it again."""
    data = json.loads((folder / ENTRY).read_text()) | changes
    data["sha256"] = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in data["sha256"]
    }
    del data["digest"]
    (folder / ENTRY).write_text(json.dumps(data | {"digest": json_format.digest(data)}))


def _foreign(folder):
    _signed(folder, options="0" * 64)


def _older(folder):
    _signed(folder, version=0)


def _changed(folder):
    text = (folder / SEARCH).read_text()
    (folder / SEARCH).write_text(text.replace('"rsqrt"', '"sqrt"'))
    assert (folder / SEARCH).read_text() != text


def _no_dict(folder):
    (folder / ENTRY).write_text("[[]]")


def _binary(folder):
    (folder / SEARCH).write_bytes(b"\xff\xfe\x00")


def _wrong_but_signed(folder):
    _changed(folder)
    _signed(folder)


def _without_record(folder):
    data = json.loads((folder / ENTRY).read_text())
    del data["sha256"][SEARCH]
    _signed(folder, sha256=data["sha256"])


@pytest.mark.parametrize(
    "harm, says",
    [
        (_cut, "is damaged"),
        (_foreign, "its key is not that of its program"),
        (_older, "version 0"),
        (_changed, "is not the file"),
        pytest.param(_no_dict, "is damaged", marks=pytest.mark.thorough),
        (_binary, "not UTF-8"),
        (_wrong_but_signed, "not proven again .*differ"),
        (_without_record, "holds no µGraphs of a search"),
    ],
)
def test_a_damaged_result_is_never_used_and_made_anew(small_is_kept, searches, harm, says):
    first = mi.superoptimize(small())
    assert first.report.stop == "loaded" and not searches
    (folder,) = (at for at in kept() if "4x64" in at.parent.name)
    harm(folder)
    anew()
    again = mi.superoptimize(small())
    assert len(searches) == 1 and list(again) == list(first) and again.report.stop == "exhausted"
    (note,) = again.report.notes
    assert (
        re.search(says, note)
        and str(folder) in note
        and note.endswith("searched anew")
        and note in str(again.report)
    )
    anew()
    assert mi.superoptimize(small()).report.stop == "loaded" and len(searches) == 1


def test_a_ugraph_that_is_not_proven_again_is_left_out(monkeypatch):
    first = mi.superoptimize(small())
    anew()
    monkeypatch.setattr(
        trust,
        "examine",
        lambda u, **options: (
            Rejected("it is Friday") if u.kernels == first[0].kernels else examine(u, **options)
        ),
    )
    again = mi.superoptimize(small())
    assert (
        len(again) == len(first) - 1
        and again[0] == first[1]
        and again.report.found == first.report.found - 1
    )
    assert "µGraph 0 was left out, it was not proven again (it is Friday)" in str(again.report)


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(blocked))
    found = mi.superoptimize(small())
    assert found[0].is_fused and "MIRAGE_HF_CACHE" in str(found.report)


def test_a_cache_that_cannot_be_read_is_no_failure(tmp_path, monkeypatch, caplog):
    """Every look-up raises OSError for a name that is too long.

    For users other than root, a folder without permission does the same.
    """
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path / ("x" * 300)))
    found = mi.superoptimize(small())
    assert (
        found[0].is_fused
        and "cannot be read" in str(found.report)
        and "MIRAGE_HF_CACHE" in str(found.report)
    )
    source = "def run(inputs): return inputs\n# of a test\n"
    assert compiler.load(source, hashlib.sha256(source.encode()).hexdigest()).run([1]) == [1]
    assert "for this process only" in caplog.text


def test_a_locked_cache_is_no_failure(monkeypatch):
    user_store().root.mkdir(parents=True)
    monkeypatch.setattr(store, "LOCK_SECONDS", 0.05)
    with FileLock(user_store().root / ".lock"):
        found = mi.superoptimize(small())
    assert found[0].is_fused and "locked by another process" in str(found.report)


def test_a_cache_where_nothing_can_be_locked_is_no_failure(monkeypatch):
    def no_lock(*_, **__):
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(store, "FileLock", no_lock)
    found = mi.superoptimize(small())
    assert found[
        0
    ].is_fused and "cannot be written (FileSystem does not appear to support flock)" in str(
        found.report
    )


def test_an_interrupted_search_and_one_that_found_nothing_are_not_kept(monkeypatch, searches):
    def interrupted(program, *args, **kwargs):
        searched = search_and_verify(program, *args, **kwargs)
        return replace(searched, report=replace(searched.report, stop="interrupted"))

    monkeypatch.setattr(find_outcome, "search_and_verify", interrupted)
    assert mi.superoptimize(small())[0].is_fused and not kept()
    assert mi.superoptimize(small()).report.stop == "interrupted"
    monkeypatch.setattr(find_outcome, "search_and_verify", search_and_verify)
    assert not mi.superoptimize(small(), max_block_ops=1, max_kernels=2)[0].is_fused and not kept()


def test_the_caches_are_bounded(monkeypatch):
    memory = ResultMemory(2)
    for n in range(3):
        memory.put(n, n)
        memory.get(1)
    assert [memory.get(n) for n in range(3)] == [None, 1, 2]
    monkeypatch.setattr(store, "MOST_SEARCHES", 2)
    for rows in (1, 2, 3):
        mi.superoptimize(small(rows=rows))
        (user_store().root / ".partial-a8f3").mkdir()  # left by a process that ended while it wrote
    assert len(kept()) == 2
    assert {p.name for p in user_store().root.iterdir()} == {".lock", ".partial-a8f3", "program"}


# -- the page -------------------------------------------------------------------------------------


class Page(HTMLParser):
    """A strict reader of HTML: tags close in order, ids are unique, and nothing is loaded."""

    VOID = ("meta", "path", "rect")

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        assert not {"src", "href", "id", "onclick"} & {name for name, _ in attrs}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert tag in ("path", "rect")
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_of_a_result(tmp_path):
    g = mi.new_kernel_graph()
    x, w = g.new_input((4, 64), name="x"), g.new_input((64, 48), name="w")
    g.mark_output(g.silu(g.matmul(x, w)))
    found = mi.superoptimize(g, backend="cpu")
    found.report = replace(
        found.report,
        rejected=(RejectedCandidate(7, "rounds <badly> & loudly"),),
        notes=("a <note>",),
    )
    path = found.to_html(tmp_path / "r.html")
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>") and "prefers-color-scheme: dark" in text
    assert (
        "<badly>" not in text and "rounds <badly> & loudly" in page.text and "a <note>" in page.text
    )
    assert (
        not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)
        and "script" not in page.seen
    )
    assert page.seen.count("svg") == min(len(found), html_report.MOST_SHOWN) and page.seen.count(
        "details"
    ) >= page.seen.count("svg")
    for part in (
        str(g),
        str(found[0]),
        "@triton.jit",
        "exhausted",
        f"{found.report.error_bound:.1e}",
        "library path",
        "Not measured",
    ):
        assert part in page.text
    for _, label, number in counter_labels.rows(found.report.counters):
        assert label in page.text and number in page.text


def test_counters_without_a_label_are_shown_by_their_name():
    @dataclass
    class Other:
        values: int = 1234
        rings_drawn: int = 5
        never: float = -1.0

    assert counter_labels.rows(Other()) == [
        ("values", "values kept", "1,234"),
        ("other", "rings drawn", "5"),
    ]
    assert counter_labels.rows(Counters(values=7)) and {
        group for group, _ in counter_labels.LABELS.values()
    } <= set(counter_labels.GROUPS)


def test_a_users_default_device_changes_nothing():
    with torch.device("meta"):  # nothing in it can be read
        found = mi.superoptimize(small(), backend="cpu", cache=False)
        x = [torch.ones(t.dims, dtype=t.dtype, device="cpu") for t in small().inputs]
        got = found[0](inputs=x)
    assert (
        all(torch.allclose(a, b) for a, b in zip(got, found[0](inputs=x), strict=True))
        and got[0].device.type == "cpu"
    )


@pytest.mark.parametrize(
    "inputs", [None, 3, {1, 2}, (x for x in ())], ids=["None", "a number", "a set", "a generator"]
)
def test_inputs_that_are_no_list_are_refused(inputs):
    g = mi.new_kernel_graph()
    g.exp(g.new_input((4, 6)))
    with pytest.raises(
        errors.InputError, match=r"expected a list of 1 tensors in the order of graph\.inputs, got"
    ):
        g.superoptimize(backend="cpu")(inputs)
    with pytest.raises(errors.SearchError, match="unknown config"):
        g.superoptimize(["mlp"])
    with pytest.raises(errors.CodegenError, match="tiles is 3"):
        mi.ugraph(g, g, tiles=3)


def test_a_folder_for_codes_that_cannot_be_is_refused_before_the_search(tmp_path):
    g, stages = mi.new_kernel_graph(), []
    g.exp(g.new_input((4, 6)))
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.SearchError, match=r"save_codes: the folder .*file cannot be made"):
        g.superoptimize(
            backend="cpu",
            cache=False,
            save_codes=tmp_path / "file",
            progress=lambda stage, detail: stages.append(stage),
        )
    assert not stages


def test_equal_ugraphs_with_other_schedules_run_their_own(monkeypatch):
    asked = []
    monkeypatch.setattr(
        triton,
        "generate",
        lambda u, schedules: asked.append(schedules) or SimpleNamespace(source="", digest=""),
    )
    monkeypatch.setattr(
        compiler,
        "load",
        lambda source, digest: SimpleNamespace(run=lambda inputs: []),
    )
    g = mi.new_kernel_graph()
    g.exp(g.new_input((4, 64)))
    u = g.superoptimize(backend="cpu", cache=False)[0]
    ops = place_kernels(u)
    first, second = (tuple(s[n] for s in map(space.schedules, ops)) for n in (0, 1))
    for schedules in (first, second, first):
        run_ugraph._runner(replace(u, schedules=schedules), schedules)
    assert asked == [first, second]


def described(doc: str) -> dict[str, str]:
    """Return what the Args section of a docstring says, by the name of the argument."""
    section = re.search(r"^Args:\n((?:    .*\n|\n)*)", doc + "\n", re.M)
    entries = re.split(r"^    (\w+): ", section[1] if section else "", flags=re.M)[1:]
    return {name: " ".join(text.split()) for name, text in zip(*[iter(entries)] * 2, strict=True)}


@pytest.mark.parametrize(
    "entry",
    [mi.superoptimize, mi.optimize, mi.ugraph, mi.new_block_graph],
    ids=lambda f: f.__name__,
)
def test_help_says_in_words_what_every_argument_is(entry):
    said = described(inspect.getdoc(entry))
    assert list(said) == list(inspect.signature(entry).parameters)
    assert all(len(text.split()) >= 3 and text.endswith(".") for text in said.values()), said


def test_results_show_how_many_kernels_and_ops_they_have():
    result = mi.superoptimize(small())
    assert repr(result[0]) == "<UGraph: 1 kernel, 1 of them block graphs>"
    assert repr(result[-1]) == "<UGraph: 2 kernels, 0 of them block graphs>"  # library calls
    assert repr(result.program) == "<KernelGraph: 3 inputs, 2 ops, 1 outputs>"
