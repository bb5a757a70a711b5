// Lets ids and their vectors pass between C++ and Python. Ids and axis sets are integers there, and
// the name of a value is a tuple.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <utility>

#include "core/candidate.h"
#include "core/ids.h"

namespace pybind11::detail {

template <typename Tag>
struct type_caster<mirage::Id<Tag>> {
  PYBIND11_TYPE_CASTER(mirage::Id<Tag>, const_name("int"));

  bool load(handle source, bool convert) {
    make_caster<int> index;
    if (!index.load(source, convert)) return false;
    value = mirage::Id<Tag>(cast_op<int>(index));
    return true;
  }
  static handle cast(mirage::Id<Tag> id, return_value_policy /*policy*/, handle /*parent*/) {
    return PyLong_FromLong(id.index());
  }
};

template <>
struct type_caster<mirage::AxisSet> {
  PYBIND11_TYPE_CASTER(mirage::AxisSet, const_name("int"));

  bool load(handle source, bool convert) {
    make_caster<std::uint64_t> bits;
    if (!bits.load(source, convert)) return false;
    value = mirage::AxisSet::of_bits(cast_op<std::uint64_t>(bits));
    return true;
  }
  static handle cast(mirage::AxisSet axes, return_value_policy /*policy*/, handle /*parent*/) {
    return PyLong_FromUnsignedLongLong(axes.bits());
  }
};

// (node, pass)
template <>
struct type_caster<mirage::ValueName> {
  PYBIND11_TYPE_CASTER(mirage::ValueName, const_name("tuple[int, int]"));

  bool load(handle source, bool convert) {
    make_caster<std::pair<int, int>> pair;
    if (!pair.load(source, convert)) return false;
    const auto [node, pass] = cast_op<std::pair<int, int>>(pair);
    value = {mirage::NodeId(node), pass};
    return true;
  }
  static handle cast(mirage::ValueName name, return_value_policy /*policy*/, handle /*parent*/) {
    return make_tuple(name.node, name.pass).release();
  }
};

template <typename I, typename T>
struct type_caster<mirage::IdVector<I, T>> : list_caster<mirage::IdVector<I, T>, T> {};

}  // namespace pybind11::detail
