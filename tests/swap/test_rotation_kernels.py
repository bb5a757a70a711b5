"""q and k of prompts are rotated by kernels, in models whose prompts run their own forward.

On a CPU torch runs what the search found.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM as Auto
from transformers import LlamaConfig
from transformers.models.cohere import modeling_cohere as cohere
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.llama import modeling_llama as llama
from transformers.models.phi import modeling_phi as phi

import mirage_hf as mi
from mirage_hf import api
from mirage_hf.swap import rotation_kernels
from mirage_hf.swap.ledger import Ledger
from mirage_hf.swap.own_forward import FORWARD_KEY
from mirage_hf.swap.rotation_forward import (
    ROTATION,
    RotationBinding,
    RotationKernels,
    RotationSizes,
)
from mirage_hf.swap.rotation_kernels import bind_rotations, find_rotation_kernels
from scripts.coded_models import with_codes
from tests.helpers.generate_features import fake_captures
from tests.helpers.kernels_on_cpu import count_rows, finder_on_cpu, set_times
from tests.swap.test_prompt_kernels import first_logits, model_of

pytestmark = pytest.mark.models

#: Functions of transformers, with the elements of a row of cos and sin for heads of 16.
FUNCTIONS: dict[str, tuple[Any, int]] = {
    "halves": (llama.apply_rotary_pos_emb, 16),
    "pairs": (cohere.apply_rotary_pos_emb, 16),
    "one number for each pair": (gpt_oss.apply_rotary_pos_emb, 8),
}
CLOSE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Let kernels be faster than stock. A test may change the times."""
    return set_times(monkeypatch, lambda run: isinstance(run, RotationKernels))


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the rows of each call of kernels."""
    return count_rows(monkeypatch)


CPU = torch.device("cpu")


def sizes_of(rotary: int = 16, dtype: torch.dtype = torch.bfloat16) -> RotationSizes:
    return RotationSizes(4, 2, 16, rotary, dtype, dtype, CPU)


def kernels_of(function: Any, sizes: RotationSizes) -> RotationKernels | None:
    found = rotation_kernels._kernels_of([(function, sizes)], finder_on_cpu())
    return found.get((function, sizes))


def inputs(sizes: RotationSizes, batch: int, tokens: int, tables: int) -> list[Tensor]:
    """Return q, k, cos and sin, with tables for each sequence or one for all."""
    heads = sizes.heads, sizes.kv_heads
    q, k = (torch.randn(batch, tokens, n, sizes.head_dim).transpose(1, 2) for n in heads)
    cos, sin = torch.randn(2, tables, tokens, sizes.rotary)
    return [x.to(sizes.dtype) for x in (q, k, cos, sin)]


# -- functions


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_give_what_the_function_gives(name: str, dtype: torch.dtype) -> None:
    function, rotary = FUNCTIONS[name]
    sizes = sizes_of(rotary, dtype)
    kernels = kernels_of(function, sizes)
    assert kernels is not None
    for batch, tokens, tables in ((1, 64, 1), (1, 5000, 1), (3, 50, 1), (3, 50, 3)):
        given = inputs(sizes, batch, tokens, tables)
        if batch == 1:  # as in gpt-oss
            given[2:] = [x.mT.contiguous().mT for x in given[2:]]
        assert kernels.takes(*given)
        for ours, stock in zip(kernels(*given), function(*given), strict=True):
            assert (ours.dtype, ours.shape, ours.stride()) == (dtype, stock.shape, stock.stride())
            assert (ours.float() - stock.float()).norm() <= CLOSE[dtype] * stock.float().norm()


def test_float32_tables_rotate_in_float32() -> None:
    sizes = RotationSizes(4, 2, 16, 16, torch.bfloat16, torch.float32, CPU)
    kernels = kernels_of(gpt_oss_like, sizes)
    assert kernels is not None
    given = inputs(sizes, 1, 100, 1)
    given[2:] = [x.float() for x in given[2:]]
    for ours, stock in zip(kernels(*given), gpt_oss_like(*given), strict=True):
        assert ours.dtype is torch.bfloat16 and torch.equal(ours, stock)


def gpt_oss_like(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate in the dtype of the tables."""
    both = llama.apply_rotary_pos_emb(q.to(cos.dtype), k.to(cos.dtype), cos, sin)
    q_rotated, k_rotated = (x.to(q.dtype) for x in both)
    return q_rotated, k_rotated


def twice(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = llama.apply_rotary_pos_emb(q, k, cos, sin)
    return 2 * q, k


def swapped(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return llama.apply_rotary_pos_emb(q, k, sin, cos)


def first_tables(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate all sequences as the first one."""
    return llama.apply_rotary_pos_emb(q, k, cos[:1], sin[:1])


def fails(*_: Tensor) -> Any:
    raise RuntimeError("no")


def fails_in_bfloat16(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    if q.dtype is torch.bfloat16:
        raise RuntimeError("no")
    return llama.apply_rotary_pos_emb(q, k, cos, sin)


def three(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    return (*llama.apply_rotary_pos_emb(q, k, cos, sin), q)


@pytest.mark.parametrize(
    "function",
    [twice, swapped, first_tables, fails, fails_in_bfloat16, three, phi.rotate_half],
)
def test_a_function_that_no_program_computes_has_no_kernels(function: Callable[..., Any]) -> None:
    assert kernels_of(function, sizes_of()) is None


@pytest.mark.parametrize(
    "sizes",
    [
        sizes_of(dtype=torch.float32),
        sizes_of(rotary=12),
        sizes_of(rotary=32),
        sizes_of(rotary=7),
        RotationSizes(3, 2, 16, 16, torch.bfloat16, torch.bfloat16, CPU),
    ],
    ids=["float32", "other tables", "longer tables", "odd tables", "heads"],
)
def test_other_sizes_have_no_kernels(sizes: RotationSizes) -> None:
    assert kernels_of(llama.apply_rotary_pos_emb, sizes) is None


def test_kernels_that_are_slower_are_not_used(times: dict[str, float]) -> None:
    times["ours"] = 3.0
    assert kernels_of(llama.apply_rotary_pos_emb, sizes_of()) is None


def test_kernels_leave_other_calls_to_stock() -> None:
    sizes = sizes_of()
    kernels = kernels_of(llama.apply_rotary_pos_emb, sizes)
    assert kernels is not None
    q, k, cos, sin = given = inputs(sizes, 2, 40, 2)
    assert kernels.takes(*given)
    others = {
        "few rows": inputs(sizes, 1, 63, 1),
        "many rows": inputs(sizes, 1, 4 * 4096 + 1, 1),
        "another order in memory": [q.contiguous(), k, cos, sin],
        "heads": [q[:, :2], k, cos, sin],
        "heads of keys": [q, k[:, :1], cos, sin],
        "a dtype": [x.float() for x in given],
        "tables in another dtype": [q, k, cos.float(), sin.float()],
        "tables of another batch": [q, k, cos[:1].expand(3, -1, -1), sin[:1].expand(3, -1, -1)],
        "no tensor": [q, k, cos, None],
        "a number": [q, k, cos.sum(), sin.sum()],
        "narrow tables": [q, k, cos[..., :8].contiguous(), sin[..., :8].contiguous()],
        "an address": [q, k, torch.empty(cos.numel() + 1).bfloat16()[1:].view_as(cos), sin],
    }
    assert [name for name, x in others.items() if kernels.takes(*x)] == []
    with torch.enable_grad():
        assert not kernels.takes(*given)
    with torch.autocast("cpu"):
        assert not kernels.takes(*given)


# -- modules


def attention() -> nn.Module:
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    return llama.LlamaAttention(config, 0).bfloat16().eval()


def call(module: nn.Module, tokens: int = 100) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, tokens, 64, generator=draw).bfloat16()
    tables = torch.randn(2, 1, tokens, 16, generator=draw).bfloat16()
    y: Tensor = module(x, (tables[0], tables[1]), None)[0]
    return y


def bound(module: nn.Module) -> Ledger:
    """Let a module rotate by kernels."""
    ledger = Ledger()
    assert bind_rotations(module, ledger) == 1
    call(module, 3)
    notes = find_rotation_kernels(module, finder_on_cpu())
    assert notes == ["prompts: 1 of 1 kinds of RoPE run by kernels"]
    return ledger


def test_attention_rotates_by_kernels_until_it_is_put_back(rows: list[int]) -> None:
    module = attention()
    kind, held, stock = type(module), set(vars(module)), call(module)
    ledger = bound(module)
    rows.clear()
    ours = call(module)
    assert rows == [100]
    assert (ours - stock).norm() <= 2e-2 * stock.norm()
    ledger.undo()
    rows.clear()
    assert torch.equal(call(module), stock) and not rows
    assert type(module) is kind and set(vars(module)) == held


def test_few_tokens_are_rotated_by_stock_bit_for_bit(rows: list[int]) -> None:
    module = attention()
    stock = call(module, 63)
    bound(module)
    rows.clear()
    assert torch.equal(call(module, 63), stock) and not rows


def test_a_function_that_was_patched_since_is_called(
    rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = attention()
    bound(module)
    rows.clear()
    monkeypatch.setattr(llama, ROTATION, lambda q, k, cos, sin: (q, k))
    ours = call(module)
    assert not rows
    monkeypatch.setattr(llama, "eager_attention_forward", None)  # other globals stay the file's
    forward = vars(module)[FORWARD_KEY]._forward
    assert forward.__globals__["eager_attention_forward"] is None
    with pytest.raises(KeyError):
        forward.__globals__["no such name"]
    stock = attention()
    stock.load_state_dict(module.state_dict())
    assert torch.equal(ours, call(stock))


def test_a_forward_that_was_replaced_since_is_called(
    rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = attention()
    bound(module)
    rows.clear()
    monkeypatch.setattr(llama.LlamaAttention, "forward", lambda self, x, *_: (x,))
    assert call(module).shape == (1, 100, 64) and not rows


def test_copies_and_pickles_are_stock(rows: list[int]) -> None:
    module = attention()
    stock = call(module)
    bound(module)
    rows.clear()
    copied = pickle.loads(pickle.dumps(module))
    assert type(copied) is llama.LlamaAttention and FORWARD_KEY not in vars(copied)
    assert torch.equal(call(copied), stock) and not rows


def test_modules_without_the_function_are_left_alone() -> None:
    own = attention()
    own.forward = own.forward  # type: ignore[method-assign]
    assert bind_rotations(nn.ModuleList([nn.Linear(4, 4), own]), Ledger()) == 0


# -- models


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `optimize` find kernels of RoPE on a CPU."""
    monkeypatch.setattr(
        api,
        "find_rotation_kernels",
        lambda model, _: find_rotation_kernels(model, finder_on_cpu()),
    )


def small_llama() -> Any:
    sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=1, vocab_size=64)
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    return Auto.from_config(config, dtype=torch.bfloat16).eval()


def bindings_of(model: nn.Module) -> list[RotationBinding]:
    found = (vars(m).get(FORWARD_KEY) for m in model.modules())
    return [b for b in found if isinstance(b, RotationBinding)]


@pytest.mark.parametrize("name", ["traced", "a step program, biases"])
def test_prompts_of_mixtures_rotate_by_kernels(
    name: str, rows: list[int], on_a_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_captures(monkeypatch)
    model, ids = model_of(name), torch.randint(0, 128, (1, 100))
    kinds = [type(m) for m in model.modules()]
    greedy: dict[str, Any] = dict(max_new_tokens=8, do_sample=False)
    stock, logits = model.generate(ids, **greedy), model(ids).logits
    found = []
    for finds in (False, True):
        with monkeypatch.context() as patch:
            if not finds:
                patch.setattr(api, "bind_rotations", lambda *_: 0)
            mi.optimize(model, backend="cpu", tune="never")
        assert len(bindings_of(model)) == finds * model.config.num_hidden_layers
        rows.clear()
        # rounding may let a token choose another expert
        assert (model(ids).logits - logits).float().norm() <= 5e-2 * logits.float().norm()
        assert rows == [100] * len(bindings_of(model))
        assert all(torch.equal(model.generate(ids, **greedy), stock) for _ in range(3))
        report = model.mirage.report
        found.append(([(r.module, r.part, r.digest) for r in report.rows], report.decode))
        mi.restore(model)
    assert found[0] == found[1] and found[0][0]
    assert [type(m) for m in model.modules()] == kinds


def test_prompts_of_models_in_codes_rotate_by_kernels(rows: list[int], on_a_cpu: None) -> None:
    model = with_codes(small_llama(), "fp8")
    mi.optimize(model, backend="cpu", tune="never")
    assert "1 of 1 kinds of RoPE run by kernels" in str(model.mirage.report)
    rows.clear()
    model(torch.randint(0, 64, (1, 100)))
    assert rows == [100]


def test_models_whose_prompts_run_by_kernels_are_not_bound(on_a_cpu: None) -> None:
    model = small_llama()
    mi.optimize(model, backend="cpu", tune="never")
    assert model.generate.runner.model_kernels is not None
    assert not [m for m in model.modules() if FORWARD_KEY in vars(m)]
    assert "RoPE" not in str(model.mirage.report.notes)


def test_a_failure_puts_attention_back(on_a_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("traced")

    def fails(*_: Any, **__: Any) -> Any:
        assert bindings_of(model)
        raise RuntimeError("no")

    monkeypatch.setattr(api.Optimization, "swap", fails)
    with pytest.raises(RuntimeError, match="no"):
        mi.optimize(model, backend="cpu", tune="never")
    assert not [m for m in model.modules() if FORWARD_KEY in vars(m)]


# -- a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["traced", "a step program, biases"])
def test_captured_prompts_rotate_by_kernels_and_are_as_stocks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # of the times of kernels
    model = model_of(name).cuda()
    ids = torch.randint(0, 128, (1, 200), device="cuda")
    (stock,) = first_logits(model, ids, 1)
    mi.optimize(model, tune="never")
    assert all(binding.kernels is not None for binding in bindings_of(model))
    for ours in first_logits(model, ids, 3):
        assert (ours - stock).float().norm() <= 5e-2 * stock.float().norm()
    assert model.generate.runner.prefills["captured"] == 2
