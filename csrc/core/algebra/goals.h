// Goals: the forms that a program computes. Saturation only keeps values that lie inside one.
#pragma once
#include <set>
#include <unordered_map>
#include <vector>

#include "core/algebra/normal_form.h"

namespace mirage {

// A value lies inside a goal if, multiplied by something and partly summed, it gives a part of it.
class Goals {
 public:
  explicit Goals(NormalForms& forms) : forms_(forms) {}

  // Adds a form, and every sum, frozen sum and argument inside it.
  void add(FormId form);
  bool inside(FormId id) const;
  bool is_goal(FormId form) const { return goals_.contains(form); }

 private:
  void add_sum(const Factor& sum, std::set<AtomId>& held);
  bool inside_terms(const Monomial& value, AtomId atom) const;
  bool inside(const Monomial& value, const Monomial& goal) const;
  bool inside_sum(const Factors& rest, const Atom& sum) const;
  bool is_whole(const Atom& partial, const Atom& sum) const;
  bool divides_a_goal(const Form& value) const;

  NormalForms& forms_;
  std::set<FormId> goals_;
  std::vector<Monomial> terms_;                                   // of all goals
  std::unordered_map<AtomId, std::vector<std::size_t>> by_atom_;  // terms that hold an atom, at the
                                                                  // top or inside a sum
};

// True if a factor of `a` stands with the opposite sign of exponent in `b`.
bool cancels(const Factors& a, const Factors& b);

}  // namespace mirage
