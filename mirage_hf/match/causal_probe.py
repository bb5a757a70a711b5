"""The probe of a whole causal language model, whose layers only record what they are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from mirage_hf.errors import Rejected
from mirage_hf.layers.part import Part
from mirage_hf.layers.rope import cos_and_sin, in_order, rotary_rows
from mirage_hf.layers.stand_in import stand_in
from mirage_hf.layers.torch_kernels import torch_kernels
from mirage_hf.match.layer_calls import distance
from mirage_hf.match.matches import CausalMatch
from mirage_hf.match.probe import TOLERANCE, Probes
from mirage_hf.match.twins import random_weights, twin

#: The vocabulary of the small embedding and head.
VOCAB = 48


@dataclass(frozen=True)
class LayerRecord:
    """The inputs and the output of a layer of a hollow model."""

    x: Tensor
    cos: Tensor
    sin: Tensor
    output: Tensor


@dataclass(frozen=True)
class HollowModel:
    """A model whose layers record their calls, with a small random embedding and head."""

    model: Any
    embedding: Tensor
    #: The weights of the last norm and of the head.
    head_weights: list[Tensor]
    #: One record for each layer that was called.
    records: list[LayerRecord]


def hollow_model(causal: CausalMatch, generator: torch.Generator) -> HollowModel:
    """Return a copy of a model with hollow layers. It shares everything else with the model."""
    layout, model, backbone = causal.layout, causal.model, causal.backbone
    records: list[LayerRecord] = []

    def forward(
        hidden_states: Tensor, *args: Any, position_embeddings: Any, **kwargs: Any
    ) -> Tensor:
        output = 1.25 * hidden_states + 0.5
        records.append(LayerRecord(hidden_states, *cos_and_sin(position_embeddings), output))
        return output

    head: Any = model._modules[layout.head]
    has_bias = head.bias is not None
    # Initialising the weights would change torch's global random state, which is the user's.
    small_head = skip_init(nn.Linear, head.in_features, VOCAB, bias=has_bias, dtype=torch.float32)
    for p in small_head.parameters():
        p.requires_grad_(False).copy_(torch.randn(p.shape, generator=generator))
    embedding: Any = backbone._modules[layout.embedding]
    rows = torch.randn(VOCAB, embedding.weight.shape[1], generator=generator)
    small = nn.Parameter(rows.to(embedding.weight.device, torch.float32), requires_grad=False)
    small_embedding = stand_in(embedding, {"_parameters": {"weight": small}, "padding_idx": None})
    norm = twin(backbone._modules[layout.norm], random_weights(4))  # type: ignore[arg-type]
    hollow = causal.with_layer_forward(
        forward,
        {layout.embedding: small_embedding, layout.norm: norm},
        {layout.head: small_head.to(embedding.weight.device)},
    )
    weights = [*norm.parameters(), *small_head.parameters()]
    return HollowModel(hollow, small, weights, records)


def probe_causal(probes: Probes, causal: CausalMatch) -> Rejected | None:
    """Check that a causal LM is its embedding, its layers in order, a norm and its head."""

    def probe() -> Rejected | None:
        generator = torch.Generator().manual_seed(4)
        hollow = hollow_model(causal, generator)
        ids = torch.randint(0, VOCAB, (2, 5), generator=generator).to(causal.embedding.device)
        positions = torch.tensor([[0, 1, 2, 3, 4], [2, 3, 4, 5, 6]]).to(ids.device)
        output = hollow.model.forward(input_ids=ids, position_ids=positions, use_cache=False)
        called, layers = len(hollow.records), len(causal.layers)
        if called != layers:
            return Rejected(f"the model calls {called} of its {layers} layers")
        x = hollow.embedding[ids] * causal.embedding_scale(torch.float32)
        if no := _check_records(causal, hollow.records, x, positions):
            return no
        last = hollow.records[-1].output.flatten(0, 1)
        logits = head_logits(causal.head, hollow.head_weights, last)
        difference = distance(logits, output.logits.flatten(0, 1))
        if difference < TOLERANCE:
            return None
        return Rejected(
            f"the model is not head(norm(layers(embedding))): off by {difference:.2g} on a probe"
        )

    return probes.once(("causal", id(causal.model)), probe)


def _check_records(
    causal: CausalMatch, records: list[LayerRecord], embedded: Tensor, positions: Tensor
) -> Rejected | None:
    """Check that each layer is given the output of the one before it, and RoPE of the positions."""
    expected = embedded
    for number, record in enumerate(records):
        kind = causal.rope_kinds[number]
        cos, sin = rotary_rows(causal.rotary, embedded, positions, kind)
        for table in (cos, sin):
            of_pairs = causal.rope.of_pairs(table)
            if not torch.equal(in_order(of_pairs, causal.rope.order), table):
                return Rejected("RoPE's cos and sin are not one number for each pair of elements")
        difference = max(
            distance(record.x, expected),
            distance(record.cos, cos),
            distance(record.sin, sin),
        )
        if not difference < TOLERANCE:
            source = "what the layer before it gave" if number else "the embedding"
            return Rejected(
                f"layer {number} is not given {source}, or not RoPE of the positions: "
                f"off by {difference:.2g} on a probe"
            )
        expected = record.output
    return None


def head_logits(head: Part, weights: list[Tensor], x: Tensor) -> Tensor:
    """Return the logits of hidden states (rows, k) by the head's program, op by op."""
    widths = tuple(w.shape[0] for w in weights if w.dim() == 2)
    block = head.block.pattern.block(**{**dict(head.block.sizes), "n": widths})
    small = Part(head.role, block, head.weights, head.bypassed)
    views = [w.t() if w.dim() == 2 else w[None] for w in weights]
    return torch_kernels([small], x.shape[0], x.dtype)["head"]([x, *views])[0]
