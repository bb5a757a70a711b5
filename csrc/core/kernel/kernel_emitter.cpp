#include "core/kernel/kernel_emitter.h"

#include <map>
#include <utility>
#include <vector>

#include "core/kernel/kernel_nodes.h"
#include "core/kernel/loop_passes.h"

namespace mirage {
namespace {

class Emitter {
 public:
  Emitter(const Program& program, const Variant& variant, const KernelTask& task,
          const KernelShape& shape)
      : variant_(variant),
        task_(task),
        loop_(shape.loop),
        nodes_(program, variant, task),
        passes_(nodes_, shape.loop) {}

  FoundKernel run(const KernelShape& shape, const IdVector<NodeId, AxisId>& partial_over) {
    kernel_.axes = nodes_.axes();
    kernel_.split = shape.split;
    kernel_.clustered = shape.clustered;
    for (const AxisId axis : nodes_.program().axes.ids()) kernel_.roles.push_back(shape.role(axis));
    add_leaves(partial_over);
    for (int pass = 0; pass < passes_.count(); ++pass) {
      add_outside_loop(pass);
      add_pass(pass);
    }
    add_outside_loop(passes_.count());
    add_outputs();
    return std::move(kernel_);
  }

 private:
  bool is_along_loop(NodeId id) const { return nodes_[id].axes.has(loop_); }
  bool is_accumulator(NodeId id) const { return loop_.valid() && nodes_.reduces(id, loop_); }

  void add_leaves(const IdVector<NodeId, AxisId>& partial_over) {
    for (const NodeId id : nodes_.all()) {
      if (nodes_.is_computed(id)) continue;
      FoundLeaf leaf;
      leaf.value = {id};
      leaf.combine = nodes_[id].op;
      if (task_.stored.has(id))
        leaf.partial_over = partial_over[id];
      else
        leaf.source = nodes_[id].source;
      kernel_.leaves.push_back(leaf);
    }
  }

  // What is ready after that many passes and does not change along the loop.
  void add_outside_loop(int passes) {
    FoundStage stage;
    for (const NodeId id : nodes_.all()) {
      if (!nodes_.is_computed(id) || is_along_loop(id) || is_accumulator(id)) continue;
      if (passes_.pass(id) == passes) stage.body.push_back(op(id, {}));
    }
    if (!stage.body.empty()) kernel_.stages.push_back(std::move(stage));
  }

  void add_pass(int pass) {
    FoundStage stage;
    stage.loop = loop_;
    Names names;  // of values along the loop in this pass
    for (const NodeId id : passes_.body(pass)) {
      FoundOp found = op(id, names);
      if (named_.has(id)) found.out.pass = pass;
      named_.insert(id);
      names[id] = found.out;
      stage.body.push_back(std::move(found));
    }
    for (const NodeId id : nodes_.all())
      if (is_accumulator(id) && passes_.pass(nodes_[id].args[0]) == pass)
        stage.accumulators.push_back(op(id, names));
    kernel_.stages.push_back(std::move(stage));
  }

  using Names = std::map<NodeId, ValueName>;

  FoundOp op(NodeId id, const Names& names) const {
    const Variant::Node& node = nodes_[id];
    FoundOp found;
    found.out = {id};
    found.op = node.op;
    found.symbol = node.symbol;
    found.axis = node.axis;
    for (const NodeId arg : node.args) {
      const auto it = names.find(arg);
      found.args.push_back(it == names.end() ? ValueName{arg} : it->second);
    }
    return found;
  }

  void add_outputs() {
    for (const NodeId id : nodes_.all()) {
      if (!task_.outputs.has(id)) continue;
      FoundOutput found;
      found.value = {id};  // the first pass that can compute it stores it
      found.stored = {id};
      if (!task_.final.has(id)) {
        kernel_.outputs.push_back(found);
        continue;
      }
      for (std::size_t output = 0; output < variant_.outputs.size(); ++output) {
        if (variant_.outputs[output] != id) continue;
        found.output = static_cast<int>(output);
        kernel_.outputs.push_back(found);
      }
    }
  }

  const Variant& variant_;
  const KernelTask& task_;
  AxisId loop_;
  KernelNodes nodes_;
  LoopPasses passes_;
  FoundKernel kernel_;
  NodeSet named_;  // values that an earlier pass computes
};

}  // namespace

FoundKernel found_kernel(const Program& program, const Variant& variant, const KernelTask& task,
                         const KernelChoice& choice, const IdVector<NodeId, AxisId>& partial_over) {
  FoundKernel kernel =
      Emitter(program, variant, task, choice.shape).run(choice.shape, partial_over);
  kernel.num_splits = choice.num_splits;
  return kernel;
}

}  // namespace mirage
