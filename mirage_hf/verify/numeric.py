"""Check the rounding of a candidate: compare it in its run dtype with float64, on many inputs.

Torch eager is the program run op by op in the run dtype. The rule has two parts:

- Where eager is finite, the candidate is finite.
- The candidate's largest error and its RMS error against float64 are at most 1.25 times eager's,
  plus one ulp of the output's scale.

There is one exception: constant rows, and rows whose mean is far above their spread. There
x − mean(x) is mostly the rounding error of the mean, and chance decides which order of a sum has
less of it. So a candidate may also err as much as if each float32 sum had its largest usual error
(see `NumericCheck._sums`).

Among few numbers chance decides how large the largest error is. So a candidate whose errors are too
large in outputs of few elements is compared again, over several draws of the same case.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.linalg import vector_norm

from mirage_hf import float32_products
from mirage_hf.errors import Rejected
from mirage_hf.graph import strided
from mirage_hf.graph.algebra import TorchAlgebra
from mirage_hf.graph.coded import unpacked
from mirage_hf.graph.execute import run_kernel_graph, run_library
from mirage_hf.graph.execute_block import run_block_graph
from mirage_hf.graph.kernel import DTensor, KernelGraph, KernelOp
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.ops.dtypes import factor_dtype
from mirage_hf.search.expand import expand
from mirage_hf.verify.case_inputs import CaseInputs, with_garbage, with_scores
from mirage_hf.verify.narrow import narrowed
from mirage_hf.verify.numeric_cases import Case, cases
from mirage_hf.verify.slices import Slice, SlicedRun
from mirage_hf.verify.verdict import Accepted, Verdict

#: A candidate's error may be this many times eager's.
SLACK = 1.25

#: Results beyond this share of the dtype's largest number are not compared: rounding alone may make
#: them infinite.
_IN_RANGE = 0.98

#: Elements that are compared at once, so that their copies in float64 take little memory.
_AT_ONCE = 1 << 22

#: Bytes of outputs that a check keeps for the next candidate. Others are computed again.
_KEPT_BYTES = 1 << 27

#: So many elements show what rounding does. Outputs with fewer are compared over several draws.
_ENOUGH = 1 << 12

#: Draws of a case, at most.
_DRAWS = 16

#: RMS errors that are this many times the allowed ones are not a matter of chance.
_FAR = 2.0

#: Bytes of the inputs of all draws, at most.
_DRAWN_BYTES = 1 << 27

#: Bytes of constants that a check keeps in float32.
_KEPT_FLOATS = 1 << 28

#: Checks of programs with an input of at least so many elements run on a GPU if one is given. Those
#: of small tensors take longer there, because each op is a launch.
_LARGE = 1 << 22

#: Threads of torch ops in checks on a CPU. The tensors are small, so the threads of a large machine
#: mostly wait for each other (docs/decisions/010-tuning.md).
_THREADS = 1

_log = logging.getLogger("mirage_hf")

Run = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Errors:
    """Errors of one output against float64, over the elements where eager is finite.

    Attributes:
        max: The largest error.
        rms: The RMS error.
        scale: The largest magnitude of the reference.
        rms_scale: The RMS of the reference.
    """

    max: float
    rms: float
    scale: float
    rms_scale: float

    def or_larger(self, other: Errors) -> Errors:
        """Return the larger error of each kind."""
        return replace(self, max=max(self.max, other.max), rms=max(self.rms, other.rms))

    def is_within(self, eager: Errors, dtype: torch.dtype) -> bool:
        """True if these errors are as small as the rule asks for, given eager's."""
        ulp = tiny = 0.0
        if dtype.is_floating_point:
            ulp, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
        max_allowed = SLACK * eager.max + ulp * eager.scale
        rms_allowed = SLACK * eager.rms + ulp * max(eager.rms_scale, tiny)
        return self.max <= max_allowed and self.rms <= rms_allowed


def measure(got: torch.Tensor, reference: torch.Tensor, where: torch.Tensor) -> Errors:
    """Return the errors of `got` over the elements where `where` is true."""
    if got.numel() > _AT_ONCE:
        parts = (x.flatten().split(_AT_ONCE) for x in (got, reference, where))
        return _together([(measure(*p), _count(p[2])) for p in zip(*parts, strict=True)])
    count = _count(where)
    if not count:
        return Errors(0.0, 0.0, 0.0, 0.0)
    values = reference.double()
    difference = got.double() - values
    if count < where.numel():  # selecting takes longer than all the rest
        difference, values = difference[where], values[where]
    return Errors(
        float(difference.abs().max()),
        float(vector_norm(difference)) / math.sqrt(count),
        float(values.abs().max()),
        float(vector_norm(values)) / math.sqrt(count),
    )


def _count(where: torch.Tensor) -> int:
    """Return the number of true elements. Torch adds up a copy of them, of 8 bytes each."""
    return sum(int(part.sum()) for part in where.flatten().split(_AT_ONCE))


def _together(parts: Sequence[tuple[Errors, int]]) -> Errors:
    """Return the errors of all elements from those of parts, each with its number of elements."""
    if len(parts) == 1:
        return parts[0][0]
    count = max(1, sum(n for _, n in parts))
    return Errors(
        max(e.max for e, _ in parts),
        math.sqrt(sum(e.rms**2 * n for e, n in parts) / count),
        max(e.scale for e, _ in parts),
        math.sqrt(sum(e.rms_scale**2 * n for e, n in parts) / count),
    )


@dataclass(frozen=True)
class _Comparison:
    """The errors of a candidate's output and of eager's.

    Attributes:
        ours: The candidate's errors.
        eager: Eager's.
        allowed: The errors that the candidate's are compared with: eager's or larger ones.
        count: The number of elements that are compared.
        dtype: The output's dtype.
    """

    ours: Errors
    eager: Errors
    allowed: Errors
    count: int
    dtype: torch.dtype

    @property
    def is_within(self) -> bool:
        return self.ours.is_within(self.allowed, self.dtype)

    @staticmethod
    def over_draws(found: Sequence[_Comparison]) -> _Comparison:
        """Return the comparison over all elements of several draws."""
        ours, eager, allowed = (
            _together([(getattr(x, name), x.count) for x in found])
            for name in ("ours", "eager", "allowed")
        )
        return _Comparison(ours, eager, allowed, sum(x.count for x in found), found[0].dtype)

    def rejected(self, where: str) -> Rejected:
        """Return the reason why the candidate is rejected.

        Args:
            where: The output and the case.
        """
        ours, eager = self.ours, self.eager
        return Rejected(
            f"numbers: {where}: max error {ours.max:.3g} (eager {eager.max:.3g}), RMS "
            f"{ours.rms:.3g} (eager {eager.rms:.3g}), scale {eager.scale:.3g}"
        )


@dataclass(frozen=True)
class _CaseData:
    """A case, or a slice of it, run by torch: float64 and eager outputs, and where they count."""

    inputs: list[torch.Tensor]
    reference: list[torch.Tensor]
    eager: list[torch.Tensor]
    where: list[torch.Tensor]

    @staticmethod
    def of(
        inputs: list[torch.Tensor], eager: list[torch.Tensor], reference: list[torch.Tensor]
    ) -> _CaseData:
        """Return the data of inputs and outputs."""
        where = [_compared(e, r) for e, r in zip(eager, reference, strict=True)]
        return _CaseData(inputs, reference, eager, where)

    @property
    def nbytes(self) -> int:
        """The bytes of its outputs. Cases share most of their inputs."""
        return sum(x.nbytes for x in (*self.reference, *self.eager, *self.where))


class NumericCheck:
    """The numeric check of one program.

    Eager's errors are computed once. So are references, unless they are large.

    >>> check = NumericCheck(program)
    >>> check.judge(lambda inputs: my_kernel(*inputs))
    Accepted(bound=0.0, detail='largest error 1.02× eager's')

    Attributes:
        program: The program.
        constants: Its constants in float32, for `run_kernels`.
    """

    def __init__(self, program: KernelGraph, device: torch.device | str = "cpu", seed: int = 0):
        self.program = program
        self._inputs = CaseInputs(program, seed, device)
        self._runs = SlicedRun(program)
        self.constants = FloatConstants()
        self._fitted: dict[Case, Case | None] = {}
        self._data: dict[Case, _CaseData] = {}
        self._eager_errors: dict[tuple[Case, int], Errors] = {}
        self._sum_errors: dict[Case, list[Errors]] = {}
        self._other_draws: list[NumericCheck] = []

    @property
    def device_type(self) -> str:
        """The type of the device that runs the check."""
        return torch.device(self._inputs.device).type

    def judge(self, run: Run) -> Verdict:
        """Run a candidate on every case.

        Returns:
            `Accepted`, or `Rejected` with the case, the output and both errors where it is worse
            than eager.
        """
        worst = 0.0
        for case, inputs in self.each():
            got = run(self._writable(inputs))
            for k in range(len(self.program.outputs)):
                found = self._compare(case, k, got[k], inputs)
                if isinstance(found, _Comparison) and not found.is_within:
                    found = self._compare_again(case, k, run, found, inputs)
                if isinstance(found, Rejected):
                    return found
                if found is not None and not found.is_within:
                    return found.rejected(f"output {k} on {case.name} inputs")
                if found is not None and found.eager.max:
                    worst = max(worst, found.ours.max / found.eager.max)
            del got  # before the outputs of the next case are made
        if sum(data.nbytes for data in self._data.values()) > _KEPT_BYTES:  # of one case
            self._data.clear()
        return Accepted(0.0, f"largest error {worst:.2f}× eager's")

    def each(self) -> Iterator[tuple[Case, list[torch.Tensor]]]:
        """Yield the cases that apply to the program, with their inputs."""
        dtypes = [t.dtype for t in self.program.outputs if t.dtype.is_floating_point]
        for case in cases(dtypes[0] if dtypes else torch.float32):
            if case.near_zero_points and not self._inputs.holds_codes:
                continue
            fitted = self._fit(case) if case.scores or case.outside else case
            if fitted is not None:
                yield fitted, self._inputs_of(fitted)
        if any(op.name == "ratio" for op in self.program.ops):
            # A ratio is 0 where its divisor is. No draw of the proof has a divisor of 0.
            for k, t in enumerate(self.program.inputs):
                if t.dtype.is_floating_point:
                    case = Case(f"zero {t.name}", zero=k)
                    yield case, self._inputs_of(case)

    def _inputs_of(self, case: Case) -> list[torch.Tensor]:
        if self._runs.compares_slices:
            return self._inputs.of(case)
        return self._run_torch(case).inputs

    def _fit(self, case: Case) -> Case | None:
        if case not in self._fitted:
            fit = with_scores if case.scores else with_garbage
            self._fitted[case] = fit(self._inputs, case)
        return self._fitted[case]

    def _run_torch(self, case: Case) -> _CaseData:
        if case not in self._data:
            self._make_room()
            inputs = self._inputs.of(case)
            # A run in float64 copies what it may write. Eager does not.
            eager = self._runs.eager(self._writable(inputs))
            self._data[case] = _CaseData.of(inputs, eager, self._runs.wide(inputs))
        return self._data[case]

    def _parts(
        self, case: Case, inputs: Sequence[torch.Tensor]
    ) -> Iterator[tuple[Slice | None, _CaseData]]:
        """Yield the slices of a case with large outputs, or None and the whole case."""
        if not self._runs.compares_slices:
            yield None, self._run_torch(case)
            return
        for part in self._runs.slices(inputs):
            eager = run_kernel_graph(part.program, part.inputs, as_on_gpu=True)
            wide = run_kernel_graph(part.program, part.inputs, torch.float64)
            yield part, _CaseData.of(part.inputs, eager, wide)

    def _make_room(self) -> None:
        """Forget the oldest outputs if those of one more case would be too many bytes."""
        sizes = [data.nbytes for data in self._data.values()]
        while sizes and sum(sizes) + max(sizes) > _KEPT_BYTES:
            del self._data[next(iter(self._data))], sizes[0]

    def _writable(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return inputs that a run may write: copies of all except constants."""
        return [
            x if t.constant else strided.copied(x)
            for t, x in zip(self.program.inputs, inputs, strict=True)
        ]

    def _compare(
        self, case: Case, k: int, got: torch.Tensor, inputs: Sequence[torch.Tensor]
    ) -> _Comparison | Rejected | None:
        """Compare an output with eager's. Return None if only infinities and NaN count."""
        ours: list[tuple[Errors, int]] = []
        eager: list[tuple[Errors, int]] = []
        for part, data in self._parts(case, inputs):
            y, where = got if part is None else part.of(k, got), data.where[k]
            if not _is_finite(y, where):
                return Rejected(
                    f"numbers: inf or NaN in output {k} on {case.name} inputs where torch eager "
                    "has none"
                )
            if case.range_only:
                continue
            of_eager, count = self._eager(case, k, data, part is None), _count(where)
            is_same = torch.equal(y, data.eager[k])
            of_ours = of_eager if is_same else measure(y, data.reference[k], where)
            ours.append((of_ours, count))
            eager.append((of_eager, count))
        if case.range_only:
            return None
        allowed, compared = _together(eager), sum(count for _, count in ours)
        found = _Comparison(_together(ours), allowed, allowed, compared, got.dtype)
        if case.cancels and not found.is_within:
            found = replace(found, allowed=allowed.or_larger(self._sums(case, inputs)[k]))
        return found

    def _compare_again(
        self,
        case: Case,
        k: int,
        run: Run,
        first: _Comparison,
        inputs: Sequence[torch.Tensor],
    ) -> _Comparison | Rejected:
        """Compare an output that has few elements over several draws of a case."""
        if first.ours.rms > _FAR * first.allowed.rms:
            return first
        drawn = sum(x.nbytes for x in inputs)
        draws = min(_DRAWS, _DRAWN_BYTES // drawn, math.ceil(_ENOUGH / first.count))
        found = [first]
        for number in range(draws - 1):
            if number == len(self._other_draws):
                seed = self._inputs.seed + number + 1
                self._other_draws.append(NumericCheck(self.program, self._inputs.device, seed))
            other = self._other_draws[number]
            given = other._inputs_of(case)
            got = run(self._writable(given))
            one = other._compare(case, k, got[k], given)
            if isinstance(one, Rejected):
                return one
            if one is not None:
                found.append(one)
        return _Comparison.over_draws(found)

    def _eager(self, case: Case, k: int, data: _CaseData, is_whole: bool) -> Errors:
        """Return eager's errors. Those of a whole case are computed once."""
        known = self._eager_errors.get((case, k)) if is_whole else None
        errors = known or measure(data.eager[k], data.reference[k], data.where[k])
        if is_whole:
            self._eager_errors[case, k] = errors
        return errors

    def _sums(self, case: Case, inputs: Sequence[torch.Tensor]) -> list[Errors]:
        """Return the errors of the outputs if each sum errs as much as a float32 sum may.

        A sum over n elements gets an error of log2(n) / 2 ulps of float32, the most that adding up
        in pairs loses. The errors of torch's own norms are smaller in most rows, and zero in some.
        """
        if case not in self._sum_errors:
            generator = torch.Generator(inputs[0].device).manual_seed(self._inputs.seed)

            def with_error(op: KernelOp, y: torch.Tensor) -> torch.Tensor:
                x, attrs = op.inputs[0], dict(op.attrs)
                if op.name != "reduction" or attrs["kind"] == "max" or not isinstance(x, DTensor):
                    return y
                sign = torch.randint(2, y.shape, generator=generator, device=y.device) * 2 - 1
                ulps = math.log2(x.dims[attrs["dim"]]) / 2
                return y * (1 + sign * ulps * torch.finfo(torch.float32).eps)

            parts: list[list[tuple[Errors, int]]] = [[] for _ in self.program.outputs]
            for part, data in self._parts(case, inputs):
                program = self.program if part is None else part.program
                results = SlicedRun(expand(program)).wide(data.inputs, with_error)
                for k, y in enumerate(results):
                    errors = measure(y, data.reference[k], data.where[k])
                    parts[k].append((errors, _count(data.where[k])))
            self._sum_errors[case] = [*map(_together, parts)]
        return self._sum_errors[case]


def _is_finite(got: torch.Tensor, where: torch.Tensor) -> bool:
    """Return whether all elements are finite where `where` is true."""
    parts = (x.flatten().split(_AT_ONCE) for x in (got, where))
    return not any(bool((~torch.isfinite(y) & w).any()) for y, w in zip(*parts, strict=True))


def _compared(eager: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return where eager is finite and the reference is in range."""
    most = _IN_RANGE * _largest_number(eager.dtype)
    parts = zip(*(x.flatten().split(_AT_ONCE) for x in (eager, reference)), strict=True)
    found = [torch.isfinite(e) & (r <= most) & (r >= -most) for e, r in parts]
    return torch.cat(found).view(eager.shape)


def _largest_number(dtype: torch.dtype) -> float:
    return (torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)).max


class FloatConstants:
    """Keeps constants in float32, so that a weight is not converted in each run."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # ids last while these live

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return a constant in float32, or as it is if it is no narrower float or too large."""
        if not x.is_floating_point() or x.itemsize != 2 or 4 * x.numel() > _KEPT_FLOATS:
            return x
        if id(x) not in self._kept:
            if sum(wide.nbytes for _, wide in self._kept.values()) + 4 * x.numel() > _KEPT_FLOATS:
                self._kept.clear()
            self._kept[id(x)] = x, x.float()
        return self._kept[id(x)][1]


def run_kernels(
    kernels: KernelGraph,
    inputs: Sequence[torch.Tensor],
    tensor_cores: bool,
    constants: FloatConstants | None = None,
) -> list[torch.Tensor]:
    """Run a µGraph's kernels as a GPU would.

    Block graphs run in float32, and their results are rounded to the tensors they are stored in.
    With `tensor_cores` the factors of contractions are rounded to the 16-bit dtype of the kernel's
    inputs. The inputs of a kernel that adds float32 partial results have no such dtype, so nothing
    is rounded there. Library ops run by their oracle.
    """
    values = {t.index: unpacked(t, x) for t, x in zip(kernels.inputs, inputs, strict=True)}
    floats = {
        t.index: constants.of(values[t.index]) for t in kernels.inputs if constants and t.constant
    }
    for op in kernels.ops:
        if op.block is not None:
            operands = [x for x in op.inputs if isinstance(x, DTensor)]
            rounded_to = factor_dtype(t.dtype for t in operands) if tensor_cores else None
            algebra = TorchAlgebra(torch.float32, rounded_to, inputs[0].device)
            for t in operands:
                if t.index in floats and t.dtype == rounded_to:
                    algebra.note_exact(floats[t.index])
            arrays = [floats.get(t.index, values[t.index]) for t in operands]
            stored = run_block_graph(op.block, arrays, algebra)
            results = [y.to(t.dtype) for y, t in zip(stored, op.outputs, strict=True)]
        else:
            args = [values[x.index] if isinstance(x, DTensor) else x for x in op.inputs]
            results = [run_library(op, args)]
        values |= {t.index: y for t, y in zip(op.outputs, results, strict=True)}
    return [values[t.index] for t in kernels.outputs]


class NumericChecks:
    """The numeric checks of some programs. µGraphs of one program share one."""

    def __init__(self, gpu: torch.device | None = None):
        """Make no check yet.

        Args:
            gpu: The GPU that runs checks of large programs. None: all run on the CPU.
        """
        self.gpu = gpu
        #: The checks, by the text of their program.
        self.made: dict[str, NumericCheck] = {}

    def of(self, program: KernelGraph) -> NumericCheck:
        """Return the check of a program."""
        key = str(program)
        if key not in self.made:
            self.made[key] = NumericCheck(program, self._device_for(program))
        return self.made[key]

    def _device_for(self, program: KernelGraph) -> torch.device:
        largest = max(math.prod(t.dims) for t in program.inputs)
        if self.gpu is None or largest < _LARGE or not float32_products.are_exact():
            return torch.device("cpu")
        return self.gpu

    def forget_gpu(self) -> None:
        """Make all checks on the CPU from now on."""
        self.gpu = None
        self.made.clear()


def judge_by_torch(ugraph: UGraph, checks: NumericChecks, tensor_cores: bool) -> Verdict:
    """Check a candidate as its kernels would compute it on a GPU (see `run_kernels`).

    Args:
        ugraph: The candidate. Its grid axes are cut short.
        checks: The checks made so far.
        tensor_cores: Whether factors of contractions are rounded.
    """
    small = narrowed(ugraph) or ugraph
    try:
        return _judged(small, checks.of(small.program), tensor_cores)
    except torch.OutOfMemoryError:
        if checks.gpu is None:
            raise
    # not within the except clause, because its traceback holds tensors
    _log.info("%s has no memory for checks of rounding: they run on the CPU", checks.gpu)
    checks.forget_gpu()
    return _judged(small, checks.of(small.program), tensor_cores)


def _judged(ugraph: UGraph, check: NumericCheck, tensor_cores: bool) -> Verdict:
    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return run_kernels(ugraph.kernels, inputs, tensor_cores, check.constants)

    # The caller may have switched autocast on, which would round factors.
    with _few_threads(), torch.autocast(check.device_type, enabled=False):
        return check.judge(run)


#: The blocks of `_few_threads` that are open, and the number of threads before the first of them.
_lock = threading.Lock()
_blocks, _threads_before = 0, 1


@contextlib.contextmanager
def _few_threads() -> Iterator[None]:
    """Let torch's ops on a CPU run on few threads. Blocks of several threads may overlap.

    Torch keeps such a number for each thread, and another one for threads that will begin.
    """
    global _blocks, _threads_before
    with _lock:
        if not _blocks:
            _threads_before = torch.get_num_threads()
        _blocks += 1
        before = _threads_before
    torch.set_num_threads(min(before, _THREADS))
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            torch.set_num_threads(before)
