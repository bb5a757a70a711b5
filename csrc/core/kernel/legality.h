// Which shapes of a kernel are legal, whatever their tiles.
#pragma once
#include <vector>

#include "core/ids.h"
#include "core/kernel/kernel_nodes.h"
#include "core/kernel/kernel_task.h"
#include "core/kernel/loop_passes.h"

namespace mirage {

// True if every axis in use has the role that it must have. `forced` holds axes by role.
bool keeps_forced_roles(const KernelNodes& nodes, const KernelShape& shape,
                        const std::vector<AxisSet>& forced);

// True if the splits of an axis are independent. A value that is reduced over the axis is a partial
// result: it must be stored, may not be used here, and may not have to be whole. Every other output
// must carry the axis.
bool splits_are_independent(const KernelNodes& nodes, AxisId split);

// True if the blocks of a cluster that splits an axis have something to add up, and can: all of them
// take part in it outside of the loop.
bool cluster_adds_up(const KernelNodes& nodes, const KernelShape& shape);

// True if a loop is walked at least once, and not too often.
bool is_walked(const LoopPasses& passes, AxisId loop);

}  // namespace mirage
