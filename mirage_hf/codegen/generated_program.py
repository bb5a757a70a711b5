"""What the generator gives: the text of a file, and how its kernels are launched."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch

#: The generators of kernels.
TRITON, CUDA = "triton", "cuda"

#: Triton's pointer type of each dtype.
POINTER_TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint4: "*i32",
    torch.int4: "*i32",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e8m0fnu: "*u8",
}


@dataclass(frozen=True)
class Launch:
    """One kernel launch of a program. It holds all that compiling ahead of time needs."""

    kernel: str
    #: Pairs (argument, Triton type), in order. The argument `overlaps` follows them. It is True on
    #: sm_90 and newer.
    signature: tuple[tuple[str, str], ...]
    grid: int
    num_warps: int
    num_stages: int
    #: Floats of scratch memory.
    scratch: int = 0
    #: Counters of arrived blocks.
    counters: int = 0
    #: Whether the kernel is CUDA C++. Its types are those of Triton all the same.
    cuda: bool = False
    #: Bytes of dynamic shared memory of a CUDA kernel.
    shared: int = 0
    #: Number of tensors at the end of the signature that a CUDA kernel writes.
    num_outputs: int = 0
    #: Inputs of a CUDA kernel, by number, that may lie at any address.
    anywhere: tuple[int, ...] = ()


@dataclass(frozen=True)
class GeneratedProgram:
    """A generated file and the launches in it."""

    source: str
    launches: tuple[Launch, ...]
    #: Pairs (output, input), by position, that may share memory: `run(inputs, out)` may be called
    #: with the input as `out[output]`.
    in_place: tuple[tuple[int, int], ...] = ()

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the source, which `compile.load` checks."""
        return hashlib.sha256(self.source.encode()).hexdigest()
