#include "core/kernel/planner.h"

#include <algorithm>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>

#include "core/kernel/cuts.h"
#include "core/kernel/kernel_emitter.h"
#include "core/kernel/kernel_search.h"

namespace mirage {
namespace {

constexpr std::size_t kSingleKernels = 3;       // plans of one kernel, kept for tuning
constexpr std::size_t kPlansPerCount = 6;       // plans kept for each other number of kernels
constexpr std::size_t kMaxShapes = 64;          // of one kernel of several
constexpr std::size_t kMaxSeparateOutputs = 6;  // that may each have a kernel in plans without cuts
constexpr std::size_t kMaxOutputUnits = 3;      // outputs, or sets of them, that are grouped freely
constexpr double kNoLimit = 1e30;

// Something that a kernel of the plan stores: a cut, or a whole output of the program.
struct StoredItem {
  NodeId node;
  bool final = false;
};

// Which kernel stores each item.
struct Grouping {
  std::vector<StoredItem> items;
  std::vector<std::vector<std::size_t>> units;  // items that go into the same kernel
  std::vector<int> kernel_of;                   // by item
  int kernels = 0;
};

struct Plan {
  std::vector<KernelTask> tasks;  // in an order in which they can run
  std::vector<KernelChoice> choices;
  double cost_us = 0;
};

class Planner {
 public:
  Planner(const Program& program, const Variant& variant, const Limits& limits, Statistics& stats,
          const StopCheck& out_of_time)
      : program_(program),
        variant_(variant),
        limits_(limits),
        stats_(stats),
        out_of_time_(out_of_time),
        search_(program, variant, limits, stats),
        cuts_(find_cuts(program, variant, limits.gpu)) {
    for (const NodeId output : variant.outputs)
      if (std::find(outputs_.begin(), outputs_.end(), output) == outputs_.end())
        outputs_.push_back(output);
    group_outputs();
  }

  std::vector<Candidate> run() {
    plan_single_kernel();
    for (int size = 0; size <= limits_.max_cuts && !stopped_; ++size)
      choose_cuts(static_cast<std::size_t>(size), 0);
    std::vector<Candidate> found;
    for (const auto& [kernels, list] : best_)
      for (const Plan& plan : list) found.push_back(candidate(plan));
    for (const Plan& plan : clusters_) found.push_back(candidate(plan));
    return found;
  }

 private:
  // Each output may be stored by a kernel of its own. If there are many, those that carry the same
  // axes stay together; if that leaves many, all do. The ways to group n outputs grow faster than
  // exponentially.
  void group_outputs() {
    if (outputs_.size() <= kMaxOutputUnits) {
      output_units_ = separate_outputs();
      return;
    }
    std::map<AxisSet, std::vector<NodeId>> by_axes;
    for (const NodeId output : outputs_) by_axes[variant_.nodes[output].axes].push_back(output);
    if (by_axes.size() > kMaxOutputUnits)
      output_units_.push_back(outputs_);
    else
      for (auto& [axes, together] : by_axes) output_units_.push_back(std::move(together));
  }

  std::vector<std::vector<NodeId>> separate_outputs() const {
    std::vector<std::vector<NodeId>> units;
    for (const NodeId output : outputs_) units.push_back({output});
    return units;
  }

  void plan_single_kernel() {
    KernelTask task;
    for (const NodeId output : outputs_) {
      task.outputs.insert(output);
      task.final.insert(output);
    }
    std::size_t kept = 0;
    for (const KernelChoice& choice : search_.choices(task, kMaxShapes)) {
      if (choice.shape.split.valid()) continue;  // outputs are whole, so the grid does as well
      if (kept++ == kSingleKernels) break;
      ++stats_.plans;
      keep({{task}, {choice}, choice.cost_us}, kSingleKernels);
    }
    if (!limits_.clusters) return;
    for (const KernelChoice& choice : search_.cluster_choices(task, kSingleKernels)) {
      ++stats_.plans;
      clusters_.push_back({{task}, {choice}, choice.cost_us});
    }
  }

  bool is_stopped() {
    stopped_ = stopped_ || out_of_time_();
    return stopped_;
  }

  // Tries every set of `size` cuts that extends the chosen ones with cuts from `from` on.
  void choose_cuts(std::size_t size, std::size_t from) {
    if (size > 1 && is_stopped()) return;  // one cut is quick, so there is always an answer
    if (chosen_.size() == size) {
      group_items();
      return;
    }
    for (std::size_t i = from; i < cuts_.size(); ++i) {
      chosen_.push_back(cuts_[i]);
      choose_cuts(size, i + 1);
      chosen_.pop_back();
    }
  }

  // Tries every way to group the cuts and outputs into kernels.
  void group_items() {
    Grouping grouping;
    const auto add_unit = [&](const std::vector<NodeId>& nodes, bool final) {
      grouping.units.emplace_back();
      for (const NodeId node : nodes) {
        grouping.units.back().push_back(grouping.items.size());
        grouping.items.push_back({node, final});
      }
    };
    for (const NodeId cut : chosen_) add_unit({cut}, false);
    const bool few = chosen_.empty() && outputs_.size() <= kMaxSeparateOutputs;
    for (const auto& together : few ? separate_outputs() : output_units_) add_unit(together, true);
    grouping.kernel_of.resize(grouping.items.size());
    assign(grouping, 0);
  }

  // Assigns a kernel to each unit from `unit` on.
  void assign(Grouping& grouping, std::size_t unit) {
    if (chosen_.size() > 1 && is_stopped()) return;
    if (unit == grouping.units.size()) {
      if (grouping.kernels > 1) evaluate(grouping);
      return;
    }
    const int kernels = grouping.kernels;
    for (int kernel = 0; kernel <= kernels && kernel < limits_.max_kernels; ++kernel) {
      for (const std::size_t item : grouping.units[unit]) grouping.kernel_of[item] = kernel;
      grouping.kernels = std::max(kernels, kernel + 1);
      assign(grouping, unit + 1);
    }
    grouping.kernels = kernels;
  }

  void evaluate(const Grouping& grouping) {
    const auto tasks = tasks_of(grouping);
    if (!tasks) return;
    const std::vector<int> order = run_order(grouping, *tasks);
    if (order.empty()) return;
    ++stats_.plans;
    Plan plan;
    for (const int kernel : order) {
      const KernelTask& task = (*tasks)[static_cast<std::size_t>(kernel)];
      const KernelChoice* best = cheapest(task, finished_elsewhere(grouping, kernel));
      if (best == nullptr) return;
      plan.cost_us += best->cost_us;
      if (plan.cost_us > limit(grouping.kernels)) {
        ++stats_.cost_pruned;
        return;
      }
      plan.tasks.push_back(task);
      plan.choices.push_back(*best);
    }
    keep(std::move(plan), kPlansPerCount);
  }

  // Returns the cuts that a kernel stores.
  static NodeSet cuts_of(const Grouping& grouping, int kernel) {
    NodeSet cuts;
    for (std::size_t i = 0; i < grouping.items.size(); ++i)
      if (!grouping.items[i].final && grouping.kernel_of[i] == kernel)
        cuts.insert(grouping.items[i].node);
    return cuts;
  }

  // Returns the task of each kernel; none if no kernel reads some cut.
  std::optional<std::vector<KernelTask>> tasks_of(const Grouping& grouping) {
    std::vector<KernelTask> tasks(static_cast<std::size_t>(grouping.kernels));
    for (std::size_t i = 0; i < grouping.items.size(); ++i) {
      KernelTask& task = tasks[static_cast<std::size_t>(grouping.kernel_of[i])];
      task.outputs.insert(grouping.items[i].node);
      if (grouping.items[i].final) task.final.insert(grouping.items[i].node);
    }
    NodeSet all_read;
    for (int kernel = 0; kernel < grouping.kernels; ++kernel) {
      KernelTask& task = tasks[static_cast<std::size_t>(kernel)];
      const NodeSet own = cuts_of(grouping, kernel);
      for (const NodeId cut : chosen_)
        if (!own.has(cut)) task.stored.insert(cut);
      task.stored = needs(task) & task.stored;
      all_read |= task.stored;
    }
    if (all_read.count() < chosen_.size()) return std::nullopt;
    return tasks;
  }

  // Returns an order in which each kernel runs after those that it reads from; empty if there is none.
  std::vector<int> run_order(const Grouping& grouping, const std::vector<KernelTask>& tasks) const {
    std::vector<int> order;
    std::vector<bool> done(tasks.size());
    NodeSet stored;
    while (order.size() < tasks.size()) {
      std::size_t next = 0;
      while (next < tasks.size() && (done[next] || !tasks[next].stored.within(stored))) ++next;
      if (next == tasks.size()) return {};
      done[next] = true;
      order.push_back(static_cast<int>(next));
      stored |= cuts_of(grouping, order.back());
    }
    return order;
  }

  // Returns the outputs that this kernel stores for another kernel to finish: they must be partial.
  static NodeSet finished_elsewhere(const Grouping& grouping, int kernel) {
    const NodeSet own = cuts_of(grouping, kernel);
    NodeSet finished;
    for (std::size_t i = 0; i < grouping.items.size(); ++i)
      if (grouping.items[i].final && own.has(grouping.items[i].node) &&
          grouping.kernel_of[i] != kernel)
        finished.insert(grouping.items[i].node);
    return finished;
  }

  NodeSet needs(const KernelTask& task) {
    const auto [it, fresh] = needs_.try_emplace(task);
    if (fresh) it->second = needed_nodes(variant_, task);
    return it->second;
  }

  // Returns the cheapest shape that stores these nodes as partial results; null if there is none.
  const KernelChoice* cheapest(const KernelTask& task, const NodeSet& partial) {
    const auto [it, fresh] = choices_.try_emplace(task);
    if (fresh) it->second = search_.choices(task, kMaxShapes);
    const auto& choices = it->second;
    const auto found = std::find_if(choices.begin(), choices.end(), [&](const KernelChoice& c) {
      for (const NodeId id : chosen_)
        if (partial.has(id) && !is_partial(variant_, id, c.shape)) return false;
      return true;
    });
    return found == choices.end() ? nullptr : &*found;
  }

  // Returns the cost of the worst plan that is kept, once there are enough.
  double limit(int kernels) const {
    const auto it = best_.find(kernels);
    const bool is_full = it != best_.end() && it->second.size() >= kPlansPerCount;
    return is_full ? it->second.back().cost_us : kNoLimit;
  }

  void keep(Plan plan, std::size_t most) {
    std::vector<Plan>& list = best_[static_cast<int>(plan.tasks.size())];
    const auto cheaper = [](const Plan& a, const Plan& b) { return a.cost_us < b.cost_us; };
    list.insert(std::upper_bound(list.begin(), list.end(), plan, cheaper), std::move(plan));
    if (list.size() > most) list.pop_back();
  }

  Candidate candidate(const Plan& plan) const {
    IdVector<NodeId, AxisId> partial_over(variant_.nodes.size());
    for (std::size_t k = 0; k < plan.tasks.size(); ++k) {
      const KernelTask& task = plan.tasks[k];
      const KernelShape& shape = plan.choices[k].shape;
      for (const NodeId id : variant_.nodes.ids())
        if (task.outputs.has(id) && !task.stored.has(id) && is_partial(variant_, id, shape))
          partial_over[id] = shape.split;
    }
    Candidate found;
    found.cost_us = plan.cost_us;
    for (std::size_t k = 0; k < plan.tasks.size(); ++k)
      found.kernels.push_back(
          found_kernel(program_, variant_, plan.tasks[k], plan.choices[k], partial_over));
    return found;
  }

  const Program& program_;
  const Variant& variant_;
  const Limits& limits_;
  Statistics& stats_;
  const StopCheck& out_of_time_;
  KernelSearch search_;
  std::vector<NodeId> cuts_, chosen_, outputs_;
  std::vector<std::vector<NodeId>> output_units_;
  std::map<int, std::vector<Plan>> best_;  // by number of kernels, cheapest first
  std::vector<Plan> clusters_;             // of one kernel whose blocks form clusters
  std::unordered_map<KernelTask, std::vector<KernelChoice>, KernelTaskHash> choices_;
  std::unordered_map<KernelTask, NodeSet, KernelTaskHash> needs_;
  bool stopped_ = false;
};

}  // namespace

std::vector<Candidate> plans(const Program& program, const Variant& variant, const Limits& limits,
                             Statistics& stats, const StopCheck& out_of_time) {
  if (variant.nodes.size() > kMaxNodes) return {};
  return Planner(program, variant, limits, stats, out_of_time).run();
}

}  // namespace mirage
