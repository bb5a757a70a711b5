"""The emulation of what kernels that stream codes call: tests/helpers/streams_on_cpu.h.

It has copies, barriers, tensor cores and conversions of codes. The conversions are compared with
the CUDA text, whose PTX instructions are emulated here.
"""

import re

import pytest
import torch

from mirage_hf.codegen.streams.helpers import (
    HELPERS,
    LANES_HELPERS,
    NIBBLE_HELPERS,
    POWER_OF_PAIR_HELPERS,
    ROWS_IN_WORDS_HELPERS,
    TABLE_HELPERS,
)
from mirage_hf.codegen.streams.tables import words
from mirage_hf.ops.dtypes import E2M1
from tests.helpers.cuda_on_cpu import CXX, ORDERS, run_kernel

pytestmark = pytest.mark.skipif(CXX is None, reason="needs a C++ compiler, such as g++")

SOURCE = r"""
// each thread has its own registers: six of the fragments, four of the sums
namespace digits {
__global__ void __launch_bounds__(64, 1) run(const unsigned* f, int* sums) {
  f += threadIdx.x * 6;
  auto& own = *reinterpret_cast<int(*)[4]>(sums + threadIdx.x * 4);
  multiply_digits(own, f[0], f[1], f[2], f[3], f[4], f[5]);
}
}  // namespace digits

namespace bytes {
__global__ void run(const unsigned* codes, unsigned* halves, unsigned* others) {
  for (int n = threadIdx.x; n < 32; n += 64)
    reinterpret_cast<Words<4>*>(halves)[n] = halves_of_float8(codes[2 * n], codes[2 * n + 1]);
  others[threadIdx.x] = largest_in_warp(threadIdx.x ^ 5);
  others[64 + threadIdx.x] = pick_bytes(0x33221100u, 0x77665544u, 0x6024u);
}
}  // namespace bytes

// warp 2 copies 8 rows of 64 numbers into a ring of two slots; the others write x + 1
namespace ring {
__global__ void run(const float* x, float* y) {
  extern __shared__ __align__(128) unsigned char memory[];
  auto full = reinterpret_cast<unsigned long long*>(memory), empty = full + 2;
  auto slots = reinterpret_cast<float*>(memory + 128);
  if (threadIdx.x == 0) {
    for (int n = 0; n < 4; ++n) start_barrier(full + n, 1 + n / 2);
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x >= 64) {
    if (threadIdx.x > 64) return;
    for (int row = 0; row < 8; ++row) {
      const int slot = row % 2;
      if (row >= 2) wait_for_phase(empty + slot, (row / 2 + 1) % 2);
      expect_bytes(full + slot, 256);
      copy_bytes(slots + slot * 64, x + row * 64, 256, full + slot);
    }
    return;
  }
  for (int row = 0; row < 8; ++row) {
    const int slot = row % 2;
    wait_for_phase(full + slot, row / 2 % 2);
    y[row * 64 + threadIdx.x] = slots[slot * 64 + threadIdx.x] + 1.0f;
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(empty + slot);
  }
}
}  // namespace ring

// warps 0 and 1 write each other's numbers once they have met; warp 2 announces a factor
namespace named {
__global__ void run(const float* x, float* y) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto shared = reinterpret_cast<float*>(memory);
  if (threadIdx.x >= 64) {
    shared[threadIdx.x] = 3.0f;
    announce<2>(96);
    return;
  }
  shared[threadIdx.x] = x[threadIdx.x];
  meet<1>(64);
  const float other = shared[threadIdx.x ^ 32];
  meet<2>(96);
  y[threadIdx.x] = other * shared[64 + threadIdx.x / 2];
}
}  // namespace named
"""
DIGITS = SOURCE[: SOURCE.index("namespace bytes")]
HALVES = DIGITS.replace("digits", "halves").replace("int*", "float*").replace("int(", "float(")


#: PTX instructions of the helpers. Halves are rounded once, because these
#: sums are exact in double.
PTX = r"""
namespace ptx {
inline unsigned lop3_b32(unsigned a, unsigned b, unsigned c, unsigned table) {
  unsigned bits = 0;
  for (int n = 0; n < 32; ++n)
    bits |= (table >> ((a >> n & 1) * 4 + (b >> n & 1) * 2 + (c >> n & 1)) & 1) << n;
  return bits;
}
inline double of_half(unsigned two, int n) {
  return __half2float({(unsigned short)(two >> 16 * n)});
}
inline unsigned as_halves(double low, double high) {
  return __float2half(float(low)).bits | unsigned(__float2half(float(high)).bits) << 16;
}
inline unsigned sub_f16x2(unsigned a, unsigned b) {
  return as_halves(of_half(a, 0) - of_half(b, 0), of_half(a, 1) - of_half(b, 1));
}
inline unsigned fma_rn_f16x2(unsigned a, unsigned b, unsigned c) {
  return as_halves(of_half(a, 0) * of_half(b, 0) + of_half(c, 0),
                   of_half(a, 1) * of_half(b, 1) + of_half(c, 1));
}
inline unsigned half_of_e4m3(unsigned code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 0x7f) == 0x7f) return 0x7fff;
  const double size = ldexp(exponent ? 8 + mantissa : mantissa, (exponent ? exponent : 1) - 10);
  return __float2half(float(size)).bits | (code >> 7 & 1) << 15;
}
inline unsigned cvt_rn_f16x2_e4m3x2(unsigned short two) {
  return half_of_e4m3(two) | half_of_e4m3(two >> 8) << 16;
}
inline unsigned prmt_b32(unsigned a, unsigned b, unsigned selector) {
  const unsigned words[2] = {a, b};
  unsigned picked = 0;
  for (int n = 0; n < 4; ++n) {
    const unsigned at = selector >> 4 * n & 15, byte = words[at / 4 % 2] >> at % 4 * 8 & 255;
    picked |= (at < 8 ? byte : byte / 128 * 255) << 8 * n;
  }
  return picked;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  return prmt_b32(a, b, selector & 0x7777);  // it has no sign mode
}
inline unsigned max_u32(unsigned a, unsigned b) { return max(a, b); }
inline unsigned min_u32(unsigned a, unsigned b) { return min(a, b); }
}  // namespace ptx
"""

#: A thread converts two words in each way.
CONVERT = r"""
__global__ void run(const unsigned* words, unsigned* converted) {
  for (int n = threadIdx.x; n < 2048; n += 64) {
    const unsigned first = words[2 * n], second = words[2 * n + 1];
    auto to = reinterpret_cast<Words<4>*>(converted) + 6 * n;
    to[0] = halves_of_4_bits(first, 0u);
    to[1] = halves_of_4_bits(first, 0x88888888u);
    to[2] = halves_of_8_bits(first, second, 0u);
    to[3] = halves_of_8_bits(first, second, 0x80808080u);
    to[4] = halves_of_float8(first, second);
    to[5] = Words<4>{upper_codes(first, 0u), upper_codes(first, 0x80808080u),
                     pick_bytes(first, second, 0x5140), pick_bytes(first, second, 0x7632)};
  }
}
"""

#: Each thread looks four codes of each word up, and converts its lowest byte to a power of two.
CONVERT_SMALL = r"""
__global__ void run(const unsigned* words, unsigned* converted) {
  for (int n = threadIdx.x; n < 65536; n += 64) {
    converted[2 * n] = looked_up(LOW, HIGH, words[n]);
    converted[2 * n + 1] = __float_as_uint(power_of_two(words[n] & 255));
  }
}
""".replace("LOW", "0x03020100u").replace("HIGH", "0x0c080604u")

#: Each thread looks all groups of four codes up, below and above others, as halves.
CONVERT_TABLE = r"""
__global__ void run(const unsigned* words, unsigned* converted) {
  for (int n = threadIdx.x; n < 65536; n += 64)
    reinterpret_cast<Words<4>*>(converted)[n] = halves_of_table(words[n], TABLE);
}
"""

#: A table of 16 entries: their higher and their lower bytes.
HIGH_BYTES = (64, 0, 127, 65, 100, 3, 77, 64, 63, 1, 126, 64, 90, 30, 64, 8)
LOW_BYTES = (0, 127, 127, 1, 64, 33, 99, 5, 0, 17, 0, 127, 2, 88, 0, 126)
_BYTES = [f"0x{word:08x}u" for word in (*words(HIGH_BYTES), *words(LOW_BYTES))]
CONVERT_TABLE = CONVERT_TABLE.replace("TABLE", ", ".join(_BYTES))

#: Each thread makes words of rows from eight words that are three words apart: words of eight rows,
#: of the first four rows and of the last four.
CONVERT_ROWS = r"""
__global__ void run(const unsigned char* words, unsigned* converted) {
  const auto from = words + threadIdx.x * 96;
  auto to = converted + threadIdx.x * 16;
  *reinterpret_cast<Words<8>*>(to) = words_of_rows<8>(from, 12, 0);
  *reinterpret_cast<Words<4>*>(to + 8) = words_of_rows<4>(from, 12, 0);
  *reinterpret_cast<Words<4>*>(to + 12) = words_of_rows<4>(from, 12, 1);
}
"""

#: Each thread loads pairs of elements: of 16 and of 32 bits, and in two ways.
LOAD_PAIRS = r"""
__global__ void run(const unsigned char* numbers, unsigned* loaded) {
  const auto halves = reinterpret_cast<const unsigned short*>(numbers) + threadIdx.x * 2;
  const auto words = reinterpret_cast<const float*>(numbers) + threadIdx.x * 2;
  auto to = reinterpret_cast<uint4*>(loaded) + threadIdx.x * 4;
  to[0] = load_pairs(halves);
  to[1] = load_constant_pairs(halves);
  to[2] = load_pairs(words);
  to[3] = load_constant_pairs(words);
}
"""

#: `LANES_HELPERS` as a GPU compiles it. Loads are C++.
LOADS_OF_LANES = re.sub(
    r'asm volatile\("ld\.global\.u32 %0, \[%1\];" : "=r"\((.*?)\) : "l"\((.*?)\)\);',
    r"\1 = *(\2);",
    re.sub(r"#ifdef __CUDA_ARCH__\n(.*?)#else\n.*?#endif\n", r"\1", LANES_HELPERS, flags=re.S),
)

#: Changes of `LOADS_OF_LANES` that give other pairs.
OTHER_LOADS = [
    ("words[1]", "words[2]"),
    ("words[8], words[9]", "words[4], words[5]"),
    ("words[8], words[9]", "words[9], words[8]"),
    ("words[0], words[4]", "words[0], words[1]"),
    ("words[4], words[8]", "words[8], words[4]"),
    ("words[12]", "words[9]"),
    ("if constexpr (sizeof(T) == 4)", "if constexpr (sizeof(T) == 2)"),
    ("second = sizeof(T) == 4 ? 1 : 4", "second = sizeof(T) == 4 ? 2 : 4"),
    ("second = sizeof(T) == 4 ? 1 : 4", "second = sizeof(T) == 4 ? 1 : 1"),
    ("fourth = sizeof(T) == 4 ? 9 : 12", "fourth = sizeof(T) == 4 ? 9 : 9"),
    ("fourth = sizeof(T) == 4 ? 9 : 12", "fourth = sizeof(T) == 4 ? 12 : 12"),
    ("(words + 8)", "(words + 4)"),
    ("(words + second)", "(words + fourth)"),
    ("x.y = ", "x.x = "),
]

#: Changes of `ROWS_IN_WORDS_HELPERS` that give other words.
OTHER_ROW_HELPERS = [
    ("(even & 0x0f0f0f0fu)", "(even & 0x0f0f0f07u)"),
    ("(odd << 4 & 0xf0f0f0f0u)", "(even << 4 & 0xf0f0f0f0u)"),
    ("(even >> 4 & 0x0f0f0f0fu)", "(even & 0x0f0f0f0fu)"),
    ("(odd & 0xf0f0f0f0u)", "(odd << 4 & 0xf0f0f0f0u)"),
    ("from + n * step", "from + n * 4"),
    ("0x6240u", "0x6420u"),
    ("0x6240u", "0x2640u"),
    ("0x6240u + 0x1111u *", "0x6240u + 0x1110u *"),
    ("(rows == 8 ? four : last)", "four"),
    ("(rows == 8 ? four : last)", "last"),
    ("(rows == 8 ? four : last)", "(rows == 8 ? four : 1 - last)"),
    ("column[odd + 2], which", "column[odd + 4], which"),
    ("(column[odd + 4], column[odd + 6]", "(column[odd + 6], column[odd + 4]"),
    ("(some, others, 0x5410)", "(others, some, 0x5410)"),
    ("0x7632", "0x3276"),
    ("bytes[1][odd] =", "bytes[1][1 - odd] ="),
    ("found.w[4 * four + n]", "found.w[4 * (rows / 4 - 1 - four) + n]"),
    ("= lower_of_both(bytes[n][0], bytes[n][1])", "= lower_of_both(bytes[n][1], bytes[n][0])"),
    ("= upper_of_both(bytes[n][0], bytes[n][1])", "= upper_of_both(bytes[1 - n][0], bytes[n][1])"),
    ("[4 * four + 2 + n]", "[4 * four + 3 - n]"),
]

#: Changes of `HELPERS` and `TABLE_HELPERS` that give other halves of a table.
OTHER_TABLE_HELPERS = [
    ("0x64486448u", "0x64486408u"),
    ("0x20002000u", "0x20002400u"),
    ("high, 0x64646464u", "high, 0x64646465u"),
    ("low, 0x64646464u", "low, 0x64646465u"),
    ("upper = word >> 16", "upper = word >> 12"),
    ("codes ^ 0x8888u", "codes"),
    ("| looked_up(c, d", "& looked_up(c, d"),
    ("looked_up(a, b, codes)", "looked_up(b, a, codes)"),
    ("h2, h3, upper)", "h3, h2, upper)"),
    ("l2, l3, word)", "l2, l3, upper)"),
    ("(high_1, low_1, 0x4342)", "(high_1, low_1, 0x4140)"),
    ("(high_0, low_0, 0x4140)", "(high_0, low_1, 0x4140)"),
    ('"r"(whole)', '"r"(part)'),
]

#: What all kernels call, and what some do.
SMALL_HELPERS = HELPERS + TABLE_HELPERS + POWER_OF_PAIR_HELPERS

_FUNCTION = re.compile(r"^(?:template <\w+ \w+> )?__device__ __forceinline__ .*?^\}", re.M | re.S)
_ASM = re.compile(r'asm\("(.*?)"\s*: "=r"\((\w+)\) : (.*?)\);')
_INPUT = re.compile(r'"r"\(([^()]+)\)')
_MOVE = re.compile(r"mov\.b32 \{(\w+), (\w+)\}, (\w+)")


def as_calls(asm: re.Match[str]) -> str:
    """Return an asm statement as calls of the functions in `PTX`."""
    values = [asm[2], *_INPUT.findall(asm[3])]
    text = re.sub(r"%(\d)", lambda place: values[int(place[1])], asm[1].replace("\\n", ""))
    calls = []
    for instruction in filter(None, text.removeprefix("{").removesuffix("}").split(";")):
        opcode, _, rest = instruction.partition(" ")
        to, *read = rest.split(", ")
        if opcode == ".reg":
            calls.append(f"unsigned short {rest.removeprefix('.b16 ')};")
        elif moved := _MOVE.fullmatch(instruction):
            low, high, word = moved.groups()
            calls.append(f"{low} = {word} & 0xffff; {high} = {word} >> 16;")
        else:
            calls.append(f"{to} = {opcode.replace('.', '_')}({', '.join(read)});")
    return " ".join(calls)


def cuda_helpers(helpers: str) -> str:
    """Return the functions of `HELPERS` that compute with registers alone, as C++."""
    functions = [
        f for f in _FUNCTION.findall(helpers) if "asm volatile" not in f and "shared" not in f
    ]
    return "using namespace ptx;\n" + _ASM.sub(as_calls, "\n".join(functions))


#: Changes of `HELPERS` that give other halves, bytes or codes.
OTHER_HELPERS = [
    ("0x6a;", "0xea;"),
    ("0xf0f0f0f0, 0x28;", "0xf0f0f0f0, 0x20;"),
    ("0xf0f0f0f0, 0x28;", "0xf0f0f0f1, 0x28;"),
    ("0x2c002c00u", "0x2c003000u"),
    ("0xd480d480u", "0xd400d480u"),
    ("low), 0x64086408u", "low), 0x64006408u"),
    ("(word, 0x000f000fu", "(word, 0x000f0007u"),
    ("(upper, 0x00f000f0u", "(upper, 0x007000f0u"),
    ("low = 0x64006400u", "low = 0x60006400u"),
    ("high = 0x64006400u", "high = 0x64006000u"),
    ("(flipped & 0x000f000fu)", "(flipped & 0x000f0000u)"),
    ("(flipped & 0x00f000f0u)", "(flipped & 0x000000f0u)"),
    ("word >> 8", "word >> 4"),
    ("one = 0x64646464u", "one = 0x64646465u"),
    ("zero = 0x64806480u", "zero = 0x64806400u"),
    ("first, one, 0x4140", "first, one, 0x4041"),
    ("first, one, 0x4342", "first, one, 0x4340"),
    ("second, one, 0x4140", "second, one, 0x4141"),
    ("second, one, 0x4342", "second, one, 0x4243"),
    ("  first ^= flipped;", ""),
    ("  second ^= flipped;", ""),
    ("e4m3x2 %0, low;", "e4m3x2 %0, high;"),
    ("mov.b32 {low, high}", "mov.b32 {high, low}"),
    ("first >> 16", "first >> 8"),
    ("two_float8(second >> 16)", "two_float8(second)"),
    ("__byte_perm(a, b,", "__byte_perm(b, a,"),
]


#: Changes of `SMALL_HELPERS` that give other bytes or powers of two.
OTHER_SMALL_HELPERS = [
    ("prmt.b32 %0, %1, %2, %3;", "prmt.b32 %0, %2, %1, %3;"),
    ("prmt.b32 %0, %1, %2, %3;", "prmt.b32 %0, %1, %1, %3;"),
    ('"r"(codes)', '"r"(codes & 0x7777u)'),
    ('"r"(codes)', '"r"(codes & 0x0fffu)'),
    ('"r"(codes)', '"r"(codes >> 16)'),
    ('"r"(codes)', '"r"(codes ^ 0x8888u)'),
    ("byte << 23", "byte << 22"),
    ("byte << 23", "byte << 24"),
    ("byte << 23", "byte + 1 << 23"),
    ("0x00400000u", "0x00000000u"),
    ("0x00400000u", "0x00200000u"),
    ("0x00400000u", "0x00800000u"),
    ("0x00400000u", "0x01000000u"),
    (
        'max.u32 %0, %1, %2;" : "=r"(bits) : "r"(byte',
        'min.u32 %0, %1, %2;" : "=r"(bits) : "r"(byte',
    ),
]


def conversions(helpers: str, changes: list[tuple[str, str]], kernel: str, prefix: str = "") -> str:
    """Return kernels that convert: with the CUDA text, with that of the CPU, and with changes.

    Args:
        helpers: The CUDA text.
        changes: What is changed in it, each in a kernel of its own.
        kernel: The kernel that calls the functions.
        prefix: What the names of the namespaces begin with.
    """
    texts = {f"{prefix}cuda": cuda_helpers(helpers), f"{prefix}cpu": ""}
    for n, (before, after) in enumerate(changes):
        assert helpers.count(before) >= 1, before
        texts[f"{prefix}other_{n}"] = cuda_helpers(helpers.replace(before, after, 1))
    return "\n".join(
        f"namespace {name} {{\n{text}\n{kernel}}}  // namespace {name}\n"
        for name, text in texts.items()
    )


WAIT = "wait_for_phase(full + slot, row / 2 % 2);"

#: A kernel, what is changed in it, and what is found then: a wrong result or an error.
MISTAKES = [
    ("ring", WAIT, "", "wrong"),
    ("ring", WAIT, "wait_for_phase(full, 0);", "still expects 2 arrivals and 0 bytes"),
    ("ring", WAIT, "if (row == 7) return; " + WAIT, "ends before its bulk copies"),
    ("ring", "if (row >= 2)", "if (false)", "more arrivals"),
    ("ring", "    __syncwarp();", "", "threads wait"),
    ("ring", "  __syncthreads();", "", "has not started"),
    ("ring", "(row / 2 + 1) % 2);", "row / 2 % 2);", "still expects"),
    ("ring", "arrive(empty + slot);", "arrive(empty);", "still expects 2 arrivals"),
    ("ring", "full + slot, 256", "full + slot, 272", "and 16 bytes"),
    ("ring", "x + row * 64, 256", "x + row * 64 + 1, 256", "multiples of 16"),
    ("ring", "slots + slot * 64, x", "slots + slot * 200, x", "outside of shared memory"),
    ("named", "meet<1>(64);", "", "wrong"),
    ("named", "announce<2>(96);", "", "threads wait"),
    ("named", "meet<2>(96);", "meet<2>(64);", "different counts"),
]


def changed(n):
    """Return the n-th kernel with a mistake, in a namespace of its own."""
    name, before, after, _ = MISTAKES[n]
    text = SOURCE[SOURCE.index(f"namespace {name} {{") : SOURCE.index(f"}}  // namespace {name}")]
    assert text.count(before) == 1
    return (
        text.replace(before, after).replace(f"namespace {name} ", f"namespace mistake_{n} ") + "}\n"
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streams")
    source = SOURCE + HALVES + "".join(changed(n) for n in range(len(MISTAKES))) + PTX
    source += conversions(HELPERS, OTHER_HELPERS, CONVERT)
    source += conversions(SMALL_HELPERS, OTHER_SMALL_HELPERS, CONVERT_SMALL, "small_")
    source += conversions(HELPERS + TABLE_HELPERS, OTHER_TABLE_HELPERS, CONVERT_TABLE, "table_")
    rows = HELPERS + NIBBLE_HELPERS + ROWS_IN_WORDS_HELPERS
    source += conversions(rows, OTHER_ROW_HELPERS, CONVERT_ROWS, "rows_")
    source += conversions(LOADS_OF_LANES, OTHER_LOADS, LOAD_PAIRS, "pairs_")

    def run(name, tensors, order=0, threads=96):
        return run_kernel(source, name, 1, threads, 1024, tensors, order, folder)

    return run


def fragments(a, b):
    """Return the registers of 32 lanes for a 16-row and an 8-column matrix, k along dim 1."""
    rows = a.view(torch.int32).view(2, 8, 2, 4).permute(1, 3, 2, 0).reshape(32, 4)
    columns = b.view(torch.int32).view(8, 2, 4).transpose(1, 2).reshape(32, 2)
    return torch.cat((rows, columns), 1)


def matrix(sums):
    """Return the 16 x 8 matrix that 32 lanes hold."""
    return sums.view(8, 4, 2, 2).permute(2, 0, 1, 3).reshape(16, 8)


@pytest.mark.parametrize(("name", "k"), [("digits", 32), ("halves", 16)])
def test_products_of_fragments_are_those_of_matrices(run, name, k):
    a, b = torch.randn(2, 16, k).half(), torch.randn(2, 8, k).half()
    if name == "digits":
        a, b = ((40 * x).clamp(-128, 127).to(torch.int8) for x in (a, b))
    exact = (a.double() @ b.double().mT).to(torch.int32 if name == "digits" else torch.float32)
    sums = torch.ones(2, 32, 4, dtype=exact.dtype)
    registers = torch.stack([fragments(x, y) for x, y in zip(a, b, strict=True)])
    assert run(name, (registers, sums), 2, threads=64) == ""
    got = torch.stack([matrix(x) for x in sums])
    torch.testing.assert_close(got, exact + 1, rtol=1e-6, atol=1e-6)


def test_bytes_are_converted_and_picked(run):
    codes = torch.arange(256, dtype=torch.uint8)
    halves, others = torch.zeros(128, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    assert run("bytes", (codes, halves, others), threads=64) == ""
    want = codes.view(torch.float8_e4m3fn).half()
    torch.testing.assert_close(halves.view(torch.float16), want, rtol=0, atol=0, equal_nan=True)
    assert others.tolist() == [31] * 32 + [63] * 32 + [0x66002244] * 64


def each_byte_in_each_place():
    """Return rows of eight bytes: each byte in each place, among random ones."""
    codes = torch.randint(256, (256, 8, 8), dtype=torch.uint8)
    for place in range(8):
        codes[:, place, place] = torch.arange(256, dtype=torch.uint8)
    return codes.view(2048, 8)


def converted(run, name, codes):
    """Return what a kernel of `conversions` converts rows of bytes to, as halves and as words."""
    words = torch.zeros(len(codes), 6, 4, dtype=torch.int32)
    assert run(name, (codes, words), threads=64) == ""
    return words[:, :5].contiguous().view(torch.float16), words[:, 5]


def test_the_cuda_text_converts_codes_as_the_emulation_does(run):
    codes = each_byte_in_each_place()
    halves, words = converted(run, "cuda", codes)
    nibbles = torch.stack((codes[:, :4] & 15, codes[:, :4] >> 4), 2).view(-1, 8).int()
    nibbles = nibbles[:, [0, 4, 1, 5, 2, 6, 3, 7]]  # the order of halves
    whole = codes.int()
    want = [
        nibbles - 8,
        (nibbles ^ 8) - 8,
        whole - 128,
        codes.view(torch.int8),
        codes.view(torch.float8_e4m3fn).half(),
    ]
    for n, x in enumerate(want):
        torch.testing.assert_close(halves[:, n], x.half(), rtol=0, atol=0, equal_nan=True)
    same_halves, same_words = converted(run, "cpu", codes)
    assert torch.equal(halves.view(torch.int16), same_halves.view(torch.int16))
    assert torch.equal(words, same_words)


@pytest.mark.parametrize("n", range(len(OTHER_HELPERS)))
def test_a_change_of_the_cuda_text_is_noticed(run, n):
    codes = each_byte_in_each_place()
    found, want = converted(run, f"other_{n}", codes), converted(run, "cpu", codes)
    same = (
        torch.equal(x.view(torch.int16), y.view(torch.int16))
        for x, y in zip(found, want, strict=True)
    )
    assert not all(same)


def all_groups_of_codes():
    """Return words with all groups of four codes, below random codes."""
    generator = torch.Generator().manual_seed(0)
    upper = torch.randint(-(2**15), 2**15, (65536,), generator=generator)
    return (upper * 65536 + torch.arange(65536)).to(torch.int32)


def converted_small(run, name):
    """Return what a kernel converts all groups of four codes and all bytes to."""
    words = all_groups_of_codes()
    found = torch.zeros(65536, 2, dtype=torch.int32)
    assert run(f"small_{name}", (words, found), threads=64) == ""
    return found


def test_the_cuda_text_converts_small_floats_and_powers_as_the_emulation_does(run):
    found = converted_small(run, "cuda")
    codes = torch.arange(65536)[:, None] >> torch.tensor([0, 4, 8, 12]) & 15
    twice = torch.tensor([2 * x if n < 8 else 0 for n, x in enumerate(E2M1)], dtype=torch.uint8)
    assert torch.equal(found[:, 0].contiguous().view(torch.uint8).view(-1, 4), twice[codes])
    powers = found[:256, 1].contiguous().view(torch.float32)
    bytes_ = torch.arange(255, dtype=torch.uint8)
    assert torch.equal(powers[:255], bytes_.view(torch.float8_e8m0fnu).float())
    assert powers[255] == torch.inf
    assert torch.equal(found, converted_small(run, "cpu"))


def test_positive_floats_less_those_of_flipped_codes_are_all_floats(run):
    """Products subtract the sums of codes that have a sign: those of codes with flipped signs."""
    found = converted_small(run, "cuda")[:, 0].contiguous().view(torch.uint8).view(-1, 4).int()
    numbers = torch.arange(65536)
    codes = numbers[:, None] >> torch.tensor([0, 4, 8, 12]) & 15
    want = (2 * torch.tensor(E2M1)).int()[codes]
    assert torch.equal(found - found[numbers ^ 0x8888], want)


@pytest.mark.parametrize("n", range(len(OTHER_SMALL_HELPERS)))
def test_a_change_of_the_small_cuda_text_is_noticed(run, n):
    assert not torch.equal(converted_small(run, f"other_{n}"), converted_small(run, "cpu"))


def converted_by_table(run, name):
    """Return what a kernel looks all groups of codes up as: eight halves for each word."""
    found = torch.zeros(65536, 8, dtype=torch.float16)
    assert run(f"table_{name}", (all_groups_of_codes(), found), threads=64) == ""
    return found


def test_the_cuda_text_looks_codes_up_as_the_emulation_does(run):
    found = converted_by_table(run, "cuda")
    high, low = torch.tensor(HIGH_BYTES), torch.tensor(LOW_BYTES)
    entries = (high - 64 + low / 128).half()
    codes = all_groups_of_codes()[:, None] >> torch.arange(0, 32, 4) & 15
    assert torch.equal(found, entries[codes.long()])
    assert torch.equal(found, converted_by_table(run, "cpu"))


@pytest.mark.parametrize("n", range(len(OTHER_TABLE_HELPERS)))
def test_a_change_of_the_cuda_text_of_tables_is_noticed(run, n):
    found, want = converted_by_table(run, f"other_{n}"), converted_by_table(run, "cpu")
    assert not torch.equal(found.view(torch.int16), want.view(torch.int16))


def words_of_columns():
    """Return words of eight columns, three words apart, 64 times."""
    generator = torch.Generator().manual_seed(0)
    bounds = torch.iinfo(torch.int32)
    return torch.randint(
        bounds.min, bounds.max + 1, (64, 8, 3), generator=generator, dtype=torch.int32
    )


def converted_to_rows(run, name):
    """Return what a kernel makes of `words_of_columns`: words of 8, 4 and 4 rows."""
    found = torch.zeros(64, 16, dtype=torch.int32)
    assert run(f"rows_{name}", (words_of_columns(), found), threads=64) == ""
    return found


def codes_of_words(words):
    """Return the codes of words, those in the lowest bits first."""
    return words[..., None] >> torch.arange(0, 32, 4) & 15


def test_the_cuda_text_makes_words_of_rows_as_the_emulation_does(run):
    found = converted_to_rows(run, "cuda")
    columns = codes_of_words(words_of_columns()[:, :, 0])
    in_order = torch.empty_like(columns)
    in_order[..., [0, 2, 4, 6, 1, 3, 5, 7]] = columns
    rows = in_order.mT
    assert torch.equal(codes_of_words(found), torch.cat((rows, rows[:, :4], rows[:, 4:]), 1))
    assert torch.equal(found, converted_to_rows(run, "cpu"))


@pytest.mark.parametrize("n", range(len(OTHER_ROW_HELPERS)))
def test_a_change_of_the_cuda_text_of_rows_is_noticed(run, n):
    assert not torch.equal(converted_to_rows(run, f"other_{n}"), converted_to_rows(run, "cpu"))


def pairs_of(run, name):
    """Return the memory that each thread loads pairs from, and what a kernel of loads gives."""
    numbers = torch.arange(2 * 64 + 24, dtype=torch.int32) * 0x10003 + 0x20001
    loaded = torch.zeros(64, 4, 4, dtype=torch.int32)
    assert run(f"pairs_{name}", (numbers, loaded), threads=64) == ""
    return numbers, loaded


def test_the_cuda_text_loads_pairs_as_the_emulation_does(run):
    numbers, loaded = pairs_of(run, "cuda")
    of_thread = 2 * torch.arange(64)[:, None]
    for place, of_bits, count in ((0, torch.int16, 8), (2, torch.int32, 4)):
        columns = torch.tensor([8 * (n // 2) + n % 2 for n in range(count)])
        want = numbers.view(of_bits)[of_thread + columns]
        for way in (place, place + 1):
            assert torch.equal(loaded[:, way].contiguous().view(of_bits), want)
    assert torch.equal(loaded, pairs_of(run, "cpu")[1])


@pytest.mark.parametrize("n", range(len(OTHER_LOADS)))
def test_a_change_of_the_cuda_text_of_pairs_is_noticed(run, n):
    assert not torch.equal(pairs_of(run, f"other_{n}")[1], pairs_of(run, "cpu")[1])


def outcomes(run, name, copies):
    """Return what happens in each order: an error, "right" or "wrong"."""
    x, found = torch.randn(512), []
    want = x + 1 if copies else 3 * x[:64].view(2, 32).flip(0).flatten()
    for order in ORDERS:
        y = torch.zeros_like(want)
        error = run(name, (x, y), order)
        found.append(error or ("right" if torch.equal(y, want) else "wrong"))
    return found


@pytest.mark.parametrize("name", ["ring", "named"])
def test_barriers_order_the_threads_of_a_block(run, name):
    assert outcomes(run, name, name == "ring") == ["right"] * len(ORDERS)


@pytest.mark.parametrize("n", range(len(MISTAKES)))
def test_a_mistake_is_found_in_some_order(run, n):
    name, *_, finding = MISTAKES[n]
    found = outcomes(run, f"mistake_{n}", name == "ring")
    assert any(finding in x for x in found), found
