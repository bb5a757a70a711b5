"""`model.mirage`: the report, the ledger, and the decode runner of an optimized model."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from mirage_hf.swap.guard import Binding
from mirage_hf.swap.report import Report, Row, with_counts
from mirage_hf.swap.swap import Ledger, put_back, strays

NAME = "mirage"


class Handle:
    """What optimize() leaves on a model, as a plain attribute. Copies and pickles of the model carry None in its place."""

    def __init__(self, report: Report, ledger: Ledger, bindings: dict[str, Binding]):
        self._report, self._ledger, self._bindings = report, ledger, bindings
        self._runner: Any = None
        self._runner_model: nn.Module | None = None

    @property
    def report(self) -> Report:
        """What was done, with the calls and fallbacks counted so far."""
        rows = tuple(self._counted(r) for r in self._report.rows)
        return replace(self._report, rows=rows, decode=None if self._runner is None else dict(self._runner.counts))

    def _counted(self, row: Row) -> Row:
        binding = self._bindings.get(row.module)
        return row if binding is None else with_counts(row, binding.calls, binding.fallbacks)

    def release(self) -> None:
        """Free the memory that decoding keeps between calls (cache pool, CUDA graphs). The next generate makes it anew."""
        if self._runner is not None:
            self._runner.release()

    def __repr__(self) -> str:
        return f"<mirage_hf: {len({r.module for r in self._report.swapped})} modules swapped; print(model.mirage.report)>"

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


def _nothing() -> None:
    return None


def attach_decoding(handle: Handle, model: nn.Module, runner: Any) -> None:
    handle._runner, handle._runner_model = runner, model


def take_back(model: nn.Module) -> None:
    """Undo everything on a model, whether it is optimized, holds modules optimized elsewhere, is a copy of such a one, or neither."""
    from mirage_hf import decode
    from mirage_hf.match.eligible import generating

    handle = model.__dict__.pop(NAME, None)
    if isinstance(handle, Handle):
        handle._ledger.undo()
        if handle._runner_model is not None:
            decode.uninstall(handle._runner_model)
    for module, stock in list(strays(model)):
        put_back(module, stock)
    if (inner := generating(model)) is not None:
        decode.uninstall(inner)
