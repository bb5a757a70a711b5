"""Tables of codes in kernels: an exchange between the threads of a warp looks codes up.

4-bit floats are decoded by arithmetic instead.

Triton's interpreter knows no assembly, so it runs the plain form. Here a model of a warp runs the
assembly.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mirage_hf as mi
from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.triton_math import HELPERS, helpers_of
from mirage_hf.formats.bitsandbytes import TABLES
from mirage_hf.ops.dtypes import E2M1
from mirage_hf.search.engine import search
from mirage_hf.search.search_options import SearchOptions
from mirage_hf.tune.space import schedules

pytest.importorskip("triton")

LANES = torch.arange(32)


def shuffled(source: torch.Tensor, index: torch.Tensor, clamp: int) -> torch.Tensor:
    """Return what each lane gets by `shfl.sync.idx`, as the PTX manual defines it."""
    segment, most = clamp >> 8 & 31, clamp & 31
    first = LANES & segment
    last = first | (most & ~segment)
    wanted = first | (index & ~segment & 31)
    return source[torch.where(wanted <= last, wanted, LANES)]


def run_assembly(text: str, constraints: str, args: list[Any], *_: Any, **__: Any) -> Any:
    """Run an inline assembly of these helpers on the 32 lanes of a warp."""
    outputs = constraints.count("=")
    registers = {f"${outputs + n}": x for n, x in enumerate(args)} | {"%laneid": LANES}

    def word(name: str) -> torch.Tensor:
        """Return a register as an unsigned number, or a number of the text."""
        number = registers[name] if name in registers else torch.tensor(int(name, 0))
        return number.to(torch.int64) & 0xFFFFFFFF

    for line in text.split(";"):
        op, _, operands = line.strip(" \n").removeprefix("{").strip(" }\n").partition(" ")
        names = [x.strip(" {}") for x in operands.split(",")]
        if op == "shr.u32":
            registers[names[0]] = word(names[1]) >> int(names[2])
        elif op == "shl.b32":
            registers[names[0]] = word(names[1]) << int(names[2]) & 0xFFFFFFFF
        elif op == "and.b32":
            registers[names[0]] = word(names[1]) & word(names[2])
        elif op == "lop3.b32":
            assert names[4] == "0xEA"  # (a & b) | c
            registers[names[0]] = word(names[1]) & word(names[2]) | word(names[3])
        elif op == "prmt.b32":
            both, selector = word(names[1]) | word(names[2]) << 32, int(names[3], 16)
            chosen = [both >> 8 * (selector >> 4 * n & 7) & 255 for n in range(4)]
            registers[names[0]] = sum(byte << 8 * n for n, byte in enumerate(chosen))
        elif op == "mov.b32":
            low, high, source = names
            registers[low], registers[high] = word(source) & 0xFFFF, word(source) >> 16
        elif op == "cvt.f32.f16":
            bits = registers[names[1]].to(torch.int32).to(torch.int16)
            registers[names[0]] = bits.view(torch.float16).float()
        elif op == "mov.u32":
            registers[names[0]] = registers[names[1]]
        elif op == "shfl.sync.idx.b32":
            assert names[4] == "0xffffffff"
            source, index = registers[names[1]], registers[names[2]].to(torch.int64)
            registers[names[0]] = shuffled(source, index, int(names[3], 16))
        else:
            assert op in ("", ".reg"), line
    results = tuple(registers[f"${n}"] for n in range(outputs))
    return results if outputs > 1 else results[0]


def helpers() -> dict[str, Any]:
    """Return the helpers as Python functions of torch tensors that hold a value for each lane."""
    names = helpers_of("table_of_lanes( uint4_entries(")
    assert "INTERPRETED" in names and "entry_of" in names
    text = "\n".join(HELPERS[n] for n in ("table_of_lanes", "uint4_entries", "small_e2m1"))
    for dtype in ("int32", "float32"):
        text = text.replace(f".to(tl.{dtype}, bitcast=True)", f".view(torch.{dtype})")
    language = SimpleNamespace(
        constexpr=object,
        where=torch.where,
        join=lambda x, y: torch.stack((x, y), -1),
        program_id=lambda axis: 0,
        inline_asm_elementwise=run_assembly,
        float32=torch.float32,
        int32=torch.int32,
    )
    module = {
        "tl": language,
        "triton": SimpleNamespace(jit=lambda f: f),
        "torch": torch,
        "INTERPRETED": False,
    }
    exec(re.sub(r"^@triton.jit$", "", text, flags=re.M), module)
    return module


@pytest.mark.parametrize("kind", TABLES)
def test_a_warp_looks_up_the_eight_codes_of_each_word(kind):
    module, values = helpers(), TABLES[kind]
    words = torch.randint(-(1 << 31), 1 << 31, (32,), dtype=torch.int64).to(torch.int32)
    table = module["table_of_lanes"](values)
    got = module["uint4_entries"](words, table, values)
    codes = (words.to(torch.int64)[:, None] >> torch.arange(0, 32, 4)) & 15
    assert torch.equal(got.reshape(32, 8), torch.tensor(values)[codes])


def test_four_bit_floats_are_decoded_by_arithmetic():
    words = torch.randint(-(1 << 31), 1 << 31, (1 << 14,), dtype=torch.int64).to(torch.int32)
    got = helpers()["small_e2m1"](words, E2M1) * 2.0**14
    codes = (words.to(torch.int64)[:, None] >> torch.arange(0, 32, 4)) & 15
    wanted = torch.tensor(E2M1)[codes]
    assert torch.equal(got.reshape(-1, 8), wanted)
    assert torch.equal(got.reshape(-1, 8).signbit(), wanted.signbit())


def linear(values: tuple[float, ...], reads_codes: bool = False) -> mi.KernelGraph:
    """Return x · Wᵀ for W = values[code] · scale, plus the codes themselves if `reads_codes`."""
    g = mi.new_graph()
    x = g.new_input((1, 256), "bfloat16")
    codes = g.cast(g.new_input((64, 4, 64), "uint4", constant=True), "float32")
    scales = g.new_input((64, 4, 1), "float32", constant=True)
    w = g.mul(g.lookup(codes, values=values), scales)
    w = g.add(w, codes) if reads_codes else w
    w = g.reshape(g.cast(w, "bfloat16"), (64, 256))
    g.mark_output(g.matmul(x, g.permute(w, (1, 0))))
    return g


def kernel_of(program: mi.KernelGraph) -> triton.GeneratedProgram:
    """Return a kernel of a program that is compiled for sm_90."""
    for ranked in search(program, SearchOptions(threads=1))[0]:
        ops = place_kernels(ranked.ugraph)
        if len(ops) == 1:
            choices = [s for s in schedules(ops[0]) if not s.mma]
            made = triton.generate(ranked.ugraph, choices[:1])
            assert compiler.ahead_of_time(made, 90)
            return made
    raise AssertionError("no µGraph has one kernel")


def test_a_table_is_in_registers():
    source = kernel_of(linear(TABLES["nf4"])).source
    assert "table0 = table_of_lanes(values0)" in source and "uint4_entries(" in source
    assert source.count("entry_of(") == 2, "only the helpers name the plain form"


@pytest.mark.parametrize(
    "program",
    [linear(TABLES["nf4"][:8]), linear(TABLES["nf4"], reads_codes=True)],
    ids=["eight values", "codes are read, too"],
)
def test_other_lookups_are_chains_of_choices(program):
    source = kernel_of(program).source
    assert "table_of_lanes" not in source and "= entry_of(" in source


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ((1.0,), "two or more"),
        ([1.0, 2.0], "a tuple"),
        ((1.0, "2"), "numbers"),
        ((1.0, float("nan")), "numbers"),
    ],
)
def test_wrong_tables_are_refused(values, why):
    g = mi.new_graph()
    with pytest.raises(mi.errors.GraphError, match=why):
        g.lookup(g.new_input((4, 4)), values=values)
