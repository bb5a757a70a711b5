#include "core/algebra/goals.h"

#include <algorithm>
#include <cstdlib>

namespace mirage {
namespace {

// True if `all` has the atom to at least this power, with the same sign.
bool contains(const Factors& all, const Factor& factor) {
  const auto it =
      std::find_if(all.begin(), all.end(), [&](const Factor& f) { return f.atom == factor.atom; });
  return it != all.end() && (it->exponent > 0) == (factor.exponent > 0) &&
         std::abs(factor.exponent) <= std::abs(it->exponent);
}

bool contains(const Factors& all, const Factors& factors) {
  return std::all_of(factors.begin(), factors.end(),
                     [&](const Factor& f) { return contains(all, f); });
}

Factors inverse(Factors factors) {
  for (Factor& f : factors) f.exponent = -f.exponent;
  return factors;
}

// True if every term of `value`, times the cofactor that takes its first term to `target`, is a term
// of `goal`.
bool scales_into(const Form& value, const Monomial& target, const Form& goal) {
  const Monomial& first = value.terms[0];
  const Factors cofactor = product(target.factors, inverse(first.factors));
  const auto scale = multiply(target.coefficient, reciprocal(first.coefficient));
  return scale && std::all_of(value.terms.begin(), value.terms.end(), [&](const Monomial& term) {
           const Factors factors = product(term.factors, cofactor);
           const auto coefficient = multiply(term.coefficient, *scale);
           return coefficient && std::any_of(goal.terms.begin(), goal.terms.end(), [&](auto& t) {
                    return t.factors == factors && t.coefficient == *coefficient;
                  });
         });
}

}  // namespace

bool cancels(const Factors& a, const Factors& b) {
  for (const Factor& f : a)
    for (const Factor& g : b)
      if (f.atom == g.atom && (f.exponent > 0) != (g.exponent > 0)) return true;
  return false;
}

void Goals::add(FormId form) {
  if (!goals_.insert(form).second) return;
  for (const Monomial& term : forms_.form(form).terms) {
    const std::size_t index = terms_.size();
    terms_.push_back(term);
    std::set<AtomId> held;
    for (const Factor& f : term.factors) {
      held.insert(f.atom);
      for (const FormId arg : forms_.atom(f.atom).args) add(arg);
      if (forms_.atom(f.atom).kind == Atom::Kind::sum) add_sum(f, held);
    }
    for (const AtomId atom : held) by_atom_[atom].push_back(index);
  }
}

void Goals::add_sum(const Factor& sum, std::set<AtomId>& held) {
  for (const Factor& inner : forms_.atom(sum.atom).factors) {
    const Atom& atom = forms_.atom(inner.atom);
    held.insert(inner.atom);
    for (const FormId arg : atom.args) add(arg);
    if (atom.kind == Atom::Kind::sum) add(forms_.of_factors({{inner.atom, 1}}));
  }
  if (sum.exponent != 1) add(forms_.of_factors({{sum.atom, 1}}));
}

// True if a partial sum has every factor of the goal's sum that carries an axis it binds.
bool Goals::is_whole(const Atom& partial, const Atom& sum) const {
  return contains(sum.factors, partial.factors) &&
         std::all_of(sum.factors.begin(), sum.factors.end(), [&](const Factor& f) {
           return !forms_.atom(f.atom).traits.free.meets(partial.bound) ||
                  std::find(partial.factors.begin(), partial.factors.end(), f) !=
                      partial.factors.end();
         });
}

// True if the factors are part of the sum's, and the partial sums among them are whole.
bool Goals::inside_sum(const Factors& rest, const Atom& sum) const {
  Factors used;
  for (const Factor& f : rest) {
    if (contains(sum.factors, f)) {
      used = product(used, {f});
      continue;
    }
    const Atom& partial = forms_.atom(f.atom);
    if (partial.kind != Atom::Kind::sum || f.exponent != 1) return false;
    if (!partial.bound.within(sum.bound) || !is_whole(partial, sum)) return false;
    used = product(used, partial.factors);
  }
  return contains(sum.factors, used);  // none is taken more often than the goal has it
}

bool Goals::inside(const Monomial& value, const Monomial& goal) const {
  if (value.coefficient != Rational{} && value.coefficient != goal.coefficient) return false;
  Factors rest;  // factors that the goal itself lacks must lie in one of its sums
  for (const Factor& f : value.factors)
    if (!contains(goal.factors, f)) rest.push_back(f);
  if (rest.empty()) return true;
  return std::any_of(goal.factors.begin(), goal.factors.end(), [&](const Factor& f) {
    const Atom& atom = forms_.atom(f.atom);
    return atom.kind == Atom::Kind::sum && f.exponent == 1 && !contains(value.factors, f) &&
           inside_sum(rest, atom);
  });
}

// True if a sum times one monomial is part of a goal.
bool Goals::divides_a_goal(const Form& value) const {
  return std::any_of(goals_.begin(), goals_.end(), [&](FormId id) {
    const Form& goal = forms_.form(id);
    return goal.terms.size() >= value.terms.size() &&
           std::any_of(goal.terms.begin(), goal.terms.end(), [&](const Monomial& target) {
             return contains(target.factors, value.terms[0].factors) &&
                    scales_into(value, target, goal);
           });
  });
}

bool Goals::inside_terms(const Monomial& value, AtomId atom) const {
  const auto it = by_atom_.find(atom);
  return it != by_atom_.end() &&
         std::any_of(it->second.begin(), it->second.end(),
                     [&](std::size_t term) { return inside(value, terms_[term]); });
}

bool Goals::inside(FormId id) const {
  if (is_goal(id)) return true;
  const Form& form = forms_.form(id);
  if (form.is_zero()) return false;
  if (!form.is_monomial()) return divides_a_goal(form);
  const Monomial& value = form.terms[0];
  if (value.factors.empty()) return false;
  // Only terms that hold the first factor can hold the value, or, if that factor is a partial sum,
  // terms that hold something inside it.
  const AtomId first = value.factors[0].atom;
  if (inside_terms(value, first)) return true;
  const Atom& atom = forms_.atom(first);
  return atom.kind == Atom::Kind::sum && inside_terms(value, atom.factors[0].atom);
}

}  // namespace mirage
