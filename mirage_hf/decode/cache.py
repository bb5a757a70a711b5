"""The cache pool: key and value memory, leased to one `generate` call at a time: full-length, or of sliding layers a ring."""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from mirage_hf.errors import MirageError

MOST_EOS = 32
"""Stop tokens a control has room for; a longer list is a table of the vocabulary (decode/selection.py)."""
KEEP_IDLE = 4
"""Blocks kept between calls. A fifth (batch, capacity) pair pushes out the one idle longest."""
IDLE_SHARE = 4
"""Of the memory of a GPU one part in so many may be kept by idle blocks; what is beyond is freed, the longest idle first, but for the last
call's."""
GRAIN = 256
"""Capacities are multiples of it."""


def bucket(slots: int) -> int:
    """Round a number of cache slots up to a capacity: multiples of GRAIN, and of 1/8 of the power of two below 2048 up.

    Few distinct capacities mean few captures; at most 1/8 of a long cache is read in vain.
    """
    grain = max(GRAIN, (1 << (max(slots, 1).bit_length() - 1)) // 8)
    return -(-slots // grain) * grain


def send(values: Tensor, to: Tensor) -> None:
    """Copy without waiting for the device, wherever the values lie."""
    if values.device.type == "cpu" and to.device.type == "cuda":
        values = values.pin_memory()
    to.copy_(values, non_blocking=True)


# -- what a step reads and writes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Control:
    """The device-side state of one call, at fixed addresses so that a captured graph finds it. Integers are int64."""

    ids: Tensor
    """(batch, 1): the token chosen last; it is not in the cache yet."""
    position: Tensor
    """(batch, 1): its RoPE position. Under left padding it is smaller than its slot."""
    length: Tensor
    """(1,): valid slots of the cache, which is also the slot the next key goes to."""
    lowest: Tensor
    """(batch, 1): the first slot a row may see, its left padding."""
    budget: Tensor
    """(1,): tokens that may still be chosen."""
    alive: Tensor
    """(batch,) bool: rows that go on after the token in `ids`."""
    eos: Tensor
    """(MOST_EOS,): stop tokens, filled up with −1."""
    pad: Tensor
    """(1,): the token of a row that has ended."""
    report: Tensor
    """(2, batch): the tokens chosen last, and which rows go on; what the host reads."""
    slots: Tensor
    """(1, capacity): 0, 1, 2, …"""

    @classmethod
    def allocate(cls, batch: int, capacity: int, device: torch.device) -> Control:
        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.long, device=device)

        return cls(
            ids=ints(batch, 1),
            position=ints(batch, 1),
            length=ints(1),
            lowest=ints(batch, 1),
            budget=ints(1),
            alive=torch.zeros(batch, dtype=torch.bool, device=device),
            eos=ints(MOST_EOS),
            pad=ints(1),
            report=ints(2, batch),
            slots=torch.arange(capacity, device=device)[None],
        )

    def start(
        self,
        *,
        length: int,
        position: Tensor,
        lowest: Tensor | None,
        budget: int,
        eos: Tensor | None,
        pad: Tensor | None,
    ) -> None:
        """Set the state to "the last prompt token has just been fed": its slot and its position, every row alive.

        `length` counts the prompt's slots, that token's included; `position` is (batch or 1, 1).
        """
        self.length.fill_(length - 1)
        self.position.copy_(position.expand_as(self.position))
        self.lowest.zero_() if lowest is None else self.lowest.copy_(lowest)
        self.budget.fill_(budget)
        self.alive.fill_(True)
        self.eos.fill_(-1)
        if eos is not None:
            self.eos[: eos.numel()].copy_(eos.reshape(-1))
        if pad is not None:
            self.pad.copy_(pad.reshape(-1)[:1])

    def continue_from(self, other: Control) -> None:
        """Take over the state of a smaller block's control."""
        for name in (
            "ids",
            "position",
            "length",
            "lowest",
            "budget",
            "alive",
            "eos",
            "pad",
            "report",
        ):
            getattr(self, name).copy_(getattr(other, name))


@dataclass(frozen=True, eq=False)
class TokenHistory:
    """What choices that are more than the greatest logit look at, at fixed addresses. Integers are int64."""

    ids: Tensor
    """(batch, capacity + 2): the text so far as stock's input_ids hold it. Steps found dead write behind it."""
    numbers: Tensor
    """(batch, capacity + 2) float64: for each step of a call that samples its number in [0, 1)."""
    prompt: Tensor
    """(1,): tokens of input_ids when the call began."""
    budget: Tensor
    """(1,): what `Control.budget` was when the call began; what it has lost since is the number of the step."""
    slots: Tensor
    """(1, capacity + 2): 0, 1, 2, …"""

    @classmethod
    def allocate(cls, batch: int, capacity: int, device: torch.device) -> TokenHistory:
        room = capacity + 2
        ids, prompt, budget = (
            torch.zeros(shape, dtype=torch.long, device=device)
            for shape in ((batch, room), (1,), (1,))
        )
        return cls(
            ids,
            torch.zeros(batch, room, dtype=torch.float64, device=device),
            prompt,
            budget,
            torch.arange(room, device=device)[None],
        )

    def start(self, input_ids: Tensor, budget: int) -> None:
        """Begin a call with a prompt (batch, length)."""
        self.ids[:, : input_ids.shape[1]].copy_(input_ids)
        self.prompt.fill_(input_ids.shape[1])
        self.budget.fill_(budget)

    def continue_from(self, other: TokenHistory) -> None:
        """Take over a smaller block's text."""
        self.ids[:, : other.ids.shape[1]].copy_(other.ids)
        self.prompt.copy_(other.prompt)
        self.budget.copy_(other.budget)

    def set_numbers(self, numbers: Tensor) -> None:
        """Put in (batch, steps) numbers from the CPU, without waiting for the device."""
        send(numbers, self.numbers[:, : numbers.shape[1]])


# -- rings --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ring:
    """How keys and values of a sliding layer lie in fewer slots than a text has: as many as its window, rounded up.

    Token n of a row, counted without its left padding, lies in slot n mod (window − 1); the padding before it too, as long as nothing took
    its place. So the keys that a step sees are slots [0, n), or all of them, in whatever order, and kernels need know nothing of rings: the
    key of token n goes to the first slot behind those seen. From n = window − 1 on that is the spare slot window − 1, and the step ends by
    moving it to where the oldest was (`turn`). A step that finds no row alive writes the spare slot only.
    """

    window: int
    slots: int

    @property
    def spare(self) -> int:
        return self.window - 1

    def slot(self, control: Control) -> Tensor:
        """The slot (batch, 1) that a step's key goes to; the step sees those before it and the new one."""
        return (
            (control.length - control.lowest)
            .clamp_max(self.spare)
            .masked_fill(~control.alive.any(), self.spare)
        )

    def turn(self, slab: Tensor, control: Control) -> None:
        """End a step for a slab (layers, batch, heads, slots, dim), before `control` moves on."""
        n, spare = control.length - control.lowest[:, 0], self.spare
        to = (n % spare).masked_fill(
            ~control.alive.any() | (n < spare), spare
        )  # the spare slot's own place where nothing moves
        new = slab[:, :, :, spare : self.window].clone()
        slab.scatter_(3, to.view(1, -1, 1, 1, 1).expand_as(new), new)

    def held(self, length: int | Tensor, lowest: Tensor) -> Tensor:
        """The slot of a text of `length` slots whose key lies in each of the ring's slots (batch, window − 1); below 0 where none does."""
        last = length - 1 - lowest
        return lowest + last - (last - torch.arange(self.spare, device=lowest.device)) % self.spare

    def fill(self, memory: Tensor, states: Tensor, length: int) -> None:
        """Put in what a text of `length` slots without padding leaves, from states (batch, heads, n, dim) of its last slots."""
        if length <= self.spare:
            memory[:, :, :length].copy_(states)
            return
        kept, first = states[:, :, -self.spare :], length % self.spare
        memory[:, :, first : self.spare].copy_(kept[:, :, : self.spare - first])
        memory[:, :, :first].copy_(kept[:, :, self.spare - first :])

    def read(self, memory: Tensor, length: int, lowest: Tensor | None) -> Tensor:
        """Return the keys of a text of `length` slots that a window leaves, in their order."""
        first, spare = max(length - self.spare, 0), self.spare
        if lowest is not None:
            return _pick(
                memory, (torch.arange(first, length, device=memory.device) - lowest) % spare
            )
        if not first:
            return memory[:, :, :length]
        return torch.cat([memory[:, :, length % spare : spare], memory[:, :, : length % spare]], 2)


def _pick(states: Tensor, at: Tensor) -> Tensor:
    """The slots `at` (batch, n) of states (batch, heads, slots, dim)."""
    return states.gather(2, at[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3]))


def rings_of(windows: Sequence[int | None], capacity: int) -> tuple[Ring | None, ...]:
    """The rings of layers with these windows (None: nothing is dropped) in a block, where they take less memory than its capacity."""
    return tuple(
        Ring(w, bucket(w)) if w is not None and w > 1 and bucket(w) < capacity else None
        for w in windows
    )


# -- the layers HF's forward sees ---------------------------------------------------------------------------------------


class _PoolLayer(CacheLayerMixin):
    """What the layers of both phases share. Only `update` and the sizes are part of HF's decoding protocol."""

    is_compileable = (
        False  # keeps generate from preparing 4D masks for the prefill: it is stock's dynamic one
    )

    def __init__(self, block: CacheBlock, index: int, is_sliding: bool):
        super().__init__()
        self.block, self.index, self.is_sliding = block, index, is_sliding
        self.is_initialized = True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        pass

    def get_max_length(self) -> int:
        return self.block.capacity

    get_max_cache_shape = get_max_length  # its name before transformers 5.10 or so


class UpdatedTwice(MirageError):
    """A forward that runs a layer again, for which stock's cache adds keys again; the pool has a slot for one."""


class PrefillLayer(_PoolLayer):
    """Writes a whole prompt into the block's first slots; attention sees the prompt's own keys, as with a fresh DynamicLayer."""

    def __init__(self, block: CacheBlock, index: int, is_sliding: bool):
        super().__init__(block, index, is_sliding)
        self.seen = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.seen:
            raise UpdatedTwice(
                "decode: a layer of the prefill was updated twice in one forward; "
                "call the stock method with type(model).generate(model, ...)"
            )
        self.seen = key_states.shape[-2]
        self.block.hold(self.index, key_states, value_states, self.seen)
        return key_states, value_states

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self.seen + int(query_length), 0

    def get_seq_length(self) -> int:
        return self.seen


class StepLayer(_PoolLayer):
    """Writes one key and value at the device-side length, or where its ring has it, and returns all slots; the mask does the rest."""

    def __init__(
        self, block: CacheBlock, index: int, is_sliding: bool, slots: Mapping[Ring, Tensor]
    ):
        super().__init__(block, index, is_sliding)
        self.slots = slots

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        block, ring = self.block, self.block.rings[self.index]
        keys, values = block.keys[self.index], block.values[self.index]
        for memory, states in ((keys, key_states), (values, value_states)):
            if ring is None:
                memory.index_copy_(2, block.control.length, states)
            else:
                memory.scatter_(2, self.slots[ring][:, :, None, None].expand_as(states), states)
        return keys, values

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self.block.slots_of(self.index), 0

    def get_seq_length(self) -> Tensor:  # type: ignore[override]  # a device tensor, as StaticLayer's
        return self.block.control.length


# -- a leased block -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class CacheBlock:
    """Memory for one call: `capacity` slots of every layer's keys and values, or a ring, the control state, and graphs over both."""

    batch: int
    capacity: int
    windows: tuple[int | None, ...]
    """Of each layer how many keys a query sees, its own included, where stock's cache drops the others; None where it keeps all."""
    device: torch.device
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    slabs: list[Tensor] = field(default_factory=list)
    """Owners of the memory. Layers of one shape are rows of one slab, so that one launch clears them all."""
    turning: list[tuple[Ring, Tensor]] = field(default_factory=list)
    """The slabs that are rings."""
    lowest: Tensor | None = None
    """(batch, 1): the left padding of the call under way, None without any."""
    logits: Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))
    """(batch, vocabulary), in the model's dtype: of the step enqueued last."""
    graphs: dict[Any, Any] = field(default_factory=dict)
    """Captured steps and prefills of this block, by what they are."""
    history: TokenHistory | None = None
    choosers: dict[Any, Any] = field(default_factory=dict)
    """What chose on this block so far and may have graphs here, by its key; the one used last is last."""
    sampler: Any = None
    """Chooses the tokens of steps with these logits (decode/kernels/sampling.py)."""
    prompts: Counter[Any] = field(default_factory=Counter)
    """Prompts so far that a captured prefill could serve, by shape."""
    valid_for: object = None
    """The fingerprint of the model that `graphs` were captured from; see `graphs_for`."""
    graph_pool: Any = None
    written: set[int] = field(default_factory=set)
    """The layers that the model has, as its last prompt wrote them: it may have lost some that its config still has."""
    dirty: int = 0
    """Slots below this one may hold keys of an earlier call."""
    stale: bool = False
    done: Any = None
    """CUDA event after which another stream may use the block."""
    make_room: Callable[[], None] = lambda: None
    """Called when the device is out of memory, before the second and last try."""

    def __post_init__(self) -> None:
        self.rings = rings_of(self.windows, self.capacity)
        # of the call at hand, begun anew by `begin`
        self._held: dict[tuple[Ring, int, int], Tensor] = {}
        self._claimed = False
        with torch.inference_mode(False):
            self.control = Control.allocate(self.batch, self.capacity, self.device)

    @property
    def bytes(self) -> int:
        """Bytes of device memory this block holds, not counting its graphs' scratch. Other threads may ask while a call is under way."""
        tensors = [
            *self.slabs,
            *vars(self.control).values(),
            self.logits,
            *(vars(self.history).values() if self.history is not None else ()),
            *(t for chooser in list(self.choosers.values()) for t in chooser.tensors()),
            *(vars(self.sampler).values() if self.sampler is not None else ()),
        ]
        return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))

    def prefill_cache(self) -> Cache:
        """Return a cache that takes a prompt's keys and values into this block."""
        self.written.clear()
        return Cache(
            layers=[PrefillLayer(self, i, w is not None) for i, w in enumerate(self.windows)]
        )

    def step_cache(self, slots: Mapping[Ring, Tensor]) -> Cache:
        """Return the cache that the step's forward sees. `slots`: what `Ring.slot` gave for this step."""
        return Cache(
            layers=[StepLayer(self, i, w is not None, slots) for i, w in enumerate(self.windows)]
        )

    def slots_of(self, index: int) -> int:
        """Slots of layer `index`."""
        ring = self.rings[index]
        return self.capacity if ring is None else ring.slots

    def begin(self, lowest: Tensor | None) -> None:
        """Take the left padding (batch, 1) of a call, None without any, before its prompt comes."""
        self.lowest = lowest
        self._held.clear()
        self._claimed = False

    def claim(self, index: int, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return layer `index`'s (batch, heads, slots, dim) memory, made to fit these states."""
        fits = self._fits(self.keys, index, key_states) and self._fits(
            self.values, index, value_states
        )
        if index in self.keys and not (
            fits or self._claimed
        ):  # the model changed dtype or shape since the last call
            self.drop_memory()
        self._claimed = (
            True  # whichever layer comes first: those behind it must not take its memory away
        )
        return self._fit(self.keys, index, key_states), self._fit(self.values, index, value_states)

    def reserve(self, cache: DynamicCache) -> None:
        """Make room for what a user's cache holds."""
        for i, layer in enumerate(cache.layers):
            if layer.is_initialized:
                self.claim(i, layer.keys, layer.values)

    def hold(self, index: int, key_states: Tensor, value_states: Tensor, length: int) -> None:
        """Take layer `index`'s states of the last slots of a text of `length` slots; those before them are out of its window."""
        ring, first = self.rings[index], length - key_states.shape[-2]
        self.written.add(index)
        for memory, states in zip(
            self.claim(index, key_states, value_states), (key_states, value_states), strict=True
        ):
            if ring is None:
                memory[:, :, :first].zero_()  # as in clear_from
                memory[:, :, first:length].copy_(states)
            elif self.lowest is None:
                ring.fill(memory, states, length)
            else:
                if (key := (ring, length, first)) not in self._held:  # the same for all layers
                    self._held[key] = (ring.held(length, self.lowest) - first).clamp_min(0)
                memory[:, :, : ring.spare].copy_(_pick(states, self._held[key]))

    def _shape(self, index: int, states: Tensor) -> tuple[int, ...]:
        return self.batch, states.shape[1], self.slots_of(index), states.shape[3]

    def _fits(self, rows: dict[int, Tensor], index: int, states: Tensor) -> bool:
        row = rows.get(index)
        return row is not None and (row.shape, row.dtype, row.device) == (
            self._shape(index, states),
            states.dtype,
            states.device,
        )

    def _fit(self, rows: dict[int, Tensor], index: int, states: Tensor) -> Tensor:
        if self._fits(rows, index, states):
            return rows[index]
        self.drop_graphs()
        # the layer that comes first is taken for all of its ring, or without one; a later one that differs gets memory of its own
        ring, shape = self.rings[index], self._shape(index, states)
        like = [i for i, r in enumerate(self.rings) if r == ring]
        owners = [index] if any(i in rows for i in like) else like
        try:
            slab = _zeros((len(owners), *shape), states)
        except torch.OutOfMemoryError:
            self.make_room()
            slab = _zeros((len(owners), *shape), states)
        self.slabs.append(slab)
        if ring is not None:
            self.turning.append((ring, slab))
        rows.update(zip(owners, slab, strict=True))
        return rows[index]

    def set_logits(self, logits: Tensor) -> None:
        """Put (batch, vocabulary) logits into the static buffer, made to fit."""
        if (self.logits.shape, self.logits.dtype, self.logits.device) != (
            logits.shape,
            logits.dtype,
            logits.device,
        ):
            self.drop_graphs()
            self.logits = _zeros(tuple(logits.shape), logits)
        self.logits.copy_(logits)

    def clear_from(self, length: int, rings_full: bool = False) -> None:
        """Zero what an earlier call left above `length`: masked keys weigh 0, but 0 · NaN is NaN. `rings_full`: this call has written all
        slots of its rings but the spare one, which any step writes."""
        rings = {id(slab): ring for ring, slab in self.turning}
        for slab in self.slabs:
            ring, first, last = rings.get(id(slab)), length, self.dirty
            if ring is not None:
                first, last = (
                    ring.spare if rings_full else min(length, ring.spare),
                    ring.window if self.dirty else 0,
                )
            if last > first:
                slab[:, :, :, first:last].zero_()
        self.dirty = length

    def graphs_for(self, graph_key: object) -> dict[Any, Any]:
        """The graphs captured from a model with this fingerprint; those from an earlier one are dropped."""
        if self.valid_for != graph_key:
            if (
                self.valid_for is not None
            ):  # another model's: keys and logits may be of another shape or dtype now
                self.prompts.clear()
            self.drop_graphs()
            self.valid_for = graph_key
        return self.graphs

    def drop_graphs(self) -> None:
        if self.graphs and self.done is not None:
            self.done.synchronize()  # steps found dead may still be running; a graph must outlive its replays
        self.graphs.clear()
        self.graph_pool = None
        self.valid_for = None

    def own_history(self) -> TokenHistory:
        """The block's history, made when the first call wants it."""
        if self.history is None:
            with torch.inference_mode(False):
                self.history = TokenHistory.allocate(self.batch, self.capacity, self.device)
        return self.history

    def drop_chooser(self, key: object) -> None:
        """Forget a way to choose and its graphs."""
        if self.done is not None:
            self.done.synchronize()
        del self.choosers[key]
        for what in [w for w in self.graphs if key in w]:
            del self.graphs[what]

    def drop_memory(self) -> None:
        self.drop_graphs()
        self.choosers.clear()
        self.history = self.sampler = None
        self.keys.clear()
        self.values.clear()
        self.slabs.clear()
        self.turning.clear()
        self.logits = torch.empty(0, device="cpu")
        self.dirty = 0

    # -- exchange with the caches users hold

    def take(self, cache: DynamicCache) -> int:
        """Copy a user's cache in; return its length. A sliding layer's remainder goes to the slots it stands for."""
        length = cache.get_seq_length()
        self.written.clear()
        for i, layer in enumerate(cache.layers):
            if layer.is_initialized:
                self.hold(i, layer.keys, layer.values, length)
        return length

    def put(self, cache: DynamicCache, length: int) -> None:
        """Make `cache` what stock would have left there after `length` tokens: fresh tensors, never pool memory."""
        for i, ring in enumerate(self.rings):
            if i not in self.written:
                continue
            while i >= len(cache.layers):
                cache.layers.append(
                    DynamicLayer()
                )  # DynamicCache() without a config makes its layers as they come
            layer = cache.layers[i]
            if ring is not None:
                keys, values = (
                    ring.read(memory[i], length, self.lowest) for memory in (self.keys, self.values)
                )
            else:
                keys, values = self.keys[i][:, :, :length], self.values[i][:, :, :length]
                if isinstance(layer, DynamicSlidingWindowLayer):
                    keys, values = (
                        keys[:, :, 1 - layer.sliding_window :],
                        values[:, :, 1 - layer.sliding_window :],
                    )
            if not layer.is_initialized:
                layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys.clone(), values.clone()
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = length

    def continue_from(self, other: CacheBlock, length: int) -> None:
        """Take over a smaller block's first `length` slots, logits and state, on the current stream."""
        self.control.continue_from(other.control)
        self.begin(other.lowest)
        self.written = set(other.written)
        for i, ring in enumerate(self.rings):
            if i not in other.keys:
                continue
            for memory, states in zip(
                self.claim(i, other.keys[i], other.values[i]),
                (other.keys[i], other.values[i]),
                strict=True,
            ):
                if other.rings[i] is not None:
                    memory.copy_(states)
                elif ring is None:
                    memory[:, :, :length].copy_(states[:, :, :length])
                else:  # the device knows the length: steps that found no row alive have been counted
                    at = ring.held(self.control.length, self.control.lowest).clamp_min(0)
                    memory[:, :, : ring.spare].copy_(_pick(states, at))
        self.clear_from(length, rings_full=other.lowest is not None)
        self.set_logits(other.logits)


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    # a buffer made under inference_mode would raise in the next call outside it
    with torch.inference_mode(False), torch.no_grad():
        return torch.zeros(shape, dtype=like.dtype, device=like.device)


def windows_of(cache: Cache, count: int) -> tuple[int | None, ...] | str:
    """Return the windows of `count` layers, None where nothing is dropped, or why this cache cannot be exchanged with the pool."""
    if type(cache) is not DynamicCache:
        return f"cache type {type(cache).__name__}"
    if getattr(cache, "offloading", False):
        return "offloaded cache"
    if not cache.layers:
        return (None,) * count
    if len(cache.layers) != count:
        return f"a cache of {len(cache.layers)} layers for {count} decoder layers"
    for layer in cache.layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return f"cache layer type {type(layer).__name__}"
        if getattr(layer, "record_past", False):
            return "a cache that records its past"
        if type(layer) is DynamicSlidingWindowLayer and layer.sliding_window == 1:
            return "a sliding window of 1, for which stock's cache keeps every key"
    if (why := _uneven([layer for layer in cache.layers if layer.is_initialized])) is not None:
        return why
    return tuple(
        layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        for layer in cache.layers
    )


def _uneven(layers: Sequence[CacheLayerMixin]) -> str | None:
    """Why layers do not hold one text, or None: a reset leaves zeros in place of keys, and sliding layers forget how many there were."""
    lengths = {int(layer.get_seq_length()) for layer in layers}
    if len(lengths) > 1:
        return f"a cache whose layers hold {min(lengths)} to {max(lengths)} tokens"
    for layer in layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            held, length = layer.keys.shape[-2] if layer.keys.numel() else 0, layer.get_seq_length()
            if held != min(length, layer.sliding_window - 1):
                return f"a cache that has {held} keys of {length} tokens in a window of {layer.sliding_window}"
    return None


def most_idle(device: torch.device) -> float:
    """Bytes that idle blocks may keep of a device's memory."""
    return (
        torch.cuda.get_device_properties(device).total_memory / IDLE_SHARE
        if device.type == "cuda"
        else math.inf
    )


# -- the pool -----------------------------------------------------------------------------------------------------------


class CachePool:
    """Blocks of cache memory, each leased to one call of one thread at a time, kept and reused between calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[CacheBlock] = []
        # weak: Ctrl-C may come between a lease and what would end it, and the block must not outlive its call
        self._leased: weakref.WeakSet[CacheBlock] = weakref.WeakSet()

    @property
    def bytes(self) -> int:
        """Bytes of device memory in all blocks, leased and idle."""
        with self._lock:
            return sum(block.bytes for block in (*self._idle, *self._leased))

    @property
    def blocks(self) -> Sequence[tuple[int, int]]:
        """(batch, capacity) of every block, leased ones first."""
        with self._lock:
            return [(b.batch, b.capacity) for b in (*self._leased, *self._idle)]

    def lease(
        self, batch: int, capacity: int, windows: tuple[int | None, ...], device: torch.device
    ) -> CacheBlock:
        """Return a block nobody else uses until `give_back`. Its memory appears as the prefill fills it."""
        rings = rings_of(windows, capacity)
        with self._lock:
            block = next(
                (
                    b
                    for b in reversed(self._idle)
                    if (b.batch, b.capacity, b.rings, b.device) == (batch, capacity, rings, device)
                ),
                None,
            )
            if block is not None:
                self._idle.remove(block)
                block.windows = windows
                self._leased.add(block)
        if block is None:
            block = CacheBlock(batch, capacity, windows, device)
            with self._lock:
                self._leased.add(block)
        block.make_room = self.drop_idle
        if block.done is not None:
            torch.cuda.current_stream(device).wait_event(block.done)
        return block

    def give_back(self, block: CacheBlock, used: int) -> None:
        """End a lease; the first `used` slots may have been written."""
        block.dirty = max(block.dirty, used)
        block.begin(None)
        block.make_room = (
            CacheBlock.make_room
        )  # an idle block that knew the pool would keep both alive with their model gone
        if block.device.type == "cuda":
            block.done = torch.cuda.Event()
            block.done.record(torch.cuda.current_stream(block.device))
        with self._lock:
            self._leased.remove(block)
            if not block.stale:
                self._idle.append(block)
            dropped = [block] if block.stale else self._surplus()
        for block in dropped:
            block.drop_memory()

    def _surplus(self) -> list[CacheBlock]:
        """Take out the idle blocks that are not kept, the longest idle first. That of the last call is, whatever its size: the next call
        is likely to be alike, and would capture its graphs anew."""
        kept, dropped, room = (
            list[CacheBlock](),
            list[CacheBlock](),
            {b.device: most_idle(b.device) for b in self._idle},
        )
        for block in reversed(self._idle):
            fits = not kept or (len(kept) < KEEP_IDLE and block.bytes <= room[block.device])
            (kept if fits else dropped).append(block)
            room[block.device] -= block.bytes if fits else 0
        self._idle = kept[::-1]
        return dropped

    def drop_idle(self) -> None:
        """Free every idle block and its graphs now."""
        with self._lock:
            idle, self._idle = self._idle, []
        for block in idle:
            block.drop_memory()

    def release(self) -> None:
        """Free idle blocks and their graphs now, and leased ones as their calls end."""
        with self._lock:
            for block in self._leased:
                block.stale = True
        self.drop_idle()
