"""Compile CUDA C++ by NVRTC, and launch it through NVIDIA's bindings of the driver.

Generated files stand alone: the text of these functions is copied into each file that calls them.
So they use torch and `cuda.bindings`, and nothing else of this package. Neither a CUDA toolkit nor
its headers are needed.
"""

import ctypes
import functools
import hashlib
import inspect
import os
import tempfile
import threading

import torch

_cubins: dict = {}
_functions: dict = {}
_configs: dict = {}
_bindings: list = []
_cuda_lock = threading.Lock()


def cuda_bindings():
    """Return NVIDIA's bindings of the driver and of NVRTC, and the version of NVRTC.

    Raises:
        RuntimeError: They are not installed.
    """
    if _bindings:
        return _bindings[0]
    try:
        from cuda.bindings import driver, nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except Exception as e:  # whatever a broken installation raises
        raise RuntimeError(
            "CUDA kernels are compiled by NVRTC and launched through the driver, but "
            f"cuda.bindings cannot be used ({e}); install the packages cuda-bindings and "
            "nvidia-cuda-nvrtc (CUDA 12: nvidia-cuda-nvrtc-cu12), or use Triton kernels "
            "(backend='triton')"
        ) from e
    _bindings.append((driver, nvrtc, (major, minor)))
    return _bindings[0]


def compiled_cuda(name, source, sm):
    """Return the mangled name and the cubin of a kernel.

    Cubins are kept in the folder `__pycache__` beside this file. Their names are digests of the
    source, the options and the version of NVRTC.

    Args:
        name: The namespace of the kernel, whose function is `run`.
        source: CUDA C++.
        sm: The compute capability, as 90.

    Raises:
        RuntimeError: NVRTC is missing, or refuses the source.
    """
    if (name, source, sm) in _cubins:
        return _cubins[name, source, sm]
    _, nvrtc, version = cuda_bindings()
    options = [f"--gpu-architecture=sm_{sm}", "--std=c++17"]
    digest = hashlib.sha256(repr((name, source, options, version)).encode()).hexdigest()
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "__pycache__")
    path = os.path.join(folder, f"{digest}.cubin")
    made = None
    try:
        with open(path, "rb") as f:
            check, mangled, cubin = f.read().split(b"\n", 2)
        if check.decode() == hashlib.sha256(mangled + cubin).hexdigest():
            made = mangled, cubin
    except (OSError, ValueError):
        pass  # there is none, or it is damaged
    if made is None:
        made = _compile_cuda(nvrtc, name, source, options)
        check = hashlib.sha256(made[0] + made[1]).hexdigest().encode()
        partial = None
        try:
            os.makedirs(folder, exist_ok=True)
            handle, partial = tempfile.mkstemp(dir=folder)
            with os.fdopen(handle, "wb") as f:
                f.write(b"\n".join([check, *made]))
            os.replace(partial, path)
        except OSError:  # the folder cannot be written to, or is full
            if partial is not None and os.path.exists(partial):
                os.unlink(partial)
    _cubins[name, source, sm] = made
    return made


def _compile_cuda(nvrtc, name, source, options):
    """Return what `compiled_cuda` returns, compiled now."""
    expression = f"{name}::run".encode()
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], [])
    try:
        nvrtc.nvrtcAddNameExpression(program, expression)
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if int(status):
            log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
            nvrtc.nvrtcGetProgramLog(program, log)
            said = log.decode(errors="replace").strip("\0 \n")
            raise RuntimeError(f"{name}: NVRTC: {getattr(status, 'name', status)}: {said[:2000]}")
        mangled = nvrtc.nvrtcGetLoweredName(program, expression)[1]
        cubin = bytearray(nvrtc.nvrtcGetCUBINSize(program)[1])
        nvrtc.nvrtcGetCUBIN(program, cubin)
        return bytes(mangled), bytes(cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _driver_call(function, *arguments):
    """Call the driver, and return what it returns besides its status."""
    status, *results = function(*arguments)
    if int(status):
        raise RuntimeError(f"{function.__name__}: {getattr(status, 'name', status)}")
    return results[0] if results else None


def cuda_function(name, source, device, shared):
    """Return a kernel, loaded on a GPU. It is never unloaded, because graphs may hold it.

    Args:
        name: The namespace of the kernel.
        source: CUDA C++.
        device: The number of the GPU, which is the current one.
        shared: Bytes of dynamic shared memory that a block needs.

    Raises:
        RuntimeError: It cannot be compiled or loaded.
    """
    major, minor = torch.cuda.get_device_capability(device)
    mangled, cubin = compiled_cuda(name, source, 10 * major + minor)
    driver, _, _ = cuda_bindings()
    if not int(_driver_call(driver.cuCtxGetCurrent)):  # in a thread that has not used torch yet
        number = _driver_call(driver.cuDeviceGet, device)
        context = _driver_call(driver.cuDevicePrimaryCtxRetain, number)
        _driver_call(driver.cuCtxSetCurrent, context)
    module = _driver_call(driver.cuModuleLoadData, cubin)
    function = _driver_call(driver.cuModuleGetFunction, module, mangled)
    if shared > 48 * 1024:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _driver_call(driver.cuFuncSetAttribute, function, attribute, shared)
    return function


def launch_cuda(name, source, grid, tensors, num_outputs, num_warps, shared, anywhere=()):
    """Launch a CUDA kernel on the current stream. The tensors are on the current device.

    In a CUDA graph, on sm_90 and newer, launches use programmatic dependent launch (PDL): a kernel
    may start before the previous one is done. The kernel itself waits before it reads anything
    except constants, and before it writes.

    Args:
        name: The namespace of the kernel.
        source: CUDA C++.
        grid: Number of blocks.
        tensors: The inputs, then the outputs.
        num_outputs: Number of outputs.
        num_warps: Warps of a block.
        shared: Bytes of dynamic shared memory.
        anywhere: Inputs, by number, that the kernel reads at any address. Others are copied if they
            do not begin at a multiple of 16 bytes.
    """
    device = tensors[0].device.index
    if device is None:
        raise RuntimeError(f"{name} is a CUDA kernel, but its inputs are on the CPU; call .cuda()")
    pointers = [x.data_ptr() for x in tensors]
    copies = []
    for n in range(len(tensors) - num_outputs):
        if pointers[n] & 15 and n not in anywhere:  # it is read 16 bytes at a time
            x = tensors[n]
            reach = 1 + sum((d - 1) * s for d, s in zip(x.shape, x.stride(), strict=True))
            copies.append(x.as_strided((reach,), (1,)).clone())
            pointers[n] = copies[-1].data_ptr()
    key = name, source, device
    if key not in _functions:
        with _cuda_lock:
            if key not in _functions:
                _functions[key] = cuda_function(name, source, device, shared)
    function = _functions[key]
    stream = torch._C._cuda_getCurrentRawStream(device)
    overlaps = torch.cuda.is_current_stream_capturing()
    # Before its wait a kernel may read constants, but not what was copied just now.
    overlaps = overlaps and not copies and torch.cuda.get_device_capability(device) >= (9, 0)
    driver, _, _ = cuda_bindings()
    at = grid, num_warps, shared, stream, overlaps
    config = _configs.get(at)
    if config is None:
        if len(_configs) > 4096:
            _configs.clear()
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = 32 * num_warps, 1, 1
        config.sharedMemBytes, config.hStream = shared, driver.CUstream(stream)
        config.numAttrs = int(overlaps)
        if overlaps:
            pdl = driver.CUlaunchAttribute()
            kinds = driver.CUlaunchAttributeID
            pdl.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            pdl.value.programmaticStreamSerializationAllowed = 1
            config.attrs = [pdl]
        _configs[at] = config
    values = (ctypes.c_uint64 * len(pointers))(*pointers)
    first = ctypes.addressof(values)
    addresses = (ctypes.c_void_p * len(pointers))(*[first + 8 * n for n in range(len(pointers))])
    (status,) = driver.cuLaunchKernelEx(config, function, ctypes.addressof(addresses), 0)
    if int(status):
        raise RuntimeError(f"{name}: cuLaunchKernelEx: {getattr(status, 'name', status)}")


#: The functions that a generated file needs, in order.
_FUNCTIONS = (
    cuda_bindings,
    compiled_cuda,
    _compile_cuda,
    _driver_call,
    cuda_function,
    launch_cuda,
)


@functools.cache
def text() -> str:
    """Return the text of the functions that a generated file carries."""
    state = (
        "_cubins, _functions, _configs, _bindings = {}, {}, {}, []\n_cuda_lock = threading.Lock()"
    )
    return "\n\n\n".join([state, *(inspect.getsource(f).rstrip() for f in _FUNCTIONS)])
