"""All kernels of a model: every part of every layer, and the head.

`generate` runs decoding steps and prompts with them. swap/assemble.py puts them together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mirage_hf.errors import MirageError, Rejected
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.layers.cache_kernels import CacheKernels
from mirage_hf.layers.compose import Kernel
from mirage_hf.layers.operands import OperandTable
from mirage_hf.layers.part import LONG_CACHES_ROLE, Part, StepShape, block_at
from mirage_hf.layers.prefill import LayerPrefill, PromptInputs
from mirage_hf.layers.rope import LengthRope, rotary_rows
from mirage_hf.layers.row_chunks import RowChunks, prepare_row_chunks
from mirage_hf.layers.step import LayerStep, StepInputs
from mirage_hf.patterns.schema import PatternBlock
from mirage_hf.pipeline import resolver
from mirage_hf.pipeline.resolver import Resolved


@dataclass(frozen=True)
class LayerKernels:
    """A layer's step and prefill, and the kernels that run them."""

    #: The layer's name in the model.
    name: str
    step: LayerStep
    #: What runs prompts, or None if the layer's own forward does.
    prefill: LayerPrefill | None
    #: Which of the model's RoPE tables the layer is given.
    rope_table: int
    #: The resolved kernels, by the shape of a step and by role.
    found: Mapping[StepShape, Mapping[str, Resolved]]


@dataclass(frozen=True, slots=True)
class WatchedNumber:
    """A number that kernels were made for, such as an epsilon, and where a module keeps it."""

    #: Its `get(name)` returns the present value: a dictionary of attributes or buffers, or
    #: `swap.watch.InstanceNumbers`.
    owner: Any
    name: str
    #: The value that the kernels were made for (see `comparable`).
    value: Any


def comparable(value: Any) -> Any:
    """Return a value that is equal while a number is. For a tensor: its identity and version."""
    if isinstance(value, Tensor):
        return id(value), None if value.is_inference() else value._version
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class ModelKernels:
    """The kernels of a whole model, for steps of some shapes.

    Attention's kernels are made for as many slots as a cache has, when they are asked for. This
    holds the model's layers and weights, and not the model, which holds this.
    """

    #: The shapes of steps that every part has a kernel for.
    shapes: tuple[StepShape, ...]
    layers: tuple[LayerKernels, ...]
    #: The kernel of the last norm and head, by number of rows.
    heads: Mapping[int, Resolved]
    #: The weights of the last norm and head. Their role is "head".
    head_operands: OperandTable
    #: How many logits the head gives.
    vocab: int
    #: The embedding's weight, and the number that embeddings are multiplied by.
    embedding: Tensor
    embedding_scale: float
    #: The model's RoPE module.
    rotary: Any
    #: The model's RoPE if it depends on the text's length. The kernels are for texts within its
    #: reach.
    rope: LengthRope | None
    #: For each RoPE table, the kind of RoPE and the step of one layer that reads the table.
    ropes: tuple[tuple[str, LayerStep], ...]
    #: Why prompts run the model's own forward, or "" if kernels run them.
    no_prefill: str
    #: The numbers of the model that the kernels were made for.
    watched: tuple[WatchedNumber, ...]
    over_cache: CacheKernels = field(init=False)
    _prefills: dict[PatternBlock, RowChunks] = field(default_factory=dict)
    _obstacles: dict[tuple[StepShape, tuple[int, ...]], str] = field(default_factory=dict)
    _products_us: dict[StepShape, float | None] = field(default_factory=dict)
    _prefill_lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        object.__setattr__(self, "over_cache", CacheKernels(self.embedding.device))

    # -- kernels of decoding steps

    @property
    def rows(self) -> tuple[int, ...]:
        """The numbers of sequences that steps of one token have kernels for."""
        return tuple(shape.batch for shape in self.shapes if shape.tokens == 1)

    @cached_property
    def weight_bytes(self) -> int:
        """The bytes of the weights of all layers and the head."""
        _embedding, *weights = self.weights
        return sum(weight.numel() * weight.element_size() for weight in weights)

    def bytes_read_in(self, shape: StepShape) -> int:
        """Return the bytes of weights that a step of a shape reads."""
        return self.weight_bytes

    def products_us(self, shape: StepShape) -> float | None:
        """Return the time of a step's kernels except attention's, in µs.

        Attention's time depends on the text. None if one of the others was not measured.
        """
        if shape not in self._products_us:
            resolved = [self.heads[shape.rows]]
            for layer in self.layers:
                parts = layer.step.parts.items()
                products = (role for role, part in parts if not part.block.pattern.over_cache)
                resolved += [layer.found[shape][role] for role in products]
            what = {True: "time_us", False: "library_us"}
            times = [getattr(each, what[each.runs_kernel]) for each in resolved]
            measured = [time for time in times if time is not None]
            is_complete = len(measured) == len(times)
            self._products_us[shape] = sum(measured) if is_complete else None
        return self._products_us[shape]

    def kernels(self, layer: LayerKernels, shape: StepShape, slots: int) -> dict[str, Kernel]:
        """Return what runs the parts of a layer for caches of `slots` slots.

        Raises:
            MirageError: If attention has no kernel for that many slots.
        """
        found = layer.found[shape]
        return {
            role: self._for_slots(found, role, part, shape, slots)
            if part.block.pattern.over_cache
            else found[role].run
            for role, part in layer.step.parts.items()
        }

    def _for_slots(
        self, found: Mapping[str, Resolved], role: str, part: Part, shape: StepShape, slots: int
    ) -> Kernel:
        """Return a kernel over a cache, cut to `slots`."""
        at = block_at(part.block, shape)
        assert not isinstance(at, Rejected), "such shapes have no kernels"
        block, rows = at
        tuned = [found[role]]
        if role == "attention" and LONG_CACHES_ROLE in found:
            tuned.append(found[LONG_CACHES_ROLE])
        return self.over_cache.at(tuned, block, rows, slots)

    def obstacle(self, shape: StepShape, slots: tuple[int, ...]) -> str:
        """Return why no kernels run steps over caches of `slots` (one for each layer), or ""."""
        key = shape, slots
        if key not in self._obstacles:
            # Other threads read this without a lock. So write only the final result.
            self._obstacles[key] = self._find_obstacle(shape, slots)
        return self._obstacles[key]

    def _find_obstacle(self, shape: StepShape, slots: tuple[int, ...]) -> str:
        for layer, layer_slots in zip(self.layers, slots, strict=True):
            try:
                self.kernels(layer, shape, layer_slots)
            except MirageError as error:
                return f"no kernels for {layer_slots} slots ({error})"
        return ""

    # -- kernels of prompts

    def prefill_kernels(self, rows: int) -> list[Mapping[str, Kernel]]:
        """Return each layer's prefill kernels for `rows` tokens, and make them if missing.

        Raises:
            MirageError: If a kernel cannot be made.
        """
        with self._prefill_lock:  # not the lock that steps take, whose kernels exist already
            by_layer: list[Mapping[str, RowChunks]] = []
            for layer in self.layers:
                assert layer.prefill is not None
                blocks = layer.prefill.blocks
                by_layer.append({name: self._row_chunks(block) for name, block in blocks.items()})
            prepare_row_chunks(self._prefills.values(), rows)
            return list(by_layer)

    def _row_chunks(self, block: PatternBlock) -> RowChunks:
        if block not in self._prefills:
            self._prefills[block] = RowChunks(block, self.embedding.device, self._resolver(block))
        return self._prefills[block]

    def _resolver(self, block: PatternBlock) -> Callable[[KernelGraph], Resolved]:
        device, pattern = self.embedding.device, block.pattern

        def resolve(program: KernelGraph) -> Resolved:
            return resolver.resolve(
                program,
                device=device,
                tune="never",
                pattern=pattern.name,
                next_may_launch_early=pattern.next_may_launch_early,
            )

        return resolve

    # -- the state of the model

    @property
    def weights(self) -> Iterator[Tensor]:
        """The weights that kernels read."""
        yield self.embedding
        for operand in self.head_operands:
            yield operand.tensor
        for layer in self.layers:
            for role in layer.step.parts:
                yield from layer.step.operands.parameters(role)

    def changed(self) -> str:
        """Return which number is no longer what kernels were made for, or ""."""
        for number in self.watched:
            if comparable(number.owner.get(number.name)) != number.value:
                return f"a {number.name} was changed"
        return ""

    def rotary_tables(self, positions: int) -> tuple[Tensor, Tensor]:
        """Return RoPE's cos and sin (tables, positions, width) as the layers' kernels read them.

        The model's own module computes them, in the dtype that it gives. Positions beyond RoPE's
        reach get zeros.
        """
        reach = positions if self.rope is None else min(positions, self.rope.reach)
        at = torch.arange(reach, device=self.embedding.device)[None]
        with torch.inference_mode(False), torch.no_grad():
            like = self.embedding[:1, None].detach()
            tables = [
                step.tables(*rotary_rows(self.rotary, like, at, kind)) for kind, step in self.ropes
            ]
            cos, sin = (
                torch.nn.functional.pad(torch.cat(each), (0, 0, 0, positions - reach))
                for each in zip(*tables, strict=True)
            )
            return cos, sin

    # -- running the model

    def run_step(
        self,
        kernels: Sequence[Mapping[str, Kernel]],
        x: Tensor,
        inputs: Iterable[StepInputs],
        logits: Tensor,
    ) -> None:
        """Run every layer and the head for the new tokens of each sequence.

        Args:
            kernels: What runs the parts of each layer (see `kernels`).
            x: The embedded tokens (rows, width).
            inputs: What each layer reads besides `x`. Its keys and values are appended to.
            logits: Where the logits (rows, vocabulary) are written.
        """
        for layer, layer_kernels, layer_inputs in zip(self.layers, kernels, inputs, strict=True):
            x = layer.step(layer_kernels, x, layer_inputs)
        self.head(x.shape[0], x, logits)

    def run_prompt(
        self,
        kernels: Sequence[Mapping[str, Kernel]],
        ids: Tensor,
        last: Tensor,
        inputs: Iterable[PromptInputs],
        logits: Tensor,
    ) -> None:
        """Run the embedding, every layer and the head for whole prompts.

        Args:
            kernels: What `prefill_kernels` returns for all tokens of the batch.
            ids: The tokens (batch, tokens). Each row starts with its own first token.
            last: The index of each row's last token (batch,). Its logits are computed.
            inputs: What each layer reads besides its hidden states. It writes its keys and values.
            logits: Where the logits (batch, vocabulary) are written.
        """
        x = torch.nn.functional.embedding(ids, self.embedding).flatten(0, 1)
        if self.embedding_scale != 1:
            x = x.mul_(self.embedding_scale)
        for layer, layer_kernels, layer_inputs in zip(self.layers, kernels, inputs, strict=True):
            assert layer.prefill is not None
            x = layer.prefill(layer_kernels, x, layer_inputs)
        batch, tokens = ids.shape
        x = x.view(batch, tokens, -1)
        x = x.gather(1, last[:, None, None].expand(-1, 1, x.shape[-1]))
        self.head(batch, x[:, 0], logits)

    def head(self, rows: int, x: Tensor, logits: Tensor) -> None:
        """Write the logits (rows, vocabulary) of hidden states x (rows, width)."""
        kernel = self.heads[rows]
        operands = [x, *self.head_operands.views("head")]
        if kernel.runs_kernel and x.device.type == "cuda":
            kernel.run(operands, [logits])  # type: ignore[call-arg]
        else:
            logits.copy_(kernel.run(operands)[0])
