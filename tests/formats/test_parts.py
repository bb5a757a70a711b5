"""Weights in codes that are decoded part by part."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mirage_hf.formats import gguf, torchao_int4
from mirage_hf.formats.coding import CodedWeight, Coding
from mirage_hf.formats.parts import in_parts
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.swap.coded_forward import Decoding, decoding_program
from mirage_hf.tune.measure import random_inputs
from tests.formats.test_kernels import NAMES, codings

ROWS, COLUMNS = 512, 256


def coding_of(name: str) -> Coding:
    if name == "tiles of other dims":
        return torchao_int4.coding_of_tiles(ROWS, 512, 512, 128, torch.bfloat16)
    if name == "several blocks of Q6_K":
        return gguf.coding_of(14, ROWS, 512, torch.bfloat16)
    return codings(ROWS, COLUMNS, 64, 64)[name]


def run_by_torch(coding: Coding, tensors: list[Tensor]) -> Tensor:
    return run_kernel_graph(decoding_program(coding), tensors)[0]


def inputs_of(coding: Coding) -> list[Tensor]:
    tensors = random_inputs(decoding_program(coding), "cpu")
    if coding.order:
        tensors[-1].copy_(torch.randint(COLUMNS // 64, tensors[-1].shape))
    return tensors


@pytest.mark.parametrize("name", [*NAMES, "tiles of other dims", "several blocks of Q6_K"])
@pytest.mark.parametrize("rows", [[256] * 2, [192, 192, 128], [128] * 4])
def test_parts_decode_to_the_rows_of_the_whole_weight(name: str, rows: list[int]) -> None:
    coding = coding_of(name)
    tensors = inputs_of(coding)
    parts = in_parts(coding, rows[0] * coding.columns * coding.dtype.itemsize)
    if name == "HQQ int4":  # each byte holds codes of rows of both halves
        assert [part.coding for part in parts] == [coding]
        return
    assert [part.coding.rows for part in parts] == rows
    whole = run_by_torch(coding, tensors)
    memory = [t.untyped_storage().data_ptr() for t in tensors]
    for part, wanted in zip(parts, whole.split(rows), strict=True):
        views = part.tensors(tensors)
        assert [t.untyped_storage().data_ptr() for t in views] == memory
        starts = [(v.data_ptr() - t.data_ptr()) % 16 for v, t in zip(views, tensors, strict=True)]
        assert not any(starts)
        assert torch.equal(run_by_torch(part.coding, views), wanted)


def rows_of_parts(coding: Coding, most_bytes: int) -> list[int]:
    return [part.coding.rows for part in in_parts(coding, most_bytes)]


@pytest.mark.parametrize("rows", [14336, 32002, 32003, 128256, 128257, 128262, 151669, 49155])
@pytest.mark.parametrize("name", ["int8 rows", "int4 groups", "NF4", "fp8 one scale"])
def test_any_number_of_rows_is_cut_into_few_parts(name: str, rows: int) -> None:
    coding, most = codings(rows, 4096, 64, 64, torch.bfloat16)[name], 1 << 26
    found = rows_of_parts(coding, most)
    assert sum(found) == rows and max(found) * 8192 <= most
    assert len(found) <= -(-rows * 8192 // most) + 1
    assert not any(part % 64 for part in found[:-1])


def test_blocks_of_float8_are_not_cut() -> None:
    coding = codings(128256, 4096, 64, 128, torch.bfloat16)["fp8 blocks"]
    assert rows_of_parts(coding, 1 << 26) == [63 * 128] * 15 + [57 * 128]
    assert rows_of_parts(coding, 1 << 19) == [128256]  # a block has 1 MiB


def test_a_small_weight_is_one_part() -> None:
    assert rows_of_parts(coding_of("int8 rows"), ROWS * COLUMNS * 2) == [ROWS]


def test_parts_begin_where_kernels_load_16_bytes() -> None:
    coding = codings(48, 256, 64, 16)["int8 rows"]  # its scales have 4 bytes
    found = {rows: rows_of_parts(coding, 512 * rows) for rows in (48, 47, 24, 23, 10, 4, 3)}
    assert found == {
        48: [48],
        47: [24, 24],
        24: [24, 24],
        23: [16, 16, 16],
        10: [8] * 6,
        4: [4] * 12,
        3: [48],
    }


def weight_and_decoding(count: int) -> tuple[CodedWeight, Decoding]:
    """Return a weight and what decodes it. It fails if a part is decoded while another is held."""
    whole = codings(ROWS, COLUMNS, 64, 64, torch.float32)["int4 groups"]
    weight = CodedWeight(whole, tuple(inputs_of(whole)))
    parts = in_parts(whole, -(-ROWS // (64 * count)) * 64 * COLUMNS * 4)
    assert len(parts) == count
    held: list[weakref.ref[Tensor]] = []

    def run(coding: Coding, tensors: list[Tensor]) -> list[Tensor]:
        assert torch.is_grad_enabled() or not any(ref() is not None for ref in held)
        w = run_by_torch(coding, tensors)
        held.append(weakref.ref(w))
        return [w]

    return weight, Decoding(parts, tuple(partial(run, part.coding) for part in parts))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(COLUMNS,), (3, COLUMNS), (2, 3, COLUMNS), (0, COLUMNS)])
def test_a_linear_of_parts_gives_what_the_whole_weight_gives(
    shape: tuple[int, ...], has_bias: bool
) -> None:
    weight, decoding = weight_and_decoding(3)
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
    x, w = torch.randn(3, COLUMNS), run_by_torch(weight.coding, [*weight.tensors])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y, expected = decoding.linear(x, weight, None), F.linear(x, w)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y, expected)


def test_a_compiled_call_has_no_breaks() -> None:
    weight, decoding = weight_and_decoding(3)
    x = torch.randn(2, COLUMNS)
    run = torch.compile(Decoding.by_torch(weight.coding).linear, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(run(x, weight, None), decoding.linear(x, weight, None))
