#include "core/plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <unordered_map>

#include "core/rates.h"

namespace mirage {
namespace {

constexpr std::size_t kRoleChoices = 3;  // of a single kernel, kept for tuning
constexpr std::size_t kPerCount = 6;     // plans kept for each number of kernels
constexpr std::size_t kMaxChoices = 64;  // roles of one kernel of several
constexpr double kAgainUs =
    0.5;  // scalar work done again by other blocks that makes a value worth keeping
constexpr std::size_t kMostApart =
    6;  // outputs of a program that may each have a kernel of its own in plans without cuts
constexpr std::size_t kMostUnits = 3;  // outputs, or sets of them, that are grouped freely
constexpr int kMostCuts = 24;          // values considered for cutting

// Something that a kernel of the plan stores: a cut (possibly as partial results), or an output of
// the program (whole).
struct Item {
  int node = -1;
  bool final = false;
};

struct Plan {
  std::vector<KernelTask> tasks;
  std::vector<KernelChoice> choices;  // in the order of `tasks`
  double cost = 0;
};

class Planner {
 public:
  Planner(const Program& program, const Variant& variant, const Limits& limits, Statistics& stats,
          const std::function<bool()>& out_of_time)
      : program_(program),
        variant_(variant),
        limits_(limits),
        stats_(stats),
        out_of_time_(out_of_time),
        search_(program, variant, limits, stats) {
    for (int o : variant.outputs)
      if (std::find(finals_.begin(), finals_.end(), o) == finals_.end()) finals_.push_back(o);
    find_cuts();
    group_outputs();
  }

  std::vector<Candidate> run() {
    single();
    for (int size = 0; size <= limits_.max_cuts && !stopped_; ++size)
      choose(size, 0);
    std::vector<Candidate> found;
    for (auto& [count, list] : best_)
      for (Plan& p : list)
        found.push_back(emit(p));
    return found;
  }

 private:
  // Values worth keeping: sums, and the last of a chain of scalar work that nothing else reads.
  // Numbers are cheaper to compute again, and so is what is computed from inputs without a
  // reduction, unless many blocks would.
  void find_cuts() {
    const int count = static_cast<int>(variant_.nodes.size());
    std::vector<std::vector<int>> users(count);
    std::vector<bool> summed(count, false);
    std::vector<double> scalars(count,
                                0);  // ops for one element of what is computed without a reduction
    for (int n = 0; n < count; ++n) {
      const Variant::Node& node = variant_.nodes[n];
      summed[n] = node.reduces();
      if (!node.leaf())
        scalars[n] = node.op == Op::opaque || node.op == Op::exp || node.op == Op::div ? 4 : 1;
      for (int a : node.args) {
        users[a].push_back(n);
        summed[n] = summed[n] || summed[a];
        scalars[n] += scalars[a];
      }
    }
    for (int n = 0; n < count; ++n) {
      const Variant::Node& node = variant_.nodes[n];
      const bool output = std::find(finals_.begin(), finals_.end(), n) != finals_.end();
      const bool again = std::any_of(users[n].begin(), users[n].end(), [&](int u) {
        const AxisSet wider = variant_.nodes[u].axes;
        return !subset(wider, node.axes) &&
               scalars[n] * elements(wider) / static_cast<double>(kNominalTile) / kScalarOps >
                   kAgainUs;
      });
      if (node.leaf() || node.number || !(summed[n] || again) ||
          (output && !node.reduces() && users[n].empty()))
        continue;
      const bool passed_on = users[n].size() == 1 && !variant_.nodes[users[n][0]].reduces() &&
                             subset(variant_.nodes[users[n][0]].axes, node.axes);
      // summed where it is formed, unless it is no larger than what it is formed from
      const bool scaled = std::any_of(node.args.begin(), node.args.end(), [&](int a) {
        return summed[a] && variant_.nodes[a].axes == node.axes;
      });
      const bool product = users[n].size() == 1 && variant_.nodes[users[n][0]].reduces() &&
                           node.op == Op::mul && (!scaled || node.args[0] == node.args[1]);
      if (!node.reduces() && !output && (passed_on || product)) continue;
      cuts_.push_back(n);
    }
    if (static_cast<int>(cuts_.size()) > kMostCuts) {  // the smallest results first
      std::stable_sort(cuts_.begin(), cuts_.end(), [&](int a, int b) {
        return std::popcount(variant_.nodes[a].axes) < std::popcount(variant_.nodes[b].axes);
      });
      cuts_.resize(kMostCuts);
      std::sort(cuts_.begin(), cuts_.end());
    }
  }

  double elements(AxisSet axes) const {
    double n = 1;
    for (int a = 0; a < static_cast<int>(program_.axes.size()); ++a)
      if (has(axes, a)) n *= static_cast<double>(program_.axes[a].size);
    return n;
  }

  void single() {
    KernelTask task;
    for (int o : finals_) {
      task.outputs.set(o);
      task.final.set(o);
    }
    for (KernelChoice& c : search_.choices(task, kRoleChoices)) {
      if (c.split >= 0) continue;  // outputs are whole, so the grid serves as well
      ++stats_.plans;
      keep({{task}, {c}, c.cost}, kRoleChoices);
    }
  }

  void choose(int size, std::size_t from) {
    if (size > 1 && (stopped_ || (stopped_ = out_of_time_())))
      return;  // one cut is quick, so there is always an answer
    if (static_cast<int>(chosen_.size()) == size) {
      partition();
      return;
    }
    for (std::size_t i = from; i < cuts_.size(); ++i) {
      chosen_.push_back(cuts_[i]);
      choose(size, i + 1);
      chosen_.pop_back();
    }
  }

  // Every way to group the stored values into kernels.
  void partition() {
    std::vector<Item> items;
    std::vector<std::vector<int>> units;  // items that go into the same kernel
    for (int n : chosen_) {
      units.push_back({static_cast<int>(items.size())});
      items.push_back({n, false});
    }
    const bool few =
        chosen_.empty() && finals_.size() <= kMostApart;  // without cuts there are few groupings
    std::vector<std::vector<int>> apart;
    for (int o : finals_)
      apart.push_back({o});
    for (const auto& together : few ? apart : output_units_) {
      units.emplace_back();
      for (int o : together) {
        units.back().push_back(static_cast<int>(items.size()));
        items.push_back({o, true});
      }
    }
    std::vector<int> group(items.size(), 0);
    assign(items, units, group, 0, 0);
  }

  void assign(const std::vector<Item>& items, const std::vector<std::vector<int>>& units,
              std::vector<int>& group, std::size_t at, int groups) {
    if (chosen_.size() > 1 && (stopped_ || (stopped_ = out_of_time_()))) return;
    if (at == units.size()) {
      if (groups > 1) evaluate(items, group, groups);
      return;
    }
    for (int g = 0; g <= groups && g < limits_.max_kernels; ++g) {
      for (int i : units[at])
        group[i] = g;
      assign(items, units, group, at + 1, std::max(groups, g + 1));
    }
  }

  // Each output may be stored by a kernel of its own. Where there are many, those that carry the
  // same axes stay together, and where that leaves many, all do: the ways to group n outputs grow
  // faster than exponentially.
  void group_outputs() {
    for (int o : finals_)
      output_units_.push_back({o});
    if (output_units_.size() <= kMostUnits) return;
    std::map<AxisSet, std::vector<int>> by_axes;
    for (int o : finals_)
      by_axes[variant_.nodes[o].axes].push_back(o);
    output_units_.clear();
    if (by_axes.size() <= kMostUnits)
      for (auto& [axes, together] : by_axes)
        output_units_.push_back(together);
    else
      output_units_.push_back(finals_);
  }

  void evaluate(const std::vector<Item>& items, const std::vector<int>& group, int groups) {
    std::vector<KernelTask> tasks(groups);
    std::vector<int> owner(variant_.nodes.size(), -1);
    for (std::size_t i = 0; i < items.size(); ++i) {
      tasks[group[i]].outputs.set(items[i].node);
      if (items[i].final)
        tasks[group[i]].final.set(items[i].node);
      else
        owner[items[i].node] = group[i];
    }
    for (int g = 0; g < groups; ++g)
      for (int n : chosen_)
        if (owner[n] != g) tasks[g].stored.set(n);
    // each kernel reads what others store, in some order; each cut is read
    std::vector<NodeSet> reads(groups);
    std::vector<bool> read(chosen_.size(), false);
    for (int g = 0; g < groups; ++g) {
      reads[g] = needs(tasks[g]) & tasks[g].stored;
      tasks[g].stored = reads[g];
      for (std::size_t i = 0; i < chosen_.size(); ++i)
        read[i] = read[i] || reads[g][chosen_[i]];
    }
    if (std::find(read.begin(), read.end(), false) != read.end()) return;
    std::vector<int> order;
    NodeSet stored;
    while (static_cast<int>(order.size()) < groups) {
      int next = -1;
      for (int g = 0; g < groups && next < 0; ++g)
        if (std::find(order.begin(), order.end(), g) == order.end() && (reads[g] & ~stored).none())
          next = g;
      if (next < 0) return;  // a circle
      order.push_back(next);
      for (int n : chosen_)
        if (owner[n] == next) stored.set(n);
    }
    ++stats_.plans;
    Plan plan;
    for (int g : order) {
      NodeSet finished;  // outputs that another kernel finishes must come in parts
      for (std::size_t i = 0; i < items.size(); ++i)
        if (items[i].final && owner[items[i].node] == g && group[i] != g)
          finished.set(items[i].node);
      const KernelChoice* best = cheapest(tasks[g], finished);
      if (best == nullptr) return;
      plan.cost += best->cost;
      if (plan.cost > limit(groups)) {
        ++stats_.cost_pruned;
        return;
      }
      plan.tasks.push_back(tasks[g]);
      plan.choices.push_back(*best);
    }
    keep(std::move(plan), kPerCount);
  }

  NodeSet needs(const KernelTask& t) {
    auto it = needs_.find(t);
    if (it == needs_.end()) it = needs_.emplace(t, search_.needed(t)).first;
    return it->second;
  }

  const KernelChoice* cheapest(const KernelTask& task, const NodeSet& in_parts) {
    auto it = memo_.find(task);
    if (it == memo_.end()) it = memo_.emplace(task, search_.choices(task, kMaxChoices)).first;
    for (const KernelChoice& c : it->second) {
      bool all = true;
      for (int n = 0; all && n < static_cast<int>(variant_.nodes.size()); ++n)
        all = !in_parts[n] || search_.partial(n, c);
      if (all) return &c;
    }
    return nullptr;
  }

  double limit(int count) const {
    const auto it = best_.find(count);
    return it == best_.end() || it->second.size() < kPerCount ? 1e30 : it->second.back().cost;
  }

  void keep(Plan plan, std::size_t most) {
    std::vector<Plan>& list = best_[static_cast<int>(plan.tasks.size())];
    const auto at = std::upper_bound(list.begin(), list.end(), plan,
                                     [](const Plan& a, const Plan& b) { return a.cost < b.cost; });
    list.insert(at, std::move(plan));
    if (list.size() > most) list.pop_back();
  }

  Candidate emit(const Plan& plan) const {
    Candidate c;
    c.cost_us = plan.cost;
    c.nodes = static_cast<int>(variant_.nodes.size());
    std::vector<std::pair<int, KernelChoice>> stored_by;
    for (std::size_t k = 0; k < plan.tasks.size(); ++k)
      for (int n = 0; n < static_cast<int>(variant_.nodes.size()); ++n)
        if (plan.tasks[k].outputs[n] && !(plan.tasks[k].stored[n]))
          stored_by.emplace_back(n, plan.choices[k]);
    for (std::size_t k = 0; k < plan.tasks.size(); ++k)
      c.kernels.push_back(search_.emit(plan.tasks[k], plan.choices[k], stored_by));
    return c;
  }

  struct TaskHash {
    std::size_t operator()(const KernelTask& t) const {
      const std::hash<NodeSet> h;
      return h(t.outputs) * 31 + h(t.final) * 17 + h(t.stored);
    }
  };

  const Program& program_;
  const Variant& variant_;
  const Limits& limits_;
  Statistics& stats_;
  const std::function<bool()>& out_of_time_;
  KernelSearch search_;
  std::vector<int> finals_, cuts_, chosen_;
  std::vector<std::vector<int>> output_units_;
  std::map<int, std::vector<Plan>> best_;  // by number of kernels, cheapest first
  std::unordered_map<KernelTask, std::vector<KernelChoice>, TaskHash> memo_;
  std::unordered_map<KernelTask, NodeSet, TaskHash> needs_;
  bool stopped_ = false;
};

}  // namespace

std::vector<Candidate> plans(const Program& program, const Variant& variant, const Limits& limits,
                             Statistics& stats, const std::function<bool()>& out_of_time) {
  if (static_cast<int>(variant.nodes.size()) > kMaxNodes) return {};
  return Planner(program, variant, limits, stats, out_of_time).run();
}

}  // namespace mirage
