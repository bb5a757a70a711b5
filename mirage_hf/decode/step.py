"""The step of decoding: one token for every row, on the device. The host reads nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from mirage_hf.decode.cache_block import CacheBlock
from mirage_hf.decode.cache_layers import step_cache
from mirage_hf.decode.choosing import Chooser, move_on
from mirage_hf.decode.control import Control
from mirage_hf.decode.graphs import capture
from mirage_hf.decode.masks import MaskPlan
from mirage_hf.decode.rings import Ring
from mirage_hf.decode.routing import cache_name
from mirage_hf.decode.sources import step_arguments


class Step(ABC):
    """One decoding step over a block.

    It feeds `control.ids`, leaves the logits in `block.logits`, and moves the lengths on. It is
    replayed as a CUDA graph, or called if none can be captured. A graph lives with its block as
    long as `graph_key` stays the same.

    A step that finds no row alive writes only unused slots from `control.length` on, and in rings
    the spare slot. So steps may run ahead of the host and need no rollback.

    Attributes:
        by_kernels: Whether its graphs hold only our kernels, on weights that the step holds.
            Capturing them, and calling the step, may run modules (RoPE's).
        runs_modules: Whether it runs modules of the model. RoPE's do not count.
        block: The memory it works on.
        graphs: Whether it is captured.
        graph_key: The state of the model that its graphs depend on.
    """

    by_kernels = False
    runs_modules = True

    def __init__(self, block: CacheBlock, graphs: bool, graph_key: object):
        self.block, self.graphs, self.graph_key = block, graphs, graph_key

    def held(self) -> Any:
        """Return what must live as long as a graph, except the block, which holds the graphs."""
        return None

    @abstractmethod
    def _forward(self) -> None:
        """Feed the tokens and leave the logits in the block."""

    def feed(self) -> None:
        """Feed the tokens, append their keys and values, and leave the logits."""
        self._forward()

    def _to_logits(self) -> None:
        self._forward()
        move_on(self.block.control, self.block.control.alive.any())

    @property
    def logits(self) -> Tensor:
        """The logits that the step leaves."""
        return self.block.logits

    def _to_token(self, chooser: Chooser) -> None:
        self._forward()
        chooser.choose(self.block.control, self.logits)

    def is_captured(self, chooser: Chooser | None) -> bool:
        """Return whether `prepare` would return the replay of a graph that is there already."""
        return self.has_graph(self._name(chooser))

    def has_graph(self, name: tuple[Any, ...]) -> bool:
        """Return whether `replay_of` would return the replay of a graph that is there already."""
        return self.graphs and name in self.block.graphs_for(self.graph_key)

    def _name(self, chooser: Chooser | None) -> tuple[Any, ...]:
        """Return the key of the step's graph among the block's."""
        return type(self).__name__, *((None,) if chooser is None else chooser.keys)

    def prepare(self, chooser: Chooser | None) -> Callable[[], None]:
        """Return the function that runs the step. If it replays a graph, capture a missing one now.

        Args:
            chooser: Chooses the next tokens. None ends the step with the logits.
        """
        run = self._to_logits if chooser is None else partial(self._to_token, chooser)
        return self.replay_of(self._name(chooser), run)

    def replay_of(self, name: tuple[Any, ...], run: Callable[[], None]) -> Callable[[], None]:
        """Return the replay of a graph of the block, which is captured now if it is missing.

        Args:
            name: The name of the graph.
            run: What is captured. It is returned itself if steps are called.
        """
        if not self.graphs:
            return run
        graphs = self.block.graphs_for(self.graph_key)
        if name not in graphs:
            graphs[name] = self._captured(run), self.held()
        return graphs[name][0].replay  # type: ignore[no-any-return]

    def _captured(self, run: Callable[[], None]) -> Any:
        block = self.block
        # with no row alive the warm-ups leave no other trace than in these
        control = block.control
        touched = (control.alive, control.report, block.logits, *block.states.values())
        kept = [t.clone() for t in touched]
        block.control.alive.fill_(False)
        try:
            graph, block.graph_pool = capture(run, block.device, block.graph_pool)
            return graph
        finally:
            for t, value in zip(touched, kept, strict=True):
                t.copy_(value)


class CapturedForward(Step):
    """Hugging Face's own forward, swapped modules included, over layers with fixed slots.

    Attributes:
        rows: The rows that the forward takes: those of the block, or new tokens of them.
    """

    def __init__(
        self,
        model: Any,
        block: CacheBlock,
        masks: MaskPlan,
        *,
        logits_to_keep: bool,
        graphs: bool,
        graph_key: object,
        gives_positions: bool = True,
        rows: Control | None = None,
        logits: Tensor | None = None,
    ):
        super().__init__(block, graphs, graph_key)
        self.model, self.masks, self.gives_positions = model, masks, gives_positions
        self.rows = block.control if rows is None else rows
        self._logits = logits
        self.kwargs: dict[str, Any] = {"logits_to_keep": 1} if logits_to_keep else {}
        #: Whether a decoder gets the mask of the encoder's output, and whether as a part of it.
        self.gives_source_mask, self.mask_in_output = True, False
        self.ring_slots: dict[Ring, Tensor] = {}
        self.cache = step_cache(block, self.ring_slots, self.rows)

    @property
    def logits(self) -> Tensor:
        """The logits that the step leaves."""
        return self.block.logits if self._logits is None else self._logits

    def _forward(self) -> None:
        self.run(self.masks_now())

    def masks_now(self) -> Any:
        """Return the masks that the forward takes at this step, and set the slots in rings."""
        masks, slots = step_masks(self.masks, self.block, self.rows)
        self.ring_slots.update(slots)
        return masks

    def run(self, masks: Any) -> None:
        """Run the forward with these masks."""
        block, control = self.block, self.block.control
        outputs = self.model(
            **self._arguments(masks), use_cache=True, return_dict=True, **self.kwargs
        )
        self.logits.copy_(outputs.logits[:, -1])
        for ring, slab in block.ring_slabs:
            ring.turn(slab, control)

    def _arguments(self, masks: Any) -> dict[str, Any]:
        if self.block.source_slots:
            arguments = step_arguments(self.model, self.block, self.rows, self.cache, masks)
            if self.mask_in_output:
                arguments["encoder_outputs"].attention_mask = arguments["attention_mask"]
            if not self.gives_source_mask:
                del arguments["attention_mask"]
            return arguments
        arguments = {
            "input_ids": self.rows.ids,
            "attention_mask": self.masks.by_names(masks),
            cache_name(self.model): self.cache,
        }
        if self.gives_positions:
            arguments["position_ids"] = self.rows.positions()
        return arguments


def step_masks(
    masks: MaskPlan, block: CacheBlock, control: Control
) -> tuple[Any, dict[Ring, Tensor]]:
    """Return the masks that a forward takes at this step, and the slot of its key in each ring.

    Args:
        masks: The masks of the model.
        block: Memory of the call.
        control: The rows of the step.
    """
    rings = {masks.kind_of(n): ring for n, ring in enumerate(block.rings) if ring is not None}
    slots = {ring: ring.slot(control) for ring in set(rings.values())}
    in_rings = {kind: (ring, slots[ring]) for kind, ring in rings.items()}
    return masks.build(control, block.logits.dtype, in_rings), slots
