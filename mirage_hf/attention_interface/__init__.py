"""`attn_implementation="mirage"`: attention that transformers' models ask for by name.

Decoding steps over a static cache run searched kernels. A kernel is made for one size and one set
of strides of the keys. So it serves caches whose tensors stay as they are (StaticCache). Everything
else runs in SDPA, or in torch ops if SDPA would drop an argument. Each reason is counted.
"""

from __future__ import annotations

from mirage_hf.attention_interface.attention import GROWING, MANY, Attention
from mirage_hf.attention_interface.constants import MOST_TRACED, NAME
from mirage_hf.attention_interface.masks import bounds_of
from mirage_hf.attention_interface.report import AttentionReport, KernelRow
from mirage_hf.attention_interface.torch_attention import attention_in_torch

__all__ = [
    "GROWING",
    "MANY",
    "MOST_TRACED",
    "NAME",
    "Attention",
    "AttentionReport",
    "KernelRow",
    "attention_in_torch",
    "attention_report",
    "bounds_of",
]

_attention = Attention()
_attention.register(NAME)


def attention_report() -> AttentionReport:
    """Return which kernels, or torch, ran attention in models with `attn_implementation="mirage"`.

    It counts the calls of this process so far.
    """
    return _attention.report()
