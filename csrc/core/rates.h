// Rates of one H200 for ranking only (per µs); tuning measures. FACTS: 4.47 TB/s; 132 SMs x 128
// lanes x 1.7 GHz.
#pragma once
#include <cstdint>

namespace mirage {

constexpr double kDramBytes = 4.47e6, kCacheBytes = 8e6, kScalarOps = 28e6, kMatrixOps = 345e6;
constexpr double kSms = 132, kSmBytes = 55e3;  // one SM cannot draw more
constexpr double kLaunchUs = 1.16, kLatencyUs = 1.5, kStageUs = 1.0;
constexpr double kMatrixRows = 4;  // more rows than this go to the tensor cores
constexpr std::int64_t kNominalTile =
    64;  // of a grid axis whose blocks read the same tiles of the largest input
constexpr double kMostAgain =
    16;  // times the largest input that another one may be read again by blocks that are cut fine
constexpr std::int64_t kLargestTile =
    16384;  // elements of the tile axes of a value: what registers and 100 KB of shared memory hold
constexpr std::int64_t kLoopTile = 16;  // elements of a loop axis in a step, at least
constexpr std::int64_t kPart = 64;      // the least elements of a loop axis in one part
constexpr std::int64_t kTileParts[] = {128, 64, 32, 16};  // elements of a tile axis in one part
constexpr std::int64_t kMaxParts = 128;
constexpr int kMaxPasses = 4;

}  // namespace mirage
