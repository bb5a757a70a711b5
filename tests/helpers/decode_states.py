"""Random states of a decoding step, and its hand-written kernels compiled without a GPU."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from mirage_hf.codegen.kernel_launch import KernelLaunch
from mirage_hf.decode.control import MAX_EOS, Control

CPU = torch.device("cpu")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CAPACITY = 64
TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}


def random_control(rng: random.Random, batch: int, vocab: int) -> Control:
    c = Control.allocate(batch, CAPACITY, CPU)
    length = rng.randrange(CAPACITY - 8)
    c.length.fill_(length)
    c.budget.fill_(rng.choice((1, 2, 50)))
    c.pad.fill_(rng.randrange(vocab))
    everyone = rng.choice((None, True, False))
    for row in range(batch):
        c.ids[row] = rng.randrange(vocab)
        c.lowest[row] = rng.randrange(length + 1)
        c.position[row] = length - c.lowest[row]
        c.alive[row] = rng.random() < 0.6 if everyone is None else everyone
        c.report[:, row] = torch.tensor([rng.randrange(vocab), 1])
    c.eos.fill_(-1)
    for n in range(rng.choice((0, 1, 3, MAX_EOS))):
        c.eos[n] = rng.randrange(min(vocab, 12))  # `random_logits` often has maxima there
    return c


def to(c: Control, device: torch.device) -> Control:
    return Control(**{f.name: getattr(c, f.name).clone().to(device) for f in dataclasses.fields(c)})


def differing(c: Control, want: dict[str, list]) -> list[str]:
    return [name for name, values in want.items() if getattr(c, name).tolist() != values]


def compiled(what: KernelLaunch, dtypes: list[torch.dtype], sm: int) -> Any:
    """Compile a kernel for tensors of these dtypes, as the launch helper does."""
    compiler = pytest.importorskip("triton.compiler")
    from triton.backends.compiler import GPUTarget

    names = what.kernel.arg_names
    pointers, constexprs = names[: len(dtypes)], names[len(dtypes) :]
    assert constexprs == ["overlaps", *what.constants]  # a launch passes them by position
    types = dict(zip(pointers, (TYPES[dtype] for dtype in dtypes), strict=True))
    source = compiler.ASTSource(
        what.kernel,
        signature=types | dict.fromkeys(constexprs, "constexpr"),
        constexprs={"overlaps": sm >= 90, **what.constants},
        attrs={(n,): [["tt.divisibility", 16]] for n in range(len(dtypes))},
    )
    options = {
        "num_warps": what.num_warps,
        "num_stages": what.num_stages,
        "enable_fp_fusion": True,
    }
    if sm >= 90:
        options["launch_pdl"] = True
    return compiler.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


def assert_compiles_and_waits(what: KernelLaunch, dtypes: list[torch.dtype]) -> None:
    """Assert that a kernel waits before it touches memory, and lets the next one begin early."""
    for sm in (80, 90):
        kernel = compiled(what, dtypes, sm)
        ptx = kernel.asm["ptx"]
        assert kernel.asm["cubin"]
        assert ".ftz" not in ptx  # subnormal numbers have an order too
        waits = ptx.count("griddepcontrol.wait")
        triggers = ptx.count("griddepcontrol.launch_dependents")
        assert waits == triggers == (1 if sm >= 90 else 0)
        accesses = ("st.global", "atom.", "prefetch", "cp.async", "ld.global")
        touched = min(ptx.find(access) for access in accesses if access in ptx)
        if sm >= 90:
            wait = ptx.find("griddepcontrol.wait")
            assert 0 <= wait < ptx.find("griddepcontrol.launch_dependents") < touched
