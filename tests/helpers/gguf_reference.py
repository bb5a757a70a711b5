"""Random blocks of GGUF's K types, and what they decode to, byte by byte as ggml's C code does."""

from __future__ import annotations

import torch

from mirage_hf.formats import gguf
from mirage_hf.formats.coding import CodedWeight
from mirage_hf.formats.gguf_blocks import LAYOUTS

#: The types of blocks with 256 codes, by GGUF's number, and where their float16 numbers begin.
K_TYPES = {12: (0, 2), 13: (0, 2), 14: (208,)}


def random_blocks(kind: int, rows: int, columns: int, seed: int) -> torch.Tensor:
    """Return random bytes (rows, bytes of a row). Float16 numbers are small."""
    layout, draw = LAYOUTS[kind], torch.Generator().manual_seed(seed)
    shape = rows, columns // layout.codes
    blocks = torch.randint(0, 256, (*shape, layout.bytes), generator=draw, dtype=torch.uint8)
    for at in K_TYPES[kind]:
        numbers = torch.rand(shape, generator=draw) * 2e-4 + 1e-4
        blocks[..., at : at + 2] = numbers.half().unsqueeze(-1).view(torch.uint8)
    return blocks.flatten(1)


def coded(kind: int, blocks: torch.Tensor, dtype: torch.dtype) -> CodedWeight:
    """Return the weight in codes that blocks are."""
    layout = LAYOUTS[kind]
    rows, columns = len(blocks), blocks.shape[1] // layout.bytes * layout.codes
    coding = gguf.coding_of(kind, rows, columns, dtype)
    return CodedWeight(coding, gguf.views(kind, coding, blocks))


def decoded(kind: int, blocks: torch.Tensor) -> torch.Tensor:
    """Return the weight in float64."""
    size = LAYOUTS[kind].bytes
    every = [_DECODE[kind](block) for block in blocks.view(-1, size)]
    return torch.tensor(every, dtype=torch.float64).view(len(blocks), -1)


def _half(block: torch.Tensor, at: int) -> float:
    return float(block[at : at + 2].clone().view(torch.float16))


def _scale_and_minimum(s: list[int], j: int) -> tuple[int, int]:
    """Return the scale and the minimum of block j (get_scale_min_k4 of ggml)."""
    if j < 4:
        return s[j] & 63, s[j + 4] & 63
    low, high = s[j + 4], (s[j - 4] >> 6, s[j] >> 6)
    return low & 15 | high[0] << 4, low >> 4 | high[1] << 4


def _with_minima(block: torch.Tensor, codes: int, highs: int | None) -> list[float]:
    d, least, b = _half(block, 0), _half(block, 2), block.tolist()
    weight = []
    for j in range(8):
        scale, minimum = _scale_and_minimum(b[4:16], j)
        for n in range(32):
            q = b[codes + 32 * (j // 2) + n] >> 4 * (j % 2) & 15
            q += 0 if highs is None else 16 * (b[highs + n] >> j & 1)
            weight.append(d * scale * q - least * minimum)
    return weight


def _q6_k(block: torch.Tensor) -> list[float]:
    d, b, weight = _half(block, 208), block.tolist(), []
    for k in range(256):
        half, quarter, n = k // 128, k // 32 % 4, k % 32
        q = b[64 * half + 32 * (quarter % 2) + n] >> 4 * (quarter // 2) & 15
        q += 16 * (b[128 + 32 * half + n] >> 2 * quarter & 3)
        scale = b[192 + k // 16]
        weight.append(d * (scale - 256 * (scale > 127)) * (q - 32))
    return weight


_DECODE = {
    12: lambda block: _with_minima(block, 16, None),
    13: lambda block: _with_minima(block, 48, 16),
    14: _q6_k,
}
