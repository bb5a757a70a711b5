"""Programs run in float64 slice by slice, and the bytes that checks of large programs take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from typing import Any

import pytest
import torch

import mirage_hf as mi
from mirage_hf.formats.coding import Coding
from mirage_hf.formats.stored import Split
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph, new_kernel_graph
from mirage_hf.swap.coded_forward import decoding_program
from mirage_hf.tune.measure import random_inputs
from mirage_hf.verify import case_inputs, numeric, slices
from mirage_hf.verify.case_inputs import CaseInputs
from mirage_hf.verify.numeric import NumericCheck
from mirage_hf.verify.numeric_cases import Case
from mirage_hf.verify.slices import SlicedRun
from mirage_hf.verify.verdict import Accepted, Rejected
from tests.helpers.coded_programs import fp8_linear, int4_joined, int4_linear
from tests.helpers.memory import Allocations

RANDOM = Case("random")
BF16 = torch.bfloat16


def int4(rows: int, columns: int, group: int = 64) -> Coding:
    split = Split(rows, columns, 1, group)
    return Coding(rows, columns, BF16, split.codes(torch.uint4), split.per_row(BF16), zero=8.0)


def fp8_blocks(rows: int, columns: int, block: int) -> Coding:
    split = Split(rows, columns, block, block)
    scales = split.per_block(torch.float32)
    return Coding(rows, columns, BF16, split.codes(torch.float8_e4m3fn), scales)


def awq_like() -> KernelGraph:
    """Return the decoding of words that hold codes of eight rows, in an order of their own."""
    g = new_kernel_graph()
    codes = g.new_input((40, 4, 2, 16), "uint4", (128, 1, 4, 8), constant=True)
    scales = g.new_input((40, 4, 2, 1), "bfloat16", constant=True)
    g.mark_output(g.reshape(g.mul(g.cast(codes, "bfloat16"), scales), (320, 16)))
    return g


def gate_and_up() -> KernelGraph:
    g = new_kernel_graph()
    x = g.new_input((2, 128), BF16)
    y = g.rms_norm(x, g.new_input((1, 128), BF16, constant=True))
    gate, up = (g.matmul(y, int4(200, 128).write(g)[1]) for _ in range(2))
    g.mark_output(g.mul(g.silu(gate), up))
    return g


def head() -> KernelGraph:
    g = new_kernel_graph()
    x, w = g.new_input((1, 64), BF16), g.new_input((500, 64), BF16, constant=True)
    g.mark_output(g.matmul(x, g.permute(w, (1, 0))))
    return g


def softmax_of_scores() -> KernelGraph:
    g = mi.new_graph()
    q, k = g.new_input((8, 4, 16), "float32"), g.new_input((8, 16, 64), "float32")
    g.mark_output(g.softmax(g.matmul(q, k)), g.mul(q, 2.0))
    return g


def two_sums() -> KernelGraph:
    g = mi.new_graph()
    x = g.new_input((30, 70), "float32")
    g.mark_output(g.reduction(x, 0, "sum"), g.reduction(x, 1, "sum"))
    return g


def chosen_rows() -> KernelGraph:
    """Return products of a matrix with some of its own rows. A slice would lack chosen ones."""
    g = new_kernel_graph()
    w = g.new_input((64, 8), "float32", constant=True)
    index = g.new_input((8,), torch.int64)
    g.mark_output(g.matmul(w, g.permute(g.take(w, index), (1, 0))))
    return g


def summed_blocks() -> KernelGraph:
    """Return blocks of rows, normalized over all rows."""
    g = new_kernel_graph()
    x = g.new_input((8, 16, 4), "float32")
    g.mark_output(g.softmax(g.permute(g.reshape(x, (128, 4)), (1, 0))))
    return g


def block_sums() -> KernelGraph:
    """Return rows, and the sums of their blocks."""
    g = new_kernel_graph()
    x = g.new_input((8, 64), "float32")
    g.mark_output(g.reshape(x, (512,)), g.reduction(x, 0, "sum"))
    return g


def chosen_experts(tokens: int = 3, experts: int = 8, n: int = 72, k: int = 32) -> KernelGraph:
    """Return what two experts make of each token. Each token's experts are taken."""
    g = new_kernel_graph()
    x = g.new_input((tokens, 1, 1, k), BF16)
    w = g.new_input((experts, n, k), BF16, constant=True)
    index = g.new_input((tokens, 2), torch.int64)
    g.mark_output(g.matmul(x, g.permute(g.take(w, index), (0, 1, 3, 2))))
    return g


@pytest.mark.parametrize(
    "program",
    [
        gate_and_up,
        chosen_experts,
        head,
        softmax_of_scores,
        awq_like,
        lambda: decoding_program(int4(136, 128)),
        lambda: decoding_program(fp8_blocks(96, 64, 16)),
        lambda: fp8_linear(1, 512, 256),
        lambda: int4_linear(3, 72, 128, 64, zeros=True, norm=True),
    ],
)
def test_slices_together_are_the_whole(
    program: Callable[[], KernelGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = program()
    inputs = CaseInputs(graph).of(RANDOM)
    whole = run_kernel_graph(graph, inputs, torch.float64)
    monkeypatch.setattr(slices, "SLICE_BYTES", 1 << 11)
    run = SlicedRun(graph)
    assert run._axis is not None
    for t, y, expected in zip(graph.outputs, run.wide(inputs), whole, strict=True):
        assert y.shape == expected.shape
        close = 1e-6 if t.dtype.itemsize == 2 else 1e-12
        torch.testing.assert_close(y.double(), expected, rtol=close, atol=close)
    sizes = {part.outputs[0].dims for part in run._parts.values()}
    assert sizes and all(dims != graph.outputs[0].dims for dims in sizes)


@pytest.mark.parametrize("program", [gate_and_up, chosen_experts, softmax_of_scores])
def test_slices_of_eager_are_the_whole(
    program: Callable[[], KernelGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = program()
    inputs = CaseInputs(graph).of(RANDOM)
    whole = run_kernel_graph(graph, inputs, as_on_gpu=True)
    monkeypatch.setattr(slices, "SLICE_BYTES", 1 << 11)
    monkeypatch.setattr(slices, "EAGER_BYTES", 1 << 9)
    run = SlicedRun(graph)
    for y, expected in zip(run.eager(inputs), whole, strict=True):
        torch.testing.assert_close(y, expected)
    assert run._parts


def test_eager_appends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In slices, the second one would read what the first one appended."""
    g = new_kernel_graph()
    x, cache = g.new_input((64, 16), BF16), g.new_input((1, 16, 8), BF16, name="cache")
    rows, slot = g.new_input((1, 1, 8), BF16), g.new_input((1, 1, 1), torch.int32, name="slot")
    before = g.matmul(x, g.reshape(cache, (16, 8)))
    after = g.matmul(x, g.reshape(g.cache_append(cache, rows, slot), (16, 8)))
    g.mark_output(g.add(before, after))
    inputs = CaseInputs(g).of(RANDOM)
    whole = run_kernel_graph(g, [t.clone() for t in inputs], as_on_gpu=True)
    monkeypatch.setattr(slices, "SLICE_BYTES", 1 << 10)
    monkeypatch.setattr(slices, "EAGER_BYTES", 1 << 8)
    run = SlicedRun(g)
    assert run._axis is not None
    torch.testing.assert_close(run.eager([t.clone() for t in inputs]), whole, rtol=0, atol=0)


@pytest.mark.parametrize(
    "program",
    [two_sums, lambda: int4_joined(1, (8, 24), 128, 64), chosen_rows, summed_blocks, block_sums],
)
def test_programs_without_an_axis_to_cut_run_whole(
    program: Callable[[], KernelGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = program()
    inputs = CaseInputs(graph).of(RANDOM)
    whole = run_kernel_graph(graph, inputs, torch.float64)
    monkeypatch.setattr(slices, "SLICE_BYTES", 1 << 9)
    for y, expected in zip(SlicedRun(graph).wide(inputs), whole, strict=True):
        torch.testing.assert_close(y, expected, rtol=0, atol=0)


def test_slices_are_cut_where_tensors_become_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than blocks of columns, but the weight is the largest tensor."""
    monkeypatch.setattr(slices, "SLICE_BYTES", 1 << 16)
    run = SlicedRun(fp8_linear(64, 1024, 256))
    inputs = CaseInputs(run.program).of(RANDOM)
    parts = [part.program for part in run.slices(inputs)]
    assert len(parts) > 1 and all(p.inputs[0].dims == (64, 256) for p in parts)


def test_words_of_a_slice_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes of successive rows share a word, so slices have multiples of eight rows."""
    g = new_kernel_graph()
    codes = g.new_input((48, 16), "uint4", (1, 48), constant=True)
    scales = g.new_input((48, 1), "bfloat16", constant=True)
    g.mark_output(g.mul(g.cast(codes, "bfloat16"), scales))
    inputs = CaseInputs(g).of(RANDOM)
    whole = run_kernel_graph(g, inputs, torch.float64)
    monkeypatch.setattr(slices, "SLICE_BYTES", 1 << 10)
    run = SlicedRun(g)
    (y,) = run.wide(inputs)
    torch.testing.assert_close(y.double(), whole[0], rtol=1e-6, atol=0)
    assert [part.outputs[0].dims for part in run._parts.values()] == [(8, 16)]


def test_a_large_weight_is_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is scaled as the whole weight is."""
    monkeypatch.setattr(case_inputs, "PART_BYTES", 1 << 12)
    _, weight = CaseInputs(head()).of(RANDOM)
    assert weight.float().std().item() == pytest.approx(500**-0.5, rel=0.05)
    assert len(weight.unique(dim=0)) == 500


# -- comparing slices -----------------------------------------------------------------------------

LARGE_OUTPUTS = [
    lambda: decoding_program(int4(136, 128)),
    lambda: decoding_program(fp8_blocks(96, 64, 16)),
    gate_and_up,
    softmax_of_scores,
]


@pytest.fixture
def comparing_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_BYTES", 1 << 11)
    monkeypatch.setattr(slices, "OUTPUT_BYTES", 1 << 6)


@pytest.mark.usefixtures("comparing_slices")
@pytest.mark.parametrize("program", LARGE_OUTPUTS)
def test_compared_in_slices_eager_is_accepted(program: Callable[[], KernelGraph]) -> None:
    graph = program()
    check = NumericCheck(graph)
    assert check._runs.compares_slices
    eager = partial(run_kernel_graph, graph, as_on_gpu=True)
    assert isinstance(check.judge(eager), Accepted)
    assert not check._data


@pytest.mark.usefixtures("comparing_slices")
@pytest.mark.parametrize("program", LARGE_OUTPUTS)
@pytest.mark.parametrize("value", [3.0, float("nan")])
def test_one_wrong_element_in_any_slice_is_refused(
    program: Callable[[], KernelGraph], value: float
) -> None:
    graph = program()
    check = NumericCheck(graph)
    places = [part.places[0] for part in check._runs.slices(CaseInputs(graph).of(RANDOM))]
    assert len(places) > 1
    for dim, start, length in (places[0], places[-1]):

        def wrong(inputs: Any, dim: int = dim, at: int = start + length - 1) -> Any:
            first, *others = run_kernel_graph(graph, inputs, as_on_gpu=True)
            first = first.clone()
            part = first.select(dim, at)
            part[(0,) * part.dim()] = value * (1 + float(first.float().abs().max()))
            return [first, *others]

        verdict = check.judge(wrong)
        assert isinstance(verdict, Rejected) and "output 0" in verdict.reason


@pytest.mark.usefixtures("comparing_slices")
def test_errors_over_slices_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = decoding_program(int4(136, 128))

    def noisy(inputs: Any) -> list[torch.Tensor]:
        (y,) = run_kernel_graph(graph, inputs, as_on_gpu=True)
        noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(0))
        return [(y.float() * (1 + 1e-3 * noise)).to(y.dtype)]

    case, inputs = next(NumericCheck(graph).each())
    in_slices = NumericCheck(graph)._compare(case, 0, noisy(inputs)[0], inputs)
    monkeypatch.setattr(slices, "OUTPUT_BYTES", 1 << 30)
    whole = NumericCheck(graph)._compare(case, 0, noisy(inputs)[0], inputs)
    assert isinstance(in_slices, numeric._Comparison) and isinstance(whole, numeric._Comparison)
    assert in_slices.count == whole.count
    for a, b in ((in_slices.ours, whole.ours), (in_slices.eager, whole.eager)):
        assert astuple(a) == pytest.approx(astuple(b), rel=1e-6)


def test_programs_that_write_are_compared_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_BYTES", 1 << 10)
    monkeypatch.setattr(slices, "OUTPUT_BYTES", 1)
    g = new_kernel_graph()
    x, cache = g.new_input((64, 16), BF16), g.new_input((1, 16, 8), BF16, name="cache")
    rows, slot = g.new_input((1, 1, 8), BF16), g.new_input((1, 1, 1), torch.int32, name="slot")
    g.mark_output(g.matmul(x, g.reshape(g.cache_append(cache, rows, slot), (16, 8))))
    run = SlicedRun(g)
    assert run._axis is not None and not run.compares_slices


# -- bytes ----------------------------------------------------------------------------------------

MIB = 1 << 20


def large_gate() -> Any:
    """Return gate and up of half a million codes each: 4 MiB in float64."""
    g = new_kernel_graph()
    x = g.new_input((1, 512), BF16)
    gate, up = (g.matmul(x, int4(1024, 512).write(g)[1]) for _ in range(2))
    g.mark_output(g.mul(g.silu(gate), up))
    return g


@pytest.mark.parametrize(
    "program, most",
    [
        # On a CPU eager multiplies in float32: 2 MiB. The weight in bfloat16 is 1 MiB.
        (large_gate, 5 * MIB),
        # A weight is 2 MiB and is drawn in float32. The experts that tokens take are 32 MiB.
        (partial(chosen_experts, 64, 8, 256, 512), 10 * MIB),
        # The outputs of one case: 1 MiB in bfloat16 and 2 in float32, and 0.5 for where they count.
        (lambda: decoding_program(int4(1024, 512)), 8 * MIB),
        # The candidate has 2 MiB. Of what it is compared with, only slices are held.
        (lambda: decoding_program(int4(2048, 512)), 6 * MIB),
    ],
)
def test_a_check_takes_little_memory(
    program: Callable[[], KernelGraph], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64 one weight takes 4 MiB. Two of them and all outputs were held at once."""
    monkeypatch.setattr(slices, "SLICE_BYTES", 1 << 18)
    monkeypatch.setattr(slices, "EAGER_BYTES", 1 << 21)
    monkeypatch.setattr(slices, "OUTPUT_BYTES", 3 << 19)
    monkeypatch.setattr(numeric, "_AT_ONCE", 1 << 15)
    monkeypatch.setattr(numeric, "_KEPT_BYTES", 0)
    graph = program()
    with torch.no_grad(), Allocations() as counted:
        check = NumericCheck(graph)
        verdict = check.judge(SlicedRun(graph).eager)
    assert isinstance(verdict, Accepted)
    assert counted.peak <= most


def test_random_codes_take_little_memory() -> None:
    graph = large_gate()
    with Allocations() as counted:
        inputs = random_inputs(graph, "cpu")
    held = sum(x.nbytes for x in inputs)
    assert counted.live == held
    assert counted.peak <= 8 * held


def test_a_run_holds_no_tensor_after_its_last_use() -> None:
    g = new_kernel_graph()
    x = g.new_input((1024, 128), "float32")
    y = x
    for _ in range(6):
        y = g.mul(y, 2.0)
    g.mark_output(y)
    given = torch.ones(1024, 128)
    with Allocations() as counted:
        (result,) = run_kernel_graph(g, [given])
    assert counted.live == result.nbytes
    assert counted.peak <= 2 * result.nbytes + 64
