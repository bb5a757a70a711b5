#include "core/normal_form.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <numeric>

namespace mirage {
namespace {

constexpr std::int64_t kLimit = std::int64_t{1} << 62;
constexpr int kMaxExponent = 1 << 20;  // a square of a square of … doubles it every time
constexpr std::int64_t kMaxSize =
    1 << 30;  // so does f(x, x) the size; a form of this size has no derivation

__extension__ using Wide = __int128;

std::optional<Rational> reduced(Wide num, Wide den) {
  if (den < 0) {
    num = -num;
    den = -den;
  }
  Wide a = num < 0 ? -num : num, b = den;
  while (b != 0) {
    const Wide r = a % b;
    a = b;
    b = r;
  }
  if (a > 1) {
    num /= a;
    den /= a;
  }
  if (num > kLimit || num < -kLimit || den > kLimit) return std::nullopt;
  return Rational{static_cast<std::int64_t>(num), static_cast<std::int64_t>(den)};
}

void append(std::vector<std::int64_t>& key, const Factors& factors) {
  key.push_back(static_cast<std::int64_t>(factors.size()));
  for (auto [atom, exponent] : factors) {
    key.push_back(atom);
    key.push_back(exponent);
  }
}

bool representable(const Factors& factors) {
  return std::all_of(factors.begin(), factors.end(),
                     [](const auto& f) { return std::abs(f.second) <= kMaxExponent; });
}

int clamped(std::int64_t size) {
  return static_cast<int>(std::min(size, kMaxSize));
}

}  // namespace

std::optional<Rational> multiply(Rational a, Rational b) {
  return reduced(static_cast<Wide>(a.num) * b.num, static_cast<Wide>(a.den) * b.den);
}

std::optional<Rational> add(Rational a, Rational b) {
  // 62-bit operands: each product fits in 124 bits, their sum in 125
  return reduced(static_cast<Wide>(a.num) * b.den + static_cast<Wide>(b.num) * a.den,
                 static_cast<Wide>(a.den) * b.den);
}

Factors product(const Factors& a, const Factors& b) {
  Factors out;
  out.reserve(a.size() + b.size());
  auto i = a.begin(), j = b.begin();
  while (i != a.end() || j != b.end()) {
    if (j == b.end() || (i != a.end() && i->first < j->first))
      out.push_back(*i++);
    else if (i == a.end() || j->first < i->first)
      out.push_back(*j++);
    else {
      if (i->second + j->second != 0) out.emplace_back(i->first, i->second + j->second);
      ++i;
      ++j;
    }
  }
  return out;
}

AxisSet NormalForms::free(const Factors& factors) const {
  AxisSet set = 0;
  for (auto [a, e] : factors)
    set |= atoms_[a].free;
  return set;
}

bool NormalForms::is_number(NfId id) const {
  return forms_[id].number;
}

std::int64_t NormalForms::size(const Factors& factors) const {
  std::int64_t total = 0;
  // one more for a negative exponent: 1/x is larger than x, and e^(-x) larger than -x
  for (auto [a, e] : factors)
    total += std::int64_t{atom_size_[a]} * std::abs(e) + (e < 0 ? 1 : 0);
  return total;
}

AtomId NormalForms::intern(Atom a) {
  std::vector<std::int64_t> key{static_cast<std::int64_t>(a.kind), a.symbol,
                                static_cast<std::int64_t>(a.bound)};
  for (const auto* list : {&a.index, &a.args}) {
    key.push_back(static_cast<std::int64_t>(list->size()));
    key.insert(key.end(), list->begin(), list->end());
  }
  append(key, a.factors);
  auto [it, fresh] = atom_ids_.try_emplace(std::move(key), static_cast<AtomId>(atoms_.size()));
  if (fresh) {
    std::int64_t size = 1;
    for (NfId arg : a.args)
      size += forms_[arg].size;
    size += this->size(a.factors) + std::popcount(a.bound);
    atom_size_.push_back(clamped(size));
    // a sum binds an axis that only inputs carry
    a.has_sum =
        a.kind == Atom::Kind::sum || a.kind == Atom::Kind::max ||
        std::any_of(a.args.begin(), a.args.end(), [&](NfId arg) { return forms_[arg].has_sum; }) ||
        std::any_of(a.factors.begin(), a.factors.end(),
                    [&](const auto& f) { return atoms_[f.first].has_sum; });
    a.number =
        a.kind != Atom::Kind::input && a.kind != Atom::Kind::sum &&
        std::all_of(a.args.begin(), a.args.end(), [&](NfId arg) { return forms_[arg].number; });
    atoms_.push_back(std::move(a));
  }
  return it->second;
}

NfId NormalForms::intern(std::vector<Monomial> terms) {
  std::erase_if(terms, [](const Monomial& t) { return t.coefficient.num == 0; });
  std::sort(terms.begin(), terms.end(),
            [](const Monomial& a, const Monomial& b) { return a.factors < b.factors; });
  std::vector<std::int64_t> key;
  for (const Monomial& t : terms) {
    key.push_back(t.coefficient.num);
    key.push_back(t.coefficient.den);
    append(key, t.factors);
  }
  auto [it, fresh] = form_ids_.try_emplace(std::move(key), static_cast<NfId>(forms_.size()));
  if (fresh) {
    Nf nf;
    nf.number = true;
    std::int64_t size = static_cast<std::int64_t>(terms.size()) - 1;
    for (const Monomial& t : terms) {
      nf.free |= free(t.factors);
      size += this->size(t.factors) + (t.coefficient == Rational{} ? 0 : 1);
      for (auto [a, e] : t.factors) {
        nf.has_exp |= atoms_[a].has_exp;
        nf.number &= atoms_[a].number;
        nf.has_sum |= atoms_[a].has_sum;
      }
    }
    nf.size = clamped(size);
    nf.terms = std::move(terms);
    forms_.push_back(std::move(nf));
  }
  return it->second;
}

NfId NormalForms::of_factors(Factors factors) {
  return intern(std::vector<Monomial>{{Rational{}, std::move(factors)}});
}

NfId NormalForms::core(NfId a, int axis, bool& waits) {
  waits = false;
  if (forms_[a].terms.size() != 1) return a;
  Factors kept;
  for (auto [atom, e] : forms_[a].terms[0].factors) {
    if (atoms_[atom].kind == Atom::Kind::sum && has(atoms_[atom].bound, axis))
      kept.emplace_back(atom, e);
    else
      waits = waits || atoms_[atom].has_sum;
  }
  return of_factors(std::move(kept));
}

NfId NormalForms::input(int symbol, const std::vector<int>& index) {
  Atom a{Atom::Kind::input, symbol, index, {}, 0, {}, 0, false};
  for (int axis : index)
    if (axis >= 0) a.free |= bit(axis);
  return single(intern(std::move(a)));
}

NfId NormalForms::constant(Rational value) {
  return intern(std::vector<Monomial>{{value, {}}});
}

NfId NormalForms::named_constant(int symbol) {
  return single(intern(Atom{Atom::Kind::constant, symbol, {}, {}, 0, {}, 0, false}));
}

AtomId NormalForms::frozen(NfId id) {
  return intern(Atom{Atom::Kind::frozen, -1, {}, {id}, 0, {}, forms_[id].free, forms_[id].has_exp});
}

std::optional<NfId> NormalForms::mul(NfId a, NfId b) {
  // copies: interning may move the forms
  std::vector<Monomial> left = forms_[a].terms, right = forms_[b].terms;
  if (left.empty() || right.empty()) return constant({0, 1});
  // a sum is multiplied out only within the width; a frozen factor keeps it whole. Numbers always
  // distribute.
  const auto is_number = [](const std::vector<Monomial>& t) {
    return t.size() == 1 && t[0].factors.empty();
  };
  if (!is_number(left) && !is_number(right) &&
      static_cast<int>(left.size() * right.size()) > width_) {
    if (left.size() > 1) left = {{Rational{}, {{frozen(a), 1}}}};
    if (right.size() > 1) right = {{Rational{}, {{frozen(b), 1}}}};
  }
  std::map<Factors, Rational> terms;
  for (const Monomial& s : left)
    for (const Monomial& t : right) {
      const auto c = multiply(s.coefficient, t.coefficient);
      if (!c) return std::nullopt;
      Factors factors = product(s.factors, t.factors);
      if (!representable(factors)) return std::nullopt;
      auto [it, fresh] = terms.try_emplace(std::move(factors), *c);
      if (!fresh) {
        const auto total = mirage::add(it->second, *c);
        if (!total) return std::nullopt;
        it->second = *total;
      }
    }
  std::vector<Monomial> out;
  for (auto& [factors, c] : terms)
    out.push_back({c, factors});
  return intern(std::move(out));
}

std::optional<NfId> NormalForms::add(NfId a, NfId b, bool negate_b) {
  std::map<Factors, Rational> terms;
  for (const Monomial& t : forms_[a].terms)
    terms.emplace(t.factors, t.coefficient);
  for (const Monomial& t : forms_[b].terms) {
    const Rational c{negate_b ? -t.coefficient.num : t.coefficient.num, t.coefficient.den};
    auto [it, fresh] = terms.try_emplace(t.factors, c);
    if (!fresh) {
      const auto total = mirage::add(it->second, c);
      if (!total) return std::nullopt;
      it->second = *total;
    }
  }
  std::vector<Monomial> out;
  for (auto& [factors, c] : terms)
    out.push_back({c, factors});
  return intern(std::move(out));
}

std::optional<NfId> NormalForms::inverse(NfId a) {
  const Nf& nf = forms_[a];
  if (nf.terms.empty()) return std::nullopt;
  if (nf.terms.size() > 1) return single(frozen(a), -1);
  Monomial t = nf.terms[0];
  t.coefficient = t.coefficient.num > 0 ? Rational{t.coefficient.den, t.coefficient.num}
                                        : Rational{-t.coefficient.den, -t.coefficient.num};
  for (auto& [atom, exponent] : t.factors)
    exponent = -exponent;
  return intern(std::vector<Monomial>{std::move(t)});
}

NfId NormalForms::exp(NfId a) {
  // e^(s+t) = e^s e^t and e^(-s) = 1/e^s. What already holds an exp stays whole: its exponent has
  // no place in the field.
  if (forms_[a].has_exp)
    return single(intern(Atom{Atom::Kind::exp, 1, {}, {a}, 0, {}, forms_[a].free, true}));
  const std::vector<Monomial> terms = forms_[a].terms;
  Factors factors;
  for (Monomial t : terms) {
    const int sign = t.coefficient.num < 0 ? -1 : 1;
    t.coefficient.num *= sign;
    const NfId arg = intern(std::vector<Monomial>{t});
    const AtomId atom = intern(Atom{Atom::Kind::exp, 0, {}, {arg}, 0, {}, forms_[arg].free, true});
    factors = product(factors, Factors{{atom, sign}});
  }
  return of_factors(std::move(factors));
}

NfId NormalForms::opaque(int symbol, const std::vector<NfId>& args) {
  Atom a{Atom::Kind::opaque, symbol, {}, args, 0, {}, 0, false};
  for (NfId arg : args) {
    a.free |= forms_[arg].free;
    a.has_exp |= forms_[arg].has_exp;
  }
  return single(intern(std::move(a)));
}

std::optional<Monomial> NormalForms::sum(const Monomial& term, int axis) {
  Factors inside, outside;
  for (const auto& f : term.factors)
    (has(atoms_[f.first].free, axis) ? inside : outside).push_back(f);
  if (inside.empty()) {  // Σ of a constant along the axis
    const auto c = multiply(term.coefficient, {axes_[axis].size, 1});
    if (!c) return std::nullopt;
    return Monomial{*c, outside};
  }
  // Σ_k (Σ_r A)·B = Σ_kr A·B while r names nothing else; otherwise the inner sum stays an atom of
  // its own
  AxisSet bound = bit(axis);
  Factors flat;
  for (const auto& f : inside) {
    const Atom& a = atoms_[f.first];
    bool splice = a.kind == Atom::Kind::sum && f.second == 1;
    if (splice) {
      for (const auto& other : inside)
        if (other != f && ((atoms_[other.first].free | atoms_[other.first].bound) & a.bound) != 0)
          splice = false;
      for (const auto& other : outside)
        if ((atoms_[other.first].free & a.bound) != 0) splice = false;
    }
    if (splice) {
      bound |= a.bound;
      flat = product(flat, a.factors);
    } else
      flat = product(flat, Factors{f});
  }
  Atom s{Atom::Kind::sum, -1, {}, {}, bound, flat, free(flat) & ~bound, false};
  for (auto [a, e] : flat)
    s.has_exp |= atoms_[a].has_exp;
  Factors factors = product(outside, Factors{{intern(std::move(s)), 1}});
  if (!representable(factors)) return std::nullopt;
  return Monomial{term.coefficient, std::move(factors)};
}

std::optional<NfId> NormalForms::sum(NfId a, int axis) {
  const std::vector<Monomial> terms = forms_[a].terms;
  NfId total = constant({0, 1});
  for (const Monomial& t : terms) {
    const auto s = sum(t, axis);
    if (!s) return std::nullopt;
    const auto next = add(total, intern(std::vector<Monomial>{*s}), false);
    if (!next) return std::nullopt;
    total = *next;
  }
  return total;
}

NfId NormalForms::max(NfId a, int axis) {
  return single(intern(Atom{Atom::Kind::max,
                            -1,
                            {},
                            {a},
                            bit(axis),
                            {},
                            forms_[a].free & ~bit(axis),
                            forms_[a].has_exp}));
}

}  // namespace mirage
