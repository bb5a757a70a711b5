"""What is decided about a call of generate before its prefill.

The whole of generate is not run here, so that each decision is checked by itself.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from mirage_hf.decode import call_plan
from mirage_hf.decode.call_plan import CallInputs, plan_call
from mirage_hf.decode.masks import MaskPlan
from mirage_hf.decode.not_covered import NotCoveredError
from mirage_hf.decode.prompt_plan import PromptPlan
from tests.helpers.generate_comparison import tiny

pytestmark = pytest.mark.models
BATCH, LENGTH = 2, 4


# -- the prompt -----------------------------------------------------------------------------------


def ids(length: int = LENGTH) -> torch.Tensor:
    return torch.ones(BATCH, length, dtype=torch.long)


def counted(length: int = LENGTH, rows: int = BATCH, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + length).expand(rows, -1)


def prompt_plan(
    input_ids: torch.Tensor, past: int = 0, mask_length: int = LENGTH, **given: Any
) -> PromptPlan:
    return PromptPlan.of(input_ids, past, mask_length, given)


@pytest.mark.parametrize("masked", [False, True])
def test_a_plain_prompt_counts_from_zero(masked: bool) -> None:
    mask = {"attention_mask": torch.ones(BATCH, LENGTH)} if masked else {}
    plan = prompt_plan(ids(), position_ids=counted(), **mask)
    assert (plan.past, plan.length, plan.lowest) == (0, LENGTH, None)
    assert plan.position.tolist() == [[LENGTH - 1]] * BATCH
    assert plan.counts_from_zero is True and not plan.has_unusual_positions


def test_one_row_of_positions_serves_all_rows() -> None:
    plan = prompt_plan(ids(), position_ids=counted(rows=1))
    assert plan.counts_from_zero and plan.position.tolist() == [[LENGTH - 1]]


def test_left_padding_is_counted_by_row() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    positions = torch.tensor([[1, 1, 0, 1], [0, 1, 2, 3]])
    plan = prompt_plan(ids(), attention_mask=mask, position_ids=positions)
    assert plan.lowest is not None and plan.lowest.tolist() == [[2], [0]]
    assert plan.position.tolist() == [[1], [3]]
    assert plan.counts_from_zero and not plan.has_unusual_positions


def test_padding_whose_positions_count_otherwise_does_not_count_from_zero() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    plan = prompt_plan(ids(), attention_mask=mask, position_ids=counted())
    assert not plan.counts_from_zero and not plan.has_unusual_positions


def test_all_tokens_of_a_row_but_the_last_may_be_padding() -> None:
    mask = torch.tensor([[0, 0, 0, 1], [1, 1, 1, 1]])
    plan = prompt_plan(ids(), attention_mask=mask, position_ids=counted())
    assert plan.lowest is not None and plan.lowest.tolist() == [[3], [0]]


@pytest.mark.parametrize("first", [0, 1, 9])
def test_the_first_token_after_left_padding_has_position_zero(first: int) -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    positions = torch.tensor([[1, 1, first, 1], [0, 1, 2, 3]])
    plan = prompt_plan(ids(), attention_mask=mask, position_ids=positions)
    assert plan.counts_from_zero is (first == 0)


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("width", [1, 3, 5])
def test_positions_of_other_than_all_tokens_do_not_count_from_zero(
    width: int, padding: int
) -> None:
    mask = torch.tensor([[0] * padding + [1] * (LENGTH - padding), [1] * LENGTH])
    for given in ({}, {"attention_mask": mask}):
        plan = prompt_plan(ids(), position_ids=counted(width), **given)
        assert plan.counts_from_zero is False and plan.position.tolist() == [[width - 1]] * BATCH


def test_a_padded_text_beside_a_cache_does_not_count_from_zero() -> None:
    """Some of its tokens are the cache's."""
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    positions = torch.tensor([[1, 1, 0, 1], [0, 1, 2, 3]])
    plan = prompt_plan(ids(), past=1, attention_mask=mask, position_ids=positions)
    assert plan.lowest is not None and plan.counts_from_zero is False


@pytest.mark.parametrize(
    "start, odd", [(0, False), (-1, False), (-3, False), (1, True), (-4, True), (90, True)]
)
def test_positions_beyond_the_text_or_below_zero_are_odd(start: int, odd: bool) -> None:
    """After the prompt, only the last position of a row is used."""
    plan = prompt_plan(ids(), position_ids=counted(start=start))
    assert plan.has_unusual_positions is odd and plan.counts_from_zero is (start == 0)


def test_one_odd_row_is_enough() -> None:
    positions = torch.stack([torch.arange(4), torch.arange(-4, 0)])
    assert prompt_plan(ids(), position_ids=positions).has_unusual_positions


def test_the_whole_text_may_be_given_beside_a_cache_of_its_beginning() -> None:
    plan = prompt_plan(ids(4), past=3, position_ids=counted(), attention_mask=torch.ones(BATCH, 4))
    assert (plan.past, plan.length, plan.counts_from_zero) == (3, 4, False)
    assert plan.lowest is None


def test_only_the_new_tokens_may_be_given_beside_a_cache() -> None:
    """The mask covers the whole text.

    Without a mask, the cache's length says how long the text is.
    """
    for given in ({"attention_mask": torch.ones(BATCH, 7)}, {}):
        plan = prompt_plan(ids(4), past=3, mask_length=7, position_ids=counted(start=3), **given)
        assert (plan.past, plan.length, plan.counts_from_zero) == (3, 7, False)
        assert not plan.has_unusual_positions


def test_the_length_of_the_mask_decides_before_the_counted_length() -> None:
    plan = prompt_plan(
        ids(4), past=3, mask_length=4, position_ids=counted(), attention_mask=torch.ones(BATCH, 7)
    )
    assert plan.length == 7


@pytest.mark.parametrize(
    "given, reason",
    [
        ({}, "no position_ids"),
        ({"position_ids": counted()[0]}, "position_ids of 1 dimensions"),
        ({"position_ids": counted()[None, None]}, "position_ids of 4 dimensions"),
        ({"position_ids": counted().float()}, "torch.float32"),
        ({"position_ids": counted().to("meta")}, "meta"),
        ({"position_ids": counted(), "attention_mask": torch.ones(2, 4).to("meta")}, "meta"),
        ({"position_ids": counted(), "attention_mask": torch.ones(3, 4)}, "mask for 3 rows of 2"),
        ({"position_ids": counted(rows=3)}, "position_ids for 3 rows of 2"),
        *(
            (
                {"position_ids": counted(), "attention_mask": torch.tensor([row, [1, 1, 1, 1]])},
                "holes in the mask",
            )
            for row in ([1, 0, 1, 1], [0, 1, 0, 1], [1, 1, 1, 0], [0, 0, 0, 0])
        ),
        *(
            (
                {"position_ids": counted(), "attention_mask": torch.ones(*dims)},
                rf"mask of shape \({', '.join(map(str, dims))}\) for 4 tokens",
            )
            for dims in ((2, 5), (2, 3), (2, 4, 1), (2, 4, 2, 4))
        ),
    ],
)
def test_a_prompt_that_is_not_covered_says_why(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotCoveredError, match=reason):
        prompt_plan(ids(), **given)


def test_positions_may_have_axes() -> None:
    """Each axis adds a number to the positions, the same for all later tokens."""
    positions = torch.stack([counted(), counted(start=2), counted(start=-1)])
    plan = prompt_plan(ids(), position_ids=positions)
    assert plan.position.tolist() == [[LENGTH - 1]]
    assert plan.offsets is not None and plan.offsets.tolist() == [
        [[0], [0]],
        [[2], [2]],
        [[-1]] * 2,
    ]
    assert plan.lowest is None and not plan.counts_from_zero


def test_axes_that_all_count_the_tokens_are_a_plain_prompt() -> None:
    """So a text for a model of images can be prefilled again by the same graph."""
    plan = prompt_plan(ids(), position_ids=counted().expand(3, -1, -1))
    assert plan.is_plain and plan.offsets is not None and not plan.offsets.any()
    early = counted().clone()
    early[0, 0] = 1  # the last positions are as before
    assert not prompt_plan(ids(), position_ids=early.expand(3, -1, -1)).is_plain


def test_axes_are_counted_from_the_tokens_after_left_padding() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    positions = torch.stack([torch.tensor([[1, 1, 0, 1], [0, 1, 2, 5]])] * 2)
    plan = prompt_plan(ids(), attention_mask=mask, position_ids=positions)
    assert plan.position.tolist() == [[1], [3]] and plan.lowest is not None
    assert plan.offsets is not None and plan.offsets.tolist() == [[[0], [2]]] * 2


def test_axes_over_a_cache_of_the_users_are_not_covered() -> None:
    with pytest.raises(NotCoveredError, match="several axes, over a cache of the user's"):
        prompt_plan(ids(), past=2, position_ids=torch.stack([counted()] * 3))


@pytest.mark.parametrize("past", [0, 3])
def test_a_model_without_positions_may_count_its_tokens(past: int) -> None:
    plan = PromptPlan.of(ids(), past, past + LENGTH, {}, counts_itself=True)
    assert (plan.past, plan.length) == (past, past + LENGTH)
    assert plan.position.tolist() == [[past + LENGTH - 1]]
    assert plan.counts_from_zero is (past == 0)


def test_positions_of_a_whole_text_over_a_cache_begin_at_zero() -> None:
    plan = PromptPlan.of(ids(), LENGTH - 1, LENGTH, {}, counts_itself=True)
    assert (plan.past, plan.length) == (LENGTH - 1, LENGTH)
    assert plan.position.tolist() == [[LENGTH - 1]]


@pytest.mark.parametrize("past", [4, 5])
def test_a_cache_must_be_shorter_than_the_text(past: int) -> None:
    with pytest.raises(NotCoveredError, match="cache"):
        prompt_plan(ids(4), past=past, position_ids=counted())
    assert prompt_plan(ids(4), past=3, position_ids=counted()).length == 4


# -- the call -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")


class Options(GenerationConfig):
    """A generation config as generate hands it to its decoding method."""

    _pad_token_tensor: torch.Tensor | None = torch.tensor(0)


def call(model: Any, length: int = LENGTH, **changes: Any) -> call_plan.CallPlan:
    """Return the plan of a call that is covered, except for `changes`."""
    wanted: dict[str, Any] = dict(
        criteria=[MaxLengthCriteria(20)],
        cache_is_users=False,
        max_cache_len=None,
        axes=None,
        expected=SimpleNamespace(obstacle=None, misplaced=None),
        config=Options(),
        input_ids=ids(length),
    )
    given: dict[str, Any] = dict(
        past_key_values=DynamicCache(config=model.config),
        use_cache=True,
        position_ids=counted(length),
    )
    for name, value in changes.items():
        (wanted if name in wanted else given)[name] = value
    inputs = CallInputs(
        model=model,
        input_ids=wanted["input_ids"],
        processors=LogitsProcessorList(),
        criteria=StoppingCriteriaList(wanted["criteria"]),
        config=wanted["config"],
        kwargs=given,
    )
    return plan_call(
        inputs,
        cache_is_users=wanted["cache_is_users"],
        max_cache_len=wanted["max_cache_len"],
        expected=wanted["expected"],
        axes=wanted["axes"],
    )


def test_a_covered_call(model: Any) -> None:
    cache = DynamicCache(config=model.config)
    expected = SimpleNamespace(obstacle=None, misplaced=None)
    plan = call(model, past_key_values=cache, cache_is_users=True, expected=expected)
    assert plan.cache is cache and plan.cache_is_users and plan.fingerprint is expected
    assert (plan.budget, plan.most_slots, plan.slots) == (16, 19, 19)
    assert plan.windows == (None,) * model.config.num_hidden_layers
    assert plan.eos is None and not isinstance(plan.selection, str)
    assert plan.expected and not plan.logits_to_keep and not plan.prompt_is_whole


def test_a_prompt_is_alone_if_only_its_last_logits_are_wanted(model: Any) -> None:
    assert call(model, logits_to_keep=1).prompt_is_whole
    assert not call(model, logits_to_keep=1, position_ids=counted(start=1)).prompt_is_whole


def test_memory_for_a_long_text_is_reserved_step_by_step(model: Any) -> None:
    plan = call(model, criteria=[MaxLengthCriteria(5000)], max_cache_len=4999)
    assert plan.most_slots == 4999
    assert plan.slots == LENGTH + call_plan.FIRST_REACH


def test_the_shortest_of_several_lengths_counts_and_fractions_are_rounded_up(model: Any) -> None:
    criteria = [MaxLengthCriteria(30), MaxLengthCriteria(8.5), MaxLengthCriteria(40)]
    assert call(model, criteria=criteria).budget == 5


@pytest.mark.parametrize("most", [1, 4, 5])
def test_one_token_at_least_is_chosen(model: Any, most: int) -> None:
    plan = call(model, criteria=[MaxLengthCriteria(most)])
    assert (plan.budget, plan.most_slots) == (1, LENGTH)


def test_max_cache_len_is_the_most_slots(model: Any) -> None:
    assert call(model, max_cache_len=19).most_slots == 19
    with pytest.raises(NotCoveredError, match="max_cache_len=18"):
        call(model, max_cache_len=18)


def test_an_unexpected_model_is_looked_at(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = SimpleNamespace(obstacle=None, misplaced=None)
    monkeypatch.setattr(call_plan, "take_fingerprint", lambda model: seen)
    plan = call(model, expected=None)
    assert plan.fingerprint is seen and plan.expected is False
    seen.obstacle = "two layers are one"
    with pytest.raises(NotCoveredError, match="two layers are one"):
        call(model, expected=None)


def filled(model: Any, rows: int) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    heads, dim = model.config.num_key_value_heads, model.config.head_dim
    for layer in range(model.config.num_hidden_layers):
        cache.update(torch.zeros(rows, heads, 2, dim), torch.zeros(rows, heads, 2, dim), layer)
    return cache


def test_the_rows_of_a_cache_are_those_of_the_prompt(model: Any) -> None:
    assert call(model, past_key_values=filled(model, BATCH), cache_is_users=True).prompt.past == 2
    with pytest.raises(NotCoveredError, match="a cache of 3 rows for 2"):
        call(model, past_key_values=filled(model, 3), cache_is_users=True)


THREE_AXES = torch.stack([counted()] * 3)


@pytest.mark.parametrize(
    "axes, positions",
    [(None, THREE_AXES), (0, THREE_AXES), (2, THREE_AXES), (3, counted()), (4, THREE_AXES)],
)
def test_positions_have_the_axes_that_were_traced(
    model: Any, axes: int | None, positions: torch.Tensor
) -> None:
    with pytest.raises(NotCoveredError, match=f"position_ids of {positions.ndim} dimensions"):
        call(model, axes=axes, position_ids=positions)
    plan = call(model, axes=3, position_ids=THREE_AXES)
    assert plan.only_traced and plan.prompt.offsets is not None and not plan.stock_prefill


def test_a_traced_model_may_be_given_more_than_tokens(model: Any) -> None:
    """Stock's prefill takes it, and only a traced step was compared with stock's."""
    pixels = {"pixel_values": torch.zeros(1)}
    with pytest.raises(NotCoveredError, match="model kwarg pixel_values"):
        call(model, **pixels)
    plan = call(model, axes=0, logits_to_keep=1, **pixels)
    assert plan.stock_prefill and plan.only_traced and not plan.prompt_is_whole
    for given in ({}, {"pixel_values": None}):
        plan = call(model, axes=0, logits_to_keep=1, **given)
        assert not plan.stock_prefill and not plan.only_traced and plan.prompt_is_whole


def test_the_first_reason_is_the_options(model: Any) -> None:
    """Whatever a traced model is given, stock serves what steps cannot do."""
    with pytest.raises(NotCoveredError, match="generation mode beam_search"):
        call(model, axes=0, config=Options(num_beams=2), pixel_values=torch.zeros(1))


def test_a_model_with_parts_elsewhere_runs_traced_steps_only(model: Any) -> None:
    seen = SimpleNamespace(obstacle=None, misplaced="a table on the CPU")
    with pytest.raises(NotCoveredError, match="a table on the CPU"):
        call(model, expected=seen)
    assert call(model, expected=seen, axes=0).only_traced


def test_a_model_that_declares_no_static_caches_runs_traced_steps_only(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(model), "_can_compile_fullgraph", False)
    plan = call(model, axes=0)
    assert plan.only_traced and plan.stock_prefill
    assert not call(model).only_traced  # `generate` asks about the model before


def test_layers_with_states_run_traced_steps_only(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = MaskPlan((("", None),), by_layer_type=False, states=("conv",))
    monkeypatch.setattr(MaskPlan, "of", lambda config: plan)
    with pytest.raises(NotCoveredError, match="layer type conv"):
        call(model)
    given = call(model, axes=0)
    assert given.only_traced and given.stock_prefill


def test_a_text_fits_into_a_chunk_of_attention(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = MaskPlan((("", None),), by_layer_type=False, chunk=19)
    monkeypatch.setattr(MaskPlan, "of", lambda config: plan)
    assert call(model).most_slots == 19
    with pytest.raises(NotCoveredError, match=r"longer than a chunk of attention \(19\)"):
        call(model, criteria=[MaxLengthCriteria(21)])


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"past_key_values": None}, "no cache"),
        ({"use_cache": False}, "no cache"),
        ({"criteria": []}, "no maximum length"),
        ({"config": Options(num_beams=2)}, "generation mode beam_search"),
        ({"inputs_embeds": torch.ones(1)}, "inputs_embeds"),
        ({"logits_to_keep": None}, "logits_to_keep=None"),
        ({"input_ids": torch.ones(4, dtype=torch.long)}, "an empty prompt"),
        ({"input_ids": torch.ones(2, 0, dtype=torch.long)}, "an empty prompt"),
        ({"input_ids": torch.ones(2, 4)}, "torch.float32"),
        ({"input_ids": ids().to("meta")}, "input_ids on meta, the model on cpu"),
    ],
)
def test_a_call_that_is_not_covered_says_why(
    model: Any, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(NotCoveredError, match=reason):
        call(model, **changes)


def test_input_ids_may_be_int32_and_absent_inputs_are_none(model: Any) -> None:
    assert call(model, input_ids=ids().int(), inputs_embeds=None).budget == 16


def test_every_part_of_a_call_is_asked_whether_it_is_covered(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts have tests of their own. Here: their reasons are heeded."""
    sliding = tiny("mistral")
    other = tiny("mistral").config
    other.sliding_window = 5
    with pytest.raises(NotCoveredError, match="slides over other windows"):
        call(sliding, past_key_values=DynamicCache(config=other))
    unused = tiny("llama")
    unused.config.sliding_window = 7
    with pytest.raises(NotCoveredError, match="a sliding_window in the config"):
        call(unused, past_key_values=DynamicCache())
    with pytest.raises(NotCoveredError, match="output_attentions"):
        call(model, config=Options(output_attentions=True))
    monkeypatch.setattr(call_plan, "rejected_length", lambda _, tokens: f"{tokens} tokens")
    with pytest.raises(NotCoveredError, match="20 tokens"):  # with the new ones
        call(model)


def test_the_text_config_is_the_decoders(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def get_text_config(self: Any, decoder: Any = None, encoder: Any = None) -> Any:
        asked.append((decoder, encoder))
        return self

    monkeypatch.setattr(type(model.config), "get_text_config", get_text_config)
    call(model, past_key_values=DynamicCache())
    assert set(asked) == {(True, None)}


def test_the_selection_knows_the_vocabulary(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(call_plan.Selection, "of", lambda *given: seen.extend(given) or "the host")
    call(model)
    assert seen[-1] == model.config.vocab_size


def test_generate_counts_the_text_where_no_mask_does(model: Any) -> None:
    """The config's count covers the tokens that the cache already has."""
    given = dict(past_key_values=filled(model, BATCH), position_ids=counted(start=2))
    assert call(model, **given).prompt.length == LENGTH
    config = Options()
    config._mask_length = 2 + LENGTH
    assert call(model, config=config, **given).prompt.length == 2 + LENGTH


def test_a_cropped_cache_has_rows_and_one_without_keys_has_none(model: Any) -> None:
    cropped = filled(model, 3)
    cropped.crop(0)
    with pytest.raises(NotCoveredError, match="a cache of 3 rows for 2"):
        call(model, past_key_values=cropped)
    empty = filled(model, 3)
    for layer in empty.layers:
        layer.keys = layer.values = torch.tensor([])
    assert call(model, past_key_values=empty).prompt.past == 0


def test_stop_tokens_need_a_pad_token(model: Any) -> None:
    criteria = [MaxLengthCriteria(20), EosTokenCriteria(torch.tensor([5, 7]))]
    assert call(model, criteria=criteria).budget == 16
    config = Options()
    config._pad_token_tensor = None
    assert call(model, config=config).budget == 16
    with pytest.raises(NotCoveredError, match="pad token"):
        call(model, config=config, criteria=criteria)


@pytest.mark.parametrize(
    "selection, eos",
    [
        (SimpleNamespace(eos=None), [5, 7, 9]),
        (SimpleNamespace(eos=(5, 7, 9)), None),
        ("a processor of the user's", None),
    ],
)
def test_stop_tokens_are_kept_unless_the_selection_or_the_host_has_them(
    model: Any, monkeypatch: pytest.MonkeyPatch, selection: Any, eos: list[int] | None
) -> None:
    monkeypatch.setattr(call_plan.Selection, "of", lambda *_: selection)
    criteria = [
        EosTokenCriteria(torch.tensor([5, 7])),
        MaxLengthCriteria(20),
        EosTokenCriteria(torch.tensor([9])),
    ]
    plan = call(model, criteria=criteria)
    assert (None if plan.eos is None else plan.eos.tolist()) == eos
    assert plan.selection is selection


def test_layers_that_all_slide_reserve_their_rings_at_once() -> None:
    model = tiny("mistral")
    plan = call(model, criteria=[MaxLengthCriteria(5000)])
    assert None not in plan.windows and plan.slots == plan.most_slots == 4999


@pytest.mark.parametrize(
    "more, others",
    [
        ({"pixel_values": None}, []),
        ({"mm_encoder_outputs": {}}, []),  # what transformers 5.23 gives for a text
        ({"mm_encoder_outputs": {"image": torch.ones(1)}}, ["mm_encoder_outputs"]),
        ({"pixel_values": torch.zeros(2)}, ["pixel_values"]),
    ],
)
def test_a_text_has_no_inputs_beside_it(more, others):
    given = {"attention_mask": torch.ones(1, 3), "use_cache": True, **more}
    assert call_plan._prompt_inputs(given) == others
