"""The commands `mirage-hf zoo list | show | verify | add | pull | push | export`."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from mirage_hf import errors
from mirage_hf.cli import show
from mirage_hf.cli.one_line_errors import FAILURE

if TYPE_CHECKING:
    from mirage_hf.zoo.entry import Entry
    from mirage_hf.zoo.store import Store

zoo_app = typer.Typer(
    no_args_is_help=True,
    help="Look into kernel zoos, verify them, and exchange them through folders and the Hub.",
)

Root = Annotated[
    str | None,
    typer.Argument(
        help="A zoo's folder or Hub repo. Default: the user's cache and the packaged zoo."
    ),
]
Source = Annotated[
    str | None,
    typer.Option("--from", help="The zoo to take entries from. Default: the user's cache."),
]
Destination = Annotated[
    Path | None, typer.Option("--to", help="The zoo to add to. Default: the user's cache.")
]
Target = Annotated[
    str | None, typer.Option(help="Take entries for this target only, as sm_90. Default: all.")
]


def _named(root: str) -> Store:
    """Return the zoo with a name.

    Raises:
        ZooError: `root` is not a zoo.
    """
    from mirage_hf.zoo import store

    named = store.named_store(root)
    if reason := named.misplaced():
        raise errors.ZooError(reason)
    return named


def _stores(root: str | None) -> list[Store]:
    """Return the stores to look into."""
    from mirage_hf.zoo import store

    return [store.user_store(), store.packaged_store()] if root is None else [_named(root)]


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
            cells = (
                entry.pattern,
                entry.key.title,
                entry.key.target,
                entry.ugraph.num_kernels,
                times or "not timed",
                entry.machine.get("gpu", "-"),
                entry.created,
            )
            table.add_row(*map(show.cell, cells))
        damaged = len(entries) - table.row_count
        rejected = f", and {damaged} that `mirage-hf zoo verify` rejects" if damaged else ""
        show.plain(f"{store.root}: {table.row_count} entries{rejected}")
        if table.row_count:
            show.console.print(table)


@zoo_app.command("verify")
def zoo_verify(root: Root = None) -> None:
    """Check every entry on this machine, and prove its µGraph. Exit with 1 if one is rejected."""
    from mirage_hf.pipeline import zoo_exchange

    bad = 0
    for store in _stores(root):
        good = 0
        for _, entry in zoo_exchange.verified(store):
            if isinstance(entry, errors.Rejected):
                bad += 1
                show.plain(entry.reason)
            else:
                good += 1
        show.plain(f"{store.root}: {good} entries are valid")
    if bad:
        show.plain(
            f"{bad} entries are not valid; they are never used, "
            "and the next optimize() that needs them makes them anew"
        )
        raise typer.Exit(FAILURE)


@zoo_app.command("show")
def zoo_show(
    name: Annotated[
        str, typer.Argument(help="Part of the entry's folder or key, as `zoo list` prints them.")
    ],
    root: Root = None,
    svg: Annotated[
        Path | None, typer.Option(help="Draw the µGraph into this file. Default: no file.")
    ] = None,
) -> None:
    """Show an entry: its program, its µGraph, its times and its rivals', and its proof here."""
    store, entry = _found(name, _stores(root))
    show.plain(store.root / entry.folder)
    show.heading("Program")
    show.plain(entry.ugraph.program)
    show.heading("µGraph")
    show.plain(entry.ugraph)
    show.heading("Times")
    _show_times(entry)
    show.heading("Evidence")
    _show_evidence(store, entry)
    if svg is not None:
        show.plain(f"\nwritten: {entry.ugraph.visualize(svg)}")


def _found(name: str, stores: list[Store]) -> tuple[Store, Entry]:
    """Return the only entry with a name.

    Raises:
        ZooError: There is none, or there are several.
    """
    found, reasons = [], []
    for store in stores:
        for folder, entry in store.verify():
            place = str(folder.relative_to(store.root)) if folder != store.root else ""
            if isinstance(entry, errors.Rejected):
                reasons += [entry.reason] if name in place else []
            elif name in place or entry.key.digest.startswith(name):
                found.append((store, entry))
    if not found:
        where = ", ".join(str(store.root) for store in stores)
        raise errors.ZooError("; ".join(reasons) or f"{where}: no entry is called {name!r}")
    if len(found) > 1:
        names = ", ".join(f"{entry.folder}" for _, entry in found[:5])
        more = " …" if len(found) > 5 else ""
        raise errors.ZooError(f"{name!r} names {len(found)} entries: {names}{more}; name one")
    return found[0]


def _show_times(entry: Entry) -> None:
    if not entry.timings:
        show.plain("not measured")
        return
    table = Table(box=None, pad_edge=False)
    for column in ("", "median", "10 % to 90 %", "runs"):
        table.add_column(column)
    for t in sorted(entry.timings, key=lambda t: t.median_us):
        spread = f"{t.low_us:.2f} to {t.high_us:.2f} µs"
        table.add_row(*map(show.cell, (t.name, f"{t.median_us:.2f} µs", spread, t.runs)))
    show.console.print(table)


def _show_evidence(store: Store, entry: Entry) -> None:
    from mirage_hf.pipeline import zoo_exchange

    verdict = zoo_exchange.verified_entry(entry, store.root / entry.folder, store)
    if isinstance(verdict, errors.Rejected):
        show.plain(f"not accepted here: {verdict.reason}")
    elif store.is_trusted:
        show.plain(f"packaged; chance of a wrong proof at most {verdict.error_bound:.1e}")
    else:
        show.plain(f"proven here; chance of a wrong proof at most {verdict.error_bound:.1e}")
    for schedule in entry.schedules:
        show.plain(schedule)
    gpu = entry.machine.get("gpu", "none")
    show.plain(f"made {entry.created} on GPU {gpu}; key {entry.key.digest[:16]}")


@zoo_app.command("add")
def zoo_add(
    folder: Annotated[Path, typer.Argument(help="The folder of the zoo to add.")],
    to: Destination = None,
    target: Target = None,
) -> None:
    """Verify the entries of a folder, and add them to your cache or to another folder."""
    _merge(_named(str(folder.absolute())), _writable(to), target)


@zoo_app.command("pull")
def zoo_pull(
    repo: Annotated[str, typer.Argument(help="The Hub repo, as user/name or user/name@revision.")],
    to: Destination = None,
    target: Target = None,
) -> None:
    """Fetch a zoo from the Hub, verify its entries, and add them to your cache."""
    _merge(_named(_hub_name(repo)), _writable(to), target)


@zoo_app.command("export")
def zoo_export(
    folder: Annotated[Path, typer.Argument(help="The folder to write, or to add to.")],
    source: Source = None,
    target: Target = None,
) -> None:
    """Write the entries of your cache, or of another zoo, to a folder."""
    _merge(_from(source), _writable(folder), target)


@zoo_app.command("push")
def zoo_push(
    repo: Annotated[str, typer.Argument(help="The Hub repo, as user/name.")],
    source: Source = None,
    target: Target = None,
    private: Annotated[bool, typer.Option(help="Make a new repo private.")] = False,
) -> None:
    """Upload the entries of your cache that a Hub repo lacks, or has slower ones for."""
    from mirage_hf.pipeline import zoo_exchange
    from mirage_hf.zoo import hub
    from mirage_hf.zoo.store import Store

    name = _hub_name(repo).removeprefix("hf://")
    found = hub.fetched_if_there(name)
    present = Store(found, links_inside=hub.links_inside(found)) if found else None
    with tempfile.TemporaryDirectory(prefix="mirage_hf_") as folder:
        better = Store(Path(folder), writable=True)
        counts = _counted(zoo_exchange.merge(_from(source), better, target, rival=present))
        if not counts[zoo_exchange.Merged.ADDED]:
            show.plain(f"{name}: {_summary(counts)}; nothing to upload")
            return
        added = counts[zoo_exchange.Merged.ADDED]
        address = hub.upload(name, better.root, f"Add {added} kernels", private)
    show.plain(f"{address}: {_summary(counts)}")


def _hub_name(repo: str) -> str:
    return f"hf://{repo.removeprefix('hf://')}"


def _from(source: str | None) -> Store:
    from mirage_hf.zoo import store

    return store.user_store() if source is None else _named(source)


def _writable(folder: Path | None) -> Store:
    """Return a zoo to write: the user's cache, or a folder that is made if it is missing."""
    from mirage_hf.zoo import store

    return store.user_store() if folder is None else store.Store(folder, writable=True)


def _merge(source: Store, destination: Store, target: str | None) -> None:
    """Merge zoos and say what became of the entries. Exit with 1 if one was rejected."""
    from mirage_hf.pipeline import zoo_exchange

    counts = _counted(zoo_exchange.merge(source, destination, target))
    show.plain(f"{destination.root}: {_summary(counts)}")
    if counts[zoo_exchange.Merged.REJECTED]:
        raise typer.Exit(FAILURE)


def _counted(merged: object) -> Counter[str]:
    """Count what became of entries, and print the reasons of those that were rejected."""
    counts: Counter[str] = Counter()
    for _, became, reason in merged:  # type: ignore[attr-defined]
        counts[became] += 1
        if reason:
            show.plain(reason)
    return counts


def _summary(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[what]} {what}" for what in ("added", "replaced", "kept", "rejected"))
