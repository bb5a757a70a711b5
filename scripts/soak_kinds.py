"""The kinds of calls that `soak_generate` makes, without drafts (soak_drafts.py has the others)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache

from tests.helpers.generate_comparison import FULL, Recorder, left_padded
from tests.helpers.generate_features import Pair, in_threads
from tests.helpers.tiny_models import prompt

LENGTHS = (1, 2, 7, 30, 63, 64, 65, 120, 200, 250, 300)
#: The batch sizes of calls, each drawn as often as it occurs here. Kernels exist for all of them.
BATCHES = (1, 1, 2, 3, 4)

Call = Callable[[Pair, random.Random], None]
PLAIN: dict[str, Call] = {}


def kind(call: Call) -> Call:
    """Register a kind of call."""
    PLAIN[call.__name__] = call
    return call


def steps_of(pair: Pair) -> dict[str, int]:
    """Return how the steps of the calls so far ran."""
    return {
        what.removeprefix("step: "): n
        for what, n in pair.runner.counts.items()
        if what.startswith("step: ")
    }


def some(rng: random.Random, batch: int | None = None) -> dict[str, Any]:
    """Return a prompt, left-padded or not, and a greedy call of a few tokens."""
    batch, seed = batch or rng.choice(BATCHES), rng.randrange(10**6)
    lengths = [rng.choice(LENGTHS) for _ in range(batch)]
    given = (
        left_padded(tuple(lengths), seed)
        if rng.random() < 0.4
        else {"input_ids": prompt(batch, lengths[0], seed)}
    )
    return {**given, "do_sample": False, "max_new_tokens": rng.choice((1, 2, 5, 9, 16))}


@kind
def greedy(pair: Pair, rng: random.Random) -> None:
    """Greedy decoding."""
    pair.agree({**some(rng), **(FULL if rng.random() < 0.3 else {})})


@kind
def stop_tokens(pair: Pair, rng: random.Random) -> None:
    """Stop tokens."""
    pair.agree(
        {
            **some(rng),
            "max_new_tokens": 16,
            "eos_token_id": rng.sample(range(3, 99), rng.choice((1, 5, 30))),
        }
    )


@kind
def processors(pair: Pair, rng: random.Random) -> None:
    """Logits processors."""
    extra = rng.choice(
        (
            {"repetition_penalty": 1.3},
            {"bad_words_ids": [[n] for n in rng.sample(range(3, 99), 40)]},
            {"min_new_tokens": 5, "eos_token_id": rng.sample(range(3, 99), 60)},
            {"no_repeat_ngram_size": 2},
        )
    )
    pair.agree({**some(rng), **extra})


@kind
def sampling(pair: Pair, rng: random.Random) -> None:
    """Sampling: the same text for the same seed, whatever came before."""
    given = {
        **some(rng, rng.choice((1, 1, 2))),
        "do_sample": True,
        **rng.choice(({}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 1.7})),
    }
    if len(given["input_ids"]) == 1:
        given["num_return_sequences"] = rng.choice((1, 3))
    seed = rng.randrange(10**6)
    first, again = (pair.generate(given, seed=seed) for _ in range(2))
    assert torch.equal(first, again), f"seed {seed} gave {first.tolist()}, then {again.tolist()}"


@kind
def sampling_of_one(pair: Pair, rng: random.Random) -> None:
    """Sampling with one candidate."""
    pair.agree({**some(rng), "do_sample": True, "top_k": 1})


@kind
def streamed(pair: Pair, rng: random.Random) -> None:
    """A streamer."""
    seen: list[Recorder] = []
    given = some(rng)

    def arguments() -> dict[str, Any]:
        seen.append(r := Recorder())
        return {**given, "streamer": r}

    pair.agree(arguments)
    assert seen[0].events == seen[1].events, "not what stock's streamer got"


@kind
def interrupted(pair: Pair, rng: random.Random) -> None:
    """Ctrl-C in the middle, after which the same call is right."""
    given, at = {**some(rng, rng.choice((1, 2))), "max_new_tokens": 9}, rng.randrange(9)

    class Interrupting(Recorder):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.events) > at:
                raise KeyboardInterrupt

    before = steps_of(pair)
    try:
        pair.ours.generate(
            **pair.fresh(given),
            streamer=Interrupting(),
            **rng.choice(({}, {"repetition_penalty": 1.2})),
        )
        raise AssertionError("the interrupt was lost")
    except KeyboardInterrupt:
        pass
    # The first steps may be under way when the streamer gets the prompt.
    if at or steps_of(pair) != before:
        pair.expect(len(given["input_ids"]))
    pair.agree(given)


@kind
def conversation(pair: Pair, rng: random.Random) -> None:
    """Two turns over one cache of the user's. Half of the first calls return more than text."""
    given, returns_all = some(rng), rng.random() < 0.5
    caches: list[DynamicCache] = []  # one for stock, one for ours

    def first() -> dict[str, Any]:
        caches.append(DynamicCache(config=pair.stock.config))
        return {**given, "past_key_values": caches[-1], **(FULL if returns_all else {})}

    out = pair.agree(first)
    text = out.sequences if returns_all else out
    longer = torch.cat([text, prompt(len(text), 3, seed=rng.randrange(99)).to(text)], -1)
    mask = given.get("attention_mask", torch.ones_like(given["input_ids"]))
    mask = torch.cat([mask, mask.new_ones(len(text), longer.shape[1] - mask.shape[1])], -1)
    again = iter(caches)
    pair.agree(
        lambda: {
            "input_ids": longer,
            "attention_mask": mask,
            "past_key_values": next(again),
            "do_sample": False,
            "max_new_tokens": 5,
        }
    )


@kind
def threads(pair: Pair, rng: random.Random) -> None:
    """Calls from several threads."""
    calls = [{**some(rng, 1 + n), "max_new_tokens": 9} for n in range(2)]
    in_threads([lambda given=given: [pair.agree(given) for _ in range(2)] for given in calls])


@kind
def nested(pair: Pair, rng: random.Random) -> None:
    """A call within a call, as from a streamer."""
    given, inner = some(rng, 1), some(rng, 2)

    class Asking(Recorder):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.events) == 2:
                pair.agree(inner)

    pair.agree(lambda: {**given, "streamer": Asking()})


@kind
def inference_mode(pair: Pair, rng: random.Random) -> None:
    """A call in inference mode."""
    with torch.inference_mode():
        pair.agree(some(rng))


@kind
def no_time(pair: Pair, rng: random.Random) -> None:
    """max_time of nearly nothing."""
    pair.agree({**some(rng), "max_time": 0.0})


@kind
def by_stock(pair: Pair, rng: random.Random) -> None:
    """Calls that run stock."""
    given, torch_seed = (
        {**some(rng, 1), **rng.choice(({"num_beams": 2}, {"use_cache": False}))},
        rng.randrange(99),
    )
    out = []
    for model in (pair.stock, pair.ours):
        torch.manual_seed(torch_seed)
        out.append(model.generate(**pair.fresh(given)))
    assert torch.equal(*out)


@kind
def weights(pair: Pair, rng: random.Random) -> None:
    """Write new numbers into old weights, which graphs read in place."""
    seed = rng.randrange(10**6)
    for model in (pair.stock, pair.ours):
        with torch.no_grad():
            for p in (model.lm_head.weight, model.model.layers[-1].mlp.up_proj.weight):
                order = torch.randperm(len(p), generator=torch.Generator().manual_seed(seed))
                p.copy_(p[order.to(p.device)])
    pair.agree(some(rng))


@kind
def released(pair: Pair, rng: random.Random) -> None:
    """One time in four, free all memory kept between calls. Graphs are then captured again."""
    if rng.random() < 0.25:
        pair.runner.release()
    pair.agree(some(rng))
