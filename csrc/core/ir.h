// What goes into the search and what comes out of it: plain data, no behaviour.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace mirage {

using AxisSet = std::uint64_t;  // bit i: axis i
constexpr int kMaxAxes = 64;

inline AxisSet bit(int axis) {
  return AxisSet{1} << axis;
}
inline bool has(AxisSet set, int axis) {
  return (set & bit(axis)) != 0;
}
inline bool subset(AxisSet inner, AxisSet outer) {
  return (inner & ~outer) == 0;
}

struct AxisInfo {
  std::string name;
  std::int64_t size = 1;
};

// The ops of a lowered program. "opaque" stands for every function that algebra does not look into.
enum class Op { input, constant, add, sub, mul, div, exp, opaque, sum, max };

struct Node {
  Op op = Op::input;
  std::vector<int> args;   // earlier nodes
  int axis = -1;           // sum, max
  std::vector<int> index;  // input: the axis of each dim of its tensor, in order
  int symbol = -1;  // input: which input; opaque: which function; constant that is not a small
                    // rational: which one
  std::int64_t num = 1, den = 1;  // constant: its value when symbol < 0
  std::int64_t bytes = 0;         // input: bytes in device memory
};

// A tensor program over named axes. Nodes are in topological order.
struct Program {
  std::vector<AxisInfo> axes;
  std::vector<Node> nodes;
  std::vector<int> outputs;
};

enum class Role : std::uint8_t { grid, loop, tile };

struct Limits {
  double seconds = 60;
  int width = 1;        // monomials a product may be multiplied out to
  int max_kernels = 4;  // of one plan
  int max_cuts = 3;     // values that a plan keeps in device memory
  int max_variants =
      64;  // algebraically different ways to compute the outputs that are partitioned
  int max_candidates = 24;
  int max_block_ops = 64;
  std::int64_t max_values = 20000;
  std::int64_t max_forms = 4000000;      // normal forms and atoms held: about 0.4 KB each
  std::int64_t max_expansions = 100000;  // states of the search over derivations
  int threads = 1;
  std::vector<AxisSet> forced;  // forced[role]: axes that must have that role (empty: free)
};

// One op of a found block graph; `out` and `args` name values of its kernel.
struct FoundOp {
  int out = -1;
  Op op = Op::input;
  int symbol = -1;  // opaque: the program's function
  std::vector<int> args;
  int axis = -1;  // sum, max over a tile axis, or over the loop axis for an accumulator
};

struct FoundStage {
  int loop = -1;
  std::vector<FoundOp> body;
  std::vector<FoundOp> accumulators;
};

// What a kernel reads: an input or a constant of the program, or a value that an earlier kernel
// stored.
struct FoundLeaf {
  int value = -1;
  int node = -1;  // the program's node; -1: stored by an earlier kernel
  int partial =
      -1;  // the axis over which the stored value is still to be summed: one result per part of it
  Op combine = Op::sum;  // how partial results are combined: sum or max
};

struct FoundOutput {
  int value = -1;   // as the kernel names it
  int stored = -1;  // as later kernels name it
  int output = -1;  // which output of the program; -1: for later kernels
};

struct FoundKernel {
  std::vector<Role> roles;  // per axis of the program
  AxisSet axes = 0;         // axes in use
  int split = -1;  // a loop or tile axis dealt out to the blocks of the grid in `parts` parts
  std::int64_t parts = 1;
  std::vector<FoundLeaf> leaves;
  std::vector<FoundStage> stages;
  std::vector<FoundOutput> outputs;
};

struct Candidate {
  std::vector<FoundKernel> kernels;  // in an order in which they can run
  int nodes =
      0;  // a value computed again in a later pass has its number raised by a multiple of this
  double cost_us = 0;
};

struct Statistics {
  std::int64_t values = 0;        // distinct values kept
  std::int64_t derivations = 0;   // ways to compute them
  std::int64_t examined = 0;      // derivations tried
  std::int64_t outside_goal = 0;  // pruned: not part of any goal
  std::int64_t cancelling = 0;    // pruned: would cancel
  std::int64_t expansions = 0;    // states of the search over derivations
  std::int64_t dominated = 0;     // pruned: another state needs the same values and costs less
  std::int64_t variants = 0;      // algebraically different ways found
  std::int64_t kernels = 0;       // kernels evaluated: a set of outputs with one role per axis
  std::int64_t illegal =
      0;  // of these, refused: a block would need what others compute, or too large a tile
  std::int64_t plans = 0;        // ways to cut a variant into kernels
  std::int64_t cost_pruned = 0;  // plans given up once they cost more than those kept
  std::int64_t forms = 0;        // normal forms and atoms held
  std::int64_t candidates = 0;   // plans kept so far
  double best_us = -1;           // the cheapest of them
  double seconds = 0, first_seconds = -1;
};

struct SearchResult {
  std::vector<Candidate> candidates;  // best first
  Statistics stats;
  std::string stop;  // exhausted, time, values, memory, expansions, interrupted
};

// Called now and then with the counters so far; returns true to stop.
using Progress = std::function<bool(const Statistics&)>;

SearchResult search(const Program& program, const Limits& limits, const Progress& progress);

}  // namespace mirage
