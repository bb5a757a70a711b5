"""The memory of a model that a captured prefill reads, and whether it is still there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from mirage_hf.formats import held_tensors
from mirage_hf.formats.containers import plain_parts
from mirage_hf.layers.model_kernels import ModelKernels
from mirage_hf.swap.own_forward import FORWARD_KEY


@dataclass(frozen=True)
class ModelMemory:
    """The memory that a captured prefill reads, as it was at the capture.

    While all of it is in use, the graph may be replayed before the model is compared with its
    fingerprint. If the model has changed, nothing uses the results. The references are weak, so
    weights that the model loses are freed as ever.

    Attributes:
        storages: The memory of the tensors.
        table: Where the table of embeddings lay, and its shape. None without one.
    """

    storages: tuple[StorageWeakRef, ...]
    table: tuple[Any, ...] | None

    @classmethod
    def of_kernels(cls, model_kernels: ModelKernels) -> ModelMemory:
        """Return what a prefill by kernels reads."""
        return cls(_storages(model_kernels.weights), _place(model_kernels.embedding))

    @classmethod
    def of_model(cls, model: Any) -> ModelMemory:
        """Return what the forward of a model may read: all tensors that its modules have."""
        with torch._C.DisableTorchFunctionSubclass():
            found = [part for t in _tensors_of(model) for part in plain_parts(t)]
            return cls(_storages(found), _place(_table_of(model)))

    def serves(self, model: nn.Module) -> bool:
        """Return whether all memory is in use, and each token has a row in the table."""
        if self.table is None or any([storage.expired() for storage in self.storages]):
            return False
        return _place(_table_of(model)) == self.table and not _maps_tokens(model)


def _storages(tensors: Iterable[Tensor]) -> tuple[StorageWeakRef, ...]:
    """Return weak references to the memory of tensors, one for each storage."""
    plain = (t.untyped_storage() for t in tensors if t.layout is torch.strided)
    storages = {storage._cdata: storage for storage in plain}
    return tuple(StorageWeakRef(storage) for storage in storages.values())


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Iterate over the tensors that the modules of a model have, and their bindings."""
    for module in model.modules():
        state = vars(module)
        yield from module.parameters(recurse=False)
        yield from module.buffers(recurse=False)
        yield from held_tensors(module)
        for value in state.values():
            values = value.values() if isinstance(value, dict) else value
            yield from _tensors_in(values if isinstance(value, dict | list | tuple) else [value])
        weight = getattr(state.get(FORWARD_KEY), "weight", None)  # decoded scales are copies
        yield from _tensors_in(getattr(weight, "tensors", ()))


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    return (x for x in values if isinstance(x, Tensor))


def _table_of(model: Any) -> Any:
    """Return the weight of a model's table of embeddings, None if there is none."""
    try:
        table = model.get_input_embeddings()
    except NotImplementedError:
        return None
    return getattr(table, "_parameters", {}).get("weight")


def _place(table: Tensor | None) -> tuple[Any, ...] | None:
    """Return where a table lies. Tokens beyond it would end the process."""
    return None if table is None else (table.data_ptr(), table.shape, table.dtype)


def _maps_tokens(model: Any) -> bool:
    """Return whether something may change tokens before they are looked up."""
    modules = (model, model.base_model, model.get_input_embeddings())
    return any(m._forward_pre_hooks or "forward" in m.__dict__ for m in modules)
