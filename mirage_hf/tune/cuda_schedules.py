"""List schedules of CUDA kernels for a block graph, best estimate first, and estimate their times.

The estimate counts bytes, what a thread has in flight, and the latencies of a block's trips. It was
not fitted to measured times yet. It decides what is measured first, and which kernel a result has
that is not measured.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mirage_hf import errors
from mirage_hf.codegen import cuda_text
from mirage_hf.codegen.cuda_kernel import CudaKernel
from mirage_hf.codegen.placement import PlacedOp, placed
from mirage_hf.codegen.schedule import Schedule, next_power_of_two
from mirage_hf.codegen.streams.finding import reads_codes
from mirage_hf.codegen.streams.layout import stream_layout
from mirage_hf.gpus import H200, Device
from mirage_hf.graph.block import BlockGraph, Role
from mirage_hf.graph.kernel import DTensor, KernelOp
from mirage_hf.ops.dtypes import element_bytes
from mirage_hf.tune.stream_schedules import estimated_stream_us, stream_schedules

#: Tiles of the grid axis that tells the threads of a block apart, of loop axes, and warps.
_GRID_TILES = (1, 2, 4, 8, 16, 32, 64)
_LOOP_TILES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_WARPS = (1, 2, 4, 8, 16)

#: The most schedules that are estimated for one op.
_MOST = 400

#: Threads and blocks of an SM of Hopper. Others have fewer of either.
_SM_THREADS, _SM_BLOCKS = 2048, 32

#: Bytes of shared memory that the system takes from each block. An SM has as many more than a block
#: may have.
_SYSTEM_SHARED = 1024

#: Registers of a thread besides the vectors that it loads ahead, in the machine code of a few
#: kernels.
_PLAIN_REGISTERS = 48

#: Registers of a thread of a kernel that streams codes, besides the vectors that it holds of the
#: other factor. The machine code of a few kernels has fewer.
_STREAM_REGISTERS = 56

#: Bytes that lie side by side below which reads of device memory are wasted.
_SEGMENT = 64

#: µs of a load from device memory, of a barrier with what it waits for, and of an exchange among
#: the blocks of a cluster.
_LOAD_US, _BARRIER_US, _EXCHANGE_US = 0.8, 0.03, 0.45


@dataclass(frozen=True)
class CudaCost:
    """The estimate of one CUDA kernel.

    Attributes:
        us: Time of a dependent launch in µs.
        registers: Registers of a thread.
        shared: Bytes of shared memory of a block.
    """

    us: float
    registers: int
    shared: int


def cuda_schedules(op: KernelOp, device: Device = H200, limit: int = 256) -> list[Schedule]:
    """Return schedules of CUDA kernels for a placed op, best estimate first.

    The list is empty if only the Triton generator writes the op.
    """
    op = placed(op)
    known = _known.get((op, device))
    if known is None and reads_codes(op):
        known = tuple(s for s, _ in stream_schedules(op, device))
    elif known is None:
        costs: dict[Schedule, float] = {}
        for schedule in itertools.islice(_space(op, device), _MOST):
            try:
                cost = estimate_cuda(op, schedule, device)
            except errors.CodegenError:
                continue
            if cost.registers * 32 * schedule.num_warps <= device.registers:
                costs[schedule] = cost.us
        known = tuple(sorted(costs, key=lambda s: (costs[s], repr(s))))
        if len(_known) > 256:
            _known.clear()
        _known[op, device] = known
    return list(known[:limit])


_known: dict[tuple[KernelOp, Device], tuple[Schedule, ...]] = {}


def _space(op: PlacedOp, device: Device) -> Iterator[Schedule]:
    """Yield schedules to estimate."""
    block = op.block
    assert block is not None
    if cuda_text.obstacle(op):
        return
    choices = {a.name: _tiles(block, a.name) for a in block.axes}
    products = itertools.product(*choices.values())
    sets = [dict(zip(choices, tiles, strict=True)) for tiles in products]
    sets.sort(key=lambda tiles: _unlikely(block, tiles, device))
    has_loop = bool(block.named(Role.LOOP))
    constant = any(t.constant for t in op.inputs if isinstance(t, DTensor))
    for tiles in sets:
        for num_warps in _WARPS:
            base = Schedule(tiles, num_warps=num_warps, cuda=True)
            if has_loop:
                yield replace(base, num_stages=2, prefetch_steps=int(constant))
            else:
                yield base


def _tiles(block: BlockGraph, name: str) -> tuple[int, ...]:
    """Return tiles to try for an axis."""
    axis = block.axis(name)
    size = next_power_of_two(block.split_size(name))
    if axis.role is Role.TILE:
        return (size,)
    if axis.role is Role.CLUSTER or block.axis_split_by(name) is not None:
        return (1,)
    if axis.role is Role.LOOP:
        return tuple(t for t in _LOOP_TILES if t <= size) or (size,)
    last = {o.axes[-1] for o in block.outputs}
    most = 64 if name in last else 8
    return tuple(t for t in _GRID_TILES if t <= min(size, most))


def _unlikely(block: BlockGraph, tiles: Mapping[str, int], device: Device) -> float:
    """Return how far the blocks of a set of tiles are from two for each SM."""
    blocks = math.prod(
        -(-block.split_size(a.name) // tiles[a.name]) for a in block.named(Role.GRID, Role.CLUSTER)
    )
    return abs(math.log2(max(1, blocks) / (2 * device.sms)))


def estimate_cuda(op: PlacedOp, schedule: Schedule, device: Device = H200) -> CudaCost:
    """Estimate a CUDA kernel.

    Raises:
        CodegenError: The op has no kernel with this schedule.
    """
    if schedule.persistent_blocks:
        layout = stream_layout(op, schedule)
        us = estimated_stream_us(layout, device)
        loads = layout.rounds * len(layout.products.read_columns)
        registers = _STREAM_REGISTERS + 4 * loads * layout.rows_at_once(loads)
        return CudaCost(us, registers, layout.shared_bytes)
    kernel = cuda_text.plan_kernel(op, schedule, "kernel")
    block = op.block
    assert block is not None
    threads = 32 * schedule.num_warps
    registers = _PLAIN_REGISTERS + 4 * kernel.loaded_ahead + 4
    resident = min(
        _SM_THREADS // threads,
        device.registers // (registers * threads),
        (device.shared_bytes + _SYSTEM_SHARED) // (kernel.shared + _SYSTEM_SHARED),
        _SM_BLOCKS,
    )
    if resident < 1 or registers > 255:
        raise errors.CodegenError(
            f"kernel: {schedule} needs {registers} registers a thread and {kernel.shared} bytes of "
            f"shared memory, and fits on no SM of {device.name}"
        )
    return CudaCost(_us(op, block, schedule, kernel, resident, device), registers, kernel.shared)


def _us(
    op: PlacedOp,
    block: BlockGraph,
    schedule: Schedule,
    kernel: CudaKernel,
    resident: int,
    device: Device,
) -> float:
    """Return the estimated time of a kernel in µs."""
    read, unique, work = _block_bytes(op, block, schedule), _bytes(op), _elements(block, schedule)
    threads = 32 * schedule.num_warps
    per_sm = -(-kernel.grid // device.sms)
    at_once = min(resident, per_sm)
    flight = at_once * threads * 16 * max(1, min(kernel.loaded_ahead, 16) or 2)
    rate = min(device.sm_bandwidth, 1e6 * flight / _LOAD_US)
    bytes_us = 1e6 * read * per_sm / rate
    memory_us = 1e6 * unique / device.bandwidth
    lanes = device.lane_rate / device.sms
    compute_us = 1e6 * 3.0 * work * per_sm / lanes
    # A block whose threads are few for its work cannot hide the latency of its own instructions.
    serial_us = 1e-3 * 2.0 * work / threads
    loop = block.named(Role.LOOP)
    trips = math.prod(-(-block.split_size(a.name) // schedule.tiles[a.name]) for a in loop)
    loops = sum(stage.loop is not None for stage in block.stages)
    waves = -(-per_sm // resident)
    barriers = kernel.source.count("__syncthreads")
    latency_us = _LOAD_US * waves + _BARRIER_US * barriers * waves
    latency_us += loops * trips * waves * (0.05 if kernel.loaded_ahead else _LOAD_US)
    exchanges = kernel.source.count("cluster.sync") > 1
    latency_us += _EXCHANGE_US * exchanges
    early = 0.4 if kernel.loaded_early else 0.0
    busy = max(bytes_us, memory_us, compute_us)
    return device.launch_us + latency_us + serial_us + max(0.0, busy - early)


def _bytes(op: PlacedOp) -> float:
    """Return the bytes of all tensors of an op."""
    tensors = {t.index: t for t in (*op.inputs, *op.outputs) if isinstance(t, DTensor)}
    return sum(math.prod(t.dims) * element_bytes(t.dtype) for t in tensors.values())


def _block_bytes(op: PlacedOp, block: BlockGraph, schedule: Schedule) -> float:
    """Return the bytes that one block reads."""
    total = 0.0
    for i in block.inputs:
        t = op.inputs[i.sources[0]]
        assert isinstance(t, DTensor)
        axes = tuple(a for a in i.axes if a)
        size = element_bytes(t.dtype)
        read = _seen(block, schedule, axes) * size
        lying = tuple(a for a, s in zip(i.axes, t.strides, strict=True) if a and s == 1)
        row = _seen(block, schedule, lying) * size
        total += read * max(1.0, _SEGMENT / row) if read > _SEGMENT else _SEGMENT
    return total


def _seen(block: BlockGraph, schedule: Schedule, axes: tuple[str, ...]) -> int:
    """Return how many elements of some axes one block sees."""
    count = 1
    for name in axes:
        size = block.split_size(name)
        is_cut = block.axis(name).role in (Role.GRID, Role.CLUSTER)
        count *= min(size, schedule.tiles[name]) if is_cut else size
    return count


def _elements(block: BlockGraph, schedule: Schedule) -> float:
    """Return how many elements one block computes in all of its ops."""
    total = 0.0
    for stage in block.stages:
        for operation in stage.body:
            axes = dict.fromkeys(block.carried[operation.out])
            for arg in operation.args:
                if isinstance(arg, str):
                    axes |= dict.fromkeys(block.carried[arg])
            total += _seen(block, schedule, tuple(axes))
    return total
