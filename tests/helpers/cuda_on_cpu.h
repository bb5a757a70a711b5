// Runs generated CUDA C++ on a CPU, so that tests need no GPU.
//
// Every thread of a cluster is a fiber (ucontext) that runs until it waits at a barrier. Fibers are
// switched by _setjmp and _longjmp, because swapcontext asks the kernel each time. An order
// decides who runs first: 0 is by number, 1 is by number from the last to the first, all others are
// random and change all the time. A warp runs as far as it can before the next one, a block before
// the next one. So if two threads meet in memory without a barrier between them, one comes first in
// order 0 and the other in order 1. Shared memory holds NaN when a block starts and after it ends.
//
// Threads that wait for each other at different lines, or for threads that have ended, are errors.
// tests/helpers/cuda_on_cpu.py rewrites what is no C++: launches, and declarations of shared memory.
// streams_on_cpu.h adds mbarriers, bulk copies, named barriers and tensor-core instructions.
#pragma once
#undef _FORTIFY_SOURCE  // it takes a jump to another stack for an error
#include <math.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(x, y, z)

// -- numbers ------------------------------------------------------------------------------------------

struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct half {
  unsigned short bits;
};
struct __nv_bfloat16 {
  unsigned short bits;
};

inline float as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline unsigned as_bits(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float __uint_as_float(unsigned bits) { return as_float(bits); }
inline float __int_as_float(int bits) { return as_float(unsigned(bits)); }
inline unsigned __float_as_uint(float x) { return as_bits(x); }
inline int __float_as_int(float x) { return int(as_bits(x)); }

inline float __bfloat162float(__nv_bfloat16 x) { return as_float(unsigned(x.bits) << 16); }

inline __nv_bfloat16 __float2bfloat16(float x) {
  if (x != x) return {0x7fff};
  const unsigned bits = as_bits(x);
  return {(unsigned short)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

inline float __half2float(half x) {
  const unsigned magnitude = x.bits & 0x7fff, sign = unsigned(x.bits >> 15) << 31;
  if (magnitude >= 0x7c00) return as_float(sign | (magnitude > 0x7c00 ? 0x7fc00000 : 0x7f800000));
  const float scaled = as_float(magnitude << 13) * as_float(0x77800000);  // by 2^112: other biases
  return as_float(sign | as_bits(scaled));
}

inline half __float2half(float x) {
  const unsigned short sign = (unsigned short)((as_bits(x) >> 31) << 15);
  const unsigned bits = as_bits(x) & 0x7fffffff;
  if (bits > 0x7f800000) return {0x7fff};
  if (bits >= as_bits(65520.0f)) return {(unsigned short)(sign | 0x7c00)};
  if (bits < as_bits(0x1p-14f))  // subnormal: a multiple of 2^-24, as are floats around 0.5
    return {(unsigned short)(sign | (as_bits(as_float(bits) + 0.5f) - as_bits(0.5f)))};
  const unsigned rounded = bits + 0xfff + ((bits >> 13) & 1) - (112u << 23);
  return {(unsigned short)(sign | (rounded >> 13))};
}

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
using std::max;
using std::min;

// -- threads ------------------------------------------------------------------------------------------

struct Index {
  int x = 0, y = 0, z = 0;
};
inline Index threadIdx, blockIdx;

namespace cuda_on_cpu {

constexpr int kWarp = 32;
constexpr std::size_t kStack = 1 << 16;
constexpr std::size_t kAlignment = 128;  // of shared memory

struct Block;
struct Fiber;

struct Barrier {
  std::vector<Fiber*> waiting;
  int line = 0;
};

struct Phases;

// A copy that has not happened yet: a bulk copy, or a vector of 16 bytes. Vectors that a thread requests
// count those that are left, and the thread arrives with the last one.
struct Copy {
  void* to;
  const void* from;
  int bytes;
  Phases* phases;
  std::shared_ptr<int> left = nullptr;
};

struct Fiber {
  jmp_buf paused;
  ucontext_t context;  // where it starts
  std::unique_ptr<char[]> stack{new char[kStack]};
  Block* block = nullptr;
  int thread = 0;
  Barrier* waits = nullptr;
  bool started = false, ended = false;
  std::vector<Copy> requested;  // vectors for which the thread has not arrived anywhere yet
};

// An mbarrier. All its waiting threads wait for the end of the current phase.
struct Phases {
  int arrivals = 0, pending_arrivals = 0, pending_bytes = 0, parity = 0;
  Barrier threads;
};

// A barrier of bar.sync and bar.arrive.
struct NamedBarrier {
  int threads = 0;
  std::vector<int> arrived;
  Barrier waiting;
};

using Shown = std::array<unsigned, 6>;  // what a thread shows to its warp

struct Block {
  int number = 0, threads = 0, running = 0;
  std::vector<unsigned char> storage;
  unsigned char* memory = nullptr;
  Barrier barrier;
  std::vector<Barrier> warps;
  std::vector<Shown> lanes[2];      // what each thread shows to its warp, in turn
  std::vector<unsigned char> turn;  // which of them a thread shows next
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::size_t bytes = 0;                    // of shared memory
  std::map<const void*, Phases> mbarriers;  // by address
  std::vector<Copy> copies;
  NamedBarrier named[16];
};

struct Machine {
  unsigned order = 0;
  bool other_warps_next = false;  // the current warp stops although it could go on
  unsigned long long state = 1;
  jmp_buf scheduler;
  Fiber* current = nullptr;
  std::function<void()> kernel;
  std::vector<std::unique_ptr<Block>> cluster;
  Barrier barrier;
  std::string error;
  std::vector<int> clusters, ranks, warps, lanes;  // orders
};
inline Machine machine;

inline void set_order(unsigned order) {
  machine.order = order;
  machine.state = order;
}

inline void fail(const std::string& what) {
  if (machine.error.empty()) machine.error = what;
}

inline unsigned random_number() {
  machine.state = machine.state * 6364136223846793005ULL + 1442695040888963407ULL;
  return unsigned(machine.state >> 33);
}

// Writes the numbers below n in the order of the machine, and returns them.
inline const std::vector<int>& ordered(int n, std::vector<int>& all) {
  all.resize(n);
  std::iota(all.begin(), all.end(), 0);
  if (machine.order == 1) std::reverse(all.begin(), all.end());
  for (int i = n - 1; i > 0 && machine.order > 1; --i)
    std::swap(all[i], all[random_number() % (i + 1)]);
  return all;
}

inline void pause() {
  if (_setjmp(machine.current->paused) == 0) _longjmp(machine.scheduler, 1);
}

inline void clear(Barrier& barrier) {
  barrier.waiting.clear();
  barrier.line = 0;
}

inline void release(Barrier& barrier) {
  for (Fiber* fiber : barrier.waiting) fiber->waits = nullptr;
  clear(barrier);
}

// The current thread waits until a release.
inline void wait(Barrier& barrier) {
  machine.current->waits = &barrier;
  barrier.waiting.push_back(machine.current);
  pause();
}

// Waits until `all` threads have arrived.
inline void wait(Barrier& barrier, int all, int line) {
  if (!barrier.waiting.empty() && barrier.line != line)
    fail("threads wait for each other at lines " + std::to_string(barrier.line) + " and " +
         std::to_string(line));
  barrier.line = line;
  if (int(barrier.waiting.size()) + 1 < all) return wait(barrier);
  release(barrier);
  pause();
}

// The threads of the cluster that have not ended. Its barrier waits for no others.
inline int cluster_threads() {
  int threads = 0;
  for (const auto& block : machine.cluster) threads += block->running;
  return threads;
}

// A fiber whose kernel has ended waits for the next one.
inline void run_fiber() {
  Fiber& fiber = *machine.current;
  while (true) {
    machine.kernel();
    fiber.ended = true;
    if (!fiber.requested.empty()) fail("a thread ends before it arrives for its copies");
    if (--fiber.block->running == 0) {
      if (!fiber.block->copies.empty()) fail("a block ends before its bulk copies");
      std::memset(fiber.block->memory, 0xff, fiber.block->bytes);  // what others still read is gone
    }
    Barrier& barrier = machine.barrier;
    if (!barrier.waiting.empty() && int(barrier.waiting.size()) == cluster_threads()) release(barrier);
    pause();
  }
}

inline void resume(Fiber& fiber) {
  machine.current = &fiber;
  threadIdx.x = fiber.thread;
  blockIdx.x = fiber.block->number;
  if (_setjmp(machine.scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.paused, 1);
  fiber.started = true;
  setcontext(&fiber.context);
}

// Each returns whether anything ran.
inline bool run_warp(Block& block, int warp) {
  bool any = false, again = true;
  const int first = warp * kWarp, count = std::min(kWarp, block.threads - first);
  while (again && machine.error.empty()) {
    again = false;
    for (const int lane : ordered(count, machine.lanes)) {
      Fiber& fiber = *block.fibers[first + lane];
      if (fiber.ended || fiber.waits) continue;
      resume(fiber);
      if (std::exchange(machine.other_warps_next, false)) return true;
      any = again = true;
    }
  }
  return any;
}

inline bool run_block(Block& block) {
  bool any = false, again = true;
  while (again) {
    again = false;
    for (const int warp : ordered((block.threads + kWarp - 1) / kWarp, machine.warps))
      again |= run_warp(block, warp);
    any |= again;
  }
  return any;
}

inline void start(Block& block, int number, int threads, std::size_t bytes) {
  block.number = number;
  block.threads = block.running = threads;
  block.storage.assign(bytes + kAlignment, 0xff);
  block.bytes = bytes;
  block.memory = block.storage.data();
  while (reinterpret_cast<std::size_t>(block.memory) % kAlignment) ++block.memory;
  block.mbarriers.clear();
  block.copies.clear();
  for (NamedBarrier& barrier : block.named) barrier = {};
  clear(block.barrier);
  block.warps.resize((threads + kWarp - 1) / kWarp);
  for (Barrier& warp : block.warps) clear(warp);
  for (auto& lanes : block.lanes) lanes.assign(threads, Shown{});
  block.turn.assign(threads, 0);
  while (int(block.fibers.size()) < threads) block.fibers.push_back(std::make_unique<Fiber>());
  for (int t = 0; t < threads; ++t) {
    Fiber& fiber = *block.fibers[t];
    fiber.block = &block;
    fiber.thread = t;
    fiber.waits = nullptr;
    const bool waits_for_a_kernel = fiber.started && fiber.ended;
    fiber.ended = false;
    if (waits_for_a_kernel) continue;
    fiber.started = false;
    fiber.requested.clear();
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
  }
}

// streams_on_cpu.h
inline bool finish_a_copy(Block& block);
inline std::string waits_in_vain(const Block& block);

inline void launch(int blocks, int threads, std::size_t shared, int cluster, std::function<void()> kernel) {
  machine.error.clear();
  machine.kernel = std::move(kernel);
  if (blocks % cluster) return fail("the grid is no multiple of the cluster");
  machine.cluster.resize(cluster);
  for (auto& block : machine.cluster)
    if (!block) block = std::make_unique<Block>();
  for (const int c : ordered(blocks / cluster, machine.clusters)) {
    clear(machine.barrier);
    for (int rank = 0; rank < cluster; ++rank)
      start(*machine.cluster[rank], c * cluster + rank, threads, shared);
    bool again = true;
    while (again && machine.error.empty()) {
      again = false;
      for (const int rank : ordered(cluster, machine.ranks)) again |= run_block(*machine.cluster[rank]);
      if (again) continue;
      for (auto& block : machine.cluster) again |= finish_a_copy(*block);
    }
    for (auto& block : machine.cluster)
      if (block->running) fail(waits_in_vain(*block));
    if (!machine.error.empty()) return;
  }
}

inline unsigned char* shared_memory() { return machine.current->block->memory; }

}  // namespace cuda_on_cpu

inline void __syncthreads(int line = __builtin_LINE()) {
  auto& block = *cuda_on_cpu::machine.current->block;
  cuda_on_cpu::wait(block.barrier, block.threads, line);
}

namespace cuda_on_cpu {

// Shows values to the warp's threads. Returns what they all show, by their number in the block.
inline const std::vector<Shown>& show_to_warp(const Shown& values, int line) {
  const int thread = machine.current->thread;
  auto& block = *machine.current->block;
  const int warp = thread / kWarp;
  const int all = std::min(kWarp, block.threads - warp * kWarp);
  // no thread can be two turns ahead of another one
  auto& lanes = block.lanes[block.turn[thread] ^= 1];
  lanes[thread] = values;
  wait(block.warps[warp], all, line);
  return lanes;
}

}  // namespace cuda_on_cpu

template <class T>
T __shfl_xor_sync(unsigned, T x, int step, int line = __builtin_LINE()) {
  static_assert(sizeof(T) == sizeof(unsigned));
  cuda_on_cpu::Shown own{};
  std::memcpy(&own[0], &x, sizeof(T));
  const int other = cuda_on_cpu::machine.current->thread ^ step;
  std::memcpy(&x, &cuda_on_cpu::show_to_warp(own, line)[other][0], sizeof(T));
  return x;
}

inline void __syncwarp(unsigned = 0xffffffffu, int line = __builtin_LINE()) {
  cuda_on_cpu::show_to_warp({}, line);
}

#include "streams_on_cpu.h"

// -- cooperative groups -------------------------------------------------------------------------------

namespace cooperative_groups {

struct cluster_group {
  unsigned block_rank() const {
    return unsigned(cuda_on_cpu::machine.current->block->number) % unsigned(num_blocks());
  }
  unsigned num_blocks() const { return unsigned(cuda_on_cpu::machine.cluster.size()); }
  void sync(int line = __builtin_LINE()) const {
    cuda_on_cpu::wait(cuda_on_cpu::machine.barrier, cuda_on_cpu::cluster_threads(), line);
  }
  template <class T>
  T* map_shared_rank(T* own, int rank) const {
    const auto at = reinterpret_cast<unsigned char*>(own) - cuda_on_cpu::shared_memory();
    return reinterpret_cast<T*>(cuda_on_cpu::machine.cluster[rank]->memory + at);
  }
};

inline cluster_group this_cluster() { return {}; }

}  // namespace cooperative_groups

// -- the host's side ----------------------------------------------------------------------------------

using cudaStream_t = void*;
using cudaEvent_t = int;
enum cudaError_t { cudaSuccess = 0, cudaErrorLaunchFailure = 719 };
enum { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize };

template <class F>
cudaError_t cudaFuncSetAttribute(F, int, int) {
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() {
  return cuda_on_cpu::machine.error.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}
inline cudaError_t cudaDeviceSynchronize() { return cudaGetLastError(); }
inline const char* cudaGetErrorString(cudaError_t) { return cuda_on_cpu::machine.error.c_str(); }
inline cudaError_t cudaMalloc(void** p, std::size_t bytes) {
  *p = std::aligned_alloc(16, (bytes + 15) / 16 * 16);
  return cudaSuccess;
}
inline void cudaMemcpy(void* to, const void* from, std::size_t bytes, int) { std::memcpy(to, from, bytes); }
inline void cudaEventCreate(cudaEvent_t*) {}
inline void cudaEventRecord(cudaEvent_t) {}
inline void cudaEventSynchronize(cudaEvent_t) {}
inline void cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) { *ms = 0; }

extern "C" inline __attribute__((used)) void set_order(unsigned order) { cuda_on_cpu::set_order(order); }
extern "C" inline __attribute__((used)) const char* last_error() { return cuda_on_cpu::machine.error.c_str(); }
