"""The command line: `mirage-hf demo | optimize | bench | explain | search | zoo | env | doctor`.

It only calls the public API and shows results. Commands import torch and everything that needs it
when they run, so that `--help` does not wait seconds for it.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from mirage_hf import errors, files
from mirage_hf.cli import show
from mirage_hf.cli.one_line_errors import FAILURE, Commands
from mirage_hf.cli.zoo import zoo_app

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Searched and proven fused GPU kernels for Hugging Face transformers.",
)
app.add_typer(zoo_app, name="zoo")

Model = Annotated[str, typer.Argument(help="A folder or a Hub id of a causal language model.")]
Prompt = Annotated[str, typer.Option(help="The text that the model continues.")]
Device = Annotated[
    str | None,
    typer.Option(help="cuda, cuda:1 or cpu. Default: the first GPU, or the CPU if there is none."),
]
DType = Annotated[
    str | None,
    typer.Option(
        help="The dtype of weights: float32, bfloat16 or float16. "
        "Default: as stored on a GPU, float32 on a CPU and in the demo."
    ),
]


@app.command()
def demo(
    model: Annotated[
        str | None,
        typer.Option(help="A folder or a Hub id. Default: a small model of the package."),
    ] = None,
    prompt: Prompt = "The ",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 200,
    time_limit: Annotated[
        float | None,
        typer.Option(
            help="The most seconds of each search. Default: MIRAGE_HF_SEARCH_SECONDS, else 60."
        ),
    ] = None,
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
        raise typer.Exit(FAILURE)


@app.command()
def optimize(
    model: Model,
    batch_size: Annotated[
        list[int] | None,
        typer.Option(
            help="Sequences that decode together, up to 1,024. May be repeated. Default: 1."
        ),
    ] = None,
    backend: Annotated[
        str, typer.Option(help="triton on a GPU, cpu elsewhere. auto decides by device.")
    ] = "auto",
    tune: Annotated[
        str,
        typer.Option(
            help="What is measured on a GPU. auto: kernels that were never measured. "
            "never: nothing, the cost model chooses. full: everything anew, and more candidates."
        ),
    ] = "auto",
    zoo: Annotated[
        str | None,
        typer.Option(
            help="A further kernel zoo, a folder or a Hub repo. Its kernels are proven again. "
            "Default: none."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option(help="Say what would be done, and change nothing.")
    ] = False,
    report_json: Annotated[
        Path | None, typer.Option(help="Write the report to this file as JSON. Default: no file.")
    ] = None,
    device: Device = None,
    dtype: DType = None,
) -> None:
    """Search and tune kernels for a model, keep them in the user's cache, and print the report."""
    import mirage_hf as mi
    from mirage_hf.cli import models
    from mirage_hf.match.options import check_options

    model_files = [f for kind in models.FILES for f in Path(model).glob(kind)]
    _check_files({f"the model's {f.name}": f for f in model_files}, {"--report-json": report_json})
    rows = tuple(batch_size or (1,))
    if tune == "background":
        raise typer.BadParameter(
            "--tune background: its tuner ends with the model, which ends with this command; "
            "use --tune auto, which waits for it"
        )
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
        files.write_text(report_json, json.dumps(report.to_dict(), indent=1, default=str) + "\n")


@app.command()
def bench(
    model: Model,
    prompt: Prompt = "The ",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate in each call.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Sequences that decode together.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Timed calls, before and after.")] = 5,
    device: Device = None,
    dtype: DType = None,
) -> None:
    """Time greedy generate() before and after optimize(), everything included."""
    import mirage_hf as mi
    from mirage_hf.cli import models

    loaded = models.load(model, prompt, batch, device, dtype)
    loaded.model.generation_config.eos_token_id = None  # every run makes all the tokens

    def median_ms(name: str) -> float:
        loaded.generate(tokens)
        ms, times = show.median_ms(lambda: loaded.generate(tokens), rounds, loaded.device)
        fastest, slowest = min(times) / tokens, max(times) / tokens
        show.plain(
            f"{name:<7} {ms / tokens:8.3f} ms a token "
            f"({fastest:.3f} to {slowest:.3f}, {rounds} runs)"
        )
        return ms

    before = median_ms("before")
    with show.searching("optimize") as note:
        mi.optimize(loaded.model, batch_sizes=(batch,), progress=note)
    after = median_ms("after")
    where = f"{loaded.device}, {loaded.model.dtype}, batch {batch}, {tokens} new tokens"
    show.plain(f"{_compared(before, after, loaded.device.type)}; {where}")


def _compared(before: float, after: float, device_type: str) -> str:
    """Return the comparison of two times in words."""
    if before >= after:
        return f"{before / after:.2f} times as fast"
    slower = f"{after / before:.1f} times slower"
    return f"{slower}: the cpu backend is for checking" if device_type == "cpu" else slower


@app.command()
def explain(
    model: Annotated[str, typer.Argument(help="A folder or a Hub id. Only its config is read.")],
    batch: Annotated[int, typer.Option(min=1, help="Sequences that decode together.")] = 1,
    dtype: Annotated[
        str, typer.Option(help="The dtype of weights: float32, bfloat16 or float16.")
    ] = "bfloat16",
) -> None:
    """Say which ops of a decoding step become kernels, and which stay torch ops, and why."""
    from mirage_hf.cli import explain as pages
    from mirage_hf.cli import models

    pages.show_step(models.of_config(model, dtype), batch)


@app.command()
def search(
    program: Annotated[
        Path,
        typer.Argument(
            exists=True, dir_okay=False, help="A kernel graph, written by graph.to_json(PATH)."
        ),
    ],
    config: Annotated[
        str | None,
        typer.Option(help="A preset of restrictions: attention, lora or mlp. Default: none."),
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            help="auto and triton measure candidates if there is a GPU. cuda measures CUDA "
            "kernels. cpu never measures."
        ),
    ] = "auto",
    time_limit: Annotated[
        float | None,
        typer.Option(
            help="The most seconds of the search. Default: MIRAGE_HF_SEARCH_SECONDS, else 60."
        ),
    ] = None,
    max_kernels: Annotated[
        int | None, typer.Option(help="The most kernels of a result. Default: 4, or the preset's.")
    ] = None,
    max_block_ops: Annotated[
        int | None, typer.Option(help="The most ops in one kernel. Default: 64, or the preset's.")
    ] = None,
    griddims: Annotated[
        list[str] | None,
        typer.Option(
            help="Allowed numbers of blocks per grid dim, as 64 or 32,4. May be repeated. "
            "Default: any."
        ),
    ] = None,
    blockdims: Annotated[
        list[str] | None,
        typer.Option(
            help="Allowed numbers of threads per dim, as 128. May be repeated. Default: any."
        ),
    ] = None,
    franges: Annotated[
        list[int] | None,
        typer.Option(help="Allowed numbers of loop trips. May be repeated. Default: any."),
    ] = None,
    clusters: Annotated[
        bool,
        typer.Option(
            "--clusters",
            help="Also find kernels whose blocks form clusters (sm_90). They are CUDA C++, so it "
            "needs a GPU or --backend cpu.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="The seed of the proofs' random inputs.")] = 0,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Threads of the search. Default: MIRAGE_HF_THREADS, else one for each core.",
        ),
    ] = None,
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Use and keep results of earlier searches.")
    ] = True,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Load the result from this file, or keep it there. Default: the user's cache."
        ),
    ] = None,
    json_out: Annotated[
        Path | None,
        typer.Option(
            "--json", help="Write results and report to this file as JSON. Default: no file."
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a page with results, pictures and code. Default: no file."),
    ] = None,
    triton: Annotated[
        Path | None,
        typer.Option(help="Write the best kernel as a Triton file. Default: no file."),
    ] = None,
) -> None:
    """Search for faster kernels of a tensor program."""
    import mirage_hf as mi
    from mirage_hf.cli import live
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
        "clusters": clusters,
    }
    try:
        search_options(**options)
    except errors.SearchError as e:
        raise typer.BadParameter(str(e).removeprefix("superoptimize: ")) from None
    if threads is not None:
        os.environ["MIRAGE_HF_THREADS"] = str(threads)
    graph = mi.load_graph(program)
    with live.searching(program.name, time_limit or settings().search_seconds) as view:
        result = mi.superoptimize(
            graph, progress=view, seed=seed, checkpoint=checkpoint, cache=cache, **options
        )
    _show_result(program.name, graph, result)
    for path in _write_result(result, json_out, html, triton):
        show.plain(f"\nwritten: {path}")


def _show_result(name: str, graph: Any, result: Any) -> None:
    if result.report.stop == "interrupted":
        show.plain(
            "interrupted: these are the results until then; they were not kept, "
            "so the same command searches anew\n"
        )
    table = show.search_table()
    show.search_row(table, name, graph, result, result.report)
    show.console.print(table)
    show.plain(f"\n{result.report}")
    best = "The best µGraph" if result[0].is_fused else "The library path is the best µGraph"
    show.heading(best)
    show.plain(result[0])


def _write_result(
    result: Any, json_out: Path | None, html: Path | None, triton: Path | None
) -> list[Path]:
    """Write the files that were asked for. Return their paths."""
    from mirage_hf.graph import json_format

    written = []
    if json_out:
        ugraphs = [json_format.ugraph_to_dict(u) for u in result]
        data = {"report": result.report.to_dict(), "results": ugraphs}
        files.write_text(json_out, json.dumps(data, indent=1) + "\n")
        written.append(json_out)
    if html:
        written.append(result.to_html(html))
    if triton:
        written.append(result[0].generate_triton_program(triton))
    return written


def _check_files(read: Mapping[str, Path], written: Mapping[str, Path | None]) -> None:
    """Check the files of options before anything is loaded or searched.

    Args:
        read: The files that the command reads, by a name for messages.
        written: The files that it writes, by option. None: the option was not given.

    Raises:
        typer.BadParameter: A file cannot be written, or another argument names it, too.
    """
    taken = {_identity(path): name for name, path in read.items()}
    for name, path in written.items():
        if path is None:
            continue
        if path.is_dir():
            raise typer.BadParameter(f"{name} {path}: is a folder, give a file")
        folder = path.absolute().parent
        if not folder.is_dir():
            raise typer.BadParameter(f"{name} {path}: has no folder {path.parent}, make it first")
        if (other := taken.setdefault(_identity(path), name)) != name:
            raise typer.BadParameter(
                f"{name} {path}: is {other}, which would be overwritten; give another file"
            )


def _identity(path: Path) -> object:
    """Return what two names of one file have in common, links included."""
    try:
        found = path.stat()
    except OSError:
        return path.absolute().parent.resolve() / path.name
    is_file = stat.S_ISREG(found.st_mode)
    return (found.st_dev, found.st_ino) if is_file else object()


def _dims(name: str, given: list[str] | None) -> list[tuple[int, ...]] | None:
    """Parse sizes that are written as "64", "32,4" or "32x4"."""
    for text in given or ():
        if not re.fullmatch(r"\d+([,x]\d+)*", text):
            raise typer.BadParameter(f"{name} {text}: give numbers as 64, 32,4 or 32x4")
    return [tuple(map(int, re.split("[,x]", text))) for text in given] if given else None


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
        "state": in_force.state_dir,
        "search threads": in_force.threads,
        "search seconds": in_force.search_seconds,
        "packaged zoo": store.packaged_store().root,
    }
    for name, value in rows.items():
        show.plain(f"{name:<15} {value}")


@app.command()
def doctor() -> None:
    """Say what works on this machine and what is missing. Exit with 1 if something is."""
    from mirage_hf.cli import doctor as checks

    found = []
    for finding in checks.findings():
        show.plain(finding)
        found.append(finding.status)
    problems = found.count(checks.PROBLEM)
    if problems:
        are = "1 problem" if problems == 1 else f"{problems} problems"
        show.plain(f"\n{are}: follow the arrows, then run `mirage-hf doctor` again")
        raise typer.Exit(FAILURE)
    limits = found.count(checks.LIMIT)
    show.plain("\noptimize() works here" + (", with the limits above" if limits else ""))


if __name__ == "__main__":
    app()
