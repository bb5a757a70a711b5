// Typed indices, and vectors and sets that only take the matching kind of index.
#pragma once
#include <algorithm>
#include <bit>
#include <compare>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <utility>
#include <vector>

namespace mirage {

// An index into one kind of table. A default-constructed id names nothing.
template <typename Tag>
class Id {
 public:
  constexpr Id() = default;
  template <std::integral Int>
  constexpr explicit Id(Int index) : index_(static_cast<int>(index)) {}

  constexpr bool valid() const { return index_ >= 0; }
  constexpr int index() const { return index_; }
  auto operator<=>(const Id&) const = default;

 private:
  int index_ = -1;
};

using AxisId = Id<struct AxisTag>;                // an axis of the program
using ProgramNodeId = Id<struct ProgramNodeTag>;  // a node of the program
using FormId = Id<struct FormTag>;                // a normal form
using AtomId = Id<struct AtomTag>;                // an atom of normal forms
using ValueId = Id<struct ValueTag>;              // a value of the e-graph
using NodeId = Id<struct NodeTag>;                // a node of a variant

// The ids 0, 1, … below a count, to loop over.
template <typename I>
class IdRange {
 public:
  class Iterator {
   public:
    explicit Iterator(int index) : index_(index) {}
    I operator*() const { return I(index_); }
    Iterator& operator++() {
      ++index_;
      return *this;
    }
    bool operator==(const Iterator&) const = default;

   private:
    int index_;
  };

  explicit IdRange(std::size_t count) : count_(static_cast<int>(count)) {}
  Iterator begin() const { return Iterator(0); }
  Iterator end() const { return Iterator(count_); }

 private:
  int count_;
};

// A vector whose index is an id of type I.
template <typename I, typename T>
class IdVector {
 public:
  using value_type = T;

  IdVector() = default;
  explicit IdVector(std::size_t count, const T& item = T()) : items_(count, item) {}
  IdVector(std::initializer_list<T> items) : items_(items) {}

  decltype(auto) operator[](I id) { return items_[static_cast<std::size_t>(id.index())]; }
  decltype(auto) operator[](I id) const { return items_[static_cast<std::size_t>(id.index())]; }
  I push_back(T item) {
    items_.push_back(std::move(item));
    return I(items_.size() - 1);
  }
  void resize(std::size_t count) { items_.resize(count); }
  void reserve(std::size_t count) { items_.reserve(count); }
  void clear() { items_.clear(); }
  std::size_t size() const { return items_.size(); }
  bool empty() const { return items_.empty(); }
  IdRange<I> ids() const { return IdRange<I>(items_.size()); }
  bool contains(I id) const {
    return id.valid() && static_cast<std::size_t>(id.index()) < items_.size();
  }
  auto begin() { return items_.begin(); }
  auto end() { return items_.end(); }
  auto begin() const { return items_.begin(); }
  auto end() const { return items_.end(); }
  bool operator==(const IdVector&) const = default;

 private:
  std::vector<T> items_;
};

constexpr int kMaxAxes = 64;

// A set of axes, as the bits of one word.
class AxisSet {
 public:
  constexpr AxisSet() = default;
  constexpr AxisSet(AxisId axis) : bits_(std::uint64_t{1} << static_cast<unsigned>(axis.index())) {}
  static constexpr AxisSet of_bits(std::uint64_t bits) {
    AxisSet set;
    set.bits_ = bits;
    return set;
  }

  constexpr std::uint64_t bits() const { return bits_; }
  constexpr bool empty() const { return bits_ == 0; }
  constexpr int count() const { return std::popcount(bits_); }
  // False for an id that names nothing.
  constexpr bool has(AxisId axis) const {
    return axis.valid() && (bits_ >> static_cast<unsigned>(axis.index()) & 1U) != 0;
  }
  constexpr bool within(AxisSet other) const { return (bits_ & ~other.bits_) == 0; }
  constexpr bool meets(AxisSet other) const { return (bits_ & other.bits_) != 0; }

  constexpr AxisSet& operator|=(AxisSet other) { return *this = *this | other; }
  constexpr AxisSet& operator&=(AxisSet other) { return *this = *this & other; }
  constexpr AxisSet& operator-=(AxisSet other) { return *this = *this - other; }
  friend constexpr AxisSet operator|(AxisSet a, AxisSet b) { return of_bits(a.bits_ | b.bits_); }
  friend constexpr AxisSet operator&(AxisSet a, AxisSet b) { return of_bits(a.bits_ & b.bits_); }
  friend constexpr AxisSet operator-(AxisSet a, AxisSet b) { return of_bits(a.bits_ & ~b.bits_); }
  auto operator<=>(const AxisSet&) const = default;

  // Visits the axes in ascending order.
  class Iterator {
   public:
    explicit Iterator(std::uint64_t rest) : rest_(rest) {}
    AxisId operator*() const { return AxisId(std::countr_zero(rest_)); }
    Iterator& operator++() {
      rest_ &= rest_ - 1U;
      return *this;
    }
    bool operator==(const Iterator&) const = default;

   private:
    std::uint64_t rest_;
  };
  Iterator begin() const { return Iterator(bits_); }
  Iterator end() const { return Iterator(0); }

 private:
  std::uint64_t bits_ = 0;
};

}  // namespace mirage

template <typename Tag>
struct std::hash<mirage::Id<Tag>> {
  std::size_t operator()(mirage::Id<Tag> id) const noexcept { return std::hash<int>{}(id.index()); }
};
