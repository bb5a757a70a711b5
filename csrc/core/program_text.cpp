#include "core/program_text.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <tuple>
#include <vector>

namespace mirage {
namespace {

struct OpRow {
  std::string_view name;
  int args;
};  // args < 0: one or more
constexpr std::array<OpRow, 10> kOps{{{"input", 0},
                                      {"constant", 0},
                                      {"add", 2},
                                      {"sub", 2},
                                      {"mul", 2},
                                      {"div", 2},
                                      {"exp", 1},
                                      {"opaque", -1},
                                      {"sum", 1},
                                      {"max", 1}}};
const OpRow& row(Op op) {
  return kOps[static_cast<std::size_t>(op)];
}
bool reduces(Op op) {
  return op == Op::sum || op == Op::max;
}

bool identifier(std::string_view s) {
  const auto letter = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
  };
  return !s.empty() && letter(s[0]) && std::all_of(s.begin(), s.end(), [&](char c) {
    return letter(c) || (c >= '0' && c <= '9');
  });
}

// -- what a well-formed program is
// ------------------------------------------------------------------------------------

struct Problem {
  enum class Part { axis, node, output, whole } part;
  int at;
  std::string text;
};

std::string listed(std::string_view what, std::int64_t found) {
  return std::string(what) + ", found " + std::to_string(found);
}

class Checker {
 public:
  explicit Checker(const Program& p) : p_(p), axes_(static_cast<int>(p.axes.size())) {}

  std::optional<Problem> run() {
    for (auto [count, most, what] : {std::tuple{p_.axes.size(), kMaxAxes, "axes"},
                                     std::tuple{p_.nodes.size(), kMaxProgramNodes, "nodes"},
                                     std::tuple{p_.outputs.size(), kMaxProgramNodes, "outputs"}})
      if (count > static_cast<std::size_t>(most))
        return Problem{Problem::Part::whole, 0,
                       "expected at most " + std::to_string(most) + " " + what + ", found " +
                           std::to_string(count)};
    for (int i = 0; i < axes_; ++i)
      if (auto text = axis(p_.axes[i]); !text.empty())
        return Problem{Problem::Part::axis, i, std::move(text)};
    for (int i = 0; i < static_cast<int>(p_.nodes.size()); ++i)
      if (auto text = node(p_.nodes[i], i); !text.empty())
        return Problem{Problem::Part::node, i, std::move(text)};
    if (p_.outputs.empty()) return Problem{Problem::Part::whole, 0, "expected an output"};
    for (int i = 0; i < static_cast<int>(p_.outputs.size()); ++i)
      if (!earlier(p_.outputs[i], static_cast<int>(p_.nodes.size())))
        return Problem{Problem::Part::output, i,
                       listed("expected a node of the program", p_.outputs[i])};
    return std::nullopt;
  }

 private:
  static bool earlier(int a, int i) { return a >= 0 && a < i; }

  std::string axis(const AxisInfo& a) {
    if (!identifier(a.name)) return "expected a name of letters, digits and _";
    if (!names_.insert(a.name).second)
      return "expected another name than that of an earlier axis, found " + a.name;
    if (a.size < 1 || a.size > kMaxNumber) return listed("expected a size from 1 to 2^62", a.size);
    return "";
  }

  std::string node(const Node& n, int i) {
    const Node plain;
    if (static_cast<std::size_t>(n.op) >= kOps.size())
      return listed("expected an op", static_cast<int>(n.op));
    const int arity = row(n.op).args, given = static_cast<int>(n.args.size());
    if (arity >= 0 && given != arity)
      return listed("expected " + std::to_string(arity) + " values", given);
    if (arity < 0 && (given < 1 || given > kMaxOpaqueArgs))
      return listed("expected 1 to 16 values", given);
    for (int a : n.args)
      if (!earlier(a, i)) return listed("expected an earlier node", a);
    if (n.op != Op::input && (!n.index.empty() || n.bytes != plain.bytes))
      return "only an input has an index and bytes";
    if (n.op != Op::input && n.op != Op::constant && n.op != Op::opaque && n.symbol != plain.symbol)
      return "only an input, a constant and an opaque function have a symbol";
    if ((n.op != Op::constant || n.symbol >= 0) && (n.num != plain.num || n.den != plain.den))
      return "only a constant without a symbol has a value";
    if (!reduces(n.op) && n.axis != plain.axis) return "only sum and max have an axis";
    AxisSet carried = 0;
    for (int a : n.args)
      carried |= carried_[a];
    std::string text;
    if (n.op == Op::input)
      text = input(n, carried);
    else if (n.op == Op::constant)
      text = constant(n);
    else if (n.op == Op::opaque && n.symbol < 0)
      text = listed("expected a symbol from 0", n.symbol);
    else if (reduces(n.op))
      text = reduction(n, carried);
    carried_.push_back(carried);
    return text;
  }

  std::string input(const Node& n, AxisSet& carried) {
    if (n.symbol < 0) return listed("expected a symbol from 0", n.symbol);
    if (n.bytes < 0 || n.bytes > kMaxNumber) return listed("expected 0 to 2^62 bytes", n.bytes);
    std::vector<std::int64_t> dims;
    std::int64_t elements = 1;
    for (int a : n.index) {
      if (a < -1 || a >= axes_) return listed("expected an axis of the program or -1", a);
      if (a >= 0 && has(carried, a))
        return "expected an axis once, found " + p_.axes[a].name + " twice";
      if (a >= 0) carried |= bit(a);
      dims.push_back(a < 0 ? 1 : p_.axes[a].size);
      if (dims.back() > kMaxNumber / elements) return "expected at most 2^62 elements";
      elements *= dims.back();
    }
    const auto [it, fresh] = inputs_.try_emplace(n.symbol, n.bytes, dims);
    if (!fresh && it->second != std::pair(n.bytes, dims))
      return "expected the sizes and bytes that this input has in an earlier node";
    return "";
  }

  static std::string constant(const Node& n) {
    if (n.symbol < -1) return listed("expected a symbol from 0, or -1", n.symbol);
    if (n.num < -kMaxNumber || n.num > kMaxNumber)
      return listed("expected a numerator of at most 2^62", n.num);
    if (n.den < 1 || n.den > kMaxNumber)
      return listed("expected a denominator from 1 to 2^62", n.den);
    if (std::gcd(n.num, n.den) != 1)
      return "expected a fraction in lowest terms, found " + std::to_string(n.num) + "/" +
             std::to_string(n.den);
    return "";
  }

  std::string reduction(const Node& n, AxisSet& carried) const {
    if (n.axis < 0 || n.axis >= axes_) return listed("expected an axis of the program", n.axis);
    if (!has(carried, n.axis))
      return "expected an axis that the value carries, found " + p_.axes[n.axis].name;
    carried &= ~bit(n.axis);
    return "";
  }

  const Program& p_;
  const int axes_;
  std::set<std::string> names_;
  std::vector<AxisSet> carried_;  // by node
  std::map<int, std::pair<std::int64_t, std::vector<std::int64_t>>>
      inputs_;  // by symbol: bytes, sizes
};

// -- text to program
// --------------------------------------------------------------------------------------------------

std::vector<std::string_view> words(std::string_view line) {
  constexpr std::string_view blanks = " \t\r";
  line = line.substr(0, line.find('#'));
  std::vector<std::string_view> out;
  for (std::size_t from; (from = line.find_first_not_of(blanks)) != line.npos;) {
    line.remove_prefix(from);
    const std::size_t to = std::min(line.find_first_of(blanks), line.size());
    out.push_back(line.substr(0, to));
    line.remove_prefix(to);
  }
  return out;
}

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
    if (const auto problem = Checker(program_).run())
      throw ParseError(line_of(*problem), problem->text);
    return std::move(program_);
  }

 private:
  [[noreturn]] void expected(const std::string& what) const {
    throw ParseError(line_,
                     "expected " + what + ", found " +
                         (at_ < words_.size() ? std::string(words_[at_]) : "the end of the line"));
  }

  template <typename Known>
  int known(const Known& names, const std::string& what) {
    const auto it = at_ < words_.size() ? names.find(words_[at_]) : names.end();
    if (it == names.end()) expected(what);
    ++at_;
    return it->second;
  }

  template <typename Int>
  Int number(std::string_view digits, const std::string& what) {
    Int n{};
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), n);
    if (error != std::errc{} || end != digits.data() + digits.size()) expected(what);
    return n;
  }

  std::string_view word(const std::string& what) {
    if (at_ == words_.size()) expected(what);
    return words_[at_];
  }

  int symbol() {
    const std::string_view w = word("@ and a number");
    if (w[0] != '@') expected("@ and a number");
    const int n = number<int>(w.substr(1), "@ and a number");
    if (n < 0) expected("@ and a number from 0");
    ++at_;
    return n;
  }

  std::int64_t integer(const std::string& what) {
    const auto n = number<std::int64_t>(word(what), what);
    ++at_;
    return n;
  }

  void statement() {
    if (words_.size() > 1 && words_[1] == "=") return definition();
    const std::string_view keyword = words_[at_];
    if (keyword == "axis") {
      ++at_;
      const std::string name(word("a name"));
      ++at_;
      program_.axes.push_back({name, integer("a size")});
      axis_lines_.push_back(line_);
      axes_.try_emplace(name, static_cast<int>(axis_lines_.size()) - 1);
    } else if (keyword == "output") {
      ++at_;
      do {
        program_.outputs.push_back(known(values_, "a value"));
      } while (at_ < words_.size());
    } else {
      expected("axis, output, or a name and =");
    }
  }

  void definition() {
    const std::string name(words_[0]);
    if (!identifier(name)) expected("a name of letters, digits and _");
    if (values_.count(name)) expected("a new name");
    at_ = 2;
    const auto op = std::find_if(kOps.begin(), kOps.end(), [&](const OpRow& r) {
      return at_ < words_.size() && r.name == words_[at_];
    });
    if (op == kOps.end()) expected("an op");
    ++at_;
    Node n;
    n.op = static_cast<Op>(op - kOps.begin());
    if (n.op == Op::input) {
      n.symbol = symbol();
      n.bytes = integer("its bytes");
      while (at_ < words_.size())
        if (words_[at_] == "1") {
          n.index.push_back(-1);
          ++at_;
        } else
          n.index.push_back(known(axes_, "an axis or 1"));
    } else if (n.op == Op::constant) {
      constant(n);
    } else {
      if (n.op == Op::opaque) n.symbol = symbol();
      if (op->args < 0)
        while (at_ < words_.size())
          n.args.push_back(known(values_, "a value"));
      for (int i = 0; i < op->args; ++i)
        n.args.push_back(known(values_, "a value"));
      if (reduces(n.op)) n.axis = known(axes_, "an axis");
    }
    values_.emplace(name, static_cast<int>(program_.nodes.size()));
    program_.nodes.push_back(std::move(n));
    node_lines_.push_back(line_);
  }

  void constant(Node& n) {
    const std::string what = "a whole number, a fraction, or @ and a number";
    const std::string_view w = word(what);
    if (w[0] == '@') {
      n.symbol = symbol();
      return;
    }
    const std::size_t slash = w.find('/');
    n.num = number<std::int64_t>(w.substr(0, slash), what);
    if (slash != w.npos) n.den = number<std::int64_t>(w.substr(slash + 1), what);
    ++at_;
  }

  int line_of(const Problem& problem) const {
    switch (problem.part) {
      case Problem::Part::axis:
        return axis_lines_[problem.at];
      case Problem::Part::node:
        return node_lines_[problem.at];
      default:
        return std::max(line_, 1);
    }
  }

  Program program_;
  std::map<std::string, int, std::less<>> axes_, values_;
  std::vector<int> axis_lines_, node_lines_;
  std::vector<std::string_view> words_;
  std::size_t at_ = 0;
  int line_ = 0;
};

}  // namespace

void check(const Program& program) {
  const auto problem = Checker(program).run();
  if (!problem) return;
  const std::string at = std::to_string(problem->at) + ": ";
  switch (problem->part) {
    case Problem::Part::axis:
      throw std::invalid_argument("axis " + at + problem->text);
    case Problem::Part::node:
      throw std::invalid_argument("node " + at + problem->text);
    case Problem::Part::output:
      throw std::invalid_argument("output " + at + problem->text);
    case Problem::Part::whole:
      throw std::invalid_argument("program: " + problem->text);
  }
}

std::string format(const Program& program) {
  check(program);
  std::string out;
  for (const AxisInfo& a : program.axes)
    out += "axis " + a.name + " " + std::to_string(a.size) + "\n";
  for (std::size_t i = 0; i < program.nodes.size(); ++i) {
    const Node& n = program.nodes[i];
    out += "v" + std::to_string(i) + " = " + std::string(row(n.op).name);
    if (n.symbol >= 0) out += " @" + std::to_string(n.symbol);
    if (n.op == Op::input) out += " " + std::to_string(n.bytes);
    for (int a : n.index)
      out += " " + (a < 0 ? "1" : program.axes[a].name);
    if (n.op == Op::constant && n.symbol < 0)
      out += " " + std::to_string(n.num) + (n.den == 1 ? "" : "/" + std::to_string(n.den));
    for (int a : n.args)
      out += " v" + std::to_string(a);
    if (reduces(n.op)) out += " " + program.axes[n.axis].name;
    out += "\n";
  }
  out += "output";
  for (int o : program.outputs)
    out += " v" + std::to_string(o);
  return out + "\n";
}

Program parse(std::string_view text) {
  return Parser().run(text);
}

}  // namespace mirage
