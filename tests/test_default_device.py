"""Tensors of the package are on the CPU, whatever default device the user has set."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from mirage_hf.default_device import on_the_cpu


class ByFunctions(TorchFunctionMode):
    """A default device that torch.get_default_device() does not know.

    torch.set_default_tensor_type sets such a default.
    """

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return fn(
            *args,
            **({"device": "meta"} if fn in (torch.empty, torch.zeros) else {}) | (kwargs or {}),
        )


@pytest.mark.parametrize(
    "default", [lambda: torch.device("meta"), ByFunctions], ids=["device", "functions"]
)
def test_whatever_the_default_is_tensors_are_on_the_cpu(
    default: Callable[[], AbstractContextManager[Any]],
) -> None:
    with default():
        assert torch.zeros(1).device.type == "meta"
        with on_the_cpu():
            assert torch.zeros(1).device.type == "cpu"
        assert torch.zeros(1).device.type == "meta"


def test_without_a_default_torch_is_not_sent_through_python() -> None:
    assert isinstance(on_the_cpu(), nullcontext)
    with torch.device("meta"), torch.device("cpu"):
        assert isinstance(on_the_cpu(), nullcontext)
