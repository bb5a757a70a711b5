"""The command line: `mirage-hf demo | optimize | bench | search | zoo | env`. It only calls the public API and shows results."""
from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperGroup

from mirage_hf import errors
from mirage_hf.cli import show


class Commands(TyperGroup):
    """The package's own errors are messages, not tracebacks."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (errors.MirageError, OSError) as e:
            show.errors_console.print(f"error: {e}", markup=False)
            raise SystemExit(1) from None


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="Searched and proven fused GPU kernels for Hugging Face transformers.")
zoo_app = typer.Typer(no_args_is_help=True, help="Look into kernel zoos: the user's cache, the packaged one, or a folder.")
app.add_typer(zoo_app, name="zoo")

Model = Annotated[str, typer.Argument(help="A folder or a Hub id of a causal language model.")]
Prompt = Annotated[str, typer.Option(help="What the model goes on from.")]
Device = Annotated[str | None, typer.Option(help="cuda or cpu; a GPU if there is one.")]
DType = Annotated[str | None, typer.Option(help="Weights: float32, bfloat16 or float16 (GPU: as stored; demo and CPU: float32).")]


@app.command()
def demo(model: Annotated[str | None, typer.Option(help="A folder or a Hub id; the repository's small model unless given.")] = None,
         prompt: Prompt = "The ", tokens: Annotated[int, typer.Option(min=1)] = 200,
         time_limit: Annotated[float | None, typer.Option(help="Seconds for each search.")] = None,
         device: Device = None, dtype: DType = None) -> None:
    """Find, prove and use kernels for a small model, and show every step."""
    from mirage_hf.cli import demo as steps
    from mirage_hf.cli import models
    loaded = models.load(model or models.demo_model(), prompt, device=device, dtype=dtype or "float32")
    if not steps.run(loaded, tokens, time_limit):
        raise typer.Exit(1)


@app.command()
def optimize(model: Model, batch_size: Annotated[list[int] | None, typer.Option(help="Rows to make kernels for; may be repeated.")] = None,
             backend: str = "auto", tune: Annotated[str, typer.Option(help="auto, never or full")] = "auto",
             zoo: Annotated[str | None, typer.Option(help="A further kernel zoo: a folder or a Hub repo.")] = None,
             dry_run: Annotated[bool, typer.Option(help="Only say what would be done.")] = False,
             report_json: Annotated[Path | None, typer.Option(help="Write the report there as JSON.")] = None,
             device: Device = None, dtype: DType = None) -> None:
    """Search and tune kernels for a model, keep them in the user's cache, and print the report."""
    import mirage_hf as mi
    from mirage_hf.cli import models
    loaded = models.load(model, "The ", device=device, dtype=dtype)
    with show.searching("optimize") as note:
        done = mi.optimize(loaded.model, batch_sizes=tuple(batch_size or (1,)), backend=backend, tune=tune, zoo=zoo, dry_run=dry_run,
                           progress=note)
    report = done if dry_run else loaded.report
    show.plain(report)
    if report_json:
        report_json.write_text(json.dumps(report.to_dict(), indent=1, default=str) + "\n")


@app.command()
def bench(model: Model, prompt: Prompt = "The ", tokens: Annotated[int, typer.Option(min=1)] = 128,
          batch: Annotated[int, typer.Option(min=1)] = 1, rounds: Annotated[int, typer.Option(min=1)] = 5,
          device: Device = None, dtype: DType = None) -> None:
    """Time generate() before and after optimize(), greedy, taking everything into account."""
    import mirage_hf as mi
    from mirage_hf.cli import models
    loaded = models.load(model, prompt, batch, device, dtype)
    loaded.model.generation_config.eos_token_id = None  # every run makes all the tokens

    def rounds_of(name: str) -> float:
        loaded.generate(tokens)
        ms, times = show.median_ms(lambda: loaded.generate(tokens), rounds, loaded.device)
        show.plain(f"{name:<7} {ms / tokens:8.3f} ms a token ({min(times) / tokens:.3f} to {max(times) / tokens:.3f}, {rounds} runs)")
        return ms

    before = rounds_of("before")
    with show.searching("optimize") as note:
        mi.optimize(loaded.model, batch_sizes=(batch,), progress=note)
    after = rounds_of("after")
    show.plain(f"{before / after:.2f} times as fast; {loaded.device}, {loaded.model.dtype}, batch {batch}, {tokens} new tokens")


@app.command()
def search(program: Annotated[Path, typer.Argument(help="A kernel graph written by graph.to_json().")],
           time_limit: Annotated[float | None, typer.Option(help="Seconds.")] = None,
           threads: Annotated[int | None, typer.Option(min=1, help="Threads of the search; all cores unless given.")] = None,
           json_out: Annotated[Path | None, typer.Option("--json", help="Write results and report there.")] = None,
           triton: Annotated[Path | None, typer.Option(help="Write the best kernel there as a Triton file.")] = None) -> None:
    """Search for faster kernels of a tensor program."""
    import mirage_hf as mi
    from mirage_hf.graph import json_format
    if threads is not None:
        os.environ["MIRAGE_HF_THREADS"] = str(threads)
    graph = mi.load_graph(program)
    options: dict[str, Any] = {} if time_limit is None else {"time_limit": time_limit}
    with show.searching(program.name) as note:
        found = mi.superoptimize(graph, progress=note, **options)
    table = show.search_table()
    show.search_row(table, program.name, graph, found, found.report)
    show.console.print(table)
    show.plain(f"\n{found.report}")
    if len(found):
        show.heading("The best µGraph")
        show.plain(found[0])
    if json_out:
        data = {"report": found.report.to_dict(), "results": [json_format.ugraph_to_dict(u) for u in found]}
        json_out.write_text(json.dumps(data, indent=1) + "\n")
    if triton:
        show.plain(f"\nwritten: {found[0].generate_triton_program(triton)}")


# -- zoos -------------------------------------------------------------------------------------------------------------

Root = Annotated[Path | None, typer.Argument(help="A zoo's folder; the user's cache and the packaged zoo unless given.")]


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
        for e in store.entries():
            times = ", ".join(f"{t.name} {t.median_us:.2f} µs" for t in e.timings) or "not timed"
            table.add_row(e.pattern, e.key.title, e.key.target, str(e.ugraph.num_kernels), times, e.machine.get("gpu", "-"), e.created)
        show.plain(f"{store.root}: {table.row_count} entries")
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
        show.plain(f"{bad} entries do not check; they are never used, and the next optimize() that needs them makes them anew")
        raise typer.Exit(1)


@app.command()
def env() -> None:
    """Print versions, GPU, and the settings in force."""
    from mirage_hf.settings import settings
    from mirage_hf.zoo import store
    from mirage_hf.zoo.machine import this_machine
    in_force = settings()
    rows = {**this_machine(), "cache": in_force.cache_dir, "search threads": in_force.threads, "search seconds": in_force.search_seconds,
            "packaged zoo": store.packaged_store().root}
    for name, value in rows.items():
        show.plain(f"{name:<15} {value}")


if __name__ == "__main__":
    app()
