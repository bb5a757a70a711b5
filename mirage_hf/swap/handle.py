"""`model.mirage`: the report, the ledger and the decode runner of an optimized model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from mirage_hf.pipeline.background import BackgroundTuning
from mirage_hf.swap.guard import Binding
from mirage_hf.swap.ledger import Ledger, put_back, strays
from mirage_hf.swap.plain_copies import leave_out_of_copies, restore_in_copies
from mirage_hf.swap.swap_report import STOCK, SWAPPED, Report, ReportRow

#: The attribute of an optimized model that holds its Handle.
HANDLE_NAME = "mirage"

PUT_BACK = "put back by restore() or optimize() of a part of the model"


class Handle:
    """The attribute `model.mirage` of an optimized model. Copies and pickles of the model lack it.

    Example:
        >>> optimize(model)
        >>> print(model.mirage.report)
        >>> model.mirage.release()
    """

    def __init__(self, report: Report, ledger: Ledger, bindings: dict[str, Binding]):
        """Hold the report, the swaps, and the bindings by the names of their modules."""
        self._report, self._ledger, self._bindings = report, ledger, bindings
        #: The decode runner, or None for a model that does not generate.
        self.runner: Any = None
        #: What tunes kernels while the model is used, or None.
        self.tuning: BackgroundTuning | None = None

    @property
    def report(self) -> Report:
        """The report of optimize(), with the calls and fallbacks counted so far."""
        rows = tuple(self._counted(row) for row in self._report.rows)
        tuning = self.tuning.status if self.tuning is not None else ""
        if self.runner is None:
            return replace(self._report, rows=rows, tuning=tuning)
        # Other threads may be counting, so copy first.
        prefills = {f"prefill: {what}": n for what, n in dict(self.runner.prefills).items()}
        drafts = {f"drafts: {what}": n for what, n in dict(self.runner.drafts).items()}
        selections = {f"selection: {what}": n for what, n in dict(self.runner.selections).items()}
        return replace(
            self._report,
            rows=rows,
            tuning=tuning,
            decode=dict(self.runner.counts) | prefills | drafts | selections,
            pool_bytes=self.runner.bytes,
        )

    def _counted(self, row: ReportRow) -> ReportRow:
        binding = self._bindings.get(row.module)
        if binding is None:
            return row
        if row.status == SWAPPED and not self._ledger.holds(binding):
            row = replace(row, status=STOCK, reason=PUT_BACK)
        return replace(row, calls=binding.calls, fallbacks=dict(binding.fallbacks))

    @property
    def stored_rows(self) -> tuple[ReportRow, ...]:
        """The rows of the report without counts."""
        return self._report.rows

    def replace_rows(self, rows: Iterable[ReportRow]) -> None:
        """Put other rows into the report, after kernels were replaced."""
        self._report = replace(self._report, rows=tuple(rows))

    def binding(self, module: str) -> Binding | None:
        """Return the binding of a swapped module, or None if the module is stock."""
        binding = self._bindings.get(module)
        return binding if binding is not None and self._ledger.holds(binding) else None

    def let_tuner_see_forwards(self) -> None:
        """Tell the tuner when a forward begins, which is when that of the first module does."""
        first = next(iter(self._bindings.values()), None)
        if first is not None and self.tuning is not None:
            first.before_call = self.tuning.forward_begins

    def stop_tuning(self) -> None:
        """End the tuner, if there is one. What it has stored stays."""
        if self.tuning is not None:
            self.tuning.stop()
            for binding in self._bindings.values():
                binding.before_call = None

    def add_note(self, text: str) -> None:
        """Add a line to the report."""
        self._report = replace(self._report, notes=(*self._report.notes, text))

    def release(self) -> None:
        """Free the memory that decoding keeps between calls: the cache pool and CUDA graphs.

        The next generate allocates it anew.
        """
        if self.runner is not None:
            self.runner.release()

    def __repr__(self) -> str:
        """Return how many modules are swapped."""
        return f"<mirage_hf: {len(self._bindings)} modules swapped; print(model.mirage.report)>"

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: a copy belongs to no optimized model."""
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as None, so that an object that holds the handle loads without this package."""
        return type(None), ()


def attach(model: nn.Module, handle: Handle) -> None:
    """Put the handle on the model as `model.mirage`. Copies and pickles of the model lack it."""
    model.__dict__[HANDLE_NAME] = handle
    leave_out_of_copies(model, HANDLE_NAME)


def detach(model: nn.Module) -> None:
    """Undo every swap in a model.

    It may be optimized, hold modules that were optimized elsewhere, or be a copy of such a model.
    """
    for module in model.modules():
        handle = module.__dict__.get(HANDLE_NAME)
        if isinstance(handle, Handle):
            handle.stop_tuning()
            handle._ledger.undo()
        # A copy has None. Anything except None or a handle is the user's.
        if handle is None or isinstance(handle, Handle):
            module.__dict__.pop(HANDLE_NAME, None)
            restore_in_copies(module, HANDLE_NAME)
    for module, stock in list(strays(model)):
        put_back(module, stock)
