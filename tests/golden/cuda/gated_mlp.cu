// axes m=4 grid, n=40 grid, k=32 loop
// %x = load 0 [m, k]
// %gate = load 1 [k, n]
// %up = load 2 [k, n]
// for k {
//   %pg [m, n, k] = mul(%x, %gate)
//   %pu [m, n, k] = mul(%x, %up)
//   %g [m, n] = accumulate sum(%pg)
//   %u [m, n] = accumulate sum(%pu)
// }
// once {
//   %a [m, n] = silu(%g)
//   %o [m, n] = mul(%a, %u)
// }
// store %o [m, n] float16
namespace kernel_0 {

constexpr int threads = 256;
constexpr int n_size = 40;
constexpr int k_size = 32;
constexpr int n_tile = 16;
constexpr int k_tile = 32;

struct Shared {
  alignas(16) half x[136];  // [m, k]
  alignas(16) half gate[512];  // [k, n]
  alignas(16) half up[512];  // [k, n]
  alignas(16) float g_[64];  // [m, n]
  alignas(16) float u[64];  // [m, n]
  alignas(16) float partial[512];
};

__global__ void __launch_bounds__(threads) run(const half* __restrict__ x_ptr, const half* __restrict__ gate_ptr, const half* __restrict__ up_ptr, half* __restrict__ o_out0) {
  const int tid = threadIdx.x;
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  int block = blockIdx.x;
  const int n_0 = block % 3 * n_tile;
  const auto x_at = [&](int at_m, int at_k) { return x_ptr + at_m * 32 + at_k; };
  const auto gate_at = [&](int at_k, int at_n) { return gate_ptr + at_k * 40 + at_n; };
  const auto up_at = [&](int at_k, int at_n) { return up_ptr + at_k * 40 + at_n; };
  float g__acc[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    g__acc[r] = Sum::zero();
  }
  float u_acc[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    u_acc[r] = Sum::zero();
  }
  for (int k_0 = 0; k_0 < k_size; k_0 += k_tile) {
    // x [m, k] from device memory
    for (int e = tid; e < 16; e += threads) {
      const int j_k = e % 4 * 8;
      const int i_m = e / 4;
      const int at_m = i_m;
      half x_v[8];
      {
        const int at_k = j_k;
        load(x_v, x_at(at_m, at_k));
      }
#pragma unroll
      for (int v = 0; v < 8; ++v) {
        const int i_k = j_k + v;
        shared.x[i_m * 34 + i_k] = x_v[v];
      }
    }
    // gate [n, k] from device memory
    for (int e = tid; e < 64; e += threads) {
      const int j_n = e % 2 * 8;
      const int i_k = e / 2;
      const int at_k = i_k;
      if (j_n >= n_size - n_0) continue;
      const int i_n = j_n;
      const int at_n = n_0 + i_n;
      copy<8>(&shared.gate[i_k * 16 + i_n], gate_at(at_k, at_n));
    }
    // up [n, k] from device memory
    for (int e = tid; e < 64; e += threads) {
      const int j_n = e % 2 * 8;
      const int i_k = e / 2;
      const int at_k = i_k;
      if (j_n >= n_size - n_0) continue;
      const int i_n = j_n;
      const int at_n = n_0 + i_n;
      copy<8>(&shared.up[i_k * 16 + i_n], up_at(at_k, at_n));
    }
    __syncthreads();
    // g [m, n]: sum of pg over k
    for (int j_k = tid / 32 * 4; j_k < 32; j_k += 32) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int e = tid % 32 + r * 32;
        const int i_n = e % 16;
        const int i_m = e / 16;
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          const int i_k = j_k + v;
          const float x = to_float(shared.x[i_m * 34 + i_k]);
          const float gate = to_float(shared.gate[i_k * 16 + i_n]);
          const float pg = x * gate;
          g__acc[r] = Sum::join(g__acc[r], pg);
        }
      }
    }
    // u [m, n]: sum of pu over k
    for (int j_k = tid / 32 * 4; j_k < 32; j_k += 32) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int e = tid % 32 + r * 32;
        const int i_n = e % 16;
        const int i_m = e / 16;
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          const int i_k = j_k + v;
          const float x = to_float(shared.x[i_m * 34 + i_k]);
          const float up = to_float(shared.up[i_k * 16 + i_n]);
          const float pu = x * up;
          u_acc[r] = Sum::join(u_acc[r], pu);
        }
      }
    }
    __syncthreads();
  }
  {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int e = tid % 32 + r * 32;
      const float joined = g__acc[r];
      shared.partial[tid / 32 * 64 + e] = joined;
    }
  }
  __syncthreads();
  for (int e = tid; e < 64; e += threads) {
    const int i_n = e % 16;
    const int i_m = e / 16;
    float joined = shared.partial[e];
    for (int g = 1; g < 8; ++g) joined = Sum::join(joined, shared.partial[g * 64 + e]);
    shared.g_[i_m * 16 + i_n] = joined;
  }
  __syncthreads();
  {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int e = tid % 32 + r * 32;
      const float joined = u_acc[r];
      shared.partial[tid / 32 * 64 + e] = joined;
    }
  }
  __syncthreads();
  for (int e = tid; e < 64; e += threads) {
    const int i_n = e % 16;
    const int i_m = e / 16;
    float joined = shared.partial[e];
    for (int g = 1; g < 8; ++g) joined = Sum::join(joined, shared.partial[g * 64 + e]);
    shared.u[i_m * 16 + i_n] = joined;
  }
  __syncthreads();
  // o [m, n] to device memory
  for (int e = tid; e < 64; e += threads) {
    const int i_n = e % 16;
    const int i_m = e / 16;
    const int at_m = i_m;
    const int at_n = n_0 + i_n;
    if (i_n >= n_size - n_0) continue;
    const float g_ = shared.g_[i_m * 16 + i_n];
    const float a = g_ / (1.0f + expf(-g_));
    const float u = shared.u[i_m * 16 + i_n];
    const float o = a * u;
    o_out0[at_m * 40 + at_n] = from_float<half>(o);
  }
}

}  // namespace kernel_0

// bytes of scratch memory that launch() needs
extern "C" size_t workspace_bytes() { return 0; }

// launches every kernel on a stream; returns the cudaError_t of the first that fails
extern "C" int launch(const void* x, const void* gate, const void* up, void* out0, void* workspace, cudaStream_t stream) {
  kernel_0::run<<<3, kernel_0::threads, 4880, stream>>>(
      (const half*)(x), (const half*)(gate), (const half*)(up), (half*)(out0));
  if (cudaError_t e = cudaGetLastError()) return e;
  return cudaSuccess;
}

