// Plans: a variant cut into kernels. A cut is a value that one kernel stores and others read.
#pragma once
#include <functional>
#include <vector>

#include "core/ir.h"
#include "core/kernel.h"
#include "core/variants.h"

namespace mirage {

// The cheapest plans of one variant for each number of kernels, and the runner-up roles of a single
// kernel.
std::vector<Candidate> plans(const Program& program, const Variant& variant, const Limits& limits,
                             Statistics& stats, const std::function<bool()>& out_of_time);

}  // namespace mirage
