"""torch.compile and torch.export of swapped modules.

Kernels stay in the graph as `mirage_hf::run`, and nothing else changes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CompileConfig

from mirage_hf.api import optimize, restore
from mirage_hf.errors import ZooError
from mirage_hf.pipeline import torch_op
from mirage_hf.swap.guard import BINDING_KEY
from tests.helpers.tiny_models import decode_logits, prompt, tiny, twin_of

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("resolved")]
THOROUGH = pytest.mark.thorough
CLOSE = dict(atol=3e-5, rtol=1e-4)
OP = torch.ops.mirage_hf.run.default
ROPE = dict(position_embeddings=(torch.ones(1, 1, 8), torch.ones(1, 1, 8)))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    with torch.no_grad():
        yield
    torch.compiler.reset()


def count(gm: Any) -> int:
    return sum(node.target is OP for node in gm.graph.nodes)


def counting() -> tuple[Any, list[int]]:
    """Return a backend of torch.compile that runs graphs as they are, and a list.

    The list gets the number of our ops in each graph.
    """
    seen: list[int] = []

    def backend(gm: Any, _: Any) -> Any:
        seen.append(count(gm))
        return gm

    return backend, seen


def compiled(module: Any) -> tuple[Any, list[int]]:
    """Return the module compiled without graph breaks, and the list that `counting` returns."""
    backend, seen = counting()
    return torch.compile(module, backend=backend, fullgraph=True), seen


def pair(family: str = "llama", **options: Any) -> tuple[Any, Any]:
    """Return the first layer of a stock model and that of its optimized copy."""
    stock = tiny(family, num_hidden_layers=1)
    ours = optimize(twin_of(stock), **options)
    return stock.model.layers[0], ours.model.layers[0]


def hidden(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 1, 32, generator=torch.Generator().manual_seed(seed))


# -- compiled graphs hold kernels -----------------------------------------------------------------


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        pytest.param("gemma2", marks=pytest.mark.slow),
        *(pytest.param(f, marks=THOROUGH) for f in ("qwen3", "phi3")),
    ],
)
def test_a_whole_model_is_one_graph_with_kernels(family: str) -> None:
    model = optimize(tiny(family, num_hidden_layers=2))
    run, seen = compiled(model)
    assert torch.equal(
        run(prompt(1, 1), use_cache=False).logits, model(prompt(1, 1), use_cache=False).logits
    )
    assert seen == [
        sum(r.pattern != "attention" and r.module != "head" for r in model.mirage.report.swapped)
    ]
    assert seen == [8]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kept",
    [
        "gated_mlp",
        *(pytest.param(k, marks=THOROUGH) for k in ("rms_norm_linear", "linear_residual")),
    ],
)
def test_parts_that_stay_stock_are_traced_beside_kernels(kept: str) -> None:
    _, ours = pair("qwen2", patterns=[kept])
    run, seen = compiled(ours)
    assert torch.equal(run(hidden(), **ROPE), ours(hidden(), **ROPE))
    assert seen == [2 if kept == "linear_residual" else 1]


@pytest.mark.slow
def test_aot_autograd_keeps_them() -> None:
    _, ours = pair()
    run = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert torch.equal(run(hidden(), **ROPE), ours(hidden(), **ROPE))
    with torch.inference_mode():
        assert torch.equal(run(hidden(), **ROPE), ours(hidden(), **ROPE))


@pytest.mark.slow
def test_inductor_calls_them() -> None:
    mlp = optimize(tiny("louder", num_hidden_layers=1)).model.layers[0].mlp
    torch.testing.assert_close(torch.compile(mlp, fullgraph=True)(hidden()), mlp(hidden()), **CLOSE)


@pytest.mark.slow
def test_layers_compiled_one_by_one_share_a_graph() -> None:
    model = optimize(tiny("llama"))
    want = model(prompt(1, 1), use_cache=False).logits
    backend, seen = counting()
    for layer in model.model.layers:
        layer.compile(backend=backend, fullgraph=True)
    assert torch.equal(model(prompt(1, 1), use_cache=False).logits, want) and seen == [4]


@pytest.mark.slow
def test_rows_without_kernels_are_stock_and_dynamic() -> None:
    stock, ours = pair(batch_sizes=(1, 4))
    run, seen = compiled(ours)
    for rows in (1, 2, 3, 4, 5, 1, 4):
        assert torch.equal(run(hidden(rows), **ROPE), ours(hidden(rows), **ROPE))
    assert seen == [4, 0, 4]
    torch.testing.assert_close(run(hidden(4), **ROPE), stock(hidden(4), **ROPE), **CLOSE)


@pytest.mark.slow
def test_dropouts_that_are_switched_on_are_traced_as_stock() -> None:
    _, ours = pair("phi3")
    ours.resid_attn_dropout.p = 0.5
    ours.resid_attn_dropout.train()
    run, seen = compiled(ours)
    assert run(hidden(), **ROPE).shape == (1, 1, 32) and seen == [0]


@pytest.mark.slow
def test_generate_with_a_compiled_static_cache_gives_the_same_tokens() -> None:
    model = tiny("llama", num_hidden_layers=2)
    options: dict[str, Any] = dict(max_new_tokens=8, do_sample=False)
    want, (backend, seen) = model.generate(prompt(), **options), counting()
    config = CompileConfig(backend=backend, fullgraph=True, mode=None)
    config._compile_all_devices = True
    optimize(model)
    assert torch.equal(
        model.generate(prompt(), cache_implementation="static", compile_config=config, **options),
        want,
    )
    assert set(seen) == {8}
    assert torch.equal(model.generate(prompt(), **options), want)


@pytest.mark.slow
def test_calling_without_compiling_is_as_before() -> None:
    _, ours = pair()
    run, _ = compiled(ours)
    run(hidden(), **ROPE)
    bound = ours.__dict__[BINDING_KEY]
    assert bound.calls == 0 and bound.fallbacks == {}
    ours(hidden(), **ROPE)
    assert bound.calls == 1


@pytest.mark.slow
def test_restored_and_retired_modules_are_stock() -> None:
    model = optimize(tiny("llama", num_hidden_layers=2))
    model.model.layers[1].load_state_dict(
        tiny("llama", seed=1).model.layers[1].state_dict(), assign=True
    )
    decode_logits(model)  # its guard gives up
    run, seen = compiled(model)
    run(prompt(1, 1), use_cache=False)
    assert seen == [4]
    restore(model)
    run(prompt(1, 1), use_cache=False)
    assert seen == [4, 0]


# -- what must be traced as stock -----------------------------------------------------------------


def _hook(m: Any) -> None:
    m.mlp.up_proj.register_forward_hook(lambda module, args, out: 2 * out)


def _forward(m: Any) -> None:
    m.mlp.up_proj.forward = lambda x, w=m.mlp.up_proj.weight: 2 * nn.functional.linear(x, w)


def _method(m: Any) -> None:
    m.mlp.up_proj.forward = MethodType(
        lambda self, x: 2 * nn.functional.linear(x, self.weight), m.mlp.up_proj
    )


class Doubling(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def _kind(m: Any) -> None:
    m.mlp.up_proj.__class__ = Doubling


def _child(m: Any) -> None:
    m.mlp.act_fn = nn.ReLU()


def _other_shape(m: Any) -> None:
    torch.manual_seed(1)
    m.mlp.gate_proj, m.mlp.up_proj, m.mlp.down_proj = (
        nn.Linear(32, 40),
        nn.Linear(32, 40),
        nn.Linear(40, 32),
    )


def _epsilon(m: Any) -> None:
    m.input_layernorm.variance_epsilon = 0.5


def _dtype(m: Any) -> None:
    m.bfloat16()


def _bias(m: Any) -> None:
    m.self_attn.o_proj.bias = nn.Parameter(torch.linspace(-2, 2, 32))


CHANGES: dict[str, Callable[[Any], None]] = {
    "a hook": _hook,
    "a forward on the instance": _forward,
    "a method on the instance": _method,
    "another class": _kind,
    "another child": _child,
    "other shapes": _other_shape,
    "another epsilon": _epsilon,
    "another dtype": _dtype,
    "a bias that was not there": _bias,
}
OFTEN = "a hook", "another child", "another epsilon"


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [pytest.param(c, marks=[THOROUGH] * (c not in OFTEN)) for c in CHANGES]
)
def test_changes_send_a_graph_to_stock(change: str) -> None:
    stock, ours = pair()
    run, seen = compiled(ours)
    if change != "a hook":  # torch.compile does not guard on hooks, not even of stock modules
        run(hidden(), **ROPE)
    for m in (stock, ours):
        CHANGES[change](m)
    x = hidden().to(stock.input_layernorm.weight.dtype)
    rope = dict(position_embeddings=tuple(c.to(x.dtype) for c in ROPE["position_embeddings"]))
    assert torch.equal(run(x, **rope), stock(x, **rope))
    assert seen == ([0] if change == "a hook" else [4, 0])


@pytest.mark.slow
def test_training_autocast_and_other_arguments_are_stock() -> None:
    stock, ours = pair()
    run, seen = compiled(ours)
    run(hidden(), **ROPE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(run(hidden(), **ROPE), stock(hidden(), **ROPE))
    assert torch.equal(run(hidden(), colour="blue", **ROPE), stock(hidden(), **ROPE))
    assert torch.equal(run(hidden_states=hidden(), **ROPE), stock(hidden(), **ROPE))
    assert torch.equal(
        run(hidden().expand(1, 1, 32).transpose(0, 1), None, **ROPE), stock(hidden(), **ROPE)
    )
    ours.train()
    assert torch.equal(run(hidden(), **ROPE), stock(hidden(), **ROPE))
    assert seen[0] == 4 and set(seen[1:]) == {0} and len(seen) == 6


@torch.enable_grad()
@pytest.mark.slow
def test_gradients_are_those_of_stock() -> None:
    stock, ours = pair()
    run, seen = compiled(ours)
    for forward in (stock, run):
        forward(hidden(), **ROPE).square().sum().backward()
    assert seen == [0]
    assert all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(stock.parameters(), ours.parameters(), strict=True)
    )
    ours.requires_grad_(False)
    run(hidden(), **ROPE)
    run(hidden().requires_grad_(), **ROPE)
    assert seen == [0, 4, 0]


@pytest.mark.slow
def test_transforms_trace_stock() -> None:
    stock, ours = pair()
    x = torch.stack([hidden(seed=i) for i in range(2)])
    run, seen = compiled(torch.func.vmap(lambda y: ours(y, **ROPE)))
    torch.testing.assert_close(run(x), torch.func.vmap(lambda y: stock(y, **ROPE))(x), **CLOSE)
    frozen = ours.requires_grad_(False)
    run, seen_too = compiled(torch.func.grad(lambda y: frozen(y, **ROPE).sum()))
    torch.testing.assert_close(
        run(x[0]), torch.func.grad(lambda y: stock(y, **ROPE).sum())(x[0]), **CLOSE
    )
    assert seen == [0] and seen_too == [0]


@pytest.mark.slow
def test_weights_are_inputs_of_the_graph() -> None:
    stock, ours = pair()
    run, seen = compiled(ours)
    run(hidden(), **ROPE)
    for m in (stock, ours):
        m.load_state_dict({k: 0.7 * v for k, v in m.state_dict().items()})
    torch.testing.assert_close(run(hidden(), **ROPE), stock(hidden(), **ROPE), **CLOSE)
    for m in (stock, ours):
        m.load_state_dict({k: 0.7 * v for k, v in m.state_dict().items()}, assign=True)
    torch.testing.assert_close(run(hidden(), **ROPE), stock(hidden(), **ROPE), **CLOSE)
    assert seen == [4]


# -- adapters -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("alone", [True, False])
def test_adapters_that_change_are_seen(alone: bool) -> None:
    """The adapters belong to a linear that is swapped alone, or to a layer."""
    peft = pytest.importorskip("peft")
    models = []
    for _ in range(2):
        model = tiny("llama", num_hidden_layers=1)
        torch.manual_seed(3)
        adapter = dict(lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, **adapter))
        model.add_adapter("other", peft.LoraConfig(r=2, **adapter))
        models.append(model.eval())
    stock, ours = models
    optimize(ours, patterns=["lora"] if alone else None)
    layers = [model.get_base_model().model.layers[0] for model in (ours, stock)]
    layer, want = (each.self_attn.q_proj if alone else each for each in layers)
    run, seen = compiled(layer)
    given: dict[str, Any] = {} if alone else ROPE

    def agree() -> None:
        torch.testing.assert_close(run(hidden(), **given), want(hidden(), **given), **CLOSE)

    agree()
    for model in models:
        model.set_adapter("other")
    agree()
    for model in models:
        model.set_adapter("default")
    agree()
    for each in layers:
        each.self_attn.q_proj.merge()
    agree()
    assert seen == [1 if alone else 5, 0, 0]


@pytest.mark.parametrize(
    "strict", [None, *(pytest.param(x, marks=pytest.mark.slow) for x in (True, False))]
)
def test_the_scaling_of_an_adapter_is_a_constant_of_the_graph(
    strict: bool | None, tmp_path: Path
) -> None:
    """A kernel in a CUDA graph may read it before earlier launches are done.

    Hence nothing in the graph may write it.
    """
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj", "o_proj"],
        init_lora_weights=False,
        alpha_pattern={"v_proj": 3},
    )
    model = peft.get_peft_model(tiny("llama", num_hidden_layers=1), adapters).eval()
    layer, graphs = optimize(model).get_base_model().model.layers[0], []
    want = layer(hidden(), **ROPE)
    if strict is None:
        run = torch.compile(layer, backend=lambda gm, _: graphs.append(gm) or gm, fullgraph=True)
    else:
        torch.export.save(
            torch.export.export(layer, (hidden(),), ROPE, strict=strict), tmp_path / "layer.pt2"
        )
        graphs.append(run := torch.export.load(tmp_path / "layer.pt2").module())
    assert torch.equal(run(hidden(), **ROPE), want) and count(graphs[0]) == 6
    names = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert not [
        name for name in names if any(what in name for what in ("full", "zeros", "clone", "lift"))
    ], names


@pytest.mark.slow
def test_scalings_that_are_tensors_are_read_by_the_graph() -> None:
    """Their values may change unnoticed, so such adapters run stock there."""
    peft = pytest.importorskip("peft")
    from peft.utils.hotswap import prepare_model_for_compiled_hotswap

    models = []
    for _ in range(2):
        model = tiny("llama", num_hidden_layers=1)
        torch.manual_seed(3)
        models.append(
            peft.get_peft_model(
                model, peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
            ).eval()
        )
        prepare_model_for_compiled_hotswap(models[-1])
    optimize(models[1])
    want, layer = (model.get_base_model().model.layers[0] for model in models)
    run, seen = compiled(layer)
    for _ in range(2):
        torch.testing.assert_close(run(hidden(), **ROPE), want(hidden(), **ROPE), **CLOSE)
        for each in (want, layer):
            each.self_attn.q_proj.scale_layer(0.5)
    assert seen == [0]


# -- torch.export ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=THOROUGH)])
def test_exported_programs_hold_kernels_and_parameters(strict: bool) -> None:
    _, ours = pair()
    exported = torch.export.export(ours, (hidden(),), ROPE, strict=strict)
    assert count(exported.graph_module) == count(exported.run_decompositions().graph_module) == 4
    assert set(exported.state_dict) == set(ours.state_dict()) and not exported.constants
    module = exported.module()
    assert torch.equal(module(hidden(seed=2), **ROPE), ours(hidden(seed=2), **ROPE))
    module.load_state_dict({k: 2 * v for k, v in ours.state_dict().items()})
    ours.load_state_dict({k: 2 * v for k, v in ours.state_dict().items()})
    assert torch.equal(module(hidden(), **ROPE), ours(hidden(), **ROPE))


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=THOROUGH)])
def test_an_exported_program_for_any_batch_is_stock(strict: bool) -> None:
    stock, ours = pair(batch_sizes=(4,))
    shapes = {"hidden_states": {0: torch.export.Dim.DYNAMIC}, "position_embeddings": (None, None)}
    exported = torch.export.export(ours, (hidden(4),), ROPE, dynamic_shapes=shapes, strict=strict)
    assert count(exported.graph_module) == 0
    assert torch.equal(exported.module()(hidden(7), **ROPE), stock(hidden(7), **ROPE))


LOADS = """
import sys, torch
import mirage_hf
exported = torch.export.load(sys.argv[1])
x, want = torch.load(sys.argv[2])
assert torch.equal(exported.module()(x), want), "another result"
print("same")
"""


@pytest.mark.slow
def test_a_saved_program_finds_its_kernels_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The real resolver keeps what it finds in the cache, where the other process looks.
    monkeypatch.undo()
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path / "cache"))
    ours = optimize(tiny("louder", num_hidden_layers=1)).model.layers[0].mlp
    exported = torch.export.export(ours, (hidden(),))
    assert count(exported.graph_module) == 1
    torch.export.save(exported, tmp_path / "mlp.pt2")
    torch.save((hidden(seed=3), ours(hidden(seed=3))), tmp_path / "want.pt")
    done = subprocess.run(
        [sys.executable, "-c", LOADS, str(tmp_path / "mlp.pt2"), str(tmp_path / "want.pt")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.endswith("same\n"), done.stderr
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(torch_op, "_known", {})
    with pytest.raises(
        ZooError, match=r"no kernel for program .*empty.*run mirage_hf\.optimize here"
    ):
        exported.module()(hidden())
