// The whole Python surface of the core: plain data in, plain data out, the GIL released in between.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <exception>

#include "core/ir.h"
#include "core/kernel.h"
#include "core/program_text.h"

namespace py = pybind11;
using namespace mirage;

static std::vector<std::pair<double, std::vector<int>>> kernel_costs(
    const Program& program, const Limits& limits, const std::vector<int>& outputs,
    const std::vector<int>& final, const std::vector<int>& stored) {
  check(program);
  if (program.nodes.size() > kMaxNodes) throw std::invalid_argument("kernel_costs: too many nodes");
  const Variant variant = as_variant(program);
  Statistics stats;
  const KernelSearch kernels(program, variant, limits, stats);
  KernelTask task;
  for (auto& [set, nodes] :
       {std::pair{&task.outputs, &outputs}, {&task.final, &final}, {&task.stored, &stored}})
    for (int n : *nodes)
      set->set(static_cast<std::size_t>(n));
  std::vector<std::pair<double, std::vector<int>>> found;
  for (const KernelChoice& c : kernels.choices(task, kMaxNodes)) {
    found.emplace_back(c.cost, std::vector<int>());
    for (int n : outputs)
      if (!task.stored[n] && kernels.partial(n, c)) found.back().second.push_back(n);
  }
  return found;
}

PYBIND11_MODULE(_core, m) {
  m.doc() = "C++ core of the search; mirage_hf.search.engine is its only user.";
  py::enum_<Op>(m, "Op")
      .value("input", Op::input)
      .value("constant", Op::constant)
      .value("add", Op::add)
      .value("sub", Op::sub)
      .value("mul", Op::mul)
      .value("div", Op::div)
      .value("exp", Op::exp)
      .value("opaque", Op::opaque)
      .value("sum", Op::sum)
      .value("max", Op::max);
  py::enum_<Role>(m, "Role")
      .value("grid", Role::grid)
      .value("loop", Role::loop)
      .value("tile", Role::tile);
  py::class_<AxisInfo>(m, "AxisInfo")
      .def(py::init<std::string, std::int64_t>(), py::arg("name"), py::arg("size"));
  py::class_<Node>(m, "Node")
      .def(py::init<>())
      .def_readwrite("op", &Node::op)
      .def_readwrite("args", &Node::args)
      .def_readwrite("axis", &Node::axis)
      .def_readwrite("index", &Node::index)
      .def_readwrite("symbol", &Node::symbol)
      .def_readwrite("num", &Node::num)
      .def_readwrite("den", &Node::den)
      .def_readwrite("bytes", &Node::bytes);
  py::class_<Program>(m, "Program")
      .def(py::init<>())
      .def_readwrite("axes", &Program::axes)
      .def_readwrite("nodes", &Program::nodes)
      .def_readwrite("outputs", &Program::outputs)
      .def("text", &format, "The program as text, in the form of core/program_text.h.");
  py::class_<Limits>(m, "Limits")
      .def(py::init<>())
      .def_readwrite("seconds", &Limits::seconds)
      .def_readwrite("width", &Limits::width)
      .def_readwrite("max_kernels", &Limits::max_kernels)
      .def_readwrite("max_cuts", &Limits::max_cuts)
      .def_readwrite("max_variants", &Limits::max_variants)
      .def_readwrite("max_candidates", &Limits::max_candidates)
      .def_readwrite("max_block_ops", &Limits::max_block_ops)
      .def_readwrite("max_values", &Limits::max_values)
      .def_readwrite("max_forms", &Limits::max_forms)
      .def_readwrite("max_expansions", &Limits::max_expansions)
      .def_readwrite("threads", &Limits::threads)
      .def_readwrite("forced", &Limits::forced);
  py::class_<FoundOp>(m, "FoundOp")
      .def_readonly("out", &FoundOp::out)
      .def_readonly("op", &FoundOp::op)
      .def_readonly("symbol", &FoundOp::symbol)
      .def_readonly("args", &FoundOp::args)
      .def_readonly("axis", &FoundOp::axis);
  py::class_<FoundStage>(m, "FoundStage")
      .def_readonly("loop", &FoundStage::loop)
      .def_readonly("body", &FoundStage::body)
      .def_readonly("accumulators", &FoundStage::accumulators);
  py::class_<FoundLeaf>(m, "FoundLeaf")
      .def_readonly("value", &FoundLeaf::value)
      .def_readonly("node", &FoundLeaf::node)
      .def_readonly("partial", &FoundLeaf::partial)
      .def_readonly("combine", &FoundLeaf::combine);
  py::class_<FoundOutput>(m, "FoundOutput")
      .def_readonly("value", &FoundOutput::value)
      .def_readonly("stored", &FoundOutput::stored)
      .def_readonly("output", &FoundOutput::output);
  py::class_<FoundKernel>(m, "FoundKernel")
      .def_readonly("roles", &FoundKernel::roles)
      .def_readonly("axes", &FoundKernel::axes)
      .def_readonly("split", &FoundKernel::split)
      .def_readonly("parts", &FoundKernel::parts)
      .def_readonly("leaves", &FoundKernel::leaves)
      .def_readonly("stages", &FoundKernel::stages)
      .def_readonly("outputs", &FoundKernel::outputs);
  py::class_<Candidate>(m, "Candidate")
      .def_readonly("kernels", &Candidate::kernels)
      .def_readonly("nodes", &Candidate::nodes)
      .def_readonly("cost_us", &Candidate::cost_us);
  py::class_<Statistics>(m, "Statistics")
      .def_readonly("values", &Statistics::values)
      .def_readonly("derivations", &Statistics::derivations)
      .def_readonly("examined", &Statistics::examined)
      .def_readonly("outside_goal", &Statistics::outside_goal)
      .def_readonly("cancelling", &Statistics::cancelling)
      .def_readonly("expansions", &Statistics::expansions)
      .def_readonly("dominated", &Statistics::dominated)
      .def_readonly("variants", &Statistics::variants)
      .def_readonly("kernels", &Statistics::kernels)
      .def_readonly("illegal", &Statistics::illegal)
      .def_readonly("plans", &Statistics::plans)
      .def_readonly("cost_pruned", &Statistics::cost_pruned)
      .def_readonly("forms", &Statistics::forms)
      .def_readonly("candidates", &Statistics::candidates)
      .def_readonly("best_us", &Statistics::best_us)
      .def_readonly("seconds", &Statistics::seconds)
      .def_readonly("first_seconds", &Statistics::first_seconds);
  py::class_<SearchResult>(m, "SearchResult")
      .def_readonly("candidates", &SearchResult::candidates)
      .def_readonly("stats", &SearchResult::stats)
      .def_readonly("stop", &SearchResult::stop);
  m.attr("max_axes") = kMaxAxes;
  m.attr("max_nodes") = kMaxProgramNodes;
  m.def(
      "parse_program",
      [](const std::string& text) {
        try {
          return parse(text);
        } catch (const ParseError& e) {
          throw py::value_error(e.what());
        }
      },
      py::arg("text"), "A well-formed program from its text; ValueError with the line else.");
  m.def("kernel_costs", &kernel_costs, py::arg("program"), py::arg("limits"), py::arg("outputs"),
        py::arg("final"), py::arg("stored"),
        "For tests: (cost in µs, outputs stored as partial results) of each legal choice of roles "
        "of the kernel that stores nodes "
        "`outputs`, of which those in `final` are whole, and reads those in `stored`; the program "
        "is taken as written.");
  m.def(
      "search",
      [](const Program& program, const Limits& limits,
         const std::function<bool(const Statistics&)>& progress) {
        // Python errors stop the search and are raised once its threads have ended; ctrl-C stops it
        // and keeps what was found.
        std::exception_ptr raised;
        const Progress poll = [&](const Statistics& stats) {
          py::gil_scoped_acquire held;
          try {
            if (PyErr_CheckSignals() != 0) throw py::error_already_set();
            return progress ? progress(stats) : false;
          } catch (py::error_already_set& e) {
            if (!e.matches(PyExc_KeyboardInterrupt)) raised = std::current_exception();
            return true;
          } catch (...) {
            raised = std::current_exception();
            return true;
          }
        };
        check(program);
        SearchResult result;
        {
          py::gil_scoped_release released;
          result = search(program, limits, poll);
        }
        if (raised) std::rethrow_exception(raised);
        return result;
      },
      py::arg("program"), py::arg("limits"), py::arg("progress"));
}
