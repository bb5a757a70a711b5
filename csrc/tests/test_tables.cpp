// Ids, sets and the tables behind normal forms.
#include "core/ids.h"
#include "core/interner.h"
#include "tests/check.h"

namespace {

using namespace mirage;

struct Word {
  std::size_t hash() const { return text.size(); }  // collides on purpose
  bool same_as(const Word& other) const { return text == other.text; }

  std::string text;
  int completed = 0;
};

using WordId = Id<struct WordTag>;

std::string word(int i) { return "word " + std::to_string(i); }

}  // namespace

TEST(a_default_id_names_nothing) {
  CHECK(!AxisId().valid());
  CHECK(AxisId(0).valid());
  CHECK(AxisId() < AxisId(0));
  CHECK(!AxisSet(AxisId(3)).has(AxisId()));
}

TEST(axis_sets_are_sets) {
  const AxisSet a = AxisSet(AxisId(1)) | AxisId(63), b = AxisId(63);
  CHECK(a.has(AxisId(1)) && a.has(AxisId(63)) && !a.has(AxisId(0)));
  CHECK(b.within(a) && !a.within(b) && a.meets(b));
  CHECK((a & b) == b && (a - b) == AxisSet(AxisId(1)) && (a - a).empty());
  std::vector<AxisId> visited;
  for (const AxisId axis : a) visited.push_back(axis);
  CHECK(visited == std::vector<AxisId>{AxisId(1), AxisId(63)});
}

TEST(an_interner_keeps_one_of_each) {
  Interner<WordId, Word> words;
  constexpr int kCount = 2000;  // grows the table and the arena several times
  const auto intern = [&](int i) {
    return words.intern({word(i), 0}, [](Word& fresh) { ++fresh.completed; });
  };
  for (int i = 0; i < kCount; ++i) CHECK(intern(i) == WordId(i));
  const Word& first = words[WordId(0)];
  for (int i = 0; i < kCount; ++i) CHECK(intern(i) == WordId(i));
  CHECK(words.size() == kCount);
  CHECK(&first == &words[WordId(0)] && first.text == word(0));  // references stay valid
  for (int i = 0; i < kCount; ++i) CHECK(words[WordId(i)].completed == 1);
}
