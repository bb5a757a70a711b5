#include "core/program_check.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include "core/op_table.h"

namespace mirage {
namespace {

std::string but_found(std::string text, std::int64_t found) {
  text += ", found ";
  text += std::to_string(found);
  return text;
}

// Each function returns what is wrong, or an empty text.
class Checker {
 public:
  explicit Checker(const Program& program) : program_(program) {}

  std::optional<Problem> run() {
    using Part = Problem::Part;
    for (const std::string& text : {count(program_.axes.size(), kMaxAxes, "axes"),
                                    count(program_.nodes.size(), kMaxProgramNodes, "nodes"),
                                    count(program_.outputs.size(), kMaxProgramNodes, "outputs")})
      if (!text.empty()) return Problem{Part::whole, 0, text};
    for (const AxisId id : program_.axes.ids())
      if (auto text = axis(program_.axes[id]); !text.empty())
        return Problem{Part::axis, static_cast<std::size_t>(id.index()), std::move(text)};
    for (const ProgramNodeId id : program_.nodes.ids())
      if (auto text = node(id); !text.empty())
        return Problem{Part::node, static_cast<std::size_t>(id.index()), std::move(text)};
    if (program_.outputs.empty()) return Problem{Part::whole, 0, "expected an output"};
    for (std::size_t i = 0; i < program_.outputs.size(); ++i)
      if (auto text = output(program_.outputs[i]); !text.empty())
        return Problem{Part::output, i, std::move(text)};
    return std::nullopt;
  }

 private:
  static std::string count(std::size_t found, std::size_t most, std::string_view what) {
    if (found <= most) return "";
    std::string text = "expected at most " + std::to_string(most) + " ";
    text += what;
    return but_found(std::move(text), static_cast<std::int64_t>(found));
  }

  std::string axis(const AxisInfo& axis) {
    if (!is_identifier(axis.name)) return "expected a name of letters, digits and _";
    if (!names_.insert(axis.name).second)
      return "expected another name than that of an earlier axis, found " + axis.name;
    if (axis.size < 1 || axis.size > kMaxNumber)
      return but_found("expected a size from 1 to 2^62", axis.size);
    return "";
  }

  std::string output(const Output& output) const {
    if (!program_.nodes.contains(output.node))
      return but_found("expected a node of the program", output.node.index());
    if (output.itemsize < 1 || output.itemsize > kMaxItemsize)
      return but_found("expected 1 to 16 bytes for an element", output.itemsize);
    return "";
  }

  std::string node(ProgramNodeId id) {
    const Node& node = program_.nodes[id];
    if (auto text = args(node, id); !text.empty()) return text;
    if (auto text = unused_fields(node); !text.empty()) return text;
    AxisSet carried;
    for (const ProgramNodeId arg : node.args) carried |= carried_[arg];
    std::string text;
    if (node.op == Op::input)
      text = input(node, carried);
    else if (node.op == Op::constant)
      text = constant(node);
    else if (node.op == Op::opaque && node.symbol < 0)
      text = but_found("expected a symbol from 0", node.symbol);
    else if (is_reduction(node.op))
      text = reduction(node, carried);
    carried_.push_back(carried);
    return text;
  }

  static std::string args(const Node& node, ProgramNodeId id) {
    if (static_cast<std::size_t>(node.op) >= kOps.size())
      return but_found("expected an op", static_cast<int>(node.op));
    const int wanted = row(node.op).args, given = static_cast<int>(node.args.size());
    if (wanted >= 0 && given != wanted)
      return but_found("expected " + std::to_string(wanted) + " values", given);
    if (wanted < 0 && (given < 1 || given > kMaxOpaqueArgs))
      return but_found("expected 1 to 16 values", given);
    for (const ProgramNodeId arg : node.args)
      if (!arg.valid() || arg >= id) return but_found("expected an earlier node", arg.index());
    return "";
  }

  static std::string unused_fields(const Node& node) {
    const Node plain;
    const bool has_symbol =
        node.op == Op::input || node.op == Op::constant || node.op == Op::opaque;
    const bool has_value = node.op == Op::constant && node.symbol < 0;
    if (node.op != Op::input && (!node.index.empty() || node.bytes != plain.bytes))
      return "only an input has an index and bytes";
    if (!has_symbol && node.symbol != plain.symbol)
      return "only an input, a constant and an opaque function have a symbol";
    if (!has_value && (node.num != plain.num || node.den != plain.den))
      return "only a constant without a symbol has a value";
    if (!is_reduction(node.op) && node.axis != plain.axis) return "only sum and max have an axis";
    return "";
  }

  std::string input(const Node& node, AxisSet& carried) {
    if (node.symbol < 0) return but_found("expected a symbol from 0", node.symbol);
    if (node.bytes < 0 || node.bytes > kMaxNumber)
      return but_found("expected 0 to 2^62 bytes", node.bytes);
    std::vector<std::int64_t> dims;
    std::int64_t elements = 1;
    for (const AxisId axis : node.index) {
      if (axis != AxisId() && !program_.axes.contains(axis))
        return but_found("expected an axis of the program or -1", axis.index());
      if (carried.has(axis))
        return "expected an axis once, found " + program_.axes[axis].name + " twice";
      if (axis.valid()) carried |= axis;
      dims.push_back(axis.valid() ? program_.axes[axis].size : 1);
      if (dims.back() > kMaxNumber / elements) return "expected at most 2^62 elements";
      elements *= dims.back();
    }
    const auto [it, fresh] = inputs_.try_emplace(node.symbol, node.bytes, dims);
    if (!fresh && it->second != std::pair(node.bytes, dims))
      return "expected the sizes and bytes that this input has in an earlier node";
    return "";
  }

  static std::string constant(const Node& node) {
    if (node.symbol < -1) return but_found("expected a symbol from 0, or -1", node.symbol);
    if (node.num < -kMaxNumber || node.num > kMaxNumber)
      return but_found("expected a numerator of at most 2^62", node.num);
    if (node.den < 1 || node.den > kMaxNumber)
      return but_found("expected a denominator from 1 to 2^62", node.den);
    if (std::gcd(node.num, node.den) != 1)
      return but_found("expected a fraction in lowest terms", node.num) + "/" +
             std::to_string(node.den);
    return "";
  }

  std::string reduction(const Node& node, AxisSet& carried) const {
    if (!program_.axes.contains(node.axis))
      return but_found("expected an axis of the program", node.axis.index());
    if (!carried.has(node.axis))
      return "expected an axis that the value carries, found " + program_.axes[node.axis].name;
    carried -= node.axis;
    return "";
  }

  static constexpr int kMaxItemsize = 16;

  const Program& program_;
  std::set<std::string> names_;
  IdVector<ProgramNodeId, AxisSet> carried_;
  std::map<int, std::pair<std::int64_t, std::vector<std::int64_t>>> inputs_;  // bytes, sizes
};

std::string place(const Problem& problem) {
  const std::string at = std::to_string(problem.at);
  switch (problem.part) {
    case Problem::Part::axis: return "axis " + at;
    case Problem::Part::node: return "node " + at;
    case Problem::Part::output: return "output " + at;
    case Problem::Part::whole: return "program";
  }
  return "";
}

}  // namespace

bool is_identifier(std::string_view text) {
  const auto is_letter = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
  };
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  return !text.empty() && is_letter(text[0]) &&
         std::all_of(text.begin(), text.end(), [&](char c) { return is_letter(c) || is_digit(c); });
}

std::optional<Problem> find_problem(const Program& program) { return Checker(program).run(); }

void check(const Program& program) {
  if (const auto problem = find_problem(program))
    throw std::invalid_argument(place(*problem) + ": " + problem->text);
}

}  // namespace mirage
