#include "core/kernel/loop_passes.h"

#include <algorithm>

#include "core/kernel/tile_sizes.h"

namespace mirage {

LoopPasses::LoopPasses(const KernelNodes& nodes, AxisId loop)
    : nodes_(nodes), loop_(loop), pass_(nodes.variant_size()), loads_(nodes.variant_size()) {
  if (!loop.valid()) return;
  for (const NodeId id : nodes.all()) {
    const Variant::Node& node = nodes[id];
    if (nodes.reduces(id, loop)) {
      pass_[id] = pass_[node.args[0]] + 1;
    } else if (nodes.is_computed(id)) {
      for (const NodeId arg : node.args) pass_[id] = std::max(pass_[id], pass_[arg]);
    }
    count_ = std::max(count_, node.axes.has(loop) ? pass_[id] + 1 : pass_[id]);
  }
  if (count_ <= kMaxPasses) count_loads();  // else it is not legal, and nothing asks for loads
}

void LoopPasses::count_loads() {
  for (int pass = 0; pass < count_; ++pass) {
    NodeSet loaded;
    for (const NodeId id : body(pass))
      for (const NodeId arg : nodes_[id].args)
        if (!nodes_.is_computed(arg) && nodes_[arg].axes.has(loop_)) loaded.insert(arg);
    for (const NodeId id : nodes_.all())
      if (loaded.has(id)) ++loads_[id];
  }
}

std::vector<NodeId> LoopPasses::body(int pass) const {
  NodeSet wanted;  // by the accumulators and outputs of this pass
  for (const NodeId id : nodes_.all()) {
    if (!nodes_.is_computed(id)) continue;
    const Variant::Node& node = nodes_[id];
    if (node.reduces(loop_) && pass_[node.args[0]] == pass) wanted.insert(node.args[0]);
    if (node.axes.has(loop_) && pass_[id] == pass && nodes_.task().outputs.has(id))
      wanted.insert(id);
  }
  std::vector<NodeId> found;
  for (auto it = nodes_.all().rbegin(); it != nodes_.all().rend(); ++it) {
    if (!wanted.has(*it) || !nodes_.is_computed(*it)) continue;
    found.push_back(*it);
    for (const NodeId arg : nodes_[*it].args)
      if (nodes_[arg].axes.has(loop_)) wanted.insert(arg);
  }
  std::reverse(found.begin(), found.end());
  return found;
}

}  // namespace mirage
