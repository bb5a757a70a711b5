"""Run a program slice by slice with torch, so that it needs little memory.

Decoded to float64, the weight of one linear of a large model takes gigabytes. So do copies of the
experts that 16 tokens choose, even in 16 bits. Most programs compute each column of their outputs
alone, so a few columns at a time give the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
from mirage_hf.verify.narrow import keys_to_keep, resized
from mirage_hf.verify.size_classes import SizeClasses
from mirage_hf.verify.size_relations import PROGRAM, Key, ResizeError, TensorDim

#: Programs are cut if one of their tensors has more bytes than this in float64.
SLICE_BYTES = 1 << 26
#: Eager runs in slices if, besides, the result of an op has more bytes than this in its own dtype.
EAGER_BYTES = 1 << 28

#: Imitates rounding errors, as in `run_kernel_graph`.
WithError = Callable[[KernelOp, Tensor], Tensor]


class SlicedRun:
    """Runs of one program by torch."""

    def __init__(self, program: KernelGraph):
        """Find the axis along which the program can be cut, if it is large."""
        self.program = program
        self._axis = _axis_to_cut(program) if _largest(program) > SLICE_BYTES else None
        self._parts: dict[int, KernelGraph] = {}

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

        return self._by_slices(self._axis, inputs, outputs, run)

    def eager(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs as torch computes them, each op in its own dtype.

        A program that writes into an input runs whole, or a slice would read what others wrote.
        """
        writes = any(op.name == APPEND for op in self.program.ops)
        if self._axis is None or writes or _largest_result(self.program) <= EAGER_BYTES:
            return run_kernel_graph(self.program, inputs, as_on_gpu=True)
        device = inputs[0].device
        outputs = [torch.empty(t.dims, dtype=t.dtype, device=device) for t in self.program.outputs]
        return self._by_slices(
            self._axis, inputs, outputs, partial(run_kernel_graph, as_on_gpu=True)
        )

    def _by_slices(
        self,
        axis: _Axis,
        inputs: Sequence[Tensor],
        outputs: list[Tensor],
        run: Callable[[KernelGraph, Sequence[Tensor]], list[Tensor]],
    ) -> list[Tensor]:
        """Fill the outputs slice by slice, and return them."""
        for start in range(0, axis.size, axis.step):
            length = min(axis.step, axis.size - start)
            cut = [
                x if d is None else _narrowed(t, x, d, start, length)
                for t, x, d in zip(self.program.inputs, inputs, axis.inputs, strict=True)
            ]
            results = run(self._part(axis, length), cut)
            for y, result, d in zip(outputs, results, axis.outputs, strict=True):
                y.narrow(d, start, length).copy_(result)
        return outputs

    def _part(self, axis: _Axis, length: int) -> KernelGraph:
        if length not in self._parts:
            self._parts[length] = axis.part(length)
        return self._parts[length]


@dataclass(frozen=True)
class _Axis:
    """An axis of a program that each output has once, and that no op reduces, splits or joins.

    Attributes:
        classes: The dims of the program, by axis.
        key: The axis.
        size: Its size.
        step: How much of it a slice has.
        inputs: For each input its dim along the axis, or None.
        outputs: For each output its dim along the axis.
    """

    classes: SizeClasses
    key: Key
    size: int
    step: int
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]

    def part(self, length: int) -> KernelGraph:
        """Return the program with a shorter axis. Its inputs keep their strides.

        Raises:
            MirageError, ResizeError: The program cannot have this size.
        """
        sizes = self.classes.roots() | {self.key: length}
        return resized(self.classes, PROGRAM, sizes, keep_strides=True)


def _axis_to_cut(program: KernelGraph) -> _Axis | None:
    """Return the longest axis that a program can be cut along, or None."""
    try:
        classes = SizeClasses(program, program)
    except ResizeError:
        return None
    excluded = {classes.find(key) for key in keys_to_keep(classes)}
    for rule in classes.rules:
        excluded |= {classes.find(key) for key in (rule.total, *rule.parts)}
    count = math.ceil(_largest(program) / SLICE_BYTES)
    free = [(n, key) for key, n in classes.roots().items() if n > 1 and key not in excluded]
    for size, key in sorted(free, key=lambda pair: -pair[0]):
        axis = _axis(classes, key, size, math.ceil(size / count))
        if axis is None or axis.step >= size:
            continue
        try:
            axis.part(axis.step)
        except (ResizeError, errors.MirageError):
            continue
        return axis
    return None


def _axis(classes: SizeClasses, key: Key, size: int, step: int) -> _Axis | None:
    """Return an axis if each output has it once, and no tensor has it twice."""
    program = classes.program

    def dims(t: DTensor) -> list[int]:
        found = range(len(t.dims))
        return [d for d in found if classes.find(TensorDim(PROGRAM, t.index, d)) == key]

    made = [t for op in program.ops for t in op.outputs]
    if any(len(dims(t)) > 1 for t in (*program.inputs, *made)):
        return None
    outputs = [dims(t) for t in program.outputs]
    if not all(outputs):
        return None
    inputs = [next(iter(dims(t)), None) for t in program.inputs]
    if any(_shares_words(t, d) for t, d in zip(program.inputs, inputs, strict=True)):
        step = math.ceil(step / CODES_PER_WORD) * CODES_PER_WORD
    return _Axis(classes, key, size, step, tuple(inputs), tuple(d for (d,) in outputs))


def _shares_words(t: DTensor, dim: int | None) -> bool:
    return is_packed(t.dtype) and dim in word_dims(t.dims, t.strides)


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
