"""The survey: small models of diverse architectures, and the classes of its rows."""

import json

import pytest
import torch

from scripts import survey_calls, survey_models, survey_tables
from scripts.survey_configs import small_config

#: A row of a type whose steps all ran by kernels.
WHOLE = {
    "type": "whole",
    "optimized": True,
    "equal": {"batch 1": True, "image": True},
    "logits": {"batch 1": 1e-6, "image": 0.0},
    "handed_in": {"batch 1": True},
    "restored": {"batch 1": True, "image": True},
    "handed_out": {"batch 1": True},
    "decode": {"batch 1": {"step: all by kernels": 2}, "image": {"stock: model kwarg x": 2}},
    "notes": [],
    "warned": [],
}


def row(name, **changes):
    return WHOLE | {"type": name} | changes


ROWS = {
    "whole steps": [
        WHOLE,
        row(
            "traced",
            decode={"batch 1": {"step: traced": 2}},
            notes=["searched kernels read 93% of the bytes of their weights"],
        ),
    ],
    "some": [
        row("own", decode={"batch 1": {"step: a reason": 2}}),
        row("stock", decode={"batch 1": {"step: traced": 2}, "batch 3": {"stock: padding": 2}}),
        row("twin", decode={"batch 1": {"step: a reason": 2}}),
    ],
    "nothing": [row("nothing", optimized=False, decode={}, warned=["no layer | no kernel"])],
    "unbuilt": [{"type": "unbuilt", "unbuilt": "ImportError: timm"}],
    "error": [{"type": "error", "error": "its process ended with code -11"}],
    "WRONG TOKENS": [
        row("wrong", equal={"batch 1": False}),
        row("after", restored={"batch 1": True, "image": False}),
        row("far", logits={"batch 1": 1e-4}),
        row("in", handed_in={"batch 1": False}),
        row("out", handed_out={"batch 1": False}),
    ],
}


@pytest.mark.parametrize("name", ["gpt2", "qwen3_next", "deepseek_v3", "gemma4", "llava"])
def test_small_models_generate(name):
    model = survey_models.build(name, survey_models.model_types()[name])
    assert sum(p.numel() for p in model.parameters()) < 3_000_000
    for call in survey_calls.calls_of(model, name):
        text = survey_calls.text_of(model, call, 10)
        assert text.shape == (len(call.inputs["input_ids"]), call.inputs["input_ids"].shape[1] + 10)


def test_small_configs_keep_a_layer_of_each_kind():
    config = small_config("qwen3_next")
    assert config.layer_types == ["linear_attention", "full_attention"]
    assert config.num_hidden_layers == 2


def test_a_type_without_a_small_model_has_a_reason():
    with pytest.raises(survey_models.UnbuiltError, match="cache of another model"):
        survey_models.build("gemma4_assistant", "causal")


def test_a_survey_of_one_type():
    torch.manual_seed(0)
    found = survey_models.survey("llama", "causal", 10)
    assert survey_tables.class_of(found) == "whole steps", found
    found = json.loads(json.dumps(found))
    for key in ("equal", "handed_in", "restored", "handed_out"):
        assert found[key] == {"batch 1": True, "batch 3": True}, key
    assert max(found["logits"].values()) < survey_tables.MOST_DIFFERENCE


def test_a_wrong_logit_and_a_wrong_text_after_a_cache_are_seen(monkeypatch):
    optimize = survey_models.mirage_hf.optimize

    def shift_logits(model, **kwargs):
        optimize(model, **kwargs)
        monkeypatch.setattr(model, "generate", shifted(model.generate))

    def shifted(generate):
        def wrong(*args, **kwargs):
            out = generate(*args, **kwargs)
            if isinstance(out, torch.Tensor):
                return out.flip(-1) if "past_key_values" in kwargs else out
            out.logits = tuple(step + 1 for step in out.logits)
            return out

        return wrong

    monkeypatch.setattr(survey_models.mirage_hf, "optimize", shift_logits)
    monkeypatch.setattr(survey_models.mirage_hf, "restore", lambda model: None)
    found = survey_models.survey("llama", "causal", 5)
    assert survey_tables.reason_of(found) == (
        "by logits in batch 1, batch 3; after stock's cache in batch 1, batch 3; "
        "after restore with the returned cache in batch 1, batch 3"
    )


def test_logits_that_are_not_finite_must_be_equal():
    stock = [torch.tensor([[1.0, -torch.inf]])]
    assert survey_calls.logits_difference([torch.tensor([[1.5, -torch.inf]])], stock) == 0.5
    for wrong in ([[1.0, 0.0]], [[torch.nan, -torch.inf]], [[1.0, torch.inf]], [[1.0]]):
        assert survey_calls.logits_difference([torch.tensor(wrong)], stock) == torch.inf
    assert survey_calls.logits_difference([], stock) == torch.inf


@pytest.mark.parametrize("kind", survey_tables.CLASSES)
def test_rows_have_their_class(kind):
    assert [survey_tables.class_of(r) for r in ROWS[kind]] == [kind] * len(ROWS[kind])


def test_the_table_names_all_types_and_the_reasons_for_failures(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [r for members in ROWS.values() for r in members]
    older = {"type": "whole", "error": "an older line of the same type"}
    file.write_text("".join(json.dumps(r) + "\n" for r in [older, *rows]))
    lines = survey_tables.table(survey_tables.rows_of([file])).splitlines()
    assert lines == [
        "whole steps: 2",
        "  traced whole",
        "some: 3",
        "  own stock twin",
        "nothing: 1",
        "  nothing",
        "unbuilt: 1",
        "  unbuilt: ImportError: timm",
        "error: 1",
        "  error: its process ended with code -11",
        "WRONG TOKENS: 5",
        "  after: after restore in image",
        "  far: by logits in batch 1",
        "  in: after stock's cache in batch 1",
        "  out: after restore with the returned cache in batch 1",
        "  wrong: in batch 1",
        "logits: 12 calls, at most 1.0e-06 of stock's largest",
        "caches: 6 handed in, 6 handed out",
    ]


@pytest.mark.parametrize(
    "note",
    [
        "steps of generate cannot be traced: layer type moe",
        "steps of generate run the model's own forward, in a CUDA graph: layer type moe",
    ],
)
def test_a_note_says_the_reason_if_no_step_was_counted(note):
    own_generate = row("own", decode={"batch 1": {}}, notes=["backend cpu", note])
    assert survey_tables.reason_of(own_generate) == "layer type moe"


def test_types_of_equal_cells_share_a_row_of_the_grid():
    rows = [r for members in ROWS.values() for r in members]
    assert survey_tables.grid(rows).splitlines()[2:] == [
        "| `whole` | whole steps | all |  |",
        "| `traced` | whole steps | 93% |  |",
        "| `own`, `twin` | some |  | a reason |",
        "| `stock` | some |  | padding |",
        "| `nothing` | nothing |  | no layer \\| no kernel |",
    ]
