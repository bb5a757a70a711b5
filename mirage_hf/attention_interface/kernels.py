"""The kernels of attention: found at the first call with their sizes, kept, and counted."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mirage_hf.attention_interface.constants import MOST_TRACED
from mirage_hf.attention_interface.masks import is_capturing
from mirage_hf.attention_interface.report import KernelRow
from mirage_hf.attention_interface.sizes import Sizes, block_of, title_of
from mirage_hf.errors import MirageError, Rejected, described
from mirage_hf.graph import symbolic
from mirage_hf.patterns.attention import LONG_FROM, LONG_SLOTS, REFERENCE_SLOTS
from mirage_hf.patterns.masked_attention import MASKED_ATTENTION
from mirage_hf.pipeline import resize, resolver, torch_op
from mirage_hf.pipeline.torch_op import Run
from mirage_hf.zoo.key import key_of, target_of

_log = logging.getLogger("mirage_hf")


@dataclass(frozen=True)
class FoundKernel:
    """A kernel for one size of the cache, ready to run.

    Attributes:
        run: Runs the kernel.
        digest: The digest of its program, by which compiled graphs call it.
        device: The device of its tensors.
        resolved: The result of the search that it comes from.
        timed_at: The number of keys that it was tuned for.
    """

    run: Run
    digest: str
    device: torch.device
    resolved: resolver.Resolved
    timed_at: int


class KernelsBySizes:
    """The kernels of one backend, with the counts of their calls.

    Sizes are the fields of `Sizes` as a plain tuple, as `sizes_of` returns them.

    Attributes:
        by_sizes: Each kernel, or why there is none.
        traceable: The sizes and digests of the kernels that compiled graphs may hold.
        calls: Calls by models that are not compiled, by sizes.
        calls_compiled: Calls by compiled graphs, by digest and device.
    """

    def __init__(self, backend: str):
        self.backend = backend
        self.by_sizes: dict[Any, FoundKernel | Rejected] = {}
        self.traceable: list[tuple[Any, str]] = []
        self.calls: Counter[Any] = Counter()
        self.calls_compiled: Counter[tuple[str, torch.device]] = Counter()
        self._titles: dict[Any, str] = {}
        self._lock = threading.RLock()

    def find(self, sizes: Any, key: Tensor, value: Tensor) -> FoundKernel | Rejected:
        """Return the kernel for these sizes, or why there is none. It is made at the first call."""
        known = self.by_sizes.get(sizes)
        if known is not None:
            return known
        if is_capturing(key):
            return Rejected("no kernel was found before the CUDA graph was captured")
        with self._lock:
            if sizes not in self.by_sizes:
                self.by_sizes[sizes] = self._make_and_list(sizes, key, value)
            return self.by_sizes[sizes]

    def report(self) -> tuple[tuple[KernelRow, ...], dict[str, str]]:
        """Return a row for each kernel, and why there is none for other sizes, by title."""
        known = dict(self.by_sizes)  # other threads may be finding more
        traceable = [sizes for sizes, _ in self.traceable]
        rows = []
        without = {}
        for sizes, kernel in known.items():
            title = self._titles[sizes]
            if isinstance(kernel, Rejected):
                without[title] = kernel.reason
                continue
            rows.append(
                KernelRow(
                    title=title,
                    source=kernel.resolved.source,
                    time_us=kernel.resolved.time_us,
                    library_us=kernel.resolved.library_us,
                    timed_at=kernel.timed_at,
                    calls=self.calls[sizes],
                    calls_compiled=self.calls_compiled[kernel.digest, kernel.device],
                    traceable=sizes in traceable,
                )
            )
        return tuple(rows), without

    def _make_and_list(self, sizes: Any, key: Tensor, value: Tensor) -> FoundKernel | Rejected:
        """Make the kernel for these sizes, and let compiled graphs hold it if there is room."""
        block, rows, slots = block_of(Sizes(*sizes)), key.shape[0], key.shape[2]
        title = title_of(block, rows, slots)
        self._titles[sizes] = title
        strides = key.stride(), value.stride()
        kernel = self._make(block, rows, slots, strides, key.device, title)
        without_length = Sizes(*sizes).without_length
        other_lengths = [
            known for known, _ in self.traceable if Sizes(*known).without_length == without_length
        ]
        if isinstance(kernel, FoundKernel) and len(other_lengths) < MOST_TRACED:
            self.traceable = [*self.traceable, (sizes, kernel.digest)]
        return kernel

    def _make(
        self, block: Any, rows: int, slots: int, strides: Any, device: torch.device, title: str
    ) -> FoundKernel | Rejected:
        """Look the kernel up, or search and tune it, and cut it to the sizes asked for.

        It is tuned at one of two reference numbers of slots.
        """
        reference = LONG_SLOTS if slots >= LONG_FROM else REFERENCE_SLOTS
        program = block.program(rows, slots=slots, strides=strides)
        smaller = block.program(rows, slots=REFERENCE_SLOTS)
        try:
            with torch.inference_mode(False), torch.no_grad():
                resolved = resolver.resolve(
                    block.program(rows, slots=reference),
                    device=device,
                    backend=self.backend,
                    pattern=MASKED_ATTENTION.name,
                    progress=_Announcement(title),
                    like=smaller if reference != REFERENCE_SLOTS else None,
                )
                if not resolved.runs_kernel:
                    return Rejected(resolved.reason)
                run = resize.at_size(resolved, program, device)
        except (MirageError, torch.OutOfMemoryError) as e:
            return Rejected(f"no kernel: {e if isinstance(e, MirageError) else described(e)}")
        digest = key_of(program, target_of(device)).digest

        def compiled(inputs: Sequence[Tensor]) -> list[Tensor]:
            # counted by device, because one digest serves all devices of a type
            self.calls_compiled[digest, inputs[0].device] += 1
            return run(inputs)

        ugraph = symbolic.for_program(resolved.ugraph, program)
        torch_op.register(digest, ugraph, compiled, device.type)
        return FoundKernel(run, digest, device, resolved, reference)


class _Announcement:
    """A `progress` callback that warns, at its first call, that a kernel is searched for."""

    def __init__(self, title: str) -> None:
        self._title, self._made = title, False

    def __call__(self, *_: Any) -> None:
        if not self._made:
            self._made = True
            _log.warning(
                "attention: searching and tuning a kernel for %s; it is kept in the user's cache",
                self._title,
            )
