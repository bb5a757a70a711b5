"""Where the tokens of a call lie in its cache, and where their positions count from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mirage_hf.decode.not_covered import NotCoveredError, covered


@dataclass(frozen=True)
class PromptPlan:
    """Where the tokens of a call lie in its cache, and where their positions count from.

    Attributes:
        past: Tokens in the cache already.
        length: Tokens of the text: those in the cache and the new ones.
        lowest: (batch, 1): left padding, None if no row has any.
        position: (batch or 1, 1): positions of the last tokens.
        offsets: (axes, batch or 1, 1): what each axis of the positions adds to them, None if
            positions have no axes.
        has_unusual_positions: Whether some row's position is beyond its slot or below 0. Only
            positions that a user gives can be so.
        counts_from_zero: Whether every row's own tokens, after left padding, count from position 0
            on, without a cache of the user's. With axes, False if a row has left padding.
    """

    past: int
    length: int
    lowest: Tensor | None
    position: Tensor
    has_unusual_positions: bool
    counts_from_zero: bool
    offsets: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether all rows are whole texts of one length, and every position is a token's place."""
        return self.counts_from_zero and self.lowest is None

    @classmethod
    def of(
        cls,
        input_ids: Tensor,
        past: int,
        mask_length: int,
        kwargs: dict[str, Any],
        *,
        counts_itself: bool = False,
    ) -> PromptPlan:
        """Read the arguments that stock's decoding method would get.

        Args:
            input_ids: (batch, tokens).
            past: Tokens in the cache.
            mask_length: Tokens of the text as generate counts them if no mask is given.
            kwargs: The model's kwargs.
            counts_itself: Whether a model that is given no positions may count the tokens of its
                cache.

        Raises:
            NotCoveredError: The pool cannot serve this prompt.
        """
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        tokens = input_ids.shape[1]
        text_length = mask.shape[1] if mask is not None else mask_length
        # as in HF's _prefill: input_ids hold the whole text, or only what the cache does not have
        length = tokens if text_length == tokens else past + tokens
        if positions is None and counts_itself:
            positions = torch.arange(length - tokens, length, device=input_ids.device)[None]
        if positions is not None and positions.ndim == 3:
            return cls._of_axes(input_ids, past, mask_length, kwargs)
        _check_sizes(input_ids, mask, positions)
        assert positions is not None
        if length <= past:
            raise NotCoveredError("a cache as long as the prompt")
        if past == 0 and _is_plain(mask, positions, length):
            return cls(past, length, None, positions[:, -1:], False, True)
        lowest = covered(_left_padding(mask, length))
        counts_from_zero = (
            past == 0 and lowest is not None and _counts_after(positions, lowest, length)
        )
        first, last = torch.stack(torch.aminmax(positions[:, -1])).tolist()
        is_unusual = last >= length or first < 0
        return cls(past, length, lowest, positions[:, -1:], is_unusual, counts_from_zero)

    @classmethod
    def _of_axes(
        cls, input_ids: Tensor, past: int, mask_length: int, kwargs: dict[str, Any]
    ) -> PromptPlan:
        """Read positions with axes, as models of images have them.

        Every axis moves on by one with each new token (`_update_model_kwargs_for_generation`).
        """
        mask, positions = kwargs.get("attention_mask"), kwargs["position_ids"]
        if past:
            raise NotCoveredError("positions with several axes, over a cache of the user's")
        if mask is not None:
            counted = (mask.long().cumsum(-1) - 1).clamp_min(0)
        else:
            counted = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        plan = cls.of(input_ids, past, mask_length, {**kwargs, "position_ids": counted})
        offsets = positions[..., -1:] - plan.position
        is_text = plan.is_plain and bool((positions == counted).all())
        return replace(plan, offsets=offsets, counts_from_zero=is_text)


def _check_sizes(input_ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> None:
    rows = input_ids.shape[0]
    if positions is None:
        raise NotCoveredError("no position_ids")
    if positions.ndim != 2:
        raise NotCoveredError(f"position_ids of {positions.ndim} dimensions")
    if positions.is_floating_point():
        raise NotCoveredError(f"position_ids of {positions.dtype}")
    for tensor in (mask, positions):
        if tensor is not None and tensor.device != input_ids.device:
            raise NotCoveredError(
                f"a mask or position_ids on {tensor.device}, input_ids on {input_ids.device}"
            )
    if mask is not None and mask.shape[0] != rows:
        raise NotCoveredError(f"a mask for {mask.shape[0]} rows of {rows}")
    if positions.shape[0] not in (1, rows):
        raise NotCoveredError(f"position_ids for {positions.shape[0]} rows of {rows}")


def _is_plain(mask: Tensor | None, positions: Tensor, slots: int) -> bool:
    """Return whether all rows count from position 0 on and nothing is masked.

    The host reads once.
    """
    is_mask = mask is None or (mask.ndim == 2 and mask.shape[1] == slots)
    if positions.shape[1] != slots or not is_mask:
        return False
    same = positions == torch.arange(slots, device=positions.device)
    return bool((same if mask is None else same & (mask != 0)).all())


def _counts_after(positions: Tensor, lowest: Tensor, slots: int) -> bool:
    """Return whether each row's positions count from 0 on after its left padding.

    The host reads once.
    """
    if positions.shape[1] != slots:
        return False
    own = torch.arange(slots, device=positions.device) - lowest
    return bool(((positions == own) | (own < 0)).all())


def _left_padding(mask: Tensor | None, slots: int) -> Tensor | str | None:
    """Return (batch, 1) counts of leading zeros of a mask, None without any.

    If the mask is not left padding, return why. The host reads once or twice. That costs as much as
    stock's own checks of the mask.
    """
    if mask is None:
        return None
    if mask.ndim != 2 or mask.shape[1] != slots:
        return f"a mask of shape {tuple(mask.shape)} for {slots} tokens"
    seen = mask != 0
    if bool(seen.all()):
        return None
    if not bool((seen[:, 1:] >= seen[:, :-1]).all() & seen[:, -1].all()):
        return "holes in the mask"
    return (~seen).sum(-1, keepdim=True)
