"""One entry of the kernel zoo: a found µGraph, its kernel, and the evidence for both, in a folder of three files.

`kernel.py` is readable source, `ugraph.json` the µGraph, `entry.json` all the rest with digests of both. Reading believes
nothing that it cannot check: what does not fit is `Rejected` with a reason, and then never run. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

from mirage_hf import errors
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.errors import Rejected
from mirage_hf.graph import json_format
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.zoo.key import Key, key_of
from mirage_hf.zoo.machine import this_machine

KERNEL, UGRAPH, ENTRY = "kernel.py", "ugraph.json", "entry.json"
FORMAT, VERSION = "mirage_hf.zoo_entry", 1
_FOLDER_NAME = re.compile(r"[a-z0-9][a-z0-9_]*")


@dataclass(frozen=True)
class Measurement:
    """Microseconds of one way to compute the program: the median of `runs`, and the spread (10th and 90th percentile)."""

    name: str
    median_us: float
    low_us: float
    high_us: float
    runs: int


@dataclass(frozen=True)
class Entry:
    """A kernel with its evidence. Errors: ZooError when a field cannot be stored.

    pattern: the block it is for, or "program". schedules: one per block graph of `ugraph`, in order. timings: the searched
    kernel and its rivals, empty where nothing was measured. error_bound: probability that the proof let a wrong µGraph
    through. search: candidates examined, seconds, why it stopped. machine: GPU, driver and versions.
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

    def __post_init__(self) -> None:
        for what, name in (("pattern", self.pattern), ("target", self.key.target)):
            if not _FOLDER_NAME.fullmatch(name):
                raise errors.ZooError(
                    f"zoo entry: {what} {name!r} names a folder; use lower-case letters, digits and _"
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
        """Whether the library runs for want of anything else: candidates were found, but each failed on this GPU, which may pass."""
        return bool(self.search.get("candidates")) and not self.ugraph.is_fused

    @property
    def folder(self) -> Path:
        """Where the entry lies inside a zoo: pattern, shape and dtype (made unique by the key), target."""
        return Path(self.pattern, f"{self.key.title}-{self.key.digest[:8]}", self.key.target)

    @cached_property
    def files(self) -> dict[str, str]:
        """The text of each file."""
        ugraph = json_format.save_json(json_format.ugraph_to_dict(self.ugraph))
        data = {
            "format": FORMAT,
            "version": VERSION,
            "pattern": self.pattern,
            "key": self.key.digest,
            "target": self.key.target,
            "schedule_version": self.key.schedule_version,
            "kernel_format": self.key.kernel_format,
            "schedules": [s.to_dict() for s in self.schedules],
            "timings": [asdict(t) for t in self.timings],
            "error_bound": self.error_bound,
            "search": dict(self.search),
            "machine": dict(self.machine),
            "created": self.created,
            "sha256": {KERNEL: _sha256(self.kernel), UGRAPH: _sha256(ugraph)},
        }
        entry = json_format.save_json(data | {"digest": json_format.digest(data)})
        return {KERNEL: self.kernel, UGRAPH: ugraph, ENTRY: entry}


def read_entry(folder: Path) -> Entry | Rejected:
    """Return the entry in `folder`, or why it cannot be used."""
    texts = {}
    for name in (ENTRY, UGRAPH, KERNEL):
        try:
            texts[name] = (folder / name).read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as e:
            return Rejected(
                f"{folder / name}: cannot be read ({e.strerror if isinstance(e, OSError) else 'not UTF-8'})"
            )
    try:
        return _checked(folder, texts)
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        RecursionError,
        errors.MirageError,
    ) as e:
        return Rejected(f"{folder}: is damaged ({type(e).__name__}: {str(e)[:200]})")


def _checked(folder: Path, texts: Mapping[str, str]) -> Entry | Rejected:
    data = json.loads(texts[ENTRY])
    if data["format"] != FORMAT or data["version"] != VERSION:
        return Rejected(
            f"{folder}: is {data['format']} version {data['version']}, this package reads {FORMAT} version {VERSION}"
        )
    told = data.pop("digest")
    if told != json_format.digest(data):
        return Rejected(
            f"{folder / ENTRY}: does not match its own digest; it is damaged or was edited"
        )
    for name in (KERNEL, UGRAPH):
        if data["sha256"][name] != _sha256(texts[name]):
            return Rejected(
                f"{folder / name}: is not the file that {ENTRY} was written for; it is damaged or was edited"
            )
    ugraph = json_format.ugraph_from_dict(json.loads(texts[UGRAPH]), str(folder / UGRAPH))
    key = replace(
        key_of(ugraph.program, data["target"]),
        schedule_version=data["schedule_version"],
        kernel_format=data["kernel_format"],
    )
    if key.digest != data["key"]:
        return Rejected(
            f"{folder}: its key is not that of its program; it is damaged, or was written by another version"
        )
    search = data["search"]
    if (
        not isinstance(search, dict)
        or not isinstance(search.get("candidates", 0), int)
        or not isinstance(data["created"], str)
    ):
        return Rejected(
            f"{folder / ENTRY}: search must be an object with a number of candidates, and created a string; it was edited"
        )
    if len(data["schedules"]) != len(ugraph.block_ops):
        return Rejected(
            f"{folder / ENTRY}: has {len(data['schedules'])} schedules for {len(ugraph.block_ops)} block graphs; it was edited"
        )
    return Entry(
        key,
        data["pattern"],
        ugraph,
        texts[KERNEL],
        tuple(Schedule.from_dict(s) for s in data["schedules"]),
        tuple(_measurement(**t) for t in data["timings"]),
        float(data["error_bound"]),
        data["search"],
        data["machine"],
        data["created"],
    )


def _measurement(name: str, **numbers: float) -> Measurement:
    """Errors: TypeError for what cannot be compared."""
    if not isinstance(name, str) or not all(isinstance(x, (int, float)) for x in numbers.values()):
        raise TypeError(f"the timing {name!r} has {numbers}")
    return Measurement(name, **numbers)  # type: ignore[arg-type]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
