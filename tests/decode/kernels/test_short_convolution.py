"""The kernel of short convolutions: torch and Triton's interpreter agree."""

from __future__ import annotations

import random

import pytest
import torch

from mirage_hf.decode.kernels.short_convolution import (
    MAX_LENGTH,
    convolution_launch,
    convolve,
)
from mirage_hf.trace.short_convolution import short_convolution
from tests.helpers import triton_interpreter
from tests.helpers.decode_states import DTYPES, assert_compiles_and_waits

#: How far results may be from float64's, in units of the largest one: two roundings.
ALLOWED = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def wrong_convolutions(count: int, device: str = "cpu") -> list[str]:
    """Return random cases that differ from torch in float64."""
    rng, wrong = random.Random(0), []
    for n in range(count):
        batch, channels, dtype = rng.randint(1, 4), rng.choice((1, 7, 128, 300)), DTYPES[n % 3]
        width = rng.randint(1, 5)
        length = rng.randint(max(width - 1, 1), MAX_LENGTH)

        def normal(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(shape).to(dtype).to(device)

        state, weight = normal(batch, channels, length), normal(channels, 1, width)
        bias = normal(channels) if rng.random() < 0.5 else None
        # a part of a wider tensor, by tokens
        x = normal(batch, 1, channels + 3)[..., 3:].transpose(1, 2)
        silu, exact = rng.random() < 0.5, state.double()
        got = convolve(state, x, weight, bias, silu)
        want = short_convolution(
            exact, x.double(), weight.double(), None if bias is None else bias.double(), silu
        )
        error = (got.double() - want).abs().max()
        close = error <= ALLOWED[dtype] * want.abs().max().clamp(1.0)
        moved = torch.equal(state.double(), exact)
        if not (moved and close and got.dtype == dtype and got.shape == want.shape):
            wrong.append(f"{batch} {channels} {length} {width} {dtype} {silu}: {error}")
    return wrong


def test_the_kernel_is_as_torch() -> None:
    pytest.importorskip("triton")
    code = (
        "from tests.decode.kernels import test_short_convolution as t; import json; "
        "print(json.dumps(t.wrong_convolutions(24)))"
    )
    assert triton_interpreter.run(code) == []


@pytest.mark.gpu
def test_the_kernel_is_as_torch_on_a_gpu() -> None:
    assert wrong_convolutions(40, "cuda") == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_compiles(dtype: torch.dtype) -> None:
    what = convolution_launch(2, 1000, 4, 4, (1003, 1), True, True)
    assert_compiles_and_waits(what, [dtype] * 5)


def test_other_memory_is_left_to_torch() -> None:
    state, x = torch.randn(4, 2, 3).permute(1, 2, 0), torch.randn(2, 3, 1)
    weight, other = torch.randn(3, 1, 4), state.clone()
    y = convolve(state, x, weight, None, False)
    torch.testing.assert_close(y, short_convolution(other, x, weight, None, False))
    assert torch.equal(state, other)
