"""One run of optimize(): from matches and kernels to swapped, checked modules and their report."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from mirage_hf.errors import OptimizeError, OptimizeWarning, Rejected
from mirage_hf.layers.compose import Part, adapter_role
from mirage_hf.layers.model_kernels import ModelKernels, assemble_model_kernels
from mirage_hf.match.causal import CausalMatch
from mirage_hf.match.matcher import Match, Matches
from mirage_hf.patterns import IN_STEPS, decoder_layer
from mirage_hf.swap.check import Checked, check, check_head, check_step
from mirage_hf.swap.guard import Binding
from mirage_hf.swap.handle import Handle
from mirage_hf.swap.kernels import BlockKernels
from mirage_hf.swap.swap import Ledger
from mirage_hf.swap.swap_report import PLANNED, STOCK, SWAPPED, Report, ReportRow

_HEAD, _UNDONE = "head", "swapped back after the check"
_OWN_STEPS = "steps of generate run the model's own forward, in a CUDA graph where there is one: "
CPU_NOTE = (
    "backend cpu runs each kernel's block graph with torch: right, but with no promise of speed"
)


class Optimization:
    """The matches of one model, and what has become of them. `undo` takes every swap back."""

    def __init__(self, model: nn.Module, backend: str, rows: Sequence[int], found: Matches):
        self.model, self.backend, self.rows = model, backend, rows
        self.matches, self.refusals, self.causal = found.modules, found.refusals, found.causal
        self.ledger = Ledger()
        self.steps: ModelKernels | None = None
        self._refused = tuple(
            ReportRow(r.name, r.pattern, STOCK, reason=r.reason) for r in found.refusals
        )

    @property
    def wanted(self) -> list[tuple[Part, ...]]:
        """The parts that kernels are wanted for, those of a layer together."""
        heads = [(self.causal.head,)] if isinstance(self.causal, CausalMatch) else []
        return [*(m.parts for m in self.matches), *heads]

    def _report(self, rows: Sequence[ReportRow], notes: Sequence[str] = ()) -> Report:
        cpu = (CPU_NOTE,) if self.backend == "cpu" else ()
        return Report(
            type(self.model).__name__, self.backend, (*rows, *self._refused), (*cpu, *notes)
        )

    def plan(self) -> Report:
        """The report of a dry run."""
        rows = [
            _row(m.name, p, r, PLANNED) for m in self.matches for p in m.parts for r in self.rows
        ]
        note = ""
        if isinstance(self.causal, CausalMatch):
            rows += [_row(_HEAD, self.causal.head, r, PLANNED) for r in self.rows]
        elif rows:
            note = _OWN_STEPS + self.causal.reason
            rows = [replace(r, status=STOCK, reason=note) if _only_in_steps(r) else r for r in rows]
        if any(r.status == PLANNED for r in rows):
            return self._report(rows, (note,) if note else ())
        report = self._report(rows)
        return replace(
            report,
            notes=(f"nothing in this {report.model} would be replaced ({_why_nothing(report)})",),
        )

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

    def complain_of_unkept(self, found: BlockKernels) -> None:
        """Warn where kernels that were made could not be kept: the next optimize() takes as long."""
        unkept = [k.unkept for k in found.values() if not isinstance(k, Rejected) and k.unkept]
        if unkept:
            text = f"optimize: {len(unkept)} kernels were made and not kept, so the next optimize() makes them anew ({unkept[0]})"
            warnings.warn(text, OptimizeWarning, stacklevel=3)

    def nothing_done(self, on_unsupported: str, report: Report) -> None:
        """Say loudly that the model is as it was. Errors: OptimizeError when the user wants one."""
        text = f"optimize: nothing in this {type(self.model).__name__} was replaced, it runs as before ({_why_nothing(report)})"
        if on_unsupported == "error":
            families = ", ".join(row.families for row in decoder_layer.LAYOUTS)
            raise OptimizeError(
                f"{text}; supported are layers of {families}, and PEFT LoRA linears on them"
            )
        warnings.warn(text, OptimizeWarning, stacklevel=3)

    def swap(self, found: BlockKernels, *, verify: bool) -> tuple[Handle | None, Report]:
        """Swap what has kernels, then check each swapped module. Returns no handle when nothing is swapped in the end."""
        bindings: dict[str, Binding] = {}
        rows: list[ReportRow] = []
        for m in self.matches:
            kernels = _kernels(m, self.rows, found)
            if kernels:
                bindings[m.name] = self.ledger.swap(m, kernels)
            rows += [
                _resolved_row(m.name, p, r, found[p.block, r]) for p in m.parts for r in self.rows
            ]
        if verify:
            rows = self._verify(bindings, rows)
        note = ""
        if bindings:
            rows += (
                [
                    _resolved_row(_HEAD, self.causal.head, r, found[self.causal.head.block, r])
                    for r in self.rows
                ]
                if isinstance(self.causal, CausalMatch)
                else []
            )
            steps = assemble_model_kernels(self.causal, self.matches, self.rows, found)
            outcomes = (
                self._check_steps(steps, rows) if verify and isinstance(steps, ModelKernels) else {}
            )
            if isinstance(outcomes, Rejected):
                steps = outcomes
            elif isinstance(steps, ModelKernels):
                self.steps = steps
                rows = [
                    _checked_row(r, outcomes.get((r.module, r.rows))) if _only_in_steps(r) else r
                    for r in rows
                ]
            if isinstance(steps, Rejected):
                note = _OWN_STEPS + steps.reason
            ready = self.steps.rows if self.steps is not None else ()
            idle = note or "another part has no kernel for so many rows"
            rows = [
                replace(r, status=STOCK, reason=r.reason or idle)
                if r.status == SWAPPED and r.rows not in ready and _only_in_steps(r)
                else r
                for r in rows
            ]
        report = self._report(rows, (note,) if note else ())
        return (Handle(report, self.ledger, bindings) if bindings else None), report

    def _verify(self, bindings: dict[str, Binding], rows: Sequence[ReportRow]) -> list[ReportRow]:
        outcomes: dict[str, Checked | Rejected] = {}
        for m in self.matches:
            if m.name in bindings:
                outcomes[m.name] = outcome = check(m, bindings[m.name])
                if isinstance(outcome, Rejected):
                    self.ledger.undo(m.module)
                    del bindings[m.name]
        for binding in bindings.values():
            binding.forget()  # the checks' own calls, of enclosing layers too
        return [
            row if _only_in_steps(row) else _checked_row(row, outcomes.get(row.module))
            for row in rows
        ]

    def _check_steps(
        self, steps: ModelKernels, rows: Sequence[ReportRow]
    ) -> dict[tuple[str, int | None], Checked] | Rejected:
        """Check each layer's step and the head once more; the outcomes by module and number of rows."""
        undone = next((r for r in rows if r.reason.startswith(_UNDONE)), None)
        if undone is not None:
            return Rejected(f"{undone.module}: {undone.reason}")
        outcomes: dict[tuple[str, int | None], Checked] = {}
        for n in steps.rows:
            each = [(layer.match.name, partial(check_step, layer)) for layer in steps.layers]
            for name, run in (*each, (_HEAD, partial(check_head, steps, self.causal))):
                outcome = run(n)
                if isinstance(outcome, Rejected):
                    return Rejected(f"{name}: its step was refused by the check: {outcome.reason}")
                outcomes[name, n] = outcome
        return outcomes

    def undo(self) -> None:
        self.ledger.undo()


def _why_nothing(report: Report) -> str:
    why = "; ".join(dict.fromkeys(f"{r.pattern}: {r.reason}" for r in report.rows if r.reason))
    return (
        why[:600]
        or "it has no module that looks like a decoder layer, a gated MLP or a LoRA linear"
    )


def _only_in_steps(row: ReportRow) -> bool:
    """Whether a row is of what runs in steps of generate only: attention, which is over our caches, and the head."""
    return row.module == _HEAD or row.pattern in IN_STEPS


def _kernels(m: Match, rows: Sequence[int], found: BlockKernels) -> dict[int, Mapping[str, Any]]:
    """The fused kernels of a match, by number of rows and role; where the library won, stock modules do that part."""
    by_rows = {
        r: {
            p.role: found[p.block, r]
            for p in m.parts
            if p.pattern not in IN_STEPS and _fused(found[p.block, r])
        }
        for r in rows
    }
    pairs = [
        (p.role, adapter_role(p.role))
        for p in m.parts
        if p.adapters and adapter_role(p.role) in {x.role for x in m.parts}
    ]
    alone = {
        r: {role for pair in pairs for role in pair if not kernels.keys() >= {*pair}}
        for r, kernels in by_rows.items()
    }
    by_rows = {
        r: {role: x for role, x in kernels.items() if role not in alone[r]}
        for r, kernels in by_rows.items()
    }
    return {r: kernels for r, kernels in by_rows.items() if kernels}


def _fused(resolved: Any) -> bool:
    return not isinstance(resolved, Rejected) and bool(resolved.is_fused)


def _row(module: str, part: Part, rows: int, status: str) -> ReportRow:
    children = dict.fromkeys(
        path.partition(".lora_")[0].removesuffix(".base_layer").rpartition(".")[2]
        for path, _ in part.weights
    )
    return ReportRow(
        module,
        part.pattern,
        status,
        part="" if part.role == "lora" else ", ".join(children),
        rows=rows,
    )


def _resolved_row(module: str, part: Part, rows: int, resolved: Any) -> ReportRow:
    row = _row(module, part, rows, STOCK)
    if isinstance(resolved, Rejected):
        return replace(row, reason=resolved.reason)
    row = replace(
        row,
        source=resolved.source,
        time_us=resolved.time_us,
        library_us=resolved.library_us,
        error_bound=resolved.error_bound,
        digest=resolved.digest,
    )
    if not resolved.is_fused:
        return replace(
            row, kernel="library", reason=resolved.reason or "the library path is faster here"
        )
    count = resolved.ugraph.num_kernels
    return replace(
        row,
        status=SWAPPED,
        reason=resolved.reason,
        kernel=f"{count} kernel{'s' if count > 1 else ''}",
    )


def _checked_row(row: ReportRow, outcome: Checked | Rejected | None) -> ReportRow:
    if outcome is None or row.status != SWAPPED:
        return row
    if isinstance(outcome, Rejected):
        return replace(row, status=STOCK, reason=f"{_UNDONE}: {outcome.reason}")
    return replace(row, error=outcome.error, stock_error=outcome.stock_error)
