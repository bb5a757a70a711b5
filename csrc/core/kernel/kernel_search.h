// The shapes that one kernel of a plan can have.
#pragma once
#include <cstddef>
#include <optional>
#include <vector>

#include "core/algebra/variant.h"
#include "core/kernel/kernel_nodes.h"
#include "core/kernel/kernel_task.h"
#include "core/kernel/loop_passes.h"
#include "core/program.h"
#include "core/search.h"

namespace mirage {

class KernelSearch {
 public:
  KernelSearch(const Program& program, const Variant& variant, const Limits& limits,
               Statistics& stats)
      : program_(program), variant_(variant), limits_(limits), stats_(stats) {}

  // Returns the legal shapes of a kernel, cheapest first, at most `most` of them.
  std::vector<KernelChoice> choices(const KernelTask& task, std::size_t most) const;

  // The same for shapes whose blocks form clusters. Each splits an axis and adds up the results.
  std::vector<KernelChoice> cluster_choices(const KernelTask& task, std::size_t most) const;

 private:
  std::optional<KernelChoice> best_split(const KernelNodes& nodes, const LoopPasses& passes,
                                         const LoopPasses& walked, KernelShape shape) const;
  std::optional<KernelChoice> best_cluster(const KernelNodes& nodes, const LoopPasses& passes,
                                           KernelShape shape) const;
  std::optional<KernelChoice> evaluate(const KernelNodes& nodes, const LoopPasses& passes,
                                       const KernelShape& shape) const;

  const Program& program_;
  const Variant& variant_;
  const Limits& limits_;
  Statistics& stats_;
};

}  // namespace mirage
