"""Put measured kernels in the place of those that run, between two calls of a model.

The new kernels pass the checks of `optimize()`. If one fails, all kernels stay as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mirage_hf.errors import Rejected
from mirage_hf.layers.model_kernels import ModelKernels
from mirage_hf.layers.part import Part, StepShape, block_at
from mirage_hf.match.matches import CausalMatch
from mirage_hf.patterns.schema import PatternBlock
from mirage_hf.pipeline.resolver import Resolved
from mirage_hf.swap.assemble import with_kernels
from mirage_hf.swap.check import Checked, check, check_head, check_step
from mirage_hf.swap.handle import Handle
from mirage_hf.swap.kernels import BlockKernels
from mirage_hf.swap.optimization import Optimization, fused_kernels
from mirage_hf.swap.part_rows import HEAD, checked_row, head_rows, module_rows, runs_only_in_steps
from mirage_hf.swap.swap_report import ReportRow

Key = tuple[PatternBlock, int]


@dataclass
class Replacement:
    """One exchange of kernels: what is new, what was there, and what the checks said."""

    optimization: Optimization
    handle: Handle
    #: The kernels of all blocks, the new ones included.
    found: BlockKernels
    #: The blocks whose kernels are other ones now.
    changed: set[Key]
    #: The outcome of each check by module, or by (layer or head, batch, tokens) for steps.
    outcomes: dict[object, Checked] = field(default_factory=dict)
    _undos: list[Callable[[], None]] = field(default_factory=list)

    def put_in_place(self, verify: bool) -> Rejected | None:
        """Replace the kernels of modules, and make those of whole steps. Check all of them.

        Returns:
            Why all kernels are as they were, or None.
        """
        failed: Rejected | None = Rejected("it was interrupted")
        steps = self.optimization.steps
        try:
            failed = self._exchange_modules(verify)
            if failed is None and steps is not None:
                made = self._new_steps(steps, verify)
                if isinstance(made, Rejected):
                    failed = made
                else:
                    self.optimization.steps = made
        finally:
            if failed is not None:
                for undo in reversed(self._undos):
                    undo()
        return failed

    def _exchange_modules(self, verify: bool) -> Rejected | None:
        rows = self.optimization.batch_rows
        of_modules = [shape for shape in self.optimization.shapes if shape.tokens == 1]
        for match in self.optimization.matches:
            binding = self.handle.binding(match.name)
            is_idle = binding is None or binding.retired
            if binding is None or is_idle or not self._is_changed(match.parts, of_modules):
                continue
            kernels, traced = binding.kernels, binding.traced
            counts = binding.calls, binding.fallbacks

            def undo(binding=binding, kernels=kernels, traced=traced) -> None:  # type: ignore[no-untyped-def]
                binding.kernels, binding.traced = kernels, traced

            self._undos.append(undo)
            binding.use(match, fused_kernels(match, rows, self.found))
            if not verify:
                continue
            try:
                outcome = check(match, binding)
            finally:
                binding.calls, binding.fallbacks = counts
            if isinstance(outcome, Rejected):
                return Rejected(f"{match.name}: {outcome.reason}")
            self.outcomes[match.name] = outcome
        return None

    def _is_changed(self, parts: Sequence[Part], shapes: Sequence[StepShape]) -> bool:
        """Return whether a part has another kernel in steps of a shape."""
        return any(block_at(part.block, s) in self.changed for part in parts for s in shapes)

    def _new_steps(self, steps: ModelKernels, verify: bool) -> ModelKernels | Rejected:
        """Return the kernels of whole steps, the changed ones checked."""
        causal = self.optimization.causal
        assert isinstance(causal, CausalMatch)
        made = with_kernels(steps, causal, list(self.optimization.matches), self.found)
        if isinstance(made, Rejected) or not verify:
            return made
        matches = {match.name: match for match in self.optimization.matches}
        for shape in made.shapes:
            rows, tokens = shape.batch, shape.tokens
            for layer in made.layers:
                if self._is_changed(matches[layer.name].parts, made.shapes):
                    outcome = check_step(matches[layer.name], layer, shape)
                    if isinstance(outcome, Rejected):
                        return Rejected(f"the step of {layer.name}: {outcome.reason}")
                    self.outcomes[layer.name, rows, tokens] = outcome
            if self._is_changed([causal.head], [shape]):
                outcome = check_head(made, causal, shape.rows)
                if isinstance(outcome, Rejected):
                    return Rejected(f"the {HEAD}: {outcome.reason}")
                self.outcomes[HEAD, rows, tokens] = outcome
        return made

    def report_rows(self, before: tuple[ReportRow, ...], measured: set[Key]) -> list[ReportRow]:
        """Return the rows of the report: new ones for measured blocks, others as before."""
        optimization = self.optimization
        parts = [part for match in optimization.matches for part in match.parts]
        if isinstance(optimization.causal, CausalMatch):
            parts.append(optimization.causal.head)
        shapes = optimization.shapes
        keys = [block_at(part.block, shape) for part in parts for shape in shapes]
        now = module_rows(optimization.matches, shapes, self.found)
        now += head_rows(optimization.causal, shapes, self.found)
        made = []
        for key, row, old in zip(keys, now, before, strict=False):
            if key in measured and self._runs(row):
                of_step = row.module, row.rows, row.tokens
                name: object = of_step if runs_only_in_steps(row) else row.module
                row = checked_row(row, self.outcomes.get(name))
                if key not in self.changed:
                    row = checked_row(row, _check_of(old))
                made.append(row)
            else:
                made.append(old)
        return [*made, *before[len(made) :]]

    def _runs(self, row: ReportRow) -> bool:
        """Return whether the kernels of a row are in use, now or before."""
        if not runs_only_in_steps(row):
            return self.handle.binding(row.module) is not None
        steps = self.optimization.steps
        shapes = () if steps is None else steps.shapes
        return (row.rows, row.tokens) in {(shape.batch, shape.tokens) for shape in shapes}


def _check_of(row: ReportRow) -> Checked | None:
    """Return the outcome of the check that a row shows."""
    if row.error is None or row.stock_error is None:
        return None
    return Checked(row.error, row.stock_error, row.error)


def replace_kernels(
    optimization: Optimization,
    handle: Handle,
    found: BlockKernels,
    new: Mapping[Key, Resolved],
    *,
    verify: bool,
) -> tuple[BlockKernels, int] | Rejected:
    """Put measured kernels in place.

    Args:
        optimization: The optimize() of the model.
        handle: The handle of the model, whose report gets the new rows.
        found: The present kernels of all blocks.
        new: Measured kernels. One that is slower than the library takes no place of attention,
            because the library cannot read our caches.
        verify: Whether to check them.

    Returns:
        The kernels of all blocks, and how many blocks run another kernel now. Or why all kernels
        are as they were.
    """
    usable = {
        key: kernel
        for key, kernel in new.items()
        if kernel.runs_kernel or not key[0].pattern.over_cache
    }
    changed = {key for key, kernel in usable.items() if _differ(found.get(key), kernel)}
    replacement = Replacement(optimization, handle, {**found, **usable}, changed)
    if changed:
        failed = replacement.put_in_place(verify)
        if failed is not None:
            return failed
    handle.replace_rows(replacement.report_rows(handle.stored_rows, set(usable)))
    return replacement.found, len(changed)


def _differ(one: Resolved | Rejected | None, other: Resolved) -> bool:
    """Return whether two kernels of a program are not the same."""
    if one is None or isinstance(one, Rejected):
        return True
    return one.runs_kernel != other.runs_kernel or one.entry.kernel != other.entry.kernel
