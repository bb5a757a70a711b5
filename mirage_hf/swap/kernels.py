"""A kernel for every part of every match: equal blocks are resolved once (zoo, cache, search, verify, tune)."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mirage_hf import kernels, torch_op
from mirage_hf.errors import CodegenError, Rejected, SearchError, VerificationError
from mirage_hf.match.matcher import Match
from mirage_hf.match.pattern import Block

Found = Mapping[tuple[Block, int], Any]
"""(block, rows) to what `kernels.resolve` gave, or Rejected."""


def find_kernels(matches: Sequence[Match], rows: Sequence[int], *, device: torch.device, backend: str, zoo: Any, tune: str,
                 progress: Callable[..., Any] | None) -> Found:
    """Resolve each distinct block of the matches at each number of rows. A block without a kernel is a "no" with its reason."""
    wanted = dict.fromkeys((part.block, r) for m in matches for part in m.parts for r in rows)
    found: dict[tuple[Block, int], Any] = {}
    for block, r in wanted:
        try:
            kernel = kernels.resolve(block.program(r), device=device, backend=backend, zoo=zoo, tune=tune,
                                     pattern=block.pattern.name, progress=progress)
            torch_op.register(kernel.digest, kernel.ugraph, kernel.run, device.type)
            found[block, r] = kernel
        except (SearchError, VerificationError, CodegenError) as e:
            found[block, r] = Rejected(f"no kernel: {e}")
    return found
