// Normal forms (the paper's abstract expressions, made exact): equal normal forms are equal
// functions over the reals.
//
// A value is a sum of monomials; a monomial is a rational times a product of atoms to integer
// powers; an atom is an input at its axes, a named constant, an opaque function of normal forms,
// exp of a monomial, a connected sum Σ over axes of a product of atoms, a maximum over an axis, or
// a sum that was frozen because multiplying it out would be too wide. Everything is hash-consed: an
// id identifies a normal form.
#pragma once
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "core/ir.h"

namespace mirage {

using NfId = int;
using AtomId = int;

struct Rational {
  std::int64_t num = 1, den = 1;
  auto operator<=>(const Rational&) const = default;
};
std::optional<Rational> multiply(Rational a, Rational b);  // none: overflow
std::optional<Rational> add(Rational a, Rational b);

using Factors =
    std::vector<std::pair<AtomId, int>>;  // atom, exponent; sorted by atom, no zero exponent

struct Monomial {
  Rational coefficient;
  Factors factors;
};

struct Atom {
  enum class Kind { input, constant, opaque, exp, sum, max, frozen } kind = Kind::input;
  int symbol = -1;         // input, constant, opaque
  std::vector<int> index;  // input: axis per dim
  std::vector<NfId> args;  // opaque, exp (one monomial), max, frozen
  AxisSet bound = 0;       // sum, max
  Factors factors;         // sum
  AxisSet free = 0;
  bool has_exp = false;
  bool number = false;   // holds no input
  bool has_sum = false;  // is, or is a function of, a sum or a maximum
};

struct Nf {
  std::vector<Monomial> terms;  // sorted by factors; empty: zero
  AxisSet free = 0;
  bool has_exp = false;
  bool number = false;   // holds no input
  bool has_sum = false;  // is, or is a function of, a sum or a maximum
  int size = 0;  // grows with every op that builds a value, up to a limit; orders derivations
};

class NormalForms {
 public:
  NormalForms(const std::vector<AxisInfo>& axes, int width) : axes_(axes), width_(width) {}

  NfId input(int symbol, const std::vector<int>& index);
  NfId constant(Rational value);
  NfId named_constant(int symbol);
  // The binary and unary ops give none when a rational or an exponent overflows or where the form
  // is not defined (division by zero).
  std::optional<NfId> mul(NfId a, NfId b);
  std::optional<NfId> add(NfId a, NfId b, bool negate_b);
  std::optional<NfId> inverse(NfId a);
  NfId exp(NfId a);
  NfId opaque(int symbol, const std::vector<NfId>& args);
  std::optional<NfId> sum(NfId a, int axis);
  NfId max(NfId a, int axis);
  NfId of_factors(Factors factors);  // one monomial with coefficient 1
  // What a sum over `axis` is about: of a single monomial the sums that bind the axis, without the
  // factors that moved past it; other forms as they are. `waits`: one of those factors is itself
  // computed from a sum.
  NfId core(NfId a, int axis, bool& waits);

  const Nf& nf(NfId id) const { return forms_[id]; }
  const Atom& atom(AtomId id) const { return atoms_[id]; }
  AxisSet free(const Factors& factors) const;
  bool is_number(NfId id) const;  // holds no input
  std::int64_t count() const { return static_cast<std::int64_t>(forms_.size() + atoms_.size()); }

 private:
  AtomId intern(Atom atom);
  NfId intern(std::vector<Monomial> terms);
  NfId single(AtomId atom, int exponent = 1) { return of_factors({{atom, exponent}}); }
  AtomId frozen(NfId id);
  std::optional<Monomial> sum(const Monomial& term, int axis);
  std::int64_t size(const Factors& factors) const;

  std::vector<AxisInfo> axes_;
  int width_;
  std::vector<Atom> atoms_;
  std::vector<int> atom_size_;
  std::vector<Nf> forms_;
  std::map<std::vector<std::int64_t>, AtomId> atom_ids_;
  std::map<std::vector<std::int64_t>, NfId> form_ids_;
};

Factors product(const Factors& a, const Factors& b);

}  // namespace mirage
