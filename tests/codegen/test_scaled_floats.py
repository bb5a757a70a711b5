"""4-bit floats that are scaled before tensor cores sum several groups: numbers, instructions."""

from __future__ import annotations

from pathlib import Path

import pytest

from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.pipeline.search_and_verify import search_and_verify
from mirage_hf.search.scaled_codes import sums_groups_of_codes
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.tune import cost, space
from tests.helpers import small_float_programs
from tests.helpers.machine_code import instructions_of_a_thread
from tests.helpers.scaled_programs import check_errors, check_mutants
from tests.helpers.small_float_programs import mxfp4_experts, mxfp4_linear
from tests.helpers.triton_interpreter import run

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def interpreted() -> dict:
    """Return what Triton's interpreter computed."""
    return run("from tests.helpers import small_float_programs; small_float_programs.main()")


@pytest.mark.parametrize("name", small_float_programs.PROGRAMS)
def test_kernels_are_as_close_to_float64_as_torch(interpreted, name):
    check_errors(interpreted[name])


def test_every_code_times_every_scale_is_exact(interpreted):
    assert interpreted["wrong weights"] == []


def test_wrong_kernels_are_far_from_float64(interpreted):
    check_mutants(interpreted["mutants"], small_float_programs.CHANGES)


def test_codes_take_few_instructions(tmp_path):
    """With the scale after the sum of each group, a code of these experts takes 9."""
    from triton import knobs

    if not Path(knobs.nvidia.nvdisasm.path).exists():
        pytest.skip("needs nvdisasm")
    ugraph, schedule, trips, codes = small_float_programs.instructions_of()
    executed = instructions_of_a_thread(ugraph, schedule, trips, tmp_path)
    assert executed / codes < 4.8
    plan = plan_kernel(place_kernels(ugraph)[0], schedule)
    lanes = 32 * schedule.num_warps * plan.grid
    assert cost.estimate(plan).instructions / lanes == pytest.approx(executed, rel=0.3)


def test_products_keep_subnormal_numbers(tmp_path):
    """2^-126 of 0.5 is a subnormal bfloat16. Instructions with .ftz would make it 0."""
    from mirage_hf.codegen import compile as compiler

    ugraph, schedule, *_ = small_float_programs.instructions_of()
    [compiled] = compiler.ahead_of_time(triton.generate(ugraph, (schedule,)), 90)
    products = [line for line in compiled.ptx.splitlines() if "mul" in line and "bf16" in line]
    assert products and not any("ftz" in line for line in products)
    assert all("mul.bf16x2" in line for line in products)


@pytest.mark.parametrize(
    "make", [lambda: mxfp4_linear(16, 4096, 2880), lambda: mxfp4_experts(16, 2880, 2880)]
)
def test_a_form_with_scaled_floats_is_kept_and_its_schedules_take_several_groups(make):
    """2880 is 90 groups, so the last step of four groups is not full."""
    kept = [c.ugraph for c in search_and_verify(make(), SearchOptions(threads=1)).candidates]
    ops = [place_kernels(u)[0] for u in kept if u.num_kernels == 1 and sums_groups_of_codes(u)]
    assert ops
    best = [space.schedules(op)[0] for op in ops]
    assert any(s.mma and s.tiles.get("k", 1) > 1 for s in best)


def test_halves_have_too_few_powers_of_two():
    """float16 holds no 2^-100, so scales stay after the sums of groups."""
    g = mxfp4_linear(16, 64, 512, dtype="float16")
    for c in search_and_verify(g, SearchOptions(threads=1)).candidates:
        for op in place_kernels(c.ugraph):
            for s in space.schedules(op)[:20] if op.block is not None else ():
                layout = plan_kernel(op, s).layout
                assert not layout.scaled_factors and not layout.code_factors
