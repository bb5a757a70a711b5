"""The step plans of one model, and which of them serves a call."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from mirage_hf.decode.cache_block import CacheBlock
from mirage_hf.decode.drafts import Drafts
from mirage_hf.decode.recorded_inputs import sizes_of, step_inputs, tensors_of
from mirage_hf.decode.rings import Rings
from mirage_hf.decode.sources import MaskUse
from mirage_hf.decode.step_forms import FORMS, Form
from mirage_hf.layers.part import StepShape
from mirage_hf.trace.coded_linear import is_replaced
from mirage_hf.trace.record import Recording
from mirage_hf.trace.sizes import Size, shape_at
from mirage_hf.trace.step_plan import StepPlan

#: The names of inputs that each step makes anew.
_MADE_BY_STEP = ("mask.", "ring_slot.")


@dataclass(frozen=True)
class TracedSteps:
    """The traced steps of one model.

    Attributes:
        plans: The step plans by the number of rows and the layers' rings.
        kernels: How many different kernels there are.
        bytes_read: Bytes of weights that searched kernels read in a step, and of all weights.
        axes: The axes of the model's positions, 0 if positions have none.
        mask_use: What an encoder-decoder model does with `attention_mask` in steps.
        gives_positions: Whether the model's own methods give its steps positions.
        uses_rings: Whether steps over rings are stock's, too. If not, blocks have none.
        form: The form in which they were recorded.
        drafting: The step plans of steps that verify drafts, by shape. Their blocks have no rings.
    """

    plans: dict[tuple[int, Rings], StepPlan]
    kernels: int
    bytes_read: tuple[int, int]
    axes: int = 0
    mask_use: MaskUse = "hides"
    gives_positions: bool = True
    uses_rings: bool = True
    form: Form = FORMS[0]
    drafting: dict[StepShape, StepPlan] = field(default_factory=dict)

    @property
    def all_plans(self) -> list[StepPlan]:
        """All step plans."""
        return [*self.plans.values(), *self.drafting.values()]

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        """The shapes of the steps that verify drafts."""
        return tuple(self.drafting)

    @property
    def call_options(self) -> dict[str, Any]:
        """What `plan_call` takes of a model whose steps were traced."""
        names = ("axes", "mask_use", "uses_rings", "only_traced")
        return {name: getattr(self, name) for name in names}

    def bytes_read_in(self, shape: StepShape) -> int:
        """Return the bytes of weights that a step reads."""
        plan = self.drafting_plan(shape)
        assert plan is not None
        return plan.weight_bytes

    def products_us(self, shape: StepShape) -> float | None:
        """Return None: what runs as torch ops was not measured."""
        return None

    @property
    def reach(self) -> float:
        """The length of the longest text for which the recorded ops are right."""
        return min(plan.recording.reach for plan in self.all_plans)

    @property
    def only_traced(self) -> bool:
        """Whether the model's own forward over our cache need not be stock's."""
        return self.form != FORMS[0]

    @cached_property
    def most_slots(self) -> float:
        """The greatest capacity of a cache whose slots have a row in all tables of the model."""
        return min(most_slots(plan.recording) for plan in self.all_plans)

    def reads_replaced_codes(self) -> bool:
        """Return whether some linear has other codes now than those that the steps read."""
        return any(is_replaced(x) for plan in self.all_plans for x in plan.recording.coded)

    @property
    def weights(self) -> Iterator[Tensor]:
        """The parameters that the steps read."""
        for plan in self.all_plans:
            for held in plan.recording.held_tensors:
                if isinstance(held, nn.Parameter):
                    yield held

    def plan_for(
        self, block: CacheBlock, shape: StepShape, drafts: Drafts | None
    ) -> StepPlan | None:
        """Return the step plan for a block, None if none was traced for its rows or rings.

        Args:
            block: Memory of a call.
            shape: The shape of the step.
            drafts: State of the drafts, if the call drafts.
        """
        if drafts is not None:
            return self.drafting_plan(shape)
        return self.plans.get((block.batch, tuple(block.rings)))

    def drafting_plan(self, shape: StepShape) -> StepPlan | None:
        """Return the plan of steps whose rows may have several lengths. One row has one length."""
        plan = self.drafting.get(shape)
        if plan is not None or shape.rows > 1:
            return plan
        return next(
            (p for (rows, rings), p in self.plans.items() if rows == 1 and not any(rings)), None
        )


def why_no_traced_step(
    traced: TracedSteps, block: CacheBlock, shape: StepShape, drafts: Drafts | None = None
) -> str:
    """Return why steps over a block must run the model's own forward, or "" if a trace serves."""
    step_plan = traced.plan_for(block, shape, drafts)
    if step_plan is None and drafts is not None:
        return f"no traced steps of {shape}"
    if step_plan is None:
        return "sliding windows of several lengths, of which the cache holds only some in rings"
    recorded, inputs = step_plan.recording.inputs, step_inputs(block)
    if drafts is not None:
        inputs |= {**tensors_of(drafts.as_rows(block.control)), "logits": drafts.logits}
    moves = step_plan.recording.moves
    wanted = {
        name: x
        for name, x in recorded.items()
        if not name.startswith(_MADE_BY_STEP) and name not in moves
    }
    if inputs.keys() != wanted.keys():
        return "layers without keys of their own"
    for name, x in inputs.items():
        if (shape_at(wanted[name], sizes_of(block)), wanted[name].dtype) != (x.shape, x.dtype):
            return f"{name} of {tuple(x.shape)}, {x.dtype}"
    return ""


def most_slots(recording: Recording) -> float:
    """Return the largest cache capacity for which each slice ends within its tensor."""
    most = math.inf
    for node in recording.nodes:
        if node.name != "aten.slice" or len(node.args) < 4:
            continue
        sliced, dim, _, end = node.args[:4]
        count = recording.meta(sliced).shape[dim]
        if isinstance(end, Size) and type(count) is int and end.factors[0] > 0:
            most = min(most, (count - end.rest) // end.factors[0])
    return most
