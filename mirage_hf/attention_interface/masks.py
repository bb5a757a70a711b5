"""Masks that remember whether their cache has a fixed number of keys, and the bounds of masks."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import eager_mask, sdpa_mask

from mirage_hf.attention_interface.constants import NAME
from mirage_hf.patterns.masked_attention import masked_bias

_log = logging.getLogger("mirage_hf")


@dataclass
class MaskFacts:
    """What is known of a mask when it is made.

    Attributes:
        fixed: True if it is over keys of a fixed number.
        version: The mask's version. `bounds` hold while it stays the same.
        captured: True if it was made while a CUDA graph was captured. `bounds` hold only inside of
            captures, or only outside of them.
        bounds: (lo, hi, bias), made when the first layer asks.
    """

    fixed: bool
    version: int | None
    captured: bool
    bounds: tuple[Tensor, Tensor, Tensor] | None = None


def make_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return SDPA's boolean mask (batch, 1, queries, keys), or None.

    `facts_of` returns what the mask remembers. Some models know no attention by name, and their own
    code may add the mask to scores. They get the mask of `eager`.
    """
    if not _takes_names(type(kwargs.get("config"))):
        return eager_mask(*args, **kwargs)
    mask = sdpa_mask(*args, **kwargs)
    if mask is None or torch.compiler.is_compiling():
        return mask
    queries, keys = mask.shape[-2:]
    start, offset = kwargs.get("q_offset", 0), kwargs.get("kv_offset", 0)
    # Static layers count on the device, or have more keys than tokens. A sliding layer has as
    # many keys as its window once the text is longer than the window. At the one step that
    # fills a layer this looks like keys that grow.
    fixed = isinstance(start, Tensor) or offset > 0 or offset + keys != start + queries
    # an encoder has as many keys as tokens
    fixed = fixed and "allow_is_bidirectional_skip" not in kwargs
    mask._mirage = MaskFacts(fixed, version_of(mask), is_capturing(mask))  # type: ignore[attr-defined]
    return mask


def facts_of(mask: Tensor | None) -> MaskFacts | None:
    """Return what a mask of `make_mask` remembers. None for other masks."""
    return getattr(mask, "_mirage", None)


def bounds_of(mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bounds and the bias that a boolean mask (rows, 1, 1, keys) stands for.

    The host reads nothing.

    Returns:
        The first key that is let through, int32 (rows, 1, 1, 1). The one after the last, likewise.
        The bias of every key.
    """
    keys = mask.shape[-1]
    at = torch.arange(keys, dtype=torch.int32, device=mask.device)
    lo = torch.where(mask, at, keys).amin(-1, keepdim=True)
    hi = torch.where(mask, at + 1, 0).amax(-1, keepdim=True)
    masked = torch.full(mask.shape, masked_bias(dtype), dtype=dtype, device=mask.device)
    return lo, hi, masked.masked_fill_(mask, 0.0)


def is_fixed_prompt(
    module: torch.nn.Module, query: Tensor, key: Tensor, mask: Tensor | None
) -> bool:
    """Return True for a prompt over a fixed number of keys that is larger than its own.

    Without a mask it is the first prompt of its cache.
    """
    if key.shape[2] <= query.shape[2]:
        return False
    if mask is None:
        return bool(getattr(module, "is_causal", True))
    facts = facts_of(mask)
    return facts is not None and facts.fixed


def version_of(mask: Tensor) -> int | None:
    """Return the version counter of a mask. None for an inference tensor, which has none."""
    return None if mask.is_inference() else mask._version


def is_capturing(x: Tensor) -> bool:
    """Return True for a CUDA tensor while the current stream is captured into a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


@torch.compiler.assume_constant_result
def _takes_names(config: type) -> bool:
    """Return True if models of a config class run attention that is asked for by name.

    The class attributes of transformers' models say so.
    """
    return _takes_names_once(config)


@cache
def _takes_names_once(config: type) -> bool:
    # imported here, because it takes 0.2 s and not every user needs it
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    models = MODEL_MAPPING.get(config, ())
    for model in models if isinstance(models, tuple) else (models,):
        if not (
            getattr(model, "_supports_sdpa", True)
            or getattr(model, "_supports_attention_backend", True)
        ):
            _log.warning(
                'attention "%s": %s may run attention of its own whatever the name; '
                'it gets masks as "eager" does and no kernels',
                NAME,
                model.__name__,
            )
            return False
    return True
