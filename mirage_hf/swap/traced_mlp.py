"""Run an MLP of another kind, such as a mixture of experts, as its forward was recorded.

Kernels run its router, its experts and its linears. Torch runs what is left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.errors import MirageError, described
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.layers.compose import apply_own_mlp
from mirage_hf.pipeline.resolver import Resolved
from mirage_hf.swap.swap_report import STOCK, TRACED, ReportRow, resolved_row
from mirage_hf.trace.coded_linear import coded_linears_as_one_node
from mirage_hf.trace.experts import experts_as_one_node
from mirage_hf.trace.fixed_experts import experts_of_fixed_shape
from mirage_hf.trace.near_ties import KeepChoices, TakeChoices
from mirage_hf.trace.plan import RegionRun, StepPlan
from mirage_hf.trace.record import FakeOnceMode, Recording, TraceError, record
from mirage_hf.trace.torch_functions import torch_functions_only
from mirage_hf.trace.weight_names import weight_path

#: How far a traced MLP may be from its own forward, in units of the largest element.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
#: Draws of inputs for the comparison.
_DRAWS = 2


class TracedMlp:
    """An MLP for some number of tokens, with kernels in place of most of its torch ops.

    It serves the weights that lay where they lie now. `ModelFingerprint` tells if they move.
    """

    def __init__(self, plan: StepPlan):
        self._inputs: dict[str, Tensor] = {}
        self._run = plan.bind(self._inputs, ())
        self._lock = threading.Lock()

    def __call__(self, x: Tensor) -> Tensor:
        """Return what the MLP gives for x (tokens, 1, width)."""
        out = torch.empty_like(x)
        with self._lock, torch.no_grad():
            self._inputs.update(x=x, out=out)
            self._run()
            self._inputs.clear()
        return out


class MlpTracer:
    """Traces the MLPs of a model. Equal programs are resolved once.

    Args:
        model: The model.
        resolve: Finds the kernel of a program, as `resolver.resolve`.
    """

    def __init__(self, model: Any, resolve: Callable[..., Resolved]):
        self.model, self.resolve = model, resolve
        self.paths = {id(p): name for name, p in model.named_parameters()}
        self._found: dict[str, Resolved | str] = {}

    def trace(self, path: str, mlp: nn.Module, like: Tensor) -> tuple[TracedMlp, list[ReportRow]]:
        """Return an MLP with kernels, and the rows of the report.

        Args:
            path: Its name in the model.
            mlp: The MLP.
            like: A tensor such as it gets, (tokens, 1, width).

        Raises:
            TraceError: It cannot be recorded, its experts have no kernel, or it computes other
                numbers.
        """
        try:
            recording = self._recorded(mlp, like)
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
        if not any(region.reads for region in regions):
            raise TraceError("its experts have no kernel")
        plan.schedule(kernels, regions=regions)
        traced = TracedMlp(plan)
        if wrong := _difference(mlp, traced, like):
            raise TraceError(wrong)
        return traced, [*self._rows(path, plan)]

    def _recorded(self, mlp: nn.Module, like: Tensor) -> Recording:
        with (
            closing(FakeOnceMode()) as mode,
            torch_functions_only(),
            coded_linears_as_one_node(self.model) as coded,
            experts_of_fixed_shape(self.model),
            experts_as_one_node(),
        ):
            with mode:
                inputs = {name: torch.empty_like(like) for name in ("x", "out")}

            def call() -> None:
                inputs["out"].copy_(apply_own_mlp({"mlp": mlp}, "mlp", inputs["x"]))

            return replace(record(call, inputs, mode), coded=coded)

    def _kernel(self, program: KernelGraph) -> Resolved | None:
        """Return the kernel of a program, None if there is none."""
        text = str(program)
        if text not in self._found:
            try:
                self._found[text] = self.resolve(program, pattern=TRACED)
            except MirageError as error:
                self._found[text] = f"no kernel: {error}"
        kernel = self._found[text]
        return None if isinstance(kernel, str) or not kernel.runs_kernel else kernel

    def _rows(self, path: str, plan: StepPlan) -> Iterator[ReportRow]:
        """Yield a row for each program that was asked for."""
        row = ReportRow(path, TRACED, STOCK, rows=plan.rows)
        for group, program in plan.programs.items():
            names = [weight_path(plan, p.operands[1], self.paths) for p in group.products]
            part = ", ".join(name.removeprefix(f"{path}.") for name in names)
            yield resolved_row(replace(row, part=part), self._found[str(program.graph)])
        programs = [region for region in plan.regions if str(region.graph) in self._found]
        for number, region in enumerate(programs, 1):
            part = region.kind if len(programs) == 1 else f"{region.kind}, program {number}"
            yield resolved_row(replace(row, part=part), self._found[str(region.graph)])


def _difference(mlp: nn.Module, traced: TracedMlp, like: Tensor) -> str:
    """Return how a traced MLP differs from its own forward on random inputs, or ""."""
    tolerance = _TOLERANCE.get(like.dtype, 0.0)
    generator = torch.Generator(like.device).manual_seed(0)
    for _ in range(_DRAWS):
        x = torch.randn(like.shape, generator=generator, dtype=torch.float32, device=like.device)
        x = x.to(like.dtype)
        with torch.no_grad():
            with KeepChoices() as choices:
                wanted = apply_own_mlp({"mlp": mlp}, "mlp", x)
            with TakeChoices(choices, tolerance):
                found = traced(x)
        most, difference = (float(y.abs().max()) for y in (wanted, wanted - found))
        if not difference <= tolerance * max(most, 1e-6):
            return f"it differs from its own forward by {difference:.1e}, of up to {most:.1e}"
    return ""
