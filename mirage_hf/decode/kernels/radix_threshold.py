"""Top-k and top-p by radix search: which scores of a row stay, found without sorting.

A row's threshold is the least score that stays. It is searched among all float32 numbers, taken as
integers of the same order (`total_order`). A launch is one round, which finds ROUND_BITS bits.

In each round every block of a row compares its scores with 2 ** ROUND_BITS candidate thresholds at
once. For each candidate it counts the scores above, and adds the weights of the other scores. The
last block to arrive adds up the blocks' results. It takes the first candidate at which a score
would stay.

Sums are taken in a fixed order, so the same scores always give the same threshold.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from mirage_hf import errors
from mirage_hf.codegen.kernel_launch import KernelLaunch, launch
from mirage_hf.codegen.optional_triton import HAS_TRITON, tl, triton
from mirage_hf.codegen.schedule import next_power_of_two
from mirage_hf.decode.kernels.sizes import MAX_ROWS, MAX_VOCAB
from mirage_hf.decode.kernels.total_order import total_order

#: Bits of the threshold that a launch finds.
ROUND_BITS = 5
#: Candidate thresholds that are compared with every score at once.
CANDIDATES = 1 << ROUND_BITS
ROUNDS = -(-32 // ROUND_BITS)
assert 32 % ROUND_BITS, "the last round needs a candidate to spare for the number below its range"
#: Scores that are compared with the candidates at once.
TILE = 256
#: Blocks of a row whose results its last block adds up.
MAX_BLOCKS = 256
MIN_BLOCK = 1024

#: Columns of the int64 row state, all 0 at the start. Column 0 is the threshold so far, as an
#: offset from INT32_MIN.
ROUNDS_DONE = tl.constexpr(1)
#: Blocks that are done in this round.
ARRIVED = tl.constexpr(2)
#: The candidate that the last round chose.
CHOSEN = tl.constexpr(3)
STATE_COLUMNS = 4
STATE = tl.constexpr(STATE_COLUMNS)


# -- kernels ---------------------------------------------------------------------------------------


@triton.jit
def radix_round_kernel(
    ranking_ptr,
    weights_ptr,
    removable_ptr,
    keep_ptr,
    state_ptr,
    counts_ptr,
    sums_ptr,
    threshold_ptr,
    overlaps: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_TILE: tl.constexpr,
    TILE: tl.constexpr,
    BITS: tl.constexpr,
    WEIGHED: tl.constexpr,
):
    """Compute threshold = min {t : |{key > t}| < keep or Σ_{key ≤ t} weight > removable}.

    key = total_order(ranking). A launch computes BITS more bits of the threshold. Without WEIGHED
    only the number of scores counts.

    References: radix select, as in `torch.topk` on CUDA (Alabi et al., Fast k-selection algorithms
    for graphics processing units, 2012), here with sums of weights beside the counts.
    """
    if overlaps:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) // BLOCKS
    part = tl.program_id(0) % BLOCKS
    j = tl.arange(0, 1 << BITS)
    so_far = tl.load(state_ptr + row * STATE)
    done = tl.load(state_ptr + row * STATE + ROUNDS_DONE)
    keep = tl.load(keep_ptr)
    shift = tl.maximum(32 - BITS - BITS * done, 0)
    # the last round begins one number earlier, so that it has counts on both sides of the threshold
    below = (shift == 0).to(tl.int64)
    candidates = so_far + ((j + 1).to(tl.int64) << shift) - 1 - below - (1 << 31)
    candidates = tl.minimum(tl.maximum(candidates, -(1 << 31)), (1 << 31) - 1).to(tl.int32)
    counts = tl.zeros([TILE, 1 << BITS], tl.int32)
    if WEIGHED:
        removable = tl.load(removable_ptr).to(tl.float64)
        sums = tl.zeros([TILE, 1 << BITS], tl.float32)
    for at in tl.static_range(0, BLOCK, TILE):
        n = part * BLOCK + at + tl.arange(0, TILE)
        x = tl.load(ranking_ptr + row * VOCAB + n, mask=n < VOCAB, other=0.0)
        above = (total_order(x)[:, None] > candidates[None, :]) & (n < VOCAB)[:, None]
        counts += above.to(tl.int32)
        if WEIGHED:
            weight = tl.load(weights_ptr + row * VOCAB + n, mask=n < VOCAB, other=0.0)
            sums += tl.where(above, 0.0, weight[:, None])
    tl.store(counts_ptr + tl.program_id(0) * (1 << BITS) + j, tl.sum(counts, axis=0))
    if WEIGHED:
        tl.store(sums_ptr + tl.program_id(0) * (1 << BITS) + j, tl.sum(sums, axis=0))
    tl.debug_barrier()  # the results are stored before one thread says so
    arrived = tl.atomic_add(state_ptr + row * STATE + ARRIVED, 1, sem="acq_rel", scope="gpu")
    if arrived == BLOCKS - 1:
        c = tl.arange(0, BLOCKS_TILE)
        results = (row * BLOCKS + c)[:, None] * (1 << BITS) + j[None, :]
        inside = (c < BLOCKS)[:, None] & (j >= 0)[None, :]
        counted = tl.sum(
            tl.load(counts_ptr + results, mask=inside, other=0, cache_modifier=".cg"), axis=0
        )
        stays = counted < keep
        if WEIGHED:
            each = tl.load(sums_ptr + results, mask=inside, other=0.0, cache_modifier=".cg")
            summed = tl.sum(each.to(tl.float64), axis=0)
            stays = stays | ~(summed <= removable)  # a NaN, too, lets all scores stay
        chosen = tl.min(tl.where(stays, j, (1 << BITS) - 1), axis=0)
        threshold = so_far + (chosen.to(tl.int64) << shift) - below
        tl.store(state_ptr + row * STATE, threshold)
        tl.store(state_ptr + row * STATE + ROUNDS_DONE, done + 1)
        tl.store(state_ptr + row * STATE + ARRIVED, tl.zeros_like(threshold))
        tl.store(state_ptr + row * STATE + CHOSEN, chosen.to(tl.int64))
        # back from an integer to the number; below -inf there is none
        key = tl.maximum(threshold - (1 << 31), -0x7F800000)
        bits = tl.where(key < 0, (1 << 31) - key, key).to(tl.uint32)
        tl.store(threshold_ptr + row, bits.to(tl.float32, bitcast=True))


@triton.jit
def softmax_totals_kernel(
    scores_ptr,
    tops_ptr,
    sums_ptr,
    arrived_ptr,
    greatest_ptr,
    total_ptr,
    overlaps: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_TILE: tl.constexpr,
):
    """Compute greatest = max(scores); total = Σ exp(scores − greatest).

    If the greatest score is −inf, total is 0.

    A row has BLOCKS blocks; the last block of a row to arrive joins their results.

    References: online softmax (Milakov and Gimelshein, 2018).
    """
    if overlaps:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) // BLOCKS
    n = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(scores_ptr + row * VOCAB + n, mask=n < VOCAB, other=-float("inf"))
    top = tl.max(x, axis=0)
    shift = tl.where(top == -float("inf"), 0.0, top)  # -inf minus -inf would be NaN
    tl.store(tops_ptr + tl.program_id(0), top)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(tl.exp(x - shift), axis=0))
    tl.debug_barrier()  # the results are stored before one thread says so
    arrived = tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel", scope="gpu")
    if arrived == BLOCKS - 1:
        c = tl.arange(0, BLOCKS_TILE)
        tops = tl.load(
            tops_ptr + row * BLOCKS + c, mask=c < BLOCKS, other=-float("inf"), cache_modifier=".cg"
        )
        sums = tl.load(
            sums_ptr + row * BLOCKS + c, mask=c < BLOCKS, other=0.0, cache_modifier=".cg"
        ).to(tl.float64)
        greatest = tl.max(tops, axis=0)
        shift = tl.where(greatest == -float("inf"), 0.0, greatest)
        total = tl.sum(sums * tl.exp(tops - shift).to(tl.float64), axis=0)
        tl.store(greatest_ptr + row, greatest)
        tl.store(total_ptr + row, total.to(tl.float32))


@triton.jit
def mask_kernel(
    scores_ptr,
    ranking_ptr,
    weights_ptr,
    removable_ptr,
    keep_ptr,
    state_ptr,
    counts_ptr,
    sums_ptr,
    out_ptr,
    overlaps: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_TILE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    FILL: tl.constexpr,
    LOWEST_INDEX_FIRST: tl.constexpr,
):
    """Compute out = scores if key > threshold or a tie at the threshold stays, else FILL.

    Runs after the last round, whose counts and sums are those at the threshold and at the number
    below it. `mask_scores` says which of equal scores stay.

    References: as `radix_round_kernel`.
    """
    if overlaps:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) // BLOCKS
    part = tl.program_id(0) % BLOCKS
    n = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(ranking_ptr + row * VOCAB + n, mask=n < VOCAB, other=0.0)
    score = tl.load(scores_ptr + row * VOCAB + n, mask=n < VOCAB, other=0.0)
    weight = tl.load(weights_ptr + row * VOCAB + n, mask=n < VOCAB, other=0.0)
    threshold = tl.load(state_ptr + row * STATE) - (1 << 31)
    chosen = tl.load(state_ptr + row * STATE + CHOSEN)
    keep = tl.load(keep_ptr)
    removable = tl.load(removable_ptr).to(tl.float64)
    key = total_order(x)

    # the results of all blocks of the row at the threshold and at the number below it
    c = tl.arange(0, BLOCKS_TILE)
    at = (row * BLOCKS + c) * CANDIDATES + chosen
    under = tl.maximum(chosen, 1) - chosen - 1 + 0 * c
    above = tl.load(counts_ptr + at, mask=c < BLOCKS, other=0)
    equal = tl.load(counts_ptr + at + under, mask=c < BLOCKS, other=0) - above
    sums_under = tl.load(sums_ptr + at + under, mask=c < BLOCKS, other=0.0).to(tl.float64)
    behind = tl.sum(sums_under, axis=0)
    sums_through = tl.load(sums_ptr + at, mask=c < BLOCKS, other=0.0).to(tl.float64)
    through = tl.sum(sums_through, axis=0)
    enough = ~(through <= removable)
    ties = tl.sum(equal, axis=0)
    more = keep - tl.sum(above, axis=0)

    # of the ties, `fall` are removed by their weights, except that rounding never removes all
    tie = (key == threshold) & (n < VOCAB)
    one = tl.max(tl.where(tie, weight, 0.0), axis=0).to(tl.float64)  # ties have equal weights
    removed_first = tl.minimum((removable - behind) / one, ties.to(tl.float64))
    fall = tl.where(one > 0, removed_first, ties.to(tl.float64)).to(tl.int64)
    fall = tl.minimum(tl.maximum(fall, 0), ties - enough.to(tl.int64))
    fall = tl.where(through != through, 0, fall)
    by_weight = tl.where(enough, ties, 0) if LOWEST_INDEX_FIRST else ties - fall
    stay = tl.minimum(tl.maximum(by_weight, more), ties)
    before = tl.sum(tl.where(c < part, equal, 0), axis=0) + tl.cumsum(tie.to(tl.int32), axis=0) - 1
    if LOWEST_INDEX_FIRST:
        stays = (key > threshold) | (tie & (before < stay))
    else:
        stays = (key > threshold) | (tie & (before >= ties - stay))
    tl.store(out_ptr + row * VOCAB + n, tl.where(stays, score, FILL), mask=n < VOCAB)


# -- launches --------------------------------------------------------------------------------------


def _block(vocab: int) -> int:
    """Return how many scores of a row a block takes."""
    return max(MIN_BLOCK, next_power_of_two(-(-vocab // MAX_BLOCKS)))


def _blocks(vocab: int) -> int:
    """Return how many blocks a row has."""
    return -(-vocab // _block(vocab))


def _row_constants(vocab: int) -> dict[str, int]:
    blocks = _blocks(vocab)
    return {
        "VOCAB": vocab,
        "BLOCK": _block(vocab),
        "BLOCKS": blocks,
        "BLOCKS_TILE": next_power_of_two(blocks),
    }


@lru_cache(maxsize=256)
def radix_round_launch(batch: int, vocab: int, weighed: bool) -> KernelLaunch:
    """Return the launch of one round. `weighed`: by weights too, otherwise by number alone."""
    constants = {**_row_constants(vocab), "TILE": TILE, "BITS": ROUND_BITS, "WEIGHED": weighed}
    return KernelLaunch(radix_round_kernel, batch * _blocks(vocab), constants)


@lru_cache(maxsize=256)
def softmax_totals_launch(batch: int, vocab: int) -> KernelLaunch:
    """Return the launch of `softmax_totals_kernel` for (batch, vocab) scores."""
    return KernelLaunch(softmax_totals_kernel, batch * _blocks(vocab), _row_constants(vocab))


@lru_cache(maxsize=256)
def mask_launch(batch: int, vocab: int, fill: float, lowest_index_first: bool) -> KernelLaunch:
    """Return the launch of `mask_kernel` for (batch, vocab) scores."""
    constants = {
        **_row_constants(vocab),
        "CANDIDATES": CANDIDATES,
        "FILL": float(fill),
        "LOWEST_INDEX_FIRST": lowest_index_first,
    }
    return KernelLaunch(mask_kernel, batch * _blocks(vocab), constants)


# -- what processors call --------------------------------------------------------------------------


def fits(scores: Tensor) -> bool:
    """Return whether there are kernels for (batch, vocab) scores on their device."""
    return (
        scores.device.type == "cuda"
        and scores.shape[0] <= MAX_ROWS
        and scores.shape[1] <= MAX_VOCAB
        and HAS_TRITON
    )


def kth_greatest(scores: Tensor, k: Tensor) -> Tensor:
    """Return the `k`-th greatest score of each row, -inf if a row has fewer. NaN is above all.

    Args:
        scores: (batch, vocab) float32.
        k: (1,) int64.

    Returns:
        (batch, 1) float32.

    Raises:
        InputError: The scores do not fit.
    """
    return _search(scores, k).threshold


def softmax_totals(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's greatest score and the sum of exp(score - greatest), as softmax needs them.

    torch gives a row to one block. These kernels give it to many.

    Args:
        scores: (batch, vocab) float32.

    Returns:
        Two (batch, 1) float32 tensors.

    Raises:
        InputError: The scores do not fit.
    """
    _check("scores", scores, scores)
    batch, vocab = scores.shape
    device = scores.device

    def column(rows: int) -> Tensor:
        return torch.empty(rows, 1, dtype=torch.float32, device=device)

    blocks = batch * _blocks(vocab)
    tops, sums, greatest, total = column(blocks), column(blocks), column(batch), column(batch)
    arrived = torch.zeros(batch, dtype=torch.int32, device=device)
    launch(softmax_totals_launch(batch, vocab), [scores, tops, sums, arrived, greatest, total])
    return greatest, total


def mask_scores(
    scores: Tensor,
    ranking: Tensor,
    weights: Tensor,
    removable: Tensor,
    keep: Tensor,
    fill: float,
    *,
    lowest_index_first: bool,
) -> Tensor:
    """Return the scores with `fill` in place of those that do not stay.

    A score stays in three cases:

    - It is among the first `keep` scores of the ranking.
    - Its weight and the weights of all scores after it add up to more than `removable`.
    - One of the weights of the scores that are equal to it or come after it is a NaN.

    Args:
        scores: (batch, vocab) float32.
        ranking: (batch, vocab) float32: the order of the scores, greatest first.
        weights: (batch, vocab) float32: weight of each score, equal for equal rankings.
        removable: (1,) float32.
        keep: (1,) int64.
        fill: What takes the place of removed scores.
        lowest_index_first: Among equal rankings the lowest index comes first, and weights let them
            stay or go together. Otherwise the highest index comes first, and they go one by one.

    Raises:
        InputError: A tensor does not fit.
    """
    found = _search(ranking, keep, weights, removable)
    _check("scores", scores, ranking)
    out = torch.empty_like(scores)
    batch, vocab = scores.shape
    launch(
        mask_launch(batch, vocab, fill, lowest_index_first),
        [
            scores,
            ranking,
            weights,
            removable,
            keep,
            found.state,
            found.counts,
            found.sums,
            out,
        ],
    )
    return out


@dataclass(frozen=True, eq=False)
class _Search:
    """The results of a search.

    Attributes:
        state: (batch, STATE_COLUMNS) int64, after the last round.
        counts: (blocks, CANDIDATES) int32: results of the last round.
        sums: (blocks, CANDIDATES) float32, or a stand-in if there are no weights.
        threshold: (batch, 1) float32.
    """

    state: Tensor
    counts: Tensor
    sums: Tensor
    threshold: Tensor


def _search(
    ranking: Tensor,
    keep: Tensor,
    weights: Tensor | None = None,
    removable: Tensor | None = None,
) -> _Search:
    """Search the thresholds of all rows, by weights if they are given."""
    _check("ranking", ranking, ranking)
    _check_number("keep", keep, torch.int64, ranking.device)
    batch, vocab = ranking.shape
    blocks, device = batch * _blocks(vocab), ranking.device
    threshold = torch.empty(batch, 1, dtype=torch.float32, device=device)
    weighed = weights is not None and removable is not None
    if weights is not None and removable is not None:
        _check("weights", weights, ranking)
        _check_number("removable", removable, torch.float32, device)
        sums = torch.empty(blocks, CANDIDATES, dtype=torch.float32, device=device)
    else:  # the kernel does not touch these
        weights, removable, sums = ranking, threshold, threshold
    found = _Search(
        state=torch.zeros(batch, STATE_COLUMNS, dtype=torch.int64, device=device),
        counts=torch.empty(blocks, CANDIDATES, dtype=torch.int32, device=device),
        sums=sums,
        threshold=threshold,
    )
    what = radix_round_launch(batch, vocab, weighed)
    tensors = [
        ranking,
        weights,
        removable,
        keep,
        found.state,
        found.counts,
        found.sums,
        found.threshold,
    ]
    for _ in range(ROUNDS):
        launch(what, tensors)
    return found


def _check_number(name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    if tensor.numel() != 1 or tensor.dtype != dtype or tensor.device != device:
        raise errors.InputError(
            f"decode: {name} is {tensor.dtype} {errors.shape(tensor.shape)} on {tensor.device}; "
            f"it must be one {dtype} on {device}"
        )


def _check(name: str, tensor: Tensor, like: Tensor) -> None:
    if (
        tensor.dim() != 2
        or tensor.shape != like.shape
        or tensor.dtype != torch.float32
        or tensor.device != like.device
        or not tensor.is_contiguous()
        or not (0 < tensor.shape[0] <= MAX_ROWS and 0 < tensor.shape[1] <= MAX_VOCAB)
    ):
        raise errors.InputError(
            f"decode: {name} is {tensor.dtype} {errors.shape(tensor.shape)}, "
            f"strides {errors.shape(tensor.stride())}, on {tensor.device}; it must be float32 and "
            f"contiguous, of 1 to {MAX_ROWS} rows and 1 to {MAX_VOCAB} columns, like the others"
        )
