"""The random numbers of calls that sample.

A call takes one uniform number for each row and step: output `step` of Philox with the key (seed,
row). The call draws only the seed from torch's generator. So a row's tokens do not depend on other
rows, on the steps that ran ahead, or on the place where tokens are chosen. Stock chooses other
tokens, because it draws from the generator at every step.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

#: Bits of a uniform number. They are few enough that the greatest number stays below the sum of all
#: probabilities, however that is rounded.
BITS = 40


def draw_seed() -> int:
    """Draw the 64-bit seed of a call from torch's generator."""
    return int(torch.randint(-(1 << 63), (1 << 63) - 1, (), device="cpu"))


def uniforms(seed: int, rows: int, steps: int, first: int = 0) -> Tensor:
    """Return (rows, steps) float64 numbers in [0, 1) from step `first` on, a multiple of 4."""
    outputs = np.empty((rows, steps), dtype=np.uint64)
    for row in range(rows):
        philox = np.random.Philox(key=np.array([seed % (1 << 64), row], dtype=np.uint64))
        # Philox gives four numbers for each count
        outputs[row] = philox.advance(first // 4).random_raw(steps)
    return torch.from_numpy((outputs >> np.uint64(64 - BITS)).astype(np.float64) * 2.0**-BITS)


class UniformNumbers:
    """The uniform numbers of a call, step by step, for loops that choose on the host."""

    #: Steps whose numbers are made at once.
    AT_ONCE = 1024

    def __init__(self, seed: int, rows: int, device: torch.device):
        self.seed, self.rows, self.device = seed, rows, device
        self._first, self._numbers = 0, torch.empty(rows, 0, device=device)

    def at(self, step: int) -> Tensor:
        """Return the numbers (rows, 1) of a step, on the device.

        Steps must be asked for in order.
        """
        if step >= self._first + self._numbers.shape[1]:
            self._first = step - step % self.AT_ONCE
            numbers = uniforms(self.seed, self.rows, self.AT_ONCE, self._first)
            self._numbers = numbers.to(self.device)
        return self._numbers[:, step - self._first, None].contiguous()
