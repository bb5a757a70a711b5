#include "core/kernel/legality.h"

#include <algorithm>

#include "core/kernel/tile_sizes.h"

namespace mirage {

bool keeps_forced_roles(const KernelNodes& nodes, const KernelShape& shape,
                        const std::vector<AxisSet>& forced) {
  for (std::size_t role = 0; role < forced.size(); ++role)
    for (const AxisId axis : forced[role] & nodes.axes())
      if (shape.role(axis) != static_cast<Role>(role)) return false;
  return true;
}

bool splits_are_independent(const KernelNodes& nodes, AxisId split) {
  const KernelTask& task = nodes.task();
  return std::all_of(nodes.all().begin(), nodes.all().end(), [&](NodeId id) {
    if (nodes.reduces(id, split))
      return nodes.uses(id) == 0 && task.outputs.has(id) && !task.final.has(id);
    return !task.outputs.has(id) || nodes[id].axes.has(split);
  });
}

bool cluster_adds_up(const KernelNodes& nodes, const KernelShape& shape) {
  bool any = false;
  for (const NodeId id : nodes.all()) {
    if (!nodes.reduces(id, shape.split)) continue;
    if (nodes[id].axes.has(shape.loop)) return false;
    any = true;
  }
  return any;
}

bool is_walked(const LoopPasses& passes, AxisId loop) {
  return !loop.valid() || (passes.count() > 0 && passes.count() <= kMaxPasses);
}

}  // namespace mirage
