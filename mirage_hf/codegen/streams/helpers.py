"""The device functions that kernels which stream codes call."""

#: CUDA C++. It needs sm_90, and no headers.
HELPERS = """\
// Barriers in shared memory count threads that arrive and bytes that copies bring. A phase ends when
// all have come. The phases of a barrier have the parities 0, 1, 0 and so on.
__device__ __forceinline__ unsigned shared_address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ void start_barrier(unsigned long long* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void expect_bytes(unsigned long long* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(unsigned long long* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void wait_for_phase(unsigned long long* barrier, int parity) {
  asm volatile(
      "{\\n.reg .pred done;\\nagain:\\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\\n@!done bra again;\\n}"
      : : "r"(shared_address(barrier)), "r"(parity) : "memory");
}
// One thread of a warp, the same each time. The compiler knows that one thread runs what follows, so a
// copy is one instruction. Otherwise it would be a loop over threads, and take 75 cycles for each.
__device__ __forceinline__ bool is_elected() {
  unsigned elected;
  asm volatile("{\\n.reg .pred one;\\nelect.sync _|one, 0xffffffff;\\nselp.u32 %0, 1, 0, one;\\n}" : "=r"(elected));
  return elected;
}
// 16 bytes or a multiple, which nothing writes while the kernel runs and which are read once
__device__ __forceinline__ void copy_bytes(void* to, const void* from, int bytes, unsigned long long* barrier) {
  unsigned long long policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
      : : "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy) : "memory");
}

// A barrier among some threads of a block, by number. Those that announce themselves do not wait.
template <int number> __device__ __forceinline__ void meet(int threads) {
  asm volatile("bar.sync %0, %1;" : : "n"(number), "r"(threads) : "memory");
}
template <int number> __device__ __forceinline__ void announce(int threads) {
  asm volatile("bar.arrive %0, %1;" : : "n"(number), "r"(threads) : "memory");
}

__device__ __forceinline__ unsigned largest_in_warp(unsigned x) {
  unsigned y;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
}
__device__ __forceinline__ unsigned pick_bytes(unsigned a, unsigned b, unsigned selector) {
  return __byte_perm(a, b, selector);
}

// words that lie side by side
template <int count> struct alignas(4 * count) Words { unsigned w[count]; };

// the codes in the upper half of each byte, times 16, after some bits are flipped
__device__ __forceinline__ unsigned upper_codes(unsigned word, unsigned flipped) {
  unsigned codes;  // one instruction, which two operators would not be
  asm("lop3.b32 %0, %1, %2, 0xf0f0f0f0, 0x28;" : "=r"(codes) : "r"(word), "r"(flipped));
  return codes;
}

// The product of 16 x 32 signed bytes with 32 x 8, and of 16 x 16 halves with 16 x 8, which a warp adds
// to its sums. Lane 4 g + t holds rows g and g + 8 of the left factor, column g of the right factor,
// and columns 2 t and 2 t + 1 of the sums.
__device__ __forceinline__ void multiply_digits(
    int (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply_halves(
    float (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Eight codes as halves, after their zero was subtracted. Bits of signed codes are flipped, so that
// they count from the zero, too. Codes of 4 bits come as pairs 0 and 4, 1 and 5, 2 and 6, 3 and 7.
// A half with the bits 0x6400 + n is 1024 + n.
__device__ __forceinline__ unsigned subtract_halves(unsigned two, unsigned from_each) {
  unsigned halves;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(two), "r"(from_each));
  return halves;
}
__device__ __forceinline__ unsigned sixteenth_less_72(unsigned two) {
  unsigned halves;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(halves) : "r"(two), "r"(0x2c002c00u), "r"(0xd480d480u));
  return halves;
}
__device__ __forceinline__ unsigned masked_and_flipped(unsigned word, unsigned mask, unsigned flips) {
  unsigned bits;  // one instruction, which two operators would not be
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(bits) : "r"(word), "r"(mask), "r"(flips));
  return bits;
}
__device__ __forceinline__ Words<4> halves_of_4_bits(unsigned word, unsigned flipped) {
  const unsigned low = 0x64006400u ^ (flipped & 0x000f000fu), high = 0x64006400u ^ (flipped & 0x00f000f0u);
  const unsigned upper = word >> 8;
  return Words<4>{subtract_halves(masked_and_flipped(word, 0x000f000fu, low), 0x64086408u),
                  sixteenth_less_72(masked_and_flipped(word, 0x00f000f0u, high)),
                  subtract_halves(masked_and_flipped(upper, 0x000f000fu, low), 0x64086408u),
                  sixteenth_less_72(masked_and_flipped(upper, 0x00f000f0u, high))};
}
__device__ __forceinline__ Words<4> halves_of_8_bits(unsigned first, unsigned second, unsigned flipped) {
  first ^= flipped;
  second ^= flipped;
  const unsigned one = 0x64646464u, zero = 0x64806480u;
  return Words<4>{subtract_halves(pick_bytes(first, one, 0x4140), zero),
                  subtract_halves(pick_bytes(first, one, 0x4342), zero),
                  subtract_halves(pick_bytes(second, one, 0x4140), zero),
                  subtract_halves(pick_bytes(second, one, 0x4342), zero)};
}

// eight codes e4m3 as halves
__device__ __forceinline__ unsigned two_float8(unsigned two) {
  unsigned halves;
  asm("{\\n.reg .b16 low, high;\\nmov.b32 {low, high}, %1;\\ncvt.rn.f16x2.e4m3x2 %0, low;\\n}" : "=r"(halves) : "r"(two));
  return halves;
}
__device__ __forceinline__ Words<4> halves_of_float8(unsigned first, unsigned second) {
  return Words<4>{two_float8(first), two_float8(first >> 16), two_float8(second), two_float8(second >> 16)};
}
"""

#: What kernels call besides, if codes are looked up in a table.
TABLE_HELPERS = """\
// Four bytes of half a table of 16 entries. Codes of the other half give 0: one whose highest bit is set
// picks eight copies of a byte's sign, which is 0.
__device__ __forceinline__ unsigned looked_up(unsigned low, unsigned high, unsigned codes) {
  unsigned bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(codes));
  return bytes;
}
// `multiply_digits` whose sums start at the bits of 1.5 * 2^23, in registers that all first products share
__device__ __forceinline__ void first_digits(
    int (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=r"(sums[0]), "=r"(sums[1]), "=r"(sums[2]), "=r"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(0x4b400000));
}
__device__ __forceinline__ unsigned looked_up_in_both(unsigned a, unsigned b, unsigned c, unsigned d, unsigned codes) {
  return looked_up(a, b, codes) | looked_up(c, d, codes ^ 0x8888u);
}

// Two halves: higher byte + lower byte / 128 - 64. A half with the bits 0x6400 + n is 1024 + n.
__device__ __forceinline__ unsigned halves_of_bytes(unsigned high, unsigned low, unsigned which) {
  const unsigned whole = subtract_halves(pick_bytes(high, 0x64646464u, which), 0x64486448u);
  const unsigned part = pick_bytes(low, 0x64646464u, which);
  unsigned halves;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(halves) : "r"(part), "r"(0x20002000u), "r"(whole));
  return halves;
}

// eight codes as halves, given the higher and the lower bytes of a table
__device__ __forceinline__ Words<4> halves_of_table(
    unsigned word, unsigned h0, unsigned h1, unsigned h2, unsigned h3, unsigned l0, unsigned l1, unsigned l2, unsigned l3) {
  const unsigned upper = word >> 16;
  const unsigned high_0 = looked_up_in_both(h0, h1, h2, h3, word), low_0 = looked_up_in_both(l0, l1, l2, l3, word);
  const unsigned high_1 = looked_up_in_both(h0, h1, h2, h3, upper), low_1 = looked_up_in_both(l0, l1, l2, l3, upper);
  return Words<4>{halves_of_bytes(high_0, low_0, 0x4140), halves_of_bytes(high_0, low_0, 0x4342),
                  halves_of_bytes(high_1, low_1, 0x4140), halves_of_bytes(high_1, low_1, 0x4342)};
}

"""

#: What kernels with pairs of groups call, if scales are powers of two. Each infinite scale is
#: multiplied with a digit that is 0, so the result is NaN.
POWER_OF_PAIR_HELPERS = """\
// 2^(byte - 127), and infinity for 255, which stands for NaN: no result of it is finite either
__device__ __forceinline__ float power_of_two(unsigned byte) {
  unsigned bits;
  asm("max.u32 %0, %1, %2;" : "=r"(bits) : "r"(byte << 23), "r"(0x00400000u));
  return __uint_as_float(bits);
}

"""

#: What kernels without pairs of groups call, if scales are powers of two.
POWER_HELPERS = """\
// 2^(byte - 127), and NaN for 255
__device__ __forceinline__ float power_of_two_or_nan(unsigned byte) {
  const unsigned bits = byte == 255 ? 0x7fc00000u : byte == 0 ? 0x00400000u : byte << 23;
  return __uint_as_float(bits);
}

"""

#: What kernels call besides, if lanes copy: words that are column-major, or scales with gaps.
COPYING_LANES_HELPERS = """\
// 16 bytes, by one thread
__device__ __forceinline__ void copy_vector(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(shared_address(to)), "l"(from) : "memory");
}
// The thread arrives when the vectors that it has requested are there.
__device__ __forceinline__ void arrive_when_copied(unsigned long long* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" : : "r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void wait_for_own_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

"""

#: What kernels call besides, if words or bytes hold codes of several rows.
NIBBLE_HELPERS = """\
// The codes in the lower and in the upper halves of bytes, of even and of odd columns in turns.
__device__ __forceinline__ unsigned lower_of_both(unsigned even, unsigned odd) {
  return (even & 0x0f0f0f0fu) | (odd << 4 & 0xf0f0f0f0u);
}
__device__ __forceinline__ unsigned upper_of_both(unsigned even, unsigned odd) {
  return (even >> 4 & 0x0f0f0f0fu) | (odd & 0xf0f0f0f0u);
}
"""

#: What kernels call besides, if words hold codes of eight rows.
ROWS_IN_WORDS_HELPERS = """\
// Words of eight columns of each row, from eight words `step` bytes apart. Each of these holds codes of
// eight rows of a column, in the order 0, 2, 4, 6, 1, 3, 5, 7. If four rows are wanted, they are the
// first or the last ones.
template <int rows> __device__ __forceinline__ Words<rows> words_of_rows(const unsigned char* from, int step, int last) {
  unsigned column[8];
#pragma unroll
  for (int n = 0; n < 8; ++n) column[n] = *reinterpret_cast<const unsigned*>(from + n * step);
  Words<rows> found;
#pragma unroll
  for (int four = 0; four < rows / 4; ++four) {
    // bytes 0 and 2 of two words hold codes of the first rows, bytes 1 and 3 those of the last ones
    const unsigned which = 0x6240u + 0x1111u * (rows == 8 ? four : last);
    unsigned bytes[2][2];  // of even and odd columns
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const unsigned some = pick_bytes(column[odd], column[odd + 2], which);
      const unsigned others = pick_bytes(column[odd + 4], column[odd + 6], which);
      bytes[0][odd] = pick_bytes(some, others, 0x5410);
      bytes[1][odd] = pick_bytes(some, others, 0x7632);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      found.w[4 * four + n] = lower_of_both(bytes[n][0], bytes[n][1]);
      found.w[4 * four + 2 + n] = upper_of_both(bytes[n][0], bytes[n][1]);
    }
  }
  return found;
}

"""

#: What kernels call besides, if words lie as lanes load them.
LANES_HELPERS = """\
// Pairs of elements that are eight elements apart: four of 16 bits, or two of 32. Constants are loaded
// as `load_constant` loads them.
template <class T> __device__ __forceinline__ uint4 load_pairs(const T* from) {
  const unsigned* words = reinterpret_cast<const unsigned*>(from);
  if constexpr (sizeof(T) == 4) return uint4{words[0], words[1], words[8], words[9]};
  return uint4{words[0], words[4], words[8], words[12]};
}
template <class T> __device__ __forceinline__ uint4 load_constant_pairs(const T* from) {
#ifdef __CUDA_ARCH__
  const unsigned* words = reinterpret_cast<const unsigned*>(from);
  constexpr int second = sizeof(T) == 4 ? 1 : 4, fourth = sizeof(T) == 4 ? 9 : 12;
  uint4 x;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(x.x) : "l"(words));
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(x.y) : "l"(words + second));
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(x.z) : "l"(words + 8));
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(x.w) : "l"(words + fourth));
  return x;
#else
  return load_pairs(from);
#endif
}

"""
