// Plans: a variant cut into kernels.
#pragma once
#include <vector>

#include "core/algebra/variant.h"
#include "core/candidate.h"
#include "core/program.h"
#include "core/search.h"

namespace mirage {

// Returns the cheapest plans of one variant for each number of kernels, and the runner-up shapes of a
// single kernel.
std::vector<Candidate> plans(const Program& program, const Variant& variant, const Limits& limits,
                             Statistics& stats, const StopCheck& out_of_time);

}  // namespace mirage
