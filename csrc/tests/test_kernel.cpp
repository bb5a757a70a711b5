// The rules by which a kernel is judged, each alone: passes, legality, tiles, parallelism, cost, cuts.
#include <cmath>

#include "core/kernel/cuts.h"
#include "core/kernel/kernel_cost.h"
#include "core/kernel/kernel_emitter.h"
#include "core/kernel/kernel_search.h"
#include "core/kernel/legality.h"
#include "core/kernel/loop_passes.h"
#include "core/kernel/parallelism.h"
#include "core/kernel/tile_sizes.h"
#include "core/kernel/tiles.h"
#include "core/program_text.h"
#include "tests/check.h"

namespace {

using namespace mirage;

// y = x·w, with x: m × k and w: k × n
constexpr std::string_view kMatmul = R"(axis m 16
axis n 4096
axis k 1024
x = input @0 32768 m k
w = input @1 8388608 k n
p = mul x w
y = sum p k
output y
)";
// y = x / Σ x along k: two passes over x
constexpr std::string_view kNormalize = R"(axis m 16
axis k 1024
x = input @0 32768 m k
s = sum x k
y = div x s
output y
)";
// y = e^x / Σ e^x along k: e^x is computed in both passes
constexpr std::string_view kSoftmax = R"(axis m 16
axis k 1024
x = input @0 32768 m k
e = exp x
s = sum e k
y = div e s
output y
)";
// y = e^x, elementwise
constexpr std::string_view kExp = R"(axis m 64
axis k 1024
x = input @0 131072 m k
y = exp x
output y
)";

constexpr AxisId kNone;

NodeSet set_of(const std::vector<NodeId>& nodes) {
  NodeSet set;
  for (const NodeId node : nodes) set.insert(node);
  return set;
}

// One kernel that computes a whole program.
struct Kernel {
  explicit Kernel(std::string_view text)
      : program(parse(text)),
        variant(Variant::of(program)),
        task{set_of(variant.outputs), set_of(variant.outputs), {}},
        nodes(program, variant, task) {}

  // By its name in the text, which lists axes m, n, k in this order.
  AxisId axis(std::string_view name) const {
    for (const AxisId id : program.axes.ids())
      if (program.axes[id].name == name) return id;
    throw std::runtime_error("no such axis");
  }
  KernelShape shape(AxisId loop = kNone, AxisId split = kNone, std::int64_t split_size = 0) const {
    return {nodes.grid(), loop, split, split_size};
  }
  LoopPasses passes(AxisId loop) const { return {nodes, loop}; }
  double us(const KernelShape& shape, const GpuRates& gpu = {}) const {
    const LoopPasses along = passes(shape.loop);
    return kernel_us(kernel_work(nodes, along, shape, 1, gpu), grid_blocks(nodes, shape), along,
                     largest_tile(nodes, shape), gpu);
  }

  Program program;
  Variant variant;
  KernelTask task;
  KernelNodes nodes;
};

// The same kernel with its sum stored as partial results.
struct PartialKernel : Kernel {
  explicit PartialKernel(std::string_view text) : Kernel(text), partial{task.outputs, {}, {}} {}
  KernelNodes partial_nodes() const { return {program, variant, partial}; }
  KernelTask partial;
};

}  // namespace

TEST(a_kernels_grid_is_what_outputs_carry) {
  const Kernel matmul(kMatmul);
  CHECK(matmul.nodes.grid() == (AxisSet(matmul.axis("m")) | matmul.axis("n")));
  CHECK(matmul.nodes.axes() == (matmul.nodes.grid() | matmul.axis("k")));
  CHECK(matmul.nodes.op_count() == 2);
  CHECK(matmul.nodes.is_matrix_product(NodeId(2)));
  CHECK(!Kernel(kExp).nodes.is_matrix_product(NodeId(1)));
}

TEST(stored_values_are_read_not_computed) {
  const Kernel whole(kNormalize);
  const KernelTask task{set_of({NodeId(2)}), set_of({NodeId(2)}), set_of({NodeId(1)})};
  const KernelNodes nodes(whole.program, whole.variant, task);
  CHECK(whole.nodes.is_computed(NodeId(1)) && !nodes.is_computed(NodeId(1)));
  CHECK(nodes.all().size() == 3);
  CHECK(nodes.grid().has(whole.axis("k")) && !whole.nodes.grid().has(whole.axis("k")));
}

TEST(a_value_along_the_loop_of_a_sum_takes_another_pass) {
  const Kernel normalize(kNormalize);
  const LoopPasses passes = normalize.passes(normalize.axis("k"));
  CHECK(passes.count() == 2);
  CHECK(passes.pass(NodeId(1)) == 1 && passes.pass(NodeId(2)) == 1);
  CHECK(passes.body(0).empty() && passes.body(1) == std::vector<NodeId>{NodeId(2)});
  const Kernel matmul(kMatmul);
  CHECK(matmul.passes(matmul.axis("k")).count() == 1);
  CHECK(matmul.passes(matmul.axis("k")).loads(NodeId(0)) == 1);
  CHECK(matmul.passes(kNone).count() == 0);
}

TEST(forced_roles_are_kept) {
  const Kernel matmul(kMatmul);
  const KernelShape walked = matmul.shape(matmul.axis("k"));
  const auto forced = [&](Role role, AxisSet axes) {
    std::vector<AxisSet> by_role(3);
    by_role[static_cast<std::size_t>(role)] = axes;
    return by_role;
  };
  CHECK(keeps_forced_roles(matmul.nodes, walked, {}));
  CHECK(keeps_forced_roles(matmul.nodes, walked, forced(Role::loop, matmul.axis("k"))));
  CHECK(!keeps_forced_roles(matmul.nodes, walked, forced(Role::tile, matmul.axis("k"))));
  CHECK(!keeps_forced_roles(matmul.nodes, walked, forced(Role::loop, matmul.axis("m"))));
}

TEST(splits_must_be_independent) {
  const PartialKernel matmul(kMatmul);
  const AxisId k = matmul.axis("k");
  CHECK(!splits_are_independent(matmul.nodes, k));  // y must be whole
  CHECK(splits_are_independent(matmul.partial_nodes(), k));
  const PartialKernel normalize(kNormalize);
  CHECK(!splits_are_independent(normalize.partial_nodes(), normalize.axis("k")));  // uses the sum
}

TEST(a_loop_is_walked_a_few_times) {
  const Kernel normalize(kNormalize);
  CHECK(is_walked(normalize.passes(normalize.axis("k")), normalize.axis("k")));
  CHECK(is_walked(normalize.passes(kNone), kNone));
  std::string text = "axis k 64\nx0 = input @0 128 k\n";
  for (int i = 0; i < kMaxPasses; ++i) {
    const std::string n = std::to_string(i), next = std::to_string(i + 1);
    text += "s" + n + " = sum x" + n + " k\nx" + next + " = div x" + n + " s" + n + "\n";
  }
  const Kernel often(text + "output x" + std::to_string(kMaxPasses) + "\n");
  CHECK(often.passes(often.axis("k")).count() == kMaxPasses + 1);
  CHECK(!is_walked(often.passes(often.axis("k")), often.axis("k")));
}

TEST(blocks_of_a_cluster_add_up_outside_of_the_loop) {
  const auto adds_up = [](const Kernel& kernel, AxisId loop, AxisId split) {
    KernelShape shape = kernel.shape(loop, split, 128);
    shape.clustered = true;
    return cluster_adds_up(kernel.nodes, shape);
  };
  const Kernel normalize(kNormalize), exp(kExp);
  const AxisId k = normalize.axis("k");
  CHECK(adds_up(normalize, k, k));             // after the first pass
  CHECK(adds_up(normalize, kNone, k));         // each block holds its split
  CHECK(!adds_up(exp, kNone, exp.axis("k")));  // there is nothing to add up
  const Kernel batched(R"(axis m 16
axis k 1024
axis n 64
x = input @0 2097152 m k n
s = sum x k
t = exp s
y = sum t n
output y
)");
  CHECK(!adds_up(batched, batched.axis("n"), batched.axis("k")));  // in each step of the loop
  CHECK(adds_up(batched, batched.axis("k"), batched.axis("n")));
}

TEST(no_block_of_a_cluster_is_without_elements) {
  CHECK(cluster_split_size(1024, 8) == 128 && cluster_split_size(100, 8) == 13);
  CHECK(cluster_split_size(9, 8) == 0 && cluster_split_size(7, 4) == 2);
}

TEST(clusters_store_whole_results_and_take_an_exchange) {
  const Kernel matmul(kMatmul);
  Statistics stats;
  const Limits limits;
  const auto choices =
      KernelSearch(matmul.program, matmul.variant, limits, stats).cluster_choices(matmul.task, 8);
  CHECK(!choices.empty());
  for (const KernelChoice& choice : choices) {
    CHECK(choice.shape.clustered && choice.shape.split == matmul.axis("k"));
    CHECK(choice.num_splits == 2 || choice.num_splits == 4 || choice.num_splits == 8);
    CHECK(!is_partial(matmul.variant, matmul.variant.outputs[0], choice.shape));
    const LoopPasses passes = matmul.passes(choice.shape.loop);
    const KernelWork work = kernel_work(matmul.nodes, passes, choice.shape, choice.num_splits, {});
    CHECK(work.exchanges == 1);
    KernelShape partial = choice.shape;
    partial.clustered = false;
    const KernelWork apart = kernel_work(matmul.nodes, passes, partial, choice.num_splits, {});
    CHECK(work.dram_bytes < apart.dram_bytes && apart.exchanges == 0);
  }
}

TEST(tiles_hold_tile_axes_or_a_split_of_them) {
  const Kernel normalize(kNormalize);
  const AxisId k = normalize.axis("k");
  CHECK(largest_tile(normalize.nodes, normalize.shape()) == 1024);
  CHECK(largest_tile(normalize.nodes, normalize.shape(k)) == 1);
  CHECK(largest_tile(normalize.nodes, normalize.shape(kNone, k, 32)) == 32);
  CHECK(held_elements(normalize.program, normalize.shape(kNone, k, 4096), k) == 1024);
}

TEST(a_product_that_is_only_summed_is_never_whole) {
  const Kernel matmul(kMatmul);  // with n and k held: w is, the product is not
  const KernelShape shape{matmul.axis("m"), kNone, kNone, 0};
  CHECK(largest_tile(matmul.nodes, shape) == 4096.0 * 1024);
  const Kernel batch(R"(axis b 8
axis k 32
x = input @0 512 b k
w = input @1 64 k
z = input @2 512 b k
p = mul x z
y = sum p b
q = mul y w
output q
)");
  CHECK(largest_tile(batch.nodes, batch.shape()) == 8);  // k is in the grid: no other tile axis
}

TEST(blocks_are_fine_along_the_largest_input) {
  const Kernel matmul(kMatmul);
  // w is the largest: n is cut into tiles of 4, m would read w again
  CHECK(grid_blocks(matmul.nodes, matmul.shape(matmul.axis("k"))) == 4096 / 4);
  const Kernel exp(kExp);
  CHECK(grid_blocks(exp.nodes, exp.shape()) == 64.0 * 1024 / 4);
}

TEST(splits_fill_the_gpu_and_none_is_empty) {
  const Kernel matmul(kMatmul);
  const AxisId k = matmul.axis("k");
  const GpuRates gpu;
  CHECK(num_splits(matmul.program, matmul.shape(k, k), 1, gpu) == 16);  // of 64 elements at least
  CHECK(num_splits(matmul.program, matmul.shape(k, k), gpu.sms, gpu) == 2);
  CHECK(num_splits(matmul.program, matmul.shape(k, k), 2 * gpu.sms, gpu) == 1);
  CHECK(num_splits(matmul.program, matmul.shape(kNone, k, 128), 1, gpu) == 8);
  Program odd = matmul.program;
  odd.axes[k].size = 130;
  CHECK(num_splits(odd, matmul.shape(kNone, k, 128), 1, gpu) == 2);
  CHECK(num_splits(odd, matmul.shape(kNone, k, 16), 1, gpu) == 9);
}

TEST(work_counts_every_byte_once) {
  const Kernel exp(kExp);
  const KernelWork work = kernel_work(exp.nodes, exp.passes(kNone), exp.shape(), 1, {});
  CHECK(work.dram_bytes == 131072 + 2.0 * 64 * 1024);
  CHECK(work.cache_bytes == 0);
  CHECK(work.ops_us == 4.0 * 64 * 1024 / GpuRates().scalar_ops);
}

TEST(work_counts_the_bytes_of_the_outputs_dtype) {
  std::string text(kExp);
  text.replace(text.find("output y"), 8, "output y:4");
  const Kernel half(kExp), full(text);
  const auto dram = [](const Kernel& kernel) {
    return kernel_work(kernel.nodes, kernel.passes(kNone), kernel.shape(), 1, {}).dram_bytes;
  };
  CHECK(dram(full) - dram(half) == 2.0 * 64 * 1024);
}

TEST(a_second_pass_reads_from_the_cache) {
  const Kernel softmax(kSoftmax);
  const AxisId k = softmax.axis("k");
  const auto work = [&](AxisId loop) {
    return kernel_work(softmax.nodes, softmax.passes(loop), softmax.shape(loop), 1, {});
  };
  CHECK(softmax.passes(k).loads(NodeId(0)) == 2);
  CHECK(work(k).cache_bytes - work(kNone).cache_bytes == 32768);
  CHECK(work(k).dram_bytes == work(kNone).dram_bytes);
}

TEST(a_kernel_takes_a_launch_and_its_bytes) {
  const Kernel exp(kExp), matmul(kMatmul);
  const GpuRates gpu;
  CHECK(exp.us(exp.shape()) > gpu.launch_us + gpu.latency_us);
  const double read_us = (8388608 + 32768) / gpu.dram_bytes;
  CHECK(matmul.us(matmul.shape(matmul.axis("k"))) > gpu.launch_us + gpu.latency_us + read_us);
  GpuRates slow;
  slow.dram_bytes /= 2;
  CHECK(matmul.us(matmul.shape(matmul.axis("k")), slow) >
        matmul.us(matmul.shape(matmul.axis("k"))) + read_us / 2);
}

TEST(the_search_walks_the_long_axis_of_a_product) {
  const Kernel matmul(kMatmul);
  Statistics stats;
  const Limits limits;
  const auto choices =
      KernelSearch(matmul.program, matmul.variant, limits, stats).choices(matmul.task, 8);
  CHECK(!choices.empty() && choices[0].shape.loop == matmul.axis("k"));
  CHECK(choices[0].num_splits == 1 && !choices[0].shape.split.valid());  // y must be whole
  CHECK(std::abs(choices[0].cost_us - matmul.us(choices[0].shape)) < 1e-12);
  CHECK(stats.kernels >= stats.illegal && stats.illegal > 0);
}

TEST(a_value_computed_again_is_named_by_its_pass) {
  const Kernel kernel(kSoftmax);
  KernelChoice walked;
  walked.shape = kernel.shape(kernel.axis("k"));
  const FoundKernel found = found_kernel(kernel.program, kernel.variant, kernel.task, walked,
                                         IdVector<NodeId, AxisId>(kernel.variant.nodes.size()));
  CHECK(found.stages.size() == 2);
  CHECK(found.stages[0].body[0].out == (ValueName{NodeId(1), 0}));
  CHECK(found.stages[1].body[0].out == (ValueName{NodeId(1), 1}));
  CHECK(found.stages[1].body[1].args[0] == (ValueName{NodeId(1), 1}));
  CHECK(found.outputs.size() == 1 && found.outputs[0].output == 0);
}

TEST(cuts_are_sums_and_ends_of_chains) {
  const Kernel chain(R"(axis m 16
axis k 1024
axis n 64
x = input @0 32768 m k
s = sum x k
t = exp s
u = exp t
w = input @1 2048 m n
y = mul u w
output y
)");
  const auto cuts = find_cuts(chain.program, chain.variant, {});
  CHECK(cuts == (std::vector<NodeId>{NodeId(1), NodeId(3)}));  // s, and u, but not t
  const Kernel matmul(kMatmul);
  CHECK(find_cuts(matmul.program, matmul.variant, {}) == std::vector<NodeId>{NodeId(3)});
}
