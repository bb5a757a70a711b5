"""Make the inputs of numeric cases: draw them, and fit cases to what a program computes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from mirage_hf.graph import coded, strided
from mirage_hf.graph.bounds import Bounds, bounds_of, extent
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph
from mirage_hf.ops import table
from mirage_hf.verify.numeric_cases import Case
from mirage_hf.verify.random_bounds import draw_all
from mirage_hf.verify.size_classes import SizeClasses
from mirage_hf.verify.size_relations import PROGRAM, BlockAxis, ResizeError, TensorDim

#: Weights that have more bytes than this in float32 are drawn in parts.
PART_BYTES = 1 << 26

#: An input "grows" the arguments of exp if doubling it makes them larger by more than this.
_GROWS = 1.3


class CaseInputs:
    """The inputs of a program for any case, in its shapes and strides.

    They are drawn on the device, because a CPU takes seconds for the caches of a batch. Inputs that
    are the same in every case, mostly weights, are drawn once and shared. So a caller must copy an
    input before anything writes to it.
    """

    def __init__(self, program: KernelGraph, seed: int = 0, device: torch.device | str = "cpu"):
        self.program, self.seed, self.device = program, seed, device
        #: Shared inputs by position, with the generator's state after each.
        self._shared: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        #: Codes by the position of their input, and whether they are near their zero points.
        self._kept_codes: dict[tuple[int, bool], torch.Tensor] = {}
        #: The middle of the codes from which an input is subtracted, by its position.
        self._middles = _middles(program)

    def of(self, case: Case) -> list[torch.Tensor]:
        """Return the inputs of a case."""
        generator = torch.Generator(self.device).manual_seed(self.seed)
        bounds = self._bounds(case)
        inputs = []
        number = 0  # among those of floating point
        for position, t in enumerate(self.program.inputs):
            if t.dtype in table.CODE_DTYPES:
                inputs.append(self._codes(position, t, case.near_zero_points))
                continue
            if not t.dtype.is_floating_point:
                x = torch.zeros(t.dims, device="cpu")
                if position in bounds:
                    x = torch.from_numpy(bounds[position])
                inputs.append(self._laid_out(t, x))
                continue
            changes = number == 0 or number in case.grown
            changes = changes or position in case.garbage or position == case.zero
            changes = changes or (case.near_zero_points and position in self._middles)
            if not changes and position in self._shared:
                x, state = self._shared[position]
                generator.set_state(state)
            else:
                x = self._made(case, position, number, bounds, generator)
                if not changes:
                    self._shared[position] = x, generator.get_state()
            inputs.append(x)
            number += 1
        return inputs

    @property
    def holds_codes(self) -> bool:
        """Whether an input holds codes that are whole numbers."""
        return any(_is_whole_code(t) for t in self.program.inputs)

    def _codes(self, position: int, t: DTensor, near_zero: bool) -> torch.Tensor:
        """Return random codes for an input, the same ones in every case of a kind."""
        key = position, near_zero and _is_whole_code(t)
        if key not in self._kept_codes:
            generator = torch.Generator(self.device).manual_seed(self.seed + position)
            reach = _reach(t) if key[1] else coded.WHOLE_RANGE
            self._kept_codes[key] = coded.random_codes(t, generator, self.device, reach)
        return self._kept_codes[key]

    def _bounds(self, case: Case) -> dict[int, np.ndarray]:
        program, rng = self.program, np.random.default_rng(self.seed % 2**64)

        def shape(n: int) -> tuple[int, ...]:
            return program.inputs[n].dims

        return draw_all(program, shape, partial(extent, program), rng, 0, case.outside)

    def _made(
        self,
        case: Case,
        position: int,
        number: int,
        bounds: Mapping[int, Any],
        generator: torch.Generator,
    ) -> torch.Tensor:
        """Make a floating-point input, by its position and by its number among such inputs.

        A large weight is drawn in parts. In float32 a head takes gigabytes.
        """
        t = self.program.inputs[position]

        def drawn(dims: tuple[int, ...]) -> torch.Tensor:
            return self._drawn(case, position, number, bounds, generator, dims)

        parts = math.ceil(4 * math.prod(t.dims) / PART_BYTES)
        if parts == 1 or number == 0 or position in case.garbage or 0 in t.strides:
            return self._laid_out(t, drawn(t.dims))
        x = strided.blank(t.dims, t.strides, t.dtype, self.device)
        dim = max(range(len(t.dims)), key=lambda d: t.dims[d])
        for part in x.split(math.ceil(t.dims[dim] / parts), dim):
            part.copy_(drawn(tuple(part.shape)))
        return x

    def _drawn(
        self,
        case: Case,
        position: int,
        number: int,
        bounds: Mapping[int, Any],
        generator: torch.Generator,
        dims: tuple[int, ...],
    ) -> torch.Tensor:
        """Draw a floating-point input in float32, or a part of it with these dims."""
        t = self.program.inputs[position]
        most = torch.finfo(t.dtype).max
        x = torch.randn(dims, generator=generator, dtype=torch.float32, device=self.device)
        if number == 0:
            x = x[..., :1].expand(dims) if case.constant_rows else x
            x = (x * case.factor + case.offset).clamp_(-most, most)
        elif len(t.dims) >= 2 and t.dims[-2] > 1:
            x = x / max(t.dims[-2:]) ** 0.5
        if case.near_zero_points and position in self._middles:
            x = x + self._middles[position]
        if number in case.grown:
            sign = case.sign if number == case.grown[-1] else 1
            x = (x.abs() * sign * case.by).clamp_(-most, most)
        if position in case.garbage:
            for b, d in bounded_dims(self.program, position):
                x.transpose(0, d)[: int(bounds[b.lo].min())] = math.nan
                x.transpose(0, d)[int(bounds[b.hi].max()) :] = math.nan
        return x if position != case.zero else torch.zeros_like(x)

    def _laid_out(self, t: DTensor, x: torch.Tensor) -> torch.Tensor:
        return strided.laid_out(x, t.strides, t.dtype, self.device)


def _is_whole_code(t: DTensor) -> bool:
    return t.dtype in table.CODE_DTYPES and not t.dtype.is_floating_point


def _reach(t: DTensor) -> int:
    """Return how far codes near their zero points are from the middle of their range."""
    return 1 if coded.is_packed(t.dtype) else 8


def _middles(program: KernelGraph) -> dict[int, float]:
    """Return the float inputs that are subtracted from codes, with the middle of those codes.

    Inputs are given by position.
    """
    position = {t.index: n for n, t in enumerate(program.inputs)}
    #: The inputs that a tensor is made of, by its index.
    made_of = {index: {index} for index in position}
    found: dict[int, float] = {}
    for op in program.ops:
        operands = [x for x in op.inputs if isinstance(x, DTensor)]
        if op.name in ("cast", "concat", "reshape", "permute", "take"):
            operands = operands[:1] if op.name == "take" else operands
            sources = set().union(*(made_of.get(t.index, set()) for t in operands))
            made_of[op.outputs[0].index] = sources
        elif op.name == "sub" and len(operands) == 2:
            left, right = (made_of.get(t.index, set()) for t in operands)
            codes = [program.inputs[position[n]] for n in left]
            middles = {coded.middle(t.dtype) for t in codes if _is_whole_code(t)}
            floats = [n for n in right if program.inputs[position[n]].dtype.is_floating_point]
            if len(middles) == 1:
                found |= dict.fromkeys((position[n] for n in floats), middles.pop())
    return found


def make_inputs(
    program: KernelGraph, case: Case, seed: int = 0, device: torch.device | str = "cpu"
) -> list[torch.Tensor]:
    """Return the inputs of one case."""
    return CaseInputs(program, seed, device).of(case)


def copied(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies with the same strides, because strides are constants in kernels."""
    return [strided.copied(x) for x in inputs]


def bounded_dims(program: KernelGraph, position: int) -> list[tuple[Bounds, int]]:
    """Return the dims of an input along which an op of the program has bounds, with the bounds.

    Raises:
        ResizeError: If the program has an op that cannot be proven.
    """
    classes = SizeClasses(program, program)
    t = program.inputs[position]
    found = []
    for b in bounds_of(program):
        key = (
            BlockAxis(PROGRAM, b.op, b.axis)
            if b.x is None
            else TensorDim(PROGRAM, b.x.index, b.dim)
        )
        for d in range(len(t.dims)):
            if classes.find(TensorDim(PROGRAM, t.index, d)) == classes.find(key):
                found.append((b, d))
    return found


def with_garbage(inputs: CaseInputs, case: Case) -> Case | None:
    """Return the case with NaN outside of the bounds of some inputs.

    These are the inputs whose NaN leaves no trace in what torch eager computes.

    Returns:
        The case, or None if there is no such input.
    """
    program = inputs.program
    if not bounds_of(program):
        return None
    try:
        bounded = [
            n
            for n, t in enumerate(program.inputs)
            if t.dtype in table.COMPUTE_DTYPES and bounded_dims(program, n)
        ]
    except ResizeError:
        return None
    harmless = []
    for n in bounded:
        drawn = copied(inputs.of(replace(case, garbage=(n,))))
        eager = run_kernel_graph(program, drawn, as_on_gpu=True)
        if all(bool(torch.isfinite(y).all()) for y in eager):
            harmless.append(n)
    return replace(case, garbage=tuple(harmless)) if harmless else None


def exponents(program: KernelGraph) -> KernelGraph | None:
    """Return the part of a program that computes the arguments of exp, or None if it has none."""
    part = KernelGraph()
    new = {t.index: part.input_like(t) for t in program.inputs}
    found = []
    for op in program.ops:
        if op.name == CUSTOMIZED:
            return None
        args = [new[x.index] if isinstance(x, DTensor) else x for x in op.inputs]
        if op.name in ("exp", "softmax") and isinstance(args[0], DTensor):
            found.append(args[0])
        new[op.outputs[0].index] = part.apply(op.name, args, dict(op.attrs))
    part.mark_output(*found)
    return part if found else None


def with_scores(inputs: CaseInputs, case: Case) -> Case | None:
    """Return the case with the inputs and the factor that bring arguments of exp to `case.scores`.

    If torch eager overflows on the way there, the factor is the largest at which it stays finite.

    Returns:
        The case, or None if no input makes the arguments of exp grow.
    """
    part = exponents(inputs.program)
    if part is None:
        return None

    def largest(grown: tuple[int, ...], by: float, dtype: torch.dtype | None) -> float:
        drawn = inputs.of(replace(case, grown=grown, by=by))
        if dtype is None:  # as on a GPU, where appends write into their caches
            drawn = copied(drawn)
        found = run_kernel_graph(part, drawn, dtype, as_on_gpu=True)
        return max(float(x.abs().max()) for x in found)

    def growth(grown: tuple[int, ...]) -> tuple[float, float]:
        once, twice = (largest(grown, by, torch.float64) for by in (1.0, 2.0))
        return once, twice / once if once > 0 else 1.0

    count = sum(t.dtype in table.COMPUTE_DTYPES for t in inputs.program.inputs)
    grown = tuple(range(min(count, 2)))
    size, ratio = growth(grown)
    if not ratio > _GROWS:  # a norm takes the scale of its input away, but its weight has a scale
        grown = tuple(n for n in range(count) if growth((n,))[1] > _GROWS)[:2]
        if not grown:
            return None
        size, ratio = growth(grown)
    if not (math.isfinite(size) and _GROWS < ratio < math.inf):
        return None
    by = (case.scores / size) ** (1 / math.log2(ratio))
    for _ in range(10):
        if math.isfinite(largest(grown, by, None)):
            return replace(case, grown=grown, by=by)
        by *= 0.8
    return None
