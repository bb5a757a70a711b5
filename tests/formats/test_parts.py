"""Weights in codes that are decoded part by part."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mirage_hf.formats.coding import CodedWeight, Coding, in_parts, part_of
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.swap.coded_forward import Decoding, decoding_program
from mirage_hf.tune.measure import random_inputs
from tests.formats.test_kernels import NAMES, codings

ROWS, COLUMNS = 512, 256


def coding_of(name: str) -> Coding:
    return codings(ROWS, COLUMNS, 64, 64)[name]


def run_by_torch(coding: Coding, tensors: list[Tensor]) -> Tensor:
    return run_kernel_graph(decoding_program(coding), tensors)[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("parts", [2, 4])
def test_parts_decode_to_the_rows_of_the_whole_weight(name: str, parts: int) -> None:
    coding = coding_of(name)
    tensors = random_inputs(decoding_program(coding), "cpu")
    if coding.order:
        tensors[-1].copy_(torch.randint(COLUMNS // 64, tensors[-1].shape))
    size = coding.rows * coding.columns * coding.dtype.itemsize
    part, found = in_parts(coding, size // parts)
    if name == "HQQ int4":  # each byte holds codes of rows of both halves
        assert (part, found) == (coding, 1)
        return
    assert (part.rows, found) == (coding.rows // parts, parts)
    whole = run_by_torch(coding, tensors)
    for number, rows in enumerate(whole.split(part.rows)):
        views = part_of(tensors, coding, part, number)
        memory = [t.untyped_storage().data_ptr() for t in tensors]
        assert [t.untyped_storage().data_ptr() for t in views] == memory
        assert torch.equal(run_by_torch(part, [*views]), rows)


def test_a_small_weight_is_one_part() -> None:
    coding = coding_of("int8 rows")
    assert in_parts(coding, ROWS * COLUMNS * 2) == (coding, 1)


def test_no_tensor_of_a_part_begins_between_multiples_of_16_bytes() -> None:
    coding = codings(48, 256, 64, 16)["int8 rows"]  # its scales have 4 bytes
    assert [in_parts(coding, 512 * rows)[1] for rows in (48, 24, 16, 12, 8, 4)] == [
        1,
        2,
        3,
        4,
        6,
        12,
    ]
    assert in_parts(coding, 512 * 3) == (coding, 1)
    blocks = codings(48, 256, 64, 16)["fp8 blocks"]
    assert in_parts(blocks, 512 * 16)[1] == 3
    assert in_parts(blocks, 512 * 8) == (blocks, 1)


def weight_and_decoding(parts: int) -> tuple[CodedWeight, Decoding]:
    """Return a weight and what decodes it. It fails if a part is decoded while another is held."""
    whole = codings(ROWS, COLUMNS, 64, 64, torch.float32)["int4 groups"]
    weight = CodedWeight(whole, tuple(random_inputs(decoding_program(whole), "cpu")))
    part, found = in_parts(whole, ROWS * COLUMNS * 4 // parts)
    assert found == parts
    held: list[weakref.ref[Tensor]] = []

    def run(tensors: list[Tensor]) -> list[Tensor]:
        assert torch.is_grad_enabled() or not any(ref() is not None for ref in held)
        w = run_by_torch(part, tensors)
        held.append(weakref.ref(w))
        return [w]

    return weight, Decoding(whole, part, parts, run)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(COLUMNS,), (3, COLUMNS), (2, 3, COLUMNS), (0, COLUMNS)])
def test_a_linear_of_parts_gives_what_the_whole_weight_gives(
    shape: tuple[int, ...], has_bias: bool
) -> None:
    weight, decoding = weight_and_decoding(4)
    x = torch.randn(shape)
    bias = torch.randn(ROWS) if has_bias else None
    w = run_by_torch(weight.coding, [*weight.tensors])
    expected = F.linear(x, w, bias)
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-3)
    with torch.no_grad():
        close(decoding.linear(x, weight, bias), expected)
    x.requires_grad_()
    y = decoding.linear(x, weight, bias)
    close(y, expected)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    close(gradient, w.sum(0).expand(shape))


def test_autocast_gets_its_dtype() -> None:
    weight, decoding = weight_and_decoding(2)
    with torch.autocast("cpu", torch.bfloat16):
        y = decoding.linear(torch.randn(3, COLUMNS), weight, None)
    assert y.dtype is torch.bfloat16
