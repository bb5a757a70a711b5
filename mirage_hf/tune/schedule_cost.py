"""Estimate a kernel by its schedule, whichever generator writes it."""

from __future__ import annotations

from mirage_hf.codegen.placement import placed
from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.gpus import H200, Device
from mirage_hf.graph.kernel import KernelOp
from mirage_hf.tune.cost import estimate
from mirage_hf.tune.cuda_schedules import estimate_cuda


def estimated_us(op: KernelOp, schedule: Schedule, device: Device = H200) -> float:
    """Return the estimated time of an op's kernel in µs.

    Raises:
        CodegenError: The op has no kernel with this schedule.
    """
    if schedule.cuda:
        return estimate_cuda(placed(op), schedule, device).us
    return estimate(plan_kernel(op, schedule), device).us
