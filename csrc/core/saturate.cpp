#include "core/saturate.h"

#include <algorithm>
#include <cstdlib>
#include <functional>

namespace mirage {
namespace {

bool cancels(const Factors& a, const Factors& b) {
  for (auto [atom, e] : a)
    for (auto [other, f] : b)
      if (atom == other && (e > 0) != (f > 0)) return true;
  return false;
}

bool contains(const Factors& all, AtomId atom, int exponent) {
  for (auto [a, e] : all)
    if (a == atom) return (e > 0) == (exponent > 0) && std::abs(exponent) <= std::abs(e);
  return false;
}

}  // namespace

// -- goals
// ------------------------------------------------------------------------------------------------------------

void Goals::add(NfId form) {
  if (!all_.insert(form).second) return;
  const Nf nf = forms_.nf(form);
  for (const Monomial& t : nf.terms) {
    const int index = static_cast<int>(terms_.size());
    terms_.push_back(t);
    std::set<AtomId> held;
    for (auto [a, e] : t.factors) {
      held.insert(a);
      const Atom atom = forms_.atom(a);
      for (NfId arg : atom.args)
        add(arg);
      if (atom.kind == Atom::Kind::sum) {
        for (auto [inner, f] : atom.factors) {
          held.insert(inner);
          for (NfId arg : forms_.atom(inner).args)
            add(arg);
          if (forms_.atom(inner).kind == Atom::Kind::sum) add(forms_.of_factors({{inner, 1}}));
        }
        if (e != 1) add(forms_.of_factors({{a, 1}}));
      }
    }
    for (AtomId a : held)
      by_atom_[a].push_back(index);
  }
}

// The factors of `rest` must be part of the sum's, and whatever is summed in them must be whole:
// every factor of the goal's sum that carries a summed axis is in there.
bool Goals::inside_sum(const Factors& rest, const Atom& sum) const {
  Factors used;
  for (auto [a, e] : rest) {
    if (contains(sum.factors, a, e)) {
      used = product(used, Factors{{a, e}});
      continue;
    }
    const Atom& part = forms_.atom(a);
    if (part.kind != Atom::Kind::sum || e != 1 || !subset(part.bound, sum.bound)) return false;
    for (auto [inner, f] : part.factors)
      if (!contains(sum.factors, inner, f)) return false;
    for (auto [outer, f] : sum.factors) {
      if ((forms_.atom(outer).free & part.bound) == 0) continue;
      const auto same =
          std::find(part.factors.begin(), part.factors.end(), std::make_pair(outer, f));
      if (same == part.factors.end()) return false;
    }
    used = product(used, part.factors);
  }
  for (auto [a, e] : used)
    if (!contains(sum.factors, a, e)) return false;  // taken more often than the goal has it
  return true;
}

bool Goals::inside(const Monomial& v, const Monomial& goal) const {
  if (v.coefficient != Rational{} && v.coefficient != goal.coefficient) return false;
  Factors rest;  // what is not a factor of the goal itself must lie in one of its sums
  for (auto [a, e] : v.factors)
    if (!contains(goal.factors, a, e)) rest.emplace_back(a, e);
  if (rest.empty()) return true;
  for (auto [a, e] : goal.factors) {
    const Atom& s = forms_.atom(a);
    if (s.kind == Atom::Kind::sum && e == 1 && !contains(v.factors, a, 1) && inside_sum(rest, s))
      return true;
  }
  return false;
}

bool Goals::common_cofactor(const Nf& v) const {
  // v is a sum: v times one monomial must be part of one goal
  const Monomial& first = v.terms[0];
  for (NfId id : all_) {
    const Nf& goal = forms_.nf(id);
    if (goal.terms.size() < v.terms.size()) continue;
    for (const Monomial& t : goal.terms) {
      bool divides = true;
      for (auto [a, e] : first.factors)
        divides = divides && contains(t.factors, a, e);
      if (!divides) continue;
      Factors inverse = first.factors;
      for (auto& f : inverse)
        f.second = -f.second;
      const Factors cofactor = product(t.factors, inverse);
      const auto scale = multiply(
          t.coefficient, Rational{first.coefficient.den * (first.coefficient.num < 0 ? -1 : 1),
                                  std::abs(first.coefficient.num)});
      bool all = scale.has_value();
      for (std::size_t i = 0; all && i < v.terms.size(); ++i) {
        const Factors want = product(v.terms[i].factors, cofactor);
        const auto c = multiply(v.terms[i].coefficient, *scale);
        all = c && std::any_of(goal.terms.begin(), goal.terms.end(), [&](const Monomial& g) {
                return g.factors == want && g.coefficient == *c;
              });
      }
      if (all) return true;
    }
  }
  return false;
}

bool Goals::inside(NfId form) const {
  if (exact(form)) return true;
  const Nf& v = forms_.nf(form);
  if (v.terms.empty()) return false;
  if (v.terms.size() > 1) return common_cofactor(v);
  const Monomial& m = v.terms[0];
  if (m.factors.empty()) return false;
  // look only at goals that hold the first factor (or, if that is a partial sum, something inside
  // it)
  AtomId probe = m.factors[0].first;
  auto it = by_atom_.find(probe);
  if (it == by_atom_.end() && forms_.atom(probe).kind == Atom::Kind::sum)
    it = by_atom_.find(forms_.atom(probe).factors[0].first);
  if (it == by_atom_.end()) return false;
  for (int t : it->second)
    if (inside(m, terms_[t])) return true;
  // a partial sum may also be held whole by other goals
  if (forms_.atom(probe).kind == Atom::Kind::sum) {
    it = by_atom_.find(forms_.atom(probe).factors[0].first);
    if (it != by_atom_.end())
      for (int t : it->second)
        if (inside(m, terms_[t])) return true;
  }
  return false;
}

// -- programs
// ---------------------------------------------------------------------------------------------------------

std::vector<std::optional<NfId>> forms_of(const Program& program, NormalForms& forms) {
  std::vector<std::optional<NfId>> found(program.nodes.size());
  for (std::size_t i = 0; i < program.nodes.size(); ++i) {
    const Node& n = program.nodes[i];
    std::vector<NfId> args;
    for (int a : n.args)
      if (found[a]) args.push_back(*found[a]);
    if (args.size() != n.args.size()) continue;
    switch (n.op) {
      case Op::input:
        found[i] = forms.input(n.symbol, n.index);
        break;
      case Op::constant:
        found[i] = n.symbol >= 0 ? forms.named_constant(n.symbol) : forms.constant({n.num, n.den});
        break;
      case Op::add:
        found[i] = forms.add(args[0], args[1], false);
        break;
      case Op::sub:
        found[i] = forms.add(args[0], args[1], true);
        break;
      case Op::mul:
        found[i] = forms.mul(args[0], args[1]);
        break;
      case Op::div:
        if (const auto inverse = forms.inverse(args[1])) found[i] = forms.mul(args[0], *inverse);
        break;
      case Op::exp:
        found[i] = forms.exp(args[0]);
        break;
      case Op::opaque:
        found[i] = forms.opaque(n.symbol, args);
        break;
      case Op::sum:
        found[i] = forms.sum(args[0], n.axis);
        break;
      case Op::max:
        found[i] = forms.max(args[0], n.axis);
        break;
    }
  }
  return found;
}

Program without_shifts(const Program& program) {
  const auto outputs = [](const Program& p, NormalForms& forms) {
    const auto all = forms_of(p, forms);
    std::vector<std::optional<NfId>> found;
    for (int o : p.outputs)
      found.push_back(all[o]);
    return found;
  };
  Program plain = program;
  for (std::size_t i = 0; i < plain.nodes.size(); ++i) {
    if (plain.nodes[i].op != Op::max) continue;
    NormalForms forms(program.axes, 1);
    Program without = plain;
    without.nodes[i] = Node{};
    without.nodes[i].op = Op::constant;
    without.nodes[i].num = 0;
    const auto before = outputs(plain, forms), after = outputs(without, forms);
    if (before == after &&
        std::none_of(after.begin(), after.end(), [](const auto& f) { return !f; }))
      plain = std::move(without);
  }
  return plain;
}

// What the outputs need when of several nodes that are equal (x, x·1, −(−x)) the first stands for
// all: a program says no more for saying it twice.
static std::vector<bool> needed_nodes(const Program& program,
                                      const std::vector<std::optional<NfId>>& form) {
  std::unordered_map<NfId, int> first;
  for (std::size_t i = 0; i < program.nodes.size(); ++i)
    if (form[i]) first.try_emplace(*form[i], static_cast<int>(i));
  std::vector<bool> needed(program.nodes.size(), false);
  std::vector<int> todo = program.outputs;
  while (!todo.empty()) {
    const int n = form[todo.back()] ? first.at(*form[todo.back()]) : todo.back();
    todo.pop_back();
    if (needed[n]) continue;
    needed[n] = true;
    for (int a : program.nodes[n].args)
      todo.push_back(a);
  }
  return needed;
}

// -- values
// -----------------------------------------------------------------------------------------------------------

Values saturate(const Program& program, NormalForms& forms, const Limits& limits, Statistics& stats,
                const std::function<bool()>& out_of_time) {
  Values result;
  std::unordered_map<NfId, int> index;
  std::vector<std::set<Derivation>> seen;

  const auto value_of = [&](NfId form) {
    auto [it, fresh] = index.try_emplace(form, static_cast<int>(result.values.size()));
    if (fresh) {
      result.values.push_back(
          {form, forms.nf(form).free, forms.nf(form).size, forms.is_number(form), {}});
      seen.emplace_back();
    }
    return it->second;
  };
  const auto derive = [&](NfId form, Derivation d, bool own = false) {
    AxisSet carried = 0;
    bool varies = d.args.empty();  // an op of numbers alone is no work for a kernel
    for (int a : d.args) {
      // values are computed in the order of size, so there is no circle; in the program itself of
      // size, then of number: x·½ times ½ is no larger than x·½
      const int size = forms.nf(form).size, of_arg = forms.nf(result.values[a].form).size;
      if (of_arg > size || (of_arg == size && !(own && a < index.at(form)))) return -1;
      carried |= result.values[a].axes;
      varies = varies || !result.values[a].number;
    }
    if (d.axis >= 0) {
      if (!has(carried, d.axis)) return -1;
      carried &= ~bit(d.axis);
    }
    // what cancels an axis away (x - y + y) has another derivation, or none
    if (!varies || (!d.args.empty() && carried != forms.nf(form).free)) return -1;
    const int v = value_of(form);
    if (seen[v].insert(d).second) {
      result.values[v].derivations.push_back(std::move(d));
      ++stats.derivations;
    }
    return v;
  };

  // the program itself: always an answer
  const std::vector<std::optional<NfId>> node_form = forms_of(program, forms);
  Goals goals(forms);
  std::set<std::pair<int, std::vector<NfId>>>
      functions;  // opaque functions with their arguments, wanted by some goal
  std::vector<std::pair<NfId, int>> maxima;
  bool uses_add = false, uses_sub = false, uses_div = false;
  const std::vector<bool> needed = needed_nodes(program, node_form);
  for (std::size_t i = 0; i < program.nodes.size(); ++i) {
    const Node& n = program.nodes[i];
    const auto& form = node_form[i];
    if (!needed[i]) continue;
    if (!form) {
      result.stop = "constants overflow";
      return result;
    }
    uses_add = uses_add || n.op == Op::add;
    uses_sub = uses_sub || n.op == Op::sub;
    uses_div = uses_div || n.op == Op::div;
    if (n.op == Op::opaque) {
      std::vector<NfId> args;
      for (int a : n.args)
        args.push_back(*node_form[a]);
      functions.emplace(n.symbol, args);
    }
    if (n.op == Op::max) maxima.emplace_back(*node_form[n.args[0]], n.axis);
    Derivation d{n.op, n.op == Op::opaque ? n.symbol : -1, n.axis, {}, -1};
    if (n.op == Op::input || n.op == Op::constant)
      d.node = static_cast<int>(i);
    else
      for (int a : n.args)
        d.args.push_back(index.at(*node_form[a]));
    value_of(*form);
    derive(*form, d, true);
    goals.add(*form);
  }
  for (int o : program.outputs)
    result.outputs.push_back(index.at(*node_form[o]));

  const auto keep = [&](std::optional<NfId> form, Derivation d) {
    ++stats.examined;
    if (!form) return;
    if (index.count(*form) == 0 && !goals.inside(*form)) {
      ++stats.outside_goal;
      return;
    }
    derive(*form, std::move(d));
  };
  const auto pair = [&](int a, int b) {
    // copies: interning may move the forms
    const Nf x = forms.nf(result.values[a].form), y = forms.nf(result.values[b].form);
    const NfId fx = result.values[a].form, fy = result.values[b].form;
    if (x.terms.size() == 1 && y.terms.size() == 1 &&
        cancels(x.terms[0].factors, y.terms[0].factors))
      ++stats.cancelling;
    else
      keep(forms.mul(fx, fy), {Op::mul, -1, -1, {a, b}, -1});
    if (uses_div) {
      for (auto [n, d, u, v] : {std::tuple{fx, fy, a, b}, std::tuple{fy, fx, b, a}}) {
        if (a == b) continue;
        const auto inv = forms.inverse(d);
        if (!inv) continue;
        const Nf nf = forms.nf(n), df = forms.nf(*inv);
        if (nf.terms.size() == 1 && cancels(nf.terms[0].factors, df.terms[0].factors)) {
          ++stats.cancelling;
          continue;
        }
        keep(forms.mul(n, *inv), {Op::div, -1, -1, {u, v}, -1});
      }
    }
    if (uses_add && !x.terms.empty() && !y.terms.empty())
      keep(forms.add(fx, fy, false), {Op::add, -1, -1, {a, b}, -1});
    if (uses_sub && a != b) {
      keep(forms.add(fx, fy, true), {Op::sub, -1, -1, {a, b}, -1});
      keep(forms.add(fy, fx, true), {Op::sub, -1, -1, {b, a}, -1});
    }
  };

  for (std::size_t done = 0; done < result.values.size(); ++done) {
    if (static_cast<std::int64_t>(result.values.size()) > limits.max_values) {
      result.stop = "values";
      break;
    }
    if (out_of_time()) {
      result.stop = "time";
      break;
    }
    const int v = static_cast<int>(done);
    for (int axis = 0; axis < static_cast<int>(program.axes.size()); ++axis)
      if (has(result.values[v].axes, axis))
        keep(forms.sum(result.values[v].form, axis), {Op::sum, -1, axis, {v}, -1});
    for (auto [arg, axis] : maxima)
      if (arg == result.values[v].form) keep(forms.max(arg, axis), {Op::max, -1, axis, {v}, -1});
    if (goals.exact(result.values[v].form))
      keep(forms.exp(result.values[v].form), {Op::exp, -1, -1, {v}, -1});
    for (const auto& [symbol, args] : functions) {
      if (std::find(args.begin(), args.end(), result.values[v].form) == args.end()) continue;
      Derivation d{Op::opaque, symbol, -1, {}, -1};
      for (NfId a : args)
        if (auto it = index.find(a); it != index.end()) d.args.push_back(it->second);
      if (d.args.size() == args.size()) keep(forms.opaque(symbol, args), d);
    }
    for (int u = 0; u <= v && result.stop.empty(); ++u) {
      pair(u, v);
      if (forms.count() > limits.max_forms)
        result.stop = "memory";  // every pair tried leaves its form
      else if (u % 256 == 255 && out_of_time())
        result.stop = "time";
    }
    if (!result.stop.empty()) break;
  }
  stats.values += static_cast<std::int64_t>(result.values.size());
  for (Value& v : result.values)
    v.rank = forms.nf(v.form).size;
  return result;
}

}  // namespace mirage
