"""A cubin on a GPU, launched through NVIDIA's bindings of the driver (`cuda.bindings`).

torch brings the bindings with its CUDA builds from 2.10 on. What is set and passed here is what
Triton's own loader and launcher set and pass, so a launch does the same. Neither a C compiler nor
Triton is needed.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import torch

from mirage_hf.codegen.cubins import SCRATCH_POINTERS, Cubin, CubinError, TooLargeError

#: Dynamic shared memory that a block gets without asking, in bytes.
_SHARED_WITHOUT_ASKING = 48 * 1024

#: Streams whose launch configs are kept. torch has 32 of each priority for a device.
_MOST_CONFIGS = 128


def bindings() -> Any:
    """Return `cuda.bindings.driver`.

    Raises:
        CubinError: It is not installed, or cannot be imported.
    """
    try:
        from cuda.bindings import driver
    except Exception as e:  # whatever a broken installation raises
        raise CubinError(f"cuda-bindings cannot be imported ({e})") from e
    return driver


def can_launch() -> bool:
    """Return whether cubins can be launched here, so that Triton's launchers are not needed."""
    try:
        bindings()
    except CubinError:
        return False
    return torch.version.cuda is not None


class LoadedCubin:
    """A cubin that is loaded on one GPU. Launches from several threads are safe.

    It is never unloaded, because captured graphs may hold it.
    """

    def __init__(self, cubin: Cubin, image: bytes, device: int, driver: Any | None = None):
        """Load a cubin on the GPU with number `device`, in the context that is current there.

        Raises:
            CubinError: The driver refuses it.
        """
        self._driver = driver or bindings()
        self._cubin = cubin
        try:
            self._function = self._loaded(image, device)
        except CubinError:
            raise
        except Exception as e:  # bindings without the driver's library, or of another version
            raise CubinError(f"the driver cannot be called ({type(e).__name__}: {e})") from e
        self._arguments = _Arguments(cubin.num_pointers)
        self._configs: dict[tuple[int, int, bool], Any] = {}
        self._has_launched = False

    def _loaded(self, image: bytes, device: int) -> Any:
        """Return the function, allowed to use as much shared memory as it needs."""
        driver, cubin = self._driver, self._cubin
        number = self._call(driver.cuDeviceGet, device)
        self._enter_context(number)
        module = self._call(driver.cuModuleLoadData, image)
        function = self._call(driver.cuModuleGetFunction, module, cubin.kernel.encode())
        of_function, of_device = driver.CUfunction_attribute, driver.CUdevice_attribute
        # Asking for an attribute makes a driver that loads lazily load the function now.
        most_threads = self._call(
            driver.cuFuncGetAttribute,
            of_function.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
            function,
        )
        if 32 * cubin.num_warps > most_threads:
            raise TooLargeError(
                f"{cubin.kernel}: needs {32 * cubin.num_warps} threads a block, "
                f"and may have {most_threads}"
            )
        if cubin.shared > _SHARED_WITHOUT_ASKING:
            most_shared = self._call(
                driver.cuDeviceGetAttribute,
                of_device.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
                number,
            )
            static = self._call(
                driver.cuFuncGetAttribute,
                of_function.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
                function,
            )
            if cubin.shared > most_shared - static:
                raise TooLargeError(
                    f"{cubin.kernel}: needs {cubin.shared} bytes of shared memory a block, "
                    f"and this GPU has {most_shared - static}"
                )
            prefer_shared = driver.CUfunc_cache.CU_FUNC_CACHE_PREFER_SHARED
            self._call(driver.cuFuncSetCacheConfig, function, prefer_shared)
            self._call(
                driver.cuFuncSetAttribute,
                function,
                of_function.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                most_shared - static,
            )
        return function

    def _enter_context(self, number: Any) -> None:
        """Make the device's primary context current, if this thread has none."""
        if not int(self._call(self._driver.cuCtxGetCurrent)):
            context = self._call(self._driver.cuDevicePrimaryCtxRetain, number)
            self._call(self._driver.cuCtxSetCurrent, context)

    def _call(self, function: Any, *arguments: Any) -> Any:
        """Call the driver, and return what it returns besides its status.

        Raises:
            CubinError: The status is an error.
        """
        status, *results = function(*arguments)
        if int(status):
            raise CubinError(f"{function.__name__}: {getattr(status, 'name', status)}")
        return results[0] if results else None

    def launch(self, grid: int, stream: int, pointers: Sequence[int], is_dependent: bool) -> None:
        """Launch the kernel.

        Args:
            grid: Number of blocks.
            stream: The address of the stream.
            pointers: The tensors' addresses, all 16-byte aligned.
            is_dependent: Whether it may start before the previous kernel of the stream is done
                (PDL), if it was compiled for that.

        Raises:
            CubinError: The driver refuses the first launch.
            RuntimeError: It reports an error later.
        """
        is_dependent = is_dependent and self._cubin.launch_pdl
        config = self._configs.get((grid, stream, is_dependent))
        if config is None:
            config = self._add_config(grid, stream, is_dependent)
        arguments = self._arguments
        arguments.values[: len(pointers)] = pointers  # type: ignore[call-overload]
        (status,) = self._driver.cuLaunchKernelEx(config, self._function, arguments.address, 0)
        if int(status):
            name = getattr(status, "name", status)
            why = f"{self._cubin.kernel}: cuLaunchKernelEx: {name}"
            raise RuntimeError(why) if self._has_launched else CubinError(why)
        self._has_launched = True

    def _add_config(self, grid: int, stream: int, is_dependent: bool) -> Any:
        """Return what the driver reads of a launch. It is not changed afterwards."""
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = 32 * self._cubin.num_warps, 1, 1
        config.sharedMemBytes = self._cubin.shared
        config.hStream = driver.CUstream(stream)
        config.numAttrs = int(is_dependent)
        if is_dependent:
            attribute = driver.CUlaunchAttribute()
            attribute.id = (
                driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            )
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs = [attribute]
        if len(self._configs) >= _MOST_CONFIGS:
            self._configs.clear()
        self._configs[grid, stream, is_dependent] = config
        return config


class _Arguments(threading.local):
    """Memory of one thread for the arguments of a kernel. The driver copies them in each launch.

    Attributes:
        values: The tensors' addresses, then Triton's scratch pointers, which stay null.
        address: The address of an array of pointers to each of `values`.
    """

    def __init__(self, num_pointers: int):
        count = num_pointers + SCRATCH_POINTERS
        self.values = (ctypes.c_uint64 * count)()
        first = ctypes.addressof(self.values)
        self._pointers = (ctypes.c_void_p * count)(*[first + 8 * n for n in range(count)])
        self.address = ctypes.addressof(self._pointers)
