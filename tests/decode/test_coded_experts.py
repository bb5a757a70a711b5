"""Models whose experts hold codes: whole steps by kernels, right tokens, and exact restores."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import mirage_hf as mi
from mirage_hf.errors import OptimizeError
from mirage_hf.formats.experts import CodedExperts, coded_experts
from mirage_hf.trace.experts import ExpertsForm, form_of
from scripts.coded_models import coded_bytes, put_mxfp4, with_codes
from tests.decode.test_coded_models import generated, snapshot
from tests.helpers.coded_experts import (
    decoded_fp8,
    shape_of_blocks,
    with_names,
)
from tests.helpers.thorough import THOROUGH

pytestmark = pytest.mark.models

#: Float8 comes in blocks of 128, so this is the least width of a model of `with_codes`.
WIDTH = 128
SIZES: dict[str, Any] = dict(
    hidden_size=WIDTH,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=200,
    num_experts_per_tok=2,
    max_position_embeddings=128,
    eos_token_id=None,
    pad_token_id=0,
    initializer_range=0.2,
)


def fp8_model() -> tuple[Any, Any]:
    """Return a model of FP8Linear and FP8Experts, and its twin with decoded experts."""
    library = pytest.importorskip("transformers.integrations.finegrained_fp8")
    if not hasattr(PreTrainedModel, "get_experts_implementation"):
        pytest.skip("this transformers runs experts of float32 in another way")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **SIZES, num_experts=4, moe_intermediate_size=WIDTH, norm_topk_prob=True
    )
    plain = Qwen3MoeForCausalLM(config).eval()
    model = with_codes(copy.deepcopy(plain), "fp8")
    twin = copy.deepcopy(model)
    for n, layer in enumerate(model.model.layers):
        assert type(layer.mlp.experts) is library.FP8Experts
        experts = plain.model.layers[n].mlp.experts
        for name in ("gate_up_proj", "down_proj"):
            decoded = decoded_fp8(with_names(layer.mlp.experts), name, WIDTH)
            getattr(experts, name).data = decoded.float()
        experts.config = twin.config
        twin.model.layers[n].mlp.experts = experts
    return model, twin


def mxfp4_model() -> tuple[Any, Any]:
    """Return gpt-oss as transformers holds it in MXFP4, and its twin with decoded experts.

    The twin's experts have the weights that the library's own function decodes.
    """
    library = pytest.importorskip("transformers.integrations.mxfp4")
    if not hasattr(library, "mlp_forward"):
        pytest.skip("this transformers runs mixtures in MXFP4 by other functions")
    torch.manual_seed(0)
    config = GptOssConfig(**SIZES, num_local_experts=4, intermediate_size=64, sliding_window=32)
    model = GptOssForCausalLM(config).eval()
    twin = copy.deepcopy(model)
    for n, layer in enumerate(model.model.layers):
        plain = twin.model.layers[n].mlp.experts
        experts = library.Mxfp4GptOssExperts(config)
        for name in ("gate_up_proj", "down_proj"):
            shape = shape_of_blocks(getattr(experts, name))
            blocks = torch.randint(0, 256, shape, dtype=torch.uint8)
            scales = torch.randint(120, 124, blocks.shape[:-1], dtype=torch.uint8)
            getattr(experts, f"{name}_bias").data = getattr(plain, f"{name}_bias").data.float()
            decoded = library.convert_moe_packed_tensors(blocks, scales)
            getattr(plain, name).data = decoded.float()
            put_mxfp4(experts, name, blocks, scales)
        layer.mlp.experts = experts.eval()
        layer.mlp.forward = MethodType(library.mlp_forward, layer.mlp)
    return model, twin


MODELS = {"fp8": fp8_model, "mxfp4": mxfp4_model}


def optimized_twin(twin: nn.Module) -> nn.Module:
    """Return the twin, whose linears in codes run without kernels that must be fetched."""
    mi.optimize(twin)
    return twin


@pytest.mark.parametrize("kind", MODELS)
def test_steps_read_codes_and_give_the_tokens_of_decoded_experts(kind: str) -> None:
    model, twin = MODELS[kind]()
    before = list(snapshot(model))
    # tests/trace/test_coded_experts.py has kernels for several tokens
    sizes = (1, 3) if THOROUGH else (1,)
    mi.optimize(model, batch_sizes=sizes)
    report = model.mirage.report
    rows = [row for row in report.rows if row.part == "experts"]
    assert len(rows) == 2 * 2 * len(sizes) and all(row.status == "swapped" for row in rows), report
    experts = [m for m in model.modules() if isinstance(coded_experts(m), CodedExperts)]
    assert len(experts) == 2
    plain = optimized_twin(twin) if kind == "fp8" else twin
    for count in sizes:
        assert torch.equal(generated(model, count), generated(plain, count)), count
    assert model.mirage.report.decode["step: traced"] == len(sizes)
    mi.restore(model)
    assert list(snapshot(model)) == before


@pytest.mark.parametrize("kind", MODELS)
def test_a_copy_of_an_optimized_model_is_stock(kind: str) -> None:
    model, _ = MODELS[kind]()
    kinds = [type(m) for m in model.modules()]
    mi.optimize(model)
    assert [type(m) for m in copy.deepcopy(model).modules()] == kinds


def test_another_order_of_codes_is_an_error_with_its_name() -> None:
    """Such as the one that the library makes on Hopper."""

    class HopperMXValueLayout:
        pass

    model, _ = mxfp4_model()
    for layer in model.model.layers:
        layer.mlp.experts.gate_up_proj.storage.layout = HopperMXValueLayout()
    with pytest.raises(OptimizeError, match=r"HopperMXValueLayout.*dequantize=True"):
        mi.optimize(model)


@pytest.mark.parametrize(("kind", "allowed"), [("fp8", 0.04), ("mxfp4", 0.2)])
def test_benchmarks_give_experts_codes_near_their_weights(kind: str, allowed: float) -> None:
    pytest.importorskip(f"transformers.integrations.{'finegrained_fp8' if kind == 'fp8' else kind}")
    if kind == "fp8":
        config = Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=WIDTH)
        model: Any = Qwen3MoeForCausalLM(config).eval()
    else:
        model = GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=4, intermediate_size=64))
    plain = [form_of(layer.mlp.experts) for layer in model.model.layers]
    before = coded_bytes(model), coded_bytes(model, 16)
    with_codes(model, kind)
    for form, layer in zip(plain, model.model.layers, strict=True):
        coded = form_of(layer.mlp.experts, torch.float32)
        assert isinstance(coded, ExpertsForm) and isinstance(form, ExpertsForm) and coded.is_coded
        for a, b in ((form.first, coded.first), (form.second, coded.second)):
            for expert in range(4):
                x, y = a.decoded(expert, {}), b.decoded(expert, {})
                assert (x - y).norm() < allowed * x.norm()
    after = coded_bytes(model), coded_bytes(model, 16)
    assert after[0] < before[0] and after[0] < after[1] < before[1]
