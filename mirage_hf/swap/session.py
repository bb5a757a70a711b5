"""One run of optimize(): from matches and kernels to swapped, checked modules and their report."""
from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from mirage_hf.errors import OptimizeError, OptimizeWarning, Rejected
from mirage_hf.match.compose import Part
from mirage_hf.match.matcher import Match, Refusal
from mirage_hf.swap.check import Checked, check
from mirage_hf.swap.guard import Binding
from mirage_hf.swap.handle import Handle
from mirage_hf.swap.kernels import Found
from mirage_hf.swap.report import PLANNED, STOCK, SWAPPED, Report, Row
from mirage_hf.swap.swap import Ledger

CPU_NOTE = "backend cpu runs each kernel's block graph with torch: right, but with no promise of speed"


class Session:
    """The matches of one model, and what has become of them. `undo` takes every swap back."""

    def __init__(self, model: nn.Module, backend: str, rows: Sequence[int], matches: Sequence[Match], refusals: Sequence[Refusal]):
        self.model, self.backend, self.rows, self.matches, self.refusals = model, backend, rows, matches, refusals
        self.ledger = Ledger()
        self._refused = tuple(Row(r.name, r.pattern, STOCK, reason=r.reason) for r in refusals)

    def _report(self, rows: Sequence[Row]) -> Report:
        return Report(type(self.model).__name__, self.backend, (*rows, *self._refused), (CPU_NOTE,) if self.backend == "cpu" else ())

    def plan(self) -> Report:
        """The report of a dry run."""
        return self._report([_row(m, p, r, PLANNED) for m in self.matches for p in m.parts for r in self.rows])

    def complain(self, on_unsupported: str) -> None:
        """Warn of refused blocks, or fail, as the user wishes. Errors: OptimizeError."""
        if not self.refusals or on_unsupported == "skip":
            return
        shown = "; ".join(f"{r.name}: {r.pattern}: {r.reason}" for r in self.refusals[:5])
        more = f" and {len(self.refusals) - 5} more" if len(self.refusals) > 5 else ""
        text = f"optimize: {len(self.refusals)} blocks cannot be replaced ({shown}{more})"
        if on_unsupported == "error":
            raise OptimizeError(f"{text}; use on_unsupported='skip' to leave them as they are")
        warnings.warn(text, OptimizeWarning, stacklevel=3)

    def nothing_done(self, on_unsupported: str, report: Report) -> None:
        """Say loudly that the model is as it was. Errors: OptimizeError when the user wants one."""
        why = "; ".join(dict.fromkeys(f"{r.pattern}: {r.reason}" for r in report.rows if r.reason)) or \
            "it has no module that looks like a decoder layer, a gated MLP or a LoRA linear"
        text = f"optimize: nothing in this {type(self.model).__name__} was replaced, it runs as before ({why[:600]})"
        if on_unsupported == "error":
            raise OptimizeError(f"{text}; Llama, Mistral, Qwen2 and Qwen3 are supported, and PEFT LoRA linears on them")
        warnings.warn(text, OptimizeWarning, stacklevel=3)

    def swap(self, found: Found, *, verify: bool) -> tuple[Handle | None, Report]:
        """Swap what has kernels, then check each swapped module. Returns no handle when nothing is swapped in the end."""
        bindings: dict[str, Binding] = {}
        rows: list[Row] = []
        for m in self.matches:
            kernels = _kernels(m, self.rows, found)
            if kernels:
                bindings[m.name] = self.ledger.swap(m, kernels)
            rows += [_resolved_row(m, p, r, found[p.block, r]) for p in m.parts for r in self.rows]
        if verify:
            rows = self._verify(bindings, rows)
        report = self._report(rows)
        return (Handle(report, self.ledger, bindings) if bindings else None), report

    def _verify(self, bindings: dict[str, Binding], rows: Sequence[Row]) -> list[Row]:
        outcomes: dict[str, Checked | Rejected] = {}
        for m in self.matches:
            if m.name in bindings:
                outcomes[m.name] = outcome = check(m, bindings[m.name])
                if isinstance(outcome, Rejected):
                    self.ledger.undo(m.module)
                    del bindings[m.name]
        for binding in bindings.values():
            binding.forget()  # the checks' own calls, of enclosing layers too
        return [_checked_row(row, outcomes.get(row.module)) for row in rows]

    def undo(self) -> None:
        self.ledger.undo()


def _kernels(m: Match, rows: Sequence[int], found: Found) -> dict[int, Mapping[str, Any]]:
    """The fused kernels of a match, by number of rows and role; where the library won, stock modules do that part."""
    by_rows = {r: {p.role: found[p.block, r] for p in m.parts if _fused(found[p.block, r])} for r in rows}
    return {r: kernels for r, kernels in by_rows.items() if kernels}


def _fused(resolved: Any) -> bool:
    return not isinstance(resolved, Rejected) and bool(resolved.is_fused)


def _row(m: Match, part: Part, rows: int, status: str) -> Row:
    children = dict.fromkeys(path.rpartition(".")[2] for path, _ in part.weights)
    return Row(m.name, part.pattern, status, part="" if part.role == "lora" else ", ".join(children), rows=rows)


def _resolved_row(m: Match, part: Part, rows: int, resolved: Any) -> Row:
    row = _row(m, part, rows, STOCK)
    if isinstance(resolved, Rejected):
        return replace(row, reason=resolved.reason)
    row = replace(row, source=resolved.source, time_us=resolved.time_us, library_us=resolved.library_us,
                  error_bound=resolved.error_bound, digest=resolved.digest)
    if not resolved.is_fused:
        return replace(row, kernel="library", reason=resolved.reason or "the library path is faster here")
    count = resolved.ugraph.num_kernels
    return replace(row, status=SWAPPED, reason=resolved.reason, kernel=f"{count} kernel{'s' if count > 1 else ''}")


def _checked_row(row: Row, outcome: Checked | Rejected | None) -> Row:
    if outcome is None or row.status != SWAPPED:
        return row
    if isinstance(outcome, Rejected):
        return replace(row, status=STOCK, reason=f"swapped back after the check: {outcome.reason}")
    return replace(row, error=outcome.error, stock_error=outcome.stock_error)
