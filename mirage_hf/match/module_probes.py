"""Probes of single modules: norms, activations, RoPE, MLPs and LoRA linears."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mirage_hf.errors import Rejected
from mirage_hf.formats.experts import CodedExperts, coded_experts, replaced_forward
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.layers.rope import Rope, in_order, rotary_kinds, rotary_rows
from mirage_hf.layers.stand_in import MlpStandIn, stand_in
from mirage_hf.layers.torch_kernels import torch_kernels
from mirage_hf.match.layer_calls import distance
from mirage_hf.match.matches import Match
from mirage_hf.match.probe import TOLERANCE, Probes
from mirage_hf.match.twins import kind_of, lora_scalings, random_weights, twin
from mirage_hf.ops import table
from mirage_hf.patterns import decoder_layer
from mirage_hf.patterns.fragments import activated

#: The largest difference between an activation and its op.
ACTIVATION_TOLERANCE = 1e-6


class NormKind(NamedTuple):
    """What a norm computes besides dividing by the root of the mean square."""

    #: True for LayerNorm: the mean is subtracted first.
    centred: bool
    #: What is added to the weight.
    offset: float


def norm_epsilon(norm: nn.Module) -> float:
    """Return the epsilon of a norm by its own attribute, or a usual one if it has none."""
    values = (norm.__dict__.get(name) for name in decoder_layer.EPS_NAMES)
    return next((value for value in values if isinstance(value, float)), 1e-6)


def probe_norm(probes: Probes, name: str, norm: Any) -> NormKind | Rejected:
    """Return which norm a module computes, as the ops `layer_norm` and `rms_norm` do.

    A bias is added to either.
    """
    eps = norm_epsilon(norm)

    def probe() -> NormKind | Rejected:
        distances = _norm_distances(norm, eps)
        nearest = min(distances, key=lambda kind: distances[kind])
        if distances[nearest] < TOLERANCE:
            return nearest
        formula = _norm_formula(nearest, has_bias=norm._parameters.get("bias") is not None)
        return Rejected(
            f"{name} ({type(norm).__name__}) is not {formula}: "
            f"off by {distances[nearest]:.2g} on a probe"
        )

    return probes.once(("norm", name, eps, kind_of(norm)), probe)


def _norm_distances(norm: Any, eps: float) -> dict[NormKind, float]:
    """Return how far a norm is from each kind, on inputs of usual and of small size."""
    generator = torch.Generator().manual_seed(0)
    other = twin(norm, random_weights(0))
    bias = 0.0 if norm._parameters.get("bias") is None else other.bias
    oracles = [table.lookup(op).oracle for op in ("rms_norm", "layer_norm")]
    kinds = [NormKind(*kind) for kind in product((False, True), decoder_layer.OFFSETS)]
    distances = dict.fromkeys(kinds, 0.0)
    for scale in (1.0, 1e-3):
        shape = (3, 5, *norm.weight.shape)
        noise = torch.randn(shape, generator=generator, dtype=torch.float32)
        x = (scale * (0.5 + noise)).to(norm.weight.device)
        y = other.forward(x)
        for kind in kinds:
            normed = oracles[kind.centred](x, eps=eps)
            expected = normed * (other.weight + kind.offset) + bias
            distances[kind] = max(distances[kind], distance(y, expected))
    return distances


def _norm_formula(kind: NormKind, has_bias: bool) -> str:
    normed = "(x − mean(x)) / sqrt(var(x) + eps)" if kind.centred else "x / sqrt(mean(x²) + eps)"
    weight = f"({kind.offset:g} + w)" if kind.offset else "w"
    return f"{normed} · {weight}" + (" + b" if has_bias else "")


def probe_activation(probes: Probes, module: Any, names: Sequence[str]) -> str | Rejected:
    """Return which of the activations `names` a module computes."""

    def probe() -> str | Rejected:
        # Some activations clip large inputs.
        xs = [torch.linspace(-end, end, 721, dtype=torch.float64) for end in (9, 1000)]
        ys = [module.forward(x) for x in xs]
        if all(isinstance(y, Tensor) for y in ys):
            for name in names:
                distances = [distance(_activated(name, x), y) for x, y in zip(xs, ys, strict=True)]
                if max(distances) < ACTIVATION_TOLERANCE:
                    return name
        return Rejected(f"({type(module).__name__}) is none of {', '.join(names)}")

    return probes.once(("activation", kind_of(module)), probe)


def _activated(activation: str, x: Tensor) -> Tensor:
    graph = KernelGraph()
    given = graph.new_input(tuple(x.shape), torch.float32, name="x")
    graph.mark_output(activated(graph, given, activation))
    return run_kernel_graph(graph, [x], torch.float64)[0]


def probe_rotary(probes: Probes, rotary: Any, config: Any, dtype: torch.dtype) -> Rope | Rejected:
    """Return the form in which a model's RoPE module gives cos and sin to layers of a dtype."""

    def probe() -> Rope | Rejected:
        device = next((b.device for b in rotary.buffers()), torch.device("cpu"))
        layers = len(getattr(config, "layer_types", None) or ()) or 1
        positions = torch.tensor([[0, 3]], device=device)
        x = torch.zeros(1, 2, 8, dtype=dtype, device=device)
        kinds = sorted(set(rotary_kinds(rotary, config, layers)))
        ropes = {_rope_of(rotary_rows(rotary, x, positions, kind)[0]) for kind in kinds}
        if len(ropes) != 1:
            return Rejected("RoPE differs in more than numbers from layer to layer")
        return ropes.pop()

    return probes.once(("rotary", id(rotary), dtype), probe)


def _rope_of(cos: Tensor) -> Rope:
    """Return the form of a table of cos (…, positions, width)."""
    width = cos.shape[-1]
    for order in ("halves", "pairs"):
        rope = Rope(width, cos.dtype, order)
        if width % 2 == 0 and torch.equal(in_order(rope.of_pairs(cos), order), cos):
            return rope
    return Rope(2 * width, cos.dtype, "once")


def make_mlp_stand_in(probes: Probes, mlp: Any, norm: Any) -> MlpStandIn | Rejected:
    """Return a stand-in for an MLP that runs its own forward. It returns a tuple if the MLP does.

    Args:
        probes: The outcomes so far.
        mlp: The MLP.
        norm: A norm of the same layer.
    """

    def probe() -> MlpStandIn:
        weight = norm.weight
        # Routers and norms may be kept in float32 while the rest is in half precision.
        dtypes = list(dict.fromkeys((weight.dtype, *(p.dtype for p in mlp.parameters()))))
        runnable = _without_coded_experts(mlp)
        for dtype in dtypes:
            try:
                y = runnable.forward(weight.new_zeros(1, 1, weight.shape[0], dtype=dtype))
            except RuntimeError:
                if dtype is dtypes[-1]:
                    raise
            else:
                break
        return MlpStandIn(returns_tuple=isinstance(y, tuple)).eval()  # type: ignore[return-value]

    return probes.once(("passing", kind_of(mlp)), probe)


def _without_coded_experts(mlp: Any) -> Any:
    """Return an MLP whose experts in codes give zeros: their library's kernels may be missing."""
    coded = [
        n for n, child in mlp.named_children() if isinstance(coded_experts(child), CodedExperts)
    ]
    if not coded:
        return mlp
    other = stand_in(mlp, dict.fromkeys(coded, lambda x, *_, **__: torch.zeros_like(x)))
    if replaced_forward(mlp):
        del other.__dict__["forward"]
    return other


def probe_module(probes: Probes, candidate: Match) -> Rejected | None:
    """Compare an MLP or LoRA linear with its one part done by its program."""
    module, (part, *_) = candidate.module, candidate.parts

    def probe() -> Rejected | None:
        generator = torch.Generator().manual_seed(2)
        other = twin(module, random_weights(2, lora_scalings(module)))
        composed = candidate.compose(other)
        width = dict(part.block.sizes)["k"]
        device = next(other.parameters()).device
        for batch, length in ((1, 1), (2, 3)):
            x = torch.randn(batch, length, width, generator=generator, dtype=torch.float32)
            x = x.to(device)
            kernels = torch_kernels(candidate.parts, batch * length, torch.float32)
            difference = distance(composed(kernels, x, {}), other.forward(x))
            if not difference < TOLERANCE:
                return Rejected(
                    "the module computes something else than the pattern: "
                    f"off by {difference:.2g} on a probe"
                )
        return None

    return probes.once((candidate.kind, parts_key(candidate), kind_of(module)), probe)


def parts_key(candidate: Match) -> tuple[Any, ...]:
    """Return what the parts of a candidate compute.

    A probe of an adapter that is scaled by 0 says nothing about one that is not.
    """
    return tuple((part.block, part.scalings) for part in candidate.parts)
