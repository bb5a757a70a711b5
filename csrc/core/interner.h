// An arena that keeps one copy of each distinct value and numbers the copies in order of first sight.
#pragma once
#include <cstddef>
#include <utility>
#include <vector>

#include "core/ids.h"

namespace mirage {

// A growing table whose elements never move: references to them stay valid.
template <typename I, typename T>
class Arena {
 public:
  const T& operator[](I id) const {
    const auto index = static_cast<std::size_t>(id.index());
    return chunks_[index / kChunk][index % kChunk];
  }
  I push_back(T item) {
    if (size_ % kChunk == 0) chunks_.emplace_back().reserve(kChunk);
    chunks_.back().push_back(std::move(item));
    return I(size_++);
  }
  std::size_t size() const { return size_; }

 private:
  static constexpr std::size_t kChunk = 256;
  std::vector<std::vector<T>> chunks_;  // each of fixed capacity
  std::size_t size_ = 0;
};

// T has `std::size_t hash() const` and `bool same_as(const T&) const`, which look at what identifies
// a value and may leave out what is computed from that.
template <typename I, typename T>
class Interner {
 public:
  const T& operator[](I id) const { return arena_[id]; }
  std::size_t size() const { return arena_.size(); }

  // Returns the id of `value`. Calls `complete` on a value that is new, before it is stored.
  template <typename Complete>
  I intern(T value, Complete&& complete) {
    if (2 * (arena_.size() + 1) > slots_.size()) grow();
    const std::size_t hash = value.hash();
    Slot& slot = find(hash, [&](I id) { return arena_[id].same_as(value); });
    if (!slot.id.valid()) {
      complete(value);
      slot = {hash, arena_.push_back(std::move(value))};
    }
    return slot.id;
  }

 private:
  struct Slot {
    std::size_t hash = 0;
    I id;
  };

  // The slot of the value with this hash that `same` accepts, else the empty slot where it goes.
  template <typename Same>
  Slot& find(std::size_t hash, Same&& same) {
    const std::size_t mask = slots_.size() - 1;
    for (std::size_t at = hash & mask;; at = (at + 1) & mask) {
      Slot& slot = slots_[at];
      if (!slot.id.valid() || (slot.hash == hash && same(slot.id))) return slot;
    }
  }

  void grow() {
    const std::vector<Slot> old = std::exchange(slots_, {});
    slots_.resize(old.empty() ? kFirstSlots : 2 * old.size());
    for (const Slot& slot : old)
      if (slot.id.valid()) find(slot.hash, [](I) { return false; }) = slot;
  }

  static constexpr std::size_t kFirstSlots = 64;  // the number of slots is a power of two
  Arena<I, T> arena_;
  std::vector<Slot> slots_;  // open addressing, at most half full
};

}  // namespace mirage
