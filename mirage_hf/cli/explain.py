"""Print what a decoding step of a model would run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.table import Table

from mirage_hf.cli import show
from mirage_hf.decode import explain_step, layout_of
from mirage_hf.gpus import current_gpu


def show_step(model: Any, rows: int) -> None:
    """Print the kernels and torch ops of a step.

    Args:
        model: The model. It may be on the meta device.
        rows: The number of sequences.

    Raises:
        MirageError: The step cannot be traced.
    """
    kernels, torch_ops = explain_step(model, rows)
    show.heading(f"{type(model).__name__}: a decoding step of {rows} rows")
    layout = layout_of(model)
    if layout is not None:
        show.plain(str(layout))
    _table(
        ("kernels", "module", "reads", "computes", "MB", "µs at least", "why not"),
        (
            (
                str(e.count),
                e.module,
                e.what,
                e.ops,
                f"{e.count * e.bytes / 1e6:.1f}",
                f"{e.count * e.microseconds:.1f}",
                e.why,
            )
            for e in kernels
        ),
    )
    show.heading("torch ops in the same CUDA graph")
    _table(("ops", "op", "called at"), ((str(e.count), e.what, e.module) for e in torch_ops))
    read = sum(e.count * e.bytes for e in kernels)
    of_kernels = sum(e.count * e.bytes for e in kernels if not e.why)
    gpu = current_gpu()
    show.plain(
        f"\n{of_kernels / max(read, 1):.0%} of {read / 1e6:.0f} MB of weights are in programs that "
        "optimize() looks up or searches; "
        f"at least {read / gpu.bandwidth * 1e3:.2f} ms a token on {gpu.name}"
    )


def _table(columns: Iterable[str], rows: Iterable[tuple[str, ...]]) -> None:
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name)
    for row in rows:
        table.add_row(*row)
    show.console.print(table)
