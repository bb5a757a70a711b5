"""Kernels that stream codes give results as close to float64 as torch, on the CPU and on a GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from mirage_hf.codegen.cuda_kernel import CudaKernel
from mirage_hf.codegen.streams.kernel import write_stream_kernel
from mirage_hf.graph.coded import is_exponent
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import DTensor
from mirage_hf.tune.tuner import check_compiled
from mirage_hf.verify.numeric import NumericCheck, Rejected, measure
from tests.helpers.cuda_on_cpu import ORDERS, run_kernel
from tests.helpers.streamed_graphs import CASES, Case, schedule_of, streamed
from tests.helpers.thorough import THOROUGH


def kernel_of(case: Case, **changes: int) -> CudaKernel:
    _, op, found = streamed(case)
    return write_stream_kernel(op, schedule_of(case, found, **changes), "kernel")


def runner(case: Case, kernel: CudaKernel, order: int, folder: Path):
    """Return a function that runs a kernel as the numeric check calls it."""
    ugraph, op, _ = streamed(case)
    of_input = {t.index: n for n, t in enumerate(ugraph.kernels.inputs)}
    views = {o.outputs[0].index: o.inputs[0].index for o in ugraph.kernels.ops if o.block is None}

    def place(t: DTensor) -> int:
        index = t.index
        while index not in of_input:
            index = views[index]
        return of_input[index]

    read = [op.operands[s] for i in op.block.inputs for s in i.sources]

    def run(inputs: Sequence[torch.Tensor], out=None) -> list[torch.Tensor]:
        outputs = [torch.full(t.dims, torch.nan, dtype=t.dtype) for t in op.outputs]
        tensors = [inputs[place(t)] for t in read] + outputs
        failure = run_kernel(
            kernel.source,
            "kernel",
            kernel.grid,
            kernel.threads,
            kernel.shared,
            tensors,
            order,
            folder,
        )
        assert not failure, failure
        return [y.view(t.dims) for y, t in zip(outputs, ugraph.program.outputs, strict=True)]

    return run


@pytest.mark.parametrize("name", CASES)
def test_results_are_as_close_to_float64_as_torch(name, tmp_path):
    case = CASES[name]
    kernel = kernel_of(case)
    check = NumericCheck(case.program, torch.device("cpu"))
    in_orders = [runner(case, kernel, order, tmp_path) for order in ORDERS[:2]]
    if THOROUGH:
        verdicts = [check.judge(run) for run in in_orders]
    else:
        turns = itertools.cycle(in_orders)  # each call takes the other order
        verdicts = [check.judge(lambda inputs: next(turns)(inputs))]
    assert not any(isinstance(verdict, Rejected) for verdict in verdicts), verdicts


#: Changes of the first activations, by name. Values are float32. They are rounded afterwards.
SPREADS = {
    "one element is 2^20 times the others": lambda x: x.index_put(
        (torch.tensor(0), torch.tensor(5)), torch.tensor(2.0**20)
    ),
    "one element of each 256 is 2^20 times the others": lambda x: torch.where(
        torch.arange(x.shape[-1]) % 256 == 255, x * 2.0**20, x
    ),
    "half of the columns are 2^20 times the others": lambda x: torch.where(
        torch.arange(x.shape[-1]) < x.shape[-1] // 2, x * 2.0**20, x
    ),
    "powers of two of alternating sign": lambda x: torch.exp2(x.round()) * x.sign(),
    "one below a power of two": lambda x: x.sign() * (2 - 2.0**-7),
    "zeros": torch.zeros_like,
    "negative zeros": lambda x: -torch.zeros_like(x),
    "subnormal": lambda x: x * 2.0**-130,
    "tiny": lambda x: x * 2.0**-100,
    "large": lambda x: x * 2.0**40,
}
#: What is put at a few places of the first activations.
SPECIAL = {"inf": [math.inf], "-inf": [-math.inf], "NaN": [math.nan], "both": [math.inf, -math.inf]}
EXTREME = (
    "int4, 448 columns in groups of 64",
    "int4, 960 columns in groups of 64",
    "int8, gate and up",
    "int8, residual",
    "float8, norm and joined linears",
    "float8, residual",
    "NF4, norm and joined linears",
    "NF4, gate and up, 4 rows",
    "int4, norm and joined linears, 4 rows",
    "int8, residual, 5 rows",
    "float8, residual, 8 rows",
)


@cache
def checked(name: str) -> NumericCheck:
    return NumericCheck(CASES[name].program, torch.device("cpu"))


def results_of(name: str, changed, order: int, folder: Path):
    """Return a kernel's output, eager's and that of float64, with other first activations."""
    case = CASES[name]
    _, inputs = next(checked(name).each())
    x = changed(inputs[0].float()).to(inputs[0].dtype)
    inputs = [x, *inputs[1:]]
    (got,) = runner(case, kernel_of(case), order, folder)(inputs)
    (eager,) = run_kernel_graph(case.program, inputs)
    (exact,) = run_kernel_graph(case.program, inputs, torch.float64)
    return got, eager, exact


@pytest.mark.parametrize("name", EXTREME)
def test_activations_of_any_spread_give_results_as_close_as_torch(name, tmp_path):
    for spread, changed in SPREADS.items():
        got, eager, exact = results_of(name, changed, 0, tmp_path)
        where = eager.isfinite()
        assert got[where].isfinite().all(), spread
        errors, allowed = measure(got, exact, where), measure(eager, exact, where)
        if spread == "subnormal":  # a power of two below 2^-117 is 0
            assert errors.max < 2.0**-100
            continue
        assert errors.is_within(allowed, got.dtype), f"{spread}: {errors}, {allowed}"


@pytest.mark.parametrize("name", EXTREME)
def test_infinities_and_nan_never_give_finite_results(name, tmp_path):
    for special, values in SPECIAL.items():
        for at in 0, 255, -1:

            def changed(x, values=values, at=at):
                x = x.clone()
                for n, value in enumerate(values):
                    x[0, at - n] = value
                return x

            got, _, exact = results_of(name, changed, 0, tmp_path)
            assert not got[~exact.isfinite()].isfinite().any(), (special, at)


@pytest.mark.parametrize("name", ["MXFP4, pairs of groups", "int4, powers of two"])
def test_a_scale_of_nan_gives_nan(name, tmp_path):
    """A byte of 255 stands for NaN. An infinity in its place could be clamped to a number."""
    case = CASES[name]
    _, inputs = next(checked(name).each())
    scales = next(n for n, t in enumerate(case.program.inputs) if is_exponent(t.dtype))
    inputs[scales][1:, 1] = 255
    (got,) = runner(case, kernel_of(case), 0, tmp_path)(inputs)
    assert got[0, 0].isfinite() and got[0, 1:].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_kernels_on_a_gpu_are_as_close_to_float64_as_torch(name):
    case = replace(CASES[name], hidden=4096, width=14336, blocks=132)
    if case.weights == "int8":
        case = replace(case, tile=2048)
    ugraph, _, found = streamed(case)
    # more warps' sums of 16 rows would not fit into shared memory
    for stages, warps in ((2, 4), (4, 4)) if case.sharers > 1 else ((2, 4), (3, 8)):
        schedule = schedule_of(case, found, num_stages=stages, num_warps=warps)
        verdict = check_compiled(ugraph, [schedule], torch.device("cuda"))
        assert not isinstance(verdict, Rejected), verdict
