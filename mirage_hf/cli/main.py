"""The command line: `mirage-hf demo | optimize | bench | search | zoo | env`. It only calls the public API and shows results."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperGroup

from mirage_hf import errors
from mirage_hf.cli import show

_UsageError: Any = typer.BadParameter.__base__
"""typer's class for misuse of the command line; newer versions bring a click of their own."""

MISUSE, FAILURE = 2, 1


@contextmanager
def _one_line() -> Iterator[None]:
    """The package's own errors and misuse are one line on stderr and an exit code, not a traceback or a panel."""
    try:
        yield
    except (errors.MirageError, OSError) as e:
        show.errors_console.print(f"error: {e}", markup=False)
        raise SystemExit(FAILURE) from None
    except _UsageError as e:
        if type(e).__name__ == "NoArgsIsHelpError":
            raise
        command = e.ctx.command_path if e.ctx else "mirage-hf"
        message = " ".join(e.format_message().removeprefix("Invalid value: ").split())
        show.errors_console.print(f"error: {message} (see {command} --help)", markup=False)
        raise SystemExit(MISUSE) from None


class Commands(TyperGroup):
    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _one_line():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _one_line():
            return super().invoke(ctx)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Searched and proven fused GPU kernels for Hugging Face transformers.",
)
zoo_app = typer.Typer(
    no_args_is_help=True,
    help="Look into kernel zoos: the user's cache, the packaged one, or a folder.",
)
app.add_typer(zoo_app, name="zoo")

Model = Annotated[str, typer.Argument(help="A folder or a Hub id of a causal language model.")]
Prompt = Annotated[str, typer.Option(help="What the model goes on from.")]
Device = Annotated[str | None, typer.Option(help="cuda or cpu; a GPU if there is one.")]
DType = Annotated[
    str | None,
    typer.Option(
        help="Weights: float32, bfloat16 or float16 (GPU: as stored; demo and CPU: float32)."
    ),
]


@app.command()
def demo(
    model: Annotated[
        str | None,
        typer.Option(help="A folder or a Hub id; the repository's small model unless given."),
    ] = None,
    prompt: Prompt = "The ",
    tokens: Annotated[int, typer.Option(min=1)] = 200,
    time_limit: Annotated[float | None, typer.Option(help="Seconds for each search.")] = None,
    device: Device = None,
    dtype: DType = None,
) -> None:
    """Find, prove and use kernels for a small model, and show every step."""
    from mirage_hf.cli import demo as steps
    from mirage_hf.cli import models

    loaded = models.load(
        model or models.demo_model(), prompt, device=device, dtype=dtype or "float32"
    )
    if not steps.run(loaded, tokens, time_limit):
        raise typer.Exit(1)


@app.command()
def optimize(
    model: Model,
    batch_size: Annotated[
        list[int] | None, typer.Option(help="Rows to make kernels for; may be repeated.")
    ] = None,
    backend: str = "auto",
    tune: Annotated[
        str,
        typer.Option(
            help="On a GPU: auto measures what was never measured, never takes the cost model's word, full measures anew."
        ),
    ] = "auto",
    zoo: Annotated[
        str | None, typer.Option(help="A further kernel zoo: a folder or a Hub repo.")
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Only say what would be done.")] = False,
    report_json: Annotated[
        Path | None, typer.Option(help="Write the report there as JSON.")
    ] = None,
    device: Device = None,
    dtype: DType = None,
) -> None:
    """Search and tune kernels for a model, keep them in the user's cache, and print the report."""
    import mirage_hf as mi
    from mirage_hf.cli import models
    from mirage_hf.match.eligible import check_options

    _check_files(
        {f"the model's {f.name}": f for kind in models.FILES for f in Path(model).glob(kind)},
        {"--report-json": report_json},
    )
    rows = tuple(batch_size or (1,))
    try:
        check_options(None, rows, None, zoo, None, backend=backend, tune=tune)
    except errors.OptimizeError as e:
        raise typer.BadParameter(str(e).removeprefix("optimize: ")) from None
    loaded = models.load(model, None, device=device, dtype=dtype)
    with show.searching("optimize") as note:
        done = mi.optimize(
            loaded.model,
            batch_sizes=rows,
            backend=backend,
            tune=tune,
            zoo=zoo,
            dry_run=dry_run,
            progress=note,
        )
    report = done if dry_run else loaded.report
    show.plain(report)
    if report_json:
        report_json.write_text(json.dumps(report.to_dict(), indent=1, default=str) + "\n")


@app.command()
def bench(
    model: Model,
    prompt: Prompt = "The ",
    tokens: Annotated[int, typer.Option(min=1)] = 128,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    device: Device = None,
    dtype: DType = None,
) -> None:
    """Time generate() before and after optimize(), greedy, taking everything into account."""
    import mirage_hf as mi
    from mirage_hf.cli import models

    loaded = models.load(model, prompt, batch, device, dtype)
    loaded.model.generation_config.eos_token_id = None  # every run makes all the tokens

    def rounds_of(name: str) -> float:
        loaded.generate(tokens)
        ms, times = show.median_ms(lambda: loaded.generate(tokens), rounds, loaded.device)
        show.plain(
            f"{name:<7} {ms / tokens:8.3f} ms a token ({min(times) / tokens:.3f} to {max(times) / tokens:.3f}, {rounds} runs)"
        )
        return ms

    before = rounds_of("before")
    with show.searching("optimize") as note:
        mi.optimize(loaded.model, batch_sizes=(batch,), progress=note)
    after = rounds_of("after")
    show.plain(
        f"{before / after:.2f} times as fast; {loaded.device}, {loaded.model.dtype}, batch {batch}, {tokens} new tokens"
    )
    if loaded.device.type == "cpu":
        show.plain("without a GPU kernels run as torch code, which is right but slower")


@app.command()
def search(
    program: Annotated[
        Path,
        typer.Argument(
            exists=True, dir_okay=False, help="A kernel graph, written by graph.to_json(PATH)."
        ),
    ],
    config: Annotated[
        str | None, typer.Option(help="A preset of restrictions: attention, lora or mlp.")
    ] = None,
    backend: Annotated[str, typer.Option(help="auto, triton or cpu")] = "auto",
    time_limit: Annotated[float | None, typer.Option(help="Seconds.")] = None,
    max_kernels: Annotated[int | None, typer.Option(help="Most kernels of a result.")] = None,
    max_block_ops: Annotated[int | None, typer.Option(help="Most ops in one kernel.")] = None,
    griddims: Annotated[
        list[str] | None,
        typer.Option(help="Allowed blocks per grid dim, as 64 or 32,4; may be repeated."),
    ] = None,
    blockdims: Annotated[
        list[str] | None, typer.Option(help="Allowed threads per dim, as 128; may be repeated.")
    ] = None,
    franges: Annotated[
        list[int] | None, typer.Option(help="Allowed trips of the loop; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the proofs' random inputs.")] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of the search; all cores unless given.")
    ] = None,
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Use and keep results of earlier searches.")
    ] = True,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Load the result from this file, or keep it there.")
    ] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Write results and report there.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with results, pictures and code there.")
    ] = None,
    triton: Annotated[
        Path | None, typer.Option(help="Write the best kernel there as a Triton file.")
    ] = None,
) -> None:
    """Search for faster kernels of a tensor program."""
    import mirage_hf as mi
    from mirage_hf.cli import live
    from mirage_hf.graph import json_format
    from mirage_hf.pipeline.superoptimizer_options import search_options
    from mirage_hf.settings import settings

    _check_files(
        {"PROGRAM": program},
        {"--checkpoint": checkpoint, "--json": json_out, "--html": html, "--triton": triton},
    )
    options: dict[str, Any] = {
        "config": config,
        "backend": backend,
        "griddims": _dims("--griddims", griddims),
        "blockdims": _dims("--blockdims", blockdims),
        "franges": franges or None,
        "max_kernels": max_kernels,
        "max_block_ops": max_block_ops,
        "time_limit": time_limit,
    }
    try:
        search_options(**options)
    except errors.SearchError as e:
        raise typer.BadParameter(str(e).removeprefix("superoptimize: ")) from None
    if threads is not None:
        os.environ["MIRAGE_HF_THREADS"] = str(threads)
    graph = mi.load_graph(program)
    with live.searching(program.name, time_limit or settings().search_seconds) as view:
        found = mi.superoptimize(
            graph, progress=view, seed=seed, checkpoint=checkpoint, cache=cache, **options
        )
    if found.report.stop == "interrupted":
        show.plain(
            "interrupted: this is what was found until then; it was not kept, the same command searches anew\n"
        )
    table = show.search_table()
    show.search_row(table, program.name, graph, found, found.report)
    show.console.print(table)
    show.plain(f"\n{found.report}")
    show.heading("The best µGraph" if found[0].is_fused else "The library path is the best µGraph")
    show.plain(found[0])
    if json_out:
        data = {
            "report": found.report.to_dict(),
            "results": [json_format.ugraph_to_dict(u) for u in found],
        }
        json_out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    written = [json_out] if json_out else []
    written += [found.to_html(html)] if html else []
    written += [found[0].generate_triton_program(triton)] if triton else []
    for path in written:
        show.plain(f"\nwritten: {path}")


def _check_files(read: Mapping[str, Path], written: Mapping[str, Path | None]) -> None:
    """Before anything is loaded or searched. Errors: misuse where an option's file cannot be one, or is one that is read, or another
    option's."""
    taken = {path.resolve(): name for name, path in read.items()}
    for name, path in written.items():
        if path is None:
            continue
        if path.is_dir() or not path.absolute().parent.is_dir():
            what = (
                "is a folder, give a file"
                if path.is_dir()
                else f"has no folder {path.parent}, make it first"
            )
            raise typer.BadParameter(f"{name} {path}: {what}")
        if (other := taken.setdefault(path.resolve(), name)) != name:
            raise typer.BadParameter(
                f"{name} {path}: is {other}, which would be overwritten; give another file"
            )


def _dims(name: str, given: list[str] | None) -> list[tuple[int, ...]] | None:
    """Sizes as "64", "32,4" or "32x4"."""
    for text in given or ():
        if not re.fullmatch(r"\d+([,x]\d+)*", text):
            raise typer.BadParameter(f"{name} {text}: give numbers as 64, 32,4 or 32x4")
    return [tuple(map(int, re.split("[,x]", text))) for text in given] if given else None


# -- zoos -------------------------------------------------------------------------------------------------------------

Root = Annotated[
    Path | None,
    typer.Argument(help="A zoo's folder; the user's cache and the packaged zoo unless given."),
]


def _stores(root: Path | None) -> list[Any]:
    from mirage_hf.zoo import store

    return [store.named_store(root)] if root else [store.user_store(), store.packaged_store()]


@zoo_app.command("list")
def zoo_list(root: Root = None) -> None:
    """List entries: what they are for, how fast, found where."""
    for store in _stores(root):
        table = Table(box=None, pad_edge=False)
        for column in ("pattern", "program", "target", "kernels", "times", "GPU", "created"):
            table.add_column(column)
        found = [entry for _, entry in store.verify()]
        for e in (x for x in found if not isinstance(x, errors.Rejected)):
            times = ", ".join(f"{t.name} {t.median_us:.2f} µs" for t in e.timings) or "not timed"
            table.add_row(
                e.pattern,
                e.key.title,
                e.key.target,
                str(e.ugraph.num_kernels),
                times,
                e.machine.get("gpu", "-"),
                e.created,
            )
        damaged = len(found) - table.row_count
        show.plain(
            f"{store.root}: {table.row_count} entries"
            + (f", and {damaged} that `mirage-hf zoo verify` refuses" if damaged else "")
        )
        if table.row_count:
            show.console.print(table)


@zoo_app.command("verify")
def zoo_verify(root: Root = None) -> None:
    """Check every entry: digests, keys, µGraphs. The exit code is 1 if one does not check."""
    bad = 0
    for store in _stores(root):
        good = 0
        for _, found in store.verify():
            if isinstance(found, errors.Rejected):
                bad += 1
                show.plain(found.reason)
            else:
                good += 1
        show.plain(f"{store.root}: {good} entries check")
    if bad:
        show.plain(
            f"{bad} entries do not check; they are never used, and the next optimize() that needs them makes them anew"
        )
        raise typer.Exit(1)


@app.command()
def env() -> None:
    """Print versions, GPU, and the settings in force."""
    from mirage_hf.settings import settings
    from mirage_hf.zoo import store
    from mirage_hf.zoo.machine import this_machine

    in_force = settings()
    rows = {
        **this_machine(),
        "cache": in_force.cache_dir,
        "search threads": in_force.threads,
        "search seconds": in_force.search_seconds,
        "packaged zoo": store.packaged_store().root,
    }
    for name, value in rows.items():
        show.plain(f"{name:<15} {value}")


if __name__ == "__main__":
    app()
