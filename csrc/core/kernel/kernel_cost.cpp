#include "core/kernel/kernel_cost.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <set>

#include "core/kernel/tile_sizes.h"

namespace mirage {
namespace {

constexpr double kHiddenShare = 0.1;  // of memory or arithmetic time that the longest does not hide
constexpr double kLargeTileUs = 0.02;  // for every doubling of the largest tile, in registers
constexpr double kSmallTile = 64;      // elements up to which a tile costs nothing
// Of blocks of a cluster that add up a few numbers. Measured on an H200, for one number of each
// block: 0.38 (2 blocks) to 0.45 (8). What larger tiles take has not been measured.
constexpr double kExchangeUs = 0.45;

class WorkCounter {
 public:
  WorkCounter(const KernelNodes& nodes, const LoopPasses& passes, const KernelShape& shape,
              std::int64_t num_splits, const GpuRates& gpu)
      : nodes_(nodes),
        passes_(passes),
        shape_(shape),
        num_splits_(static_cast<double>(num_splits)),
        gpu_(gpu) {}

  KernelWork run() {
    for (const NodeId id : nodes_.all()) {
      if (!nodes_.is_computed(id)) {
        if (nodes_[id].op != Op::constant) load(id);
        continue;
      }
      if (nodes_.task().outputs.has(id)) store(id);
      compute(id);
      if (shape_.clustered && nodes_.reduces(id, shape_.split)) exchange(id);
    }
    return work_;
  }

 private:
  // The times that the blocks together load, or compute, a value with these axes.
  double copies(AxisSet axes) const {
    double copies = 1;
    for (const AxisId axis : shape_.grid - axes)
      copies *= std::max(1.0, nodes_.program().size(axis) / kNominalTile);
    if (shape_.split.valid() && !axes.has(shape_.split)) copies *= num_splits_;
    return copies;
  }

  void load(NodeId id) {
    const Variant::Node& node = nodes_[id];
    const double bytes = node.op == Op::input
                             ? static_cast<double>(nodes_.program().nodes[node.source].bytes)
                             : kIntermediateItemsize * nodes_.elements(id);
    const double rereads = std::max(0, passes_.loads(id) - 1);
    work_.dram_bytes += bytes;
    work_.cache_bytes += bytes * (copies(node.axes) * (1 + rereads) - 1);
    if (rereads > 0 && bytes > gpu_.cached_bytes) work_.dram_bytes += bytes * rereads;
  }

  void store(NodeId id) {
    const bool partial = nodes_[id].reduces(shape_.split) && !shape_.clustered;
    const double elements = nodes_.elements(id);
    work_.dram_bytes += nodes_.stored_itemsize(id) * elements * (partial ? num_splits_ : 1.0);
    if (partial) work_.cache_bytes += kIntermediateItemsize * elements * num_splits_;
  }

  // Every block of a cluster reads what all of them hold. What one pass leaves is exchanged at once.
  void exchange(NodeId id) {
    const double bytes = kIntermediateItemsize * nodes_.elements(id);
    work_.cache_bytes += bytes * num_splits_ * num_splits_;
    if (exchanged_.insert(passes_.pass(id)).second) ++work_.exchanges;
  }

  // Every block computes its own tile of what does not carry a grid axis.
  void compute(NodeId id) {
    const Variant::Node& node = nodes_[id];
    if (node.reduces()) {
      const NodeId arg = node.args[0];
      if (node.op == Op::sum && nodes_.is_matrix_product(arg)) return;
      work_.ops_us +=
          kReductionOps * nodes_.elements(arg) * copies(nodes_[arg].axes) / gpu_.scalar_ops;
      return;
    }
    const double elements = nodes_.elements(id) * copies(node.axes);
    if (node.op == Op::mul && nodes_.is_matrix_product(id))
      work_.ops_us += elements / gpu_.matrix_ops;
    else
      work_.ops_us += scalar_ops(node.op) * elements / gpu_.scalar_ops;
  }

  const KernelNodes& nodes_;
  const LoopPasses& passes_;
  const KernelShape& shape_;
  double num_splits_;
  const GpuRates& gpu_;
  KernelWork work_;
  std::set<int> exchanged_;  // passes
};

}  // namespace

KernelWork kernel_work(const KernelNodes& nodes, const LoopPasses& passes, const KernelShape& shape,
                       std::int64_t num_splits, const GpuRates& gpu) {
  return WorkCounter(nodes, passes, shape, num_splits, gpu).run();
}

double kernel_us(const KernelWork& work, double blocks, const LoopPasses& passes,
                 double largest_tile, const GpuRates& gpu) {
  const double busy = std::min(1.0, blocks / gpu.sms);
  const double dram_rate = std::min(gpu.dram_bytes, std::min(blocks, gpu.sms) * gpu.sm_bytes);
  const double times[] = {
      work.dram_bytes / dram_rate,
      (work.dram_bytes + work.cache_bytes) / gpu.cache_bytes / busy,
      work.ops_us / busy,
  };
  const double longest = *std::max_element(std::begin(times), std::end(times));
  const double hidden = times[0] + times[1] + times[2] - longest;
  const double more_passes = std::max(0, passes.count() - 1);
  // holding a long axis whole takes registers that walking it does not
  const double registers_us = kLargeTileUs * std::log2(std::max(1.0, largest_tile / kSmallTile));
  return gpu.launch_us + gpu.latency_us + longest + kHiddenShare * hidden +
         gpu.pass_us * more_passes + registers_us + kExchangeUs * work.exchanges;
}

}  // namespace mirage
