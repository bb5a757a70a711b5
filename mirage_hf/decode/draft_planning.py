"""How a call drafts, decided before its prefill: the source, the shapes of steps, their costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mirage_hf.decode.assistants import Assistant
from mirage_hf.decode.call_plan import CallInputs
from mirage_hf.decode.draft_sources import DraftPlan, PromptLookup
from mirage_hf.decode.not_covered import NotCoveredError
from mirage_hf.decode.runner import DecodeRunner
from mirage_hf.decode.step_plans import TracedSteps
from mirage_hf.layers.model_kernels import ModelKernels
from mirage_hf.layers.part import StepShape

#: How much longer a step takes for each row more, if its kernels were not measured. Decision 028
#: has the evidence: for Llama-3.1-8B a step of four rows takes 1.13 times as long as one of one.
COST_OF_ROW = 0.045
#: Values of HF's `num_assistant_tokens_schedule`. With the first one the number of drafts does not
#: change. With the second one a call goes on from the calls before. With all others it begins anew.
CONSTANT, PERSISTENT = "constant", "heuristic"


@dataclass(frozen=True)
class DraftRequest:
    """What a call says about drafts, besides what stock's config has.

    Attributes:
        assistant: The model that drafts, if there is one.
        schedule: The call's `num_assistant_tokens_schedule`. HF fills in its default later.
        lookup: The call's `prompt_lookup_num_tokens` and `max_matching_ngram_size`, if stock's
            generate must not see them.
    """

    assistant: Any = None
    schedule: Any = None
    lookup: tuple[int, int | None] | None = None


def plan_drafts(
    runner: DecodeRunner, inputs: CallInputs, request: DraftRequest
) -> DraftPlan | None:
    """Return how a call drafts, None if it does not.

    As in stock, prompt lookup comes before an assistant.

    Args:
        runner: What the model keeps between calls.
        inputs: What stock's decoding method would get.
        request: What the call says about drafts.

    Raises:
        NotCoveredError: It wants drafts, and there are no steps that verify them.
    """
    config, assistant, schedule = inputs.config, request.assistant, request.schedule
    most, longest = config.prompt_lookup_num_tokens, config.max_matching_ngram_size
    if request.lookup is not None:
        most, longest = request.lookup
    if most is None:
        return None if assistant is None else _by_assistant(runner, inputs, assistant, schedule)
    longest = 2 if longest is None else longest
    if most < 1 or longest < 1:
        raise NotCoveredError("prompt lookup with options that stock rejects")
    steps, shapes = _draft_shapes(runner, inputs, most, "prompt lookup")
    plan = DraftPlan(shapes, step_costs(steps, shapes), most, PromptLookup(most, longest))
    return plan.constant() if schedule == CONSTANT else plan


def _by_assistant(runner: DecodeRunner, inputs: CallInputs, model: Any, schedule: Any) -> DraftPlan:
    """Return how an assistant drafts for a call.

    HF reads the schedule from the assistant's own config. A call may ask for a constant number.
    """
    assistant = Assistant.of(model, inputs)
    steps, shapes = _draft_shapes(runner, inputs, assistant.most, "assisted decoding")
    one = StepShape(len(inputs.input_ids))
    of_step = assistant.steps.bytes_read_in(one) / max(steps.bytes_read_in(one), 1)
    costs = step_costs(steps, shapes)
    for shape in shapes:
        if shape.tokens > 1:
            drafts = min(shape.tokens - 1, assistant.most)
            costs[shape.tokens] += of_step * assistant.feeds(drafts)
    plan = DraftPlan(shapes, costs, assistant.most, None, assistant)
    of_assistant = model.generation_config.num_assistant_tokens_schedule
    if CONSTANT in (schedule, of_assistant):
        return plan.constant()
    if of_assistant == PERSISTENT:
        acceptance = assistant.runner.acceptance
        acceptance.forget_half()
        return replace(plan, acceptance=acceptance)
    return plan


def _draft_shapes(
    runner: DecodeRunner, inputs: CallInputs, most: int, what: str
) -> tuple[ModelKernels | TracedSteps, tuple[StepShape, ...]]:
    """Return the model's steps, and the shapes of those that verify up to about so many drafts.

    Raises:
        NotCoveredError: There are no such steps.
    """
    batch = len(inputs.input_ids)
    if batch > 1 and inputs.config.return_dict_in_generate:
        raise NotCoveredError(f"{what} for several rows with outputs besides tokens")
    steps: ModelKernels | TracedSteps | None = runner.model_kernels or runner.traced
    if steps is None:
        raise NotCoveredError(f"{what}: steps are not all by kernels, and take one token")
    of_batch = sorted(shape for shape in steps.shapes if shape.batch == batch)
    several = [shape for shape in of_batch if shape.tokens > 1]
    if not several:
        raise NotCoveredError(
            f"{what}: no kernels for steps of several tokens of {batch} rows; "
            "optimize(draft_tokens=…) makes them"
        )
    # the smallest one that has room for them, otherwise the largest one
    largest = next((shape for shape in several if shape.tokens > most), several[-1])
    return steps, tuple(shape for shape in of_batch if shape.tokens <= largest.tokens)


def step_costs(steps: ModelKernels | TracedSteps, shapes: Sequence[StepShape]) -> dict[int, float]:
    """Return the time of steps as a multiple of the time of a step of one token, by tokens.

    If all kernels were measured when they were made, it comes from their times. Otherwise it is an
    estimate from the bytes of weights: more rows choose more experts of a mixture. Nothing is
    measured during calls, so that a repeated call makes the same steps.

    Args:
        steps: The steps of the model.
        shapes: The shapes of the steps, that of one token included.
    """
    plain = min(shapes)
    plain_us, plain_bytes = steps.products_us(plain), max(steps.bytes_read_in(plain), 1)
    costs = {}
    for shape in shapes:
        us = steps.products_us(shape)
        cost = 1 + COST_OF_ROW * (shape.rows - shape.batch)
        cost *= steps.bytes_read_in(shape) / plain_bytes
        if us is not None and plain_us:
            cost = max(1.0, us / plain_us)
        costs[shape.tokens] = cost
    return costs
