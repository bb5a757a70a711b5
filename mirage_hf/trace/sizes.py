"""Make one recording for all sizes of its inputs, from recordings at some sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mirage_hf.trace.record import Held, Meta, Node, Recording, TraceError

#: The sizes of a recording's inputs: the slots of the cache, and of what the encoder gave, if any.
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Size:
    """An integer `factor` · size + `rest`, where sizes are given when the recording is run.

    Attributes:
        factor: What the size is multiplied by.
        rest: What is added.
        axis: Which of the sizes it depends on.
    """

    factor: int
    rest: int
    axis: int = 0

    def __repr__(self) -> str:
        """Return the integer as a text for messages."""
        size = "the slots of the cache" if self.axis == 0 else "those of the encoder's output"
        scaled = size if self.factor == 1 else f"{self.factor} · {size}"
        return f"({scaled} + {self.rest})" if self.rest else f"({scaled})"

    def at(self, sizes: Sizes) -> int:
        """Return the integer at some sizes."""
        return self.factor * sizes[self.axis] + self.rest


def generalized(first: Recording, second: Recording, sizes: tuple[Sizes, Sizes]) -> Recording:
    """Return one recording for all values of one size, made of recordings at two of them.

    An integer that differs between them becomes a `Size`.

    Args:
        first: The recording at the first sizes. It may be generalized already for another size.
        second: The recording at the second sizes.
        sizes: Both. They differ in one.

    Raises:
        TraceError: The recordings differ in more than integers.
    """
    merge = _Merger(sizes)
    if len(first.nodes) != len(second.nodes):
        raise TraceError(
            f"the number of ops depends on the cache's size: {len(first.nodes)} at "
            f"{merge.values[0]}, {len(second.nodes)} at {merge.values[1]}"
        )
    merged = Recording(held=first.held, reach=min(first.reach, second.reach))
    for a, b in zip(first.nodes, second.nodes, strict=True):
        if a.op is not b.op:
            raise TraceError(f"{a.where} runs another op at another size of the cache")
        if len(a.outputs) != len(b.outputs):
            raise TraceError(f"{a.where} returns more tensors at another size of the cache")
        node = Node(
            a.op,
            merge.together(a.args, b.args, a.where),
            merge.together(a.kwargs, b.kwargs, a.where),
            [
                None if x is None or y is None else merge.metas(x, y, a.where)
                for x, y in zip(a.outputs, b.outputs, strict=True)
            ],
            a.where,
            a.written,
        )
        merged.nodes.append(node)
    merged.inputs = {
        name: merge.metas(meta, second.inputs[name], name) for name, meta in first.inputs.items()
    }
    return merged


class _Merger:
    def __init__(self, sizes: tuple[Sizes, Sizes]):
        self.sizes = sizes
        (self.axis,) = (n for n, (a, b) in enumerate(zip(*sizes, strict=True)) if a != b)
        self.values = sizes[0][self.axis], sizes[1][self.axis]

    def metas(self, a: Meta, b: Meta, where: str) -> Meta:
        shape = self.together(a.shape, b.shape, where)
        strides = self.together(a.strides, b.strides, where)
        dtype = self.together(a.dtype, b.dtype, where)
        return replace(a, shape=shape, strides=strides, dtype=dtype)

    def together(self, a: Any, b: Any, where: str) -> Any:
        if isinstance(a, Size) and a.at(self.sizes[0]) == b:
            return a
        if type(a) is not type(b):
            raise TraceError(f"{where} takes {a!r} at one size of the cache, {b!r} at another")
        if isinstance(a, (tuple, list)):
            if len(a) != len(b):
                raise TraceError(f"{where} takes lists of other lengths at another size")
            return type(a)([self.together(x, y, where) for x, y in zip(a, b, strict=True)])
        if isinstance(a, dict):
            if a.keys() != b.keys():
                raise TraceError(f"{where} takes other keyword arguments at another size")
            return {key: self.together(a[key], b[key], where) for key in a}
        if isinstance(a, Held):
            if a.tensor is not b.tensor and not _same_constant(a.tensor, b.tensor):
                raise TraceError(f"{where} makes another constant at another size")
            return a
        if a == b or a != a:
            return a
        if type(a) is int:
            return self._size(a, b, where)
        raise TraceError(f"{where} takes {a!r} at one size of the cache, {b!r} at another")

    def _size(self, a: int, b: int, where: str) -> Size:
        first, second = self.values
        factor, rest = divmod(b - a, second - first)
        if rest:
            raise TraceError(f"{where}: {a} and {b} are no multiple of the cache's size")
        return Size(factor, a - factor * first, self.axis)


def _same_constant(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    return a.is_meta or bool(torch.equal(a, b))  # a model on the meta device has no numbers


def at_size(x: Any, sizes: Sizes) -> Any:
    """Return arguments with each `Size` as the integer that it is at `sizes`."""
    if isinstance(x, Size):
        return x.at(sizes)
    if isinstance(x, (tuple, list)):
        return type(x)([at_size(each, sizes) for each in x])
    if isinstance(x, dict):
        return {key: at_size(each, sizes) for key, each in x.items()}
    return x


def shape_at(meta: Meta, sizes: Sizes) -> tuple[int, ...]:
    """Return a shape at some sizes."""
    return tuple(at_size(meta.shape, sizes))


def fixed_shape(meta: Meta) -> Sequence[int] | None:
    """Return the shape of a tensor, None if it depends on a size."""
    return None if any(isinstance(n, Size) for n in meta.shape) else meta.shape
