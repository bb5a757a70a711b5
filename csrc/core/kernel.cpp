#include "core/kernel.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "core/rates.h"

namespace mirage {

KernelSearch::KernelSearch(const Program& program, const Variant& variant, const Limits& limits,
                           Statistics& stats)
    : program_(program), v_(variant), limits_(limits), stats_(stats) {}

double KernelSearch::extent(AxisSet axes) const {
  double n = 1;
  for (int a = 0; a < static_cast<int>(program_.axes.size()); ++a)
    if (has(axes, a)) n *= static_cast<double>(program_.axes[a].size);
  return n;
}

NodeSet KernelSearch::needed(const KernelTask& task) const {
  NodeSet found = task.outputs;
  for (int n = static_cast<int>(v_.nodes.size()) - 1; n >= 0; --n) {
    if (!found[n] || task.stored[n]) continue;
    for (int a : v_.nodes[n].args)
      found.set(a);
  }
  return found;
}

bool KernelSearch::partial(int n, const KernelChoice& c) const {
  return c.split >= 0 && v_.nodes[n].reduces() && v_.nodes[n].axis == c.split;
}

// When each value is ready: in which pass over the loop axis (values that carry it), or after how
// many passes.
KernelSearch::Timing KernelSearch::timing(const std::vector<int>& nodes, const NodeSet& leaves,
                                          int loop) const {
  Timing t;
  t.stage.assign(v_.nodes.size(), 0);
  for (int n : nodes) {
    const Variant::Node& node = v_.nodes[n];
    int at = 0;
    if (computed(n, leaves)) {
      for (int a : node.args)
        at = std::max(at, t.stage[a]);
      if (node.reduces() && node.axis == loop) at = t.stage[node.args[0]] + 1;
    }
    t.stage[n] = at;
    t.loops = std::max(t.loops, carries(n, loop) ? at + 1 : at);
  }
  return t;
}

std::vector<KernelChoice> KernelSearch::choices(const KernelTask& task, std::size_t most) const {
  const NodeSet all = needed(task);
  std::vector<int> nodes;
  AxisSet used = 0, every = ~AxisSet{0}, reduced = 0;
  int ops = 0;
  for (int n = 0; n < static_cast<int>(v_.nodes.size()); ++n) {
    if (!all[n]) continue;
    nodes.push_back(n);
    used |= v_.nodes[n].axes;
    if (task.outputs[n]) every &= v_.nodes[n].axes;
    if (!computed(n, task.stored)) continue;
    ++ops;
    if (v_.nodes[n].reduces()) reduced |= bit(v_.nodes[n].axis);
  }
  std::vector<KernelChoice> found;
  if (ops > limits_.max_block_ops) return found;
  const AxisSet grid = every & used & ~reduced;
  std::vector<int> loops{-1}, splits;
  for (int a = 0; a < static_cast<int>(program_.axes.size()); ++a)
    if (has(used & ~grid, a)) loops.push_back(a);
  for (int loop : loops) {
    for (int split : loops) {
      std::optional<KernelChoice> best;
      for (std::int64_t part : kTileParts) {
        ++stats_.kernels;
        auto choice =
            evaluate(task, nodes, task.stored, grid, loop, split, split == loop ? 0 : part);
        if (!choice) {
          ++stats_.illegal;
          break;
        }
        if (loop < 0 && split >= 0) {  // walked where that costs nothing: a schedule may hold it
                                       // whole too, and a longer axis is walked
          auto walked = evaluate(task, nodes, task.stored, grid, split, split, part);
          if (walked && walked->cost <= choice->cost) choice = std::move(walked);
        }
        if (!best || choice->cost < best->cost) best = std::move(choice);
        if (split < 0 || split == loop) break;  // a loop axis is dealt out as the grid needs it
      }
      if (best) found.push_back(std::move(*best));
    }
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const KernelChoice& a, const KernelChoice& b) { return a.cost < b.cost; });
  if (found.size() > most) found.resize(most);
  return found;
}

std::optional<KernelChoice> KernelSearch::evaluate(const KernelTask& task,
                                                   const std::vector<int>& nodes,
                                                   const NodeSet& leaves, AxisSet grid, int loop,
                                                   int split, std::int64_t part) const {
  const int axes = static_cast<int>(program_.axes.size());
  KernelChoice c;
  c.loop = loop;
  c.split = split;
  c.roles.assign(axes, Role::tile);
  for (int a = 0; a < axes; ++a)
    if (has(grid, a)) c.roles[a] = Role::grid;
  if (loop >= 0) c.roles[loop] = Role::loop;
  AxisSet used = 0;
  for (int n : nodes)
    used |= v_.nodes[n].axes;
  for (std::size_t r = 0; r < limits_.forced.size(); ++r)
    for (int a = 0; a < axes; ++a)
      if (has(limits_.forced[r] & used, a) && c.roles[a] != static_cast<Role>(r))
        return std::nullopt;

  // what is reduced over the split axis is partial: stored, and used by nothing in here
  std::vector<int> uses(v_.nodes.size(), 0);
  for (int n : nodes)
    if (computed(n, leaves))
      for (int a : v_.nodes[n].args)
        ++uses[a];
  if (split >= 0) {
    for (int n : nodes) {
      const bool sums = computed(n, leaves) && v_.nodes[n].reduces() && v_.nodes[n].axis == split;
      if (sums && (uses[n] > 0 || !task.outputs[n] || task.final[n])) return std::nullopt;
      if (task.outputs[n] && !sums && !carries(n, split)) return std::nullopt;
    }
  }
  const bool has_loop = loop >= 0;
  const Timing t = timing(nodes, leaves, loop);
  if (has_loop && (t.loops == 0 || t.loops > kMaxPasses)) return std::nullopt;

  // tile axes are held whole, or a part of them
  const auto held = [&](AxisSet s) {
    double n = 1;
    for (int a = 0; a < axes; ++a)
      if (has(s, a) && c.roles[a] == Role::tile)
        n *= a == split
                 ? std::min(static_cast<double>(part), static_cast<double>(program_.axes[a].size))
                 : static_cast<double>(program_.axes[a].size);
    return n;
  };
  // a product that only a sum over a tile axis reads is never formed whole, unless both factors
  // carry another tile axis, or the loop: a batch of products is done by multiply-adds, in each
  // step of a loop
  double widest = 1;
  for (int n : nodes) {
    double elements = held(v_.nodes[n].axes);
    if (v_.nodes[n].op == Op::mul && uses[n] == 1 && !task.outputs[n] && computed(n, leaves)) {
      AxisSet over = 0;
      for (int u : nodes)
        if (computed(u, leaves) && v_.nodes[u].op == Op::sum && v_.nodes[u].args[0] == n)
          over = bit(v_.nodes[u].axis);
      const AxisSet a = v_.nodes[v_.nodes[n].args[0]].axes, b = v_.nodes[v_.nodes[n].args[1]].axes;
      const AxisSet both = a & b & ~over;
      const bool batch = a != b && (held(both) > 1 || (has_loop && has(both, loop)));
      if (over && !batch) continue;
      if (over && carries(n, loop))
        elements *= static_cast<double>(std::min(kLoopTile, program_.axes[loop].size));
    }
    widest = std::max(widest, elements);
  }
  if (widest > static_cast<double>(kLargestTile)) return std::nullopt;

  // blocks: an axis that the largest input carries is cut fine, one that shares its tiles is not.
  // Where there is a loop, of the inputs that it walks: blocks that are fine for what follows the
  // loop would each walk all of it
  double most = 0;
  AxisSet largest = 0;
  for (int n : nodes) {
    if (computed(n, leaves) || (has_loop && !carries(n, loop))) continue;
    const double e = extent(v_.nodes[n].axes);
    if (e > most) {
      most = e;
      largest = v_.nodes[n].axes;
    } else if (e == most)
      largest &= v_.nodes[n].axes;  // of several, what all carry: their order says nothing
  }
  double blocks = 1;
  for (int a = 0; a < axes; ++a) {
    if (!has(grid, a)) continue;
    const double size = static_cast<double>(program_.axes[a].size);
    const double fine = size > 512 ? 4 : 1;
    bool again = !has(largest, a);  // or far more would be read again than there is to read
    for (int n : nodes)
      if (!computed(n, leaves) && has_loop && carries(n, loop) && !has(v_.nodes[n].axes, a))
        again = again || extent(v_.nodes[n].axes) * size / fine > kMostAgain * most;
    const double tile = again ? static_cast<double>(kNominalTile) : fine;
    blocks *= std::max(1.0, std::ceil(size / tile));
  }
  const auto size_of = [&](int a) { return program_.axes[a].size; };
  if (split >= 0) {
    const std::int64_t size = size_of(split);
    std::int64_t parts = part > 0 ? (size + part - 1) / part : 0;
    if (parts == 0) {  // as the grid needs it
      parts = (size + kPart - 1) / kPart;
      parts = std::min(parts, kMaxParts);
      std::int64_t wanted = 1;
      while (wanted < parts && blocks * static_cast<double>(wanted) < 2 * kSms)
        wanted *= 2;
      parts = std::min(parts, wanted);
    }
    while (parts > 1 && (parts - 1) * ((size + parts - 1) / parts) >= size)
      --parts;  // no part is empty
    if (parts < 2) return std::nullopt;
    c.parts = parts;
    blocks *= static_cast<double>(parts);
  }

  // bytes, work and passes
  double dram = 0, cache = 0, work = 0;
  const auto copies_of = [&](AxisSet s) {
    double copies = 1;
    for (int a = 0; a < axes; ++a)
      if (has(grid, a) && !has(s, a))
        copies *=
            std::max(1.0, static_cast<double>(size_of(a)) / static_cast<double>(kNominalTile));
    if (split >= 0 && !has(s, split)) copies *= static_cast<double>(c.parts);
    return copies;
  };
  std::vector<std::set<int>> passes(v_.nodes.size());
  for (int stage = 0; has_loop && stage < t.loops; ++stage)
    for (int n : body(nodes, leaves, task.outputs, t, loop, stage))
      for (int a : v_.nodes[n].args)
        if (!computed(a, leaves) && carries(a, loop)) passes[a].insert(stage);
  for (int n : nodes) {
    const Variant::Node& node = v_.nodes[n];
    const double whole = extent(node.axes);
    if (!computed(n, leaves)) {
      if (node.op == Op::constant) continue;
      const bool input = node.op == Op::input;
      const double bytes =
          input ? static_cast<double>(program_.nodes[node.source].bytes) : 4 * whole;
      const double again = std::max<double>(0, static_cast<double>(passes[n].size()) - 1);
      dram += bytes;
      cache += bytes * (copies_of(node.axes) * (1 + again) - 1);
      if (again > 0 && bytes > 30e6) dram += bytes * again;  // beyond what the L2 keeps
      continue;
    }
    // every block computes its own tile of what does not carry a grid axis
    const double e = whole * copies_of(node.axes);
    if (task.outputs[n]) {
      const bool parts = split >= 0 && node.reduces() && node.axis == split;
      dram += (task.final[n] ? 2 : 4) * whole * (parts ? static_cast<double>(c.parts) : 1.0);
      if (parts) cache += 4 * whole * static_cast<double>(c.parts);
    }
    switch (node.op) {
      case Op::mul: {
        const AxisSet a = v_.nodes[node.args[0]].axes, b = v_.nodes[node.args[1]].axes;
        const bool matrix = std::min(extent(a & ~b), extent(b & ~a)) > kMatrixRows;
        work += e / (matrix ? kMatrixOps : kScalarOps);
        break;
      }
      case Op::sum:
      case Op::max: {
        const Variant::Node& arg = v_.nodes[node.args[0]];
        bool matrix = false;
        if (node.op == Op::sum && arg.op == Op::mul) {
          const AxisSet a = v_.nodes[arg.args[0]].axes, b = v_.nodes[arg.args[1]].axes;
          matrix = std::min(extent(a & ~b), extent(b & ~a)) > kMatrixRows;
        }
        if (!matrix) work += 0.25 * extent(arg.axes) * copies_of(arg.axes) / kScalarOps;
        break;
      }
      default:
        work += (node.op == Op::opaque || node.op == Op::exp || node.op == Op::div ? 4.0 : 1.0) *
                e / kScalarOps;
    }
  }
  const double busy = std::min(1.0, blocks / kSms);
  const double rate = std::min(kDramBytes, std::min(blocks, kSms) * kSmBytes);
  const double times[] = {dram / rate, (dram + cache) / kCacheBytes / busy, work / busy};
  const double longest = *std::max_element(std::begin(times), std::end(times));
  c.cost = kLaunchUs + kLatencyUs + longest + 0.1 * (times[0] + times[1] + times[2] - longest) +
           kStageUs * std::max(0, t.loops - 1);
  // holding a long axis whole costs registers that walking it does not; a schedule may hold a loop
  // axis whole too
  c.cost += 0.02 * std::log2(std::max(1.0, widest / 64));
  return c;
}

// Values that carry the loop axis and are computed in pass `stage`, in order: what its accumulators
// and outputs need.
std::vector<int> KernelSearch::body(const std::vector<int>& nodes, const NodeSet& leaves,
                                    const NodeSet& outputs, const Timing& t, int loop,
                                    int stage) const {
  NodeSet wanted;
  for (int n : nodes) {
    if (!computed(n, leaves)) continue;
    const Variant::Node& node = v_.nodes[n];
    if (node.reduces() && node.axis == loop && t.stage[node.args[0]] == stage)
      wanted.set(node.args[0]);
    if (carries(n, loop) && t.stage[n] == stage && outputs[n]) wanted.set(n);
  }
  std::vector<int> out;
  for (auto it = nodes.rbegin(); it != nodes.rend(); ++it) {
    if (!wanted[*it] || !computed(*it, leaves)) continue;
    out.push_back(*it);
    for (int a : v_.nodes[*it].args)
      if (carries(a, loop)) wanted.set(a);
  }
  std::reverse(out.begin(), out.end());
  return out;
}

FoundKernel KernelSearch::emit(const KernelTask& task, const KernelChoice& choice,
                               const std::vector<std::pair<int, KernelChoice>>& stored_by) const {
  const NodeSet all = needed(task);
  std::vector<int> nodes;
  for (int n = 0; n < static_cast<int>(v_.nodes.size()); ++n)
    if (all[n]) nodes.push_back(n);
  const Timing t = timing(nodes, task.stored, choice.loop);
  const int count = static_cast<int>(v_.nodes.size());
  FoundKernel k;
  k.roles = choice.roles;
  k.split = choice.split;
  k.parts = choice.parts;
  for (int n : nodes) {
    const Variant::Node& node = v_.nodes[n];
    k.axes |= node.axes;
    if (computed(n, task.stored)) continue;
    FoundLeaf leaf{n, task.stored[n] ? -1 : node.source, -1, node.op};
    for (auto& [stored, by] : stored_by)
      if (stored == n && task.stored[n] && partial(n, by)) leaf.partial = by.split;
    k.leaves.push_back(leaf);
  }
  // a value of the loop that two passes need is computed in both, under two names
  std::map<std::pair<int, int>, int> name;
  const auto op = [&](int n, int stage) {
    const Variant::Node& node = v_.nodes[n];
    FoundOp f{n, node.op, node.symbol, {}, node.axis};
    for (int a : node.args) {
      const auto it = name.find({a, stage});
      f.args.push_back(it == name.end() ? a : it->second);
    }
    return f;
  };
  const auto accumulates = [&](int n) {
    return choice.loop >= 0 && computed(n, task.stored) && v_.nodes[n].reduces() &&
           v_.nodes[n].axis == choice.loop;
  };
  const auto plain = [&](int after) {
    FoundStage stage;
    for (int n : nodes)
      if (computed(n, task.stored) && !carries(n, choice.loop) && !accumulates(n) &&
          t.stage[n] == after)
        stage.body.push_back(op(n, -1));
    if (!stage.body.empty()) k.stages.push_back(std::move(stage));
  };
  std::set<int> done;
  for (int pass = 0; pass < t.loops; ++pass) {
    plain(pass);
    FoundStage stage;
    stage.loop = choice.loop;
    for (int n : body(nodes, task.stored, task.outputs, t, choice.loop, pass)) {
      FoundOp f = op(n, pass);
      if (!done.insert(n).second) f.out = name[{n, pass}] = n + pass * count;
      stage.body.push_back(std::move(f));
    }
    for (int n : nodes)
      if (accumulates(n) && t.stage[v_.nodes[n].args[0]] == pass)
        stage.accumulators.push_back(op(n, pass));
    k.stages.push_back(std::move(stage));
  }
  plain(t.loops);
  const auto stored_name = [&](int n) {
    const auto it = carries(n, choice.loop) ? name.find({n, t.stage[n]}) : name.end();
    return it == name.end() ? n : it->second;
  };
  for (int n : nodes) {
    if (!task.outputs[n]) continue;
    FoundOutput out{stored_name(n), n, -1};
    if (!task.final[n])
      k.outputs.push_back(out);
    else
      for (out.output = 0; out.output < static_cast<int>(v_.outputs.size()); ++out.output)
        if (v_.outputs[out.output] == n) k.outputs.push_back(out);
  }
  return k;
}

}  // namespace mirage
