"""The rates of each known GPU, in one table. The search and the tuner estimate with it.

The H200's numbers were measured, and so was the H100's bandwidth. The rest of the H100's row is the
H200's, because it is the same chip with other memory. The other rows come from NVIDIA's data
sheets, scaled by the share of its data sheet that the H200 reaches. In these rows, bandwidths of L2
caches and of single SMs are guesses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Device:
    """The rates of one GPU. Bandwidths are in bytes/s, rates in operations/s, times in µs."""

    #: The name in torch and nvidia-smi, or how it begins.
    name: str
    #: Compute capability: 90 is 9.0.
    sm: int
    #: Streaming multiprocessors.
    sms: int
    #: Bandwidth of reads from device memory.
    bandwidth: float
    #: Bandwidth of reads from the L2 cache.
    l2_bandwidth: float
    #: Instructions of all lanes.
    lane_rate: float
    #: Floating-point operations of the tensor cores: a multiply-add counts as two.
    mma_rate: float
    #: The `lane_rate` that the search uses, in whole T/s.
    scalar_rate: float
    #: Time from one kernel of a CUDA graph to the next.
    launch_us: float = 1.16
    #: Time from a kernel's first load to its last store if only latency counts.
    latency_us: float = 1.5
    #: Time of each further pass of a kernel over its loop.
    pass_us: float = 1.0
    #: Time in which cooperating blocks signal that partial results are stored and the last one
    #: reads them.
    meeting_us: float = 0.8
    #: Bytes of streamed inputs in flight per SM that fill the memory system.
    flight_bytes: int = 32 * 1024
    #: Bytes/s that one SM can read. Fewer blocks than SMs cannot fill the memory system.
    sm_bandwidth: float = 55e9
    #: Size of the L2 cache.
    l2_bytes: int = 60 << 20
    #: The largest input that is still in the L2 when a kernel reads it again: about half of the L2.
    reread_bytes: float = 30e6
    #: Shared memory that one block may ask for.
    shared_bytes: int = 227 * 1024
    #: Registers of one SM.
    registers: int = 65536


#: Measured: bandwidth, tensor-core rate, launch (docs/benchmarks). Each SM issues 4 × 32 lanes a
#: cycle.
H200 = Device(
    "NVIDIA H200",
    sm=90,
    sms=132,
    bandwidth=4.47e12,
    l2_bandwidth=8e12,
    lane_rate=132 * 128 * 1.7e9,
    mma_rate=690e12,
    scalar_rate=28e12,
)

#: Measured: bandwidth, 3.0 of 3.35 TB/s.
H100 = Device(
    "NVIDIA H100",
    sm=90,
    sms=132,
    bandwidth=3.0e12,
    l2_bandwidth=7e12,
    lane_rate=132 * 128 * 1.7e9,
    mma_rate=690e12,
    scalar_rate=28e12,
    l2_bytes=50 << 20,
    reread_bytes=25e6,
)

#: The shares of its data sheet that the H200 reaches. The data sheet says 4.8 TB/s, 989 dense
#: bfloat16 TFLOPS, and 1.98 GHz at most.
BANDWIDTH_REACHED = 4.47 / 4.8
MMA_REACHED = 690 / 989
CLOCK_REACHED = 1.7 / 1.98


def _from_data_sheet(
    name: str,
    sm: int,
    sms: int,
    *,
    bandwidth: float,
    l2_bandwidth: float,
    lanes: int,
    clock: float,
    mma_rate: float,
    l2_bytes: int,
    shared_bytes: int,
    sm_bandwidth: float,
) -> Device:
    """Return a device that reaches as much of its data sheet as the H200 does.

    Args:
        name: As torch names the GPU.
        sm: Compute capability.
        sms: Streaming multiprocessors.
        bandwidth: Of device memory, in bytes/s.
        l2_bandwidth: A guess, taken as it is.
        lanes: float32 lanes of one SM.
        clock: The highest clock, in Hz.
        mma_rate: Dense float16 FLOPS with float32 sums.
        l2_bytes: Size of the L2 cache.
        shared_bytes: Shared memory that one block may ask for.
        sm_bandwidth: A guess, taken as it is.
    """
    lane_rate = sms * lanes * clock * CLOCK_REACHED
    return Device(
        name,
        sm,
        sms,
        bandwidth=bandwidth * BANDWIDTH_REACHED,
        l2_bandwidth=l2_bandwidth,
        lane_rate=lane_rate,
        mma_rate=mma_rate * MMA_REACHED,
        scalar_rate=lane_rate // 1e12 * 1e12,
        sm_bandwidth=sm_bandwidth,
        l2_bytes=l2_bytes,
        reread_bytes=l2_bytes / 2,
        shared_bytes=shared_bytes,
    )


#: The SXM module of 80 GB.
A100 = _from_data_sheet(
    "NVIDIA A100",
    80,
    108,
    bandwidth=2.039e12,
    l2_bandwidth=4e12,
    lanes=64,
    clock=1.41e9,
    mma_rate=312e12,
    l2_bytes=40 << 20,
    shared_bytes=163 * 1024,
    sm_bandwidth=55e9,
)
B200 = _from_data_sheet(
    "NVIDIA B200",
    100,
    148,
    bandwidth=8.0e12,
    l2_bandwidth=10e12,
    lanes=128,
    clock=1.98e9,
    mma_rate=2250e12,
    l2_bytes=126 << 20,
    shared_bytes=227 * 1024,
    sm_bandwidth=55e9,
)
L40S = _from_data_sheet(
    "NVIDIA L40S",
    89,
    142,
    bandwidth=0.864e12,
    l2_bandwidth=3.5e12,
    lanes=128,
    clock=2.52e9,
    mma_rate=362e12,
    l2_bytes=96 << 20,
    shared_bytes=99 * 1024,
    sm_bandwidth=20e9,
)
RTX_4090 = _from_data_sheet(
    "NVIDIA GeForce RTX 4090",
    89,
    128,
    bandwidth=1.008e12,
    l2_bandwidth=3.5e12,
    lanes=128,
    clock=2.52e9,
    mma_rate=165.2e12,
    l2_bytes=72 << 20,
    shared_bytes=99 * 1024,
    sm_bandwidth=20e9,
)
RTX_5090 = _from_data_sheet(
    "NVIDIA GeForce RTX 5090",
    120,
    170,
    bandwidth=1.792e12,
    l2_bandwidth=5e12,
    lanes=128,
    clock=2.41e9,
    mma_rate=209.5e12,
    l2_bytes=96 << 20,
    shared_bytes=99 * 1024,
    sm_bandwidth=25e9,
)

DEVICES = (H200, H100, A100, B200, L40S, RTX_4090, RTX_5090)


def device_named(name: str, sm: int) -> Device:
    """Return the device with this name, else the first of the nearest compute capability."""
    by_name = [device for device in DEVICES if name.startswith(device.name)]
    return by_name[0] if by_name else min(DEVICES, key=lambda device: abs(device.sm - sm))


def current_gpu(device: torch.device | None = None) -> Device:
    """Return the rates of a CUDA device, by default the current one. Without a GPU: the H200's."""
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return H200
    properties = torch.cuda.get_device_properties(device)
    return device_named(properties.name, 10 * properties.major + properties.minor)
