// What one GPU can do in a microsecond.
//
// Python passes the row of a GPU of mirage_hf/gpus.py, which says where each number comes from. The
// defaults are the H200's, for the tests of the core alone; tests/core keeps them equal to its row.
#pragma once

namespace mirage {

struct GpuRates {
  double dram_bytes = 4.47e6;
  double cache_bytes = 8e6;  // of the L2
  double scalar_ops = 28e6;
  double matrix_ops = 345e6;   // multiply-adds of the tensor cores
  double sms = 132;            // streaming multiprocessors
  double sm_bytes = 55e3;      // that one of them can draw
  double cached_bytes = 30e6;  // of an input that the L2 keeps between two passes over it
  double launch_us = 1.16;
  double latency_us = 1.5;  // from a kernel's first load to its last store
  double pass_us = 1.0;     // of each further pass over a loop
};

}  // namespace mirage
