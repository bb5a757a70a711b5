// The driver: saturate, list the variants, cut each into kernels on all threads, keep the cheapest.
#include "core/search.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "core/algebra/normal_form.h"
#include "core/algebra/program_forms.h"
#include "core/algebra/saturate.h"
#include "core/algebra/variants.h"
#include "core/kernel/planner.h"

namespace mirage {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kProgressSeconds = 0.05;  // between two calls of the progress callback
constexpr int kKeptPerCount = 2;           // candidates kept for each number of kernels

// Writes a candidate down so that two are equal if their kernels, roles, stages and ops are, whatever
// the numbers of their values.
class Signature {
 public:
  explicit Signature(const Candidate& candidate) {
    for (const FoundKernel& kernel : candidate.kernels) add(kernel);
  }
  auto operator<=>(const Signature&) const = default;

 private:
  enum class Tag : std::uint8_t { kernel, input, stored, value };

  struct KernelNames {
    std::map<ValueName, const FoundLeaf*> leaves;
    std::map<ValueName, std::size_t> values;  // in order of first use
  };

  template <typename T>
  void put(T part) {
    parts_.push_back(static_cast<std::int64_t>(part));
  }

  void add(const FoundKernel& kernel) {
    KernelNames names;
    for (const FoundLeaf& leaf : kernel.leaves) names.leaves[leaf.value] = &leaf;
    put(Tag::kernel);
    for (const Role role : kernel.roles) put(role);
    put(kernel.split.index());
    put(kernel.num_splits);
    put(kernel.clustered);
    put(kernel.stages.size());
    for (const FoundStage& stage : kernel.stages) {
      put(stage.loop.index());
      put(stage.body.size());
      for (const FoundOp& op : stage.body) add(op, names);
      put(stage.accumulators.size());
      for (const FoundOp& op : stage.accumulators) add(op, names);
    }
    for (const FoundOutput& output : kernel.outputs) {
      put(output.output);
      add_value(output.value, names);
    }
  }

  void add(const FoundOp& op, KernelNames& names) {
    put(op.op);
    put(op.symbol);
    put(op.axis.index());
    for (const ValueName& arg : op.args) add_arg(arg, names);
    add_value(op.out, names);
  }

  void add_arg(const ValueName& arg, KernelNames& names) {
    const auto it = names.leaves.find(arg);
    if (it == names.leaves.end()) {
      put(Tag::value);
      add_value(arg, names);
    } else if (it->second->source.valid()) {
      put(Tag::input);
      put(it->second->source.index());
    } else {
      put(Tag::stored);
      put(arg.node.index());
    }
  }

  void add_value(const ValueName& value, KernelNames& names) {
    put(names.values.try_emplace(value, names.values.size()).first->second);
  }

  std::vector<std::int64_t> parts_;
};

std::vector<Candidate> without_duplicates(std::vector<std::vector<Candidate>> by_variant) {
  std::set<Signature> seen;
  std::vector<Candidate> all;
  for (std::vector<Candidate>& list : by_variant)
    for (Candidate& candidate : list)
      if (seen.insert(Signature(candidate)).second) all.push_back(std::move(candidate));
  return all;
}

// How a candidate of one kernel walks and splits its axes.
struct Walk {
  AxisId loop;     // none: it has no loop
  AxisId cluster;  // the axis that the blocks of a cluster split; none: they form no clusters
  auto operator<=>(const Walk&) const = default;
};

Walk walk_of(const Candidate& candidate) {
  const FoundKernel& kernel = candidate.kernels[0];
  Walk walk;
  for (const FoundStage& stage : kernel.stages)
    if (stage.loop.valid()) walk.loop = stage.loop;
  if (kernel.clustered) walk.cluster = kernel.split;
  return walk;
}

// Returns the cheapest, and the best few for each number of kernels whatever they cost: the Pareto
// set of cost and launches. For each way of a single kernel to walk its axes, the best is kept as
// well, beyond `most`: the schedule decides which loop suits tensor cores.
std::vector<Candidate> best_of(std::vector<Candidate> all, std::size_t most) {
  const auto cheaper = [](const auto& a, const auto& b) { return a.cost_us < b.cost_us; };
  std::stable_sort(all.begin(), all.end(), cheaper);
  std::map<std::size_t, int> counts;
  std::size_t room = most;  // for candidates that are not among the best of their number
  for (const Candidate& candidate : all)
    if (counts[candidate.kernels.size()]++ < kKeptPerCount && room > 0) --room;
  counts.clear();
  std::set<Walk> walks;
  std::vector<Candidate> kept;
  std::size_t taken = 0;
  for (Candidate& candidate : all) {
    const bool is_among_best = counts[candidate.kernels.size()]++ < kKeptPerCount;
    const bool is_new_walk = candidate.kernels.size() == 1 && !walks.contains(walk_of(candidate));
    if (taken < most && (is_among_best || room > 0)) {
      if (!is_among_best) --room;
      ++taken;
    } else if (!is_new_walk) {
      continue;
    }
    if (candidate.kernels.size() == 1) walks.insert(walk_of(candidate));
    kept.push_back(std::move(candidate));
  }
  return kept;
}

// One search, whose threads share the counters.
class Driver {
 public:
  Driver(const Program& program, const Limits& limits, const Progress& progress)
      : program_(without_shifts(program)), limits_(limits), progress_(progress) {}

  SearchResult run() {
    NormalForms forms(program_.axes, limits_.width);
    const EGraph graph = saturate(program_, forms, limits_, stats_, out_of_time_);
    stats_.forms = forms.count();
    std::optional<StopReason> stop = graph.stop;
    std::vector<Candidate> candidates;
    if (!graph.outputs.empty()) {
      const Variants found = variants(program_, graph, forms, limits_, stats_, out_of_time_);
      if (!found.complete && !stop) stop = StopReason::expansions;
      candidates = best_of(without_duplicates(plan_all(found.all)),
                           static_cast<std::size_t>(limits_.max_candidates));
    }
    stats_.candidates = static_cast<std::int64_t>(candidates.size());
    stats_.seconds = seconds();
    if (stopped_) stop = is_late_ ? StopReason::time : StopReason::interrupted;
    return {std::move(candidates), stats_, stop.value_or(StopReason::exhausted)};
  }

 private:
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

  bool is_stopped() {
    if (stopped_) return true;
    const double now = seconds();
    if (now > limits_.seconds) {
      is_late_ = true;
      stopped_ = true;
    }
    if (std::this_thread::get_id() == main_thread_ && now - reported_ > kProgressSeconds) {
      reported_ = now;
      report(now);
    }
    return stopped_;
  }

  void report(double now) {
    Statistics copy;
    {
      const std::scoped_lock guard(lock_);
      copy = stats_;
    }
    copy.seconds = now;
    if (progress_ && progress_(copy)) stopped_ = true;
  }

  // Cuts each variant into kernels. The first, which is the program as written, is always tried.
  std::vector<std::vector<Candidate>> plan_all(const std::vector<Variant>& all) {
    std::vector<std::vector<Candidate>> found(all.size());
    std::atomic<std::size_t> next{0};
    const auto work = [&] {
      for (std::size_t i = next++; i < all.size() && (i == 0 || !stopped_); i = next++) {
        Statistics stats;
        found[i] = plans(program_, all[i], limits_, stats, out_of_time_);
        add(stats, found[i]);
        out_of_time_();  // reports
      }
    };
    std::vector<std::thread> helpers;
    for (int t = 1; t < limits_.threads && t < static_cast<int>(all.size()); ++t)
      helpers.emplace_back(work);
    work();
    for (std::thread& helper : helpers) helper.join();
    return found;
  }

  void add(const Statistics& stats, const std::vector<Candidate>& found) {
    const std::scoped_lock guard(lock_);
    stats_.kernels += stats.kernels;
    stats_.illegal += stats.illegal;
    stats_.plans += stats.plans;
    stats_.cost_pruned += stats.cost_pruned;
    stats_.candidates += static_cast<std::int64_t>(found.size());
    if (!found.empty() && stats_.first_seconds < 0) stats_.first_seconds = seconds();
    for (const Candidate& candidate : found)
      if (stats_.best_us < 0 || candidate.cost_us < stats_.best_us)
        stats_.best_us = candidate.cost_us;
  }

  const Clock::time_point start_ = Clock::now();
  const std::thread::id main_thread_ = std::this_thread::get_id();
  const Program program_;
  const Limits& limits_;
  const Progress& progress_;
  const StopCheck out_of_time_ = [this] { return is_stopped(); };
  std::mutex lock_;  // of stats_ while threads run
  Statistics stats_;
  std::atomic<bool> stopped_{false}, is_late_{false};
  double reported_ = 0;
};

}  // namespace

std::string_view to_string(StopReason reason) {
  switch (reason) {
    case StopReason::exhausted: return "exhausted";
    case StopReason::time: return "time";
    case StopReason::values: return "values";
    case StopReason::memory: return "memory";
    case StopReason::expansions: return "expansions";
    case StopReason::interrupted: return "interrupted";
    case StopReason::constants_overflow: return "constants overflow";
  }
  return "";
}

SearchResult search(const Program& program, const Limits& limits, const Progress& progress) {
  return Driver(program, limits, progress).run();
}

}  // namespace mirage
