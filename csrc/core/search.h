// The search: a program in, the cheapest equivalent kernels out.
#pragma once
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "core/candidate.h"
#include "core/gpu_rates.h"
#include "core/ids.h"
#include "core/program.h"

namespace mirage {

struct Limits {
  double seconds = 60;
  int width = 1;          // monomials that a product may be multiplied out to
  int max_kernels = 4;    // kernels of one candidate
  int max_cuts = 3;       // values that a candidate keeps in device memory between kernels
  int max_variants = 64;  // algebraic variants that are cut into kernels
  int max_candidates = 24;
  int max_block_ops = 64;                // ops of one kernel
  bool clusters = false;                 // also find single kernels whose blocks form clusters
  std::int64_t max_values = 20000;       // values of the e-graph
  std::int64_t max_forms = 4000000;      // normal forms and atoms in memory: about 0.4 KB each
  std::int64_t max_expansions = 100000;  // states of the search for variants
  int threads = 1;
  std::vector<AxisSet> forced;  // by role: axes that must have it; empty: all are free
  GpuRates gpu;                 // the GPU that costs are estimated for
};

struct Statistics {
  std::int64_t values = 0;        // distinct values kept
  std::int64_t derivations = 0;   // ways to compute them
  std::int64_t examined = 0;      // derivations tried
  std::int64_t outside_goal = 0;  // pruned: part of no goal
  std::int64_t cancelling = 0;    // pruned: a factor would cancel
  std::int64_t expansions = 0;    // states of the search for variants
  std::int64_t dominated = 0;     // pruned: a cheaper state needs the same values
  std::int64_t variants = 0;      // algebraic variants found
  std::int64_t kernels = 0;       // kernels evaluated: a set of outputs with one role for each axis
  std::int64_t illegal = 0;  // pruned: a block would need what others compute, or too large a tile
  std::int64_t plans = 0;    // ways to cut a variant into kernels
  std::int64_t cost_pruned = 0;  // pruned: plans that cost more than those kept
  std::int64_t forms = 0;        // normal forms and atoms in memory
  std::int64_t candidates = 0;   // plans kept
  double best_us = -1;           // the cost of the cheapest; -1: none
  double seconds = 0;
  double first_seconds = -1;  // when the first candidate was found; -1: none was
};

enum class StopReason : std::uint8_t {
  exhausted,           // Everything within the limits was searched.
  time,                // The time limit was hit.
  values,              // The limit on values of the e-graph was hit.
  memory,              // The limit on normal forms was hit.
  expansions,          // The limit on states of the search for variants was hit.
  interrupted,         // The progress callback asked to stop.
  constants_overflow,  // A constant of the program has no exact rational form.
};
std::string_view to_string(StopReason reason);

struct SearchResult {
  std::vector<Candidate> candidates;  // best first
  Statistics stats;
  StopReason stop = StopReason::exhausted;
};

// Receives the counters so far, on the calling thread; returns true to stop the search.
using Progress = std::function<bool(const Statistics&)>;
// Returns true once the search must end.
using StopCheck = std::function<bool()>;

SearchResult search(const Program& program, const Limits& limits, const Progress& progress);

}  // namespace mirage
