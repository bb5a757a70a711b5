"""The hand-written ends of a decoding step: torch, Triton's interpreter and plain Python agree, and both kernels wait before they read."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch

from mirage_hf import errors
from mirage_hf.codegen import compile as compiler
from mirage_hf.decode.cache import MOST_EOS, Control, Ring
from mirage_hf.decode.graphs import capture
from mirage_hf.decode.kernels import ends
from mirage_hf.decode.kernels.ends import Ends, Inputs
from mirage_hf.decode.program import NOTHING, MaskPlan, choose_greedily
from tests.helpers import triton_interpreter

CPU = torch.device("cpu")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CAPACITY = 64
WINDOWS = [
    (),
    (None,),
    (1,),
    (None, 8),
    (5, None, 1000),
    (Ring(2, 16),),
    (None, Ring(7, 7)),
    (Ring(30, 32), 30),
]


# -- states, logits, and what should come of them -----------------------------------------------------------------------


def random_control(rng: random.Random, batch: int, vocab: int) -> Control:
    c = Control.allocate(batch, CAPACITY, CPU)
    length = rng.randrange(CAPACITY - 8)
    c.length.fill_(length)
    c.budget.fill_(rng.choice((1, 2, 50)))
    c.pad.fill_(rng.randrange(vocab))
    everyone = rng.choice((None, True, False))
    for row in range(batch):
        c.ids[row] = rng.randrange(vocab)
        c.lowest[row] = rng.randrange(length + 1)
        c.position[row] = length - c.lowest[row]
        c.alive[row] = rng.random() < 0.6 if everyone is None else everyone
        c.report[:, row] = torch.tensor([rng.randrange(vocab), 1])
    c.eos.fill_(-1)
    for n in range(rng.choice((0, 1, 3, MOST_EOS))):
        c.eos[n] = rng.randrange(min(vocab, 12))  # where `random_logits` likes to have its maxima
    return c


def random_logits(rng: random.Random, batch: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of few values, hence ties; all equal; infinite; with NaN of either sign; with zeros of either sign; and plain ones."""
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
    """What `choose_greedily` promises, in plain Python."""
    state = {f.name: getattr(c, f.name).tolist() for f in dataclasses.fields(c)}
    tokens = [
        greatest(row) if a else state["pad"][0]
        for row, a in zip(logits.tolist(), state["alive"], strict=True)
    ]
    return after(state, tokens, [False] * len(tokens))


def after(state: dict[str, list], tokens: list[int], ended: list[bool]) -> dict[str, list]:
    """The state that tokens lead to, where some rows end whatever their token is."""
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


def to(c: Control, device: torch.device) -> Control:
    return Control(**{f.name: getattr(c, f.name).clone().to(device) for f in dataclasses.fields(c)})


def differing(c: Control, want: dict[str, list]) -> list[str]:
    return [name for name, values in want.items() if getattr(c, name).tolist() != values]


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
    """What `begin` should write, row by row, with the bounds counted off the masks."""
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


def outputs(out: Inputs) -> list[torch.Tensor]:
    return [
        out.x,
        out.cos,
        out.sin,
        out.slot,
        out.end,
        *(t for each in zip(out.lows, out.slots, out.ends, strict=True) for t in each),
    ]


# -- the cases, for torch and, in a process of its own, for the interpreter ---------------------------------------------


def wrong_choices(by_kernels: bool, shapes: list[tuple[int, int]], seed: int) -> list[str]:
    rng, wrong = random.Random(seed), []
    for n, (batch, vocab) in enumerate(shapes):
        runner = Ends.allocate(batch, vocab, CPU, by_kernels)
        dtype = DTYPES[n % 3]
        for _ in range(2):  # the second finds what the first left in the scratch
            c, logits = random_control(rng, batch, vocab), random_logits(rng, batch, vocab, dtype)
            want, stock, before = by_hand(c, logits), to(c, CPU), logits.clone()
            choose_greedily(stock, logits)
            runner.select(c, logits)
            found = differing(c, want) + [f"stock's {name}" for name in differing(stock, want)]
            found += ["logits"] * (
                not torch.equal(before.view(torch.uint8), logits.view(torch.uint8))
            ) + ["counter"] * int(runner.counter)
            wrong += [f"{batch} {vocab} {dtype}: {found}"] if found else []
    return wrong


def wrong_beginnings(by_kernels: bool, count: int, seed: int) -> list[str]:
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
        if n % 4 == 0:  # a pad token that the embedding does not have, as some tokenizers name
            c.ids[0] = rng.choice((-1, vocab))
        tables[0].requires_grad_()
        out = Inputs.allocate(batch, hidden, width, windows, dtype, CPU, tables=ropes)
        state = {f.name: getattr(c, f.name).tolist() for f in dataclasses.fields(c)}
        Ends.allocate(batch, vocab, CPU, by_kernels).begin(c, *tables, out, scale)
        want = begun(c, tables, windows, scale)
        if (
            by_kernels and dtype == torch.bfloat16 and scale != 1
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


def wrong_turns(
    by_kernels: bool, count: int, seed: int, device: torch.device = CPU, width: int = 3
) -> list[str]:
    """Slabs of several rings at once, every number of them known by where it lies."""
    rng, wrong = random.Random(seed), []
    for n in range(count):
        batch = rng.choice((1, 2, 3, 5))
        c = random_control(rng, batch, 9)
        slabs, wants = [], []
        for at in range(rng.randint(1, 3)):
            ring = Ring(window := rng.randint(2, CAPACITY), window + rng.randrange(3))
            shape = (
                rng.randint(1, 3),
                batch,
                rng.randint(1, width),
                ring.slots,
                rng.choice((1, 6, 8, 8 * width)),
            )
            slab = (
                torch.arange(1024 * at, 1024 * at + math.prod(shape))
                .remainder(2048)
                .view(shape)
                .to(DTYPES[(n + at) % 3])
            )
            want = slab.clone()
            for row, low in enumerate(c.lowest[:, 0].tolist()):
                token = int(c.length) - low
                if any(c.alive.tolist()) and token >= window - 1:
                    want[:, row, :, token % (window - 1)] = slab[:, row, :, window - 1]
            slabs.append((ring, slab.to(device)))
            wants.append(want)
        state, there = (
            {f.name: getattr(c, f.name).tolist() for f in dataclasses.fields(c)},
            to(c, device),
        )
        Ends.allocate(batch, 9, device, by_kernels).turn(there, slabs)
        same = [torch.equal(slab.cpu(), want) for (_, slab), want in zip(slabs, wants, strict=True)]
        wrong += (
            []
            if all(same) and not differing(there, state)
            else [
                f"{batch} rows, {[(r, tuple(s.shape), s.dtype) for r, s in slabs]}, {state}: {same}"
            ]
        )
    return wrong


def wrong_settlings(
    by_kernels: bool, count: int, seed: int, device: torch.device = CPU
) -> list[str]:
    """Given tokens, of which some are nothing, and rows that end for reasons of their own."""
    rng, wrong = random.Random(seed), []
    for n in range(count):
        batch, vocab = rng.choice((1, 2, 3, 5, 70)), 20
        c, runner = (
            to(random_control(rng, batch, vocab), device),
            Ends.allocate(batch, vocab, device, by_kernels),
        )
        tokens = [rng.randrange(vocab) if rng.random() < 0.8 else NOTHING for _ in range(batch)]
        ended = None if n % 3 == 0 else [rng.random() < 0.3 for _ in range(batch)]
        state = {f.name: getattr(c, f.name).tolist() for f in dataclasses.fields(c)}
        want = after(state, tokens, ended or [False] * batch)
        want["ids"] = [[0 if t == NOTHING else t] for (t,) in want["ids"]]
        runner.settle(
            c,
            torch.tensor(tokens, device=device),
            None if ended is None else torch.tensor(ended, device=device),
        )
        wrong += [f"{batch} {ended} {found}"] if (found := differing(c, want)) else []
    return wrong


def random_scores(rng: random.Random, batch: int, vocab: int) -> torch.Tensor:
    """Flat, sharp, with most tokens shut, with whole parts shut or far below the others, with nothing to draw, and with NaN."""
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


def wrong_draws(
    by_kernels: bool, shapes: list[tuple[int, int]], seed: int, device: torch.device = CPU
) -> list[str]:
    """Tokens beside sums of probabilities in float64: the number must lie in the token's share, up to rounding."""
    rng, wrong = random.Random(seed), []
    for batch, vocab in shapes:
        runner = Ends.allocate(batch, vocab, device, by_kernels)
        for _ in range(2):  # the second finds what the first left in the scratch
            scores = random_scores(rng, batch, vocab)
            numbers = torch.tensor(
                [[rng.choice((0, 1 - 2.0**-40, 0.5, rng.random()))] for _ in range(batch)],
                dtype=torch.float64,
            )
            tokens = runner.draw(scores.to(device), numbers.to(device)).tolist()
            again = runner.draw(scores.to(device), numbers.to(device)).tolist()
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
                    )  # below float64's rounding of 1
                wrong += (
                    []
                    if fits
                    else [
                        f"{batch} {vocab}, row {row}: token {token}, number {float(numbers[row])}"
                    ]
                )
            wrong += ["counters"] * int(runner.arrived.any())
    return wrong


SHAPES = [(batch, vocab) for vocab in (1, 7, 97, 1024, 1025, 5003) for batch in (1, 2, 3, 5)]


def test_torch_chooses_as_by_hand():
    assert not wrong_choices(False, SHAPES * 6, seed=0)


def test_torch_begins_as_by_hand():
    assert not wrong_beginnings(False, 200, seed=1)


def test_torch_turns_as_by_hand():
    assert not wrong_turns(False, 100, seed=10)


def test_torch_settles_and_draws_as_by_hand():
    assert not wrong_settlings(False, 200, seed=4)
    assert not wrong_draws(False, SHAPES * 4, seed=5)


INTERPRETED = """
import json
from tests.decode import test_ends as t, test_limits
many = [(70, 33001)]  # blocks of more logits than usual
wrong = t.wrong_choices(True, t.SHAPES + many, seed=2) + t.wrong_beginnings(True, 40, seed=3)
wrong += t.wrong_settlings(True, 60, seed=6) + t.wrong_draws(True, t.SHAPES * 2, seed=7)
wrong += t.wrong_turns(True, 25, seed=11)
wrong += test_limits.wrong_limits(test_limits.SHAPES, seed=8)
print(json.dumps(wrong))
"""


def test_kernels_do_as_torch_and_by_hand():
    assert ends._chunk(70, 33001) > ends.LEAST_CHUNK
    assert triton_interpreter.run(INTERPRETED) == []


# -- compiled -----------------------------------------------------------------------------------------------------------

PROGRAMS = {
    "begin": lambda: ends.begin_program(
        1, 128256, 2048, (1, 4096, 64), (None,), torch.bfloat16, torch.bfloat16
    ),
    "begin odd": lambda: ends.begin_program(
        5, 101, 1030, (2, 77, 6), (None, 16, 1), torch.float16, torch.float32, 0.3
    ),
    "begin ring": lambda: ends.begin_program(
        3, 101, 1030, (2, 77, 6), (None, Ring(512, 512)), torch.bfloat16, torch.bfloat16
    ),
    "turn": lambda: ends.turn_program(
        1, [(Ring(4096, 4096), (32, 1, 8, 4096, 128), torch.bfloat16)] * 2
    ),
    "turn odd": lambda: ends.turn_program(
        5,
        [
            (Ring(70, 256), (2, 5, 3, 256, 80), torch.float16),
            (Ring(9, 256), (1, 5, 1, 256, 7), torch.float32),
        ],
    ),
    "select": lambda: ends.select_program(1, 128256, torch.bfloat16),
    "select odd": lambda: ends.select_program(5, 50257, torch.float16),
    "select many": lambda: ends.select_program(64, 262144, torch.float32),
    "draw": lambda: ends.draw_program(1, 128256),
    "draw odd": lambda: ends.draw_program(5, 50257),
    "draw many": lambda: ends.draw_program(128, 1 << 20),
    "settle": lambda: ends.settle_program(1),
    "settle odd": lambda: ends.settle_program(70),
}


@pytest.mark.parametrize(
    "program",
    [
        lambda dtype: ends.begin_program(1, 101, 64, (1, 77, 8), (None,), dtype, torch.float32),
        lambda dtype: ends.begin_program(1, 101, 64, (1, 77, 8), (None,), torch.float16, dtype),
        lambda dtype: ends.turn_program(1, [(Ring(70, 256), (2, 1, 3, 256, 8), dtype)]),
        lambda dtype: ends.select_program(1, 101, dtype),
    ],
    ids=["begin", "begin, tables", "turn", "select"],
)
def test_each_dtype_has_a_file_of_its_own(program):
    """A launch took what was compiled for the first one of its file: bfloat16 rings were turned as float32 ones."""
    assert (
        len({program(dtype).source for dtype in (torch.float16, torch.bfloat16, torch.float32)})
        == 3
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_compiles_and_waits_before_it_reads(name, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))
    program = PROGRAMS[name]()
    for sm in (80, 90):
        (kernel,) = compiler.ahead_of_time(program, sm)
        assert kernel.asm["cubin"]
        assert ".ftz" not in kernel.ptx  # numbers that are not normal have an order too
        wait, let, load = (
            kernel.ptx.find(s)
            for s in ("griddepcontrol.wait", "griddepcontrol.launch_dependents", "ld.global")
        )
        if sm < 90:
            assert wait == let == -1
            continue
        assert (
            kernel.ptx.count("griddepcontrol.wait")
            == kernel.ptx.count("griddepcontrol.launch_dependents")
            == 1
        )
        touching = min(
            n
            for n in (
                kernel.ptx.find(s)
                for s in ("st.global", "atom.", "prefetch", "cp.async", "ld.global")
            )
            if n >= 0
        )
        assert 0 <= wait < let < touching <= load


def test_one_row_of_bfloat16_is_read_16_bytes_a_thread(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("MIRAGE_HF_CACHE", str(tmp_path))
    for name in ("begin", "select", "turn"):
        (kernel,) = compiler.ahead_of_time(PROGRAMS[name](), 90)
        assert "ld.global.v4.b32" in kernel.ptx


# -- what is refused ----------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused():
    c, runner = Control.allocate(2, CAPACITY, CPU), Ends.allocate(2, 9, CPU)
    for batch, vocab in ((0, 9), (ends.MOST_ROWS + 1, 9), (2, 0), (2, ends.MOST_VOCAB + 1)):
        with pytest.raises(errors.InputError, match="use choose_greedily"):
            Ends.allocate(batch, vocab, CPU)
    for logits in (
        torch.zeros(2, 8),
        torch.zeros(1, 9),
        torch.zeros(9, 2).T,
        torch.zeros(2, 9, dtype=torch.float64),
        torch.zeros(2, 9, device="meta"),
    ):
        with pytest.raises(errors.InputError, match="logits"):
            runner.select(c, logits)
    with pytest.raises(errors.InputError, match=r"control\.ids"):
        runner.select(Control.allocate(3, CAPACITY, CPU), torch.zeros(2, 9))
    good = random_tables(2, 9, 4, 5, 6, torch.float32)
    out = Inputs.allocate(2, 4, 6, (None,), torch.float32, CPU)
    runner.begin(c, *good, out)
    bad = {
        "out.x": dict(x=torch.zeros(2, 5)),
        "out.cos": dict(cos=torch.zeros(1, 2, 6).half()),
        "out.sin": dict(sin=torch.zeros(1, 1, 6)),
        "out.slot": dict(slot=torch.zeros(2).long()),
        r"out.slots\[0\]": dict(slots=(torch.zeros(3).int(),)),
        "2 lows": dict(lows=out.lows * 2),
        r"out.lows\[0\]": dict(lows=(torch.zeros(1).int(),)),
    }
    for match, change in bad.items():
        with pytest.raises(errors.InputError, match=match):
            runner.begin(c, *good, dataclasses.replace(out, **change))
    tables = (
        ("embedding", 0, torch.zeros(4, 9).T),
        ("sin", 2, torch.zeros(1, 4, 6)),
        ("rotary", 1, torch.zeros(1, 5, 6).double()),
        ("rotary tables", 1, torch.zeros(5, 6)),
    )
    for match, at, table in tables:
        with pytest.raises(errors.InputError, match=match):
            runner.begin(c, *good[:at], table, *good[at + 1 :], out)


def test_memory_made_under_inference_mode_serves_outside_it():
    with torch.inference_mode():
        runner, out = (
            Ends.allocate(2, 9, CPU),
            Inputs.allocate(2, 4, 6, (None, 3), torch.float32, CPU),
        )
    assert not any(t.is_inference() for t in (runner.best, runner.counter, *outputs(out)))


# -- on a GPU -----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_compiled_kernels_settle_and_draw_as_by_hand():
    device = torch.device("cuda", torch.cuda.current_device())
    shapes = [*SHAPES, (1, 128256), (3, 50257), (64, 32001), (128, 5000), (2, 1 << 20)]
    assert not (wrong := wrong_settlings(True, 100, seed=8, device=device)), wrong
    assert not (wrong := wrong_turns(True, 100, seed=12, device=device, width=20)), wrong
    assert not (wrong := wrong_draws(True, shapes, seed=9, device=device)), wrong


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
    """Graphs of select → begin → select → begin, nothing between them, against torch on the CPU."""
    rng, device, windows = (
        random.Random(batch),
        torch.device("cuda", torch.cuda.current_device()),
        (None, 8),
    )
    tables = random_tables(
        batch, min(vocab, 20_000), hidden, 2 * CAPACITY, 64, dtype, ropes=2
    )  # ids beyond take the last row
    runner, on_cpu = Ends.allocate(batch, vocab, device), Ends.allocate(batch, vocab, CPU)
    steps = [
        (
            torch.zeros(batch, vocab, dtype=dtype, device=device),
            Inputs.allocate(batch, hidden, 64, windows, dtype, device, tables=2),
        )
        for _ in range(2)
    ]
    c, there = to(random_control(rng, batch, vocab), device), [t.to(device) for t in tables]

    def run():
        for logits, out in steps:
            runner.select(c, logits)
            runner.begin(c, *there, out, 55.4256)

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
            expected = Inputs.allocate(batch, hidden, 64, windows, dtype, CPU, tables=2)
            on_cpu.select(want, samples[k])
            on_cpu.begin(want, *tables, expected, 55.4256)
            assert all(
                torch.equal(x.cpu(), y)
                for x, y in zip(outputs(out), outputs(expected), strict=True)
            ), n
        assert not differing(
            c, {f.name: getattr(want, f.name).tolist() for f in dataclasses.fields(c)}
        ), n
        assert not int(runner.counter)
