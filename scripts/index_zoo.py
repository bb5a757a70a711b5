"""Write the index of the packaged zoo's tuned kernels, `kernel_zoo/tuned.json`.

    python -m scripts.index_zoo

Run it after entries were added, replaced or measured again. With `tune="never"`, a kernel takes the
schedule of a tuned one of the same structure. The index says which entry has such a kernel.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mirage_hf.pipeline.tuned_kernels import INDEX, index_of

ROOT = Path(__file__).resolve().parent.parent / "kernel_zoo"


def text_of(root: Path) -> str:
    """Return the text of a zoo's index: a line for each entry."""
    targets = []
    for target, folders in index_of(root).items():
        lines = [f"    {json.dumps(folder)}: {json.dumps(ops)}" for folder, ops in folders.items()]
        targets.append(f"  {json.dumps(target)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(targets) + "\n}\n"


def write(root: Path) -> None:
    """Write the index of a zoo."""
    (root / INDEX).write_text(text_of(root), encoding="utf-8")


def main() -> None:
    """Write the index of the packaged zoo, or of another one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--zoo", type=Path, default=ROOT, help="the folder of the zoo")
    write(parser.parse_args().zoo)


if __name__ == "__main__":
    main()
