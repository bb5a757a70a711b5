"""Chosen experts in codes: their programs read the codes, and compute what decoded experts do."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.errors import Rejected
from mirage_hf.experts_interface import Experts
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.search.engine import search
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.trace.experts import decoded
from mirage_hf.trace.experts.decoded import run_decoded
from mirage_hf.trace.experts.form import ExpertsForm, form_of
from mirage_hf.trace.experts.programs import ParameterSlice
from mirage_hf.trace.step_ops import RegionRun
from scripts.coded_models import put_mxfp4
from tests.helpers import (
    coded_experts,
    coded_modules,
    coded_mutants,
    torchao_tensors,
    triton_interpreter,
)
from tests.helpers.coded_experts import CODED, given, operands_of, plan_of
from tests.helpers.coded_mutants import CodedProgram
from tests.helpers.thorough import THOROUGH, count
from tests.helpers.traced_functions import results_of, runs

DTYPES = [torch.float32, torch.bfloat16]


def exact(plain: nn.Module, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return what decoded experts compute in float64."""
    with torch.no_grad():
        return ALL_EXPERTS_FUNCTIONS["batched_mm"](plain, x.double(), index, weights.double())


def far(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> float:
    """Return the largest error in units of what is allowed."""
    allowed = 8 * torch.finfo(dtype).eps * wanted.abs().max()
    return float((found.double() - wanted).abs().max() / allowed)


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3])
def test_two_programs_compute_what_decoded_experts_do(
    name: str, dtype: torch.dtype, tokens: int
) -> None:
    module, plain = CODED[name]()
    inputs = given(tokens, dtype, name)
    plan = plan_of(module, inputs)
    found = [region for region in plan.regions if region.kind == "experts"]
    assert len(found) == 2
    form = form_of(module, dtype)
    assert isinstance(form, ExpertsForm)
    whole = sum(x.nbytes for x in form.parameters)
    chosen = min(tokens * coded_experts.CHOSEN, coded_experts.EXPERTS)
    assert sum(region.reads for region in found) <= whole * chosen // coded_experts.EXPERTS
    held = {x.untyped_storage().data_ptr() for x in coded_experts.parameters_of(module)}
    assert all(x.untyped_storage().data_ptr() in held for x in form.parameters)
    plan.schedule({}, regions={region: RegionRun(runs(region.graph)) for region in found})
    assert sum(u.region is not None for u in plan.step_ops) == 2
    wanted = exact(plain, *inputs.values())
    (ours,) = results_of(plan, inputs, (wanted.to(dtype),))
    assert far(ours, wanted, dtype) < 1


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_kernels_weights_are_decoded(name: str, dtype: torch.dtype) -> None:
    module, plain = CODED[name]()
    inputs = given(5, dtype, name)
    inputs["index"][1] = inputs["index"][0, :1]  # one expert twice
    form = form_of(module, dtype)
    assert isinstance(form, ExpertsForm)
    wanted = exact(plain, *inputs.values())
    assert far(run_decoded(form, *inputs.values()), wanted, dtype) < 1
    plan = plan_of(module, inputs)
    plan.schedule({})
    assert far(results_of(plan, inputs, (wanted.to(dtype),))[0], wanted, dtype) < 1


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("at_once", [1, 2, 3, 6])
@pytest.mark.parametrize("scales_inputs", [False, True])
def test_products_of_a_few_decoded_experts_at_a_time(
    name: str, at_once: int, scales_inputs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, plain = CODED[name]()
    inputs = given(9, torch.bfloat16, name)
    inputs["index"][1] = coded_experts.EXPERTS  # no expert, or one of another rank
    inputs["index"][2, 0] = -1
    every_expert = torch.arange(coded_experts.EXPERTS)
    inputs["index"][3:6] = every_expert.view(3, coded_experts.CHOSEN)
    found = form_of(module, torch.bfloat16)
    assert isinstance(found, ExpertsForm)
    form = replace(found, scales_inputs=scales_inputs)
    wanted = torch.stack([exact(plain, *one).sum(0) for one in rows_of(inputs, scales_inputs)])
    sizes = [n.rows * n.columns * 2 for n in (form.first, form.second)]
    monkeypatch.setattr(decoded, "_DECODED_BYTES", at_once * max(sizes))
    if decoded._GROUPED_MM is None:
        pytest.skip("this torch has no grouped products")
    products = []

    def grouped(x: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
        products.append(len(weights))
        return torch.nn.functional.grouped_mm(x, weights, offs=offs)

    monkeypatch.setattr(decoded, "_GROUPED_MM", grouped)
    assert far(run_decoded(form, *inputs.values()), wanted, torch.bfloat16) < 1
    assert sum(products) == 2 * coded_experts.EXPERTS
    assert max(products) >= at_once
    # a graph that is captured takes every expert, and gives the same
    every = decoded._run_grouped(form, *inputs.values(), range(coded_experts.EXPERTS), {})
    assert torch.equal(every, run_decoded(form, *inputs.values()))


def rows_of(inputs: dict[str, Tensor], scales_inputs: bool) -> Iterator[tuple[Tensor, ...]]:
    """Iterate over tokens with the experts that they chose, those without one left out."""
    for x, index, weights in zip(*inputs.values(), strict=True):
        kept = (index >= 0) & (index < coded_experts.EXPERTS)
        index, weights = torch.where(kept, index, 0), torch.where(kept, weights, 0)
        if not scales_inputs:
            yield x[None], index[None], weights[None]
            continue
        scaled = (x[None] * weights[:, None]).to(x.dtype)
        yield scaled, index[:, None], kept[:, None].to(weights.dtype)


@pytest.mark.parametrize(
    "name",
    [  # its kernels are searched, proven and compiled by other tests, and called as the others are
        pytest.param(name, marks=pytest.mark.thorough)
        if name == "Int4TilePackedTo4dTensor"
        else name
        for name in CODED
    ],
)
def test_experts_by_name_run_kernels(name: str) -> None:
    module, plain = CODED[name]()
    ours = Experts(backend="cpu")
    inputs = given(2, torch.float32, name)
    found = ours.forward(module, *inputs.values())
    assert far(found, exact(plain, *inputs.values()), torch.float32) < 1
    assert sum(ours.report().by_kernels.values()) == 1 and not ours.report().by_torch
    many = given(40, torch.float32, name)
    found = ours.forward(module, *many.values())
    assert far(found, exact(plain, *many.values()), torch.float32) < 1
    assert list(ours.report().by_torch) == ["more than 16 tokens"]


def programs(name: str, dtype: torch.dtype, tokens: int = 2) -> list[Any]:
    module, _ = CODED[name]()
    plan = plan_of(module, given(tokens, dtype, name))
    return [region.graph for region in plan.regions if region.kind == "experts"]


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("part", [0, 1])
def test_one_kernel_is_found_and_proven(name: str, part: int) -> None:
    program = programs(name, torch.float16)[part]
    assert coded_modules.proven_as_one_kernel(program)
    best = search(program, SearchOptions(threads=1))[0][0].ugraph
    (block,) = (op.block for op in best.kernels.ops if op.block is not None)
    taken = [i for i in block.inputs if i.taken is not None]
    assert len(taken) >= 2  # codes and scales


def of_real_sizes(name: str) -> tuple[Any, int, int]:
    """Return the experts of a layer of a model on the meta device, their width and choices."""
    config: Any = Qwen3MoeConfig(
        hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8
    )
    if name in REAL_TENSORS:
        with torch.device("meta"):
            module = Qwen3MoeExperts(config)
        for parameter, make in zip(("gate_up_proj", "down_proj"), REAL_TENSORS[name], strict=True):
            made = make(getattr(module, parameter).shape)
            setattr(module, parameter, nn.Parameter(made, requires_grad=False))
        return module, 2048, 8
    if name == "FP8Experts":
        library = pytest.importorskip("transformers.integrations.finegrained_fp8")
        with torch.device("meta"):
            module = coded_experts.with_names(library.FP8Experts(config, block_size=(128, 128)))
        return module.requires_grad_(False), 2048, 8
    library = pytest.importorskip("transformers.integrations.mxfp4")
    config = GptOssConfig(hidden_size=2880, intermediate_size=2880, num_local_experts=32)
    with torch.device("meta"):
        module = library.Mxfp4GptOssExperts(config)
        for linear in ("gate_up_proj", "down_proj"):
            blocks = getattr(module, linear).data
            put_mxfp4(module, linear, blocks, torch.empty(blocks.shape[:-1], dtype=torch.uint8))
    return module.requires_grad_(False), 2880, 4


_rows, _tiles = torchao_tensors.empty_rows, torchao_tensors.empty_tiles
_int8, _float8 = (partial(torchao_tensors.empty_bytes, kind) for kind in ("Int8", "Float8"))

#: What makes the two parameters of experts on the meta device.
REAL_TENSORS = {
    "Int4Tensor": (_rows, _rows),
    "Int4TilePackedTo4dTensor": (_tiles, _tiles),
    "Int8Tensor": (_int8, _int8),
    "Float8Tensor": (_float8, _float8),
    "Int8Tensor and Int4Tensor": (_int8, _rows),
}


OF_MODELS = ("FP8Experts", "Mxfp4GptOssExperts", *REAL_TENSORS)


@pytest.mark.parametrize(
    ("tokens", "name"),
    [
        *((1, name) for name in OF_MODELS),
        *(  # codes of 4 bits and of 8, with several tokens
            (4, name)
            if name in ("FP8Experts", "Int4Tensor")
            else pytest.param(4, name, marks=pytest.mark.thorough)
            for name in OF_MODELS
        ),
    ],
)
def test_kernels_of_models_compile_for_a_gpu(name: str, tokens: int) -> None:
    """Qwen3-30B-A3B in float8 and with tensors of torchao, and gpt-oss-20b in MXFP4."""
    pytest.importorskip("triton")
    module, width, chosen = of_real_sizes(name)
    with torch.device("meta"):
        inputs = {
            "x": torch.empty(tokens, width, dtype=torch.bfloat16),
            "index": torch.empty(tokens, chosen, dtype=torch.long),
            "weights": torch.empty(tokens, chosen, dtype=torch.bfloat16),
        }
    plan = plan_of(module, inputs)
    assert len(plan.regions) == 2
    for region in plan.regions:
        best = search(region.graph, SearchOptions(threads=1))[0][0].ugraph
        assert best.num_kernels == 1
        (kernel,) = compiler.ahead_of_time(triton.generate(best), 90)
        assert kernel.asm["cubin"]


def errors_of_kernels(name: str, dtypes: int, kernels: int) -> list[Any]:
    """Return the errors of the first kernels of each program, beside those of torch."""
    errors = []
    for dtype in DTYPES[-dtypes:]:
        module, _ = CODED[name]()
        inputs = given(2, dtype, name)
        plan = plan_of(module, inputs)
        for n, region in enumerate(r for r in plan.regions if r.kind == "experts"):
            graph = region.graph
            operands = operands_of(region, inputs)
            (want,) = run_kernel_graph(graph, operands, torch.float64)
            (eager,) = run_kernel_graph(graph, operands)
            torchs = float((eager - want).abs().max())
            allowed = 2 * torchs + 8 * torch.finfo(dtype).eps * float(want.abs().max())
            for candidate in search(graph, SearchOptions(threads=1))[0][:kernels]:
                program = triton.generate(candidate.ugraph)
                (y,) = compiler.load(program.source, program.digest).run(operands)
                error = float((y - want).abs().max())
                errors.append([f"{name} {dtype} {n}", error, allowed])
    return errors


@pytest.mark.parametrize("name", CODED)
def test_kernels_are_as_close_to_float64_as_torch(name: str) -> None:
    pytest.importorskip("triton")
    if "Tensor" in name:  # the process that interprets kernels cannot skip
        pytest.importorskip("torchao")
    if name == "Int4TilePackedTo4dTensor" and not THOROUGH:
        pytest.skip("its kernels are interpreted for minutes")
    tried = (count(2, 1), count(2, 1))  # dtypes, and kernels
    code = (
        "from tests.trace import test_coded_experts as t; import json; "
        f"print(json.dumps(t.errors_of_kernels({name!r}, *{tried})))"
    )
    found = triton_interpreter.run(code)
    assert len(found) == 2 * tried[0] * tried[1]
    assert all(error <= allowed for _, error, allowed in found), json.dumps(found)


def coded_program(name: str, part: int) -> CodedProgram:
    """Return a program of experts with the role of each input, "order" for the chosen experts."""
    module, _ = CODED[name]()
    plan = plan_of(module, given(1, torch.float16, name))
    region = [region for region in plan.regions if region.kind == "experts"][part]
    form = form_of(module, torch.float16)
    assert isinstance(form, ExpertsForm)
    coding = (form.first, form.second)[part].coding
    assert coding is not None
    of_codes = itertools.cycle(coding.roles)
    roles = []
    for operand, x in zip(region.inputs, region.graph.inputs, strict=True):
        is_code = isinstance(operand, ParameterSlice)
        other = "order" if x.dtype is torch.int64 else "x"
        roles.append(next(of_codes) if is_code else other)
    return CodedProgram(region.graph, tuple(roles))


#: Kinds of wrong programs that must be among the mutants.
WRONG = {
    "nibbles in another order",
    "codes of another place",
    "scales of another place",
    "scales off by one",
    "scales shared by too many",
    "no scales",
    "no zero points",
    "zeros of another place",
    "shifts of another place",
    "order exchanged",
    "order off by one",
    "dropped op",
}


def test_no_wrong_decoding_of_experts_is_proven() -> None:
    """Such as another nibble, another group, another expert, or no zero point."""
    made = {
        f"{name} {part}": partial(coded_program, name, part)
        for name in ("Int4Tensor", "Int8Tensor, groups")
        for part in (0, 1)
    }
    found = coded_mutants.tally(1, count(100_000, 250), programs=made)
    assert found.originals >= 4
    assert not found.proven and not found.unclear and not found.disputed, found
    assert found.refused.keys() >= WRONG, WRONG - found.refused.keys()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CODED)
def test_experts_by_name_run_kernels_on_a_gpu(name: str) -> None:
    module, plain = CODED[name]()
    if name == "Mxfp4GptOssExperts":
        pytest.skip("its tensors are made by its library on a GPU")
    ours = Experts()
    for dtype in (torch.bfloat16, torch.float16):
        inputs = given(3, dtype, name)
        found = ours.forward(module.cuda(), *(x.cuda() for x in inputs.values()))
        assert far(found.cpu(), exact(plain, *inputs.values()), dtype) < 1
    assert not ours.report().by_torch


def other_order(module: Any) -> None:
    class HopperMXValueLayout:
        pass

    module.gate_up_proj.storage.layout = HopperMXValueLayout()


def changed(field: str, change: Any) -> Any:
    """Return what changes a field of a tensor of torchao."""

    def apply(module: Any) -> None:
        weight = module.gate_up_proj
        setattr(weight, field, change(getattr(weight, field)))

    return apply


def plain_down_proj(module: Any) -> None:
    module.down_proj = nn.Parameter(torch.zeros(module.down_proj.shape), requires_grad=False)


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("FP8Experts", lambda m: setattr(m, "block_size", None), "its scales are not for blocks"),
        ("FP8Experts", lambda m: setattr(m, "block_size", (80, 80)), "blocks of 80 do not divide"),
        ("FP8Experts", lambda m: setattr(m, "has_bias", True), "its experts have biases"),
        ("FP8Experts", lambda m: setattr(m, "gate_up_proj_scale_inv", None), "scale is missing"),
        ("FP8Experts", lambda m: m.double(), "holds float64"),
        ("FP8Experts", lambda m: setattr(m, "down_proj", None), "down_proj is missing"),
        ("Mxfp4GptOssExperts", other_order, "order HopperMXValueLayout of its library"),
        (
            "Mxfp4GptOssExperts",
            lambda m: setattr(m, "down_proj_precision_config", None),
            "down_proj has no scales",
        ),
        ("Int4Tensor", changed("scale", lambda t: t[1:]), "gate_up_proj: scale has shape"),
        ("Int4Tensor", changed("zero_point", lambda t: None), "zero_point is missing"),
        ("Int4Tensor", changed("qdata", lambda t: t.short()), "qdata holds int16"),
        ("Int4Tensor", changed("block_size", lambda b: [1, 2, 32]), "blocks of (1, 2, 32)"),
        ("Int4Tensor", changed("block_size", lambda b: [1, 1, 48]), "do not divide"),
        ("Int4Tensor", changed("act_pre_scale", lambda t: torch.ones(64)), "scales its input"),
        ("Int4Tensor", lambda m: setattr(m, "is_transposed", True), "(experts, inputs, outputs)"),
        ("Int4Tensor", lambda m: setattr(m, "has_norm", True), "in a way of their own"),
        ("Int4Tensor", lambda m: setattr(m, "has_bias", True), "its biases is missing"),
        ("Int4Tensor", plain_down_proj, "down_proj has no codes, but the other linear does"),
        ("Int8Tensor", changed("block_size", lambda b: [6, 192, 64]), "blocks of (6, 192, 64)"),
        ("Int8Tensor", changed("scale", lambda t: t.double()), "scale holds float64"),
        ("Int4TilePackedTo4dTensor", changed("qdata", lambda t: t[:, 1:]), "qdata has shape"),
    ],
)
def test_damaged_containers_are_refused(name: str, change: Any, why: str) -> None:
    module, _ = CODED[name]()
    change(module)
    found = form_of(module)
    assert isinstance(found, Rejected) and why in found.reason, found


def test_parts_of_blocks_have_no_program() -> None:
    """Scales are for blocks of 32 outputs, and gate would begin at output 16."""
    module, _ = CODED["FP8Experts"]()
    module._apply_gate = lambda x: x[..., 16:112] * x[..., :96]
    plan = plan_of(module, given(2, torch.float32))
    assert not [region for region in plan.regions if region.kind == "experts"]


@pytest.mark.parametrize("name", CODED)
def test_containers_stay_as_they_are(name: str) -> None:
    module, _ = CODED[name]()
    before = [x.clone() for x in coded_experts.parameters_of(module)]
    inputs = given(2, torch.float32, name)
    Experts(backend="cpu").forward(module, *inputs.values())
    after = coded_experts.parameters_of(module)
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(before, after, strict=True)
    )
