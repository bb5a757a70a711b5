// The passes of a kernel over its loop axis.
#pragma once
#include <vector>

#include "core/ids.h"
#include "core/kernel/kernel_nodes.h"

namespace mirage {

// A sum over the loop axis is ready after a pass; what is computed from it along the loop needs
// another. Without a loop there are no passes.
class LoopPasses {
 public:
  LoopPasses(const KernelNodes& nodes, AxisId loop);

  int count() const { return count_; }
  // The pass that computes a value that carries the loop axis, or the number of passes that any other
  // value waits for.
  int pass(NodeId id) const { return pass_[id]; }
  // The values along the loop that a pass computes, arguments first.
  std::vector<NodeId> body(int pass) const;
  // The passes that load a value.
  int loads(NodeId id) const { return loads_[id]; }

 private:
  void count_loads();

  const KernelNodes& nodes_;
  AxisId loop_;
  IdVector<NodeId, int> pass_, loads_;
  int count_ = 0;
};

}  // namespace mirage
