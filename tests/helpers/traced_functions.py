"""Recordings of small functions, and plans that run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mirage_hf.graph import coded
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.trace.groups import Group
from mirage_hf.trace.record import Recording, record
from mirage_hf.trace.sizes import Sizes
from mirage_hf.trace.step_ops import Run
from mirage_hf.trace.step_plan import StepPlan
from mirage_hf.trace.term import Term
from mirage_hf.trace.terms import Terms

Function = Callable[..., Tensor | tuple[Tensor, ...]]

#: Rows and widths of the functions.
ROWS, WIDTH, WIDE = 3, 8, 12


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def outputs_of(function: Function, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Return what a function gives for copies of the inputs."""
    with torch.no_grad():
        found = function(**{name: x.clone() for name, x in inputs.items()})
    return found if isinstance(found, tuple) else (found,)


def recorded(function: Function, inputs: Mapping[str, Tensor]) -> Recording:
    """Record a function whose results are copied into the inputs `out.0`, `out.1`, ….

    A step, too, writes its results into tensors that it is given.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    given = {**inputs, **places_of(outputs_of(function, inputs))}
    fakes = {name: mode.from_tensor(x) for name, x in given.items()}

    def step() -> None:
        found = function(**{name: fakes[name] for name in inputs})
        for n, x in enumerate(found if isinstance(found, tuple) else (found,)):
            fakes[f"out.{n}"].copy_(x)

    return record(step, fakes, mode)


def places_of(results: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Return tensors that results can be copied into, by name."""
    return {f"out.{n}": torch.zeros_like(x) for n, x in enumerate(results)}


def terms_of(function: Function, inputs: Mapping[str, Tensor], rows: int = ROWS) -> list[Term]:
    """Return the computed terms of a function."""
    return Terms(recorded(function, inputs), rows).all()


def plan_of(function: Function, inputs: Mapping[str, Tensor], rows: int = ROWS) -> StepPlan:
    """Return the plan of a function, without kernels yet."""
    return StepPlan(recorded(function, inputs), rows)


def program_kernels(plan: StepPlan) -> dict[Group, Run]:
    """Return kernels that run the programs op by op, and check the form of their inputs."""
    return {group: runs(program.graph) for group, program in plan.programs.items()}


def runs(graph: Any) -> Run:
    """Return a kernel that runs a program op by op."""

    def run(inputs: Any) -> list[Tensor]:
        for given, x in zip(graph.inputs, inputs, strict=True):
            wanted = coded.storage(given)
            assert (tuple(x.shape), x.dtype) == (wanted.dims, wanted.dtype), (wanted, x.shape)
            strides = zip(x.stride(), wanted.strides, wanted.dims, strict=True)
            assert all(a == b for a, b, dim in strides if dim > 1), (wanted, x.stride())
        return run_kernel_graph(graph, inputs)

    return run


def results_of(
    plan: StepPlan, inputs: Mapping[str, Tensor], results: tuple[Tensor, ...], sizes: Sizes = ()
) -> tuple[Tensor, ...]:
    """Run a scheduled plan on copies of the inputs, twice, and return the second results."""
    given: dict[str, Tensor] = {}
    places = places_of(results)
    given.update(places)
    given.update({name: x.clone() for name, x in inputs.items()})
    run = plan.bind(given, sizes)
    run()
    for name, x in inputs.items():
        given[name].copy_(x)
    with torch.no_grad():
        run()
    return tuple(places.values())
