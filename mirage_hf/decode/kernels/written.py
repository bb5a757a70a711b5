"""What kernels written by hand share: text that stands alone like that of generated ones, loaded, compiled and launched as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import launching
from mirage_hf.codegen.triton import GeneratedProgram, Launch

INFINITY = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F800000}
"""What embeddings, rotary tables, logits and scores may be made of, with the bits of infinity: more of them are NaN."""

HEAD = '''
"""Written by mirage_hf.decode."""
import copy
import threading

import torch
import triton
import triton.language as tl
'''.strip()


def order(dtype: torch.dtype) -> str:
    """Text that makes int32 `order` of `x`: in the order of the numbers, -0.0 is 0.0, and every NaN the same one above everything."""
    width = 8 * dtype.itemsize
    return f"""
bits = x.to(tl.int{width}, bitcast=True).to(tl.int32)
size = bits & 0x{(1 << width - 1) - 1:X}
order = tl.where(size > 0x{INFINITY[dtype]:X}, 0x7FFFFFFF, tl.where(bits < 0, -size, size))
""".strip()


def as_program(kernel: str, launch: Launch) -> GeneratedProgram:
    """A file of one kernel and one set of argument types, which it names: kernels for other dtypes are other files."""
    types = f"# {launch.kernel}: {', '.join(f'{name} {kind}' for name, kind in launch.signature)}"
    return GeneratedProgram(
        "\n\n\n".join([HEAD, f"{types}\n{kernel.strip()}", launching.text(with_counters=False)])
        + "\n",
        (launch,),
    )


Loaded = tuple[ModuleType, Launch]


def load(program: GeneratedProgram) -> Loaded:
    return compiler.load(program.source, program.digest), program.launches[0]


def loading(write: Callable[..., GeneratedProgram]) -> Callable[..., Loaded]:
    """What `write` writes, loaded: once for the same sizes."""
    return lru_cache(maxsize=256)(lambda *sizes: load(write(*sizes)))


def launch(loaded: Loaded, tensors: list[Tensor]) -> None:
    """Launch on the device of the tensors, on its current stream."""
    module, how = loaded
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(loaded, tensors)
    module.launch(
        getattr(module, how.kernel),
        how.grid,
        tensors,
        num_warps=how.num_warps,
        num_stages=how.num_stages,
    )
