"""The guard of a swapped layer: whether a call runs kernels or the stock forward, and why."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import BaseTorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers.utils.output_capturing import _active_collector

from mirage_hf.api import optimize
from mirage_hf.swap import guard
from mirage_hf.swap.guard import BINDING_KEY
from tests.helpers.swapped_models import EVENTS, counts, layer_of, swapped
from tests.helpers.tiny_models import decode_logits, prompt, tiny, twin_of

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("resolved"), pytest.mark.slow]
CLOSE = dict(atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("reason", EVENTS)
def test_a_changed_model_runs_the_stock_forward(reason: str) -> None:
    stock, ours = swapped()
    for model in (stock, ours):
        EVENTS[reason](model)
    torch.testing.assert_close(decode_logits(ours).float(), decode_logits(stock).float(), **CLOSE)
    assert counts(ours)[reason] == (5 if reason == "training mode" else 4)


def test_children_given_another_class_are_not_bypassed() -> None:
    class Doubling(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    stock, ours = swapped()
    for model in (stock, ours):
        layer_of(model).mlp.up_proj.__class__ = Doubling
    torch.testing.assert_close(decode_logits(ours), decode_logits(stock), **CLOSE)
    assert counts(ours)["up_proj has changed its class"] == 4


def test_dropouts_that_are_switched_on_drop() -> None:
    stock = tiny("phi3", num_hidden_layers=2, resid_pdrop=0.5)
    ours = optimize(twin_of(stock), verify=False)
    seen = []
    for model in (stock, ours):
        layer_of(model).resid_mlp_dropout.train()  # the model itself stays in eval mode
        torch.manual_seed(0)
        seen.append(decode_logits(model))
    torch.testing.assert_close(seen[1], seen[0], **CLOSE)
    assert counts(ours) == {"prefill": 1, "dropout is active": 4}
    layer_of(ours).resid_mlp_dropout.p = 0.0
    decode_logits(ours)
    assert counts(ours) == {"prefill": 2, "dropout is active": 4}


def test_dropouts_that_are_functions_drop() -> None:
    stock = tiny("starcoder2", num_hidden_layers=2, residual_dropout=0.5)
    ours = optimize(twin_of(stock), verify=False)
    for part in ("mlp", "self_attn"):
        seen = []
        for model in (stock, ours):
            getattr(layer_of(model), part).train()
            torch.manual_seed(0)
            seen.append(decode_logits(model))
            getattr(layer_of(model), part).eval()
        torch.testing.assert_close(seen[1], seen[0], **CLOSE)
    assert counts(ours) == {"prefill": 2, "a part is in training mode": 8}


def _norm(m: Any) -> None:
    layer_of(m).input_layernorm = copy.deepcopy(layer_of(m).input_layernorm)
    layer_of(m).input_layernorm.weight.data.mul_(3)


def _attention(m: Any) -> None:
    layer_of(m).self_attn = copy.deepcopy(layer_of(m).self_attn)
    layer_of(m).self_attn.q_proj.weight.data.mul_(3)


def _attention_hook(m: Any) -> None:
    layer_of(m).self_attn.register_forward_hook(lambda module, args, out: (2 * out[0], *out[1:]))


def _down(m: Any) -> None:
    layer_of(m).mlp.down_proj = copy.deepcopy(layer_of(m).mlp.down_proj)
    layer_of(m).mlp.down_proj.weight.data.mul_(3)


@pytest.mark.parametrize("family", ["llama", "louder"])
@pytest.mark.parametrize("change", [_norm, _attention, _attention_hook, _down])
def test_children_that_stayed_stock_may_change(family: str, change: Callable[[Any], None]) -> None:
    stock, ours = swapped(family, patterns=["gated_mlp"])
    plain = decode_logits(ours)
    for model in (stock, ours):
        change(model)
    torch.testing.assert_close(decode_logits(ours), decode_logits(stock), **CLOSE)
    assert not torch.allclose(decode_logits(ours), plain)
    bound = (layer_of(ours) if family == "llama" else layer_of(ours).mlp).__dict__[BINDING_KEY]
    assert set(bound.fallbacks) == {"prefill"} and bound.calls == 12


def test_classes_patched_later_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, ours = swapped()
    plain = decode_logits(stock)
    for inner in (
        type(layer_of(stock)),
        type(layer_of(stock).mlp),
        type(layer_of(stock).self_attn),
        type(layer_of(stock).input_layernorm),
    ):
        forward = inner.forward

        def patched(*args: Any, forward: Any = forward, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            return (1.5 * out[0], *out[1:]) if isinstance(out, tuple) else 1.5 * out

        with monkeypatch.context() as patch:
            patch.setattr(inner, "forward", patched)
            assert torch.equal(decode_logits(ours), decode_logits(stock)) and not torch.equal(
                decode_logits(stock), plain
            )
            assert counts(ours)[f"the forward of class {inner.__name__} was replaced"] == 4
    layer_of(ours).input_layernorm.variance_epsilon = layer_of(
        stock
    ).input_layernorm.variance_epsilon = 0.5
    torch.testing.assert_close(decode_logits(ours), decode_logits(stock), **CLOSE)
    assert counts(ours)["a variance_epsilon was changed"] == 4


def test_strided_inputs_are_right() -> None:
    stock, ours = swapped()
    x, cos = torch.randn(1, 1, 64)[..., ::2], torch.ones(1, 1, 8)
    with torch.no_grad():
        a, b = (layer_of(m)(x, position_embeddings=(cos, cos)) for m in (stock, ours))
    torch.testing.assert_close(a, b, **CLOSE)
    assert counts(ours) == {}


def test_weights_changed_in_place_are_seen() -> None:
    stock, ours = swapped()
    for model in (stock, ours):
        with torch.no_grad():
            layer_of(model).mlp.gate_proj.weight.mul_(1.5)
            model.load_state_dict({k: v * 0.9 for k, v in model.state_dict().items()})
    torch.testing.assert_close(decode_logits(ours), decode_logits(stock), **CLOSE)
    assert counts(ours) == {"prefill": 1}


def test_a_replaced_child_is_not_kept_alive() -> None:
    _, ours = swapped()
    old = weakref.ref(layer_of(ours).mlp.gate_proj)
    EVENTS["gate_proj was replaced"](ours)
    decode_logits(ours)
    assert old() is None


def test_moved_weights_free_their_old_memory() -> None:
    _, ours = swapped()
    old = weakref.ref(layer_of(ours).mlp.gate_proj.weight.data.untyped_storage())
    ours.bfloat16()
    assert old() is None


@pytest.mark.parametrize(
    "family", ["llama", "granite"]
)  # the second model's layers have other numbers
def test_a_deleted_model_frees_its_memory(family: str) -> None:
    model = optimize(tiny(family))
    model.generate(prompt(), max_new_tokens=3)
    alive = weakref.ref(
        layer_of(model).mlp.gate_proj.weight
    )  # it is not the layer's, because its dictionary may outlive it
    gc.collect()
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()


def run_once(model: Any, **kwargs: Any) -> Any:
    return model(prompt(1, 1), use_cache=False, **kwargs).logits


def test_gradients_go_the_stock_way() -> None:
    stock, ours = swapped()
    for model in (stock, ours):
        run_once(model).sum().backward()
    assert counts(ours) == {"gradients needed": 1}
    assert torch.equal(
        layer_of(ours).mlp.gate_proj.weight.grad, layer_of(stock).mlp.gate_proj.weight.grad
    )
    frozen = twin_of(stock).requires_grad_(False)
    # the part that reads this weight stays stock
    layer_of(frozen).self_attn.k_proj.weight.requires_grad_(True)
    optimize(frozen, patterns=["gated_mlp"])
    run_once(frozen)
    assert counts(frozen) == {"gradients needed": 1}
    frozen.requires_grad_(False)
    optimize(frozen)
    run_once(frozen)
    assert counts(frozen) == {}


def test_gradient_checkpointing_trains_as_stock() -> None:
    stock, ours = swapped()
    for model in (stock, ours):
        model.gradient_checkpointing_enable()
        model.train()
        model(prompt(2, 5), labels=prompt(2, 5)).loss.backward()
    for a, b in zip(stock.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@torch.no_grad()
def test_modes_and_transforms_go_the_stock_way() -> None:
    stock, ours = swapped()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(run_once(ours), run_once(stock))
    with BaseTorchDispatchMode():
        assert torch.equal(run_once(ours), run_once(stock))
    with FlopCounterMode(display=False) as seen:
        run_once(ours)
    with FlopCounterMode(display=False) as wanted:
        run_once(stock)
    assert seen.get_total_flops() == wanted.get_total_flops() > 0
    handle = nn.modules.module.register_module_forward_hook(lambda *a: None)
    run_once(ours)
    handle.remove()
    assert counts(ours) == {
        "autocast": 1,
        "a torch mode or transform is active": 1,
        "global forward hooks": 2,
    }


@torch.no_grad()
def test_unknown_arguments_and_other_shapes_go_the_stock_way() -> None:
    stock, ours = swapped()
    for model in (stock, ours):
        run_once(model, colour="blue")
        model(prompt(4, 1), use_cache=False)
    cos = torch.ones(1, 1, 8)
    x = torch.randn(1, 1, 32)
    a = layer_of(stock)(x, None, position_embeddings=(cos, cos))
    b = layer_of(ours)(x, None, position_embeddings=(cos, cos))
    c = layer_of(ours)(hidden_states=x, position_embeddings=(cos, cos))
    assert torch.equal(a, b) and torch.equal(a, c)
    assert counts(ours) == {
        "unknown argument colour": 1,
        "no kernel for 4 rows": 1,
        "expected one positional argument": 2,
    }


@torch.no_grad()
def test_inner_outputs_are_those_of_stock() -> None:
    stock, ours = swapped()
    for model in (stock, ours):
        model.set_attn_implementation("eager")
    a, b = (
        m(prompt(1, 1), use_cache=False, output_attentions=True, output_hidden_states=True)
        for m in (stock, ours)
    )
    assert len(b.attentions) == 3 and all(
        torch.equal(x, y) for x, y in zip(a.attentions, b.attentions, strict=True)
    )
    assert counts(ours) == {"output_attentions": 1} or counts(ours) == {
        "attentions or other inner outputs asked for": 1
    }
    before = dict(counts(ours))
    a, b = (m(prompt(1, 1), use_cache=False, output_hidden_states=True) for m in (stock, ours))
    assert len(b.hidden_states) == 4
    torch.testing.assert_close(torch.stack(a.hidden_states), torch.stack(b.hidden_states), **CLOSE)
    run_once(ours)
    assert (
        counts(ours) == before and layer_of(ours).__dict__[BINDING_KEY].calls == 2
    )  # the hooks stay, and are ignored


@torch.no_grad()
def test_hooks_on_the_layer_itself_still_run() -> None:
    _, ours = swapped()
    seen: list[int] = []
    layer_of(ours).register_forward_hook(lambda m, args, out: seen.append(1))
    layer_of(ours).register_forward_hook(lambda m, args, out: out * 2)
    a = run_once(ours)
    assert seen == [1] and counts(ours) == {}
    layer_of(ours)._forward_hooks.clear()
    assert not torch.equal(a, run_once(ours))


@torch.no_grad()
def test_the_guard_makes_few_calls() -> None:
    """Count function calls, because times depend on the machine (3 to 9 µs on shared cores)."""
    model = optimize(tiny("llama").requires_grad_(False))
    layer = layer_of(model)
    bound, state, args = layer.__dict__[BINDING_KEY], layer.__dict__, (torch.randn(1, 1, 32),)
    kwargs = dict(
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        use_cache=True,
        position_embeddings=None,
    )
    events: list[str] = []
    sys.setprofile(lambda _, event, __: events.append(event))
    try:
        answer = bound.choose(state, args, kwargs)
    finally:
        sys.setprofile(None)
    assert type(answer) is not str
    assert sum(event in ("call", "c_call") for event in events) <= 40  # 38 with Python 3.11


# -- one decision at a time -----------------------------------------------------------------------


@pytest.fixture
def swapped_layer() -> Any:
    """Return a swapped layer with kernels for one and three rows. Nothing wants gradients."""
    model = tiny("llama", num_hidden_layers=2).requires_grad_(False)
    return layer_of(optimize(model, batch_sizes=(1, 3), verify=False))


def choose(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module.__dict__[BINDING_KEY].choose(module.__dict__, args, kwargs)


def rows(*dims: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*dims, dtype=dtype)


def test_the_kernels_are_those_for_the_number_of_rows(swapped_layer: Any) -> None:
    kernels = swapped_layer.__dict__[BINDING_KEY].kernels
    assert sorted(kernels) == [1, 3] and kernels[1] is not kernels[3]
    assert choose(swapped_layer, rows(1, 1, 32)) is kernels[1]
    assert choose(swapped_layer, rows(3, 1, 32), use_cache=True) is kernels[3]
    assert choose(swapped_layer, rows(1, 3, 32)) is kernels[3]  # three tokens of one text


@pytest.mark.parametrize(
    "x, reason",
    [
        (rows(1, 5, 32), "prefill"),
        (rows(1, 2, 32), "prefill"),
        (rows(2, 1, 32), "no kernel for 2 rows"),
        (rows(1, 32), "no kernel for 1 rows"),
        (rows(1, 1, 1, 32), "no kernel for 1 rows"),
        (rows(2, 1, 16), "no kernel for 1 rows"),
        (rows(1, 1, 32, dtype=torch.float64), "input is torch.float64 on cpu"),
        (nn.Parameter(rows(1, 1, 32)), "input is a Parameter"),
        (None, "input is a NoneType"),
    ],
)
def test_inputs_that_no_kernel_takes_name_the_reason(
    swapped_layer: Any, x: Any, reason: str
) -> None:
    assert choose(swapped_layer, x) == reason


class RowOnGpu:
    """What the guard asks about a row on the first GPU, at some address."""

    shape, dtype = torch.Size((1, 1, 32)), torch.float32
    device, requires_grad = torch.device("cuda", 0), False

    def __init__(self, address: int):
        self.address = address

    def numel(self) -> int:
        return self.shape.numel()

    def get_device(self) -> int:
        return self.device.index

    def data_ptr(self) -> int:
        return self.address


def test_only_inputs_on_a_gpu_must_be_aligned(
    swapped_layer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel on a GPU loads vectors of 16 bytes; on a CPU no input is refused for this."""
    x = torch.randn(33)[1:].view(1, 1, 32)
    assert x.data_ptr() % 16 and type(choose(swapped_layer, x)) is dict
    monkeypatch.setattr(guard, "Tensor", RowOnGpu)
    binding = swapped_layer.__dict__[BINDING_KEY]
    binding.device = 0
    assert choose(swapped_layer, RowOnGpu(256)) is binding.kernels[1]
    assert choose(swapped_layer, RowOnGpu(264)) == "input is not 16-byte aligned"


def test_inputs_on_another_device_than_the_kernels_are_stocks(swapped_layer: Any) -> None:
    swapped_layer.__dict__[BINDING_KEY].device = 0
    assert choose(swapped_layer, rows(1, 1, 32)) == "input is torch.float32 on cpu"


@pytest.mark.parametrize("args", [(), (rows(1, 1, 32), None)])
def test_a_call_has_one_positional_argument(swapped_layer: Any, args: tuple[Any, ...]) -> None:
    assert "position" in choose(swapped_layer, *args)


def test_an_input_that_wants_gradients_is_stocks_unless_they_are_off(swapped_layer: Any) -> None:
    x = rows(1, 1, 32).requires_grad_()
    assert choose(swapped_layer, x) == "gradients needed"
    with torch.no_grad():
        assert type(choose(swapped_layer, x)) is dict


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook"])
def test_global_hooks_are_stocks(swapped_layer: Any, kind: str) -> None:
    handle = getattr(nn.modules.module, f"register_module_{kind}")(lambda *_: None)
    assert choose(swapped_layer, rows(1, 1, 32)) == "global forward hooks"
    handle.remove()
    assert type(choose(swapped_layer, rows(1, 1, 32))) is dict


def test_traces_and_transforms_are_stocks(swapped_layer: Any) -> None:
    seen: list[Any] = []
    given = rows(1, 1, 32)

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(choose(swapped_layer, given))
        return x

    torch.func.vmap(look)(rows(2, 3))
    torch.jit.trace(look, rows(2, 3), check_trace=False)
    assert seen[0] == "a torch mode or transform is active"
    assert type(seen[1]) is str  # a trace makes tensors of sizes, so the rows have no kernel


def test_a_trace_is_stocks_even_if_its_sizes_are_numbers(
    swapped_layer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_tracing_state", object)
    assert choose(swapped_layer, rows(1, 1, 32)) == "a torch mode or transform is active"


@pytest.mark.parametrize(
    "recorded, served",
    [
        ({}, True),
        ({"hidden_states": []}, True),
        ({"hidden_states": [], "_hidden_states_layers": {0}}, True),
        ({"hidden_states": [], "attentions": []}, False),
        ({"router_logits": []}, False),
    ],
)
def test_only_what_a_layer_returns_can_be_recorded_from_kernels(
    swapped_layer: Any, recorded: dict[str, Any], served: bool
) -> None:
    """HF's collector records outputs of inner modules by hooks, and kernels bypass these."""
    token = _active_collector.set(recorded)
    try:
        chosen = choose(swapped_layer, rows(1, 1, 32))
    finally:
        _active_collector.reset(token)
    reason = "attentions or other inner outputs asked for"
    assert type(chosen) is dict if served else chosen == reason


def test_a_child_that_is_none_has_no_gradients(swapped_layer: Any) -> None:
    swapped_layer.mlp.register_module("nothing", None)
    assert type(choose(swapped_layer, rows(1, 1, 32))) is dict
    swapped_layer.mlp.register_parameter("more", nn.Parameter(torch.ones(1)))
    assert choose(swapped_layer, rows(1, 1, 32)) == "gradients needed"


@pytest.mark.parametrize(
    "given, reason",
    [
        ({"colour": "blue"}, "unknown argument colour"),
        ({"zeal": 1, "colour": "blue"}, "unknown argument colour"),
        ({"output_attentions": True}, "output_attentions"),
        ({"output_attentions": False, "use_cache": True}, None),
    ],
)
def test_keyword_arguments_that_kernels_cannot_serve(
    swapped_layer: Any, given: dict[str, Any], reason: str | None
) -> None:
    chosen = choose(swapped_layer, rows(1, 1, 32), **given)
    assert chosen == reason if reason else type(chosen) is dict


def test_a_part_of_a_layer_takes_no_keyword_arguments() -> None:
    model = optimize(tiny("louder").requires_grad_(False), patterns=["gated_mlp"])
    mlp = layer_of(model).mlp
    assert type(choose(mlp, rows(1, 32))) is dict and type(choose(mlp, rows(1, 1, 32))) is dict
    assert choose(mlp, rows(1, 32), use_cache=True) == "keyword arguments"


def test_a_removed_child_retires_the_kernels_for_good(swapped_layer: Any) -> None:
    binding = swapped_layer.__dict__[BINDING_KEY]
    mlp = swapped_layer.mlp
    del swapped_layer.mlp
    assert choose(swapped_layer, rows(1, 1, 32)) == "mlp was removed"
    swapped_layer.mlp = mlp
    assert choose(swapped_layer, rows(1, 1, 32)) == "mlp was removed"
    assert binding.composition is None and binding.traced == "" and binding.kernels == {}
    kept = ("children", "dropouts", "containers", "weights", "absences", "classes", "numbers")
    assert not any(getattr(binding, name) for name in (*kept, "adapters"))


def test_a_moved_weight_may_come_back_and_a_replaced_one_may_not(swapped_layer: Any) -> None:
    weight = swapped_layer.mlp.down_proj.weight
    where = weight.data
    weight.data = where.clone()
    assert choose(swapped_layer, rows(1, 1, 32)) == "mlp.down_proj.weight has moved"
    weight.data = where
    assert type(choose(swapped_layer, rows(1, 1, 32))) is dict
    swapped_layer.mlp.down_proj.weight = nn.Parameter(where, requires_grad=False)
    assert choose(swapped_layer, rows(1, 1, 32)) == "mlp.down_proj.weight was replaced"
    swapped_layer.mlp.down_proj.weight = weight
    assert choose(swapped_layer, rows(1, 1, 32)) == "mlp.down_proj.weight was replaced"


@pytest.mark.parametrize("own", [True, False], ids=["its own linear", "the module itself"])
def test_adapters_are_asked_at_each_call(swapped_layer: Any, own: bool) -> None:
    """What they answer has tests of its own."""
    binding = swapped_layer.__dict__[BINDING_KEY]
    linear = nn.Module() if own else swapped_layer
    linear.lora_A = held = nn.ModuleDict()
    asked: list[Any] = []
    answers = [None, "another adapter is active", None]
    recorded = SimpleNamespace(why_changed=lambda state: asked.append(state) or answers.pop(0))
    state = linear.__dict__ if own else None
    adapter = SimpleNamespace(state=state, containers=(("lora_A", held),), recorded=recorded)
    binding.adapters = (adapter,)
    x = rows(1, 1, 32)
    assert choose(swapped_layer, x) is binding.kernels[1]
    assert choose(swapped_layer, x) == "another adapter is active"
    assert choose(swapped_layer, x) is binding.kernels[1]
    assert all(state is linear.__dict__ for state in asked)
    linear.lora_A = nn.ModuleDict()
    assert choose(swapped_layer, x) == "lora_A was replaced" == binding.retired


def test_a_hook_that_is_removed_gives_the_kernels_back(swapped_layer: Any) -> None:
    handle = swapped_layer.mlp.up_proj.register_forward_hook(lambda *_: None)
    assert choose(swapped_layer, rows(1, 1, 32)) == "forward hook on up_proj"
    handle.remove()
    assert type(choose(swapped_layer, rows(1, 1, 32))) is dict


def test_a_binding_has_no_calls_and_no_fallbacks_at_first() -> None:
    """Checks count calls, and reset the counts. Without them nothing does."""
    model = optimize(tiny("llama"), verify=False)
    binding = layer_of(model).__dict__[BINDING_KEY]
    assert (binding.calls, binding.fallbacks, binding.retired) == (0, {}, "")


def test_counts_begin_anew_when_asked(swapped_layer: Any) -> None:
    binding = swapped_layer.__dict__[BINDING_KEY]
    binding.calls, binding.fallbacks["prefill"] = 4, 2
    binding.forget()
    assert binding.calls == 0 and binding.fallbacks == {}
