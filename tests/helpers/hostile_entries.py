"""Hostile entries of a kernel zoo: every digest is right, and something else is wrong.

`hostile` changes the folder of a valid entry. Most changes are wrong, and a few are harmless, as a
new name of a value is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mirage_hf.codegen import triton
from mirage_hf.graph import json_format
from mirage_hf.zoo.entry import ENTRY, KERNEL, UGRAPH
from mirage_hf.zoo.entry_reader import read_entry
from mirage_hf.zoo.key import key_of
from tests.helpers.mutants import mutants

Json = Any

#: Values that no field expects. JSON holds all of them.
STRANGE: tuple[Json, ...] = (
    None,
    True,
    [],
    {},
    [[]],
    {"": {}},
    "",
    "..",
    "../../x",
    "/etc/passwd",
    "x" * 5000,
    "\x1b]0;owned\x07\x1b[2J",
    "\u202egnp.exe",
    "a\nb: 9 entries are valid",
    "__import__('os').system('true')",
    "[red]markup[/red]",
    "\ud800",
    -1,
    0,
    3,
    1 << 31,
    1 << 62,
    1 << 63,
    1 << 64,
    10**400,
    -(10**400),
    0.5,
    1e308,
    -1e308,
    1e-308,
)


def sign(folder: Path) -> None:
    """Write the digests of the present files into entry.json."""
    data = json.loads((folder / ENTRY).read_text())
    for name in data["sha256"]:
        if (folder / name).is_file():
            data["sha256"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    write(folder, data)


def write(folder: Path, data: Json) -> None:
    """Write entry.json with the digest of its content."""
    data.pop("digest", None)
    (folder / ENTRY).write_text(json.dumps(data | {"digest": json_format.digest(data)}))


def edit(folder: Path, **fields: Json) -> None:
    write(folder, json.loads((folder / ENTRY).read_text()) | fields)


def edited_kernel(folder: Path, payload: str, rng: random.Random) -> None:
    """Put a payload somewhere into the text of the kernel."""
    lines = (folder / KERNEL).read_text().split("\n")
    at = rng.choice((0, len(lines), rng.randrange(len(lines))))
    text = rng.choice((payload, "# a remark", "\ufeff", "import os; " + payload))
    lines.insert(at, text)
    (folder / KERNEL).write_text("\n".join(lines) if rng.random() < 0.8 else payload)
    sign(folder)


def swapped_ugraph(folder: Path, payload: str, rng: random.Random) -> None:
    """Put in a small change of the µGraph, with the kernel that is generated from it."""
    entry = read_entry(folder)
    found = [m.ugraph for m in mutants(entry.ugraph)]
    ugraph = rng.choice(found)
    (folder / UGRAPH).write_text(ugraph.to_json())
    with contextlib.suppress(Exception):  # what cannot be made keeps its old text
        source = triton.generate(ugraph, entry.schedules).source
        (folder / KERNEL).write_text(source)
    sign(folder)


def other_program(folder: Path, payload: str, rng: random.Random) -> None:
    """Put in a µGraph of another program, under its own key or under the one asked for."""
    text = (folder / UGRAPH).read_text()
    sizes = rng.choice(
        (("256", "512"), ("64", "128"), ('"float16"', '"bfloat16"'), ("1e-06", "0.1"))
    )
    (folder / UGRAPH).write_text(text.replace(*sizes))
    sign(folder)
    if rng.random() < 0.5:
        with_own_key(folder)


def with_own_key(folder: Path) -> None:
    """Name the key of the program that is there, if it can be read."""
    data = json.loads((folder / ENTRY).read_text())
    with contextlib.suppress(Exception):  # what cannot be made keeps its old text
        ugraph = json_format.ugraph_from_dict(json.loads((folder / UGRAPH).read_text()))
        edit(folder, key=key_of(ugraph.program, data["target"]).digest)


def wrong_schedule(folder: Path, payload: str, rng: random.Random) -> None:
    data = json.loads((folder / ENTRY).read_text())
    schedule = data["schedules"][0]
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice([*schedule, "unknown"])
        value = rng.choice((*STRANGE, False, 1, 2, 4, 64, 1024, 1 << 20, 1 << 30))
        if name == "tiles" and rng.random() < 0.8:
            tiles = schedule["tiles"] if isinstance(schedule["tiles"], dict) else {}
            schedule["tiles"] = tiles | {rng.choice([*tiles, "q"]): value}
        else:
            schedule[name] = value
    data["schedules"] = rng.choice(([schedule], [schedule], [schedule, schedule], []))
    write(folder, data)


def path_trick(folder: Path, payload: str, rng: random.Random) -> None:
    """Put something else in the place of a file, or name files elsewhere."""
    name = rng.choice((KERNEL, UGRAPH, ENTRY))
    kind = rng.randrange(8)
    if kind == 0:
        edit(folder, pattern=rng.choice(("../x", "/tmp", "..", "", "a/b", "x" * 300, "A", ".hid")))
    elif kind == 1:
        edit(folder, target=rng.choice(("../sm_90", "..", "*", "", "sm_90/..", "any", "x" * 300)))
    elif kind == 2:
        data = json.loads((folder / ENTRY).read_text())
        data["sha256"][rng.choice(("../../../secret", "/etc/passwd"))] = "0" * 64
        del data["sha256"][rng.choice((KERNEL, UGRAPH))]
        write(folder, data)
    else:
        (folder / name).unlink()
        if kind == 3:
            (folder / name).mkdir()
        elif kind == 4:
            os.mkfifo(folder / name)
        else:
            target = rng.choice(
                ("/dev/zero", "/etc/passwd", name, "..", "/dev/stdin", "/proc/self")
            )
            (folder / name).symlink_to(target)


def other_architecture(folder: Path, payload: str, rng: random.Random) -> None:
    target = rng.choice(("sm_80", "sm_100", "sm_9", "cpu", "any", "sm_999999"))
    if target == json.loads((folder / ENTRY).read_text())["target"]:
        target = "sm_75"
    edit(folder, target=target)
    if rng.random() < 0.5:
        with_own_key(folder)


def strange_file(folder: Path, payload: str, rng: random.Random) -> None:
    name = rng.choice((KERNEL, UGRAPH, ENTRY))
    depth = 100_000
    content = rng.choice(
        (
            b"[" * depth + b"]" * depth,
            b'{"a":' * depth + b"1" + b"}" * depth,
            b"9" * 100_000,
            b"NaN",
            b"",
            b"\x00" * 100,
            b"\xff\xfe",
            b"\x80\x04\x95cos\nsystem\n",
            b" " * ((1 << 22) + 1),
        )
    )
    (folder / name).write_bytes(content)
    if name != ENTRY:
        sign(folder)


def leaves(data: Json, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values in JSON data."""
    inner = data.items() if isinstance(data, dict) else enumerate(data)
    found = []
    for key, value in inner:
        found.append((*path, key))
        if isinstance(value, (dict, list)):
            found += leaves(value, (*path, key))
    return found


def strange_value(folder: Path, payload: str, rng: random.Random) -> None:
    """Put strange values in the place of others."""
    name = rng.choice((ENTRY, UGRAPH))
    data = json.loads((folder / name).read_text())
    for _ in range(rng.choice((1, 1, 3))):
        place = data
        *path, last = rng.choice(leaves(data))
        for key in path:
            place = place[key]
        value = rng.choice(STRANGE)
        if isinstance(place, dict) and rng.random() < 0.15:
            place[str(value)] = place.pop(last)
        elif rng.random() < 0.15:
            del place[last]
        else:
            place[last] = value
    try:
        if name == ENTRY:
            write(folder, data)
        else:
            (folder / name).write_text(json.dumps(data), encoding="utf-8")
            sign(folder)
    except ValueError:  # a digest of infinity does not exist
        (folder / name).write_text(json.dumps(data))
    if rng.random() < 0.5:
        with_own_key(folder)


def renamed(folder: Path, payload: str, rng: random.Random) -> None:
    """Give a value of the µGraph a name that could become code."""
    name = rng.choice(
        (
            "tl",
            "torch",
            "exec",
            "class",
            "x\n    import os",
            'x"""\nimport os\n"""',
            "x; import os",
            "__builtins__",
            "run",
            "𝐱",
            payload,
        )
    )
    text = (folder / UGRAPH).read_text()
    data = json.loads(text)
    names = {n["name"] for n in data["program"]["nodes"] if "name" in n}
    names |= {
        a["name"] for n in data["kernels"]["nodes"] for a in n.get("block", {}).get("axes", ())
    }
    old = rng.choice(sorted(names))
    (folder / UGRAPH).write_text(text.replace(json.dumps(old), json.dumps(name)), encoding="utf-8")
    with contextlib.suppress(Exception):  # what cannot be made keeps its old text
        entry = read_entry(folder)
        (folder / KERNEL).write_text(triton.generate(entry.ugraph, entry.schedules).source)
    sign(folder)
    with_own_key(folder)


KINDS: tuple[Callable[[Path, str, random.Random], None], ...] = (
    edited_kernel,
    swapped_ugraph,
    other_program,
    wrong_schedule,
    path_trick,
    other_architecture,
    strange_file,
    strange_value,
    strange_value,
    renamed,
)
