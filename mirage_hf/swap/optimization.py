"""One run of optimize(): from matches and kernels to swapped, checked modules and their report."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from mirage_hf.errors import OptimizeError, OptimizeWarning, Rejected
from mirage_hf.experts_interface import Resolve, experts_by_kernels
from mirage_hf.layers.model_kernels import ModelKernels
from mirage_hf.layers.part import Part, StepShape, adapter_role
from mirage_hf.layers.step import LayerStep
from mirage_hf.match.matches import CausalMatch, Match, Matches
from mirage_hf.patterns import IN_STEPS, decoder_layer
from mirage_hf.pipeline.resolver import Resolved
from mirage_hf.swap.assemble import assemble_model_kernels
from mirage_hf.swap.check import Checked, check, check_head, check_step
from mirage_hf.swap.coded_modules import unread_experts
from mirage_hf.swap.guard import Binding
from mirage_hf.swap.handle import Handle
from mirage_hf.swap.kernels import BlockKernels
from mirage_hf.swap.ledger import Ledger
from mirage_hf.swap.part_rows import (
    HEAD,
    SWAPPED_BACK,
    checked_row,
    head_rows,
    module_rows,
    part_row,
    runs_only_in_steps,
)
from mirage_hf.swap.swap_report import PLANNED, STOCK, SWAPPED, TRACED, Report, ReportRow
from mirage_hf.swap.traced_half import HalfTracer
from mirage_hf.trace.record import TraceError

_OWN_STEPS = (
    "steps of generate run the model's own forward, in a CUDA graph if it can be captured: "
)
CPU_NOTE = "backend cpu runs each kernel's block graph with torch: right, with no promise of speed"

#: How many rejected modules a warning names, and how much of the reasons it quotes.
_MOST_NAMED, _MOST_CHARACTERS = 5, 600

#: The outcome of a check by (module, sequences, tokens of each).
_Outcomes = dict[tuple[str, "int | None", int], Checked]


class Optimization:
    """One optimize() of a model: it plans, swaps, checks and reports the model's matches."""

    def __init__(
        self, model: nn.Module, backend: str, shapes: Sequence[StepShape], matches: Matches
    ):
        """Start with the matches of `model`. Nothing is changed yet.

        Args:
            model: The model.
            backend: "triton" or "cpu".
            shapes: The shapes of steps to make kernels for.
            matches: The matches of the model.
        """
        self.model, self.backend, self.shapes = model, backend, shapes
        #: The numbers of rows that swapped modules have kernels for: one token of each sequence.
        self.batch_rows = [shape.batch for shape in shapes if shape.tokens == 1]
        self.matches, self.rejected, self.causal = matches
        self.ledger = Ledger()
        #: The kernels of whole steps, once swapped, or None if steps run the model's own forward.
        self.steps: ModelKernels | None = None
        #: The rows and the note of steps that were traced, if they were.
        self.traced_rows: list[ReportRow] = []
        self.traced_note = ""
        #: Finds the kernel of a program.
        self.resolve: Resolve | None = None
        #: Whether halves of layers may be traced.
        self.traces_halves = False

    @property
    def wanted(self) -> list[tuple[Part, ...]]:
        """The parts that need kernels: one tuple for each matched module, and one for the head."""
        head = [(self.causal.head,)] if isinstance(self.causal, CausalMatch) else []
        return [*(match.parts for match in self.matches), *head]

    def add_traced(self, report_rows: Sequence[ReportRow], note: str) -> None:
        """Add the rows of traced steps, or why there are none."""
        unread = unread_experts(self.model)
        self.traced_rows, self.traced_note = (
            list(report_rows),
            "; ".join(filter(None, (note, unread))),
        )

    # -- reports and warnings

    def _report(self, rows: Sequence[ReportRow], notes: Sequence[str] = ()) -> Report:
        rejected = (ReportRow(r.name, r.pattern, STOCK, reason=r.reason) for r in self.rejected)
        on_cpu = (CPU_NOTE,) if self.backend == "cpu" else ()
        model = type(self.model).__name__
        return Report(model, self.backend, (*rows, *rejected), (*on_cpu, *notes))

    def dry_run_report(self) -> Report:
        """Return the report of a dry run."""
        report_rows = [
            part_row(match.name, part, shape, PLANNED)
            for match in self.matches
            for part in match.parts
            for shape in self.shapes
        ]
        notes: tuple[str, ...] = ()
        if isinstance(self.causal, CausalMatch):
            head = self.causal.head
            report_rows += [part_row(HEAD, head, shape, PLANNED) for shape in self.shapes]
        elif report_rows:
            note = self.traced_note or _OWN_STEPS + self.causal.reason
            notes = (note,)
            report_rows = [
                replace(row, status=STOCK, reason=note) if runs_only_in_steps(row) else row
                for row in report_rows
            ]
        if any(row.status == PLANNED for row in report_rows):
            return self._report(report_rows, notes)
        report = self._report(report_rows)
        note = f"nothing in this {report.model} would be replaced ({_why_nothing(report)})"
        return replace(report, notes=(note,))

    def report_rejected(self, on_unsupported: str) -> None:
        """Warn of rejected blocks, or raise an error, as `on_unsupported` asks.

        Raises:
            OptimizeError: There are rejected blocks, and `on_unsupported` is "error".
        """
        if not self.rejected or on_unsupported == "skip":
            return
        named = [f"{r.name}: {r.pattern}: {r.reason}" for r in self.rejected[:_MOST_NAMED]]
        shown, more = "; ".join(named), len(self.rejected) - len(named)
        if more:
            shown += f" and {more} more"
        text = f"optimize: {len(self.rejected)} blocks cannot be replaced ({shown})"
        if on_unsupported == "error":
            raise OptimizeError(f"{text}; use on_unsupported='skip' to leave them as they are")
        warnings.warn(text, OptimizeWarning, stacklevel=3)

    def warn_of_unstored(self, found: BlockKernels) -> None:
        """Warn if new kernels could not be stored, so that the next optimize() takes as long."""
        kernels = (kernel for kernel in found.values() if not isinstance(kernel, Rejected))
        unkept = [kernel.unkept for kernel in kernels if kernel.unkept]
        if unkept:
            warnings.warn(
                f"optimize: {len(unkept)} kernels were made and not kept, "
                f"so the next optimize() makes them anew ({unkept[0]})",
                OptimizeWarning,
                stacklevel=3,
            )

    def nothing_done(self, on_unsupported: str, report: Report) -> None:
        """Warn that the model is as it was, or raise an error, as `on_unsupported` asks.

        Raises:
            OptimizeError: If `on_unsupported` is "error".
        """
        reasons = "; ".join(filter(None, (_why_nothing(report), self.traced_note)))
        text = (
            f"optimize: nothing in this {type(self.model).__name__} was replaced, "
            f"it runs as before ({reasons})"
        )
        if on_unsupported == "error":
            families = ", ".join(layout.families for layout in decoder_layer.LAYOUTS)
            raise OptimizeError(
                f"{text}; supported are layers of {families}, and PEFT LoRA linears on them"
            )
        warnings.warn(text, OptimizeWarning, stacklevel=3)

    # -- swapping

    def swap(self, found: BlockKernels, *, verify: bool) -> tuple[Handle | None, Report]:
        """Swap the modules that have kernels, then check each swapped module.

        Args:
            found: The kernels of the wanted parts.
            verify: Whether to check them.

        Returns:
            The handle, or None if nothing is swapped in the end, and the report.
        """
        bindings: dict[str, Binding] = {}
        for match in self.matches:
            if kernels := fused_kernels(match, self.batch_rows, found):
                bindings[match.name] = self.ledger.swap(match, kernels)
        report_rows = module_rows(self.matches, self.shapes, found)
        if verify:
            report_rows = self._check_modules(bindings, report_rows)
        if not bindings and not self.traced_rows:
            return None, self._report(report_rows)
        report_rows += head_rows(self.causal, self.shapes, found)
        report_rows, notes = self._assemble_steps(found, report_rows, verify)
        report_rows += self.traced_rows
        report = self._report(report_rows, notes)
        return Handle(report, self.ledger, bindings), report

    def _check_modules(
        self, bindings: dict[str, Binding], report_rows: Sequence[ReportRow]
    ) -> list[ReportRow]:
        """Check the swapped modules, and put back those that fail."""
        outcomes: dict[str, Checked | Rejected] = {}
        for match in self.matches:
            if match.name in bindings:
                outcomes[match.name] = outcome = check(match, bindings[match.name])
                if isinstance(outcome, Rejected):
                    self.ledger.undo(match.module)
                    del bindings[match.name]
        for binding in bindings.values():
            binding.forget()  # the calls of the checks, also of those of enclosing layers
        return [
            row if runs_only_in_steps(row) else checked_row(row, outcomes.get(row.module))
            for row in report_rows
        ]

    def _assemble_steps(
        self, found: BlockKernels, report_rows: Sequence[ReportRow], verify: bool
    ) -> tuple[list[ReportRow], tuple[str, ...]]:
        """Assemble the kernels of whole steps, and check them. Return the rows and notes."""
        kernels = assemble_model_kernels(self.causal, self.matches, self.shapes, found)
        outcomes: _Outcomes = {}
        if verify and isinstance(kernels, ModelKernels):
            checked = self._check_steps(kernels, report_rows)
            if isinstance(checked, Rejected):
                kernels = checked
            else:
                outcomes = checked
        notes = (self.traced_note,) if self.traced_note else ()
        half_rows: list[ReportRow] = []
        if isinstance(kernels, ModelKernels):
            half_rows = self._trace_halves(kernels)
            self.steps = kernels
            usable = {(shape.batch, shape.tokens) for shape in kernels.shapes}
            why_idle = "another part has no kernel for so many rows"
        elif self.traced_rows:
            usable, why_idle = set(), self.traced_note
        else:
            usable, why_idle = set(), _OWN_STEPS + kernels.reason
            notes = (why_idle, *notes)
        made = []
        for row in report_rows:
            if runs_only_in_steps(row):
                row = checked_row(row, outcomes.get((row.module, row.rows, row.tokens)))
                if row.status == SWAPPED and (row.rows, row.tokens) not in usable:
                    row = replace(row, status=STOCK, reason=row.reason or why_idle)
            made.append(row)
        return made + half_rows, notes

    def _trace_halves(self, kernels: ModelKernels) -> list[ReportRow]:
        """Find the kernels of halves whose MLP is of another kind, before generate captures steps.

        A half that is not traced runs the MLP's own forward, and its experts run by name. If steps
        are traced as a whole, that is enough for the other calls.

        Returns:
            The rows of the report.
        """
        assert isinstance(self.causal, CausalMatch) and self.resolve is not None
        may_trace = self.traces_halves and not self.traced_rows
        own = [layer for layer in kernels.layers if not layer.step.first]
        width = {match.name: match.width for match in self.matches}
        tracer = HalfTracer(self.causal.model, self.resolve)
        report_rows: list[ReportRow] = []
        for rows in dict.fromkeys(shape.rows for shape in kernels.shapes):
            for layer in own:
                step, like = layer.step, kernels.embedding.new_zeros(rows, width[layer.name])
                if not may_trace:
                    self._find_experts(step, like)
                    continue
                try:
                    step.traced_halves[rows], made = tracer.trace(layer.name, step, like)
                except TraceError as error:
                    path = f"{layer.name}.{step.layout.mlp}"
                    reason = f"its own forward runs: {error}"
                    made = [ReportRow(path, TRACED, STOCK, rows=rows, reason=reason)]
                    self._find_experts(step, like)
                report_rows += made
        return report_rows

    def _find_experts(self, step: LayerStep, like: Tensor) -> None:
        """Find the kernels of an MLP's experts, by a call of it."""
        assert isinstance(self.causal, CausalMatch)
        model, rows = self.causal.model, len(like)
        with experts_by_kernels(model, rows, self.resolve) as may_run, torch.no_grad():
            if may_run:
                step.own_mlp(like[:, None])

    def _check_steps(
        self, kernels: ModelKernels, report_rows: Sequence[ReportRow]
    ) -> _Outcomes | Rejected:
        """Check each layer's step and the head."""
        assert isinstance(self.causal, CausalMatch)
        put_back = next((row for row in report_rows if row.reason.startswith(SWAPPED_BACK)), None)
        if put_back is not None:
            return Rejected(f"{put_back.module}: {put_back.reason}")
        matches = {match.name: match for match in self.matches}
        outcomes: _Outcomes = {}
        for shape in kernels.shapes:
            for layer in kernels.layers:
                outcome = check_step(matches[layer.name], layer, shape)
                if isinstance(outcome, Rejected):
                    return _step_rejected(layer.name, outcome)
                outcomes[layer.name, shape.batch, shape.tokens] = outcome
            outcome = check_head(kernels, self.causal, shape.rows)
            if isinstance(outcome, Rejected):
                return _step_rejected(HEAD, outcome)
            outcomes[HEAD, shape.batch, shape.tokens] = outcome
        return outcomes

    def undo(self) -> None:
        """Take every swap back."""
        self.ledger.undo()


def _step_rejected(name: str, no: Rejected) -> Rejected:
    return Rejected(f"{name}: its step was rejected by the check: {no.reason}")


def _why_nothing(report: Report) -> str:
    reasons = dict.fromkeys(f"{row.pattern}: {row.reason}" for row in report.rows if row.reason)
    if not reasons:
        return "it has no module that looks like a decoder layer, a gated MLP or a LoRA linear"
    return "; ".join(reasons)[:_MOST_CHARACTERS]


def fused_kernels(
    match: Match, batch_rows: Sequence[int], found: BlockKernels
) -> dict[int, Mapping[str, Resolved]]:
    """Return the fused kernels of a match by number of rows and role.

    If the library won, the stock modules do that part.
    """
    roles = {part.role for part in match.parts}
    by_rows: dict[int, Mapping[str, Resolved]] = {}
    for rows in batch_rows:
        kernels: dict[str, Resolved] = {}
        for part in match.parts:
            kernel = found[part.block, rows]
            if part.pattern in IN_STEPS or isinstance(kernel, Rejected) or not kernel.runs_kernel:
                continue
            kernels[part.role] = kernel
        for part in match.parts:
            pair = (part.role, adapter_role(part.role))
            # A part and the first products of its adapters run together or not at all.
            if part.adapters and pair[1] in roles and not kernels.keys() >= {*pair}:
                for role in pair:
                    kernels.pop(role, None)
        if kernels:
            by_rows[rows] = kernels
    return by_rows
