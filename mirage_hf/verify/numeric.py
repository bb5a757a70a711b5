"""Numbers: a candidate in its run dtype beside a float64 reference, on ordinary and on hard inputs.

The rule: where torch eager (the program op by op in the run dtype) is finite the candidate is finite, and its largest and
its RMS error against float64 are at most 1.25 times eager's plus one ulp of the output's scale. On constant rows and where the
mean is far above the spread, x − mean(x) is what rounding left of the mean, and which order of a sum has luck there says nothing:
what float32 sums that are off by as much as they may be make of the results counts as eager's error where that is less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from mirage_hf.errors import Rejected
from mirage_hf.graph import strided
from mirage_hf.graph.execute import TorchAlgebra, run_block_graph, run_kernel_graph, run_library
from mirage_hf.graph.kernel import CUSTOMIZED, DTensor, KernelGraph, KernelOp
from mirage_hf.graph.ragged import Bounds, bounds_of, extent
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.search.spec import expand
from mirage_hf.verify.narrow import narrowed
from mirage_hf.verify.random_bounds import draw_all
from mirage_hf.verify.shrink import Classes, Misfit
from mirage_hf.verify.verdict import Accepted, Verdict

SLACK = 1.25
_IN_RANGE = 0.98
"""Results beyond this part of the dtype's largest number may round to infinity or not; either is right."""

Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """One set of inputs: `factor` and `offset` apply to the first floating-point input, `constant_rows` makes its rows constant.

    `scores`: inputs with which the arguments of exp grow are scaled until these reach that size (`grown`: which ones, `by`: the
    factor). They are made positive, the last of them of `sign`, so that products of them are far from 0 in every row.
    `range_only`: only infinities and NaN count. So near the largest number most results overflow, and the errors of the few
    cancellations that do not are luck. `outside`: no row's bounds reach the ends of their axis, and the inputs `garbage` are NaN
    where no row's bounds are. `zero`: the input that is 0 throughout.
    """

    name: str
    factor: float = 1.0
    offset: float = 0.0
    constant_rows: bool = False
    range_only: bool = False
    scores: float = 0.0
    sign: int = 0
    grown: tuple[int, ...] = ()
    by: float = 1.0
    garbage: tuple[int, ...] = ()
    outside: bool = False
    zero: int | None = None

    @property
    def cancels(self) -> bool:
        """Whether a mean is so near to what it is subtracted from that its rounding is seen in the results."""
        return self.constant_rows or self.offset != 0


def cases(dtype: torch.dtype) -> tuple[Case, ...]:
    large = 300.0 if dtype == torch.float16 else 1e4
    edge = (
        (Case("nearly the largest", factor=12000.0, range_only=True),)
        if dtype == torch.float16
        else ()
    )
    return (
        Case("random"),
        Case("large", factor=large),
        Case("tiny", factor=1e-3),
        Case("constant rows", constant_rows=True),
        Case("mean far above spread", offset=1000.0),
        Case("huge positive scores", scores=3e4, sign=1, range_only=True),
        Case("huge negative scores", scores=3e4, sign=-1, range_only=True),
        Case("NaN out of bounds", outside=True),
        *edge,
    )


class Draws:
    """Inputs of a program for any case: normal numbers in its shapes and strides, matrices scaled so that products keep their size. Drawn
    on their device: a CPU takes seconds for the caches of a batch.
    Those that are alike in every case, weights mostly, are drawn once and shared: callers copy what they let anything write."""

    def __init__(self, program: KernelGraph, seed: int = 0, device: torch.device | str = "cpu"):
        self.program, self.seed, self.device = program, seed, device
        self._alike: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By position, with the state of the generator behind it."""

    def of(self, case: Case) -> list[torch.Tensor]:
        program, number = self.program, 0
        generator = torch.Generator(self.device).manual_seed(self.seed)
        rng = np.random.default_rng(self.seed % 2**64)
        bounds = draw_all(
            program,
            lambda n: program.inputs[n].dims,
            partial(extent, program),
            rng,
            0,
            case.outside,
        )
        found = []
        for position, t in enumerate(program.inputs):
            if not t.dtype.is_floating_point:
                whole = (
                    torch.from_numpy(bounds[position])
                    if position in bounds
                    else torch.zeros(t.dims, device="cpu")
                )
                found.append(self._laid_out(t, whole))
                continue
            if (
                number == 0
                or number in case.grown
                or position in case.garbage
                or position == case.zero
            ):
                found.append(
                    self._laid_out(t, self._drawn(case, position, number, bounds, generator))
                )
            else:
                if position not in self._alike:
                    x = self._laid_out(t, self._drawn(case, position, number, bounds, generator))
                    self._alike[position] = x, generator.get_state()
                x, behind = self._alike[position]
                generator.set_state(behind)
                found.append(x)
            number += 1
        return found

    def _drawn(
        self,
        case: Case,
        position: int,
        number: int,
        bounds: Mapping[int, Any],
        generator: torch.Generator,
    ) -> torch.Tensor:
        t = self.program.inputs[position]
        most = torch.finfo(t.dtype).max
        x = torch.randn(t.dims, generator=generator, dtype=torch.float32, device=self.device)
        if number == 0:
            x = x[..., :1].expand(t.dims) if case.constant_rows else x
            x = (x * case.factor + case.offset).clamp_(-most, most)
        elif len(t.dims) >= 2 and t.dims[-2] > 1:
            x = x / max(t.dims[-2:]) ** 0.5
        if number in case.grown:
            x = (x.abs() * (case.sign if number == case.grown[-1] else 1) * case.by).clamp_(
                -most, most
            )
        if position in case.garbage:
            for b, d in bounded_dims(self.program, position):
                x.transpose(0, d)[: int(bounds[b.lo].min())] = math.nan
                x.transpose(0, d)[int(bounds[b.hi].max()) :] = math.nan
        return x if position != case.zero else torch.zeros_like(x)

    def _laid_out(self, t: DTensor, x: torch.Tensor) -> torch.Tensor:
        return strided.laid_out(x, t.strides, t.dtype, self.device)


def make_inputs(
    program: KernelGraph, case: Case, seed: int = 0, device: torch.device | str = "cpu"
) -> list[torch.Tensor]:
    """The inputs of one case."""
    return Draws(program, seed, device).of(case)


def copied(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies with the same strides, which kernels have as constants."""
    return [strided.copied(x) for x in inputs]


def bounded_dims(program: KernelGraph, position: int) -> list[tuple[Bounds, int]]:
    """The dims of an input along which an op of the program has bounds."""
    classes = Classes(program, program)
    found, t = [], program.inputs[position]
    for b in bounds_of(program):
        key = ("program", b.op, b.axis) if b.x is None else ("program", b.x.index, b.dim)
        found += [
            (b, d)
            for d in range(len(t.dims))
            if classes.find(("program", t.index, d)) == classes.find(key)
        ]
    return found


def with_garbage(draws: Draws, case: Case) -> Case | None:
    """The case with those inputs that may be NaN out of bounds without a trace of it in what torch eager gives; None where no input
    may, or nothing has bounds."""
    program = draws.program
    if not bounds_of(program):
        return None
    try:
        may = [
            n
            for n, t in enumerate(program.inputs)
            if t.dtype.is_floating_point and bounded_dims(program, n)
        ]
    except Misfit:
        return None
    harmless = []
    for n in may:
        eager = run_kernel_graph(
            program, copied(draws.of(replace(case, garbage=(n,)))), as_on_gpu=True
        )
        harmless += [n] if all(bool(torch.isfinite(y).all()) for y in eager) else []
    return replace(case, garbage=tuple(harmless)) if harmless else None


def exponents(program: KernelGraph) -> KernelGraph | None:
    """The part of a program that computes the arguments of its exponentials; None if it has none."""
    part = KernelGraph()
    new = {t.index: part.input_like(t) for t in program.inputs}
    found = []
    for op in program.ops:
        if op.name == CUSTOMIZED:
            return None
        args = [new[x.index] if isinstance(x, DTensor) else x for x in op.inputs]
        found += [args[0]] if op.name in ("exp", "softmax") else []
        new[op.outputs[0].index] = part.apply(op.name, args, dict(op.attrs))
    part.mark_output(*(x for x in found if isinstance(x, DTensor)))
    return part if found else None


def with_scores(draws: Draws, case: Case) -> Case | None:
    """The case with the factors that bring the arguments of exp to `case.scores`, or as near as torch eager stays finite; None
    where they do not grow with any input."""
    program = draws.program
    part = exponents(program)
    if part is None:
        return None

    def largest(grown: tuple[int, ...], by: float, wide: torch.dtype | None) -> float:
        inputs = draws.of(replace(case, grown=grown, by=by))
        found = run_kernel_graph(
            part, copied(inputs) if wide is None else inputs, wide, as_on_gpu=True
        )  # caches are written to
        return max(float(x.abs().max()) for x in found)

    def growth(grown: tuple[int, ...]) -> tuple[float, float]:
        once, twice = (largest(grown, by, torch.float64) for by in (1.0, 2.0))
        return once, twice / once if once > 0 else 1.0

    count = sum(t.dtype.is_floating_point for t in program.inputs)
    grown = tuple(range(min(count, 2)))
    size, ratio = growth(grown)
    if not ratio > 1.3:  # a norm takes the scale of its input away; then its weight has it
        grown = tuple(n for n in range(count) if growth((n,))[1] > 1.3)[:2]
        if not grown:
            return None
        size, ratio = growth(grown)
    if not (math.isfinite(size) and 1.3 < ratio < math.inf):
        return None
    by = (case.scores / size) ** (1 / math.log2(ratio))
    for _ in range(10):
        if math.isfinite(largest(grown, by, None)):
            return replace(case, grown=grown, by=by)
        by *= 0.8
    return None


@dataclass(frozen=True)
class Errors:
    """Largest and RMS error against float64 where eager is finite, and the scale (largest magnitude and RMS) there."""

    max: float
    rms: float
    scale: float
    rms_scale: float


def measure(got: torch.Tensor, reference: torch.Tensor, where: torch.Tensor) -> Errors:
    if not bool(where.any()):
        return Errors(0.0, 0.0, 0.0, 0.0)
    d, r = (got.double() - reference)[where], reference.double()[where]
    return Errors(
        float(d.abs().max()),
        float(d.square().mean().sqrt()),
        float(r.abs().max()),
        float(r.square().mean().sqrt()),
    )


def within(candidate: Errors, eager: Errors, dtype: torch.dtype) -> bool:
    ulp, tiny = (
        (torch.finfo(dtype).eps, torch.finfo(dtype).tiny) if dtype.is_floating_point else (0.0, 0.0)
    )
    return (
        candidate.max <= SLACK * eager.max + ulp * eager.scale
        and candidate.rms <= SLACK * eager.rms + ulp * max(eager.rms_scale, tiny)
    )


def larger(a: Errors, b: Errors) -> Errors:
    return replace(a, max=max(a.max, b.max), rms=max(a.rms, b.rms))


def _info(dtype: torch.dtype) -> torch.finfo | torch.iinfo:
    return torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)


class NumericCheck:
    """References and eager errors of one program, computed once and used for all its candidates."""

    def __init__(self, program: KernelGraph, device: torch.device | str = "cpu", seed: int = 0):
        self.program, self._draws = program, Draws(program, seed, device)
        self._scaled: dict[Case, Case | None] = {}
        self._stock: dict[tuple[Case, int], Errors] = {}
        self._rounded: dict[Case, list[Errors]] = {}
        self._cached: dict[
            Case,
            tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]],
        ] = {}

    def _case(
        self, case: Case
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        if case not in self._cached:
            inputs = self._draws.of(case)
            reference = run_kernel_graph(
                self.program, inputs, torch.float64
            )  # which copies what it may write
            eager = run_kernel_graph(self.program, copied(inputs), as_on_gpu=True)
            where = [
                torch.isfinite(e) & (r.abs() <= _IN_RANGE * _info(e.dtype).max)
                for e, r in zip(eager, reference, strict=True)
            ]
            self._cached[case] = (inputs, reference, eager, where)
        return self._cached[case]

    def _sums(self, case: Case) -> list[Errors]:
        """What becomes of the results where every sum over a dim of n is off by log2(n) / 2 ulps of float32, the most that adding up
        in pairs loses: torch's own norms are off by less in most rows, by nothing in some, in an order of their own."""
        if case not in self._rounded:
            inputs, reference, _, where = self._case(case)
            generator = torch.Generator(inputs[0].device).manual_seed(self._draws.seed)

            def off(op: KernelOp, y: torch.Tensor) -> torch.Tensor:
                x, attrs = op.inputs[0], dict(op.attrs)
                if op.name != "reduction" or attrs["kind"] == "max" or not isinstance(x, DTensor):
                    return y
                sign = torch.randint(2, y.shape, generator=generator, device=y.device) * 2 - 1
                return y * (
                    1 + sign * math.log2(x.dims[attrs["dim"]]) / 2 * torch.finfo(torch.float32).eps
                )

            found = run_kernel_graph(expand(self.program), inputs, torch.float64, err=off)
            self._rounded[case] = [
                measure(y, r, w) for y, r, w in zip(found, reference, where, strict=True)
            ]
        return self._rounded[case]

    def each(self) -> Iterator[tuple[Case, list[torch.Tensor]]]:
        dtype = next(
            (t.dtype for t in self.program.outputs if t.dtype.is_floating_point), torch.float32
        )
        for case in cases(dtype):
            if case.scores or case.outside:
                if case not in self._scaled:
                    make = with_scores if case.scores else with_garbage
                    self._scaled[case] = make(self._draws, case)
                if (scaled := self._scaled[case]) is None:
                    continue
                case = scaled
            yield case, self._case(case)[0]
        if any(
            op.name == "ratio" for op in self.program.ops
        ):  # 0 where the divisor is, which no draw of the proof has
            for k, t in enumerate(self.program.inputs):
                if t.dtype.is_floating_point:
                    yield (case := Case(f"zero {t.name}", zero=k)), self._case(case)[0]

    def judge(self, run: Run) -> Verdict:
        """Run a candidate on every case. Returns Rejected with the case, the output and both errors where it is worse."""
        worst = 0.0
        for case, inputs in self.each():
            _, reference, eager, where = self._case(case)
            got = run(copied(inputs))
            for k, t in enumerate(self.program.outputs):
                finite = torch.isfinite(got[k])
                if bool((where[k] & ~finite).any()):
                    return Rejected(
                        f"numbers: inf or NaN in output {k} on {case.name} inputs where torch eager has none"
                    )
                if case.range_only:
                    continue
                if (case, k) not in self._stock:
                    self._stock[case, k] = measure(eager[k], reference[k], where[k])
                stock = self._stock[case, k]
                mine = (
                    stock
                    if torch.equal(got[k], eager[k])
                    else measure(got[k], reference[k], where[k])
                )
                if not within(mine, stock, t.dtype) and not (
                    case.cancels and within(mine, larger(stock, self._sums(case)[k]), t.dtype)
                ):
                    return Rejected(
                        f"numbers: output {k} on {case.name} inputs: max error {mine.max:.3g} (eager {stock.max:.3g}), "
                        f"RMS {mine.rms:.3g} (eager {stock.rms:.3g}), scale {stock.scale:.3g}"
                    )
                worst = max(worst, mine.max / stock.max if stock.max else 0.0)
        return Accepted(0.0, f"largest error {worst:.2f}× eager's")


def run_kernels(
    kernels: KernelGraph, inputs: Sequence[torch.Tensor], tensor_cores: bool
) -> list[torch.Tensor]:
    """Run a µGraph's kernels as a GPU would: block graphs in float32 with their results rounded to the tensors they are stored
    in, and with `tensor_cores` the factors of contractions rounded to the dtype of the kernel's inputs (a kernel of float32
    partial results has none); library ops by their oracle."""
    values = {t.index: x for t, x in zip(kernels.inputs, inputs, strict=True)}
    for op in kernels.ops:
        read = [x for x in op.inputs if isinstance(x, DTensor)]
        if op.name == CUSTOMIZED:
            assert op.block is not None
            halves = {t.dtype for t in read if t.dtype.itemsize == 2}
            algebra = TorchAlgebra(
                torch.float32, halves.pop() if tensor_cores and halves else None, inputs[0].device
            )
            stored = run_block_graph(op.block, [values[t.index] for t in read], algebra)
            results = [y.to(t.dtype) for y, t in zip(stored, op.outputs, strict=True)]
        else:
            results = [
                run_library(
                    op, [values[x.index] if isinstance(x, DTensor) else x for x in op.inputs]
                )
            ]
        values |= {t.index: y for t, y in zip(op.outputs, results, strict=True)}
    return [values[t.index] for t in kernels.outputs]


def judge_on_cpu(ugraph: UGraph, checks: dict[object, NumericCheck], tensor_cores: bool) -> Verdict:
    """Check a candidate as its kernels would compute it (see `run_kernels`). `checks` keeps references among candidates."""
    small = narrowed(ugraph) or ugraph
    key = str(small.program)
    if key not in checks:
        checks[key] = NumericCheck(small.program)
    return checks[key].judge(lambda inputs: run_kernels(small.kernels, inputs, tensor_cores))
