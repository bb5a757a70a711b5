"""Tune an optimized model in the background: measure its kernels in a second process.

Kernels that turn out to be better are put in place between two calls of the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mirage_hf.default_device import on_the_cpu
from mirage_hf.errors import Rejected
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.pipeline import resolver
from mirage_hf.pipeline.background import BackgroundTuning
from mirage_hf.pipeline.layer_choice import BlockToMake
from mirage_hf.pipeline.resolver import Resolved
from mirage_hf.swap.handle import HANDLE_NAME, Handle
from mirage_hf.swap.kernels import ModelBlocks, register
from mirage_hf.swap.live_model import locked, on_device
from mirage_hf.swap.optimization import Optimization
from mirage_hf.swap.replacement import replace_kernels


class TuningOfModel:
    """Starts the tuner of one model.

    Args:
        device: The device of the model.
        backend: "triton" or "cpu".
        zoo: A kernel zoo besides the packaged one, or None.
        verify: Whether better kernels are checked before they stay in place.
    """

    def __init__(self, *, device: torch.device, backend: str, zoo: Any, verify: bool):
        self._device, self._backend, self._zoo, self._verify = device, backend, zoo, verify
        self._untuned: list[BlockToMake] = []

    def note(self, program: KernelGraph, options: Mapping[str, Any], kernel: Resolved) -> None:
        """Note a program besides those of the model's blocks, if its kernel was not measured."""
        if not kernel.is_measured:
            pattern, like = options.get("pattern", "program"), options.get("like")
            early = options.get("next_may_launch_early", False)
            self._untuned.append(BlockToMake(program, pattern, like, early))

    def start(
        self,
        model: nn.Module,
        handle: Handle,
        optimization: Optimization,
        blocks: ModelBlocks,
        made: Mapping[BlockToMake, Resolved | Rejected],
    ) -> None:
        """Start the tuner of an optimized model, if anything is left to measure.

        Args:
            model: The model.
            handle: Its handle, which keeps the tuner.
            optimization: What optimized it.
            blocks: The blocks of its layers.
            made: The kernels of the blocks.
        """
        device, backend = self._device, self._backend
        layers = [*blocks.unmeasured_layers(made), *([block] for block in self._untuned)]
        if not resolver.can_measure(device, backend):
            handle.add_note(
                "nothing is tuned in the background: kernels are measured on a GPU only"
            )
            return
        if not layers:
            handle.add_note("nothing is tuned in the background: all kernels were measured before")
            return
        found, of_model, verify = blocks.by_key(made), weakref.ref(model), self._verify

        def replace(new: Mapping[BlockToMake, Resolved]) -> int | Rejected:
            nonlocal found
            owner = of_model()
            if owner is None:
                return Rejected("the model was deleted")
            with locked(owner), on_the_cpu(), on_device(device):
                if owner.__dict__.get(HANDLE_NAME) is not handle:
                    return Rejected("the model was restored")
                outcome = replace_kernels(
                    optimization, handle, found, blocks.keys_of(new), verify=verify
                )
                if isinstance(outcome, Rejected):
                    return outcome
                found, count = outcome
                register(new.values(), device)
                if count and handle.runner is not None and optimization.steps is not None:
                    handle.runner.use_kernels(optimization.steps)
                return count

        handle.tuning = BackgroundTuning(
            layers, device=device, backend=backend, zoo=self._zoo, replace=replace
        )
        if handle.runner is not None:
            handle.runner.tuning = handle.tuning
        handle.let_tuner_see_forwards()
        handle.tuning.start()
