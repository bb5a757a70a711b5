"""The kinds of calls that `soak_generate` makes with drafts, some of them interrupted.

Only our call drafts: stock refuses drafts for batches. Its tokens are those of a call without.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import DynamicCache

from scripts.soak_kinds import Call, some
from tests.helpers.generate_comparison import (
    FULL,
    PAD,
    Recorder,
    assert_same_cache,
    tokenizer,
)
from tests.helpers.generate_features import Pair, in_threads
from tests.helpers.tiny_models import prompt

#: The batch sizes of calls. All have kernels for steps that verify drafts.
BATCHES = (1, 1, 2, 3)
#: How the number of drafts changes in a call.
SCHEDULES = ("constant", None, "heuristic")
DRAFTED: dict[str, Call] = {}


def kind(call: Call) -> Call:
    """Register a kind of call."""
    DRAFTED[call.__name__] = call
    return call


def call_of(rng: random.Random, batch: int | None = None) -> dict[str, Any]:
    """Return a prompt, and a greedy call of some tokens."""
    return {**some(rng, batch or rng.choice(BATCHES)), "max_new_tokens": rng.choice((1, 2, 9, 24))}


def drafts_of(pair: Pair, rng: random.Random) -> dict[str, Any]:
    """Return options of a call that drafts, by prompt lookup or by the assistant."""
    schedule = rng.choice(SCHEDULES)
    if rng.random() < 0.5:
        return {
            "prompt_lookup_num_tokens": rng.choice((1, 3)),
            "num_assistant_tokens_schedule": schedule,
        }
    pair.assistant.generation_config.num_assistant_tokens_schedule = schedule
    return {"assistant_model": pair.assistant}


@kind
def drafted_greedy(pair: Pair, rng: random.Random) -> None:
    """Greedy decoding. Calls of one row may return more than text."""
    given = call_of(rng)
    more = FULL if len(given["input_ids"]) == 1 and rng.random() < 0.5 else {}
    pair.agree({**given, **more}, drafts=drafts_of(pair, rng))


@kind
def drafted_processors(pair: Pair, rng: random.Random) -> None:
    """Logits processors and stop tokens."""
    extra: dict[str, Any] = rng.choice(
        (
            {"repetition_penalty": 1.3},
            {"min_new_tokens": 5},
            {"no_repeat_ngram_size": 2},
            {"eos_token_id": rng.sample(range(3, 99), 5)},
        )
    )
    stops = {"eos_token_id": rng.sample(range(3, 99), 40), "pad_token_id": PAD}
    pair.agree({**call_of(rng), **stops, **extra}, drafts=drafts_of(pair, rng))


@kind
def drafted_stop_strings(pair: Pair, rng: random.Random) -> None:
    """Stop strings of one or two tokens. A token is a character."""
    strings = ["".join(chr(33 + rng.randrange(96)) for _ in range(n)) for n in (1, 1, 1, 2)]
    given = {**call_of(rng, 1), "stop_strings": strings, "tokenizer": tokenizer()}
    pair.agree(given, drafts=drafts_of(pair, rng))


@kind
def drafted_sampling(pair: Pair, rng: random.Random) -> None:
    """Sampling: drafts do not change the text of a seed."""
    given = {
        **call_of(rng),
        "do_sample": True,
        **rng.choice(({}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 1.7})),
    }
    seed = rng.randrange(10**6)
    plain = pair.generate(given, seed=seed)
    drafted = pair.generate(given, seed=seed, drafts=drafts_of(pair, rng))
    assert torch.equal(plain, drafted), (
        f"seed {seed} gave {plain.tolist()}, with drafts {drafted.tolist()}"
    )


@kind
def drafted_streamed(pair: Pair, rng: random.Random) -> None:
    """A streamer, which gets all tokens in order."""
    given, recorder = call_of(rng), Recorder()
    out = pair.agree(given, drafts={**drafts_of(pair, rng), "streamer": recorder})
    assert recorder.events[-1] == ("end",)
    # a burst is (rows, tokens), the prompt comes first
    bursts = [torch.tensor(event[2]) for event in recorder.events[:-1]]
    assert torch.equal(torch.cat(bursts, -1), out.cpu())


class Interrupting(Recorder):
    """A streamer that raises after some bursts, and keeps what it got before."""

    def __init__(self, bursts: int, error: BaseException):
        super().__init__()
        self.bursts, self.error = bursts, error
        self.text: list[torch.Tensor] = []

    def put(self, value: torch.Tensor) -> None:
        """Keep a burst, or raise."""
        self.text.append(value)
        if len(self.text) > self.bursts:
            raise self.error


@kind
def drafted_interrupted(pair: Pair, rng: random.Random) -> None:
    """Ctrl-C or an error. The caller's cache then holds exactly the tokens that were accepted."""
    ids = prompt(rng.choice(BATCHES), rng.choice((1, 7, 63, 120)), rng.randrange(10**6))
    given = {"input_ids": ids, "do_sample": False, "max_new_tokens": 24}
    error = rng.choice((KeyboardInterrupt(), RuntimeError("the streamer's own")))
    streamer = Interrupting(rng.randrange(1, 9), error)
    cache, empty = (DynamicCache(config=pair.stock.config) for _ in range(2))
    options = {**drafts_of(pair, rng), "streamer": streamer, "past_key_values": cache}
    try:
        pair.ours.generate(**pair.fresh(given), **options)
        assert len(streamer.text) <= streamer.bursts, "the interrupt was lost"
    except (KeyboardInterrupt, RuntimeError) as raised:
        if raised is not error:
            raise
    pair.expect(len(ids))
    text = torch.cat([part.view(len(ids), -1) for part in streamer.text], -1)
    accepted = text[:, :-1].to(pair.device)  # the last token is not in the cache yet
    with torch.no_grad():
        pair.stock(accepted, past_key_values=empty, use_cache=True)
    assert_same_cache(empty, cache)
    pair.agree(given, drafts=drafts_of(pair, rng))


@kind
def drafted_out_of_time(pair: Pair, rng: random.Random) -> None:
    """max_time of nearly nothing: the text is the beginning of stock's."""
    given = {**call_of(rng), "max_new_tokens": 24}
    whole = type(pair.stock).generate(pair.stock, **pair.fresh(given))
    out = pair.generate({**given, "max_time": 0.0}, drafts=drafts_of(pair, rng))
    assert out.shape[1] > given["input_ids"].shape[1]
    assert torch.equal(out, whole[:, : out.shape[1]])


@kind
def drafted_in_threads(pair: Pair, rng: random.Random) -> None:
    """Calls from several threads, one of them without drafts."""
    calls = [(call_of(rng, n), drafts_of(pair, rng) if n < 3 else {}) for n in (1, 2, 3)]

    def repeat(given: dict[str, Any], drafts: dict[str, Any]) -> None:
        for _ in range(2):
            pair.agree(given, drafts=drafts)

    in_threads([lambda call=call: repeat(*call) for call in calls])  # type: ignore[misc]


@kind
def drafted_by_another_assistant(pair: Pair, rng: random.Random) -> None:
    """Write new numbers into the assistant's weights, which graphs read in place."""
    with torch.no_grad():
        weight = pair.assistant.model.layers[0].mlp.up_proj.weight
        order = torch.randperm(
            len(weight), generator=torch.Generator().manual_seed(rng.randrange(99))
        )
        weight.copy_(weight[order.to(weight.device)])
    pair.agree(call_of(rng), drafts={"assistant_model": pair.assistant})
