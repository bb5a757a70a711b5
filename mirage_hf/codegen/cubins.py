"""Cubins: machine code of packaged kernels, in one file for each compute capability.

A cubin is found by a digest of the source that it was compiled from and of the options. So a
kernel whose text or options differ in anything finds none, and is compiled.

The file is a safetensors file. Each tensor holds the LZMA-compressed bytes of a cubin under its
digest. The header's metadata has the format, the versions of the compilers, and a record of each
cubin. Only the packaged zoo's files are ever opened: other zoos hold no compiled code.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from mirage_hf import files
from mirage_hf.codegen import ahead
from mirage_hf.codegen.generated_program import GeneratedProgram, Launch
from mirage_hf.errors import described
from mirage_hf.graph import json_format

try:
    import lzma
except ImportError:  # Python can be built without it
    lzma = None  # type: ignore[assignment]

FORMAT, VERSION = "mirage_hf.cubins", 2

#: The most bytes of a cubin. Those of the packaged zoo have up to a fiftieth of it.
_MOST_BYTES = 1 << 22

#: The most bytes of shared memory that a block can have on any GPU.
_MOST_SHARED = 1 << 20

#: Parameters that Triton adds to a kernel: pointers to two kinds of scratch memory, null here.
SCRATCH_POINTERS = 2

_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


class CubinError(Exception):
    """An error raised if a cubin is not used. Its kernel is then compiled."""


class TooLargeError(CubinError):
    """An error raised if a kernel needs more than the GPU has, however it is launched."""


@dataclass(frozen=True)
class Cubin:
    """What must be known of a cubin to launch it.

    Attributes:
        digest: What it is found by, see `digest_of` and `cuda_digest_of`.
        kernel: The name of the function.
        num_pointers: Tensors that it takes. In Triton's kernels scratch pointers follow them.
        num_warps: Warps of a block.
        shared: Bytes of dynamic shared memory of a block.
        launch_pdl: Whether it waits for the previous kernel, so that it may start before.
        size: Bytes of the cubin.
        sha256: The digest of the cubin.
    """

    digest: str
    kernel: str
    num_pointers: int
    num_warps: int
    shared: int
    launch_pdl: bool
    size: int
    sha256: str

    def __post_init__(self) -> None:
        limits = {
            "num_pointers": 512,
            "num_warps": 64,
            "shared": _MOST_SHARED,
            "size": _MOST_BYTES,
        }
        for name, most in limits.items():
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= most:
                raise CubinError(f"a record of a cubin has {name} {value!r}")
        if type(self.launch_pdl) is not bool:
            raise CubinError(f"a record of a cubin has launch_pdl {self.launch_pdl!r}")
        if not _DIGEST.fullmatch(self.digest) or not _DIGEST.fullmatch(self.sha256):
            raise CubinError("a record of a cubin has no digest")
        if not _NAME.fullmatch(self.kernel):
            raise CubinError("a record of a cubin names no function")


def digest_of(
    source: str, kernel: str, types: Sequence[str], num_warps: int, num_stages: int, sm: int
) -> str:
    """Return the digest that a cubin is found by.

    Args:
        source: The SHA-256 of the source.
        kernel: The name of the function in it.
        types: Triton's type of each tensor. All are 16-byte aligned.
        num_warps: Warps of a block.
        num_stages: Loop iterations whose loads are in flight.
        sm: The compute capability.
    """
    options = ahead.compile_options(num_warps, num_stages, sm)
    return json_format.digest([VERSION, source, kernel, list(types), options, sm])


def digest_of_launch(program: GeneratedProgram, launch: Launch, sm: int) -> str:
    """Return the digest that the cubin of a program's kernel is found by."""
    if launch.cuda:
        return cuda_digest_of(program.digest, launch.kernel, sm)
    types = [kind for _, kind in launch.signature]
    options = launch.num_warps, launch.num_stages, sm
    return digest_of(program.digest, launch.kernel, types, *options)


def cuda_digest_of(source: str, kernel: str, sm: int) -> str:
    """Return the digest that the cubin of a CUDA kernel is found by.

    Args:
        source: The SHA-256 of the generated file, which has the options of the compiler.
        kernel: The name of the kernel in it.
        sm: The compute capability.
    """
    return json_format.digest([VERSION, source, kernel, "cuda", sm])


def cuda_cubin_of(digest: str, mangled: str, image: bytes, launch: Launch) -> Cubin:
    """Return the record of a CUDA kernel that NVRTC has compiled.

    Launches read no more of it than the name. The rest is in the text of the kernel's file.

    Args:
        digest: What it will be found by.
        mangled: The name of its function in the cubin.
        image: The bytes of the cubin.
        launch: The launch that it is compiled for.
    """
    return Cubin(
        digest=digest,
        kernel=mangled,
        num_pointers=len(launch.signature),
        num_warps=launch.num_warps,
        shared=launch.shared,
        launch_pdl=True,
        size=len(image),
        sha256=hashlib.sha256(image).hexdigest(),
    )


def cubin_of(digest: str, compiled: Any, num_pointers: int) -> tuple[Cubin, bytes]:
    """Return the record of a kernel that Triton has compiled, and its bytes.

    Args:
        digest: What it will be found by.
        compiled: Triton's compiled kernel.
        num_pointers: Its tensors.

    Raises:
        CubinError: It cannot be launched by `cubin_launch`.
    """
    image: bytes = compiled.asm["cubin"]
    made = compiled.metadata
    scratch = made.global_scratch_size or getattr(made, "profile_scratch_size", 0)
    if scratch or made.num_ctas != 1 or getattr(made, "launch_cooperative_grid", False):
        raise CubinError(f"{made.name} needs scratch memory, clusters or a cooperative launch")
    entry = re.search(rf"\.entry {re.escape(made.name)}\((.*?)\)", compiled.asm["ptx"], re.DOTALL)
    parameters = re.findall(r"\.param\s+(\.\w+)", entry[1] if entry else "")
    if parameters != [".u64"] * (num_pointers + SCRATCH_POINTERS):
        raise CubinError(f"{made.name} has parameters {parameters} for {num_pointers} tensors")
    cubin = Cubin(
        digest=digest,
        kernel=made.name,
        num_pointers=num_pointers,
        num_warps=made.num_warps,
        shared=made.shared,
        launch_pdl=made.launch_pdl,
        size=len(image),
        sha256=hashlib.sha256(image).hexdigest(),
    )
    return cubin, image


@dataclass(frozen=True)
class CubinFile:
    """The cubins for one compute capability.

    Attributes:
        path: The file.
        sm: The compute capability.
        compilers: Versions of what compiled them, by name.
        cubins: The records by digest.
    """

    path: Path
    sm: int
    compilers: Mapping[str, str]
    cubins: Mapping[str, Cubin]

    def image(self, digest: str) -> bytes:
        """Return the bytes of a cubin.

        Raises:
            CubinError: They cannot be read, or are not what the record says.
        """
        cubin = self.cubins[digest]
        if lzma is None:
            raise CubinError("this Python was built without the module lzma")
        try:
            with safe_open(self.path, framework="numpy") as f:
                stored = f.get_tensor(digest).tobytes()
            unpacker = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=_filters())
            image = unpacker.decompress(stored, cubin.size + 1)
        except (OSError, SafetensorError, lzma.LZMAError, EOFError) as e:
            raise CubinError(f"{self.path} cannot be read ({described(e)})") from e
        if len(image) != cubin.size or hashlib.sha256(image).hexdigest() != cubin.sha256:
            raise CubinError(f"{self.path}: a cubin does not match its digest")
        return image


def read(path: Path) -> CubinFile:
    """Read the header of a file.

    Raises:
        CubinError: It is damaged, was edited, or is of another version.
    """
    try:
        with safe_open(path, framework="numpy") as f:
            data = json.loads((f.metadata() or {})["mirage_hf"])
            names = set(f.keys())
        if (data["format"], data["version"]) != (FORMAT, VERSION):
            raise CubinError(f"{path} is of another version")
        if data.pop("digest") != json_format.digest(data):
            raise CubinError(f"{path} does not match its own digest")
        cubins = [Cubin(**record) for record in data["cubins"]]
        if {c.digest for c in cubins} != names:
            raise CubinError(f"{path} has other cubins than records")
        return CubinFile(path, data["sm"], data["compilers"], {c.digest: c for c in cubins})
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as e:
        raise CubinError(f"{path} cannot be read ({described(e)})") from e


def write(
    path: Path, sm: int, compilers: Mapping[str, str], made: Iterable[tuple[Cubin, bytes]]
) -> None:
    """Write a file of cubins. The same cubins give the same bytes."""
    in_order = sorted(made, key=lambda one: one[0].digest)
    tensors = {cubin.digest: np.frombuffer(_packed(image), np.uint8) for cubin, image in in_order}
    data: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "sm": sm,
        "compilers": dict(compilers),
        "cubins": [asdict(cubin) for cubin, _ in in_order],
    }
    text = json.dumps(data | {"digest": json_format.digest(data)}, sort_keys=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(save(tensors, {"mirage_hf": text}))
    partial.replace(path)


def _filters() -> list[dict[str, int]]:
    """Return how cubins are compressed: without a checksum, because their records have one."""
    return [{"id": lzma.FILTER_LZMA2, "preset": 6}]


def _packed(image: bytes) -> bytes:
    return lzma.compress(image, lzma.FORMAT_RAW, filters=_filters())


def packaged_path(sm: int) -> Path:
    """Return where the packaged zoo has the cubins for a compute capability."""
    return files.packaged_zoo() / f"sm_{sm}.safetensors"


@cache
def packaged(sm: int) -> CubinFile | CubinError:
    """Return the packaged zoo's cubins for a compute capability, or why there are none."""
    path = packaged_path(sm)
    if not path.is_file():
        return CubinError(f"the package has no cubins for sm_{sm}")
    try:
        found = read(path)
    except CubinError as e:
        return e
    return found if found.sm == sm else CubinError(f"{path} is for sm_{found.sm}")
