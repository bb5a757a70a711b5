"""Tokens chosen in captured steps on a GPU.

Each HF processor is compared with stock, samples by chi-square. A seed gives the same tokens at any
depth, and no step waits for the host.
"""

from __future__ import annotations

import math

import pytest
import torch
import transformers.generation.logits_process as hf
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria

from mirage_hf.decode import install
from mirage_hf.decode.cache_block import CacheBlock
from mirage_hf.decode.graphs import capture
from mirage_hf.decode.selection import Selection
from mirage_hf.decode.uniform_numbers import uniforms
from mirage_hf.errors import SamplingError
from tests.decode.kernels.test_radix_threshold import SHAPES, wrong_thresholds
from tests.decode.test_generate_life import tokenizer
from tests.decode.test_sampling import (
    CASES,
    EACH,
    ON_DEVICE,
    VOCAB,
    WARPERS,
    by_the_table,
    compare,
    draws,
)
from tests.helpers.generate_comparison import Recorder, assert_same, both, left_padded, prompt, tiny

pytestmark = pytest.mark.gpu
FULL = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def exact_float32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def cuda(arguments):
    return {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}


def captured_only(runner):
    assert set(runner.counts) == {"captured"}, runner.counts
    assert set(runner.selections) <= {ON_DEVICE}, runner.selections


@pytest.mark.parametrize("name", EACH)
def test_processors_are_hfs(name):
    compare(name, CUDA, rtol=1e-5)  # log-probabilities near 0 are differences: 3.6e-6 was seen


@pytest.mark.parametrize("shape", [*SHAPES, (1, 1), (2, 7), (5, 2999), (128, 40)], ids=str)
def test_thresholds_are_those_of_a_sort(shape):
    wrong = wrong_thresholds(
        [shape] * 24, sum(shape), CUDA
    )  # each shape is compiled, so few shapes are tried often
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("vocab", [50_257, 128_256, 151_936, 1 << 20])
@pytest.mark.parametrize("kind", ["plain", "bfloat16", "flat", "few"])
def test_the_tokens_kept_of_a_large_vocabulary(kind, vocab):
    """The kept tokens are those of HF's classes.

    Top k keeps exactly the same. Others may differ at the limit, because sums in float32 are
    rounded.
    """
    generator = torch.Generator(CUDA).manual_seed(vocab)
    scores = 3 * torch.randn(2, vocab, device=CUDA, generator=generator)
    scores = {
        "plain": scores,
        "bfloat16": scores.bfloat16().float(),
        "flat": scores.mul(0.01).round(decimals=3),
        "few": scores.masked_fill(scores < scores.topk(50).values[:, -1:], -math.inf),
    }[kind]
    ids = torch.zeros(2, 3, dtype=torch.long, device=CUDA)
    wrong = []
    for p in (
        hf.TopKLogitsWarper(50),
        hf.TopPLogitsWarper(0.9),
        hf.TopPLogitsWarper(0.3, min_tokens_to_keep=5),
        hf.TypicalLogitsWarper(0.9),
        hf.MinPLogitsWarper(0.05),
    ):
        want, got = p(ids, scores.clone()) > -math.inf, by_the_table(p, ids, scores) > -math.inf
        share = scores.double().softmax(-1)
        mass = (
            torch.stack([(share * (want & ~got)).sum(-1), (share * (got & ~want)).sum(-1)])
            .max()
            .item()
        )
        allowed = 0 if isinstance(p, hf.TopKLogitsWarper) else 2e-5
        if mass > allowed or not got.any(-1).all():
            wrong.append(
                f"{type(p).__name__}: HF keeps {want.sum(-1).tolist()}, ours "
                f"{got.sum(-1).tolist()}; they differ by {mass:.3g} of "
                f"the probability, {allowed} is allowed"
            )
    assert not wrong, f"{kind}, vocabulary {vocab}, seed {vocab}:\n" + "\n".join(wrong)


def choosing(selection: Selection, rows: int, vocab: int = VOCAB) -> tuple[CacheBlock, object]:
    block = CacheBlock(rows, 256, (), CUDA)
    block.set_logits(3 * torch.randn(rows, vocab, device=CUDA))
    chooser = selection.chooser_on(block)
    chooser.history.start(prompt(rows).cuda().remainder(min(vocab, VOCAB)), 100)
    chooser.history.set_numbers(uniforms(3, rows, 100))
    block.control.start(
        length=7,
        position=torch.tensor([[6]], device=CUDA),
        lowest=None,
        budget=100,
        eos=None,
        pad=torch.tensor(0, device=CUDA),
    )
    return block, chooser


@pytest.mark.parametrize("vocab", [VOCAB, 40_000])
@pytest.mark.parametrize("rows", [1, 3])
def test_choices_never_wait_for_the_host_and_can_be_captured(rows, vocab):
    """Called and replayed choices give the same tokens.

    An error names processor, rows and vocabulary.
    """
    tok = tokenizer()
    kinds = {
        name: Selection((make(CUDA),), sample=sample, pads=sample)
        for name, make in EACH.items()
        for sample in (False, True)
    }
    kinds |= {
        "sample": Selection(sample=True),
        "stop strings": Selection(stop_strings=(StopStringCriteria(tok, ["abc", "d"]),)),
        "records": Selection((EACH["top p"](CUDA),), sample=True, records=True),
    }
    wrong = []
    for name, kind in kinds.items():
        torch.manual_seed(0)
        (block, chooser), (twin, other) = choosing(kind, rows, vocab), choosing(kind, rows, vocab)
        twin.logits.copy_(block.logits)
        other.history.ids.copy_(chooser.history.ids)
        try:
            chooser.choose(
                block.control, block.logits
            )  # what is lazily initialised may synchronise once
            other.choose(twin.control, twin.logits)
            torch.cuda.set_sync_debug_mode("error")
            try:
                assert kind.chooser_on(block) is chooser  # as in another call
                chooser.choose(block.control, block.logits)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            kept = {n: t.clone() for n, t in vars(twin.control).items()}
            history = other.history.ids.clone()
            graph, _ = capture(lambda c=other, b=twin: c.choose(b.control, b.logits), CUDA, None)
            for n, t in kept.items():
                getattr(twin.control, n).copy_(t)
            other.history.ids.copy_(history)
            graph.replay()
            torch.cuda.synchronize()
            for n in kept:
                a, b = getattr(block.control, n), getattr(twin.control, n)
                if not torch.equal(a, b):
                    wrong.append(
                        f"{name}, {rows} rows of {vocab}: {n} called {a.tolist()}, replayed "
                        f"{b.tolist()}"
                    )
        except RuntimeError as error:
            wrong.append(
                f"{name}, {rows} rows of {vocab}: {type(error).__name__}: "
                f"{str(error).splitlines()[0]}"
            )
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", EACH)
def test_greedy_behind_each_processor_is_stocks(name):
    model = tiny("llama").cuda()
    runner = install(model)
    for seed in range(2):
        for again in ("captured now", "captured before"):
            arguments = {
                "inputs": prompt(3, 3, seed=seed).cuda(),
                "max_new_tokens": 14,
                **FULL,
                "logits_processor": LogitsProcessorList([EACH[name](CUDA)]),
            }
            try:
                assert_same(*both(model, arguments))
            except AssertionError as error:
                raise AssertionError(f"{name}, prompt seed {seed}, {again}: {error}") from error
    captured_only(runner)
    assert runner.selections == {ON_DEVICE: 4}


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_generate_chooses_as_stock(name, sample):
    model = tiny("llama").cuda()
    runner = install(model)
    options = {
        k: v
        for k, v in CASES[name].items()
        if sample or k not in ("temperature", "top_k", "top_p", "min_p", "typical_p")
    }
    for seed in range(3):
        arguments = cuda(
            {**left_padded(seed=seed), "max_new_tokens": 14, "do_sample": sample, **options, **FULL}
        )
        try:
            assert_same(*both(model, arguments, seed=seed))
        except AssertionError as error:
            raise AssertionError(f"{name}, do_sample={sample}, seed {seed}: {error}") from error
    captured_only(runner)


@pytest.mark.parametrize("name", WARPERS)
def test_twenty_thousand_draws_have_stocks_probabilities(name):
    draws(name, CUDA)


@pytest.mark.parametrize("vocab", [1025, 3001, 60_000])
def test_draws_from_a_large_vocabulary(vocab):
    draws("temperature, top p", CUDA, vocab=vocab)


@pytest.mark.parametrize(
    "extra", [{}, {"eos_token_id": list(range(3, 12))}, {"top_p": 0.8, "repetition_penalty": 1.2}]
)
def test_a_seed_gives_the_same_tokens_at_any_depth_and_with_or_without_graphs(extra):
    model = tiny("llama").cuda()
    arguments = cuda(
        {**left_padded(), "max_new_tokens": 40, "do_sample": True, "temperature": 1.3, **extra}
    )

    def run(seed, depth=2, mode="graph", **more):
        runner = install(model, depth=depth, mode=mode)
        found = []
        for _ in range(2):  # captured in the first
            torch.manual_seed(seed)
            found.append(model.generate(**arguments, **more).tolist())
        assert found[0] == found[1], f"depth {depth}, {mode}: {found}"
        if not more and mode == "graph":
            captured_only(runner)
        return found[0]

    first = run(7)
    for depth in (0, 1, 4, 9):
        assert run(7, depth=depth) == first, f"depth {depth}"
    assert run(7, mode="eager") == first
    assert run(7, stopping_criteria=StoppingCriteriaList([Recorder().criterion])) == first, (
        "chosen on the host's side"
    )
    assert run(8) != first


def test_other_numbers_need_no_other_graph():
    model = tiny("llama").cuda()
    runner = install(model)
    for t in (0.5, 0.8, 1.4):
        assert_same(
            *both(
                model,
                cuda(
                    {
                        "inputs": prompt(2),
                        "max_new_tokens": 9,
                        "do_sample": True,
                        "temperature": t,
                        "top_p": t / 2,
                    }
                ),
            )
        )
    (block,) = runner.pool._idle
    captured = [what for what in block.graphs if what[0] == "CapturedForward"]
    assert len(captured) == len(block.choosers) == 1, captured
    for k in range(1, 8):
        assert_same(
            *both(
                model,
                cuda({"inputs": prompt(2), "max_new_tokens": 9, "do_sample": True, "top_k": k}),
            )
        )
    captured = [what for what in block.graphs if what[0] == "CapturedForward"]
    assert len(captured) == len(block.choosers) == 2, captured
    for n in range(2, 7):  # the batch size, which each graph is made for
        assert_same(
            *both(
                model,
                cuda(
                    {
                        "inputs": prompt(2),
                        "max_new_tokens": 9,
                        "do_sample": True,
                        "no_repeat_ngram_size": n,
                    }
                ),
            )
        )
    captured = [what for what in block.graphs if what[0] == "CapturedForward"]
    assert len(captured) == len(block.choosers) == 4, captured
    captured_only(runner)


@pytest.mark.parametrize(
    "extra", [{}, {"eos_token_id": [3, 4]}, {"do_sample": True}, {"max_time": 100.0}]
)
def test_stop_strings(extra):
    model, tok = tiny("llama").cuda(), tokenizer()
    runner = install(model)
    free, _ = both(
        model, cuda({**left_padded(), "max_new_tokens": 30, "do_sample": "do_sample" in extra})
    )
    texts = [tok.decode(row) for row in free[:, 11:]]
    for strings in (
        [text[4 + 6 * n : 6 + 6 * n] for n, text in enumerate(texts)],
        [texts[2][20]],
        ["no such text at all"],
    ):
        for _ in range(2):
            assert_same(
                *both(
                    model,
                    cuda(
                        {
                            **left_padded(),
                            "max_new_tokens": 30,
                            "stop_strings": strings,
                            "tokenizer": tok,
                            **extra,
                        }
                    ),
                )
            )
    captured_only(runner)


def test_growth(monkeypatch):

    monkeypatch.setattr("mirage_hf.decode.call_plan.FIRST_REACH", 3)
    model = tiny("llama", max_position_embeddings=1024).cuda()
    runner = install(model)
    for _ in range(2):
        for extra in (
            {"do_sample": True},
            {"no_repeat_ngram_size": 2},
            {"do_sample": True, "repetition_penalty": 1.2, "top_p": 0.9},
        ):
            assert_same(
                *both(
                    model, cuda({**left_padded((250, 240)), "max_new_tokens": 40, **extra, **FULL})
                )
            )
    captured_only(runner)


def test_no_token_to_draw():
    model = tiny("llama").cuda()
    runner = install(model)
    with torch.no_grad():
        model.lm_head.weight[7] = float("nan")
    for _ in range(2):
        with pytest.raises(SamplingError, match="row 0 at new token 0"):
            model.generate(prompt(2).cuda(), max_new_tokens=9, do_sample=True)
    assert_same(
        *both(
            model,
            cuda(
                {
                    "inputs": prompt(2),
                    "max_new_tokens": 5,
                    "remove_invalid_values": True,
                    "do_sample": True,
                }
            ),
        )
    )
    captured_only(runner)
