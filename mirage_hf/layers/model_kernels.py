"""What a model's steps of decoding are made of: the kernels of every part of every layer and of the head, by batch size."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mirage_hf.errors import MirageError, Rejected
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.layers.compose import Kernel, Part, child
from mirage_hf.layers.prefill import LayerPrefill, PromptInputs, layer_prefill, why_no_prefill
from mirage_hf.layers.row_chunks import RowChunks, prepare_row_chunks
from mirage_hf.layers.step import LayerStep, StepInputs, layer_step
from mirage_hf.match.causal import CausalMatch, LengthRope, length_rope, rotary_rows
from mirage_hf.match.matcher import Match
from mirage_hf.match.probe import softcap_of
from mirage_hf.patterns.attention import LONG_FROM, for_long_caches
from mirage_hf.patterns.causal_lm import (
    LOGITS_DIVISOR,
    LOGITS_MULTIPLIER,
    LOGITS_SOFTCAP,
    OF_LAYERS,
)
from mirage_hf.patterns.decoder_layer import CLIPS, MULTIPLIERS, SOFTCAPS, SWITCHES
from mirage_hf.patterns.schema import PatternBlock
from mirage_hf.pipeline import resize, resolver

BlockKernels = Mapping[Any, Any]
LONG_CACHES_ROLE = "attention, long caches"
"""The role of attention's kernels that were tuned at many slots."""


@dataclass(frozen=True)
class LayerKernels:
    """A layer's step and its kernels, by number of rows and role; what its prompts run, None where that is its own forward."""

    match: Match
    step: LayerStep
    prefill: LayerPrefill | None
    rope_table: int
    """Which of the tables of RoPE it is given."""
    found: Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True)
class ModelKernels:
    """The kernels of whole steps, for each of `rows` sequences. Attention's are made for as many slots as a cache has.

    It holds the model's layers and weights, and not the model, which holds it.
    """

    rows: tuple[int, ...]
    layers: tuple[LayerKernels, ...]
    heads: Mapping[int, Any]
    embedding: Tensor
    embedding_scale: float
    rotary: Any
    rope: LengthRope | None
    """What kind of RoPE it is where that depends on the length of the text: these kernels are for texts within its reach."""
    ropes: tuple[tuple[str, LayerStep], ...]
    """The kinds of RoPE that layers are given, and a layer that takes its numbers as it does: a table each."""
    head_weights: tuple[Tensor, ...]
    vocab: int
    no_prefill: str
    """Why prompts are not by kernels, "" where they are."""
    constants: tuple[tuple[dict[str, Any], str, Any], ...]
    """Numbers that kernels were made for, where modules keep them: an attribute dictionary, a name, a value; of a tensor its version."""
    _attention: dict[tuple[str, int], Kernel] = field(default_factory=dict)
    _prompts: dict[PatternBlock, RowChunks] = field(default_factory=dict)
    _obstacles: dict[tuple[int, tuple[int, ...]], str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _making: threading.Lock = field(default_factory=threading.Lock)

    def kernels(self, layer: LayerKernels, rows: int, slots: int) -> dict[str, Kernel]:
        """What runs the parts of a layer, for caches of so many slots. Errors: MirageError where attention has no kernel for them."""
        found, parts = layer.found[rows], layer.step.parts
        return {
            role: self._for_slots(found, role, part, rows, slots)
            if part.block.pattern.over_cache
            else found[role].run
            for role, part in parts.items()
        }

    def _for_slots(
        self, found: Mapping[str, Any], role: str, part: Part, rows: int, slots: int
    ) -> Kernel:
        """Those tuned for caches of about this length where they can be cut to it, else those for the others."""
        tuned = (
            [found[role], found[LONG_CACHES_ROLE]]
            if role == "attention" and LONG_CACHES_ROLE in found
            else [found[role]]
        )
        program, failed = part.block.program(rows, slots=slots), None
        for each in reversed(tuned) if slots >= LONG_FROM else tuned:
            with self._lock:
                key = each.digest, slots
                try:
                    if key not in self._attention:
                        self._attention[key] = resize.at_size(each, program, self.embedding.device)
                    return self._attention[key]
                except MirageError as e:
                    failed = failed or e
        assert failed is not None
        raise failed

    def prefill_kernels(self, rows: int) -> list[Mapping[str, Kernel]]:
        """What does each layer's part of prompts of so many tokens in all that is not the library's: looked up, or searched and made now.
        Errors: MirageError."""
        with self._making:  # not the lock that calls take whose kernels are there
            each: list[Mapping[str, RowChunks]] = []
            for layer in self.layers:
                assert layer.prefill is not None
                each.append(
                    {
                        name: self._prompts.get(block) or self._in_pieces(block)
                        for name, block in layer.prefill.blocks.items()
                    }
                )
            prepare_row_chunks(self._prompts.values(), rows)
            return list(each)

    def _in_pieces(self, block: PatternBlock) -> RowChunks:
        device = self.embedding.device

        def resolve(program: KernelGraph) -> resolver.Resolved:
            return resolver.resolve(
                program,
                device=device,
                tune="never",
                pattern=block.pattern.name,
                next_may_launch_early=block.pattern.next_may_launch_early,
            )

        found = self._prompts[block] = RowChunks(block, device, resolve)
        return found

    def obstacle(self, rows: int, slots: tuple[int, ...]) -> str:
        """Why there are no steps for caches of so many slots in each layer, "" where there are."""
        if (rows, slots) not in self._obstacles:
            self._obstacles[rows, slots] = self._missing(
                rows, slots
            )  # not before it is known: other threads look here, too
        return self._obstacles[rows, slots]

    def _missing(self, rows: int, slots: tuple[int, ...]) -> str:
        for layer, n in zip(self.layers, slots, strict=True):
            try:
                self.kernels(layer, rows, n)
            except MirageError as e:
                return f"no kernels for {n} slots ({e})"
        return ""

    @property
    def weights(self) -> Iterator[Tensor]:
        """Those that kernels read."""
        yield from (self.embedding, *self.head_weights)
        for layer in self.layers:
            for each in layer.step.parameters.values():
                yield from each

    def changed(self) -> str:
        """Which number is no longer what kernels were made for, "" where none is."""
        return next(
            (
                f"a {name} was changed"
                for inner, name, value in self.constants
                if _value(inner.get(name)) != value
            ),
            "",
        )

    def rotary_tables(self, positions: int) -> tuple[Tensor, Tensor]:
        """RoPE's cos and sin (kinds, positions, width) as the model's own module computes them, in the dtype that it gives, and as layers
        take them. Positions out of RoPE's reach get no numbers."""
        reach = positions if self.rope is None else min(positions, self.rope.reach)
        at = torch.arange(reach, device=self.embedding.device)[None]
        with torch.inference_mode(False), torch.no_grad():
            tables = [
                step.tables(*rotary_rows(self.rotary, self.embedding[:1, None].detach(), at, kind))
                for kind, step in self.ropes
            ]
            cos, sin = (
                torch.nn.functional.pad(torch.cat(each), (0, 0, 0, positions - reach))
                for each in zip(*tables, strict=True)
            )
            return cos, sin

    def run_step(
        self,
        kernels: Sequence[Mapping[str, Kernel]],
        x: Tensor,
        inputs: Iterable[StepInputs],
        logits: Tensor,
    ) -> None:
        """Run every layer and the head for one token of each sequence.

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
            ids: The tokens (batch, tokens), each row from its own first token on.
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
        """Write the logits (rows, vocabulary) of hidden states (rows, width)."""
        found, views = (
            self.heads[rows],
            [p.t() if p.dim() == 2 else p[None] for p in self.head_weights],
        )
        if found.is_fused and x.device.type == "cuda":
            found.run([x, *views], [logits])
        else:
            logits.copy_(found.run([x, *views])[0])


def assemble_model_kernels(
    causal: CausalMatch | Rejected,
    matches: Sequence[Match],
    rows: Sequence[int],
    found: BlockKernels,
) -> ModelKernels | Rejected:
    """Put the kernels found together, for those numbers of rows for which each part has one."""
    if isinstance(causal, Rejected):
        return causal
    by_name = {m.name: m for m in matches}
    reasons: list[str] = []

    def missing(r: int) -> str:
        for part in (*(p for name in causal.layers for p in by_name[name].parts), causal.head):
            kernel = found[part.block, r]
            if isinstance(kernel, Rejected):
                return f"{part.pattern}: {kernel.reason}"
            if part.block.pattern.over_cache and not kernel.is_fused:
                return f"{part.pattern}: {kernel.reason}"
        return ""

    good = [r for r in rows if not (why := missing(r)) or reasons.append(f"{r} rows: {why}")]  # type: ignore[func-returns-value]
    if not good:
        return Rejected("; ".join(reasons))
    each = [by_name[name] for name in causal.layers]
    steps = [layer_step(m.module, m.parts, m.layouts[0], m.rope) for m in each]
    taking = [(kind, step.taking) for kind, step in zip(causal.kinds, steps, strict=True)]
    ropes = dict(zip(reversed(taking), reversed(steps), strict=True))
    layers = tuple(
        LayerKernels(
            m,
            step,
            layer_prefill(m.module, m.parts, m.layouts[0]),
            list(ropes).index(rope),
            {r: _by_role(m, r, found) for r in good},
        )
        for m, step, rope in zip(each, steps, taking, strict=True)
    )
    no_prefill = next((no for m in each if (no := why_no_prefill(m.parts, m.layouts[0]))), "")
    head = causal.head
    weights = [child(causal.model, path)._parameters[name] for path, name in head.weights]
    constants = tuple(
        (inner, name, _value(value)) for inner, name, value in _constants(causal, by_name)
    )
    return ModelKernels(
        tuple(good),
        layers,
        {r: found[head.block, r] for r in good},
        causal.embedding,
        causal.embedding_scale(causal.embedding.dtype),
        causal.rotary,
        length_rope(getattr(causal.backbone, "config", None)),
        tuple((kind, step) for (kind, _), step in ropes.items()),
        tuple(w for w in weights if w is not None),
        dict(head.block.sizes)["n"][0],
        no_prefill,
        constants,
    )


def _value(x: Any) -> Any:
    if isinstance(x, Tensor):
        return id(x), None if x.is_inference() else x._version
    return tuple(x) if isinstance(x, list) else x


def _by_role(m: Match, rows: int, found: BlockKernels) -> dict[str, Any]:
    kernels = {p.role: found[p.block, rows] for p in m.parts}
    long = next(
        (found.get((for_long_caches(p.block), rows)) for p in m.parts if p.role == "attention"),
        None,
    )
    return (
        kernels
        if long is None or isinstance(long, Rejected) or not long.is_fused
        else {**kernels, LONG_CACHES_ROLE: long}
    )


def _constants(
    causal: CausalMatch, matches: Mapping[str, Match]
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    backbone, row = causal.backbone._modules, causal.layout
    config = getattr(causal.backbone, "config", None)
    modules = [backbone[row.norm], causal.rotary]
    for name in causal.layers:
        m = matches[name]
        attention: Any = m.module._modules[m.layouts[0].attention]
        yield from _named(m.module.__dict__, (*MULTIPLIERS, *SWITCHES))
        yield from _named(attention.__dict__, SOFTCAPS)
        yield from (
            (attention.config.__dict__, name, None)
            for name in CLIPS
            if hasattr(attention, "config")
        )
        if softcap_of(attention) is not None:  # another attention may do something else with it
            yield from _named(attention.config.__dict__, ("_attn_implementation_internal",))
        modules += [
            child(m.module, path)
            for path in dict.fromkeys(path for p in m.parts for path in p.bypassed)
        ]
    for module in modules:
        yield from ((module.__dict__, n, v) for n, v in module.__dict__.items() if type(v) is float)  # type: ignore[union-attr]
    yield backbone[row.embedding].__dict__, "max_norm", None  # type: ignore[union-attr]
    yield from causal.embedding_scales
    yield from _named(getattr(config, "__dict__", {}), OF_LAYERS)
    yield from _named(causal.model.config.__dict__, (LOGITS_DIVISOR, LOGITS_SOFTCAP))
    yield from _named(causal.model.__dict__, (LOGITS_MULTIPLIER,))


def _named(
    inner: dict[str, Any], names: Sequence[str]
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    return ((inner, n, inner[n]) for n in names if n in inner)
