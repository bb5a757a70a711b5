"""Kernels of prompts: linears in codes, and experts. Here torch runs their programs."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM as Auto
from transformers import DeepseekV2Config, GptOssConfig, Qwen3MoeConfig

import mirage_hf as mi
from mirage_hf import api
from mirage_hf.formats.coding import CodedWeight
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import new_kernel_graph
from mirage_hf.ops.dtypes import CODE_DTYPES
from mirage_hf.pipeline.resolver import KernelFinder
from mirage_hf.swap import norm_kernels, prompt_kernels, rotation_kernels
from mirage_hf.swap.coded_forward import (
    PRODUCT_ROWS,
    RowsProduct,
    decoding_program,
    product_program,
)
from mirage_hf.swap.experts_forward import ExpertsBinding
from mirage_hf.swap.own_forward import FORWARD_KEY
from mirage_hf.swap.row_kernels import KERNEL_ROWS
from mirage_hf.trace.experts.form import ExpertsForm, form_of
from mirage_hf.trace.experts.row_blocks import RowBlocks
from mirage_hf.tune.measure import random_inputs
from scripts.bench_codes import CODINGS
from tests.trace.test_experts import built
from tests.trace.test_row_blocks import blocks_of

SIZES: dict[str, Any] = dict(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    num_experts_per_tok=2,
    vocab_size=128,
)
CONFIGS = {
    "traced": partial(
        Qwen3MoeConfig, moe_intermediate_size=32, intermediate_size=64, num_experts=16, head_dim=16
    ),
    "a step program, biases": partial(
        GptOssConfig, intermediate_size=32, num_local_experts=16, head_dim=16
    ),
    "a step program, shared experts": partial(
        DeepseekV2Config,
        moe_intermediate_size=32,
        intermediate_size=64,
        n_routed_experts=16,
        n_shared_experts=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    ),
}


class OnACpu(KernelFinder):
    """Finds kernels on a CPU as if it were a GPU."""

    gpu = torch.device("cpu")  # type: ignore[assignment]


def model_of(name: str) -> Any:
    """Return a small mixture in bfloat16."""
    config = CONFIGS[name](**SIZES)
    torch.manual_seed(0)
    return Auto.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)


def first_logits(model: Any, ids: Tensor, calls: int) -> list[Tensor]:
    """Return the logits of the first new token in so many calls of generate."""
    options = dict(
        max_new_tokens=2, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    return [model.generate(ids, **options).logits[0] for _ in range(calls)]


def experts_of(model: nn.Module) -> Any:
    """Return the first experts that are bound."""
    return next(m for m in model.modules() if isinstance(vars(m).get(FORWARD_KEY), ExpertsBinding))


@pytest.mark.parametrize("tune", ["auto", "full", "never"])
def test_linears_are_tuned_unless_that_is_not_wanted(tune: str) -> None:
    finder = KernelFinder(torch.device("cpu"), tune=tune, noting=lambda *_: None)
    first, *others = prompt_kernels.finders_for_linears(finder)
    assert first == prompt_kernels.finder_for_prompts(finder)
    if tune != "auto":
        assert not others
        return
    (tuning,) = others
    assert (tuning.tune, tuning.noting) == ("auto", None)
    program = product_program(CODINGS["int8"](64, 32), torch.bfloat16, has_bias=False)
    few, many = (f.request(program).effort for f in (tuning, finder))
    assert few.schedules < many.schedules and not few.rounds


@pytest.mark.parametrize(
    ("untuned", "tuned", "chosen"),
    [
        (None, 1.0, None),  # no kernel
        (40.0, 1.0, None),  # hopeless, so it is not tuned
        (15.0, 8.0, "tuned"),
        (9.0, 8.0, "tuned"),
        (8.0, 9.0, "untuned"),
        (15.0, 12.0, None),
    ],
)
def test_the_faster_kernel_of_a_linear_is_used_if_it_beats_stock(
    untuned: float | None, tuned: float, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"untuned": untuned, "tuned": tuned}

    def kernel(program: Any, pattern: str, finder: str) -> Any:
        return None if times[finder] is None else finder

    def compared(what: str, ours: Any, *_: Any) -> tuple[float, float]:
        return times[ours.func.run], 10.0  # type: ignore[return-value]

    monkeypatch.setattr(prompt_kernels, "_kernel", kernel)
    monkeypatch.setattr(prompt_kernels, "compared", compared)
    coding = CODINGS["int8"](64, 32)
    binding = SimpleNamespace(
        weight=CodedWeight(coding, (torch.zeros(1),)), product=None, run=lambda *_: None
    )
    give: Any = prompt_kernels._give_product
    give(nn.Identity(), binding, torch.bfloat16, ("untuned", "tuned"), {})
    assert (None if binding.product is None else binding.product.run) == chosen


@pytest.mark.parametrize("kind", CODINGS)
def test_no_kernel_is_searched_for_codes_in_reverse_order(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[Any] = []
    monkeypatch.setattr(prompt_kernels, "_kernel", lambda *given: searched.append(given))
    weight = CodedWeight(CODINGS[kind](256, 256), (torch.zeros(1),))
    binding = SimpleNamespace(weight=weight, product=None, run=lambda *_: None)
    give: Any = prompt_kernels._give_product
    give(nn.Identity(), binding, torch.bfloat16, ("untuned",), {})
    assert bool(searched) == (kind != "nf4")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Let `optimize` find kernels of prompts on a CPU. Gives the tokens of each call of them."""
    found: list[int] = []
    run, find = RowBlocks.run, api.find_prompt_kernels

    def counted(self: RowBlocks, form: Any, x: Tensor, *args: Tensor) -> Tensor:
        found.append(len(x))
        return run(self, form, x, *args)

    def on_a_cpu(model: nn.Module, finder: Any) -> list[str]:
        notes = find(model, OnACpu(torch.device("cpu")))
        found.clear()
        return notes

    def kernel(program: Any, *_: Any, **__: Any) -> Any:
        return partial(run_kernel_graph, program)

    def unskipped(*args: Any, skips_blocks: bool) -> RowBlocks:
        return RowBlocks(*args, skips_blocks=False)

    monkeypatch.setattr(RowBlocks, "run", counted)
    monkeypatch.setattr(api, "find_prompt_kernels", on_a_cpu)
    monkeypatch.setattr(prompt_kernels, "_kernel", kernel)
    monkeypatch.setattr(prompt_kernels, "RowBlocks", unskipped)
    monkeypatch.setattr(prompt_kernels, "time_run", _faster_by_kernels)
    monkeypatch.setattr(prompt_kernels, "_us_called", lambda *_: 1.0)
    yield found


def _faster_by_kernels(run: Any, *_: Any, **__: Any) -> Any:
    """Return a time: kernels take less than what runs without them."""
    (forward,) = run.args
    is_ours = isinstance(getattr(forward.func, "__self__", None), RowBlocks)
    return SimpleNamespace(us=1.0 if is_ours else 2.0)


@pytest.mark.models
@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_prompts_of_mixtures_run_kernels_until_they_are_restored(
    name: str, calls: list[int]
) -> None:
    model = model_of(name)
    classes, held = [type(m) for m in model.modules()], [set(vars(m)) for m in model.modules()]
    prompts = [torch.randint(0, 128, (1, tokens)) for tokens in (40, 200)]
    stock = [model(ids).logits for ids in prompts]
    tokens = model.generate(prompts[0], max_new_tokens=8, do_sample=False)
    mi.optimize(model, backend="cpu", tune="never")
    assert "prompts of 17 to 128 tokens: experts run by kernels" in str(model.mirage.report)
    ours = [model(ids).logits for ids in prompts]
    assert {*calls} == {40}  # 200 tokens do not fit
    for x, y in zip(ours, stock, strict=True):
        assert (x - y).abs().max() <= 2e-2 * y.abs().max()
    assert torch.equal(model.generate(prompts[0], max_new_tokens=8, do_sample=False), tokens)
    experts = experts_of(model)
    assert type(copy.deepcopy(experts)) in classes
    assert FORWARD_KEY not in copy.deepcopy(experts).__dict__
    mi.restore(model)
    assert [type(m) for m in model.modules()] == classes
    assert [set(vars(m)) for m in model.modules()] == held
    calls.clear()
    assert torch.equal(model(prompts[0]).logits, stock[0])
    assert not calls


@pytest.mark.models
def test_calls_that_kernels_do_not_take_run_stock(calls: list[int]) -> None:
    model = model_of("traced")
    ids = torch.randint(0, 128, (1, 40))
    mi.optimize(model, backend="cpu", tune="never")
    experts = experts_of(model)
    x, index = torch.randn(20, 64).bfloat16(), torch.randint(0, 16, (20, 2))
    _, dtype = experts.__dict__[FORWARD_KEY].called_with  # routers of some versions give float32
    other = torch.float32 if dtype is torch.bfloat16 else torch.bfloat16
    weights = torch.rand(20, 2).to(dtype)
    with torch.no_grad():
        experts(x, index, weights)
        assert calls == [20]
        calls.clear()
        experts(x[:16], index[:16], weights[:16])  # as few tokens as steps have
        experts(x, index, weights.to(other))
        with torch.autocast("cpu", torch.bfloat16):
            experts(x, index, weights)
        experts(x, top_k_index=index, top_k_weights=weights)
        experts.limit = 1.0  # a number that the experts may read
        experts(x, index, weights)
        del experts.limit
        own = type(experts)._apply_gate
        experts._apply_gate = lambda h: own(experts, h)  # another function
        experts(x, index, weights)
        del experts._apply_gate
        assert not calls
        experts(x.T.contiguous().T, index, weights.T.contiguous().T)
        assert calls == [20]
        calls.clear()
    with torch.enable_grad():
        experts(x.requires_grad_(), index, weights).sum().backward()
    assert not calls
    with torch.no_grad():
        experts.gate_up_proj.data = experts.gate_up_proj.data.transpose(1, 2).contiguous().mT
        experts(x, index, weights)  # weights stored in another order
    assert not calls
    assert model(ids).logits.isfinite().all()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", CODINGS)
def test_a_product_is_that_of_the_decoded_weight(name: str, has_bias: bool) -> None:
    coding = CODINGS[name](256, 128)
    graph = new_kernel_graph()
    coding.write(graph)
    tensors = random_inputs(graph, "cpu")
    for t, stored in zip(tensors, coding.stored, strict=True):
        if stored.dtype not in CODE_DTYPES:
            t.abs_()
    bias = torch.randn(128).bfloat16() if has_bias else None
    weight = CodedWeight(coding, tuple(tensors), bias)
    program = product_program(coding, torch.bfloat16, has_bias)
    product = RowsProduct(partial(run_kernel_graph, program), torch.bfloat16, has_bias)
    decoded = run_kernel_graph(decoding_program(coding), tensors)[0]
    for shape in ((1, 256), (2, 30, 256), (PRODUCT_ROWS, 256)):
        x = torch.randn(shape).bfloat16()
        assert not product.takes(x, weight, bias)  # on a CPU
        ours, wanted = product(x, weight, bias).double(), F.linear(x, decoded, bias).double()
        assert ours.shape == wanted.shape
        assert (ours - wanted).norm() <= 2e-2 * wanted.norm()


def some_blocks() -> tuple[RowBlocks, ExpertsForm]:
    """Return blocks of experts of which torch runs the programs."""
    form = form_of(built("gate and up"), torch.float32)
    assert isinstance(form, ExpertsForm)
    return blocks_of(form, torch.float32, torch.float32), form


@pytest.mark.parametrize(
    "faster, found",
    [
        (range(100), range(17, 49)),
        (range(40), range(17, 25)),
        (range(30, 100), range(25, 49)),
        (range(0), range(0)),
    ],
)
def test_kernels_serve_the_numbers_of_tokens_for_which_they_are_faster(
    faster: range, found: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, form = some_blocks()
    stock = partial(blocks.run, form)

    def time(run: Any, sets: Any, **_: Any) -> Any:
        is_ours = run.args[0] is not stock
        return SimpleNamespace(us=float(len(sets[0][0]) not in faster) if is_ours else 0.5)

    monkeypatch.setattr(prompt_kernels, "time_run", time)
    monkeypatch.setattr(prompt_kernels, "_us_called", lambda *_: 1.0)
    assert prompt_kernels.faster_for(blocks, form, stock) == found


def test_kernels_that_are_much_slower_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, form = some_blocks()
    stock = partial(blocks.run, form)
    monkeypatch.setattr(prompt_kernels, "time_run", lambda *_, **__: pytest.fail("was captured"))
    monkeypatch.setattr(prompt_kernels, "_us_called", lambda run, _: 1.0 if run is stock else 3.0)
    assert not prompt_kernels.faster_for(blocks, form, stock)


def test_kernels_that_give_other_results_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, form = some_blocks()
    monkeypatch.setattr(prompt_kernels, "time_run", lambda *_, **__: pytest.fail("was timed"))
    for wrong in (1.1, float("nan")):
        stock = lambda *given, wrong=wrong: wrong * blocks.run(form, *given)  # noqa: E731
        assert not prompt_kernels.faster_for(blocks, form, stock)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("of memory"), RuntimeError("other")])
def test_if_stock_fails_no_kernels_are_used(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, form = some_blocks()

    def stock(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(prompt_kernels, "time_run", lambda *_, **__: pytest.fail("was timed"))
    assert not prompt_kernels.faster_for(blocks, form, stock)


def test_what_cannot_be_captured_is_timed_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, form = some_blocks()
    stock = partial(blocks.run, form)

    def refuses(*_: Any, **__: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(prompt_kernels, "time_run", refuses)
    monkeypatch.setattr(prompt_kernels, "_us_called", lambda run, _: 2.0 if run is stock else 1.0)
    assert prompt_kernels.faster_for(blocks, form, stock) == range(17, 49)


def test_tensors_of_other_sizes_are_not_taken() -> None:
    blocks, _ = some_blocks()
    x, index, weights = torch.randn(9, 16), torch.zeros(9, 2, dtype=torch.int64), torch.rand(9, 2)
    assert blocks.takes(x, index, weights)
    for given in (
        (x[:, :8], index, weights),
        (x[:5], index, weights),
        (x.repeat(6, 1), index.repeat(6, 1), weights.repeat(6, 1)),
        (x, index[:, :1], weights[:, :1]),
        (x, index, weights[:5]),
        (x, index.to(torch.int16), weights),
        (x[None], index, weights),
        (x[:0], index[:0], weights[:0]),
    ):
        assert not blocks.takes(*given)


@pytest.mark.parametrize(("runs_kernel", "kernels"), [(True, 1), (True, 2), (False, 1)])
def test_a_program_needs_one_kernel(runs_kernel: bool, kernels: int) -> None:
    ugraph = SimpleNamespace(num_kernels=kernels)
    found = SimpleNamespace(run=object(), runs_kernel=runs_kernel, ugraph=ugraph)
    finder: Any = SimpleNamespace(resolve=lambda *_, **__: found)
    program: Any = None
    got = prompt_kernels._kernel(program, "experts", finder)
    assert got is (found.run if runs_kernel and kernels == 1 else None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dims", [(3, 5), (1, 2, 7), (0, 4), (6,), ()])
def test_results_are_compared_in_slices(
    monkeypatch: pytest.MonkeyPatch, dims: Any, dtype: torch.dtype
) -> None:
    """Each element counts, whichever slice it is in. Results stay as they are."""
    monkeypatch.setattr(prompt_kernels, "COMPARED_AT_ONCE", 4)
    slices = 0

    def squares(self: Tensor, square: Any = Tensor.square) -> Tensor:
        nonlocal slices
        slices += 1
        assert self.numel() <= 7
        return square(self)  # type: ignore[no-any-return]

    monkeypatch.setattr(Tensor, "square", squares)
    stock = torch.ones(dims, dtype=dtype)
    distance = prompt_kernels._distance
    assert distance(stock.clone(), stock) == ""
    assert slices == {(3, 5): 5, (1, 2, 7): 4, (0, 4): 1, (6,): 2, (): 1}[dims]
    for n in range(stock.numel()):
        for wrong, difference in ((torch.nan, "nan"), (2.0, f"{stock.numel() ** -0.5:.2g}")):
            ours = stock.clone()
            ours.view(-1)[n] = wrong
            given = ours.clone()
            for x, y in ((ours, stock), (ours.mT, stock.mT) if ours.dim() > 1 else (ours, stock)):
                assert distance(x, y) == f"kernels differ from stock by {difference}"
            assert torch.equal(ours.nan_to_num(9), given.nan_to_num(9))
    assert distance(stock.half(), stock).startswith("kernels give torch.float16")
    assert distance(stock[None], stock).startswith("kernels give (1,")


@pytest.mark.parametrize("module", [norm_kernels, rotation_kernels])
def test_kernels_are_compared_with_stock_for_two_launches_and_for_the_largest(module: Any) -> None:
    rows = [math.prod(dims) if isinstance(dims, tuple) else dims for dims in module._TIMED]
    assert min(rows) == 128
    assert max(KERNEL_ROWS) in rows, "the largest launch"
    assert any(max(k for k in KERNEL_ROWS if k <= n) * 2 == n for n in rows), "two launches"
