// axes h=2 grid, i=3 grid, c=8 tile, e=8 tile, j=24 loop
// %q = load 0 [h, i, c]
// %k = load 1 [h, j, c]
// %v = load 2 [h, j, e]
// for j {
//   %p0 [h, i, c, j] = mul(%q, %k)
//   %s0 [h, i, j] = sum(%p0, over=c)
//   %z0 [h, i, j] = mul(%s0, 0.35355339059327373)
//   %top [h, i] = accumulate max(%z0)
// }
// for j {
//   %p1 [h, i, c, j] = mul(%q, %k)
//   %s1 [h, i, j] = sum(%p1, over=c)
//   %z1 [h, i, j] = mul(%s1, 0.35355339059327373)
//   %shifted [h, i, j] = sub(%z1, %top)
//   %w [h, i, j] = exp(%shifted)
//   %wv [h, i, e, j] = mul(%w, %v)
//   %l [h, i] = accumulate sum(%w)
//   %acc [h, i, e] = accumulate sum(%wv)
// }
// once {
//   %o [h, i, e] = div(%acc, %l)
// }
// store %o [h, i, e] float16
namespace kernel_0 {

constexpr int threads = 256;
constexpr int j_size = 24;
constexpr int h_tile = 1;
constexpr int j_tile = 24;

struct Shared {
  alignas(16) half q_[30];  // [h, i, c]
  alignas(16) float s0[72];  // [h, i, j]
  alignas(16) float top[3];  // [h, i]
  alignas(16) float s1[72];  // [h, i, j]
  alignas(16) float w[72];  // [h, i, j]
  alignas(16) float l[3];  // [h, i]
  alignas(16) float acc[24];  // [h, i, e]
  alignas(16) float partial[192];
};

__global__ void __launch_bounds__(threads) run(const half* q__ptr, const half* k_ptr, const half* v__ptr, half* o_out0) {
  const int tid = threadIdx.x;
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  int block = blockIdx.x;
  const int h_0 = block % 2 * h_tile;
  const auto q__at = [&](int at_h, int at_i, int at_c) { return q__ptr + at_h * 24 + at_i * 8 + at_c; };
  const auto k_at = [&](int at_h, int at_j, int at_c) { return k_ptr + at_h * 192 + at_j * 8 + at_c; };
  const auto v__at = [&](int at_h, int at_j, int at_e) { return v__ptr + at_h * 192 + at_j * 8 + at_e; };
  wait_for_previous_kernel();
  launch_next_kernel();
  uint4 s0_k_ahead[1];
  {
    const int j_c = 0 * 8;
    const int e = min(tid, 23);
    const int i_j = e;
    const int at_j = i_j;
    const int at_h = h_0;
    const int at_c = j_c;
    s0_k_ahead[0] = load_plain(k_at(at_h, at_j, at_c));
  }
  // q [h, i, c] from device memory
  if (const int e = tid; e < 3) {
    const int j_c = e % 1 * 8;
    const int i_i = e / 1;
    const int at_h = h_0;
    const int at_i = i_i;
    alignas(16) half q__v[8];
    {
      const int at_c = j_c;
      load(q__v, q__at(at_h, at_i, at_c));
    }
#pragma unroll
    for (int v = 0; v < 8; ++v) {
      const int i_c = j_c + v;
      shared.q_[i_i * 10 + i_c] = q__v[v];
    }
  }
  __syncthreads();
  float top_acc[1];
  top_acc[0] = Max::zero();
  for (int j_0 = 0; j_0 < j_size; j_0 += j_tile) {
    {
      float s0_acc[3];
#pragma unroll
      for (int r = 0; r < 3; ++r) {
        s0_acc[r] = Sum::zero();
      }
      // s0 [h, i, j]: sum of p0 over c
      {
        const int j_c = 0 * 8;
        alignas(16) half k_v[8];
        *reinterpret_cast<uint4*>(k_v) = s0_k_ahead[0];
#pragma unroll
        for (int v = 0; v < 8; ++v) {
          const int i_c = j_c + v;
#pragma unroll
          for (int q = 0; q < 3; ++q) {
            const int i_i = q;
            const float q_ = to_float(shared.q_[i_i * 10 + i_c]);
            const float k = to_float(k_v[v]);
            const float p0 = q_ * k;
            s0_acc[q] = Sum::join(s0_acc[q], p0);
          }
        }
      }
      {
        const int e = tid;
#pragma unroll
        for (int q = 0; q < 3; ++q) {
          const float joined = s0_acc[q];
          if (e < 24) {
            const int i_i = (e * 3 + q) % 3;
            const int i_j = (e * 3 + q) / 3;
            shared.s0[i_i * 24 + i_j] = joined;
          }
        }
      }
      __syncthreads();
    }
    // top [h, i]: max of z0 over j
    for (int j_j = tid % 8 * 4; j_j < 24; j_j += 32) {
      const int e = min(tid / 8, 2);
      const int i_i = e;
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        const int i_j = j_j + v;
        const float s0 = shared.s0[i_i * 24 + i_j];
        const float z0 = s0 * 0.35355339059327373f;
        top_acc[0] = Max::join(top_acc[0], z0);
      }
    }
  }
  {
    const int e = tid / 8;
    const float joined = join_lanes<Max, 8>(top_acc[0]);
    if (e < 3 && tid % 8 == 0) {
      const int i_i = e;
      shared.top[i_i] = joined;
    }
  }
  __syncthreads();
  uint4 s1_k_ahead[1];
  {
    const int j_c = 0 * 8;
    const int e = min(tid, 23);
    const int i_j = e;
    const int at_j = i_j;
    const int at_h = h_0;
    const int at_c = j_c;
    s1_k_ahead[0] = load_plain(k_at(at_h, at_j, at_c));
  }
  uint4 acc_v__ahead[1];
  {
    const int i_j = tid;
    const int e = 0;
    const int j_e = e * 8;
    const int at_h = h_0;
    const int at_j = min(i_j, j_size - 1);
    const int at_e = j_e;
    acc_v__ahead[0] = load_plain(v__at(at_h, at_j, at_e));
  }
  float l_acc[1];
  l_acc[0] = Sum::zero();
  float acc_acc[24];
#pragma unroll
  for (int r = 0; r < 24; ++r) {
    acc_acc[r] = Sum::zero();
  }
  for (int j_0 = 0; j_0 < j_size; j_0 += j_tile) {
    {
      float s1_acc[3];
#pragma unroll
      for (int r = 0; r < 3; ++r) {
        s1_acc[r] = Sum::zero();
      }
      // s1 [h, i, j]: sum of p1 over c
      {
        const int j_c = 0 * 8;
        alignas(16) half k_v[8];
        *reinterpret_cast<uint4*>(k_v) = s1_k_ahead[0];
#pragma unroll
        for (int v = 0; v < 8; ++v) {
          const int i_c = j_c + v;
#pragma unroll
          for (int q = 0; q < 3; ++q) {
            const int i_i = q;
            const float q_ = to_float(shared.q_[i_i * 10 + i_c]);
            const float k = to_float(k_v[v]);
            const float p1 = q_ * k;
            s1_acc[q] = Sum::join(s1_acc[q], p1);
          }
        }
      }
      {
        const int e = tid;
#pragma unroll
        for (int q = 0; q < 3; ++q) {
          const float joined = s1_acc[q];
          if (e < 24) {
            const int i_i = (e * 3 + q) % 3;
            const int i_j = (e * 3 + q) / 3;
            shared.s1[i_i * 24 + i_j] = joined;
          }
        }
      }
      __syncthreads();
    }
    // w [h, i, j]
    if (const int e = tid; e < 72) {
      const int i_i = e % 3;
      const int i_j = e / 3;
      const float s1 = shared.s1[i_i * 24 + i_j];
      const float z1 = s1 * 0.35355339059327373f;
      const float top = shared.top[i_i];
      const float shifted = z1 - top;
      const float w = expf(shifted);
      shared.w[i_i * 24 + i_j] = w;
    }
    __syncthreads();
    // l [h, i]: sum of w over j
    for (int j_j = tid % 8 * 4; j_j < 24; j_j += 32) {
      const int e = min(tid / 8, 2);
      const int i_i = e;
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        const int i_j = j_j + v;
        const float w = shared.w[i_i * 24 + i_j];
        l_acc[0] = Sum::join(l_acc[0], w);
      }
    }
    // acc [h, i, e]: sum of wv over j
    {
      const int i_j = tid;
      if (i_j < 24) {
        alignas(16) half v__v[8];
        *reinterpret_cast<uint4*>(v__v) = acc_v__ahead[0];
#pragma unroll
        for (int v = 0; v < 8; ++v) {
#pragma unroll
          for (int q = 0; q < 3; ++q) {
            const int i_i = q;
            const float w = shared.w[i_i * 24 + i_j];
            const float v_ = to_float(v__v[v]);
            const float wv = w * v_;
            acc_acc[v * 3 + q] = Sum::join(acc_acc[v * 3 + q], wv);
          }
        }
      }
    }
  }
  {
    const int e = tid / 8;
    const float joined = join_lanes<Sum, 8>(l_acc[0]);
    if (e < 3 && tid % 8 == 0) {
      const int i_i = e;
      shared.l[i_i] = joined;
    }
  }
  {
    const int e = 0;
#pragma unroll
    for (int v = 0; v < 8; ++v) {
#pragma unroll
      for (int q = 0; q < 3; ++q) {
        const float joined = join_lanes<Sum, 32>(acc_acc[v * 3 + q]);
        if (tid % 32 == 0) {
          shared.partial[tid / 32 * 24 + ((e * 8 + v) * 3 + q)] = joined;
        }
      }
    }
  }
  __syncthreads();
  if (const int e = tid; e < 24) {
    const int i_i = e % 3;
    const int i_e = e / 3;
    float joined = shared.partial[e];
#pragma unroll
    for (int g = 1; g < 8; ++g) joined = Sum::join(joined, shared.partial[g * 24 + e]);
    shared.acc[i_i * 8 + i_e] = joined;
  }
  __syncthreads();
  // o [h, i, e] to device memory
  if (const int e = tid; e < 24) {
    const int i_e = e % 8;
    const int i_i = e / 8;
    const int at_h = h_0;
    const int at_i = i_i;
    const int at_e = i_e;
    const float acc = shared.acc[i_i * 8 + i_e];
    const float l = shared.l[i_i];
    const float o = acc / l;
    o_out0[at_h * 24 + at_i * 8 + at_e] = from_float<half>(o);
  }
}

}  // namespace kernel_0

// bytes of scratch memory that launch() needs
extern "C" size_t workspace_bytes() { return 0; }

// launches every kernel on a stream; returns the cudaError_t of the first that fails
extern "C" int launch(const void* q, const void* k, const void* v, void* out0, void* workspace, cudaStream_t stream) {
  kernel_0::run<<<2, kernel_0::threads, 1824, stream>>>(
      (const half*)(q), (const half*)(k), (const half*)(v), (half*)(out0));
  if (cudaError_t e = cudaGetLastError()) return e;
  return cudaSuccess;
}

