"""Measure packaged entries again after the text of their kernels changed.

    python -m scripts.retune_zoo --layer "$(ls -d kernel_zoo/traced/1x2048-to-1x3072-*/sm_90 …)"

Each --layer names the folders of entries in the order in which a layer of a model runs them, with
white space between. Their µGraphs stay. Entries whose text is out of date get the schedules that
make the whole layer fastest, and so do those whose codes a CUDA kernel can stream. All others only
run beside them. With --pattern, entries of this pattern get new schedules, and all others only run
beside them. An entry is written with its new schedules, text, times, machine and date.

Newer versions of Triton need another text for some schedules, and would make their kernels again.
Such schedules are not tried, unless an entry has one already.

`scripts/refresh_zoo.py` is enough if the same schedules still generate the same code up to names.
Run `scripts/build_cubins.py` afterwards, because cubins belong to a text. Then run
`scripts/index_zoo.py`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from unittest import mock

from mirage_hf.codegen.placement import PlacedOp, place_kernels
from mirage_hf.codegen.plan import pipelining, plan_kernel
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.codegen.triton_kernel import write_kernel
from mirage_hf.errors import CodegenError
from mirage_hf.gpus import Device
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.pipeline.layer_choice import only_choice
from mirage_hf.pipeline.outcome import measurements
from mirage_hf.tune import space, tuner
from mirage_hf.tune.candidates import ScheduledCandidate
from mirage_hf.tune.layer import choose_for_layer
from mirage_hf.tune.stream_schedules import stream_schedules
from mirage_hf.tune.tuner import TuneResult
from mirage_hf.zoo.entry import Entry
from mirage_hf.zoo.entry_reader import read_entry
from mirage_hf.zoo.machine import this_machine
from scripts.benching import DEVICE, need_gpu
from scripts.refresh_zoo import ROOT, write

#: Schedules to try for an op, and those of Triton kernels.
TRIED, MOST = 48, 24


def schedules_of(op: PlacedOp, device: Device, own: Schedule) -> list[Schedule]:
    """Return the schedules to try for an op.

    These are its own, and those that stream codes. If none do, they are the best of Triton kernels.
    """
    streams = [s for s, _ in stream_schedules(op, device)]
    others = (s for s in space.schedules(op, device) if s.mma == own.mma and is_portable(op, s))
    return list(dict.fromkeys([own, *(streams or islice(others, MOST))]))


def is_portable(op: PlacedOp, schedule: Schedule) -> bool:
    """Return whether an op's Triton kernel has the same text for older and newer Tritons."""
    texts = []
    for is_newer in (False, True):
        with mock.patch.object(pipelining, "WGMMA_TAKES_8_COLUMNS", is_newer):
            try:
                texts.append(write_kernel(plan_kernel(op, schedule), "kernel").source)
            except CodegenError:
                return False
    return texts[0] == texts[1]


def is_wanted(entry: Entry, pattern: str | None) -> bool:
    """Return whether an entry is to get new schedules.

    Args:
        entry: The entry.
        pattern: The pattern whose entries get them. None: those that are out of date, and those
            whose codes a CUDA kernel can stream.
    """
    if pattern is not None:
        return entry.pattern == pattern
    ops = place_kernels(entry.ugraph, entry.key.next_may_launch_early)
    return entry.generate().source != entry.kernel or any(stream_schedules(op) for op in ops)


def tuned(entry: Entry, tried: int) -> TuneResult:
    """Return up to `tried` measured kernels of an entry's µGraph."""
    ops = place_kernels(entry.ugraph, entry.key.next_may_launch_early)
    own = dict(zip(map(str, ops), entry.schedules, strict=True))
    return tuner.tune(
        [entry.ugraph],
        device=DEVICE,
        per_graph=tried,
        schedules=lambda op, device: schedules_of(op, device, own[str(op)]),
        rounds=0,
        patience=0,
        next_may_launch_early=entry.key.next_may_launch_early,
    )


def remade(entry: Entry, chosen: ScheduledCandidate, result: TuneResult, layer_us: float) -> Entry:
    """Return an entry with another schedule and its times."""
    program, kernels = entry.ugraph.program, entry.ugraph.kernels
    assert result.library is not None
    return replace(
        entry,
        ugraph=UGraph(program, kernels, chosen.schedules),
        kernel=chosen.generate().source,
        schedules=chosen.schedules,
        timings=measurements(chosen, result.library),
        search={**entry.search, "layer_us": round(layer_us, 3), "tried": len(result.candidates)},
        machine=this_machine(),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def retune(folders: Sequence[Path], zoo: Path, tried: int, pattern: str | None = None) -> None:
    """Measure the entries of a layer again, and write those that were tuned."""
    started = time.perf_counter()
    entries = [read_entry(folder) for folder in folders]
    patterns = sorted({entry.pattern for entry in entries})
    if pattern not in (None, *patterns):
        raise SystemExit(f"no entry of the layer has the pattern {pattern}; it has {patterns}")
    results = [tuned(entry, tried) if is_wanted(entry, pattern) else None for entry in entries]
    choices = [
        only_choice(entry) if result is None else result.searched
        for entry, result in zip(entries, results, strict=True)
    ]
    for folder, found in zip(folders, choices, strict=True):
        if not found:
            raise SystemExit(f"{folder}: no kernel was right; nothing is written for its layer")
    chosen, whole = choose_for_layer(choices, device=DEVICE)
    seconds = time.perf_counter() - started
    print(f"a layer of {len(folders)} takes {whole.us:.2f} µs, {seconds:.1f} s", flush=True)
    for entry, result, kernel, folder in zip(entries, results, chosen, folders, strict=True):
        if result is not None:
            write(remade(entry, kernel, result, whole.us), zoo, folder)
            schedules = ", ".join(map(str, kernel.schedules))
            print(f"  {kernel.us:8.2f} µs  {folder.parent.name}  {schedules}", flush=True)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layer", action="append", required=True, help="folders of entries")
    parser.add_argument("--zoo", type=Path, default=ROOT / "kernel_zoo", help="where they lie")
    parser.add_argument("--tried", type=int, default=TRIED, help="schedules to try for each entry")
    parser.add_argument("--pattern", help="the pattern whose entries get new schedules")
    args = parser.parse_args()
    need_gpu("retune_zoo")
    for layer in args.layer:
        folders = [Path(folder).resolve() for folder in layer.split()]
        zoo = args.zoo.resolve()
        if outside := [f for f in folders if not f.is_relative_to(zoo)]:
            parser.error(f"{outside[0]} does not lie in {zoo}; name its zoo by --zoo")
        retune(folders, zoo, args.tried, args.pattern)


if __name__ == "__main__":
    main()
