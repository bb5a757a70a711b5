"""The cost model: kernels that were measured as fast rank high."""

from pathlib import Path

import pytest
import torch

from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.codegen.plan.stages import running_maxima
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.gpus import H200
from mirage_hf.graph.block import Role
from mirage_hf.graph.kernel import new_kernel_graph
from mirage_hf.ops.dtypes import E2M1
from mirage_hf.search.engine import search
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.tune import cost, space
from mirage_hf.tune.footprint import footprint
from tests.helpers import coded_programs, kernel_cases
from tests.helpers.machine_code import instructions_of_a_thread
from tests.helpers.schedule_cases import SPACES


def test_estimates_count_parts():
    """More splits mean more blocks, shorter loops, and more partial results to write."""
    few, many = (
        kernel_cases.online_attention(8, 1, 4096, 128, parts).block_ops[0] for parts in (4, 16)
    )
    s = Schedule({"h": 1, "m": 1, "p": 1, "s": 64, "d": 128})
    assert (
        plan_kernel(few, s).tiling.trips("s") == 4 * plan_kernel(many, s).tiling.trips("s") == 16
        and 4 * plan_kernel(few, s).grid == plan_kernel(many, s).grid == 128
    )
    one, other = cost.estimate(plan_kernel(few, s)), cost.estimate(plan_kernel(many, s))
    assert other.us < one.us and other.bytes - one.bytes == 12 * 8 * (128 + 2) * 4
    assert plan_kernel(few, s).tiling.is_streamed(few.block.inputs[1]) and not plan_kernel(
        few, s
    ).tiling.is_streamed(few.block.inputs[0])


def test_bytes_that_tensor_cores_multiply_need_many_warps():
    found = search(coded_programs.int8_linear(16, 4096, 14336), SearchOptions(threads=1))[0]
    (op,) = place_kernels(next(r.ugraph for r in found if r.ugraph.num_kernels == 1))
    few, many = (
        Schedule({"m": 16, "n": 128, "k": 256}, mma=True, num_warps=warps, num_stages=3)
        for warps in (4, 8)
    )
    estimates = [cost.estimate(plan_kernel(op, s)).us for s in (few, many)]
    assert estimates[1] < 0.9 * estimates[0]


def test_a_sum_of_one_element_in_a_step_takes_no_shared_memory():
    """A product of float8 for each block of 128 columns: one step of the loop has one of them.

    So all 128 rows of a prompt fit into a tile, and codes are decoded once.
    """
    found = search(coded_programs.fp8_linear(128, 14336, 4096), SearchOptions(threads=1))[0]
    ops = [place_kernels(r.ugraph)[0] for r in found if r.ugraph.num_kernels == 1]
    op = next(op for op in ops if [a.name for a in op.block.named(Role.LOOP)] == ["k"])
    tiles = {"k": 1, "m": 128, "n": 1, "o": 128, "r": 128}
    schedule = Schedule(tiles, mma=True, num_warps=8, num_stages=4, prefetch_steps=2)
    plan = plan_kernel(op, schedule)
    assert footprint(plan).exchanged == 0
    assert cost.estimate(plan).shared <= H200.shared_bytes
    listed = [s for s in space.schedules(op) if s.mma]
    assert listed[0].tiles["m"] == 128


#: Lines of µGraphs of a linear in groups: scales multiply the sum of a group, or each code.
SCALED_SUMS, SUMS_OF_R = "[n, k] = mul(", "[n, r] = accumulate sum("


@pytest.mark.parametrize("table", [None, E2M1])
@pytest.mark.parametrize(
    "form, schedule",
    [
        (SCALED_SUMS, Schedule({"n": 16, "k": 32, "r": 32})),
        (SCALED_SUMS, Schedule({"n": 4, "k": 32, "r": 32}, num_warps=1)),
        # two threads decode the same word
        (SCALED_SUMS, Schedule({"n": 2, "k": 16, "r": 32}, num_warps=8, num_stages=3)),
        # threads exchange sums of r
        (SUMS_OF_R, Schedule({"n": 8, "k": 16, "r": 32}, reduce_after_loop=False)),
    ],
    ids=["many codes", "one warp", "few codes", "exchanges in each step"],
)
def test_estimates_count_the_instructions_of_packed_codes(form, schedule, table, tmp_path):
    pytest.importorskip("triton")
    from triton import knobs

    if not Path(knobs.nvidia.nvdisasm.path).exists():
        pytest.skip("needs nvdisasm")
    groups, rows = 128, 4096
    g = new_kernel_graph()
    x = g.new_input((1, groups * 32), "bfloat16")
    codes = g.new_input((rows, groups, 32), "uint4", constant=True)
    scales = g.new_input((rows, groups, 1), "bfloat16", constant=True)
    read = g.cast(codes, "bfloat16")
    numbers = g.sub(read, 8.0) if table is None else g.lookup(read, values=table)
    weight = g.reshape(g.mul(g.cast(numbers, "bfloat16"), scales), (rows, groups * 32))
    g.mark_output(g.matmul(x, g.permute(weight, (1, 0))))
    found, _ = search(g, SearchOptions(threads=1))
    ugraph = next(
        r.ugraph for r in found if r.ugraph.num_kernels == 1 and form in str(r.ugraph.kernels)
    )
    assert [a.name for a in ugraph.block_ops[0].block.axes] == ["n", "r", "k"]
    plan = plan_kernel(place_kernels(ugraph)[0], schedule)
    lanes = 32 * schedule.num_warps * plan.grid
    executed = instructions_of_a_thread(ugraph, schedule, plan.tiling.trips("k"), tmp_path)
    assert cost.estimate(plan).instructions / lanes == pytest.approx(executed, rel=0.3)


@pytest.mark.parametrize("columns, loads", [(32, 1), (128, 4)])
def test_a_tile_in_several_tensors_is_held_once_for_each(columns, loads):
    """Triton copies the tile from each tensor, and masks what lies in another one."""
    pytest.importorskip("triton")
    g = new_kernel_graph()
    x = g.new_input((2, 512), "bfloat16")
    sizes = (256, 128, 32, 32)
    joined = [g.new_input((512, n), "bfloat16", strides=(1, 512), constant=True) for n in sizes]
    g.mark_output(g.matmul(x, g.concat(joined, 1)))
    found, _ = search(g, SearchOptions(threads=1))
    ugraph = next(r.ugraph for r in found if r.ugraph.num_kernels == 1)
    (op,) = place_kernels(ugraph)
    schedule = Schedule({"k": 128, "m": 8, "n": columns}, mma=True, num_stages=2)
    (compiled,) = compiler.ahead_of_time(triton.generate(ugraph, [schedule]), 90)
    weights = 128 * columns * 2 * loads
    assert weights < cost.estimate(plan_kernel(op, schedule)).shared == compiled.shared


def test_shifted_sums_and_their_maxima_are_not_lazy():
    op = kernel_cases.online_attention(2, 4, 100, 32).block_ops[0]
    planned = plan_kernel(op, Schedule({"h": 1, "m": 4, "s": 32, "d": 32}, reduce_after_loop=True))
    stage = op.block.stages[0]
    assert not any(planned.is_reduced_after_loop(a) for a in stage.accumulators) and set(
        running_maxima(stage)
    ) == {"top"}


def test_measured_winners_rank_high():
    """FACTS: 8 rows of W, 1024 of K, 4 warps won for one row of 4096 to 4096.

    16 rows want tensor cores.
    """
    op = SPACES["norm linear"].block_ops[0]
    winner = Schedule({"m": 1, "n": 8, "k": 1024}, num_warps=4, prefetch_steps=1)
    best, won = (cost.estimate(plan_kernel(op, s)).us for s in (space.default_schedule(op), winner))
    assert won < 1.15 * best, (won, best)
    assert all(s.mma for s in space.schedules(SPACES["16 rows"].block_ops[0], limit=10))


#: By (k, n, warps, stages, cooperating blocks): µs on an H200. The kernel is RMSNorm + Linear, 4096
#: to 6144, of 16 rows, and multiplies γ with the weights.
MEASURED = {
    (256, 64, 4, 4, 1): 21.3,
    (128, 64, 4, 4, 1): 21.4,
    (64, 64, 4, 11, 1): 34.5,
    (128, 128, 8, 4, 2): 21.4,
    (64, 128, 8, 12, 2): 27.2,
    (256, 32, 2, 3, 2): 30.0,
}


def test_kernels_whose_steps_are_long_are_expected_to_be_slow():
    """By bytes alone all of them would take 15 µs, and would be tried before the two that do."""
    g = new_kernel_graph()
    g.new_input((16, 4096), torch.float16)
    g.new_input((1, 4096), torch.float16, constant=True)
    g.new_input((4096, 6144), torch.float16, (1, 4096), constant=True)
    b = kernel_cases.Block({"m": 16, "n": 6144}, {"k": 4096})
    for name, axes, source in (("x", "mk", 0), ("gamma", "1k", 1), ("w", "kn", 2)):
        b.load(name, axes, source)
    loop = b.stage(loop=True)
    loop.accumulate("squares", loop.op("square", "mul", "x", "x"))
    loop.accumulate("sums", loop.op("product", "mul", "x", loop.op("scaled", "mul", "gamma", "w")))
    end = b.stage()
    b.store(
        end.op("y", "mul", "sums", kernel_cases.scale(end, "squares", 4096)), "mn", torch.float16
    )
    (op,) = kernel_cases.ugraph(g, b).block_ops
    expected = {
        c: cost.estimate(
            plan_kernel(
                op,
                Schedule(
                    {"m": 16, "n": n, "k": k},
                    mma=True,
                    num_warps=w,
                    num_stages=s,
                    cooperating_blocks=p,
                ),
            )
        ).us
        for c in MEASURED
        for k, n, w, s, p in (c,)
    }
    assert all(abs(expected[c] / us - 1) < 0.25 for c, us in MEASURED.items()), [
        (c, expected[c], us) for c, us in MEASURED.items()
    ]


def test_scores_by_multiply_adds_and_products_held_whole_are_expected_to_be_slow():
    """Measured on an H200.

    Attention of 4 rows over 4096 keys by multiply-adds took 6 to 13 times as long as on tensor
    cores. Products that hold 2048 × 32 weights in the registers of 4 warps took 112 µs instead of
    6.
    """
    (op,) = place_kernels(kernel_cases.online_attention(64, 4, 4096, 64))
    tiles = dict(h=1, s=64, d=64)
    by_hand, cores = (
        cost.estimate(
            plan_kernel(op, Schedule(tiles | {"m": m}, mma, num_warps=8, num_stages=3))
        ).us
        for m, mma in ((4, False), (8, True))
    )
    assert by_hand > 3 * cores, (by_hand, cores)
    (op,) = place_kernels(kernel_cases.rms_norm_linear(8, 2048, 3072))
    whole, walked = (
        cost.estimate(
            plan_kernel(op, Schedule({"m": 8, "n": 32, "k": k}, True, num_stages=3))
        ).registers
        for k in (2048, 256)
    )
    assert walked < space.REGISTER_BUDGET < 2 * space.REGISTER_BUDGET < whole
    assert all(
        s.num_stages == 1 for s in space.schedules(op, limit=10**6) if s.tiles["k"] == 2048
    )  # all cases use the same kernel


@pytest.mark.parametrize("group, share", [(32, 0.45), (64, 0.6), (128, 0.75)])
def test_the_next_step_reads_the_rest_of_a_line(group, share):
    """A step on tensor cores reads one group of each row: 16, 32 or 64 bytes."""
    program = coded_programs.int4_linear(16, 1024, 4096, group)
    found, _ = search(program, SearchOptions(threads=1))
    tiles = {"m": 16, "n": 64, "k": 1, "r": group}
    ops = [op for r in found for op in r.ugraph.block_ops]
    walked = [op for op in ops if {a.name for a in op.block.named(Role.LOOP)} == {"k"}]
    (op, *_) = (op for op in walked if {a.name for a in op.block.axes} == {*tiles})
    shares = [
        footprint(plan_kernel(op, Schedule(tiles | {"k": steps}, mma=True))).contiguity
        for steps in (1, 2, 4)
    ]
    assert share < shares[0] < 1 and shares == sorted(shares)


def test_arithmetic_on_codes_lasts_until_the_fullest_sm_is_done():
    """144 blocks keep 12 of 132 SMs busy twice as long as the others, 576 are spread evenly."""
    found, _ = search(coded_programs.int4_linear(1, 9216, 4096, 32), SearchOptions(threads=1))
    (op,) = next(
        r.ugraph.block_ops
        for r in found
        if r.ugraph.num_kernels == 1 and SCALED_SUMS in str(r.ugraph.kernels)
    )
    few, many = (
        cost.estimate(plan_kernel(op, Schedule({"n": n, "k": 16, "r": 32}))) for n in (64, 16)
    )
    assert few.instructions < 0.8 * many.instructions and many.us < 0.95 * few.us
