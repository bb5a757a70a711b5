// What a kernel takes on a GPU. The estimate only ranks kernels; tuning measures them.
#pragma once
#include <cstdint>

#include "core/gpu_rates.h"
#include "core/kernel/kernel_nodes.h"
#include "core/kernel/kernel_task.h"
#include "core/kernel/loop_passes.h"

namespace mirage {

// What all blocks of a kernel do together.
struct KernelWork {
  double dram_bytes = 0;   // between device memory and the chip
  double cache_bytes = 0;  // read again from the L2
  double ops_us = 0;       // arithmetic, on all SMs
  double exchanges = 0;    // among the blocks of a cluster, one after the other
};

KernelWork kernel_work(const KernelNodes& nodes, const LoopPasses& passes, const KernelShape& shape,
                       std::int64_t num_splits, const GpuRates& gpu);

// Returns the µs of one launch. `largest_tile`: elements of the largest value that a block holds.
double kernel_us(const KernelWork& work, double blocks, const LoopPasses& passes,
                 double largest_tile, const GpuRates& gpu);

}  // namespace mirage
