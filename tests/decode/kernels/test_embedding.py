"""The kernel that begins a step: torch, Triton's interpreter and plain Python agree."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from mirage_hf import errors
from mirage_hf.decode.control import Control
from mirage_hf.decode.drafts import Drafts
from mirage_hf.decode.graphs import capture
from mirage_hf.decode.kernels.embedding import EmbeddingOutput, embed, embedding_launch
from mirage_hf.decode.masks import MaskPlan
from mirage_hf.decode.rings import Ring
from mirage_hf.decode.sampler import Sampler
from tests.decode.kernels.test_sampling import random_logits
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

WINDOWS = [
    (),
    (None,),
    (1,),
    (None, 8),
    (5, 1000),
    (Ring(2, 16),),
    (None, Ring(7, 7)),
    (Ring(30, 32), 30),
]


def random_tables(
    batch: int,
    vocab: int,
    hidden: int,
    positions: int,
    width: int,
    dtype: torch.dtype,
    ropes: int = 1,
) -> list[torch.Tensor]:
    return [
        torch.randn(size).to(dtype)
        for size in ((vocab, hidden), (ropes, positions, width), (ropes, positions, width))
    ]


def begun(
    c: Control, tables: list[torch.Tensor], windows: tuple[int | Ring | None, ...], scale: float
) -> list[torch.Tensor]:
    """Return what `embed` should write, row by row, with the bounds counted from the masks."""
    embedding, cos, sin = tables
    ids, position = (
        c.ids[:, 0].clamp(0, len(embedding) - 1),
        c.position[:, 0].clamp(0, cos.shape[1] - 1),
    )
    plan = MaskPlan(
        tuple((str(n), None if isinstance(w, Ring) else w) for n, w in enumerate(windows)),
        by_layer_type=True,
    )
    masks = plan.build(c, torch.float32, {})
    slot = torch.full((len(ids),), int(c.length), dtype=torch.int32)
    bounds = [slot, slot + 1]
    for n, w in enumerate(windows):
        if isinstance(w, Ring):
            own = [
                min(int(c.length) - low, w.window - 1) if any(c.alive.tolist()) else w.window - 1
                for (low,) in c.lowest.tolist()
            ]
            bounds += [
                torch.zeros_like(slot),
                torch.tensor(own, dtype=torch.int32),
                torch.tensor(own, dtype=torch.int32) + 1,
            ]
        else:
            bounds += [(masks[str(n)][:, 0, 0] == 0).int().argmax(-1).int(), slot, slot + 1]
    turned = [
        torch.stack([torch.stack([rows[i] for i in position]) for rows in t]) for t in (cos, sin)
    ]
    return [torch.stack([embedding[i] for i in ids]) * scale, *turned, *bounds]


def drafted(
    c: Control,
    drafts: Drafts,
    tables: list[torch.Tensor],
    windows: tuple[int | Ring | None, ...],
    scale: float,
) -> list[torch.Tensor]:
    """Return what `embed` should write for drafts: each token as if a row of its own."""
    batch, tokens = drafts.tokens.shape
    rows, firsts = [], []
    for row in range(batch):
        for number in range(tokens):
            one = Control.allocate(1, CAPACITY + 32, CPU)
            one.ids.copy_(drafts.tokens[row, number])
            one.position.copy_(c.position[row] + drafts.ahead[row] + number)
            one.length.copy_(c.length + drafts.ahead[row] + number)
            one.lowest.copy_(c.lowest[row])
            rows.append(begun(one, tables, windows, scale))
            slot = int(one.length)
            firsts.append([max(slot - window + 1, 0) if window else 0 for window in windows])
    x, cos, sin, slots, _, *bounds = zip(*rows, strict=True)
    slot = torch.cat(slots)[::tokens]  # bounds of cached slots are those of a row's first token
    lows = [torch.cat(low)[::tokens] for low in bounds[::3]]
    return [
        torch.cat(x),
        torch.cat(cos, 1),
        torch.cat(sin, 1),
        slot,
        slot + 1,
        *(t for low in lows for t in (low, slot, slot + 1)),
        *torch.tensor(firsts, dtype=torch.int32).view(batch, tokens, -1).unbind(-1),
    ]


def outputs(out: EmbeddingOutput) -> list[torch.Tensor]:
    return [
        out.x,
        out.cos,
        out.sin,
        out.slot,
        out.end,
        *(t for each in zip(out.lows, out.slots, out.ends, strict=True) for t in each),
        *out.firsts,
    ]


def wrong_beginnings(by_kernel: bool, count: int, seed: int) -> list[str]:
    rng, wrong = random.Random(seed), []
    for n in range(count):
        batch, windows, dtype = rng.randint(1, 5), WINDOWS[n % len(WINDOWS)], DTYPES[n % 3]
        vocab, hidden = rng.randint(1, 40), rng.choice((1, 7, 64, 1000, 1030, 2048))
        positions, width, ropes, scale = (
            rng.randint(1, 70),
            rng.choice((6, 64)),
            1 + n % 2,
            (1.0, 1.0, 0.3, 55.4256)[n % 4],
        )
        c, tables = (
            random_control(rng, batch, vocab),
            random_tables(batch, vocab, hidden, positions, width, dtype, ropes),
        )
        if n % 4 == 0:  # some tokenizers name a pad token that the embedding does not have
            c.ids[0] = rng.choice((-1, vocab))
        tables[0].requires_grad_()
        out = EmbeddingOutput.allocate(batch, hidden, width, windows, dtype, CPU, tables=ropes)
        state = {f.name: getattr(c, f.name).tolist() for f in dataclasses.fields(c)}
        embed(c, *tables, out, scale, by_kernel=by_kernel)
        want = begun(c, tables, windows, scale)
        if (
            by_kernel and dtype == torch.bfloat16 and scale != 1
        ):  # Triton's interpreter cuts such numbers off, a GPU rounds them
            assert (out.x.float() - want[0].float()).abs().max() <= 2**-7 * want[0].abs().max()
            want[0] = out.x
        same = [
            torch.equal(x, y) and x.dtype == y.dtype
            for x, y in zip(outputs(out), want, strict=True)
        ]
        wrong += (
            []
            if all(same) and not differing(c, state)
            else [f"{batch} {hidden} {width} {windows} {dtype} {ropes} {scale}: {same}"]
        )
    return wrong


def wrong_drafts(by_kernel: bool, count: int, seed: int) -> list[str]:
    rng, wrong = random.Random(seed), []
    for n in range(count):
        batch, tokens, vocab = rng.randint(1, 3), (2, 1, 8, 5)[n % 4], rng.randint(1, 40)
        windows = ((None,), (5,), (None, 3), ())[n // 4 % 4]
        if tokens > 1 and not windows:
            windows = (None,)
        hidden, dtype = rng.choice((7, 64, 1030)), DTYPES[n % 3]
        c = random_control(rng, batch, vocab)
        tables = random_tables(batch, vocab, hidden, rng.randint(1, 90), 6, dtype, 1 + n % 2)
        drafts = Drafts.allocate(batch, tokens, torch.zeros(batch, vocab), None)
        drafts.tokens.copy_(torch.randint(0, vocab, (batch, tokens)))
        drafts.ahead.copy_(torch.randint(0, 9, (batch, 1)))
        out = EmbeddingOutput.allocate(
            batch, hidden, 6, windows, dtype, CPU, tables=1 + n % 2, tokens=tokens
        )
        state = {f.name: getattr(c, f.name).tolist() for f in dataclasses.fields(c)}
        embed(c, *tables, out, by_kernel=by_kernel, drafts=drafts)
        want = drafted(c, drafts, tables, windows, 1.0)
        if tokens == 1:
            want = want[: len(want) - len(windows)]
        same = [
            torch.equal(x, y) and x.dtype == y.dtype
            for x, y in zip(outputs(out), want, strict=True)
        ]
        is_right = all(same) and not differing(c, state)
        wrong += [] if is_right else [f"{batch} {tokens} {hidden} {windows} {dtype}: {same}"]
    return wrong


def test_torch_begins_as_by_hand():
    assert not wrong_beginnings(False, 200, seed=1)


def test_torch_feeds_drafts_as_rows_of_their_own():
    assert not wrong_drafts(False, 64, seed=2)


def test_rows_that_are_ahead_share_no_ring():
    out = EmbeddingOutput.allocate(1, 4, 6, (Ring(7, 7),), torch.float32, CPU, tokens=2)
    drafts = Drafts.allocate(1, 2, torch.zeros(1, 9), None)
    tables = random_tables(1, 9, 4, 5, 6, torch.float32)
    with pytest.raises(errors.InputError, match="rings"):
        embed(Control.allocate(1, CAPACITY, CPU), *tables, out, by_kernel=False, drafts=drafts)


INTERPRETED = """
import json
from tests.decode.kernels import test_embedding as t
print(json.dumps(t.wrong_beginnings(True, 40, seed=3) + t.wrong_drafts(True, 16, seed=4)))
"""


def test_kernel_does_as_torch_and_by_hand():
    assert triton_interpreter.run(INTERPRETED) == []


# -- compiled -----------------------------------------------------------------------------------

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32


def dtypes(x: torch.dtype, table: torch.dtype) -> list[torch.dtype]:
    state, tables = [torch.int64] * 5, [table, table]
    return [*state, x, *tables, x, *tables, *[torch.int32] * 2, torch.uint8, *[torch.int32] * 8]


@pytest.mark.parametrize(
    "sizes, windows, scale, x, table",
    [
        ((1, 128256, 2048, (1, 4096, 64)), (None,), 1.0, BFLOAT16, BFLOAT16),
        ((5, 101, 1030, (2, 77, 6)), (None, 16), 0.3, FLOAT16, FLOAT32),
        ((3, 101, 1030, (2, 77, 6)), (None, Ring(512, 512)), 1.0, BFLOAT16, BFLOAT16),
    ],
    ids=["one row", "odd sizes", "ring"],
)
def test_compiles_and_waits_before_it_reads(sizes, windows, scale, x, table):
    pytest.importorskip("triton")
    assert_compiles_and_waits(embedding_launch(*sizes, windows, scale), dtypes(x, table))
    if not any(isinstance(window, Ring) for window in windows):
        for tokens in (1, 8):
            what = embedding_launch(*sizes, windows, scale, tokens, is_ahead=True)
            assert_compiles_and_waits(what, dtypes(x, table))


def test_one_row_of_bfloat16_is_read_16_bytes_a_thread():
    pytest.importorskip("triton")
    what = embedding_launch(1, 128256, 2048, (1, 4096, 64), (None,))
    assert "ld.global.v4.b32" in compiled(what, dtypes(BFLOAT16, BFLOAT16), 90).asm["ptx"]


# -- what is refused ----------------------------------------------------------------------------


def test_wrong_tensors_are_refused():
    c, good = Control.allocate(2, CAPACITY, CPU), random_tables(2, 9, 4, 5, 6, torch.float32)
    out = EmbeddingOutput.allocate(2, 4, 6, (None,), torch.float32, CPU)
    embed(c, *good, out, by_kernel=False)
    bad = {
        "out.x": dict(x=torch.zeros(2, 5)),
        "out.cos": dict(cos=torch.zeros(1, 2, 6).half()),
        "out.sin": dict(sin=torch.zeros(1, 1, 6)),
        "out.slot": dict(slot=torch.zeros(2).long()),
        r"out.slots\[0\]": dict(slots=(torch.zeros(3).int(),)),
        "2 lows": dict(lows=out.lows * 2),
        "at most 2 windows": dict(
            windows=(None, 1, 2), lows=out.lows * 3, slots=out.slots * 3, ends=out.ends * 3
        ),
        r"out.lows\[0\]": dict(lows=(torch.zeros(1).int(),)),
    }
    for match, change in bad.items():
        with pytest.raises(errors.InputError, match=match):
            embed(c, *good, dataclasses.replace(out, **change), by_kernel=False)
    with pytest.raises(errors.InputError, match=r"out\.x"):
        embed(Control.allocate(3, CAPACITY, CPU), *good, out, by_kernel=False)
    tables = (
        ("embedding", 0, torch.zeros(4, 9).T),
        ("sin", 2, torch.zeros(1, 4, 6)),
        ("rotary", 1, torch.zeros(1, 5, 6).double()),
        ("rotary tables", 1, torch.zeros(5, 6)),
    )
    for match, at, table in tables:
        with pytest.raises(errors.InputError, match=match):
            embed(c, *good[:at], table, *good[at + 1 :], out, by_kernel=False)


def test_memory_made_under_inference_mode_serves_outside_it():
    with torch.inference_mode():
        out = EmbeddingOutput.allocate(2, 4, 6, (None, 3), torch.float32, CPU)
    assert not any(t.is_inference() for t in outputs(out))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(
    "batch, vocab, hidden, dtype",
    [
        (1, 128256, 2048, torch.bfloat16),
        (1, 50257, 768, torch.float16),
        (5, 5003, 1030, torch.float32),
        (64, 32001, 4096, torch.bfloat16),
    ],
)
def test_captured_steps(batch, vocab, hidden, dtype):
    """Graphs of argmax → embed → argmax → embed agree with torch on the CPU.

    Nothing runs between the kernels.
    """
    rng, device, windows = (
        random.Random(batch),
        torch.device("cuda", torch.cuda.current_device()),
        (None, 8),
    )
    tables = random_tables(
        batch, min(vocab, 20_000), hidden, 2 * CAPACITY, 64, dtype, ropes=2
    )  # ids beyond the table take its last row
    sampler, on_cpu = Sampler.allocate(batch, vocab, device), Sampler.allocate(batch, vocab, CPU)
    steps = [
        (
            torch.zeros(batch, vocab, dtype=dtype, device=device),
            EmbeddingOutput.allocate(batch, hidden, 64, windows, dtype, device, tables=2),
        )
        for _ in range(2)
    ]
    c, there = to(random_control(rng, batch, vocab), device), [t.to(device) for t in tables]

    def run():
        for logits, out in steps:
            sampler.argmax(c, logits)
            embed(c, *there, out, 55.4256, by_kernel=True)

    graph, _ = capture(run, device, None)
    samples = [random_logits(rng, batch, vocab, dtype) for _ in range(5)]
    resident = [s.to(device) for s in samples]
    for n in range(60):
        want = random_control(rng, batch, vocab)
        for f in dataclasses.fields(c):
            getattr(c, f.name).copy_(getattr(want, f.name))
        chosen = (n % 5, (n * 3 + 1) % 5)
        for (logits, _), k in zip(steps, chosen, strict=True):
            logits.copy_(resident[k])
        graph.replay() if n % 4 else run()
        for (_, out), k in zip(steps, chosen, strict=True):
            expected = EmbeddingOutput.allocate(batch, hidden, 64, windows, dtype, CPU, tables=2)
            on_cpu.argmax(want, samples[k])
            embed(want, *tables, expected, 55.4256, by_kernel=False)
            assert all(
                torch.equal(x.cpu(), y)
                for x, y in zip(outputs(out), outputs(expected), strict=True)
            ), n
        assert not differing(
            c, {f.name: getattr(want, f.name).tolist() for f in dataclasses.fields(c)}
        ), n
        assert not int(sampler.counter)
