"""Report which kernels run the steps of a trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from mirage_hf.decode.sources import is_source
from mirage_hf.decode.step_kernels import StepKernels
from mirage_hf.layers.part import StepShape
from mirage_hf.patterns.attention import ATTENTION
from mirage_hf.swap.swap_report import STOCK, TRACED, ReportRow, resolved_row
from mirage_hf.trace.cached_attention import ATTENTION_OP
from mirage_hf.trace.step_plan import StepPlan
from mirage_hf.trace.weight_names import common_module, weight_path

_CROSS_ATTENTION = "torch's op runs it: keys that the encoder gave are not appended to"
_OTHER_ATTENTION = (
    "torch's op runs it: it is not of the form that kernels compute, or something else reads its "
    "keys first, such as another layer"
)


def report_rows(
    plan: StepPlan, shape: StepShape, kernels: StepKernels, paths: Mapping[int, str]
) -> list[ReportRow]:
    """Return a row for the attention of each layer, and for each region and group of a step plan.

    Args:
        plan: The plan.
        shape: The shape of its steps.
        kernels: The kernels that were found.
        paths: The names of the model's parameters, by id.
    """
    return [
        *_attention_rows(plan, shape, kernels),
        *_region_rows(plan, shape, kernels),
        *_group_rows(plan, shape, kernels, paths),
    ]


def _attention_rows(plan: StepPlan, shape: StepShape, kernels: StepKernels) -> Iterator[ReportRow]:
    known = {one.node: one for one in plan.attentions}
    for number, node in enumerate(plan.recording.nodes):
        if node.name != ATTENTION_OP:
            continue
        one = known.get(number)
        layer = "attention" if one is None else f"layers.{one.layer}"
        row = ReportRow(layer, ATTENTION.name, STOCK, rows=shape.batch, tokens=shape.tokens)
        if one is None:
            reads_source = any(is_source(x) for x in node.operands)
            reason = _CROSS_ATTENTION if reads_source else _OTHER_ATTENTION
            yield replace(row, reason=reason)
            continue
        yield resolved_row(row, kernels.attention[kernels.attention_block(one, plan)][0])


def _region_rows(plan: StepPlan, shape: StepShape, kernels: StepKernels) -> Iterator[ReportRow]:
    rows, tokens = shape.batch, shape.tokens
    for region in plan.regions:
        is_later = region.state is not None and region.state.name in plan.recording.moves
        if str(region.graph) not in kernels.found or is_later:
            continue  # what moves a state on for the first token does so for the others
        where = plan.recording.nodes[region.nodes[0]].where
        if region.state is not None:
            where = f"layers.{region.state.name.rpartition('.')[2]}"
        row = ReportRow(where, TRACED, STOCK, part=region.kind, rows=rows, tokens=tokens)
        yield resolved_row(row, kernels.found[str(region.graph)])


def _group_rows(
    plan: StepPlan, shape: StepShape, kernels: StepKernels, paths: Mapping[int, str]
) -> Iterator[ReportRow]:
    rows, tokens = shape.batch, shape.tokens
    for group in plan.groups:
        names = [weight_path(plan, product.operands[1], paths) for product in group.products]
        module, parts = common_module(names)
        row = ReportRow(module, TRACED, STOCK, part=parts, rows=rows, tokens=tokens)
        program = plan.programs.get(group)
        if program is None:
            yield replace(row, reason=plan.reasons[group])
            continue
        yield resolved_row(row, kernels.found[str(program.graph)])
