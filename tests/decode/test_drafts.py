"""Calls whose steps verify drafts give the tokens of plain decoding, whatever is drafted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.generation import configuration_utils

from mirage_hf.api import optimize
from mirage_hf.decode.draft_planning import COST_OF_ROW, step_costs
from mirage_hf.decode.runner import DecodeRunner
from mirage_hf.decode.session import Session
from mirage_hf.decode.step import Step
from mirage_hf.errors import OptimizeError
from scripts.scripted_drafts import drafting
from tests.decode.test_sampling import bound, chi_square
from tests.helpers.generate_comparison import (
    PAD,
    Recorder,
    assert_same,
    left_padded,
    our_numbers,
    tokenizer,
)
from tests.helpers.step_pairs import CHANGED, FULL, generated, stocks
from tests.helpers.thorough import THOROUGH, count
from tests.helpers.tiny_models import WINDOW, prompt, tiny, twin_of

pytestmark = [pytest.mark.models, pytest.mark.slow, pytest.mark.usefixtures("resolved")]

VOCAB = 99
KEEPS_ALL_KEYS = "dynamic_full" in str(vars(configuration_utils))
VERIFIES = "step: all by kernels"
#: Stock's prompt lookup of transformers 5.4 needs a stop token. No text here has this one.
STOP = {"eos_token_id": 98, "pad_token_id": PAD}
LOOKUP = {"prompt_lookup_num_tokens": 7}


def pair(family: str = "llama", **options: Any) -> tuple[Any, Any]:
    """Return a stock model and its optimized copy with steps for drafts."""
    stock = tiny(family, num_hidden_layers=2, max_position_embeddings=1024)
    given = {"batch_sizes": (1, 3), "draft_tokens": (3, 7), "verify": False, **options}
    return stock, optimize(twin_of(stock), **given)


def verified(model: Any) -> int:
    """Return how many calls verified drafts in steps by kernels."""
    assert not stocks(model), model.mirage.report
    return model.mirage.report.decode.get(VERIFIES, 0)


def counted_steps(model: Any, arguments: dict[str, Any]) -> tuple[Any, int]:
    """Return what a call gives, and how many steps it took."""
    steps, enqueue = [], Session.enqueue_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "enqueue_step", lambda self: steps.append(1) or enqueue(self))
        return model.generate(**arguments), len(steps)


def steps_by_tokens(model: Any) -> dict[int, int]:
    """Return how many steps of calls with drafts took how many tokens, by tokens."""
    prefix = "drafts: tokens of a step: "
    counts = model.mirage.report.decode.items()
    return {int(what.removeprefix(prefix)): n for what, n in counts if what.startswith(prefix)}


def scripts(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return scripts of drafts for texts: good, random, and adversarial ones."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randint(3, VOCAB, tokens.shape, generator=generator)
    is_wrong = torch.rand(tokens.shape, generator=generator) < 0.3
    wrong = (tokens + 1) % VOCAB
    every_eighth = torch.arange(tokens.shape[1])[None] % 8 == 5
    return {
        "good": tokens,
        "random": noise,
        "often right": torch.where(is_wrong, noise, tokens),
        "always wrong": wrong,
        "right but one": torch.where(every_eighth, wrong, tokens),
        "late by one": tokens.roll(1, 1),
        "outside of the vocabulary": torch.full_like(tokens, -1),
    }


def few_scripts(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return scripts of which all, some and no drafts are taken, or all scripts if thorough."""
    few = ("good", "often right", "always wrong")
    return {name: x for name, x in scripts(tokens).items() if THOROUGH or name in few}


#: A window in all layers, in some and in none, a softcap, and experts with sinks.
FAMILIES = ("llama", "mistral", "gemma2", pytest.param("gpt_oss", marks=pytest.mark.thorough))

#: Families whose steps for drafts differ from those above in norms and projections only.
ALIKE = ("qwen3", "gemma3", "olmo2", "phi3", "cohere", "gpt_neox")


@pytest.mark.parametrize(
    "family",
    [*FAMILIES, *(pytest.param(family, marks=pytest.mark.thorough) for family in ALIKE)],
)
def test_greedy_tokens_are_stocks_whatever_is_drafted(family: str) -> None:
    stock, ours = pair(family)
    for given in ({"input_ids": prompt()}, left_padded((1, 2 * WINDOW + 1, WINDOW))):
        # drafts that are late by one help gpt-oss in longer texts only
        tokens = count(256, 128 if family == "gpt_oss" else 64)
        given = {**given, "do_sample": False, "max_new_tokens": tokens, "pad_token_id": PAD}
        want = stock.generate(**given)
        batch = want.shape[0]
        for name, script in scripts(want).items():
            with drafting(script, name):
                got, steps = counted_steps(ours, {**given, **LOOKUP})
            assert got.tolist() == want.tolist(), name
            if name == "good":
                assert steps == -(-(tokens - 1) // 8)
            elif name in ("always wrong", "outside of the vocabulary"):
                assert steps == tokens - 1
            elif batch == 1 and name != "random":
                assert steps < tokens - 1
        assert ours.generate(**given, **LOOKUP).tolist() == want.tolist()
    assert verified(ours) == 2 * (len(scripts(want)) + 1)


def test_a_repeated_text_takes_few_steps() -> None:
    stock, ours = pair()
    text = prompt(1, 12).repeat(1, 4)
    given = {"inputs": text, "do_sample": False, "max_new_tokens": 200, **STOP}
    want = stock.generate(**given)
    got, steps = counted_steps(ours, {**given, **LOOKUP})
    assert got.tolist() == want.tolist()
    stock_steps = []
    forward = type(stock).forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(stock), "forward", lambda *a, **k: stock_steps.append(1) or forward(*a, **k)
        )
        assert stock.generate(**given, **LOOKUP).tolist() == want.tolist()
    assert steps < 150 and abs(steps - len(stock_steps)) <= 2


def test_calls_end_at_stop_tokens_and_lengths() -> None:
    stock, ours = pair()
    given = {"input_ids": prompt(3, 9), "do_sample": False, "pad_token_id": PAD}
    tokens = stock.generate(**given, max_new_tokens=40)
    with drafting(tokens):
        for stop in tokens[0, 12:34:3].tolist():
            for eos in (stop, [stop, int(tokens[1, 20])]):
                ends = {**given, "max_new_tokens": 40, "eos_token_id": eos}
                assert_same(stock.generate(**ends), ours.generate(**ends, **LOOKUP))
        for most in (1, 2, 3, 7, 8, 9, 10, 17):
            for length in ({"max_new_tokens": most}, {"max_length": 9 + most}):
                assert_same(
                    stock.generate(**given, **length), ours.generate(**given, **length, **LOOKUP)
                )
    many = {**given, "max_new_tokens": 40, "eos_token_id": [*range(50, VOCAB)]}
    assert_same(stock.generate(**many), ours.generate(**many, **LOOKUP))
    assert verified(ours)


def test_stop_strings_end_a_row_in_the_middle_of_a_step() -> None:
    stock, ours = pair()
    given = {"input_ids": prompt(3, 9), "do_sample": False, "max_new_tokens": 40}
    given |= {"tokenizer": tokenizer(), "pad_token_id": PAD, "eos_token_id": 98}
    tokens = stock.generate(**given)
    texts = tokenizer().batch_decode(tokens[:, 9:])
    with drafting(tokens):
        for first in range(2, 20, 3):
            strings = {"stop_strings": [texts[0][first : first + 3], texts[1][first + 1 :][:2]]}
            assert_same(
                stock.generate(**given, **strings), ours.generate(**given, **strings, **LOOKUP)
            )
    assert verified(ours)


def test_streamers_get_the_tokens_in_bursts() -> None:
    stock, ours = pair()
    given = {"input_ids": prompt(1, 9), "do_sample": False, "max_new_tokens": 40}
    tokens = stock.generate(**given)
    streamer = Recorder()
    with drafting(tokens):
        ours.generate(**given, **LOOKUP, streamer=streamer)
    puts = [event[2] for event in streamer.events if event[0] == "put"]
    assert puts[0] == prompt(1, 9).tolist() and streamer.events[-1] == ("end",)
    assert [token for (burst,) in puts[1:] for token in burst] == tokens[0, 9:].tolist()
    assert {len(burst) for (burst,) in puts[2:-1]} == {8}


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("name", ["good", "often right", "always wrong"])
def test_outputs_and_the_cache_are_those_of_plain_decoding(family: str, name: str) -> None:
    stock, ours = pair(family)
    given = {"inputs": prompt(1, 9), **FULL, "max_new_tokens": 40, "repetition_penalty": 1.2}
    # transformers 5.4 gives calls with drafts a cache whose layers keep all keys
    own = {"past_key_values": DynamicCache()} if KEEPS_ALL_KEYS else {}
    want = stock.generate(**given, **own)
    with drafting(scripts(want.sequences)[name], name):
        assert_same(want, ours.generate(**given, **LOOKUP))
    assert verified(ours)


PROCESSORS = {
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 2,
    "min_new_tokens": 9,
    "bad_words_ids": [[7], [11, 12]],
    "sequence_bias": [[[5], 2.0], [[20, 21], 3.0]],
    "exponential_decay_length_penalty": (5, 1.02),
    "eos_token_id": 2,
}


def test_processors_see_the_text_at_each_place() -> None:
    stock, ours = pair()
    given = {**left_padded((4, 11, 7)), "do_sample": False, "max_new_tokens": 60}
    given |= {"pad_token_id": PAD, **PROCESSORS}
    want = stock.generate(**given)
    for name, script in scripts(want).items():
        with drafting(script, name):
            assert_same(want, ours.generate(**given, **LOOKUP))
    assert verified(ours)


def test_samples_are_those_of_plain_decoding() -> None:
    stock, ours = pair()
    given = {**left_padded((4, 11, 7)), "do_sample": True, "max_new_tokens": 60, "top_p": 0.9}
    given |= {"temperature": 1.3, "top_k": 30, "pad_token_id": PAD, "repetition_penalty": 1.1}
    for seed in range(count(4, 2)):
        with our_numbers():
            want = generated(stock, given, seed)
        for name, script in scripts(want).items():
            with drafting(script, name):
                got = generated(ours, {**given, **LOOKUP}, seed)
                assert got.tolist() == want.tolist(), name
    assert verified(ours)


@pytest.mark.parametrize("quality", ["good", "bad"])
def test_samples_have_plain_probabilities(quality: str) -> None:
    """The second new token is drafted, and has the probabilities of plain sampling."""
    draws, batch, temperature = count(20_032, 5_056), 64, 2.0
    stock, ours = pair(batch_sizes=(batch,), draft_tokens=(1,))
    text = prompt(1, 9)

    def probabilities(texts: torch.Tensor) -> torch.Tensor:
        return (stock(texts).logits[:, -1] / temperature).softmax(-1).double()

    with torch.no_grad():
        firsts = torch.cat([text.repeat(VOCAB, 1), torch.arange(VOCAB)[:, None]], 1)
        p = (probabilities(text).T * probabilities(firsts)).sum(0)
    draft = int(p.argmax()) if quality == "good" else int(p.argsort()[VOCAB // 2])
    script = torch.cat([text, torch.full((1, 2), draft)], 1).repeat(batch, 1)
    given = {"inputs": text.repeat(batch, 1), "do_sample": True, "temperature": temperature}
    given |= {"top_k": 0, "max_new_tokens": 2, "prompt_lookup_num_tokens": 1}
    counts = torch.zeros(VOCAB, dtype=torch.float64)
    torch.manual_seed(3)
    with drafting(script, quality):
        for _ in range(draws // batch):
            counts += torch.bincount(ours.generate(**given)[:, -1], minlength=VOCAB)
    assert ours.mirage.report.decode[VERIFIES] == draws // batch
    statistic, freedom = chi_square(counts, p)
    assert statistic < bound(freedom)
    wrong, freedom = chi_square(counts, p.flip(0))
    assert wrong > bound(freedom)


def test_a_cache_that_grows_keeps_the_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mirage_hf.decode.call_plan.FIRST_REACH", 3)
    stock, ours = pair("mistral")
    given = {"input_ids": prompt(3, 240), "do_sample": False, "max_new_tokens": 300}
    want = stock.generate(**given)
    for name, script in few_scripts(want).items():
        with drafting(script, name):
            assert ours.generate(**given, **LOOKUP).tolist() == want.tolist(), name
    assert verified(ours)


@pytest.mark.parametrize("sampled", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_the_number_of_drafts_adapts(sampled: bool) -> None:
    stock, ours = pair()
    given = {"inputs": prompt(1, 9), "do_sample": sampled, "max_new_tokens": 256}
    with our_numbers():
        want = generated(stock, given)
    wrong_at_first = torch.where(torch.arange(want.shape[1]) < 130, (want + 1) % VOCAB, want)
    by_name = {}
    for name, script in {**few_scripts(want), "wrong at first": wrong_at_first}.items():
        before = steps_by_tokens(ours)
        with drafting(script, name):
            assert generated(ours, {**given, **LOOKUP}).tolist() == want.tolist(), name
        after = steps_by_tokens(ours)
        by_name[name] = [after.get(n, 0) - before.get(n, 0) for n in (1, 4, 8)]
    assert by_name["good"] == [0, 0, 32]
    plain, short, long = by_name["always wrong"]
    assert plain + short + long == 255 and long <= 2 and short <= 30
    plain, short, long = by_name["wrong at first"]
    assert 90 < plain < 140 and short + long < 60 and long > 10
    counted = f"{steps_by_tokens(ours)[1]} steps in calls with drafts (tokens a row: 1)"
    assert counted in str(ours.mirage.report)


def test_a_constant_schedule_keeps_the_number_of_drafts() -> None:
    stock, ours = pair()
    given = {"inputs": prompt(1, 9), "do_sample": False, "max_new_tokens": 60}
    want = stock.generate(**given)
    constant = {"num_assistant_tokens_schedule": "constant"}
    with drafting((want + 1) % VOCAB):
        assert ours.generate(**given, **LOOKUP, **constant).tolist() == want.tolist()
        assert steps_by_tokens(ours) == {8: 59}
        ours.generation_config.num_assistant_tokens_schedule = "constant"
        assert ours.generate(**given, **LOOKUP).tolist() == want.tolist()
    assert steps_by_tokens(ours) == {8: 2 * 59}


@pytest.mark.parametrize("schedule", [None, "heuristic_transient", "heuristic"])
def test_an_assistant_that_does_not_pay_is_given_up(schedule: str | None) -> None:
    stock, ours = pair()
    for given in ({"input_ids": prompt(1, 9)}, left_padded((4, 11, 7))):
        given = {**given, "do_sample": False, "max_new_tokens": 60, "pad_token_id": PAD}
        want, helper, drafted = stock.generate(**given).tolist(), assistant(schedule=schedule), []
        for _ in range(2):
            before = steps_by_tokens(ours)
            assert ours.generate(**given, assistant_model=helper).tolist() == want
            after = steps_by_tokens(ours)
            assert after[1] - before.get(1, 0) > 45
            drafted.append(sum(after[n] - before.get(n, 0) for n in after if n > 1))
        # only one schedule goes on from call to call
        goes_on = schedule == "heuristic"
        assert drafted[1] < drafted[0] if goes_on else drafted[1] == drafted[0] > 0


def test_outputs_are_kept_when_an_assistant_is_given_up() -> None:
    stock, ours = pair()
    given = {"inputs": prompt(1, 9), **FULL, "max_new_tokens": 30, "repetition_penalty": 1.2}
    assert_same(
        stock.generate(**given), ours.generate(**given, assistant_model=assistant(schedule=None))
    )
    assert steps_by_tokens(ours)[1] > 10


def test_costs_of_steps_come_from_measured_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = pair()
    kernels = ours.generate.runner.model_kernels
    shapes = [shape for shape in kernels.shapes if shape.batch == 1]
    assert step_costs(kernels, shapes) == pytest.approx(
        {1: 1.0, 4: 1 + 3 * COST_OF_ROW, 8: 1 + 7 * COST_OF_ROW}
    )
    for shape in shapes:
        monkeypatch.setattr(kernels.heads[shape.rows], "time_us", 10.0 * shape.rows)
        for found in (layer.found[shape] for layer in kernels.layers):
            for each in found.values():
                monkeypatch.setattr(each, "time_us", float(shape.rows))
    kernels._products_us.clear()
    assert step_costs(kernels, shapes) == {1: 1.0, 4: 4.0, 8: 8.0}
    parts = sum(not part.block.pattern.over_cache for part in kernels.layers[0].step.parts.values())
    assert kernels.products_us(shapes[0]) == 10.0 + 2 * parts


def test_a_model_that_changes_runs_stock() -> None:
    stock, ours = pair()
    given = {"inputs": prompt(1, 9), "do_sample": False, "max_new_tokens": 12}
    for model in (stock, ours):
        model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(
            -model.model.layers[0].mlp.up_proj.weight.detach()
        )
    want = stock.generate(**given).tolist()
    assert ours.generate(**given, **LOOKUP).tolist() == want
    (reason,) = stocks(ours)
    assert reason == f"stock: drafts, and steps without kernels: {CHANGED}"


def test_a_time_limit_ends_a_call() -> None:
    stock, ours = pair()
    given = {"inputs": prompt(1, 9), "do_sample": False}
    tokens = stock.generate(**given, max_new_tokens=40)[0].tolist()
    with drafting(torch.tensor([tokens])):
        got = ours.generate(**given, max_new_tokens=40, max_time=0.0, **LOOKUP)[0].tolist()
    assert got == tokens[: len(got)] and 9 < len(got) < 40
    assert verified(ours) == 1


def test_checked_steps_are_used() -> None:
    stock = tiny("qwen3", num_hidden_layers=2)
    ours = optimize(twin_of(stock), draft_tokens=3)
    given = {"inputs": prompt(1, 9), "do_sample": False, "max_new_tokens": 30}
    want = stock.generate(**given)
    got = ours.generate(**given, prompt_lookup_num_tokens=2, max_matching_ngram_size=3)
    assert got.tolist() == want.tolist()
    rows = [row for row in ours.mirage.report.rows if row.tokens == 4]
    assert rows and all(row.status == "swapped" for row in rows), ours.mirage.report
    assert all(row.error < 1e-4 for row in rows) and "1 x 4" in str(ours.mirage.report)


@pytest.mark.parametrize("what", ["lookup", "assistant", "sample"])
def test_captured_steps_run_ahead_of_the_host(what: str, captures: list[str]) -> None:
    stock, ours = pair("mistral")
    ours.generate.runner.depth = 2
    given = {**left_padded((4, 11, 7)), "do_sample": what == "sample", "max_new_tokens": 40}
    given |= {"pad_token_id": PAD, "eos_token_id": 50}
    drafts = {"assistant_model": assistant("mistral", 0)} if what == "assistant" else LOOKUP
    for seed in range(3):
        with our_numbers():
            want = generated(stock, given, seed)
        assert generated(ours, {**given, **drafts}, seed).tolist() == want.tolist()
        # a call without drafts between two with drafts has steps of its own
        with our_numbers():
            want = generated(stock, given, seed)
        assert generated(ours, given, seed).tolist() == want.tolist()
    # each number of tokens that was used has a graph of its own, and so have plain calls, and the
    # first drafts of an assistant
    used = steps_by_tokens(ours)
    assert captures.count("step") == len(used) + 1 + (what == "assistant"), (captures, used)
    assert len(used) > 1 or what == "assistant"


def assistant(
    family: str = "llama",
    seed: int = 1,
    vocab: int = VOCAB,
    schedule: str | None = "constant",
    draft_tokens: tuple[int, ...] = (),
) -> Any:
    """Return an optimized model that drafts. With the seed 0 it drafts what the others choose.

    It is as large as the others, so its drafts do not pay. A constant schedule takes them anyway.
    """
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 1024, "vocab_size": vocab}
    helper = tiny(family, seed, **sizes)
    helper = optimize(helper, batch_sizes=(1, 3), draft_tokens=draft_tokens, verify=False)
    helper.generation_config.num_assistant_tokens_schedule = schedule
    return helper


@pytest.mark.parametrize(
    "family", ["llama", "mistral", pytest.param("gemma2", marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("feeds_pairs", [False, True])
def test_an_assistant_drafts(
    family: str, seed: int, feeds_pairs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a step for each draft, and one more if it has no step of two tokens."""
    stock, ours = pair(family)
    helper = assistant(family, seed, draft_tokens=(1,) * feeds_pairs)
    fed, feed = Counter[int](), Step.feed
    monkeypatch.setattr(
        Step, "feed", lambda self: fed.update([self.drafts.tokens.shape[1]]) or feed(self)
    )
    for given in ({"input_ids": prompt()}, left_padded((1, 2 * WINDOW + 1, WINDOW))):
        tokens = count(256, 64)
        given = {**given, "do_sample": False, "max_new_tokens": tokens, "pad_token_id": PAD}
        want = stock.generate(**given)
        got, steps = counted_steps(ours, {**given, "assistant_model": helper})
        assert got.tolist() == want.tolist()
        # a batch may contain a row that differs by rounding at a near tie
        assert steps == tokens // 8 if seed == 0 else steps > tokens // 8
        rounds = steps + 1  # it drafts after the choice from the prompt, too
        assert fed == ({2: rounds, 1: 6 * rounds} if feeds_pairs else {1: 8 * rounds})
        fed.clear()
    counts = ours.mirage.report.decode
    assert verified(ours) == 2 and counts["drafts: drafted"] == 7 * counts["drafts: steps of a row"]
    if seed == 0:
        assert counts["drafts: taken"] >= counts["drafts: drafted"] - 4 * 7


def test_no_step_runs_ahead_of_those_that_may_be_the_last() -> None:
    """All drafts are taken here, so each step gives eight tokens."""
    stock, ours = pair()
    ours.generate.runner.depth = 2
    for tokens in (41, 48):
        given = {"inputs": prompt(1, 9), "do_sample": False, "max_new_tokens": tokens}
        want = stock.generate(**given).tolist()
        got, steps = counted_steps(ours, {**given, "assistant_model": assistant(seed=0)})
        assert got.tolist() == want and steps == -(-(tokens - 1) // 8)


def test_first_drafts_that_cannot_be_captured_are_called(
    captures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, ours = pair()
    replay_of, refused = Step.replay_of, []

    def refuse(self: Step, name: tuple[Any, ...], run: Any) -> Any:
        if name[0] == "first drafts":
            refused.append(name)
            raise RuntimeError("no capture")
        return replay_of(self, name, run)

    monkeypatch.setattr(Step, "replay_of", refuse)
    given = {"inputs": prompt(1, 9), "do_sample": False, "max_new_tokens": 41}
    want, helper = stock.generate(**given).tolist(), assistant(seed=0)
    for _ in range(2):
        got, steps = counted_steps(ours, {**given, "assistant_model": helper})
        assert got.tolist() == want and steps == 5
    assert len(refused) == 2


def test_an_assistant_whose_step_of_two_tokens_is_refused_takes_one_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock, ours = pair()
    helper = assistant(seed=0, draft_tokens=(1,))
    by_kernels = DecodeRunner.step_by_kernels
    monkeypatch.setattr(
        DecodeRunner,
        "step_by_kernels",
        lambda self, plan, block, key, shape, drafts=None: (
            "not now" if shape.tokens == 2 else by_kernels(self, plan, block, key, shape, drafts)
        ),
    )
    given = {"inputs": prompt(1, 9), "do_sample": False, "max_new_tokens": 41}
    want = stock.generate(**given).tolist()
    got, steps = counted_steps(ours, {**given, "assistant_model": helper})
    assert got.tolist() == want and steps == 5 and not stocks(ours)


def test_costs_of_an_assistant_are_those_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is as large as the model, so each of its steps costs as much as a plain step."""
    _, ours = pair()
    costs, draft_from = [], Session.draft_from
    monkeypatch.setattr(
        Session,
        "draft_from",
        lambda self, source: costs.append(self.plan.drafts.costs) or draft_from(self, source),
    )
    for draft_tokens in ((), (1,)):
        helper = assistant(draft_tokens=draft_tokens)
        helper.generation_config.num_assistant_tokens = 5
        ours.generate(prompt(1, 9), assistant_model=helper, max_new_tokens=3, do_sample=False)
    of_rows = {tokens: 1 + (tokens - 1) * COST_OF_ROW for tokens in (1, 4, 8)}
    assert costs[0] == pytest.approx({8: of_rows[8] + 6})
    assert costs[1] == pytest.approx({8: of_rows[8] + 5})


def test_an_assistant_samples_by_the_same_numbers() -> None:
    stock, ours = pair()
    helpers = [assistant(seed=0), assistant(seed=1)]
    given = {**left_padded((4, 11, 7)), "do_sample": True, "max_new_tokens": 57, "top_k": 40}
    given |= {"temperature": 1.3, "pad_token_id": PAD, "repetition_penalty": 1.2}
    for seed in range(2):
        with our_numbers():
            want = generated(stock, given, seed).tolist()
        for helper in helpers:
            torch.manual_seed(seed)
            got, steps = counted_steps(ours, {**given, "assistant_model": helper})
            assert got.tolist() == want and (steps == 7) == (helper is helpers[0])
    full = {"inputs": prompt(1, 9), **FULL, "max_new_tokens": 20, "repetition_penalty": 1.2}
    assert_same(stock.generate(**full), ours.generate(**full, assistant_model=helpers[1]))
    assert verified(ours) == 5


@pytest.mark.parametrize("feeds_pairs", [False, True])
def test_an_assistant_of_another_family_follows_the_accepted_text(
    feeds_pairs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mirage_hf.decode.call_plan.FIRST_REACH", 3)
    stock, ours = pair("llama")
    helper = assistant("qwen3", draft_tokens=(1,) * feeds_pairs)
    helper.generation_config.num_assistant_tokens = 3
    given = {**left_padded((240, 235, 9)), "do_sample": False, "max_new_tokens": 60}
    given |= {"pad_token_id": PAD, "eos_token_id": 98}
    want = stock.generate(**given)
    for _ in range(2):
        got = ours.generate(**given, assistant_model=helper)
        assert got.tolist() == want.tolist()
    block = max(ours.generate.runner.pool._idle, key=lambda b: b.capacity).assistant
    # its keys are those of a forward of the whole text
    rows = [(want[row] != PAD).nonzero()[0].item() for row in range(3)]
    length = int(block.control.length) + 8
    text, mask = want[:, :length], torch.ones(3, length, dtype=torch.long)
    for row, first in enumerate(rows):
        mask[row, :first] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        cache = (
            type(helper)
            .forward(helper, text, attention_mask=mask, position_ids=positions, use_cache=True)
            .past_key_values
        )
    for row, first in enumerate(rows):
        mine = block.keys[0][row, :, first:length]
        torch.testing.assert_close(mine, cache.layers[0].keys[row, :, first:], rtol=1e-4, atol=1e-4)


def test_an_assistant_that_changes_is_noticed() -> None:
    stock, ours = pair()
    helper = assistant(seed=0)
    given = {"inputs": prompt(1, 9), "do_sample": False, "max_new_tokens": 40}
    want = stock.generate(**given).tolist()
    for _ in range(2):
        got, steps = counted_steps(ours, {**given, "assistant_model": helper})
        assert got.tolist() == want and steps == 5
    with torch.no_grad():
        helper.model.norm.weight.mul_(-1)  # in place, so that its kernels see it
    got, steps = counted_steps(ours, {**given, "assistant_model": helper})
    assert got.tolist() == want and steps > 20
    helper.model.norm.weight = torch.nn.Parameter(-helper.model.norm.weight.detach())
    got = ours.generate(**given, assistant_model=helper)
    assert got.tolist() == want
    assert stocks(ours) == [f"stock: assisted decoding: {CHANGED}"]


def test_assistants_that_are_not_covered_run_stock() -> None:
    stock, ours = pair()
    given = {"inputs": prompt(1, 9), "do_sample": False, "max_new_tokens": 12}
    want = stock.generate(**given).tolist()
    plain = tiny("llama", 1, num_hidden_layers=1)
    assert ours.generate(**given, assistant_model=plain).tolist() == want
    with pytest.raises(ValueError, match="num_return_sequences"):
        ours.generate(
            **{**given, "do_sample": True}, assistant_model=assistant(), num_return_sequences=2
        )
    with pytest.raises(ValueError, match="tokenizer"):
        ours.generate(**given, assistant_model=assistant(vocab=77))
    other = optimize(tiny("llama", 1, num_hidden_layers=1), batch_sizes=(3,), verify=False)
    assert ours.generate(**given, assistant_model=other).tolist() == want
    assert sorted(stocks(ours)) == [
        "stock: assisted decoding with options that stock rejects",
        "stock: assisted decoding: an assistant with another vocabulary",
        "stock: assisted decoding: no kernels for a batch of 1; optimize(batch_sizes=…) makes them",
        "stock: assisted decoding: the assistant has no steps by kernels",
    ]


def test_what_is_not_covered_runs_stock() -> None:
    stock, ours = pair(draft_tokens=())
    given = {"inputs": prompt(1, 9), "do_sample": False, "max_new_tokens": 12, **STOP}
    assert_same(stock.generate(**given, **LOOKUP), ours.generate(**given, **LOOKUP))
    assert stocks(ours) == [
        "stock: prompt lookup: no kernels for steps of several tokens of 1 rows; "
        "optimize(draft_tokens=…) makes them"
    ]
    stock, ours = pair()
    with pytest.raises(ValueError, match="batch"):
        ours.generate(prompt(3, 9), max_new_tokens=4, return_dict_in_generate=True, **LOOKUP)
    recorder = Recorder()
    ours.generate(**given, **LOOKUP, logits_processor=[recorder.processor])
    assert recorder.events
    assert ours.generate(**given, **LOOKUP).tolist() == stock.generate(**given).tolist()
    reasons = sorted(what for what in ours.mirage.report.decode if what.startswith("stock"))
    assert reasons == [
        "stock: drafts, and tokens that the host chooses: processor _Processor",
        "stock: prompt lookup for several rows with outputs besides tokens",
    ]


@pytest.mark.parametrize("wrong", [0, 16, (3, 0), (True,), "3", 2.5])
def test_wrong_numbers_of_drafts_are_refused(wrong: Any) -> None:
    with pytest.raises(OptimizeError, match="draft_tokens"):
        optimize(tiny("llama", num_hidden_layers=1), draft_tokens=wrong)
