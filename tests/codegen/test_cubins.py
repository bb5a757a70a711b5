"""The packaged file of cubins: what it holds, and what damage to it leads to."""

from __future__ import annotations

import json
import random
import struct
from dataclasses import replace

import pytest
from safetensors import safe_open
from safetensors.numpy import load, save

from mirage_hf.codegen import ahead, cubins, triton
from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen.cubins import CubinError
from mirage_hf.pipeline import resize
from mirage_hf.zoo.store import packaged_store
from scripts import build_cubins
from scripts.build_cubins import CudaKernelToCompile as CudaKernel
from scripts.build_cubins import KernelToCompile
from tests.helpers.thorough import THOROUGH

SM = 90

#: Kernels that are compiled again, if not all are.
SAMPLE = 3


@pytest.fixture(scope="module")
def packaged():
    found = cubins.packaged(SM)
    assert not isinstance(found, CubinError), found
    return found


@pytest.fixture(scope="module")
def wanted():
    return build_cubins.kernels(SM)


@pytest.fixture
def one(packaged):
    """Return the record and the bytes of the smallest cubin."""
    cubin = min(packaged.cubins.values(), key=lambda c: c.size)
    return cubin, packaged.image(cubin.digest)


def sample(wanted, packaged, kind):
    """Return kernels of a kind whose compilers are here in the version of the packaged file."""
    here = build_cubins.compilers()
    found = [
        kernel
        for kernel in wanted
        if isinstance(kernel, kind)
        and {*kernel.compilers} <= {*here}
        and build_cubins.are_alike(kernel, packaged.compilers, here)
    ]
    if not found:
        pytest.skip(f"made by {packaged.compilers}, here is {here}")
    return found if THOROUGH else random.Random(7).sample(found, SAMPLE)


def sections(elf: bytes) -> dict[str, bytes]:
    """Return the sections of a 64-bit ELF file that hold instructions or constants of kernels."""
    (at,) = struct.unpack_from("<Q", elf, 40)
    size, count, names_at = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, at + n * size) for n in range(count)]
    names = elf[headers[names_at][4] :]
    found = {}
    for name, _, _, _, offset, length in headers:
        text = names[name : names.index(b"\0", name)].decode()
        if text.startswith((".text", ".nv.constant")):
            found[text] = elf[offset : offset + length]
    return found


def test_every_packaged_kernel_has_a_cubin_and_nothing_else_has(packaged, wanted):
    """If this fails, run `python -m scripts.build_cubins`."""
    assert {kernel.digest for kernel in wanted} == set(packaged.cubins)


@pytest.mark.parametrize("kind", [KernelToCompile, CudaKernel])
def test_cubins_are_what_the_generated_sources_compile_to(packaged, wanted, kind):
    for kernel in sample(wanted, packaged, kind):
        cubin, image = kernel.compiled()
        assert cubin == packaged.cubins[kernel.digest], kernel.name
        assert image == packaged.image(kernel.digest), kernel.name


def test_cubins_have_the_instructions_that_users_would_compile(packaged, wanted):
    """Cubins have no line numbers. Triton writes them by default, and changes nothing else."""
    for kernel in sample(wanted, packaged, KernelToCompile):
        image = packaged.image(kernel.digest)
        with_lines = kernel.compile().asm["cubin"]
        assert sections(with_lines) == sections(image) and sections(image), kernel.name


def test_all_cubins_unpack_and_are_small(packaged):
    images = [packaged.image(digest) for digest in packaged.cubins]
    assert all(image.startswith(b"\x7fELF") for image in images)
    assert packaged.path.stat().st_size < 0.3 * sum(map(len, images))


def test_cubins_are_kept_unless_another_version_of_their_compiler_is_here(packaged, wanted):
    by_triton, by_nvrtc = (
        [k for k in wanted if isinstance(k, kind)][:2] for kind in (KernelToCompile, CudaKernel)
    )
    both, versions = [*by_triton, *by_nvrtc], dict(packaged.compilers)
    assert by_triton and by_nvrtc

    def kept(**here):
        return {*build_cubins._kept(packaged.path, both, here)[1]}

    of_triton, of_nvrtc = ({k.digest for k in each} for each in (by_triton, by_nvrtc))
    assert kept(**versions) == of_triton | of_nvrtc
    assert kept(triton=versions["triton"], ptxas=versions["ptxas"]) == of_triton | of_nvrtc
    assert kept(**(versions | {"nvrtc": "1.0"})) == of_triton
    assert kept(**(versions | {"ptxas": "1.0"})) == of_nvrtc


def test_without_lzma_kernels_are_compiled(packaged, monkeypatch):
    monkeypatch.setattr(cubins, "lzma", None)
    with pytest.raises(CubinError, match="built without the module lzma"):
        packaged.image(next(iter(packaged.cubins)))


def test_attention_cut_to_its_own_number_of_slots_has_a_cubin(packaged):
    """A cache has 256 slots or a multiple, and kernels are cut to it. At 256 the text stays."""
    entries = [e for e in packaged_store().entries() if e.pattern == "attention"]
    assert entries
    for entry in entries[:4]:
        early = entry.key.next_may_launch_early
        ugraph, schedules = resize.cut_to(
            entry.ugraph, entry.schedules, entry.ugraph.program, early
        )
        program = triton.generate(ugraph, schedules, next_may_launch_early=early)
        assert program.source == entry.kernel


def test_digests_depend_on_source_types_and_options():
    def digest(**changed):
        known = {"source": "s", "kernel": "k", "types": ["*bf16"], "num_warps": 4}
        return cubins.digest_of(**(known | {"num_stages": 3, "sm": 90} | changed))

    changes = [
        {"source": "t"},
        {"kernel": "l"},
        {"types": ["*fp16"]},
        {"types": []},
        {"num_warps": 8},
        {"num_stages": 2},
        {"sm": 100},
    ]
    assert len({digest(), *(digest(**change) for change in changes)}) == 1 + len(changes)


def test_a_file_is_read_back_and_written_alike(tmp_path, one):
    path = tmp_path / "sm_90.safetensors"
    cubins.write(path, SM, {"triton": "3"}, [one])
    found = cubins.read(path)
    assert found.cubins == {one[0].digest: one[0]} and found.image(one[0].digest) == one[1]
    before = path.read_bytes()
    cubins.write(path, SM, {"triton": "3"}, [one])
    assert path.read_bytes() == before


def test_a_flipped_byte_anywhere_is_noticed(tmp_path, one):
    path = tmp_path / "sm_90.safetensors"
    cubins.write(path, SM, {"triton": "3"}, [one])
    good = path.read_bytes()
    for at in random.Random(0).sample(range(len(good)), 60):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(CubinError):
            cubins.read(path).image(one[0].digest)


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_cut_file_is_refused(tmp_path, one, size):
    path = tmp_path / "sm_90.safetensors"
    cubins.write(path, SM, {}, [one])
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CubinError):
        cubins.read(path)


def test_edited_records_and_cubins_are_refused(tmp_path, one):
    path = tmp_path / "sm_90.safetensors"
    cubins.write(path, SM, {}, [one])
    tensors = load(path.read_bytes())
    with safe_open(path, framework="numpy") as f:
        text = f.metadata()["mirage_hf"]

    def edited(change):
        data = json.loads(text)
        change(data)
        path.write_bytes(save(tensors, {"mirage_hf": json.dumps(data)}))

    edited(lambda data: data["cubins"][0].update(num_warps=64))
    with pytest.raises(CubinError, match="own digest"):
        cubins.read(path)
    edited(lambda data: data.update(version=99))
    with pytest.raises(CubinError, match="version"):
        cubins.read(path)
    for other in (replace(one[0], sha256="0" * 64), replace(one[0], size=one[0].size - 1)):
        cubins.write(path, SM, {}, [(other, one[1])])
        with pytest.raises(CubinError, match="does not match its digest"):
            cubins.read(path).image(other.digest)


@pytest.mark.parametrize(
    "changed",
    [{"shared": -1}, {"num_warps": 99}, {"size": 1 << 30}, {"kernel": "a b"}, {"digest": "x"}],
)
def test_records_with_impossible_values_are_refused(one, changed):
    with pytest.raises(CubinError):
        replace(one[0], **changed)


def test_hand_made_kernels_that_need_more_than_pointers_get_no_cubin(wanted):
    by_triton = [kernel for kernel in wanted if isinstance(kernel, KernelToCompile)]
    kernel = min(by_triton, key=lambda k: k.num_pointers)
    with pytest.raises(CubinError, match="parameters"):
        cubins.cubin_of(kernel.digest, kernel.compile(), kernel.num_pointers + 1)


def test_compiling_takes_the_options_that_the_digest_names(wanted, monkeypatch):
    """Otherwise a cubin might be found for other options than it was compiled with."""
    import triton as real_triton

    seen = []
    monkeypatch.setattr(
        real_triton, "compile", lambda source, target, options: seen.append(options)
    )
    entry = next(e for e in packaged_store().entries() if e.ugraph.is_fused)
    program = entry.generate()
    launch = program.launches[0]
    kernel = getattr(compiler.load(program.source, program.digest), launch.kernel)
    ahead.compile_kernel(kernel, launch.signature, launch.num_warps, launch.num_stages, SM)
    assert seen == [ahead.compile_options(launch.num_warps, launch.num_stages, SM)]
