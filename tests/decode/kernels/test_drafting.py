"""What a step takes of drafts, and prompt lookup: torch, Triton's interpreter, plain Python, HF."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from mirage_hf.decode.cache_block import CacheBlock
from mirage_hf.decode.choosing import NOTHING, Picked
from mirage_hf.decode.control import Control, TokenHistory
from mirage_hf.decode.draft_sources import NoDrafts, PromptLookup, Verifier, drafts_of
from mirage_hf.decode.drafts import Drafts
from mirage_hf.decode.kernels import drafting
from mirage_hf.decode.sampler import Sampler
from tests.helpers import triton_interpreter
from tests.helpers.decode_states import CAPACITY, CPU, assert_compiles_and_waits, random_control

VOCAB = 5


@dataclasses.dataclass(frozen=True)
class State:
    """A random state of a call that drafts, and what a step picked."""

    control: Control
    drafts: Drafts
    history: TokenHistory
    picked: torch.Tensor
    ended: torch.Tensor | None


class Fixed:
    """Picks given tokens."""

    key, scores = ("fixed",), None

    def __init__(self, picked: torch.Tensor, ended: torch.Tensor | None):
        self.picked, self.ended = picked, ended

    def pick(self, *_: Any) -> Picked:
        """Return the tokens."""
        ended = None if self.ended is None else self.ended.flatten()
        return Picked(self.picked.flatten(), ended)


def random_state(
    rng: random.Random, by_kernels: bool, sizes: tuple[int, ...] = (2, 3, 8, 16)
) -> State:
    batch, tokens = rng.randint(1, 4), rng.choice(sizes)
    control = random_control(rng, batch, VOCAB)
    control.budget.fill_(rng.choice((20, 30)))
    control.eos.fill_(-1)
    for n in range(rng.choice((0, 1, 2))):
        control.eos[n] = rng.randrange(VOCAB)
    sampler = Sampler.allocate(batch * tokens, VOCAB, CPU, by_kernels)
    drafts = Drafts.allocate(batch, tokens, torch.zeros(batch, VOCAB), sampler)
    history = TokenHistory.allocate(batch, CAPACITY, CPU)
    prompt = rng.randint(1, CAPACITY - 34)
    history.prompt.fill_(prompt)
    history.ids.copy_(torch.tensor([[rng.randrange(VOCAB)] * 1 for _ in range(batch)]))
    for row in range(batch):
        control.lowest[row] = rng.randint(0, prompt - 1)
        drafts.ahead[row] = rng.randint(0, 18)
        drafts.count[row] = rng.randint(0, tokens - 1)
        for n in range(history.ids.shape[1]):
            history.ids[row, n] = rng.randrange(VOCAB)
    picked = torch.tensor([[rng.randrange(VOCAB) for _ in range(tokens)] for _ in range(batch)])
    for row in range(batch):  # agree for some tokens
        agreeing = rng.randint(0, tokens - 1)
        drafts.tokens[row] = torch.tensor([rng.randrange(VOCAB) for _ in range(tokens)])
        drafts.tokens[row, 1 : 1 + agreeing] = picked[row, :agreeing]
        if rng.random() < 0.2:
            picked[row, agreeing] = NOTHING
    ended = None
    if rng.random() < 0.5:
        ended = torch.rand(batch, tokens, generator=torch.Generator().manual_seed(prompt)) < 0.2
    return State(control, drafts, history, picked, ended)


def taken_by_hand(state: State, row: int) -> tuple[list[int], bool]:
    """Return the tokens that a row takes, one after another, and whether it goes on."""
    if not state.control.alive[row]:
        return [], False
    fed, eos = state.drafts.tokens[row].tolist(), state.control.eos.tolist()
    left = int(state.control.budget - state.drafts.ahead[row])
    taken: list[int] = []
    for n, token in enumerate(state.picked[row].tolist()):
        taken.append(token)
        stops = token in eos or (state.ended is not None and bool(state.ended[row, n]))
        if stops or len(taken) == left:
            return taken, False
        is_last = n + 1 == len(fed) or n >= int(state.drafts.count[row])
        if is_last or fed[n + 1] != token:
            break
    return taken, True


def wrong_takes(by_kernels: bool, count: int, seed: int) -> list[str]:
    rng, wrong = random.Random(seed), []
    for n in range(count):
        state = random_state(rng, by_kernels, (1, 2, 3, 8, 16))
        c, drafts, history = state.control, state.drafts, state.history
        wanted = [taken_by_hand(state, row) for row in range(len(c.ids))]
        ahead, tokens, text = drafts.ahead.tolist(), drafts.tokens.tolist(), history.ids.tolist()
        length = drafts.text_length(history)[:, 0].tolist()
        verifier = Verifier(Fixed(state.picked, state.ended), NoDrafts(), drafts, history)
        verifier.choose(c, drafts.logits)
        found, goes_on = verifier.read(verifier.report(c).tolist())
        for row, (taken, alive) in enumerate(wanted):
            fed = [0 if token == NOTHING else token for token in taken]
            is_right = (
                found[row] == taken
                and bool(goes_on[row]) == bool(c.alive[row]) == alive
                and int(drafts.ahead[row]) == ahead[row][0] + len(taken)
                and int(drafts.tokens[row, 0]) == (fed[-1] if fed else tokens[row][0])
                and history.ids[row, : length[row]].tolist() == text[row][: length[row]]
                and history.ids[row, length[row] :][: len(fed)].tolist() == fed
            )
            wrong += [] if is_right else [f"{n}.{row}: {taken} {found[row]}"]
    return wrong


def wrong_look_ups(by_kernels: bool, count: int, seed: int) -> list[str]:
    rng, wrong = random.Random(seed), []
    for n in range(count):
        state = random_state(rng, by_kernels)
        c, drafts, history = state.control, state.drafts, state.history
        most, longest = rng.randint(1, 16), rng.randint(1, 4)
        PromptLookup(most, longest).draft(c, drafts, history, Fixed(state.picked, None))
        most = min(most, drafts.tokens.shape[1] - 1)
        for row in range(len(c.ids)):
            length = int(drafts.text_length(history)[row])
            text = history.ids[row, int(c.lowest[row]) : length][None]
            stock = PromptLookupCandidateGenerator(
                num_output_tokens=most, max_matching_ngram_size=longest, max_length=10**6
            )
            want = stock.get_candidates(text)[0][0, text.shape[1] :].tolist()
            got = drafts.tokens[row, 1:][: int(drafts.count[row])].tolist()
            wrong += [] if got == want else [f"{n}.{row}: {text.tolist()} {got} {want}"]
    return wrong


def test_torch_takes_as_by_hand():
    assert not wrong_takes(False, 300, seed=1)


def test_torch_looks_up_what_stock_does():
    assert not wrong_look_ups(False, 200, seed=2)


INTERPRETED = """
import json
from tests.decode.kernels import test_drafting as t
print(json.dumps(t.wrong_takes(True, 40, seed=3) + t.wrong_look_ups(True, 25, seed=4)))
"""


def test_kernels_do_as_torch():
    assert triton_interpreter.run(INTERPRETED) == []


def test_a_block_keeps_its_drafts_until_the_logits_change():
    block = CacheBlock(2, 256, (None,), CPU)
    block.set_logits(torch.zeros(2, 9))
    first, before = drafts_of(block, 4), block.bytes
    assert drafts_of(block, 4) is first and drafts_of(block, 8) is not first
    assert block.bytes > before
    block.set_logits(torch.zeros(2, 10))
    assert drafts_of(block, 4) is not first


INT32, INT64, UINT8 = torch.int32, torch.int64, torch.uint8


@pytest.mark.parametrize("batch, tokens, room", [(1, 4, 273), (5, 16, 4113), (3, 1, 273)])
def test_kernels_compile_and_wait_before_they_read(batch, tokens, room):
    pytest.importorskip("triton")
    accepted = [INT64, UINT8, *[INT64] * 7, UINT8, INT64]
    assert_compiles_and_waits(drafting.accept_launch(batch, tokens, room), accepted)
    if tokens > 1:  # a step of one token drafts nothing
        looked_up = drafting.look_up_launch(batch, tokens, room, tokens - 1, 2)
        assert_compiles_and_waits(looked_up, [INT64] * 6)
