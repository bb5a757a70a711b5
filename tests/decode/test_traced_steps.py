"""Traced steps of models that no layout describes: all results are stock's.

Kernels run their programs op by op here, so that no search is needed.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, Lfm2Config, Lfm2ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

from mirage_hf.api import optimize, restore
from mirage_hf.decode import (
    call_plan,
    prefill,
    prompts,
    runner,
    step,
    step_recording,
    trace_check,
    tracing,
)
from mirage_hf.decode.graphs import WARM_UPS
from mirage_hf.decode.masks import MaskPlan
from mirage_hf.decode.rings import rings_variants
from mirage_hf.decode.step_beginning import StepBeginning
from mirage_hf.errors import OptimizeWarning, SearchError
from mirage_hf.pipeline import resolver
from mirage_hf.trace import torch_ops
from mirage_hf.trace.attention import attention_as_one_node
from mirage_hf.trace.position_ops import PositionOps
from mirage_hf.trace.record import record
from scripts import survey_configs, survey_images, survey_models
from tests.helpers.generate_comparison import assert_same, tiny
from tests.helpers.step_pairs import (
    CHANGED,
    FULL,
    UNTRACED,
    agree,
    generated,
    no_kernels,
    shared,
    steps,
    stocks,
)
from tests.helpers.thorough import THOROUGH
from tests.helpers.tiny_models import Resolved, same, snapshot, twin_of

# Not run with other versions of transformers, which do not have all of these models.
pytestmark = [pytest.mark.models, pytest.mark.slow, pytest.mark.usefixtures("resolved")]

GREEDY = {"do_sample": False, "max_new_tokens": 24}
TRACED = {"traced": 1}


def built(name: str) -> Any:
    """Return a small random model of a type. LFM2's has a layer with a convolution's state."""
    if name == "lfm2":
        return convolution_and_attention()
    model = survey_models.build(name, survey_models.model_types()[name])
    if name == "gemma3":  # at first it is 0, and hides the image
        nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
    return model


def convolution_and_attention() -> Any:
    torch.manual_seed(1)
    config = Lfm2Config(
        vocab_size=211,
        hidden_size=64,
        intermediate_size=144,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
        initializer_range=0.125,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    return Lfm2ForCausalLM(config).eval()


def pair(name: str, batch_sizes: tuple[int, ...] = (1,), **options: Any) -> tuple[Any, Any]:
    """Return a small stock model and its optimized copy."""
    stock = built(name)
    ours = optimize(twin_of(stock), batch_sizes=batch_sizes, verify=False, **options)
    return stock, ours


shared_pair = shared(pair)


def prefills(model: Any) -> dict[str, int]:
    """Return how prompts were run other than by a call of stock's prefill."""
    return dict(model.generate.runner.prefills)


def text(batch: int = 1, length: int = 9, seed: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, survey_configs.SPECIAL_TOKENS, (batch, length), generator=generator)


def padded(batch: int = 3, length: int = 9) -> dict[str, Tensor]:
    mask = (torch.arange(length) >= 2 * torch.arange(batch)[:, None]).long()
    return {"input_ids": text(batch, length) * mask, "attention_mask": mask}


# -- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        pytest.param("opt", marks=pytest.mark.thorough),  # as gpt2
        "falcon",
        "gptj",
        pytest.param("apertus", marks=pytest.mark.thorough),  # as falcon, with another activation
        pytest.param("bart", marks=pytest.mark.thorough),  # in test_encoder_decoder.py too
        "lfm2",
        "jamba",
        "qwen3_next",
        "qwen3_vl",
        pytest.param("smolvlm", marks=pytest.mark.thorough),  # as qwen3_vl
        "gemma3",
        "roformer",  # makes positions of the number of tokens, as an integer
        "bloom",  # makes its bias of a mask of 0 and 1
        "zaya",  # calls masks by the types of its layers
        "falcon_h1",  # multiplies keys after it has split them into heads
        "gemma4_text",  # its last layers read the keys of others
        "gemma3n_text",  # likewise, and asks a distribution, which checks numbers on the host
        "qwen3_moe",  # known by name, and traced so that kernels run its experts
        pytest.param("olmoe", marks=pytest.mark.thorough),  # likewise
    ],
)
def test_tokens_logits_and_caches_are_stocks(name: str) -> None:
    sizes = (1, 3) if THOROUGH or name in ("gpt2", "qwen3_moe") else (3,)
    stock, ours = shared_pair(name, sizes)
    if 1 in sizes:
        agree(stock, ours, {"inputs": text(), **FULL, **GREEDY})
    agree(stock, ours, {**padded(), **FULL, **GREEDY})
    assert steps(ours) == {"traced": len(sizes)} and not stocks(ours)
    report = ours.mirage.report
    rows = [r for r in report.rows if r.pattern == "traced"]
    assert {r.rows for r in rows} == {*sizes} and {r.status for r in rows} == {"swapped"}
    assert any("searched kernels read 100% of the bytes" in note for note in report.notes)


@pytest.mark.parametrize(("name", "count"), [("mamba2", 1), ("lfm2", 2)])
def test_steps_without_keys_are_recorded_once(
    name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of the cache changes nothing in them. They also serve a longer text."""
    nodes = []

    def counted(*args: Any) -> Any:
        recording = record(*args)
        nodes.append(len(recording.nodes))
        return recording

    monkeypatch.setattr(step_recording, "record", counted)
    stock, ours = pair(name)
    assert sum(n > 0 for n in nodes) == count
    options = {"inputs": text(), "do_sample": False, "max_new_tokens": 300}
    assert torch.equal(stock.generate(**options), ours.generate(**options))
    assert steps(ours) == TRACED


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let a graph be a call, after the runs before a capture, as they would be on a GPU.

    Returns:
        A list that gets the name of the module, such as "prefill", at each capture.
    """
    made: list[str] = []

    def capture_for(name: str) -> Callable[..., Any]:
        def capture(run: Callable[[], None], *_: Any) -> tuple[Any, None]:
            for _ in range(WARM_UPS):
                run()
            made.append(name)
            return SimpleNamespace(replay=run), None

        return capture

    monkeypatch.setattr(step, "capture", capture_for("step"))
    monkeypatch.setattr(prefill, "capture", capture_for("prefill"))
    monkeypatch.setattr(runner, "why_no_capture", lambda device: None)
    return made


@pytest.mark.parametrize("name", [pytest.param("jamba", marks=pytest.mark.thorough), "qwen3_next"])
@pytest.mark.usefixtures("graphs")
def test_a_capture_leaves_states_as_they_are(name: str) -> None:
    """The runs before a capture move states on."""
    stock, ours = pair(name, (1, 3))
    agree(stock, ours, {"inputs": text(), **FULL, **GREEDY})
    agree(stock, ours, {**padded(), **FULL, **GREEDY})
    assert ours.mirage.report.decode["captured"] == 2 and steps(ours) == {"traced": 2}


@pytest.mark.parametrize(
    "name",
    [
        "lfm2",  # attention and a state
        "mamba2",  # states only
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("jamba", "falcon_h1", "qwen3_next")
        ),
    ],
)
def test_the_second_prompt_of_a_length_captures_stocks_prefill(
    name: str, graphs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A padding would move states on, so a graph serves prompts of one length."""
    monkeypatch.setattr(prefill, "MOST_EXACT", 2)
    stock, ours = pair(name, (1, 3))
    for batch, length in [(1, 9), (1, 9), (3, 9), (1, 9), (1, 12), (1, 12), (1, 9), (3, 9)]:
        given = {"inputs": text(batch, length, seed=len(graphs) + length), **GREEDY}
        agree(stock, ours, given)
    agree(stock, ours, {**padded(), **GREEDY})
    assert steps(ours) == {"traced": 9} and not stocks(ours)
    assert prefills(ours) == {"captured": 5} and graphs.count("prefill") == 3
    if name != "mamba2":  # its cache does not know its length
        agree(stock, ours, {"inputs": text(1, 12), **FULL, **GREEDY})
        assert prefills(ours) == {"captured": 5}, "the caller gets the cache that stock fills"
    for length in (15, 15, 9):  # one graph more than are kept
        agree(stock, ours, {"inputs": text(1, length), **GREEDY})
    assert graphs.count("prefill") == 5


def test_texts_for_a_model_of_images_share_a_captured_prefill(graphs: list[str]) -> None:
    """Their positions have axes that all count alike. Those of images do not."""
    stock, ours = pair("qwen3_vl")
    for length in (9, 11, 17):
        agree(stock, ours, {"inputs": text(1, length), **FULL, **GREEDY})
    inputs = survey_images.image_inputs(stock, "qwen3_vl")
    for _ in range(2):
        agree(stock, ours, {**inputs, **FULL, **GREEDY})
    assert steps(ours) == {"traced": 5} and not stocks(ours)
    assert prefills(ours) == {"captured": 2} and graphs.count("prefill") == 1


@pytest.mark.parametrize("what", ["needs a mask", "reads the host", "is long"])
def test_a_prefill_that_cannot_be_repeated_is_called(
    what: str, graphs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, ours = pair("lfm2")
    own, has_mask = GenerationMixin._prefill, []

    def of_mask(model: Any, ids: Tensor, config: Any, kwargs: Any, **options: Any) -> Any:
        has_mask.append(kwargs.get("attention_mask") is not None)
        outputs = own(model, ids, config, kwargs, **options)
        if what == "reads the host" and not has_mask[-1]:
            raise RuntimeError("operation not permitted when stream is capturing")
        if what == "needs a mask" and not has_mask[-1]:
            outputs.logits.mul_(-1)
        return outputs

    monkeypatch.setattr(GenerationMixin, "_prefill", of_mask)
    if what == "is long":
        monkeypatch.setattr(prompts, "MAX_STOCK_TOKENS", 8)
    else:
        with contextlib.suppress(RuntimeError):
            generated(stock, {"inputs": text(), **GREEDY})
        if not any(has_mask):
            pytest.skip("this version of transformers gives texts without padding no mask")
    for length in (9, 9, 9, 7, 7):
        agree(stock, ours, {"inputs": text(1, length), **GREEDY})
    ((found, times),) = prefills(ours).items()
    assert graphs.count("prefill") == (1 if what == "is long" else 0) and times == 1
    assert {
        "needs a mask": "without a mask, results differ by 2",
        "reads the host": "operation not permitted",
        "is long": "captured",
    }[what] in found
    assert steps(ours) == {"traced": 5}


@pytest.mark.parametrize(
    "name",
    ["qwen3_vl", pytest.param("smolvlm", marks=pytest.mark.thorough), "gemma3"],  # as qwen3_vl
)
def test_images_are_in_the_prompt_only(name: str) -> None:
    stock, ours = shared_pair(name)
    inputs = survey_images.image_inputs(stock, name)
    agree(stock, ours, {**inputs, **FULL, **GREEDY})
    agree(stock, ours, {"inputs": text(), **FULL, **GREEDY})
    assert steps(ours) == {"traced": 2}, stocks(ours)
    unlike = {**inputs, "pixel_values": 1 - inputs["pixel_values"]}
    first, second = (generated(stock, {**given, **FULL, **GREEDY}) for given in (inputs, unlike))
    assert not torch.equal(first.logits[-1], second.logits[-1])
    agree(stock, ours, {**unlike, **FULL, **GREEDY})


@pytest.mark.parametrize("length", [9, 40, 300])
def test_windows_of_32_tokens_in_texts_of_all_lengths(length: int) -> None:
    stock, ours = shared_pair("gemma3")
    given = {"inputs": text(1, length), **FULL, **GREEDY, "max_new_tokens": 40}
    agree(stock, ours, lambda: {**given, "past_key_values": DynamicCache(config=stock.config)})
    agree(stock, ours, given)
    assert steps(ours) == {"traced": 2}


def test_samples_are_drawn_with_our_numbers() -> None:
    stock, ours = shared_pair("gpt2", (3,))
    drawn = {"do_sample": True, "top_k": 20, "repetition_penalty": 1.2, "max_new_tokens": 24}
    agree(stock, ours, {**padded(), **FULL, **drawn})
    assert steps(ours) == TRACED


def test_a_cache_that_grows_over_a_block_of_slots() -> None:
    stock, ours = shared_pair("gpt2")
    agree(stock, ours, {"inputs": text(1, 225), **FULL, **GREEDY})
    agree(stock, ours, {"inputs": text(1, 5), **GREEDY})
    assert steps(ours) == {"traced": 2}


# -- how a step begins -----------------------------------------------------------------------------


@pytest.fixture
def beginnings(monkeypatch: pytest.MonkeyPatch) -> list[StepBeginning | None]:
    """Collect how steps begin."""
    made: list[StepBeginning | None] = []

    def of(*args: Any) -> StepBeginning | None:
        made.append(beginning_of(*args))
        return made[-1]

    beginning_of = StepBeginning.of
    monkeypatch.setattr(StepBeginning, "of", of)
    return made


@pytest.mark.parametrize(
    ("name", "tables", "windows"), [("falcon", 1, 0), ("lfm2", 1, 1), ("gemma3", 2, 2)]
)
def test_rows_of_tables_replace_ops_of_positions(
    name: str, tables: int, windows: int, beginnings: list[StepBeginning | None]
) -> None:
    stock, ours = shared_pair(name, (3,))
    agree(stock, ours, {**padded(), **FULL, **GREEDY})
    begun = beginnings[-1]
    assert begun is not None
    assert begun.tables.shape[:2] == (2, tables)
    assert len(begun.out.windows) == windows
    for plan in ours.generate.runner.traced.all_plans:
        left = {plan.recording.nodes[n].name for n in begun.left_out}
        assert {"aten.embedding", "aten.cos", "aten.sin"} <= left


@pytest.mark.parametrize("name", ["falcon", "gemma3"])
def test_positions_beyond_the_slots_are_computed(
    name: str, beginnings: list[StepBeginning | None]
) -> None:
    stock, ours = shared_pair(name, (3,))
    beginnings.clear()  # those of the check
    positions = 9 + torch.arange(9).expand(3, -1)
    given = {"input_ids": text(3), "position_ids": positions, **FULL, **GREEDY}
    for offset in (0, 700):
        agree(stock, ours, {**given, "position_ids": positions + offset})
    assert steps(ours) == {"traced": 2}
    assert beginnings == []


def test_tables_of_positions_are_computed_once_for_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock, ours = pair("falcon", (3,))
    filled: list[int] = []

    def fill(ops: PositionOps, tables: Tensor, batch: int) -> bool:
        filled.append(tables.shape[1])
        return usual(ops, tables, batch)

    usual = PositionOps.fill
    monkeypatch.setattr(PositionOps, "fill", fill)
    given = {**padded(), **FULL, **GREEDY}
    ours.generate.runner.pool.drop_idle()
    for _ in range(2):
        agree(stock, ours, given)
    (capacity,) = filled
    with torch.no_grad():
        for model in (stock, ours):
            model.transformer.rotary_emb.inv_freq.mul_(1.5)
    agree(stock, ours, given)
    assert filled == [capacity]  # the model has changed, and runs its own forward


def test_positions_that_steps_count_from_another_number_are_computed(
    beginnings: list[StepBeginning | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the prompt they are 400 greater, so beyond the slots. One call outgrows its block."""
    monkeypatch.setattr(call_plan, "FIRST_REACH", 16)
    stock = built("falcon")
    usual = type(stock).prepare_inputs_for_generation

    def far(self: Any, input_ids: Tensor, **given: Any) -> Any:
        made = usual(self, input_ids, **given)
        if made["input_ids"].shape[1] == 1:
            made["position_ids"] = made["position_ids"] + 400
        return made

    stock.__class__ = type("Far", (type(stock),), {"prepare_inputs_for_generation": far})
    ours = optimize(twin_of(stock), batch_sizes=(1,), verify=False)
    beginnings.clear()  # those of the check
    for length in (9, 225):
        agree(stock, ours, {"inputs": text(1, length), **FULL, **GREEDY, "max_new_tokens": 64})
    assert steps(ours) == {"traced": 2}
    assert beginnings == []


# -- caches of the caller's -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["gpt2", pytest.param("opt", marks=pytest.mark.thorough), "lfm2", "qwen3_next", "gemma3"],
)
def test_a_text_goes_on_from_the_cache_of_the_last_call(name: str) -> None:
    stock, ours = shared_pair(name)
    outputs = []
    for model in (stock, ours):
        first = generated(
            model,
            {
                "inputs": text(),
                "past_key_values": DynamicCache(config=model.config.get_text_config(decoder=True)),
                **FULL,
                **GREEDY,
            },
        )
        longer = torch.cat([first.sequences, text(1, 3, seed=4)], dim=-1)
        cache = first.past_key_values
        outputs.append(
            generated(model, {"inputs": longer, "past_key_values": cache, **FULL, **GREEDY})
        )
        assert outputs[-1].past_key_values is cache
    assert_same(*outputs)
    assert steps(ours) == {"traced": 2}, (steps(ours), stocks(ours))


# -- what is left as it is ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "lfm2", "gemma3"])
def test_restore_brings_back_the_model(name: str) -> None:
    model = built(name)
    before = snapshot(model)
    want = generated(model, {"inputs": text(), **GREEDY})
    optimize(model, verify=False)
    assert torch.equal(generated(model, {"inputs": text(), **GREEDY}), want)
    assert steps(model) == TRACED
    restore(model)
    assert same(before, snapshot(model)) and "mirage" not in model.__dict__
    assert torch.equal(generated(model, {"inputs": text(), **GREEDY}), want)


def test_optimize_under_inference_mode_traces_the_same() -> None:
    def rows(model: Any) -> list[tuple[str, ...]]:
        return [(row.module, row.part, row.status) for row in model.mirage.report.rows]

    stock, outside = pair("lfm2")
    model = built("lfm2")
    with torch.inference_mode():
        inside = optimize(model, verify=False)
        agree(stock, inside, {"inputs": text(), **GREEDY})
    assert rows(inside) == rows(outside) and steps(inside) == TRACED


def test_a_model_built_under_inference_mode_is_traced() -> None:
    with torch.inference_mode():
        stock, ours = pair("lfm2")
        agree(stock, ours, {"inputs": text(), **GREEDY})
    assert steps(ours) == TRACED


def test_named_patterns_trace_nothing() -> None:
    model = built("gpt2")
    with pytest.warns(OptimizeWarning, match="nothing in this GPT2LMHeadModel was replaced"):
        optimize(model, **UNTRACED)
    assert "mirage" not in model.__dict__


@pytest.mark.parametrize(
    ("name", "where"), [("gpt2", {no_kernels(2): 1}), ("lfm2", {}), ("qwen3_vl", {})]
)
def test_batch_sizes_that_were_not_traced(name: str, where: dict[str, int]) -> None:
    """A model whose own forward was never compared with stock's steps runs stock."""
    stock, ours = shared_pair(name)
    agree(stock, ours, {**padded(2), **FULL, **GREEDY})
    assert steps(ours) == where
    assert stocks(ours) == ([] if where else [f"stock: {no_kernels(2)}"])
    agree(stock, ours, {"inputs": text(), **GREEDY})
    assert steps(ours) == {**where, **TRACED}


# -- models that change after optimize() ----------------------------------------------------------


class Louder(GPT2MLP):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def new_weight(m: Any) -> None:
    norm = m.transformer.h[1].ln_1
    norm.weight = nn.Parameter(2 * norm.weight.detach())


def new_matrix(m: Any) -> None:
    linear = m.transformer.h[1].mlp.c_fc
    linear.weight = nn.Parameter(2 * linear.weight.detach())


def new_head(m: Any) -> None:
    m.lm_head.weight = nn.Parameter(m.lm_head.weight.detach().flip(0))


def hooked(m: Any) -> None:
    m.transformer.h[0].register_forward_hook(lambda module, given, result: 1.5 * result)


def own_forward(m: Any) -> None:
    mlp = m.transformer.h[0].mlp
    mlp.forward = lambda x: 2 * type(mlp).forward(mlp, x)


def without_a_layer(m: Any) -> None:
    del m.transformer.h[1]
    m.config.n_layer = 1


NEW: dict[str, Callable[[Any], Any]] = {
    "a norm's weight": new_weight,
    "a matrix": new_matrix,
    "the head": new_head,
    "a class": lambda m: setattr(m.transformer.h[0].mlp, "__class__", Louder),
    "an activation": lambda m: setattr(m.transformer.h[0].mlp, "act", nn.ReLU()),
    "an epsilon": lambda m: setattr(m.transformer.h[0].ln_1, "eps", 0.5),
    "a hook": hooked,
    "a forward": own_forward,
    "a scale": lambda m: setattr(m.transformer.h[0].attn, "scale_attn_weights", False),
    "a layer less": without_a_layer,
    "eager attention": lambda m: m.set_attn_implementation("eager"),
    "the config": lambda m: setattr(m.config, "reorder_and_upcast_attn", True),
    "another dtype": lambda m: m.double(),
    "training mode of a part": lambda m: m.transformer.drop.train(),
}


@pytest.fixture(scope="module")
def gpt2() -> Any:
    return built("gpt2")


#: Changes that a fingerprint sees as it sees others: a parameter replaced, a number of a module.
ALIKE = ("a matrix", "a scale")


@pytest.mark.parametrize(
    "change",
    [pytest.param(name, marks=pytest.mark.thorough) if name in ALIKE else name for name in NEW],
)
def test_a_changed_model_is_served_as_it_is(change: str, gpt2: Any) -> None:
    """By stock or by its own forward, never by the old trace."""
    stock, ours = twin_of(gpt2), optimize(twin_of(gpt2), verify=False)
    agree(stock, ours, {"inputs": text(), **GREEDY})
    before = generated(stock, {"inputs": text(), **FULL, **GREEDY})
    for model in (stock, ours):
        NEW[change](model)
    after = agree(stock, ours, {"inputs": text(), **FULL, **GREEDY})
    counted = steps(ours)
    assert counted.pop("traced") == 1, counted
    assert counted in ({}, {CHANGED: 1}) and bool(counted) == (not stocks(ours))
    if change not in ("eager attention", "the config", "another dtype"):
        assert not torch.equal(torch.cat(before.logits), torch.cat(after.logits)) or stocks(ours)


@pytest.mark.parametrize("name", ["gpt2", "lfm2"])
def test_weights_that_change_in_place_are_read_as_they_are(name: str) -> None:
    stock, ours = pair(name)
    agree(stock, ours, {"inputs": text(), **GREEDY})
    for model in (stock, ours):
        with torch.no_grad():
            for n, parameter in enumerate(model.parameters()):
                parameter.mul_(1 + 0.1 * (n % 5))
    agree(stock, ours, {"inputs": text(), **FULL, **GREEDY})
    assert steps(ours) == {"traced": 2}


@pytest.mark.parametrize("name", ["lfm2", "qwen3_vl"])
def test_a_changed_model_without_another_step_runs_stock(name: str) -> None:
    stock, ours = pair(name)
    for model in (stock, ours):
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().flip(0))
    agree(stock, ours, {"inputs": text(), **FULL, **GREEDY})
    assert steps(ours) == {} and stocks(ours) == [f"stock: {CHANGED}"]


# -- models that cannot be traced -----------------------------------------------------------------


def not_traced(model: Any) -> str:
    """Return the warning of optimize() for a model of which nothing is replaced."""
    with pytest.warns(OptimizeWarning) as caught:
        optimize(model, verify=False)
    assert "mirage" not in model.__dict__
    (warning,) = caught
    return str(warning.message)


def test_a_wrong_trace_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_ops.PLAIN_OPS, "silu", "relu")
    found = not_traced(built("lfm2"))
    assert "the traced step of 1 row after 3 tokens differs from stock's by " in found
    assert "with logits up to " in found


def test_a_kernel_that_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "resolve", lambda program, **_: Resolved(program, scale=1.01))
    assert "differs from stock's by" in not_traced(built("gpt2"))


def test_the_keys_of_an_indexer_are_cached() -> None:
    stock, ours = pair("deepseek_v32", (1, 3))
    agree(stock, ours, {"inputs": text(), **FULL, **GREEDY})
    agree(stock, ours, {**padded(), **FULL, **GREEDY})
    assert steps(ours) == {"traced": 2} and not stocks(ours)


class Rounded(Resolved):
    """A kernel that prefers one expert of a router by a rounding."""

    preferred = 0

    def run(self, inputs: Any, *out: Any) -> list[Tensor]:
        shift = 1e-6 * (torch.arange(4) == self.preferred)
        return [y + shift if y.shape[-1:] == (4,) else y for y in super().run(inputs, *out)]


def test_a_near_tie_of_a_router_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("jamba")
    routers = [m for name, m in model.named_modules() if name.endswith(".router")]
    assert routers
    with torch.no_grad():
        for router in routers:
            router.weight[2:] = router.weight[0]
    monkeypatch.setattr(resolver, "resolve", lambda program, **_: Rounded(program))

    def found() -> list[str]:
        notes = []
        for number in (0, 3):
            monkeypatch.setattr(Rounded, "preferred", number)
            ours = optimize(twin_of(model), verify=False)
            notes.append(next(n for n in ours.mirage.report.notes if "traced" in n))
        return notes

    assert all("run as traced" in note for note in found())
    monkeypatch.setattr(trace_check, "TakeChoices", lambda *_: contextlib.nullcontext())
    assert any("differs from stock's by" in note for note in found())


def test_a_wrong_kernel_before_a_router_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "resolve", lambda program, **_: Resolved(program, scale=1.01))
    ours = optimize(built("jamba"), verify=False)
    assert any("differs from stock's by" in note for note in ours.mirage.report.notes)


def test_the_check_runs_prompts_in_the_form_for_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form of experts for steps copies weights for each token: 26 GB for 16 rows of OLMoE."""
    in_form_for_steps = [False]
    fed = set()

    @contextlib.contextmanager
    def form_for_steps(_: Any) -> Any:
        in_form_for_steps.append(True)
        yield
        in_form_for_steps.pop()

    feed = trace_check._StockRun.feed

    def noted(run: Any, first: int, last: int) -> Tensor:
        fed.add((last - first == 1, in_form_for_steps[-1]))
        return feed(run, first, last)

    monkeypatch.setattr(GenerationMixin, "_optimize_model_for_decode", form_for_steps)
    monkeypatch.setattr(trace_check._StockRun, "feed", noted)
    _, ours = pair("qwen3_moe", draft_tokens=(2,))
    assert any("run as traced" in note for note in ours.mirage.report.notes)
    assert fed == {(False, False), (True, True)}


class RoundedOtherwise(Resolved):
    """A kernel whose results are some units in the last place off."""

    def run(self, inputs: Any, *out: Any) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        results = super().run(inputs, *out)
        for y in results:
            signs = torch.randint(0, 2, y.shape, generator=generator) * 2 - 1
            y.mul_(1 + torch.finfo(y.dtype).eps * signs)
        return results


def gpt2_with_offsets(tokens: slice | int, offset: float) -> Any:
    """Return GPT-2 whose LayerNorms subtract a mean thousands of times as large as what is left."""
    model = built("gpt2")
    with torch.no_grad():
        model.transformer.wpe.weight.zero_()
        model.transformer.wte.weight[tokens] += offset
    return model


def last_token(length: int, vocab: int = 64) -> int:
    """Return the token that the check feeds in the step after so many tokens."""
    generator = torch.Generator().manual_seed(1)
    for n in trace_check.LENGTHS:
        ids = torch.randint(0, vocab, (1, n + 1), generator=generator)
        if n == length:
            return int(ids[0, -1])
    raise AssertionError(length)


def test_rounding_of_an_ill_conditioned_step_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vocab = built("gpt2").config.vocab_size
    model = gpt2_with_offsets(last_token(3, vocab), 100)
    monkeypatch.setattr(resolver, "resolve", lambda program, **_: RoundedOtherwise(program))
    notes = optimize(twin_of(model), verify=False).mirage.report.notes
    assert any("run as traced" in note for note in notes)
    monkeypatch.setattr(trace_check, "_PERTURBATIONS", 0)
    assert "1 row after 3 tokens differs from stock's by" in not_traced(model)


@pytest.mark.parametrize("scale", [0.0, 1.01])
@pytest.mark.parametrize("all_texts", [False, True])
def test_a_wrong_kernel_of_an_ill_conditioned_step_is_refused(
    scale: float, all_texts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab = built("gpt2").config.vocab_size
    model = gpt2_with_offsets(slice(None) if all_texts else last_token(3, vocab), 3000)
    monkeypatch.setattr(resolver, "resolve", lambda program, **_: Resolved(program, scale=scale))
    assert "differs from stock's" in not_traced(model)


@pytest.mark.parametrize("name", ["gpt2", "jamba", "fsmt/seq2seq"])
def test_a_step_that_is_not_perturbed_is_stocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So what perturbations move is rounding alone, and no other way to run the prompt."""
    allowed: list[Tensor] = []
    rows = trace_check.TraceCheck._allowed

    def noted(check: Any, prompt: Any, wanted: Tensor, choices: Any) -> Tensor:
        check.tolerance, usual = 0.0, check.tolerance
        allowed.append(rows(check, prompt, wanted, choices))
        check.tolerance = usual
        return torch.full_like(allowed[-1], math.inf)

    monkeypatch.setattr(trace_check, "perturbed", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(trace_check.TraceCheck, "_is_close", lambda *_: len(allowed) > 2)
    monkeypatch.setattr(trace_check.TraceCheck, "_allowed", noted)
    optimize(built(name), verify=False)
    assert allowed and not any(x.any() for x in allowed)


def test_the_check_allows_deeper_models_more_rounding():
    """Errors of rounding grow with the root of the depth; a few layers get no more than before."""

    def tolerance(layers: int) -> float:
        model = tiny("llama", num_hidden_layers=layers).to(torch.bfloat16)
        return trace_check.TraceCheck(model, MaskPlan.of(model.config), 1).tolerance

    assert [tolerance(n) for n in (2, 8, 32)] == [0.06, 0.06, 0.12]


def test_a_kernel_that_raises_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any) -> Any:
        raise RuntimeError("out of registers")

    monkeypatch.setattr(Resolved, "run", run)
    assert "the check of a step raised RuntimeError: out of registers" in not_traced(built("gpt2"))


def tensors_of_caches() -> set[int]:
    """Return what identifies the tensors with as many slots as the caches of checks."""
    slots = {rings_variants([None])[0][2][0]}
    found = (x for x in gc.get_objects() if issubclass(type(x), Tensor))
    return {id(x) for x in found if any(type(d) is int and d in slots for d in x.shape)}


@pytest.mark.parametrize("is_refused", [False, True])
def test_the_check_leaves_no_memory_to_the_garbage_collector(
    is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caches of 16 rows take gigabytes, and the collector does not know the memory of a GPU."""
    model = built("gpt2")
    if is_refused:
        monkeypatch.setattr(resolver, "resolve", lambda program, **_: Resolved(program, scale=1.01))
    gc.collect()
    before = tensors_of_caches()
    gc.disable()
    try:
        if is_refused:
            not_traced(model)
        else:
            optimize(model, verify=False)
        assert not tensors_of_caches() - before
    finally:
        # Up to Python 3.11 a collection may begin in the middle of freeing a parameter, and crashes
        # if it frees weak references to it. So everything is collected before the model is freed.
        gc.collect()
        gc.enable()


@pytest.mark.parametrize("kind", ["no kernel", "the library"])
def test_steps_without_a_kernel_are_not_traced(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(program: Any, **_: Any) -> Any:
        if kind == "no kernel":
            raise SearchError("nothing found in 60 s")
        return Resolved(program, runs_kernel=False)

    monkeypatch.setattr(resolver, "resolve", resolve)
    found = not_traced(built("gpt2"))
    assert "steps of generate cannot be traced: no product of its step has a kernel" in found


def test_products_without_a_kernel_run_as_they_were_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def resolve(program: Any, **_: Any) -> Any:
        asked.append(program)
        if len(asked) % 2:
            raise SearchError("nothing found in 60 s")
        return Resolved(program)

    monkeypatch.setattr(resolver, "resolve", resolve)
    for name in ("gpt2", "qwen3_next"):
        asked.clear()
        stock, ours = pair(name)
        agree(stock, ours, {"inputs": text(), **FULL, **GREEDY})
        assert steps(ours) == TRACED
        rows = [r for r in ours.mirage.report.rows if r.pattern == "traced"]
        assert {(r.status, r.reason) for r in rows} == {
            ("swapped", ""),
            ("stock", "no kernel: nothing found in 60 s"),
        }


class ByValue(GPT2MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else 2 * super().forward(x)


class Numpy(GPT2MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.from_numpy(x.numpy()))


def test_reads_on_the_host_are_named() -> None:
    model = built("gpt2")
    model.transformer.h[1].mlp.__class__ = ByValue
    found = not_traced(model)
    assert "steps of generate cannot be traced: " in found
    assert "reads values of the device on the host (aten._local_scalar_dense" in found


def test_other_errors_of_a_forward_are_quoted() -> None:
    model = built("gpt2")
    model.transformer.h[1].mlp.__class__ = Numpy
    assert (
        "cannot be traced: with an empty cache of transformers its forward raised "
        in not_traced(model)
    )


# -- programs -------------------------------------------------------------------------------------


def test_equal_programs_are_asked_for_once(resolved: list[Any]) -> None:
    _, ours = pair("gpt2", (1, 3))
    texts = [str(program) for program in resolved]
    assert len(texts) == len(set(texts))
    traced = ours.mirage.runner.traced
    layers = ours.config.n_layer
    assert traced.kernels < len(traced.plans) * 4 * layers
    assert traced.bytes_read[0] == traced.bytes_read[1] > 0
    present = set(map(id, ours.parameters()))
    assert {id(w) for w in traced.weights} <= present


def test_a_model_of_a_layout_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "record_step", None)
    _, ours = pair("llama")
    assert ours.mirage.runner.traced is None
    agree(_, ours, {"inputs": text(), **GREEDY})
    assert steps(ours) == {"all by kernels": 1}


def test_progress_is_told_of_each_program() -> None:
    seen: list[Any] = []
    optimize(
        built("gpt2"), verify=False, progress=lambda stage, detail: seen.append((stage, detail))
    )
    numbers = [detail for stage, detail in seen if stage == "kernel"]
    assert numbers and all(pattern == "traced" for _, _, pattern in numbers)
    assert [n for n, _, _ in numbers] == list(range(1, len(numbers) + 1))
    assert {total for _, total, _ in numbers} == {len(numbers)}


def test_a_trace_does_not_hide_attention_that_is_registered_later() -> None:
    """The mapping of the instance comes first, and a user registers in that of the class."""
    with attention_as_one_node():
        assert "sdpa" in ALL_ATTENTION_FUNCTIONS._local_mapping
    assert "sdpa" not in ALL_ATTENTION_FUNCTIONS._local_mapping
