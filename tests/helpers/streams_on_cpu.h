// The device functions of CUDA kernels that stream weights through shared memory, on the CPU.
//
// On a GPU each of them is one PTX instruction. cuda_on_cpu.h runs the threads and includes this.
//
// Copies happen at once in order 0. In order 1 they happen as late as possible: when no thread
// can go on, and one waits for the barrier of the copy. In the other orders each copy does one or
// the other. So a thread that reads too early finds NaN, and a copy that starts too early overwrites
// what others still read. An arrival that ends a phase lets other warps run next, before the other
// threads of its own warp. In random orders it does so every other time.
#pragma once

namespace cuda_on_cpu {

constexpr int kMostPending = (1 << 20) - 1;  // arrivals or bytes of an mbarrier's phase
constexpr unsigned long long kStarted = 0x7265697272616221ULL;  // what shared memory holds for one

// The current thread stays here because of an error.
inline void stop(const std::string& why) {
  fail(why);
  pause();
}

inline bool in_shared_memory(const void* from, std::size_t bytes) {
  const Block& block = *machine.current->block;
  const auto at = reinterpret_cast<std::size_t>(from),
             first = reinterpret_cast<std::size_t>(block.memory);
  return at >= first && at + bytes <= first + block.bytes;
}

inline bool is_aligned(const void* p, std::size_t bytes) {
  return reinterpret_cast<std::size_t>(p) % bytes == 0;
}

inline Phases& phases_of(const unsigned long long* barrier) {
  auto& all = machine.current->block->mbarriers;
  const auto found = all.find(barrier);
  if (found == all.end() || *barrier != kStarted)
    stop("a thread uses an mbarrier that has not started or was overwritten");
  return found->second;
}

// Starts the next phase if nothing is pending. Returns whether it did.
inline bool end_phase(Phases& phases) {
  if (phases.pending_arrivals || phases.pending_bytes) return false;
  phases.pending_arrivals = phases.arrivals;
  phases.parity ^= 1;
  release(phases.threads);
  return true;
}

inline bool arrive_once(Phases& phases) {
  if (phases.pending_arrivals == 0) stop("an mbarrier gets more arrivals than a phase has");
  --phases.pending_arrivals;
  return end_phase(phases);
}

inline void change_bytes(Phases& phases, int bytes) {
  phases.pending_bytes += bytes;
  if (std::abs(phases.pending_bytes) > kMostPending) stop("an mbarrier counts too many bytes");
}

inline void let_other_warps_run() {
  if (machine.order > 1 && random_number() % 2) return;
  machine.other_warps_next = true;
  pause();
}

inline void finish(const Copy& copy) {
  std::memcpy(copy.to, copy.from, copy.bytes);
  if (copy.left) {
    if (--*copy.left == 0) arrive_once(*copy.phases);
    return;
  }
  change_bytes(*copy.phases, -copy.bytes);
  end_phase(*copy.phases);
}

inline bool is_late() { return machine.order == 1 || (machine.order > 1 && random_number() % 2); }

// Makes one copy that a thread waits for. Returns whether there was one.
inline bool finish_a_copy(Block& block) {
  std::vector<int> numbers;
  for (const int n : ordered(int(block.copies.size()), numbers)) {
    const Copy copy = block.copies[n];
    if (copy.phases->threads.waiting.empty()) continue;
    block.copies.erase(block.copies.begin() + n);
    finish(copy);
    return true;
  }
  return false;
}

// What to say about threads that can never go on.
inline std::string waits_in_vain(const Block& block) {
  std::string why = "threads wait for threads that have ended or wait elsewhere";
  for (const auto& [at, phases] : block.mbarriers)
    if (!phases.threads.waiting.empty())
      why += "; the mbarrier at byte " +
             std::to_string(static_cast<const unsigned char*>(at) - block.memory) +
             " of shared memory still expects " + std::to_string(phases.pending_arrivals) +
             " arrivals and " + std::to_string(phases.pending_bytes) + " bytes";
  return why;
}

// Arrives at a named barrier. Returns whether its last thread has arrived, so that it was released.
inline bool arrive_at(NamedBarrier& barrier, int threads) {
  const int thread = machine.current->thread;
  auto& arrived = barrier.arrived;
  if (threads <= 0 || threads % kWarp || threads > machine.current->block->threads)
    stop("a named barrier counts threads of whole warps of the block");
  if (!arrived.empty() && barrier.threads != threads)
    stop("threads arrive at a named barrier with different counts");
  if (std::count(arrived.begin(), arrived.end(), thread))
    stop("a thread arrives twice at a named barrier");
  barrier.threads = threads;
  arrived.push_back(thread);
  if (int(arrived.size()) < threads) return false;
  arrived.clear();
  release(barrier.waiting);
  return true;
}

}  // namespace cuda_on_cpu

// -- mbarriers ----------------------------------------------------------------------------------------

inline void start_barrier(unsigned long long* barrier, int arrivals) {
  using namespace cuda_on_cpu;
  if (!is_aligned(barrier, sizeof(*barrier)) || !in_shared_memory(barrier, sizeof(*barrier)))
    stop("an mbarrier needs 8 aligned bytes of shared memory");
  if (arrivals < 1 || arrivals > kMostPending) stop("an mbarrier needs 1 to 2^20 - 1 arrivals");
  Phases phases;
  phases.arrivals = phases.pending_arrivals = arrivals;
  if (!machine.current->block->mbarriers.emplace(barrier, phases).second)
    stop("an mbarrier starts twice");
  *barrier = kStarted;
}

inline void publish_barriers() {}

// Another thread of the warp in each order.
inline bool is_elected() {
  using namespace cuda_on_cpu;
  return machine.current->thread % kWarp == machine.order % kWarp;
}

inline void arrive(unsigned long long* barrier) {
  using namespace cuda_on_cpu;
  if (arrive_once(phases_of(barrier))) let_other_warps_run();
}

inline void expect_bytes(unsigned long long* barrier, int bytes) {
  using namespace cuda_on_cpu;
  Phases& phases = phases_of(barrier);
  change_bytes(phases, bytes);
  arrive_once(phases);
}

inline void wait_for_phase(unsigned long long* barrier, int parity) {
  using namespace cuda_on_cpu;
  Phases& phases = phases_of(barrier);
  if (parity & ~1) stop("the parity of a phase is 0 or 1");
  // a thread that is slower than a whole further phase waits again, as on a GPU
  while (phases.parity == parity) wait(phases.threads);
}

inline void copy_bytes(void* to, const void* from, int bytes, unsigned long long* barrier) {
  using namespace cuda_on_cpu;
  if (bytes < 0 || bytes % 16 || !is_aligned(to, 16) || !is_aligned(from, 16))
    stop("a bulk copy needs addresses and a size that are multiples of 16 bytes");
  if (!in_shared_memory(to, bytes)) stop("a bulk copy writes outside of shared memory");
  const Copy copy{to, from, bytes, &phases_of(barrier)};
  if (!is_late()) return finish(copy);
  machine.current->block->copies.push_back(copy);
}

inline void copy_vector(void* to, const void* from) {
  using namespace cuda_on_cpu;
  if (!is_aligned(to, 16) || !is_aligned(from, 16))
    stop("a copy of a vector needs addresses that are multiples of 16 bytes");
  if (!in_shared_memory(to, 16)) stop("a copy of a vector writes outside of shared memory");
  machine.current->requested.push_back({to, from, 16, nullptr});
}

inline void arrive_when_copied(unsigned long long* barrier) {
  using namespace cuda_on_cpu;
  Phases& phases = phases_of(barrier);
  std::vector<Copy> copies;
  copies.swap(machine.current->requested);
  if (copies.empty()) return arrive(barrier);
  const auto left = std::make_shared<int>(int(copies.size()));
  for (Copy& copy : copies) {
    copy.phases = &phases;
    copy.left = left;
    if (is_late())
      machine.current->block->copies.push_back(copy);
    else
      finish(copy);
  }
}

// Threads that wait for the barrier make the copies happen.
inline void wait_for_own_copies() {}

// -- named barriers -----------------------------------------------------------------------------------

template <int number>
void meet(int threads) {
  static_assert(number > 0 && number < 16, "barrier 0 is that of __syncthreads");
  auto& barrier = cuda_on_cpu::machine.current->block->named[number];
  if (cuda_on_cpu::arrive_at(barrier, threads))
    cuda_on_cpu::pause();
  else
    cuda_on_cpu::wait(barrier.waiting);
}

template <int number>
void announce(int threads) {
  static_assert(number > 0 && number < 16, "barrier 0 is that of __syncthreads");
  auto& barrier = cuda_on_cpu::machine.current->block->named[number];
  if (cuda_on_cpu::arrive_at(barrier, threads)) cuda_on_cpu::let_other_warps_run();
}

// -- warps --------------------------------------------------------------------------------------------

inline unsigned largest_in_warp(unsigned x, int line = __builtin_LINE()) {
  using namespace cuda_on_cpu;
  const int first = machine.current->thread / kWarp * kWarp;
  const auto& shown = show_to_warp({x}, line);
  for (int lane = 0; lane < kWarp; ++lane) x = max(x, shown[first + lane][0]);
  return x;
}

namespace cuda_on_cpu {

// Adds a product of 16 rows and 8 columns to sums. Each register holds N numbers that lie side by
// side in k. number(register, n) is the n-th of them. Total is the type of the sum over k.
template <int N, class Total, class T, class F>
void multiply(T (&sums)[4], const Shown& own, F number, int line) {
  const int lane = machine.current->thread % kWarp, first = machine.current->thread - lane;
  const auto& shown = show_to_warp(own, line);
  for (int c = 0; c < 4; ++c) {
    const int row = lane / 4, column = lane % 4 * 2 + c % 2, lower = c / 2;
    Total sum = sums[c];
    for (int t = 0; t < 4; ++t) {
      const Shown &a = shown[first + row * 4 + t], &b = shown[first + column * 4 + t];
      for (int n = 0; n < N; ++n)
        sum += number(a[lower], n) * number(b[4], n) + number(a[2 + lower], n) * number(b[5], n);
    }
    sums[c] = T(sum);
  }
}

}  // namespace cuda_on_cpu

// mma.sync.m16n8k32.row.col.s32.s8.s8.s32
inline void multiply_digits(int (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                            unsigned b0, unsigned b1, int line = __builtin_LINE()) {
  const auto number = [](unsigned x, int n) { return int((signed char)(x >> 8 * n)); };
  cuda_on_cpu::multiply<4, unsigned>(sums, {a0, a1, a2, a3, b0, b1}, number, line);
}

// the same, to which the bits of 1.5 * 2^23 are added
inline void first_digits(int (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                         unsigned b1, int line = __builtin_LINE()) {
  for (int& sum : sums) sum = 0x4b400000;
  multiply_digits(sums, a0, a1, a2, a3, b0, b1, line);
}

// mma.sync.m16n8k16.row.col.f32.f16.f16.f32; a GPU rounds otherwise
inline void multiply_halves(float (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                            unsigned b0, unsigned b1, int line = __builtin_LINE()) {
  const auto number = [](unsigned x, int n) {
    return double(__half2float({(unsigned short)(x >> 16 * n)}));
  };
  cuda_on_cpu::multiply<2, double>(sums, {a0, a1, a2, a3, b0, b1}, number, line);
}

// -- bytes --------------------------------------------------------------------------------------------

// words that lie side by side
template <int count>
struct alignas(4 * count) Words {
  unsigned w[count];
};

// The codes in the upper half of each byte, times 16, after some bits are flipped.
inline unsigned upper_codes(unsigned word, unsigned flipped) {
  return (word ^ flipped) & 0xf0f0f0f0u;
}

// Eight codes as halves: integers of 4 bits less 8, as pairs 0 and 4, 1 and 5, 2 and 6, 3 and 7.
inline Words<4> halves_of_4_bits(unsigned word, unsigned flipped) {
  Words<4> halves{};
  for (int n = 0; n < 8; ++n) {
    const int code = int((word ^ flipped) >> 4 * n & 15) - 8;
    halves.w[n % 4] |= unsigned(__float2half(float(code)).bits) << 16 * (n / 4);
  }
  return halves;
}

// Eight codes as halves: integers of 8 bits less 128.
inline Words<4> halves_of_8_bits(unsigned first, unsigned second, unsigned flipped) {
  Words<4> halves{};
  for (int n = 0; n < 8; ++n) {
    const int code = int(((n < 4 ? first : second) ^ flipped) >> 8 * (n % 4) & 255) - 128;
    halves.w[n / 2] |= unsigned(__float2half(float(code)).bits) << 16 * (n % 2);
  }
  return halves;
}

// Eight float8_e4m3fn as halves.
inline Words<4> halves_of_float8(unsigned first, unsigned second) {
  Words<4> halves{};
  for (int n = 0; n < 8; ++n) {
    const unsigned code = (n < 4 ? first : second) >> 8 * (n % 4) & 0xff, magnitude = code & 0x7f;
    const float x = __half2float({(unsigned short)(magnitude << 7)}) * 256.0f;  // other biases
    const unsigned bits = magnitude == 0x7f ? 0x7fff : __float2half(x).bits | (code >> 7) << 15;
    halves.w[n / 2] |= bits << 16 * (n % 2);
  }
  return halves;
}

// prmt.b32: each of four digits of the selector names a byte, 0 to 3 of a or 4 to 7 of b. A digit of 8
// and more names eight copies of a byte's highest bit.
inline unsigned looked_up(unsigned low, unsigned high, unsigned codes) {
  unsigned bytes = 0;
  for (int n = 0; n < 4; ++n) {
    const unsigned code = codes >> 4 * n & 15, byte = (code & 4 ? high : low) >> code % 4 * 8 & 255;
    bytes |= (code < 8 ? byte : byte / 128 * 255) << 8 * n;
  }
  return bytes;
}

// Eight codes as halves. The first half of a table are the bytes of the words h0 and h1, and of l0 and l1.
inline Words<4> halves_of_table(unsigned word, unsigned h0, unsigned h1, unsigned h2, unsigned h3,
                                unsigned l0, unsigned l1, unsigned l2, unsigned l3) {
  const unsigned high[4] = {h0, h1, h2, h3}, low[4] = {l0, l1, l2, l3};
  Words<4> halves{};
  for (int n = 0; n < 8; ++n) {
    const unsigned code = word >> 4 * n & 15, shift = code % 4 * 8;
    const float whole = float(high[code / 4] >> shift & 127), part = float(low[code / 4] >> shift & 127);
    halves.w[n / 2] |= unsigned(__float2half(whole - 64.0f + part / 128.0f).bits) << n % 2 * 16;
  }
  return halves;
}

inline float power_of_two(unsigned byte) {
  return byte == 255 ? INFINITY : std::ldexp(1.0f, int(byte) - 127);
}

inline void __threadfence_block() {}

inline float power_of_two_or_nan(unsigned byte) {
  return byte == 255 ? NAN : std::ldexp(1.0f, int(byte) - 127);
}

// Words of eight columns of each row, from words that hold codes of eight rows of a column.
template <int rows>
Words<rows> words_of_rows(const unsigned char* from, int step, int last) {
  const int order[] = {0, 2, 4, 6, 1, 3, 5, 7};
  const int first = rows == 8 ? 0 : 4 * last;
  Words<rows> found{};
  for (int column = 0; column < 8; ++column) {
    const unsigned word = *reinterpret_cast<const unsigned*>(from + column * step);
    for (int n = 0; n < 8; ++n)
      if (order[n] >= first && order[n] < first + rows)
        found.w[order[n] - first] |= (word >> 4 * n & 15) << 4 * column;
  }
  return found;
}

// The codes in the lower and in the upper halves of bytes, of two words in turns.
inline unsigned lower_of_both(unsigned even, unsigned odd) {
  unsigned codes = 0;
  for (int n = 0; n < 8; ++n) codes |= ((n % 2 ? odd : even) >> n / 2 * 8 & 15) << 4 * n;
  return codes;
}
inline unsigned upper_of_both(unsigned even, unsigned odd) { return lower_of_both(even >> 4, odd >> 4); }

// Pairs of elements that are eight elements apart.
template <class T>
uint4 load_pairs(const T* from) {
  uint4 loaded;
  for (unsigned n = 0; n < sizeof(loaded) / sizeof(T); ++n)
    reinterpret_cast<T*>(&loaded)[n] = from[n / 2 * 8 + n % 2];
  return loaded;
}
template <class T>
uint4 load_constant_pairs(const T* from) {
  return load_pairs(from);
}

inline unsigned pick_bytes(unsigned a, unsigned b, unsigned selector) {
  if (selector & 0x8888) cuda_on_cpu::stop("pick_bytes has no sign mode");
  const unsigned long long both = (unsigned long long)b << 32 | a;
  unsigned picked = 0;
  for (int n = 0; n < 4; ++n)
    picked |= unsigned(both >> 8 * (selector >> 4 * n & 7) & 0xff) << 8 * n;
  return picked;
}
