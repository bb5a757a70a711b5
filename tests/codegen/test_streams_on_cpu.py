"""The emulation of bulk copies, barriers and tensor cores: tests/helpers/streams_on_cpu.h."""

import pytest
import torch

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
__global__ void run(const unsigned short* codes, unsigned* halves, unsigned* others) {
  for (int n = threadIdx.x; n < 128; n += 64) halves[n] = halves_of_float8(codes[n]);
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
    source = SOURCE + HALVES + "".join(changed(n) for n in range(len(MISTAKES)))

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
