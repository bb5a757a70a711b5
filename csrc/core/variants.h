// Variants: the algebraically different ways to compute a program's outputs, cheapest first, before
// any kernel is thought of.
#pragma once
#include <functional>
#include <vector>

#include "core/ir.h"
#include "core/saturate.h"

namespace mirage {

// One derivation for every value that the outputs need. Nodes are in ascending rank, so arguments
// come first.
struct Variant {
  struct Node {
    int value = -1;  // of `Values`
    Op op = Op::input;
    int symbol = -1, axis = -1;
    int source = -1;        // input, constant: the program's node
    std::vector<int> args;  // nodes
    AxisSet axes = 0;
    bool number = false;
    bool leaf() const { return op == Op::input || op == Op::constant; }
    bool reduces() const { return op == Op::sum || op == Op::max; }
  };
  std::vector<Node> nodes;
  std::vector<int> outputs;  // nodes
  double cost = 0;
};

// A program as it is written, a node for a node.
Variant as_variant(const Program& program);

// µs of one op over whole axes, on one GPU used to the full: ranks, does not promise.
double op_work(const Program& program, const std::vector<Value>& values, const Value& value,
               const Derivation& derivation);

// Two variants differ in the sums they form, or in whether some sum waits for a factor that it
// could have left out (which makes another pass, but keeps what is summed in range). Of those that
// agree in both, the one with the least scalar work is kept. The program as written comes first,
// whatever it costs. `complete` says whether the list is the cheapest `max_variants` for certain.
std::vector<Variant> variants(const Program& program, const Values& values, NormalForms& forms,
                              const Limits& limits, Statistics& stats, bool& complete,
                              const std::function<bool()>& out_of_time);

}  // namespace mirage
