"""Random mixtures of experts of all kinds, and what is wrong with their kernels.

A case has a program, random routing, and indices of which some may be out of range. Outputs lie
between guards, which a kernel must not touch.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.errors import CodegenError, InputError
from mirage_hf.graph import strided
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.search.engine import search
from mirage_hf.tune.measure import random_inputs
from mirage_hf.tune.space import schedules
from tests.helpers.indexed_programs import SEARCH, Mixture, coded, down, gate_up, whole

#: How many random cases there are.
CASES = 1000

#: Elements before and after each output, and what they hold.
GUARD, HELD = 64, 7.25

#: Which experts tokens choose: any, all the same, each another one.
ROUTINGS = ("random", "one", "different")


@dataclass(frozen=True)
class Case:
    """A random program with its routing.

    Attributes:
        program: The program.
        experts: How many experts there are.
        routing: How tokens choose.
        outside: Whether some indices are out of range.
        text: What it is, for messages.
    """

    program: KernelGraph
    experts: int
    routing: str
    outside: bool
    text: str


def case_of(n: int, is_small: bool) -> Case:
    """Return a case. Small ones suit Triton's interpreter, which takes 1 ms for each block."""
    r = random.Random(n)
    experts = r.choice((1, 2, 3, 5, 8, 9) if is_small else (1, 2, 3, 8, 16, 33, 60, 64, 128))
    m = Mixture(
        tokens=r.randint(1, 4 if is_small else 16),
        chosen=r.randint(1, min(4 if is_small else 8, experts)),
        experts=experts,
        width=r.choice((8, 20, 32, 48) if is_small else (8, 20, 64, 96, 128, 200, 256)),
        inner=r.choice((4, 12, 16, 40) if is_small else (4, 12, 48, 96, 128, 192)),
        dtype=r.choice(("float32", "float16", "bfloat16")),
        index=r.choice(("int32", "int64")),
        layout=r.choice(("apart", "packed", "interleaved")),
        biases=r.random() < 0.4,
        norm=r.random() < 0.3,
    )
    routing, outside = r.choice(ROUTINGS), r.random() < 0.3
    kind = r.choice(("gate and up", "gate and up", "down", "down", "whole", "codes"))
    if kind == "codes":
        rows, group = r.choice((16, 32)), r.choice((32, 64))
        g = coded(m.tokens, min(m.chosen, 5), rows, group * r.randint(1, 3), group)
        return Case(g, 5, routing, outside, f"{n}: codes in groups of {group}, {routing}")
    makers: dict[str, Callable[[Mixture], KernelGraph]] = {
        "gate and up": gate_up,
        "down": down,
        "whole": whole,
    }
    return Case(makers[kind](m), experts, routing, outside, f"{n}: {kind}, {m}, {routing}")


def routed(case: Case, seed: int, shape: Iterable[int]) -> tuple[Tensor, Tensor]:
    """Return the chosen experts, and which of them are in range."""
    draw = torch.Generator().manual_seed(seed)
    shape = tuple(shape)
    if case.routing == "one":
        index = torch.full(shape, seed % case.experts)
    elif case.routing == "different":
        numbers = torch.randperm(case.experts, generator=draw)
        index = numbers.repeat(-(-shape[0] * shape[1] // case.experts))[: shape[0] * shape[1]]
        index = index.view(shape)
    else:
        index = torch.randint(0, case.experts, shape, generator=draw)
    inside = torch.ones(shape, dtype=torch.bool)
    if case.outside:
        inside = torch.rand(shape, generator=draw) < 0.6
        bad = torch.tensor([-1, case.experts, 2**31 - 1, -(2**31)])
        other = bad[torch.randint(0, len(bad), shape, generator=draw)]
        index = torch.where(inside, index, other)
    return index, inside


def inputs_of(case: Case, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the inputs of a case, and those of what it must give.

    Of the latter, indices are in range, and routing weights are 0 where those of the former are
    not.
    """
    g = case.program
    given = random_inputs(g, "cpu", seed)
    at = next(n for n, t in enumerate(g.inputs) if t.name == "e")
    index, inside = routed(case, seed, given[at].shape)
    wanted = [*given]
    given[at] = index.to(given[at].dtype)
    wanted[at] = torch.where(inside, index, 0).to(given[at].dtype)
    for n, t in enumerate(g.inputs):
        if t.name == "weights":
            wanted[n] = given[n] * inside[..., None, None]
    return given, wanted


def reference(case: Case, wanted: list[Tensor], inside: Tensor, wide: Any) -> Tensor:
    """Return what a case must give: 0 for an expert that is not read, if nothing sums experts."""
    y = run_kernel_graph(case.program, wanted, wide)[0]
    has_weights = any(t.name == "weights" for t in case.program.inputs)
    return y if has_weights else torch.where(inside[..., None, None], y, 0.0)


def wrong(numbers: Iterable[int], device: str, is_small: bool) -> list[str]:
    """Return what is wrong with the kernels of some cases."""
    found: list[str] = []
    for n in numbers:
        found += _wrong(case_of(n, is_small), n, device)
    return found


def _wrong(case: Case, seed: int, device: str) -> Iterator[str]:
    r = random.Random(seed)
    given, wanted = inputs_of(case, seed)
    at = next(n for n, t in enumerate(case.program.inputs) if t.name == "e")
    inside = (given[at] >= 0) & (given[at] < case.experts)
    exact = reference(case, wanted, inside, torch.float64)
    eager = reference(case, wanted, inside, None)
    (out,) = case.program.outputs
    ulps = 8 if out.dtype is torch.float32 else 2
    largest = max(float(exact.abs().max()), 1e-3)
    allowed = 2 * float((eager.double() - exact).abs().max())
    allowed += ulps * torch.finfo(out.dtype).eps * largest
    ugraphs = [candidate.ugraph for candidate in search(case.program, SEARCH)[0]]
    if device == "interpreted cpu":
        yield from _wrong_on_cpu(case, r.choice(ugraphs), given, inside, exact, allowed)
        return
    ugraph, choice = _scheduled(ugraphs, r)
    try:
        program = triton.generate(ugraph, choice)
    except CodegenError:
        choice = []
        program = triton.generate(ugraph)
    # `to` would close the gaps between rows of a view
    tensors = [strided.laid_out(x, x.stride(), x.dtype, device) for x in given]
    before = [x.clone() for x in tensors]
    memory = torch.full((exact.numel() + 2 * GUARD,), HELD, dtype=out.dtype, device=device)
    y = memory[GUARD:-GUARD].view(out.dims)
    compiler.load(program.source, program.digest).run(tensors, [y])
    error = float((y.cpu().double() - exact).abs().max())
    if not error <= allowed:
        yield f"{case.text} {ugraph.kernels} {choice}: {error} is more than {allowed}"
    if not bool((torch.cat([memory[:GUARD], memory[-GUARD:]]) == HELD).all()):
        yield f"{case.text}: it wrote beside its output"
    same = zip(before, tensors, strict=True)
    if not all(torch.equal(_bytes(a), _bytes(b)) for a, b in same):
        yield f"{case.text}: it wrote to an input"


def _scheduled(ugraphs: list[UGraph], r: random.Random) -> tuple[UGraph, list[Schedule]]:
    """Return a random µGraph that has schedules, with random ones. Large tiles may have none."""
    r.shuffle(ugraphs)
    for last, ugraph in zip((*[False] * (len(ugraphs) - 1), True), ugraphs, strict=True):
        try:
            return ugraph, [r.choice(schedules(op, limit=24)) for op in place_kernels(ugraph)]
        except CodegenError:
            if last:
                raise
    raise AssertionError("the search found no µGraph")


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _wrong_on_cpu(
    case: Case,
    ugraph: UGraph,
    given: list[Tensor],
    inside: Tensor,
    exact: Tensor,
    allowed: float,
) -> Iterator[str]:
    """Run a case as the backend "cpu" does, which refuses indices out of range."""
    try:
        (y,) = run_kernel_graph(ugraph.kernels, given)
    except InputError as error:
        if bool(inside.all()) or "index" not in str(error):
            yield f"{case.text}: {error}"
        return
    if not bool(inside.all()):
        yield f"{case.text}: indices out of range are taken"
    error = float((y.double() - exact).abs().max())
    if not error <= allowed:
        yield f"{case.text}: {error} is more than {allowed}"


def main(first: int, last: int) -> None:
    """Print what is wrong with small cases in Triton's interpreter, as JSON."""
    print(json.dumps(wrong(range(first, last), "cpu", is_small=True)))
