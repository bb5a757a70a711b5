"""Norms of prompts by kernels, in models whose prompts run their own forward.

On a CPU torch runs what the search found.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM as Auto
from transformers import LlamaConfig
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import mirage_hf as mi
from mirage_hf import api
from mirage_hf.decode.model_fingerprint import take_fingerprint
from mirage_hf.decode.summed_products import SummedProducts
from mirage_hf.errors import SearchError
from mirage_hf.pipeline.resolver import KernelFinder
from mirage_hf.swap.ledger import Ledger
from mirage_hf.swap.norm_forward import NormBinding, NormKernels
from mirage_hf.swap.norm_kernels import bind_norms
from mirage_hf.swap.own_forward import FORWARD_KEY
from scripts.coded_models import with_codes
from tests.helpers.generate_features import fake_captures
from tests.helpers.kernels_on_cpu import OnACpu, count_rows, finder_on_cpu, set_times
from tests.swap.test_prompt_kernels import CONFIGS, first_logits, model_of

WIDTH = 64
NORMS: dict[str, Callable[[], nn.Module]] = {
    "RMSNorm": partial(LlamaRMSNorm, WIDTH, eps=1e-5),
    "RMSNorm, 1 + weight": partial(GemmaRMSNorm, WIDTH, eps=1e-3),
    "LayerNorm": partial(nn.LayerNorm, WIDTH, eps=1e-4),
}
#: The largest relative difference of a row: a few roundings.
CLOSE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Let kernels be faster than stock. A test may change the times."""
    return set_times(monkeypatch, lambda run: isinstance(getattr(run, "func", None), NormKernels))


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the rows of each call of kernels."""
    return count_rows(monkeypatch)


def norm_of(name: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Return a norm with random parameters."""
    norm = NORMS[name]().eval()
    for p in norm.parameters():
        p.copy_(0.5 + torch.rand(p.shape))
    return norm.to(dtype)


def bound(*norms: nn.Module) -> tuple[Ledger, list[str]]:
    """Let norms run by kernels. Return what undoes it, and the notes."""
    ledger = Ledger()
    notes = bind_norms(nn.ModuleList(norms), ledger, OnACpu(torch.device("cpu")))
    return ledger, notes


def pair(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """Return a norm that is bound, and a stock one."""
    norm = norm_of(name, dtype)
    stock = copy.deepcopy(norm)
    bound(norm)
    assert isinstance(norm.__dict__[FORWARD_KEY], NormBinding)
    return norm, stock


def assert_close(ours: Tensor, stock: Tensor) -> None:
    """Assert that each row is as stock's, and lies in memory as stock's does."""
    assert ours.dtype == stock.dtype and ours.shape == stock.shape
    assert ours.stride() == stock.stride()
    difference = (ours.double() - stock.double()).norm(dim=-1)
    assert (difference <= CLOSE[stock.dtype] * stock.double().norm(dim=-1)).all()


def inputs_of(dtype: torch.dtype) -> dict[str, Tensor]:
    """Return inputs by name. The number of rows is the first word."""
    draw = torch.Generator().manual_seed(0)
    random = partial(torch.randn, generator=draw)
    inputs = {
        "64": random(64, WIDTH),
        "100": random(2, 50, WIDTH),
        "129": random(1, 43, 3, WIDTH),
        "4160": random(1, 4096 + 64, WIDTH),
        "90 in a part of each row": random(3, 30, 2 * WIDTH)[..., WIDTH:],
        "120 of every second token": random(2, 120, WIDTH)[:, ::2],
    }
    return {name: (3 * x + 1).to(dtype) for name, x in inputs.items()}


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("name", NORMS)
def test_kernels_give_what_stock_gives_for_any_number_of_rows(
    name: str, dtype: torch.dtype, rows: list[int]
) -> None:
    norm, stock = pair(name, dtype)
    rows.clear()
    for what, x in inputs_of(dtype).items():
        assert_close(norm(x), stock(x))
        assert rows == [int(what.split()[0])], what
        rows.clear()


@pytest.mark.parametrize("name", NORMS)
def test_calls_that_kernels_do_not_take_run_stock(name: str, rows: list[int]) -> None:
    norm, stock = pair(name)
    x = torch.randn(2, 50, WIDTH).bfloat16()
    rows.clear()
    few = x[:1, :49]
    turned = x.view(2, 10, 5, WIDTH).transpose(1, 2)
    doubled = torch.randn(100, 2 * WIDTH).bfloat16()
    unaligned = torch.randn(1 + x.numel()).bfloat16()[1:].view(x.shape)
    for given in (few, turned, x.expand(4, 2, 50, WIDTH), unaligned):
        y = norm(given)
        assert torch.equal(y, stock(given)) and y.stride() == stock(given).stride()
    argument = "input" if name == "LayerNorm" else next(iter(_arguments(stock)))
    assert torch.equal(norm(**{argument: x}), stock(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(norm(x), stock(x))
    with torch.enable_grad():
        assert norm(x).requires_grad
    assert torch.equal(torch.vmap(norm)(x[:, None]), torch.vmap(stock)(x[:, None]))
    with pytest.raises(RuntimeError):
        norm(doubled)
    norm.float(), stock.float()
    for given in (x.float(), x):
        with contextlib.suppress(RuntimeError):  # LayerNorm takes one dtype
            assert torch.equal(norm(given), stock(given))
    assert not rows


class Watching(TorchDispatchMode):
    """Sees all torch ops."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def test_under_modes_of_others_stock_runs(rows: list[int]) -> None:
    norm, stock = pair("RMSNorm")
    x = torch.randn(100, WIDTH).bfloat16()
    rows.clear()
    with SummedProducts():
        assert_close(norm(x), stock(x))
    assert rows == [100]
    with Watching() as ours:
        norm(x)
    with Watching() as theirs:
        stock(x)
    with SummedProducts(), Watching():
        norm(x)
    assert rows == [100] and ours.seen == theirs.seen


def _arguments(norm: nn.Module) -> Sequence[str]:
    code = type(norm).forward.__code__
    return code.co_varnames[1 : code.co_argcount]


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_that_changes_runs_with_what_it_has_now(name: str, rows: list[int]) -> None:
    norm, stock = pair(name)
    x = (1e-2 * torch.randn(2, 50, WIDTH)).bfloat16()
    rows.clear()
    for each in (norm, stock):  # in other memory
        each.weight = nn.Parameter(torch.linspace(-2, 3, WIDTH).bfloat16())
    assert_close(norm(x), stock(x))
    for each in (norm, stock):
        each.weight.data = -0.5 * each.weight.data
    assert_close(norm(x), stock(x))
    norm.train()
    assert_close(norm(x), stock(x))
    assert rows == [100] * 3
    rows.clear()
    epsilon = "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps"
    old = getattr(norm, epsilon)
    before = norm(x)
    for value in (0.5, torch.tensor(0.5)):
        if name == "LayerNorm" and isinstance(value, Tensor):
            continue  # it takes no tensor
        rows.clear()
        setattr(norm, epsilon, value), setattr(stock, epsilon, value)
        assert torch.equal(norm(x), stock(x)) and not rows
        assert not torch.equal(norm(x), before)
    setattr(norm, epsilon, old), setattr(stock, epsilon, old)
    assert_close(norm(x), stock(x))
    assert rows == [100]


def test_a_bias_that_comes_or_goes_is_seen(rows: list[int]) -> None:
    norm, stock = pair("LayerNorm")
    x = torch.randn(100, WIDTH).bfloat16()
    rows.clear()
    norm.bias = stock.bias = None
    assert torch.equal(norm(x), stock(x)) and not rows


def test_a_new_forward_of_the_class_or_the_instance_runs(
    rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    norm, _ = pair("RMSNorm")
    x = torch.randn(100, WIDTH).bfloat16()
    before = take_fingerprint(nn.ModuleList([norm])).facts
    rows.clear()
    with monkeypatch.context() as patch:
        patch.setattr(LlamaRMSNorm, "forward", lambda self, x: 2 * x)
        assert torch.equal(norm(x), 2 * x)
        assert take_fingerprint(nn.ModuleList([norm])).facts != before
    norm.forward = lambda x: 3 * x
    assert torch.equal(norm(x), 3 * x) and not rows
    del norm.forward
    assert norm(x) is not None and rows == [100]


def test_hooks_of_a_norm_run(rows: list[int]) -> None:
    norm, seen = norm_of("RMSNorm"), []
    norm.register_forward_hook(lambda *_: seen.append("before"))
    bound(norm)
    norm.register_forward_hook(lambda *_: seen.append("later"))
    seen.clear()
    rows.clear()
    norm(torch.randn(100, WIDTH).bfloat16())
    assert seen == ["before", "later"] and rows == [100]


def test_compiled_norms_are_stock(rows: list[int]) -> None:
    norm, stock = pair("RMSNorm")
    x = torch.randn(100, WIDTH).bfloat16()
    rows.clear()
    ours = torch.compile(norm, backend="eager", fullgraph=True)
    assert torch.equal(ours(x), stock(x)) and not rows
    torch.compiler.reset()


@pytest.mark.parametrize("name", NORMS)
def test_norms_are_put_back_and_copies_are_stock(name: str, rows: list[int]) -> None:
    norm = norm_of(name)
    kind, held = type(norm), dict(vars(norm))
    ledger, _ = bound(norm)
    assert type(norm) is not kind
    x = torch.randn(100, WIDTH).bfloat16()
    copies = copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))
    ledger.undo()
    rows.clear()
    for each in (norm, *copies):
        assert type(each) is kind and vars(each).keys() == held.keys()
        each(x)
    assert vars(norm) == held
    assert not rows


# -- which norms


class Widening(LlamaRMSNorm):
    """A norm that gives float32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class Gated(LlamaRMSNorm):
    """A norm with a second input."""

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x) if gate is None else super().forward(x) * gate


def own_forward() -> nn.Module:
    norm = LlamaRMSNorm(WIDTH)
    norm.forward = norm.forward
    return norm


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "gives another dtype": partial(Widening, WIDTH),
    "takes two inputs": partial(Gated, WIDTH),
    "has its own forward": own_forward,
    "is no norm": partial(nn.PReLU, WIDTH),
    "is over channels": partial(nn.GroupNorm, 4, WIDTH),
    "keeps statistics": partial(nn.BatchNorm1d, WIDTH),
    "has no weight": partial(nn.LayerNorm, WIDTH, elementwise_affine=False),
    "has unaligned rows": partial(LlamaRMSNorm, WIDTH + 4),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_modules_are_not_bound(name: str) -> None:
    module = OTHERS[name]().eval().bfloat16()
    kind = type(module)
    bound(module)
    assert type(module) is kind and FORWARD_KEY not in vars(module)


def test_norms_of_another_dtype_are_not_bound() -> None:
    wide = LlamaRMSNorm(WIDTH)
    mixed = nn.LayerNorm(WIDTH).bfloat16()
    mixed.bias.data = mixed.bias.data.float()
    bound(wide, mixed)
    assert FORWARD_KEY not in vars(wide) and FORWARD_KEY not in vars(mixed)


def test_norms_with_equal_blocks_share_kernels() -> None:
    norms = [norm_of("RMSNorm"), norm_of("RMSNorm"), norm_of("LayerNorm")]
    _, notes = bound(*norms)
    kernels = [vars(norm)[FORWARD_KEY].kernels for norm in norms]
    assert kernels[0] is kernels[1] is not kernels[2]
    assert notes == ["prompts: 2 of 2 kinds of norms run by kernels"]


def test_kernels_that_are_slower_are_not_used(times: dict[str, float]) -> None:
    times["ours"] = 3.0
    norm = norm_of("RMSNorm")
    ledger, notes = bound(norm)
    assert type(norm) is LlamaRMSNorm and not ledger.undos
    assert notes == ["prompts: 0 of 1 kinds of norms run by kernels"]


def test_a_kind_without_kernels_leaves_the_others_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = OnACpu.resolve

    def fails(self: OnACpu, program: Any, **options: Any) -> Any:
        if program.inputs[0].dims == (256, 2 * WIDTH):
            raise SearchError("no")
        return resolve(self, program, **options)

    monkeypatch.setattr(OnACpu, "resolve", fails)
    good, bad = norm_of("RMSNorm"), LlamaRMSNorm(2 * WIDTH).bfloat16()
    _, notes = bound(bad, good)
    assert FORWARD_KEY in vars(good) and FORWARD_KEY not in vars(bad)
    assert notes == ["prompts: 1 of 2 kinds of norms run by kernels"]


def test_without_a_gpu_nothing_is_bound() -> None:
    norm = norm_of("RMSNorm")
    assert bind_norms(nn.ModuleList([norm]), Ledger(), KernelFinder(torch.device("cpu"))) == []
    assert FORWARD_KEY not in vars(norm)


# -- models


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `optimize` bind norms on a CPU."""
    monkeypatch.setattr(
        api, "bind_norms", lambda model, ledger, _: bind_norms(model, ledger, finder_on_cpu())
    )


def llama() -> Any:
    sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=1, vocab_size=64)
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    return Auto.from_config(config, dtype=torch.bfloat16).eval()


def norms_of(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]


def texts_of(model: Any) -> list[str]:
    """Return the programs and regions of a model's traced steps, and its traced rows."""
    runner = model.generate.runner
    plans = [*runner.traced.plans.values()] if runner.traced is not None else []
    texts = [str(program.graph) for plan in plans for program in plan.programs.values()]
    texts += [str(region.graph) for plan in plans for region in plan.regions_to_run()]
    rows = [row for row in model.mirage.report.rows if row.pattern == "traced"]
    return [*texts, *(f"{row.module} {row.part} {row.digest} {row.reason}" for row in rows)]


GREEDY: dict[str, Any] = dict(max_new_tokens=8, do_sample=False)


@pytest.mark.models
@pytest.mark.parametrize("name", CONFIGS)
def test_steps_are_the_same_as_without_kernels_of_norms(
    name: str, on_a_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_captures(monkeypatch)
    model, ids = model_of(name), torch.randint(0, 128, (1, 100))
    stock = model.generate(ids, **GREEDY)
    found = []
    for binds in (False, True):
        with monkeypatch.context() as patch:
            if not binds:
                patch.setattr(api, "bind_norms", lambda *_: [])
            mi.optimize(model, backend="cpu", tune="never")
        assert all((FORWARD_KEY in vars(norm)) == binds for norm in norms_of(model))
        tokens = [model.generate(ids, **GREEDY) for _ in range(3)]
        assert all(torch.equal(x, stock) for x in tokens)
        found.append((texts_of(model), model.mirage.report.decode))
        mi.restore(model)
    assert found[0] == found[1]
    texts, counts = found[1]
    assert texts and counts["prefill: captured"] == 2


@pytest.mark.models
@pytest.mark.parametrize("name", CONFIGS)
def test_prompts_of_mixtures_run_norms_by_kernels_until_they_are_restored(
    name: str, rows: list[int], on_a_cpu: None
) -> None:
    model, ids = model_of(name), torch.randint(0, 128, (1, 100))
    kinds, held = [type(m) for m in model.modules()], [set(vars(m)) for m in model.modules()]
    stock = model(ids).logits
    mi.optimize(model, backend="cpu", tune="never")
    assert "kinds of norms run by kernels" in str(model.mirage.report)
    rows.clear()
    ours = model(ids).logits
    assert len(rows) == len(norms_of(model)) and {*rows} <= {100, 400}  # 400: of four heads
    assert (ours - stock).abs().max() <= 3e-2 * stock.abs().max()
    mi.restore(model)
    assert [type(m) for m in model.modules()] == kinds
    assert [set(vars(m)) for m in model.modules()] == held
    rows.clear()
    assert torch.equal(model(ids).logits, stock) and not rows


@pytest.mark.models
def test_norms_of_models_with_weights_in_codes_run_by_kernels(
    rows: list[int], on_a_cpu: None
) -> None:
    model = with_codes(llama(), "fp8")
    ids = torch.randint(0, 64, (1, 100))
    mi.optimize(model, backend="cpu", tune="never")
    assert model.generate.runner.traced is not None
    assert all(FORWARD_KEY in vars(norm) for norm in norms_of(model))
    rows.clear()
    ours = model(ids).logits
    assert rows == [100] * len(norms_of(model))
    for norm in norms_of(model):
        vars(norm)[FORWARD_KEY].put_back(norm)
    stock = model(ids).logits
    assert (ours - stock).abs().max() <= 3e-2 * stock.abs().max()


@pytest.mark.models
def test_layers_with_bound_norms_see_a_new_forward_of_their_class(
    on_a_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = model_of("a step program, biases"), torch.randint(0, 128, (1, 1))
    kind = type(norms_of(model)[0])
    mi.optimize(model, backend="cpu", tune="never")
    row = next(i for i, row in enumerate(model.mirage.report.rows) if row.calls is not None)
    model(ids)
    assert model.mirage.report.rows[row].calls == 1
    monkeypatch.setattr(kind, "forward", lambda self, x: x)
    model(ids)
    (reason,) = model.mirage.report.rows[row].fallbacks
    assert reason == f"the forward of class {kind.__name__} was replaced"


@pytest.mark.models
def test_norms_of_models_whose_prompts_run_by_kernels_are_not_bound(on_a_cpu: None) -> None:
    model = llama()
    mi.optimize(model, backend="cpu", tune="never")
    assert model.generate.runner.model_kernels is not None
    assert not [m for m in model.modules() if FORWARD_KEY in vars(m)]
    assert "norms" not in str(model.mirage.report.notes)


@pytest.mark.models
def test_a_failure_after_norms_were_bound_puts_them_back(
    on_a_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("traced")

    def fails(*_: Any, **__: Any) -> Any:
        assert all(FORWARD_KEY in vars(norm) for norm in norms_of(model))
        raise RuntimeError("no")

    monkeypatch.setattr(api.Optimization, "swap", fails)
    with pytest.raises(RuntimeError, match="no"):
        mi.optimize(model, backend="cpu", tune="never")
    assert not [m for m in model.modules() if FORWARD_KEY in vars(m)]


# -- a GPU


@pytest.mark.gpu
@pytest.mark.slow
def test_captured_prompts_run_norms_by_kernels_and_are_as_stocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()  # of the times of kernels
    model = model_of("traced").cuda()
    ids = torch.randint(0, 128, (1, 200), device="cuda")
    (stock,) = first_logits(model, ids, 1)
    mi.optimize(model, tune="never")
    assert any(isinstance(vars(m).get(FORWARD_KEY), NormBinding) for m in norms_of(model))
    for ours in first_logits(model, ids, 3):
        assert (ours - stock).abs().max() <= 3e-2 * stock.abs().max()
    assert model.generate.runner.prefills == {"captured": 2}
