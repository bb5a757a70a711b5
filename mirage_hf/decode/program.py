"""The step of decoding: one token for every row, on the device, with nothing read by the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mirage_hf.decode.cache import CacheBlock, Control, Ring
from mirage_hf.decode.graphs import capture

# -- masks --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MaskPlan:
    """Which masks a model's forward wants: one, or one per layer type. A window of None sees everything before it.

    Windows mean four things. Here: which tokens attention hides from later ones. `CacheBlock.windows`: which keys stock's cache drops, and so
    ours where it is handed out; None where stock's keeps all. `CacheBlock.rings`: which layers have slots for little more than that, where it
    saves memory. `prefill.Shape.cuts`: which windows are shorter than the prompt at hand, so that its attention needs a band.
    """

    windows: tuple[tuple[str, int | None], ...]
    by_layer_type: bool
    layers: tuple[str, ...] = ()
    """The kind of each layer, where there are kinds."""

    @classmethod
    def of(cls, config: Any) -> MaskPlan | str:
        """Read a text config as HF's create_masks_for_generate does; return the reason where the pool cannot serve it."""
        layer_types = getattr(config, "layer_types", None)
        window = getattr(config, "sliding_window", None)
        if layer_types is not None:
            known = {"full_attention": None, "sliding_attention": window}
            unknown = sorted(set(layer_types) - set(known))
            if unknown:
                return f"layer type {unknown[0]}"
            return cls(
                tuple((kind, known[kind]) for kind in sorted(set(layer_types))),
                True,
                tuple(layer_types),
            )
        if window is None and getattr(config, "attention_chunk_size", None) is not None:
            return "chunked attention"
        return cls((("", window),), by_layer_type=False)

    def kind_of(self, layer: int) -> str:
        """The kind of a layer, a name in `windows`."""
        return self.layers[layer] if self.by_layer_type else ""

    def cutting(self, tokens: int, layers: int) -> tuple[int | None, ...]:
        """Of each layer the window that hides some of so many tokens from later ones, None where none does."""
        windows = dict(self.windows)
        found = (windows[self.kind_of(n)] for n in range(layers))
        return tuple([w if w is not None and w < tokens else None for w in found])

    def mismatch(self, windows: Sequence[int | None]) -> str | None:
        """Why layers whose caches drop keys out of these windows are not this model's: each kind drops what it does not see, or nothing."""
        ours = dict(self.windows)
        for kind in ours:
            found = {w for n, w in enumerate(windows) if self.kind_of(n) == kind}
            if not any(found <= {w} for w in (ours[kind], None)):
                return "a cache that slides over other windows than the model's layers"
        return None

    def build(
        self, control: Control, dtype: torch.dtype, in_rings: Mapping[str, tuple[Ring, Tensor]]
    ) -> Tensor | dict[str, Tensor]:
        """Return additive (batch, 1, 1, slots) masks, 0 or −inf: what a boolean one is turned into in every layer. `in_rings`: kinds whose
        keys lie in a ring, and the slots of the new ones."""
        masks: dict[str, Tensor] = {}
        seen = (control.slots <= control.length) & (control.slots >= control.lowest)
        for kind, window in self.windows:
            if kind in in_rings:
                ring, slot = in_rings[kind]
                visible = control.slots[:, : ring.slots] <= slot
            else:
                visible = (
                    seen if window is None else seen & (control.slots > control.length - window)
                )
            mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
                ~visible, float("-inf")
            )
            masks[kind] = mask[:, None, None, :]
        return masks if self.by_layer_type else masks[""]


NOTHING = -(1 << 62)
"""Reported instead of a token where no token can be drawn: a NaN among the scores, or none above −inf."""


# -- choosing -----------------------------------------------------------------------------------------------------------


def choose_greedily(control: Control, logits: Tensor) -> None:
    """Choose the next token of every row from (batch, vocabulary) logits and move the state on. Ties: lowest index.

    Logits are compared in the dtype the model gives them in, as float32 at most: rounding them up to float32 first,
    as stock does, changes neither their order nor their ties.
    """
    best = torch.argmax(logits.float() if logits.dtype == torch.float64 else logits, dim=-1)
    settle(control, torch.where(control.alive, best, control.pad))


def settle(control: Control, token: Tensor, ended: Tensor | None = None) -> None:
    """Take (batch,) tokens as chosen and move the state on. `ended` (batch,) bool: rows that end here whatever their token is."""
    rows = control.alive
    live = rows.any()
    move_on(control, live)
    control.budget.sub_(live.long())
    # not torch.isin: it sorts, and so synchronises, from about ten stop tokens on
    goes_on = rows & (token[:, None] != control.eos).all(-1) & (control.budget > 0)
    if ended is not None:
        goes_on = goes_on & ~ended
    control.ids.copy_(torch.where(live, token, control.ids[:, 0])[:, None])
    control.alive.copy_(goes_on)
    control.report[0].copy_(token)
    control.report[1].copy_(goes_on)


def draw(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """Choose by (batch, 1) numbers the first token at which the sum of (batch, vocab) probabilities exceeds the number's share of it all.

    Returns (batch,) tokens, NOTHING for rows without a probability above 0 or with a NaN.
    """
    sums = probabilities.cumsum(-1, dtype=torch.float64)
    total = sums[:, -1:]
    # the second condition: sums that are taken in parallel may round up where nothing is added
    token = ((sums > numbers * total) & (probabilities > 0)).to(torch.uint8).argmax(-1)
    return torch.where(total[:, 0] > 0, token, NOTHING)


def move_on(control: Control, live: Tensor) -> None:
    """Count the slot just written and step the RoPE position, where the 0-dim bool `live` is true."""
    control.length.add_(live)
    control.position.add_(live)


class Chooser(ABC):
    """What a step ends with: the choice of the next tokens. Captured steps are kept by its key, so equal keys must do the same."""

    scores: Tensor | None = None
    """(batch, vocabulary) float32: what processors made of the logits of the step enqueued last, where a call wants to keep it."""

    def __init__(self, key: tuple[Any, ...]):
        self.key = key

    def tensors(self) -> list[Tensor]:
        """The memory of its own."""
        return []

    @abstractmethod
    def choose(self, control: Control, logits: Tensor) -> None:
        """Choose from (batch, vocabulary) logits and move the state on, with nothing read by the host."""


# -- the captured forward -----------------------------------------------------------------------------------------------


class Step(ABC):
    """One decoding step over a block: feeds `control.ids`, leaves the logits in `block.logits`, moves the lengths on. In a CUDA graph, or
    called where none can be; a graph lives with its block as long as `graph_key` holds.

    A step that finds no row alive writes nothing but the unused slot at `control.length`, and of rings the spare one, so steps
    may run ahead of the host and need no rollback.
    """

    by_kernels = False
    """Whether its graphs are of kernels of ours on weights that it holds. Capturing them, and calling it, may run modules (RoPE's)."""

    def __init__(self, block: CacheBlock, graphs: bool, graph_key: object):
        self.block, self.graphs, self.graph_key = block, graphs, graph_key

    def held(self) -> Any:
        """What lives as long as a captured graph; not the block, which holds the graphs."""
        return None

    @abstractmethod
    def _to_logits(self) -> None:
        """Feed the tokens, leave the logits in the block, and move on."""

    @abstractmethod
    def _to_token(self, chooser: Chooser) -> None:
        """The same, and choose the next tokens."""

    def is_captured(self, chooser: Chooser | None) -> bool:
        """Whether `prepare` would return the replay of a graph that is there already."""
        return self.graphs and self._what(chooser) in self.block.graphs_for(self.graph_key)

    def _what(self, chooser: Chooser | None) -> tuple[Any, ...]:
        """The key of its graph among the block's."""
        return type(self).__name__, None if chooser is None else chooser.key

    def prepare(self, chooser: Chooser | None) -> Callable[[], None]:
        """Return the replay of the graph that ends at the token, without a chooser at the logits, captured now if it is not yet."""
        run = self._to_logits if chooser is None else partial(self._to_token, chooser)
        block = self.block
        if not self.graphs:
            return run
        graphs, what = block.graphs_for(self.graph_key), self._what(chooser)
        if what not in graphs:
            # with no row alive the warm-ups leave no other trace
            touched = (block.control.alive, block.control.report, block.logits)
            kept = [t.clone() for t in touched]
            block.control.alive.fill_(False)
            try:
                graph, block.graph_pool = capture(run, block.device, block.graph_pool)
                graphs[what] = graph, self.held()
            finally:
                for t, value in zip(touched, kept, strict=True):
                    t.copy_(value)
        return graphs[what][0].replay  # type: ignore[no-any-return]


class CapturedForward(Step):
    """HF's own forward, swapped modules included, over layers of a fixed number of slots."""

    def __init__(
        self,
        model: Any,
        block: CacheBlock,
        plan: MaskPlan,
        *,
        logits_to_keep: bool,
        graphs: bool,
        graph_key: object,
    ):
        super().__init__(block, graphs, graph_key)
        self.model, self.plan = model, plan
        self.kwargs: dict[str, Any] = {"logits_to_keep": 1} if logits_to_keep else {}
        self.slots: dict[Ring, Tensor] = {}
        self.cache = block.step_cache(self.slots)

    def _forward(self) -> None:
        block = self.block
        control = block.control
        kinds = {
            self.plan.kind_of(n): ring for n, ring in enumerate(block.rings) if ring is not None
        }
        self.slots.update((ring, ring.slot(control)) for ring in set(kinds.values()))
        in_rings = {kind: (ring, self.slots[ring]) for kind, ring in kinds.items()}
        outputs = self.model(
            input_ids=control.ids,
            position_ids=control.position,
            past_key_values=self.cache,
            use_cache=True,
            attention_mask=self.plan.build(control, block.keys[0].dtype, in_rings),
            return_dict=True,
            **self.kwargs,
        )
        block.logits.copy_(outputs.logits[:, -1])
        for ring, slab in block.turning:
            ring.turn(slab, control)

    def _to_logits(self) -> None:
        self._forward()
        move_on(self.block.control, self.block.control.alive.any())

    def _to_token(self, chooser: Chooser) -> None:
        self._forward()
        chooser.choose(self.block.control, self.block.logits)
