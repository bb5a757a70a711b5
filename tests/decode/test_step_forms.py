"""Steps that are traced in another form than most: all tokens are stock's.

Kernels run their programs op by op here, so that no search is needed.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from mirage_hf.api import optimize
from mirage_hf.decode.step_forms import FORMS, Form
from mirage_hf.decode.step_inputs import gives_positions
from scripts import survey_calls, survey_models
from tests.helpers.generate_comparison import FULL
from tests.helpers.step_pairs import agree, steps, stocks
from tests.helpers.thorough import count
from tests.helpers.tiny_models import twin_of

# Not run with other versions of transformers, which do not have all of these models.
pytestmark = [pytest.mark.models, pytest.mark.slow, pytest.mark.usefixtures("resolved")]

GREEDY = {"do_sample": False, "num_beams": 1, "max_new_tokens": count(40, 16)}

#: Types whose steps need a form, and the form.
CASES = {
    "gpt_neo": Form(newest_last=True),  # takes the number of keys for the length of the text
    "led/seq2seq": Form(hides_unused=True, host_length=True),  # makes no mask in a step
    "fsmt/seq2seq": Form(hides_unused=True),  # likewise, and drops all but the last token
    "speecht5/speech": Form(hides_source=True),  # maps the mask of samples
    "t5gemma2/seq2seq": Form(bool_masks=True),  # joins masks of two attentions
    "inkling_text": FORMS[0],  # takes the order of keys for their order in the text
    "muse_spark": FORMS[0],  # norms the result of each expert
    "exaone4_5": FORMS[0],  # counts positions itself, padding included
    "paligemma": FORMS[0],  # counts positions from 1
}


def pair(name: str) -> tuple[Any, Any]:
    """Return a small stock model of a type and its optimized copy."""
    types = survey_models.model_types()
    if name not in types:
        pytest.skip(f"this version of transformers has no {name}")
    stock = survey_models.build(name, types[name])
    return stock, optimize(twin_of(stock), batch_sizes=(1, 3), verify=False)


def traced(model: Any) -> Any:
    return model.generate.runner.traced


#: Types whose form another one has, too.
ALIKE = ("fsmt/seq2seq", "muse_spark", "exaone4_5", "paligemma")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.thorough) if name in ALIKE else name for name in CASES],
)
def test_tokens_are_stocks_in_the_form_that_fits(name: str) -> None:
    """Calls have one row, and three of unequal lengths."""
    stock, ours = pair(name)
    assert traced(ours) is not None and traced(ours).form == CASES[name]
    for call in survey_calls.text_calls(stock, name):
        if name == "speecht5/speech":  # padding goes to stock
            call.inputs["attention_mask"].fill_(1)
        agree(stock, ours, {**call.inputs, **GREEDY})
    assert steps(ours) == {"traced": 2} and not stocks(ours)


def test_a_table_of_positions_ends_a_trace() -> None:
    """Slots beyond the table would have no row of it, so longer texts run stock."""
    _, ours = pair("gpt_neo")
    assert traced(ours).most_slots == 2048 and traced(ours).only_traced
    ours.generate(torch.full((1, 4), 7), **{**GREEDY, "max_new_tokens": 2100}, max_time=0.0)
    assert stocks(ours) == ["stock: a text longer than 2048 tokens, beyond a table of the model"]


def test_a_prompt_of_which_a_model_keeps_only_the_last_token_runs_stock() -> None:
    stock, ours = pair("fsmt/seq2seq")
    given = {**survey_calls.text_calls(stock, "fsmt/seq2seq")[0].inputs, **GREEDY}
    given["decoder_input_ids"] = torch.tensor([[2, 9, 11]])
    found = stock.generate(**{**given, "max_new_tokens": 1}, return_dict_in_generate=True)
    keeps_all = found.past_key_values.get_seq_length() > 1  # transformers 5.23 does, 5.17 does not
    agree(stock, ours, given)
    why = "stock: a model that keeps only the last token of a prompt"
    assert stocks(ours) == ([] if keeps_all else [why])
    cache = found.past_key_values
    given["decoder_input_ids"] = found.sequences
    agree(stock, ours, lambda: {**given, **FULL, "past_key_values": copy.deepcopy(cache)})
    assert stocks(ours) == ([] if keeps_all else [why])


def test_layers_share_no_slots_if_their_order_counts() -> None:
    stock, ours = pair("inkling_text")
    assert not traced(ours).uses_rings
    text = torch.randint(5, 180, (1, 530), generator=torch.Generator().manual_seed(0))
    agree(stock, ours, {"input_ids": text, **GREEDY})
    assert steps(ours) == {"traced": 1}


@pytest.mark.parametrize(("name", "given"), [("paligemma", True), ("exaone4_5", False)])
def test_whether_methods_give_positions_is_found(name: str, given: bool) -> None:
    stock, ours = pair(name)
    assert gives_positions(stock) is given is traced(ours).gives_positions


def test_positions_that_do_not_grow_by_one_run_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, ours = pair("paligemma")
    usual = type(stock).prepare_inputs_for_generation

    def doubled(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        given = usual(self, *args, **kwargs)
        return {**given, "position_ids": 2 * given["position_ids"]}

    monkeypatch.setattr(type(stock), "prepare_inputs_for_generation", doubled)
    (call, _) = survey_calls.text_calls(stock, "paligemma")
    agree(stock, ours, {**call.inputs, **GREEDY})
    assert stocks(ours) == ["stock: a model whose steps take positions that do not grow by one"]


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("moonshine", "output"),
        pytest.param("canary", "output", marks=pytest.mark.thorough),
        ("speech-encoder-decoder", "other"),
        ("speech_to_text", "other"),
    ],
)
def test_padding_of_sound_is_hidden(name: str, use: str) -> None:
    """Encoders of sound map the mask of samples to their output, or leave that to the decoder."""
    stock, ours = pair(f"{name}/speech")
    assert traced(ours).mask_use == use
    call = survey_calls.text_calls(stock, f"{name}/speech")[1]
    agree(stock, ours, {**call.inputs, **GREEDY, **FULL})
    assert not call.inputs["attention_mask"].all() and bool(stocks(ours)) is (use == "other")
    unpadded: Tensor = torch.ones_like(call.inputs["attention_mask"])
    agree(stock, ours, {**call.inputs, "attention_mask": unpadded, **GREEDY, **FULL})
    assert "traced" in steps(ours)
