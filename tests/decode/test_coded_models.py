"""Models whose linears hold codes: whole steps by kernels, right tokens, and exact restores."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import mirage_hf as mi
from mirage_hf.decode import explain_step
from mirage_hf.errors import OptimizeError
from mirage_hf.formats import CodedWeight, coded_weight
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.swap import coded_modules
from mirage_hf.swap.coded_forward import CodedBinding, decoding_program
from mirage_hf.swap.own_forward import FORWARD_KEY
from scripts.coded_models import CPU_FORMATS, coded_bytes, linears, with_codes
from tests.helpers import gguf_reference
from tests.helpers.thorough import THOROUGH

pytestmark = pytest.mark.models

LIBRARIES = {
    "int4": "compressed_tensors",
    "int4-zeros": "compressed_tensors",
    "int8": "torchao",
    "int8-and-head": "torchao",
    "fp8": "transformers",
    "fp8-and-head": "transformers",
    "nf4": "bitsandbytes",
    "hqq": "hqq.core.quantize",
}
FLOATS = ("nvfp4", "mxfp4")
#: Types of GGUF's blocks in models, by GGUF's number.
BLOCKS = {"q8_0": 8, "q6_k": 14}
OTHERS = ("gptq", "gptq act-order", "awq", "fp4", "nf4 nested")
KINDS = (*CPU_FORMATS, *OTHERS, *FLOATS, *BLOCKS)
NEW = 12


def small_llama(seed: int = 0, vocab_size: int = 200) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=vocab_size,
        max_position_embeddings=128,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config).eval()


def coded(kind: str) -> LlamaForCausalLM:
    if kind in ("gptq", "gptq act-order", "awq"):
        return with_words_of_gptqmodel(small_llama(), kind)
    if kind in ("fp4", "nf4 nested"):
        return with_codes_of_bitsandbytes(small_llama(), kind[:3], "nested" in kind)
    if kind in FLOATS:
        return with_floats_of_compressed_tensors(small_llama(), kind)
    if kind in BLOCKS:
        return with_blocks_of_gguf(small_llama(), BLOCKS[kind])
    pytest.importorskip(LIBRARIES[kind])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # blocks of float8 have 128 rows
        return with_codes(small_llama(vocab_size=256 if kind == "fp8-and-head" else 200), kind)


def with_words_of_gptqmodel(model: LlamaForCausalLM, kind: str) -> LlamaForCausalLM:
    """Replace the linears of a model's layers by those of GPT-QModel, with zero points."""
    kinds = {"gptq": ("torch", "TorchLinear"), "awq": ("torch_awq", "AwqTorchLinear")}
    file, name = kinds[kind.split()[0]]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        library = pytest.importorskip(f"gptqmodel.nn_modules.qlinear.{file}")
    for parent, child, linear in list(linears(model)):
        n, k = linear.weight.shape
        module = getattr(library, name)(
            bits=4,
            group_size=128,
            sym=False,
            desc_act=kind == "gptq act-order",
            in_features=k,
            out_features=n,
            register_buffers=True,
        )
        order = torch.arange(k) // 128
        if kind == "gptq act-order":
            order = order[torch.randperm(k)]
        groups = linear.weight.detach()[:, order.argsort(stable=True)].unflatten(1, (-1, 128))
        low, high = groups.amin(-1), groups.amax(-1)
        scales = ((high - low) / 15).half()
        zeros = (-low / scales).round()
        pack = module.pack if kind == "awq" else module.pack_original
        pack(linear, scales, zeros, order.to(torch.int32))
        setattr(parent, child, module.eval())
    return model


def with_codes_of_bitsandbytes(
    model: LlamaForCausalLM, kind: str, nested: bool
) -> LlamaForCausalLM:
    """Replace the linears of a model's layers by those of bitsandbytes with 4 bits."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    for parent, child, linear in list(linears(model)):
        n, k = linear.weight.shape
        module = bitsandbytes.nn.Linear4bit(
            k,
            n,
            bias=False,
            compute_dtype=torch.float32,
            compress_statistics=nested,
            quant_type=kind,
        )
        module.load_state_dict(linear.state_dict())
        setattr(parent, child, module.to("cpu").eval())
    return model


def with_floats_of_compressed_tensors(model: LlamaForCausalLM, kind: str) -> LlamaForCausalLM:
    """Compress the linears of a model's layers to floats of 4 bits."""
    from tests.formats import test_compressed_tensors_fp4 as made

    for _, _, linear in linears(model):
        made.compressed(linear, f"{kind.upper()}A16")
    return model


def with_blocks_of_gguf(model: LlamaForCausalLM, kind: int) -> LlamaForCausalLM:
    """Replace the linears of a model's layers by those that hold blocks of GGUF.

    Blocks of 256 codes are random, because no library of Python makes them.
    """
    from tests.formats import test_gguf as made

    for seed, (parent, child, linear) in enumerate(list(linears(model))):
        module = made.filled(linear)
        if kind in made.K_TYPES.values():
            rows, columns = linear.weight.shape
            module = made.gguf.GgufLinear(columns, rows, kind)
            blocks = gguf_reference.random_blocks(kind, rows, columns, seed)
            module.weight.data = blocks
            module.eval()
        setattr(parent, child, module)
    return model


def decoded_twin(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return a stock model whose plain weights are what the codes of another model decode to."""
    plain = small_llama(vocab_size=model.config.vocab_size)
    for path, module in model.named_modules():
        weight = coded_weight(module, torch.float32)
        if isinstance(weight, CodedWeight):
            w = run_kernel_graph(decoding_program(weight.coding), list(weight.tensors))[0]
            plain.get_submodule(path).weight.data.copy_(w)
    return plain


def generated(model: Any, rows: int) -> Tensor:
    ids = torch.arange(1, 1 + 7 * rows).view(rows, 7) % 199 + 1
    mask = torch.ones_like(ids)
    if rows > 1:
        ids[0, :2], mask[0, :2] = 0, 0
    return model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)


def snapshot(model: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Yield what must be as before after `restore()`."""
    for name, module in model.named_modules():
        state = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_buffers")}
        tensors = {**module._parameters, **module._buffers}
        yield (
            name,
            type(module),
            sorted(state),
            state.get("forward"),
            {k: id(v) for k, v in tensors.items()},
        )
        yield name, list(module._forward_pre_hooks.items())


@pytest.mark.parametrize(
    # other versions of transformers store blocks of GGUF alike, so one type of them is enough there
    "kind",
    [pytest.param(x, marks=[pytest.mark.slow] * (x == "q6_k")) for x in KINDS],
)
def test_steps_read_codes_and_give_the_tokens_of_decoded_weights(kind: str) -> None:
    model = coded(kind)
    plain = decoded_twin(model)
    before = list(snapshot(model))
    # kernels for several rows read codes as those for one row do
    sizes = (1, 3) if THOROUGH or kind == "int8" else (1,)
    mi.optimize(model, batch_sizes=sizes)
    report = model.mirage.report
    products = [row for row in report.rows if row.pattern == "traced"]
    missing = [row for row in products if row.status != "swapped"]
    assert products and not missing, report
    assert "searched kernels read 100% of the bytes" in str(report), report
    for rows in sizes:
        assert torch.equal(generated(model, rows), generated(plain, rows)), rows
    assert model.mirage.report.decode["step: traced"] == len(sizes)
    mi.restore(model)
    assert list(snapshot(model)) == before


@pytest.mark.parametrize("kind", ["int4-zeros", "int8-and-head", "nf4"])
def test_prompts_decode_large_weights_part_by_part(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coded_modules, "DECODED_BYTES", 1 << 17)  # weights have up to twice as many
    model = coded(kind)
    plain = decoded_twin(model)
    mi.optimize(model)
    bindings = [vars(m).get(FORWARD_KEY) for m in model.modules()]
    assert {len(b.decoding.parts) for b in bindings if isinstance(b, CodedBinding)} == {1, 2}
    assert torch.equal(generated(model, 1), generated(plain, 1))
    mi.restore(model)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_head_is_in_codes_only_if_it_is_asked_for(kind: str) -> None:
    with_head = coded(f"{kind}-and-head")
    without = with_codes(small_llama(vocab_size=with_head.config.vocab_size), kind)
    assert isinstance(coded_weight(with_head.lm_head, torch.float32), CodedWeight)
    assert not isinstance(coded_weight(without.lm_head, torch.float32), CodedWeight)
    rows, columns = without.lm_head.weight.shape
    # a byte in place of a float32. For each row, int8 has a scale and a zero point of one byte.
    # float8 has a scale for each block of 128 by 128.
    scales = 5 * rows if kind == "int8" else 4 * (rows // 128) * (columns // 128)
    assert coded_bytes(without) - coded_bytes(with_head) == 3 * rows * columns - scales


@pytest.mark.parametrize("kind", ["int8", "nf4 nested", "hqq"])
def test_adapters_over_codes_are_read_by_kernels(kind: str) -> None:
    """As in QLoRA: PEFT's adapters are plain, and their base weights are codes."""
    peft = pytest.importorskip("peft")
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    base = coded(kind)
    plain = decoded_twin(base)
    config = peft.LoraConfig(r=8, target_modules=names, init_lora_weights=False)
    model, twin = (peft.get_peft_model(m, config).eval() for m in (base, plain))
    adapters = {name: x for name, x in model.state_dict().items() if "lora_" in name}
    assert len(adapters) == 2 * 2 * len(names)
    assert not twin.load_state_dict(adapters, strict=False).unexpected_keys
    before = list(snapshot(model))
    mi.optimize(model, batch_sizes=(1, 3))
    report = model.mirage.report
    assert "searched kernels read 100% of the bytes" in str(report), report
    for rows in (1, 3):
        assert torch.equal(generated(model, rows), generated(twin, rows)), rows
    assert model.mirage.report.decode["step: traced"] == 2
    mi.restore(model)
    assert list(snapshot(model)) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_an_optimized_model_is_stock(kind: str) -> None:
    model = coded(kind)
    kinds = [type(m) for m in model.modules()]
    mi.optimize(model)
    twin = copy.deepcopy(model)
    assert [type(m) for m in twin.modules()] == kinds
    assert not any("mirage" in key for m in twin.modules() for key in vars(m) if key != "mirage")
    # stock's products of "fp8" and of GGUF's blocks need kernels. Floats of 4 bits run in bfloat16
    if kind not in ("fp8", "fp8-and-head", *BLOCKS, *FLOATS):
        assert torch.equal(generated(twin, 1), generated(decoded_twin(model), 1))
    mi.restore(model)


def test_no_library_decodes_the_whole_model_at_its_first_forward() -> None:
    model = coded("int4")
    mi.optimize(model)
    generated(model, 1)
    assert all(
        hasattr(linear, "weight_packed")
        for linear in model.model.layers[0].mlp.children()
        if isinstance(linear, nn.Linear)
    )
    mi.restore(model)
    assert len(model._forward_pre_hooks) == 1


@pytest.mark.parametrize("kind", CPU_FORMATS)
def test_a_stock_model_is_explained_and_left_as_it_is(kind: str) -> None:
    model = coded(kind)
    before = list(snapshot(model))
    kernels, _ = explain_step(model)
    assert all(row.bytes and not row.why for row in kernels if "proj" in row.what)
    assert list(snapshot(model)) == before


def test_codes_that_are_replaced_after_optimize_are_read_from_then_on() -> None:
    model = coded("int8")
    mi.optimize(model)
    generated(model, 1)
    other = with_codes(small_llama(seed=1), "int8")
    for name, parameter in other.named_parameters():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, parameter)
    assert torch.equal(generated(model, 1), generated(decoded_twin_of(other), 1))
    mi.restore(model)


def decoded_twin_of(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return the decoded twin of a model of seed 1, whose embeddings and norms differ, too."""
    plain = decoded_twin(model)
    own = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        if name in own and parameter.dtype == torch.float32 and type(parameter) is nn.Parameter:
            own[name].data.copy_(parameter)
    return plain


def test_blocks_of_gguf_in_embedding_and_head(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("transformers.integrations.gguf.kernels")
    from tests.formats import test_gguf as made

    monkeypatch.setattr(kernels, "_gguf_kernel", False)  # so that none is looked for
    model = coded("q8_0")
    plain = decoded_twin(model)
    model.lm_head = made.filled(model.lm_head)
    embedding = made.gguf.GgufEmbedding(200, 256, made.dequant.GGML_Q8_0, torch.float32)
    embedding.weight = model.lm_head.weight
    model.model.embed_tokens = embedding.eval()
    decoded = nn.Parameter(made.weight_of(model.lm_head))
    plain.model.embed_tokens.weight = plain.lm_head.weight = decoded
    mi.optimize(model)
    assert torch.equal(generated(model, 1), generated(plain, 1))
    report = model.mirage.report
    assert report.decode["step: traced"] == 1 and "traced (lm_head)" in str(report), report


def test_linears_of_several_formats_and_plain_ones_share_a_step() -> None:
    pytest.importorskip("torchao")
    model = small_llama()
    fp8 = with_codes(small_llama(), "fp8")
    int8 = with_codes(small_llama(), "int8")
    for layer, a, b in zip(model.model.layers, fp8.model.layers, int8.model.layers, strict=True):
        layer.self_attn.q_proj, layer.self_attn.o_proj = a.self_attn.q_proj, a.self_attn.o_proj
        layer.mlp.up_proj, layer.mlp.gate_proj = b.mlp.up_proj, b.mlp.gate_proj
    plain = decoded_twin(model)
    mi.optimize(model)
    assert "searched kernels read 100% of the bytes" in str(model.mirage.report)
    assert torch.equal(generated(model, 1), generated(plain, 1))
    mi.restore(model)


def test_linears_that_are_not_read_run_their_librarys_code_and_are_named() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = coded("int8")
    other = quantization.Float8WeightOnlyConfig(weight_dtype=torch.float8_e5m2)
    heads = [layer.self_attn.o_proj for layer in model.model.layers]
    for head, plain in zip(heads, small_llama().model.layers, strict=True):
        head.weight = nn.Parameter(plain.self_attn.o_proj.weight.detach())
    quantization.quantize_(model, other, filter_fn=lambda m, _: m in heads)
    stock = generated(model, 1)
    mi.optimize(model)
    report = model.mirage.report
    rows = [row for row in report.rows if row.module.endswith("o_proj")]
    assert len(rows) == 2 and all("float8_e5m2" in row.reason for row in rows), report
    assert "read 100%" not in str(report)
    assert torch.equal(generated(model, 1), stock)


def test_a_format_that_is_not_read_is_an_error_with_its_name() -> None:
    model = coded("int4")
    for _, _, linear in linears(model):
        linear.weight_g_idx = nn.Parameter(torch.zeros(256, dtype=torch.int32), requires_grad=False)
    with pytest.raises(OptimizeError, match="act-order"):
        mi.optimize(model)


def test_a_model_that_a_library_has_decoded_is_plain() -> None:
    """compressed-tensors leaves plain weights behind, and its settings on each linear."""
    model = coded("int4")
    generated(model, 1)
    with pytest.raises(OptimizeError, match="optimize the model before it runs"):
        mi.optimize(model)
