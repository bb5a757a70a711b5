#include "core/kernel/kernel_nodes.h"

#include <algorithm>
#include <cstdint>

namespace mirage {
NodeSet needed_nodes(const Variant& variant, const KernelTask& task) {
  NodeSet needed = task.outputs;
  for (int i = static_cast<int>(variant.nodes.size()) - 1; i >= 0; --i) {
    const NodeId id(i);
    if (!needed.has(id) || task.stored.has(id)) continue;
    for (const NodeId arg : variant.nodes[id].args) needed.insert(arg);
  }
  return needed;
}

KernelNodes::KernelNodes(const Program& program, const Variant& variant, const KernelTask& task)
    : program_(program),
      variant_(variant),
      task_(task),
      uses_(variant.nodes.size()),
      elements_(variant.nodes.size()) {
  const NodeSet needed = needed_nodes(variant, task);
  AxisSet shared = AxisSet::of_bits(~std::uint64_t{0}), reduced;
  for (const NodeId id : variant.nodes.ids()) {
    if (!needed.has(id)) continue;
    const Variant::Node& node = variant.nodes[id];
    all_.push_back(id);
    axes_ |= node.axes;
    elements_[id] = program.elements(node.axes);
    if (task.outputs.has(id)) shared &= node.axes;
    if (node.is_leaf() || task.stored.has(id)) continue;
    computed_.insert(id);
    if (node.reduces()) reduced |= node.axis;
    for (const NodeId arg : node.args) ++uses_[arg];
    if (node.op == Op::sum) summed_.insert(node.args[0]);
  }
  grid_ = (shared & axes_) - reduced;
}

bool KernelNodes::is_matrix_product(NodeId id) const {
  const Variant::Node& node = variant_.nodes[id];
  return node.op == Op::mul && summed_.has(id) &&
         mirage::is_matrix_product(program_, variant_.nodes[node.args[0]].axes,
                                   variant_.nodes[node.args[1]].axes);
}

int KernelNodes::stored_itemsize(NodeId id) const {
  if (!task_.final.has(id)) return kIntermediateItemsize;
  int widest = 0;
  for (std::size_t output = 0; output < variant_.outputs.size(); ++output)
    if (variant_.outputs[output] == id)
      widest = std::max(widest, program_.outputs[output].itemsize);
  return widest;
}

}  // namespace mirage
