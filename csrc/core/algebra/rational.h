// Exact fractions of 64-bit integers; what overflows is none.
#pragma once
#include <compare>
#include <cstdint>
#include <optional>

namespace mirage {

struct Rational {
  std::int64_t num = 1, den = 1;  // in lowest terms, den > 0
  auto operator<=>(const Rational&) const = default;
};

std::optional<Rational> multiply(Rational a, Rational b);
std::optional<Rational> add(Rational a, Rational b);
// 1 / a; `a` is not 0.
Rational reciprocal(Rational a);

}  // namespace mirage
