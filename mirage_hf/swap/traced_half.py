"""Run the half of a layer after its attention as it was recorded, if kernels know no such MLP.

An example is a mixture of experts. Kernels run its norms, linears, router and experts, and add to
the residual stream. Torch runs what is left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mirage_hf.errors import MirageError, described
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.layers.step import LayerStep
from mirage_hf.pipeline.resolver import NO_KERNEL, Resolved, why_none
from mirage_hf.swap.swap_report import STOCK, TRACED, ReportRow, resolved_row
from mirage_hf.trace.coded_linear import coded_linears_as_one_node
from mirage_hf.trace.experts.fixed_shape import experts_of_fixed_shape
from mirage_hf.trace.experts.op import EXPERTS, experts_as_one_node
from mirage_hf.trace.fake_mode import FakeOnceMode
from mirage_hf.trace.near_ties import KeepChoices, TakeChoices
from mirage_hf.trace.record import Recording, TraceError, record
from mirage_hf.trace.step_ops import RegionRun
from mirage_hf.trace.step_plan import StepPlan
from mirage_hf.trace.torch_functions import torch_functions_only
from mirage_hf.trace.weight_names import weight_path

#: How far a traced half may be from its own forward, in units of the largest number that it adds.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
#: Draws of inputs for the comparison.
_DRAWS = 2


class TracedHalf:
    """The half of a layer with its MLP for some number of tokens, mostly by kernels.

    It serves the weights that lay where they lie now. `ModelFingerprint` tells if they move.
    """

    def __init__(self, plan: StepPlan):
        self._inputs: dict[str, Tensor] = {}
        self._run = plan.bind(self._inputs, (), replaced=("out",))
        self._lock = threading.Lock()

    def __call__(self, x: Tensor, h: Tensor) -> Tensor:
        """Return what `LayerStep.own_half` does."""
        with self._lock, torch.no_grad():
            self._inputs.update(x=x, h=h, out=torch.empty_like(h))
            self._run()
            out = self._inputs["out"]
            self._inputs.clear()
        return out


class HalfTracer:
    """Traces halves of a model's layers. Equal programs are resolved once.

    Args:
        model: The model.
        resolve: Finds the kernel of a program, as `resolver.resolve`.
    """

    def __init__(self, model: Any, resolve: Callable[..., Resolved]):
        self.model, self.resolve = model, resolve
        self.paths = {id(p): name for name, p in model.named_parameters()}
        self._found: dict[str, Resolved | str] = {}

    def trace(self, path: str, step: LayerStep, like: Tensor) -> tuple[TracedHalf, list[ReportRow]]:
        """Return the half of a layer by kernels, and the rows of the report.

        Args:
            path: The layer's name in the model.
            step: Its step.
            like: A tensor such as the residual stream (tokens, width).

        Raises:
            TraceError: It cannot be recorded, there are no kernels for it or for its experts, or it
                computes other numbers.
        """
        try:
            recording = self._recorded(step, like)
        except TraceError:
            raise
        except Exception as error:  # the forward may raise anything on fake tensors
            raise TraceError(f"its forward raised {described(error)}") from None
        plan = StepPlan(recording, len(like))
        kernels = {g: k.run for g, p in plan.programs.items() if (k := self._kernel(p.graph))}
        plan.schedule(kernels)
        regions = {
            region: RegionRun(k.run, (0, 0) in k.in_place)
            for region in plan.regions_to_run()
            if (k := self._kernel(region.graph))
        }
        experts = sum(node.name == EXPERTS for node in recording.nodes)
        if sum(bool(region.reads) for region in regions) < 2 * experts:
            without = [r for r in plan.regions_to_run() if r.reads and r not in regions]
            why = why_none(self._found[str(region.graph)] for region in without)
            raise TraceError(f"its experts have no kernel{why}")
        if not kernels and not regions:
            raise TraceError("nothing of it has a kernel")
        plan.schedule(kernels, regions=regions)
        traced = TracedHalf(plan)
        if wrong := _difference(step, traced, like):
            raise TraceError(wrong)
        return traced, [*self._rows(path, plan)]

    def _recorded(self, step: LayerStep, like: Tensor) -> Recording:
        with (
            closing(FakeOnceMode()) as mode,
            torch_functions_only(),
            coded_linears_as_one_node(self.model) as coded,
            experts_of_fixed_shape(self.model),
            experts_as_one_node(),
        ):
            names = ("x", "h", "out") if step.layout.parallel else ("h", "out")
            with mode:
                inputs = {name: torch.empty_like(like) for name in names}

            def call() -> None:
                h = inputs["h"]
                inputs["out"].copy_(step.own_half(inputs.get("x", h), h))

            return replace(record(call, inputs, mode), coded=coded)

    def _kernel(self, program: KernelGraph) -> Resolved | None:
        """Return the kernel of a program, None if there is none."""
        text = str(program)
        if text not in self._found:
            try:
                self._found[text] = self.resolve(program, pattern=TRACED)
            except MirageError as error:
                self._found[text] = f"{NO_KERNEL}{error}"
        kernel = self._found[text]
        return None if isinstance(kernel, str) or not kernel.runs_kernel else kernel

    def _rows(self, path: str, plan: StepPlan) -> Iterator[ReportRow]:
        """Yield a row for each program that was asked for."""
        row = ReportRow(path, TRACED, STOCK, rows=plan.rows)
        for group, program in plan.programs.items():
            names = [weight_path(plan, p.operands[1], self.paths) for p in group.products]
            part = ", ".join(name.removeprefix(f"{path}.") for name in names)
            yield resolved_row(replace(row, part=part), self._found[str(program.graph)])
        asked = [region for region in plan.regions if str(region.graph) in self._found]
        kinds = [region.kind for region in asked]
        for number, region in enumerate(asked):
            part = region.kind
            if kinds.count(part) > 1:
                part = f"{part}, program {kinds[: number + 1].count(part)}"
            yield resolved_row(replace(row, part=part), self._found[str(region.graph)])


def _difference(step: LayerStep, traced: TracedHalf, like: Tensor) -> str:
    """Return how a traced half differs from its own forward on random inputs, or ""."""
    tolerance, ulp = _TOLERANCE.get(like.dtype, 0.0), torch.finfo(like.dtype).eps
    generator = torch.Generator(like.device).manual_seed(0)

    def draw() -> Tensor:
        x = torch.randn(like.shape, generator=generator, dtype=torch.float32, device=like.device)
        return x.to(like.dtype)

    for _ in range(_DRAWS):
        h = draw()
        x = draw() if step.layout.parallel else h
        with torch.no_grad():
            with KeepChoices() as choices:
                wanted = step.own_half(x, h)
            with TakeChoices(choices, tolerance):
                found = traced(x, h)
        added, difference = (float(y.abs().max()) for y in (wanted - h, wanted - found))
        allowed = tolerance * max(added, 1e-6) + ulp * float(wanted.abs().max())
        if not difference <= allowed:
            return f"it differs from its own forward by {difference:.1e}, which adds {added:.1e}"
    return ""
