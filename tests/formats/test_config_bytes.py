"""The bytes of quantized checkpoints, from their configs alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mirage_hf.decode import explain_step, meta_model
from mirage_hf.decode.explaining import Explained
from mirage_hf.formats.config_bytes import CheckpointLayout, checkpoint_layout
from scripts.coded_models import with_codes

ROWS, COLUMNS = 256, 512
CODES = ROWS * COLUMNS
GROUPS = CODES // 128


def compressed(format: str, ignore: tuple[str, ...] = ("lm_head",), **weights: Any) -> dict:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "ignore": list(ignore),
        "config_groups": {"group_0": group},
    }


def layout(settings: dict) -> CheckpointLayout:
    found = checkpoint_layout(SimpleNamespace(quantization_config=settings))
    assert found is not None
    return found


INT4 = compressed(
    "pack-quantized", num_bits=4, type="int", symmetric=True, strategy="group", group_size=128
)
FP8_ROWS = compressed("float-quantized", num_bits=8, type="float", strategy="channel")

#: Settings, and the bytes of a weight of ROWS and COLUMNS.
CASES = {
    "int4": (INT4, CODES // 2 + 2 * GROUPS),
    "int4 with zero points": (
        compressed("pack-quantized", num_bits=4, symmetric=False, strategy="group", group_size=128),
        CODES // 2 + 2 * GROUPS + GROUPS // 2,
    ),
    "float8 rows": (FP8_ROWS, CODES + 2 * ROWS),
    "int8, one scale": (compressed("int-quantized", num_bits=8, strategy="tensor"), CODES + 2),
    "nvfp4": (
        compressed("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16),
        CODES // 2 + CODES // 16,
    ),
    "fp8 blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        CODES + 4 * CODES // 128**2,
    ),
    "fp8, one scale": ({"quant_method": "fp8"}, CODES + 4),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        CODES // 2 + 2 * GROUPS + GROUPS // 2 + 4 * COLUMNS,
    ),
    "gptq rows": (
        {"quant_method": "gptq", "bits": 8, "group_size": -1},
        CODES + 3 * ROWS + 4 * COLUMNS,
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 128},
        CODES // 2 + 2 * GROUPS + GROUPS // 2,
    ),
    "nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        CODES // 2 + 4 * CODES // 64,
    ),
    "nf4 twice": (
        {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
        CODES // 2 + CODES // 64 + 4 * CODES // 64 // 256,
    ),
    "hqq": (
        {
            "quant_method": "hqq",
            "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}},
        },
        CODES // 2 + 4 * CODES // 64,
    ),
    "torchao int8": (
        {
            "quant_method": "torchao",
            "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}},
        },
        CODES + 4 * ROWS,
    ),
    "torchao int4": (
        {
            "quant_method": "torchao",
            "quant_type": {
                "default": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 128}}
            },
        },
        CODES // 2 + 4 * GROUPS,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_codes_scales_and_zero_points(name: str) -> None:
    settings, expected = CASES[name]
    found = layout(settings)
    stored = found.of("model.layers.0.mlp.up_proj")
    assert not found.why_unknown and stored is not None
    assert stored.bytes_of(ROWS, COLUMNS) == expected
    assert found.of("lm_head") is None


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "quanto", "weights": "int4"},
        {"bits": 4},
        compressed("marlin-24", num_bits=4, strategy="group", group_size=128),
        compressed("pack-quantized", num_bits=4, strategy="attn_head"),
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:.*up.*": {}}},
        {"quant_method": "gptq"},
        {"quant_method": "hqq", "quant_config": {"self_attn.q_proj": {}}},
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "New", "_data": {}}}},
    ],
)
def test_a_format_that_is_not_known_is_said(settings: dict) -> None:
    found = layout(settings)
    assert found.why_unknown and found.of("model.layers.0.mlp.up_proj") is None
    assert "counted as if they were not quantized" in str(found)


def test_a_plain_config_has_no_layout() -> None:
    assert checkpoint_layout(LlamaConfig()) is None


def test_some_linears_are_left_out() -> None:
    ignored = layout({**INT4, "ignore": ["lm_head", "re:.*self_attn.*"]})
    assert ignored.of("model.layers.0.self_attn.q_proj") is None
    assert ignored.of("model.layers.0.mlp.up_proj") is not None
    kept = layout({"quant_method": "fp8", "modules_to_not_convert": ["up_proj"]})
    assert kept.of("model.layers.0.mlp.up_proj") is None and kept.of("lm_head") is not None
    inside = {"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": True}
    named = layout({**inside, "modules_in_block_to_quantize": [["mlp.up_proj"]]})
    assert named.of("model.layers.0.mlp.up_proj") is not None
    assert named.of("model.layers.0.mlp.down_proj") is None


def small_config(**options: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=300,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **options,
    )


def explained(config: LlamaConfig) -> list[Explained]:
    return explain_step(meta_model(config, torch.bfloat16))[0]


def step_bytes(config: LlamaConfig) -> dict[str, int]:
    return {e.what: e.bytes for e in explained(config) if e.bytes}


@pytest.mark.parametrize("tied", [False, True])
def test_explain_counts_codes_and_scales(tied: bool) -> None:
    """The head is not quantized, whether or not it is the table of tokens."""
    dense = step_bytes(small_config(tie_word_embeddings=tied))
    coded = step_bytes(small_config(tie_word_embeddings=tied, quantization_config=INT4))
    assert dense.keys() == coded.keys() and len(dense) >= 4
    share = (0.5 + 2 / 128) / 2
    for what, size in dense.items():
        is_head = what in ("lm_head", "embed_tokens")
        assert coded[what] == (size if is_head else size * share), what


@pytest.mark.parametrize(
    "kind, library, settings",
    [
        ("int4", "compressed_tensors", INT4),
        ("int8", "torchao", CASES["torchao int8"][0]),
        ("fp8", "transformers", CASES["fp8 blocks"][0]),
    ],
)
def test_bytes_from_a_config_are_those_of_a_model(kind: str, library: str, settings: dict) -> None:
    """The formats' libraries make as many codes and scales."""
    pytest.importorskip(library)
    plain = LlamaForCausalLM(small_config()).bfloat16().eval()
    kernels, _ = explain_step(with_codes(plain, kind))
    assert sum(e.count * e.bytes for e in kernels) == sum(
        e.count * e.bytes for e in explained(small_config(quantization_config=settings))
    )
