"""Counters of blocks that share a loop, and the launches that get them.

Streams and captures are faked.
"""

from __future__ import annotations

import threading
import time
import weakref
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from mirage_hf.codegen import launching

GPU = SimpleNamespace(type="cuda", index=0)


@pytest.fixture
def now(monkeypatch):
    """Fake the GPU that the code sees.

    It has the stream, whether the stream is captured, and the threads that have allocated memory.
    """
    now = SimpleNamespace(stream=1, capturing=False, threads=[], seconds={})

    def zeros(count, dtype, device):
        now.threads.append(threading.get_ident())
        time.sleep(now.seconds.get(count, 0.0))
        return torch.zeros(count, dtype=dtype)

    monkeypatch.setattr(launching, "_zeros", {})
    monkeypatch.setattr(
        launching,
        "torch",
        SimpleNamespace(
            zeros=zeros,
            int32=torch.int32,
            _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda index: now.stream),
            cuda=SimpleNamespace(
                is_current_stream_capturing=lambda: now.capturing,
                current_stream=lambda device: SimpleNamespace(synchronize=lambda: None),
            ),
        ),
    )
    return now


def captured(now, count):
    now.capturing = True
    found = launching.counters(count, GPU)
    now.capturing = False
    return found


def test_launches_of_a_stream_share_counters_and_captured_ones_do_not(now):
    first = launching.counters(64, GPU)
    assert len(first) == 1024 and launching.counters(1000, GPU) is first
    now.stream = 2
    assert launching.counters(64, GPU) is not first
    places = [captured(now, 64).data_ptr() for _ in range(3)]
    assert places[1] - places[0] == places[2] - places[1] == 4 * 64


def test_captured_launches_get_aligned_counters_whatever_those_before_took(now):
    """Triton compiles a kernel again for a pointer of another alignment.

    This happened to eleven of a head's hundred candidates.
    """
    launching.counters(64, GPU)
    places = [captured(now, count).data_ptr() for count in (3, 75, 1, 16, 5)]
    assert [(b - a) // 4 for a, b in pairwise(places)] == [4, 76, 4, 16]


def test_counters_in_use_stay_when_more_are_needed(now):
    """Graphs read the old counters, and kernels that use them may still run."""
    shared = weakref.ref(launching.counters(64, GPU).untyped_storage())
    stock = weakref.ref(captured(now, 1 << 17).untyped_storage())
    captured(now, 64)
    now.stream = 2
    launching.counters(4096, GPU)  # a stock is replaced when half of it is used
    now.stream = 1
    launching.counters(4096, GPU)
    assert stock() is not None and shared() is not None
    assert captured(now, 1 << 17).untyped_storage()._cdata != stock()._cdata


def test_lasting_memory_is_allocated_by_another_thread(now):
    """This thread's memory may belong to a graph, and lasting memory must not lie there."""
    launching.counters(64, GPU)
    assert len(now.threads) == 2 and threading.get_ident() not in now.threads
    captured(
        now, 1 << 19
    )  # more than any stock has: they lie in the captured graph's memory, for this launch only
    assert now.threads[2:] == [threading.get_ident()]


def test_threads_on_one_stream_get_as_many_as_they_ask_for(now):
    """A thread that needs fewer counters gets them while another waits for the stock.

    The fewer counters must not become the stock.
    """
    now.seconds = {1024: 0.1, 1 << 18: 0.3}
    counts, short = [64, 5000], []

    def ask(count):
        if len(launching.counters(count, GPU)) < count:
            short.append(count)

    threads = [threading.Thread(target=ask, args=(n,)) for n in counts]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not short


# -- launches -----------------------------------------------------------------------------------


class Kernel:
    """A kernel that records how it is compiled and run."""

    def __init__(self, name):
        self.__name__, self.compiled, self.runs = name, [], []

    def warmup(self, *tensors, **options):
        self.compiled.append(options)
        run = Launcher(self)
        return SimpleNamespace(run=run, function="function", packed_metadata="metadata")


class Launcher:
    def __init__(self, kernel):
        self.kernel, self.launch_pdl = kernel, True

    def __call__(self, *arguments):
        self.kernel.runs.append((self.launch_pdl, arguments))


def test_a_kernel_is_compiled_for_each_dtype_constant_and_number_of_warps(now, monkeypatch):
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(
        launching.torch.cuda, "get_device_capability", lambda device: (9, 0), raising=False
    )

    def tensor(dtype, address=256):
        return SimpleNamespace(device=GPU, dtype=dtype, data_ptr=lambda: address)

    kernel = Kernel("kernel")
    cases = [
        (torch.float32, 4, {}),
        (torch.bfloat16, 4, {}),
        (torch.bfloat16, 8, {}),
        (torch.bfloat16, 4, {"SIZE": 3, "FILL": 0.5}),
        (torch.bfloat16, 4, {"SIZE": 4, "FILL": 0.5}),
    ]
    for now.capturing in (False, True):
        for dtype, warps, constants in cases:
            launching.launch_with_constants(kernel, 7, [tensor(dtype)], warps, 1, constants)
    assert len(kernel.compiled) == len(cases)
    assert [options["num_warps"] for options in kernel.compiled] == [w for _, w, _ in cases]
    assert kernel.compiled[3]["SIZE"] == 3 and kernel.compiled[3]["launch_pdl"]
    for (pdl, arguments), (_, _, constants), captured in zip(
        kernel.runs, cases * 2, [False] * 5 + [True] * 5, strict=True
    ):
        assert pdl == captured
        tail = (None, None, None, 256, True, *constants.values())
        assert arguments == (7, 1, 1, 1, "function", "metadata", *tail)
