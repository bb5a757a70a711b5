"""Write an HTML page about a search: program, results with pictures and code, why it stopped.

The page loads no script, font or image from elsewhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from mirage_hf import errors, files
from mirage_hf.codegen import triton
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.render import picture
from mirage_hf.search import counter_labels
from mirage_hf.search.search_report import SearchReport, StopReason
from mirage_hf.tune import space
from mirage_hf.tune.candidates import TuneResult
from mirage_hf.tune.cost import library_us
from mirage_hf.tune.schedule_cost import estimated_us

#: Results that are shown with picture and code. All results are in the table.
MOST_SHOWN = 4

_CSS = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --text: #17202b; --faint: #556270; --line: #d3dae1; --card: #f5f7f9;
  --link: #005f99;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14181d; --text: #e4e9ee; --faint: #a3afbb; --line: #37414b; --card: #1d232a;
    --link: #7cc4f2;
  }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 92rem;
       background: var(--page); color: var(--text);
       font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; }
h2 { font-size: 1.2rem; margin: 2.25rem 0 .6rem; padding-bottom: .25rem;
     border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.6rem 0 .5rem; }
p { margin: .4rem 0; }
.faint { color: var(--faint); }
.notice { border-left: 4px solid #d55e00; padding: .3rem .8rem; background: var(--card); }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
      padding: .8rem 1rem; overflow: auto; font-size: .82rem; line-height: 1.45; tab-size: 4; }
pre, code { font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line);
         vertical-align: top; }
th { font-weight: 600; color: var(--faint); }
.number { text-align: right; }
.picture { overflow: auto; border: 1px solid var(--line); border-radius: 8px; background: #ffffff; }
.picture svg { display: block; }
details { margin: .6rem 0; }
summary { cursor: pointer; color: var(--link); }
ul { padding-left: 1.2rem; }
""".strip()

_PAGE = """
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{css}
</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
""".lstrip()


def write(
    path: str | Path,
    program: KernelGraph,
    ugraphs: Sequence[UGraph],
    report: SearchReport,
    tuned: TuneResult | None,
) -> Path:
    """Write the page about a search.

    Args:
        path: The file to write.
        program: The program that was searched for.
        ugraphs: The results, best first.
        report: The report of the search.
        tuned: The measured times.

    Returns:
        The path.

    Raises:
        OSError: The file cannot be written.
    """
    path = Path(path)
    files.write_text(path, page(program, ugraphs, report, tuned))
    return path


def page(
    program: KernelGraph,
    ugraphs: Sequence[UGraph],
    report: SearchReport,
    tuned: TuneResult | None,
) -> str:
    """Return the page as text. The arguments are those of `write`."""
    outputs = ", ".join(f"{t.name} {errors.shape(t.dims)}" for t in program.outputs)
    title = escape(f"Search: {outputs}")
    lead = "The library path is the best result."
    if ugraphs[0].is_fused:
        ops, kernels = _counted(len(program.ops), "op"), _counted(ugraphs[0].num_kernels, "kernel")
        lead = f"{ops} in the program, {kernels} in the best result."
    body = [f"<h1>{title}</h1>", f'<p class="faint">{escape(lead)}</p>']
    if report.stop == StopReason.INTERRUPTED:
        body.append(
            '<p class="notice">The search was interrupted; '
            "this is what it had found until then.</p>"
        )
    body += ["<h2>Program</h2>", f"<pre>{escape(str(program))}</pre>"]
    body += ["<h2>Results</h2>", *_results(ugraphs, tuned)]
    body += ["<h2>The search</h2>", *_search(report)]
    for n, u in enumerate(ugraphs[:MOST_SHOWN]):
        body += _ugraph(n, u)
    return _PAGE.format(title=title, css=_CSS, body="\n".join(body))


def estimate_us(u: UGraph) -> float | None:
    """Return the cost model's estimate of a µGraph at its schedules in µs.

    Returns None if it cannot be planned.
    """
    schedules = iter(u.schedules or ())
    total = 0.0
    try:
        for op in u.kernels.ops:
            if op.block is None:
                total += library_us(op)
            else:
                schedule = next(schedules, None) or space.default_schedule(op)
                total += estimated_us(op, schedule)
    except errors.CodegenError:
        return None
    return total


def _counted(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _table(
    head: Iterable[str], rows: Iterable[Iterable[object]], numbers: tuple[int, ...] = ()
) -> list[str]:
    """Return the lines of a table. `numbers` are the columns that are aligned to the right."""

    def cells(tag: str, row: Iterable[object]) -> str:
        starts = (
            f'<{tag} class="number">' if n in numbers else f"<{tag}>" for n in itertools.count()
        )
        return "".join(
            f"{start}{escape(str(x))}</{tag}>" for start, x in zip(starts, row, strict=False)
        )

    return [
        '<div class="wide"><table>',
        f"<thead><tr>{cells('th', head)}</tr></thead>",
        "<tbody>",
        *(f"<tr>{cells('td', row)}</tr>" for row in rows),
        "</tbody>",
        "</table></div>",
    ]


def _results(ugraphs: Sequence[UGraph], tuned: TuneResult | None) -> list[str]:
    measured = _measured_us(ugraphs, tuned)
    rows = []
    for n, u in enumerate(ugraphs):
        names = dict.fromkeys("block graph" if op.block else op.name for op in u.kernels.ops)
        what = ", ".join(names) if u.is_fused else "library path"
        rows.append((n, what, u.num_kernels, _us(estimate_us(u)), _us(measured.get(n))))
    note = "Not measured: no GPU was used. Estimates are the cost model's."
    if tuned is not None and tuned.measured:
        note = f"Measured on {tuned.device}, cold caches."
    head = ("#", "what", "kernels", "estimated µs", "measured µs")
    return [*_table(head, rows, (0, 2, 3, 4)), f'<p class="faint">{escape(note)}</p>']


def _us(us: float | None) -> str:
    return "–" if us is None else f"{us:.2f}"


def _measured_us(ugraphs: Sequence[UGraph], tuned: TuneResult | None) -> dict[int, float]:
    """Return the measured µs of each result that was timed, by its place."""
    times: dict[int, float] = {}
    for c in tuned.candidates if tuned else ():
        for n, u in enumerate(ugraphs):
            same = c.ugraph.kernels is u.kernels or (c.is_library and not u.is_fused)
            if same and c.timing is not None:
                times[n] = min(times.get(n, c.timing.us), c.timing.us)
    return times


def _search(report: SearchReport) -> list[str]:
    reason = f" ({report.reason})" if report.reason else ""
    lines = [f"<p>Stopped: <strong>{escape(report.stop)}</strong>{escape(reason)}.</p>"]
    if report.error_bound is not None:
        lines.append(
            "<p>Chance that the proofs accepted something wrong: "
            f"at most {report.error_bound:.1e}. Proofs and numeric checks took "
            f"{report.proof_seconds:.3f} s.</p>"
        )
    lines += [f'<p class="notice">{escape(note)}</p>' for note in report.notes]
    lines += _table(("part", "counted", "number"), counter_labels.rows(report.counters), (2,))
    lines.append("<h3>Rejected candidates</h3>")
    if report.rejected:
        rows = ((r.candidate, r.reason) for r in report.rejected)
        lines += _table(("candidate", "reason"), rows, (0,))
    else:
        lines.append('<p class="faint">None was rejected.</p>')
    return lines


def _ugraph(n: int, u: UGraph) -> list[str]:
    what = _counted(u.num_kernels, "kernel") + ("" if u.is_fused else ", the library path")
    lines = [
        f"<h2>Result {n}: {what}</h2>",
        f'<div class="picture">{picture.svg(u).strip()}</div>',
        "<details><summary>As text</summary>",
        f"<pre>{escape(str(u))}</pre>",
        "</details>",
    ]
    try:
        source = triton.generate(u).source
    except errors.MirageError as e:
        return [*lines, f'<p class="faint">No Triton program: {escape(str(e))}</p>']
    return [
        *lines,
        "<details><summary>Generated Triton program</summary>",
        f"<pre>{escape(source)}</pre>",
        "</details>",
    ]
