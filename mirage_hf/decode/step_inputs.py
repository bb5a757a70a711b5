"""What a model's own methods would give its steps, beside what our steps take."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from mirage_hf.decode.call_plan import CallInputs
from mirage_hf.decode.not_covered import NotCoveredError, covered
from mirage_hf.decode.prompt_plan import PromptPlan
from mirage_hf.decode.rounding import tolerance_of
from mirage_hf.decode.routing import DECODER_INPUTS, MODEL_INPUTS, cache_name
from mirage_hf.decode.sources import new_cache, takes_positions

#: What steps take. An attention mask has ones for the new tokens.
_KNOWN = MODEL_INPUTS | DECODER_INPUTS | {"input_ids", "decoder_input_ids", "cache_position"}


def gives_positions(model: Any) -> bool:
    """Return whether a causal model's own methods hand the positions of generate to its steps.

    Some models drop them, and count by the number of keys in the cache.
    """
    if model.config.is_encoder_decoder:
        return True
    ids = torch.zeros(1, 3, dtype=torch.long, device=model.device)
    kwargs = {
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(3, device=ids.device)[None],
        "use_cache": True,
        cache_name(model): new_cache(model),
    }
    try:
        given = _step_inputs(model, ids, kwargs)
    except Exception:  # a method that wants more than text tells at the first call
        return True
    return given.get("position_ids") is not None


def first_step_position(
    inputs: CallInputs,
    prompt: PromptPlan,
    outputs: Any,
    kwargs: dict[str, Any],
    *,
    gives_positions: bool,
    unread: UnreadInputs,
) -> Tensor | None:
    """Return the positions (batch or 1, 1) of a call's first step, if they are not the next ones.

    Args:
        inputs: What stock's decoding method would get.
        prompt: Where its tokens lie.
        outputs: What the model gave for the prompt.
        kwargs: The kwargs that its prefill got.
        gives_positions: Whether steps were recorded with positions.
        unread: What steps of the model were seen not to read.

    Returns:
        The positions, None if they are one more than those of the prompt's last tokens.

    Raises:
        NotCoveredError: The step takes something that ours does not.
    """
    model, ids = inputs.model, inputs.input_ids
    token = ids[:, -1:]
    kwargs = _next_kwargs(model, outputs, kwargs)
    given = _step_inputs(model, torch.cat([ids, token], -1), kwargs)
    others = [
        name
        for name, value in given.items()
        if name not in _KNOWN and value is not None and not _is_plain_option(value)
    ]
    if others and not unread.make_no_difference(model, given, others):
        raise NotCoveredError(f"a model whose steps take {others[0]}")
    of_decoder = "decoder_" if model.config.is_encoder_decoder else ""
    taken = given.get(f"{of_decoder}input_ids")
    if not isinstance(taken, Tensor) or not torch.equal(taken, token):
        raise NotCoveredError("a model whose steps take other input_ids than the last token")
    positions = given.get(f"{of_decoder}position_ids")
    if not gives_positions:
        covered(None if positions is None else "a model whose steps take positions at times")
        return None
    if positions is None:
        if of_decoder:  # it counts by its cache, and so do our steps if no row has left padding
            counts_itself = takes_positions(model) and prompt.lowest is not None
        else:
            counts_itself = inputs.kwargs.get("position_ids") is not None
        covered("a model that counts positions itself" if counts_itself else None)
        return None
    if prompt.offsets is not None:
        if not (positions == prompt.position + 1 + prompt.offsets).all():
            raise NotCoveredError("a model whose steps take other position_ids than the next")
        return None
    if (positions == prompt.position + 1).all():
        return None
    # the methods may count from another number, but must go on by one with each token
    kwargs = _next_kwargs(model, outputs, kwargs)
    later = _step_inputs(model, torch.cat([ids, token, token], -1), kwargs)
    second = later.get(f"{of_decoder}position_ids")
    is_next = second is not None and second.shape == positions.shape
    if positions.ndim != 2 or not is_next or not torch.equal(second, positions + 1):
        raise NotCoveredError("a model whose steps take positions that do not grow by one")
    return positions


def _next_kwargs(model: Any, outputs: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the kwargs of a step from those of the forward before it."""
    is_encoder_decoder = model.config.is_encoder_decoder
    return model._update_model_kwargs_for_generation(  # type: ignore[no-any-return]
        outputs, dict(kwargs), is_encoder_decoder=is_encoder_decoder
    )


def _step_inputs(model: Any, ids: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return what a model's own method gives the step that feeds the last of some tokens."""
    return model.prepare_inputs_for_generation(  # type: ignore[no-any-return]
        ids, next_sequence_length=1, is_first_iteration=False, **kwargs
    )


class UnreadInputs:
    """What the steps of a model were seen not to read, in its present state."""

    def __init__(self) -> None:
        self._state: object = None
        self._known: set[tuple[Any, ...]] = set()

    def begin(self, state: object) -> None:
        """Forget what was seen if the model is in another state."""
        if state != self._state:
            self._state, self._known = state, set()

    def make_no_difference(
        self, model: Any, given: Mapping[str, Any], others: Sequence[str]
    ) -> bool:
        """Return whether a step's logits are the same without these arguments.

        The step runs twice, over copies of the cache. It need not run again for other tensors if
        nothing read these ones. Logits may then differ by rounding, because two runs of one step on
        a GPU may round in different ways.
        """
        key = tuple(_kind(name, given[name]) for name in others)
        if key in self._known:
            return True
        name = cache_name(model)

        def logits(arguments: Mapping[str, Any]) -> Tensor:
            cache = copy.deepcopy(given[name])
            return model(**{**arguments, name: cache}, return_dict=True).logits  # type: ignore[no-any-return]

        without = {key: x for key, x in given.items() if key not in others}
        tensors = [given[other] for other in others if isinstance(given[other], Tensor)]
        with _Readers(tensors) as readers:
            wanted = logits(given)
        difference = float((wanted - logits(without)).abs().max())
        allowed = 0.0
        if not readers.found and len(tensors) == len(others):
            allowed = tolerance_of(model) * float(wanted.abs().max())
        if not difference <= allowed:
            return False
        if not readers.found:
            self._known.add(key)
        return True


def _kind(name: str, x: Any) -> tuple[Any, ...]:
    """Return an argument's name, and its form or value."""
    return (name, x.dtype, x.ndim) if isinstance(x, Tensor) else (name, repr(x))


#: What tells the form of a tensor, and none of its elements.
_FORM = frozenset(
    [getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda")]
    + [Tensor.size, Tensor.dim]
)


class _Readers(TorchFunctionMode):
    """Notes the functions that get a tensor, or a view of it."""

    def __init__(self, tensors: Sequence[Tensor]):
        super().__init__()
        self.storages = {x.untyped_storage().data_ptr() for x in tensors}
        self.found: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        """Call a function."""
        if func not in _FORM and any(map(self._is_watched, tree_leaves((args, kwargs)))):
            self.found.append(func)
        return func(*args, **(kwargs or {}))

    def _is_watched(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x.untyped_storage().data_ptr() in self.storages


def _is_plain_option(value: Any) -> bool:
    """Return whether a value is a switch that stays the same from step to step."""
    return isinstance(value, bool) and not value


def axes_of_positions(model: Any) -> int:
    """Return how many axes the positions have that stock's generate makes, 0 if none."""
    make = getattr(model, "_prepare_position_ids_for_generation", None)
    if make is None:
        return 0
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    positions = make(ids, {})
    return len(positions) if positions is not None and positions.ndim == 3 else 0
