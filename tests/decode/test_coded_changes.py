"""Models whose linears hold codes and change after optimize(), or share linears."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import mirage_hf as mi
from mirage_hf.errors import OptimizeError
from mirage_hf.formats import CodedWeight, coded_weight, torchao
from scripts.coded_models import linears, with_codes
from tests.decode.test_coded_models import coded, decoded_twin, generated, small_llama, snapshot

# Not run with other versions of transformers: what changes here are containers of our formats.
pytestmark = [pytest.mark.models, pytest.mark.slow]

PROMPT = torch.arange(1, 8)[None]


def coded_linears(model: Any) -> Iterator[nn.Module]:
    for module in model.modules():
        if isinstance(coded_weight(module), CodedWeight):
            yield module


def optimized_and_run(model: Any) -> Any:
    mi.optimize(model)
    generated(model, 1)
    assert model.mirage.report.decode["step: traced"] == 1
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(PROMPT).logits


def hqq_llama() -> Any:
    quantize = pytest.importorskip("hqq.core.quantize")
    config = quantize.BaseQuantizeConfig(nbits=8, group_size=64, axis=1)
    model = small_llama().requires_grad_(False)
    for parent, name, linear in list(linears(model)):
        linear.bias = nn.Parameter(torch.zeros(len(linear.weight)), requires_grad=False)
        made = quantize.HQQLinear(linear, config, compute_dtype=torch.float32, device="cpu")
        setattr(parent, name, made)
    return model.eval()


def test_a_scale_that_is_replaced_inside_a_tensor_of_torchao_is_read_from_then_on() -> None:
    model = optimized_and_run(coded("int8"))
    for linear in coded_linears(model):
        rows = len(linear.weight.scale)
        linear.weight.scale = linear.weight.scale * torch.linspace(0.5, 2, rows)[:, None]
    assert torch.equal(generated(model, 1), generated(decoded_twin(model), 1))


def test_zero_points_that_are_written_into_a_model_without_any_are_read_from_then_on() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    granularity = pytest.importorskip("torchao.quantization.granularity")

    def quantized(mapping: Any) -> Any:
        model = small_llama()
        config = quantization.IntxWeightOnlyConfig(
            weight_dtype=torch.int8, granularity=granularity.PerGroup(128), mapping_type=mapping
        )
        quantization.quantize_(model.model.layers, config)
        return model

    model = optimized_and_run(quantized(quantization.MappingType.SYMMETRIC))
    other = quantized(quantization.MappingType.ASYMMETRIC)
    model.load_state_dict(other.state_dict())
    assert torch.equal(logits(model), logits(decoded_twin(other)))
    assert torch.equal(generated(model, 1), generated(decoded_twin(other), 1))


@pytest.mark.parametrize("name", ["scale", "bias"])
def test_tensors_of_hqq_that_are_no_parameters_are_read_anew_if_they_are_replaced(
    name: str,
) -> None:
    model = optimized_and_run(hqq_llama())
    for linear in coded_linears(model):
        if name == "scale":
            linear.meta["scale"] = linear.meta["scale"] * 1.5
        else:
            linear.bias = torch.linspace(-1, 1, len(linear.bias))
    now, logits_now = generated(model, 1), logits(model)
    mi.restore(model)
    assert torch.equal(now, generated(model, 1))
    torch.testing.assert_close(logits_now, logits(model))


@pytest.mark.parametrize("nested", [False, True])
def test_scales_of_bitsandbytes_that_are_replaced_are_read_from_then_on(nested: bool) -> None:
    model = optimized_and_run(coded("nf4 nested" if nested else "nf4"))
    for linear in coded_linears(model):
        state = linear.weight.quant_state
        scales = state.state2 if nested else state
        scales.absmax = scales.absmax * torch.linspace(0.5, 2, len(scales.absmax))
        if nested:
            state.offset.add_(0.01)
    plain = decoded_twin(model)
    torch.testing.assert_close(logits(model), logits(plain))
    assert torch.equal(generated(model, 1), generated(plain, 1))


def test_a_bias_that_is_replaced_between_two_optimizations_is_read() -> None:
    model = coded("fp8")
    for linear in coded_linears(model):
        linear.bias = nn.Parameter(torch.zeros(linear.out_features))
    optimized_and_run(model)
    mi.restore(model)
    for linear in coded_linears(model):
        linear.bias = nn.Parameter(torch.linspace(-1, 1, linear.out_features))
    plain = decoded_twin(model)
    for path, linear in model.named_modules():
        if isinstance(coded_weight(linear), CodedWeight):
            plain.get_submodule(path).bias = linear.bias
    optimized_and_run(model)
    assert torch.equal(generated(model, 1), generated(plain, 1))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_biases_may_be_wider_than_the_model(kind: str) -> None:
    pytest.importorskip("torchao" if kind == "int8" else "transformers")
    model = with_codes(small_llama().to(torch.bfloat16), kind)
    for linear in coded_linears(model):
        linear.bias = nn.Parameter(torch.linspace(-1, 1, linear.out_features))
    plain = decoded_twin(model).to(torch.bfloat16)
    for path, linear in model.named_modules():
        if isinstance(coded_weight(linear), CodedWeight):
            plain.get_submodule(path).bias = nn.Parameter(linear.bias.to(torch.bfloat16))
    optimized_and_run(model)
    assert "searched kernels read 100% of the bytes" in str(model.mirage.report)
    torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=0.1)


def test_a_model_that_is_cast_runs_on() -> None:
    model = optimized_and_run(coded("int8"))
    model.to(torch.bfloat16)
    cast = logits(model)
    mi.restore(model)
    torch.testing.assert_close(cast, logits(model), rtol=0, atol=0.1)


def test_a_model_that_its_library_decodes_after_optimize_runs_on() -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    model = coded("int4")
    plain = decoded_twin(model)
    optimized_and_run(model)
    compressors.ModelCompressor().decompress_model(model)
    assert torch.equal(generated(model, 1), generated(plain, 1))
    mi.restore(model)
    assert not model._forward_pre_hooks
    assert torch.equal(generated(model, 1), generated(plain, 1))


def test_other_changes_of_a_model_keep_the_kernels_of_its_codes() -> None:
    """`FP8Linear` does not tell in which dtype it computes."""
    model = optimized_and_run(coded("fp8"))
    norm = model.model.norm
    eps, norm.variance_epsilon = norm.variance_epsilon, 1e-3
    generated(model, 1)
    norm.variance_epsilon = eps
    generated(model, 1)
    assert model.mirage.report.decode["step: traced"] == 2


def test_two_optimized_models_may_share_linears() -> None:
    one, other = coded("int8"), small_llama(seed=1)
    other.model.layers[0].mlp = one.model.layers[0].mlp
    before = [list(snapshot(model)) for model in (one, other)]
    mi.optimize(one)
    mi.optimize(other)
    assert torch.equal(generated(one, 1), generated(decoded_twin(one), 1))
    tokens = generated(other, 1)
    mi.restore(one)
    assert torch.equal(generated(other, 1), tokens)
    mi.restore(other)
    assert [list(snapshot(model)) for model in (one, other)] == before


def test_a_model_with_adapters_is_not_decoded_at_its_first_forward() -> None:
    """The hook that decodes it is that of the model inside."""
    peft = pytest.importorskip("peft")
    model = coded("int4")
    head = peft.LoraConfig(target_modules=["lm_head"], r=4, init_lora_weights=False)
    adapted = peft.get_peft_model(model, head).eval()
    before = list(snapshot(adapted))
    optimized_and_run(adapted)
    assert any(hasattr(linear, "weight_packed") for linear in coded_linears(adapted))
    mi.restore(adapted)
    assert list(snapshot(adapted)) == before


def test_codes_that_are_replaced_after_restore_are_freed() -> None:
    model = optimized_and_run(coded("int8"))
    mi.restore(model)
    linear = next(coded_linears(model))
    codes = StorageWeakRef(linear.weight.qdata.untyped_storage())
    linear.weight = nn.Parameter(torch.zeros(linear.weight.shape))
    gc.collect()
    assert codes.expired()


@pytest.mark.parametrize("quantizes_inputs", [False, True])
def test_a_weight_that_is_read_wrongly_is_an_error(monkeypatch, quantizes_inputs):
    """The library's own forward is compared with ours, so scales of other rows are noticed."""
    model = coded("int8")
    ids = torch.arange(4)[None]
    with torch.no_grad():
        before = model(ids).logits
    read = torchao._read

    def wrong(module):
        weight = read(module)
        codes, scales, *others = weight.tensors
        moved = (codes, scales.roll(1, 0), *others)
        return replace(weight, tensors=moved, quantizes_activations=quantizes_inputs)

    monkeypatch.setattr(torchao, "_read", wrong)
    with pytest.raises(OptimizeError, match="other results than its library"):
        mi.optimize(model, backend="cpu")
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)
