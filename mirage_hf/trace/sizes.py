"""Make one recording for all sizes of its inputs, from recordings at some sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mirage_hf.trace.record import Held, Meta, Node, Recording, TraceError, leaves

#: The sizes of a recording's inputs: the slots of the cache, and of what the encoder gave, if any.
Sizes = tuple[int, ...]


#: What the sizes are called in messages.
_SIZE_NAMES = ("cache slots", "encoder slots")


@dataclass(frozen=True)
class Size:
    """An integer that is a linear function of sizes, which are given when the recording is run.

    Attributes:
        factors: What each size is multiplied by.
        rest: What is added.
    """

    factors: tuple[int, ...]
    rest: int

    @property
    def is_mixed(self) -> bool:
        """Whether it depends on more than one size."""
        return sum(factor != 0 for factor in self.factors) > 1

    def __repr__(self) -> str:
        """Return the integer as a text for messages."""
        names = _SIZE_NAMES[: len(self.factors)]
        terms = [
            name if factor == 1 else f"{factor} · {name}"
            for factor, name in zip(self.factors, names, strict=True)
            if factor
        ]
        return f"({' + '.join(terms + [str(self.rest)] * bool(self.rest))})"

    def at(self, sizes: Sizes) -> int:
        """Return the integer at some sizes."""
        return sum(f * size for f, size in zip(self.factors, sizes, strict=True)) + self.rest


def generalized(first: Recording, second: Recording, sizes: tuple[Sizes, Sizes]) -> Recording:
    """Return one recording for all values of one size, made of recordings at two of them.

    An integer that differs between them becomes a `Size`.

    Args:
        first: The recording at the first sizes. It may be generalized already for another size.
        second: The recording at the second sizes.
        sizes: Both. They differ in one size. If they are equal, `first` is only compared with
            `second`.

    Raises:
        TraceError: The recordings differ in more than integers.
    """
    merge = _Merger(sizes)
    if len(first.nodes) != len(second.nodes):
        raise TraceError(
            f"it runs {len(first.nodes)} ops with {_described(sizes[0])}, and "
            f"{len(second.nodes)} with {_described(sizes[1])}"
        )
    merged = Recording(held=first.held, reach=min(first.reach, second.reach))
    for a, b in zip(first.nodes, second.nodes, strict=True):
        if a.op is not b.op:
            raise TraceError(f"{a.where} runs another op with a longer cache")
        if len(a.outputs) != len(b.outputs):
            raise TraceError(f"{a.where} returns more tensors with a longer cache")
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


def _described(sizes: Sizes) -> str:
    """Return sizes as a text for messages."""
    return " and ".join(f"{n} {name}" for n, name in zip(sizes, _SIZE_NAMES, strict=False))


def has_mixed_sizes(recording: Recording) -> bool:
    """Return whether some integer of a recording depends on more than one size."""
    metas = [meta for node in recording.nodes for meta in node.outputs if meta is not None]
    shapes = [(meta.shape, meta.strides) for meta in (*metas, *recording.inputs.values())]
    found = leaves([shapes, [(node.args, node.kwargs) for node in recording.nodes]])
    return any(isinstance(x, Size) and x.is_mixed for x in found)


class _Merger:
    def __init__(self, sizes: tuple[Sizes, Sizes]):
        self.sizes = sizes
        differing = [n for n, (a, b) in enumerate(zip(*sizes, strict=True)) if a != b]
        self.axis = differing[0] if differing else None

    def metas(self, a: Meta, b: Meta, where: str) -> Meta:
        shape = self.together(a.shape, b.shape, where)
        strides = self.together(a.strides, b.strides, where)
        dtype = self.together(a.dtype, b.dtype, where)
        return replace(a, shape=shape, strides=strides, dtype=dtype)

    def together(self, a: Any, b: Any, where: str) -> Any:
        if isinstance(a, Size) and type(b) is int:
            return a if a.at(self.sizes[1]) == b else self._size(a, b, where)
        if type(a) is not type(b):
            raise TraceError(f"{where} gets {a!r} with a short cache, and {b!r} with a long one")
        if isinstance(a, (tuple, list)):
            if len(a) != len(b):
                raise TraceError(f"{where} takes lists of other lengths with a longer cache")
            return type(a)([self.together(x, y, where) for x, y in zip(a, b, strict=True)])
        if isinstance(a, dict):
            if a.keys() != b.keys():
                raise TraceError(f"{where} takes other keyword arguments with a longer cache")
            return {key: self.together(a[key], b[key], where) for key in a}
        if isinstance(a, Held):
            if a.tensor is not b.tensor and not _same_constant(a.tensor, b.tensor):
                raise TraceError(f"{where} makes another constant with a longer cache")
            return a
        try:
            if a == b or a != a:
                return a
        except Exception as error:  # such as a process group
            what = f"{type(a).__name__}, which cannot be compared"
            raise TraceError(f"{where} gets a {what}") from error
        if type(a) is int:
            return self._size(Size((0,) * len(self.sizes[0]), a), b, where)
        raise TraceError(f"{where} gets {a!r} with a short cache, and {b!r} with a long one")

    def _size(self, known: Size, value: int, where: str) -> Size:
        """Return a size that is as known at the first sizes, and has this value at the second."""
        axis, (first, second) = self.axis, self.sizes
        before = known.at(first)
        if axis is None:
            raise TraceError(f"{where} gets an integer that is no linear function of the sizes")
        factor, left = divmod(value - before, second[axis] - first[axis])
        if left:
            raise TraceError(f"{where}: {before} and {value} are no multiple of the cache's size")
        factors = [*known.factors]
        factors[axis] += factor
        return Size(tuple(factors), known.rest - factor * first[axis])


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
