#include "core/kernel/parallelism.h"

#include <algorithm>
#include <cmath>

#include "core/kernel/tile_sizes.h"

namespace mirage {
namespace {

constexpr double kLongAxis = 512;  // an axis that is longer is cut into tiles of kFineTile
constexpr double kFineTile = 4;

// The largest of the inputs that blocks walk, or of all inputs if there is no loop. (Blocks that are
// fine for what follows a loop would each walk all of it.)
struct LargestInput {
  double elements = 0;
  AxisSet axes;  // of several of that size, what all carry
};

bool is_walked(const KernelNodes& nodes, const KernelShape& shape, NodeId id) {
  return !nodes.is_computed(id) && (!shape.loop.valid() || nodes[id].axes.has(shape.loop));
}

LargestInput largest_input(const KernelNodes& nodes, const KernelShape& shape) {
  LargestInput largest;
  for (const NodeId id : nodes.all()) {
    if (!is_walked(nodes, shape, id)) continue;
    const double elements = nodes.elements(id);
    if (elements > largest.elements)
      largest = {elements, nodes[id].axes};
    else if (elements == largest.elements)
      largest.axes &= nodes[id].axes;
  }
  return largest;
}

// True if fine tiles of an axis would read the largest input again, or far more of another one.
bool is_reread(const KernelNodes& nodes, const KernelShape& shape, const LargestInput& largest,
               AxisId axis, double tiles) {
  if (!largest.axes.has(axis)) return true;
  if (!shape.loop.valid()) return false;
  return std::any_of(nodes.all().begin(), nodes.all().end(), [&](NodeId id) {
    return is_walked(nodes, shape, id) && !nodes[id].axes.has(axis) &&
           nodes.elements(id) * tiles > kMaxRereads * largest.elements;
  });
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Returns a power of two that gives each SM two blocks, or the most splits that the axis has.
std::int64_t splits_for_grid(std::int64_t size, double blocks, const GpuRates& gpu) {
  const std::int64_t most = std::min(ceil_div(size, kLoopSplit), kMaxSplits);
  std::int64_t wanted = 1;
  while (wanted < most && blocks * static_cast<double>(wanted) < 2 * gpu.sms) wanted *= 2;
  return std::min(most, wanted);
}

}  // namespace

double grid_blocks(const KernelNodes& nodes, const KernelShape& shape) {
  const LargestInput largest = largest_input(nodes, shape);
  double blocks = 1;
  for (const AxisId axis : shape.grid) {
    const double size = nodes.program().size(axis);
    const double fine = size > kLongAxis ? kFineTile : 1;
    const bool reread = is_reread(nodes, shape, largest, axis, size / fine);
    blocks *= std::max(1.0, std::ceil(size / (reread ? kNominalTile : fine)));
  }
  return blocks;
}

std::int64_t num_splits(const Program& program, const KernelShape& shape, double blocks,
                        const GpuRates& gpu) {
  const std::int64_t size = program.axes[shape.split].size;
  std::int64_t splits =
      shape.split_size > 0 ? ceil_div(size, shape.split_size) : splits_for_grid(size, blocks, gpu);
  while (splits > 1 && (splits - 1) * ceil_div(size, splits) >= size) --splits;
  return splits;
}

std::int64_t cluster_split_size(std::int64_t size, std::int64_t blocks) {
  const std::int64_t each = ceil_div(size, blocks);
  return (blocks - 1) * each < size ? each : 0;
}

}  // namespace mirage
