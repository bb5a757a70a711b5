"""PEFT adapters: one plain unmerged adapter runs in kernels, within its layer or alone.

Stock runs all other uses of PEFT. The result is right at any moment.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mirage_hf.api import optimize, restore
from mirage_hf.decode.model_fingerprint import take_fingerprint
from mirage_hf.layers import operands
from mirage_hf.layers.part import adapter_role
from mirage_hf.match.matcher import match
from mirage_hf.patterns import PATTERNS
from mirage_hf.swap.guard import BINDING_KEY
from tests.helpers.generate_features import fake_captures
from tests.helpers.tiny_models import decode_logits, prompt, same, snapshot, tiny

peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.models, pytest.mark.usefixtures("resolved"), pytest.mark.slow]
CLOSE = dict(atol=3e-5, rtol=1e-4)
QV = ("q_proj", "v_proj")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ALONE = ["lora"]
"""The patterns with which layers stay stock, and each linear is swapped alone."""


def config(targets: Any = QV, r: int = 4, **options: Any) -> Any:
    targets = targets if isinstance(targets, str) else list(targets)
    return peft.LoraConfig(
        r=r, target_modules=targets, init_lora_weights=False, **{"lora_alpha": 2 * r, **options}
    )


def with_lora(
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    cast: bool = True,
    **options: Any,
) -> Any:
    model = tiny(family, dtype=dtype)
    torch.manual_seed(seed)
    return peft.get_peft_model(model, config(**options), autocast_adapter_dtype=cast).eval()


def both(patterns: Any = None, **options: Any) -> tuple[Any, Any]:
    """Return a stock PEFT model and the same optimized.

    Both have a second adapter that is not active.
    """
    models = []
    for _ in range(2):
        model = with_lora(**options)
        torch.manual_seed(7)
        model.add_adapter("other", config(r=2))
        models.append(model.eval())
    return models[0], optimize(models[1], patterns=patterns)


def lora_layer(model: Any) -> Any:
    return model.get_base_model().model.layers[1].self_attn.q_proj


def binding(model: Any) -> Any:
    """Return the binding of the second layer, or of one of its linears if layers stay stock."""
    layer = model.get_base_model().model.layers[1]
    return (layer if BINDING_KEY in layer.__dict__ else lora_layer(model)).__dict__[BINDING_KEY]


def counts(model: Any) -> dict[str, int]:
    return dict(binding(model).fallbacks)


def kinds(model: Any, patterns: Any = tuple(PATTERNS)) -> dict[str, list[str]]:
    return {m.name: [p.role for p in m.parts] for m in match(model, list(patterns))[0]}


# -- what is matched ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "low"),
    [
        (QV, {"qkv"}),
        (("gate_proj", "down_proj"), {"gated", "down"}),
        (("o_proj",), {"out"}),
        (ALL, {"qkv", "out", "gated", "down"}),
    ],
)
def test_layers_with_adapters_are_whole(targets: tuple[str, ...], low: set[str]) -> None:
    roles = ["qkv", "attention", "out", "gated", "down"]
    found = kinds(with_lora(targets=targets))
    assert list(found.values()) == 3 * [
        [
            each
            for role in roles
            for each in ((adapter_role(role), role) if role in low else (role,))
        ]
    ]


def test_linears_whose_layer_cannot_be_are_swapped_alone() -> None:
    """q, k and v are one product, so their adapters must be alike.

    Other patterns may not be asked for.
    """
    found = kinds(with_lora(rank_pattern={"v_proj": 8}))
    layer = "base_model.model.model.layers.0"
    assert found[layer] == ["out", "gated", "down"]
    assert found[f"{layer}.self_attn.q_proj"] == found[f"{layer}.self_attn.v_proj"] == ["lora"]
    found = kinds(with_lora(targets=ALL), ["lora"])
    assert len(found) == 3 * 7 and all(parts == ["lora"] for parts in found.values())
    found = kinds(with_lora(targets=QV), [p for p in PATTERNS if p != "lora"])
    assert all(parts == ["out", "gated", "down"] for parts in found.values())


def test_kernels_serve_adapters_of_any_scaling() -> None:
    """Scalings are operands.

    So kernels are made for the same blocks, and linears of one block may have different scalings.
    """

    def blocks(**options: Any) -> list[Any]:
        return [
            p.block
            for m in match(with_lora(targets=ALL, **options), list(PATTERNS))[0]
            for p in m.parts
        ]

    usual = blocks()
    assert (
        usual
        == blocks(lora_alpha=37)
        == blocks(use_rslora=True)
        == blocks(alpha_pattern={"k_proj": 3, "up_proj": 19})
    )


@pytest.mark.parametrize("patterns", [None, ALONE])
@pytest.mark.parametrize("scaling", [0.0, float("nan")])
def test_layers_that_differ_in_scalings_are_probed_each(
    scaling: float, patterns: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer with scaling 0 says nothing about other layers, nor does one without a scaling."""
    model = with_lora()
    for name in QV:
        getattr(model.get_base_model().model.layers[0].self_attn, name).scaling["default"] = scaling
    linear = type(lora_layer(model))
    own = linear.forward
    if scaling == 0:  # its adapters are scaled twice as much
        monkeypatch.setattr(
            linear, "forward", lambda self, x: 2 * own(self, x) - self.base_layer(x)
        )
    found = {
        name: "qkv" in parts or "lora" in parts
        for name, parts in kinds(model, patterns or tuple(PATTERNS)).items()
    }
    right = {name for name, is_done in found.items() if is_done}
    assert right and all(("layers.0" in name) == (scaling == 0) for name in right), found


def test_operands_that_are_no_parameters_are_there_before_any_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If they were made during a capture, they would be empty before the first replay."""
    model = with_lora(targets=("q_proj", "v_proj", "o_proj"), alpha_pattern={"v_proj": 3})
    monkeypatch.setattr(operands, "_shared_constants", {})
    with torch.inference_mode():
        optimize(model, verify=False)
    made = dict(operands._shared_constants)
    assert len(made) == 3 and not any(
        x.is_inference() for x in made.values()
    )  # those of q and v, of o, and zeros for k
    decode_logits(model)
    model.generate(input_ids=prompt(), max_new_tokens=3)
    assert binding(model).calls and list(map(id, operands._shared_constants.values())) == list(
        map(id, made.values())
    )


def test_an_operand_that_two_threads_make_is_what_the_first_made() -> None:
    """A graph may be captured with it meanwhile, and would read memory that was freed."""
    others: list[torch.Tensor] = []

    def make(n: int) -> torch.Tensor:
        if not others:
            others.append(torch.empty(0))
            others[0] = operands.shared_constant(make, n)  # the other thread
        return torch.zeros(n)

    assert (
        operands.shared_constant(make, 2) is others[0]
        and operands.shared_constant(make, 2) is others[0]
    )


@pytest.mark.parametrize("patterns", [None, pytest.param(ALONE, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "gemma2",
        *(pytest.param(family, marks=pytest.mark.thorough) for family in ("qwen2", "qwen3")),
    ],
)
@pytest.mark.parametrize(
    "targets", [QV, ("q_proj", "gate_proj", "down_proj"), ("o_proj", "up_proj")]
)
def test_decoding_gives_the_stock_logits(family: str, targets: Any, patterns: Any) -> None:
    rows = as_stock(family, targets, {"lora_down"} if patterns is None else {"lora"}, patterns)
    assert patterns is None or len(rows) == 3 * len(targets) * 2


@pytest.mark.parametrize(
    ("family", "low"),
    [
        *((f, {"lora_down"}) for f in ("gemma2", "cohere", "olmo2", "starcoder2")),
        *(  # tests above have Llama's layers, and olmo2 has norms of queries and keys, too
            pytest.param(f, {"lora_down"}, marks=pytest.mark.thorough) for f in ("llama", "qwen3")
        ),
        ("phi3", {"lora_down", "lora"}),
    ],
)
def test_every_linear_of_other_layers_too(family: str, low: set[str]) -> None:
    """These are MLPs without a gate, and packed projections.

    If gate and up are one linear, they have one adapter, and are swapped alone.
    """
    as_stock(family, "all-linear", low)


def as_stock(family: str, targets: Any, low: set[str], patterns: Any = None) -> list[Any]:
    """Compare the logits of decoding, and return the report's rows of adapters.

    Their patterns are `low`.
    """
    stock, ours = (
        with_lora(family, targets=targets),
        optimize(with_lora(family, targets=targets), batch_sizes=(1, 3), patterns=patterns),
    )
    for batch in (1, 3):
        torch.testing.assert_close(decode_logits(ours, batch), decode_logits(stock, batch), **CLOSE)
    rows = [r for r in ours.mirage.report.rows if r.pattern in ("lora", "lora_down")]
    assert {r.pattern for r in rows} == low and all(
        r.status == "swapped" and r.calls == 8 for r in rows
    )
    return rows


OTHERS: dict[str, Any] = dict(
    targets=ALL, alpha_pattern={"k_proj": 3, "up_proj": -19, "o_proj": 0.3}
)
"""Linears of one block have other scalings, those of others have them, too."""


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        (dict(targets=QV), torch.float32),
        (dict(targets=ALL), torch.float32),
        (OTHERS, torch.bfloat16),
        ({**OTHERS, "cast": False}, torch.bfloat16),
        pytest.param(dict(targets=QV), torch.bfloat16, marks=pytest.mark.thorough),
        pytest.param(dict(targets=ALL), torch.bfloat16, marks=pytest.mark.thorough),
        pytest.param(OTHERS, torch.float32, marks=pytest.mark.thorough),
        pytest.param({**OTHERS, "cast": False}, torch.float32, marks=pytest.mark.thorough),
    ],
)
def test_steps_by_kernels_give_the_stock_tokens(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    stock, ours = (with_lora(dtype=dtype, **options) for _ in range(2))
    optimize(ours, batch_sizes=(2,))
    kwargs = dict(
        input_ids=prompt(2),
        max_new_tokens=24,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    got, want = ours.generate(**kwargs), stock.generate(**kwargs)
    assert ours.mirage.runner.model_kernels is not None
    report = ours.mirage.report
    assert [what for what in report.decode if what.startswith("step: ")] == [
        "step: all by kernels"
    ], report.decode
    assert (
        not ours.mirage.runner.model_kernels.no_prefill
    )  # the probe of a step has compared them too
    close = CLOSE if dtype is torch.float32 else dict(atol=0.15, rtol=0.05)
    torch.testing.assert_close(got.logits[0], want.logits[0], **close)
    if dtype is torch.float32:
        assert torch.equal(got.sequences, want.sequences)


@pytest.mark.parametrize(
    "targets",
    [
        pytest.param(QV, marks=pytest.mark.thorough),
        ("k_proj", "o_proj", "up_proj"),
        pytest.param(ALL, marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("family", ["llama", "granite", "olmo2", "qwen2"])
def test_prompts_by_kernels_give_the_stock_logits(
    family: str, targets: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models have residual multipliers, norms after the adapters, and biases."""
    fake_captures(monkeypatch)
    stock, ours = (with_lora(family, targets=targets) for _ in range(2))
    optimize(ours, batch_sizes=(2,))
    for length in (5, 9, 7):
        kwargs = dict(
            input_ids=prompt(2, length),
            max_new_tokens=6,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        got, want = ours.generate(**kwargs), stock.generate(**kwargs)
        torch.testing.assert_close(got.logits, want.logits, **CLOSE)
        assert torch.equal(got.sequences, want.sequences)
    assert ours.mirage.runner.prefills == {"captured, by kernels": 2}


@pytest.mark.parametrize(
    "options",
    [
        dict(r=16, lora_alpha=64),
        dict(r=8, lora_alpha=64),
        dict(r=2, lora_alpha=-40),
        dict(lora_alpha=0),
        dict(r=3, use_rslora=True),
    ],
)
def test_layers_are_whole_whatever_adapters_are_scaled_by(options: dict[str, Any]) -> None:
    """Adapters are small, because a large scaling would make scores whose exponential overflows."""
    found = match(with_lora(targets=ALL, **options), list(PATTERNS))
    assert not found.rejected and all(
        "attention" in {p.role for p in m.parts} for m in found.modules
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cast", [True, False])
@pytest.mark.parametrize("patterns", [None, ALONE])
def test_adapters_in_float32_or_in_the_models_dtype(
    dtype: torch.dtype, cast: bool, patterns: Any
) -> None:
    stock, ours = (
        with_lora(dtype=dtype, cast=cast),
        optimize(with_lora(dtype=dtype, cast=cast), patterns=patterns),
    )
    sizes = dict(match(stock, patterns or list(PATTERNS))[0][0].parts[0].block.sizes)
    assert sizes["adapter_dtype"] is (torch.float32 if cast else dtype) and sizes["dtype"] is dtype
    torch.testing.assert_close(decode_logits(ours), decode_logits(stock), atol=0.1, rtol=0.05)
    rows = [r for r in ours.mirage.report.rows if patterns is None or r.pattern == "lora"]
    assert "lora_down" in {r.pattern for r in rows} or patterns
    assert rows and all(r.status == "swapped" for r in rows)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(use_dora=True), "uses a LoRA variant"),
        (dict(lora_bias=True), "adapter default has a bias"),
    ],
)
def test_an_adapter_that_is_not_plain_lora_says_so(options: dict[str, Any], reason: str) -> None:
    stock, ours = (with_lora("qwen2", **options) for _ in range(2))
    optimize(ours)
    rows = [r for r in ours.mirage.report.rows if r.pattern == "lora"]
    assert rows and all(r.status == "stock" and reason in r.reason for r in rows)
    torch.testing.assert_close(decode_logits(ours), decode_logits(stock), **CLOSE)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.merge_adapter(), "has adapters merged into its weight (default)"),
        (lambda m: m.base_model.disable_adapter_layers(), "has its adapters disabled"),
        (
            lambda m: m.base_model.set_adapter(["default", "other"]),
            "has 2 active adapters (default, other); kernels take one",
        ),
    ],
)
def test_other_states_of_peft_say_why_not(change: Callable[[Any], Any], reason: str) -> None:
    model = with_lora()
    model.add_adapter("other", config(r=2))
    change(model)
    assert any(reason in r.reason for r in match(model, ["lora"])[1])


@pytest.mark.parametrize("prepared", ["before", "after"])
@pytest.mark.parametrize("patterns", [None, ALONE])
def test_scalings_that_are_tensors_and_written_in_place(prepared: str, patterns: Any) -> None:
    """PEFT's preparation for hot-swapping makes scalings tensors.

    Swapping, and `scale_layer`, write into these tensors.
    """
    from peft.utils.hotswap import (
        hotswap_adapter_from_state_dict,
        prepare_model_for_compiled_hotswap,
    )

    stock, ours = (with_lora(targets=ALL) for _ in range(2))
    if prepared == "before":
        prepare_model_for_compiled_hotswap(stock)
        prepare_model_for_compiled_hotswap(ours)
    optimize(ours, patterns=patterns)
    if prepared == "after":
        prepare_model_for_compiled_hotswap(stock)
        prepare_model_for_compiled_hotswap(ours)

    def compare() -> int:
        seen = binding(ours).calls
        torch.testing.assert_close(decode_logits(ours), decode_logits(stock), **CLOSE)
        options = dict(input_ids=prompt(), max_new_tokens=12, do_sample=False)
        assert torch.equal(ours.generate(**options), stock.generate(**options))
        return binding(ours).calls - seen

    assert compare()
    before = take_fingerprint(ours).facts
    for alpha, fast in ((8.001, False), (3, False), (8, True)):
        for model in (stock, ours):
            state = {
                k.replace(".weight", ".default.weight"): 0.7 * v
                for k, v in peft.get_peft_model_state_dict(model).items()
            }
            hotswap_adapter_from_state_dict(
                model, state, "default", config(targets=ALL, lora_alpha=alpha)
            )
        assert bool(compare()) == fast and (take_fingerprint(ours).facts == before) == fast
    for model in (stock, ours):
        for layer in model.get_base_model().model.layers:
            layer.self_attn.q_proj.scale_layer(0.5)
    assert not compare()


# -- the life cycle after optimize() --------------------------------------------------------------


def _disable(m: Any) -> None:
    m.base_model.disable_adapter_layers()


def _delete(m: Any) -> None:
    m.set_adapter("other")
    m.delete_adapter("default")


def _rescale(m: Any) -> None:
    for layer in m.get_base_model().model.layers:
        layer.self_attn.q_proj.scaling["default"] *= 0.5


def _new_targets(m: Any) -> None:
    torch.manual_seed(9)
    m.add_adapter("wide", config(targets=("q_proj", "k_proj", "o_proj", "up_proj")))
    m.set_adapter("wide")


def _reload(m: Any) -> None:
    state = {k: 0.5 * v for k, v in peft.get_peft_model_state_dict(m).items()}
    peft.set_peft_model_state_dict(m, state)


def _new_holders(name: str, make: Callable[[nn.Module], nn.Module]) -> Callable[[Any], None]:
    """Replace one of PEFT's dictionaries of modules by a new one."""

    def change(m: Any) -> None:
        torch.manual_seed(9)
        for layer in m.get_base_model().model.layers:
            q = layer.self_attn.q_proj
            setattr(
                q,
                name,
                nn.ModuleDict(
                    {adapter: make(each) for adapter, each in getattr(q, name).items()}
                ).eval(),
            )

    return change


EVENTS: dict[str, tuple[Callable[[Any], Any], str | None]] = {
    "set_adapter": (lambda m: m.set_adapter("other"), "another adapter is active"),
    "two adapters": (
        lambda m: m.base_model.set_adapter(["default", "other"]),
        "another adapter is active",
    ),
    "disable": (_disable, "its adapters were disabled"),
    "merge": (lambda m: m.merge_adapter(), "its adapter was merged"),
    "safe merge": (
        lambda m: m.merge_adapter(safe_merge=True),
        "q_proj.base_layer.weight has moved",
    ),
    "merge and unmerge": (lambda m: (m.merge_adapter(), m.unmerge_adapter()), None),
    "delete": (_delete, "default was removed"),
    "rescale": (_rescale, "the adapter's scaling has changed"),
    "new targets": (_new_targets, "k_proj was replaced"),
    "new values": (_reload, None),
    "bfloat16": (lambda m: m.bfloat16(), "input is torch.bfloat16 on cpu"),
    "train": (lambda m: m.train(), "training mode"),
    "new lora_A": (
        _new_holders("lora_A", lambda m: nn.Linear(m.in_features, m.out_features, bias=False)),
        "lora_A was replaced",
    ),
    "new lora_dropout": (
        _new_holders("lora_dropout", lambda _: nn.Threshold(0.1, 0.0)),
        "lora_dropout was replaced",
    ),
    "dropout": (lambda m: lora_layer(m).lora_dropout.train(), None),
}


@pytest.mark.parametrize("patterns", [None, ALONE])
@pytest.mark.parametrize("event", EVENTS)
def test_every_state_of_peft_is_right_at_any_moment(event: str, patterns: Any) -> None:
    change, reason = EVENTS[event]
    if reason is not None and patterns is ALONE:  # a linear that is swapped alone sees only itself
        reason = {"new targets": "another adapter is active"}.get(
            event, reason.removeprefix("q_proj.")
        )
    stock, ours = both(patterns)
    decode_logits(ours)
    before, seen = take_fingerprint(ours).facts, binding(ours).calls
    for model in (stock, ours):
        change(model)
    torch.testing.assert_close(decode_logits(ours).float(), decode_logits(stock).float(), **CLOSE)
    if reason is None:
        assert set(counts(ours)) == {"prefill"} and binding(ours).calls > seen
    else:
        assert sum(n for text, n in counts(ours).items() if text.endswith(reason)) >= 4, counts(
            ours
        )
    if event not in ("merge and unmerge", "new values"):
        assert take_fingerprint(ours).facts != before


@pytest.mark.parametrize("patterns", [None, ALONE])
def test_adapters_that_come_back_are_fast_again(patterns: Any) -> None:
    _, ours = both(patterns)
    ours.set_adapter("other")
    decode_logits(ours)
    ours.set_adapter("default")
    seen = binding(ours).calls
    decode_logits(ours)
    with ours.disable_adapter():
        decode_logits(ours)
    decode_logits(ours)
    assert binding(ours).calls == seen + 8


def test_an_empty_module_is_seen_once_it_holds_something() -> None:
    """PEFT has a dozen mostly empty modules in each linear. The fingerprint skips empty ones."""
    model = with_lora()
    linear, before = lora_layer(model), take_fingerprint(model).facts
    assert type(linear.lora_dropout["default"]) is torch.nn.Identity
    handle = linear.lora_dropout["default"].register_forward_hook(lambda *_: None)
    assert take_fingerprint(model).facts != before
    handle.remove()
    assert take_fingerprint(model).facts == before
    linear.lora_embedding_A["default"] = torch.nn.Parameter(torch.zeros(2))
    assert take_fingerprint(model).facts != before


@pytest.mark.parametrize("patterns", [None, ALONE])
def test_mixed_batches_go_the_stock_way(patterns: Any) -> None:
    stock, ours = both(patterns)
    kwargs = dict(max_new_tokens=5, do_sample=False, adapter_names=["default", "other", "__base__"])
    for model in (stock, ours):
        model.generation_config = model.get_base_model().generation_config
    assert torch.equal(
        ours.generate(input_ids=prompt(3), **kwargs), stock.generate(input_ids=prompt(3), **kwargs)
    )


@pytest.mark.parametrize("patterns", [None, ALONE])
def test_merge_and_unload_leaves_a_stock_model(patterns: Any) -> None:
    stock, ours = both(patterns)
    a, b = stock.merge_and_unload(), ours.merge_and_unload()
    torch.testing.assert_close(decode_logits(b), decode_logits(a), **CLOSE)
    assert all(type(m).__module__.split(".")[0] != "peft" for m in b.modules())
    restore(ours)
    assert torch.equal(decode_logits(b), decode_logits(a))
    assert {type(m) for m in b.modules()} == {type(m) for m in a.modules()}


def test_an_adapter_put_on_an_optimized_model_is_not_bypassed() -> None:
    stock, ours = tiny("llama"), optimize(tiny("llama"))
    for model in (stock, ours):
        torch.manual_seed(3)
        model.add_adapter(config(targets=("q_proj", "up_proj", "o_proj")), "late")
        model.eval()
    torch.testing.assert_close(decode_logits(ours), decode_logits(stock), **CLOSE)
    assert "q_proj was replaced" in ours.mirage.report.fallbacks


def test_generate_and_restore() -> None:
    model = with_lora()
    before, base = snapshot(model), model.get_base_model()
    options = dict(input_ids=prompt(), max_new_tokens=20, do_sample=False)
    want = model.generate(**options)
    optimize(model)
    assert torch.equal(model.generate(**options), want)
    assert model.mirage.report.decode and "generate" in base.__dict__
    restore(model)
    assert same(before, snapshot(model)) and torch.equal(model.generate(**options), want)


def test_copies_and_saved_adapters_are_stock(tmp_path: Any) -> None:
    stock, ours = both()
    twin = copy.deepcopy(ours)
    assert all(BINDING_KEY not in m.__dict__ for m in twin.modules())
    torch.testing.assert_close(decode_logits(twin), decode_logits(stock), **CLOSE)
    for name, model in (("stock", stock), ("ours", ours)):
        model.save_pretrained(tmp_path / name)
    files = sorted(
        p.relative_to(tmp_path / "stock") for p in (tmp_path / "stock").rglob("*.safetensors")
    )
    assert files and all(
        (tmp_path / "stock" / f).read_bytes() == (tmp_path / "ours" / f).read_bytes() for f in files
    )


@pytest.mark.parametrize("patterns", [None, ALONE])
def test_training_an_optimized_adapter_gives_the_stock_gradients(patterns: Any) -> None:
    stock, ours = both(patterns)
    for model in (stock, ours):
        model.train()
        model(input_ids=prompt(2, 4), labels=prompt(2, 4)).loss.backward()
    grads = [[p.grad for p in m.parameters() if p.grad is not None] for m in (stock, ours)]
    assert grads[0] and all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
