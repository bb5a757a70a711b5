// What one kernel of a plan has to do, and how it does it.
#pragma once
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "core/candidate.h"
#include "core/hashing.h"
#include "core/ids.h"

namespace mirage {

constexpr std::size_t kMaxNodes = 256;  // of a variant that is cut into kernels

class NodeSet {
 public:
  bool has(NodeId node) const { return bits_[position(node)]; }
  void insert(NodeId node) { bits_.set(position(node)); }
  bool empty() const { return bits_.none(); }
  std::size_t count() const { return bits_.count(); }
  bool within(const NodeSet& other) const { return (bits_ & ~other.bits_).none(); }
  NodeSet& operator|=(const NodeSet& other) {
    bits_ |= other.bits_;
    return *this;
  }
  friend NodeSet operator&(NodeSet a, const NodeSet& b) {
    a.bits_ &= b.bits_;
    return a;
  }
  bool operator==(const NodeSet&) const = default;
  std::size_t hash() const { return std::hash<std::bitset<kMaxNodes>>{}(bits_); }

 private:
  static std::size_t position(NodeId node) { return static_cast<std::size_t>(node.index()); }
  std::bitset<kMaxNodes> bits_;
};

struct KernelTask {
  NodeSet outputs;  // that the kernel stores; sums over a split axis are stored as partial results
  NodeSet final;    // outputs that must be whole: the program's own
  NodeSet stored;   // by other kernels: read instead of computed
  bool operator==(const KernelTask&) const = default;
};

struct KernelTaskHash {
  std::size_t operator()(const KernelTask& task) const {
    Hasher hasher;
    for (const NodeSet* nodes : {&task.outputs, &task.final, &task.stored})
      hasher.add(nodes->hash());
    return hasher.hash();
  }
};

// The role of each axis of a kernel: in `grid`, the loop, or else a tile. The loop axis or a tile
// axis may also be split among blocks (split-K, split-KV).
struct KernelShape {
  AxisSet grid;
  AxisId loop;
  AxisId split;
  // Elements of the split axis in one split; 0: as many splits as fill the GPU.
  std::int64_t split_size = 0;
  // The blocks of the splits form a cluster, so they add up their partial results themselves.
  bool clustered = false;

  Role role(AxisId axis) const {
    if (axis == loop) return Role::loop;
    return grid.has(axis) ? Role::grid : Role::tile;
  }
};

struct KernelChoice {
  KernelShape shape;
  std::int64_t num_splits = 1;  // of the split axis
  double cost_us = 0;
};

}  // namespace mirage
