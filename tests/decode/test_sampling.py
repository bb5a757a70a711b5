"""Tokens chosen on the device.

Processors and stop strings give the same as HF's, and samples have stock's probabilities.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import transformers.generation.logits_process as hf
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, StopStringCriteria

from mirage_hf.decode import install, processors, selection, uniform_numbers
from mirage_hf.decode import step as decode_step
from mirage_hf.decode.cache_block import CacheBlock
from mirage_hf.decode.choosing import NOTHING, draw
from mirage_hf.decode.control import TokenHistory
from mirage_hf.decode.processor_ops import TextSoFar
from mirage_hf.decode.processors import CallTensors
from mirage_hf.decode.sampler import Sampler
from mirage_hf.decode.selection import ProcessedChooser, Selection
from mirage_hf.decode.uniform_numbers import UniformNumbers, uniforms
from mirage_hf.errors import SamplingError
from tests.decode.test_generate_life import tokenizer
from tests.helpers.generate_comparison import (
    PAD,
    VOCABULARY,
    Recorder,
    assert_same,
    both,
    handled,
    left_padded,
    prompt,
    tiny,
)
from tests.helpers.generate_features import fake_captures

pytestmark = pytest.mark.models

CPU = torch.device("cpu")
FULL = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
ON_DEVICE = "on the device"
VOCAB = 61


# -- processors -----------------------------------------------------------------------------------


def bad_words() -> list[list[int]]:
    return [[5], [9], [3, 4], [1, 2, 3], [2, 3], [7, 7, 7, 7, 7, 7]]


EACH = {
    "temperature": lambda d: hf.TemperatureLogitsWarper(0.7),
    "hot": lambda d: hf.TemperatureLogitsWarper(3.0),
    "top k": lambda d: hf.TopKLogitsWarper(5),
    "top k of all": lambda d: hf.TopKLogitsWarper(500, min_tokens_to_keep=2),
    "top p": lambda d: hf.TopPLogitsWarper(0.8),
    "top p, little": lambda d: hf.TopPLogitsWarper(0.01, min_tokens_to_keep=3, filter_value=-50.0),
    "top h": lambda d: hf.TopHLogitsWarper(0.4),
    "min p": lambda d: hf.MinPLogitsWarper(0.2),
    "min p, kept": lambda d: hf.MinPLogitsWarper(0.99, min_tokens_to_keep=4),
    "typical": lambda d: hf.TypicalLogitsWarper(0.6),
    "typical, kept": lambda d: hf.TypicalLogitsWarper(0.05, min_tokens_to_keep=4),
    "epsilon": lambda d: hf.EpsilonLogitsWarper(0.01),
    "epsilon, kept": lambda d: hf.EpsilonLogitsWarper(0.9, min_tokens_to_keep=3),
    "eta": lambda d: hf.EtaLogitsWarper(0.02, device=d),
    "normalize": lambda d: hf.LogitNormalization(),
    "remove invalid": lambda d: hf.InfNanRemoveLogitsProcessor(),
    "suppress": lambda d: hf.SuppressTokensLogitsProcessor([1, 5, 60, 200], device=d),
    "suppress at the beginning": lambda d: hf.SuppressTokensAtBeginLogitsProcessor(
        [1, 5], 4, device=d
    ),
    "min length": lambda d: hf.MinLengthLogitsProcessor(6, [2, 8], device=d),
    "min new tokens": lambda d: hf.MinNewTokensLengthLogitsProcessor(
        3, 2, torch.tensor([2, 8], device=d)
    ),
    "forced bos": lambda d: hf.ForcedBOSTokenLogitsProcessor(7),
    "forced eos": lambda d: hf.ForcedEOSTokenLogitsProcessor(6, [2, 8], device=d),
    "decay": lambda d: hf.ExponentialDecayLengthPenalty((1, 1.3), [2, 8], 3),
    "decay of what is suppressed": lambda d: hf.ExponentialDecayLengthPenalty(
        (1, 1.3), [3, 6, 7], 3
    ),
    "repetition": lambda d: hf.RepetitionPenaltyLogitsProcessor(1.3),
    "repetition of what is new": lambda d: hf.RepetitionPenaltyLogitsProcessor(
        0.8, prompt_ignore_length=4
    ),
    "no bigram twice": lambda d: hf.NoRepeatNGramLogitsProcessor(2),
    "no token twice": lambda d: hf.NoRepeatNGramLogitsProcessor(1),
    "no 4-gram twice": lambda d: hf.NoRepeatNGramLogitsProcessor(4),
    "n-grams longer than any text": lambda d: hf.NoRepeatNGramLogitsProcessor(400),
    "bad words": lambda d: hf.NoBadWordsLogitsProcessor(bad_words(), 9),
    "one bad word": lambda d: hf.NoBadWordsLogitsProcessor([[5]]),
    "bias": lambda d: hf.SequenceBiasLogitsProcessor(
        {(5,): 2.5, (3, 4): -1.5, (1, 2, 4): 7.25, (9, 9): -math.inf, (4,): 0.5}
    ),
}


def by_the_table(
    p: LogitsProcessor, ids: torch.Tensor, scores: torch.Tensor, room: int = 40
) -> torch.Tensor:
    """Return the scores that the table's processors give.

    The text stands in a larger buffer, whose unused places hold other tokens.
    """
    row, history = processors.TABLE[type(p)], TokenHistory.allocate(len(ids), room, scores.device)
    history.ids.copy_(torch.randint(0, 10, history.ids.shape))
    history.start(ids, 9)
    values = [v.to(scores.device) for v in row.values(p, CallTensors(scores.shape[1]))]
    return row.run(
        TextSoFar(history.ids, history.prompt, history.slots), scores, *row.sizes(p), *values
    )


def compare(name: str, device: torch.device, rtol: float) -> None:
    """Compare a row of the table with HF's class, on random scores and texts of many lengths."""
    torch.manual_seed(0)
    changed = 0
    for length in (1, 2, 3, 4, 5, 6, 7, 23):
        ids = torch.randint(0, 10, (4, length)).to(device)
        ids[2:] = 1 + ids[2:] % 3  # few distinct tokens, so that they repeat
        scores = 4 * torch.randn(4, VOCAB).to(device)
        scores[1, ::3] = -math.inf
        scores[2] = scores[2].round()  # ties
        if name == "remove invalid":
            scores[0, :9] = torch.tensor([math.nan, math.inf, -math.inf] * 3, device=device)
        p = EACH[name](device)
        assert processors.why_host_runs(LogitsProcessorList([p])) is None
        before = scores.clone()
        want, got = p(ids, scores.clone()), by_the_table(EACH[name](device), ids, scores)
        assert torch.equal(before.nan_to_num(nan=7), scores.nan_to_num(nan=7)), (
            "the logits were written over"
        )
        assert torch.equal(want.isneginf(), got.isneginf()), (
            f"{name}, length {length}: {(want.isneginf() != got.isneginf()).nonzero()}"
        )
        torch.testing.assert_close(
            got,
            want,
            rtol=rtol,
            atol=0,
            equal_nan=True,
            msg=lambda m, n=length: f"{name}, length {n}: {m}",
        )
        changed += not torch.equal(want, before)
    assert changed or name in ("top k of all", "n-grams longer than any text")


@pytest.mark.parametrize("name", EACH)
def test_processors_are_hfs(name):
    compare(name, CPU, rtol=3e-7)


@pytest.mark.parametrize("other", [torch.float64, torch.bfloat16], ids=str)
def test_a_users_default_dtype_changes_no_scores(other):
    torch.manual_seed(0)
    scores, ids = torch.randn(2, VOCAB), torch.randint(0, 10, (2, 5))
    try:
        for name, make in EACH.items():
            if isinstance(make(CPU), hf.SequenceBiasLogitsProcessor):
                continue  # stock raises too
            torch.set_default_dtype(torch.float32)
            want, p = make(CPU)(ids, scores.clone()), make(CPU)
            torch.set_default_dtype(other)
            torch.testing.assert_close(
                by_the_table(p, ids, scores),
                want,
                rtol=3e-7,
                atol=0,
                msg=lambda m, n=name: f"{n}: {m}",
            )
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.slow
def test_processors_that_read_the_text_say_so():
    """The step writes the text only if a processor reads it."""
    torch.manual_seed(0)
    reads = set()
    for name, make in EACH.items():
        scores = torch.randn(1, VOCAB)
        for length in range(2, 9):
            texts = [torch.randint(1, 10, (1, length)) for _ in range(30)]
            found = [by_the_table(make(CPU), ids, scores) for ids in texts]
            if any(not torch.equal(found[0], other) for other in found[1:]):
                reads.add(type(make(CPU)))
        assert type(make(CPU)) not in reads or processors.TABLE[type(make(CPU))].reads_text, name
    assert reads == {kind for kind, row in processors.TABLE.items() if row.reads_text}


def test_every_row_is_tested():
    assert {type(make(CPU)) for make in EACH.values()} == set(processors.TABLE)


def test_tokens_outside_of_the_vocabulary_are_refused_as_by_stock():
    for make in (
        lambda: hf.NoBadWordsLogitsProcessor([[200]]),
        lambda: hf.SequenceBiasLogitsProcessor({(1, 99): 1.0}),
    ):
        raised = []
        for run in (
            lambda p: p(prompt(), torch.zeros(1, VOCAB)),
            lambda p: by_the_table(p, prompt(), torch.zeros(1, VOCAB)),
        ):
            with pytest.raises(ValueError) as e:
                run(make())
            raised.append(str(e.value))
        assert raised[0] == raised[1]


@pytest.mark.parametrize(
    "forced",
    [
        {"forced_eos_token_id": VOCABULARY},
        {"forced_eos_token_id": [7, 700]},
        {"forced_bos_token_id": VOCABULARY},
        {"forced_bos_token_id": -1},
    ],
)
def test_forced_tokens_that_the_model_has_not(forced):
    """HF counts negative ids from the end, if it takes them at all.

    For other ids it raises its own error.
    """
    model = tiny("llama")
    runner = install(model)

    def run(generate):
        try:
            return generate(prompt(length=1), max_new_tokens=5, **forced).tolist()
        except (IndexError, ValueError) as e:
            return type(e), str(e)

    assert run(lambda *args, **kw: type(model).generate(model, *args, **kw)) == run(model.generate)
    assert all(what.startswith("by the host: processor Forced") for what in runner.selections)


class Mine(hf.TemperatureLogitsWarper):
    pass


def test_the_host_runs_processors_that_the_table_lacks():
    of = processors.why_host_runs
    newer = hf.TemperatureLogitsWarper(0.5)
    newer.seen = 3
    assert of(None) is of([]) is of(LogitsProcessorList([hf.TopKLogitsWarper(3)])) is None
    assert of(LogitsProcessorList([hf.TopKLogitsWarper(3), Mine(0.5)])) == "processor Mine"
    assert of(LogitsProcessorList([newer])) == "processor TemperatureLogitsWarper"
    assert of(LogitsProcessorList([lambda ids, scores: scores])) == "processor function"
    assert (
        of(type("Other", (LogitsProcessorList,), {})([hf.TopKLogitsWarper(3)]))
        == "processors in a Other"
    )


# -- drawing --------------------------------------------------------------------------------------


def chi_square(counts: torch.Tensor, p: torch.Tensor) -> tuple[float, int]:
    """Return the chi-square statistic and its degrees of freedom.

    Cells with fewer than 5 expected counts are taken together.
    """
    expected = p.double() * counts.sum()
    small = expected < 5
    seen, wanted = (
        torch.cat([x[~small], x[small].sum()[None]]) for x in (counts.double(), expected)
    )
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    return float(((seen - wanted) ** 2 / wanted).sum()), len(wanted) - 1


def bound(freedom: int) -> float:
    """Return the value that a chi-square exceeds once in 10,000 (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3


WARPERS = {
    "alone": [],
    "temperature, top k, top p": ["temperature", "top k", "top p"],
    "temperature, top p": ["temperature", "top p"],
    "min p": ["hot", "min p"],
    "typical": ["typical"],
    "penalty": ["repetition", "temperature"],
}


def draws(
    name: str, device: torch.device, vocab: int = VOCAB, rows: int = 40, steps: int = 500
) -> None:
    """Draw at many steps, and compare the counts with the probabilities of stock's processors.

    The steps are independent.
    """
    block, ids = (
        CacheBlock(rows, 600, (), device),
        prompt().remainder(vocab).expand(rows, -1).to(device),
    )
    logits = 2.5 * torch.randn(1, vocab, generator=torch.Generator().manual_seed(1)).to(device)
    block.set_logits(logits.expand(rows, -1))
    chooser = Selection(tuple(EACH[n](device) for n in WARPERS[name]), sample=True).chooser_on(
        block
    )
    p = (
        LogitsProcessorList([EACH[n](device) for n in WARPERS[name]])(ids[:1], logits.clone())
        .softmax(-1)[0]
        .cpu()
    )
    chooser.history.set_numbers(uniforms(4711, rows, steps))
    tokens, control = [], block.control
    for step in range(steps):
        chooser.history.start(ids, steps)
        chooser.history.prompt.sub_(
            step
        )  # the text stays the prompt, so that every draw has the same probabilities
        control.start(
            length=7,
            position=torch.tensor([[6]], device=device),
            lowest=None,
            budget=steps - step,
            eos=None,
            pad=torch.tensor(PAD, device=device),
        )
        chooser.choose(control, block.logits)
        tokens.append(control.ids[:, 0].clone())
    found = torch.stack(tokens).cpu()
    counts = found.flatten().bincount(minlength=vocab)
    assert counts.sum() == rows * steps and not counts[p == 0].any()
    statistic, freedom = chi_square(counts, p)
    assert statistic < bound(freedom), (
        f"chi-square {statistic:.1f} with {freedom} degrees, at most {bound(freedom):.1f} is likely"
    )
    wrong, freedom = chi_square(counts, p.flip(0))
    assert wrong > 3 * bound(freedom)  # a wrong distribution would be noticed
    likely = p[found] > p[p > 0].median()
    for what, a, b in (("step", likely[:-1], likely[1:]), ("row", likely[:, :-1], likely[:, 1:])):
        pairs = (2 * a + b.long()).flatten().bincount(minlength=4).view(2, 2).double()
        share = pairs.sum(1, keepdim=True) * pairs.sum(0, keepdim=True) / pairs.sum()
        dependence = float(((pairs - share) ** 2 / share).sum())
        assert dependence < bound(1), (
            f"one {what}'s token tells the next one's: chi-square {dependence:.1f}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", WARPERS)
def test_twenty_thousand_draws_have_stocks_probabilities(name):
    draws(name, CPU)


@pytest.mark.slow
def test_draws_from_a_large_vocabulary():
    draws("temperature, top p", CPU, vocab=1100)


def philox(key: tuple[int, int], counter: int) -> list[int]:
    """Compute Philox4x64-10 as in its paper.

    Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3.
    """
    mask, x, (k0, k1) = (1 << 64) - 1, [counter, 0, 0, 0], key
    for _ in range(10):
        a, b = 0xD2E7470EE14C6C93 * x[0], 0xCA5A826395121157 * x[2]
        x = [(b >> 64) ^ x[1] ^ k0, b & mask, (a >> 64) ^ x[3] ^ k1, a & mask]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return x


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 123456789, -1, -(1 << 63)])
def test_numbers_are_philox_by_seed_row_and_step(seed):
    rows, steps = 3, 10
    found = uniforms(seed, rows, steps)
    for row in range(rows):
        for step in range(steps):
            raw = philox((seed % (1 << 64), row), step // 4 + 1)[step % 4]  # numpy begins at 1
            assert found[row, step] == (raw >> 24) / 2**40 < 1
    assert torch.equal(uniforms(seed, rows, 6, first=4), found[:, 4:])
    assert torch.equal(uniforms(seed, 1, steps), found[:1])
    table = UniformNumbers(seed, rows, CPU)
    assert all(
        torch.equal(table.at(step), uniforms(seed, rows, 2100)[:, step, None])
        for step in range(2100)
    )


def test_draws_at_the_edges():
    p = torch.tensor([[0, 0.25, 0, 0.5, 0.25, 0]] * 7)
    numbers = torch.tensor(
        [[0], [0.2499], [0.25], [0.7499], [0.75], [1 - 2.0**-40], [0.5]], dtype=torch.float64
    )
    p[6] = torch.tensor([0.0, 0, 1, 0, 0, 0])
    assert draw(p, numbers).tolist() == [1, 1, 3, 3, 4, 4, 2]
    p[0], p[1, 3] = 0, math.nan
    assert draw(p, numbers).tolist() == [NOTHING, NOTHING, 3, 3, 4, 4, 2]
    many = torch.full((1, 200_000), 1 / 200_000)
    many[0, 150_000:] = 0
    assert draw(many, torch.tensor([[1 - 2.0**-40]], dtype=torch.float64)).tolist() == [149_999]


# -- generate -------------------------------------------------------------------------------------

CASES = {
    "as the defaults are": {"temperature": 0.6, "top_p": 0.9},
    "min p, typical": {"top_k": 0, "min_p": 0.05, "typical_p": 0.9},
    "cut-offs": {"top_k": 0, "epsilon_cutoff": 3e-3, "eta_cutoff": 2e-3},
    "penalties": {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "temperature": 2.0,
        "remove_invalid_values": True,
    },
    "decay": {
        "exponential_decay_length_penalty": (3, 1.2),
        "eos_token_id": [30, 31],
        "begin_suppress_tokens": [9, 10],
        "top_k": 20,
    },
    "all in a row": {
        "sequence_bias": {(5,): 1.5, (8, 9): -3.0},
        "repetition_penalty": 0.9,
        "bad_words_ids": [[4], [7, 8]],
        "min_new_tokens": 5,
        "eos_token_id": list(range(30, 60)),
        "forced_eos_token_id": 31,
        "suppress_tokens": [6],
        "begin_suppress_tokens": [9, 10],
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 1e-3,
        "renormalize_logits": True,
    },
}


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_generate_chooses_as_stock(name, sample):
    model = tiny("llama")
    runner = install(model, depth=2)
    options = {
        k: v
        for k, v in CASES[name].items()
        if sample or k not in ("temperature", "top_k", "top_p", "min_p", "typical_p")
    }
    for again in range(2):
        stock, ours = both(
            model,
            {
                **left_padded(seed=again),
                "max_new_tokens": 14,
                "do_sample": sample,
                **options,
                **FULL,
            },
            seed=again,
        )
        assert_same(stock, ours)
    assert set(runner.selections) <= {ON_DEVICE} and (runner.selections or not sample)
    assert handled(runner) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra", [{}, {"eos_token_id": list(range(3, 12))}, {"top_p": 0.8, "repetition_penalty": 1.2}]
)
def test_a_seed_gives_the_same_tokens_however_they_are_chosen(extra):
    model = tiny("llama")
    arguments = {
        **left_padded(),
        "max_new_tokens": 30,
        "do_sample": True,
        "temperature": 1.3,
        **extra,
    }

    def run(seed=3, depth=0, mode="graph", **more):
        runner = install(model, depth=depth, mode=mode)
        torch.manual_seed(seed)
        found = model.generate(**arguments, **more).tolist()
        return found, dict(runner.selections)

    first, where = run()
    assert where == {ON_DEVICE: 1}
    assert all(run(depth=depth) == (first, where) for depth in (1, 2, 4)) and run(mode="eager") == (
        first,
        where,
    )
    by_host, where = run(stopping_criteria=StoppingCriteriaList([Recorder().criterion]))
    assert by_host == first and where == {"by the host: criterion _Criterion": 1}
    assert run(logits_processor=LogitsProcessorList([Recorder().processor]))[0] == first
    assert run(seed=4)[0] != first
    torch.manual_seed(3)
    assert (
        model.generate(**arguments).tolist() == first
        and model.generate(**arguments).tolist() != first
    )


def test_one_number_of_torchs_generator_a_call():
    model = tiny("llama")
    install(model, depth=3)
    for extra, drawn in (({}, 0), ({"do_sample": True}, 1), ({"repetition_penalty": 1.3}, 0)):
        torch.manual_seed(0)
        model.generate(prompt(2), max_new_tokens=9, **extra)
        after = torch.get_rng_state()
        torch.manual_seed(0)
        for _ in range(drawn):
            uniform_numbers.draw_seed()
        assert torch.equal(torch.get_rng_state(), after), extra


def test_other_rows_do_not_matter():
    model = tiny("llama")
    install(model)
    tokens = []
    for batch in (1, 3):
        torch.manual_seed(1)
        tokens.append(
            model.generate(prompt().expand(batch, -1), max_new_tokens=20, do_sample=True, top_k=0)
        )
    assert (
        tokens[0][0].tolist() == tokens[1][0].tolist()
        and len({str(row) for row in tokens[1].tolist()}) == 3
    )


@pytest.mark.slow
def test_a_text_that_outgrows_its_block(monkeypatch):

    monkeypatch.setattr("mirage_hf.decode.call_plan.FIRST_REACH", 3)
    model, tok = tiny("llama", max_position_embeddings=1024), tokenizer()
    runner = install(model, depth=2)
    for extra in (
        {"do_sample": True},
        {"no_repeat_ngram_size": 2},
        {"stop_strings": ["neverwhere"], "tokenizer": tok},
        {"do_sample": True, "repetition_penalty": 1.2, "top_p": 0.9},
    ):
        assert_same(
            *both(model, {**left_padded((250, 240)), "max_new_tokens": 40, **extra, **FULL})
        )
    assert sorted(runner.pool.blocks) == [(2, 256), (2, 512)] and runner.selections == {
        ON_DEVICE: 4
    }


def test_only_the_new_tokens_beside_a_cache():
    from transformers import DynamicCache

    model = tiny("llama")
    runner = install(model)
    used = [DynamicCache(config=model.config) for _ in range(2)]
    caches = iter(used * 2)
    both(model, lambda: {"inputs": prompt(2), "max_new_tokens": 4, "past_key_values": next(caches)})
    assert_same(
        *both(
            model,
            lambda: {
                "input_ids": prompt(2, 3, seed=4),
                "attention_mask": torch.ones(2, 13, dtype=torch.long),
                "past_key_values": next(caches),
                "max_new_tokens": 9,
                "do_sample": True,
                "repetition_penalty": 1.5,
                **FULL,
            },
        )
    )
    assert handled(runner) == 2 and runner.selections == {ON_DEVICE: 1}


# -- stopping -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize(
    "extra", [{}, {"eos_token_id": [3, 4]}, {"do_sample": True}, {"max_time": 100.0}]
)
def test_stop_strings_stop_on_the_device(extra, depth):
    model, tok = tiny("llama"), tokenizer()
    runner = install(model, depth=depth)
    free, _ = both(
        model, {**left_padded(), "max_new_tokens": 30, "do_sample": "do_sample" in extra}
    )
    texts = [tok.decode(row) for row in free[:, 11:]]
    runner.selections.clear()
    ended = set()
    for strings in (
        [text[4 + 6 * n : 6 + 6 * n] for n, text in enumerate(texts)],
        [text[3:8] for text in texts],
        [texts[2][20]],
        ["no such text at all"],
    ):
        recorders = []

        def arguments(strings=strings, recorders=recorders):
            recorders.append(r := Recorder())
            return {
                **left_padded(),
                "max_new_tokens": 30,
                "stop_strings": strings,
                "tokenizer": tok,
                "streamer": r,
                **extra,
            }

        stock, ours = both(model, arguments)
        assert_same(stock, ours)
        assert recorders[0].events == recorders[1].events
        ended.add(stock.shape[1])
    assert len(ended) > 1 and runner.selections == {ON_DEVICE: 4}


def test_an_empty_stop_string_is_the_hosts():
    model = tiny("llama")
    runner = install(model)
    assert_same(
        *both(
            model,
            {
                "inputs": prompt(2),
                "max_new_tokens": 6,
                "stop_strings": [""],
                "tokenizer": tokenizer(),
                **FULL,
            },
        )
    )
    assert runner.selections == {"by the host: criterion StopStringCriteria": 1}


def test_stop_strings_of_a_text_shorter_than_they_are():
    tok = tokenizer()
    words = [tok.decode([n]) for n in range(10, 14)]
    for strings in (
        [words[1]],
        [words[0] + words[1]],
        ["".join(words)],
        [words[3], words[1] + words[2]],
    ):
        block = CacheBlock(3, 256, (), CPU)
        block.set_logits(torch.zeros(3, VOCABULARY))
        made = StopStringCriteria(tok, strings)
        chooser = Selection(stop_strings=(made,), pads=False).chooser_on(block)
        ids = torch.tensor([[10], [11], [12]])
        chooser.history.ids.copy_(torch.randint(10, 14, chooser.history.ids.shape))
        chooser.history.start(ids, 20)
        block.control.start(
            length=1, position=torch.tensor([[0]]), lowest=None, budget=20, eos=None, pad=None
        )
        alive = torch.ones(3, dtype=torch.bool)
        for token in (11, 12, 13, 10, 11, 12, 13):
            logits = torch.zeros(3, VOCABULARY)
            logits[:, token] = 1
            chooser.choose(block.control, logits)
            ids = torch.cat([ids, torch.full((3, 1), token)], dim=-1)
            alive &= ~StopStringCriteria(tok, strings)(ids, None)
            assert block.control.alive.tolist() == alive.tolist(), (strings, ids)
            if not alive.any():
                break
        else:
            raise AssertionError(f"{strings} did not stop {ids.tolist()}")


def test_many_stop_tokens_of_two_devices():
    """Stop tokens of generate's options are on the GPU, those of a user's criterion on the CPU.

    This machine has no GPU, so another device stands for it.
    """
    criteria = [EosTokenCriteria(torch.arange(40)), EosTokenCriteria(torch.arange(9))]
    criteria[1].eos_token_id = criteria[1].eos_token_id.to("meta")
    selection = Selection.of(
        None, criteria, SimpleNamespace(do_sample=False, return_dict_in_generate=False)
    )
    assert selection.eos.shape == (49,) and selection.eos.device.type == "meta"


@pytest.mark.parametrize("sample", [False, True])
def test_many_stop_tokens(sample):
    model = tiny("llama")
    runner = install(model, depth=2)
    lengths = set()
    for first in (3, 4, 5):
        stock, ours = both(
            model,
            {
                **left_padded(),
                "max_new_tokens": 30,
                "eos_token_id": list(range(first, VOCABULARY, 2)),
                "do_sample": sample,
                **FULL,
            },
        )
        assert_same(stock, ours)
        lengths.add(stock.sequences.shape[1])
    assert len(lengths) > 1 and runner.selections == {ON_DEVICE: 3}


def test_time_is_read_by_the_host_while_steps_run_ahead():
    model = tiny("llama")
    runner = install(model, depth=3)
    stock, ours = both(model, {"inputs": prompt(2), "max_new_tokens": 50, "max_time": 0.0, **FULL})
    assert_same(stock, ours)
    assert ours.sequences.shape[1] == 8 and not runner.selections and len(ours.scores) == 1


# -- what cannot be drawn, and what is kept -------------------------------------------------------


@pytest.mark.parametrize(
    "more", [{}, {"stopping_criteria": StoppingCriteriaList([Recorder().criterion])}]
)
def test_no_token_to_draw(more):
    model = tiny("llama")
    runner = install(model, depth=2)
    everything = LogitsProcessorList([hf.SuppressTokensLogitsProcessor(range(VOCABULARY))])
    with pytest.raises(SamplingError, match="row 0 at new token 0"):
        model.generate(
            prompt(2), max_new_tokens=9, do_sample=True, logits_processor=everything, **more
        )
    with pytest.raises(RuntimeError):  # as with stock, for each row
        type(model).generate(
            model, prompt(2), max_new_tokens=9, do_sample=True, logits_processor=everything
        )
    with torch.no_grad():
        model.lm_head.weight[7] = math.nan
    with pytest.raises(SamplingError, match="NaN"):
        model.generate(prompt(2), max_new_tokens=9, do_sample=True, **more)
    assert not runner.pool._leased
    assert_same(
        *both(
            model,
            {
                "inputs": prompt(2),
                "max_new_tokens": 5,
                "remove_invalid_values": True,
                "do_sample": True,
            },
        )
    )


@pytest.mark.slow
def test_numbers_change_without_another_graph_and_few_selections_are_kept():
    model = tiny("llama")
    runner = install(model)
    for t in (0.5, 0.7, 1.1):
        assert_same(
            *both(
                model,
                {
                    "inputs": prompt(2),
                    "max_new_tokens": 6,
                    "do_sample": True,
                    "temperature": t,
                    "top_p": t / 2,
                },
            )
        )
    (block,) = runner.pool._idle
    assert len(block.choosers) == 1
    for k in range(1, 9):
        assert_same(
            *both(model, {"inputs": prompt(2), "max_new_tokens": 6, "do_sample": True, "top_k": k})
        )
    assert len(block.choosers) == 2
    for n in range(2, 7):  # the batch size, which each graph is made for
        assert_same(
            *both(
                model,
                {
                    "inputs": prompt(2),
                    "max_new_tokens": 6,
                    "do_sample": True,
                    "no_repeat_ngram_size": n,
                },
            )
        )
    assert len(block.choosers) == selection.KEEP_CHOOSERS
    keys = list(block.choosers)
    model.generate(prompt(2), max_new_tokens=6, do_sample=True, no_repeat_ngram_size=5)
    assert list(block.choosers)[-1] in keys and all(
        isinstance(c, ProcessedChooser) for c in block.choosers.values()
    )


def test_ties_take_the_lowest_index_behind_processors():
    block = CacheBlock(2, 256, (), CPU)
    block.set_logits(torch.zeros(2, VOCAB))
    chooser = Selection((hf.TemperatureLogitsWarper(0.5),)).chooser_on(block)
    chooser.history.start(prompt(2), 9)
    block.control.start(
        length=7,
        position=torch.tensor([[6]]),
        lowest=None,
        budget=9,
        eos=None,
        pad=torch.tensor(PAD),
    )
    block.logits[0, [40, 30, 50]] = 1
    chooser.choose(block.control, block.logits)
    assert block.control.ids.tolist() == [[30], [0]]


def test_a_choice_that_cannot_be_captured_leaves_others_captured(monkeypatch):
    fake_captures(monkeypatch)
    captured = decode_step.capture

    def capture(run, device, pool):
        if isinstance(run.args[0], ProcessedChooser):
            raise RuntimeError("a read by the host")
        return captured(run, device, pool)

    monkeypatch.setattr(decode_step, "capture", capture)
    model = tiny("llama")
    runner = install(model)
    for extra in ({"do_sample": True}, {}, {"do_sample": True}, {}, {"do_sample": True}):
        assert_same(*both(model, {"inputs": prompt(2), "max_new_tokens": 5, **extra}))
    assert runner.counts == {
        "captured": 2,
        "called: capture failed (RuntimeError: a read by the host)": 3,
    }


def test_the_first_token_is_chosen_as_the_others(monkeypatch):
    chosen, argmax = [], Sampler.argmax
    monkeypatch.setattr(
        Sampler,
        "argmax",
        lambda sampler, control, logits: chosen.append(1) or argmax(sampler, control, logits),
    )
    model = tiny("llama")
    install(model, mode="eager")
    assert_same(*both(model, {"inputs": prompt(2), "max_new_tokens": 6}))
    assert len(chosen) == 6
