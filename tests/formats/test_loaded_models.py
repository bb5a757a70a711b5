"""Linears of models that transformers loads from a checkpoint of compressed-tensors."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from mirage_hf.errors import Rejected
from mirage_hf.formats import CodedWeight, coded_weight
from tests.helpers import coded_modules

pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

SIZES = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
)


INT4 = QuantizationArgs(num_bits=4, group_size=32, strategy="group", symmetric=False)

SCHEMES = {
    "int4": lambda: QuantizationScheme(targets=["Linear"], weights=INT4),
    "NVFP4": lambda: preset_name_to_scheme("NVFP4", ["Linear"]),
    "MXFP4A16": lambda: preset_name_to_scheme("MXFP4A16", ["Linear"]),
}


@pytest.fixture(params=SCHEMES)
def loaded(request, tmp_path) -> nn.Module:
    """Return a model with int4 weights and zero points, or floats of 4 bits, saved and loaded."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16()
    scheme = SCHEMES[request.param]()
    config = QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data.uniform_(0.005, 0.02)
            if request.param == "int4":
                module.weight_zero_point.data.random_(-7, 8)
            if request.param == "NVFP4":
                module.weight_global_scale.data.fill_(1000.0)
                module.input_global_scale.data.fill_(1000.0)
                module.weight_scale.data *= 1000.0
            module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    return AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)


def test_every_linear_is_read_until_the_model_runs(loaded):
    linears = [m for m in loaded.model.modules() if isinstance(m, nn.Linear)]
    assert len(linears) == 7
    weights = [coded_weight(m) for m in linears]
    assert all(isinstance(w, CodedWeight) for w in weights)
    decoded = [coded_modules.decoded(w.coding, w.tensors) for w in weights]
    assert coded_weight(loaded.lm_head) is None
    loaded(torch.zeros(1, 2, dtype=torch.long))  # decompresses all weights
    assert all(torch.equal(w, m.weight) for w, m in zip(decoded, linears, strict=True))
    found = coded_weight(linears[0])
    assert isinstance(found, Rejected) and "before it runs" in found.reason
