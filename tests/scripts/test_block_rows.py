"""The rows of the benchmark of blocks: programs, targets, and rivals."""

from dataclasses import replace

import pytest
import torch

from mirage_hf.errors import Rejected
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.search.lowering import lower
from mirage_hf.verify.case_inputs import make_inputs
from mirage_hf.verify.numeric_cases import Case
from scripts import bench_blocks, block_rows
from tests.helpers.small_blocks import SMALL


@pytest.mark.parametrize("row", block_rows.ROWS.values(), ids=lambda r: r.name)
def test_every_row_is_a_program_that_can_be_searched(row):
    program = row.program()
    assert not isinstance(lower(program), Rejected)
    assert 0 < row.floor_us(program) < row.target_us
    assert sum(r.whole for r in row.rivals) >= 1 and len({r.name for r in row.rivals}) == len(
        row.rivals
    )


def test_rows_that_read_weights_say_that_they_are_constant():
    counts = {"norm_linear": 1, "gated_mlp": 2, "lora": 3, "mla": 2}
    for row in block_rows.ROWS.values():
        weights = [t for t in row.program().inputs if t.strides and t.strides[-1] != 1]
        wanted = sum(count for name, count in counts.items() if row.block.startswith(name))
        assert all(t.constant for t in weights) and len(weights) == wanted


@pytest.mark.parametrize(
    "row",
    [r for r in block_rows.ROWS.values() if r.rows <= 2 or r.block == "lora_256"],
    ids=lambda r: r.name,
)
def test_rivals_compute_what_the_program_does(row):
    program = row.program(rows=min(row.rows, 2), **SMALL[row.block])
    drawn = make_inputs(program, Case("random"))
    inputs = [x.double() if x.is_floating_point() else x for x in drawn]
    exact = run_kernel_graph(program, inputs, torch.float64)
    for rival in row.rivals:
        if rival.needs:
            assert rival.absent == (f"{rival.needs} is not installed" if rival.absent else "")
            continue
        (entrant,) = bench_blocks.entrants_of(rival, compiled=False)
        got = entrant.run(entrant.prepare(inputs))
        if rival.whole:
            torch.testing.assert_close(got, exact, rtol=1e-9, atol=1e-9)
        assert all(torch.isfinite(y).all() for y in got)


def test_long_rows_ask_for_their_part_of_the_bandwidth_and_are_checked_batch_by_batch(monkeypatch):
    assert len(block_rows.LONG) == 18 and not block_rows.LONG.keys() & block_rows.ROWS.keys()
    assert all(
        row.target_us >= row.floor_us(row.program()) / block_rows.LONG_SHARE
        for row in block_rows.LONG.values()
    )
    row = replace(
        block_rows.LONG["attention_d128_8k:8"],
        rows=3,
        sizes=(("kv_heads", 2), ("keys", 24), ("d", 16)),
    )
    inputs = make_inputs(row.program(), Case("random"))
    (at_once,) = bench_blocks.in_float64(row, inputs)
    monkeypatch.setattr(bench_blocks, "AT_ONCE_BYTES", 0)
    torch.testing.assert_close(bench_blocks.in_float64(row, inputs)[0], at_once)
