"""Write scalar programs as Triton: an algebra of expressions, and helpers of kernel files."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from mirage_hf.ops import table
from mirage_hf.ops.scalar import ScalarProgram

ATOM, UNARY, PRODUCT, SUM = 3, 2, 1, 0


@dataclass(frozen=True)
class Expr:
    """An expression.

    Attributes:
        text: Its text.
        level: The precedence of its outermost operator.
        number: Its value if it is a number, else None.
    """

    text: str
    level: int = ATOM
    number: float | None = None

    def at(self, level: int) -> str:
        """Return the text, in parentheses unless it binds at least as tightly as `level`."""
        return self.text if self.level >= level else f"({self.text})"


def constant(x: float) -> Expr:
    """Return a number as an expression."""
    if math.isinf(x) or math.isnan(x):
        return Expr(f'float("{x}")', ATOM, x)
    return Expr(repr(float(x)), ATOM if x >= 0 else UNARY, x)


def _call(function: str) -> Callable[..., Expr]:
    return lambda *args: Expr(f"{function}({', '.join(a.text for a in args)})")


def _bound(function: str, neutral: float) -> Callable[[Expr, Expr], Expr]:
    def text(x: Expr, y: Expr) -> Expr:
        if y.number == neutral:
            return x
        return Expr(f"tl.{function}({x.text}, {y.text}, propagate_nan=tl.PropagateNan.ALL)")

    return text


def _power(x: Expr, y: Expr) -> Expr:
    if y.number in (1.0, 2.0, 3.0, 4.0):
        return Expr(" * ".join([x.at(UNARY)] * int(y.number)), PRODUCT if y.number > 1 else x.level)
    if y.number == 0.5:
        return Expr(f"tl.sqrt({x.text})")
    if y.number in (-0.5, -1.0):
        return (
            Expr(f"tl.rsqrt({x.text})")
            if y.number == -0.5
            else Expr(f"1.0 / {x.at(UNARY)}", PRODUCT)
        )
    base, exponent = (
        f"tl.full([], {e.text}, tl.float32)" if e.number is not None else e.text for e in (x, y)
    )
    return Expr(f"power({base}, {exponent})")


def _lookup(x: Expr, *values: Expr) -> Expr:
    return Expr(f"entry_of({x.text}, ({', '.join(v.text for v in values)}))")


def _bits(x: Expr, start: Expr, count: Expr) -> Expr:
    assert count.number is not None
    byte, shift = (
        f"as_integer({e.text})" if e.number is None else f"{math.floor(e.number) % 256}"
        for e in (x, start)
    )
    return Expr(f"bits_of({byte}, {shift}, {int(count.number)})")


TRITON_ALGEBRA: Mapping[str, Callable[..., Expr]] = {
    "add": lambda x, y: Expr(f"{x.at(SUM)} + {y.at(PRODUCT)}", SUM),
    "sub": lambda x, y: Expr(f"{x.at(SUM)} - {y.at(PRODUCT)}", SUM),
    "mul": lambda x, y: Expr(f"{x.at(PRODUCT)} * {y.at(UNARY)}", PRODUCT),
    "div": lambda x, y: Expr(f"{x.at(PRODUCT)} / {y.at(UNARY)}", PRODUCT),
    "neg": lambda x: Expr(f"-{x.at(ATOM)}", UNARY),
    "exp": _call("tl.exp"),
    "sqrt": _call("tl.sqrt"),
    "rsqrt": _call("tl.rsqrt"),
    "erf": _call("tl.erf"),
    "tanh": _call("tanh"),
    "log1p": _call("log1p"),
    "max": _bound("maximum", -math.inf),
    "min": _bound("minimum", math.inf),
    "pow": _power,
    "select": lambda m, x, y: Expr(f"tl.where({m.at(SUM)} != 0.0, {x.text}, {y.text})"),
    "lookup": _lookup,
    "bits": _bits,
}

#: Functions that kernels may call, by name. A file carries those that it uses.
HELPERS: Mapping[str, str] = {
    "prefetch": '''
@triton.jit
def prefetch(pointers):
    """Prefetch the cache lines at these addresses into the L2, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        tl.int32,
        is_pure=False,
        pack=1,
    )
''',
    "rounded": '''
@triton.jit
def rounded(x):
    """Return products as they are rounded, for a sum that several threads compute.

    If the compiler fused a product with the first addition, a thread's own product would not be
    rounded, but that of the other thread would. So the threads' sums would differ in their last
    bits, and chance would decide which one is stored.
    """
    return tl.where(x == 0.0, 0.0, x)
''',
    "materialized": '''
@triton.jit
def materialized(x):
    """Return a reshaped tile as a tile of its own, for a product on tensor cores.

    Triton makes a view of shared memory of a reshaped factor, and then rejects that view.
    """
    return tl.where(x == 0.0, 0.0, x)
''',
    "uint4_as_float32": '''
@triton.jit
def uint4_nibble(words, number: tl.constexpr, zero: tl.constexpr, exponent):
    """Return one nibble of each word, 0 to 4, minus `zero` as float32.

    Its bits go into the mantissa of 2^23, where they count 16^number each. So one logical
    instruction and a multiply-add decode it, without a conversion of integers.
    """
    unit: tl.constexpr = 1.0 / (1 << (4 * number))
    bits = (words & (15 << (4 * number))) | exponent
    return bits.to(tl.float32, bitcast=True) * unit - (8388608.0 * unit + zero)


@triton.jit
def uint4_as_float32(words, zero: tl.constexpr):
    """Return the eight codes of each int32 word minus `zero`, lowest bits first.

    The codes are in three new last dims of 2.
    """
    # The exponent of 2^23. `program_id(1)` is 0, but the compiler must not know that: it joins an
    # `and` with a constant and an `or` with a variable to one instruction.
    exponent = 0x4B000000 + tl.program_id(1)
    high = words >> 20
    n0, n4 = uint4_nibble(words, 0, zero, exponent), uint4_nibble(words, 4, zero, exponent)
    n2, n6 = uint4_nibble(words, 2, zero, exponent), uint4_nibble(high, 1, zero, exponent)
    n1, n5 = uint4_nibble(words, 1, zero, exponent), uint4_nibble(high, 0, zero, exponent)
    n3, n7 = uint4_nibble(words, 3, zero, exponent), uint4_nibble(high, 2, zero, exponent)
    even = tl.join(tl.join(n0, n4), tl.join(n2, n6))
    odd = tl.join(tl.join(n1, n5), tl.join(n3, n7))
    return tl.join(even, odd)
''',
    "high_first": '''
@triton.jit
def high_first(codes):
    """Return codes with the high half of each byte first. The last dim is that of the halves."""
    low, high = tl.split(codes)
    return tl.join(high, low)
''',
    "INTERPRETED": """
#: True if Triton's interpreter runs the kernels. It knows no assembly.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
""",
    "uint4_pairs": '''
@triton.jit
def two_codes(halves, number: tl.constexpr, exponent: tl.constexpr):
    """Return one nibble of each half of these words as a 16-bit float, the low half first.

    The nibbles go into the mantissas of `exponent`.
    """
    nibbles = halves >> (4 * number)
    if INTERPRETED:
        pair = (nibbles & 0x000F000F) | exponent
    else:  # one instruction instead of two
        pair = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x000f000f, $2, 0xea;",
            "=r,r,r",
            [nibbles, exponent],
            tl.int32,
            is_pure=True,
            pack=1,
        )
    return pair.to(tl.int16), (pair >> 16).to(tl.int16)


@triton.jit
def uint4_pairs(words, offset: tl.constexpr, dtype: tl.constexpr):
    """Return the eight codes of pairs of int32 words as 16-bit floats, minus an offset.

    The last dim holds two words. The result has four last dims of 2: three number the code, and one
    the word. An element in front of these comes from the same pair of words, so the codes with the
    same number of two words are in one register.
    """
    exponent: tl.constexpr = 0x43004300 if dtype == tl.bfloat16 else 0x64006400
    first, second = tl.split(words)
    if INTERPRETED:
        low = (first & 0xFFFF) | (second << 16)
        high = ((first >> 16) & 0xFFFF) | (second & -0x10000)
    else:  # one instruction each instead of two
        low, high = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;",
            "=&r,=&r,r,r",
            [first, second],
            (tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    a0, b0 = two_codes(low, 0, exponent)
    a1, b1 = two_codes(low, 1, exponent)
    a2, b2 = two_codes(low, 2, exponent)
    a3, b3 = two_codes(low, 3, exponent)
    a4, b4 = two_codes(high, 0, exponent)
    a5, b5 = two_codes(high, 1, exponent)
    a6, b6 = two_codes(high, 2, exponent)
    a7, b7 = two_codes(high, 3, exponent)
    even, odd = tl.join(tl.join(a0, a4), tl.join(a2, a6)), tl.join(tl.join(a1, a5), tl.join(a3, a7))
    firsts = tl.join(even, odd)
    even, odd = tl.join(tl.join(b0, b4), tl.join(b2, b6)), tl.join(tl.join(b1, b5), tl.join(b3, b7))
    codes = tl.join(firsts, tl.join(even, odd))
    return codes.to(dtype, bitcast=True) - offset
''',
    "e2m1_pairs": '''
@triton.jit
def two_small_floats(halves, second: tl.constexpr):
    """Return a 4-bit float of each half of these words times 2^-126, the low half first.

    The code is the first or the second nibble of a half. A product with two powers of two moves
    its sign to the sign of a bfloat16, and the other bits to the lowest bits of the exponent and
    the highest one of the mantissa.
    """
    if second:
        pair = (halves & 0x00F000F0) * 0x0104
    else:
        pair = (halves & 0x000F000F) * 0x1040
    pair = pair & 0x81C081C0
    return pair.to(tl.int16), (pair >> 16).to(tl.int16)


@triton.jit
def e2m1_pairs(words):
    """Return the eight 4-bit floats (e2m1) of pairs of int32 words as bfloat16.

    The last dim holds two words. The result has the dims that `uint4_pairs` gives. A code becomes
    2^-126 of its number, exactly: 0.5 is a subnormal in both formats. So the last product is exact.
    """
    low, high = halves_of_pairs(words)
    low, high = low.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True)
    a0, b0 = two_small_floats(low, False)
    a1, b1 = two_small_floats(low, True)
    a2, b2 = two_small_floats(low >> 8, False)
    a3, b3 = two_small_floats(low >> 8, True)
    a4, b4 = two_small_floats(high, False)
    a5, b5 = two_small_floats(high, True)
    a6, b6 = two_small_floats(high >> 8, False)
    a7, b7 = two_small_floats(high >> 8, True)
    even, odd = tl.join(tl.join(a0, a4), tl.join(a2, a6)), tl.join(tl.join(a1, a5), tl.join(a3, a7))
    firsts = tl.join(even, odd)
    even, odd = tl.join(tl.join(b0, b4), tl.join(b2, b6)), tl.join(tl.join(b1, b5), tl.join(b3, b7))
    codes = tl.join(firsts, tl.join(even, odd))
    return codes.to(tl.bfloat16, bitcast=True) * 2.0**126
''',
    "halves_of_pairs": '''
@triton.jit
def halves_of_pairs(words):
    """Return the low halves of two words as one word, and their high halves as another one.

    The last dim holds the two words.
    """
    first, second = tl.split(words)
    if INTERPRETED:
        low = (first & 0xFFFF) | (second << 16)
        high = ((first >> 16) & 0xFFFF) | (second & -0x10000)
    else:  # one instruction each instead of two
        low, high = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;",
            "=&r,=&r,r,r",
            [first, second],
            (tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    return low, high
''',
    "table_of_lanes": '''
@triton.jit
def one_of_two(values: tl.constexpr, first: tl.constexpr, step: tl.constexpr, takes_second):
    """Return values[first + step] if a condition holds, else values[first]."""
    second: tl.constexpr = first + step
    return tl.where(takes_second, values[second], values[first])


@triton.jit
def table_of_lanes(values: tl.constexpr):
    """Return a number that differs between the threads of a warp: thread n has values[n % 16].

    `uint4_entries` reads it. Its type is int32.
    """
    if INTERPRETED:
        return 0
    lane = tl.inline_asm_elementwise(
        "mov.u32 $0, %laneid;", "=r,r", [tl.program_id(0)], tl.int32, is_pure=True, pack=1
    )
    odd = (lane & 1) != 0
    a, b = one_of_two(values, 0, 1, odd), one_of_two(values, 2, 1, odd)
    c, d = one_of_two(values, 4, 1, odd), one_of_two(values, 6, 1, odd)
    e, f = one_of_two(values, 8, 1, odd), one_of_two(values, 10, 1, odd)
    g, h = one_of_two(values, 12, 1, odd), one_of_two(values, 14, 1, odd)
    second = (lane & 2) != 0
    a, c = tl.where(second, b, a), tl.where(second, d, c)
    e, g = tl.where(second, f, e), tl.where(second, h, g)
    third = (lane & 4) != 0
    a, e = tl.where(third, c, a), tl.where(third, g, e)
    return tl.where((lane & 8) != 0, e, a).to(tl.float32).to(tl.int32, bitcast=True)
''',
    "uint4_entries": '''
@triton.jit
def uint4_entries(words, table, values: tl.constexpr):
    """Return the elements of a table whose indices are the eight codes of each int32 word.

    The first code is in the lowest bits. The codes are in three new last dims of 2. Each thread of
    a warp has one element of the table, so an exchange between threads is a lookup. It reads four
    bits of an index only.
    """
    if INTERPRETED:
        return entry_of(uint4_as_float32(words, 0.0), values)
    n0, n1, n2, n3, n4, n5, n6, n7 = tl.inline_asm_elementwise(
        """
        {
        .reg .b32 index;
        shfl.sync.idx.b32 $0, $9, $8, 0x101f, 0xffffffff;
        shr.u32 index, $8, 4;
        shfl.sync.idx.b32 $1, $9, index, 0x101f, 0xffffffff;
        shr.u32 index, $8, 8;
        shfl.sync.idx.b32 $2, $9, index, 0x101f, 0xffffffff;
        shr.u32 index, $8, 12;
        shfl.sync.idx.b32 $3, $9, index, 0x101f, 0xffffffff;
        shr.u32 index, $8, 16;
        shfl.sync.idx.b32 $4, $9, index, 0x101f, 0xffffffff;
        shr.u32 index, $8, 20;
        shfl.sync.idx.b32 $5, $9, index, 0x101f, 0xffffffff;
        shr.u32 index, $8, 24;
        shfl.sync.idx.b32 $6, $9, index, 0x101f, 0xffffffff;
        shr.u32 index, $8, 28;
        shfl.sync.idx.b32 $7, $9, index, 0x101f, 0xffffffff;
        }
        """,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
        [words, table],
        (tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )
    even = tl.join(tl.join(n0, n4), tl.join(n2, n6))
    odd = tl.join(tl.join(n1, n5), tl.join(n3, n7))
    return tl.join(even, odd).to(tl.float32, bitcast=True)
''',
    "small_e2m1": '''
@triton.jit
def small_e2m1(words, values: tl.constexpr):
    """Return the 4-bit floats (e2m1) of each int32 word times 2^-14, as float32.

    The first code is in the lowest bits. The codes are in three new last dims of 2. The bits of a
    code become the sign, the last bits of the exponent and the first bit of the mantissa of a
    float16. That is 2^-14 of the number, exactly: 0.5 is a subnormal in both formats. All these
    bits are in the high byte of a float16, so four codes are moved at once.
    """
    if INTERPRETED:
        return entry_of(uint4_as_float32(words, 0.0), values) * 2.0**-14
    n0, n1, n2, n3, n4, n5, n6, n7 = tl.inline_asm_elementwise(
        """
        {
        .reg .b32 signs, bytes, pair;
        .reg .b16 low, high;
        shl.b32 signs, $8, 4;
        and.b32 signs, signs, 0x80808080;
        shl.b32 bytes, $8, 1;
        lop3.b32 bytes, bytes, 0x0E0E0E0E, signs, 0xEA;
        prmt.b32 pair, bytes, 0, 0x2404;
        mov.b32 {low, high}, pair;
        cvt.f32.f16 $0, low;
        cvt.f32.f16 $4, high;
        and.b32 pair, bytes, 0xFF00FF00;
        mov.b32 {low, high}, pair;
        cvt.f32.f16 $2, low;
        cvt.f32.f16 $6, high;
        and.b32 signs, $8, 0x80808080;
        shr.u32 bytes, $8, 3;
        lop3.b32 bytes, bytes, 0x0E0E0E0E, signs, 0xEA;
        prmt.b32 pair, bytes, 0, 0x2404;
        mov.b32 {low, high}, pair;
        cvt.f32.f16 $1, low;
        cvt.f32.f16 $5, high;
        and.b32 pair, bytes, 0xFF00FF00;
        mov.b32 {low, high}, pair;
        cvt.f32.f16 $3, low;
        cvt.f32.f16 $7, high;
        }
        """,
        "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r",
        [words],
        (tl.float32,) * 8,
        is_pure=True,
        pack=1,
    )
    even = tl.join(tl.join(n0, n4), tl.join(n2, n6))
    odd = tl.join(tl.join(n1, n5), tl.join(n3, n7))
    return tl.join(even, odd)
''',
    "int8_as_float32": '''
@triton.jit
def int8_as_float32(x):
    """Return integers of 8 bits as float32: x + 128 becomes the mantissa of 2^23.

    The instruction that converts integers runs at a fraction of the rate of others.
    """
    bits = x.to(tl.uint8, bitcast=True).to(tl.int32) ^ 0x4B000080
    return bits.to(tl.float32, bitcast=True) - 8388736.0
''',
    "four_bytes": '''
@triton.jit
def four_bytes(words):
    """Return the four bytes of each int32 word, lowest first, in two new last dims of 2."""
    b0, b1, b2, b3 = words & 255, (words >> 8) & 255, (words >> 16) & 255, (words >> 24) & 255
    return tl.join(tl.join(b0, b2), tl.join(b1, b3))
''',
    "bytes_minus": '''
@triton.jit
def bytes_minus(words, offset: tl.constexpr):
    """Return the four bytes of each int32 word minus an offset, in two new last dims of 2.

    A byte becomes the mantissa of 2^23. This takes one instruction, and the subtraction another.
    """
    if INTERPRETED:
        return four_bytes(words).to(tl.float32) - offset
    b0, b1, b2, b3 = tl.inline_asm_elementwise(
        """
        prmt.b32 $0, $4, 0x4B000000, 0x7440;
        prmt.b32 $1, $4, 0x4B000000, 0x7441;
        prmt.b32 $2, $4, 0x4B000000, 0x7442;
        prmt.b32 $3, $4, 0x4B000000, 0x7443;
        """,
        "=&f,=&f,=&f,=&f,r",
        [words],
        (tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )
    found = tl.join(tl.join(b0, b2), tl.join(b1, b3))
    return found - (8388608.0 + offset)
''',
    "uint8_words_as_float32": '''
@triton.jit
def uint8_words_as_float32(words):
    """Return the four unsigned integers of each int32 word, in two new last dims of 2."""
    return bytes_minus(words, 0.0)
''',
    "int8_words_as_float32": '''
@triton.jit
def int8_words_as_float32(words):
    """Return the four signed integers of each int32 word, in two new last dims of 2.

    The other sign bit adds 128.
    """
    return bytes_minus(words ^ -0x7F7F7F80, 128.0)
''',
    "e4m3_words_as_float32": '''
@triton.jit
def e4m3_words_as_float32(words):
    """Return the four float8 numbers of each int32 word, in two new last dims of 2.

    One instruction converts two of them to float16, which is exact.
    """
    if INTERPRETED:
        codes = four_bytes(words).to(tl.uint8)
        found = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        return tl.where((codes & 127) == 127, float("nan"), found)  # the interpreter knows no NaN
    b0, b1, b2, b3 = tl.inline_asm_elementwise(
        """
        {
        .reg .b16 low, high, h0, h1, h2, h3;
        .reg .b32 first, second;
        mov.b32 {low, high}, $4;
        cvt.rn.f16x2.e4m3x2 first, low;
        cvt.rn.f16x2.e4m3x2 second, high;
        mov.b32 {h0, h1}, first;
        mov.b32 {h2, h3}, second;
        cvt.f32.f16 $0, h0;
        cvt.f32.f16 $1, h1;
        cvt.f32.f16 $2, h2;
        cvt.f32.f16 $3, h3;
        }
        """,
        "=&f,=&f,=&f,=&f,r",
        [words],
        (tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )
    return tl.join(tl.join(b0, b2), tl.join(b1, b3))
''',
    "uint8_as_float32": '''
@triton.jit
def uint8_as_float32(x):
    """Return unsigned integers of 8 bits as float32: they become the mantissa of 2^23."""
    bits = x.to(tl.int32) | 0x4B000000
    return bits.to(tl.float32, bitcast=True) - 8388608.0
''',
    "e8m0_as_float32": '''
@triton.jit
def e8m0_as_float32(x):
    """Return 2^(x - 127) for bytes x, and NaN for 255. The byte becomes the exponent of a float32.

    The exponent 0 is that of numbers below 2^-126. So 2^-127 has other bits.
    """
    bits = tl.where(x == 0, 0x00400000, x.to(tl.int32) << 23)
    return tl.where(x == 255, float("nan"), bits.to(tl.float32, bitcast=True))
''',
    "e8m0_as_bfloat16": '''
@triton.jit
def e8m0_as_bfloat16(x):
    """Return 2^(x - 127) for bytes x, and NaN for 255. The byte becomes the exponent.

    The next bit makes NaN of 255, and the subnormal 2^-127 of 0.
    """
    is_special = ((x + 1) & 254) == 0
    bits = (x.to(tl.int16) << 7) | tl.where(is_special, 64, 0).to(tl.int16)
    return bits.to(tl.bfloat16, bitcast=True)
''',
    "entry_of": '''
@triton.jit
def entry_of(x, values: tl.constexpr):
    """Return values[i], where i is x rounded down and clamped to the indices of `values`."""
    found = tl.full(x.shape, values[0], tl.float32)
    for i in tl.static_range(1, len(values)):
        found = tl.where(x < i, found, values[i])
    return found
''',
    "bits_of": '''
@triton.jit
def as_integer(x):
    """Return x rounded down and modulo 256, as int32. It may be a byte as it is stored."""
    if x.dtype == tl.uint8:
        found = x.to(tl.int32)
    else:
        whole = tl.floor(x.to(tl.float32))
        whole = whole - 256.0 * tl.floor(whole * 0.00390625)
        found = tl.where(whole >= 0.0, whole, 0.0).to(tl.int32)  # 0 for NaN
    return found


@triton.jit
def bits_of(x, start, count: tl.constexpr):
    """Return `count` bits of the byte x from bit `start` on, as float32.

    They become the mantissa of 2^23.
    """
    bits = ((x >> (start & 7)) & ((1 << count) - 1)) | 0x4B000000
    return bits.to(tl.float32, bitcast=True) - 8388608.0
''',
    "larger": '''
@triton.jit
def larger(x, y):
    """Return the larger of two numbers, NaN if one is."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
''',
    "tanh": '''
@triton.jit
def tanh(x):
    """Return tanh in float32. Nothing overflows; near 0, where 1 - exp(-2|x|) cancels, a series."""
    decay = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - decay) / (1.0 + decay)
    square = x * x
    series = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -size, size))
''',
    "log1p": '''
@triton.jit
def log1p(x):
    """Return log(1 + x) in float32. The rounding of 1 + x cancels in the quotient."""
    total = 1.0 + x
    quotient = tl.log(total) * (x / (total - 1.0))
    return tl.where(total == 1.0, x, tl.where(total == float("inf"), total, quotient))
''',
    "power": '''
@triton.jit
def power(x, y):
    """x ** y in float32, for negative x too where y is whole."""
    x, y = tl.broadcast(x, y)  # Triton's interpreter cannot join conditions of numbers and of tiles
    whole = tl.floor(y) == y
    odd = whole & (tl.floor(y * 0.5) * 2.0 != y)
    size = tl.where(tl.abs(x) == 1.0, 1.0, tl.exp2(y * tl.log2(tl.abs(x))))
    known = whole | (x == float("-inf"))
    signed = tl.where(x < 0, tl.where(odd, -size, tl.where(known, size, float("nan"))), size)
    return tl.where((y == 0.0) | (x == 1.0), 1.0, signed)
''',
}


#: A name that is called, given to a function, or annotated.
_MENTIONED = re.compile(r"(?<![\w.])(\w+)[(),:]")


def helpers_of(text: str) -> tuple[str, ...]:
    """Return the names of the helpers that a text needs, in the order of `HELPERS`."""
    needed: set[str] = set()
    texts = [text]
    while texts:
        found = set(_MENTIONED.findall(texts.pop())) & HELPERS.keys() - needed
        needed |= found
        texts += [HELPERS[h] for h in found]
    return tuple(h for h in HELPERS if h in needed)


def last(fn: str, attrs: Mapping[str, float]) -> str:
    """Return the last primitive of an elementwise op.

    The compiler could fuse "mul", "div" or "neg" with an addition that follows. "exp", "sqrt" and
    "rsqrt" are calls, so it cannot fuse them.
    """
    program = _program(fn, attrs)
    return str(program.nodes[program.result][0])


def exact_product(fn: str, args: Sequence[Expr], attrs: Mapping[str, float]) -> Expr:
    """Return an op that ends in a multiplication as a multiply-add of 0.

    It is rounded like the product (-0 becomes 0), and no later addition can be fused with it.
    """
    program = _program(fn, attrs)
    x, y = (
        replace(program, result=n).evaluate(TRITON_ALGEBRA, args, constant)
        for n in program.nodes[program.result][1:]
    )
    return Expr(f"tl.fma({x.text}, {y.text}, 0.0)")


def elementwise(fn: str, args: Sequence[Expr], attrs: Mapping[str, float]) -> Expr:
    """Return the text of the body of an op of the table on `args`, in float32."""
    return _program(fn, attrs).evaluate(TRITON_ALGEBRA, args, constant)


def _program(fn: str, attrs: Mapping[str, float]) -> ScalarProgram:
    entry = table.lookup(fn)
    return entry.program(**(entry.attrs | dict(attrs)))


@cache
def keeps_zero(
    fn: str, args: tuple[float | None, ...], attrs: tuple[tuple[str, float], ...]
) -> bool:
    """Return whether an op gives 0 if its value arguments (None) are 0."""
    import torch

    entry = table.lookup(fn)
    zeros = [torch.tensor(0.0 if a is None else a, dtype=torch.float64) for a in args]
    return fn == "cast" or bool(entry.oracle(*zeros, **(entry.attrs | dict(attrs))) == 0)
