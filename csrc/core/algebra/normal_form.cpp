#include "core/algebra/normal_form.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "core/hashing.h"

namespace mirage {
namespace {

constexpr int kMaxExponent = 1 << 20;       // squaring a square doubles an exponent every time
constexpr std::int64_t kMaxSize = 1 << 30;  // f(x, x) doubles a size; such a form is not derived

int clamped(std::int64_t size) { return static_cast<int>(std::min(size, kMaxSize)); }

bool representable(const Factors& factors) {
  return std::all_of(factors.begin(), factors.end(),
                     [](const Factor& f) { return std::abs(f.exponent) <= kMaxExponent; });
}

void add(Hasher& hasher, const Factors& factors) {
  hasher.add(factors.size());
  for (const Factor& f : factors) {
    const auto atom = static_cast<std::uint32_t>(f.atom.index());
    const auto exponent = static_cast<std::uint32_t>(f.exponent);
    hasher.add(std::uint64_t{atom} << 32U | exponent);
  }
}

template <typename I>
void add(Hasher& hasher, const std::vector<I>& ids) {
  hasher.add(ids.size());
  for (const I id : ids) hasher.add(static_cast<std::uint64_t>(id.index()));
}

Atom atom_of(Atom::Kind kind) {
  Atom atom;
  atom.kind = kind;
  return atom;
}

Atom atom_of(Atom::Kind kind, FormId arg) {
  Atom atom = atom_of(kind);
  atom.args = {arg};
  return atom;
}

}  // namespace

Factors product(const Factors& a, const Factors& b) {
  Factors out;
  out.reserve(a.size() + b.size());
  auto i = a.begin(), j = b.begin();
  while (i != a.end() && j != b.end()) {
    if (i->atom < j->atom) {
      out.push_back(*i++);
    } else if (j->atom < i->atom) {
      out.push_back(*j++);
    } else {
      const int exponent = i->exponent + j->exponent;
      if (exponent != 0) out.push_back({i->atom, exponent});
      ++i;
      ++j;
    }
  }
  out.insert(out.end(), i, a.end());
  out.insert(out.end(), j, b.end());
  return out;
}

// -- atoms and forms ------------------------------------------------------------------------------

Atom Atom::input(int symbol, std::vector<AxisId> index) {
  Atom atom = atom_of(Kind::input);
  atom.symbol = symbol;
  atom.index = std::move(index);
  return atom;
}

Atom Atom::named_constant(int symbol) {
  Atom atom = atom_of(Kind::constant);
  atom.symbol = symbol;
  return atom;
}

Atom Atom::opaque(int symbol, std::vector<FormId> args) {
  Atom atom = atom_of(Kind::opaque);
  atom.symbol = symbol;
  atom.args = std::move(args);
  return atom;
}

Atom Atom::exp(FormId monomial) { return atom_of(Kind::exp, monomial); }

Atom Atom::nested_exp(FormId arg) { return atom_of(Kind::nested_exp, arg); }

Atom Atom::sum(AxisSet bound, Factors factors) {
  Atom atom = atom_of(Kind::sum);
  atom.bound = bound;
  atom.factors = std::move(factors);
  return atom;
}

Atom Atom::max(AxisId bound, FormId arg) {
  Atom atom = atom_of(Kind::max, arg);
  atom.bound = bound;
  return atom;
}

Atom Atom::frozen(FormId form) { return atom_of(Kind::frozen, form); }

std::size_t Atom::hash() const {
  Hasher hasher;
  hasher.add(static_cast<std::uint64_t>(kind));
  hasher.add(static_cast<std::uint64_t>(symbol));
  hasher.add(bound.bits());
  add(hasher, index);
  add(hasher, args);
  add(hasher, factors);
  return hasher.hash();
}

bool Atom::same_as(const Atom& other) const {
  return kind == other.kind && symbol == other.symbol && bound == other.bound &&
         index == other.index && args == other.args && factors == other.factors;
}

std::size_t Form::hash() const {
  Hasher hasher;
  for (const Monomial& t : terms) {
    hasher.add(static_cast<std::uint64_t>(t.coefficient.num));
    hasher.add(static_cast<std::uint64_t>(t.coefficient.den));
    add(hasher, t.factors);
  }
  return hasher.hash();
}

// -- interning ------------------------------------------------------------------------------------

AxisSet NormalForms::free(const Factors& factors) const {
  AxisSet axes;
  for (const Factor& f : factors) axes |= atoms_[f.atom].traits.free;
  return axes;
}

std::int64_t NormalForms::size(const Factors& factors) const {
  std::int64_t total = 0;
  // one more for a negative exponent: 1/x is larger than x, and e^(-x) larger than -x
  for (const Factor& f : factors)
    total +=
        std::int64_t{atoms_[f.atom].traits.size} * std::abs(f.exponent) + (f.exponent < 0 ? 1 : 0);
  return total;
}

Traits NormalForms::traits_of(const Atom& atom) const {
  using Kind = Atom::Kind;
  Traits traits;
  traits.has_exp = atom.kind == Kind::exp || atom.kind == Kind::nested_exp;
  traits.has_sum = atom.kind == Kind::sum || atom.kind == Kind::max;
  // a sum binds an axis that only inputs carry, so it is no number
  traits.is_number = atom.kind != Kind::input && atom.kind != Kind::sum;
  std::int64_t size = 1 + this->size(atom.factors) + atom.bound.count();
  for (const AxisId axis : atom.index)
    if (axis.valid()) traits.free |= axis;
  for (const FormId arg : atom.args) {
    const Traits& of_arg = forms_[arg].traits;
    traits.free |= of_arg.free;
    traits.has_exp |= of_arg.has_exp;
    traits.has_sum |= of_arg.has_sum;
    traits.is_number &= of_arg.is_number;
    size += of_arg.size;
  }
  for (const Factor& f : atom.factors) {
    const Traits& of_factor = atoms_[f.atom].traits;
    traits.free |= of_factor.free;
    traits.has_exp |= of_factor.has_exp;
    traits.has_sum |= of_factor.has_sum;
  }
  traits.free -= atom.bound;
  traits.size = clamped(size);
  return traits;
}

Traits NormalForms::traits_of(const Form& form) const {
  Traits traits;
  traits.is_number = true;
  std::int64_t size = static_cast<std::int64_t>(form.terms.size()) - 1;
  for (const Monomial& t : form.terms) {
    size += this->size(t.factors) + (t.coefficient == Rational{} ? 0 : 1);
    for (const Factor& f : t.factors) {
      const Traits& of_factor = atoms_[f.atom].traits;
      traits.free |= of_factor.free;
      traits.has_exp |= of_factor.has_exp;
      traits.has_sum |= of_factor.has_sum;
      traits.is_number &= of_factor.is_number;
    }
  }
  traits.size = clamped(size);
  return traits;
}

AtomId NormalForms::intern(Atom atom) {
  return atoms_.intern(std::move(atom), [this](Atom& fresh) { fresh.traits = traits_of(fresh); });
}

FormId NormalForms::intern(std::vector<Monomial> terms) {
  return forms_.intern(Form{std::move(terms), {}},
                       [this](Form& fresh) { fresh.traits = traits_of(fresh); });
}

// Adds up the terms that have the same factors.
std::optional<FormId> NormalForms::collected(std::vector<Monomial> terms) {
  std::stable_sort(terms.begin(), terms.end(),
                   [](const Monomial& a, const Monomial& b) { return a.factors < b.factors; });
  std::size_t kept = 0;
  for (std::size_t i = 1; i < terms.size(); ++i) {
    if (terms[i].factors != terms[kept].factors) {
      ++kept;
      if (kept != i) terms[kept] = std::move(terms[i]);
      continue;
    }
    const auto total = mirage::add(terms[kept].coefficient, terms[i].coefficient);
    if (!total) return std::nullopt;
    terms[kept].coefficient = *total;
  }
  if (!terms.empty()) terms.resize(kept + 1);
  std::erase_if(terms, [](const Monomial& t) { return t.coefficient.num == 0; });
  return intern(std::move(terms));
}

FormId NormalForms::of_factors(Factors factors) {
  return intern(std::vector<Monomial>{{Rational{}, std::move(factors)}});
}

// -- ops ------------------------------------------------------------------------------------------

FormId NormalForms::input(int symbol, const std::vector<AxisId>& index) {
  return single(intern(Atom::input(symbol, index)));
}

FormId NormalForms::constant(Rational value) {
  if (value.num == 0) return intern(std::vector<Monomial>{});
  return intern(std::vector<Monomial>{{value, {}}});
}

FormId NormalForms::named_constant(int symbol) {
  return single(intern(Atom::named_constant(symbol)));
}

std::optional<FormId> NormalForms::mul(FormId a, FormId b) {
  const Form &left = forms_[a], &right = forms_[b];
  if (left.is_zero() || right.is_zero()) return constant({0, 1});
  // Sums are multiplied out within the width; else each is frozen to one factor. Numbers distribute.
  const auto is_rational = [](const Form& f) {
    return f.is_monomial() && f.terms[0].factors.empty();
  };
  const bool too_wide = !is_rational(left) && !is_rational(right) &&
                        static_cast<int>(left.terms.size() * right.terms.size()) > width_;
  std::vector<Monomial> frozen_left, frozen_right;
  if (too_wide && !left.is_monomial()) frozen_left = {{Rational{}, {{frozen(a), 1}}}};
  if (too_wide && !right.is_monomial()) frozen_right = {{Rational{}, {{frozen(b), 1}}}};
  const auto& left_terms = frozen_left.empty() ? left.terms : frozen_left;
  const auto& right_terms = frozen_right.empty() ? right.terms : frozen_right;
  std::vector<Monomial> products;
  products.reserve(left_terms.size() * right_terms.size());
  for (const Monomial& s : left_terms) {
    for (const Monomial& t : right_terms) {
      const auto coefficient = multiply(s.coefficient, t.coefficient);
      Factors factors = product(s.factors, t.factors);
      if (!coefficient || !representable(factors)) return std::nullopt;
      products.push_back({*coefficient, std::move(factors)});
    }
  }
  return collected(std::move(products));
}

std::optional<FormId> NormalForms::add(FormId a, FormId b) {
  std::vector<Monomial> terms = forms_[a].terms;
  const std::vector<Monomial>& more = forms_[b].terms;
  terms.insert(terms.end(), more.begin(), more.end());
  return collected(std::move(terms));
}

std::optional<FormId> NormalForms::sub(FormId a, FormId b) {
  std::vector<Monomial> terms = forms_[a].terms;
  for (const Monomial& t : forms_[b].terms)
    terms.push_back({{-t.coefficient.num, t.coefficient.den}, t.factors});
  return collected(std::move(terms));
}

std::optional<FormId> NormalForms::inverse(FormId a) {
  const Form& form = forms_[a];
  if (form.is_zero()) return std::nullopt;
  if (!form.is_monomial()) return single(frozen(a), -1);
  Monomial term = form.terms[0];
  term.coefficient = reciprocal(term.coefficient);
  for (Factor& f : term.factors) f.exponent = -f.exponent;
  return intern(std::vector<Monomial>{std::move(term)});
}

FormId NormalForms::exp(FormId a) {
  // e^(s+t) = e^s e^t and e^(-s) = 1/e^s. An exponent that holds an exp stays whole: it has no place
  // in the finite field of the proofs.
  const Form& form = forms_[a];
  if (form.traits.has_exp) return single(intern(Atom::nested_exp(a)));
  Factors factors;
  for (const Monomial& term : form.terms) {
    const int sign = term.coefficient.num < 0 ? -1 : 1;
    Monomial positive = term;
    positive.coefficient.num *= sign;
    const FormId arg = intern(std::vector<Monomial>{std::move(positive)});
    factors = product(factors, {{intern(Atom::exp(arg)), sign}});
  }
  return of_factors(std::move(factors));
}

FormId NormalForms::opaque(int symbol, const std::vector<FormId>& args) {
  return single(intern(Atom::opaque(symbol, args)));
}

FormId NormalForms::max(FormId a, AxisId axis) { return single(intern(Atom::max(axis, a))); }

// -- sums -----------------------------------------------------------------------------------------

std::optional<FormId> NormalForms::sum(FormId a, AxisId axis) {
  FormId total = constant({0, 1});
  for (const Monomial& term : forms_[a].terms) {
    const auto summed = sum(term, axis);
    if (!summed) return std::nullopt;
    const auto next = add(total, intern(std::vector<Monomial>{*summed}));
    if (!next) return std::nullopt;
    total = *next;
  }
  return total;
}

std::optional<Monomial> NormalForms::sum(const Monomial& term, AxisId axis) {
  Factors inside, outside;
  for (const Factor& f : term.factors)
    (atoms_[f.atom].traits.free.has(axis) ? inside : outside).push_back(f);
  if (inside.empty()) {  // Σ of what does not change along the axis
    const auto coefficient = multiply(term.coefficient, {axes_[axis].size, 1});
    if (!coefficient) return std::nullopt;
    return Monomial{*coefficient, outside};
  }
  AxisSet bound = axis;
  Factors flat;
  for (const Factor& f : inside) {
    if (can_splice(f, inside, outside)) {
      const Atom& inner = atoms_[f.atom];
      bound |= inner.bound;
      flat = product(flat, inner.factors);
    } else {
      flat = product(flat, {f});
    }
  }
  const AtomId summed = intern(Atom::sum(bound, std::move(flat)));
  Factors factors = product(outside, {{summed, 1}});
  if (!representable(factors)) return std::nullopt;
  return Monomial{term.coefficient, std::move(factors)};
}

// Σ_k (Σ_r A)·B = Σ_kr A·B if nothing else names r. Otherwise the inner sum stays an atom of its own.
bool NormalForms::can_splice(const Factor& factor, const Factors& inside,
                             const Factors& outside) const {
  const Atom& atom = atoms_[factor.atom];
  if (atom.kind != Atom::Kind::sum || factor.exponent != 1) return false;
  const bool named_inside = std::any_of(inside.begin(), inside.end(), [&](const Factor& f) {
    const Atom& other = atoms_[f.atom];
    return f != factor && (other.traits.free | other.bound).meets(atom.bound);
  });
  const bool named_outside = std::any_of(outside.begin(), outside.end(), [&](const Factor& f) {
    return atoms_[f.atom].traits.free.meets(atom.bound);
  });
  return !named_inside && !named_outside;
}

SumCore NormalForms::core(FormId a, AxisId axis) {
  const Form& form = forms_[a];
  if (!form.is_monomial()) return {a};
  Factors kept;
  bool waits = false;
  for (const Factor& f : form.terms[0].factors) {
    const Atom& atom = atoms_[f.atom];
    if (atom.kind == Atom::Kind::sum && atom.bound.has(axis))
      kept.push_back(f);
    else
      waits = waits || atom.traits.has_sum;
  }
  return {of_factors(std::move(kept)), waits};
}

}  // namespace mirage
