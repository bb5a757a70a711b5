"""Compile the kernels of the packaged zoo into its files of cubins. No GPU is needed.

    python -m scripts.build_cubins            # kernel_zoo/sm_90.safetensors
    python -m scripts.build_cubins --check    # write nothing; exit with 1 if a file is out of date

The file also has the hand-written kernels that begin and end a greedy step of the zoo's models.

Run it after kernels of the zoo were added or their text changed. Cubins are kept if they were made
by the compilers that are here, or if their compiler is not here. CUDA kernels are compiled by
NVRTC, which needs the packages cuda-bindings and nvidia-cuda-nvrtc. A file is out of date if a
kernel of the zoo has no cubin, or a cubin has no kernel.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, TypeAlias
from unittest import mock

import torch
import triton
from torch import Tensor
from triton import knobs

from mirage_hf.codegen import ahead, compile, cubins, cuda_launching
from mirage_hf.codegen.cubin_launch import CudaCubins
from mirage_hf.codegen.cubins import Cubin, CubinError
from mirage_hf.codegen.generated_program import POINTER_TYPES, Launch
from mirage_hf.codegen.kernel_launch import KernelLaunch
from mirage_hf.decode import sampler
from mirage_hf.decode.control import Control
from mirage_hf.decode.kernels import embedding
from mirage_hf.zoo.entry import Entry
from mirage_hf.zoo.store import packaged_store
from scripts.configs import MODELS

#: The compute capabilities that the packaged zoo has entries for.
ARCHITECTURES = (90,)

#: Models, numbers of sequences and slots of caches that the zoo's entries make steps of.
STEPS_OF = ("llama-3.2-1b", "llama-3.1-8b", "qwen3-0.6b")
BATCHES = (1, 2, 4, 8, 16)
SLOTS = (256, 4096)


@dataclass(frozen=True)
class KernelToCompile:
    """A Triton kernel that the zoo's file has a cubin for.

    Attributes:
        name: What it is, for people.
        digest: What its cubin is found by.
        compile: Compiles it.
        num_pointers: Its tensors.
    """

    name: str
    digest: str
    compile: Any
    num_pointers: int
    compilers: ClassVar[tuple[str, ...]] = ("triton", "ptxas")

    def compiled(self) -> tuple[Cubin, bytes]:
        """Return the record and the bytes of the cubin."""
        with without_line_numbers():
            return cubins.cubin_of(self.digest, self.compile(), self.num_pointers)


@dataclass(frozen=True)
class CudaKernelToCompile:
    """A CUDA kernel that the zoo's file has a cubin for.

    Attributes:
        name: What it is, for people.
        digest: What its cubin is found by.
        launch: Its launch.
        compile: Compiles it: gives the name of its function, and the bytes of the cubin.
    """

    name: str
    digest: str
    launch: Launch
    compile: Callable[[], tuple[bytes, bytes]]
    compilers: ClassVar[tuple[str, ...]] = ("nvrtc",)

    def compiled(self) -> tuple[Cubin, bytes]:
        """Return the record and the bytes of the cubin."""
        mangled, image = self.compile()
        return cubins.cuda_cubin_of(self.digest, mangled.decode(), image, self.launch), image


ToCompile: TypeAlias = KernelToCompile | CudaKernelToCompile


@contextmanager
def without_line_numbers() -> Iterator[None]:
    """Leave out the path of the source and its line numbers. They change no instruction."""
    with knobs.compilation.scope():
        knobs.compilation.disable_line_info = True
        yield


def of_entry(entry: Entry, sm: int) -> Iterator[ToCompile]:
    """Yield the kernels of an entry."""
    program = entry.generate()
    module = compile.load(program.source, program.digest)
    for launch in program.launches:
        name, kernel = f"{entry.folder} {launch.kernel}", getattr(module, launch.kernel)
        digest = cubins.digest_of_launch(program, launch, sm)
        if launch.cuda:
            compiling = partial(nvrtc_of(module), launch.kernel, kernel, sm)
            yield CudaKernelToCompile(name, digest, launch, compiling)
        else:
            options = launch.signature, launch.num_warps, launch.num_stages, sm
            compiling = partial(ahead.compile_kernel, kernel, *options)
            yield KernelToCompile(name, digest, compiling, len(launch.signature))


def nvrtc_of(module: ModuleType) -> Callable[[str, str, int], tuple[bytes, bytes]]:
    """Return what compiles a generated file's CUDA kernels, without the packaged cubins."""
    compiling = module.compiled_cuda
    owner = getattr(compiling, "__self__", None)
    return owner.by_nvrtc if isinstance(owner, CudaCubins) else compiling


def of_launch(what: KernelLaunch, tensors: Sequence[Tensor], sm: int) -> KernelToCompile:
    """Return the kernel of a hand-written launch."""
    names = what.kernel.arg_names[: len(tensors)]
    types = [POINTER_TYPES[x.dtype] for x in tensors]
    name = what.kernel.__name__
    digest = cubins.digest_of(what.source, name, types, what.num_warps, what.num_stages, sm)
    signature = list(zip(names, types, strict=True))
    options = signature, what.num_warps, what.num_stages, sm, what.constants
    compiling = partial(ahead.compile_kernel, what.kernel, *options)
    return KernelToCompile(f"{name} {dict(what.constants)}", digest, compiling, len(types))


def of_model(name: str, batch: int, slots: int, sm: int) -> Iterator[KernelToCompile]:
    """Yield the kernels that begin and end a greedy step of a model.

    The model has one rotary table and no sliding windows.
    """
    sizes, device = MODELS[name], torch.device("cpu")
    recorded: list[tuple[KernelLaunch, Sequence[Tensor]]] = []
    control = Control.allocate(batch, slots, device)
    logits = torch.empty(batch, sizes.vocab, dtype=torch.bfloat16)
    weight = torch.empty(sizes.vocab, sizes.hidden, dtype=torch.bfloat16)
    cos = torch.empty(1, slots, sizes.head_dim, dtype=torch.bfloat16)
    out = embedding.EmbeddingOutput.allocate(
        batch, sizes.hidden, sizes.head_dim, [None], torch.bfloat16, device
    )

    def record(what: KernelLaunch, tensors: Sequence[Tensor]) -> None:
        recorded.append((what, list(tensors)))

    with (
        mock.patch.object(embedding, "launch", record),
        mock.patch.object(sampler, "launch", record),
    ):
        embedding.embed(control, weight, cos, cos, out, by_kernel=True)
        chooser = sampler.Sampler.allocate(batch, sizes.vocab, device, by_kernels=True)
        chooser.argmax(control, logits)
    for what, tensors in recorded:
        yield of_launch(what, tensors, sm)


def kernels(sm: int) -> list[ToCompile]:
    """Return the kernels that the packaged zoo's file for a compute capability should have."""
    entries = (e for e in packaged_store().entries() if e.key.target == f"sm_{sm}")
    found = [kernel for entry in entries for kernel in of_entry(entry, sm)]
    for name, batch, slots in itertools.product(STEPS_OF, BATCHES, SLOTS):
        found += of_model(name, batch, slots, sm)
    return list({kernel.digest: kernel for kernel in found}.values())


def compilers() -> dict[str, str]:
    """Return the versions of Triton, its assembler, and NVRTC if that is installed.

    They decide what a kernel becomes.
    """
    command = [knobs.nvidia.ptxas.path, "--version"]
    shown = subprocess.run(command, text=True, capture_output=True, check=True).stdout
    version = re.search(r"V(\d[\d.]*)", shown)
    found = {"triton": triton.__version__, "ptxas": version[1] if version else "unknown"}
    try:
        _, _, (major, minor) = cuda_launching.cuda_bindings()
        found["nvrtc"] = f"{major}.{minor}"
    except RuntimeError:
        pass
    return found


def are_alike(kernel: ToCompile, versions: Mapping[str, str], others: Mapping[str, str]) -> bool:
    """Return whether a kernel's compilers have the same versions in two lists of them."""
    return all(versions.get(name) == others.get(name) for name in kernel.compilers)


def _kept(
    path: Path, wanted: Sequence[ToCompile], here: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, tuple[Cubin, bytes]]]:
    """Return the compilers of a file, and its cubins that need not be made again."""
    try:
        found = cubins.read(path)
        kept = {
            kernel.digest: (found.cubins[kernel.digest], found.image(kernel.digest))
            for kernel in wanted
            if kernel.digest in found.cubins
            and (are_alike(kernel, found.compilers, here) or not {*kernel.compilers} & {*here})
        }
        return dict(found.compilers), kept
    except CubinError as e:
        print(e)
        return {}, {}


def build(sm: int, anew: bool = False) -> str:
    """Write the file for a compute capability, and return a line about it."""
    path, wanted, here = cubins.packaged_path(sm), kernels(sm), compilers()
    before, kept = ({}, {}) if anew else _kept(path, wanted, here)
    missing = [kernel for kernel in wanted if kernel.digest not in kept]
    made = {kernel.digest: kernel.compiled() for kernel in missing}
    cubins.write(path, sm, before | here, [{**kept, **made}[k.digest] for k in wanted])
    size = path.stat().st_size
    return f"{path.name}: {len(wanted)} kernels, {len(made)} compiled, {size:,} bytes"


def out_of_date(sm: int) -> list[str]:
    """Return why the file for a compute capability is out of date, a line for each kernel."""
    found, wanted = cubins.packaged(sm), {kernel.digest: kernel for kernel in kernels(sm)}
    if isinstance(found, CubinError):
        return [str(found)]
    missing = [f"{wanted[d].name} has no cubin" for d in wanted.keys() - found.cubins.keys()]
    return missing + [f"no kernel has cubin {d[:12]}" for d in found.cubins.keys() - wanted.keys()]


def main() -> None:
    """Build the files, or with --check say what is out of date."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--anew", action="store_true", help="compile all kernels again")
    args = parser.parse_args()
    if not args.check:
        for sm in ARCHITECTURES:
            print(build(sm, args.anew))
        return
    lines = [line for sm in ARCHITECTURES for line in out_of_date(sm)]
    print("\n".join(lines) or "up to date")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
