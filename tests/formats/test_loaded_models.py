"""Linears of models that transformers loads from a checkpoint of compressed-tensors."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from mirage_hf.errors import Rejected
from mirage_hf.formats import CodedWeight, coded_weight

pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
)

SIZES = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
)


@pytest.fixture
def loaded(tmp_path) -> nn.Module:
    """Return a model with int4 weights and zero points, saved and loaded."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16()
    args = QuantizationArgs(num_bits=4, group_size=32, strategy="group", symmetric=False)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    config = QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data.uniform_(0.005, 0.02)
            module.weight_zero_point.data.random_(-7, 8)
            module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    return AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)


def test_every_linear_is_read_until_the_model_runs(loaded):
    linears = [m for m in loaded.model.modules() if isinstance(m, nn.Linear)]
    assert len(linears) == 7
    assert all(isinstance(coded_weight(m), CodedWeight) for m in linears)
    assert coded_weight(loaded.lm_head) is None
    loaded(torch.zeros(1, 2, dtype=torch.long))  # decompresses all weights
    found = coded_weight(linears[0])
    assert isinstance(found, Rejected) and "before it runs" in found.reason
