"""Models whose experts hold codes: whole steps by kernels, right tokens, and exact restores."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    TorchAoConfig,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

import mirage_hf as mi
from mirage_hf.errors import OptimizeError, OptimizeWarning
from mirage_hf.formats.experts import CodedExperts, coded_experts
from mirage_hf.match.matcher import match
from mirage_hf.patterns import PATTERNS
from mirage_hf.trace.experts.decoded import decoded_weights
from mirage_hf.trace.experts.form import ExpertsForm, form_of
from scripts.coded_models import (
    coded_bytes,
    put_mxfp4,
    with_codes,
    with_library_of_mxfp4,
)
from tests.decode.test_coded_models import generated, snapshot
from tests.helpers import torchao_tensors
from tests.helpers.coded_experts import Make, decoded_fp8, shape_of_blocks, with_names
from tests.helpers.hopper_order import HopperMXValueLayout, put_in_hopper_order
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


def torchao_model(make: Make) -> tuple[Any, Any]:
    """Return a model whose experts have parameters of torchao, and its twin with plain ones.

    The library makes int4 on a GPU only, so the weights are made here, and not by its `quantize_`.
    """
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **SIZES, num_experts=4, moe_intermediate_size=WIDTH, norm_topk_prob=True
    )
    model = Qwen3MoeForCausalLM(config).eval()
    twin = copy.deepcopy(model)
    for layer, plain in zip(model.model.layers, twin.model.layers, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            made, weight = make(getattr(layer.mlp.experts, name).detach())
            setattr(layer.mlp.experts, name, nn.Parameter(made, requires_grad=False))
            getattr(plain.mlp.experts, name).data = weight.float()
    if not hasattr(model, "get_experts_implementation"):
        pytest.skip("this transformers has no experts by name")
    return model, twin


def hopper_model() -> tuple[Any, Any]:
    """Return gpt-oss with codes in the order for Hopper, and its twin with decoded experts."""
    model, twin = mxfp4_model()
    for layer in model.model.layers:
        put_in_hopper_order(layer.mlp.experts)
    return model, twin


MODELS = {
    "fp8": fp8_model,
    "mxfp4": mxfp4_model,
    "mxfp4 of Hopper": hopper_model,
    "int4 of torchao": lambda: torchao_model(torchao_tensors.of_rows(32)),
    "int8 of torchao": lambda: torchao_model(torchao_tensors.of_bytes("Int8", group=64)),
}


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
    rows = [row for row in report.rows if row.part.startswith("experts")]
    assert len(rows) == 2 * 2 * len(sizes) and all(row.status == "swapped" for row in rows), report
    experts = [m for m in model.modules() if isinstance(coded_experts(m), CodedExperts)]
    assert len(experts) == 2
    plain = optimized_twin(twin) if kind == "fp8" else twin
    for count in sizes:
        assert torch.equal(generated(model, count), generated(plain, count)), count
    how = "all by kernels" if kind.startswith("mxfp4") else "traced"
    assert model.mirage.report.decode[f"step: {how}"] == len(sizes)
    mi.restore(model)
    assert list(snapshot(model)) == before


def test_layers_are_matched_whose_experts_need_kernels_of_a_library() -> None:
    """The library's kernels are missing here, so its forward of the mixture raises."""
    model, _ = MODELS["mxfp4"]()
    with pytest.raises((AttributeError, ImportError, NameError, RuntimeError)):
        model.model.layers[0].mlp(torch.zeros(1, 1, model.config.hidden_size))
    found = match(model, list(PATTERNS), model)
    assert [m.kind for m in found.modules] == ["layer", "layer"], found.rejected
    assert all(m.mlp_stand_in is not None for m in found.modules)


@pytest.mark.parametrize("kind", MODELS)
def test_a_copy_of_an_optimized_model_is_stock(kind: str) -> None:
    model, _ = MODELS[kind]()

    def of_modules(x: Any) -> list[Any]:
        forwards = [vars(m).get("forward") for m in x.modules()]
        functions = [getattr(forward, "__func__", None) for forward in forwards]
        bound = [f is None or f.__self__ is m for f, m in zip(forwards, x.modules(), strict=True)]
        return [[type(m) for m in x.modules()], functions, bound]

    before = of_modules(model)
    mi.optimize(model)
    assert of_modules(copy.deepcopy(model)) == before


def loaded(config: Any, path: Any, **settings: Any) -> Any:
    """Return a model that transformers quantizes with torchao while it loads it."""
    library = pytest.importorskip("torchao.quantization")
    experts = r"re:.*\.experts\.(gate_up|down)_proj"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_name = library.FqnToConfig({experts: config, "_default": library.Int8WeightOnlyConfig()})
        quantization = TorchAoConfig(by_name)
        return AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, quantization_config=quantization, **settings
        )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **SIZES, num_experts=4, moe_intermediate_size=WIDTH, norm_topk_prob=True
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def checkpoint_of(model: Any, path: Path) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Save a model, and return its config, the tensors of its file as lists, and what it says."""
    model.save_pretrained(path)
    with safe_open(path / "model.safetensors", "pt") as file:
        tensors = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
        said = file.metadata()
    return (path / "config.json").read_text(), {n: x.tolist() for n, x in tensors.items()}, said


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_transformers_loads_saves_and_loads_them_again(kind: str, saved: Path) -> None:
    """Stock's own products cannot run int4 experts of torchao, on any device."""
    library = pytest.importorskip("torchao.quantization")
    if kind == "int4":
        config = library.Int4WeightOnlyConfig(group_size=32)
    else:
        config = library.Int8WeightOnlyConfig()
    with torchao_tensors.packing():
        model = loaded(config, saved)
    plain = torchao_tensors.with_decoded(copy.deepcopy(model))
    before = checkpoint_of(model, saved / "before")
    if kind == "int4":
        for name in ("eager", "batched_mm", "grouped_mm"):
            model.set_experts_implementation(name)
            with pytest.raises(NotImplementedError, match="Int4Tensor"):
                model(torch.zeros(1, 4, dtype=torch.long))
    mi.optimize(model)
    rows = [row for row in model.mirage.report.rows if row.part == "experts"]
    assert len(rows) == 2 * 2 and all(row.status == "swapped" for row in rows)
    wanted = generated(optimized_twin(plain), 1)
    assert torch.equal(generated(model, 1), wanted)
    assert model.mirage.report.decode["step: traced"] == 1
    assert checkpoint_of(model, saved / "optimized") == before
    mi.restore(model)
    assert checkpoint_of(model, saved / "restored") == before
    again = AutoModelForCausalLM.from_pretrained(saved / "before", dtype=torch.float32)
    mi.optimize(again)
    assert torch.equal(generated(again, 1), wanted)


def test_models_that_ask_for_experts_by_name_run_them(saved: Path) -> None:
    library = pytest.importorskip("torchao.quantization")
    with torchao_tensors.packing():
        config = library.Int4WeightOnlyConfig(group_size=32)
        model = loaded(config, saved, experts_implementation="mirage")
    plain = torchao_tensors.with_decoded(copy.deepcopy(model))
    text = torch.arange(1, 21)[None]
    with torch.no_grad():
        far = (model(text).logits - plain(text).logits).abs().max()
    assert far < 1e-4


def test_experts_whose_tensors_are_not_read_are_an_error_that_says_why(saved: Path) -> None:
    """One scale for all experts together."""
    library = pytest.importorskip("torchao.quantization")
    config = library.Float8WeightOnlyConfig(granularity=library.PerTensor())
    model = loaded(config, saved)
    for layer in model.model.layers:  # plain linears, so the model has no codes that are read
        layer.self_attn = Qwen3MoeAttention(model.config, layer.self_attn.layer_idx)
    with pytest.raises(OptimizeError, match=r"gate_up_proj: blocks of \(4, 256, 128\)"):
        mi.optimize(model)


def test_a_model_whose_experts_are_not_read_stays_stock_and_says_why(saved: Path) -> None:
    """Its linears could be read."""
    library = pytest.importorskip("torchao.quantization")
    model = loaded(library.Int8WeightOnlyConfig(), saved, experts_implementation="eager")
    for layer in model.model.layers:
        layer.mlp.experts.down_proj.act_pre_scale = torch.ones(WIDTH)
    kinds, text = [type(m) for m in model.modules()], torch.arange(1, 9)[None]
    with torch.no_grad():
        before = model(text).logits
        with pytest.warns(OptimizeWarning, match=r"the codes of model.layers.0.mlp.experts"):
            mi.optimize(model)
        assert [type(m) for m in model.modules()] == kinds
        assert torch.equal(model(text).logits, before)


def stored(model: Any) -> list[tuple[Any, ...]]:
    """Return where the codes of a model's experts are, their order, and their bytes."""
    names = ("gate_up_proj", "down_proj")
    storages = [getattr(x.mlp.experts, n).storage for x in model.model.layers for n in names]
    return [(id(x.data), x.layout, x.data.tolist()) for x in storages]


def plain_bytes(model: Any) -> list[Any]:
    """Return the bytes that transformers saves for the experts of a model."""
    names = ("gate_up_proj", "down_proj")
    storages = [getattr(x.mlp.experts, n).storage for x in model.model.layers for n in names]
    return [x.layout.unswizzle_data(x.data).tolist() for x in storages]


def test_codes_in_the_order_of_their_library_are_rewritten_and_put_back() -> None:
    model, _ = hopper_model()
    before, saved = stored(model), plain_bytes(model)
    report = mi.optimize(model, dry_run=True)
    assert "experts" in str(report) and stored(model) == before
    mi.optimize(model)
    assert plain_bytes(model) == saved
    copied = copy.deepcopy(model)
    assert stored(model) != before
    mi.restore(model)
    assert stored(model) == before
    assert plain_bytes(copied) == saved  # a copy of an optimized model is a stock model
    mi.optimize(model, patterns=["rms_norm_linear"])  # other blocks: stock runs the experts
    assert stored(model) == before


def test_a_failure_puts_rewritten_codes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = hopper_model()
    before = stored(model)

    def failing(*_: Any, **__: Any) -> None:
        assert stored(model)[0] != before[0]
        raise RuntimeError("no steps")

    monkeypatch.setattr("mirage_hf.decode.trace_steps", failing)
    with pytest.raises(RuntimeError, match="no steps"):
        mi.optimize(model)
    assert stored(model) == before


def test_experts_of_two_optimized_models_are_rewritten_until_both_are_restored() -> None:
    first, twin = hopper_model()
    second, _ = hopper_model()
    second.model, second.lm_head = first.model, first.lm_head
    before, library = stored(first), first.model.layers[0].mlp.forward
    wanted = generated(twin, 1)
    mi.optimize(first)
    mi.optimize(second)
    mi.restore(first)
    assert torch.equal(generated(second, 1), wanted) and stored(first) != before
    mi.restore(second)
    assert stored(first) == before and first.model.layers[0].mlp.forward == library


@pytest.mark.gpu
def test_its_library_computes_the_same_before_and_after() -> None:
    """On a GPU with `triton_kernels`: stock, optimized, a copy of that, and restored."""
    if with_library_of_mxfp4() is None:
        pytest.skip("triton_kernels is not installed")
    sizes = {**SIZES, "hidden_size": 256, "initializer_range": 0.05}
    config = GptOssConfig(**sizes, num_local_experts=4, intermediate_size=256, sliding_window=32)
    torch.manual_seed(0)
    model: Any = GptOssForCausalLM(config).to("cuda", torch.bfloat16).eval()
    with_codes(model, "mxfp4")
    layout = type(model.model.layers[0].mlp.experts.down_proj.storage.layout).__name__
    before, saved = stored(model), plain_bytes(model)
    text = torch.arange(1, 41, device="cuda")[None]

    def logits(of: Any) -> torch.Tensor:
        with torch.no_grad():
            return of(text).logits.float()

    stock = logits(model)
    mi.optimize(model)
    assert plain_bytes(model) == saved
    assert (stored(model) != before) == (layout != "StridedLayout")
    far = (logits(model) - stock).norm() / stock.norm()
    assert far < 0.05
    copied = copy.deepcopy(model)
    assert (logits(copied) - stock).norm() / stock.norm() < 0.05
    tokens = model.generate(text, max_new_tokens=8, do_sample=False)
    assert tokens.shape == copied.generate(text, max_new_tokens=8, do_sample=False).shape
    assert model.mirage.report.decode["step: all by kernels"] == 1
    mi.restore(model)
    assert stored(model) == before and torch.equal(logits(model), stock)


def test_an_order_that_does_not_lead_back_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its library loses bits of the last expert of the second layer."""
    model, _ = hopper_model()
    before = stored(model)
    storage = model.model.layers[1].mlp.experts.down_proj.storage
    of_last = storage.layout.unswizzle_data(storage.data[-1:])
    right = HopperMXValueLayout.unswizzle_data

    def wrong(self: Any, data: torch.Tensor) -> torch.Tensor:
        plain = right(self, data)
        return plain & 254 if torch.equal(plain, of_last) else plain

    monkeypatch.setattr(HopperMXValueLayout, "unswizzle_data", wrong)
    with pytest.raises(OptimizeError, match=r"layers.1.mlp.experts: .*HopperMXValueLayout"):
        mi.optimize(model)
    assert stored(model) == before


def test_an_order_that_its_library_does_not_convert_is_an_error_with_its_name() -> None:
    class FutureLayout:
        pass

    model, _ = mxfp4_model()
    for layer in model.model.layers:
        layer.mlp.experts.gate_up_proj.storage.layout = FutureLayout()
    with pytest.raises(OptimizeError, match=r"FutureLayout.*dequantize=True"):
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
                x, y = (decoded_weights(linear, expert, 1, {})[0] for linear in (a, b))
                assert (x - y).norm() < allowed * x.norm()
    after = coded_bytes(model), coded_bytes(model, 16)
    assert after[0] < before[0] and after[0] < after[1] < before[1]
