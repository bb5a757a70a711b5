"""Attention in torch ops, for arguments that SDPA does not take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.integrations.sdpa_attention import repeat_kv

from mirage_hf.attention_interface.constants import NAME
from mirage_hf.errors import InputError


def attention_in_torch(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute attention in torch ops, for a softcap or sinks. SDPA has no arguments for these.

    The arguments are those of `Attention.attend`.

    Raises:
        InputError: There is also a position bias or a paged cache.
    """
    for name in ("position_bias", "cache"):
        if kwargs.get(name) is not None:
            raise InputError(
                f'attention "{NAME}": {name} together with softcap or sinks is not supported; '
                'use attn_implementation="eager"'
            )
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(query, key.transpose(2, 3)) * factor
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if mask is None and query.shape[2] > 1 and causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    if sinks is not None:
        sink_scores = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink_scores.to(scores.dtype)), -1)
    weights = functional.softmax(scores, -1, dtype=torch.float32).to(value.dtype)
    weights = weights[..., : key.shape[2]]  # without the sinks
    weights = functional.dropout(weights, dropout, module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous()
