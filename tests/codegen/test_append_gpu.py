"""Attention that appends to caches in place, on a GPU.

Random configurations are compared with SDPA, and captured graphs are replayed.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from triton.runtime.errors import OutOfResources

from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.graph import symbolic
from mirage_hf.ops import table
from mirage_hf.patterns import ATTENTION
from mirage_hf.tune import space
from tests.codegen import test_append
from tests.helpers.tolerances import as_close_as

pytestmark = pytest.mark.gpu

SHAPES = {
    "llama-1b": dict(kv_heads=8, group=4, head_dim=64, norm=""),
    "qwen3": dict(kv_heads=8, group=2, head_dim=128, norm="rms"),
}
RANDOM = 50
"""Random configurations, each at two schedules and five pairs of bounds."""


def program_of(shape: dict, rows: int, slots: int, dtype: torch.dtype):
    return ATTENTION.block(**shape, scale=shape["head_dim"] ** -0.5, eps=1e-6, dtype=dtype).program(
        rows, slots=slots
    )


def inputs_of(g, lo: int, slot: int) -> list[torch.Tensor]:
    """Return random inputs.

    The first row has these bounds, the others see everything before `slot`.
    """
    torch.manual_seed(lo + slot)
    inputs = []
    for t in g.inputs:
        x = torch.empty_strided(t.dims, t.strides, dtype=t.dtype, device="cuda")
        inputs.append(
            x.normal_() if t.dtype.is_floating_point else x.fill_(lo if t.name == "lo" else slot)
        )
        if t.name == "lo":
            inputs[-1].view(-1)[1:] = 0
    return inputs


def by_sdpa(g, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return what torch gives in the dtype of its inputs.

    These are norms, RoPE, then SDPA over the keys that each row sees.
    """
    q, k, v, cos, sin, keys, values, lo, slot, *norms = inputs
    scale, keys, values = q.shape[-1] ** -0.5, keys.clone(), values.clone()
    if norms:
        q, k = (table.lookup("rms_norm").oracle(x, w) for x, w in zip((q, k), norms, strict=True))
    q, k = (table.lookup("rope").oracle(x, cos, sin) for x in (q, k))
    rows = []
    for b in range(len(q)):
        first, at = int(lo[b]), int(slot[b])
        seen = [torch.cat([x[b, :, first:at], y[b]], 1)[None] for x, y in ((keys, k), (values, v))]
        rows.append(F.scaled_dot_product_attention(q[b][None], *seen, scale=scale))
        keys[b, :, at], values[b, :, at] = k[b, :, 0], v[b, :, 0]
    return [torch.cat(rows), keys, values]


@pytest.mark.parametrize("seed", range(RANDOM))
def test_random_configurations_are_as_close_to_float64_as_sdpa(seed):
    draw = random.Random(seed)
    shape = dict(
        kv_heads=draw.choice((1, 2, 3, 8)),
        group=draw.choice((1, 2, 4, 5, 8)),
        head_dim=draw.choice((64, 80, 96, 128, 192, 256)),
        norm=draw.choice(("", "rms")),
    )
    dtype, rows = draw.choice((torch.float16, torch.bfloat16)), draw.choice((1, 2, 3, 8, 16))
    slots = draw.choice((64, 130, 300, 1024, 4096))
    g = program_of(shape, rows, slots, dtype)
    found = [
        (c, symbolic.for_program(c.ugraph, g))
        for c in test_append.searched(program_of(shape, rows, 64, dtype)).candidates
    ]
    usable = [(c, u) for c, u in found if not space.obstacle(place_kernels(u))]
    c, u = (
        usable[0]
        if draw.random() < 0.5
        else next(((c, u) for c, u in usable if u.num_kernels == 2), usable[0])
    )
    ranked = [
        [s for s in space.schedules(op, limit=32) if c.allows(s.mma)] for op in place_kernels(u)
    ]
    tried = 0
    for n in (0, draw.randrange(min(map(len, ranked)))):
        program = triton.generate(u, [r[n] for r in ranked])
        try:
            run = compiler.load(program.source, program.digest).run
            for lo, slot in (
                (0, 0),
                (0, 1),
                (5, slots // 2),
                (slots // 3, slots - 1),
                (slots // 2, slots // 2),
            ):
                inputs = inputs_of(g, lo, slot)
                stock = by_sdpa(g, inputs)
                exact = by_sdpa(g, [x.double() if x.is_floating_point() else x for x in inputs])
                got = run(inputs)
                assert got[1].data_ptr() == inputs[5].data_ptr()
                as_close_as(
                    got,
                    stock,
                    exact,
                    f"{shape} {rows} {slots} {lo} {slot} {[str(r[n]) for r in ranked]}",
                )
                tried += 1
        except OutOfResources:
            continue
    assert tried


@pytest.mark.parametrize("name", ["llama-1b", "qwen3"])
def test_a_captured_graph_stays_right_while_lengths_grow_and_rows_change(name):
    """Nothing is captured again: each row has bounds and slots, which are read on the device."""
    rows, slots = 4, 300
    small = program_of(SHAPES[name], rows, 64, torch.float16)
    u = symbolic.for_program(
        test_append.searched(small).candidates[0].ugraph,
        program_of(SHAPES[name], rows, slots, torch.float16),
    )
    g, program = u.program, triton.generate(u)
    run = compiler.load(program.source, program.digest).run
    inputs = inputs_of(g, 0, 0)
    names = [t.name for t in g.inputs]
    lo, slot, keys = (inputs[names.index(n)] for n in ("lo", "slot", "keys"))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = run(inputs)[0]
    torch.cuda.current_stream().wait_stream(stream)
    generator = torch.Generator().manual_seed(0)
    lengths = [0, 10, 100, 250]
    for step in range(120):
        if step % 30 == 29:  # one sequence has ended, and another takes its place
            lengths[step // 30] = int(torch.randint(0, 200, (1,), generator=generator))
        starts = [n // 3 if step % 2 else 0 for n in lengths]
        slot.copy_(torch.tensor(lengths).view(slot.shape))
        lo.copy_(torch.tensor(starts).view(lo.shape))
        for x, n in zip(inputs, names, strict=True):
            if n in ("q", "new_keys", "new_values"):
                x.normal_()
        before = [x.clone() for x in inputs]
        graph.replay()
        stock = by_sdpa(g, before)
        want = by_sdpa(g, [x.double() if x.is_floating_point() else x for x in before])
        as_close_as([out, keys], stock[:2], want[:2], f"{name} step {step}")
        lengths = [min(n + 1, slots - 1) for n in lengths]
