// What the search finds: programs cut into kernels, as plain data.
#pragma once
#include <compare>
#include <cstdint>
#include <vector>

#include "core/ids.h"
#include "core/program.h"

namespace mirage {

// What a kernel does with an axis: cut it among blocks, walk it in a loop, or hold it in a tile.
enum class Role : std::uint8_t { grid, loop, tile };

// A value of a kernel: a node of the variant. `pass` is 0, unless a later pass over the loop computes
// the node again: then it is the number of that pass.
struct ValueName {
  NodeId node;
  int pass = 0;
  auto operator<=>(const ValueName&) const = default;
};

struct FoundOp {
  ValueName out;
  Op op = Op::input;
  int symbol = -1;  // opaque: the program's function
  std::vector<ValueName> args;
  AxisId axis;  // sum, max: a tile axis, or the loop axis if it is an accumulator
};

// A pass over the loop axis with its accumulators, or ops outside the loop.
struct FoundStage {
  AxisId loop;
  std::vector<FoundOp> body;
  std::vector<FoundOp> accumulators;
};

// What a kernel reads: an input or a constant of the program, or a value that an earlier kernel stored.
struct FoundLeaf {
  ValueName value;
  ProgramNodeId source;  // none: stored by an earlier kernel
  AxisId partial_over;   // stored as one partial result for each split of this axis
  Op combine = Op::sum;  // how partial results are combined: sum or max
};

struct FoundOutput {
  ValueName value;   // as the kernel names it
  ValueName stored;  // as later kernels name it
  int output = -1;   // which output of the program; -1: for later kernels
};

struct FoundKernel {
  std::vector<Role> roles;  // of each axis of the program
  AxisSet axes;             // axes in use
  AxisId split;             // a loop or tile axis that is split among blocks
  std::int64_t num_splits = 1;
  bool clustered = false;  // the blocks of the splits form a cluster, and add up what they hold
  std::vector<FoundLeaf> leaves;
  std::vector<FoundStage> stages;
  std::vector<FoundOutput> outputs;
};

struct Candidate {
  std::vector<FoundKernel> kernels;  // in an order in which they can run
  double cost_us = 0;
};

}  // namespace mirage
