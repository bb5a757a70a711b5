"""Charts of what the benchmarks measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

SERIES = {
    "ours": ("ours", "#1b7837"),
    "eager": ("torch eager", "#999999"),
    "eager compiled": ("torch.compile max-autotune", "#5a7fb5"),
    "floor": ("floor: memory or tensor cores", "#d9a441"),
}
"""By contender: what the legend says, colour."""

TITLES = {
    "norm_linear": "RMSNorm +\nLinear 4096",
    "norm_linear_6144": "RMSNorm +\nLinear 6144",
    "gated_mlp": "gated MLP\n4096",
    "lora": "LoRA r16\n4096",
    "lora_256": "LoRA r16\n256→4096",
    "gqa_decode": "GQA decode\n4096 keys",
    "gqa_paper": "GQA,\n256 queries",
    "qk_norm_attention": "q, k norm +\nattention",
    "mla_decode": "MLA\ndecode",
    "ntrans": "nTrans",
}

LEAST_US = 0.5
"""Where the axis begins; the floors of the smallest blocks lie below it, less than any launch takes."""


PEERS = {
    "ours": ("ours", "#1b7837"),
    "eager": ("HF eager", "#999999"),
    "static": ("HF static, compiled", "#5a7fb5"),
    "attention": ("HF static with our attention", "#5aae61"),
    "liger": ("HF with Liger", "#a35ea3"),
    "compile": ("max-autotune step in a CUDA graph", "#8fb8de"),
    "bare": ("ours, without adapters", "#7fbf7b"),
    "floor": ("floor: memory", "#d9a441"),
}
"""Of bench_generate: what the legend says, colour."""


def draw_generate(report: dict[str, Any], path: Path) -> list[Path]:
    """ms/token by batch size, a panel for each model and prompt length, on a log scale where there are several batch sizes; writes `path`
    with .png and .svg added. Models lie side by side where there is one prompt length.

    Of what is a step only, its time. Errors: SystemExit.
    """
    figure_of, formatter, _, patch = _matplotlib()
    rows = [r for r in report["rows"] if "peers" in r]
    if not rows:
        sys.exit("nothing to draw: no row was measured")
    models, prompts = (
        list(dict.fromkeys(r["model"] for r in rows)),
        sorted({r["prompt"] for r in rows}),
    )
    down, across = (len(models), len(prompts)) if len(prompts) > 1 else (1, len(models))
    figure = figure_of(figsize=(1.4 + 3.2 * across, 0.8 + 2.6 * down), layout="constrained")
    panels = figure.subplots(
        down, across, squeeze=False, sharey="row" if len(prompts) > 1 else "none"
    )
    shown = {
        name: label for name, label in PEERS.items() if any(_ms(r, name) is not None for r in rows)
    }
    log = len({r["batch"] for r in rows}) > 1
    for model, line in zip(models, panels.reshape(len(models), len(prompts)), strict=True):
        for prompt, axes in zip(prompts, line, strict=True):
            here = sorted(
                (r for r in rows if (r["model"], r["prompt"]) == (model, prompt)),
                key=lambda r: r["batch"],
            )
            for n, (name, (_, colour)) in enumerate(shown.items()):
                bars = [
                    (x + (n - (len(shown) - 1) / 2) * 0.8 / len(shown), _ms(r, name))
                    for x, r in enumerate(here)
                ]
                measured = [(x, ms) for x, ms in bars if ms is not None]
                drawn = axes.bar(
                    [x for x, _ in measured],
                    [ms for _, ms in measured],
                    0.8 / len(shown),
                    color=colour,
                )
                axes.bar_label(drawn, fmt="%.3g", fontsize=6 if log else 8)
            axes.set_xticks(range(len(here)), [str(r["batch"]) for r in here], fontsize=8)
            if log:
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter(formatter())
            axes.set_title(f"{model}, prompt {prompt}", fontsize=9)
            axes.set_xlabel("batch", fontsize=8)
            _plain(axes)
    for line in panels:
        line[0].set_ylabel("ms a token of each row" + " (log)" * log, fontsize=8)
    handles = [patch(color=colour, label=label) for label, colour in shown.values()]
    figure.legend(
        handles=handles,
        loc="outside upper center",
        fontsize=8,
        ncols=min(len(shown), 3 * across),
        frameon=False,
    )
    return _save(figure, path)


def _ms(row: dict[str, Any], name: str) -> float | None:
    if name == "floor":
        return row["floor_ms"]  # type: ignore[no-any-return]
    found = row["peers"].get(name, {})
    return (found.get("ms_per_token") or found.get("step_ms") or {}).get("median")


def _matplotlib() -> tuple[Any, Any, Any, Any]:
    """Figure, ScalarFormatter, rc_context, Patch. Errors: SystemExit."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
        from matplotlib.ticker import ScalarFormatter
    except ImportError:
        sys.exit(
            "the chart needs matplotlib; install it, or draw the JSON file elsewhere with --redraw"
        )
    return Figure, ScalarFormatter, rc_context, Patch


def _plain(axes: Any) -> None:
    axes.grid(axis="y", which="major", linewidth=0.4, alpha=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _save(figure: Any, path: Path) -> list[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    written = [path.with_name(path.name + suffix) for suffix in (".png", ".svg")]
    with _matplotlib()[2]({"svg.hashsalt": "mirage_hf"}):  # the same numbers give the same file
        figure.savefig(written[0], dpi=150)
        figure.savefig(written[1], metadata={"Date": None})
    return written


def draw_blocks(report: dict[str, Any], path: Path) -> list[Path]:
    """Bars of each row, grouped by block, µs on a log scale; writes `path` with .png and .svg added. Errors: SystemExit."""
    figure_of, formatter, *_ = _matplotlib()
    rows = [r for r in report["rows"] if "contenders" in r]
    order = list(dict.fromkeys(r["block"] for r in rows))
    rows.sort(key=lambda r: order.index(r["block"]))  # a resumed run may have split a block
    if not rows:
        sys.exit("nothing to draw: no row was measured")
    at, labels = _places(rows)
    figure = figure_of(figsize=(max(6.0, 0.45 * at[-1] + 2.0), 4.8), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(SERIES)
    for n, (name, (label, colour)) in enumerate(SERIES.items()):
        bars = [
            (x + (n - (len(SERIES) - 1) / 2) * width, _us(r, name))
            for x, r in zip(at, rows, strict=True)
        ]
        shown = [(x, us) for x, us in bars if us is not None]
        axes.bar([x for x, _ in shown], [us for _, us in shown], width, label=label, color=colour)
    axes.plot(at, [r["target_us"] for r in rows], "k_", markersize=11, label="target")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(formatter())
    axes.set_ylim(bottom=LEAST_US)
    axes.set_ylabel("µs a call (log)")
    axes.set_xticks(at, labels, fontsize=8)
    axes.set_title(
        f"Blocks by batch size: float16, cold, in a CUDA graph, {report['machine']['gpu']}",
        pad=24,
        fontsize=11,
    )
    axes.legend(fontsize=8, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    axes.margins(x=0.01)
    _plain(axes)
    return _save(figure, path)


def _us(row: dict[str, Any], name: str) -> float | None:
    return row["floor_us"] if name == "floor" else row["contenders"].get(name, {}).get("us")


def _places(rows: list[dict[str, Any]]) -> tuple[list[float], list[str]]:
    """Where each row's bars stand, with a gap between blocks, and what is written under them: the block under its middle row."""
    at: list[float] = []
    for n, r in enumerate(rows):
        at.append(at[-1] + (1.0 if r["block"] == rows[n - 1]["block"] else 1.6) if at else 0.0)
    labels = []
    for r in rows:
        group = [x for x in rows if x["block"] == r["block"]]
        title = TITLES.get(r["block"], r["block"]) if r is group[(len(group) - 1) // 2] else ""
        labels.append(f"{r['rows']}\n{title}")
    return at, labels
