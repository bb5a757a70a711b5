"""How a call drafts, decided before its prefill: the source, the shapes of steps, their costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mirage_hf.decode.assistants import Assistant
from mirage_hf.decode.call_plan import CallInputs
from mirage_hf.decode.draft_sources import DraftPlan, PromptLookup
from mirage_hf.decode.not_covered import NotCoveredError
from mirage_hf.decode.runner import DecodeRunner
from mirage_hf.layers.model_kernels import ModelKernels
from mirage_hf.layers.part import StepShape

#: How much longer a step takes for each row more, if its kernels were not measured. Decision 028
#: has the evidence: for Llama-3.1-8B a step of four rows takes 1.13 times as long as one of one.
COST_OF_ROW = 0.045
#: Values of HF's `num_assistant_tokens_schedule`. With the first one the number of drafts does not
#: change. With the second one a call goes on from the calls before. With all others it begins anew.
CONSTANT, PERSISTENT = "constant", "heuristic"


def plan_drafts(
    runner: DecodeRunner, inputs: CallInputs, assistant: Any = None, schedule: Any = None
) -> DraftPlan | None:
    """Return how a call drafts, None if it does not.

    As in stock, prompt lookup comes before an assistant.

    Args:
        runner: What the model keeps between calls.
        inputs: What stock's decoding method would get.
        assistant: The model that drafts, if there is one.
        schedule: The call's `num_assistant_tokens_schedule`, without HF's default.

    Raises:
        NotCoveredError: It wants drafts, and there are no steps that verify them.
    """
    config = inputs.config
    most = config.prompt_lookup_num_tokens
    if most is None:
        return None if assistant is None else _by_assistant(runner, inputs, assistant, schedule)
    longest = config.max_matching_ngram_size
    longest = 2 if longest is None else longest
    if most < 1 or longest < 1:
        raise NotCoveredError("prompt lookup with options that stock rejects")
    kernels, shapes = _draft_shapes(runner, inputs, most, "prompt lookup")
    plan = DraftPlan(shapes, step_costs(kernels, shapes), most, PromptLookup(most, longest))
    return plan.constant() if schedule == CONSTANT else plan


def _by_assistant(runner: DecodeRunner, inputs: CallInputs, model: Any, schedule: Any) -> DraftPlan:
    """Return how an assistant drafts for a call.

    HF reads the schedule from the assistant's own config. A call may ask for a constant number.
    """
    assistant = Assistant.of(model, inputs)
    kernels, shapes = _draft_shapes(runner, inputs, assistant.most, "assisted decoding")
    of_step = assistant.runner.model_kernels.weight_bytes / kernels.weight_bytes
    costs = step_costs(kernels, shapes, of_step, assistant.most)
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
) -> tuple[ModelKernels, tuple[StepShape, ...]]:
    """Return the model's kernels, and the shapes of steps that verify up to about so many drafts.

    Raises:
        NotCoveredError: There are no such steps.
    """
    kernels, batch = runner.model_kernels, len(inputs.input_ids)
    if batch > 1 and inputs.config.return_dict_in_generate:
        raise NotCoveredError(f"{what} for several rows with outputs besides tokens")
    if kernels is None:
        why = "are traced" if runner.traced is not None else "are not all by kernels"
        raise NotCoveredError(f"{what}: steps {why}, and take one token")
    largest = kernels.shape_for(batch, 1 + most)
    if largest is None:
        raise NotCoveredError(
            f"{what}: no kernels for steps of several tokens of {batch} rows; "
            "optimize(draft_tokens=…) makes them"
        )
    smaller = (s for s in kernels.shapes if s.batch == batch and s.tokens < largest.tokens)
    return kernels, (*sorted(smaller), largest)


def step_costs(
    kernels: ModelKernels,
    shapes: Sequence[StepShape],
    cost_of_assistant: float = 0.0,
    most: int = 0,
) -> dict[int, float]:
    """Return the time of steps as a multiple of the time of a step of one token, by tokens.

    If all kernels were measured when they were made, it comes from their times. Otherwise it is an
    estimate. Nothing is measured during calls, so that a repeated call makes the same steps.

    Args:
        kernels: The kernels of the model.
        shapes: The shapes of the steps, that of one token included.
        cost_of_assistant: The time of an assistant's step, likewise.
        most: The most tokens that it drafts.
    """
    plain_us = kernels.products_us(min(shapes))
    costs = {}
    for shape in shapes:
        us = kernels.products_us(shape)
        cost = 1 + COST_OF_ROW * (shape.rows - shape.batch)
        if us is not None and plain_us:
            cost = max(1.0, us / plain_us)
        if shape.tokens > 1:  # an assistant feeds the last draft, too
            cost += cost_of_assistant * (min(shape.tokens - 1, most) + 1)
        costs[shape.tokens] = cost
    return costs
