"""The report: which kernels attention ran, how often, and why torch ran the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mirage_hf.attention_interface.constants import MOST_TRACED, NAME


@dataclass(frozen=True)
class KernelRow:
    """One attention kernel in the report.

    Attributes:
        title: The sizes that it is for.
        source: Where it came from.
        time_us: Microseconds a call, over `timed_at` keys. None if it was not measured.
        library_us: The same for the library path.
        timed_at: The number of keys that it was tuned for.
        calls: Calls so far by models that are not compiled.
        calls_compiled: Calls so far by compiled graphs. Replays from CUDA graphs are not counted.
        traceable: True if compiled graphs may hold it, see `MOST_TRACED`.
    """

    title: str
    source: str
    time_us: float | None
    library_us: float | None
    timed_at: int
    calls: int
    calls_compiled: int
    traceable: bool

    def __str__(self) -> str:
        time = ""
        if self.time_us is not None:
            # "12.0 µs (15.0)": this kernel, and in parentheses the library path
            library = "" if self.library_us is None else f" ({self.library_us:.1f})"
            time = f", {self.time_us:.1f} µs{library} over {self.timed_at} keys"
        calls = str(self.calls)
        if self.calls_compiled:
            calls += f" and {self.calls_compiled} by compiled graphs, not counting replays"
        note = ""
        if not self.traceable:
            note = f", not in compiled graphs, which hold {MOST_TRACED} others like it"
        return f"kernel for {self.title}: {calls} ({self.source}{time}){note}"


@dataclass(frozen=True)
class AttentionReport:
    """The calls of attention in this process, by models that asked for it by name.

    Calls that torch runs in compiled graphs are not counted.

    Attributes:
        kernels: The kernels found so far.
        by_torch: Calls that torch ran, by reason.
        without: Why there is no kernel, by sizes.
    """

    kernels: tuple[KernelRow, ...]
    by_torch: Mapping[str, int]
    without: Mapping[str, str]

    def __str__(self) -> str:
        by_kernels = sum(k.calls + k.calls_compiled for k in self.kernels)
        by_torch = sum(self.by_torch.values())
        return "\n".join(
            [
                f'mirage_hf: attention "{NAME}", {by_kernels} calls by kernels, '
                f"{by_torch} by torch",
                *map(str, self.kernels),
                *(f"by torch: {reason}: {n}" for reason, n in sorted(self.by_torch.items())),
                *(f"no kernel for {title}: {reason}" for title, reason in self.without.items()),
            ]
        )
