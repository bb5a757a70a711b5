"""The builder of the packaged zoo."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mirage_hf.codegen.schedule import Schedule
from mirage_hf.errors import CodegenError, Rejected
from mirage_hf.graph.ugraph import library_ugraph
from mirage_hf.zoo.entry import Entry
from mirage_hf.zoo.key import key_of
from mirage_hf.zoo.store import Store, user_store
from scripts import build_zoo
from tests.cli.test_zoo import entry
from tests.helpers import ugraphs


def test_a_zoo_gets_no_result_whose_candidates_failed(monkeypatch, tmp_path):
    """If every candidate failed, the library path would stay in the zoo for good."""
    ugraph = ugraphs.rms_norm_linear()
    fused = Entry(
        key_of(ugraph.program, "sm_90"),
        "program",
        ugraph,
        "# text\n",
        (Schedule({"m": 1, "n": 16, "k": 64}),),
        (),
        0.0,
        {"candidates": 3},
    )
    failed = replace(
        fused,
        ugraph=library_ugraph(ugraph.program),
        schedules=(),
        search={"candidates": 3, "reason": "no code for sm_90"},
    )
    for made, kept in ((failed, 0), (replace(failed, search={"candidates": 0}), 1), (fused, 1)):
        zoo = Store(tmp_path / str(kept) / made.pattern / str(len(made.schedules)), writable=True)
        monkeypatch.setattr(build_zoo, "make_entries", lambda *_, made=made: [made])
        (said,) = build_zoo.build([], torch.device("cpu"), zoo, SimpleNamespace(tune="auto"))
        assert len(list(zoo.entries())) == kept
        assert (
            "not kept, every candidate failed here" in said and "no code for sm_90" in said
        ) == (kept == 0), said


@pytest.mark.parametrize("rank", [0, 4])
def test_a_zoo_has_the_blocks_of_adapters_too(rank):
    pytest.importorskip("peft")
    found = build_zoo.matched("smoke", "bfloat16", torch.device("cpu"), rank)
    layer, head = build_zoo.blocks_of(found)
    sizes = [dict(block.sizes) for block in layer]
    assert [block.pattern.name for block in head] == ["rms_norm_linear"] and "lora" not in dict(
        head[0].sizes
    )
    assert sum(block.pattern.name == "lora_down" for block in layer) == (4 if rank else 0)
    assert sum(s.get("lora") is not None for s in sizes) == (4 if rank else 0)


@pytest.mark.parametrize("anew, tune", [(False, "auto"), (True, "full")])
def test_a_zoo_gets_what_was_measured_of_a_model_in_codes(monkeypatch, tmp_path, anew, tune):
    """The user's own cache is neither read nor changed, and what was not measured stays out."""
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path / "own"))
    user_store().put(entry(rows=5))
    given, codes, made_us = [], [], 0.0

    def optimize(model, **options):
        given.append(options)
        assert next(user_store().entries(), None) is None
        for made in (entry(us=made_us, rows=3), entry(us=None, rows=4)):
            user_store().put(made)

    monkeypatch.setattr(build_zoo.mirage_hf, "optimize", optimize)
    monkeypatch.setattr(build_zoo.mirage_hf, "restore", lambda model: None)
    monkeypatch.setattr(build_zoo, "with_codes", lambda model, kind: codes.append(kind) or model)
    zoo = Store(tmp_path / "zoo", writable=True)
    cpu = torch.device("cpu")
    for known, us in ((None, 9.0), (zoo.root, 8.0)):
        made_us = us
        said = list(build_zoo.build_with_codes("smoke", "bfloat16", cpu, "int4", 2, zoo, anew))
        assert said[0].startswith("smoke in int4, batch 2: optimized and generated in")
        assert len(said) == 2 and f"searched kernel {us:.2f} µs" in said[1]
        assert given.pop() == {"batch_sizes": (2,), "tune": tune, "zoo": known}
        assert codes.pop() == "int4" and not codes
        ((_, kept),) = zoo.verify()
        assert kept.key == entry(rows=3).key and kept.timings[0].median_us == us
    assert os.environ["MIRAGE_HF_CACHE"] == str(tmp_path / "own")
    ((_, own),) = user_store().verify()
    assert own.key == entry(rows=5).key


@pytest.mark.parametrize(
    "options, why",
    [
        ("--weights int5", "unknown: int5; there are int4,"),
        ("--weights mxfp4", "unknown: mxfp4; there are int4,"),
        *(
            (f"--weights int4 {other}", "--weights goes with none of")
            for other in ("--lora 4", "--draft-tokens 3", "--tune auto", "--untimed")
        ),
        ("--configs smoke,large", "unknown: large; there are"),
    ],
)
def test_wrong_options_are_refused(monkeypatch, capsys, options, why):
    monkeypatch.setattr("sys.argv", ["build_zoo", *options.split()])
    with pytest.raises(SystemExit):
        build_zoo.main()
    assert why in capsys.readouterr().err


def test_unmeasured_kernels_of_norms_and_rope_are_measured(capsys):
    """One that fails does not stop the others."""
    unmeasured = [
        replace(entry(us=None, rows=rows), pattern=pattern)
        for rows, pattern in ((3, "prompt_norm"), (4, "linear"), (5, "prompt_rotation"))
    ]
    entries = [replace(entry(us=9.0, rows=6), pattern="prompt_norm"), *unmeasured]
    asked = []

    def resolve(program, pattern):
        asked.append((program, pattern))
        if pattern == "prompt_norm":
            raise CodegenError("no code for it")

    finder = SimpleNamespace(measuring_few=lambda: SimpleNamespace(resolve=resolve))
    made = SimpleNamespace(verify=lambda: [(None, e) for e in [*entries, Rejected("damaged")]])
    build_zoo.measure_kernels_of_prompts(made, finder)
    norm, _, rotation = unmeasured
    assert asked == [(e.ugraph.program, e.pattern) for e in (norm, rotation)]
    assert f"{norm.folder}: not measured: CodegenError: no code for it" in capsys.readouterr().out


def test_each_format_and_batch_size_is_a_job(monkeypatch, tmp_path):
    seen = []

    def build_with_codes(name, dtype, device, kind, batch, zoo, anew):
        seen.append((name, kind, batch, zoo.root, anew))
        yield "done"

    monkeypatch.setattr(build_zoo, "build_with_codes", build_with_codes)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    options = f"--configs smoke --weights int4,nf4, --batch-sizes 1,16 --anew --out {tmp_path}"
    monkeypatch.setattr("sys.argv", ["build_zoo", *options.split()])
    build_zoo.main()
    wanted = [(kind, batch) for kind in ("int4", "nf4") for batch in (1, 16)]
    assert seen == [("smoke", kind, batch, tmp_path, True) for kind, batch in wanted]
