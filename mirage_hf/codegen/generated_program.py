"""What the generator gives: the text of a file, and how its kernels are launched."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Launch:
    """One kernel of a program as it is launched: what is needed to compile it ahead of time."""

    kernel: str
    #: (argument, Triton type), in order. `overlaps` follows, which is True on sm_90 and newer.
    signature: tuple[tuple[str, str], ...]
    grid: int
    num_warps: int
    num_stages: int
    #: Floats of scratch memory.
    scratch: int = 0
    #: Counters of arrived blocks.
    counters: int = 0


@dataclass(frozen=True)
class GeneratedProgram:
    """A generated file and the launches in it."""

    source: str
    launches: tuple[Launch, ...]
    #: Pairs (output, input), by position, that may be the same memory: `run(inputs, out)` may be
    #: called with `out[output]` the input.
    in_place: tuple[tuple[int, int], ...] = ()

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the source, which `compile.load` checks."""
        return hashlib.sha256(self.source.encode()).hexdigest()
