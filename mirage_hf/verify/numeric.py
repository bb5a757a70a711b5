"""Numbers: a candidate in its run dtype beside a float64 reference, on ordinary and on hard inputs.

The rule: where torch eager (the program op by op in the run dtype) is finite the candidate is finite, and its largest and
its RMS error against float64 are at most 1.25 times eager's plus one ulp of the output's scale.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from mirage_hf import errors
from mirage_hf.graph.block import Axis, BlockGraph, Role
from mirage_hf.graph.execute import TorchAlgebra, run_block_graph, run_kernel_graph
from mirage_hf.graph.kernel import DTensor, KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.verify.verdict import Accepted, Refused, Verdict

SLACK = 1.25
_WIDE_AXIS = 192
"""Grid axes are narrowed to this many elements: more columns of the same matrix product show nothing new."""
_WIDE_BATCH = 4
_IN_RANGE = 0.98
"""Results beyond this part of the dtype's largest number may round to infinity or not; either is right."""

Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """One set of inputs: `factor` and `offset` apply to the first floating-point input, `constant_rows` makes its rows constant.

    `range_only`: only infinities and NaN count. So near the largest number most results overflow, and the errors of the few
    cancellations that do not are luck.
    """

    name: str
    factor: float = 1.0
    offset: float = 0.0
    constant_rows: bool = False
    range_only: bool = False


def cases(dtype: torch.dtype) -> tuple[Case, ...]:
    large = 300.0 if dtype == torch.float16 else 1e4
    edge = (Case("nearly the largest", factor=12000.0, range_only=True),) if dtype == torch.float16 else ()
    return (Case("random"), Case("large", factor=large), Case("tiny", factor=1e-3), Case("constant rows", constant_rows=True),
            Case("mean far above spread", offset=1000.0), *edge)


def make_inputs(program: KernelGraph, case: Case, seed: int = 0, device: torch.device | str = "cpu") -> list[torch.Tensor]:
    """Draw inputs of the program's shapes and strides: normal, matrices scaled so that products keep their size."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    out, first = [], True
    for t in program.inputs:
        if not t.dtype.is_floating_point:
            out.append(torch.zeros(t.dims, dtype=t.dtype, device=device))
            continue
        x = torch.randn(t.dims, generator=generator, dtype=torch.float32)
        if first:
            x = x[..., :1].expand(t.dims) if case.constant_rows else x
            x = (x * case.factor + case.offset).clamp_(-torch.finfo(t.dtype).max, torch.finfo(t.dtype).max)
            first = False
        elif len(t.dims) >= 2 and t.dims[-2] > 1:
            x = x / max(t.dims[-2:]) ** 0.5
        base = torch.empty_strided(t.dims, t.strides, dtype=t.dtype, device=device)
        base.copy_(x)
        out.append(base)
    return out


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
    d, r = (got.double() - reference)[where], reference[where]
    return Errors(float(d.abs().max()), float(d.square().mean().sqrt()), float(r.abs().max()), float(r.square().mean().sqrt()))


def within(candidate: Errors, eager: Errors, dtype: torch.dtype) -> bool:
    ulp = torch.finfo(dtype).eps
    return (candidate.max <= SLACK * eager.max + ulp * eager.scale
            and candidate.rms <= SLACK * eager.rms + ulp * max(eager.rms_scale, torch.finfo(dtype).tiny))


class NumericCheck:
    """References and eager errors of one program, computed once and used for all its candidates."""

    def __init__(self, program: KernelGraph, device: torch.device | str = "cpu", seed: int = 0):
        self.program, self.device, self.seed = program, device, seed
        self._cached: dict[Case, tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]] = {}

    def _case(self, case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        if case not in self._cached:
            inputs = make_inputs(self.program, case, self.seed, self.device)
            reference = run_kernel_graph(self.program, [x.clone() for x in inputs], torch.float64)
            eager = run_kernel_graph(self.program, [x.clone() for x in inputs])
            where = [torch.isfinite(e) & (r.abs() <= _IN_RANGE * torch.finfo(e.dtype).max) for e, r in zip(eager, reference, strict=True)]
            self._cached[case] = (inputs, reference, eager, where)
        return self._cached[case]

    def each(self) -> Iterator[tuple[Case, list[torch.Tensor]]]:
        dtype = next(t.dtype for t in self.program.outputs)
        for case in cases(dtype):
            yield case, self._case(case)[0]

    def judge(self, run: Run) -> Verdict:
        """Run a candidate on every case. Returns Refused with the case, the output and both errors where it is worse."""
        worst = 0.0
        for case, inputs in self.each():
            _, reference, eager, where = self._case(case)
            got = run([x.clone() for x in inputs])
            for k, t in enumerate(self.program.outputs):
                finite = torch.isfinite(got[k])
                if bool((where[k] & ~finite).any()):
                    return Refused(f"numbers: inf or NaN in output {k} on {case.name} inputs where torch eager has none")
                if case.range_only:
                    continue
                mine, stock = measure(got[k], reference[k], where[k]), measure(eager[k], reference[k], where[k])
                if not within(mine, stock, t.dtype):
                    return Refused(f"numbers: output {k} on {case.name} inputs: max error {mine.max:.3g} (eager {stock.max:.3g}), "
                                   f"RMS {mine.rms:.3g} (eager {stock.rms:.3g}), scale {stock.scale:.3g}")
                worst = max(worst, mine.max / stock.max if stock.max else 0.0)
        return Accepted(0.0, f"largest error {worst:.2f}× eager's")


def narrowed(ugraph: UGraph) -> UGraph | None:
    """The same µGraph with its grid axes cut short, for checks that should not move gigabytes; None if it does not apply."""
    if len(ugraph.block_ops) != 1 or len(ugraph.kernels.ops) != 1:
        return None
    block = ugraph.block_ops[0].block
    assert block is not None
    products = [set(block.carried[c.a]) & set(block.carried[c.b]) for c in block.contractions.values()]
    batch = {a.name for n, a in enumerate(reversed(block.named(Role.GRID))) if n >= 2 or (products and all(a.name in p for p in products))}
    sizes = {a.name: min(a.size, (_WIDE_BATCH if a.name in batch else _WIDE_AXIS) if a.role is Role.GRID else a.size) for a in block.axes}
    dims = [list(t.dims) for t in ugraph.program.inputs]
    parts: dict[int, dict[int, int]] = {}
    inputs = []
    for i in block.inputs:
        new_sizes = i.sizes
        if i.joined is not None and block.role(i.joined) is Role.GRID:
            new_sizes = tuple(min(n, _WIDE_AXIS // 2) for n in i.sizes)
            sizes[i.joined] = sum(new_sizes)
        inputs.append(replace(i, sizes=new_sizes))
    for i in inputs:
        for k, source in enumerate(i.sources):
            for d, a in enumerate(i.axes):
                if a is not None:
                    want = i.sizes[k] if a == i.joined else sizes[a]
                    if parts.setdefault(source, {}).setdefault(d, want) != want:
                        return None
                    dims[source][d] = want
    program, kernels = KernelGraph(), KernelGraph()
    new: dict[int, DTensor] = {}
    try:
        for t, new_dims in zip(ugraph.program.inputs, dims, strict=True):
            new[t.index] = program.new_input(new_dims, t.dtype)
        for op in ugraph.program.ops:
            args = [new[x.index] if isinstance(x, DTensor) else x for x in op.inputs]
            new[op.outputs[0].index] = program._apply(op.name, *args, **dict(op.attrs))
        program.mark_output(*(new[t.index] for t in ugraph.program.outputs))
        small = BlockGraph(tuple(Axis(a.name, sizes[a.name], a.role) for a in block.axes), tuple(inputs), block.stages, block.outputs)
        tensors = [kernels.new_input(t.dims, t.dtype) for t in program.inputs]
        kernels.mark_output(*kernels.customized(tensors, small))
    except errors.MirageError:
        return None  # a reshape or slice that names the full sizes
    return UGraph(program, kernels)


def judge_on_cpu(ugraph: UGraph, checks: dict[object, NumericCheck], tensor_cores: bool) -> Verdict:
    """Check a candidate of one block graph as a kernel would compute it: float32 inside, and with `tensor_cores` the factors
    of its contractions rounded to the run dtype. `checks` keeps references among candidates."""
    small = narrowed(ugraph) or ugraph
    key = (tuple(t.dims for t in small.program.inputs), tuple(str(op.name) for op in small.program.ops))
    check = checks.setdefault(key, NumericCheck(small.program))
    op = small.block_ops[0]
    assert op.block is not None
    dtype = small.program.outputs[0].dtype
    algebra = TorchAlgebra(torch.float32, dtype if tensor_cores and dtype.itemsize == 2 else None)

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        outs = run_block_graph(op.block, list(inputs), algebra)  # type: ignore[arg-type]
        return [y.to(t.dtype) for y, t in zip(outs, op.outputs, strict=True)]

    return check.judge(run)
