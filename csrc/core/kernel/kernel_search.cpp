#include "core/kernel/kernel_search.h"

#include <algorithm>
#include <utility>

#include "core/kernel/kernel_cost.h"
#include "core/kernel/legality.h"
#include "core/kernel/parallelism.h"
#include "core/kernel/tile_sizes.h"
#include "core/kernel/tiles.h"

namespace mirage {

namespace {

// Returns the axes that a kernel may loop over or split. The first is none.
std::vector<AxisId> loop_candidates(const KernelNodes& nodes) {
  std::vector<AxisId> candidates{AxisId()};
  for (const AxisId axis : nodes.axes() - nodes.grid()) candidates.push_back(axis);
  return candidates;
}

std::vector<KernelChoice> cheapest_of(std::vector<KernelChoice> found, std::size_t most) {
  const auto cheaper = [](const auto& a, const auto& b) { return a.cost_us < b.cost_us; };
  std::stable_sort(found.begin(), found.end(), cheaper);
  if (found.size() > most) found.resize(most);
  return found;
}

}  // namespace

std::vector<KernelChoice> KernelSearch::choices(const KernelTask& task, std::size_t most) const {
  const KernelNodes nodes(program_, variant_, task);
  std::vector<KernelChoice> found;
  if (nodes.op_count() > static_cast<std::size_t>(limits_.max_block_ops)) return found;
  const std::vector<AxisId> candidates = loop_candidates(nodes);
  std::vector<LoopPasses> passes;
  for (const AxisId loop : candidates) passes.emplace_back(nodes, loop);
  for (std::size_t loop = 0; loop < candidates.size(); ++loop) {
    for (std::size_t split = 0; split < candidates.size(); ++split) {
      const KernelShape shape{nodes.grid(), candidates[loop], candidates[split]};
      const auto best = best_split(nodes, passes[loop], passes[split], shape);
      if (best) found.push_back(*best);
    }
  }
  return cheapest_of(std::move(found), most);
}

std::vector<KernelChoice> KernelSearch::cluster_choices(const KernelTask& task,
                                                        std::size_t most) const {
  const KernelNodes nodes(program_, variant_, task);
  std::vector<KernelChoice> found;
  if (nodes.op_count() > static_cast<std::size_t>(limits_.max_block_ops)) return found;
  const std::vector<AxisId> candidates = loop_candidates(nodes);
  for (const AxisId loop : candidates) {
    const LoopPasses passes(nodes, loop);
    for (const AxisId split : candidates) {
      if (!split.valid()) continue;
      KernelShape shape{nodes.grid(), loop, split};
      shape.clustered = true;
      const auto best = best_cluster(nodes, passes, shape);
      if (best) found.push_back(*best);
    }
  }
  return cheapest_of(std::move(found), most);
}

// Returns the best choice over the numbers of blocks of a cluster.
std::optional<KernelChoice> KernelSearch::best_cluster(const KernelNodes& nodes,
                                                       const LoopPasses& passes,
                                                       KernelShape shape) const {
  std::optional<KernelChoice> best;
  for (const std::int64_t blocks : kClusterBlocks) {
    ++stats_.kernels;
    shape.split_size = cluster_split_size(program_.axes[shape.split].size, blocks);
    std::optional<KernelChoice> choice;
    if (shape.split_size >= kClusterSplit) choice = evaluate(nodes, passes, shape);
    if (!choice)
      ++stats_.illegal;
    else if (!best || choice->cost_us < best->cost_us)
      best = choice;
  }
  return best;
}

// Returns the best choice over the sizes of a split. Those of a tile axis are tried in turn.
// `walked`: the passes if that axis is the loop.
std::optional<KernelChoice> KernelSearch::best_split(const KernelNodes& nodes,
                                                     const LoopPasses& passes,
                                                     const LoopPasses& walked,
                                                     KernelShape shape) const {
  const bool splits_tile = shape.split.valid() && shape.split != shape.loop;
  std::optional<KernelChoice> best;
  for (const std::int64_t split_size : kTileSplits) {
    ++stats_.kernels;
    shape.split_size = splits_tile ? split_size : 0;
    auto choice = evaluate(nodes, passes, shape);
    if (!choice) {
      ++stats_.illegal;
      break;
    }
    if (splits_tile && !shape.loop.valid()) {
      // Walk a split if that costs no more. A schedule may still hold it whole, and a longer axis
      // is walked anyway.
      const auto loop = evaluate(nodes, walked, {shape.grid, shape.split, shape.split, split_size});
      if (loop && loop->cost_us <= choice->cost_us) choice = loop;
    }
    if (!best || choice->cost_us < best->cost_us) best = choice;
    if (!splits_tile) break;  // a loop axis has as many splits as the grid needs
  }
  return best;
}

std::optional<KernelChoice> KernelSearch::evaluate(const KernelNodes& nodes,
                                                   const LoopPasses& passes,
                                                   const KernelShape& shape) const {
  if (!keeps_forced_roles(nodes, shape, limits_.forced)) return std::nullopt;
  if (shape.clustered && !cluster_adds_up(nodes, shape)) return std::nullopt;
  if (shape.split.valid() && !shape.clustered && !splits_are_independent(nodes, shape.split))
    return std::nullopt;
  if (!is_walked(passes, shape.loop)) return std::nullopt;
  const double tile = largest_tile(nodes, shape);
  if (tile > kLargestTile) return std::nullopt;

  double blocks = grid_blocks(nodes, shape);
  std::int64_t splits = 1;
  if (shape.split.valid()) {
    splits = num_splits(program_, shape, blocks, limits_.gpu);
    if (splits < 2) return std::nullopt;
    blocks *= static_cast<double>(splits);
  }
  const KernelWork work = kernel_work(nodes, passes, shape, splits, limits_.gpu);
  return KernelChoice{shape, splits, kernel_us(work, blocks, passes, tile, limits_.gpu)};
}

}  // namespace mirage
