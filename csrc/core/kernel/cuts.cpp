#include "core/kernel/cuts.h"

#include <algorithm>

#include "core/kernel/tile_sizes.h"

namespace mirage {
namespace {

constexpr std::size_t kMaxCuts = 24;
constexpr double kRepeatedUs =
    0.5;  // scalar work repeated by other blocks that makes a cut worth it

class CutFinder {
 public:
  CutFinder(const Program& program, const Variant& variant, const GpuRates& gpu)
      : program_(program), variant_(variant), gpu_(gpu) {
    const std::size_t count = variant.nodes.size();
    users_.resize(count);
    summed_.resize(count);
    scalar_ops_.resize(count);
    for (const NodeId id : variant.nodes.ids()) {
      const Variant::Node& node = variant.nodes[id];
      summed_[id] = node.reduces();
      if (!node.is_leaf()) scalar_ops_[id] = scalar_ops(node.op);
      for (const NodeId arg : node.args) {
        users_[arg].push_back(id);
        summed_[id] = summed_[id] || summed_[arg];
        scalar_ops_[id] += scalar_ops_[arg];
      }
    }
  }

  std::vector<NodeId> run() const {
    std::vector<NodeId> cuts;
    for (const NodeId id : variant_.nodes.ids())
      if (is_worth_storing(id)) cuts.push_back(id);
    return smallest(std::move(cuts));
  }

 private:
  bool is_worth_storing(NodeId id) const {
    const Variant::Node& node = variant_.nodes[id];
    if (node.is_leaf() || node.is_number) return false;
    if (!summed_[id] && !is_repeated_work(id)) return false;
    if (node.reduces()) return true;
    if (is_output(id)) return !users_[id].empty();
    return !is_passed_on(id) && !is_summed_product(id);
  }

  bool is_output(NodeId id) const {
    return std::find(variant_.outputs.begin(), variant_.outputs.end(), id) !=
           variant_.outputs.end();
  }

  // True if a user that carries more axes would repeat much scalar work in other blocks.
  bool is_repeated_work(NodeId id) const {
    const Variant::Node& node = variant_.nodes[id];
    return std::any_of(users_[id].begin(), users_[id].end(), [&](NodeId user) {
      const AxisSet wider = variant_.nodes[user].axes;
      return !wider.within(node.axes) &&
             scalar_ops_[id] * program_.elements(wider) / kNominalTile / gpu_.scalar_ops >
                 kRepeatedUs;
    });
  }

  // True if one op of no more axes goes on with the value.
  bool is_passed_on(NodeId id) const {
    if (users_[id].size() != 1) return false;
    const Variant::Node& user = variant_.nodes[users_[id][0]];
    return !user.reduces() && user.axes.within(variant_.nodes[id].axes);
  }

  // True if the value is a product that is best summed where it is formed. A product that is no
  // larger than a sum that it scales may be stored.
  bool is_summed_product(NodeId id) const {
    const Variant::Node& node = variant_.nodes[id];
    if (node.op != Op::mul || users_[id].size() != 1) return false;
    if (!variant_.nodes[users_[id][0]].reduces()) return false;
    const bool scales_a_sum = std::any_of(node.args.begin(), node.args.end(), [&](NodeId arg) {
      return summed_[arg] && variant_.nodes[arg].axes == node.axes;
    });
    return !scales_a_sum || node.args[0] == node.args[1];
  }

  // Keeps the values of the fewest axes, in ascending order.
  std::vector<NodeId> smallest(std::vector<NodeId> cuts) const {
    if (cuts.size() <= kMaxCuts) return cuts;
    std::stable_sort(cuts.begin(), cuts.end(), [&](NodeId a, NodeId b) {
      return variant_.nodes[a].axes.count() < variant_.nodes[b].axes.count();
    });
    cuts.resize(kMaxCuts);
    std::sort(cuts.begin(), cuts.end());
    return cuts;
  }

  const Program& program_;
  const Variant& variant_;
  const GpuRates& gpu_;
  IdVector<NodeId, std::vector<NodeId>> users_;
  IdVector<NodeId, bool> summed_;        // computed from a reduction
  IdVector<NodeId, double> scalar_ops_;  // for one element, with those of its arguments
};

}  // namespace

std::vector<NodeId> find_cuts(const Program& program, const Variant& variant, const GpuRates& gpu) {
  return CutFinder(program, variant, gpu).run();
}

}  // namespace mirage
