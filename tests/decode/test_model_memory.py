"""The memory that a captured prompt reads: what is noticed if it is gone, and what is not kept."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from mirage_hf.decode.model_memory import ModelMemory
from tests.helpers.generate_comparison import tiny

pytestmark = pytest.mark.models


class Holder(nn.Module):
    """Holds tensors in every way that a module of a library may."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.ones(8, dtype=torch.int32))
        self.loose = torch.ones(8)
        self.listed = [torch.ones(8)]
        self.named = {"scales": torch.ones(8)}


def model_with_holder() -> Any:
    model = tiny("llama")
    model.model.holder = Holder()
    return model


def larger_table(model: Any) -> None:
    table = model.model.embed_tokens
    table.weight = nn.Parameter(torch.cat([table.weight.data, table.weight.data]))


#: Changes after which a graph must not run any more.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "a parameter": lambda m: setattr(m.model.norm, "weight", nn.Parameter(torch.ones(64))),
    "its data": lambda m: setattr(m.model.norm.weight, "data", 2 * m.model.norm.weight.data),
    "a buffer": lambda m: setattr(m.model.holder, "codes", torch.ones(8, dtype=torch.int32)),
    "another dtype": lambda m: m.double(),
    "an attribute": lambda m: setattr(m.model.holder, "loose", torch.ones(8)),
    "an element of a list": lambda m: m.model.holder.listed.__setitem__(0, torch.ones(8)),
    "an entry of a dictionary": lambda m: m.model.holder.named.update(scales=torch.ones(8)),
    "a module": lambda m: setattr(m.model, "holder", None),
    "a larger table": larger_table,
    "a hook": lambda m: m.model.register_forward_pre_hook(lambda module, args: args),
    "an own forward": lambda m: setattr(m.model.embed_tokens, "forward", lambda ids: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_graph_does_not_run_once_something_it_reads_is_gone(change: str) -> None:
    model = model_with_holder()
    memory = ModelMemory.of_model(model)
    assert memory.serves(model)
    CHANGES[change](model)
    assert not memory.serves(model)


def test_writes_in_place_move_nothing() -> None:
    model = model_with_holder()
    memory = ModelMemory.of_model(model)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    model.config.initializer_range = 0.5
    assert memory.serves(model)


def test_the_memory_that_a_model_loses_is_freed() -> None:
    model = model_with_holder()
    memory = ModelMemory.of_model(model)
    old = [StorageWeakRef(t.untyped_storage()) for t in (*model.parameters(), *model.buffers())]
    model.load_state_dict({n: x.clone() for n, x in model.state_dict().items()}, assign=True)
    model.double()
    gc.collect()
    assert all(storage.expired() for storage in old) and not memory.serves(model)


def test_a_model_without_a_table_is_not_served() -> None:
    model = model_with_holder()
    model.model.embed_tokens = nn.Identity()
    assert not ModelMemory.of_model(model).serves(model)

    def not_there() -> nn.Module:
        raise NotImplementedError

    model.get_input_embeddings = not_there
    assert not ModelMemory.of_model(model).serves(model)


def test_sparse_tensors_are_left_out() -> None:
    model = model_with_holder()
    model.model.holder.loose = torch.eye(4).to_sparse()
    assert ModelMemory.of_model(model).serves(model)
