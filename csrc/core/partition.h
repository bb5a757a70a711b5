// From values to kernels: one role per axis, one derivation per needed value, stages by a fixpoint over what each needs.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "core/ir.h"
#include "core/saturate.h"

namespace mirage {

// The role assignments worth trying: a grid axis is never reduced inside and is carried by every output.
std::vector<std::vector<Role>> role_assignments(const Program& program, const Values& values, const Limits& limits);

// The best kernels for one role assignment, cheapest first, no two with the same accumulators.
std::vector<Candidate> kernels(const Program& program, const Values& values, const std::vector<Role>& roles,
                               const Limits& limits, Statistics& stats, bool& complete, const std::function<bool()>& out_of_time);

}  // namespace mirage
