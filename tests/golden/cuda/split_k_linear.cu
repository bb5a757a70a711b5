// axes s=4 grid, m=2 grid, n=20 grid, k=6 loop
// %x = load 0 [m, s, k]
// %w = load 1 [s, k, n]
// for k {
//   %p [s, m, n, k] = mul(%x, %w)
//   %part [s, m, n] = accumulate sum(%p)
// }
// store %part [s, m, n] float32
namespace kernel_0 {

constexpr int threads = 256;
constexpr int n_size = 20;
constexpr int k_size = 6;
constexpr int s_tile = 1;
constexpr int n_tile = 16;
constexpr int k_tile = 6;

struct Shared {
  alignas(16) half x[16];  // [s, m, k]
  alignas(16) half w[96];  // [s, k, n]
  alignas(16) float part[32];  // [s, m, n]
  alignas(16) float partial[256];
};

__global__ void __launch_bounds__(threads) run(const half* x_ptr, const half* w_ptr, float* part_out0) {
  const int tid = threadIdx.x;
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  int block = blockIdx.x;
  const int n_0 = block % 2 * n_tile;
  block /= 2;
  const int s_0 = block % 4 * s_tile;
  const auto x_at = [&](int at_m, int at_s, int at_k) { return x_ptr + at_m * 24 + at_s * 6 + at_k; };
  const auto w_at = [&](int at_s, int at_k, int at_n) { return w_ptr + at_s * 120 + at_k * 20 + at_n; };
  wait_for_previous_kernel();
  launch_next_kernel();
  float part_acc[1];
  part_acc[0] = Sum::zero();
  for (int k_0 = 0; k_0 < k_size; k_0 += k_tile) {
    // x [s, m, k] from device memory
    if (const int e = tid; e < 12) {
      const int i_k = e % 6;
      const int i_m = e / 6;
      const int at_s = s_0;
      const int at_m = i_m;
      const int at_k = i_k;
      shared.x[i_m * 8 + i_k] = *x_at(at_m, at_s, at_k);
    }
    // w [s, n, k] from device memory
    if (const int e = tid; e < 96) {
      const int i_n = e % 16;
      const int i_k = e / 16;
      const int at_s = s_0;
      const int at_k = i_k;
      const int at_n = n_0 + i_n;
      if (i_n < n_size - n_0) {
        shared.w[i_k * 16 + i_n] = *w_at(at_s, at_k, at_n);
      }
    }
    __syncthreads();
    // part [s, m, n]: sum of p over k
    for (int i_k = tid / 32; i_k < 6; i_k += 8) {
      const int e = tid % 32;
      const int i_n = e % 16;
      const int i_m = e / 16;
      const float x = to_float(shared.x[i_m * 8 + i_k]);
      const float w = to_float(shared.w[i_k * 16 + i_n]);
      const float p = x * w;
      part_acc[0] = Sum::join(part_acc[0], p);
    }
  }
  {
    const int e = tid % 32;
    const float joined = part_acc[0];
    shared.partial[tid / 32 * 32 + e] = joined;
  }
  __syncthreads();
  if (const int e = tid; e < 32) {
    const int i_n = e % 16;
    const int i_m = e / 16;
    float joined = shared.partial[e];
#pragma unroll
    for (int g = 1; g < 8; ++g) joined = Sum::join(joined, shared.partial[g * 32 + e]);
    shared.part[i_m * 16 + i_n] = joined;
  }
  __syncthreads();
  // part [s, m, n] to device memory
  if (const int e = tid; e < 32) {
    const int i_n = e % 16;
    const int i_m = e / 16;
    const int at_s = s_0;
    const int at_m = i_m;
    const int at_n = n_0 + i_n;
    if (i_n < n_size - n_0) {
      const float part = shared.part[i_m * 16 + i_n];
      part_out0[at_s * 40 + at_m * 20 + at_n] = from_float<float>(part);
    }
  }
}

}  // namespace kernel_0

// axes s=4 tile, m=2 grid, n=20 grid
// %part = load 0 [s, m, n]
// once {
//   %o [m, n] = sum(%part, over=s)
// }
// store %o [m, n] float16
namespace kernel_1 {

constexpr int threads = 256;
constexpr int s_size = 4;
constexpr int n_size = 20;
constexpr int m_tile = 1;
constexpr int n_tile = 16;

struct Shared {
  alignas(16) float o[16];  // [m, n]
  alignas(16) float partial[128];
};

__global__ void __launch_bounds__(threads) run(const float* part_ptr, half* o_out0) {
  const int tid = threadIdx.x;
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  int block = blockIdx.x;
  const int n_0 = block % 2 * n_tile;
  block /= 2;
  const int m_0 = block % 2 * m_tile;
  const auto part_at = [&](int at_s, int at_m, int at_n) { return part_ptr + at_s * 40 + at_m * 20 + at_n; };
  wait_for_previous_kernel();
  launch_next_kernel();
  uint4 o_part_ahead[1];
  {
    const int i_s = tid / 4;
    const int e = tid % 4;
    const int j_n = e * 4;
    const int at_m = m_0;
    const int at_s = min(i_s, s_size - 1);
    const int at_n = min(n_0 + j_n, n_size - 4);
    o_part_ahead[0] = load_plain(part_at(at_s, at_m, at_n));
  }
  {
    float o_acc[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      o_acc[r] = Sum::zero();
    }
    // o [m, n]: sum of part over s
    {
      const int i_s = tid / 4;
      if (i_s < 4) {
        alignas(16) float part_v[4];
        *reinterpret_cast<uint4*>(part_v) = o_part_ahead[0];
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          const float part = to_float(part_v[v]);
          o_acc[v] = Sum::join(o_acc[v], part);
        }
      }
    }
    {
      const int e = tid % 4;
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        const float joined = join_lanes<Sum, 8, 4>(o_acc[v]);
        if (tid / 4 % 8 == 0) {
          shared.partial[tid / 4 / 8 * 16 + (e * 4 + v)] = joined;
        }
      }
    }
    __syncthreads();
    if (const int e = tid; e < 16) {
      const int i_n = e;
      float joined = shared.partial[e];
#pragma unroll
      for (int g = 1; g < 8; ++g) joined = Sum::join(joined, shared.partial[g * 16 + e]);
      shared.o[i_n] = joined;
    }
    __syncthreads();
  }
  // o [m, n] to device memory
  if (const int e = tid; e < 16) {
    const int i_n = e;
    const int at_m = m_0;
    const int at_n = n_0 + i_n;
    if (i_n < n_size - n_0) {
      const float o = shared.o[i_n];
      o_out0[at_m * 20 + at_n] = from_float<half>(o);
    }
  }
}

}  // namespace kernel_1

// bytes of scratch memory that launch() needs
extern "C" size_t workspace_bytes() { return 768; }

// launches every kernel on a stream; returns the cudaError_t of the first that fails
extern "C" int launch(const void* x, const void* w, void* out0, void* workspace, cudaStream_t stream) {
  kernel_0::run<<<8, kernel_0::threads, 1376, stream>>>(
      (const half*)(x), (const half*)(w), (float*)(static_cast<char*>(workspace) + 0));
  if (cudaError_t e = cudaGetLastError()) return e;
  kernel_1::run<<<4, kernel_1::threads, 576, stream>>>(
      (const float*)(static_cast<char*>(workspace) + 0), (half*)(out0));
  if (cudaError_t e = cudaGetLastError()) return e;
  return cudaSuccess;
}

