"""Write the entries of a kernel zoo anew after the generated text or a stored name changed.

    python -m scripts.refresh_zoo                 # kernel_zoo/
    python -m scripts.refresh_zoo --zoo FOLDER --check

For each entry, `kernel.py` is generated from the stored µGraph and schedules, and the key and all
digests are computed again. A folder whose key changed is renamed. Schedules, timings, search
statistics, machine and date stay as they are. So this is only right if the same schedule still
generates the same code up to names and comments, which `scripts/compare_kernels.py` checks.

Run `scripts/build_cubins.py` afterwards, because cubins belong to a text. Then run
`scripts/index_zoo.py`.

Names that changed in the JSON since the entry was written are mapped by the tables below.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from mirage_hf.codegen import triton
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.graph import json_format
from mirage_hf.zoo.entry import ENTRY, UGRAPH, Entry, Measurement
from mirage_hf.zoo.key import key_of

ROOT = Path(__file__).resolve().parent.parent

#: Old names of schedule fields and the present ones.
SCHEDULE_FIELDS: dict[str, str] = {
    "hasten": "trigger_early",
    "lazy": "reduce_after_loop",
    "preload": "prefetch_steps",
    "split": "cooperating_blocks",
}

#: Old names of keys in ugraph.json (at any depth) and the present ones.
UGRAPH_KEYS: dict[str, str] = {}


def refreshed(folder: Path) -> Entry:
    """Return the entry in `folder` with kernel, key and digests of this version."""
    data = json.loads((folder / ENTRY).read_text(encoding="utf-8"))
    stored = json.loads((folder / UGRAPH).read_text(encoding="utf-8"))
    ugraph = json_format.ugraph_from_dict(_with_present_names(stored), str(folder / UGRAPH))
    schedules = tuple(Schedule.from_dict(_renamed(s, SCHEDULE_FIELDS)) for s in data["schedules"])
    # Entries of version 1 have this promise in the program.
    early = data.get("next_may_launch_early", stored["program"].get("leads", False))
    return Entry(
        key=key_of(ugraph.program, data["target"], next_may_launch_early=early),
        pattern=data["pattern"],
        ugraph=ugraph,
        kernel=triton.generate(ugraph, schedules, next_may_launch_early=early).source,
        schedules=schedules,
        timings=tuple(Measurement(**t) for t in data["timings"]),
        error_bound=data["error_bound"],
        search=data["search"],
        machine=data["machine"],
        created=data["created"],
    )


def _with_present_names(x: Any) -> Any:
    """Return a copy of a JSON value with all keys mapped by UGRAPH_KEYS."""
    if isinstance(x, dict):
        mapped = {key: _with_present_names(value) for key, value in x.items()}
        return _renamed(mapped, UGRAPH_KEYS)
    if isinstance(x, list):
        return [_with_present_names(value) for value in x]
    return x


def _renamed(data: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in data.items()}


def write(entry: Entry, zoo: Path, old_folder: Path) -> bool:
    """Write the files of an entry that differ, and return whether there were any."""
    folder = zoo / entry.folder
    changed = folder != old_folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in entry.files.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            changed = True
    if folder != old_folder:
        shutil.rmtree(old_folder)
        if not any(old_folder.parent.iterdir()):
            old_folder.parent.rmdir()
    return changed


def main() -> None:
    """Refresh a zoo, or with --check say what would change."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--zoo", type=Path, default=ROOT / "kernel_zoo", help="the zoo to refresh")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if an entry is out of date"
    )
    args = parser.parse_args()
    folders = sorted(path.parent for path in args.zoo.glob(f"*/*/*/{ENTRY}"))
    changed = 0
    for folder in folders:
        entry = refreshed(folder)
        if args.check:
            stored = {name: folder / name for name in entry.files}
            changed += args.zoo / entry.folder != folder or any(
                path.read_text(encoding="utf-8") != entry.files[name]
                for name, path in stored.items()
            )
        else:
            changed += write(entry, args.zoo, folder)
    print(f"{changed} of {len(folders)} entries {'are out of date' if args.check else 'changed'}")
    if args.check and changed:
        sys.exit(1)


if __name__ == "__main__":
    main()
