// What goes into the search and what comes out of it: plain data, no behaviour.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace mirage {

using AxisSet = std::uint64_t;  // bit i: axis i
constexpr int kMaxAxes = 64;

inline AxisSet bit(int axis) { return AxisSet{1} << axis; }
inline bool has(AxisSet set, int axis) { return (set & bit(axis)) != 0; }
inline bool subset(AxisSet inner, AxisSet outer) { return (inner & ~outer) == 0; }

struct AxisInfo {
  std::string name;
  std::int64_t size = 1;
};

// The ops of a lowered program. "opaque" stands for every function that algebra does not look into.
enum class Op { input, constant, add, sub, mul, div, exp, opaque, sum, max };

struct Node {
  Op op = Op::input;
  std::vector<int> args;           // earlier nodes
  int axis = -1;                   // sum, max
  std::vector<int> index;          // input: the axis of each dim of its tensor, in order
  int symbol = -1;                 // input: which input; opaque: which function; constant that is not a small rational: which one
  std::int64_t num = 1, den = 1;   // constant: its value when symbol < 0
  std::int64_t bytes = 0;          // input: bytes in device memory
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
  int max_width = 2;              // monomials a product may be multiplied out to
  int max_candidates = 16;
  int max_block_ops = 64;
  std::int64_t max_values = 20000;
  std::int64_t max_forms = 4000000;       // normal forms and atoms held for one width: 1 to 2 GB
  std::int64_t max_expansions = 2000000;  // branch-and-bound nodes per role assignment
  int threads = 1;
  std::vector<AxisSet> forced;    // forced[role]: axes that must have that role (empty: free)
};

// One op of a found block graph; `out` and `args` name values of that block graph.
struct FoundOp {
  int out = -1;
  Op op = Op::input;
  int symbol = -1;                // opaque: the program's function
  std::vector<int> args;
  int axis = -1;                  // sum, max over a tile axis, or over the loop axis for an accumulator
  AxisSet axes = 0;
};

struct FoundStage {
  int loop = -1;
  std::vector<FoundOp> body;
  std::vector<FoundOp> accumulators;
};

struct FoundLeaf {                // an input or a constant that the block graph reads
  int value = -1;
  int node = -1;                  // the program's node
};

struct Candidate {
  std::vector<Role> roles;        // per axis of the program
  AxisSet axes = 0;               // axes in use
  std::vector<FoundLeaf> leaves;
  std::vector<FoundStage> stages;
  std::vector<int> outputs;
  double cost_us = 0;
  int width = 1;                  // at which it was found
};

struct Statistics {
  std::int64_t values = 0;          // distinct values kept
  std::int64_t derivations = 0;     // ways to compute them
  std::int64_t examined = 0;        // derivations tried
  std::int64_t outside_goal = 0;    // pruned: not part of any goal
  std::int64_t cancelling = 0;      // pruned: would cancel
  std::int64_t role_assignments = 0;
  std::int64_t kernels = 0;         // complete kernels evaluated
  std::int64_t cost_pruned = 0;     // partial kernels cut by the cost bound
  std::int64_t duplicates = 0;      // kernels that differ from a kept one only in the order of scalar work
  int width = 0;                    // the last width searched to the end
  double seconds = 0, first_seconds = -1;
};

struct SearchResult {
  std::vector<Candidate> candidates;  // best first
  Statistics stats;
  std::string stop;                   // exhausted, time, values, memory, expansions, interrupted
};

// Called now and then with the counters so far; returns true to stop.
using Progress = std::function<bool(const Statistics&)>;

SearchResult search(const Program& program, const Limits& limits, const Progress& progress);

}  // namespace mirage
