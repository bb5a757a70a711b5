#include "core/algebra/program_forms.h"

#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

namespace mirage {
namespace {

std::optional<FormId> form_of(const Node& node, const std::vector<FormId>& args,
                              NormalForms& forms) {
  switch (node.op) {
    case Op::input: return forms.input(node.symbol, node.index);
    case Op::constant:
      return node.symbol >= 0 ? forms.named_constant(node.symbol)
                              : forms.constant({node.num, node.den});
    case Op::add: return forms.add(args[0], args[1]);
    case Op::sub: return forms.sub(args[0], args[1]);
    case Op::mul: return forms.mul(args[0], args[1]);
    case Op::div: {
      const auto inverse = forms.inverse(args[1]);
      return inverse ? forms.mul(args[0], *inverse) : std::nullopt;
    }
    case Op::exp: return forms.exp(args[0]);
    case Op::opaque: return forms.opaque(node.symbol, args);
    case Op::sum: return forms.sum(args[0], node.axis);
    case Op::max: return forms.max(args[0], node.axis);
  }
  return std::nullopt;
}

std::vector<std::optional<FormId>> output_forms(const Program& program, NormalForms& forms) {
  const NodeForms all = forms_of(program, forms);
  std::vector<std::optional<FormId>> found;
  for (const Output& output : program.outputs) found.push_back(all[output.node]);
  return found;
}

Program with_zero_at(const Program& program, ProgramNodeId node) {
  Program changed = program;
  changed.nodes[node] = Node{};
  changed.nodes[node].op = Op::constant;
  changed.nodes[node].num = 0;
  return changed;
}

}  // namespace

NodeForms forms_of(const Program& program, NormalForms& forms) {
  NodeForms found(program.nodes.size());
  for (const ProgramNodeId id : program.nodes.ids()) {
    const Node& node = program.nodes[id];
    std::vector<FormId> args;
    for (const ProgramNodeId arg : node.args)
      if (found[arg]) args.push_back(*found[arg]);
    if (args.size() == node.args.size()) found[id] = form_of(node, args, forms);
  }
  return found;
}

Program without_shifts(const Program& program) {
  Program plain = program;
  for (const ProgramNodeId id : plain.nodes.ids()) {
    if (plain.nodes[id].op != Op::max) continue;
    NormalForms forms(program.axes, 1);
    Program without = with_zero_at(plain, id);
    const auto before = output_forms(plain, forms), after = output_forms(without, forms);
    const bool defined =
        std::all_of(after.begin(), after.end(), [](const auto& form) { return form.has_value(); });
    if (defined && before == after) plain = std::move(without);
  }
  return plain;
}

IdVector<ProgramNodeId, bool> needed_nodes(const Program& program, const NodeForms& forms) {
  std::unordered_map<FormId, ProgramNodeId> first;
  for (const ProgramNodeId id : program.nodes.ids())
    if (forms[id]) first.try_emplace(*forms[id], id);
  IdVector<ProgramNodeId, bool> needed(program.nodes.size());
  std::vector<ProgramNodeId> todo;
  for (const Output& output : program.outputs) todo.push_back(output.node);
  while (!todo.empty()) {
    const ProgramNodeId written = todo.back();
    todo.pop_back();
    const ProgramNodeId id = forms[written] ? first.at(*forms[written]) : written;
    if (needed[id]) continue;
    needed[id] = true;
    for (const ProgramNodeId arg : program.nodes[id].args) todo.push_back(arg);
  }
  return needed;
}

}  // namespace mirage
