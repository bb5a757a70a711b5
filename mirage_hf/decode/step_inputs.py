"""What a model's own methods would give its steps, beside what our steps take."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mirage_hf.decode.call_plan import CallInputs
from mirage_hf.decode.prompt_plan import PromptPlan
from mirage_hf.decode.routing import DECODER_INPUTS, MODEL_INPUTS, cache_name
from mirage_hf.decode.sources import takes_positions

#: What steps take. An attention mask has ones for the new tokens.
_KNOWN = MODEL_INPUTS | DECODER_INPUTS | {"input_ids", "decoder_input_ids", "cache_position"}


def unusual_step_inputs(
    inputs: CallInputs,
    prompt: PromptPlan,
    outputs: Any,
    kwargs: dict[str, Any],
    *,
    counts_from_zero: bool,
) -> str | None:
    """Return what the first step of a call takes that ours do not, or None.

    Args:
        inputs: What stock's decoding method would get.
        prompt: Where its tokens lie.
        outputs: What the model gave for the prompt.
        kwargs: The kwargs that its prefill got.
        counts_from_zero: Whether the model counts tokens from 0 if it is given no positions.
    """
    model, ids = inputs.model, inputs.input_ids
    token = ids[:, -1:]
    kwargs = model._update_model_kwargs_for_generation(
        outputs, dict(kwargs), is_encoder_decoder=model.config.is_encoder_decoder
    )
    given = model.prepare_inputs_for_generation(
        torch.cat([ids, token], -1), next_sequence_length=1, is_first_iteration=False, **kwargs
    )
    others = [
        name
        for name, value in given.items()
        if name not in _KNOWN and value is not None and not _is_plain_option(value)
    ]
    if others and not _make_no_difference(model, given, others):
        return f"a model whose steps take {others[0]}"
    of_decoder = "decoder_" if model.config.is_encoder_decoder else ""
    taken = given.get(f"{of_decoder}input_ids")
    if not isinstance(taken, Tensor) or not torch.equal(taken, token):
        return "a model whose steps take other input_ids than the last token"
    wanted = prompt.position + 1 if prompt.offsets is None else prompt.position + 1 + prompt.offsets
    positions = given.get(f"{of_decoder}position_ids")
    if positions is not None and not (positions == wanted).all():
        return "a model whose steps take other position_ids than the next"
    is_given = inputs.kwargs.get("position_ids") is not None
    if of_decoder:
        is_given = takes_positions(model)
    if positions is None and is_given and not counts_from_zero:
        return "a model that counts positions itself, and not from 0"
    if positions is None and is_given and prompt.lowest is not None:
        return "a model that counts positions itself, with left padding"
    return None


def _make_no_difference(model: Any, given: dict[str, Any], others: Sequence[str]) -> bool:
    """Return whether a step's logits are the same without these arguments.

    The step runs twice, over copies of the cache.
    """
    name = cache_name(model)

    def logits(arguments: Mapping[str, Any]) -> Tensor:
        cache = copy.deepcopy(given[name])
        return model(**{**arguments, name: cache}, return_dict=True).logits  # type: ignore[no-any-return]

    without = {key: x for key, x in given.items() if key not in others}
    return torch.equal(logits(given), logits(without))


def _is_plain_option(value: Any) -> bool:
    """Return whether a value is a switch that stays the same from step to step."""
    return isinstance(value, bool) and not value
