"""Traced steps that verify drafts give the tokens of plain decoding, whatever is drafted."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

from mirage_hf.api import optimize
from mirage_hf.decode.cache_exchange import has_keys
from mirage_hf.decode.cache_layers import states_of
from mirage_hf.decode.draft_planning import COST_OF_ROW, step_costs
from mirage_hf.decode.drafts import Drafts
from mirage_hf.decode.traced_step import TracedStep
from mirage_hf.layers.part import StepShape
from mirage_hf.trace.attention import append_tokens, for_each_token
from mirage_hf.trace.row_values import RowValues, UnknownRowsError
from scripts.scripted_drafts import drafting
from scripts.survey_images import image_inputs
from tests.decode.test_traced_steps import built
from tests.helpers.drafted import scripts, taken
from tests.helpers.generate_comparison import our_numbers
from tests.helpers.step_pairs import generated, shared, stocks
from tests.helpers.tiny_models import twin_of

pytestmark = [pytest.mark.models, pytest.mark.slow, pytest.mark.usefixtures("resolved")]

GREEDY = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
LOOKUP = {"prompt_lookup_num_tokens": 3}


def more(name: str) -> Any:
    """Return a type that is more of the same."""
    return pytest.param(name, marks=pytest.mark.thorough)


def pair(name: str, **options: Any) -> tuple[Any, Any]:
    """Return a stock model and its optimized copy with traced steps for drafts."""
    stock = built(name).eval()
    given = {"batch_sizes": (3,), "draft_tokens": (3,), "verify": False, **options}
    return stock, optimize(twin_of(stock), **given)


shared_pair = shared(pair)


def texts(model: Any, length: int = 9) -> list[dict[str, torch.Tensor]]:
    """Return one text, and three with left padding."""
    vocab = model.config.get_text_config().vocab_size
    ids = torch.randint(3, min(vocab, 90), (3, length), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(length) >= torch.tensor([[0], [4], [2]])).long()
    return [{"input_ids": ids[:1]}, {"input_ids": ids * mask, "attention_mask": mask}]


def assert_tokens(stock: Any, ours: Any, given: dict[str, Any]) -> None:
    """Compare the tokens of a call with stock's, for drafts of all qualities."""
    want = stock.generate(**given)
    for name, script in scripts(want).items():
        with drafting(script, name):
            assert ours.generate(**given, **LOOKUP).tolist() == want.tolist(), name


PLAIN = ["gpt2", "qwen3_moe", more("opt"), more("gemma4")]
#: These ask their cache for one number of tokens, for positions or biases of all rows.
OF_ONE_LENGTH = ["llama4", "bloom", more("xglm")]
WITH_STATES = ["qwen3_next", "mamba2", more("lfm2"), more("falcon_h1"), more("jamba")]


@pytest.mark.parametrize("name", PLAIN + WITH_STATES)
def test_greedy_tokens_are_stocks_whatever_is_drafted(name: str) -> None:
    stock, ours = shared_pair(name)
    assert_tokens(stock, ours, {**texts(stock)[1], **GREEDY})
    assert taken(ours) > 60
    by_kernels = {r.tokens for r in ours.mirage.report.swapped if r.pattern == "attention"}
    assert by_kernels == (set() if name == "mamba2" else {1, 4})


@pytest.mark.parametrize("name", OF_ONE_LENGTH)
def test_each_row_has_its_own_number_of_cached_tokens(name: str) -> None:
    stock, ours = shared_pair(name, batch_sizes=(1, 3))
    for given in texts(stock):
        assert_tokens(stock, ours, {**given, **GREEDY, "max_new_tokens": 60})
    assert taken(ours) > 200


def test_keys_of_an_indexer_go_to_the_slots_of_their_text() -> None:
    stock, ours = pair("deepseek_v32", batch_sizes=(1, 3))
    for given in texts(stock):
        assert_tokens(stock, ours, {**given, **GREEDY})
    assert taken(ours) > 80


@pytest.mark.parametrize("name", ["qwen3_next", more("mamba2")])
def test_a_state_moves_on_by_one_kernel_for_each_token(name: str) -> None:
    _, ours = shared_pair(name)
    plan = ours.generate.runner.traced.drafting[StepShape(3, 4)]
    states = [
        unit.region.target.name for unit in plan.step_ops if unit.region and unit.region.target
    ]
    layers = {state.partition("@")[0] for state in states}
    assert layers and sorted(states) == sorted(f"{x}@{n}" for x in layers for n in range(4))


def test_options_of_models_with_states_are_hidden_from_stock() -> None:
    """Stock's generate refuses drafts for models with states."""
    stock, ours = pair("mamba2")
    given = {**texts(stock)[1], **GREEDY}
    want = stock.generate(**given)
    config = copy.deepcopy(ours.generation_config)
    config.update(do_sample=False, max_new_tokens=24, pad_token_id=0, prompt_lookup_num_tokens=3)
    with drafting(want):
        got = ours.generate(**texts(stock)[1], generation_config=config)
    assert got.tolist() == want.tolist() and config.prompt_lookup_num_tokens == 3
    assert taken(ours)
    ours.generation_config.prompt_lookup_num_tokens = 3
    with pytest.raises(ValueError, match="stateful"):
        ours.generate(**given)
    assert stocks(ours) == ["stock: prompt_lookup_num_tokens in the model's generation_config"]


@pytest.mark.parametrize("name", ["qwen3_vl", more("gemma3")])
def test_texts_after_an_image(name: str) -> None:
    stock, ours = pair(name, batch_sizes=(1,))
    assert_tokens(stock, ours, {**image_inputs(stock, name), **GREEDY})
    assert taken(ours) > 20


def test_windows_move_with_each_token() -> None:
    stock, ours = shared_pair("gemma3")
    assert stock.config.get_text_config().sliding_window < 60
    assert_tokens(stock, ours, {**texts(stock, length=50)[1], **GREEDY})
    assert taken(ours)


def test_a_cache_that_grows_keeps_the_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mirage_hf.decode.call_plan.FIRST_REACH", 3)
    stock, ours = pair("qwen3_moe", batch_sizes=(1,))
    given = {**texts(stock, length=200)[0], **GREEDY, "max_new_tokens": 90}
    assert_tokens(stock, ours, given)
    assert taken(ours)


def test_drafts_after_the_end_of_a_table_of_positions_read_nothing() -> None:
    stock, ours = shared_pair("gpt2", batch_sizes=(1,))
    most = stock.config.max_position_embeddings
    given = {**texts(stock, length=most - 23)[0], **GREEDY, "max_new_tokens": 23}
    want = stock.generate(**given)
    assert want.shape[1] == most
    longer = torch.cat([want, want[:, :3]], 1)  # drafts up to the end, and after it
    with drafting(longer):
        assert ours.generate(**given, **LOOKUP).tolist() == want.tolist()
    assert taken(ours)


def test_samples_are_those_of_plain_decoding() -> None:
    stock, ours = shared_pair("gpt2")
    given = {**texts(stock)[1], **GREEDY, "do_sample": True, "temperature": 1.3, "top_k": 30}
    with our_numbers():
        want = generated(stock, given, 3)
    for name, script in scripts(want).items():
        with drafting(script, name):
            assert generated(ours, {**given, **LOOKUP}, 3).tolist() == want.tolist(), name
    assert taken(ours)


def test_models_without_such_steps_run_stock_and_the_report_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(*_: Any) -> None:
        raise UnknownRowsError("a reason")

    monkeypatch.setattr(RowValues, "run", unknown)
    stock, ours = pair("llama4", batch_sizes=(1,))
    (note,) = [note for note in ours.mirage.report.notes if "draft" in note]
    assert "batch of 1 run stock if they draft: modeling_llama4.py:" in note
    assert "takes one number of tokens for all rows (aten." in note and "a reason" in note
    given = {**texts(stock)[0], **GREEDY}
    for options in ({}, LOOKUP):
        want = stock.generate(**given, **options)
        assert ours.generate(**given, **options).tolist() == want.tolist()
    assert "no kernels for steps of several tokens" in stocks(ours)[0]


@pytest.mark.parametrize("wrong", ["position", "ids", "lo", "slot", "new_last", "state"])
def test_the_check_finds_a_row_that_is_wrong(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_rows, bounds_of = Drafts.as_rows, TracedStep._bounds_of

    def wrong_rows(self: Drafts, control: Any) -> Any:
        rows = as_rows(self, control)
        getattr(rows, wrong)[1] += 1
        return rows

    def wrong_bounds(self: TracedStep, *args: Any) -> dict[str, torch.Tensor]:
        bounds = bounds_of(self, *args)
        if self.drafts is not None and wrong in bounds:
            changed = bounds[wrong].clone()
            if wrong == "new_last":  # of all rows, because there are no windows
                changed[:, -1] -= 1
            else:
                changed[1] += 1
            bounds[wrong] = changed
        return bounds

    if wrong in ("position", "ids"):
        monkeypatch.setattr(Drafts, "as_rows", wrong_rows)
    elif wrong == "state":
        settle = TracedStep.settle
        monkeypatch.setattr(TracedStep, "settle", lambda self, taken: settle(self, taken - 1))
    else:
        monkeypatch.setattr(TracedStep, "_bounds_of", wrong_bounds)
    _, ours = pair("mamba2" if wrong == "state" else "gpt2")
    (note,) = [note for note in ours.mirage.report.notes if "draft" in note]
    assert "of 3 run stock if they draft: the traced" in note
    assert not ours.generate.runner.traced.drafting


def test_more_rows_read_more_experts_so_they_cost_more() -> None:
    _, dense = shared_pair("gpt2", batch_sizes=(1,))
    _, mixture = shared_pair("qwen3_moe", batch_sizes=(1,))
    shapes = [StepShape(1, 1), StepShape(1, 4)]
    costs = [step_costs(model.generate.runner.traced, shapes) for model in (dense, mixture)]
    assert costs[0] == pytest.approx({1: 1.0, 4: 1 + 3 * COST_OF_ROW})
    assert costs[1][4] > 1.2 * costs[0][4]


def test_keys_of_several_tokens_go_to_the_slots_of_their_text() -> None:
    texts_, tokens, heads, slots, d = 2, 3, 2, 7, 4
    memory = torch.randn(texts_, heads, slots, d)
    new = torch.randn(texts_ * tokens, heads, 1, d)
    first = torch.tensor([[1], [4]])
    want = memory.clone()
    for text in range(texts_):
        for token in range(tokens):
            want[text, :, first[text, 0] + token] = new[text * tokens + token, :, 0]
    assert append_tokens(memory, 2, first + torch.arange(tokens), new) is memory
    assert torch.equal(memory, want)
    assert torch.equal(for_each_token(memory, tokens), want[[0, 0, 0, 1, 1, 1]])


@pytest.mark.parametrize("rows", [1, 3])
def test_a_traced_assistant_drafts(rows: int) -> None:
    """The assistant is a model of the same kind. It drafts the tokens of its own text."""
    stock, ours = shared_pair("gpt2", batch_sizes=(rows,))
    helper = optimize(twin_of(stock), batch_sizes=(rows,), draft_tokens=(1,), verify=False)
    helper.generation_config.num_assistant_tokens = 3
    given = {**texts(stock)[rows > 1], **GREEDY}
    want = stock.generate(**given).tolist()
    assert ours.generate(**given, assistant_model=helper).tolist() == want
    counts = ours.mirage.report.decode
    assert counts["drafts: drafted"] == 3 * counts["drafts: steps of a row"]
    assert taken(ours) >= counts["drafts: drafted"] - 3 > 0


def test_an_assistant_without_steps_for_several_lengths_is_stocks() -> None:
    stock, ours = shared_pair("gpt2")
    helper = optimize(twin_of(stock), batch_sizes=(3,), verify=False)
    given = {**texts(stock)[1], **GREEDY}
    with pytest.raises(ValueError, match="batch_size = 1"):  # stock takes one row only
        ours.generate(**given, assistant_model=helper)
    (why,) = stocks(ours)
    assert "the assistant's steps of 3 rows take texts of one length" in why


@pytest.mark.parametrize("quality", ["good", "often right", "wrong"])
def test_states_of_a_cache_handed_back_are_those_of_the_text(quality: str) -> None:
    stock, ours = shared_pair("qwen3_next", batch_sizes=(1,))
    given = {**texts(stock)[0], **GREEDY, "return_dict_in_generate": True}
    given["eos_token_id"] = int(stock.generate(**given).sequences[0, -5])
    want = stock.generate(**given)
    with drafting(scripts(want.sequences)[quality], quality):
        got = ours.generate(**given, **LOOKUP)
    assert got.sequences.tolist() == want.sequences.tolist() and not stocks(ours)
    pairs = [*zip(got.past_key_values.layers, want.past_key_values.layers, strict=True)]
    assert any(states_of(layer) for layer, _ in pairs)
    for layer, other in pairs:
        states, others = states_of(layer), states_of(other)
        assert states.keys() == others.keys()
        for name, state in states.items():
            torch.testing.assert_close(state, others[name], rtol=1e-4, atol=1e-4)
        if has_keys(layer):
            torch.testing.assert_close(layer.keys, other.keys, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("mamba2", 3),
        *(  # the test below has one of these, too, and captures its steps
            pytest.param(name, rows, marks=pytest.mark.thorough)
            for name, rows in [*itertools.product(["qwen3_next"], [1, 3]), ("mamba2", 1)]
            + [*itertools.product(["lfm2", "falcon_h1"], [1, 3])]
        ),
    ],
)
def test_states_of_an_assistant_follow_the_accepted_text(name: str, rows: int) -> None:
    """The same model drafts what the other chooses. Other weights draft something else."""
    stock, ours = shared_pair(name, batch_sizes=(rows,))
    given = {**texts(stock)[rows > 1], **GREEDY, "max_new_tokens": 40}
    want = stock.generate(**given).tolist()
    for seed in (0, 1):
        helper = twin_of(stock)
        torch.manual_seed(seed)
        if seed:
            with torch.no_grad():
                helper.get_input_embeddings().weight.normal_()
        helper = optimize(helper, batch_sizes=(rows,), draft_tokens=(1,), verify=False)
        helper.generation_config.num_assistant_tokens = 3
        helper.generation_config.num_assistant_tokens_schedule = "constant"
        for _ in range(2):
            assert ours.generate(**given, assistant_model=helper).tolist() == want
        if not seed:
            counts = ours.mirage.report.decode
            # all are taken, except for those after the last token
            assert taken(ours) >= counts["drafts: drafted"] - 2 * 3 * rows > 0
    assert not stocks(ours)


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.thorough), 3])
def test_capturing_a_step_leaves_the_states_of_an_assistant(rows: int, captures: list[str]) -> None:
    """A step is warmed up before it is captured, in the middle of a call."""
    stock, ours = pair("qwen3_next", batch_sizes=(rows,))
    given = {**texts(stock)[rows > 1], **GREEDY}
    want = stock.generate(**given).tolist()
    helper = optimize(twin_of(stock), batch_sizes=(rows,), draft_tokens=(1,), verify=False)
    helper.generation_config.num_assistant_tokens = 3
    helper.generation_config.num_assistant_tokens_schedule = "constant"
    for _ in range(2):
        assert ours.generate(**given, assistant_model=helper).tolist() == want
    counts = ours.mirage.report.decode
    assert "step" in captures and counts["captured"] == 2
    assert taken(ours) >= counts["drafts: drafted"] - 2 * 3 * rows > 0
