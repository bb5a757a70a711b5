#include "core/partition.h"

#include <algorithm>
#include <map>
#include <set>

namespace mirage {
namespace {

// Rates of one H200 for ranking only (per µs); tuning measures. FACTS: 4.47 TB/s; 132 SMs x 128 lanes x 1.7 GHz.
constexpr double kDramBytes = 4.47e6, kCacheBytes = 12e6, kScalarOps = 28e6, kMatrixOps = 200e6;
constexpr double kLaunchUs = 1.16, kStageUs = 1.0;
constexpr std::int64_t kNominalTile = 64;      // of a grid axis
constexpr std::int64_t kLargestTileAxis = 16384;
constexpr std::int64_t kShortAxis = 64;        // held whole without a second thought
constexpr int kMaxLoopStages = 4;
constexpr int kMatrixRows = 4;                 // more rows than this go to the tensor cores

struct Solution {
  double cost = 0;
  std::vector<int> values;                     // needed, ascending rank
  std::map<int, const Derivation*> chosen;
};

class Search {
 public:
  Search(const Program& p, const Values& v, const std::vector<Role>& roles, const Limits& limits, Statistics& stats,
         const std::function<bool()>& out_of_time)
      : program_(p), v_(v.values), outputs_(v.outputs), roles_(roles), limits_(limits), stats_(stats), out_of_time_(out_of_time) {
    for (int a = 0; a < static_cast<int>(roles.size()); ++a) {
      if (roles[a] == Role::loop) loop_ = a;
      if (roles[a] == Role::grid) grid_ |= bit(a);
    }
    least_.reserve(v_.size());
    for (const Value& value : v_) {
      double least = 1e30;
      for (const Derivation& d : value.derivations)
        if (legal(value, d)) least = std::min(least, work(value, d));
      least_.push_back(least);
    }
  }

  std::vector<Candidate> run(bool& complete) {
    for (int o : outputs_) require(o);
    branch();
    complete = !stopped_;
    std::vector<std::pair<double, const Solution*>> ordered;
    for (auto& [signature, s] : best_) ordered.emplace_back(s.cost, &s);
    std::stable_sort(ordered.begin(), ordered.end(), [](auto& a, auto& b) { return a.first < b.first; });
    std::vector<Candidate> found;
    for (auto& [cost, s] : ordered) {
      if (static_cast<int>(found.size()) == limits_.max_candidates) break;
      found.push_back(emit(*s));
    }
    return found;
  }

 private:
  bool carries_loop(int v) const { return loop_ >= 0 && has(v_[v].axes, loop_); }

  double elements(AxisSet axes) const {  // of all blocks together
    double n = 1;
    for (int a = 0; a < static_cast<int>(roles_.size()); ++a) {
      const double size = static_cast<double>(program_.axes[a].size);
      if (has(axes, a)) n *= size;
      else if (has(grid_, a)) n *= std::max(1.0, size / kNominalTile);
    }
    return n;
  }

  bool legal(const Value& value, const Derivation& d) const {
    if ((d.op == Op::sum || d.op == Op::max) && roles_[d.axis] == Role::grid) return false;
    double held = 1;
    for (int a = 0; a < static_cast<int>(roles_.size()); ++a)
      if (has(value.axes, a) && roles_[a] == Role::tile) held *= static_cast<double>(program_.axes[a].size);
    return held <= kLargestTileAxis;
  }

  double work(const Value& value, const Derivation& d) const {
    switch (d.op) {
      case Op::input: {
        const double bytes = static_cast<double>(program_.nodes[d.node].bytes);
        double copies = 1;
        for (int a = 0; a < static_cast<int>(roles_.size()); ++a)
          if (has(grid_, a) && !has(value.axes, a)) copies *= std::max(1.0, static_cast<double>(program_.axes[a].size) / kNominalTile);
        return bytes / kDramBytes + bytes * (copies - 1) / kCacheBytes;
      }
      case Op::constant: return 0;
      case Op::sum: case Op::max: return 0.25 * elements(v_[d.args[0]].axes) / kScalarOps;
      case Op::mul: {
        // a product of two smaller values is what a contraction sums: tensor cores take it when there are rows enough
        const AxisSet a = v_[d.args[0]].axes, b = v_[d.args[1]].axes;
        double rows = 1;
        for (int x = 0; x < static_cast<int>(roles_.size()); ++x)
          if (has(value.axes & ~(a & b), x)) rows = rows == 1 ? static_cast<double>(program_.axes[x].size) : std::min(rows, static_cast<double>(program_.axes[x].size));
        const bool matrix = !subset(a, b) && !subset(b, a) && rows > kMatrixRows;
        return elements(value.axes) / (matrix ? kMatrixOps : kScalarOps);
      }
      default: return (d.op == Op::opaque || d.op == Op::exp || d.op == Op::div ? 4.0 : 1.0) * elements(value.axes) / kScalarOps;
    }
  }

  void require(int v) {
    if (needed_.insert({v_[v].rank, v}).second) { bound_ += least_[v]; }
  }

  double worst_kept() const {
    if (static_cast<int>(best_.size()) < limits_.max_candidates) return 1e30;
    std::vector<double> costs;
    for (auto& [s, x] : best_) costs.push_back(x.cost);
    std::nth_element(costs.begin(), costs.begin() + limits_.max_candidates - 1, costs.end());
    return costs[limits_.max_candidates - 1];
  }

  // Values are decided from the highest rank down, so all users of a value are known when its turn comes.
  void branch() {
    if (stopped_) return;
    if (++expansions_ > limits_.max_expansions || (expansions_ % 1024 == 0 && out_of_time_())) { stopped_ = true; return; }
    if (bound_ >= threshold_) { ++stats_.cost_pruned; return; }
    auto next = needed_.rbegin();
    while (next != needed_.rend() && chosen_.count(next->second)) ++next;
    if (next == needed_.rend()) { finish(); return; }
    const int v = next->second;
    std::vector<const Derivation*> options;
    for (const Derivation& d : v_[v].derivations)
      if (legal(v_[v], d)) options.push_back(&d);
    std::stable_sort(options.begin(), options.end(), [&](auto* a, auto* b) { return work(v_[v], *a) < work(v_[v], *b); });
    for (const Derivation* d : options) {
      if (d->op != Op::input && d->op != Op::constant && ops_ >= limits_.max_block_ops) continue;
      const double saved = bound_;
      std::vector<std::pair<int, int>> added;
      bound_ += work(v_[v], *d) - least_[v];
      for (int a : d->args)
        if (least_[a] < 1e29) {
          if (needed_.insert({v_[a].rank, a}).second) { added.emplace_back(v_[a].rank, a); bound_ += least_[a]; }
        } else bound_ = 1e30;
      chosen_[v] = d;
      ops_ += d->op != Op::input && d->op != Op::constant;
      branch();
      ops_ -= d->op != Op::input && d->op != Op::constant;
      chosen_.erase(v);
      for (auto& a : added) needed_.erase(a);
      bound_ = saved;
    }
  }

  struct Timing { std::map<int, int> stage; int loops = 0; };

  // When each value is ready: in which pass over the loop axis (values that carry it), or after how many passes.
  Timing timing(const Solution& s) const { return timing(s, loop_); }

  Timing timing(const Solution& s, int loop) const {
    Timing t;
    for (int v : s.values) {
      const Derivation& d = *s.chosen.at(v);
      int at = 0;
      for (int a : d.args) at = std::max(at, t.stage[a]);
      if ((d.op == Op::sum || d.op == Op::max) && d.axis == loop) at = t.stage[d.args[0]] + 1;
      t.stage[v] = at;
      t.loops = std::max(t.loops, loop >= 0 && has(v_[v].axes, loop) ? at + 1 : at);
    }
    return t;
  }

  // Holding a long axis whole gains nothing over walking it when one pass is enough: a schedule may hold it whole too.
  bool twin_walks(const Solution& s, const Timing& t) const {
    if (!limits_.forced.empty()) return false;
    const std::int64_t walked = loop_ < 0 ? 1 : program_.axes[loop_].size;
    AxisSet stored = 0, used = 0;
    for (int o : outputs_) stored |= v_[o].axes;
    for (int v : s.values) used |= v_[v].axes;
    for (int a = 0; a < static_cast<int>(roles_.size()); ++a)
      if (roles_[a] == Role::tile && has(used & ~stored, a) && program_.axes[a].size > std::max(walked, kShortAxis) &&
          timing(s, a).loops <= std::max(1, t.loops))
        return true;
    return false;
  }

  void finish() {
    ++stats_.kernels;
    Solution s;
    for (auto& [rank, v] : needed_) s.values.push_back(v);
    s.chosen = chosen_;
    const Timing t = timing(s);
    if (loop_ >= 0 && (t.loops == 0 || t.loops > kMaxLoopStages)) return;
    if (twin_walks(s, t)) { ++stats_.duplicates; return; }
    s.cost = kLaunchUs + bound_ + kStageUs * std::max(0, t.loops - 1);
    // a further pass reads its inputs again, from the cache if they are small
    const auto passes = input_passes(s, t);
    for (auto [v, n] : passes) s.cost += (n - 1) * static_cast<double>(program_.nodes[s.chosen.at(v)->node].bytes) / kDramBytes;
    std::vector<int> signature{t.loops};
    for (int v : s.values) {
      const Derivation& d = *s.chosen.at(v);
      if ((d.op == Op::sum || d.op == Op::max)) signature.push_back(v_[v].shape);
    }
    std::sort(signature.begin() + 1, signature.end());
    auto [it, fresh] = best_.try_emplace(std::move(signature), s);
    if (!fresh) {
      ++stats_.duplicates;
      if (s.cost < it->second.cost) it->second = s;
    }
    threshold_ = worst_kept();
    std::erase_if(best_, [&](const auto& kept) { return kept.second.cost > threshold_; });  // it only falls
  }

  std::map<int, int> input_passes(const Solution& s, const Timing& t) const {
    std::map<int, std::set<int>> read;
    for (int stage = 0; stage < t.loops; ++stage)
      for (int v : body(s, t, stage)) 
        for (int a : s.chosen.at(v)->args)
          if (s.chosen.at(a)->op == Op::input && carries_loop(a)) read[a].insert(stage);
    std::map<int, int> n;
    for (auto& [v, stages] : read) n[v] = static_cast<int>(stages.size());
    return n;
  }

  bool accumulates(const Derivation& d) const { return loop_ >= 0 && (d.op == Op::sum || d.op == Op::max) && d.axis == loop_; }
  static bool leaf(const Derivation& d) { return d.op == Op::input || d.op == Op::constant; }

  // Values that carry the loop axis and are computed in pass `stage`, in order: what its accumulators and outputs need.
  std::vector<int> body(const Solution& s, const Timing& t, int stage) const {
    std::set<int> wanted;
    for (auto it = s.values.rbegin(); it != s.values.rend(); ++it) {
      const Derivation& d = *s.chosen.at(*it);
      if (accumulates(d) && t.stage.at(d.args[0]) == stage) wanted.insert(d.args[0]);
      if (carries_loop(*it) && t.stage.at(*it) == stage && std::find(outputs_.begin(), outputs_.end(), *it) != outputs_.end()) wanted.insert(*it);
    }
    std::vector<int> out;
    for (auto it = s.values.rbegin(); it != s.values.rend(); ++it) {
      if (wanted.count(*it) == 0 || leaf(*s.chosen.at(*it))) continue;
      out.push_back(*it);
      for (int a : s.chosen.at(*it)->args) if (carries_loop(a)) wanted.insert(a);
    }
    std::reverse(out.begin(), out.end());
    return out;
  }

  Candidate emit(const Solution& s) const {
    const Timing t = timing(s);
    const int count = static_cast<int>(v_.size());
    Candidate c;
    c.roles = roles_;
    c.cost_us = s.cost;
    for (int v : s.values) {
      const Derivation& d = *s.chosen.at(v);
      c.axes |= v_[v].axes;
      if (leaf(d)) c.leaves.push_back({v, d.node});
    }
    // a value of the loop that two passes need is computed in both, under two names
    std::map<std::pair<int, int>, int> name;
    const auto op = [&](int v, int stage) {
      const Derivation& d = *s.chosen.at(v);
      FoundOp f{v, d.op, d.symbol, {}, d.axis, v_[v].axes};
      for (int a : d.args) {
        const auto it = name.find({a, stage});
        f.args.push_back(it == name.end() ? a : it->second);
      }
      return f;
    };
    const auto plain = [&](int after) {
      FoundStage stage;
      for (int v : s.values) {
        const Derivation& d = *s.chosen.at(v);
        if (!leaf(d) && !carries_loop(v) && !accumulates(d) && t.stage.at(v) == after) stage.body.push_back(op(v, -1));
      }
      if (!stage.body.empty()) c.stages.push_back(stage);
    };
    std::set<int> computed;
    for (int pass = 0; pass < t.loops; ++pass) {
      plain(pass);
      FoundStage stage;
      stage.loop = loop_;
      for (int v : body(s, t, pass)) {
        FoundOp f = op(v, pass);
        if (!computed.insert(v).second) f.out = name[{v, pass}] = v + (pass * count);
        stage.body.push_back(std::move(f));
      }
      for (int v : s.values) {
        const Derivation& d = *s.chosen.at(v);
        if (accumulates(d) && t.stage.at(d.args[0]) == pass) stage.accumulators.push_back(op(v, pass));
      }
      c.stages.push_back(std::move(stage));
    }
    plain(t.loops);
    for (int o : outputs_) {
      const int pass = t.stage.at(o);
      const auto it = carries_loop(o) ? name.find({o, pass}) : name.end();
      c.outputs.push_back(it == name.end() ? o : it->second);
    }
    return c;
  }

  const Program& program_;
  const std::vector<Value>& v_;
  const std::vector<int>& outputs_;
  const std::vector<Role>& roles_;
  const Limits& limits_;
  Statistics& stats_;
  const std::function<bool()>& out_of_time_;
  int loop_ = -1;
  AxisSet grid_ = 0;
  std::vector<double> least_;                    // the least a value costs by itself
  std::set<std::pair<int, int>> needed_;         // rank, value
  std::map<int, const Derivation*> chosen_;
  std::map<std::vector<int>, Solution> best_;    // by signature: which sums are formed (up to constants), in how many passes
  double bound_ = 0, threshold_ = 1e30;
  int ops_ = 0;
  std::int64_t expansions_ = 0;
  bool stopped_ = false;
};

}  // namespace

std::vector<std::vector<Role>> role_assignments(const Program& program, const Values& values, const Limits& limits) {
  AxisSet every = ~AxisSet{0}, used = 0, reduced = 0;
  for (int o : values.outputs) every &= values.values[o].axes;
  for (const Value& v : values.values) {
    used |= v.axes;
    for (const Derivation& d : v.derivations)
      if (d.op == Op::sum || d.op == Op::max) reduced |= bit(d.axis);
  }
  std::vector<std::vector<Role>> found{{}};
  for (int a = 0; a < static_cast<int>(program.axes.size()); ++a) {
    std::vector<Role> options;
    if (!has(used, a)) options = {Role::tile};
    else {
      if (has(every, a)) options.push_back(Role::grid);
      if (!has(every, a) || has(reduced, a)) {
        options.push_back(Role::loop);
        if (program.axes[a].size <= kLargestTileAxis) options.push_back(Role::tile);
      }
      for (int r = 0; r < static_cast<int>(limits.forced.size()); ++r)
        if (has(limits.forced[r], a)) {
          const bool possible = std::find(options.begin(), options.end(), static_cast<Role>(r)) != options.end();
          options.assign(possible ? 1 : 0, static_cast<Role>(r));
        }
    }
    std::vector<std::vector<Role>> next;
    for (const auto& roles : found)
      for (Role r : options) {
        if (r == Role::loop && std::find(roles.begin(), roles.end(), Role::loop) != roles.end()) continue;
        next.push_back(roles);
        next.back().push_back(r);
      }
    found = std::move(next);
  }
  return found;
}

std::vector<Candidate> kernels(const Program& program, const Values& values, const std::vector<Role>& roles,
                               const Limits& limits, Statistics& stats, bool& complete, const std::function<bool()>& out_of_time) {
  return Search(program, values, roles, limits, stats, out_of_time).run(complete);
}

}  // namespace mirage
