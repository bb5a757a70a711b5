"""Prompts that run while the host still compares the model with its fingerprint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from mirage_hf.api import optimize
from mirage_hf.decode import call_plan, generate, install, prefill, session
from mirage_hf.decode import runner as decode_runner
from mirage_hf.errors import OptimizeWarning
from tests.decode.test_traced_steps import convolution_and_attention
from tests.helpers import tiny_models
from tests.helpers.generate_comparison import assert_same, prompt, tiny
from tests.helpers.prompt_pairs import FULL, agree, optimized

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("captures")]


#: The families of the first test: how a captured prompt of theirs counts.
FAMILIES = {"llama": "captured, by kernels", "louder": "captured", "mixtral": "captured"}

#: By name: whether all that a captured prompt reads is still in its place, and the change.
CHANGES: dict[str, tuple[bool, Any]] = {
    "nothing": (True, lambda model: None),
    "a config's number": (True, lambda model: setattr(model.config, "initializer_range", 0.5)),
    "a weight in place": (True, lambda model: model.model.norm.weight.data.mul_(1.5)),
    "a norm's number": (
        False,
        lambda model: setattr(
            model.model.layers[1].post_attention_layernorm, "variance_epsilon", 0.5
        ),
    ),
    "an own forward": (True, lambda model: setattr(model.model.norm, "forward", lambda x: 2 * x)),
    "a hook": (
        True,
        lambda model: model.model.layers[0].mlp.register_forward_hook(lambda m, args, y: 2 * y),
    ),
    "a weight replaced": (
        True,
        lambda model: setattr(
            model.model.norm, "weight", torch.nn.Parameter(3 * model.model.norm.weight.data)
        ),
    ),
    "a weight elsewhere": (  # "graphs" of tests hold the old memory, so it is still there
        True,
        lambda model: setattr(model.model.norm.weight, "data", 3 * model.model.norm.weight.data),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("depth", "streams"),
    [
        (0, False),
        (2, True),
        *(pytest.param(*both, marks=pytest.mark.thorough) for both in ((0, True), (2, False))),
    ],
)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_fingerprint_is_taken_while_the_prompt_runs(
    family: str,
    change: str,
    streams: bool,
    depth: int,
    captures: list[str],
    resolved: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock, ours = optimized(family, {})
    ours.generate.runner.depth = depth
    for length in (7, 8, 9):
        agree(stock, ours, 1, length)
    (early, alter), runner = CHANGES[change], ours.generate.runner
    by_kernels, kind = family == "llama", FAMILIES[family]
    # kernels of prompts were made for this number; a captured forward of stock's looks at none
    early |= change == "a norm's number" and not by_kernels
    # traced steps run only once the model is known, and experts change their form before steps
    most = depth if by_kernels else int(runner.traced is not None)
    steps_before = ["step"] * min(depth, most)
    for model in (stock, ours):
        alter(model)
    events, before = [], dict(runner.prefills)
    look, replay, enqueue = (
        session.take_fingerprint,
        prefill.PrefillGraph.run,
        session.Session.enqueue_step,
    )
    for module in (call_plan, session):
        monkeypatch.setattr(
            module, "take_fingerprint", lambda model: events.append("look") or look(model)
        )
    monkeypatch.setattr(
        session.Session, "enqueue_step", lambda self: events.append("step") or enqueue(self)
    )
    monkeypatch.setattr(
        prefill.PrefillGraph, "run", lambda self, *of: events.append("prompt") or replay(self, *of)
    )

    class Seen(list[Any]):
        def put(self, tokens: torch.Tensor) -> None:
            events.append("token" if self else "text")  # the text comes first, as stock's does
            self.extend(tokens.flatten().tolist())

        def end(self) -> None:
            events.append("end")

    given: dict[str, Any] = {"inputs": prompt(1, 10, seed=1), **FULL}
    seen = Seen()
    got = ours.generate(**given, **({"streamer": seen} if streams else {}))
    told = list(events)
    assert_same(stock.generate(**given), got)
    assert not streams or (seen == got.sequences[0].tolist() and told.count("end") == 1)
    same = change in ("nothing", "a weight in place")
    assert (
        told[: told.index("look")]
        == ["text"] * streams + (["prompt", *steps_before] if early else [])
        and told.count("look") == 1
    )
    assert not streams or told.index("look") < told.index("token")
    if same:  # one prompt, and it counts
        assert told.count("prompt") == 1 and runner.prefills[kind] == before[kind] + 1
    else:  # what ran too early counts for nothing, and the next call finds the model as it is
        assert runner.prefills[kind] == before[kind]
    agree(stock, ours, 1, 11)


def test_the_first_prompts_of_a_model_are_not_early(
    captures: list[str], resolved: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later prompts are not early either with a known obstacle."""
    stock, ours = optimized("llama", {})
    seen = []
    plan_call = generate.plan_call
    monkeypatch.setattr(
        generate,
        "plan_call",
        lambda *a, **k: seen.append(k["expected"] is not None) or plan_call(*a, **k),
    )
    for length in (7, 8, 9):
        agree(stock, ours, 1, length)
    with torch.autocast("cpu"):
        ours.generate(prompt(1, 9), max_new_tokens=3)
    agree(stock, ours, 1, 9)
    install(plain := tiny("llama"))
    for _ in range(3):
        plain.generate(prompt(1, 9), max_new_tokens=3)
    assert seen == [False, True, True, False, True] + [False, True, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [c for c in CHANGES if c != "a hook"]
)  # a hook makes calls run stock
def test_an_early_prompt_that_is_dropped_draws_no_random_numbers(
    change: str, captures: list[str], resolved: list[Any]
) -> None:
    """Each call that samples takes one seed from the generator and draws its tokens by it."""
    stock, ours = optimized("llama", {})
    for length in (7, 8, 9):
        agree(stock, ours, 1, length)
    CHANGES[change][1](ours)
    seen = []
    for _ in range(3):
        torch.manual_seed(5)
        tokens = ours.generate(prompt(1, 10), do_sample=True, max_new_tokens=12)
        seen.append((tokens.tolist(), torch.get_rng_state().tolist()))
    assert seen[0] == seen[1] == seen[2]


#: Options with a way to choose tokens for which no step was captured yet.
OTHER: dict[str, Any] = {**FULL, "repetition_penalty": 1.3}


def ahead_of_the_look(depth: int = 2) -> tuple[Any, Any]:
    """Return a model and its optimized twin whose next prompt starts early.

    It starts before the host looks at the model, and so do as many steps as on a GPU.
    """
    stock, ours = optimized("llama", {})
    ours.generate.runner.depth = depth
    for length in (7, 8, 9):
        agree(stock, ours, 1, length)
    return stock, ours


def test_no_module_runs_before_the_fingerprint_is_taken(
    captures: list[str], resolved: list[Any]
) -> None:
    """A step that is captured asks the model's own RoPE for its tables.

    A hook of that module is called as often as with stock.
    """
    models, seen = ahead_of_the_look(), ([], [])
    for model, calls in zip(models, seen, strict=True):
        model.model.rotary_emb.register_forward_hook(
            lambda m, args, y, calls=calls: calls.append(1)
        )
    given = {"inputs": prompt(1, 10), **OTHER}
    assert_same(*(model.generate(**given) for model in models))
    assert seen[0] == seen[1]


def test_no_step_is_captured_for_a_model_that_is_not_there(
    captures: list[str], resolved: list[Any]
) -> None:
    """Its graph would hold numbers of another model, and would run when the first model is back."""
    stock, ours = ahead_of_the_look()
    rotary, given = ours.model.rotary_emb, {"inputs": prompt(1, 10), **OTHER}
    frequencies = rotary.inv_freq
    rotary.inv_freq = 3 * frequencies
    hook = ours.model.norm.register_forward_hook(
        lambda m, args, y: None
    )  # with a hook the call runs stock, so the block's graphs stay
    ours.generate(**given)
    rotary.inv_freq = frequencies
    hook.remove()
    assert_same(stock.generate(**given), ours.generate(**given))


def test_an_early_failure_counts_only_for_the_present_model(
    captures: list[str], resolved: list[Any]
) -> None:
    models = ahead_of_the_look()
    for model in models:
        weight = model.model.layers[0].self_attn.o_proj.weight
        weight.data = weight.data.t()  # in the same memory, but kernels expect other strides
    given = {"inputs": prompt(1, 10), **OTHER}
    assert_same(*(model.generate(**given) for model in models))


@pytest.mark.parametrize("how", ["", "a hook", "a hook of the backbone"])
def test_tokens_that_the_kernels_have_no_row_for(
    how: str, captures: list[str], resolved: list[Any]
) -> None:
    """A larger table has replaced the captured one, or a hook changes the id of a token."""
    models = ahead_of_the_look()
    table = models[0].model.embed_tokens
    larger = torch.nn.Embedding.from_pretrained(
        torch.cat([table.weight.data, 2 * table.weight.data[:8]])
    )
    for model in models:
        if how == "a hook":
            model.model.embed_tokens.register_forward_pre_hook(
                lambda m, args: (args[0] % m.num_embeddings,)
            )
        elif how:
            model.model.register_forward_pre_hook(
                lambda m, args, kwargs: (
                    args,
                    {**kwargs, "input_ids": kwargs["input_ids"] % m.vocab_size},
                ),
                with_kwargs=True,
            )
        else:
            model.model.embed_tokens = larger
    given = {"inputs": prompt(1, 10), **FULL}
    given["inputs"][0, 3] = table.num_embeddings + 2
    assert_same(*(model.generate(**given) for model in models))


def test_a_call_that_stock_serves_starts_early_only_once(
    captures: list[str], resolved: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, ours = ahead_of_the_look()
    begun, replay = [], prefill.PrefillGraph.run
    monkeypatch.setattr(
        prefill.PrefillGraph, "run", lambda self, *of: begun.append(1) or replay(self, *of)
    )
    hook = ours.model.norm.register_forward_hook(lambda m, args, y: None)
    for _ in range(3):
        agree(stock, ours, 1, 10)
    assert len(begun) == 1
    hook.remove()
    for _ in range(3):
        agree(stock, ours, 1, 10)
    assert (
        len(begun) == 1 + 3
        and sum(n for what, n in ours.generate.runner.counts.items() if what.startswith("stock"))
        == 3
    )


def test_experts_that_change_their_form_for_steps_are_no_other_model(
    captures: list[str], resolved: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers changes the form of experts during steps. On a CPU it does not.

    There are traced steps for one row. Steps of two rows run the model's modules.
    """
    stock, ours = optimized("mixtral", {})
    for length in (7, 8, 9):
        agree(stock, ours, 1, length)
        agree(stock, ours, 2, length)
    changed = []

    @contextmanager
    def another_form() -> Iterator[None]:
        changed.append(1)
        before = ours.config._experts_implementation
        ours.config._experts_implementation_internal = "batched_mm"
        try:
            yield
        finally:
            ours.config._experts_implementation_internal = before

    attempts, attempt = [], generate.attempt
    monkeypatch.setattr(ours, "_optimize_model_for_decode", another_form)
    monkeypatch.setattr(generate, "attempt", lambda *of: attempts.append(1) or attempt(*of))
    agree(stock, ours, 1, 10)
    of_one = len(changed)
    assert of_one == (ours.generate.runner.traced is None)
    for length in (10, 11):
        agree(stock, ours, 2, length)
    assert len(attempts) == 3 and len(changed) == of_one + 2
    assert ours.config._experts_implementation != "batched_mm"


def test_memory_is_given_back_if_experts_do_not_get_their_form_back(
    captures: list[str], resolved: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, ours = optimized("mixtral", {})
    agree(stock, ours, 2, 9)
    idle = len(ours.generate.runner.pool._idle)

    @contextmanager
    def stays() -> Iterator[None]:
        yield
        raise ValueError("the form stays")

    with monkeypatch.context() as patch:
        patch.setattr(ours, "_optimize_model_for_decode", stays)
        with pytest.raises(ValueError, match="the form stays"):
            agree(stock, ours, 2, 9)
    assert len(ours.generate.runner.pool._idle) == idle
    agree(stock, ours, 2, 9)


def outcome(model: Any, **given: Any) -> Any:
    """Return the tokens of a call, or what it raised."""
    try:
        return model.generate(prompt(1, 9), max_new_tokens=6, do_sample=False, **given).tolist()
    except Exception as error:
        return type(error)


def norms_weight(model: Any) -> None:
    norm = next(m for m in model.modules() if type(m).__name__.endswith("Norm"))
    norm.weight = torch.nn.Parameter(3 * norm.weight.data)


def order_of_layers(model: Any) -> None:
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    first.layer_idx, second.layer_idx = second.layer_idx, first.layer_idx


@pytest.mark.parametrize("with_cache", [False, True])
@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", norms_weight),
        ("llama", order_of_layers),
        ("lfm2", norms_weight),
        ("qwen3 without kernels", norms_weight),
        ("qwen3 without kernels", order_of_layers),
    ],
)
def test_a_call_of_a_changed_model_is_planned_again(
    family: str, with_cache: bool, change: Any, captures: list[str], resolved: list[Any]
) -> None:
    """The plan before was for another model: over other steps, with another prefill."""
    name = family.partition(" ")[0]
    stock = convolution_and_attention() if name == "lfm2" else tiny_models.tiny(name)
    ours = tiny_models.twin_of(stock)
    try:
        optimize(ours, batch_sizes=(1,), verify=False) if name == family else install(ours)
    except OptimizeWarning:
        pytest.skip("steps over the cache of this version of transformers are not traced")
    for _ in range(4):
        assert outcome(ours) == outcome(stock)
    change(stock), change(ours)
    for _ in range(2):
        want, got = (
            outcome(m, **({"past_key_values": DynamicCache(config=m.config)} if with_cache else {}))
            for m in (stock, ours)
        )
        assert got == want


def test_each_call_has_its_own_fingerprint() -> None:
    """Of two threads, one may expect the earlier model while the other knows the present one."""

    class Raced(decode_runner.DecodeRunner):
        _graph_key = property(lambda self: ("another thread's", None), lambda self, found: None)  # type: ignore[assignment]

    given: Any = SimpleNamespace(fingerprint=SimpleNamespace(graph_facts="expected"), masks=None)
    assert Raced().graph_key_of(given) == ("expected", None)


def test_no_prompt_is_captured_before_the_fingerprint_is_taken(
    captures: list[str], resolved: list[Any]
) -> None:
    """A number that kernels were made for has changed, so their graph is dropped.

    Instead, the model's own forward runs.
    """
    stock, ours = models = ahead_of_the_look()
    seen: tuple[list[int], list[int]] = ([], [])
    numbers = [model.model.layers[1].post_attention_layernorm.__dict__ for model in models]
    hooks = [
        model.model.norm.register_forward_hook(lambda m, args, y, calls=calls: calls.append(1))
        for model, calls in zip(models, seen, strict=True)
    ]
    before = numbers[0]["variance_epsilon"]
    for number in numbers:
        number["variance_epsilon"] = 0.5
    agree(stock, ours, 1, 10)
    assert seen[0] == seen[1] and captures.count("prefill") == 1
    for hook in hooks:
        hook.remove()
    for number in numbers:
        number["variance_epsilon"] = before
    agree(stock, ours, 1, 10)
