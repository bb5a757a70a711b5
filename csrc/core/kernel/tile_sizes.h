// The sizes of tiles and splits that kernels are estimated with; tuning chooses the real ones.
#pragma once
#include <cstdint>

namespace mirage {

constexpr double kMatrixRows = 4;    // products of more rows use the tensor cores
constexpr double kNominalTile = 64;  // of a grid axis whose blocks read the same tiles of an input
constexpr double kMaxRereads = 16;   // of another input, in sizes of the largest one
constexpr double kLargestTile = 16384;   // elements that registers and 100 KB of shared memory hold
constexpr std::int64_t kLoopTile = 16;   // elements of a loop axis in one step, at least
constexpr std::int64_t kLoopSplit = 64;  // elements of a loop axis in one split, at least
constexpr std::int64_t kTileSplits[] = {128, 64, 32, 16};  // elements of a tile axis in one split
constexpr std::int64_t kMaxSplits = 128;
constexpr std::int64_t kClusterBlocks[] = {2, 4, 8};  // that all GPUs with clusters run
constexpr std::int64_t kClusterSplit =
    16;                        // elements of an axis in one block of a cluster, at least
constexpr int kMaxPasses = 4;  // over the loop axis

}  // namespace mirage
