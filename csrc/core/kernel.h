// One kernel of a plan: which nodes of a variant it computes, one role per axis, stages by a
// fixpoint over what each needs.
#pragma once
#include <bit>
#include <bitset>
#include <optional>
#include <vector>

#include "core/ir.h"
#include "core/variants.h"

namespace mirage {

constexpr int kMaxNodes = 256;
using NodeSet = std::bitset<kMaxNodes>;  // of a variant

// What a kernel stores and what it may read instead of computing it.
struct KernelTask {
  NodeSet outputs;  // stored; a sum over a split axis is stored as partial results
  NodeSet final;    // outputs that must be whole: the program's own
  NodeSet stored;   // by other kernels
  bool operator==(const KernelTask&) const = default;
};

struct KernelChoice {
  std::vector<Role> roles;
  int loop = -1, split = -1;
  std::int64_t parts = 1;
  double cost = 0;
};

class KernelSearch {
 public:
  KernelSearch(const Program& program, const Variant& variant, const Limits& limits,
               Statistics& stats);

  // Everything that `task` computes or reads, as nodes.
  NodeSet needed(const KernelTask& task) const;
  // The legal choices of roles, cheapest first. Few: at most `most`.
  std::vector<KernelChoice> choices(const KernelTask& task, std::size_t most) const;
  // Whether node `n`, stored by a kernel with this choice, is stored as partial results.
  bool partial(int n, const KernelChoice& choice) const;
  FoundKernel emit(const KernelTask& task, const KernelChoice& choice,
                   const std::vector<std::pair<int, KernelChoice>>& stored_by) const;

 private:
  struct Timing {
    std::vector<int> stage;
    int loops = 0;
  };
  Timing timing(const std::vector<int>& nodes, const NodeSet& leaves, int loop) const;
  // `part`: elements of the split axis in one part; 0: so many parts as the grid needs.
  std::optional<KernelChoice> evaluate(const KernelTask& task, const std::vector<int>& nodes,
                                       const NodeSet& leaves, AxisSet grid, int loop, int split,
                                       std::int64_t part) const;
  bool carries(int n, int axis) const { return axis >= 0 && has(v_.nodes[n].axes, axis); }
  bool computed(int n, const NodeSet& leaves) const { return !leaves[n] && !v_.nodes[n].leaf(); }
  std::vector<int> body(const std::vector<int>& nodes, const NodeSet& leaves,
                        const NodeSet& outputs, const Timing& t, int loop, int stage) const;
  double extent(AxisSet axes) const;

  const Program& program_;
  const Variant& v_;
  const Limits& limits_;
  Statistics& stats_;
};

}  // namespace mirage
