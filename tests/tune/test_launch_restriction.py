"""Restrictions of launches by the user."""

from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.tune.launch_restriction import LaunchRestriction
from tests.helpers import kernel_cases


def test_restrictions_count_parts_as_blocks():
    op = kernel_cases.online_attention(8, 1, 4096, 128, 4).block_ops[0]
    kept = LaunchRestriction.of([(8, 4)], [(128,)], [16]).schedules(op)
    assert kept and all(
        plan_kernel(op, s).grid == 32 and plan_kernel(op, s).tiling.trips("s") == 16 for s in kept
    )
    assert not LaunchRestriction.of([(8, 2)], None, None).schedules(op)
