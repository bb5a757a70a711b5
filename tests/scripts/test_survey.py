"""The survey: small models of diverse architectures, and the classes of its rows."""

import json

import pytest
import torch

from scripts import survey_models, survey_tables
from scripts.survey_configs import small_config

#: A row of a type whose steps all ran by kernels.
WHOLE = {
    "type": "whole",
    "optimized": True,
    "equal": {"batch 1": True, "image": True},
    "restored": {"batch 1": True, "image": True},
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
    ],
}


@pytest.mark.parametrize("name", ["gpt2", "qwen3_next", "deepseek_v3", "gemma4", "llava"])
def test_small_models_generate(name):
    model = survey_models.build(name, survey_models.model_types()[name])
    assert sum(p.numel() for p in model.parameters()) < 3_000_000
    for call in survey_models.calls_of(model, name):
        text = survey_models.generate(model, call, 10)
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
    assert json.loads(json.dumps(found))["equal"] == {"batch 1": True, "batch 3": True}


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
        "WRONG TOKENS: 2",
        "  after: after restore in image",
        "  wrong: in batch 1",
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
