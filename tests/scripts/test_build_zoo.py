"""The builder of the packaged zoo."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mirage_hf.codegen.schedule import Schedule
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
    given = []

    def optimize(model, **options):
        given.append(options)
        assert next(user_store().entries(), None) is None
        for made in (entry(rows=3), entry(us=None, rows=4)):
            user_store().put(made)

    monkeypatch.setattr(build_zoo.mirage_hf, "optimize", optimize)
    monkeypatch.setattr(build_zoo.mirage_hf, "restore", lambda model: None)
    monkeypatch.setattr(build_zoo, "with_codes", lambda model, kind: model)
    args = SimpleNamespace(anew=anew, out=tmp_path / "zoo")
    cpu = torch.device("cpu")
    said = list(build_zoo.build_with_codes("smoke", "bfloat16", cpu, "int4", 2, args))
    assert said[0].startswith("smoke in int4, batch 2: optimized and generated in")
    assert len(said) == 2 and said[1].endswith("/sm_90: added")
    assert given == [{"batch_sizes": (2,), "tune": tune}]
    (kept,) = Store(tmp_path / "zoo").verify()
    assert kept[1].key == entry(rows=3).key
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize(
    "options, why",
    [
        ("--weights int5", "unknown: int5; there are int4,"),
        ("--weights int4 --lora 4", "--weights goes with neither --lora nor --draft-tokens"),
        ("--configs smoke,large", "unknown: large; there are"),
    ],
)
def test_wrong_options_are_told(monkeypatch, capsys, options, why):
    monkeypatch.setattr("sys.argv", ["build_zoo", *options.split()])
    with pytest.raises(SystemExit):
        build_zoo.main()
    assert why in capsys.readouterr().err
