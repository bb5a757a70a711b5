"""Checks of caches in rings, one function for each thing that can go wrong.

They run on a CPU and on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from mirage_hf.decode import prompts as bucketed
from mirage_hf.decode import rings as ring_slots
from tests.helpers.generate_comparison import (
    FULL,
    PAD,
    Recorder,
    assert_same,
    assert_same_cache,
    prompt,
)
from tests.helpers.generate_features import Pair


@dataclass
class Rings:
    """A stock model and ours, in which the layers named by `sliding` use rings.

    Their window is `window` keys, and each ring has `slots` slots.
    """

    pair: Pair
    window: int
    slots: int
    sliding: tuple[bool, ...]

    def agree(
        self, given: dict[str, Any] | Callable[[], dict[str, Any]], tokens: int, **more: Any
    ) -> Any:
        """Return our output after comparing it with stock's.

        If the tokens must be the same, the returned caches are compared too.
        """

        def arguments() -> dict[str, Any]:
            return {
                **(given() if callable(given) else given),
                **FULL,
                "do_sample": False,
                "max_new_tokens": tokens,
                **more,
            }

        return self.pair.agree(arguments)

    def check(self) -> None:
        """Assert that every call ran as expected and that the last block has rings.

        The text in that block is longer than a ring.
        """
        self.pair.check_counts()
        block = self.pair.runner.pool._idle[-1]
        held = tuple(block.keys[i].shape[2] for i in range(len(self.sliding)))
        assert (
            held == tuple(self.slots if slides else block.capacity for slides in self.sliding)
            and block.capacity > self.slots
        ), held


def padded(lengths: Sequence[int], seed: int = 0) -> dict[str, torch.Tensor]:
    ids = prompt(len(lengths), max(lengths), seed)
    mask = (torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": torch.where(mask == 1, ids, PAD), "attention_mask": mask}


Check = Callable[[Rings], None]
CHECKS: dict[str, Check] = {}


def check(f: Check) -> Check:
    CHECKS[f.__name__] = f
    return f


@check
def prompts_shorter_and_longer_than_the_window(r: Rings) -> None:
    for length in (1, r.window - 2, r.window - 1, r.window, r.window + 1, 3 * r.window + 2):
        r.agree({"inputs": prompt(1, length, seed=length)}, 2 * r.window + 3)


@check
def prompts_that_are_replayed(r: Rings) -> None:
    """Replay prompts that fill a window, which is more than a ring has at first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucketed, "GRAIN", r.window // 3)
        for less in (r.window // 3 + 2, r.window // 3, 0, 0, 1, r.window // 3 + 1):
            r.agree({"inputs": prompt(1, r.window - less, seed=less)}, r.slots)


@check
def left_padding(r: Rings) -> None:
    """Pad on the left.

    Each row wraps around at another time, and the returned cache has padding.
    """
    w = r.window
    for lengths in ((1, w - 3, w // 2), (w - 1, 2, w), (1, 2 * w + 1, w + 2)):
        r.agree(padded(lengths), 2 * w + 3)
        r.agree(padded(lengths), r.slots, eos_token_id=list(range(3, 90)))


@check
def steps_that_find_no_row_alive(r: Rings) -> None:
    """Run steps after the last token. They must leave no trace in the returned cache.

    The warm-up before a capture runs such steps too.
    """
    r.pair.runner.release()
    for given in ({"inputs": prompt(3, r.slots, seed=1)}, padded((r.window - 2, 1, r.slots))):
        for eos in (list(range(3, 20)), list(range(3, 90))):
            r.agree(given, r.window + 5, eos_token_id=eos)


@check
def caches_passed_in(r: Rings) -> None:
    for given in ({"input_ids": prompt(1, r.slots)}, padded((2, r.slots, r.window))):
        used: list[DynamicCache] = []

        def first(used: list[DynamicCache] = used, given: dict[str, Any] = given) -> dict[str, Any]:
            used.append(DynamicCache(config=r.pair.stock.config))
            return {**given, "past_key_values": used[-1]}

        text = r.agree(first, r.window + 2).sequences
        if r.pair.half:
            continue  # after texts differ, so do the caches
        mask = given.get("attention_mask", torch.ones_like(given["input_ids"]))
        for more in (1, r.window + 3):  # the whole text and some more tokens
            assert_same_cache(*used, mask=mask)
            again, text = (
                iter(used),
                torch.cat([text, prompt(len(text), more, seed=more).to(text)], -1),
            )
            mask = torch.cat([mask, mask.new_ones(len(mask), text.shape[1] - mask.shape[1])], -1)
            text = r.agree(
                lambda again=again, text=text, mask=mask: {
                    "input_ids": text,
                    "attention_mask": mask,
                    "past_key_values": next(again),
                },
                r.window,
            ).sequences
        assert_same_cache(*used, mask=mask)


@check
def caches_that_keep_everything(r: Rings) -> None:
    """Use a cache made without a config. It has no windows, and must be returned so."""
    used: list[DynamicCache] = []

    def given() -> dict[str, Any]:
        used.append(DynamicCache())
        return {"inputs": prompt(1, r.slots), "past_key_values": used[-1]}

    r.agree(given, r.window)
    assert r.pair.half or used[1].layers[0].keys.shape[2] == r.slots + r.window - 1
    r.agree({"inputs": prompt(1, r.slots)}, r.window)


@check
def blocks_that_grow(r: Rings) -> None:
    """Grow blocks from full-length layers to rings, and from rings to rings.

    If all layers slide, no layer needs to grow.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mirage_hf.decode.call_plan.FIRST_REACH", 3)
        length = r.slots - 5
        for given in ({"inputs": prompt(1, length)}, padded((length, 1, r.window // 2))):
            r.pair.runner.release()
            text = r.agree(given, r.slots + 9).sequences
            capacities = sorted(capacity for _, capacity in r.pair.runner.pool.blocks)
            assert capacities == (
                [3 * r.slots] if all(r.sliding) else [r.slots, 2 * r.slots, 3 * r.slots]
            ), capacities
            for last in (3, 4):  # steps ahead of the host find no row alive when the block grows
                r.agree(
                    given, r.slots + 9, eos_token_id=sorted(set(text[:, length + last].tolist()))
                )


@check
def what_an_earlier_call_left_behind(r: Rings) -> None:
    for given in (padded((r.slots + 2, 2, r.window)), {"inputs": prompt(3, 4)}, padded((3, 1, 2))):
        r.agree(given, r.slots + 1)
        for block in r.pair.runner.pool._idle:
            for slab in block.slabs:
                slab[:, :, :, : min(block.dirty, r.window)] = (
                    torch.nan
                )  # as after an overflow in half precision
                slab[:, :, :, r.window - 1] = torch.nan
    r.agree({"inputs": prompt(3, 2)}, r.slots + 1)
    r.pair.runner.release()


@check
def calls_that_the_host_ends(r: Rings) -> None:
    """Stop a call from the host. The returned cache must not hold later steps."""

    class Slow(Recorder):
        def put(self, value: torch.Tensor) -> None:
            time.sleep(0.01)

    given = {"inputs": prompt(1, r.slots).to(r.pair.device)}
    for limit in (0.0, 0.01 * (r.window + 9)):  # the first call makes all that is kept
        out = r.pair.generate(
            {
                **given,
                **FULL,
                "do_sample": False,
                "max_new_tokens": 900,
                "max_time": limit,
                "streamer": Slow(),
            }
        )
    count = out.sequences.shape[1] - r.slots
    assert count < 900
    if not r.pair.half:
        assert_same(
            type(r.pair.stock).generate(
                r.pair.stock, **given, **FULL, do_sample=False, max_new_tokens=count
            ),
            out,
        )


@check
def memory(r: Rings) -> None:
    """Generate many windows of text. Sliding layers must not take more memory."""
    r.agree({"inputs": prompt(1, 3)}, 2 * r.slots)
    block = r.pair.runner.pool._idle[-1]
    slides, stays = r.sliding.count(True), r.sliding.count(False)
    one = block.keys[0][0, :, 0].numel()
    for slabs in (block.slabs, [slab for _, slab in block.ring_slabs]):
        held = sum(slab.numel() for slab in slabs)
        assert held == 2 * one * (
            slides * r.slots + (stays * block.capacity if slabs is block.slabs else 0)
        )


def small(patch: pytest.MonkeyPatch, slots: int) -> None:
    """Make blocks in multiples of few slots."""
    patch.setattr(ring_slots, "GRAIN", slots)
