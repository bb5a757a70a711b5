"""Codes that are scaled before tensor cores sum several groups: numbers, text, instructions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.errors import Rejected
from mirage_hf.graph.block import Role
from mirage_hf.graph.grouped_products import grouped_products
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.pipeline.search_and_verify import search_and_verify
from mirage_hf.search.engine import search
from mirage_hf.search.scaled_codes import sums_groups_of_codes, with_scaled_codes
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.tune import cost, space
from mirage_hf.verify.field_proof import prove
from tests.helpers import scaled_programs
from tests.helpers.coded_programs import int4_linear, int4_rows
from tests.helpers.machine_code import instructions_of_a_thread
from tests.helpers.scaled_programs import check_errors, check_mutants
from tests.helpers.triton_interpreter import run

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def interpreted() -> dict:
    """Return what Triton's interpreter computed."""
    return run("from tests.helpers import scaled_programs; scaled_programs.main()")


@pytest.mark.parametrize("name", scaled_programs.PROGRAMS)
def test_kernels_are_as_close_to_float64_as_torch(interpreted, name):
    check_errors(interpreted[name])


def test_wrong_kernels_are_far_from_float64(interpreted):
    check_mutants(interpreted["mutants"], scaled_programs.CHANGES)


def scaled_ugraph(rows: int = 16, group: int = 32, **options) -> UGraph:
    return scaled_programs.scaled_form(int4_linear(rows, 64, 512, group, **options))


def kernel_text(ugraph: UGraph, groups: int, **options) -> str:
    """Return the text of a kernel that takes several groups in a step."""
    (op,) = place_kernels(ugraph)
    tiles = {a.name: {"k": groups, "n": 32}.get(a.name, a.size) for a in op.block.axes}
    schedule = Schedule(tiles, mma=True, num_warps=1, num_stages=3, **options)
    return triton.program_source(ugraph, [schedule]).partition("def mirage_0")[2]


@pytest.mark.parametrize("weights_first", [True, False])
def test_one_product_sums_over_several_groups(weights_first):
    text = kernel_text(scaled_ugraph(), 4, weights_first=weights_first)
    (dot,) = [line for line in text.splitlines() if "tl.dot(" in line]
    assert "[32, 128]" in dot or "[128, 32]" in dot  # four groups of 32 codes
    assert dot.endswith(", acc5)") or ", acc" in dot
    assert "tl.sum(" not in text.partition("tl.store(")[0]
    scaled = next(line for line in text.splitlines() if "* scales" in line)
    assert text.index(scaled) < text.index(dot)
    assert "scales = tl.load(" in text and ".to(tl.float32)" not in text  # it stays in 16 bits


def test_one_group_in_a_step_is_added_without_a_scale_behind_the_product():
    text = kernel_text(scaled_ugraph(group=128), 1)
    (dot,) = [line for line in text.splitlines() if "tl.dot(" in line]
    assert "[:, None]" not in dot and "tl.sum(" not in text.partition("tl.store(")[0]


@pytest.mark.parametrize("rows, group, most", [(16, 32, 3.5), (16, 64, 3.5), (128, 32, 5.0)])
def test_codes_take_few_instructions(rows, group, most, tmp_path):
    """With the scale after the sum of each group, a code takes 8.5 with 16 rows."""
    from triton import knobs

    if not Path(knobs.nvidia.nvdisasm.path).exists():
        pytest.skip("needs nvdisasm")
    ugraph, schedule, codes = scaled_programs.instructions_of(rows, group)
    executed = instructions_of_a_thread(ugraph, schedule, 32, tmp_path)
    assert executed / codes < most
    plan = plan_kernel(place_kernels(ugraph)[0], schedule)
    lanes = 32 * schedule.num_warps * plan.grid
    assert cost.estimate(plan).instructions / lanes == pytest.approx(executed, rel=0.3)


def test_a_mutant_without_its_scale_is_refuted():
    ugraph = scaled_ugraph()
    (op,) = ugraph.block_ops
    (stage,) = op.block.stages
    (factor,) = [x for x in stage.body if "scales" in x.args]
    other = next(a for a in factor.args if a != "scales")
    body = tuple(
        replace(x, args=tuple(other if a == factor.out else a for a in x.args))
        for x in stage.body
        if x is not factor
    )
    mutant = ugraph.with_blocks([replace(op.block, stages=(replace(stage, body=body),))])
    assert isinstance(prove(mutant), Rejected)
    assert not isinstance(prove(ugraph), Rejected)


@pytest.mark.parametrize(
    "options", [dict(), dict(norm=True), dict(zeros=True), dict(zeros=True, norm=True)]
)
def test_a_form_with_scaled_codes_is_kept_and_comes_first(options):
    """It is kept even if the search ranks it low, and its schedules take several groups."""
    g = int4_linear(16, 4096, 4096, 32, dtype="bfloat16", **options)
    kept = [c.ugraph for c in search_and_verify(g, SearchOptions(threads=1)).candidates]
    ops = [place_kernels(u)[0] for u in kept if u.num_kernels == 1 and sums_groups_of_codes(u)]
    assert ops
    best = [space.schedules(op)[0] for op in ops]
    assert any(s.mma and s.tiles["k"] > 1 for s in best if "k" in s.tiles)


def test_one_row_and_scales_of_rows_keep_their_form():
    for g in (int4_linear(1, 64, 512, 64), int4_rows(16, 32, 256)):
        for c in search_and_verify(g, SearchOptions(threads=1)).candidates:
            assert with_scaled_codes(c.ugraph) is None
            assert not sums_groups_of_codes(c.ugraph)


def test_sums_over_a_group_that_a_loop_adds_up_stay_apart():
    """Such a loop walks the codes of groups. Its sums are not those over groups."""
    found, _ = search(int4_linear(16, 64, 512, 64), SearchOptions(threads=1))
    blocks = [r.ugraph.block_ops[0].block for r in found if r.ugraph.num_kernels == 1]
    walked = [b for b in blocks if [a.name for a in b.named(Role.LOOP)] == ["r"]]
    assert walked
    for block in walked:
        for p in grouped_products(block):
            assert p.contraction.out in block.ops_by_name
