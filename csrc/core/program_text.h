// A program as text, one line each: what tests, the fuzzer and bug reports are written in.
//
//   axis m 16                        an axis and its size
//   x = input @0 131072 m 1 k        the first input: its bytes, then the axis of each dim (1: a
//   dim of size 1) half = constant 1/2              a rational in lowest terms; "constant @3" is
//   the third named constant y = mul x half                   add, sub, mul, div: two values; exp:
//   one g = opaque @2 y                  the second function of any values s = sum g k sum, max: a
//   value and the axis that it is reduced over output s                         one or more values
//
// A value is named before it is used. "#" starts a comment. `format` names values v0, v1, …
#pragma once
#include <stdexcept>
#include <string>
#include <string_view>

#include "core/ir.h"

namespace mirage {

constexpr int kMaxProgramNodes = 4096;
constexpr int kMaxOpaqueArgs = 16;
// Of sizes, of one input's elements and bytes, of numerators and denominators: what the rationals
// of normal forms hold. The elements of a computed value have no limit.
constexpr std::int64_t kMaxNumber = std::int64_t{1} << 62;

struct ParseError : std::runtime_error {
  ParseError(int line, const std::string& text)
      : std::runtime_error("line " + std::to_string(line) + ": " + text), line(line) {}
  int line;
};

// Throws std::invalid_argument with the place and the reason unless the program is well formed. The
// search relies on all of it: topological arguments, axes in range, reduced axes carried, constants
// in lowest terms, unused fields left as they are by default.
void check(const Program& program);

std::string format(
    const Program& program);           // of a well-formed program; else throws as `check` does
Program parse(std::string_view text);  // a well-formed program; else throws ParseError

}  // namespace mirage
