"""The builder of the packaged zoo."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mirage_hf.codegen.schedule import Schedule
from mirage_hf.graph.ugraph import library_ugraph
from mirage_hf.zoo.entry import Entry
from mirage_hf.zoo.key import key_of
from mirage_hf.zoo.store import Store
from scripts import build_zoo
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
