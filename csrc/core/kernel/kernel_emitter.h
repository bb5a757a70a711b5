// Writes down a kernel that was found.
#pragma once
#include "core/algebra/variant.h"
#include "core/candidate.h"
#include "core/ids.h"
#include "core/kernel/kernel_task.h"
#include "core/program.h"

namespace mirage {

// True if a kernel of this shape stores a node as partial results.
inline bool is_partial(const Variant& variant, NodeId node, const KernelShape& shape) {
  return shape.split.valid() && !shape.clustered && variant.nodes[node].reduces(shape.split);
}

// `partial_over`: of each node that another kernel stores as partial results, the split axis.
FoundKernel found_kernel(const Program& program, const Variant& variant, const KernelTask& task,
                         const KernelChoice& choice, const IdVector<NodeId, AxisId>& partial_over);

}  // namespace mirage
