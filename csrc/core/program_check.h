// What a well-formed program is. The search relies on all of it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/program.h"

namespace mirage {

constexpr int kMaxProgramNodes = 4096;
constexpr int kMaxOpaqueArgs = 16;
// The largest size, number of elements or bytes of an input, numerator and denominator: what the
// rationals of normal forms hold. A computed value may have any number of elements.
constexpr std::int64_t kMaxNumber = std::int64_t{1} << 62;

// True for a name of letters, digits and _ that does not begin with a digit.
bool is_identifier(std::string_view text);

// The first thing that is wrong with a program, and where.
struct Problem {
  enum class Part : std::uint8_t { axis, node, output, whole };

  Part part = Part::whole;
  std::size_t at = 0;  // which axis, node or output
  std::string text;
};

// Checks that arguments are earlier nodes, axes are in range, reduced axes are carried, constants are
// in lowest terms and unused fields have their defaults.
std::optional<Problem> find_problem(const Program& program);

// Throws std::invalid_argument with the place and the reason if a program is not well formed.
void check(const Program& program);

}  // namespace mirage
