"""Launch kernels, and give them the counters that cooperating blocks share.

Generated files stand alone: the text of `launch`, `counters` and `lasting_zeros` is copied into
each file that calls them. So these functions use torch and Triton, and nothing else of this
package.
"""

import copy
import functools
import inspect
import threading

import torch

_compiled: dict = {}
_zeros: dict = {}
_lock = threading.Lock()


def launch(kernel, grid, tensors, num_warps, num_stages):
    """Launch a kernel on the current stream. The tensors are on the current device.

    In a CUDA graph, on sm_90 and newer, launches use programmatic dependent launch (PDL): a kernel
    may start before the previous one is done. The kernel itself waits (`gdc_wait`) before it reads
    anything except constants. In a step that appends to caches it also reads bounds and positions
    before it waits, so the previous launch must not write them. No generated kernel writes
    integers, and what was written before an earlier kernel that waits is visible.
    """
    device = tensors[0].device.index
    if device is None:  # the interpreter, on a CPU
        kernel[(grid,)](*tensors, overlaps=False, num_warps=num_warps, num_stages=num_stages)
        return
    pointers = [x.data_ptr() for x in tensors]
    unaligned = tuple([p % 16 for p in pointers]) if any([p & 15 for p in pointers]) else ()
    key = kernel.__name__, device, tuple([x.dtype for x in tensors]), unaligned
    if key not in _compiled:
        overlaps = torch.cuda.get_device_capability(device) >= (9, 0)
        options = {"launch_pdl": True} if overlaps else {}
        # up to Triton 3.9 only, enable_fp_fusion (multiply-adds as one instruction) is the default
        ready = kernel.warmup(
            *tensors,
            overlaps=overlaps,
            num_warps=num_warps,
            num_stages=num_stages,
            enable_fp_fusion=True,
            grid=(grid,),
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
    )


def launch_with_constants(kernel, grid, tensors, num_warps, num_stages, constants):
    """Launch a hand-written kernel on the current stream, like `launch`.

    Generated kernels have their sizes in their text. Hand-written ones take them as constexprs.

    Args:
        kernel: The `@triton.jit` function. Its parameters are tensors, `overlaps`, then constants.
        grid: Number of blocks.
        tensors: The tensors, on the current device.
        num_warps: Warps of a block.
        num_stages: Loop iterations whose loads are in flight.
        constants: Values of the constexprs by name, in the order of the kernel's parameters.
    """
    device = tensors[0].device.index
    options = {"num_warps": num_warps, "num_stages": num_stages, **constants}
    if device is None:  # the interpreter, on a CPU
        kernel[(grid,)](*tensors, overlaps=False, **options)
        return
    pointers = [x.data_ptr() for x in tensors]
    unaligned = tuple([p % 16 for p in pointers]) if any([p & 15 for p in pointers]) else ()
    dtypes = tuple([x.dtype for x in tensors])
    key = kernel.__name__, num_warps, device, dtypes, unaligned, *constants.values()
    if key not in _compiled:
        overlaps = torch.cuda.get_device_capability(device) >= (9, 0)
        if overlaps:
            options["launch_pdl"] = True
        ready = kernel.warmup(
            *tensors, overlaps=overlaps, enable_fp_fusion=True, grid=(grid,), **options
        )
        dependent = ready.run
        serial = copy.copy(dependent)
        serial.launch_pdl = False
        _compiled[key] = serial, dependent, ready.function, ready.packed_metadata, overlaps
    serial, dependent, function, metadata, overlaps = _compiled[key]
    run = dependent if torch.cuda.is_current_stream_capturing() else serial
    stream = torch._C._cuda_getCurrentRawStream(device)
    arguments = [*pointers, overlaps, *constants.values()]
    run(grid, 1, 1, stream, function, metadata, None, None, None, *arguments)


def counters(count, device):
    """Return zeros that kernels leave as zeros, for the counters of cooperating blocks.

    Launches of one stream follow each other, so they share their counters. A captured launch gets
    counters of its own, because its graph may run beside others. They are cut from a stock that
    lasts for many graphs. Counters are never freed, because graphs and running kernels use them.
    """
    if device.type == "cpu":
        return torch.zeros(count, dtype=torch.int32)
    with _lock:
        stock, begin = _zeros.get(device.index, ((), 0))
        if torch.cuda.is_current_stream_capturing():
            if begin + count > len(stock):
                return torch.zeros(count, dtype=torch.int32, device=device)
            # multiples of 16 bytes, because Triton compiles a kernel anew for unaligned pointers
            _zeros[device.index] = stock, begin + -(-count // 4) * 4
            return stock[begin : begin + count]
        key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
        shared = _zeros.get(key, ())
        if len(shared) < count:
            used = _zeros.setdefault("used", [])
            used.append(shared)
            _zeros[key] = shared = lasting_zeros(max(count, 1024), device)
            if not len(stock) or begin > 1 << 17:
                used.append(stock)
                _zeros[device.index] = lasting_zeros(1 << 18, device), 0
        return shared


def lasting_zeros(count, device):
    """Return zeros that any stream may use and that stay allocated.

    Another thread allocates them. Memory that this thread allocates may belong to a graph's pool
    (torch.compile's warm-ups), where nothing may stay.
    """
    from concurrent.futures import ThreadPoolExecutor

    def zeros():
        x = torch.zeros(count, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()
        return x

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(zeros).result()


@functools.cache
def text(with_counters: bool) -> str:
    """Return the text of the functions that a generated file carries."""
    functions = (launch, counters, lasting_zeros) if with_counters else (launch,)
    sources = [inspect.getsource(f).rstrip() for f in functions]
    state = "_compiled, _zeros, _lock = {}, {}, threading.Lock()"
    return "\n\n\n".join([state, *sources])
