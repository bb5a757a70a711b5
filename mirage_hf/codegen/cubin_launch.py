"""Launch kernels as cubins through the driver, without the C functions that Triton builds.

A kernel has a packaged cubin, or its compiler runs: Triton's, or NVRTC for CUDA kernels. The text
of a kernel decides which packaged cubin it may have, wherever the text came from. Only the packaged
zoo's cubins are read. If the driver refuses the cubin of a Triton kernel, Triton launches the
kernel. If it refuses the packaged cubin of a CUDA kernel, NVRTC compiles the kernel.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor

from mirage_hf.codegen import ahead, cubins
from mirage_hf.codegen.cubins import CubinError, CubinFile, TooLargeError
from mirage_hf.codegen.generated_program import POINTER_TYPES, GeneratedProgram
from mirage_hf.codegen.loaded_cubin import LoadedCubin, bindings
from mirage_hf.settings import settings

_log = logging.getLogger("mirage_hf")

_logged: set[str] = set()
_loaded: dict[tuple[str, int], LoadedCubin | None] = {}
_lock = threading.Lock()


def install(module: ModuleType, source: str) -> None:
    """Let a generated module launch cubins.

    Args:
        module: The module, whose kernels are called through its function `launch`.
        source: The SHA-256 of its text.
    """
    if settings().interpret or torch.version.cuda is None:
        return
    if hasattr(module, "launch"):
        module.launch = CubinLauncher(source, module.launch)  # type: ignore[attr-defined]
    if hasattr(module, "compiled_cuda"):
        CudaCubins(source, module.compiled_cuda, module.cuda_function).install(module)


class CubinLauncher:
    """The `launch` of a generated file or of a hand-written kernel, by cubins.

    Attributes:
        source: The SHA-256 of the kernel's text.
        by_triton: Launches a kernel as Triton does. The driver may refuse a cubin, and pointers may
            be unaligned.
        constants: Values of the constexprs besides `overlaps`.
    """

    def __init__(
        self,
        source: str,
        by_triton: Callable[..., None],
        constants: Mapping[str, Any] = MappingProxyType({}),
    ):
        self.source, self.by_triton, self.constants = source, by_triton, constants
        self._ready: dict[Any, LoadedCubin] = {}
        #: Names of kernels and numbers of devices for which there is no cubin.
        self._without: set[tuple[str, int | None]] = set()

    def __call__(
        self, kernel: Any, grid: int, tensors: Sequence[Tensor], num_warps: int, num_stages: int
    ) -> None:
        """Launch a kernel on the current stream. The arguments are those of `launching.launch`."""
        device = tensors[0].device.index
        cubin = None
        if device is not None and (kernel.__name__, device) not in self._without:
            pointers = [x.data_ptr() for x in tensors]
            if not any([p & 15 for p in pointers]):
                cubin = self._cubin(kernel, device, num_warps, num_stages, tensors)
        if cubin is not None:
            is_dependent = torch.cuda.is_current_stream_capturing()
            stream = torch._C._cuda_getCurrentRawStream(device)
            try:
                cubin.launch(grid, stream, pointers, is_dependent=is_dependent)
                return
            except CubinError as e:
                _log_once(str(e))
                self._without.add((kernel.__name__, device))
        self.by_triton(kernel, grid, tensors, num_warps, num_stages)

    def _cubin(
        self, kernel: Any, device: int, num_warps: int, num_stages: int, tensors: Sequence[Tensor]
    ) -> LoadedCubin | None:
        """Return the cubin of a kernel. If there is none, later calls need not ask."""
        name, dtypes = kernel.__name__, tuple([x.dtype for x in tensors])
        key = name, device, num_warps, num_stages, dtypes
        cubin = self._ready.get(key)
        if cubin is None:
            cubin = packaged(self.source, *key) or self._compiled(kernel, *key[1:])
            if cubin is None:
                self._without.add((name, device))
            else:
                self._ready[key] = cubin
        return cubin

    def _compiled(
        self,
        kernel: Any,
        device: int,
        num_warps: int,
        num_stages: int,
        dtypes: Sequence[torch.dtype],
    ) -> LoadedCubin | None:
        """Return a cubin that Triton compiles or finds in its cache, if it can be launched.

        Raises:
            TooLargeError: The kernel needs more than the GPU has.
            Exception: Whatever Triton raises if the kernel does not compile.
        """
        if not POINTER_TYPES.keys() >= set(dtypes):
            return None
        types = [POINTER_TYPES[dtype] for dtype in dtypes]
        major, minor = torch.cuda.get_device_capability(device)
        sm = 10 * major + minor
        skipped = {"overlaps", *self.constants}
        names = [name for name in kernel.arg_names if name not in skipped]
        try:
            bindings()
            digest = cubins.digest_of(
                self.source, kernel.__name__, types, num_warps, num_stages, sm
            )
            if (cubin := _loaded.get((digest, device))) is not None:
                return cubin
            signature = list(zip(names, types, strict=True))
            made = ahead.compile_kernel(
                kernel, signature, num_warps, num_stages, sm, self.constants
            )
            cubin = LoadedCubin(*cubins.cubin_of(digest, made, len(types)), device)
            with _lock:
                cubin = _loaded.get((digest, device)) or cubin
                _loaded[digest, device] = cubin
            return cubin
        except TooLargeError:
            raise
        except CubinError as e:
            _log_once(str(e))
            return None


class CudaCubins:
    """Gives and loads the cubins of a file's CUDA kernels, packaged ones first.

    Attributes:
        source: The SHA-256 of the file's text.
        by_nvrtc: The file's `compiled_cuda`.
        load: The file's `cuda_function`, which calls `compiled_cuda`.
    """

    def __init__(
        self,
        source: str,
        by_nvrtc: Callable[[str, str, int], tuple[bytes, bytes]],
        load: Callable[[str, str, int, int], Any],
    ):
        self.source, self.by_nvrtc, self.load = source, by_nvrtc, load
        #: Names of kernels whose packaged cubin the driver refuses.
        self._refused: set[str] = set()

    def install(self, module: ModuleType) -> None:
        """Let the file use the methods of this object."""
        module.compiled_cuda = self.compiled_cuda  # type: ignore[attr-defined]
        module.cuda_function = self.cuda_function  # type: ignore[attr-defined]

    def compiled_cuda(self, name: str, text: str, sm: int) -> tuple[bytes, bytes]:
        """Return the mangled name and the cubin of a kernel, whose text is that of the file."""
        return self._packaged(name, sm) or self.by_nvrtc(name, text, sm)

    def cuda_function(self, name: str, text: str, device: int, shared: int) -> Any:
        """Return a kernel, loaded on a GPU. The arguments are the file's."""
        try:
            return self.load(name, text, device, shared)
        except RuntimeError as e:
            major, minor = torch.cuda.get_device_capability(device)
            if self._packaged(name, 10 * major + minor) is None:
                raise
            _log_once(str(e))
        self._refused.add(name)
        try:
            return self.load(name, text, device, shared)
        except RuntimeError:
            self._refused.discard(name)  # something else is wrong, such as too little memory
            raise

    def _packaged(self, name: str, sm: int) -> tuple[bytes, bytes] | None:
        """Return the mangled name and the packaged cubin of a kernel, or None."""
        found = cubins.packaged(sm)
        if isinstance(found, CubinError) or name in self._refused:
            return None
        digest = cubins.cuda_digest_of(self.source, name, sm)
        if digest not in found.cubins:
            return None
        try:
            return found.cubins[digest].kernel.encode(), found.image(digest)
        except CubinError as e:
            _log_once(str(e))
            return None


def packaged(
    source: str,
    kernel: str,
    device: int,
    num_warps: int,
    num_stages: int,
    dtypes: Sequence[torch.dtype],
) -> LoadedCubin | None:
    """Return the packaged cubin of a kernel, loaded on a GPU, or None.

    Args:
        source: The SHA-256 of its source.
        kernel: The name of the function.
        device: The number of the GPU, which is the current one.
        num_warps: Warps of a block.
        num_stages: Loop iterations whose loads are in flight.
        dtypes: Dtypes of the tensors.
    """
    major, minor = torch.cuda.get_device_capability(device)
    found = cubins.packaged(10 * major + minor)
    if isinstance(found, CubinError):
        _log_once(str(found))
        return None
    try:
        types = [POINTER_TYPES[dtype] for dtype in dtypes]
    except KeyError:
        return None
    digest = cubins.digest_of(source, kernel, types, num_warps, num_stages, found.sm)
    if digest not in found.cubins:
        return None
    with _lock:
        if (digest, device) not in _loaded:
            _loaded[digest, device] = _load(found, digest, device)
        return _loaded[digest, device]


def _load(found: CubinFile, digest: str, device: int) -> LoadedCubin | None:
    """Return a loaded cubin, or None if it cannot be loaded, which is logged."""
    try:
        return LoadedCubin(found.cubins[digest], found.image(digest), device)
    except CubinError as e:
        _log_once(str(e))
        return None


def _log_once(reason: str) -> None:
    """Log once why a cubin is not used."""
    if reason not in _logged:
        _logged.add(reason)
        _log.debug("a cubin is not used: %s", reason)


@cache
def obstacle(sm: int) -> str:
    """Return why a compute capability uses no packaged cubin; empty if it may use some."""
    found = cubins.packaged(sm)
    if isinstance(found, CubinError):
        return str(found)
    try:
        bindings()
    except CubinError as e:
        return str(e)
    return ""


def has_all(program: GeneratedProgram, sm: int) -> bool:
    """Return whether every kernel of a program has a packaged cubin.

    Then none is compiled, unless the driver refuses a cubin.
    """
    found = cubins.packaged(sm)
    if isinstance(found, CubinError) or settings().interpret or obstacle(sm):
        return False
    return all(cubins.digest_of_launch(program, x, sm) in found.cubins for x in program.launches)
