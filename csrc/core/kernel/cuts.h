// Cuts: values that one kernel may store for others to read.
#pragma once
#include <vector>

#include "core/algebra/variant.h"
#include "core/gpu_rates.h"
#include "core/ids.h"
#include "core/program.h"

namespace mirage {

// Returns the values of a variant that are worth storing, at most 24, in ascending order. These are
// sums, and the last values of chains of scalar work. Numbers are cheaper to compute again. So is what
// is computed from inputs without a reduction, unless many blocks would.
std::vector<NodeId> find_cuts(const Program& program, const Variant& variant, const GpuRates& gpu);

}  // namespace mirage
