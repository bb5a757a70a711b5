"""The step plan: how a recording runs with kernels in place of some of its ops."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping
from types import MappingProxyType

import torch
from torch import Tensor

from mirage_hf.trace.binding import Binding
from mirage_hf.trace.cached_attention import CachedAttention, find_attention
from mirage_hf.trace.experts.dense import with_chosen_experts
from mirage_hf.trace.experts.programs import experts_that_repeat_norms, find_experts
from mirage_hf.trace.groups import Group, groups_of
from mirage_hf.trace.order import ancestors, dependencies, effects
from mirage_hf.trace.position_ops import PositionOps, find_position_ops
from mirage_hf.trace.program import GroupProgram, program_of
from mirage_hf.trace.record import Held, Input, Recording, Value
from mirage_hf.trace.regions import Region, find_regions
from mirage_hf.trace.routers.finder import with_routers
from mirage_hf.trace.scheduling import Scheduler
from mirage_hf.trace.short_convolution import with_short_convolutions
from mirage_hf.trace.sizes import Sizes
from mirage_hf.trace.step_ops import (
    AttentionOfSlots,
    RegionRun,
    Run,
    StepOp,
    is_unmade,
    source_of,
)
from mirage_hf.trace.term import Term
from mirage_hf.trace.terms import Terms
from mirage_hf.trace.whole_writes import without_whole_writes


class StepPlan:
    """The groups of a recording, and how they and the other ops run.

    Attributes:
        recording: The recording.
        terms: Its terms.
        programs: The program of each group that has one.
        reasons: Why other groups have none.
        regions: The regions that have a program.
        attentions: The attention of each layer that a kernel may run.
        step_ops: What runs, in order.
        position_ops: The torch ops among it that read nothing but positions, if there are any.
    """

    def __init__(self, recording: Recording, rows: int):
        recording = with_short_convolutions(without_whole_writes(recording))
        recording = with_routers(with_chosen_experts(recording, rows), rows)
        self.recording, self.rows = recording, rows
        self.terms = Terms(recording, rows, experts_that_repeat_norms(recording))
        self._before, self._effects = dependencies(recording), effects(recording)
        needed_before = ancestors(self._before)
        self.groups = groups_of(self.terms.all(), needed_before)
        self.programs: dict[Group, GroupProgram] = {}
        self.reasons: dict[Group, str] = {}
        for group in self.groups:
            program = program_of(group)
            if isinstance(program, str):
                self.reasons[group] = program
            else:
                self.programs[group] = program
        self.attentions = find_attention(recording, rows)
        self.regions = self._find_regions(needed_before)
        self.step_ops: list[StepOp] = []
        self.position_ops: PositionOps | None = None
        self._attention_runs: dict[CachedAttention, AttentionOfSlots] = {}
        self._region_runs: dict[Region, RegionRun] = {}
        self._group_ops: list[StepOp] = []

    def _find_regions(self, needed_before: list[int]) -> list[Region]:
        """Return the programs of experts, and those of nodes that no other program has."""
        others = [{term.node for term in group.terms} for group in self.programs]
        others += [{*one.appends, one.node} for one in self.attentions]
        given = [t for p in self.programs.values() for t in p.inputs if t.weight is None]
        needed = {source_of(t, self.terms) for t in given if not is_unmade(t, self.terms)}
        taken = {n for nodes in others for n in nodes}
        experts = find_experts(self.terms, needed_before, taken)
        needed |= {x.source for region in experts for x in region.inputs}
        others += [{*region.nodes} for region in experts]
        return experts + find_regions(self.recording, self._before, others, needed)

    def schedule(
        self,
        kernels: Mapping[Group, Run],
        attention: Mapping[CachedAttention, AttentionOfSlots] | None = None,
        regions: Mapping[Region, RegionRun] | None = None,
    ) -> None:
        """Order the groups that have a kernel and the torch ops that are needed besides.

        Args:
            kernels: What runs the program of a group.
            attention: What runs the attention of a layer.
            regions: What runs a region.

        Raises:
            TraceError: Kernels would have to wait for each other.
        """
        self._attention_runs = dict(attention or {})
        self._region_runs = _with_makers(dict(regions or {}))
        self._group_ops = [self._step_op_of(group, run) for group, run in kernels.items()]
        self.step_ops = self._scheduled(self._region_runs)
        self.position_ops = find_position_ops(self.recording, self.terms, self.step_ops)

    def _scheduled(self, regions: Collection[Region]) -> list[StepOp]:
        """Return what runs in order, if some regions have kernels."""
        scheduler = Scheduler(self.recording, self.terms, self._before, self._effects)
        return scheduler.schedule(self._group_ops, self._attention_runs, regions)

    def _step_op_of(self, group: Group, run: Run) -> StepOp:
        numbers = tuple(sorted({t.node for t in group.terms}))
        return StepOp(numbers, program=self.programs[group], run=run)

    def bind(
        self,
        inputs: MutableMapping[str, Tensor],
        sizes: Sizes,
        replaced: Collection[str] = (),
        given: Mapping[Value, Tensor] = MappingProxyType({}),
        left_out: Collection[int] = (),
    ) -> Callable[[], None]:
        """Return a function that runs the step ops on these inputs, at these sizes.

        Args:
            inputs: The tensors that the recording names.
            sizes: What each `Size` is taken at.
            replaced: Inputs that are results. If a tensor is copied over all of one, it takes its
                place in `inputs`, and nothing is copied.
            given: Results that something else leaves at the same addresses in every step.
            left_out: The nodes whose torch ops do not run, because their results are given.
        """
        runs = self._attention_runs, self._region_runs
        binding = Binding(self.recording, self.terms, *runs, inputs, sizes, replaced)
        step_ops = [x for x in self.step_ops if x.node is None or x.nodes[0] not in left_out]
        return binding.bind(step_ops, given)

    def embedding(self) -> tuple[Value, Tensor] | None:
        """Return the rows that torch takes for the tokens, and their table, if there is one."""
        for step_op in self.step_ops:
            node = step_op.node
            if node is None or node.name != "aten.embedding":
                continue
            table, ids = node.args[:2]
            if isinstance(table, Held) and ids == Input("ids"):
                return Value(step_op.nodes[0]), table.tensor
        return None

    def regions_to_run(self) -> list[Region]:
        """Return the regions of experts, and those that torch ops run if experts have kernels."""
        step_ops = self._scheduled([region for region in self.regions if region.reads])
        run = {step_op.region for step_op in step_ops}
        left = {step_op.nodes[0] for step_op in step_ops if step_op.node is not None}
        return [r for r in self.regions if r in run or left.issuperset(r.nodes)]

    @property
    def weight_bytes(self) -> int:
        """The bytes of weights that a step reads. Experts that several rows chose count once."""
        products = (p for group in self.groups for p in group.products)
        return sum(map(weight_bytes, products)) + sum(region.reads for region in self.regions)

    @property
    def by_kernels(self) -> tuple[CachedAttention, ...]:
        """The attention that kernels run."""
        return tuple(self._attention_runs)

    def reads_masks(self) -> bool:
        """Return whether a torch op reads a mask."""
        return any(
            isinstance(x, Input) and x.name.startswith(("mask.", "ring_slot."))
            for step_op in self.step_ops
            if step_op.node is not None
            for x in step_op.node.operands
        )


def weight_bytes(product: Term) -> int:
    """Return the bytes that a product's weight has in memory."""
    term = product.operands[1]
    if term.weight.codes:
        return sum(c.tensor.nbytes for c in term.weight.codes)
    rows, columns = term.dims
    stored: torch.dtype = term.weight.dtype or product.dtype
    return rows * columns * stored.itemsize


def _with_makers(runs: dict[Region, RegionRun]) -> dict[Region, RegionRun]:
    """Leave out regions that read what no op gives and no other region makes."""
    made = {result.value for region in runs for result in region.results}
    return {
        region: run
        for region, run in runs.items()
        if all(x.source in made for x in region.inputs if x.is_between)
    }
