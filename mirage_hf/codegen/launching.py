"""How generated files launch kernels. They stand alone: the text of these functions is copied into each file that calls them."""

import copy
import inspect
import threading

import torch

_compiled: dict = {}
_zeros: dict = {}
_lock = threading.Lock()


def launch(kernel, grid, tensors, num_warps, num_stages, **constants):
    """Launch a kernel on the current stream; the tensors are on the current device.

    What a CUDA graph captures may begin before the launch ahead of it is done, where the GPU can (programmatic dependent
    launch, sm_90): the kernel itself waits before it reads anything but constants and, where it is part of a step that appends to
    caches, bounds and positions. Those must not be written by the launch right ahead of one that reads them. No generated kernel
    writes integers; where a kernel that waits stands between, what was written before that one is there.

    constants: the kernel's other constexprs, in the order of its parameters; they follow `overlaps`.
    """
    device = tensors[0].device.index
    if device is None:  # the interpreter, on a CPU
        kernel[(grid,)](
            *tensors, overlaps=False, num_warps=num_warps, num_stages=num_stages, **constants
        )
        return
    pointers = [x.data_ptr() for x in tensors]
    unaligned = tuple([p % 16 for p in pointers]) if any([p & 15 for p in pointers]) else ()
    dtypes = tuple([x.dtype for x in tensors])
    key = kernel.__name__, num_warps, device, dtypes, unaligned, *constants.values()
    if key not in _compiled:
        overlaps = torch.cuda.get_device_capability(device) >= (9, 0)
        options = (
            {"launch_pdl": True} if overlaps else {}
        )  # multiply-adds are one instruction by default up to Triton 3.9 only
        ready = kernel.warmup(
            *tensors,
            overlaps=overlaps,
            num_warps=num_warps,
            num_stages=num_stages,
            enable_fp_fusion=True,
            grid=(grid,),
            **constants,
            **options,
        )
        dependent = ready.run
        serial = copy.copy(dependent)
        serial.launch_pdl = False
        _compiled[key] = serial, dependent, ready.function, ready.packed_metadata, overlaps
    serial, dependent, function, metadata, overlaps = _compiled[key]
    run = dependent if torch.cuda.is_current_stream_capturing() else serial
    run(
        grid,
        1,
        1,
        torch._C._cuda_getCurrentRawStream(device),
        function,
        metadata,
        None,
        None,
        None,
        *pointers,
        overlaps,
        *constants.values(),
    )


def counters(count, device):
    """Zeros, which kernels leave as zeros, for launches that follow each other: those of a stream share them.

    Every launch that is captured gets its own, as its graph may run beside others, from a stock that lasts for many graphs. What was
    handed out stays: graphs, and kernels under way, are at work on it.
    """
    if device.type == "cpu":
        return torch.zeros(count, dtype=torch.int32)
    with _lock:
        stock, begin = _zeros.get(device.index, ((), 0))
        if torch.cuda.is_current_stream_capturing():
            if begin + count > len(stock):
                return torch.zeros(count, dtype=torch.int32, device=device)
            _zeros[device.index] = (
                stock,
                begin + -(-count // 4) * 4,
            )  # a kernel is compiled anew for pointers that are not aligned
            return stock[begin : begin + count]
        key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
        shared = _zeros.get(key, ())
        if len(shared) < count:
            used = _zeros.setdefault("used", [])
            used.append(shared)
            _zeros[key] = shared = lasting(max(count, 1024), device)
            if not len(stock) or begin > 1 << 17:
                used.append(stock)
                _zeros[device.index] = lasting(1 << 18, device), 0
        return shared


def lasting(count, device):
    """Zeros that are there for any stream. A thread allocates them, as what this one does may be meant for a graph's memory
    (torch.compile's warm-ups), which nothing may stay in."""
    from concurrent.futures import ThreadPoolExecutor

    def zeros():
        x = torch.zeros(count, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()
        return x

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(zeros).result()


def text(with_counters: bool) -> str:
    """The functions as text."""
    sources = [
        inspect.getsource(f) for f in (launch, *((counters, lasting) if with_counters else ()))
    ]
    return "\n\n\n".join(
        ["_compiled, _zeros, _lock = {}, {}, threading.Lock()", *map(str.rstrip, sources)]
    )
