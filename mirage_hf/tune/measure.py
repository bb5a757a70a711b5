"""Measure times on a GPU: many calls in one CUDA graph, cold caches, median and spread."""

from __future__ import annotations

import math
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch

from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.cublas_workspaces import own_workspaces
from mirage_hf.garbage import no_garbage_collection
from mirage_hf.graph.block import Axis, BlockGraph, BlockInput, BlockOp, BlockOutput, Role, Stage
from mirage_hf.graph.bounds import bounds_of, extent
from mirage_hf.graph.coded import random_codes
from mirage_hf.graph.effects import positions_of
from mirage_hf.graph.indices import indices_of, num_choices
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.strided import blank, flat, in_turns
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.ops import table
from mirage_hf.tune.cold_sets import cold_sets, read_bytes

Run = Callable[[list[torch.Tensor]], list[torch.Tensor]]
Inputs = TypeVar("Inputs")

#: Inputs rotate over this many times the L2, so nothing of a call's inputs is left in it.
COLD_FACTOR = 2.2

MAX_SETS, MIN_CALLS = 128, 24


@dataclass(frozen=True)
class Timing:
    """Microseconds per call.

    Attributes:
        us: The median over replays.
        low: The 10th percentile.
        high: The 90th percentile.
        calls: Calls in one replay.
        replays: Replays measured.
    """

    us: float
    low: float
    high: float
    calls: int
    replays: int

    @property
    def spread(self) -> float:
        """(high − low) / median."""
        return (self.high - self.low) / self.us


def random_inputs(
    graph: KernelGraph, device: torch.device | str, seed: int = 0
) -> list[torch.Tensor]:
    """Return one set of inputs for a program.

    Floats are normal numbers in the dtype and strides of each input, and codes are random. Bounds
    keep everything, appends go to the end of their cache, and indices choose different elements as
    long as there are any. Indices whose last dim is 1 repeat a choice next to it, as blocks of rows
    of one expert do. Other integers are 0. Constants that fill each other's gaps share memory.
    """
    generator = torch.Generator(device).manual_seed(seed)
    inputs = []
    for t in graph.inputs:
        if t.dtype in table.CODE_DTYPES:
            inputs.append(random_codes(t, generator, device))
            continue
        x = blank(t.dims, t.strides, t.dtype, device)
        flat(x).normal_(generator=generator) if t.dtype.is_floating_point else x.zero_()
        inputs.append(x)
    for b in bounds_of(graph):
        inputs[b.hi].fill_(extent(graph, b))
    for n, cache, rows in positions_of(graph):
        inputs[n].fill_(cache.dims[-2] - rows.dims[-2])
    for n, chosen in indices_of(graph).items():
        different = torch.randperm(num_choices(chosen), generator=generator, device=device)
        at = torch.arange(inputs[n].numel(), device=device)
        if inputs[n].shape[-1] == 1 and len(at) > len(different):
            at = at * len(different) // len(at)
        at %= len(different)
        inputs[n].copy_(different[at].view(inputs[n].shape))
    constants = [n for n, t in enumerate(graph.inputs) if t.constant]
    for n, x in zip(constants, in_turns([inputs[n] for n in constants]), strict=True):
        inputs[n] = x
    return inputs


def cold_inputs(graph: KernelGraph, device: torch.device | str) -> list[list[torch.Tensor]]:
    """Return sets of inputs that together exceed COLD_FACTOR times the L2, at most MAX_SETS."""
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    first = [random_inputs(graph, device)]
    return [inputs for (inputs,) in _sets([graph], first, COLD_FACTOR * l2)]


def _sets(
    graphs: Sequence[KernelGraph], first: list[list[torch.Tensor]], least: float
) -> list[list[list[torch.Tensor]]]:
    """Return the inputs of some programs and other sets like them.

    Calls with all of them read more than `least` bytes, but there are at most MAX_SETS sets.
    """
    size = sum(read_bytes(g, inputs) for g, inputs in zip(graphs, first, strict=True))
    count = min(MAX_SETS, max(2, math.ceil(least / max(1, size)) + 1))
    sets = [cold_sets(g, inputs, count) for g, inputs in zip(graphs, first, strict=True)]
    return [[inputs[number] for inputs in sets] for number in range(count)]


#: Replays after which a slow candidate is given up.
GLANCE = 3

#: The fewest replays of other candidates, and the µs of GPU time after which there are no more.
#: Long calls need fewer replays.
FEW, ENOUGH_US = 5, 10_000.0


@dataclass(frozen=True)
class Captured:
    """A CUDA graph of calls that rotate over sets of inputs, between two events of its own.

    Attributes:
        graph: The captured graph.
        calls: Calls in one replay.
        start: Event before the first call.
        end: Event after the last call.
        reads: The tensors that the graph reads. A CUDA graph does not keep them alive.
    """

    graph: torch.cuda.CUDAGraph
    calls: int
    start: torch.cuda.Event
    end: torch.cuda.Event
    reads: Any

    def times(self, replays: int, to_beat: float = math.inf) -> list[float]:
        """Return microseconds per call of each replay, after two replays to warm up.

        At most `replays` are made. After FEW of them, no more are made once ENOUGH_US µs of GPU
        time are used. After GLANCE of them, no more are made if none took less than `to_beat` µs.
        Both tests count the two warm-up replays as well.

        The graph records its events itself. If this thread recorded them, it might wait for
        milliseconds between a replay and the event after it, because the tuner's threads compile. A
        kernel of 15 µs was seen to take 900.
        """
        samples: list[float] = []
        for n in range(2 + replays):
            self.graph.replay()
            torch.cuda.synchronize()
            samples.append(1e3 * self.start.elapsed_time(self.end) / self.calls)
            slow = n + 1 == 2 + GLANCE and min(samples) >= to_beat
            if slow or (n + 1 >= 2 + FEW and sum(samples) * self.calls > ENOUGH_US):
                break
        return samples[2:]


class _Streams(threading.local):
    """The stream on which a thread captures, by device.

    There is only one, because torch's streams come from a pool of 32. Other code may run on them.
    """

    def __init__(self) -> None:
        self.by_device: dict[int, torch.cuda.Stream] = {}


_streams = _Streams()


def _stream(device: int) -> torch.cuda.Stream:
    """Return the stream on which this thread captures on a device."""
    if device not in _streams.by_device:
        _streams.by_device[device] = torch.cuda.Stream(device)
    return _streams.by_device[device]


def capture(run: Callable[[Inputs], Any], sets: Sequence[Inputs], calls: int = 0) -> Captured:
    """Capture calls of `run` on each of `sets` in turn.

    Args:
        run: The function to call.
        sets: The sets of inputs.
        calls: How many calls. By default every set is used equally often, in at least MIN_CALLS
            calls.
    """
    calls = calls or len(sets) * max(1, math.ceil(MIN_CALLS / len(sets)))
    start, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
    graph, stream = torch.cuda.CUDAGraph(), _stream(torch.cuda.current_device())
    torch.cuda.synchronize()  # the inputs may still be written on another stream
    run(sets[0])
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), no_garbage_collection():
        # torch.cuda.graph() would also give memory back to the driver, which takes longer than
        # measuring. "thread_local": what other threads do to the device breaks no capture.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            with own_workspaces():
                start.record()
                for n in range(calls):
                    run(sets[n % len(sets)])
                end.record()
        finally:
            graph.capture_end()
    return Captured(graph, calls, start, end, sets)


def timing(samples: Sequence[float], calls: int) -> Timing:
    """Return the median and spread of some samples."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return Timing(
        statistics.median(ordered),
        ordered[round(0.1 * last)],
        ordered[round(0.9 * last)],
        calls,
        len(ordered),
    )


#: The most bytes of an input that stays in the L2 in a chain. Such an input is no constant, so it
#: is a result of the kernel before.
HOT_BYTES = 1 << 20


class Chain:
    """Calls of one program that depend on each other.

    After each call a small kernel runs, the link. It reads one element of the result and writes the
    first input that is no constant. Weights are cold, and activations are hot. A time is the whole
    chain's minus that of the links alone, so overlap with neighbours counts.
    """

    def __init__(self, program: KernelGraph, sets: Sequence[list[torch.Tensor]]):
        """Prepare the chain over sets of inputs."""
        indices = indices_of(program)  # each set chooses other weights
        hot = [
            n
            for n, t in enumerate(program.inputs)
            if not t.constant and sets[0][n].nbytes <= HOT_BYTES and n not in indices
        ]
        self._at = next((n for n in hot if program.inputs[n].dtype.is_floating_point), None)
        self._sets = [[sets[0][n] if n in hot else x for n, x in enumerate(s)] for s in sets]
        self._links: dict[torch.dtype, tuple[Any, float]] = {}

    def time(self, run: Run, replays: int = 15) -> Timing | None:
        """Return the time per call, or None if no input can carry a dependence."""
        if self._at is None:
            return None
        y = run(self._sets[0])[0]
        if not y.is_floating_point():
            return None
        x = flat(self._sets[0][self._at])  # strides may let elements overlap
        if y.dtype not in self._links:
            link = _link(len(x), x.dtype, y.dtype)
            one = y.as_strided((1,), (1,))
            self._links[y.dtype] = (
                link,
                time_run(lambda inputs: link([x, one], [x]), self._sets, replays).us,
            )
        link, us = self._links[y.dtype]
        whole = time_run(
            lambda inputs: link([x, run(inputs)[0].as_strided((1,), (1,))], [x]),
            self._sets,
            replays,
        )
        median, low, high = (max(0.01, t - us) for t in (whole.us, whole.low, whole.high))
        return Timing(median, low, high, whole.calls, whole.replays)


#: Bytes of weights that a layer rotates over, if memory allows. An H200's L2 has 60 MB. All the
#: same a layer ran 4% faster over 360 MB than over 2 GB, and another choice of kernels was the
#: fastest.
LAYER_BYTES = 3 << 29


class Layer:
    """Calls of several programs in turn, as a layer of a model runs them.

    The first input of a program that is no constant is the result of the program before. If that
    result is too small or of another dtype, a link stands between them (see `Chain`). Weights are
    cold, and activations are hot.
    """

    def __init__(self, programs: Sequence[KernelGraph], device: torch.device | str):
        """Make inputs for all programs on a device."""
        self._at = [
            next(
                (n for n, t in enumerate(p.inputs) if not t.constant and t.dtype.is_floating_point),
                None,
            )
            for p in programs
        ]
        first = [random_inputs(p, device) for p in programs]
        hot = {
            (n, k)
            for n, p in enumerate(programs)
            for k, t in enumerate(p.inputs)
            if not t.constant and first[n][k].nbytes <= HOT_BYTES and k not in indices_of(p)
        }
        for n, inputs in enumerate(first):
            for k, x in enumerate(inputs):
                if (n, k) not in hot and x.dtype in table.COMPUTE_DTYPES:
                    # Scale, so that results keep their size from program to program.
                    x.mul_(max(1, x.numel()) ** -0.25)
        least = min(LAYER_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
        self._sets = _sets(programs, first, least)
        for inputs in self._sets[1:]:
            for n, k in hot:
                inputs[n][k] = first[n][k]
        #: Sets of inputs, and the memory of those that are results of the program before.
        self._sets_and_results = [
            (s, [flat(x[at or 0]) for x, at in zip(s, self._at, strict=True)]) for s in self._sets
        ]

    def time(self, runs: Sequence[Run], replays: int = 15, to_beat: float = math.inf) -> Timing:
        """Return microseconds of all programs together; `to_beat` as in `time_run`."""

        def layer(of_set: tuple[list[list[torch.Tensor]], list[torch.Tensor]]) -> None:
            for run, x, n, memory in zip(runs, of_set[0], self._at, of_set[1], strict=True):
                at = (
                    x
                    if n is None or not flowed
                    else [*x[:n], _flowed(flowed[-1], x[n], memory), *x[n + 1 :]]
                )
                flowed.append(run(at)[0])

        # Results are kept here, because a CUDA graph does not keep alive the tensors it reads.
        flowed: list[torch.Tensor] = []
        return time_run(layer, self._sets_and_results, replays, to_beat)


def _flowed(y: torch.Tensor, x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return an input like `x` that is ready only once `y` is. Integers give `x` itself.

    Args:
        y: A result.
        x: The input that it stands for.
        own: The memory of `x`, flat.
    """
    if not y.is_floating_point():
        return x
    if y.dtype == x.dtype and y.numel() >= own.numel() and y.is_contiguous():
        return y.as_strided(x.shape, x.stride())
    _link(own.numel(), x.dtype, y.dtype)([own, y.as_strided((1,), (1,))], [own])
    return x


@lru_cache
def _link(size: int, x: torch.dtype, y: torch.dtype) -> Any:
    """Return a kernel that writes x + 0 · y over x, and waits for both like a generated kernel."""
    g = KernelGraph()
    block = BlockGraph(
        (Axis("n", size, Role.GRID),),
        (BlockInput("x", (0,), ("n",)), BlockInput("y", (1,), (None,))),
        (
            Stage(
                None, (BlockOp("v", "mul", ("y", 0.0), ()), BlockOp("z", "add", ("x", "v"), ("n",)))
            ),
        ),
        (BlockOutput("z", ("n",), table.dtype_name(x)),),
    )
    g.mark_output(*g.customized([g.new_input((size,), x), g.new_input((1,), y)], block))
    return run_of(triton.generate(UGraph(g, g), [Schedule({"n": 1024})], "link"))


def time_run(
    run: Callable[[Inputs], Any],
    sets: Sequence[Inputs],
    replays: int = 15,
    to_beat: float = math.inf,
) -> Timing:
    """Time `run` over cold sets in a CUDA graph.

    Only GLANCE replays are made if none of them takes less than `to_beat` µs.
    """
    captured = capture(run, sets)
    return timing(captured.times(replays, to_beat), captured.calls)


def run_of(program: triton.GeneratedProgram, load: compiler.Load = compiler.load) -> Run:
    """Return the function that runs a generated program.

    Args:
        program: The program.
        load: Imports its source. That of `compiler.passing` forgets it later.
    """
    run: Run = load(program.source, program.digest).run
    return run
