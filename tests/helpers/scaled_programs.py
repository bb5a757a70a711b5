"""Kernels whose codes are scaled before tensor cores sum several groups, and wrong ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from mirage_hf.codegen import triton
from mirage_hf.codegen.placement import place_kernels
from mirage_hf.codegen.plan import plan_kernel
from mirage_hf.codegen.schedule import Schedule
from mirage_hf.graph.block import Role
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.graph.ugraph import UGraph
from mirage_hf.search.engine import search
from mirage_hf.search.scaled_codes import sums_groups_of_codes, with_scaled_codes
from mirage_hf.search.search_options import SearchOptions
from tests.helpers.coded_programs import _Exact, int4_joined, int4_linear

#: Programs by name.
PROGRAMS = {
    "16 rows, groups of 32": lambda: int4_linear(16, 32, 256, 32, dtype="bfloat16"),
    "16 rows, groups of 32, zero points": lambda: int4_linear(16, 32, 256, 32, zeros=True),
    "16 rows, groups of 64, norm": lambda: int4_linear(16, 32, 256, 64, norm=True),
    "16 rows, five groups": lambda: int4_linear(16, 32, 160, 32, dtype="bfloat16"),
    "3 rows, groups of 32": lambda: int4_linear(3, 32, 256, 32),
    "64 rows, groups of 64, zero points": lambda: int4_linear(
        64, 64, 256, 64, zeros=True, dtype="bfloat16"
    ),
    "128 rows, groups of 128": lambda: int4_linear(128, 64, 512, 128),
    "three linears joined": lambda: int4_joined(16, (32, 16, 16), 256, 32),
}


def scaled_form(g: KernelGraph) -> UGraph:
    """Return a single kernel that loops over groups and scales codes, made of a search's result.

    Raises:
        AssertionError: There is none.
    """
    for ranked in search(g, SearchOptions(threads=1))[0]:
        if ranked.ugraph.num_kernels > 1:
            continue
        made = with_scaled_codes(ranked.ugraph)
        if made is not None and sums_groups_of_codes(made) and any(scaled_schedules(made)):
            return made
    raise AssertionError("no scale can be moved into a factor")


def scaled_schedules(ugraph: UGraph) -> Iterator[Schedule]:
    """Yield schedules of one and of several groups a step, with the weights as either factor."""
    (op,) = place_kernels(ugraph)
    block = op.block
    assert block is not None
    if [a.name for a in block.named(Role.LOOP)] != ["k"]:
        return
    rows = max(8, 1 << (block.axis("m").size - 1).bit_length())
    for groups in (1, 2, 4):
        sizes = {"k": groups, "m": rows, "n": 16, "b": 1}
        tiles = {a.name: sizes.get(a.name, a.size) for a in block.axes}
        for weights_first in (True, False):
            for stages, blocks in ((1, 1), (3, 1), (3, 2)):
                shared = groups * blocks <= block.axis("k").size // 2
                schedule = Schedule(
                    tiles,
                    mma=True,
                    weights_first=weights_first,
                    num_warps=1,
                    num_stages=stages,
                    cooperating_blocks=blocks if shared else 1,
                )
                if plan_kernel(op, schedule).layout.scaled_factors:
                    yield schedule


def errors_of(g: KernelGraph) -> list[tuple[int, bool, int, float, float]]:
    """Return (groups a step, weights first, stages, error, eager's error) of kernels."""
    exact, ugraph = _Exact(g), scaled_form(g)
    results = []
    for s in dict.fromkeys(scaled_schedules(ugraph)):
        error = exact.error_of(triton.generate(ugraph, [s]))
        results.append((s.tiles["k"], s.weights_first, s.num_stages, error, exact.allowed))
    return results


#: Errors of kernels and of eager, by name.
Errors = dict[str, tuple[float, float]]

#: The name of a kernel whose text is not changed.
UNCHANGED = "the kernel itself"

#: Changes of the text of a kernel, by name: what is replaced, and by what.
CHANGES = {
    "no scale": (" * scales[:, :, None]", " * 1.0"),
    "the scale of the next group": ("* 8 + k[None, :]", "* 8 + (k[None, :] + 1) % 8"),
    "the scale of the first group of a step": ("* 8 + k[None, :]", "* 8 + k0 + 0 * k[None, :]"),
    "another zero point": (", 136.0, ", ", 137.0, "),
    "other codes": ("[1, 0, 2, 3])", "[0, 1, 2, 3])"),
}


def mutant_errors(g: KernelGraph, changes: Mapping[str, tuple[str, str]]) -> Errors:
    """Return (error, eager's error) of a kernel, and of wrong ones, by the name of the change.

    Args:
        g: A program with 16 rows and groups of 32.
        changes: Changes of the kernel's text, by name: what is replaced, and by what.
    """
    exact, ugraph = _Exact(g), scaled_form(g)
    staged = (s for s in scaled_schedules(ugraph) if s.num_stages > 1 and s.weights_first)
    schedule = next(s for s in staged if s.tiles["k"] == 4)
    program = triton.generate(ugraph, [schedule])
    errors = {UNCHANGED: (exact.error_of(program), exact.allowed)}
    for name, (old, new) in changes.items():
        assert old in program.source, (name, program.source)
        changed = replace(program, source=program.source.replace(old, new))
        errors[name] = exact.error_of(changed), exact.allowed
    return errors


def check_errors(results: Iterable[tuple[int, bool, int, float, float]]) -> None:
    """Check that kernels are as close to float64 as torch, and that all kinds were run."""
    kinds = set()
    for groups, weights_first, stages, error, eager in results:
        assert error <= 1.25 * eager + 1e-4, (groups, weights_first, stages, error, eager)
        kinds |= {("groups", groups), ("stages", stages)}
    assert kinds == {*(("groups", n) for n in (1, 2, 4)), *(("stages", n) for n in (1, 3))}


def check_mutants(errors: Errors, changes: Mapping[str, tuple[str, str]]) -> None:
    """Check that a kernel is close to float64, and that its mutants are far from it."""
    assert errors.keys() == {UNCHANGED, *changes}
    for name, (error, eager) in errors.items():
        is_close = error <= 1.25 * eager + 1e-4
        assert is_close if name == UNCHANGED else error > 10 * eager, name


def instructions_of(rows: int, group: int) -> tuple[UGraph, Schedule, int]:
    """Return a kernel of a long linear, its schedule, and the codes of each thread."""
    g = int4_linear(rows, 4096, 4096, group, dtype="bfloat16")
    ugraph, groups = scaled_form(g), 128 // group
    sizes = {"k": groups, "m": rows, "n": 128}
    (op,) = place_kernels(ugraph)
    assert op.block is not None
    tiles = {a.name: sizes.get(a.name, a.size) for a in op.block.axes}
    warps = 4 if rows < 128 else 8
    schedule = Schedule(tiles, mma=True, weights_first=rows < 64, num_warps=warps, num_stages=3)
    return ugraph, schedule, 128 * 4096 // (32 * warps)


def main() -> None:
    """Print the errors of all programs and mutants as JSON."""
    errors: dict[str, object] = {name: errors_of(make()) for name, make in PROGRAMS.items()}
    print(
        json.dumps(
            errors | {"mutants": mutant_errors(PROGRAMS["16 rows, groups of 32"](), CHANGES)}
        )
    )
