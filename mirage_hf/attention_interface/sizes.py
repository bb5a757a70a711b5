"""The sizes that a kernel is made for, and its inputs and outputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mirage_hf.patterns.masked_attention import MASKED_ATTENTION


class Sizes(NamedTuple):
    """The sizes that a kernel is made for.

    Attributes:
        query: Rows, heads, and their dim.
        key: The shape of the keys.
        value: The shape of the values.
        key_strides: The strides of the keys.
        value_strides: The strides of the values.
        dtype: The dtype of all tensors.
        device: Their device.
        scaling: The factor of scores.
        softcap: The cap on scores.
        sinks: True if there is a sink per head.
    """

    query: tuple[int, int, int]
    key: tuple[int, ...]
    value: tuple[int, ...]
    key_strides: tuple[int, ...]
    value_strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    scaling: float
    softcap: float | None
    sinks: bool

    @property
    def without_length(self) -> tuple[Any, ...]:
        """Everything that does not depend on the length of the cache."""
        return self.query, self.dtype, self.device, self.scaling, self.softcap, self.sinks


def sizes_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Any, ...]:
    """Return the fields of `Sizes` as a plain tuple, which dynamo can trace."""
    rows, heads, _, d = query.shape
    return (
        (rows, heads, d),
        tuple(key.shape),
        tuple(value.shape),
        key.stride(),
        value.stride(),
        query.dtype,
        query.device,
        d**-0.5 if scaling is None else float(scaling),
        softcap,
        sinks is not None,
    )


def block_of(sizes: Sizes) -> Any:
    """Return the block of masked attention for these sizes."""
    _, heads, d = sizes.query
    kv_heads = sizes.key[1]
    return MASKED_ATTENTION.block(
        kv_heads=kv_heads,
        group=heads // kv_heads,
        head_dim=d,
        value_dim=sizes.value[-1],
        dtype=sizes.dtype,
        sinks=sizes.sinks,
        scale=sizes.scaling,
        softcap=sizes.softcap,
    )


def title_of(block: Any, rows: int, slots: int) -> str:
    """Return the sizes in words, for reports and logs."""
    size = dict(block.sizes)
    more = ("" if size["softcap"] is None else ", softcap") + (", sinks" if size["sinks"] else "")
    heads = size["kv_heads"] * size["group"]
    dtype = str(size["dtype"]).removeprefix("torch.")
    return (
        f"{rows} x {heads} heads of {size['head_dim']} ({size['kv_heads']} of keys), "
        f"{slots} keys, {dtype}{more}"
    )


def kernel_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lo: Tensor,
    hi: Tensor,
    bias: Tensor,
    sinks: Tensor | None,
) -> list[Tensor]:
    """Return the inputs of a kernel, in the order of its program."""
    rows, heads, _, d = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    q = query.reshape(rows, kv_heads, group, d).contiguous()
    inputs = [q, key, value, lo, hi, bias]
    if sinks is not None:
        inputs.append(sinks.reshape(1, kv_heads, group, 1).contiguous())
    return inputs


def kernel_output(outputs: list[Tensor], query: Tensor) -> Tensor:
    """Return a kernel's output as (batch, 1, heads, value d)."""
    return outputs[0].reshape(query.shape[0], 1, query.shape[1], -1)
