"""The rows of a model's report: one for each part of a match and each shape of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mirage_hf.errors import Rejected
from mirage_hf.layers.part import Part, StepShape
from mirage_hf.match.matches import CausalMatch, Match
from mirage_hf.patterns import IN_STEPS
from mirage_hf.pipeline.resolver import Resolved
from mirage_hf.swap.assemble import kernel_at
from mirage_hf.swap.check import Checked
from mirage_hf.swap.kernels import BlockKernels
from mirage_hf.swap.swap_report import STOCK, SWAPPED, ReportRow, resolved_row

#: How the report names the last norm and the head.
HEAD = "head"
#: How the reason of a row begins if the check failed.
SWAPPED_BACK = "swapped back after the check"


def module_rows(
    matches: Sequence[Match], shapes: Sequence[StepShape], found: BlockKernels
) -> list[ReportRow]:
    """Return the report's rows of all parts of modules, not checked yet."""
    return [
        _resolved_row(match.name, part, shape, kernel_at(part, shape, found))
        for match in matches
        for part in match.parts
        for shape in shapes
    ]


def head_rows(
    causal: CausalMatch | Rejected, shapes: Sequence[StepShape], found: BlockKernels
) -> list[ReportRow]:
    """Return the report's rows of the last norm and head, not checked yet."""
    if not isinstance(causal, CausalMatch):
        return []
    head = causal.head
    return [_resolved_row(HEAD, head, shape, kernel_at(head, shape, found)) for shape in shapes]


def runs_only_in_steps(row: ReportRow) -> bool:
    """Return whether a row's kernels run only in steps of generate.

    Attention's kernels do, because they read our caches. The head's do, too, and those for several
    tokens of each sequence.
    """
    return row.module == HEAD or row.pattern in IN_STEPS or row.tokens > 1


def part_row(module: str, part: Part, shape: StepShape, status: str) -> ReportRow:
    """Return the row of a part, before anything is known of its kernel."""
    names = "" if part.role == "lora" else ", ".join(_children_of(part))
    return ReportRow(
        module, part.pattern, status, part=names, rows=shape.batch, tokens=shape.tokens
    )


def _children_of(part: Part) -> list[str]:
    """Return the names of the children whose weights a part reads, as the model has them."""
    names = []
    for path, _ in part.weights:
        linear = path.partition(".lora_")[0].removesuffix(".base_layer")
        names.append(linear.rpartition(".")[2])
    return list(dict.fromkeys(names))


def _resolved_row(
    module: str, part: Part, shape: StepShape, resolved: Resolved | Rejected
) -> ReportRow:
    return resolved_row(part_row(module, part, shape, STOCK), resolved)


def checked_row(row: ReportRow, outcome: Checked | Rejected | None) -> ReportRow:
    """Return a row with the outcome of its check, if it was checked."""
    if outcome is None or row.status != SWAPPED:
        return row
    if isinstance(outcome, Rejected):
        return replace(row, status=STOCK, reason=f"{SWAPPED_BACK}: {outcome.reason}")
    return replace(row, error=outcome.error, stock_error=outcome.stock_error)
