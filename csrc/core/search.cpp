// The driver: widen, saturate, try every role assignment on all threads, keep the cheapest kernels.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <thread>

#include "core/ir.h"
#include "core/partition.h"
#include "core/saturate.h"

namespace mirage {
namespace {

using Clock = std::chrono::steady_clock;

// Two candidates found at different widths are the same kernel when roles, stages and ops agree up to value numbers.
std::vector<std::int64_t> shape_of(const Candidate& c) {
  std::vector<std::int64_t> key;
  std::map<int, std::int64_t> number;
  const auto id = [&](int v) { return number.try_emplace(v, static_cast<std::int64_t>(number.size())).first->second; };
  for (Role r : c.roles) key.push_back(static_cast<std::int64_t>(r));
  std::map<int, int> node;
  for (const FoundLeaf& l : c.leaves) node[l.value] = l.node;
  for (const FoundStage& s : c.stages) {
    key.push_back(-1 - s.loop);
    for (const auto* list : {&s.body, &s.accumulators})
      for (const FoundOp& f : *list) {
        key.push_back(static_cast<std::int64_t>(f.op));
        key.push_back(f.symbol);
        key.push_back(f.axis);
        for (int a : f.args) key.push_back(node.count(a) ? -1000 - node[a] : id(a));
        key.push_back(id(f.out));
      }
  }
  return key;
}

void add(Statistics& total, const Statistics& part) {
  total.kernels += part.kernels;
  total.cost_pruned += part.cost_pruned;
  total.duplicates += part.duplicates;
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
    if (now > limits.seconds) { late = true; stop = true; }
    if (std::this_thread::get_id() == main_thread && now - reported > 0.05) {
      reported = now;
      Statistics copy;
      { std::lock_guard guard(lock); copy = result.stats; }
      copy.seconds = now;
      if (progress && progress(copy)) stop = true;
    }
    return stop.load();
  };

  std::set<std::vector<std::int64_t>> seen;
  std::string reason;
  for (int width = 1; width <= limits.max_width && !stop; width *= 2) {
    NormalForms forms(program.axes, width);
    const Values values = saturate(program, forms, limits, result.stats, out_of_time);
    if (!values.stop.empty()) reason = values.stop;
    if (values.outputs.empty()) break;
    const auto roles = role_assignments(program, values, limits);
    result.stats.role_assignments += static_cast<std::int64_t>(roles.size());
    std::vector<std::vector<Candidate>> found(roles.size());
    std::atomic<std::size_t> next{0};
    std::atomic<bool> partial{false};
    const auto worker = [&] {
      for (std::size_t i; (i = next++) < roles.size() && !stop;) {
        Statistics stats;
        bool complete = true;
        found[i] = kernels(program, values, roles[i], limits, stats, complete, out_of_time);
        if (!complete) partial = true;
        {
          std::lock_guard guard(lock);
          add(result.stats, stats);
          if (!found[i].empty() && result.stats.first_seconds < 0) result.stats.first_seconds = seconds();
        }
        out_of_time();  // takes the lock itself
      }
    };
    std::vector<std::thread> helpers;
    for (int t = 1; t < limits.threads && t < static_cast<int>(roles.size()); ++t) helpers.emplace_back(worker);
    worker();
    for (std::thread& t : helpers) t.join();
    for (auto& list : found)
      for (Candidate& c : list) {
        c.width = width;
        if (seen.insert(shape_of(c)).second) result.candidates.push_back(std::move(c));
      }
    if (partial && reason.empty() && !stop) reason = "expansions";
    if (!stop && reason.empty()) result.stats.width = width;
  }
  std::stable_sort(result.candidates.begin(), result.candidates.end(), [](const Candidate& a, const Candidate& b) { return a.cost_us < b.cost_us; });
  if (static_cast<int>(result.candidates.size()) > limits.max_candidates) result.candidates.resize(limits.max_candidates);
  result.stats.seconds = seconds();
  result.stop = stop ? (late ? "time" : "interrupted") : reason.empty() ? "exhausted" : reason;
  return result;
}

}  // namespace mirage
