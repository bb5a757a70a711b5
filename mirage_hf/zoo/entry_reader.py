"""Read an entry of a zoo as data that somebody else may have written.

Every field is checked before it is used. An entry that fails a check is `Rejected` with a reason.
Nothing is unpickled, executed or compiled here. Whether an entry may run is decided in
`pipeline/trust.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mirage_hf import errors, files
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.errors import Rejected
from mirage_hf.graph import json_format
from mirage_hf.zoo.entry import (
    ENTRY,
    FORMAT,
    KERNEL,
    MOST_BYTES,
    SEARCH,
    UGRAPH,
    VERSION,
    Entry,
    Measurement,
    sha256,
)
from mirage_hf.zoo.key import key_of
from mirage_hf.zoo.search_record import record_from_dict

_MOST_OF_A_REASON = 400

#: The most measurements of an entry, and the longest time in µs.
_MOST_TIMINGS, _MOST_US = 64, 1e12

#: How deep the statistics of a search may be nested.
_MOST_DEPTH = 4


class _NotUsableError(Exception):
    """An entry that was read and must not be used. Its text becomes the reason."""


def read_entry(
    folder: Path, links_inside: Path | None = None, *, whole: bool = True
) -> Entry | Rejected:
    """Return the entry in `folder`, or why it cannot be used.

    Args:
        folder: The folder <zoo>/<pattern>/<shape>-<dtype>-<key>/<target>.
        links_inside: The folder that links may not lead out of. None: the zoo.
        whole: Whether the kernel's text and the record of the search are read, too. If not, the
            entry has an empty text and no record. It cannot be stored or run.
    """
    inside = links_inside or folder.parents[2]
    try:
        data = _checked_data(folder, _read_text(folder / ENTRY, inside))
        names = (KERNEL, UGRAPH, SEARCH) if whole else (UGRAPH,)
        return _entry(folder, data, _checked_files(folder, data, inside, names))
    except _NotUsableError as e:
        reason = str(e)
    except Exception as e:  # whatever hostile data leads to
        reason = f"{folder}: is damaged ({errors.described(e)[:_MOST_OF_A_REASON]})"
    return Rejected(errors.printable(reason))


def _read_text(path: Path, inside: Path) -> str:
    try:
        return files.read_bytes(path, MOST_BYTES[path.name], inside).decode("utf-8")
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
    if not _is_search(data["search"]) or not isinstance(data["created"], str):
        raise _NotUsableError(
            f"{folder / ENTRY}: search must be an object with a number of candidates and reasons "
            "in words, and created a string; it was edited"
        )
    return data


def _is_search(search: Any) -> bool:
    """Return whether the statistics of a search have the types that reports rely on."""
    if not isinstance(search, dict) or type(search.get("candidates", 0)) is not int:
        return False
    refused = search.get("refused", [])
    words = [search.get(name) or "" for name in ("stop", "reason", "version")]
    return isinstance(refused, list) and all(isinstance(w, str) for w in (*words, *refused))


def _checked_files(
    folder: Path, data: Mapping[str, Any], inside: Path, names: Sequence[str]
) -> dict[str, str]:
    """Return the texts of other files, after checking their digests."""
    texts = {}
    for name in names:
        if name == SEARCH and SEARCH not in data["sha256"]:
            continue
        texts[name] = _read_text(folder / name, inside)
        if data["sha256"][name] != sha256(texts[name]):
            raise _NotUsableError(
                f"{folder / name}: is not the file that {ENTRY} was written for; "
                "it is damaged or was edited"
            )
    return texts


def _entry(folder: Path, data: Mapping[str, Any], texts: Mapping[str, str]) -> Entry:
    ugraph = json_format.ugraph_from_dict(json.loads(texts[UGRAPH]), str(folder / UGRAPH))
    early = data["next_may_launch_early"]
    key = replace(
        key_of(ugraph.program, data["target"], data.get("options", ""), _of_type(bool, early)),
        schedule_version=_of_type(int, data["schedule_version"]),
        kernel_format=_of_type(int, data["kernel_format"]),
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
        texts.get(KERNEL, ""),
        tuple(Schedule.from_dict(s) for s in data["schedules"]),
        _timings(data["timings"]),
        _number("error_bound", data["error_bound"], 1.0),
        _plain("search", data["search"]),
        {str(name): str(value) for name, value in _plain("machine", data["machine"]).items()},
        _plain("created", data["created"]),
        record,
    )


def _of_type(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value


def _number(name: str, value: Any, most: float) -> float:
    """Return a number between 0 and `most`."""
    if type(value) not in (int, float) or not 0 <= value <= most:
        raise ValueError(f"{name} is {value!r}, it must be a number from 0 to {most:g}")
    return float(value)


def _plain(name: str, value: Any, depth: int = 0) -> Any:
    """Return statistics with printable texts and finite numbers."""
    if isinstance(value, str):
        return errors.printable(value, lines=True)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if depth < _MOST_DEPTH and isinstance(value, list):
        return [_plain(name, v, depth + 1) for v in value]
    if depth < _MOST_DEPTH and isinstance(value, dict):
        return {
            errors.printable(key): _plain(name, inner, depth + 1) for key, inner in value.items()
        }
    raise ValueError(f"{name} holds more than texts and finite numbers; it was edited")


def _timings(data: list[Any]) -> tuple[Measurement, ...]:
    if len(data) > _MOST_TIMINGS:
        raise ValueError(f"{len(data)} timings; an entry has {_MOST_TIMINGS} at most")
    return tuple(_measurement(**t) for t in data)


def _measurement(name: Any, median_us: Any, low_us: Any, high_us: Any, runs: Any) -> Measurement:
    """Return a measurement, or raise ValueError for values that no measurement has."""
    times = (median_us, low_us, high_us)
    is_time = all(type(t) in (int, float) and 0 < t <= _MOST_US for t in times)
    in_order = is_time and low_us <= median_us <= high_us
    if not isinstance(name, str) or not in_order or type(runs) is not int or runs < 1:
        raise ValueError(
            f"the timing {name!r} has median {median_us!r}, low {low_us!r}, high {high_us!r} "
            f"and {runs!r} runs"
        )
    return Measurement(errors.printable(name), median_us, low_us, high_us, runs)
