// A variant: one algebraic way to compute a program's outputs.
#pragma once
#include <vector>

#include "core/algebra/saturate.h"
#include "core/program.h"

namespace mirage {

// One derivation for every value that the outputs need. Arguments come before their users.
struct Variant {
  struct Node {
    static Node of(const Value& value, const Derivation& derivation, std::vector<NodeId> args);

    bool is_leaf() const { return mirage::is_leaf(op); }
    bool reduces() const { return is_reduction(op); }
    bool reduces(AxisId over) const { return reduces() && axis == over; }

    Op op = Op::input;
    int symbol = -1;       // opaque
    AxisId axis;           // sum, max
    ProgramNodeId source;  // input, constant: the program's node
    std::vector<NodeId> args;
    AxisSet axes;            // that the node carries
    bool is_number = false;  // no input is in it
  };

  // A program as it is written, node by node.
  static Variant of(const Program& program);

  IdVector<NodeId, Node> nodes;
  std::vector<NodeId> outputs;
};

// Scalar instructions for one element of an op: divisions and functions take several.
constexpr double scalar_ops(Op op) {
  return op == Op::opaque || op == Op::exp || op == Op::div ? 4.0 : 1.0;
}
constexpr double kReductionOps =
    0.25;  // for one element that is summed: the load pays for the rest

// True if a product of values that carry these axes runs on the tensor cores once it is summed.
bool is_matrix_product(const Program& program, AxisSet left, AxisSet right);

}  // namespace mirage
