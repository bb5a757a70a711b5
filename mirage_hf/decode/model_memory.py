"""The memory of a model that a captured prefill reads, and whether it is still there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.formats import held_tensors
from mirage_hf.formats.containers import plain_parts
from mirage_hf.layers.model_kernels import ModelKernels
from mirage_hf.swap.guard import BINDING_KEY
from mirage_hf.swap.own_forward import FORWARD_KEY


@dataclass(frozen=True)
class ModelMemory:
    """The tensors of a model that a captured prefill reads, and where they lay at the capture.

    Holding a tensor keeps its memory alive while it lies there. So a graph may be replayed whatever
    was done to the model, while its results are not used.

    Attributes:
        tensors: The tensors, each with memory of its own.
        addresses: Where they lay.
        table: The table of embeddings.
        held: What runs modules in the graph, besides their library.
    """

    tensors: tuple[Tensor, ...]
    addresses: tuple[int, ...]
    table: Tensor | None
    held: tuple[Any, ...] = ()

    @classmethod
    def of_kernels(cls, model_kernels: ModelKernels) -> ModelMemory:
        """Return what a prefill by kernels reads."""
        return cls._at(model_kernels.weights, model_kernels.embedding)

    @classmethod
    def of_model(cls, model: Any) -> ModelMemory:
        """Return what the forward of a model may read: all tensors that its modules have."""
        tensors: dict[int, Tensor] = {}
        bindings = []
        with torch._C.DisableTorchFunctionSubclass():
            for module in model.modules():
                state = vars(module)
                bindings += [state[key] for key in (BINDING_KEY, FORWARD_KEY) if key in state]
                found = [
                    *module.parameters(recurse=False),
                    *module.buffers(recurse=False),
                    *(x for x in state.values() if isinstance(x, Tensor)),
                    *held_tensors(module),
                ]
                tensors |= {id(part): part for t in found for part in plain_parts(t)}
        table = getattr(model.get_input_embeddings(), "_parameters", {}).get("weight")
        return cls._at(tensors.values(), table, tuple(bindings))

    @classmethod
    def _at(
        cls, tensors: Iterable[Tensor], table: Tensor | None, held: tuple[Any, ...] = ()
    ) -> ModelMemory:
        tensors = tuple(tensors)
        return cls(tensors, _addresses(tensors), table, held)

    def serves(self, model: nn.Module) -> bool:
        """Return whether all tensors lie where they did, and have a row for each token."""
        return _addresses(self.tensors) == self.addresses and _embeds_by(model, self.table)


def _addresses(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    return tuple([t.data_ptr() for t in tensors])


def _embeds_by(model: Any, embedding: Tensor | None) -> bool:
    """Return whether the model's tokens are rows of that table, and nothing maps them before.

    With a larger table some tokens would have no row here. Reading beyond a table ends the process.
    """
    table = model.get_input_embeddings()
    if embedding is None or getattr(table, "_parameters", {}).get("weight") is not embedding:
        return False
    modules = (model, model.base_model, table)
    return not any(m._forward_pre_hooks or "forward" in m.__dict__ for m in modules)
