// The tiles that one block of a kernel holds.
#pragma once
#include "core/ids.h"
#include "core/kernel/kernel_nodes.h"
#include "core/kernel/kernel_task.h"

namespace mirage {

// Returns the elements that a block holds of a value with these axes: tile axes are held whole, or
// one split of them; of other axes one element counts.
double held_elements(const Program& program, const KernelShape& shape, AxisSet axes);

// Returns the elements of the largest value that a block holds.
double largest_tile(const KernelNodes& nodes, const KernelShape& shape);

}  // namespace mirage
