"""Inputs of codes: how words hold them, what reads them, and what is refused."""

import json

import pytest
import torch

import mirage_hf as mi
from mirage_hf import errors
from mirage_hf.graph import coded, json_format, text
from mirage_hf.graph.block import Axis, BlockGraph, BlockInput, BlockOp, BlockOutput, Role, Stage
from mirage_hf.graph.execute import run_kernel_graph
from tests.helpers import coded_programs
from tests.helpers.coded_programs import CASES


def input_of(dims, strides=None):
    return mi.new_graph().new_input(dims, "uint4", strides)


def test_signed_codes_are_in_twos_complement():
    t = mi.new_graph().new_input((1, 8), "int4")
    words = torch.tensor([[0x76543210 ^ -0x77777778]], dtype=torch.int32)
    assert coded.unpacked(t, words).tolist() == [list(range(-8, 0))]
    assert torch.equal(coded.packed(t, torch.arange(-8, 0)[None]), words)


def test_a_stride_of_minus_1_begins_in_the_high_half_of_each_byte():
    t = input_of((2, 4), (-1, 2))
    words = torch.tensor([[0x76543210]], dtype=torch.int32)
    assert coded.unpacked(t, words).tolist() == [[1, 3, 5, 7], [0, 2, 4, 6]]


def test_the_first_code_is_in_the_lowest_bits():
    t = input_of((1, 8))
    words = torch.tensor([[0x76543210]], dtype=torch.int32)
    assert coded.unpacked(t, words).tolist() == [list(range(8))]
    assert torch.equal(coded.packed(t, torch.arange(8)[None]), words)


@pytest.mark.parametrize(
    ("dims", "strides", "words", "word_strides"),
    [
        ((6, 4, 32), None, (6, 4, 4), (16, 4, 1)),
        ((32, 6), (1, 32), (4, 6), (1, 4)),  # a transposed view
        ((4, 6, 8), (48, 8, 1), (4, 6, 1), (6, 1, 1)),  # eight rows of a column in each word
        ((3, 4, 2, 5), (8, 1, 4, 24), (3, 1, 1, 5), (1, 1, 1, 3)),  # the order of AWQ
        ((2, 3, 16), (1, 32, 2), (1, 3, 4), (1, 4, 1)),  # bytes of two rows, four to a word
        ((2, 3, 16), (-1, 32, 2), (1, 3, 4), (1, 4, 1)),  # the same, the first row in the high half
    ],
)
def test_words_hold_codes_along_the_dims_of_strides_below_8(dims, strides, words, word_strides):
    t = input_of(dims, strides)
    assert coded.storage(t) == coded.Storage(words, word_strides, torch.int32)
    codes = torch.randint(0, 16, dims, generator=torch.Generator().manual_seed(0))
    stored = coded.packed(t, codes)
    assert (stored.shape, stored.dtype) == (words, torch.int32)
    assert torch.equal(coded.unpacked(t, stored), codes.to(torch.uint8))


@pytest.mark.parametrize(
    ("dims", "strides"),
    [
        ((4, 12), None),
        ((4, 8), (12, 1)),
        ((4, 8), (16, 2)),
        ((3,), None),
        ((2, 4), (1, 3)),
        ((2, 2, 8), (1, 2, 8)),
        ((4, 4, 8), (1, 2, 16)),
        ((8, 8), (-1, 8)),
    ],
)
def test_codes_that_fill_no_words_are_refused(dims, strides):
    with pytest.raises(errors.GraphError, match="do not fill int32 words"):
        input_of(dims, strides)


def test_a_block_graph_stores_no_codes():
    with pytest.raises(errors.GraphError, match="only inputs of a program hold codes"):
        BlockGraph(
            (Axis("n", 8, Role.GRID),),
            (BlockInput("x", (0,), ("n",)),),
            (Stage(None, (BlockOp("y", "neg", ("x",), ("n",)),)),),
            (BlockOutput("y", ("n",), "uint8"),),
        )


def test_only_cast_reads_codes():
    g = mi.new_graph()
    c = g.new_input((4, 8), "uint4")
    x = g.new_input((4, 8))
    with pytest.raises(errors.DTypeError, match=r"only graph\.cast reads"):
        g.mul(x, c)
    with pytest.raises(errors.DTypeError, match=r"only graph\.cast reads"):
        g.permute(c, (1, 0))
    with pytest.raises(errors.DTypeError, match="only inputs hold codes"):
        g.cast(x, "int8")


@pytest.mark.parametrize("name", CASES)
def test_programs_of_codes_round_trip(name):
    g = CASES[name]()
    assert text.parse_graph(str(g)) == g == json_format.graph_from_dict(json.loads(g.to_json()))


def test_a_program_computes_with_decoded_weights():
    g = coded_programs.int4_linear(2, 16, 64, 32, zeros=True)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 64, generator=generator).half()
    codes = torch.randint(0, 16, (16, 2, 32), generator=generator)
    scales = torch.rand(16, 2, 1, generator=generator).half()
    zeros = torch.randint(0, 16, (16, 2, 1), generator=generator)
    words = coded.packed(g.inputs[1], codes)
    inputs = [x, words, scales, zeros.to(torch.uint8)]
    exact = x.double() @ ((codes - zeros) * scales.double()).reshape(16, 64).T
    assert torch.equal(run_kernel_graph(g, inputs, torch.float64)[0], exact)
    (y,) = mi.superoptimize(g, backend="cpu")[0](inputs)
    torch.testing.assert_close(y.double(), exact, rtol=2e-3, atol=2e-3)


def test_a_wrong_container_is_refused():
    g = coded_programs.int4_linear(1, 16, 64, 32)
    inputs = [torch.zeros(1, 64).half(), torch.zeros(16, 64, dtype=torch.uint8)]
    inputs.append(torch.ones(16, 2, 1).half())
    best = mi.superoptimize(g, backend="cpu")[0]
    with pytest.raises(errors.InputError, match=r"input 1 \(codes\): built for shape \(16, 2, 4\)"):
        best(inputs)
