"""The memory of one call: keys, values, state and captured graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mirage_hf.decode.control import Control, TokenHistory
from mirage_hf.decode.rings import Ring, gather_slots, rings_of


@dataclass(eq=False)
class CacheBlock:
    """Memory for one call: slots for every layer's keys and values, or rings of fewer slots.

    Attributes:
        batch: Rows.
        capacity: Slots of layers that lie in no ring.
        windows: For each layer the number of keys that stock's cache keeps for a query, its own
            included; None if it keeps all.
        device: Where the memory is.
        axes: The axes of the model's positions, 0 if positions have none.
        source_slots: Slots for what an encoder gave, 0 for models without one.
    """

    batch: int
    capacity: int
    windows: tuple[int | None, ...]
    device: torch.device
    axes: int = 0
    source_slots: int = 0
    #: Each layer's (batch, heads, slots, dim), rows of `slabs`.
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    #: Keys by which a layer's indexer chooses slots: (batch, 1, slots, dim), rows of `slabs`.
    indexer_keys: dict[int, Tensor] = field(default_factory=dict)
    #: The states that layers keep besides keys and values, by layer and name (cache_layers.py).
    states: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    #: What an encoder gave, by name (sources.py). One dim of each has `source_slots`.
    sources: dict[str, Tensor] = field(default_factory=dict)
    #: Owners of the memory. Layers of one shape share a slab, so that one launch clears them all.
    slabs: list[Tensor] = field(default_factory=list)
    #: The slabs that are rings.
    ring_slabs: list[tuple[Ring, Tensor]] = field(default_factory=list)
    #: (batch, 1): left padding of the call under way, None if no row has any.
    lowest: Tensor | None = None
    #: (batch, vocabulary), in the model's dtype: logits of the step enqueued last.
    logits: Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))
    #: Captured steps and prefills, by what they are.
    graphs: dict[Any, Any] = field(default_factory=dict)
    #: The state of the model that `graphs` were captured from.
    graph_key: object = None
    #: The memory pool that the graphs share.
    graph_pool: Any = None
    history: TokenHistory | None = None
    #: Choosers by their key, the one used last is last. They may have graphs here.
    choosers: dict[Any, Any] = field(default_factory=dict)
    #: Chooses tokens from logits of this size (sampler.py).
    sampler: Any = None
    #: The state of drafts, by tokens of a step (drafts.py).
    drafts: dict[int, Any] = field(default_factory=dict)
    #: Memory of an assistant that drafts for this call, what its graphs depend on, and its steps
    #: (assistants.py).
    assistant: CacheBlock | None = None
    assistant_key: object = None
    assistant_steps: Any = ()
    #: How many prompts there were that a captured prefill could serve, by shape.
    prompts: Counter[Any] = field(default_factory=Counter)
    #: Layers that the last prompt wrote. A model may have lost some that its config still counts.
    written: set[int] = field(default_factory=set)
    #: Tables of what steps compute from positions, by the ops that compute it, with the versions
    #: of the tensors that these read (step_beginning.py). None if ops give no rows of a table.
    tables: dict[Any, tuple[Any, Tensor | None]] = field(default_factory=dict)
    #: Whether no position of the call is beyond its slot, or below 0.
    positions_within_slots: bool = True
    #: Slots below this one may hold keys of an earlier call.
    dirty: int = 0
    #: Whether the block is to be freed when its lease ends.
    stale: bool = False
    #: CUDA event after which another stream may use the block.
    done: Any = None
    #: Frees other memory when the device is out of it, before the second and last try.
    make_room: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.rings = rings_of(self.windows, self.capacity)
        # these two belong to the call at hand; `begin` resets them
        self._ring_sources: dict[tuple[Ring, int, int], Tensor] = {}
        self._claimed = False
        with torch.inference_mode(False):
            self.control = Control.allocate(self.batch, self.capacity, self.device, self.axes)

    @property
    def bytes(self) -> int:
        """Bytes of device memory, without the graphs' scratch memory.

        Other threads may ask while a call is under way.
        """
        tensors = [*self.slabs, *self.states.values(), *self.sources.values(), self.logits]
        tensors += vars(self.control).values()
        tensors += [tables for _, tables in list(self.tables.values()) if tables is not None]
        for owner in (self.history, self.sampler, *list(self.drafts.values())):
            if owner is not None:
                tensors += vars(owner).values()
        for chooser in list(self.choosers.values()):
            tensors += chooser.tensors()
        own = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
        return own + (self.assistant.bytes if self.assistant is not None else 0)

    def num_slots(self, layer: int) -> int:
        """Return the slots of a layer."""
        ring = self.rings[layer]
        return self.capacity if ring is None else ring.slots

    def begin(self, lowest: Tensor | None) -> None:
        """Begin a call whose rows have this left padding (batch, 1), None if no row has any."""
        self.lowest = lowest
        self.positions_within_slots = True
        self._ring_sources.clear()
        self._claimed = False

    # -- layers' memory

    def claim(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's (batch, heads, slots, dim) keys and values, made to fit these states.

        If the model has another dtype or shape than in the last call, the block loses its memory.
        """
        fits = self._fits(self.keys, layer, keys) and self._fits(self.values, layer, values)
        # only the first layer of a call decides: later ones must not take its memory away
        if layer in self.keys and not fits and not self._claimed:
            self.drop_memory()
        self._claimed = True
        return self._fit(self.keys, layer, keys), self._fit(self.values, layer, values)

    def store(self, layer: int, keys: Tensor, values: Tensor, length: int) -> None:
        """Store a layer's states of the last slots of a text.

        Args:
            layer: Index of the layer.
            keys: (batch, heads, n, dim) of the text's last n slots. Those before are out of the
                window.
            values: Likewise.
            length: Slots of the text.
        """
        ring, first = self.rings[layer], length - keys.shape[-2]
        self.written.add(layer)
        memories = self.claim(layer, keys, values)
        for memory, states in zip(memories, (keys, values), strict=True):
            if ring is None:
                memory[:, :, :first].zero_()  # as in clear_from
                memory[:, :, first:length].copy_(states)
            elif self.lowest is None:
                ring.fill(memory, states, length)
            else:
                sources = self._sources_of(ring, length, first, self.lowest)
                memory[:, :, : ring.length].copy_(gather_slots(states, sources))

    def _sources_of(self, ring: Ring, length: int, first: int, lowest: Tensor) -> Tensor:
        """Return which states of a padded text go to a ring's slots, once for all layers."""
        key = ring, length, first
        if key not in self._ring_sources:
            self._ring_sources[key] = (ring.positions(length, lowest) - first).clamp_min(0)
        return self._ring_sources[key]

    def _shape(self, layer: int, states: Tensor) -> tuple[int, ...]:
        return self.batch, states.shape[1], self.num_slots(layer), states.shape[3]

    def _fits(self, rows: dict[int, Tensor], layer: int, states: Tensor) -> bool:
        row = rows.get(layer)
        wanted = self._shape(layer, states), states.dtype, states.device
        return row is not None and (row.shape, row.dtype, row.device) == wanted

    def _fit(self, rows: dict[int, Tensor], layer: int, states: Tensor) -> Tensor:
        if self._fits(rows, layer, states):
            return rows[layer]
        self.drop_graphs()
        # The first layer of a ring, or of none, gets memory for all layers of it. A later layer
        # that differs gets memory of its own.
        ring, shape = self.rings[layer], self._shape(layer, states)
        alike = [n for n, other in enumerate(self.rings) if other == ring]
        owners = [layer] if any(n in rows for n in alike) else alike
        try:
            slab = _zeros((len(owners), *shape), states)
        except torch.OutOfMemoryError:
            self.make_room()
            slab = _zeros((len(owners), *shape), states)
        self.slabs.append(slab)
        if ring is not None:
            self.ring_slabs.append((ring, slab))
        rows.update(zip(owners, slab, strict=True))
        return rows[layer]

    def store_indexer(self, layer: int, keys: Tensor) -> None:
        """Store an indexer's (batch, n, dim) keys of a text of n slots."""
        memory = self._fit(self.indexer_keys, layer, keys[:, None])
        memory[:, 0, : keys.shape[1]].copy_(keys)

    def store_state(self, layer: int, name: str, state: Tensor) -> None:
        """Store a state of a layer that is no keys and values, in memory made to fit."""
        known = self.states.get((layer, name))
        wanted = state.shape, state.dtype, state.device
        if known is None or (known.shape, known.dtype, known.device) != wanted:
            self.drop_graphs()
            self.states[layer, name] = known = _zeros(tuple(state.shape), state)
        known.copy_(state)

    def store_source(self, name: str, x: Tensor, dim: int = -2) -> None:
        """Store what an encoder gave, in memory made to fit, and clear the slots after it.

        Args:
            name: Its name.
            x: The tensor.
            dim: The dim that becomes `source_slots` long.
        """
        length, shape = x.shape[dim], list(x.shape)
        shape[dim] = self.source_slots
        known = self.sources.get(name)
        if known is None or (list(known.shape), known.dtype, known.device) != (
            shape,
            x.dtype,
            x.device,
        ):
            self.drop_graphs()
            self.sources[name] = known = _zeros(tuple(shape), x)
        known.narrow(dim, 0, length).copy_(x)
        known.narrow(dim, length, self.source_slots - length).zero_()

    def set_logits(self, logits: Tensor) -> None:
        """Copy (batch, vocabulary) logits into the static buffer, made to fit."""
        wanted = logits.shape, logits.dtype, logits.device
        if (self.logits.shape, self.logits.dtype, self.logits.device) != wanted:
            self.drop_graphs()
            self.logits = _zeros(tuple(logits.shape), logits)
        self.logits.copy_(logits)

    def clear_from(self, length: int, rings_full: bool = False) -> None:
        """Zero the slots above `length`. Masked keys weigh 0, but 0 · NaN of an old key is NaN.

        Args:
            length: Slots that this call has written.
            rings_full: This call has written all slots of its rings, except the spare one, which
                any step writes.
        """
        rings = {id(slab): ring for ring, slab in self.ring_slabs}
        for slab in self.slabs:
            ring, first, end = rings.get(id(slab)), length, self.dirty
            if ring is not None:
                first = ring.length if rings_full else min(length, ring.length)
                end = ring.window if self.dirty else 0
            if end > first:
                slab[:, :, :, first:end].zero_()
        self.dirty = length

    # -- graphs and what they read

    def graphs_for(self, graph_key: object) -> dict[Any, Any]:
        """Return the graphs of a model in this state, and drop those of an earlier state."""
        if self.graph_key != graph_key:
            if self.graph_key is not None:  # keys and logits may have another shape or dtype now
                self.prompts.clear()
            self.drop_graphs()
            self.graph_key = graph_key
        return self.graphs

    def drop_graphs(self) -> None:
        """Forget all graphs, once none is running."""
        if self.graphs and self.done is not None:
            self.done.synchronize()  # steps that found no row alive may still run
        self.graphs.clear()
        self.graph_pool = None
        self.graph_key = None

    def take_assistant(self, other: CacheBlock) -> None:
        """Take over the assistant of a smaller block, whose graphs are not replayed any more."""
        if other.assistant is None:
            return
        self.drop_graphs()
        other.drop_graphs()
        for name, empty in (("assistant", None), ("assistant_key", None), ("assistant_steps", ())):
            setattr(self, name, getattr(other, name))
            setattr(other, name, empty)

    def own_history(self) -> TokenHistory:
        """Return the block's token history, made when the first call needs it."""
        if self.history is None:
            with torch.inference_mode(False):
                self.history = TokenHistory.allocate(self.batch, self.capacity, self.device)
        return self.history

    def drop_chooser(self, key: object) -> None:
        """Forget a chooser and its graphs."""
        if self.done is not None:
            self.done.synchronize()
        del self.choosers[key]
        for what in [what for what in self.graphs if key in what]:
            del self.graphs[what]

    def drop_memory(self) -> None:
        """Free everything except the state."""
        self.drop_graphs()
        self.choosers.clear()
        self.history = self.sampler = None
        self.drafts.clear()
        self.tables.clear()
        self.assistant, self.assistant_steps = None, ()
        self.keys.clear()
        self.values.clear()
        self.indexer_keys.clear()
        self.states.clear()
        self.sources.clear()
        self.slabs.clear()
        self.ring_slabs.clear()
        self.logits = torch.empty(0, device="cpu")
        self.dirty = 0

    def continue_from(self, other: CacheBlock, length: int) -> None:
        """Copy a smaller block's first `length` slots, logits and state, on the current stream."""
        self.control.continue_from(other.control)
        self.begin(other.lowest)
        self.positions_within_slots = other.positions_within_slots
        self.written = set(other.written)
        for layer in range(len(self.rings)):
            if layer in other.keys:
                sources = other.keys[layer], other.values[layer]
                for memory, states in zip(self.claim(layer, *sources), sources, strict=True):
                    self._copy_layer(layer, other.rings[layer], memory, states, length)
        for layer, keys in other.indexer_keys.items():
            self.store_indexer(layer, keys[:, 0, :length])
        for (layer, name), state in other.states.items():
            self.store_state(layer, name, state)
        for name, x in other.sources.items():
            self.store_source(name, x, x.shape.index(self.source_slots))  # all slots are full
        self.clear_from(length, rings_full=other.lowest is not None)
        self.set_logits(other.logits)

    def _copy_layer(
        self, layer: int, other_ring: Ring | None, memory: Tensor, states: Tensor, length: int
    ) -> None:
        ring = self.rings[layer]
        if other_ring is not None:
            memory.copy_(states)
        elif ring is None:
            memory[:, :, :length].copy_(states[:, :, :length])
        else:  # the device knows the length; the host has counted steps that found no row alive
            slots = ring.positions(self.control.length, self.control.lowest).clamp_min(0)
            memory[:, :, : ring.length].copy_(gather_slots(states, slots))


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    # a buffer made under inference_mode would raise in the next call outside it
    with torch.inference_mode(False), torch.no_grad():
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
