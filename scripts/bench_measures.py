"""Measure peers of `bench_generate`: their times, their kernels, and how exact their logits are."""

from __future__ import annotations

import argparse
import copy
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from scripts.bench_prompts import mask_of
from scripts.benching import spread


@dataclass
class Measured:
    """One peer's numbers.

    Times are in ms, with the spread of their runs. If the peer failed, `failed` says why.
    """

    setup_s: float = 0.0
    ms_per_token: dict[str, float] = field(default_factory=dict)
    first_token_ms: dict[str, float] = field(default_factory=dict)
    step_ms: dict[str, float] = field(default_factory=dict)
    peak_mib_over_weights: float = 0.0
    failed: str = ""


class Clock(BaseStreamer):
    """A streamer that notes when it was made and when each token arrives.

    The first put is the prompt.
    """

    def __init__(self) -> None:
        """Start the clock."""
        self.started = time.perf_counter()
        self.at: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Note the time, once for each token of a burst (batch, tokens)."""
        is_burst = bool(self.at) and value.dim() == 2
        self.at += [time.perf_counter()] * (value.shape[1] if is_burst else 1)

    def end(self) -> None:
        """Do nothing."""


def sync(device: torch.device) -> None:
    """Wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes of tensors on a GPU, 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def timed_call(call: Callable[[], Any], device: torch.device) -> float:
    """Return the ms that a call takes, the GPU's work included."""
    sync(device)
    started = time.perf_counter()
    call()
    sync(device)
    return (time.perf_counter() - started) * 1e3


def measure(
    calls: dict[str, Callable[..., Any]],
    results: dict[str, Measured],
    args: argparse.Namespace,
    device: torch.device,
) -> None:
    """Time the peers in turns, and write the times into `results`.

    Each turn has a call without a streamer for the whole time, and one with a streamer for the
    others. With `--long-calls`, one call with a streamer gives all times.
    """
    totals: dict[str, list[float]] = {name: [] for name in calls}
    firsts: dict[str, list[float]] = {name: [] for name in calls}
    steps: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(args.rounds):
        for name, call in calls.items():
            if name == "compile" or not args.long_calls:
                totals[name].append(timed_call(call, device))
            if name == "compile":
                continue
            sync(device)
            clock = Clock()
            total = timed_call(partial(call, streamer=clock), device)
            if args.long_calls:
                totals[name].append(total)
            tokens = clock.at[1:] if len(clock.at) > args.new else clock.at
            firsts[name].append((tokens[0] - clock.started) * 1e3)
            if len(tokens) > 1:
                steps[name].append((tokens[-1] - tokens[0]) * 1e3 / (len(tokens) - 1))
    for name in calls:
        r = results[name]
        if name == "compile":
            r.step_ms = spread([t / (args.new - 1) for t in totals[name]])
        else:
            r.ms_per_token = spread([t / args.new for t in totals[name]])
            r.first_token_ms, r.step_ms = spread(firsts[name]), spread(steps[name])


def share_in_searched_kernels(
    call: Callable[[], Any], names: tuple[str, ...], new: int
) -> dict[str, Any]:
    """Profile one generate: the share of GPU time in searched kernels, and the longest kernels."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] = times.get(event.name, 0.0) + event.time_range.elapsed_us()
    total = sum(times.values())
    searched = sum(t for name, t in times.items() if name.startswith(names))
    longest = sorted(times.items(), key=lambda item: -item[1])[:12]
    return {
        "share": searched / total if total else 0.0,
        "searched_us_per_token": searched / new,
        "gpu_us_per_token": total / new,
        "longest_us_per_token": {name[:100]: t / new for name, t in longest},
    }


@torch.no_grad()
def closeness(
    model: PreTrainedModel, fast: PreTrainedModel, ids: torch.Tensor, tokens: int = 17
) -> dict[str, float]:
    """Return how far the logits of stock and ours are from float32: first token and later steps.

    Our logits are those from which our `generate` chose its tokens. Stock and float32 are fed with
    the same tokens.
    """
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    mask = mask_of(ids)
    out = fast.generate(
        ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **options
    )
    mine = torch.stack([x.float() for x in out.logits], 1)

    takes_states = "cache_params" in inspect.signature(model.forward).parameters
    cache_name = "cache_params" if takes_states else "past_key_values"

    def logits(m: PreTrainedModel) -> torch.Tensor:
        cache = {cache_name: DynamicCache(config=m.config)}
        fed, found = [ids, *out.sequences[:, ids.shape[1] : -1].split(1, 1)], []
        seen = mask.new_empty(ids.shape[0], 0)
        for x in fed:
            seen = torch.cat([seen, mask if x is ids else torch.ones_like(x)], 1)
            positions = (seen.cumsum(-1) - 1).clamp_min(0)[:, -x.shape[1] :]
            given = {} if seen.all() else {"attention_mask": seen, "position_ids": positions}
            found.append(m(input_ids=x, **cache, use_cache=True, **given).logits[:, -1:].float())
        return torch.cat(found, 1)

    stock = logits(model)
    wide = copy.deepcopy(model).float()
    exact = logits(wide)
    del wide
    found: dict[str, float] = {}
    for what, part in (("first", slice(0, 1)), ("steps", slice(1, None))):
        for who, seen in (("stock", stock), ("ours", mine)):
            far = (seen - exact)[:, part]
            found |= {
                f"{what}_{who}_max": far.abs().max().item(),
                f"{what}_{who}_rms": far.square().mean().sqrt().item(),
            }
        found[f"{what}_rms_ratio"] = found[f"{what}_ours_rms"] / found[f"{what}_stock_rms"]
        found[f"{what}_same_top1"] = (
            (stock.argmax(-1) == mine.argmax(-1))[:, part].float().mean().item()
        )
    return found
