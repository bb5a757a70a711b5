#include "core/kernel/tiles.h"

#include <algorithm>

#include "core/kernel/tile_sizes.h"

namespace mirage {
namespace {

// Returns the axis that a product is summed over if a sum is all that reads it; else none.
AxisId summed_over(const KernelNodes& nodes, NodeId product) {
  AxisId over;
  if (nodes[product].op != Op::mul || nodes.uses(product) != 1) return over;
  if (nodes.task().outputs.has(product) || !nodes.is_computed(product)) return over;
  for (const NodeId id : nodes.all())
    if (nodes.is_computed(id) && nodes[id].op == Op::sum && nodes[id].args[0] == product)
      over = nodes[id].axis;
  return over;
}

// True if both factors of a product carry another tile axis, or the loop. A batch of products runs as
// multiply-adds in each step of the loop, not on the tensor cores.
bool is_batch(const KernelNodes& nodes, const KernelShape& shape, NodeId product, AxisId over) {
  const AxisSet left = nodes[nodes[product].args[0]].axes;
  const AxisSet right = nodes[nodes[product].args[1]].axes;
  const AxisSet both = (left & right) - over;
  return left != right && (held_elements(nodes.program(), shape, both) > 1 || both.has(shape.loop));
}

}  // namespace

double held_elements(const Program& program, const KernelShape& shape, AxisSet axes) {
  double held = 1;
  for (const AxisId axis : axes - shape.grid) {
    if (axis == shape.loop) continue;
    const double size = program.size(axis);
    held *= axis == shape.split ? std::min(static_cast<double>(shape.split_size), size) : size;
  }
  return held;
}

double largest_tile(const KernelNodes& nodes, const KernelShape& shape) {
  double largest = 1;
  for (const NodeId id : nodes.all()) {
    const AxisSet axes = nodes[id].axes;
    double elements = held_elements(nodes.program(), shape, axes);
    // a product that is only summed is never formed whole, unless it is a batch
    const AxisId over = summed_over(nodes, id);
    if (over.valid()) {
      if (!is_batch(nodes, shape, id, over)) continue;
      if (axes.has(shape.loop))
        elements *= std::min(static_cast<double>(kLoopTile), nodes.program().size(shape.loop));
    }
    largest = std::max(largest, elements);
  }
  return largest;
}

}  // namespace mirage
