"""Times on a GPU: many calls in one CUDA graph, cold caches, median and spread."""
from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ragged import bounds_of, extent

Run = Callable[[list[torch.Tensor]], list[torch.Tensor]]

COLD_FACTOR = 2.2
"""Rotating over this many times the L2 in distinct inputs leaves nothing of a call's inputs in it."""

MAX_SETS, MIN_CALLS = 128, 24


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: the median over replays, and the 10th and 90th percentile."""

    us: float
    low: float
    high: float
    calls: int
    replays: int

    @property
    def spread(self) -> float:
        """(high − low) / median."""
        return (self.high - self.low) / self.us


def random_inputs(graph: KernelGraph, device: torch.device | str, seed: int = 0) -> list[torch.Tensor]:
    """One set of inputs: normal numbers in the dtype and strides of each input, bounds that keep all, zeros for other integers."""
    generator = torch.Generator(device).manual_seed(seed)
    inputs = []
    for t in graph.inputs:
        x = torch.empty_strided(t.dims, t.strides, dtype=t.dtype, device=device)
        inputs.append(x.normal_(generator=generator) if t.dtype.is_floating_point else x.zero_())
    for b in bounds_of(graph):
        inputs[b.hi].fill_(extent(graph, b))
    return inputs


def cold_inputs(graph: KernelGraph, device: torch.device | str) -> list[list[torch.Tensor]]:
    """As many sets of inputs as exceed twice the L2 (at most MAX_SETS)."""
    first = random_inputs(graph, device)
    size = sum(x.numel() * x.element_size() for x in first)
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    count = min(MAX_SETS, max(2, math.ceil(COLD_FACTOR * l2 / max(1, size)) + 1))
    return [first] + [[torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x) for x in first]
                      for _ in range(count - 1)]


def capture(run: Run, sets: Sequence[list[torch.Tensor]]) -> tuple[torch.cuda.CUDAGraph, int]:
    """A CUDA graph of calls that rotate over `sets`, and how many calls it holds."""
    calls = len(sets) * max(1, math.ceil(MIN_CALLS / len(sets)))
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(sets[0])
        torch.cuda.synchronize()
        graph.capture_begin()  # torch.cuda.graph() would collect garbage each time, longer than the measurement takes
        try:
            for n in range(calls):
                run(sets[n % len(sets)])
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, calls


def time_graph(graph: torch.cuda.CUDAGraph, calls: int, replays: int = 15) -> Timing:
    """Replay a captured graph and time each replay."""
    for _ in range(2):
        graph.replay()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for start, end in marks:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return timing([1e3 * start.elapsed_time(end) / calls for start, end in marks], calls)


def timing(samples: Sequence[float], calls: int) -> Timing:
    ordered = sorted(samples)
    last = len(ordered) - 1
    return Timing(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)], calls, len(ordered))


def time_run(run: Run, sets: Sequence[list[torch.Tensor]], replays: int = 15) -> Timing:
    """Time `run` over cold `sets` inside a CUDA graph."""
    graph, calls = capture(run, sets)
    return time_graph(graph, calls, replays)
