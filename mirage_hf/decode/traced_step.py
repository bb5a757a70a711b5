"""The traced step: a model's own forward, recorded once, with kernels in place of its products.

What no kernel runs, runs as the torch op that was recorded (step_recording.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mirage_hf.decode.cache_block import CacheBlock
from mirage_hf.decode.choosing import Chooser
from mirage_hf.decode.drafts import Drafts
from mirage_hf.decode.kernels.embedding import Window
from mirage_hf.decode.masks import MaskPlan
from mirage_hf.decode.recorded_inputs import (
    PLAIN_MASK,
    mask_inputs,
    plain_mask,
    sizes_of,
    step_inputs,
    tensors_of,
)
from mirage_hf.decode.rings import Ring
from mirage_hf.decode.step import Step, step_masks
from mirage_hf.decode.step_beginning import StepBeginning
from mirage_hf.layers.step import TokenBounds
from mirage_hf.trace.step_plan import StepPlan
from mirage_hf.trace.successive import kept_name


class TracedStep(Step):
    """A recorded forward, with kernels in place of some of its ops."""

    runs_modules = False

    def __init__(
        self,
        plan: StepPlan,
        block: CacheBlock,
        masks: MaskPlan,
        drafts: Drafts | None = None,
        *,
        graphs: bool,
        graph_key: object,
    ):
        super().__init__(block, graphs, graph_key)
        self._beginning: StepBeginning | None = None
        self.plan, self.masks, self.drafts = plan, masks, drafts
        self._inputs = step_inputs(block) | {"logits": self.logits}
        self._of_tokens = {} if drafts is None else self._bounds_of_tokens(drafts)
        #: The states after each token (tokens, batch, …) by name. A replayed step has its own.
        self._kept: dict[str, Tensor] = {}
        self._run: Callable[[], None] | None = None
        self._bool_masks = {n for n, x in plan.recording.inputs.items() if x.dtype == torch.bool}

    @property
    def logits(self) -> Tensor:
        """The logits that the step leaves."""
        return self.block.logits if self.drafts is None else self.drafts.logits

    def held(self) -> Any:
        """Return what a captured graph reads besides the block and the model."""
        return self._run, self._beginning, self._of_tokens, self._kept

    def _name(self, chooser: Chooser | None) -> tuple[Any, ...]:
        ops = self.plan.position_ops if self._has_rows_of_tables else None
        return *super()._name(chooser), None if ops is None else ops.versions

    @property
    def _has_rows_of_tables(self) -> bool:
        """Whether its positions are rows of tables, which have one for each slot."""
        return self.drafts is None and self.block.positions_within_slots

    def _forward(self) -> None:
        if self._run is None:
            self._keep_states()
            self._run = self._bound()
        with torch.no_grad():
            rows = self.block.control
            if self.drafts is not None:
                rows = self.drafts.as_rows(rows)
                self._inputs.update(tensors_of(rows))
            if self.plan.reads_masks():
                masks, slots = step_masks(self.masks, self.block, rows)
                if f"mask.{PLAIN_MASK}" in self.plan.recording.inputs:
                    masks = {PLAIN_MASK: plain_mask(rows)}
                inputs = mask_inputs(masks, slots)
                for name in inputs.keys() & self._bool_masks:
                    inputs[name] = inputs[name] == 0
                self._inputs.update(inputs)
            if self._beginning is not None:
                self._beginning.run(self.block)
            self._inputs.update(self._bounds())
            self._run()

    def _bound(self) -> Callable[[], None]:
        """Return what runs the step, after what begins it."""
        if self._has_rows_of_tables:
            distinct = dict.fromkeys(self._windows().values())
            self._beginning = StepBeginning.of(self.plan, self.block, distinct)
        begun = self._beginning
        sizes = sizes_of(self.block)
        if begun is None:
            return self.plan.bind(self._inputs, sizes)
        return self.plan.bind(self._inputs, sizes, given=begun.given, left_out=begun.left_out)

    def _to_token(self, chooser: Chooser) -> None:
        super()._to_token(chooser)
        if self.drafts is not None:
            self.settle(self.drafts.report[:, -2])

    def settle(self, taken: Tensor) -> None:
        """Let the states of each row be those after the tokens that it takes.

        Args:
            taken: (batch,): how many of the tokens that were fed a row takes.
        """
        rows = torch.arange(len(taken), device=taken.device)
        index = (taken - 1).clamp_min(0) * len(taken) + rows
        for name, kept in self._kept.items():
            torch.index_select(kept.flatten(0, 1), 0, index, out=self._inputs[name])

    @property
    def keeps_states(self) -> bool:
        """Whether it has memory that keeps states."""
        return bool(self._kept)

    def allocate_kept(self, count: int) -> bool:
        """Make memory that keeps the states of a step of one token so many times.

        Returns:
            Whether there was less, so that graphs which use it are no longer right.
        """
        if self._kept and len(next(iter(self._kept.values()))) >= count:
            return False
        for (layer, name), state in self.block.states.items():
            with torch.inference_mode(False):
                self._kept[f"{name}.{layer}"] = state.new_zeros((count, *state.shape))
        return True

    def keep(self, place: int) -> None:
        """Keep the present states at a place, if there is memory for them."""
        for name, kept in self._kept.items():
            kept[place].copy_(self._inputs[name])

    def _keep_states(self) -> None:
        """Make memory for the states after each token."""
        moves = self.plan.recording.moves
        for name in {*moves.values()} - {*moves}:  # what the first token reads
            state = self._inputs[name]
            tokens = sum(kept.startswith(f"{name}@") for kept in moves)
            with torch.inference_mode(False):
                kept = state.new_zeros((tokens, *state.shape))
            self._kept[name] = kept
            self._inputs |= {kept_name(name, token): x for token, x in enumerate(kept)}

    def _bounds(self) -> dict[str, Tensor]:
        """Return the slots that attention's kernels read and write, by layer."""
        made: dict[Window, dict[str, Tensor]] = {}
        bounds: dict[str, Tensor] = {}
        for layer, window in self._windows().items():
            if window not in made:
                begun = self._beginning
                made[window] = self._bounds_of(window) if begun is None else begun.bounds(window)
            bounds |= {f"{name}.{layer}": x for name, x in made[window].items()}
        return bounds

    def _windows(self) -> dict[int, Window]:
        """Return the ring or the window of each layer whose attention a kernel runs."""
        windows = dict(self.masks.windows)
        return {
            # the window is that of the mask that attention was given
            one.layer: self.block.rings[one.layer] or windows[one.mask.removeprefix("mask.")]
            for one in self.plan.by_kernels
        }

    def _bounds_of(self, window: Window) -> dict[str, Tensor]:
        """Return the bounds of attention's program by name (batch, 1), or (batch, tokens)."""
        control, drafts = self.block.control, self.drafts
        if isinstance(window, Ring):
            slot = window.slot(control)
            lo = torch.zeros_like(slot)
        else:
            slot, lo = control.length.expand_as(control.lowest), control.lowest
            if drafts is not None:
                slot = slot + drafts.ahead
            if window is not None:
                lo = torch.maximum(lo, slot - window + 1)
        bounds = {"lo": lo, "slot": slot}
        bounds = {name: x.to(torch.int32) for name, x in bounds.items()}
        of_tokens = None if isinstance(window, Ring) else self._of_tokens.get(window)
        if of_tokens is not None:
            if drafts is not None and window is not None:
                of_tokens.first.copy_((slot + drafts.number - window + 1).clamp_min(0))
            names = ("first", "last", "new_first", "new_last")
            bounds |= {name: getattr(of_tokens, name) for name in names}
        return bounds

    def _bounds_of_tokens(self, drafts: Drafts) -> dict[int | None, TokenBounds]:
        """Return what each token sees, by window. There is nothing for steps of one token."""
        if drafts.tokens.shape[1] == 1:
            return {}
        return {
            window: TokenBounds.of(
                torch.zeros_like(drafts.tokens, dtype=torch.int32),
                window,
                self.block.capacity,
                windowed=window is not None,
            )
            for _, window in self.masks.windows
        }
