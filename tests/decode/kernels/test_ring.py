"""The kernel that ends a step of caches in rings.

Torch, Triton's interpreter and plain Python agree.
"""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch

from mirage_hf import errors
from mirage_hf.decode.control import Control
from mirage_hf.decode.kernels.ring import ring_launch, turn_rings
from mirage_hf.decode.rings import Ring
from tests.helpers import triton_interpreter
from tests.helpers.decode_states import (
    CAPACITY,
    CPU,
    DTYPES,
    assert_compiles_and_waits,
    compiled,
    differing,
    random_control,
    to,
)


def wrong_turns(
    by_kernel: bool, count: int, seed: int, device: torch.device = CPU, width: int = 3
) -> list[str]:
    """Return what is wrong after slabs of several rings were turned at once.

    Every number in the slabs says where it lay.
    """
    rng, wrong = random.Random(seed), []
    for n in range(count):
        batch = rng.choice((1, 2, 3, 5))
        c = random_control(rng, batch, 9)
        slabs, wants = [], []
        for at in range(rng.randint(1, 3)):
            ring = Ring(window := rng.randint(2, CAPACITY), window + rng.randrange(3))
            shape = (
                rng.randint(1, 3),
                batch,
                rng.randint(1, width),
                ring.slots,
                rng.choice((1, 6, 8, 8 * width)),
            )
            slab = (
                torch.arange(1024 * at, 1024 * at + math.prod(shape))
                .remainder(2048)
                .view(shape)
                .to(DTYPES[(n + at) % 3])
            )
            want = slab.clone()
            for row, low in enumerate(c.lowest[:, 0].tolist()):
                token = int(c.length) - low
                if any(c.alive.tolist()) and token >= window - 1:
                    want[:, row, :, token % (window - 1)] = slab[:, row, :, window - 1]
            # two slabs of the same shape share a launch, as keys and values do
            for _ in range(rng.randint(1, 3)):
                slabs.append((ring, slab.clone().to(device)))
                wants.append(want)
        state, there = (
            {f.name: getattr(c, f.name).tolist() for f in dataclasses.fields(c)},
            to(c, device),
        )
        turn_rings(there, slabs, by_kernel=by_kernel)
        same = [torch.equal(slab.cpu(), want) for (_, slab), want in zip(slabs, wants, strict=True)]
        wrong += (
            []
            if all(same) and not differing(there, state)
            else [
                f"{batch} rows, {[(r, tuple(s.shape), s.dtype) for r, s in slabs]}, {state}: {same}"
            ]
        )
    return wrong


def test_torch_wraps_the_ring_as_by_hand():
    assert not wrong_turns(False, 100, seed=10)


INTERPRETED = """
import json
from tests.decode.kernels import test_ring as t
print(json.dumps(t.wrong_turns(True, 25, seed=11)))
"""


def test_kernel_does_as_torch_and_by_hand():
    assert triton_interpreter.run(INTERPRETED) == []


LARGE = ring_launch(Ring(4096, 4096), (32, 1, 8, 4096, 128), 2)
ODD = ring_launch(Ring(70, 256), (2, 5, 3, 256, 80), 1)


def dtypes(slab: torch.dtype) -> list[torch.dtype]:
    return [torch.int64, torch.int64, torch.uint8, slab, slab]


@pytest.mark.parametrize("what, dtype", [(LARGE, torch.bfloat16), (ODD, torch.float16)])
def test_compiles_and_waits_before_it_reads(what, dtype):
    pytest.importorskip("triton")
    assert_compiles_and_waits(what, dtypes(dtype))


def test_one_row_of_bfloat16_is_read_16_bytes_a_thread():
    pytest.importorskip("triton")
    assert "ld.global.v4.b32" in compiled(LARGE, dtypes(torch.bfloat16), 90).asm["ptx"]


def test_wrong_tensors_are_refused():
    c = Control.allocate(2, CAPACITY, CPU)
    for slab in (torch.zeros(1, 3, 1, 8, 4), torch.zeros(1, 2, 1, 9, 4)):
        with pytest.raises(errors.InputError, match=r"slabs\[0\]"):
            turn_rings(c, [(Ring(7, 8), slab)], by_kernel=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_compiled_kernel_does_as_by_hand():
    device = torch.device("cuda", torch.cuda.current_device())
    assert not (wrong := wrong_turns(True, 100, seed=12, device=device, width=20)), wrong
