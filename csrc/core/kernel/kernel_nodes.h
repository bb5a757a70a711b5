// The nodes of one kernel: what all its shapes have in common.
#pragma once
#include <vector>

#include "core/algebra/variant.h"
#include "core/ids.h"
#include "core/kernel/kernel_task.h"
#include "core/program.h"

namespace mirage {

constexpr int kIntermediateItemsize = 4;  // values between kernels are float32

// Returns every node that a task computes or reads.
NodeSet needed_nodes(const Variant& variant, const KernelTask& task);

class KernelNodes {
 public:
  KernelNodes(const Program& program, const Variant& variant, const KernelTask& task);

  const Program& program() const { return program_; }
  const KernelTask& task() const { return task_; }
  const Variant::Node& operator[](NodeId id) const { return variant_.nodes[id]; }
  // Computed or read, arguments first.
  const std::vector<NodeId>& all() const { return all_; }
  // The nodes of the whole variant.
  std::size_t variant_size() const { return variant_.nodes.size(); }
  bool is_computed(NodeId id) const { return computed_.has(id); }
  std::size_t op_count() const { return computed_.count(); }
  // How often ops of this kernel use a node.
  int uses(NodeId id) const { return uses_[id]; }
  // Axes that a node carries.
  AxisSet axes() const { return axes_; }
  // Axes that every output carries and nothing sums.
  AxisSet grid() const { return grid_; }
  // The elements of a node's value.
  double elements(NodeId id) const { return elements_[id]; }
  // True if a node is computed here by reducing this axis.
  bool reduces(NodeId id, AxisId axis) const {
    return is_computed(id) && variant_.nodes[id].reduces(axis);
  }
  // True if a node is a product that is summed on the tensor cores.
  bool is_matrix_product(NodeId id) const;
  // Bytes of an element of an output as this kernel stores it.
  int stored_itemsize(NodeId id) const;

 private:
  const Program& program_;
  const Variant& variant_;
  const KernelTask& task_;
  std::vector<NodeId> all_;
  NodeSet computed_, summed_;
  IdVector<NodeId, int> uses_;
  IdVector<NodeId, double> elements_;
  AxisSet axes_, grid_;
};

}  // namespace mirage
