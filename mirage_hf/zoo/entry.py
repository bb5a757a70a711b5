"""One entry of a kernel zoo: a µGraph, its kernel, and the evidence for both, in a folder.

`kernel.py` is the readable source and `ugraph.json` the µGraph. `entry.json` has everything else,
and digests of the other files. An entry of `superoptimize()` also has `search.json`, with all
µGraphs that the search accepted. Everything that can be checked is checked when an entry is read.
An entry that fails a check is `Rejected` with a reason and never run. Nothing is unpickled.
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
from mirage_hf.codegen import triton
from mirage_hf.codegen.generated_program import GeneratedProgram
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.errors import Rejected
from mirage_hf.graph import json_format
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.zoo.key import Key, key_of
from mirage_hf.zoo.machine import this_machine
from mirage_hf.zoo.search_record import SearchRecord, record_from_dict

KERNEL, UGRAPH, ENTRY, SEARCH = "kernel.py", "ugraph.json", "entry.json", "search.json"
FORMAT, VERSION = "mirage_hf.zoo_entry", 2
_FOLDER_NAME = re.compile(r"[a-z0-9][a-z0-9_]*")
_MOST_OF_A_REASON = 200

#: What reading a damaged or foreign file may raise.
_DAMAGE = (KeyError, TypeError, ValueError, AttributeError, RecursionError, errors.MirageError)


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
                    f"zoo entry: {what} {name!r} names a folder; use lower-case letters, digits "
                    "and _"
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
        return Path(self.pattern, f"{self.key.title}-{self.key.digest[:8]}", self.key.target)

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
            "sha256": {name: _sha256(text) for name, text in files.items()},
        }
        if self.key.options:
            data["options"] = self.key.options
        entry = json_format.save_json(data | {"digest": json_format.digest(data)})
        return {**files, ENTRY: entry}


class _NotUsableError(Exception):
    """An entry that was read and must not be used. Its text becomes the reason."""


def read_entry(folder: Path) -> Entry | Rejected:
    """Return the entry in `folder`, or why it cannot be used."""
    try:
        data = _checked_data(folder, _read_text(folder / ENTRY))
        return _entry(folder, data, _checked_files(folder, data))
    except _NotUsableError as e:
        return Rejected(str(e))
    except _DAMAGE as e:
        reason = errors.described(e)[:_MOST_OF_A_REASON]
        return Rejected(f"{folder}: is damaged ({reason})")


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as e:
        raise _NotUsableError(f"{path}: cannot be read ({e.strerror})") from None
    except UnicodeDecodeError:
        raise _NotUsableError(f"{path}: cannot be read (not UTF-8)") from None


def _checked_data(folder: Path, text: str) -> dict[str, Any]:
    """Return the content of entry.json, after checking its format and its own digest."""
    data: dict[str, Any] = json.loads(text)
    if (data["format"], data["version"]) != (FORMAT, VERSION):
        raise _NotUsableError(
            f"{folder}: is {data['format']} version {data['version']}, "
            f"this package reads {FORMAT} version {VERSION}"
        )
    if data.pop("digest") != json_format.digest(data):
        raise _NotUsableError(
            f"{folder / ENTRY}: does not match its own digest; it is damaged or was edited"
        )
    search = data["search"]
    if (
        not isinstance(search, dict)
        or not isinstance(search.get("candidates", 0), int)
        or not isinstance(data["created"], str)
    ):
        raise _NotUsableError(
            f"{folder / ENTRY}: search must be an object with a number of candidates, "
            "and created a string; it was edited"
        )
    return data


def _checked_files(folder: Path, data: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of every other file, after checking its digest."""
    texts = {}
    for name in (KERNEL, UGRAPH, SEARCH):
        if name == SEARCH and SEARCH not in data["sha256"]:
            continue
        texts[name] = _read_text(folder / name)
        if data["sha256"][name] != _sha256(texts[name]):
            raise _NotUsableError(
                f"{folder / name}: is not the file that {ENTRY} was written for; "
                "it is damaged or was edited"
            )
    return texts


def _entry(folder: Path, data: Mapping[str, Any], texts: Mapping[str, str]) -> Entry:
    ugraph = json_format.ugraph_from_dict(json.loads(texts[UGRAPH]), str(folder / UGRAPH))
    key = replace(
        key_of(
            ugraph.program,
            data["target"],
            data.get("options", ""),
            data["next_may_launch_early"],
        ),
        schedule_version=data["schedule_version"],
        kernel_format=data["kernel_format"],
    )
    if key.digest != data["key"]:
        raise _NotUsableError(
            f"{folder}: its key is not that of its program; it is damaged, "
            "or was written by another version"
        )
    if len(data["schedules"]) != len(ugraph.block_ops):
        raise _NotUsableError(
            f"{folder / ENTRY}: has {len(data['schedules'])} schedules for "
            f"{len(ugraph.block_ops)} block graphs; it was edited"
        )
    record = None
    if SEARCH in texts:
        record = record_from_dict(json.loads(texts[SEARCH]), str(folder / SEARCH))
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
        record,
    )


def _measurement(name: str, **numbers: float) -> Measurement:
    """Return a measurement, or raise TypeError for values that cannot be compared."""
    if not isinstance(name, str) or not all(isinstance(x, (int, float)) for x in numbers.values()):
        raise TypeError(f"the timing {name!r} has {numbers}")
    return Measurement(name, **numbers)  # type: ignore[arg-type]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
