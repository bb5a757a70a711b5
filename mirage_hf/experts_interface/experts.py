"""Experts as transformers calls them: by kernels if they may run, else by stock's products."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.errors import MirageError, described
from mirage_hf.pipeline import resolver
from mirage_hf.trace.experts.decoded import run_decoded
from mirage_hf.trace.experts.form import ExpertsForm, form_of
from mirage_hf.trace.experts.op import (
    EXPERTS_FUNCTIONS,
    MOST_TOKENS,
    REGISTRIES,
    experts_as_one_node,
)
from mirage_hf.trace.fake_mode import FakeOnceMode
from mirage_hf.trace.record import record
from mirage_hf.trace.step_ops import RegionRun
from mirage_hf.trace.step_plan import StepPlan

_log = logging.getLogger("mirage_hf")

#: The name of the implementation.
NAME = "mirage"
#: Finds the kernel of a program.
Resolve = Callable[..., resolver.Resolved]


@dataclass(frozen=True)
class _Run:
    """What runs experts for some sizes.

    Attributes:
        run: Takes the inputs, the chosen experts and their weights.
        experts: How many experts there are.
    """

    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    experts: int


@dataclass(frozen=True)
class ExpertsReport:
    """The calls of experts in this process, by models that asked for them by name.

    Attributes:
        by_kernels: Calls that kernels ran, by their sizes. Replays of CUDA graphs are not counted.
        by_torch: Calls that stock's grouped products ran, by reason.
    """

    by_kernels: Mapping[str, int]
    by_torch: Mapping[str, int]

    def __str__(self) -> str:
        counts = sum(self.by_kernels.values()), sum(self.by_torch.values())
        return "\n".join(
            [
                f'mirage_hf: experts "{NAME}", {counts[0]} calls by kernels, {counts[1]} by torch',
                *(f"kernels for {title}: {n}" for title, n in sorted(self.by_kernels.items())),
                *(f"by torch: {reason}: {n}" for reason, n in sorted(self.by_torch.items())),
            ]
        )


class Experts:
    """The experts function of one name, with its kernels and counts.

    Args:
        backend: As in `optimize`. "cpu" runs kernels as torch code on the CPU.
        tune: As in `optimize`.
    """

    def __init__(self, backend: str = "auto", tune: str = "auto"):
        self.backend, self.tune = backend, tune
        self.device_type = "cpu" if backend == "cpu" else "cuda"
        self._by_kernels: Counter[str] = Counter()
        self._by_torch: Counter[str] = Counter()
        #: By module: where its weights lie, and by sizes what runs its experts, or why no kernel.
        self._runs: weakref.WeakKeyDictionary[nn.Module, tuple[Any, dict[Any, _Run | str]]] = (
            weakref.WeakKeyDictionary()
        )
        #: Kernels of programs by their text: the layers of a model share them.
        self._found: dict[str, resolver.Resolved] = {}
        self._lock = threading.RLock()
        self._local = threading.local()

    @contextmanager
    def resolved_by(self, resolve: Resolve | None) -> Iterator[None]:
        """Let this thread find kernels in another way."""
        before = getattr(self._local, "resolve", None)
        self._local.resolve = resolve
        try:
            yield
        finally:
            self._local.resolve = before

    def register(self, name: str) -> None:
        """Make models run this function for `experts_implementation=name`, if there are such."""
        for registry in REGISTRIES:
            registry.register(name, self.forward)

    def report(self) -> ExpertsReport:
        """Return what ran so far."""
        return ExpertsReport(dict(self._by_kernels), dict(self._by_torch))

    def forward(self, module: nn.Module, x: Tensor, index: Tensor, weights: Tensor) -> Any:
        """Compute the sum of the chosen experts of each token, times their weights.

        Args:
            module: The experts.
            x: (tokens, width).
            index: (tokens, chosen): the experts that each token chose.
            weights: (tokens, chosen).
        """
        is_compiling = torch.compiler.is_compiling()
        reason = "torch.compile" if is_compiling else self._obstacle(x, index, weights)
        if not reason:
            run = self._find(module, x, index, weights)
            if not isinstance(run, str):
                self._by_kernels[_title(module, x, index, run.experts)] += 1
                return run.run(x, index, weights)
            reason = run
        if not is_compiling:
            self._by_torch[reason] += 1
        form = form_of(module, x.dtype)
        if isinstance(form, ExpertsForm) and form.is_coded:
            return run_decoded(form, x, index, weights)
        # as stock's generate chooses for its steps
        is_small = x.device.type != "cpu" and len(x) <= MOST_TOKENS
        return EXPERTS_FUNCTIONS["batched_mm" if is_small else "grouped_mm"](
            module, x, index, weights
        )

    def _obstacle(self, x: Tensor, index: Tensor, weights: Tensor) -> str:
        """Return why no kernels may run, whatever the experts are; "" if they may."""
        if x.device.type != self.device_type:
            return f"tensors on {x.device.type}"
        if x.dim() != 2 or index.dim() != 2 or index.shape != weights.shape:
            return "tensors of another form"
        if len(x) > MOST_TOKENS:
            return f"more than {MOST_TOKENS} tokens"
        if not len(x):
            return "no tokens"
        if torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad):
            return "gradients"
        if torch.is_autocast_enabled(x.device.type):
            return "autocast"
        modes = torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None
        if modes or type(x) is not Tensor:
            return "a dispatch mode, a trace, or tensors of another class"
        return ""

    def _find(self, module: nn.Module, x: Tensor, index: Tensor, weights: Tensor) -> _Run | str:
        """Return what runs a module's experts. Kernels are found at the first call of each size."""
        form = form_of(module, x.dtype)
        if not isinstance(form, ExpertsForm):
            return form.reason
        parameters = form.parameters
        if torch.is_grad_enabled() and any(p.requires_grad for p in parameters):
            return "gradients"
        where = tuple(p.data_ptr() for p in parameters)
        key = (len(x), index.shape[1], x.dtype, index.dtype, weights.dtype)
        place, known = self._runs.get(module, (None, {}))
        if place != where:  # other weights, or none so far
            known = {}
            self._runs[module] = where, known
        if key not in known:
            if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return "no kernel was found before the CUDA graph was captured"
            with self._lock:
                made = self._make(module, x, index, weights)
                experts = len(form.first.tensors[0])
                known[key] = made if isinstance(made, str) else _Run(made, experts)
        return known[key]

    def _make(
        self, module: nn.Module, x: Tensor, index: Tensor, weights: Tensor
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor] | str:
        try:
            with torch.inference_mode(False), torch.no_grad():
                plan = _plan_of(module, x, index, weights)
                runs = {region: RegionRun(self._kernel(region.graph, x)) for region in plan.regions}
        except (MirageError, torch.OutOfMemoryError) as e:
            return f"no kernel: {e if isinstance(e, MirageError) else described(e)}"
        if len(runs) < 2:
            return "experts whose gate is of another form"
        plan.schedule({}, regions=runs)
        inputs: dict[str, Tensor] = {}
        action = plan.bind(inputs, (), replaced=("out",))

        def run(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            with self._lock, torch.no_grad():
                inputs.update(x=x, index=index, weights=weights, out=torch.empty_like(x))
                action()
                out = inputs["out"]
                inputs.clear()
            return out

        return run

    def _kernel(self, program: Any, like: Tensor) -> Callable[..., list[Tensor]]:
        """Return the kernel of a program: looked up, or searched and tuned.

        Raises:
            MirageError: There is none.
        """
        text = f"{like.device}: {program}"
        if text not in self._found:
            resolve = getattr(self._local, "resolve", None)
            if resolve is None:
                _log.warning("experts: searching a kernel, which is kept in the user's cache")
                resolve = partial(
                    resolver.resolve, device=like.device, backend=self.backend, tune=self.tune
                )
            self._found[text] = resolve(program, pattern="experts")
        kernel = self._found[text]
        if not kernel.runs_kernel:
            raise MirageError(kernel.reason)
        return kernel.run


def _plan_of(module: nn.Module, x: Tensor, index: Tensor, weights: Tensor) -> StepPlan:
    """Return the plan of a call of experts, whose result goes to the input "out"."""
    with closing(FakeOnceMode()) as mode, experts_as_one_node():
        with mode:
            names = {"x": x, "index": index, "weights": weights, "out": x}
            inputs = {name: torch.empty_like(t) for name, t in names.items()}

        def call() -> None:
            stock = EXPERTS_FUNCTIONS["batched_mm"]
            inputs["out"].copy_(stock(module, inputs["x"], inputs["index"], inputs["weights"]))

        return StepPlan(record(call, inputs, mode), len(x))


def _title(module: nn.Module, x: Tensor, index: Tensor, experts: int) -> str:
    return f"{len(x)} tokens × {index.shape[1]} of {experts} {type(module).__name__}"
