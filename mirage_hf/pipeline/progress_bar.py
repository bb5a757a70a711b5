"""The progress bar of a terminal while kernels are looked up, searched and tuned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from rich.console import Console
from rich.errors import LiveError
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from mirage_hf.search import counter_labels
from mirage_hf.search.search_report import Counters

#: Called with a stage and its detail: the calls of `windows.ProgressCallback`, and for optimize()
#: also ("kernel", (number, total, pattern)).
Note = Callable[..., Any]


@contextmanager
def bar(what: str, console: Console) -> Iterator[Note]:
    """Show a progress bar on a console, if it is a terminal.

    Yields:
        The function to call with a stage and its detail.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as shown:
        task = shown.add_task(what, total=None)
        kernel = ""

        def note(stage: str, detail: Any = None) -> None:
            nonlocal kernel
            if new := stage == "kernel":
                number, total, name = detail
                shown.update(task, total=total, completed=number - 1)
                kernel, stage, detail = f" kernel {number} of {total}, {name}:", "looked up", None
            shown.update(task, description=f"{what}:{kernel} {stage}{_detail(detail)}", refresh=new)

        yield note


@contextmanager
def bar_unless(progress: Note | None, what: str) -> Iterator[Note | None]:
    """Yield the caller's `progress`, or a bar on stderr if there is none.

    There is no bar if stderr is no terminal, or if transformers' progress bars are switched off.
    """
    from transformers.utils import logging

    console = Console(stderr=True, highlight=False)
    if progress is not None or not console.is_terminal or not logging.is_progress_bar_enabled():
        yield progress
        return
    with ExitStack() as stack:
        with suppress(LiveError):  # the caller shows something live already
            progress = stack.enter_context(bar(what, console))
        yield progress


def _detail(detail: Any) -> str:
    match detail:
        case Counters():
            shown = [
                f"{number} {label}"
                for group, label, number in counter_labels.rows(detail)
                if group in ("found", "values", "kernels")
            ]
            return ", " + ", ".join(shown[:4])
        case (int() as done, int() as total, name):
            return f" {done} of {total}: {name}"
        case _:
            return ""
