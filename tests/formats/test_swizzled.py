"""Codes that their library swizzled: rewritten in their own memory, and back bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mirage_hf.formats.swizzled import Swizzled, swizzled
from mirage_hf.swap.undos import put_back_all
from scripts.coded_models import StridedLayout
from tests.helpers.hopper_order import HopperMXValueLayout


def wrapped(experts: int, width: int, rows: int) -> tuple[Any, torch.Tensor]:
    """Return random codes in the order for Hopper, and their plain bytes."""
    plain = torch.randint(0, 256, (experts, rows, width), dtype=torch.uint8).mT
    layout = HopperMXValueLayout(plain.shape)
    storage = SimpleNamespace(data=layout.swizzle_data(plain), layout=layout)
    return SimpleNamespace(storage=storage, shape=(experts, 2 * width, rows)), plain


def put_in_plain_order(codes: Swizzled | None) -> Callable[[], None]:
    assert codes is not None
    undos: list[Callable[[], None]] = []
    assert codes.put_in_plain_order(undos) is None
    (undo,) = undos
    return undo


@pytest.mark.parametrize("loaded_in_inference_mode", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [(2, 32, 16), (3, 64, 48), (1, 16, 32), (2, 48, 40)],
    ids=lambda s: "x".join(map(str, s)),
)
def test_codes_are_rewritten_where_they_lie(
    sizes: tuple[int, int, int], loaded_in_inference_mode: bool
) -> None:
    """Sizes that are not multiples of 32 bytes and 16 outputs are padded."""
    torch.manual_seed(0)
    with torch.inference_mode(loaded_in_inference_mode):
        tensor, plain = wrapped(*sizes)
    storage = tensor.storage
    data, layout, before = storage.data, storage.layout, storage.data.clone()
    codes = swizzled(tensor, StridedLayout)
    assert torch.equal(data, before)
    undo = put_in_plain_order(codes)
    assert torch.equal(storage.data, plain) and storage.data.stride()[1:] == (1, sizes[1])
    assert storage.data.data_ptr() == data.data_ptr() and not torch.equal(data, before)
    assert type(storage.layout) is StridedLayout
    undo()
    assert storage.data is data and storage.layout is layout and torch.equal(data, before)


def test_an_order_that_loses_bits_is_refused_and_nothing_is_lost() -> None:
    tensor, _ = wrapped(4, 32, 16)
    data, before = tensor.storage.data, tensor.storage.data.clone()
    convert, calls = tensor.storage.layout.unswizzle_data, iter(range(4))
    tensor.storage.layout.unswizzle_data = lambda x: convert(x) ^ (next(calls) == 2)
    codes, undos = swizzled(tensor, StridedLayout), []  # type: ignore[var-annotated]
    assert codes is not None
    why = codes.put_in_plain_order(undos)
    assert why == "its library's order HopperMXValueLayout cannot be undone exactly"
    assert not torch.equal(data, before)  # two experts were rewritten
    undos.pop()()
    assert torch.equal(data, before) and tensor.storage.data is data


@pytest.mark.parametrize("failing", range(3))
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_codes_are_put_back_in_a_second_try(
    error: type[BaseException], failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU may lack the memory, and a user may interrupt at any conversion."""
    tensor, _ = wrapped(3, 32, 16)
    data, before = tensor.storage.data, tensor.storage.data.clone()
    undos = [put_in_plain_order(swizzled(tensor, StridedLayout))]
    convert, calls = HopperMXValueLayout.swizzle_data, iter(range(9))

    def once(self: Any, x: torch.Tensor) -> torch.Tensor:
        if next(calls) == failing:
            raise error
        return convert(self, x)

    monkeypatch.setattr(HopperMXValueLayout, "swizzle_data", once)
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            put_back_all(undos)
    else:  # the CPU converts instead
        put_back_all(undos)
    assert not undos
    assert torch.equal(data, before) and tensor.storage.data is data


@pytest.mark.parametrize("when", ["before", "after"])
def test_codes_are_put_back_after_an_interrupt_beside_a_write(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor, _ = wrapped(3, 32, 16)
    data, before = tensor.storage.data, tensor.storage.data.clone()
    codes, undos = swizzled(tensor, StridedLayout), []  # type: ignore[var-annotated]
    assert codes is not None
    copy, calls = torch.Tensor.copy_, iter(range(99))

    def interrupted(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        is_second = next(calls) == 1
        if is_second and when == "before":
            raise KeyboardInterrupt
        copy(self, other)
        if is_second:
            raise KeyboardInterrupt
        return self

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "copy_", interrupted)
        with pytest.raises(KeyboardInterrupt):
            codes.put_in_plain_order(undos)
    put_back_all(undos)
    assert torch.equal(data, before) and tensor.storage.data is data


@pytest.mark.parametrize(
    "change",
    [
        lambda x: setattr(x, "shape", (3, 64, 16)),  # other experts
        lambda x: setattr(x, "shape", (2, 64, 32)),  # more codes than there are
        lambda x: setattr(x.storage, "layout", object()),
        lambda x: setattr(x.storage, "data", x.storage.data[:, ::2]),
    ],
    ids=["experts", "sizes", "no conversions", "gaps"],
)
def test_codes_of_another_form_are_not_known(change: Callable[[Any], None]) -> None:
    tensor, _ = wrapped(2, 32, 16)
    assert swizzled(tensor, StridedLayout) is not None
    change(tensor)
    assert swizzled(tensor, StridedLayout) is None
