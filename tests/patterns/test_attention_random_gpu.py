"""Random configurations of decoding attention on a GPU.

They are compared with SDPA in the same dtype, and with float64.
"""

from __future__ import annotations

import random

import pytest
from triton.runtime.errors import OutOfResources

from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from tests.helpers import attention_configs as configs
from tests.helpers.tolerances import as_close_as

pytestmark = pytest.mark.gpu

RANDOM, OF_A_KIND = 500, 10
"""Random configurations, each with a schedule of its own and three draws of inputs and bounds.

Neighbours share what is searched.
"""
REFERENCE_SLOTS = 128


@pytest.mark.parametrize("seed", range(RANDOM))
def test_random_configurations_are_as_close_to_float64_as_sdpa(seed):
    draw = random.Random(seed)
    k = configs.kind(seed // OF_A_KIND, configs.LARGE)
    each = k.rows * k["kv_heads"] * k["group"] * k["head_dim"]
    slots = draw.choice([n for n in configs.LARGE["slots"] if n * each <= configs.MOST_ELEMENTS])
    for _ in range(8):
        u, schedules = configs.chosen(k, slots, draw, REFERENCE_SLOTS, limit=32)
        what = f"seed {seed} ({k}) slots {slots} {u.num_kernels} kernels {[*map(str, schedules)]}"
        program = triton.generate(u, schedules)
        run, ran = compiler.load(program.source, program.digest).run, 0
        try:
            for _ in range(3):
                inputs = configs.inputs_of(k, u.program, draw, "cuda")
                stock, exact = configs.both(k, u.program, inputs)
                after = configs.copied(inputs)
                got = run(after)
                ran += 1
                named = zip(u.program.inputs, inputs, strict=True)
                bounds = {
                    t.name: x.flatten().tolist()[:8] for t, x in named if t.name in ("lo", "slot")
                }
                as_close_as(got, stock, exact, f"{what} {bounds}")
                assert configs.untouched(k, u.program, inputs, after), (
                    f"{what} {bounds}: a slot that is not appended to has changed"
                )
            return
        except OutOfResources:  # a schedule may need more shared memory than there is
            assert not ran, f"{what}: out of resources after {ran} runs"
    pytest.fail(f"{what}: no schedule fits into shared memory")
