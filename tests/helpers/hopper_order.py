"""The layout of `triton_kernels` for 4-bit floats on Hopper.

Tests do not install the library. This layout gave the same bytes as the library's. Outputs come
in blocks of 16 and bytes of inputs in blocks of 32; the library pads with zeros. A word of 32
bits holds the codes of two outputs that are eight apart and two bytes that are four apart. Their
bits are mixed: the first three codes of a half are three bits apart, and the fourth fills the
gaps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

#: Where the bits of a code go in a half word, from the lowest one, for the four bytes of a word.
_PLACES = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (13, 10, 11, 14))


class HopperMXValueLayout:
    """The library's order on Hopper, for tensors (experts, bytes of the inputs, outputs)."""

    def __init__(self, shape: Any) -> None:
        """Make the order of a tensor."""
        self.initial_shape = shape

    def swizzle_data(self, data: Tensor) -> Tensor:
        """Return the bytes of a plain tensor in this order."""
        rows = data.mT
        rows = pad(rows, (0, -rows.shape[2] % 32, 0, -rows.shape[1] % 16))
        split = rows.unflatten(2, (-1, 4, 2, 4)).unflatten(1, (-1, 2, 4, 2))
        # experts; outputs: block, eight, pair, one; bytes: block, group, four, one
        bytes_of_words = split.permute(0, 1, 3, 5, 4, 8, 6, 7, 2).flatten(-2).int()
        words = torch.zeros(bytes_of_words.shape[:-1], dtype=torch.int32, device=data.device)
        for byte, half, bit, place in _bits():
            words |= (bytes_of_words[..., byte] >> (4 * half + bit) & 1) << (16 * half + place)
        return words.flatten(3).flatten(1, 2).contiguous().view(torch.uint8).mT

    def unswizzle_data(self, data: Tensor) -> Tensor:
        """Return the plain bytes."""
        words = data.mT.contiguous().view(torch.int32)
        found = torch.zeros((*words.shape, 4), dtype=torch.int32, device=data.device)
        for byte, half, bit, place in _bits():
            found[..., byte] |= (words >> (16 * half + place) & 1) << (4 * half + bit)
        # experts; outputs: block, pair; bytes: block; output: one; bytes: one, group, four; eight
        split = found.to(torch.uint8).unflatten(2, (-1, 2, 4, 4)).unflatten(1, (-1, 4))
        rows = split.unflatten(-1, (2, 2)).permute(0, 1, 8, 2, 4, 3, 6, 7, 5)
        plain = rows.flatten(5).flatten(1, 4).flatten(2)
        return plain.mT[:, : self.initial_shape[1], : self.initial_shape[2]]


def put_in_hopper_order(experts: Any) -> None:
    """Store the codes of `Mxfp4GptOssExperts` as transformers' loader does on Hopper."""
    for name in ("gate_up_proj", "down_proj"):
        storage = getattr(experts, name).storage
        layout = HopperMXValueLayout(storage.data.shape)
        storage.data, storage.layout = layout.swizzle_data(storage.data), layout


def _bits() -> list[tuple[int, int, int, int]]:
    """Return the byte, half, bit and place of each bit of a word."""
    return [
        (byte, half, bit, place)
        for byte, places in enumerate(_PLACES)
        for half in (0, 1)
        for bit, place in enumerate(places)
    ]
