"""Choose kernels for a layer as a whole: how they overlap matters as much as their own times."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mirage_hf.errors import (
    CodegenError,
    Rejected,
    SearchError,
    VerificationError,
    ZooError,
    described,
)
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.pipeline import resolver
from mirage_hf.pipeline.find_outcome import NewOutcome, find_outcome
from mirage_hf.pipeline.outcome import Outcome, library_wins
from mirage_hf.pipeline.request import Request
from mirage_hf.pipeline.resolver import Resolved, kernel_request, resolved
from mirage_hf.pipeline.results import SEARCHED, NoResults, ZooResults
from mirage_hf.pipeline.windows import ProgressCallback
from mirage_hf.tune.candidates import ScheduledCandidate
from mirage_hf.tune.layer import choose_for_layer
from mirage_hf.zoo.entry import Entry
from mirage_hf.zoo.key import target_of
from mirage_hf.zoo.store import zoo_path


@dataclass(frozen=True, eq=False)
class BlockToMake:
    """A block of a layer whose kernel is to be made. Equal blocks are one object.

    The fields are arguments of `resolve`, except for `for_long_caches`: attention that is made as
    well if this block has a kernel.
    """

    program: KernelGraph
    pattern: str
    like: KernelGraph | None = None
    next_may_launch_early: bool = False
    for_long_caches: BlockToMake | None = None


class LayerResolver:
    """Finds the kernels of layers with the same options, each block once.

    Attributes:
        found: The kernel of each block, or why it has none.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        backend: str,
        zoo: str | Path | Sequence[str | Path] | None = None,
        tune: str = "auto",
        progress: ProgressCallback | None = None,
        total: int = 0,
    ):
        """Take the arguments of `resolve`, and the number of blocks for the progress report."""
        self.device, self.zoo, self.progress, self.total = device, zoo, progress, total
        self._options = dict(device=device, backend=backend, zoo=zoo, tune=tune, progress=progress)
        self._finder = resolver.KernelFinder(device, backend, zoo, tune)
        self._begun = 0
        self.found: dict[BlockToMake, Resolved | Rejected] = {}

    def _resolve(self, block: BlockToMake) -> None:
        """Find the kernel of a block, or the reason why it has none."""
        self._begun += 1
        if self.progress is not None:
            self.progress("kernel", (self._begun, self.total, block.pattern))
        try:
            self.found[block] = resolver.resolve(
                block.program, **_options_of(block), **self._options
            )
        except (SearchError, VerificationError, CodegenError) as error:
            self.found[block] = Rejected(f"no kernel: {error}")

    def searching(
        self, layers: Iterable[Sequence[BlockToMake]]
    ) -> contextlib.AbstractContextManager[None]:
        """Search for the kernels of layers in other processes, until the block ends."""
        blocks = [block for layer in layers for block in layer]
        blocks += [block.for_long_caches for block in blocks if block.for_long_caches is not None]
        new = [block for block in dict.fromkeys(blocks) if block not in self.found]
        return self._finder.searching((block.program, _options_of(block)) for block in new)

    def resolve_layer(self, blocks: Sequence[BlockToMake]) -> None:
        """Find the kernels of blocks that run one after another."""
        blocks = list(dict.fromkeys(blocks))
        new = [block for block in blocks if block not in self.found]
        for block in new:
            self._resolve(block)
            if block.for_long_caches and not isinstance(self.found[block], Rejected):
                # Its search takes long. So this process begins it, if no worker is ready yet.
                self._resolve(block.for_long_caches)
        available = {
            block: kernel
            for block in blocks
            if not isinstance(kernel := self.found[block], Rejected)
        }
        if not new:
            return
        # The kernels that an earlier layer chose stay.
        chain = [
            kernel if block in new else replace(kernel, outcome=None)
            for block, kernel in available.items()
        ]
        chosen = chosen_for_layer(chain, device=self.device, zoo=self.zoo)
        self.found |= zip(available, chosen, strict=True)


def _options_of(block: BlockToMake) -> dict[str, Any]:
    """Return the options with which `resolve` is asked for a block."""
    early = block.next_may_launch_early
    return {"pattern": block.pattern, "like": block.like, "next_may_launch_early": early}


def chosen_for_layer(
    layer: Sequence[Resolved],
    *,
    device: torch.device | str,
    zoo: str | Path | Sequence[str | Path] | None = None,
) -> list[Resolved]:
    """Replace kernels that were just tuned by those that make the whole layer fastest.

    The choice is stored. Kernels that were looked up stay, and so do blocks that run the library.

    Args:
        layer: The results of `resolve` for the programs that a layer runs, in order.
        device: The GPU that they were tuned on.
        zoo: As for `resolve`.
    """
    started = time.perf_counter()
    if not any(r.outcome and r.outcome.measured for r in layer):
        return list(layer)
    chosen = _chosen_together([r.outcome or r.entry for r in layer], device)
    if isinstance(chosen, Rejected):
        return [_with_reason(r, chosen.reason) if r.outcome else r for r in layer]
    results = ZooResults(zoo_path(zoo))
    device = torch.device(device)
    gpu = device if device.type == "cuda" else None
    kernels = list(layer)
    for n, entry in chosen.items():
        before = layer[n]
        unkept = results.keep(entry)
        seconds = before.seconds + time.perf_counter() - started
        reason = unkept.reason if unkept is not None else ""
        kernels[n] = resolved(entry, SEARCHED, gpu, seconds, before.outcome, reason)
    return kernels


def _with_reason(kernel: Resolved, reason: str) -> Resolved:
    return replace(kernel, reason="; ".join(filter(None, (kernel.reason, reason))))


def make_entries(
    layer: Sequence[Entry | BlockToMake],
    device: torch.device,
    tune: str = "auto",
    progress: ProgressCallback | None = None,
) -> list[Entry]:
    """Search, verify and tune blocks without looking anything up, for building a zoo.

    Args:
        layer: The blocks of a layer in the order in which they run. Blocks that have kernels are
            given as entries. If a GPU times them, the new kernels are chosen for the layer as a
            whole.
        device: Where they will run.
        tune: As for `resolve`.
        progress: Called with a stage and its detail.

    Raises:
        ZooError: The layer cannot be timed.
    """
    parts: list[Outcome | Entry] = []
    for block in layer:
        if isinstance(block, Entry):
            parts.append(block)
            continue
        request = kernel_request(
            block.program,
            target=target_of(device),
            pattern=block.pattern,
            like=block.like,
            next_may_launch_early=block.next_may_launch_early,
            tune=tune,
            device=device if device.type == "cuda" else None,
        )
        parts.append(make_outcome(request, progress))
    chosen = _chosen_together(parts, device)
    if isinstance(chosen, Rejected):
        raise ZooError(
            f"build a zoo: {chosen.reason}; free memory on {device}, or build on another GPU"
        )
    return [
        chosen.get(n) or part.best_entry
        for n, part in enumerate(parts)
        if isinstance(part, Outcome)
    ]


def make_outcome(request: Request, progress: ProgressCallback | None = None) -> Outcome:
    """Search, verify and tune without looking anything up or storing anything."""
    result = find_outcome(request, NoResults(), progress)
    assert isinstance(result, NewOutcome)
    return result.outcome


def _chosen_together(
    parts: Sequence[Outcome | Entry], device: torch.device | str
) -> dict[int, Entry] | Rejected:
    """Return new entries for outcomes, by position, chosen by the time of all parts together.

    Parts that run the library are left out. Returns nothing if there is no choice.
    """
    choices: dict[int, tuple[ScheduledCandidate, ...]] = {}
    for n, part in enumerate(parts):
        candidates = part.contenders() if isinstance(part, Outcome) else only_choice(part)
        if candidates:
            choices[n] = candidates
    if len(choices) < 2 or not any(isinstance(parts[n], Outcome) for n in choices):
        return {}
    failed = ""
    try:
        candidates_chosen, whole = choose_for_layer(list(choices.values()), device=device)
    except RuntimeError as e:  # out of memory is one
        failed = described(e)
    torch.cuda.empty_cache()  # timing needs as much memory as a few layers
    if failed:
        return Rejected(f"chosen on its own, because the whole layer could not be timed ({failed})")
    entries = {}
    for n, candidate in zip(choices, candidates_chosen, strict=True):
        part = parts[n]
        if isinstance(part, Outcome):
            entries[n] = part.entry(candidate, whole.us)
    return entries


def only_choice(entry: Entry) -> tuple[ScheduledCandidate, ...]:
    """Return the kernel of an entry as the only choice; nothing if the library runs."""
    runs_kernel = entry.ugraph.is_fused and entry.timings and not library_wins(entry)
    if not runs_kernel:
        return ()
    early = entry.key.next_may_launch_early
    return (ScheduledCandidate(entry.ugraph, entry.schedules, 0.0, next_may_launch_early=early),)
