"""`model.mirage`: the report, the ledger, and the decode runner of an optimized model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from mirage_hf.swap.guard import Binding
from mirage_hf.swap.plain_copies import leave_out_of_copies, restore_in_copies
from mirage_hf.swap.swap import Ledger, put_back, strays
from mirage_hf.swap.swap_report import STOCK, SWAPPED, Report, ReportRow, with_counts

HANDLE_NAME = "mirage"
PUT_BACK = "put back by restore() or optimize() of a part of the model"


class Handle:
    """What optimize() leaves on a model, as a plain attribute. Copies and pickles of the model lack it.

    `runner` is the decode runner, None for a model that does not generate.
    """

    def __init__(self, report: Report, ledger: Ledger, bindings: dict[str, Binding]):
        self._report, self._ledger, self._bindings = report, ledger, bindings
        self.runner: Any = None

    @property
    def report(self) -> Report:
        """What was done, with the calls and fallbacks counted so far."""
        rows = tuple(self._counted(r) for r in self._report.rows)
        if self.runner is None:
            return replace(self._report, rows=rows)
        # copies first: other threads may be counting
        prefills = {f"prefill: {what}": n for what, n in dict(self.runner.prefills).items()}
        selections = {f"selection: {what}": n for what, n in dict(self.runner.selections).items()}
        return replace(
            self._report,
            rows=rows,
            decode=dict(self.runner.counts) | prefills | selections,
            pool_bytes=self.runner.bytes,
        )

    def _counted(self, row: ReportRow) -> ReportRow:
        binding = self._bindings.get(row.module)
        if binding is not None and row.status == SWAPPED and not self._ledger.holds(binding):
            row = replace(row, status=STOCK, reason=PUT_BACK)
        return row if binding is None else with_counts(row, binding.calls, binding.fallbacks)

    def add_note(self, text: str) -> None:
        """Add a line to the report."""
        self._report = replace(self._report, notes=(*self._report.notes, text))

    def release(self) -> None:
        """Free the memory that decoding keeps between calls (cache pool, CUDA graphs). The next generate makes it anew."""
        if self.runner is not None:
            self.runner.release()

    def __repr__(self) -> str:
        return f"<mirage_hf: {len(self._bindings)} modules swapped; print(model.mirage.report)>"

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: a copy belongs to no optimized model."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as None, so that what holds the handle loads where we are not installed."""
        return type(None), ()


def attach(model: nn.Module, handle: Handle) -> None:
    """Put the handle on the model as `model.mirage`. Copies and pickles of the model lack it."""
    model.__dict__[HANDLE_NAME] = handle
    leave_out_of_copies(model, HANDLE_NAME)


def detach(model: nn.Module) -> None:
    """Undo every swap in a model, whether it is optimized, holds modules optimized elsewhere, or is a copy of such a one."""
    for module in model.modules():
        handle = module.__dict__.get(HANDLE_NAME)
        if isinstance(handle, Handle):
            handle._ledger.undo()
        if handle is None or isinstance(
            handle, Handle
        ):  # what a copy carries, or ours; anything else is the user's
            module.__dict__.pop(HANDLE_NAME, None)
            restore_in_copies(module, HANDLE_NAME)
    for module, stock in list(strays(model)):
        put_back(module, stock)
