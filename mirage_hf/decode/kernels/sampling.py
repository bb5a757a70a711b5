"""The kernels that end a decoding step: from logits to the next token and the state after it."""

from __future__ import annotations

from functools import lru_cache

from mirage_hf.codegen.kernel_launch import KernelLaunch
from mirage_hf.codegen.optional_triton import tl, triton
from mirage_hf.codegen.schedule import next_power_of_two
from mirage_hf.decode.choosing import NOTHING
from mirage_hf.decode.control import MAX_EOS
from mirage_hf.decode.kernels.total_order import total_order

#: Logits of a row that a block of `argmax_kernel` compares at least. 2048 were 0.5 µs faster than
#: 1024 after a language-model head (H200).
MIN_ARGMAX_BLOCK = 2048
#: From this size on blocks of `argmax_kernel` grow only if there are more than MAX_PARTIALS.
LONG_ARGMAX_BLOCK = 8192
#: How many partial results the last block of `argmax_kernel` should compare, and how many it can.
#: With 600 to 1000 blocks a launch took 1 to 2 µs longer (H200).
FEW_PARTIALS, MAX_PARTIALS = 512, 4096
#: Scores of a row that a block of `sample_kernel` adds up: 16 bytes a thread of 16-bit numbers.
SAMPLE_BLOCK = 1024

assert MAX_EOS & MAX_EOS - 1 == 0, "the kernels read all stop tokens as one tile"


# -- kernels ---------------------------------------------------------------------------------------


@triton.jit
def argmax_kernel(
    logits_ptr,
    ids_ptr,
    position_ptr,
    length_ptr,
    budget_ptr,
    alive_ptr,
    eos_ptr,
    pad_ptr,
    report_ptr,
    best_ptr,
    counter_ptr,
    token_ptr,
    overlaps: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    VOCAB: tl.constexpr,
    EOS_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_TILE: tl.constexpr,
    ADVANCES: tl.constexpr,
):
    """Compute token = argmax(logits), the lowest index of equal logits; then `_advance`.

    Without ADVANCES the tokens are only stored, and the state is neither read nor written.

    A row has BLOCKS blocks. The last block of all rows to arrive compares their results, moves the
    state on and leaves the counter at 0, as it was.

    References: `torch.argmax`; `choose_greedily` does the same with torch.
    """
    if overlaps:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) // BLOCKS
    n = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * VOCAB + n, mask=n < VOCAB, other=-float("inf"))

    # Every block reads the state although one uses it: here its latency is hidden, and no block
    # writes before all have read.
    m = tl.arange(0, ROWS_TILE)
    if ADVANCES:
        alive = tl.load(alive_ptr + m, mask=m < ROWS, other=0) != 0
        position = tl.load(position_ptr + m, mask=m < ROWS, other=0)
        eos = tl.load(eos_ptr + tl.arange(0, EOS_TILE))
        length = tl.load(length_ptr)
        budget = tl.load(budget_ptr)
        pad = tl.load(pad_ptr)

    # the upper half orders by logit, the lower half is greater for lower indices
    key = total_order(x)
    tl.store(
        best_ptr + tl.program_id(0), tl.max((key.to(tl.int64) << 32) + (0x7FFFFFFF - n), axis=0)
    )
    tl.debug_barrier()  # the result is stored before one thread says so
    arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    if arrived == ROWS * BLOCKS - 1:
        tl.store(counter_ptr, 0)  # for the next launch
        c = tl.arange(0, BLOCKS_TILE)
        inside = (m < ROWS)[:, None] & (c < BLOCKS)[None, :]
        each = tl.load(
            best_ptr + m[:, None] * BLOCKS + c[None, :],
            mask=inside,
            other=-(1 << 63),
            cache_modifier=".cg",
        )
        index = 0x7FFFFFFF - (tl.max(each, axis=1) & 0x7FFFFFFF)
        if ADVANCES:
            token = tl.where(alive, index, pad)
            _advance(
                token,
                token,
                alive,
                alive,
                position,
                eos,
                length,
                budget,
                m,
                ids_ptr,
                position_ptr,
                length_ptr,
                budget_ptr,
                alive_ptr,
                report_ptr,
                ROWS,
            )
        else:
            tl.store(token_ptr + m, index, mask=m < ROWS)


@triton.jit
def sample_kernel(
    scores_ptr,
    numbers_ptr,
    greatest_ptr,
    weight_ptr,
    token_ptr,
    arrived_ptr,
    overlaps: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_TILE: tl.constexpr,
    NOTHING: tl.constexpr,
):
    """Compute token = min {t : Σ_{i ≤ t} p[i] > number · Σ_i p[i]}, p = softmax(scores).

    It is NOTHING if the sum is 0 or NaN.

    A row has BLOCKS blocks. Each stores its greatest score and its sum of exponentials. The last
    block to finish finds the block in which the sum is exceeded, and then the token in that block.
    It leaves the row's counter at 0. Sums are taken in float64 and in a fixed order, so the same
    scores and numbers give the same tokens.

    References: inverse transform sampling; `choosing.draw` does the same with torch.
    """
    if overlaps:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) // BLOCKS
    at = tl.arange(0, BLOCK)
    n = tl.program_id(0) % BLOCKS * BLOCK + at
    x = tl.load(scores_ptr + row * VOCAB + n, mask=n < VOCAB, other=-float("inf"))
    number = tl.load(numbers_ptr + row)
    greatest = tl.max(x, axis=0)
    shift = tl.where(greatest == -float("inf"), 0.0, greatest)  # -inf minus -inf would be NaN
    tl.store(greatest_ptr + tl.program_id(0), greatest)
    tl.store(weight_ptr + tl.program_id(0), tl.sum(tl.exp(x - shift).to(tl.float64), axis=0))
    tl.debug_barrier()  # the results are stored before one thread says so
    arrived = tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel", scope="gpu")
    if arrived == BLOCKS - 1:
        tl.store(arrived_ptr + row, 0)  # for the next launch
        c = tl.arange(0, BLOCKS_TILE)
        tops = tl.load(
            greatest_ptr + row * BLOCKS + c,
            mask=c < BLOCKS,
            other=-float("inf"),
            cache_modifier=".cg",
        )
        weights = tl.load(
            weight_ptr + row * BLOCKS + c, mask=c < BLOCKS, other=0.0, cache_modifier=".cg"
        )
        top = tl.max(tops, axis=0)
        top = tl.where(top == -float("inf"), 0.0, top)
        shares = weights * tl.exp(tops - top).to(tl.float64)
        total = tl.sum(shares, axis=0)
        sums = tl.cumsum(shares, axis=0)
        exceeds = (sums > number * total) & (shares > 0)
        part = tl.min(tl.where(exceeds, c, BLOCKS_TILE), axis=0)
        one = c == part
        before = tl.sum(tl.where(one, sums - shares, 0.0), axis=0)
        shift = tl.max(tl.where(one, tops, -float("inf")), axis=0)

        n = part * BLOCK + at
        y = tl.load(scores_ptr + row * VOCAB + n, mask=n < VOCAB, other=-float("inf"))
        y = tl.where(n < VOCAB, tl.exp(y - shift), 0.0).to(tl.float64)
        rest = (number * total - before) / tl.exp(shift - top).to(tl.float64)
        first = tl.min(tl.where((tl.cumsum(y, axis=0) > rest) & (y > 0), n, VOCAB), axis=0)
        # where rounding puts the number beyond its block
        last = tl.max(tl.where(y > 0, n, -1), axis=0)
        token = tl.where(first < VOCAB, first, last).to(tl.int64)
        tl.store(token_ptr + row, tl.where(total > 0, token, NOTHING))


@triton.jit
def advance_kernel(
    token_ptr,
    ended_ptr,
    ids_ptr,
    position_ptr,
    length_ptr,
    budget_ptr,
    alive_ptr,
    eos_ptr,
    report_ptr,
    overlaps: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    EOS_TILE: tl.constexpr,
    NOTHING: tl.constexpr,
):
    """Run `_advance` for tokens that are chosen already.

    NOTHING is reported, and token 0 is fed in its place.

    References: `choosing.settle` does the same with torch.
    """
    if overlaps:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    m = tl.arange(0, ROWS_TILE)
    alive = tl.load(alive_ptr + m, mask=m < ROWS, other=0) != 0
    position = tl.load(position_ptr + m, mask=m < ROWS, other=0)
    eos = tl.load(eos_ptr + tl.arange(0, EOS_TILE))
    length = tl.load(length_ptr)
    budget = tl.load(budget_ptr)
    token = tl.load(token_ptr + m, mask=m < ROWS, other=0)
    ended = tl.load(ended_ptr + m, mask=m < ROWS, other=0)
    tl.debug_barrier()  # all of the state is read before any of it is written
    fed = tl.where(token == NOTHING, 0, token)
    _advance(
        token,
        fed,
        alive,
        alive & (ended == 0),
        position,
        eos,
        length,
        budget,
        m,
        ids_ptr,
        position_ptr,
        length_ptr,
        budget_ptr,
        alive_ptr,
        report_ptr,
        ROWS,
    )


@triton.jit
def _advance(
    token,
    fed,
    alive,
    may_go_on,
    position,
    eos,
    length,
    budget,
    m,
    ids_ptr,
    position_ptr,
    length_ptr,
    budget_ptr,
    alive_ptr,
    report_ptr,
    ROWS: tl.constexpr,
):
    """Compute length, position += 1; budget −= 1; ids = fed; alive; report = (token, alive).

    alive = may_go_on ∧ token ∉ eos ∧ budget > 0. If no row is alive only `alive` and `report`
    are written.
    """
    live = tl.max(alive.to(tl.int32), axis=0)
    left = budget - live
    stops = tl.max((token[:, None] == eos[None, :]).to(tl.int32), axis=1)
    goes_on = may_go_on & (stops == 0) & (left > 0)
    moves = live != 0  # a step that finds no row alive leaves the rest as it is
    tl.store(length_ptr, length + live, mask=moves)
    tl.store(budget_ptr, left, mask=moves)
    tl.store(position_ptr + m, position + live, mask=(m < ROWS) & moves)
    tl.store(ids_ptr + m, fed, mask=(m < ROWS) & moves)
    tl.store(alive_ptr + m, goes_on.to(tl.uint8), mask=m < ROWS)
    tl.store(report_ptr + m, token, mask=m < ROWS)
    tl.store(report_ptr + ROWS + m, goes_on.to(tl.int64), mask=m < ROWS)


# -- launches --------------------------------------------------------------------------------------


def argmax_block(batch: int, vocab: int) -> int:
    """Return how many logits of a row a block compares: as few as the limits on blocks allow."""
    block = MIN_ARGMAX_BLOCK
    while next_power_of_two(batch) * next_power_of_two(-(-vocab // block)) > (
        FEW_PARTIALS if block < LONG_ARGMAX_BLOCK else MAX_PARTIALS
    ):
        block *= 2
    return block


@lru_cache(maxsize=256)
def argmax_launch(batch: int, vocab: int, *, advances: bool = True) -> KernelLaunch:
    """Return the launch of `argmax_kernel` for (batch, vocab) logits."""
    block = argmax_block(batch, vocab)
    blocks = -(-vocab // block)
    constants = {
        "ROWS": batch,
        "ROWS_TILE": next_power_of_two(batch),
        "VOCAB": vocab,
        "EOS_TILE": MAX_EOS,
        "BLOCK": block,
        "BLOCKS": blocks,
        "BLOCKS_TILE": next_power_of_two(blocks),
        "ADVANCES": advances,
    }
    return KernelLaunch(argmax_kernel, batch * blocks, constants, num_warps=8)


@lru_cache(maxsize=256)
def sample_launch(batch: int, vocab: int) -> KernelLaunch:
    """Return the launch of `sample_kernel` for (batch, vocab) scores."""
    blocks = -(-vocab // SAMPLE_BLOCK)
    constants = {
        "VOCAB": vocab,
        "BLOCK": SAMPLE_BLOCK,
        "BLOCKS": blocks,
        "BLOCKS_TILE": next_power_of_two(blocks),
        "NOTHING": NOTHING,
    }
    return KernelLaunch(sample_kernel, batch * blocks, constants)


@lru_cache(maxsize=256)
def advance_launch(batch: int) -> KernelLaunch:
    """Return the launch of `advance_kernel` for a batch."""
    constants = {
        "ROWS": batch,
        "ROWS_TILE": next_power_of_two(batch),
        "EOS_TILE": MAX_EOS,
        "NOTHING": NOTHING,
    }
    return KernelLaunch(advance_kernel, 1, constants)
