"""The commands `mirage-hf zoo list | verify`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from mirage_hf import errors
from mirage_hf.cli import show
from mirage_hf.cli.one_line_errors import FAILURE

if TYPE_CHECKING:
    from mirage_hf.zoo.store import Store

zoo_app = typer.Typer(
    no_args_is_help=True,
    help="Look into kernel zoos: the user's cache, the packaged one, or a folder.",
)

Root = Annotated[
    Path | None,
    typer.Argument(
        help="A zoo's folder or Hub repo. Default: the user's cache and the packaged zoo."
    ),
]


def _stores(root: Path | None) -> list[Store]:
    """Return the stores to look into.

    Raises:
        ZooError: `root` is not a zoo.
    """
    from mirage_hf.zoo import store

    if root is None:
        return [store.user_store(), store.packaged_store()]
    named = store.named_store(root)
    if reason := named.misplaced():
        raise errors.ZooError(reason)
    return [named]


@zoo_app.command("list")
def zoo_list(root: Root = None) -> None:
    """List entries: what they are for, how fast they are, and where they were measured."""
    for store in _stores(root):
        table = Table(box=None, pad_edge=False)
        for column in ("pattern", "program", "target", "kernels", "times", "GPU", "created"):
            table.add_column(column)
        entries = [entry for _, entry in store.verify()]
        for entry in entries:
            if isinstance(entry, errors.Rejected):
                continue
            times = ", ".join(f"{t.name} {t.median_us:.2f} µs" for t in entry.timings)
            table.add_row(
                entry.pattern,
                entry.key.title,
                entry.key.target,
                str(entry.ugraph.num_kernels),
                times or "not timed",
                entry.machine.get("gpu", "-"),
                entry.created,
            )
        damaged = len(entries) - table.row_count
        rejected = f", and {damaged} that `mirage-hf zoo verify` rejects" if damaged else ""
        show.plain(f"{store.root}: {table.row_count} entries{rejected}")
        if table.row_count:
            show.console.print(table)


@zoo_app.command("verify")
def zoo_verify(root: Root = None) -> None:
    """Check digests, key, µGraph and kernel text of every entry. Exit with 1 if one is rejected."""
    from mirage_hf.pipeline.trust import text_differs

    bad = 0
    for store in _stores(root):
        good = 0
        for folder, entry in store.verify():
            if isinstance(entry, errors.Rejected):
                reason = entry.reason
            else:
                differs = text_differs(entry)
                reason = f"{folder}: {differs}" if differs else ""
            if reason:
                bad += 1
                show.plain(reason)
            else:
                good += 1
        show.plain(f"{store.root}: {good} entries are valid")
    if bad:
        show.plain(
            f"{bad} entries are not valid; they are never used, "
            "and the next optimize() that needs them makes them anew"
        )
        raise typer.Exit(FAILURE)
