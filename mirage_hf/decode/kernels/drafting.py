"""The kernels of steps that verify drafts: what a row takes of them, and the next drafts."""

from __future__ import annotations

from functools import lru_cache

from mirage_hf.codegen.kernel_launch import KernelLaunch
from mirage_hf.codegen.optional_triton import tl, triton
from mirage_hf.codegen.schedule import next_power_of_two
from mirage_hf.decode.choosing import NOTHING
from mirage_hf.decode.control import MAX_EOS

#: Tokens of a text that a block of `look_up_kernel` compares at once.
TEXT_BLOCK = 1024


@triton.jit
def accept_kernel(
    picked_ptr,
    ended_ptr,
    tokens_ptr,
    count_ptr,
    ahead_ptr,
    report_ptr,
    text_ptr,
    prompt_ptr,
    budget_ptr,
    alive_ptr,
    eos_ptr,
    overlaps: tl.constexpr,
    TOKENS: tl.constexpr,
    TOKENS_TILE: tl.constexpr,
    EOS_TILE: tl.constexpr,
    ROOM: tl.constexpr,
    NOTHING: tl.constexpr,
):
    """Compute taken = min(first wrong draft + 1, first stop token + 1, left); then move on.

    ahead += taken; tokens[0] = picked[taken − 1]; text gets `picked`; alive; report.
    A block serves a row.

    References: `drafts.accept` does the same with torch.
    """
    if overlaps:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    n = tl.arange(0, TOKENS_TILE)
    inside = n < TOKENS
    picked = tl.load(picked_ptr + row * TOKENS + n, mask=inside, other=0)
    ended = tl.load(ended_ptr + row * TOKENS + n, mask=inside, other=0) != 0
    draft = tl.load(tokens_ptr + row * TOKENS + n + 1, mask=n < TOKENS - 1, other=0)
    count = tl.load(count_ptr + row)
    ahead = tl.load(ahead_ptr + row)
    prompt = tl.load(prompt_ptr)
    left = tl.load(budget_ptr) - ahead
    alive = tl.load(alive_ptr + row) != 0
    eos = tl.load(eos_ptr + tl.arange(0, EOS_TILE))
    first = tl.load(tokens_ptr + row * TOKENS)
    tl.debug_barrier()  # all of the state is read before any of it is written

    is_right = (n < TOKENS - 1) & (n < count) & (draft == picked)
    wrong = tl.min(tl.where(is_right, TOKENS_TILE, n), axis=0).to(tl.int64)
    taken = tl.minimum(wrong + 1, left)
    is_eos = tl.max((picked[:, None] == eos[None, :]).to(tl.int32), axis=1) != 0
    stops = inside & (is_eos | ended)
    stop = tl.min(tl.where(stops, n, TOKENS_TILE), axis=0).to(tl.int64)
    goes_on = alive & (stop >= taken)
    taken = tl.minimum(taken, stop + 1)
    taken = tl.where(alive, taken, 0)
    goes_on = goes_on & (taken < left)

    fed = tl.where(picked == NOTHING, 0, picked)
    tl.store(text_ptr + row * ROOM + prompt + 1 + ahead + n, fed, mask=inside)
    last = tl.sum(tl.where(n == taken - 1, fed, 0), axis=0)
    tl.store(tokens_ptr + row * TOKENS, tl.where(alive, last, first))
    tl.store(ahead_ptr + row, ahead + taken)
    tl.store(alive_ptr + row, goes_on.to(tl.uint8))
    report = report_ptr + row * (TOKENS + 3)
    tl.store(report + n, picked, mask=inside)
    tl.store(report + TOKENS, tl.where(alive, count, 0))
    tl.store(report + TOKENS + 1, taken)
    tl.store(report + TOKENS + 2, goes_on.to(tl.int64))


@triton.jit
def look_up_kernel(
    text_ptr,
    prompt_ptr,
    ahead_ptr,
    lowest_ptr,
    tokens_ptr,
    count_ptr,
    overlaps: tl.constexpr,
    TOKENS: tl.constexpr,
    TOKENS_TILE: tl.constexpr,
    ROOM: tl.constexpr,
    MOST: tl.constexpr,
    LONGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute e = the first place before the last token whose match is longest; draft what follows.

    The match at e is the most n ≤ LONGEST with text[e − n + 1 … e] = text[last − n + 1 … last].
    A block serves a row.

    References: HF's `PromptLookupCandidateGenerator`; `drafts.look_up` does the same with torch.
    """
    if overlaps:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    text = text_ptr + row * ROOM
    lowest = tl.load(lowest_ptr + row)
    last = tl.load(prompt_ptr) + tl.load(ahead_ptr + row)
    at = tl.arange(0, BLOCK)
    best = tl.zeros((BLOCK,), tl.int64)
    for begin in range(0, last, BLOCK):
        place = begin + at
        goes_on = place < last
        same = tl.zeros((BLOCK,), tl.int64)
        for back in range(LONGEST):
            goes_on = goes_on & (place - back >= lowest)
            token = tl.load(text + tl.maximum(last - back, 0))
            earlier = tl.load(text + place - back, mask=goes_on, other=-1)
            goes_on = goes_on & (earlier == token)
            same += goes_on.to(tl.int64)
        # the upper part orders by length, the lower part is greater for earlier places
        best = tl.maximum(best, tl.where(same > 0, same * ROOM + (ROOM - 1 - place), 0))
    most = tl.max(best, axis=0)
    place = ROOM - 1 - most % ROOM
    count = tl.where(most > 0, tl.minimum(last - place, MOST), 0)
    n = tl.arange(0, TOKENS_TILE)
    source = tl.minimum(place + 1 + n, ROOM - 1)
    drafts = tl.load(text + source, mask=n < TOKENS - 1, other=0)
    tl.store(tokens_ptr + row * TOKENS + 1 + n, drafts, mask=n < TOKENS - 1)
    tl.store(count_ptr + row, count)


@lru_cache(maxsize=256)
def accept_launch(batch: int, tokens: int, room: int) -> KernelLaunch:
    """Return the launch of `accept_kernel` for a batch, and a text with so much room."""
    constants = {
        "TOKENS": tokens,
        "TOKENS_TILE": next_power_of_two(tokens),
        "EOS_TILE": MAX_EOS,
        "ROOM": room,
        "NOTHING": NOTHING,
    }
    return KernelLaunch(accept_kernel, batch, constants)


@lru_cache(maxsize=256)
def look_up_launch(batch: int, tokens: int, room: int, most: int, longest: int) -> KernelLaunch:
    """Return the launch of `look_up_kernel`, for at most `most` drafts of matches of `longest`."""
    constants = {
        "TOKENS": tokens,
        "TOKENS_TILE": next_power_of_two(tokens),
        "ROOM": room,
        "MOST": most,
        "LONGEST": longest,
        "BLOCK": TEXT_BLOCK,
    }
    return KernelLaunch(look_up_kernel, batch, constants)
