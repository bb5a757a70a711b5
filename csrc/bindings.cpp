// The Python surface of the core: plain data in, plain data out, with the GIL released in between.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/algebra/variant.h"
#include "core/kernel/kernel_emitter.h"
#include "core/kernel/kernel_search.h"
#include "core/kernel/tile_sizes.h"
#include "core/program_check.h"
#include "core/program_text.h"
#include "core/search.h"
#include "id_casters.h"

namespace py = pybind11;

namespace mirage {
namespace {

// -- calls ----------------------------------------------------------------------------------------

// A Python error stops the search and is raised once its threads have ended. Ctrl-C stops the search
// and keeps what was found.
SearchResult search_from_python(const Program& program, const Limits& limits,
                                const Progress& progress) {
  std::exception_ptr raised;
  const Progress poll = [&](const Statistics& stats) {
    const py::gil_scoped_acquire held;
    try {
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      return progress ? progress(stats) : false;
    } catch (const py::error_already_set& error) {
      if (!error.matches(PyExc_KeyboardInterrupt)) raised = std::current_exception();
      return true;
    } catch (...) {
      raised = std::current_exception();
      return true;
    }
  };
  check(program);
  SearchResult result;
  {
    const py::gil_scoped_release released;
    result = search(program, limits, poll);
  }
  if (raised) std::rethrow_exception(raised);
  return result;
}

Program parse_from_python(const std::string& text) {
  try {
    return parse(text);
  } catch (const ParseError& error) {
    throw py::value_error(error.what());
  }
}

using KernelCost = std::pair<double, std::vector<NodeId>>;

NodeSet node_set(const std::vector<NodeId>& nodes) {
  NodeSet set;
  for (const NodeId node : nodes) {
    if (node.index() < 0 || static_cast<std::size_t>(node.index()) >= kMaxNodes)
      throw std::invalid_argument("kernel_costs: expected a node of the program");
    set.insert(node);
  }
  return set;
}

std::vector<KernelCost> kernel_costs(const Program& program, const Limits& limits,
                                     const std::vector<NodeId>& outputs,
                                     const std::vector<NodeId>& final,
                                     const std::vector<NodeId>& stored) {
  check(program);
  if (program.nodes.size() > kMaxNodes)
    throw std::invalid_argument("kernel_costs: expected at most 256 nodes");
  const Variant variant = Variant::of(program);
  const KernelTask task{node_set(outputs), node_set(final), node_set(stored)};
  Statistics stats;
  std::vector<KernelCost> found;
  for (const KernelChoice& choice :
       KernelSearch(program, variant, limits, stats).choices(task, kMaxNodes)) {
    std::vector<NodeId> partial;
    for (const NodeId node : outputs)
      if (!task.stored.has(node) && is_partial(variant, node, choice.shape))
        partial.push_back(node);
    found.emplace_back(choice.cost_us, std::move(partial));
  }
  return found;
}

// -- types ----------------------------------------------------------------------------------------

std::vector<ProgramNodeId> output_nodes(const Program& program) {
  std::vector<ProgramNodeId> nodes;
  for (const Output& output : program.outputs) nodes.push_back(output.node);
  return nodes;
}

void set_outputs(Program& program, const std::vector<ProgramNodeId>& nodes) {
  program.outputs.clear();
  for (const ProgramNodeId node : nodes) program.outputs.push_back({node});
}

std::vector<int> output_itemsizes(const Program& program) {
  std::vector<int> itemsizes;
  for (const Output& output : program.outputs) itemsizes.push_back(output.itemsize);
  return itemsizes;
}

void set_output_itemsizes(Program& program, const std::vector<int>& itemsizes) {
  if (itemsizes.size() != program.outputs.size())
    throw std::invalid_argument("output_itemsizes: expected one for each output");
  for (std::size_t i = 0; i < itemsizes.size(); ++i) program.outputs[i].itemsize = itemsizes[i];
}

void bind_program(py::module_& m) {
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
      .def_property("outputs", &output_nodes, &set_outputs)
      .def_property("output_itemsizes", &output_itemsizes, &set_output_itemsizes)
      .def(
          "text", [](const Program& program) { return format(program); },
          "Return the program as text, in the form of core/program_text.h.");
}

void bind_limits(py::module_& m) {
  py::class_<GpuRates>(m, "GpuRates")
      .def(py::init<>())
      .def_readwrite("dram_bytes", &GpuRates::dram_bytes)
      .def_readwrite("cache_bytes", &GpuRates::cache_bytes)
      .def_readwrite("scalar_ops", &GpuRates::scalar_ops)
      .def_readwrite("matrix_ops", &GpuRates::matrix_ops)
      .def_readwrite("sms", &GpuRates::sms)
      .def_readwrite("sm_bytes", &GpuRates::sm_bytes)
      .def_readwrite("cached_bytes", &GpuRates::cached_bytes)
      .def_readwrite("launch_us", &GpuRates::launch_us)
      .def_readwrite("latency_us", &GpuRates::latency_us)
      .def_readwrite("pass_us", &GpuRates::pass_us);
  py::class_<Limits>(m, "Limits")
      .def(py::init<>())
      .def_readwrite("seconds", &Limits::seconds)
      .def_readwrite("width", &Limits::width)
      .def_readwrite("max_kernels", &Limits::max_kernels)
      .def_readwrite("max_cuts", &Limits::max_cuts)
      .def_readwrite("max_variants", &Limits::max_variants)
      .def_readwrite("max_candidates", &Limits::max_candidates)
      .def_readwrite("max_block_ops", &Limits::max_block_ops)
      .def_readwrite("clusters", &Limits::clusters)
      .def_readwrite("max_values", &Limits::max_values)
      .def_readwrite("max_forms", &Limits::max_forms)
      .def_readwrite("max_expansions", &Limits::max_expansions)
      .def_readwrite("threads", &Limits::threads)
      .def_readwrite("forced", &Limits::forced)
      .def_readwrite("gpu", &Limits::gpu);
}

void bind_candidates(py::module_& m) {
  py::enum_<Role>(m, "Role")
      .value("grid", Role::grid)
      .value("loop", Role::loop)
      .value("tile", Role::tile);
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
      .def_readonly("node", &FoundLeaf::source)
      .def_readonly("partial", &FoundLeaf::partial_over)
      .def_readonly("combine", &FoundLeaf::combine);
  py::class_<FoundOutput>(m, "FoundOutput")
      .def_readonly("value", &FoundOutput::value)
      .def_readonly("stored", &FoundOutput::stored)
      .def_readonly("output", &FoundOutput::output);
  py::class_<FoundKernel>(m, "FoundKernel")
      .def_readonly("roles", &FoundKernel::roles)
      .def_readonly("axes", &FoundKernel::axes)
      .def_readonly("split", &FoundKernel::split)
      .def_readonly("num_splits", &FoundKernel::num_splits)
      .def_readonly("clustered", &FoundKernel::clustered)
      .def_readonly("leaves", &FoundKernel::leaves)
      .def_readonly("stages", &FoundKernel::stages)
      .def_readonly("outputs", &FoundKernel::outputs);
  py::class_<Candidate>(m, "Candidate")
      .def_readonly("kernels", &Candidate::kernels)
      .def_readonly("cost_us", &Candidate::cost_us);
}

void bind_results(py::module_& m) {
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
      .def_property_readonly(
          "stop", [](const SearchResult& result) { return std::string(to_string(result.stop)); },
          "The value of a member of mirage_hf.search.search_report.StopReason.");
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "The C++ core of the search. Only mirage_hf.search uses it.";
  bind_program(m);
  bind_limits(m);
  bind_candidates(m);
  bind_results(m);
  m.attr("max_axes") = kMaxAxes;
  m.attr("max_nodes") = kMaxProgramNodes;
  m.attr("largest_tile") = static_cast<std::int64_t>(kLargestTile);
  m.def("parse_program", &parse_from_python, py::arg("text"),
        "Return a well-formed program, or raise ValueError with the line.");
  m.def(
      "kernel_costs", &kernel_costs, py::arg("program"), py::arg("limits"), py::arg("outputs"),
      py::arg("final"), py::arg("stored"),
      "Return the cost in µs, and the outputs stored as partial results, of each legal shape of a "
      "kernel. It stores nodes `outputs`, those in `final` whole, and reads those in `stored`. "
      "The program is taken as written. For tests.");
  m.def("search", &search_from_python, py::arg("program"), py::arg("limits"), py::arg("progress"));
}

}  // namespace mirage
