#include "core/algebra/rational.h"

namespace mirage {
namespace {

constexpr std::int64_t kLimit = std::int64_t{1} << 62;

__extension__ using Wide = __int128;

std::optional<Rational> reduced(Wide num, Wide den) {
  if (den < 0) {
    num = -num;
    den = -den;
  }
  Wide a = num < 0 ? -num : num, b = den;
  while (b != 0) {
    const Wide rest = a % b;
    a = b;
    b = rest;
  }
  if (a > 1) {
    num /= a;
    den /= a;
  }
  if (num > kLimit || num < -kLimit || den > kLimit) return std::nullopt;
  return Rational{static_cast<std::int64_t>(num), static_cast<std::int64_t>(den)};
}

}  // namespace

std::optional<Rational> multiply(Rational a, Rational b) {
  return reduced(static_cast<Wide>(a.num) * b.num, static_cast<Wide>(a.den) * b.den);
}

std::optional<Rational> add(Rational a, Rational b) {
  // operands have 62 bits: each product fits in 124 bits, their sum in 125
  return reduced(static_cast<Wide>(a.num) * b.den + static_cast<Wide>(b.num) * a.den,
                 static_cast<Wide>(a.den) * b.den);
}

Rational reciprocal(Rational a) {
  return a.num > 0 ? Rational{a.den, a.num} : Rational{-a.den, -a.num};
}

}  // namespace mirage
