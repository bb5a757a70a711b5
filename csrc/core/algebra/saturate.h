// Saturation: every value that can help to compute a program, with every way to compute it. The
// result is an e-graph whose classes are normal forms.
#pragma once
#include <compare>
#include <optional>
#include <vector>

#include "core/algebra/normal_form.h"
#include "core/program.h"
#include "core/search.h"

namespace mirage {

// One way to compute a value.
struct Derivation {
  static Derivation leaf(Op op, ProgramNodeId source);
  static Derivation opaque(int symbol, std::vector<ValueId> args);
  static Derivation reduction(Op op, AxisId axis, ValueId arg);
  static Derivation of(Op op, std::vector<ValueId> args);  // any other op

  Op op = Op::input;
  int symbol = -1;  // opaque
  AxisId axis;      // sum, max
  std::vector<ValueId> args;
  ProgramNodeId source;  // input, constant: the program's node
  auto operator<=>(const Derivation&) const = default;
};

struct Value {
  FormId form;
  AxisSet axes;  // that it carries
  int rank = 0;  // at least that of each argument; of equal ranks arguments have smaller ids
  bool is_number = false;               // no input is in it
  std::vector<Derivation> derivations;  // the program's own first
};

struct EGraph {
  IdVector<ValueId, Value> values;
  std::vector<ValueId> outputs;    // empty if the program itself overflows
  std::optional<StopReason> stop;  // none: saturated
};

EGraph saturate(const Program& program, NormalForms& forms, const Limits& limits, Statistics& stats,
                const StopCheck& out_of_time);

}  // namespace mirage
