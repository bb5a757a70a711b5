// The text form: a program is read back as it was written, and a malformed one is refused with its
// line and the reason.
#include "core/program_text.h"

#include "core/program_check.h"
#include "tests/check.h"

namespace {

using namespace mirage;

ProgramNodeId n(int index) { return ProgramNodeId(index); }

constexpr std::string_view kEvery = R"(# every statement once
axis m 16
axis k 4096

x = input @0 131072 m 1 k   # a dim of size 1
w = input @1 8192 k
scalar = input @2 2
third = constant -1/3
two = constant 2
eps = constant @7
a = add x w
b = sub a third
c = mul b two
d = div c scalar
e = exp d
f = opaque @3 e eps w
s = sum f k
t = max f k
output s t:4
output s
)";

std::string error_of(std::string_view text) {
  try {
    parse(text);
  } catch (const ParseError& e) {
    return e.what();
  }
  return "";
}

// Every error, after two axes and an input.
std::string refused(const std::string& rest) {
  return error_of("axis m 16\naxis k 8\nx = input @0 256 m k\n" + rest);
}

std::string refused(const Program& program) {
  try {
    check(program);
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "";
}

}  // namespace

TEST(text_is_read_and_written_back) {
  const Program p = parse(kEvery);
  CHECK(p.axes.size() == 2 && p.axes[AxisId(1)].name == "k" && p.axes[AxisId(1)].size == 4096);
  CHECK(p.nodes.size() == 14);
  CHECK(p.nodes[n(0)].op == Op::input &&
        p.nodes[n(0)].index == std::vector<AxisId>{AxisId(0), AxisId(), AxisId(1)} &&
        p.nodes[n(0)].bytes == 131072);
  CHECK(p.nodes[n(3)].num == -1 && p.nodes[n(3)].den == 3 && p.nodes[n(3)].symbol == -1);
  CHECK(p.nodes[n(5)].symbol == 7);
  CHECK(p.nodes[n(11)].op == Op::opaque && p.nodes[n(11)].symbol == 3 &&
        p.nodes[n(11)].args == std::vector<ProgramNodeId>{n(10), n(5), n(1)});
  CHECK(p.nodes[n(13)].op == Op::max && p.nodes[n(13)].axis == AxisId(1));
  CHECK(p.outputs.size() == 3);
  CHECK(p.outputs[0].node == n(12) && p.outputs[1].node == n(13) && p.outputs[2].node == n(12));
  CHECK(p.outputs[0].itemsize == 2 && p.outputs[1].itemsize == 4);
  const std::string text = format(p);
  CHECK(text == format(parse(text)));
  CHECK(text == R"(axis m 16
axis k 4096
v0 = input @0 131072 m 1 k
v1 = input @1 8192 k
v2 = input @2 2
v3 = constant -1/3
v4 = constant 2
v5 = constant @7
v6 = add v0 v1
v7 = sub v6 v3
v8 = mul v7 v4
v9 = div v8 v2
v10 = exp v9
v11 = opaque @3 v10 v5 v1
v12 = sum v11 k
v13 = max v11 k
output v12 v13:4 v12
)");
}

TEST(blanks_line_ends_and_keywords_as_names) {
  const std::string text =
      format(parse("axis axis 4\r\n\toutput = input  @0 8 axis \r\n\n# end\noutput output"));
  CHECK(text == "axis axis 4\nv0 = input @0 8 axis\noutput v0\n");
  CHECK(format(parse("v1 = constant -4611686018427387904/4611686018427387903\noutput v1")) ==
        "v0 = constant -4611686018427387904/4611686018427387903\noutput v0\n");
}

TEST(syntax_errors_say_where_and_what) {
  CHECK(error_of("") == "line 1: expected an output");
  CHECK(error_of("\nbogus") == "line 2: expected axis, output, or a name and =, found bogus");
  CHECK(error_of("axis") == "line 1: expected a name, found the end of the line");
  CHECK(error_of("axis m") == "line 1: expected a size, found the end of the line");
  CHECK(error_of("axis m 4x") == "line 1: expected a size, found 4x");
  CHECK(error_of("axis m 99999999999999999999") ==
        "line 1: expected a size, found 99999999999999999999");
  CHECK(error_of("axis m 4 5") == "line 1: expected the end of the line, found 5");
  CHECK(refused("3 = exp x") == "line 4: expected a name of letters, digits and _, found 3");
  CHECK(refused("x = exp x") == "line 4: expected a new name, found x");
  CHECK(refused("y =") == "line 4: expected an op, found the end of the line");
  CHECK(refused("y = tanh x") == "line 4: expected an op, found tanh");
  CHECK(refused("y = exp z") == "line 4: expected a value, found z");
  CHECK(refused("y = exp y") == "line 4: expected a value, found y");
  CHECK(refused("y = add x") == "line 4: expected a value, found the end of the line");
  CHECK(refused("y = add x x x") == "line 4: expected the end of the line, found x");
  CHECK(refused("y = sum x") == "line 4: expected an axis, found the end of the line");
  CHECK(refused("y = sum x n") == "line 4: expected an axis, found n");
  CHECK(refused("y = input") == "line 4: expected @ and a number, found the end of the line");
  CHECK(refused("y = input 0") == "line 4: expected @ and a number, found 0");
  CHECK(refused("y = input @") == "line 4: expected @ and a number, found @");
  CHECK(refused("y = input @-1") == "line 4: expected @ and a number from 0, found @-1");
  CHECK(refused("y = input @4294967296") == "line 4: expected @ and a number, found @4294967296");
  CHECK(refused("y = input @1 m") == "line 4: expected its bytes, found m");
  CHECK(refused("y = input @1 8 n") == "line 4: expected an axis or 1, found n");
  CHECK(
      refused("y = constant") ==
      "line 4: expected a whole number, a fraction, or @ and a number, found the end of the line");
  CHECK(refused("y = constant 1/") ==
        "line 4: expected a whole number, a fraction, or @ and a number, found 1/");
  CHECK(refused("y = constant 0.5") ==
        "line 4: expected a whole number, a fraction, or @ and a number, found 0.5");
  CHECK(refused("output") == "line 4: expected a value, found the end of the line");
  CHECK(refused("output x:two") == "line 4: expected the bytes of an element, found x:two");
  CHECK(refused("output x y") == "line 4: expected a value, found y");
}

TEST(malformed_programs_are_refused_at_their_line) {
  CHECK(refused("axis m 2\noutput x") ==
        "line 4: expected another name than that of an earlier axis, found m");
  CHECK(refused("axis 1 2\noutput x") == "line 4: expected a name of letters, digits and _");
  CHECK(refused("axis n 0\noutput x") == "line 4: expected a size from 1 to 2^62, found 0");
  CHECK(refused("axis n 4611686018427387905\noutput x") ==
        "line 4: expected a size from 1 to 2^62, found 4611686018427387905");
  CHECK(refused("y = input @1 8 m m\noutput x") == "line 4: expected an axis once, found m twice");
  CHECK(refused("y = input @1 -8 m\noutput x") == "line 4: expected 0 to 2^62 bytes, found -8");
  CHECK(refused("axis a 4294967296\naxis b 4294967296\ny = input @1 8 a b\noutput x") ==
        "line 6: expected at most 2^62 elements");
  CHECK(refused("y = input @0 256 k m\noutput x") ==
        "line 4: expected the sizes and bytes that this input has in an earlier node");
  CHECK(refused("y = input @0 255 m k\noutput x") ==
        "line 4: expected the sizes and bytes that this input has in an earlier node");
  CHECK(refused("y = constant 2/4\noutput x") ==
        "line 4: expected a fraction in lowest terms, found 2/4");
  CHECK(refused("y = constant 0/2\noutput x") ==
        "line 4: expected a fraction in lowest terms, found 0/2");
  CHECK(refused("y = constant 1/0\noutput x") ==
        "line 4: expected a denominator from 1 to 2^62, found 0");
  CHECK(refused("y = constant 1/-2\noutput x") ==
        "line 4: expected a denominator from 1 to 2^62, found -2");
  CHECK(refused("y = constant -9223372036854775808\noutput x") ==
        "line 4: expected a numerator of at most 2^62, found -9223372036854775808");
  CHECK(refused("y = opaque @0\noutput x") == "line 4: expected 1 to 16 values, found 0");
  CHECK(refused("y = sum x k\nz = max y k\noutput x") ==
        "line 5: expected an axis that the value carries, found k");
  CHECK(refused("y = exp x") == "line 4: expected an output");
}

TEST(check_refuses_what_text_cannot_say) {
  const Program good = parse(kEvery);
  CHECK(refused(good).empty());
  const auto with = [&](auto change) {
    Program p = good;
    change(p);
    return refused(p);
  };
  CHECK(with([](Program& p) { p.nodes[n(6)].args[1] = n(6); }) ==
        "node 6: expected an earlier node, found 6");
  CHECK(with([](Program& p) { p.nodes[n(6)].args[1] = n(-1); }) ==
        "node 6: expected an earlier node, found -1");
  CHECK(with([](Program& p) { p.nodes[n(6)].args.pop_back(); }) ==
        "node 6: expected 2 values, found 1");
  CHECK(with([](Program& p) { p.nodes[n(6)].axis = AxisId(1); }) ==
        "node 6: only sum and max have an axis");
  CHECK(with([](Program& p) { p.nodes[n(6)].index = {AxisId(0)}; }) ==
        "node 6: only an input has an index and bytes");
  CHECK(with([](Program& p) { p.nodes[n(6)].bytes = 1; }) ==
        "node 6: only an input has an index and bytes");
  CHECK(with([](Program& p) { p.nodes[n(6)].symbol = 1; }) ==
        "node 6: only an input, a constant and an opaque function have a symbol");
  CHECK(with([](Program& p) { p.nodes[n(6)].num = 2; }) ==
        "node 6: only a constant without a symbol has a value");
  CHECK(with([](Program& p) { p.nodes[n(5)].num = 2; }) ==
        "node 5: only a constant without a symbol has a value");
  CHECK(with([](Program& p) { p.nodes[n(5)].symbol = -2; }) ==
        "node 5: expected a symbol from 0, or -1, found -2");
  CHECK(with([](Program& p) { p.nodes[n(0)].symbol = -1; }) ==
        "node 0: expected a symbol from 0, found -1");
  CHECK(with([](Program& p) { p.nodes[n(11)].symbol = -1; }) ==
        "node 11: expected a symbol from 0, found -1");
  CHECK(with([](Program& p) { p.nodes[n(11)].args.assign(17, n(0)); }) ==
        "node 11: expected 1 to 16 values, found 17");
  CHECK(with([](Program& p) { p.nodes[n(0)].index = {AxisId(2)}; }) ==
        "node 0: expected an axis of the program or -1, found 2");
  CHECK(with([](Program& p) { p.nodes[n(0)].index = {AxisId(-2)}; }) ==
        "node 0: expected an axis of the program or -1, found -2");
  CHECK(with([](Program& p) { p.nodes[n(12)].axis = AxisId(2); }) ==
        "node 12: expected an axis of the program, found 2");
  CHECK(with([](Program& p) { p.nodes[n(12)].axis = AxisId(); }) ==
        "node 12: expected an axis of the program, found -1");
  CHECK(with([](Program& p) { p.nodes[n(12)].op = static_cast<Op>(10); }) ==
        "node 12: expected an op, found 10");
  CHECK(with([](Program& p) { p.outputs[1].node = n(14); }) ==
        "output 1: expected a node of the program, found 14");
  CHECK(with([](Program& p) { p.outputs[1].itemsize = 0; }) ==
        "output 1: expected 1 to 16 bytes for an element, found 0");
  CHECK(with([](Program& p) { p.axes[AxisId(0)].name = "a b"; }) ==
        "axis 0: expected a name of letters, digits and _");
  CHECK(with([](Program& p) { p.axes.resize(65); }) ==
        "program: expected at most 64 axes, found 65");
  CHECK(with([](Program& p) { p.nodes.resize(4097); }) ==
        "program: expected at most 4096 nodes, found 4097");
  CHECK(with([](Program& p) { p.outputs.resize(4097); }) ==
        "program: expected at most 4096 outputs, found 4097");
}
