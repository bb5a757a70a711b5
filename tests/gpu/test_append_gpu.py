"""Steps of attention that append to caches in place, on the GPU: every schedule of the space's first, lengths of all kinds."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from triton.runtime.errors import OutOfResources

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
sys.path.insert(0, str(Path(__file__).parents[1]))
import test_append
from tolerances import as_close_as

from mirage_hf import errors
from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.plan import placed
from mirage_hf.graph import symbolic
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.patterns import ATTENTION
from mirage_hf.tune import space

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

SHAPES = {"llama-1b": dict(kv_heads=8, group=4, head_dim=64, norm=False), "llama-8b": dict(kv_heads=8, group=4, head_dim=128, norm=False),
          "qwen3": dict(kv_heads=8, group=2, head_dim=128, norm=True), "one head": dict(kv_heads=1, group=8, head_dim=256, norm=False),
          "odd": dict(kv_heads=3, group=5, head_dim=80, norm=True), "no groups": dict(kv_heads=4, group=1, head_dim=96, norm=False)}


def program_of(name: str, rows: int, slots: int, dtype: torch.dtype):
    return ATTENTION.block(**SHAPES[name], scale=SHAPES[name]["head_dim"] ** -0.5, eps=1e-6, dtype=dtype).program(rows, slots=slots)


def inputs_of(g, lo: int, slot: int) -> list[torch.Tensor]:
    torch.manual_seed(lo + slot)
    inputs = []
    for t in g.inputs:
        x = torch.empty_strided(t.dims, t.strides, dtype=t.dtype, device="cuda")
        inputs.append(x.normal_() if t.dtype.is_floating_point else x.fill_(lo if t.name == "lo" else slot))
    if inputs[7].numel() > 1:
        inputs[7].view(-1)[1:] = 0
    return inputs


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("name", SHAPES)
def test_against_float64(name, rows, dtype):
    """As close to float64 as the same ops in torch, for kernels found at few slots and run at many, schedules of all kinds."""
    small = program_of(name, rows, 64, dtype)
    candidates = test_append.searched(small).candidates
    tried = 0
    for slots in (64, 300, 1024):
        g = program_of(name, rows, slots, dtype)
        for c in [*candidates[:1], *[c for c in candidates if c.ugraph.num_kernels == 2][:1]]:
            u = symbolic.for_program(c.ugraph, g)
            ranked = [[s for s in space.schedules(op, limit=64) if c.allows(s.mma)] for op in placed(u)]
            for n in range(0, min(map(len, ranked)), max(1, min(map(len, ranked)) // 5)):
                program = triton.generate(u, [r[n] for r in ranked])
                try:
                    module = compiler.load(program.source, program.digest)
                    for lo, slot in ((0, 0), (0, 1), (5, slots // 2), (slots // 3, slots - 1), (slots // 2, slots // 2)):
                        inputs = inputs_of(g, lo, slot)
                        wide = [x.double() if x.is_floating_point() else x.clone() for x in inputs]
                        want = run_kernel_graph(g, wide, torch.float64)
                        stock = run_kernel_graph(g, [x.clone() for x in inputs])
                        got = module.run(inputs)
                        assert got[1].data_ptr() == inputs[5].data_ptr()
                        as_close_as(got, stock, want, f"{name} {rows} {slots} {lo} {slot} {[str(r[n]) for r in ranked]}")
                        tried += 1
                except (OutOfResources, errors.CodegenError):
                    continue
    assert tried


@pytest.mark.parametrize("name", ["llama-1b", "qwen3"])
def test_a_captured_graph_stays_right_while_lengths_grow_and_rows_change(name):
    """No recapture: bounds and slots are read on the device, each row has its own."""
    rows, slots = 4, 300
    small = program_of(name, rows, 64, torch.float16)
    u = symbolic.for_program(test_append.searched(small).candidates[0].ugraph, program_of(name, rows, slots, torch.float16))
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
        if step % 30 == 29:  # a sequence has ended, another takes its place
            lengths[step // 30] = int(torch.randint(0, 200, (1,), generator=generator))
        starts = [n // 3 if step % 2 else 0 for n in lengths]
        slot.copy_(torch.tensor(lengths).view(slot.shape))
        lo.copy_(torch.tensor(starts).view(lo.shape))
        for x, n in zip(inputs, names, strict=True):
            if n in ("q", "new_keys", "new_values"):
                x.normal_()
        before = [x.clone() for x in inputs]
        graph.replay()
        stock = run_kernel_graph(g, [x.clone() for x in before])
        want = run_kernel_graph(g, [x.double() if x.is_floating_point() else x for x in before], torch.float64)
        as_close_as([out, keys], stock[:2], want[:2], f"{name} step {step}")
        lengths = [min(n + 1, slots - 1) for n in lengths]
