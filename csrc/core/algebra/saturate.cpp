#include "core/algebra/saturate.h"

#include <algorithm>
#include <set>
#include <unordered_map>
#include <utility>

#include "core/algebra/goals.h"
#include "core/algebra/program_forms.h"

namespace mirage {
namespace {

constexpr int kPairsPerCheck = 256;  // pairs of values between two looks at the clock

class Saturation {
 public:
  Saturation(const Program& program, NormalForms& forms, const Limits& limits, Statistics& stats,
             const StopCheck& out_of_time)
      : program_(program),
        forms_(forms),
        limits_(limits),
        stats_(stats),
        out_of_time_(out_of_time),
        goals_(forms) {}

  EGraph run() {
    if (add_program()) {
      for (int next = 0; next < static_cast<int>(graph_.values.size()) && !graph_.stop; ++next)
        expand(ValueId(next));
      stats_.values += static_cast<std::int64_t>(graph_.values.size());
    }
    return std::move(graph_);
  }

 private:
  FormId form_of(ValueId value) const { return graph_.values[value].form; }

  ValueId value_of(FormId id) {
    const auto [it, fresh] = by_form_.try_emplace(id, ValueId(graph_.values.size()));
    if (fresh) {
      const Traits& traits = forms_.form(id).traits;
      graph_.values.push_back({id, traits.free, traits.size, traits.is_number, {}});
      seen_.push_back({});
    }
    return it->second;
  }

  // Adds the program as it is written, so that there is always an answer. Returns false if a form
  // overflows.
  bool add_program() {
    const NodeForms node_forms = forms_of(program_, forms_);
    const IdVector<ProgramNodeId, bool> needed = needed_nodes(program_, node_forms);
    for (const ProgramNodeId id : program_.nodes.ids()) {
      if (!needed[id]) continue;
      if (!node_forms[id]) {
        graph_.stop = StopReason::constants_overflow;
        return false;
      }
      add_node(id, node_forms);
    }
    for (const Output& output : program_.outputs)
      graph_.outputs.push_back(by_form_.at(*node_forms[output.node]));
    return true;
  }

  void add_node(ProgramNodeId id, const NodeForms& node_forms) {
    const Node& node = program_.nodes[id];
    uses_add_ = uses_add_ || node.op == Op::add;
    uses_sub_ = uses_sub_ || node.op == Op::sub;
    uses_div_ = uses_div_ || node.op == Op::div;
    std::vector<FormId> args;
    for (const ProgramNodeId arg : node.args) args.push_back(*node_forms[arg]);
    if (node.op == Op::max) maxima_.emplace_back(args[0], node.axis);
    if (node.op == Op::opaque) functions_.emplace(node.symbol, args);
    const FormId form = *node_forms[id];
    value_of(form);
    derive(form, as_written(id, args), /*by_program=*/true);
    goals_.add(form);
  }

  Derivation as_written(ProgramNodeId id, const std::vector<FormId>& args) const {
    const Node& node = program_.nodes[id];
    if (is_leaf(node.op)) return Derivation::leaf(node.op, id);
    std::vector<ValueId> values;
    for (const FormId arg : args) values.push_back(by_form_.at(arg));
    if (is_reduction(node.op)) return Derivation::reduction(node.op, node.axis, values[0]);
    if (node.op == Op::opaque) return Derivation::opaque(node.symbol, std::move(values));
    return Derivation::of(node.op, std::move(values));
  }

  // Tries every op on a value and on its pairs with earlier ones.
  void expand(ValueId value) {
    if (static_cast<std::int64_t>(graph_.values.size()) > limits_.max_values) {
      graph_.stop = StopReason::values;
      return;
    }
    if (out_of_time_()) {
      graph_.stop = StopReason::time;
      return;
    }
    try_unary(value);
    try_functions(value);
    for (int other = 0; other <= value.index() && !graph_.stop; ++other) {
      try_pair(ValueId(other), value);
      if (forms_.count() > limits_.max_forms)  // every pair that is tried leaves its form
        graph_.stop = StopReason::memory;
      else if (other % kPairsPerCheck == kPairsPerCheck - 1 && out_of_time_())
        graph_.stop = StopReason::time;
    }
  }

  void try_unary(ValueId value) {
    const FormId form = form_of(value);
    for (const AxisId axis : graph_.values[value].axes)
      keep(forms_.sum(form, axis), Derivation::reduction(Op::sum, axis, value));
    for (const auto& [arg, axis] : maxima_)
      if (arg == form) keep(forms_.max(arg, axis), Derivation::reduction(Op::max, axis, value));
    if (goals_.is_goal(form)) keep(forms_.exp(form), Derivation::of(Op::exp, {value}));
  }

  // Only the program's own functions of its own values are of use.
  void try_functions(ValueId value) {
    for (const auto& [symbol, args] : functions_) {
      if (std::find(args.begin(), args.end(), form_of(value)) == args.end()) continue;
      std::vector<ValueId> values;
      for (const FormId arg : args)
        if (const auto it = by_form_.find(arg); it != by_form_.end()) values.push_back(it->second);
      if (values.size() == args.size())
        keep(forms_.opaque(symbol, args), Derivation::opaque(symbol, std::move(values)));
    }
  }

  void try_pair(ValueId a, ValueId b) {
    const FormId form_a = form_of(a), form_b = form_of(b);
    if (cancel(form_a, form_b))
      ++stats_.cancelling;
    else
      keep(forms_.mul(form_a, form_b), Derivation::of(Op::mul, {a, b}));
    if (uses_div_ && a != b) {
      try_division(a, b);
      try_division(b, a);
    }
    const bool zero = forms_.form(form_a).is_zero() || forms_.form(form_b).is_zero();
    if (uses_add_ && !zero) keep(forms_.add(form_a, form_b), Derivation::of(Op::add, {a, b}));
    if (uses_sub_ && a != b) {
      keep(forms_.sub(form_a, form_b), Derivation::of(Op::sub, {a, b}));
      keep(forms_.sub(form_b, form_a), Derivation::of(Op::sub, {b, a}));
    }
  }

  void try_division(ValueId numerator, ValueId denominator) {
    const auto inverse = forms_.inverse(form_of(denominator));
    if (!inverse) return;
    if (cancel(form_of(numerator), *inverse))
      ++stats_.cancelling;
    else
      keep(forms_.mul(form_of(numerator), *inverse),
           Derivation::of(Op::div, {numerator, denominator}));
  }

  bool cancel(FormId a, FormId b) const {
    const Form &left = forms_.form(a), &right = forms_.form(b);
    return left.is_monomial() && right.is_monomial() &&
           cancels(left.terms[0].factors, right.terms[0].factors);
  }

  // Adds a derivation of a form that is a value already or lies inside a goal.
  void keep(std::optional<FormId> form, Derivation derivation) {
    ++stats_.examined;
    if (!form) return;
    if (!by_form_.contains(*form) && !goals_.inside(*form))
      ++stats_.outside_goal;
    else
      derive(*form, std::move(derivation));
  }

  void derive(FormId form, Derivation derivation, bool by_program = false) {
    if (!is_useful(form, derivation, by_program)) return;
    const ValueId value = value_of(form);
    if (!seen_[value].insert(derivation).second) return;
    graph_.values[value].derivations.push_back(std::move(derivation));
    ++stats_.derivations;
  }

  bool is_useful(FormId form, const Derivation& derivation, bool by_program) const {
    if (is_leaf(derivation.op)) return true;
    const Traits& traits = forms_.form(form).traits;
    AxisSet carried;
    bool only_numbers = true;
    for (const ValueId arg : derivation.args) {
      // Sizes grow along derivations, so there is no circle. The program itself may keep a size:
      // x·½ times ½ is no larger than x·½. Then ids grow.
      const int size = forms_.form(form_of(arg)).traits.size;
      const bool ordered =
          size < traits.size || (size == traits.size && by_program && arg < by_form_.at(form));
      if (!ordered) return false;
      carried |= graph_.values[arg].axes;
      only_numbers = only_numbers && graph_.values[arg].is_number;
    }
    if (is_reduction(derivation.op)) {
      if (!carried.has(derivation.axis)) return false;
      carried -= derivation.axis;
    }
    // An op of numbers alone is no work for a kernel. A value that an axis cancels out of
    // (x - y + y) has another derivation, or none.
    return !only_numbers && carried == traits.free;
  }

  const Program& program_;
  NormalForms& forms_;
  const Limits& limits_;
  Statistics& stats_;
  const StopCheck& out_of_time_;
  Goals goals_;
  EGraph graph_;
  std::unordered_map<FormId, ValueId> by_form_;
  IdVector<ValueId, std::set<Derivation>> seen_;
  std::set<std::pair<int, std::vector<FormId>>> functions_;  // of the program: symbol, arguments
  std::vector<std::pair<FormId, AxisId>> maxima_;            // of the program: argument, axis
  bool uses_add_ = false, uses_sub_ = false, uses_div_ = false;
};

}  // namespace

Derivation Derivation::leaf(Op op, ProgramNodeId source) {
  Derivation derivation = of(op, {});
  derivation.source = source;
  return derivation;
}

Derivation Derivation::of(Op op, std::vector<ValueId> args) {
  Derivation derivation;
  derivation.op = op;
  derivation.args = std::move(args);
  return derivation;
}

Derivation Derivation::opaque(int symbol, std::vector<ValueId> args) {
  Derivation derivation = of(Op::opaque, std::move(args));
  derivation.symbol = symbol;
  return derivation;
}

Derivation Derivation::reduction(Op op, AxisId axis, ValueId arg) {
  Derivation derivation = of(op, {arg});
  derivation.axis = axis;
  return derivation;
}

EGraph saturate(const Program& program, NormalForms& forms, const Limits& limits, Statistics& stats,
                const StopCheck& out_of_time) {
  return Saturation(program, forms, limits, stats, out_of_time).run();
}

}  // namespace mirage
