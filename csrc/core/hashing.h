// Combining hashes of parts into one.
#pragma once
#include <cstddef>
#include <cstdint>

namespace mirage {

// Hashes a sequence of integers; each step is one round of MurmurHash's finalizer.
class Hasher {
 public:
  void add(std::uint64_t part) {
    state_ = (state_ ^ part) * 0xff51afd7ed558ccdU;
    state_ ^= state_ >> 32U;
  }
  std::size_t hash() const { return static_cast<std::size_t>(state_); }

 private:
  std::uint64_t state_ = 0x9e3779b97f4a7c15U;
};

}  // namespace mirage
