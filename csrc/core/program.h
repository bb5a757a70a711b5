// The program that is searched for: a tensor program over named axes.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/ids.h"

namespace mirage {

struct AxisInfo {
  std::string name;
  std::int64_t size = 1;
};

// The ops of a program. `opaque` stands for every function that the algebra does not know.
enum class Op : std::uint8_t { input, constant, add, sub, mul, div, exp, opaque, sum, max };

constexpr bool is_leaf(Op op) { return op == Op::input || op == Op::constant; }
constexpr bool is_reduction(Op op) { return op == Op::sum || op == Op::max; }

struct Node {
  Op op = Op::input;
  std::vector<ProgramNodeId> args;  // earlier nodes
  AxisId axis;                      // sum, max: the axis that is reduced
  std::vector<AxisId> index;  // input: the axis of each dim of its tensor; none: a dim of size 1
  int symbol = -1;            // input, opaque: which one; constant: which one, if not a rational
  std::int64_t num = 1, den = 1;  // constant: its value if symbol < 0
  std::int64_t bytes = 0;         // input: bytes in device memory
};

struct Output {
  ProgramNodeId node;
  int itemsize = 2;  // bytes of an element in device memory
};

// Nodes are in topological order.
struct Program {
  IdVector<AxisId, AxisInfo> axes;
  IdVector<ProgramNodeId, Node> nodes;
  std::vector<Output> outputs;

  double size(AxisId axis) const { return static_cast<double>(axes[axis].size); }
  // The elements of a value that carries these axes.
  double elements(AxisSet carried) const {
    double count = 1;
    for (const AxisId axis : carried) count *= size(axis);
    return count;
  }
};

}  // namespace mirage
