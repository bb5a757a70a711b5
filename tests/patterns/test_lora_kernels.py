"""Blocks with PEFT adapters: generated kernels against torch in float64.

The last tests are about the memory of inputs whose elements overlap.
"""

from __future__ import annotations

import pytest
import torch

from mirage_hf.graph.strided import copied, flat, laid_out, reach
from tests.helpers import triton_interpreter

INTERPRETED = """
import json
import torch
from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.pipeline.choose import promising
from mirage_hf.patterns import GATED_MLP, LINEAR_RESIDUAL, RMS_NORM_LINEAR
from mirage_hf.patterns.lora import LORA_DOWN, BlockAdapters
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.gpus import H200
from mirage_hf.tune.ranking import rank_by_estimate
from mirage_hf.pipeline.search_and_verify import search_and_verify
from mirage_hf.verify.numeric_cases import Case
from mirage_hf.verify.case_inputs import copied, make_inputs

half, single = torch.float16, torch.float32
packed = RMS_NORM_LINEAR.block(
    k=96,
    n=(40, 24, 24),
    bias=True,
    eps=1e-5,
    dtype=half,
    lora=BlockAdapters((3, 0, 3), single, True),
)
blocks = {
    "down": LORA_DOWN.block(k=96, r=(3, 5), eps=1e-5, dtype=half, adapter_dtype=single),
    "packed": packed,
    "apart": GATED_MLP.block(
        k=64,
        n=40,
        activation="silu",
        norm=True,
        bias=False,
        eps=1e-5,
        dtype=half,
        lora=BlockAdapters((4, 7), half),
    ),
    "one": LINEAR_RESIDUAL.block(
        k=64, n=40, bias=False, dtype=half, lora=BlockAdapters((4,), single)
    ),
}
far = {}
for name, block in blocks.items():
    for rows in (1, 3, 17):
        g = block.program(rows)
        ugraphs = [
            c.ugraph
            for c in promising(search_and_verify(g, SearchOptions(time_limit=20)).candidates)
        ][:2]
        tried = [c for c in rank_by_estimate(ugraphs, H200, 6) if not c.is_library]
        picked = {any(s.mma for s in c.schedules): c for c in reversed(tried)}
        inputs = make_inputs(g, Case("random"), seed=rows)
        want = run_kernel_graph(g, [x.double() for x in inputs], torch.float64)[0]
        for mma, c in picked.items():
            p = triton.generate(c.ugraph, c.schedules)
            got = compiler.load(p.source, p.digest).run(copied(inputs))[0]
            far[f"{name} {rows} {'mma' if mma else 'fma'}"] = float(
                (got.double() - want).abs().max() / want.abs().max()
            )
print(json.dumps(far))
"""


def test_kernels_add_what_adapters_add() -> None:
    far = triton_interpreter.run(INTERPRETED)
    assert {name.split()[0] for name in far} == {"down", "packed", "apart", "one"} and len(
        far
    ) >= 12
    assert max(far.values()) < 4e-3, far


@pytest.mark.parametrize(
    ("dims", "strides"),
    [
        ((2, 3), (3, 1)),
        ((2, 3), (8, 1)),
        ((2, 3, 4), (7, 1, 0)),
        ((5,), (0,)),
        ((3, 2), (1, 3)),
        ((2, 0), (1, 1)),
    ],
)
def test_memory_of_any_strides(dims: tuple[int, ...], strides: tuple[int, ...]) -> None:
    x = torch.randn([1 if s == 0 else n for n, s in zip(dims, strides, strict=True)]).expand(dims)
    y = laid_out(x, strides, torch.float64, "cpu")
    assert (
        y.shape == dims and torch.equal(y, x.double()) and (y.numel() == 0 or y.stride() == strides)
    )
    z = copied(y)
    assert torch.equal(z, y) and z.stride() == y.stride()
    assert flat(z).numel() == reach(dims, strides) and (
        z.numel() == 0 or z.data_ptr() != y.data_ptr()
    )
