// The name and the number of arguments of each op.
#pragma once
#include <array>
#include <cstddef>
#include <string_view>

#include "core/program.h"

namespace mirage {

struct OpRow {
  std::string_view name;
  int args = 0;  // -1: one or more
};

constexpr std::array<OpRow, 10> kOps{{
    {"input", 0},
    {"constant", 0},
    {"add", 2},
    {"sub", 2},
    {"mul", 2},
    {"div", 2},
    {"exp", 1},
    {"opaque", -1},
    {"sum", 1},
    {"max", 1},
}};

constexpr const OpRow& row(Op op) { return kOps[static_cast<std::size_t>(op)]; }

}  // namespace mirage
