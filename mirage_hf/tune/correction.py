"""Correct the estimates of kernels that multiply weights and add up, by a model fitted to times.

The model is linear in features of the kernel and its schedule.

`scripts/fit_estimates.py` fits it and writes `correction.json`: the weights, what they were fitted
to, and the error for sizes that were left out of the fit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from operator import mul
from pathlib import Path

from mirage_hf.codegen.plan import KernelPlan
from mirage_hf.gpus import Device
from mirage_hf.tune.footprint import Footprint
from mirage_hf.tune.multiply_adds import joined

#: The file of weights.
WEIGHTS = Path(__file__).with_name("correction.json")

#: A correction is at most this factor, up or down. Kernels unlike those of the fit get no wild one.
MOST = 2.0


def features(
    plan: KernelPlan,
    tiles: Footprint,
    device: Device,
    *,
    us: float,
    blocks_us: float,
    arithmetic_us: float,
    l2_bytes: int,
    registers: int,
    per_sm: int,
    trigger_early: bool,
) -> dict[str, float]:
    """Return what the linear model knows about a kernel, mostly logarithms to the base 2.

    Args:
        plan: The kernel.
        tiles: Its footprint.
        device: The GPU.
        us: The estimate without a correction.
        blocks_us: The estimate if only the blocks' own work counted.
        arithmetic_us: The estimate if only instructions counted.
        l2_bytes: Bytes that all blocks together load.
        registers: Registers that a thread needs for tiles.
        per_sm: Blocks that fit on one SM at a time.
        trigger_early: The value of `Schedule.trigger_early`.
    """
    tiling, schedule = plan.tiling, plan.schedule
    steps = plan.cooperation.steps_per_block if tiling.is_looped else 1
    waves = plan.grid / (device.sms * per_sm)
    memory_us = 1e6 * tiles.moved / device.bandwidth
    return {
        "time": math.log2(us),
        "memory": math.log2(memory_us),
        "blocks": math.log2(blocks_us),
        "arithmetic": arithmetic_us / memory_us,
        "loads": math.log2(max(1, l2_bytes) / tiles.moved),
        "once": math.log2(1 + tiles.once),
        "steps": math.log2(steps),
        "warps": math.log2(schedule.num_warps),
        "columns": math.log2(max(1.0, tiles.columns)),
        "elements": math.log2(tiles.largest / (32 * schedule.num_warps)),
        "registers": registers / 64,
        "resident": math.log2(per_sm),
        "waves": math.log2(waves),
        "tail": math.ceil(waves) / waves - 1,
        "sums": sum(len(s.accumulators) for s in tiling.block.stages),
        "looped": tiling.is_looped,
        "staged": tiling.is_looped and schedule.num_stages > 1,
        "each_step": tiling.is_looped and not schedule.reduce_after_loop,
        "prefetched": schedule.prefetch_steps,
        "all_prefetched": schedule.prefetch_steps >= steps,
        "cooperating": math.log2(schedule.cooperating_blocks),
        "early": trigger_early,
    }


def corrected(us: float, known: Mapping[str, float]) -> float:
    """Return a corrected estimate.

    Args:
        us: The estimate.
        known: The features of its kernel.
    """
    return corrected_by(us, known, *_model())


def corrected_by(
    us: float, known: Mapping[str, float], weights: Mapping[str, float], constant: float
) -> float:
    """Return the same for other weights than those of the package.

    The result is not below the time that memory takes.
    """
    products = map(mul, known.values(), map(weights.__getitem__, known))
    doublings = constant + math.fsum(products)
    us *= min(MOST, max(1 / MOST, 2.0**doublings))
    return joined((us, 2.0 ** known["memory"]))


@cache
def _model() -> tuple[dict[str, float], float]:
    """Return the weight of each feature and the constant."""
    data = json.loads(WEIGHTS.read_text(encoding="utf-8"))
    return data["weights"], data["constant"]
