#include "core/program_text.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <utility>
#include <vector>

#include "core/op_table.h"
#include "core/program_check.h"

namespace mirage {
namespace {

std::vector<std::string_view> words(std::string_view line) {
  constexpr std::string_view kBlanks = " \t\r";
  line = line.substr(0, line.find('#'));
  std::vector<std::string_view> found;
  for (std::size_t from = 0; (from = line.find_first_not_of(kBlanks)) != line.npos;) {
    line.remove_prefix(from);
    const std::size_t to = std::min(line.find_first_of(kBlanks), line.size());
    found.push_back(line.substr(0, to));
    line.remove_prefix(to);
  }
  return found;
}

// Turns words into statements. `at_` is the word that is read next.
class Parser {
 public:
  Program run(std::string_view text) {
    while (!text.empty()) {
      ++line_;
      const std::size_t end = std::min(text.find('\n'), text.size());
      words_ = words(text.substr(0, end));
      text.remove_prefix(std::min(end + 1, text.size()));
      at_ = 0;
      if (words_.empty()) continue;
      statement();
      if (at_ < words_.size()) expected("the end of the line");
    }
    if (const auto problem = find_problem(program_))
      throw ParseError(line_of(*problem), problem->text);
    return std::move(program_);
  }

 private:
  [[noreturn]] void expected(const std::string& what) const {
    const std::string found =
        at_ < words_.size() ? std::string(words_[at_]) : "the end of the line";
    throw ParseError(line_, "expected " + what + ", found " + found);
  }

  std::string_view word(const std::string& what) const {
    if (at_ == words_.size()) expected(what);
    return words_[at_];
  }

  template <typename I>
  I known(const std::map<std::string, I, std::less<>>& names, std::string_view name,
          const std::string& what) const {
    const auto it = names.find(name);
    if (it == names.end()) expected(what);
    return it->second;
  }

  ProgramNodeId value() {
    const ProgramNodeId id = known(values_, word("a value"), "a value");
    ++at_;
    return id;
  }

  AxisId axis(const std::string& what) {
    const AxisId id = known(axes_, word(what), what);
    ++at_;
    return id;
  }

  template <typename Int>
  Int number(std::string_view digits, const std::string& what) const {
    Int found{};
    const char* last = digits.data() + digits.size();
    const auto [end, error] = std::from_chars(digits.data(), last, found);
    if (error != std::errc{} || end != last) expected(what);
    return found;
  }

  int symbol() {
    const std::string_view text = word("@ and a number");
    if (text[0] != '@') expected("@ and a number");
    const int found = number<int>(text.substr(1), "@ and a number");
    if (found < 0) expected("@ and a number from 0");
    ++at_;
    return found;
  }

  std::int64_t integer(const std::string& what) {
    const auto found = number<std::int64_t>(word(what), what);
    ++at_;
    return found;
  }

  void statement() {
    if (words_.size() > 1 && words_[1] == "=") {
      definition();
    } else if (words_[0] == "axis") {
      ++at_;
      const std::string name(word("a name"));
      ++at_;
      axes_.try_emplace(name, program_.axes.push_back({name, integer("a size")}));
      axis_lines_.push_back(line_);
    } else if (words_[0] == "output") {
      ++at_;
      do {
        program_.outputs.push_back(output());
      } while (at_ < words_.size());
    } else {
      expected("axis, output, or a name and =");
    }
  }

  Output output() {
    Output found;
    const std::string_view text = word("a value");
    const std::size_t colon = text.find(':');
    found.node = known(values_, text.substr(0, colon), "a value");
    if (colon != text.npos)
      found.itemsize = number<int>(text.substr(colon + 1), "the bytes of an element");
    ++at_;
    return found;
  }

  void definition() {
    const std::string name(words_[0]);
    if (!is_identifier(name)) expected("a name of letters, digits and _");
    if (values_.contains(name)) expected("a new name");
    at_ = 2;
    values_.emplace(name, program_.nodes.push_back(node()));
    node_lines_.push_back(line_);
  }

  Node node() {
    const std::string_view name = word("an op");
    const auto op =
        std::find_if(kOps.begin(), kOps.end(), [&](const OpRow& row) { return row.name == name; });
    if (op == kOps.end()) expected("an op");
    ++at_;
    Node found;
    found.op = static_cast<Op>(op - kOps.begin());
    if (found.op == Op::input) {
      input(found);
    } else if (found.op == Op::constant) {
      constant(found);
    } else {
      if (found.op == Op::opaque) found.symbol = symbol();
      for (int i = 0; i < op->args || (op->args < 0 && at_ < words_.size()); ++i)
        found.args.push_back(value());
      if (is_reduction(found.op)) found.axis = axis("an axis");
    }
    return found;
  }

  void input(Node& node) {
    node.symbol = symbol();
    node.bytes = integer("its bytes");
    while (at_ < words_.size()) {
      if (words_[at_] == "1") {
        node.index.emplace_back();
        ++at_;
      } else {
        node.index.push_back(axis("an axis or 1"));
      }
    }
  }

  void constant(Node& node) {
    const std::string what = "a whole number, a fraction, or @ and a number";
    const std::string_view text = word(what);
    if (text[0] == '@') {
      node.symbol = symbol();
      return;
    }
    const std::size_t slash = text.find('/');
    node.num = number<std::int64_t>(text.substr(0, slash), what);
    if (slash != text.npos) node.den = number<std::int64_t>(text.substr(slash + 1), what);
    ++at_;
  }

  int line_of(const Problem& problem) const {
    switch (problem.part) {
      case Problem::Part::axis: return axis_lines_[problem.at];
      case Problem::Part::node: return node_lines_[problem.at];
      default: return std::max(line_, 1);
    }
  }

  Program program_;
  std::map<std::string, AxisId, std::less<>> axes_;
  std::map<std::string, ProgramNodeId, std::less<>> values_;
  std::vector<int> axis_lines_, node_lines_;
  std::vector<std::string_view> words_;
  std::size_t at_ = 0;
  int line_ = 0;
};

// Appends a blank and some text.
void append(std::string& line, std::string_view text) {
  line += ' ';
  line += text;
}

std::string value_name(ProgramNodeId id) {
  std::string name = std::to_string(id.index());
  name.insert(name.begin(), 'v');
  return name;
}

std::string symbol_name(int symbol) {
  std::string name = std::to_string(symbol);
  name.insert(name.begin(), '@');
  return name;
}

std::string format(const Program& program, ProgramNodeId id) {
  const Node& node = program.nodes[id];
  std::string line = value_name(id);
  append(line, "=");
  append(line, row(node.op).name);
  if (node.symbol >= 0) append(line, symbol_name(node.symbol));
  if (node.op == Op::input) append(line, std::to_string(node.bytes));
  for (const AxisId axis : node.index) append(line, axis.valid() ? program.axes[axis].name : "1");
  if (node.op == Op::constant && node.symbol < 0) {
    append(line, std::to_string(node.num));
    if (node.den != 1) line += '/' + std::to_string(node.den);
  }
  for (const ProgramNodeId arg : node.args) append(line, value_name(arg));
  if (is_reduction(node.op)) append(line, program.axes[node.axis].name);
  return line;
}

}  // namespace

std::string format(const Program& program) {
  check(program);
  std::string text;
  for (const AxisInfo& axis : program.axes)
    text += "axis " + axis.name + ' ' + std::to_string(axis.size) + '\n';
  for (const ProgramNodeId id : program.nodes.ids()) text += format(program, id) + '\n';
  text += "output";
  for (const Output& output : program.outputs) {
    append(text, value_name(output.node));
    if (output.itemsize != Output().itemsize) text += ':' + std::to_string(output.itemsize);
  }
  return text + '\n';
}

Program parse(std::string_view text) { return Parser().run(text); }

}  // namespace mirage
