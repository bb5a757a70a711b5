// A program as text, one statement a line. Tests, the fuzzer and bug reports are written in it.
//
//   axis m 16                        an axis and its size
//   x = input @0 131072 m 1 k        the first input: its bytes, and the axis of each dim (1: size 1)
//   half = constant 1/2              a rational in lowest terms
//   eps = constant @3                the fourth constant that is no small rational
//   y = mul x half                   add, sub, mul and div take two values, exp takes one
//   g = opaque @2 y                  the third function of any values
//   s = sum g k                      sum and max take a value and the axis that they reduce
//   output s t:4                     one or more values; t has elements of 4 bytes, others of 2
//
// A value is named before it is used. "#" starts a comment. `format` names values v0, v1, …
#pragma once
#include <stdexcept>
#include <string>
#include <string_view>

#include "core/program.h"

namespace mirage {

struct ParseError : std::runtime_error {
  ParseError(int line, const std::string& text)
      : std::runtime_error("line " + std::to_string(line) + ": " + text), line(line) {}
  int line;
};

// Throws std::invalid_argument, as `check` does, if the program is not well formed.
std::string format(const Program& program);
// Returns a well-formed program, or throws ParseError.
Program parse(std::string_view text);

}  // namespace mirage
