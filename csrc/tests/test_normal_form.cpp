// Equal functions have equal ids, different functions different ones; what does not fit is
// none, never a wrong number.
#include "core/algebra/normal_form.h"
#include "tests/check.h"

namespace {

using namespace mirage;

const AxisId m(0), k(1), r(2);
constexpr std::int64_t kLargest = std::int64_t{1} << 62;

struct Forms : NormalForms {
  explicit Forms(int width = 1) : NormalForms({{"m", 4}, {"k", 8}, {"r", 3}}, width) {}
  FormId x(int symbol, const std::vector<AxisId>& index) { return input(symbol, index); }
  FormId times(FormId a, FormId b) { return mul(a, b).value(); }
  FormId plus(FormId a, FormId b) { return add(a, b).value(); }
  FormId minus(FormId a, FormId b) { return sub(a, b).value(); }
  FormId over(FormId a, FormId b) { return times(a, inverse(b).value()); }
  bool holds_no_input(FormId id) const { return form(id).traits.is_number; }
  FormId total(FormId a, AxisId axis) { return sum(a, axis).value(); }
};

}  // namespace

TEST(products_and_sums_commute_and_associate) {
  Forms f;
  const FormId a = f.x(0, {m}), b = f.x(1, {k}), c = f.x(2, {m, k});
  CHECK(f.times(a, b) == f.times(b, a));
  CHECK(f.times(f.times(a, b), c) == f.times(a, f.times(c, b)));
  CHECK(f.plus(a, b) == f.plus(b, a));
  CHECK(f.plus(f.plus(a, b), c) == f.plus(a, f.plus(c, b)));
  CHECK(f.times(a, b) != f.times(a, c));
  CHECK(f.x(0, {m}) == a);
  CHECK(f.x(0, {k}) != a);
}

TEST(sums_cancel_and_collect) {
  Forms f;
  const FormId a = f.x(0, {m}), zero = f.constant({0, 1}), one = f.constant({1, 1});
  CHECK(f.minus(a, a) == zero);
  CHECK(f.plus(a, a) == f.times(a, f.constant({2, 1})));
  CHECK(f.times(a, zero) == zero);
  CHECK(f.times(a, one) == a);
  CHECK(f.plus(f.constant({1, 2}), f.constant({1, 3})) == f.constant({5, 6}));
}

TEST(division_is_a_negative_exponent) {
  Forms f;
  const FormId a = f.x(0, {m}), b = f.x(1, {m}), c = f.x(2, {m});
  CHECK(f.over(f.times(a, b), b) == a);
  CHECK(f.over(f.over(a, b), c) == f.over(a, f.times(b, c)));
  CHECK(f.over(a, a) == f.constant({1, 1}));
  CHECK(f.inverse(f.constant({-2, 3})) == f.constant({-3, 2}));
  CHECK(!f.inverse(f.constant({0, 1})));
  const FormId wide = f.plus(a, b);
  CHECK(f.over(f.times(c, f.inverse(wide).value()), c) ==
        f.inverse(wide).value());  // the sum is one frozen factor
}

TEST(a_product_is_multiplied_out_within_the_width_only) {
  for (int width : {1, 4}) {
    Forms f(width);
    const FormId a = f.x(0, {m}), b = f.x(1, {m}), c = f.x(2, {m}), d = f.x(3, {m});
    const FormId whole = f.times(f.plus(a, b), f.plus(c, d));
    const FormId out =
        f.plus(f.plus(f.times(a, c), f.times(a, d)), f.plus(f.times(b, c), f.times(b, d)));
    CHECK((whole == out) == (width == 4));
    CHECK(f.form(whole).terms.size() == (width == 4 ? 4u : 1u));
    CHECK(f.times(f.plus(a, b), f.constant({2, 1})) ==
          f.plus(f.plus(a, a), f.plus(b, b)));  // numbers always are
  }
}

TEST(exp_of_a_sum_is_a_product) {
  Forms f;
  const FormId a = f.x(0, {m}), b = f.x(1, {k});
  CHECK(f.exp(f.plus(a, b)) == f.times(f.exp(a), f.exp(b)));
  CHECK(f.exp(f.minus(a, b)) == f.over(f.exp(a), f.exp(b)));
  CHECK(f.exp(f.constant({0, 1})) == f.constant({1, 1}));
  CHECK(f.exp(f.plus(a, a)) != f.exp(a));
  const FormId nested = f.exp(f.plus(f.exp(a), b));  // stays whole
  CHECK(f.form(nested).terms[0].factors.size() == 1);
  CHECK(f.form(nested).traits.has_exp);
}

TEST(a_softmax_shift_cancels) {
  Forms f;
  const FormId s = f.x(0, {m, k}), shift = f.max(s, k);
  const FormId e = f.exp(f.minus(s, shift));
  CHECK(f.over(e, f.total(e, k)) == f.over(f.exp(s), f.total(f.exp(s), k)));
}

TEST(a_factor_without_the_axis_leaves_the_sum) {
  Forms f;
  const FormId a = f.x(0, {m}), b = f.x(1, {m, k});
  CHECK(f.total(f.times(a, b), k) == f.times(a, f.total(b, k)));
  CHECK(f.total(f.over(b, a), k) == f.over(f.total(b, k), a));
  CHECK(f.total(a, k) == f.times(a, f.constant({8, 1})));
  CHECK(f.total(f.plus(b, a), k) == f.plus(f.total(b, k), f.total(a, k)));
  CHECK(f.form(f.total(b, k)).traits.free == AxisSet(m));
}

TEST(nested_sums_are_spliced) {
  Forms f;
  const FormId a = f.x(0, {m, r}), b = f.x(1, {r, k}), c = f.x(2, {k});
  const FormId inner_first = f.total(f.times(f.total(f.times(a, b), r), c), k);
  const FormId outer_first = f.total(f.times(a, f.total(f.times(b, c), k)), r);
  CHECK(inner_first == outer_first);
  CHECK(f.atom(f.form(inner_first).terms[0].factors[0].atom).bound == (AxisSet(k) | AxisSet(r)));
}

TEST(a_bound_axis_captures_nothing) {
  Forms f;
  const FormId a = f.x(0, {r, k}), b = f.x(1, {r, k}), c = f.x(2, {r});
  // (Σ_r a)·b: b's r is free, the sum's is not
  const FormId shadowed = f.total(f.times(f.total(a, r), b), k);
  CHECK(f.form(shadowed).traits.free.has(r));
  CHECK(shadowed != f.total(f.total(f.times(a, b), r), k));
  // (Σ_r a)·(Σ_r b) is a product of two sums, not one sum of products
  CHECK(f.total(f.times(f.total(a, r), f.total(b, r)), k) != f.total(f.total(f.times(a, b), r), k));
  CHECK(f.times(f.total(a, r), f.total(a, r)) != f.total(f.times(a, a), r));
  const FormId squared = f.total(f.times(f.total(a, r), f.total(a, r)), k);
  CHECK(squared != f.total(f.total(f.times(a, a), r), k));
  // c carries r and stands outside of Σ_k: its r stays free (the inner sum is left an atom of its
  // own)
  const FormId outside = f.total(f.times(f.total(a, r), c), k);
  CHECK(f.form(outside).traits.free.has(r));
  CHECK(outside != f.total(f.total(f.times(a, c), r), k));
}

TEST(rationals_that_overflow_are_none) {
  CHECK(!multiply({kLargest, 1}, {2, 1}));
  CHECK(!multiply({1, kLargest}, {1, 3}));
  CHECK(!add({kLargest, 1}, {1, 1}));
  CHECK(!add({1, kLargest}, {1, kLargest - 1}));
  CHECK(multiply({kLargest, 3}, {3, kLargest}) == Rational{1, 1});
  CHECK(multiply({-kLargest, 1}, {1, kLargest}) == Rational{-1, 1});
  CHECK(add({kLargest, 1}, {-kLargest, 1}) == Rational{0, 1});
  Forms f;
  const FormId big = f.constant({kLargest, 1}), a = f.x(0, {m});
  CHECK(!f.mul(big, big));
  CHECK(!f.add(big, big));
  CHECK(!f.add(f.times(a, big), f.times(a, big)));
  CHECK(!f.sum(big, k));
  CHECK(!f.sum(f.times(a, big), k));
}

TEST(exponents_that_overflow_are_none) {
  Forms f;
  std::optional<FormId> power = f.x(0, {m});
  int squared = 0;
  for (; power && squared < 64; ++squared) power = f.mul(*power, *power);
  CHECK(!power);
  CHECK(squared > 16);
}

TEST(sizes_grow_with_every_op_and_do_not_overflow) {
  Forms f;
  const FormId a = f.x(0, {m}), b = f.x(1, {m, k});
  const auto size = [&](FormId id) { return f.form(id).traits.size; };
  CHECK(size(f.times(a, b)) > size(b));
  CHECK(size(f.plus(a, b)) > size(b));
  CHECK(size(f.total(b, k)) > size(b));
  CHECK(size(f.exp(b)) > size(b));
  CHECK(size(f.max(b, k)) > size(b));
  CHECK(size(f.inverse(b).value()) > size(b));
  const FormId minus = f.times(b, f.constant({-1, 1})), difference = f.minus(a, b);
  CHECK(size(f.exp(minus)) > size(minus));
  CHECK(size(f.exp(difference)) > size(difference));
  FormId nested = a;
  for (int i = 0; i < 80; ++i) nested = f.opaque(0, {nested, nested});  // doubles every time
  CHECK(size(nested) > size(b));
  CHECK(size(f.over(a, nested)) > 0);
}

TEST(numbers_hold_no_input) {
  Forms f;
  const FormId half = f.constant({1, 2}), eps = f.named_constant(0), a = f.x(0, {});
  CHECK(f.holds_no_input(half));
  CHECK(f.holds_no_input(f.exp(f.plus(half, eps))));
  CHECK(f.holds_no_input(f.opaque(1, {eps, half})));
  CHECK(!f.holds_no_input(a));
  CHECK(!f.holds_no_input(f.opaque(1, {half, f.plus(a, eps)})));
  CHECK(!f.holds_no_input(f.inverse(f.plus(a, eps)).value()));
  FormId nested = eps;
  for (int i = 0; i < 80; ++i) nested = f.opaque(0, {nested, nested});
  CHECK(f.holds_no_input(nested));  // linear in its depth
}
