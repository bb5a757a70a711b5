#include "core/algebra/variant.h"

#include <algorithm>
#include <utility>

#include "core/kernel/tile_sizes.h"

namespace mirage {

Variant::Node Variant::Node::of(const Value& value, const Derivation& derivation,
                                std::vector<NodeId> args) {
  Node node;
  node.op = derivation.op;
  node.symbol = derivation.symbol;
  node.axis = derivation.axis;
  node.source = derivation.source;
  node.args = std::move(args);
  node.axes = value.axes;
  node.is_number = value.is_number;
  return node;
}

Variant Variant::of(const Program& program) {
  Variant variant;
  for (const ProgramNodeId id : program.nodes.ids()) {
    const mirage::Node& written = program.nodes[id];
    Node node;
    node.op = written.op;
    node.axis = written.axis;
    node.is_number = written.op != Op::input;
    if (written.op == Op::opaque) node.symbol = written.symbol;
    if (node.is_leaf()) node.source = id;
    for (const AxisId axis : written.index)
      if (axis.valid()) node.axes |= axis;
    for (const ProgramNodeId arg : written.args) {
      node.args.emplace_back(arg.index());
      node.axes |= variant.nodes[node.args.back()].axes;
      node.is_number = node.is_number && variant.nodes[node.args.back()].is_number;
    }
    if (node.reduces()) node.axes -= node.axis;
    variant.nodes.push_back(std::move(node));
  }
  for (const Output& output : program.outputs) variant.outputs.emplace_back(output.node.index());
  return variant;
}

bool is_matrix_product(const Program& program, AxisSet left, AxisSet right) {
  return std::min(program.elements(left - right), program.elements(right - left)) > kMatrixRows;
}

}  // namespace mirage
