"""Fake tensors of ops that were inferred before, compared with those of torch's own mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mirage_hf.trace.fake_mode import FakeOnceMode, storages

#: By name: a function of float32 (4, 6), and whether its op is inferred once.
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "new": (lambda x: x + x, True),
    "a number": (lambda x: x * 2, True),
    "a new dtype": (lambda x: x.to(torch.bfloat16), True),
    "transposed": (lambda x: x.t(), True),
    "a part": (lambda x: x[1:3, 2:], True),
    "a part of a part": (lambda x: x[1:][1:, 1:4], True),
    "expanded": (lambda x: x[:, :1].expand(4, 8), True),
    "a view after a product": (lambda x: torch.ops.aten._unsafe_view(x @ x.t(), [2, 8]), True),
    "smaller elements of the same bits": (lambda x: x.view(torch.int16), False),
    "larger elements of the same bits": (lambda x: x.view(torch.int64), False),
    "several results": (lambda x: x.topk(2), True),
    "a list of views": (lambda x: torch.ops.aten.unbind.int(x), True),
    "in place": (lambda x: x.mul_(3), True),
    "in place in a view": (lambda x: x[1:].zero_(), True),
    "appended": (lambda x: x.index_copy_(0, torch.arange(2), x[:2] + 1), True),
    "out": (lambda x: torch.add(x, x, out=torch.empty(4, 6)), False),
    "a place in the storage": (lambda x: x.as_strided((2, 2), (6, 1), 3), False),
    "complex": (lambda x: torch.view_as_complex(x.view(4, 3, 2)).conj(), False),
    "resized": (lambda x: x.clone().resize_(2, 3), False),
    "indexed": (lambda x: x[torch.arange(2), torch.arange(2)], False),
}


@pytest.fixture
def mode() -> Iterator[FakeOnceMode]:
    with closing(FakeOnceMode()) as made:
        yield made


@pytest.fixture
def inferred(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list of the ops that torch's mode is asked for."""
    asked: list[Any] = []
    usual = FakeTensorMode.__torch_dispatch__

    def noted(mode: Any, func: Any, *rest: Any) -> Any:
        asked.append(func)
        return usual(mode, func, *rest)

    monkeypatch.setattr(FakeTensorMode, "__torch_dispatch__", noted)
    return asked


def run(mode: FakeTensorMode, function: Callable[[Tensor], Any], rows: int) -> tuple[Any, ...]:
    """Return the shapes and so on of what a function gives, and what shares memory with what.

    The function's argument begins at row number `rows` of a larger tensor.
    """
    with mode, torch.no_grad():
        whole = torch.empty(10, 6)
        x = whole[rows : rows + 4]
        result = function(x)
    results = list(result) if isinstance(result, (tuple, list)) else [result]
    begin = x.storage_offset()
    return type(result), [
        (
            y.shape,
            y.stride(),
            y.dtype,
            y.device,
            y.requires_grad,
            y.is_conj(),
            type(y),
            y is x,
            storages(y) == storages(x),
            y.storage_offset() - begin * (storages(y) == storages(x)),
        )
        for y in results
    ]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_those_of_torch(name: str, mode: FakeOnceMode) -> None:
    function, _ = FUNCTIONS[name]
    for rows in (0, 3, 5):
        assert run(mode, function, rows) == run(FakeTensorMode(), function, rows)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_ordinary_op_is_inferred_once(
    name: str, mode: FakeOnceMode, inferred: list[Any]
) -> None:
    function, once = FUNCTIONS[name]
    run(mode, function, 0)
    run(mode, torch.abs, 3)  # the argument itself is another view
    inferred.clear()
    run(mode, function, 3)
    assert (not inferred) is once


def test_equal_numbers_of_other_types_are_told_apart(mode: FakeOnceMode) -> None:
    with mode, torch.no_grad():
        x = torch.ones(3, dtype=torch.int64)
        dtypes = [(x + one).dtype for one in (1, 1.0, True)]
    assert dtypes == [torch.int64, torch.float32, torch.int64]


def test_the_default_dtype_counts(mode: FakeOnceMode) -> None:
    before = torch.get_default_dtype()
    try:
        with mode, torch.no_grad():
            x = torch.ones(3, dtype=torch.int64)
            assert (x / 2).dtype == torch.float32
            torch.set_default_dtype(torch.float64)
            assert (x / 2).dtype == torch.float64
    finally:
        torch.set_default_dtype(before)


def test_gradients_are_those_of_torch(mode: FakeOnceMode) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    with mode:
        assert (weight * 2).requires_grad
        with torch.no_grad():
            assert not (weight * 2).requires_grad


def test_a_real_tensor_becomes_one_fake_tensor(mode: FakeOnceMode) -> None:
    weight = torch.ones(2, 2)
    with mode, torch.no_grad():
        first, second = weight.t(), weight.t()
    assert type(first) is FakeTensor
    assert storages(first) == storages(second)
