"""Causal attention of a whole prompt through a sliding window."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

#: The tokens that a run sees before itself are a multiple of this. Fused attention wants masks
#: whose rows begin at multiples of 16 bytes.
LOOK_BACK_MULTIPLE = 64

#: The least tokens of a run, unless the prompt is shorter. Shorter runs are more launches, and
#: longer ones compute more scores that nothing sees.
LEAST_RUN = 512


@dataclass(frozen=True, eq=False)
class WindowAttention:
    """Attends in runs of tokens, so that the cost grows with the length and not with its square."""

    #: Added to scores (run, back + run). Token n of a run sees the run up to n. It may also see
    #: some of the `back` tokens before the run.
    mask: Tensor

    @classmethod
    def of(cls, window: int, tokens: int, like: Tensor) -> WindowAttention:
        """Return the attention for a window and a number of tokens, for queries like `like`."""
        back = -(-window // LOOK_BACK_MULTIPLE) * LOOK_BACK_MULTIPLE
        run = min(max(back, LEAST_RUN), tokens)
        with torch.inference_mode(False):
            token = torch.arange(run, device=like.device)[:, None]
            seen = torch.arange(-back, run, device=like.device)
            hidden = (seen > token) | (seen <= token - window)
            mask = torch.zeros(run, back + run, dtype=like.dtype, device=like.device)
            return cls(mask.masked_fill_(hidden, -math.inf))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Return what attention gives (b, tokens, heads, d).

        Args:
            q: Queries (b, heads, tokens, d).
            k: Keys (b, kv_heads, tokens, d). Each of its heads serves a group of q's heads.
            v: Values, like `k`.
            scale: What scores are multiplied by.
        """
        run, group = self.mask.shape[0], q.shape[1] // k.shape[1]
        back = self.mask.shape[1] - run
        outputs = []
        for first in range(0, q.shape[2], run):
            queries, before = q[:, :, first : first + run], min(back, first)
            seen = slice(first - before, first + run)
            # Fused attention takes a mask only if keys have as many heads as queries.
            keys, values = (x[:, :, seen].repeat_interleave(group, 1) for x in (k, v))
            mask = self.mask[: queries.shape[2], back - before :][:, : keys.shape[2]]
            y = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
            outputs.append(y.transpose(1, 2))
        return torch.cat(outputs, 1)
