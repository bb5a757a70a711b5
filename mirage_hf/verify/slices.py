"""Run a program slice by slice with torch, so that it needs little memory.

Decoded to float64, the weight of one linear of a large model takes gigabytes. So do copies of the
experts that 16 tokens choose, even in 16 bits. Most programs compute each column of their outputs
alone, so a few columns at a time give the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mirage_hf import errors
from mirage_hf.graph.coded import is_packed, word_dims
from mirage_hf.graph.effects import APPEND
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import DTensor, KernelGraph, KernelOp
from mirage_hf.ops.dtypes import CODES_PER_WORD
from mirage_hf.verify.narrow import chosen_dims, keys_to_keep, resized
from mirage_hf.verify.size_classes import SizeClasses
from mirage_hf.verify.size_relations import PROGRAM, Key, ResizeError, TensorDim

#: Programs are cut if one of their tensors has more bytes than this in float64.
SLICE_BYTES = 1 << 25
#: Eager runs in slices if, besides, the result of an op has more bytes than this in its own dtype.
EAGER_BYTES = 1 << 27

#: Outputs of more bytes than this, all together, are compared slice by slice.
OUTPUT_BYTES = 1 << 26

#: Imitates rounding errors, as in `run_kernel_graph`.
WithError = Callable[[KernelOp, Tensor], Tensor]


@dataclass(frozen=True)
class Slice:
    """A part of a program, and where its outputs lie in those of the whole.

    Attributes:
        program: The program of the part.
        inputs: Its inputs, views of the whole ones.
        places: For each output the dim that is cut, the first element and how many there are.
    """

    program: KernelGraph
    inputs: list[Tensor]
    places: tuple[tuple[int, int, int], ...]

    def of(self, k: int, output: Tensor) -> Tensor:
        """Return the part of the whole program's output `k`."""
        return output.narrow(*self.places[k])


class SlicedRun:
    """Runs of one program by torch."""

    def __init__(self, program: KernelGraph):
        """Find the axis along which the program can be cut, if it is large."""
        self.program = program
        self._axis = _axis_to_cut(program) if _largest(program) > SLICE_BYTES else None
        self._writes = any(op.name == APPEND for op in program.ops)
        self._parts: dict[int, KernelGraph] = {}

    @property
    def compares_slices(self) -> bool:
        """Whether outputs are so large that only slices of them should be held."""
        size = sum(math.prod(t.dims) * t.dtype.itemsize for t in self.program.outputs)
        return self._axis is not None and not self._writes and size > OUTPUT_BYTES

    def slices(self, inputs: Sequence[Tensor]) -> Iterator[Slice]:
        """Yield the slices of a program that can be cut."""
        axis = self._axis
        assert axis is not None
        for start in range(0, axis.size, axis.step):
            length = min(axis.step, axis.size - start)
            cut = [
                x
                if at is None
                else _narrowed(t, x, at.dim, start * at.per_element, length * at.per_element)
                for t, x, at in zip(self.program.inputs, inputs, axis.inputs, strict=True)
            ]
            places = tuple(
                (at.dim, start * at.per_element, length * at.per_element) for at in axis.outputs
            )
            yield Slice(self._part(axis, length), cut, places)

    def wide(self, inputs: Sequence[Tensor], err: WithError | None = None) -> list[Tensor]:
        """Return the outputs: in float64, or rounded to float32 where a sliced one has 16 bits.

        Args:
            inputs: The inputs.
            err: As for `run_kernel_graph`.
        """
        if self._axis is None:
            return run_kernel_graph(self.program, inputs, torch.float64, err=err)
        outputs = [_wide_blank(t, inputs[0].device) for t in self.program.outputs]

        def run(part: KernelGraph, cut: Sequence[Tensor]) -> list[Tensor]:
            return run_kernel_graph(part, cut, torch.float64, err=err)

        return self._by_slices(inputs, outputs, run)

    def eager(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs as torch computes them, each op in its own dtype.

        A program that writes into an input runs whole, or a slice would read what others wrote.
        """
        if self._axis is None or self._writes or _largest_result(self.program) <= EAGER_BYTES:
            return run_kernel_graph(self.program, inputs, as_on_gpu=True)
        device = inputs[0].device
        outputs = [torch.empty(t.dims, dtype=t.dtype, device=device) for t in self.program.outputs]
        return self._by_slices(inputs, outputs, partial(run_kernel_graph, as_on_gpu=True))

    def _by_slices(
        self,
        inputs: Sequence[Tensor],
        outputs: list[Tensor],
        run: Callable[[KernelGraph, Sequence[Tensor]], list[Tensor]],
    ) -> list[Tensor]:
        """Fill the outputs slice by slice, and return them."""
        for part in self.slices(inputs):
            for k, result in enumerate(run(part.program, part.inputs)):
                part.of(k, outputs[k]).copy_(result)
        return outputs

    def _part(self, axis: _Axis, length: int) -> KernelGraph:
        if length not in self._parts:
            self._parts[length] = axis.part(length)
        return self._parts[length]


@dataclass(frozen=True)
class _Place:
    """Where a tensor has an axis.

    Attributes:
        dim: The dim along it.
        per_element: How many of the dim's elements belong to one element of the axis.
    """

    dim: int
    per_element: int


@dataclass(frozen=True)
class _Axis:
    """An axis of a program that each output has once, and that no op reduces, splits or joins.

    It may be the first of the axes that a dim consists of, such as the blocks of a weight's rows.

    Attributes:
        classes: The dims of the program, by axis.
        each: For the axis itself 1. For a dim that it is the first part of, the size of the rest.
        size: Its size.
        step: How much of it a slice has.
        inputs: Where each input has the axis, or None.
        outputs: Where each output has it.
    """

    classes: SizeClasses
    each: Mapping[Key, int]
    size: int
    step: int
    inputs: tuple[_Place | None, ...]
    outputs: tuple[_Place, ...]

    def part(self, length: int) -> KernelGraph:
        """Return the program with a shorter axis. Its inputs keep their strides.

        Raises:
            MirageError, ResizeError: The program cannot have this size.
        """
        sizes = self.classes.roots() | {key: length * n for key, n in self.each.items()}
        return resized(self.classes, PROGRAM, sizes, keep_strides=True)


def _axis_to_cut(program: KernelGraph) -> _Axis | None:
    """Return the axis along which slices have the smallest tensors, or None if none can be cut."""
    try:
        classes = SizeClasses(program, program)
    except ResizeError:
        return None
    kept = {classes.find(key) for key in (*keys_to_keep(classes), *chosen_dims(classes))}
    count = math.ceil(_largest(program) / SLICE_BYTES)
    best, least = None, _largest(program)
    for each in sorted(_free(classes, kept), key=lambda each: -_size(classes, each)):
        size = _size(classes, each)
        axis = _axis(classes, each, size, math.ceil(size / count))
        if axis is None or axis.step >= size:
            continue
        try:
            largest = _largest(axis.part(axis.step))
        except (ResizeError, errors.MirageError):
            continue
        if largest < least:
            best, least = axis, largest
    return best


def _free(classes: SizeClasses, kept: Collection[Key]) -> Iterator[Mapping[Key, int]]:
    """Yield the axes along which results do not depend on each other, each as `_Axis.each`."""
    rules = {
        (r.kind, classes.find(r.total), tuple(classes.find(key) for key in r.parts))
        for r in classes.rules
    }
    bound = {key for _, total, parts in rules for key in (total, *parts)}
    # A dim and its first part must have no further rule, because that would have to hold, too.
    for key, size in classes.roots().items():
        if size > 1 and key not in kept and key not in bound:
            yield {key: 1}
    for kind, total, (first, *rest) in rules:
        alone = sum(first in (t, *p) or total in (t, *p) for _, t, p in rules) == 1
        if (
            kind == "product"
            and alone
            and classes.roots()[first] > 1
            and not {first, total} & {*kept}
        ):
            yield {first: 1, total: math.prod(classes.roots()[key] for key in rest)}


def _size(classes: SizeClasses, each: Mapping[Key, int]) -> int:
    return classes.roots()[next(key for key, n in each.items() if n == 1)]


def _axis(classes: SizeClasses, each: Mapping[Key, int], size: int, step: int) -> _Axis | None:
    """Return an axis if each output has it once, and no tensor has it twice."""
    program = classes.program

    def places(t: DTensor) -> list[_Place]:
        keys = [classes.find(TensorDim(PROGRAM, t.index, d)) for d in range(len(t.dims))]
        return [_Place(d, each[key]) for d, key in enumerate(keys) if key in each]

    made = [t for op in program.ops for t in op.outputs]
    if any(len(places(t)) > 1 for t in (*program.inputs, *made)):
        return None
    outputs = [places(t) for t in program.outputs]
    if not all(outputs):
        return None
    inputs = [next(iter(places(t)), None) for t in program.inputs]
    if any(_shares_words(t, at) for t, at in zip(program.inputs, inputs, strict=True)):
        step = math.ceil(step / CODES_PER_WORD) * CODES_PER_WORD
    return _Axis(classes, each, size, step, tuple(inputs), tuple(at for (at,) in outputs))


def _shares_words(t: DTensor, at: _Place | None) -> bool:
    return is_packed(t.dtype) and at is not None and at.dim in word_dims(t.dims, t.strides)


def _narrowed(t: DTensor, x: Tensor, dim: int, start: int, length: int) -> Tensor:
    """Return a part of what stores an input. The part begins and ends with a word."""
    per_word = word_dims(t.dims, t.strides).get(dim, 1) if is_packed(t.dtype) else 1
    return x.narrow(dim, start // per_word, length // per_word)


def _largest(program: KernelGraph) -> int:
    """Return the bytes of the largest tensor in float64."""
    made = (t for op in program.ops for t in op.outputs)
    return 8 * max(math.prod(t.dims) for t in (*program.inputs, *made))


def _largest_result(program: KernelGraph) -> int:
    """Return the bytes of the largest result of an op."""
    made = (t for op in program.ops for t in op.outputs)
    return max((math.prod(t.dims) * t.dtype.itemsize for t in made), default=0)


def _wide_blank(t: DTensor, device: torch.device) -> Tensor:
    """Return memory for an output. Float32 holds results of 16 bits well enough to compare them."""
    wide = torch.float32 if t.dtype.itemsize == 2 else torch.float64
    return torch.empty(t.dims, dtype=wide if t.dtype.is_floating_point else t.dtype, device=device)
