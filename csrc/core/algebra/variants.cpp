#include "core/algebra/variants.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <queue>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/hashing.h"

namespace mirage {
namespace {

constexpr double kImpossible = 1e30;       // the cost of what cannot be computed
constexpr double kTolerance = 1e-9;        // of comparing sums of costs
constexpr int kExpansionsPerCheck = 1024;  // states between two looks at the clock

using Choice = std::map<ValueId, const Derivation*>;

Variant build(const EGraph& graph, const Choice& chosen) {
  std::vector<ValueId> order;
  for (const auto& [value, derivation] : chosen) order.push_back(value);
  std::sort(order.begin(), order.end(), [&](ValueId a, ValueId b) {
    return std::pair(graph.values[a].rank, a) < std::pair(graph.values[b].rank, b);
  });
  Variant variant;
  std::unordered_map<ValueId, NodeId> node_of;
  for (const ValueId value : order) {
    const Derivation& derivation = *chosen.at(value);
    std::vector<NodeId> args;
    for (const ValueId arg : derivation.args) args.push_back(node_of.at(arg));
    node_of[value] = variant.nodes.push_back(
        Variant::Node::of(graph.values[value], derivation, std::move(args)));
  }
  for (const ValueId output : graph.outputs) variant.outputs.push_back(node_of.at(output));
  return variant;
}

// The program as written: the first derivation of each of its values.
std::optional<Variant> as_written(const EGraph& graph) {
  Choice chosen;
  std::vector<ValueId> todo = graph.outputs;
  while (!todo.empty()) {
    const ValueId value = todo.back();
    todo.pop_back();
    if (chosen.contains(value)) continue;
    const std::vector<Derivation>& derivations = graph.values[value].derivations;
    if (derivations.empty()) return std::nullopt;
    chosen[value] = derivations.data();
    for (const ValueId arg : derivations[0].args) todo.push_back(arg);
  }
  return build(graph, chosen);
}

// Axes that every input has all of, or none, and no output has: sums over them may come in any order,
// and other sums between them gain nothing. They are summed in the order of the list, the longest first.
using Twins = std::vector<AxisId>;

std::vector<Twins> twins_of(const Program& program, const EGraph& graph) {
  std::vector<AxisSet> together;
  for (const Node& node : program.nodes) {
    if (node.op != Op::input) continue;
    AxisSet axes;
    for (const AxisId axis : node.index)
      if (axis.valid()) axes |= axis;
    together.push_back(axes);
  }
  AxisSet stored;
  for (const ValueId output : graph.outputs) stored |= graph.values[output].axes;
  std::map<std::vector<bool>, Twins> by_inputs;
  for (const AxisId axis : program.axes.ids()) {
    if (stored.has(axis)) continue;
    std::vector<bool> has_it;
    for (const AxisSet axes : together) has_it.push_back(axes.has(axis));
    by_inputs[has_it].push_back(axis);
  }
  std::vector<Twins> all;
  for (auto& [_, axes] : by_inputs) {
    if (axes.size() < 2) continue;
    std::stable_sort(axes.begin(), axes.end(),
                     [&](AxisId a, AxisId b) { return program.size(a) > program.size(b); });
    all.push_back(std::move(axes));
  }
  return all;
}

// What each value costs by itself at least, and which of its derivations are worth a try.
//
// A derivation is not if its own op and its arguments' ops cost more than another derivation costs
// with everything below it. So x·γ is scaled before the product with a matrix, never the matrix.
class DerivationCosts {
 public:
  DerivationCosts(const Program& program, const EGraph& graph, const GpuRates& gpu,
                  Statistics& stats)
      : program_(program),
        graph_(graph),
        gpu_(gpu),
        summed_(summed_values(graph)),
        twins_(twins_of(program, graph)),
        least_(graph.values.size(), kImpossible) {
    std::vector<ValueId> order;
    for (const ValueId value : graph.values.ids()) {
      order.push_back(value);
      for (const Derivation& d : graph.values[value].derivations)
        least_[value] = std::min(least_[value], cost(value, d));
    }
    std::sort(order.begin(), order.end(), [&](ValueId a, ValueId b) {
      return std::pair(graph.values[a].rank, a) < std::pair(graph.values[b].rank, b);
    });
    keep_worthwhile(order, stats);
  }

  double cost(ValueId value, const Derivation& derivation) const {
    return op_work(program_, graph_, value, summed_.contains(value), derivation, gpu_);
  }
  double least(ValueId value) const { return least_[value]; }
  const std::vector<const Derivation*>& worthwhile(ValueId value) const { return kept_[value]; }

 private:
  // Leaves are free here: every way to compute a value reads them.
  double own_cost(ValueId value, const Derivation& derivation) const {
    return is_leaf(derivation.op) ? 0 : cost(value, derivation);
  }

  bool is_leaf_value(ValueId value) const {
    const std::vector<Derivation>& derivations = graph_.values[value].derivations;
    return !derivations.empty() && is_leaf(derivations[0].op);
  }

  void keep_worthwhile(const std::vector<ValueId>& order, Statistics& stats) {
    IdVector<ValueId, double> whole(order.size(), kImpossible);  // with all below, shared or not
    kept_.resize(order.size());
    for (const ValueId value : order) {
      const std::vector<Derivation>& derivations = graph_.values[value].derivations;
      for (const Derivation& d : derivations) {
        double cost = own_cost(value, d);
        for (const ValueId arg : d.args) cost += whole[arg];
        whole[value] = std::min(whole[value], cost);
      }
      for (const Derivation& d : derivations) {
        if (sums_twins_otherwise(value, d)) {
          ++stats.dominated;
          continue;
        }
        double cost = own_cost(value, d);
        for (const ValueId arg : d.args)
          if (!is_leaf_value(arg)) cost += least_[arg];
        if (cost <= whole[value] * (1 + kTolerance))
          kept_[value].push_back(&d);
        else
          ++stats.dominated;
      }
    }
  }

  // Whether a derivation sums over twins in another order than theirs, although the value has a
  // derivation in that one.
  bool sums_twins_otherwise(ValueId value, const Derivation& derivation) const {
    if (derivation.op != Op::sum) return false;
    const AxisSet axes = graph_.values[value].axes;
    const std::vector<Derivation>& all = graph_.values[value].derivations;
    for (const Twins& twins : twins_) {
      const auto is_left = [&](AxisId axis) { return axes.has(axis); };
      const auto left = std::find_if(twins.begin(), twins.end(), is_left);
      // no twin is summed yet, or one is that follows another which is not
      if (left == twins.begin() || !std::all_of(left, twins.end(), is_left)) continue;
      const AxisId last = *std::prev(left);
      const bool is_twin = std::find(twins.begin(), twins.end(), derivation.axis) != twins.end();
      const bool is_other = derivation.axis != last && (is_twin || left != twins.end());
      const auto sums_last = [&](const Derivation& d) { return d.op == Op::sum && d.axis == last; };
      if (is_other && std::any_of(all.begin(), all.end(), sums_last)) return true;
    }
    return false;
  }

  const Program& program_;
  const EGraph& graph_;
  const GpuRates& gpu_;
  const std::unordered_set<ValueId> summed_;
  const std::vector<Twins> twins_;
  IdVector<ValueId, double> least_;
  IdVector<ValueId, std::vector<const Derivation*>> kept_;
};

// What tells two states of the search apart.
struct Frontier {
  std::vector<ValueId> undecided;  // by falling rank
  std::vector<FormId> sums;        // formed so far, sorted
  bool waits = false;              // one of them waits for a factor
  bool operator==(const Frontier&) const = default;
};

struct FrontierHash {
  std::size_t operator()(const Frontier& frontier) const {
    Hasher hasher;
    hasher.add(frontier.undecided.size());
    for (const ValueId value : frontier.undecided)
      hasher.add(static_cast<std::uint64_t>(value.index()));
    for (const FormId sum : frontier.sums) hasher.add(static_cast<std::uint64_t>(sum.index()));
    hasher.add(frontier.waits ? 1 : 0);
    return hasher.hash();
  }
};

// A* over derivations. Values are decided by falling rank, so all users of a value are known when
// its turn comes, and what is still to pay depends only on the undecided ones.
class VariantSearch {
 public:
  VariantSearch(const Program& program, const EGraph& graph, NormalForms& forms,
                const Limits& limits, Statistics& stats, const StopCheck& out_of_time)
      : graph_(graph),
        forms_(forms),
        limits_(limits),
        stats_(stats),
        out_of_time_(out_of_time),
        costs_(program, graph, limits.gpu, stats) {}

  // Appends variants; returns false if the search was cut short.
  bool run(std::vector<Variant>& found) {
    push_start();
    std::int64_t expansions = 0;
    int complete_ones = 0;
    bool complete = true;
    while (!open_.empty() && complete_ones < limits_.max_variants) {
      const std::size_t at = open_.top().second;
      open_.pop();
      const State& state = states_[at];
      if (state.frontier->second < state.cost) {
        ++stats_.dominated;
      } else if (state.frontier->first.undecided.empty()) {
        found.push_back(build(graph_, chosen_by(at)));
        ++complete_ones;
      } else {
        ++expansions;
        if (expansions > limits_.max_expansions ||
            (expansions % kExpansionsPerCheck == 0 && out_of_time_())) {
          complete = false;
          break;
        }
        expand(at);
      }
    }
    stats_.expansions += expansions;
    return complete;
  }

 private:
  using Best = std::unordered_map<Frontier, double, FrontierHash>;  // the least cost to get there

  struct State {
    const Best::value_type* frontier = nullptr;
    double cost = 0, bound = 0;  // so far; of the whole variant, at least
    std::optional<std::size_t> parent;
    ValueId decided;  // last
    const Derivation* by = nullptr;
  };

  bool before(ValueId a, ValueId b) const {
    return std::pair(graph_.values[a].rank, a) > std::pair(graph_.values[b].rank, b);
  }

  void push_start() {
    Frontier frontier;
    frontier.undecided = graph_.outputs;
    std::vector<ValueId>& values = frontier.undecided;
    std::sort(values.begin(), values.end(), [&](auto a, auto b) { return before(a, b); });
    values.erase(std::unique(values.begin(), values.end()), values.end());
    State start;
    for (const ValueId value : values) start.bound += costs_.least(value);
    push(start, std::move(frontier));
  }

  void push(State state, Frontier frontier) {
    if (state.bound >= kImpossible / 10) return;
    const auto [it, fresh] = best_.try_emplace(std::move(frontier), state.cost);
    if (!fresh && it->second <= state.cost) {
      ++stats_.dominated;
      return;
    }
    it->second = state.cost;
    state.frontier = &*it;
    open_.emplace(state.bound, states_.size());
    states_.push_back(state);
  }

  // Decides the first undecided value in every way that is worth a try.
  void expand(std::size_t at) {
    const State from = states_[at];  // a copy: pushing moves the states
    const Frontier& frontier = from.frontier->first;
    const ValueId value = frontier.undecided.front();
    for (const Derivation* by : costs_.worthwhile(value)) {
      State next;
      next.cost = from.cost + costs_.cost(value, *by);
      next.bound = from.bound - costs_.least(value) + (next.cost - from.cost);
      next.parent = at;
      next.decided = value;
      next.by = by;
      Frontier after;
      after.undecided.assign(frontier.undecided.begin() + 1, frontier.undecided.end());
      for (const ValueId arg : by->args)
        if (insert(after.undecided, arg)) next.bound += costs_.least(arg);
      after.sums = frontier.sums;
      after.waits = frontier.waits;
      if (next.bound < kImpossible / 10 && is_reduction(by->op)) add_sum(after, value, by->axis);
      push(next, std::move(after));
    }
  }

  // Returns false if the value is there already.
  bool insert(std::vector<ValueId>& undecided, ValueId value) const {
    const auto place = std::lower_bound(undecided.begin(), undecided.end(), value,
                                        [&](auto a, auto b) { return before(a, b); });
    if (place != undecided.end() && *place == value) return false;
    undecided.insert(place, value);
    return true;
  }

  void add_sum(Frontier& frontier, ValueId value, AxisId axis) {
    const SumCore core = forms_.core(graph_.values[value].form, axis);
    std::vector<FormId>& sums = frontier.sums;
    sums.insert(std::upper_bound(sums.begin(), sums.end(), core.form), core.form);
    frontier.waits = frontier.waits || core.waits;
  }

  Choice chosen_by(std::size_t at) const {
    Choice chosen;
    for (std::optional<std::size_t> i = at; i; i = states_[*i].parent)
      if (states_[*i].by != nullptr) chosen[states_[*i].decided] = states_[*i].by;
    return chosen;
  }

  const EGraph& graph_;
  NormalForms& forms_;
  const Limits& limits_;
  Statistics& stats_;
  const StopCheck& out_of_time_;
  DerivationCosts costs_;
  std::vector<State> states_;
  Best best_;  // its elements do not move
  using Entry = std::pair<double, std::size_t>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> open_;
};

}  // namespace

std::unordered_set<ValueId> summed_values(const EGraph& graph) {
  std::unordered_set<ValueId> summed;
  for (const ValueId id : graph.values.ids())
    for (const Derivation& derivation : graph.values[id].derivations)
      if (derivation.op == Op::sum) summed.insert(derivation.args[0]);
  return summed;
}

double op_work(const Program& program, const EGraph& graph, ValueId id, bool is_summed,
               const Derivation& derivation, const GpuRates& gpu) {
  const Value& value = graph.values[id];
  const auto axes_of = [&](ValueId id) { return graph.values[id].axes; };
  const auto is_matrix = [&](const Derivation& d) {
    return is_matrix_product(program, axes_of(d.args[0]), axes_of(d.args[1]));
  };
  switch (derivation.op) {
    case Op::constant: return 0;
    case Op::input:
      return static_cast<double>(program.nodes[derivation.source].bytes) / gpu.dram_bytes;
    case Op::mul:
      return program.elements(value.axes) /
             (is_summed && is_matrix(derivation) ? gpu.matrix_ops : gpu.scalar_ops);
    case Op::sum:
    case Op::max: {
      const Value& arg = graph.values[derivation.args[0]];
      const auto is_summed_matrix = [&](const Derivation& d) {
        return d.op == Op::mul && is_matrix(d);
      };
      const bool by_tensor_cores =
          derivation.op == Op::sum &&
          std::any_of(arg.derivations.begin(), arg.derivations.end(), is_summed_matrix);
      return by_tensor_cores ? 0 : kReductionOps * program.elements(arg.axes) / gpu.scalar_ops;
    }
    default: return scalar_ops(derivation.op) * program.elements(value.axes) / gpu.scalar_ops;
  }
}

Variants variants(const Program& program, const EGraph& graph, NormalForms& forms,
                  const Limits& limits, Statistics& stats, const StopCheck& out_of_time) {
  Variants found;
  if (auto own = as_written(graph)) found.all.push_back(std::move(*own));
  found.complete = VariantSearch(program, graph, forms, limits, stats, out_of_time).run(found.all);
  stats.variants += static_cast<std::int64_t>(found.all.size());
  return found;
}

}  // namespace mirage
