#include "core/variants.h"

#include <algorithm>
#include <map>
#include <queue>
#include <set>
#include <unordered_map>

#include "core/rates.h"

namespace mirage {
namespace {

struct State {
  std::vector<int> undecided;  // values, by falling rank
  std::vector<NfId> sums;      // formed so far, sorted; -1 in front: one of them waits
  double cost = 0, bound = 0;
  int parent = -1;
  int value = -1;  // decided last
  const Derivation* by = nullptr;
};

struct Key {
  std::vector<int> undecided;
  std::vector<NfId> sums;
  bool operator==(const Key&) const = default;
};

struct KeyHash {
  std::size_t operator()(const Key& k) const {
    std::size_t h = 1469598103934665603u;
    for (const auto* list : {&k.undecided, &k.sums}) {
      for (int x : *list)
        h = (h ^ static_cast<std::size_t>(x)) * 1099511628211u;
      h = (h ^ 0x9e37u) * 1099511628211u;
    }
    return h;
  }
};

double elements(const Program& p, AxisSet axes) {
  double n = 1;
  for (int a = 0; a < static_cast<int>(p.axes.size()); ++a)
    if (has(axes, a)) n *= static_cast<double>(p.axes[a].size);
  return n;
}

Variant build(const Values& values, const std::map<int, const Derivation*>& chosen, double cost) {
  Variant v;
  v.cost = cost;
  std::vector<int> order;
  for (auto& [value, d] : chosen)
    order.push_back(value);
  std::sort(order.begin(), order.end(), [&](int a, int b) {
    return std::pair(values.values[a].rank, a) < std::pair(values.values[b].rank, b);
  });
  std::unordered_map<int, int> at;
  for (int value : order) {
    const Derivation& d = *chosen.at(value);
    Variant::Node n{value,
                    d.op,
                    d.symbol,
                    d.axis,
                    d.node,
                    {},
                    values.values[value].axes,
                    values.values[value].number};
    for (int a : d.args)
      n.args.push_back(at.at(a));
    at[value] = static_cast<int>(v.nodes.size());
    v.nodes.push_back(std::move(n));
  }
  for (int o : values.outputs)
    v.outputs.push_back(at.at(o));
  return v;
}

// The program as written: the first derivation of each of its values.
std::optional<Variant> as_written(const Program& program, const Values& values) {
  std::map<int, const Derivation*> chosen;
  std::vector<int> todo = values.outputs;
  double cost = 0;
  while (!todo.empty()) {
    const int v = todo.back();
    todo.pop_back();
    if (chosen.count(v)) continue;
    const Value& value = values.values[v];
    if (value.derivations.empty()) return std::nullopt;
    chosen[v] = &value.derivations[0];
    cost += op_work(program, values.values, value, *chosen[v]);
    for (int a : chosen[v]->args)
      todo.push_back(a);
  }
  return build(values, chosen, cost);
}

// What each value costs by itself at least, and which of its derivations are worth trying: one that
// costs more by its own op and those of its arguments than another with everything below it is not
// (x·γ is scaled before the product with a matrix is formed, never the matrix).
struct Costs {
  std::vector<double> least;
  std::vector<std::vector<const Derivation*>> kept;

  Costs(const Program& program, const Values& values, Statistics& stats) {
    const std::vector<Value>& all = values.values;
    const std::size_t count = all.size();
    least.assign(count, 1e30);
    kept.resize(count);
    std::vector<int> order(count);
    for (std::size_t v = 0; v < count; ++v) {
      order[v] = static_cast<int>(v);
      for (const Derivation& d : all[v].derivations)
        least[v] = std::min(least[v], op_work(program, all, all[v], d));
    }
    std::sort(order.begin(), order.end(),
              [&](int a, int b) { return std::pair(all[a].rank, a) < std::pair(all[b].rank, b); });
    const auto leaf = [](const Derivation& d) { return d.op == Op::input || d.op == Op::constant; };
    std::vector<double> whole(count,
                              1e30);  // with everything below it, shared or not; leaves are free
    for (int v : order) {
      for (const Derivation& d : all[v].derivations) {
        double cost = leaf(d) ? 0 : op_work(program, all, all[v], d);
        for (int a : d.args)
          cost += whole[a];
        whole[v] = std::min(whole[v], cost);
      }
      for (const Derivation& d : all[v].derivations) {
        double cost = leaf(d) ? 0 : op_work(program, all, all[v], d);
        for (int a : d.args)
          if (all[a].derivations.empty() || !leaf(all[a].derivations[0])) cost += least[a];
        if (cost <= whole[v] * (1 + 1e-9))
          kept[v].push_back(&d);
        else
          ++stats.dominated;
      }
    }
  }
};

}  // namespace

Variant as_variant(const Program& program) {
  Variant v;
  for (std::size_t i = 0; i < program.nodes.size(); ++i) {
    const Node& from = program.nodes[i];
    const bool leaf = from.op == Op::input || from.op == Op::constant;
    Variant::Node n{static_cast<int>(i),
                    from.op,
                    from.op == Op::opaque ? from.symbol : -1,
                    from.axis,
                    leaf ? static_cast<int>(i) : -1,
                    from.args,
                    0,
                    from.op != Op::input};
    for (int axis : from.index)
      if (axis >= 0) n.axes |= bit(axis);
    for (int a : n.args) {
      n.axes |= v.nodes[a].axes;
      n.number = n.number && v.nodes[a].number;
    }
    if (n.reduces()) n.axes &= ~bit(n.axis);
    v.nodes.push_back(std::move(n));
  }
  v.outputs = program.outputs;
  return v;
}

// A product of two smaller values is what a contraction sums: tensor cores take both when there are
// rows enough.
static bool matrix_product(const Program& program, AxisSet a, AxisSet b) {
  return std::min(elements(program, a & ~b), elements(program, b & ~a)) > kMatrixRows;
}

double op_work(const Program& program, const std::vector<Value>& values, const Value& value,
               const Derivation& d) {
  switch (d.op) {
    case Op::input:
      return static_cast<double>(program.nodes[d.node].bytes) / kDramBytes;
    case Op::constant:
      return 0;
    case Op::sum:
    case Op::max: {
      const Value& arg = values[d.args[0]];
      for (const Derivation& p : arg.derivations)
        if (d.op == Op::sum && p.op == Op::mul &&
            matrix_product(program, values[p.args[0]].axes, values[p.args[1]].axes))
          return 0;
      return 0.25 * elements(program, arg.axes) / kScalarOps;
    }
    case Op::mul:
      return elements(program, value.axes) /
             (matrix_product(program, values[d.args[0]].axes, values[d.args[1]].axes) ? kMatrixOps
                                                                                      : kScalarOps);
    default:
      return (d.op == Op::opaque || d.op == Op::exp || d.op == Op::div ? 4.0 : 1.0) *
             elements(program, value.axes) / kScalarOps;
  }
}

std::vector<Variant> variants(const Program& program, const Values& values, NormalForms& forms,
                              const Limits& limits, Statistics& stats, bool& complete,
                              const std::function<bool()>& out_of_time) {
  std::vector<Variant> found;
  complete = true;
  if (auto own = as_written(program, values)) found.push_back(std::move(*own));

  const Costs costs(program, values, stats);
  const std::vector<double>& least = costs.least;
  const auto before = [&](int a, int b) {
    return std::pair(values.values[a].rank, a) > std::pair(values.values[b].rank, b);
  };

  // A*: values are decided from the highest rank down, so all users of a value are known when its
  // turn comes, and what is still to pay depends only on the undecided ones.
  std::vector<State> states;
  using Entry = std::pair<double, int>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> open;
  std::unordered_map<Key, double, KeyHash> best;
  const auto push = [&](State s) {
    auto [it, fresh] = best.try_emplace(Key{s.undecided, s.sums}, s.cost);
    if (!fresh) {
      if (it->second <= s.cost) {
        ++stats.dominated;
        return;
      }
      it->second = s.cost;
    }
    open.emplace(s.bound, static_cast<int>(states.size()));
    states.push_back(std::move(s));
  };
  State start;
  start.undecided = values.outputs;
  std::sort(start.undecided.begin(), start.undecided.end(), before);
  start.undecided.erase(std::unique(start.undecided.begin(), start.undecided.end()),
                        start.undecided.end());
  for (int v : start.undecided)
    start.bound += least[v];
  if (start.bound < 1e29) push(std::move(start));

  std::int64_t expansions = 0;
  int complete_ones = 0;
  while (!open.empty()) {
    const int at = open.top().second;
    open.pop();
    {
      const State& s = states[at];
      if (best.at(Key{s.undecided, s.sums}) < s.cost) {
        ++stats.dominated;
        continue;
      }
      if (s.undecided.empty()) {
        std::map<int, const Derivation*> chosen;
        for (int i = at; i >= 0; i = states[i].parent)
          if (states[i].value >= 0) chosen[states[i].value] = states[i].by;
        found.push_back(build(values, chosen, s.cost));
        if (++complete_ones == limits.max_variants) break;
        continue;
      }
    }
    if (++expansions > limits.max_expansions || (expansions % 1024 == 0 && out_of_time())) {
      complete = false;
      break;
    }
    const int v = states[at].undecided.front();
    for (const Derivation* by : costs.kept[v]) {
      const Derivation& d = *by;
      const State& s = states[at];  // push moves the states
      State n;
      n.cost = s.cost + op_work(program, values.values, values.values[v], d);
      n.bound = s.bound - least[v] + (n.cost - s.cost);
      n.undecided.assign(s.undecided.begin() + 1, s.undecided.end());
      for (int a : d.args) {
        const auto place = std::lower_bound(n.undecided.begin(), n.undecided.end(), a, before);
        if (place != n.undecided.end() && *place == a) continue;
        n.undecided.insert(place, a);
        n.bound += least[a];
      }
      if (n.bound >= 1e29) continue;
      n.sums = s.sums;
      if (d.op == Op::sum || d.op == Op::max) {
        bool waits = false;
        const NfId core = forms.core(values.values[v].form, d.axis, waits);
        n.sums.insert(std::upper_bound(n.sums.begin(), n.sums.end(), core), core);
        if (waits && n.sums.front() != -1) n.sums.insert(n.sums.begin(), -1);
      }
      n.parent = at;
      n.value = v;
      n.by = &d;
      push(std::move(n));
    }
  }
  stats.expansions += expansions;
  stats.variants += static_cast<std::int64_t>(found.size());
  return found;
}

}  // namespace mirage
