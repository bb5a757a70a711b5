"""A stand-in for `cuda.bindings.driver` that records what it is asked to launch."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace


class Status(int):
    """A status of the driver, with a name."""

    @property
    def name(self) -> str:
        return "CUDA_SUCCESS" if self == 0 else f"CUDA_ERROR_{int(self)}"


class FakeDriver:
    """A driver with one GPU.

    Attributes:
        launches: What was launched, in order.
        failing: The function that fails, and its status.
        context: The current context, 0 for none.
        max_shared: Bytes of shared memory that a block may ask for.
        static_shared: Bytes of it that functions have already.
    """

    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK=0,
        CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES=1,
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
    )
    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN=97)
    CUfunc_cache = SimpleNamespace(CU_FUNC_CACHE_PREFER_SHARED=1)
    CUlaunchAttributeID = SimpleNamespace(
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="programmatic"
    )
    CUlaunchConfig = SimpleNamespace
    CUstream = int

    def __init__(self) -> None:
        self.launches: list[SimpleNamespace] = []
        self.images: list[bytes] = []
        self.asked_shared: list[int] = []
        self.failing: tuple[str, int] = "", 0
        self.context = 5
        self.max_shared, self.static_shared, self.max_threads = 232448, 16, 1024
        self.num_arguments = 0

    def __getattribute__(self, name: str):
        failing, status = object.__getattribute__(self, "failing")
        if name == failing:

            def refuse(*arguments: object) -> tuple[Status]:
                return (Status(status),)

            refuse.__name__ = name
            return refuse
        return object.__getattribute__(self, name)

    def CUlaunchAttribute(self):
        return SimpleNamespace(value=SimpleNamespace())

    def cuDeviceGet(self, number):
        return Status(0), number

    def cuCtxGetCurrent(self):
        return Status(0), self.context

    def cuDevicePrimaryCtxRetain(self, device):
        return Status(0), 77

    def cuCtxSetCurrent(self, context):
        self.context = context
        return (Status(0),)

    def cuModuleLoadData(self, image):
        self.images.append(image)
        return Status(0), len(self.images)

    def cuModuleGetFunction(self, module, name):
        return Status(0), (module, name)

    def cuFuncGetAttribute(self, attribute, function):
        return Status(0), self.static_shared if attribute == 1 else self.max_threads

    def cuDeviceGetAttribute(self, attribute, device):
        return Status(0), self.max_shared

    def cuFuncSetCacheConfig(self, function, config):
        return (Status(0),)

    def cuFuncSetAttribute(self, function, attribute, value):
        self.asked_shared.append(value)
        return (Status(0),)

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        pointers = (ctypes.c_void_p * self.num_arguments).from_address(parameters)
        values = [ctypes.c_uint64.from_address(p).value for p in pointers]
        overlaps = [
            a.value.programmaticStreamSerializationAllowed
            for a in (config.attrs if config.numAttrs else [])
            if a.id == "programmatic"
        ]
        self.launches.append(
            SimpleNamespace(
                function=function[1].decode(),
                grid=(config.gridDimX, config.gridDimY, config.gridDimZ),
                block=(config.blockDimX, config.blockDimY, config.blockDimZ),
                shared=config.sharedMemBytes,
                stream=config.hStream,
                overlaps=overlaps,
                arguments=values,
            )
        )
        return (Status(0),)
