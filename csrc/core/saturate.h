// Saturation: every value that can help to compute the goals, with every way to compute it (an
// e-graph whose classes are normal forms).
#pragma once
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/ir.h"
#include "core/normal_form.h"

namespace mirage {

struct Derivation {
  Op op = Op::input;
  int symbol = -1;        // opaque
  int axis = -1;          // sum, max
  std::vector<int> args;  // values
  int node = -1;          // input, constant: the program's node
  auto operator<=>(const Derivation&) const = default;
};

struct Value {
  NfId form = -1;
  AxisSet axes = 0;
  int rank =
      0;  // not less than that of anything it is computed from; among equals the number is larger
  bool number = false;  // holds no input
  std::vector<Derivation> derivations;
};

// Where a value may lie: "inside" means that, times something and partly reduced, it gives part of
// a goal.
class Goals {
 public:
  Goals(NormalForms& forms) : forms_(forms) {}
  void add(NfId form);  // and every sum, frozen sum and argument inside it
  bool inside(NfId form) const;
  bool exact(NfId form) const { return all_.count(form) != 0; }

 private:
  bool inside(const Monomial& v, const Monomial& goal) const;
  bool inside_sum(const Factors& rest, const Atom& sum) const;
  bool common_cofactor(const Nf& v) const;

  NormalForms& forms_;
  std::set<NfId> all_;
  std::vector<Monomial> terms_;  // single monomials of all goals
  std::unordered_map<AtomId, std::vector<int>>
      by_atom_;  // terms that hold an atom, at top or inside a sum
};

// The normal form of every node; none where a constant overflows or a division is by zero.
std::vector<std::optional<NfId>> forms_of(const Program& program, NormalForms& forms);

// The program with each maximum that cancels out of every output (the shift of a softmax) taken to
// be 0: such a shift keeps numbers in range and is put back, where it is cheapest, into the kernels
// that are found.
Program without_shifts(const Program& program);

struct Values {
  std::vector<Value> values;
  std::vector<int> outputs;
  std::string stop;  // empty: saturated
};

Values saturate(const Program& program, NormalForms& forms, const Limits& limits, Statistics& stats,
                const std::function<bool()>& out_of_time);

}  // namespace mirage
