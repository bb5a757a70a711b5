"""Errors of the command line: one line on stderr and an exit code, no traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from mirage_hf import errors
from mirage_hf.cli import show

#: typer's class for misuse of the command line. Newer versions bring a click of their own.
_UsageError: Any = typer.BadParameter.__base__

#: Exit codes.
MISUSE, FAILURE = 2, 1


@contextmanager
def _one_line() -> Iterator[None]:
    """Show the package's own errors and misuse as one line on stderr, and exit with a code."""
    try:
        yield
    except (errors.MirageError, OSError) as e:
        text = errors.printable(str(e), lines=True)
        show.errors_console.print(f"error: {text}", markup=False)
        raise SystemExit(FAILURE) from None
    except _UsageError as e:
        if type(e).__name__ == "NoArgsIsHelpError":
            raise
        command = e.ctx.command_path if e.ctx else "mirage-hf"
        message = " ".join(e.format_message().removeprefix("Invalid value: ").split())
        message = errors.printable(message)
        show.errors_console.print(f"error: {message} (see {command} --help)", markup=False)
        raise SystemExit(MISUSE) from None


class Commands(TyperGroup):
    """The commands, with errors in one line."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the command line."""
        with _one_line():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        with _one_line():
            return super().invoke(ctx)
