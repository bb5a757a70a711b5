// Normal forms (the paper's abstract expressions, made exact): equal forms are equal functions over
// the reals.
//
// A value is a sum of monomials. A monomial is a rational times a product of atoms to integer powers.
// An atom is one of:
//   - an input at its axes, or a named constant;
//   - an opaque function of normal forms;
//   - exp of a monomial;
//   - a sum Σ over axes of a product of atoms;
//   - a maximum over an axis;
//   - a sum that is frozen: multiplying it out would give too many monomials.
// Forms and atoms are interned: equal ones have the same id.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "core/algebra/rational.h"
#include "core/ids.h"
#include "core/interner.h"
#include "core/program.h"

namespace mirage {

// An atom to a power.
struct Factor {
  AtomId atom;
  int exponent = 1;
  auto operator<=>(const Factor&) const = default;
};
using Factors = std::vector<Factor>;  // sorted by atom; no exponent is 0

Factors product(const Factors& a, const Factors& b);

struct Monomial {
  Rational coefficient;
  Factors factors;
  bool operator==(const Monomial&) const = default;
};

// What follows from the structure of a form or an atom.
struct Traits {
  AxisSet free;            // axes that it carries
  bool has_exp = false;    // an exp is in it
  bool has_sum = false;    // a sum or a maximum is in it
  bool is_number = false;  // no input is in it
  int size = 0;            // grows with every op, up to a limit; orders derivations
};

struct Atom {
  enum class Kind : std::uint8_t { input, constant, opaque, exp, nested_exp, sum, max, frozen };

  static Atom input(int symbol, std::vector<AxisId> index);
  static Atom named_constant(int symbol);
  static Atom opaque(int symbol, std::vector<FormId> args);
  static Atom exp(FormId monomial);
  static Atom nested_exp(FormId arg);  // exp of what holds an exp already
  static Atom sum(AxisSet bound, Factors factors);
  static Atom max(AxisId bound, FormId arg);
  static Atom frozen(FormId form);

  std::size_t hash() const;
  bool same_as(const Atom& other) const;

  Kind kind = Kind::input;
  int symbol = -1;            // input, constant, opaque
  std::vector<AxisId> index;  // input: the axis of each dim
  std::vector<FormId> args;   // opaque, exp, nested_exp, max, frozen
  AxisSet bound;              // sum, max: the axes that are reduced
  Factors factors;            // sum
  Traits traits;
};

struct Form {
  std::size_t hash() const;
  bool same_as(const Form& other) const { return terms == other.terms; }
  bool is_zero() const { return terms.empty(); }
  bool is_monomial() const { return terms.size() == 1; }

  std::vector<Monomial> terms;  // sorted by factors; empty: zero
  Traits traits;
};

// The sums of a reduced value without the factors that moved out of them.
struct SumCore {
  FormId form;
  bool waits = false;  // one of those factors is itself computed from a sum
};

// The table of all forms and atoms. References to them stay valid.
class NormalForms {
 public:
  // A product of sums is multiplied out if it gives at most `width` monomials.
  NormalForms(const IdVector<AxisId, AxisInfo>& axes, int width) : axes_(axes), width_(width) {}

  // Ops return none if a rational or an exponent overflows, or on a division by zero.
  FormId input(int symbol, const std::vector<AxisId>& index);
  FormId constant(Rational value);
  FormId named_constant(int symbol);
  std::optional<FormId> mul(FormId a, FormId b);
  std::optional<FormId> add(FormId a, FormId b);
  std::optional<FormId> sub(FormId a, FormId b);
  std::optional<FormId> inverse(FormId a);
  FormId exp(FormId a);
  FormId opaque(int symbol, const std::vector<FormId>& args);
  std::optional<FormId> sum(FormId a, AxisId axis);
  FormId max(FormId a, AxisId axis);
  FormId of_factors(Factors factors);  // one monomial with coefficient 1
  SumCore core(FormId a, AxisId axis);

  const Form& form(FormId id) const { return forms_[id]; }
  const Atom& atom(AtomId id) const { return atoms_[id]; }
  std::int64_t count() const { return static_cast<std::int64_t>(forms_.size() + atoms_.size()); }

 private:
  AtomId intern(Atom atom);
  FormId intern(std::vector<Monomial> terms);  // sorted, with distinct factors, none zero
  FormId single(AtomId atom, int exponent = 1) { return of_factors({{atom, exponent}}); }
  AtomId frozen(FormId id) { return intern(Atom::frozen(id)); }
  std::optional<FormId> collected(std::vector<Monomial> terms);
  std::optional<Monomial> sum(const Monomial& term, AxisId axis);
  bool can_splice(const Factor& factor, const Factors& inside, const Factors& outside) const;
  Traits traits_of(const Atom& atom) const;
  Traits traits_of(const Form& form) const;
  AxisSet free(const Factors& factors) const;
  std::int64_t size(const Factors& factors) const;

  IdVector<AxisId, AxisInfo> axes_;
  int width_;
  Interner<AtomId, Atom> atoms_;
  Interner<FormId, Form> forms_;
};

}  // namespace mirage
