// The driver on programs that people write kernels for: there is an answer, threads do not change
// it, and it ends when told to.
#include <algorithm>
#include <chrono>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include "core/program_text.h"
#include "core/search.h"
#include "tests/check.h"

namespace {

using namespace mirage;
using Clock = std::chrono::steady_clock;

Program example(const std::string& name) {
  const std::string path = std::string(MIRAGE_CORPUS) + "/" + name + ".txt";
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path);
  std::ostringstream text;
  text << file.rdbuf();
  return parse(text.str());
}

SearchResult search_for(const Program& program, double seconds, int threads = 1) {
  Limits limits;
  limits.seconds = seconds;
  limits.threads = threads;
  return search(program, limits, nullptr);
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

TEST(known_blocks_have_an_answer) {
  for (const char* name : {"rms_norm_linear", "attention", "lora", "gated_mlp", "layer_norm",
                           "gram", "turned_codes"}) {
    const SearchResult result = search_for(example(name), 60);
    std::cout << name << ": " << result.candidates.size() << " candidates, " << result.stats.seconds
              << " s, " << to_string(result.stop) << "\n";
    CHECK(!result.candidates.empty());
    CHECK(result.stop == StopReason::exhausted);
  }
}

TEST(sums_over_axes_that_belong_together_have_one_order) {
  Limits limits;
  limits.max_expansions = 4000;  // in all orders there are 6,119 states, and 916 in one
  const SearchResult result = search(example("turned_codes"), limits, nullptr);
  CHECK(result.stop == StopReason::exhausted);
  CHECK(!result.candidates.empty() && result.candidates[0].kernels.size() == 1);
}

TEST(threads_do_not_change_the_answer) {
  for (const char* name : {"rms_norm_linear", "lora", "gated_mlp"}) {
    const SearchResult one = search_for(example(name), 60, 1),
                       two = search_for(example(name), 60, 2);
    CHECK(one.candidates.size() == two.candidates.size());
    CHECK(one.stop == two.stop);
    CHECK(one.stats.values == two.stats.values);
    for (std::size_t i = 0; i < std::min(one.candidates.size(), two.candidates.size()); ++i)
      CHECK(one.candidates[i].cost_us == two.candidates[i].cost_us);
  }
}

TEST(no_time_ends_at_once) {
  for (int threads : {1, 2}) {
    const auto start = Clock::now();
    const SearchResult result = search_for(example("attention"), 0, threads);
    CHECK(seconds_since(start) < 2);
    CHECK(result.stop == StopReason::time);
  }
}

TEST(progress_interrupts) {
  Limits limits;
  limits.threads = 2;
  int calls = 0;
  const auto start = Clock::now();
  const SearchResult result =
      search(example("attention"), limits, [&](const Statistics&) { return ++calls == 1; });
  CHECK(calls <= 1);  // none where the search ends before the first is due
  CHECK(result.stop == (calls == 1 ? StopReason::interrupted : StopReason::exhausted));
  CHECK(seconds_since(start) < 30);
}
