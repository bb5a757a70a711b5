"""The kernels that choose tokens: torch, Triton's interpreter and plain Python agree."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch

from mirage_hf import errors
from mirage_hf.decode.choosing import NOTHING, choose_greedily
from mirage_hf.decode.control import Control
from mirage_hf.decode.kernels import sampling
from mirage_hf.decode.kernels.sizes import MAX_ROWS, MAX_VOCAB
from mirage_hf.decode.sampler import Sampler
from tests.helpers import triton_interpreter
from tests.helpers.decode_states import (
    CAPACITY,
    CPU,
    DTYPES,
    assert_compiles_and_waits,
    compiled,
    differing,
    random_control,
    to,
)


def random_logits(rng: random.Random, batch: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of logits of many kinds.

    They have few values and hence ties, are all equal, infinite, or plain. They may hold NaN and
    zeros of either sign.
    """
    rows = []
    for _ in range(batch):
        x = (
            torch.tensor([rng.gauss(0, 3) for _ in range(min(vocab, 64))])
            .repeat(-(-vocab // 64))[:vocab]
            .clone()
        )
        at = [rng.randrange(vocab) for _ in range(3)] + [
            rng.randrange(min(vocab, 12)) for _ in range(2)
        ]
        match rng.randrange(9):
            case 0:
                x = x.round()
            case 1:
                x.fill_(rng.choice((-math.inf, math.inf, 0.0, -3.0)))
            case 2:
                x[at] = math.inf
            case 3:
                x.fill_(-math.inf)
                x[at] = torch.finfo(dtype).min
            case 4:
                x[at] = math.nan
                x[at[0]], x[at[1]] = -math.nan, math.inf
            case 5:
                x = -x.abs() - 1
                x[at] = torch.tensor([0.0, -0.0, 0.0, -0.0, -0.0])
            case 6:
                x = -x.abs() - 1
                x[at] = torch.finfo(dtype).smallest_normal * torch.tensor(
                    [-0.25, 0.25, 0.5, 0.0, -0.0]
                )  # no normal numbers
            case 7:
                x[at[-1]] = 1000.0
        rows.append(x.to(dtype))
    return torch.stack(rows)


def greatest(row: list[float]) -> int:
    best = 0
    for n, x in enumerate(row):
        if math.isnan(x):
            return n
        best = n if x > row[best] else best
    return best


def by_hand(c: Control, logits: torch.Tensor) -> dict[str, list]:
    """Return what `choose_greedily` promises, in plain Python."""
    state = {f.name: getattr(c, f.name).tolist() for f in dataclasses.fields(c)}
    tokens = [
        greatest(row) if a else state["pad"][0]
        for row, a in zip(logits.tolist(), state["alive"], strict=True)
    ]
    return after(state, tokens, [False] * len(tokens))


def after(state: dict[str, list], tokens: list[int], ended: list[bool]) -> dict[str, list]:
    """Return the state after these tokens. Some rows end whatever their token is."""
    alive, live = state["alive"], any(state["alive"])
    left = state["budget"][0] - live
    goes_on = [
        a and t not in state["eos"] and left > 0 and not e
        for a, t, e in zip(alive, tokens, ended, strict=True)
    ]
    if live:
        state |= {
            "ids": [[t] for t in tokens],
            "budget": [left],
            "length": [state["length"][0] + 1],
            "position": [[p + 1] for (p,) in state["position"]],
        }
    return state | {"alive": goes_on, "report": [tokens, [int(g) for g in goes_on]]}


def wrong_choices(by_kernels: bool, shapes: list[tuple[int, int]], seed: int) -> list[str]:
    rng, wrong = random.Random(seed), []
    for n, (batch, vocab) in enumerate(shapes):
        sampler = Sampler.allocate(batch, vocab, CPU, by_kernels)
        dtype = DTYPES[n % 3]
        for _ in range(2):  # the second call finds what the first left in the scratch memory
            c, logits = random_control(rng, batch, vocab), random_logits(rng, batch, vocab, dtype)
            want, stock, before = by_hand(c, logits), to(c, CPU), logits.clone()
            choose_greedily(stock, logits)
            alone = sampler.greatest_tokens(logits).tolist()
            hand = [greatest(row) for row in logits.tolist()]
            sampler.argmax(c, logits)
            found = (
                ["alone"] * (alone != hand)
                + differing(c, want)
                + [f"stock's {name}" for name in differing(stock, want)]
            )
            found += ["logits"] * (
                not torch.equal(before.view(torch.uint8), logits.view(torch.uint8))
            ) + ["counter"] * int(sampler.counter)
            wrong += [f"{batch} {vocab} {dtype}: {found}"] if found else []
    return wrong


def wrong_advances(
    by_kernels: bool, count: int, seed: int, device: torch.device = CPU
) -> list[str]:
    """Return what is wrong after `advance` got these tokens.

    Some tokens are missing, and some rows end for other reasons.
    """
    rng, wrong = random.Random(seed), []
    for n in range(count):
        batch, vocab = rng.choice((1, 2, 3, 5, 70)), 20
        c, sampler = (
            to(random_control(rng, batch, vocab), device),
            Sampler.allocate(batch, vocab, device, by_kernels),
        )
        tokens = [rng.randrange(vocab) if rng.random() < 0.8 else NOTHING for _ in range(batch)]
        ended = None if n % 3 == 0 else [rng.random() < 0.3 for _ in range(batch)]
        state = {f.name: getattr(c, f.name).tolist() for f in dataclasses.fields(c)}
        want = after(state, tokens, ended or [False] * batch)
        want["ids"] = [[0 if t == NOTHING else t] for (t,) in want["ids"]]
        sampler.advance(
            c,
            torch.tensor(tokens, device=device),
            None if ended is None else torch.tensor(ended, device=device),
        )
        wrong += [f"{batch} {ended} {found}"] if (found := differing(c, want)) else []
    return wrong


def random_scores(rng: random.Random, batch: int, vocab: int) -> torch.Tensor:
    """Return scores of many kinds.

    They are flat or sharp, or have most tokens masked. Whole ranges may be masked or far below the
    others. Some rows have nothing to draw, or NaN.
    """
    x = (
        torch.tensor([[rng.gauss(0, 3) for _ in range(min(vocab, 64))] for _ in range(batch)])
        .repeat(1, -(-vocab // 64))[:, :vocab]
        .clone()
    )
    for row in range(batch):
        at = rng.randrange(vocab)
        match rng.randrange(9):
            case 0:
                x[row] = 0
            case 1:
                x[row, at] = 60
            case 2:
                kept = x[row, at].clone()
                x[row] = -math.inf
                x[row, at] = kept
            case 3:
                x[row, at:] = -math.inf if at else 0
            case 4:
                x[row, :at] -= 90
            case 5:
                x[row, :1024] = -math.inf
            case 6:
                x[row, at] = rng.choice((math.nan, math.inf))
            case 7:
                x[row, ::2] = -math.inf
    return x


def wrong_samples(
    by_kernels: bool, shapes: list[tuple[int, int]], seed: int, device: torch.device = CPU
) -> list[str]:
    """Return the sampled tokens that differ from sums of probabilities in float64.

    The random number must lie in the token's share, up to rounding.
    """
    rng, wrong = random.Random(seed), []
    for batch, vocab in shapes:
        sampler = Sampler.allocate(batch, vocab, device, by_kernels)
        for _ in range(2):  # the second call finds what the first left in the scratch memory
            scores = random_scores(rng, batch, vocab)
            numbers = torch.tensor(
                [[rng.choice((0, 1 - 2.0**-40, 0.5, rng.random()))] for _ in range(batch)],
                dtype=torch.float64,
            )
            tokens = sampler.sample(scores.to(device), numbers.to(device)).tolist()
            again = sampler.sample(scores.to(device), numbers.to(device)).tolist()
            wrong += [] if again == tokens else [f"{batch} {vocab}: {tokens}, then {again}"]
            p = scores.double().softmax(-1)
            sums = p.cumsum(-1)
            for row, token in enumerate(tokens):
                if p[row].isnan().any():
                    fits = token == NOTHING
                else:
                    share = (float(sums[row, token] - p[row, token]), float(sums[row, token]))
                    fits = (
                        p[row, token] > 0
                        and share[0] - 1e-6 <= float(numbers[row]) <= share[1] + 1e-6
                    )
                    fits = fits or (
                        scores[row, token] > -math.inf and float(numbers[row]) > 1 - 1e-6
                    )  # smaller than float64's rounding of 1
                wrong += (
                    []
                    if fits
                    else [
                        f"{batch} {vocab}, row {row}: token {token}, number {float(numbers[row])}"
                    ]
                )
            wrong += ["counters"] * int(sampler.arrived.any())
    return wrong


SHAPES = [(batch, vocab) for vocab in (1, 7, 97, 1024, 1025, 5003) for batch in (1, 2, 3, 5)]


def test_torch_chooses_as_by_hand():
    assert not wrong_choices(False, SHAPES * 6, seed=0)


def test_torch_advances_and_samples_as_by_hand():
    assert not wrong_advances(False, 300, seed=4)
    assert not wrong_samples(False, SHAPES * 6, seed=5)


INTERPRETED = """
import json
from tests.decode.kernels import test_sampling as t
many = [(70, 33001)]  # blocks of more logits than usual
wrong = t.wrong_choices(True, t.SHAPES + many, seed=2)
wrong += t.wrong_advances(True, 60, seed=6) + t.wrong_samples(True, t.SHAPES * 2, seed=7)
print(json.dumps(wrong))
"""


def test_kernels_do_as_torch_and_by_hand():
    assert sampling.argmax_block(70, 33001) > sampling.MIN_ARGMAX_BLOCK
    assert triton_interpreter.run(INTERPRETED) == []


# -- compiled -----------------------------------------------------------------------------------

INT64, INT32, UINT8 = torch.int64, torch.int32, torch.uint8
STATE = [INT64, INT64, INT64, INT64, UINT8]


@pytest.mark.parametrize(
    "batch, vocab, dtype",
    [(1, 128256, torch.bfloat16), (5, 50257, torch.float16), (64, 262144, torch.float32)],
)
def test_argmax_compiles_and_waits_before_it_reads(batch, vocab, dtype):
    pytest.importorskip("triton")
    dtypes = [dtype, *STATE, INT64, INT64, INT64, INT64, INT32, INT64]
    assert_compiles_and_waits(sampling.argmax_launch(batch, vocab), dtypes)


@pytest.mark.parametrize("batch, vocab", [(1, 128256), (5, 50257), (128, 1 << 20)])
def test_sample_compiles_and_waits_before_it_reads(batch, vocab):
    pytest.importorskip("triton")
    dtypes = [torch.float32, torch.float64, torch.float32, torch.float64, INT64, INT32]
    assert_compiles_and_waits(sampling.sample_launch(batch, vocab), dtypes)


@pytest.mark.parametrize("batch", [1, 70])
def test_advance_compiles_and_waits_before_it_reads(batch):
    pytest.importorskip("triton")
    assert_compiles_and_waits(sampling.advance_launch(batch), [INT64, UINT8, *STATE, INT64, INT64])


def test_one_row_of_bfloat16_is_read_16_bytes_a_thread():
    pytest.importorskip("triton")
    dtypes = [torch.bfloat16, *STATE, INT64, INT64, INT64, INT64, INT32, INT64]
    kernel = compiled(sampling.argmax_launch(1, 128256), dtypes, 90)
    assert "ld.global.v4.b32" in kernel.asm["ptx"]


# -- what is refused ----------------------------------------------------------------------------


def test_wrong_tensors_are_refused():
    c, sampler = Control.allocate(2, CAPACITY, CPU), Sampler.allocate(2, 9, CPU)
    for batch, vocab in ((0, 9), (MAX_ROWS + 1, 9), (2, 0), (2, MAX_VOCAB + 1)):
        with pytest.raises(errors.InputError, match="use choose_greedily"):
            Sampler.allocate(batch, vocab, CPU)
    for logits in (
        torch.zeros(2, 8),
        torch.zeros(1, 9),
        torch.zeros(9, 2).T,
        torch.zeros(2, 9, dtype=torch.float64),
        torch.zeros(2, 9, device="meta"),
    ):
        with pytest.raises(errors.InputError, match="logits"):
            sampler.argmax(c, logits)
    with pytest.raises(errors.InputError, match=r"control\.ids"):
        sampler.argmax(Control.allocate(3, CAPACITY, CPU), torch.zeros(2, 9))


def test_memory_made_under_inference_mode_serves_outside_it():
    with torch.inference_mode():
        sampler = Sampler.allocate(2, 9, CPU)
    assert not any(t.is_inference() for t in (sampler.best, sampler.counter, sampler.weight))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_compiled_kernels_advance_and_sample_as_by_hand():
    device = torch.device("cuda", torch.cuda.current_device())
    shapes = [*SHAPES, (1, 128256), (3, 50257), (64, 32001), (128, 5000), (2, 1 << 20)]
    assert not (wrong := wrong_advances(True, 100, seed=8, device=device)), wrong
    assert not (wrong := wrong_samples(True, shapes, seed=9, device=device)), wrong
