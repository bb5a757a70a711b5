"""One entry of a kernel zoo: a µGraph, its kernel, and the evidence for both, in a folder.

`kernel.py` is the readable source and `ugraph.json` the µGraph. `entry.json` has everything else,
and digests of the other files. An entry of `superoptimize()` also has `search.json`, with all
µGraphs that the search accepted. `entry_reader` reads an entry from its folder.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

from mirage_hf import errors
from mirage_hf.codegen import triton
from mirage_hf.codegen.generated_program import GeneratedProgram
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.graph import json_format
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.zoo.key import Key
from mirage_hf.zoo.machine import this_machine
from mirage_hf.zoo.search_record import SearchRecord

KERNEL, UGRAPH, ENTRY, SEARCH = "kernel.py", "ugraph.json", "entry.json", "search.json"
FORMAT, VERSION = "mirage_hf.zoo_entry", 2
_FOLDER_NAME = re.compile(r"[a-z0-9][a-z0-9_]{0,63}")

#: The most characters of the shapes in a folder's name.
_MOST_TITLE = 100


#: The most bytes of each file. Those of the packaged zoo have a hundredth of it.
MOST_BYTES = {KERNEL: 1 << 22, UGRAPH: 1 << 22, ENTRY: 1 << 20, SEARCH: 1 << 26}


@dataclass(frozen=True)
class Measurement:
    """Microseconds of one way to compute the program: the median of `runs`, and the spread.

    The spread is the 10th and the 90th percentile.
    """

    name: str
    median_us: float
    low_us: float
    high_us: float
    runs: int


@dataclass(frozen=True)
class Entry:
    """A kernel with its evidence.

    Attributes:
        key: What the entry is stored under.
        pattern: The block it is for, or "program".
        ugraph: The µGraph that the kernel computes. The library path if nothing better was found.
        kernel: The generated source.
        schedules: One schedule for each block graph of `ugraph`, in order.
        timings: The searched kernel and its rivals. Empty if nothing was measured.
        error_bound: The probability that the proof accepted a wrong µGraph.
        search: Statistics of the search, such as candidates, seconds, and why it stopped.
        machine: GPU, driver and versions.
        created: The time in UTC, ISO format.
        record: All µGraphs that the search accepted, for `superoptimize()`.

    Raises:
        ZooError: A field cannot be stored.
    """

    key: Key
    pattern: str
    ugraph: UGraph
    kernel: str
    schedules: tuple[Schedule, ...]
    timings: tuple[Measurement, ...]
    error_bound: float
    search: Mapping[str, Any]
    machine: Mapping[str, str] = field(default_factory=this_machine)
    created: str = field(
        default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds")
    )
    record: SearchRecord | None = None

    def __post_init__(self) -> None:
        for what, name in (("pattern", self.pattern), ("target", self.key.target)):
            if not _FOLDER_NAME.fullmatch(name):
                raise errors.ZooError(
                    f"zoo entry: {what} {name!r} names a folder; use up to 64 lower-case letters, "
                    "digits and _"
                )
        try:
            json.dumps([self.search, self.error_bound, dict(self.machine)], allow_nan=False)
        except (TypeError, ValueError) as e:
            raise errors.ZooError(
                f"zoo entry: search, error_bound and machine must be plain JSON values: {e}"
            ) from None

    @property
    def fastest(self) -> str | None:
        """The name of the fastest timing."""
        return min(self.timings, key=lambda t: t.median_us).name if self.timings else None

    @property
    def failed(self) -> bool:
        """True if candidates were found, but each failed on this GPU. The failure may pass."""
        return bool(self.search.get("candidates")) and not self.ugraph.is_fused

    @property
    def folder(self) -> Path:
        """The place in a zoo: pattern, then shape and dtype with a short key, then target."""
        title = self.key.title[:_MOST_TITLE]
        return Path(self.pattern, f"{title}-{self.key.digest[:8]}", self.key.target)

    def generate(self) -> GeneratedProgram:
        """Generate the kernel again from the µGraph and its schedules.

        Raises:
            CodegenError: No kernel can be generated here.
        """
        return triton.generate(
            self.ugraph, self.schedules, next_may_launch_early=self.key.next_may_launch_early
        )

    @cached_property
    def files(self) -> dict[str, str]:
        """The text of each file.

        Raises:
            ValueError, TypeError: The record cannot be written as JSON.
        """
        ugraph = json_format.save_json(json_format.ugraph_to_dict(self.ugraph))
        files = {KERNEL: self.kernel, UGRAPH: ugraph}
        if self.record is not None:
            files[SEARCH] = json_format.save_json(self.record.to_dict())
        data: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "pattern": self.pattern,
            "key": self.key.digest,
            "target": self.key.target,
            "schedule_version": self.key.schedule_version,
            "kernel_format": self.key.kernel_format,
            "schedules": [s.to_dict() for s in self.schedules],
            "next_may_launch_early": self.key.next_may_launch_early,
            "timings": [asdict(t) for t in self.timings],
            "error_bound": self.error_bound,
            "search": dict(self.search),
            "machine": dict(self.machine),
            "created": self.created,
            "sha256": {name: sha256(text) for name, text in files.items()},
        }
        if self.key.options:
            data["options"] = self.key.options
        entry = json_format.save_json(data | {"digest": json_format.digest(data)})
        return {**files, ENTRY: entry}


def sha256(text: str) -> str:
    """Return the digest of a file's text, in hex."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
