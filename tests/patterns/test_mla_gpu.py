"""Multi-head latent attention and the ops before it on a GPU, compared with float64.

The shapes are those of DeepSeek-V2-Lite, V2 and V3.
"""

from __future__ import annotations

import pytest
import torch
from triton.runtime.errors import OutOfResources

from mirage_hf import errors
from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.patterns.attention import LONG_SLOTS
from mirage_hf.patterns.mla import MLA, MLA_APPEND
from mirage_hf.search.engine import search
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.search.split_appends import split_appends
from mirage_hf.tune import space
from mirage_hf.verify.case_inputs import copied

pytestmark = pytest.mark.gpu

LITE = dict(heads=16, latent=512, nope=128, rope=64, q_rank=None, ropes="pairs")
V2 = LITE | dict(heads=128, q_rank=1536)
V3 = V2 | dict(ropes="parted pairs")
CASES = [
    (LITE, 1, torch.bfloat16, LONG_SLOTS),
    (LITE, 16, torch.bfloat16, LONG_SLOTS),
    (LITE, 3, torch.float16, 1000),
    (V2, 1, torch.bfloat16, LONG_SLOTS),
    (V3, 1, torch.bfloat16, LONG_SLOTS),
    (V3, 4, torch.float16, 513),
]
NAMES = [
    f"{s['heads']} heads {s['ropes']} x{rows} {str(dtype)[6:]} {slots} slots"
    for s, rows, dtype, slots in CASES
]


def inputs_of(g: KernelGraph, slots: int) -> list[torch.Tensor]:
    """Return unit normal numbers, and weights of unit gain.

    Rows see all, most, some and one slot of the cache.
    """
    generator, found = torch.Generator().manual_seed(0), []
    bounds = {
        "lo": [0, 3, slots // 2, slots - 3],
        "end": [slots, slots - 1, slots // 2 + 70, slots - 2],
        "slot": [slots - 1, 5, 0, 100],
    }
    for t in g.inputs:
        if t.name in bounds:
            found.append(
                torch.tensor([bounds[t.name][n % 4] for n in range(t.dims[0])], dtype=torch.int32)
                .view(t.dims)
                .cuda()
            )
            continue
        x = torch.randn(t.dims, generator=generator) * (
            t.dims[2] ** -0.5 if t.name.startswith("w_") else 1.0
        )
        size = 1 + sum((d - 1) * s for d, s in zip(t.dims, t.strides, strict=True))
        view = torch.zeros(size, dtype=t.dtype, device="cuda").as_strided(t.dims, t.strides)
        found.append(view.copy_(x))
    return found


def wrong(
    g: KernelGraph, slots: int, tolerance: float, graphs: int = 2, schedules: int = 3
) -> tuple[list[str], int]:
    """Return what is wrong with the kernels of some µGraphs, and how many ran.

    µGraphs that keep latents as they are come first. Some schedules are run.
    """
    appending = split_appends(g)
    found = [
        f.ugraph for f in search(appending.graph if appending else g, SearchOptions(max_width=1))[0]
    ]
    found = [
        appending.join(u) if appending else u
        for u in sorted(found, key=lambda u: u.num_kernels != 3)
    ]
    found = [u for u in found if not space.obstacle(u.block_ops)][:graphs]
    inputs = inputs_of(g, slots)
    want = run_kernel_graph(
        g, [x.double() if x.is_floating_point() else x for x in copied(inputs)], torch.float64
    )
    off, ran = [], 0
    for n, u in enumerate(found):
        ranked = [space.schedules(op, limit=24) for op in place_kernels(u)]
        for k in range(0, min(map(len, ranked)), max(1, min(map(len, ranked)) // schedules)):
            chosen = [r[k] for r in ranked]
            try:
                program = triton.generate(u, chosen)
                got = compiler.load(program.source, program.digest).run(copied(inputs))
            except (errors.CodegenError, OutOfResources):
                continue
            ran += 1
            far = [
                float((y.double() - w).abs().max() / w.abs().max())
                for y, w in zip(got, want, strict=True)
            ]
            if not max(far) < tolerance:
                off.append(
                    f"µGraph {n} ({u.num_kernels} kernels), {[*map(str, chosen)]}: outputs off by "
                    f"{far} of their size"
                )
    return off, ran


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_attention(case):
    sizes, rows, dtype, slots = case
    g = MLA.block(**sizes, value=128, scale=192**-0.5, dtype=dtype, slots=slots).program(rows)
    off, ran = wrong(g, slots, 3e-2 if dtype is torch.bfloat16 else 5e-3)
    assert ran > 1 and not off, f"{case}: of {ran}: " + "\n".join(off)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_append(case):
    sizes, rows, dtype, slots = case
    g = MLA_APPEND.block(
        **sizes,
        eps=1e-6,
        dtype=dtype,
        rope_dtype=torch.float32 if sizes["ropes"] == "pairs" else dtype,
        slots=slots,
    ).program(rows)
    off, ran = wrong(g, slots, 2e-2 if dtype is torch.bfloat16 else 3e-3)
    assert ran > 1 and not off, f"{case}: of {ran}: " + "\n".join(off)
