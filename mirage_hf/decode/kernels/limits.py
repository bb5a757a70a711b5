"""Which scores of a row stay when only so many may, or only so much probability: found by search, not by sorting.

The limit of a row is the least score that stays. It is searched among all float32 numbers, as integers of the same order, a few bits a
launch: every block of a row counts, for 2 ** BITS numbers at once, its scores above and sums the weights of the others; the last block
to arrive adds up and takes the first number at which a score would stay. The same scores always give the same limit, since sums are
taken in a fixed order.
"""

from __future__ import annotations

from importlib.util import find_spec
from textwrap import indent

import torch
from torch import Tensor

from mirage_hf import errors
from mirage_hf.codegen.schedule import next_power_of_two
from mirage_hf.codegen.triton import GeneratedProgram, Launch
from mirage_hf.decode.kernels.ends import MOST_ROWS, MOST_VOCAB
from mirage_hf.decode.kernels.written import INFINITY, as_program, launch, loading, order

BITS = 5
"""Of the limit that a launch finds."""
NUMBERS = 1 << BITS
"""Compared with every score at once."""
ROUNDS = -(-32 // BITS)
assert 32 % BITS, "the last round must have numbers to spare for the one below those that are left"
PIECE = 256
"""Scores that are compared with the numbers at once."""
MOST_PARTS = 256
"""Blocks of a row, of which the last adds up the results."""
LEAST_CHUNK = 1024

DONE, ARRIVED, CHOSEN, STATE = 1, 2, 3, 4
"""Of a row's state, int64, 0 at first: the limit so far as a distance from the least integer, rounds done, blocks that are done in this
round, and which number the last round chose."""


def fits(scores: Tensor) -> bool:
    """Whether there are kernels for (batch, vocab) scores where they lie."""
    return (
        scores.device.type == "cuda"
        and scores.shape[0] <= MOST_ROWS
        and scores.shape[1] <= MOST_VOCAB
        and find_spec("triton") is not None
    )


def kth(scores: Tensor, k: Tensor) -> Tensor:
    """(batch, 1): of each row of (batch, vocab) float32 scores the `k`-th greatest, -inf where there are fewer; k: (1,) int64.

    NaN is above all. Errors: InputError for scores that do not fit.
    """
    return _searched(scores, k, None, None)[2]


def totals(scores: Tensor) -> tuple[Tensor, Tensor]:
    """(batch, 1) each: the greatest of each row of (batch, vocab) float32 scores, and the sum of e to the power of their distances from it.

    What softmax needs; torch gives a row to one block. Errors: InputError for scores that do not fit.
    """
    _check("scores", scores, scores)
    batch, vocab = scores.shape
    blocks, device = batch * -(-vocab // _chunk(vocab)), scores.device
    tops, sums, greatest, total = (
        torch.empty(n, 1, dtype=torch.float32, device=device)
        for n in (blocks, blocks, batch, batch)
    )
    arrived = torch.zeros(batch, dtype=torch.int32, device=device)
    launch(_totals(batch, vocab), [scores, tops, sums, arrived, greatest, total])
    return greatest, total


def cut(
    scores: Tensor,
    order: Tensor,
    weights: Tensor,
    rest: Tensor,
    keep: Tensor,
    fill: float,
    *,
    firsts: bool,
) -> Tensor:
    """Return (batch, vocab) scores with `fill` where neither `keep` nor the weights let them stay.

    order: what decides, greatest first; weights: of each score. A score stays if it is among the first `keep`, or if its weight and those
    of all behind it are more than `rest`, taken together. firsts: of equal ones those with the lowest index come first, and by weight they
    stay together; else those with the highest come first, and stay one by one. scores, order, weights float32, rest (1,) float32, keep
    (1,) int64. What has a NaN among its weights, those of equal scores or those behind stays. Errors: InputError for tensors that do not
    fit.
    """
    state, parts, _ = _searched(order, keep, weights, rest)
    counts, sums = parts
    out = torch.empty_like(scores)
    _check("scores", scores, order)
    launch(
        _cut(*scores.shape, fill, firsts),
        [scores, order, weights, rest, keep, state, counts, sums, out],
    )
    return out


def _searched(
    order: Tensor, keep: Tensor, weights: Tensor | None, rest: Tensor | None
) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """The states at the end, what the blocks found in the last round, and the limits."""
    _check("order", order, order)
    for name, t, dtype in (("keep", keep, torch.int64), ("rest", rest, torch.float32)):
        if t is not None and (t.numel() != 1 or t.dtype != dtype or t.device != order.device):
            raise errors.InputError(
                f"decode: {name} is {t.dtype} {errors.shape(t.shape)} on {t.device}; it must be one {dtype} on "
                f"{order.device}"
            )
    batch, vocab = order.shape
    blocks, device = batch * -(-vocab // _chunk(vocab)), order.device
    state = torch.zeros(batch, STATE, dtype=torch.int64, device=device)
    counts = torch.empty(blocks, NUMBERS, dtype=torch.int32, device=device)
    limit = torch.empty(batch, 1, dtype=torch.float32, device=device)
    parts: tuple[Tensor, ...] = (counts,)
    weighed: list[Tensor] = []
    if weights is not None and rest is not None:
        _check("weights", weights, order)
        parts = counts, torch.empty(blocks, NUMBERS, dtype=torch.float32, device=device)
        weighed = [weights, rest]
    loaded = _narrow(batch, vocab, weights is not None)
    for _ in range(ROUNDS):
        launch(loaded, [order, *weighed, keep, state, *parts, limit])
    return state, parts, limit


def _check(name: str, t: Tensor, like: Tensor) -> None:
    if (
        t.dim() != 2
        or t.shape != like.shape
        or t.dtype != torch.float32
        or t.device != like.device
        or not t.is_contiguous()
        or not (0 < t.shape[0] <= MOST_ROWS and 0 < t.shape[1] <= MOST_VOCAB)
    ):
        raise errors.InputError(
            f"decode: {name} is {t.dtype} {errors.shape(t.shape)}, strides {errors.shape(t.stride())}, on {t.device}; "
            f"it must be float32, contiguous, alike for all, of 1 to {MOST_ROWS} rows and 1 to {MOST_VOCAB} columns"
        )


def _chunk(vocab: int) -> int:
    """Scores of a row that a block takes."""
    return max(LEAST_CHUNK, next_power_of_two(-(-vocab // MOST_PARTS)))


def narrow_program(batch: int, vocab: int, weighed: bool) -> GeneratedProgram:
    """The kernel of one round. `weighed`: by weights too, else by the number of scores alone."""
    chunk = _chunk(vocab)
    chunks, kept = -(-vocab // chunk), "counted < keep"
    signature = (
        ("order_ptr", "*fp32"),
        *((("weights_ptr", "*fp32"), ("rest_ptr", "*fp32")) if weighed else ()),
        ("keep_ptr", "*i64"),
        ("state_ptr", "*i64"),
        ("counts_ptr", "*i32"),
        *((("sums_ptr", "*fp32"),) if weighed else ()),
        ("limit_ptr", "*fp32"),
    )
    first = each = stored = added = ""
    if weighed:
        kept = "(counted < keep) | ~(summed <= rest)"  # NaN, too, lets all stay
        first = f"\n    rest = tl.load(rest_ptr).to(tl.float64)\n    sums = tl.zeros([{PIECE}, {NUMBERS}], tl.float32)"
        each = f"""
        weight = tl.load(weights_ptr + row * {vocab} + n, mask=n < {vocab}, other=0.0)
        sums += tl.where(above, 0.0, weight[:, None])"""
        stored = (
            f"\n    tl.store(sums_ptr + tl.program_id(0) * {NUMBERS} + j, tl.sum(sums, axis=0))"
        )
        added = """
        summed = tl.sum(tl.load(sums_ptr + found, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float64), axis=0)"""
    kernel = f'''
@triton.jit
def narrow({", ".join(name for name, _ in signature)}, overlaps: tl.constexpr):
    """{BITS} bits more of the limit of each of {batch} rows of {vocab} numbers; {chunks} blocks for a row."""
    if overlaps:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) // {chunks}
    part = tl.program_id(0) % {chunks}
    j = tl.arange(0, {NUMBERS})
    so_far = tl.load(state_ptr + row * {STATE})
    done = tl.load(state_ptr + row * {STATE} + {DONE})
    keep = tl.load(keep_ptr)
    shift = tl.maximum({32 - BITS} - {BITS} * done, 0)
    below = (shift == 0).to(tl.int64)  # the last round begins one number earlier, so that it has counts on both sides of the limit
    numbers = so_far + ((j + 1).to(tl.int64) << shift) - 1 - below - {1 << 31}
    numbers = tl.minimum(tl.maximum(numbers, {-(1 << 31)}), {(1 << 31) - 1}).to(tl.int32)
    counts = tl.zeros([{PIECE}, {NUMBERS}], tl.int32){first}
    for at in tl.static_range(0, {chunk}, {PIECE}):
        n = part * {chunk} + at + tl.arange(0, {PIECE})
        x = tl.load(order_ptr + row * {vocab} + n, mask=n < {vocab}, other=0.0)
{indent(order(torch.float32), " " * 8)}
        above = (order[:, None] > numbers[None, :]) & (n < {vocab})[:, None]
        counts += above.to(tl.int32){each}
    tl.store(counts_ptr + tl.program_id(0) * {NUMBERS} + j, tl.sum(counts, axis=0)){stored}
    tl.debug_barrier()  # stored before one thread says so
    arrived = tl.atomic_add(state_ptr + row * {STATE} + {ARRIVED}, 1, sem="acq_rel", scope="gpu")
    if arrived == {chunks - 1}:
        c = tl.arange(0, {next_power_of_two(chunks)})
        found = (row * {chunks} + c)[:, None] * {NUMBERS} + j[None, :]
        inside = (c < {chunks})[:, None] & (j >= 0)[None, :]
        counted = tl.sum(tl.load(counts_ptr + found, mask=inside, other=0, cache_modifier=".cg"), axis=0){added}
        chosen = tl.min(tl.where({kept}, j, {NUMBERS - 1}), axis=0)
        limit = so_far + (chosen.to(tl.int64) << shift) - below
        tl.store(state_ptr + row * {STATE}, limit)
        tl.store(state_ptr + row * {STATE} + {DONE}, done + 1)
        tl.store(state_ptr + row * {STATE} + {ARRIVED}, tl.zeros_like(limit))
        tl.store(state_ptr + row * {STATE} + {CHOSEN}, chosen.to(tl.int64))
        least = tl.maximum(limit - {1 << 31}, {-INFINITY[torch.float32]})
        tl.store(limit_ptr + row, tl.where(least < 0, {1 << 31} - least, least).to(tl.uint32).to(tl.float32, bitcast=True))
'''
    return as_program(
        kernel, Launch("narrow", signature, batch * chunks, num_warps=4, num_stages=1)
    )


def totals_program(batch: int, vocab: int) -> GeneratedProgram:
    """The kernel of `totals`."""
    chunk = _chunk(vocab)
    chunks = -(-vocab // chunk)
    signature = (
        ("scores_ptr", "*fp32"),
        ("tops_ptr", "*fp32"),
        ("sums_ptr", "*fp32"),
        ("arrived_ptr", "*i32"),
        ("greatest_ptr", "*fp32"),
        ("total_ptr", "*fp32"),
    )
    kernel = f'''
@triton.jit
def totals({", ".join(name for name, _ in signature)}, overlaps: tl.constexpr):
    """The greatest of {vocab} scores of each of {batch} rows, and the sum of exponentials; {chunks} blocks for a row."""
    if overlaps:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) // {chunks}
    n = tl.program_id(0) % {chunks} * {chunk} + tl.arange(0, {chunk})
    x = tl.load(scores_ptr + row * {vocab} + n, mask=n < {vocab}, other=-float("inf"))
    top = tl.max(x, axis=0)
    shift = tl.where(top == -float("inf"), 0.0, top)  # -inf minus itself would be NaN
    tl.store(tops_ptr + tl.program_id(0), top)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(tl.exp(x - shift), axis=0))
    tl.debug_barrier()  # stored before one thread says so
    arrived = tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel", scope="gpu")
    if arrived == {chunks - 1}:
        c = tl.arange(0, {next_power_of_two(chunks)})
        tops = tl.load(tops_ptr + row * {chunks} + c, mask=c < {chunks}, other=-float("inf"), cache_modifier=".cg")
        sums = tl.load(sums_ptr + row * {chunks} + c, mask=c < {chunks}, other=0.0, cache_modifier=".cg").to(tl.float64)
        greatest = tl.max(tops, axis=0)
        shift = tl.where(greatest == -float("inf"), 0.0, greatest)
        tl.store(greatest_ptr + row, greatest)
        tl.store(total_ptr + row, tl.sum(sums * tl.exp(tops - shift).to(tl.float64), axis=0).to(tl.float32))
'''
    return as_program(
        kernel, Launch("totals", signature, batch * chunks, num_warps=4, num_stages=1)
    )


def cut_program(batch: int, vocab: int, fill: float, firsts: bool) -> GeneratedProgram:
    """The kernel that fills what does not stay, after the last round. Of equal scores at the limit some may stay; see `cut`."""
    chunk = _chunk(vocab)
    chunks = -(-vocab // chunk)
    signature = (
        ("scores_ptr", "*fp32"),
        ("order_ptr", "*fp32"),
        ("weights_ptr", "*fp32"),
        ("rest_ptr", "*fp32"),
        ("keep_ptr", "*i64"),
        ("state_ptr", "*i64"),
        ("counts_ptr", "*i32"),
        ("sums_ptr", "*fp32"),
        ("out_ptr", "*fp32"),
    )
    # each says how many of `ties` stay by their weights, and which of them these and those that `keep` keeps are
    by_weight = "tl.where(enough, ties, 0)" if firsts else "ties - fall"
    stays = "before < stay" if firsts else "before >= ties - stay"
    kernel = f'''
@triton.jit
def cut({", ".join(name for name, _ in signature)}, overlaps: tl.constexpr):
    """The scores that stay, of each of {batch} rows of {vocab}; {chunks} blocks for a row."""
    if overlaps:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) // {chunks}
    part = tl.program_id(0) % {chunks}
    n = part * {chunk} + tl.arange(0, {chunk})
    x = tl.load(order_ptr + row * {vocab} + n, mask=n < {vocab}, other=0.0)
    score = tl.load(scores_ptr + row * {vocab} + n, mask=n < {vocab}, other=0.0)
    weight = tl.load(weights_ptr + row * {vocab} + n, mask=n < {vocab}, other=0.0)
    limit = tl.load(state_ptr + row * {STATE}) - {1 << 31}
    chosen = tl.load(state_ptr + row * {STATE} + {CHOSEN})
    keep = tl.load(keep_ptr)
    rest = tl.load(rest_ptr).to(tl.float64)
{indent(order(torch.float32), " " * 4)}

    # what the last round found at the limit and at the number below it, in every block of the row
    c = tl.arange(0, {next_power_of_two(chunks)})
    at = (row * {chunks} + c) * {NUMBERS} + chosen
    under = tl.maximum(chosen, 1) - chosen - 1 + 0 * c
    above = tl.load(counts_ptr + at, mask=c < {chunks}, other=0)
    equal = tl.load(counts_ptr + at + under, mask=c < {chunks}, other=0) - above
    behind = tl.sum(tl.load(sums_ptr + at + under, mask=c < {chunks}, other=0.0).to(tl.float64), axis=0)
    through = tl.sum(tl.load(sums_ptr + at, mask=c < {chunks}, other=0.0).to(tl.float64), axis=0)
    enough = ~(through <= rest)
    ties = tl.sum(equal, axis=0)
    more = keep - tl.sum(above, axis=0)

    tie = (order == limit) & (n < {vocab})
    one = tl.max(tl.where(tie, weight, 0.0), axis=0).to(tl.float64)  # equal scores have equal weights
    fall = tl.where(one > 0, tl.minimum((rest - behind) / one, ties.to(tl.float64)), ties.to(tl.float64)).to(tl.int64)
    fall = tl.minimum(tl.maximum(fall, 0), ties - enough.to(tl.int64))  # by rounding alone not all of them
    fall = tl.where(through != through, 0, fall)
    stay = tl.minimum(tl.maximum({by_weight}, more), ties)
    before = tl.sum(tl.where(c < part, equal, 0), axis=0) + tl.cumsum(tie.to(tl.int32), axis=0) - 1
    stays = (order > limit) | (tie & ({stays}))
    tl.store(out_ptr + row * {vocab} + n, tl.where(stays, score, {_literal(fill)}), mask=n < {vocab})
'''
    return as_program(kernel, Launch("cut", signature, batch * chunks, num_warps=4, num_stages=1))


def _literal(value: float) -> str:
    return f'float("{value}")' if value in (float("inf"), -float("inf")) else repr(float(value))


_narrow = loading(narrow_program)
_totals = loading(totals_program)
_cut = loading(cut_program)
