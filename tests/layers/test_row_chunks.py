"""Programs that treat every row alike, run in chunks of rows."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.errors import MirageError
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.layers import row_chunks
from mirage_hf.patterns.prompt import PROMPT_ADDED, PROMPT_GATE, PROMPT_NORM, PROMPT_ROTATION
from mirage_hf.pipeline import choose
from mirage_hf.pipeline.search_and_verify import search_and_verify
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.tune import space
from mirage_hf.tune.measure import random_inputs
from tests.helpers import triton_interpreter

DTYPE = torch.float32
OF_NORM: dict[str, Any] = dict(
    k=16, eps=1e-6, dtype=DTYPE, offset=0.0, centred=False, norm_bias=False
)
OF_HEADS: dict[str, Any] = dict(kv_heads=2, group=3, head_dim=32, eps=1e-6, dtype=DTYPE)
BLOCKS = {
    "norm": PROMPT_NORM.block(**OF_NORM),
    "norm, 1 + weight": PROMPT_NORM.block(**OF_NORM | {"dtype": torch.bfloat16, "offset": 1.0}),
    "norm, centred": PROMPT_NORM.block(**OF_NORM | {"centred": True, "norm_bias": True}),
    "added": PROMPT_ADDED.block(**OF_NORM, scale=0.5),
    "gate": PROMPT_GATE.block(n=24, activation="silu", dtype=DTYPE),
    **{
        f"rotation, {norm or 'no norm'}": PROMPT_ROTATION.block(**OF_HEADS, norm=norm)
        for norm in ("", "rms", "full")
    },
    "rotation, layer": PROMPT_ROTATION.block(**OF_HEADS | {"dtype": torch.bfloat16}, norm="layer"),
    "rotation, packed by heads": PROMPT_ROTATION.block(
        **OF_HEADS | {"group": 1}, norm="", packing="heads", rope="pairs", rotary=4
    ),
}


def resolve(program: Any) -> Any:
    return SimpleNamespace(runs_kernel=True, run=lambda inputs: run_kernel_graph(program, inputs))


@pytest.mark.parametrize("rows", [64, 192, 4096 + 64, 3 * 4096 + 2048 + 128])
def test_rows_are_dealt_out_among_few_sizes(rows: int) -> None:
    found = row_chunks.row_chunk_sizes(rows)
    assert (
        sum(found) == rows
        and sorted(found, reverse=True) == found
        and set(found) <= {1 << n for n in range(6, 13)}
    )
    assert all(found.count(size) == 1 for size in set(found) - {row_chunks.MAX_CHUNK_ROWS})


def test_rows_without_a_chunk_are_not_left_out_silently() -> None:
    with pytest.raises(AssertionError, match="the last 36 would be left out"):
        row_chunks.row_chunk_sizes(100)


@pytest.mark.parametrize("name", BLOCKS)
def test_row_chunks_give_the_same_as_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_chunks, "MAX_CHUNK_ROWS", 128)
    block, asked = BLOCKS[name], []
    kernel = row_chunks.RowChunks(
        block,
        torch.device("cpu"),
        lambda program: asked.append(program.inputs[0].dims[0]) or resolve(program),
    )
    for rows in (64, 128, 64 + 2 * 128):
        whole = block.program(rows)
        inputs = random_inputs(whole, "cpu", seed=rows)
        row_chunks.prepare_row_chunks([kernel], rows)
        got = kernel(inputs)
        for y, x in zip(got, run_kernel_graph(whole, inputs), strict=True):
            assert y.shape == x.shape and torch.allclose(y, x, atol=16 * torch.finfo(x.dtype).eps)
    assert sorted(asked) == [64, 128]  # each is made once


@pytest.mark.parametrize("rows, chunks", [(64, [64]), (100, [64] * 2), (300, [128] * 3)])
def test_chunks_that_overlap_give_the_same_as_the_whole(rows: int, chunks: list[int]) -> None:
    ran: list[int] = []

    def counting(program: Any) -> Any:
        size = program.inputs[0].dims[0]
        run = lambda inputs: ran.append(size) or run_kernel_graph(program, inputs)  # noqa: E731
        return SimpleNamespace(runs_kernel=True, run=run)

    block = BLOCKS["norm"]
    kernel = row_chunks.RowChunks(block, torch.device("cpu"), counting)
    row_chunks.prepare_chunk_sizes([kernel], (64, 128))
    whole = block.program(rows)
    inputs = random_inputs(whole, "cpu")
    assert torch.equal(kernel.with_overlap(inputs)[0], run_kernel_graph(whole, inputs)[0])
    assert ran == chunks


@pytest.mark.parametrize("wrong", [3, 4095])
def test_a_kernel_that_gives_other_numbers_is_refused(
    wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row of thousands is wrong, by as little as the rounding of all rows together."""
    block = PROMPT_NORM.block(**OF_NORM | {"dtype": torch.bfloat16})
    graph = block.program(4096)
    chunks = row_chunks.RowChunks(block, torch.device("cpu"), lambda program: None)  # type: ignore[arg-type, return-value]

    def right(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return run_kernel_graph(graph, inputs)

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        (y,) = right(inputs)
        y[wrong] = 2 * y[wrong]
        return [y]

    sizes = []
    monkeypatch.setattr(
        row_chunks,
        "run_kernel_graph",
        lambda g, x: sizes.append(len(x[0])) or run_kernel_graph(g, x),
    )

    def check(run: Any) -> None:
        kernel: Any = SimpleNamespace(run=run)
        row_chunks._check(row_chunks._ChunkKernel(kernel, graph, (True, False)), chunks)

    check(right)
    assert sizes == [row_chunks.CHECKED_ROWS] * (4096 // row_chunks.CHECKED_ROWS)
    with pytest.raises(
        MirageError, match="x, gamma for 4096 rows gives other numbers than torch: off by 1"
    ):
        check(run)


def test_kernels_are_compiled_together_before_they_are_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[Any] = []

    def found(program: Any) -> Any:
        ugraph = choose.promising(
            search_and_verify(program, SearchOptions(time_limit=20), keep=1).candidates
        )[0].ugraph
        schedules = [space.schedules(op, limit=1)[0] for op in place_kernels(ugraph)]
        entry = SimpleNamespace(generate=lambda: triton.generate(ugraph, schedules))
        return SimpleNamespace(runs_kernel=True, run=None, entry=entry)

    def compiling(programs: Sequence[Any], sm: int) -> Any:
        for p in programs:
            done.append((sm, len(compiler.ahead_of_time(p, sm))))
            yield done[-1]

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(row_chunks, "Compilation", compiling)
    monkeypatch.setattr(
        row_chunks, "_check", lambda made, chunks: done.append(made.graph.inputs[0].dims[0])
    )
    made = [
        row_chunks.RowChunks(BLOCKS[name], torch.device("cuda"), found) for name in ("norm", "gate")
    ]
    row_chunks.prepare_row_chunks(made, 64 + 128)
    row_chunks.prepare_row_chunks(made, 128)
    assert done == [(90, 1)] * 4 + [128, 64] * 2 and all(
        sorted(kernel.made) == [64, 128] for kernel in made
    )


CODE = """
import json, torch
from tests.layers import test_row_chunks
from mirage_hf.pipeline import choose
from mirage_hf.codegen import compile as compiler, triton
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.tune.measure import random_inputs
from mirage_hf.pipeline.search_and_verify import search_and_verify

graph = test_row_chunks.BLOCKS[{name!r}].program(64)
result = search_and_verify(graph, SearchOptions(time_limit=20), keep=1)
found = choose.first_scheduled(choose.promising(result.candidates)[0], True)
program = triton.generate(found, found.schedules)
run = compiler.load(program.source, program.digest).run
inputs = random_inputs(graph, "cpu")
want = run_kernel_graph(graph, inputs)
room = [torch.full((192, *t.dims[1:]), 7.0, dtype=t.dtype) for t in graph.outputs]
got = run(inputs, [y[64:128] for y in room])
far = max(float((y - x).abs().max()) / torch.finfo(x.dtype).eps for y, x in zip(got, want))
outside = all(bool((y[:64] == 7).all() and (y[128:] == 7).all()) for y in room)
kept = outside and all(torch.equal(y[64:128], g) for y, g in zip(room, got))
print(json.dumps([far, kept, len(program.launches)]))
"""


@pytest.mark.parametrize("name", BLOCKS)
def test_generated_row_chunks_write_only_their_rows(name: str) -> None:
    far, kept, launches = triton_interpreter.run(CODE.format(name=name))
    assert far < 64 and kept and launches == 1
