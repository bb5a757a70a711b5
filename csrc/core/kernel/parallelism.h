// How many blocks a kernel has.
#pragma once
#include <cstdint>

#include "core/gpu_rates.h"
#include "core/kernel/kernel_nodes.h"
#include "core/kernel/kernel_task.h"

namespace mirage {

// Returns the blocks of a kernel, not counting splits of an axis. Axes that the largest input
// carries are cut fine; axes whose blocks would all read its tiles are not.
double grid_blocks(const KernelNodes& nodes, const KernelShape& shape);

// Returns the number of splits of the split axis. None is empty. `blocks` are those of the grid.
std::int64_t num_splits(const Program& program, const KernelShape& shape, double blocks,
                        const GpuRates& gpu);

// Returns the elements of an axis that each block of a cluster holds; 0 if one would hold none.
std::int64_t cluster_split_size(std::int64_t size, std::int64_t blocks);

}  // namespace mirage
