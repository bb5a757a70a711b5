// Variants: the algebraically different ways to compute a program, before it is cut into kernels.
#pragma once
#include <unordered_set>
#include <vector>

#include "core/algebra/normal_form.h"
#include "core/algebra/saturate.h"
#include "core/algebra/variant.h"
#include "core/search.h"

namespace mirage {

struct Variants {
  std::vector<Variant> all;  // the program as written, then the others, cheapest first
  bool complete = true;      // these are the cheapest `max_variants` for certain
};

// Lists variants that differ in the sums they form, or in whether a sum waits for a factor that it
// could leave out. (Waiting takes another pass, but keeps what is summed in range.) Of those that
// agree in both, the one with the least scalar work is kept.
Variants variants(const Program& program, const EGraph& graph, NormalForms& forms,
                  const Limits& limits, Statistics& stats, const StopCheck& out_of_time);

// Returns the values that some sum adds up.
std::unordered_set<ValueId> summed_values(const EGraph& graph);

// Estimates the µs of one op over its whole axes, on a GPU that it keeps busy. A product runs on the
// tensor cores only if it is summed: scaling every weight by a factor of its group is scalar work.
double op_work(const Program& program, const EGraph& graph, ValueId id, bool is_summed,
               const Derivation& derivation, const GpuRates& gpu);

}  // namespace mirage
