// The driver: saturate, list the variants, cut each into kernels on all threads, keep the cheapest
// plans.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "core/ir.h"
#include "core/plan.h"
#include "core/saturate.h"
#include "core/variants.h"

namespace mirage {
namespace {

using Clock = std::chrono::steady_clock;

// Two candidates are the same when kernels, roles, stages and ops agree up to the numbers of
// values.
std::vector<std::int64_t> shape_of(const Candidate& c) {
  std::vector<std::int64_t> key;
  int before = 0;
  for (const FoundKernel& k : c.kernels) {
    std::map<int, std::int64_t> number;
    const auto id = [&](int v) {
      return number.try_emplace(v, static_cast<std::int64_t>(number.size())).first->second;
    };
    key.push_back(--before);
    for (Role r : k.roles)
      key.push_back(static_cast<std::int64_t>(r));
    key.push_back(k.split);
    key.push_back(k.parts);
    std::map<int, std::int64_t> leaf;
    for (const FoundLeaf& l : k.leaves)
      leaf[l.value] = l.node >= 0 ? l.node : 100000 + l.value;
    for (const FoundStage& s : k.stages) {
      key.push_back(-1 - s.loop);
      for (const auto* list : {&s.body, &s.accumulators})
        for (const FoundOp& f : *list) {
          key.push_back(static_cast<std::int64_t>(f.op));
          key.push_back(f.symbol);
          key.push_back(f.axis);
          for (int a : f.args)
            key.push_back(leaf.count(a) ? -1000 - leaf[a] : id(a));
          key.push_back(id(f.out));
        }
    }
    for (const FoundOutput& o : k.outputs) {
      key.push_back(o.output);
      key.push_back(id(o.value));
    }
  }
  return key;
}

void add(Statistics& total, const Statistics& part) {
  total.kernels += part.kernels;
  total.illegal += part.illegal;
  total.plans += part.plans;
  total.cost_pruned += part.cost_pruned;
}

// The cheapest, but for each number of kernels the best few whatever they cost: a Pareto set of
// cost and launches.
std::vector<Candidate> best_of(std::vector<Candidate> all, std::size_t most) {
  constexpr int kEachCount = 2;
  std::stable_sort(all.begin(), all.end(),
                   [](const Candidate& a, const Candidate& b) { return a.cost_us < b.cost_us; });
  std::map<std::size_t, int> taken;
  std::vector<Candidate> kept;
  std::size_t room = most;
  for (const Candidate& c : all)
    if (taken[c.kernels.size()]++ < kEachCount && room > 0) --room;
  taken.clear();
  for (Candidate& c : all) {
    const bool first = taken[c.kernels.size()]++ < kEachCount;
    if (!first && room == 0) continue;
    if (!first) --room;
    kept.push_back(std::move(c));
  }
  if (kept.size() > most) kept.resize(most);
  return kept;
}

}  // namespace

SearchResult search(const Program& program, const Limits& limits, const Progress& progress) {
  const auto start = Clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  SearchResult result;
  std::atomic<bool> stop{false}, late{false};
  std::mutex lock;
  const auto main_thread = std::this_thread::get_id();
  double reported = 0;
  const std::function<bool()> out_of_time = [&] {
    if (stop) return true;
    const double now = seconds();
    if (now > limits.seconds) {
      late = true;
      stop = true;
    }
    if (std::this_thread::get_id() == main_thread && now - reported > 0.05) {
      reported = now;
      Statistics copy;
      {
        std::lock_guard guard(lock);
        copy = result.stats;
      }
      copy.seconds = now;
      if (progress && progress(copy)) stop = true;
    }
    return stop.load();
  };

  std::string reason;
  NormalForms forms(program.axes, limits.width);
  const Program plain = without_shifts(program);
  const Values values = saturate(plain, forms, limits, result.stats, out_of_time);
  result.stats.forms = forms.count();
  reason = values.stop;
  if (!values.outputs.empty()) {
    bool complete = true;
    const std::vector<Variant> ways =
        variants(plain, values, forms, limits, result.stats, complete, out_of_time);
    if (!complete && reason.empty()) reason = "expansions";
    std::vector<std::vector<Candidate>> found(ways.size());
    std::atomic<std::size_t> next{0};
    const auto worker = [&] {
      for (std::size_t i; (i = next++) < ways.size() &&
                          (i == 0 || !stop);) {  // the program as written is always tried
        Statistics stats;
        found[i] = plans(plain, ways[i], limits, stats, out_of_time);
        {
          std::lock_guard guard(lock);
          add(result.stats, stats);
          if (!found[i].empty() && result.stats.first_seconds < 0)
            result.stats.first_seconds = seconds();
          result.stats.candidates += static_cast<std::int64_t>(found[i].size());
          for (const Candidate& c : found[i])
            if (result.stats.best_us < 0 || c.cost_us < result.stats.best_us)
              result.stats.best_us = c.cost_us;
        }
        out_of_time();  // takes the lock itself
      }
    };
    std::vector<std::thread> helpers;
    for (int t = 1; t < limits.threads && t < static_cast<int>(ways.size()); ++t)
      helpers.emplace_back(worker);
    worker();
    for (std::thread& t : helpers)
      t.join();
    std::set<std::vector<std::int64_t>> seen;
    std::vector<Candidate> all;
    for (auto& list : found)
      for (Candidate& c : list)
        if (seen.insert(shape_of(c)).second) all.push_back(std::move(c));
    result.candidates = best_of(std::move(all), static_cast<std::size_t>(limits.max_candidates));
  }
  result.stats.candidates = static_cast<std::int64_t>(result.candidates.size());
  result.stats.seconds = seconds();
  result.stop = stop ? (late ? "time" : "interrupted") : reason.empty() ? "exhausted" : reason;
  return result;
}

}  // namespace mirage
