"""Probes: a twin of a module with random float32 weights runs beside the pattern's program on the same inputs.

Random weights say more than real ones (a norm's weight of ones would hide what is done with it), and no weight is copied.
Modules of one kind (classes, shapes, scalar attributes) share one probe.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.errors import Rejected, described
from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.kernel import KernelGraph
from mirage_hf.layers.compose import Kernel, MlpStandIn, any_norm, in_dtype, stand_in, torch_kernels
from mirage_hf.layers.prefill import LayerPrefill, PromptInputs, layer_prefill
from mirage_hf.layers.step import LayerStep, Rope, StepInputs, in_order, layer_step
from mirage_hf.match import plain
from mirage_hf.match.adapters import scaling_of
from mirage_hf.match.causal import head_of, hollow, rotary_kinds, rotary_rows
from mirage_hf.ops import table
from mirage_hf.patterns import decoder_layer
from mirage_hf.patterns.parts import activated
from mirage_hf.patterns.schema import LayerLayout

TOLERANCE = 1e-3
"""Of the largest output: float32 sums of any order pass, TF32 too; another formula does not."""
FAR = 1 << 20
"""Between the positions of a probe's sequences."""
MASKED = ("eager", "sdpa")
"""Attention backends that take the float mask a probe gives. Twins of models with another one are probed with sdpa."""


# -- twins --------------------------------------------------------------------------------------------------------------


def twin(module: nn.Module, convert: Callable[[str, Tensor], Tensor]) -> Any:
    """Return a copy of a module whose parameters and buffers are `convert(name, tensor)`; configs are shared, not copied."""
    memo: dict[int, Any] = {}
    for name, p in module.named_parameters():
        memo[id(p)] = nn.Parameter(convert(name, p.detach()), requires_grad=False)
    for name, b in module.named_buffers():
        memo[id(b)] = convert(name, b) if b.is_floating_point() else b.clone()
    for m in module.modules():
        config = m.__dict__.get("config")
        if config is not None and id(config) not in memo:
            memo[id(config)] = _probing_config(config)
    return copy.deepcopy(module, memo)


def _probing_config(config: Any) -> Any:
    if getattr(config, "_attn_implementation", None) in (None, *MASKED):
        return config
    config = copy.copy(config)
    config._attn_implementation = "sdpa"
    return config


def scalings(module: nn.Module) -> dict[str, float]:
    """What PEFT scales adapters by, by the names of their second weights."""
    given = (
        (name, m.__dict__["scaling"])
        for name, m in module.named_modules()
        if "lora_B" in m._modules
    )
    return {
        f"{name}.lora_B.{adapter}.weight".removeprefix("."): scaling_of(x)
        for name, each in given
        for adapter, x in each.items()
    }


def randomised(
    seed: int, scaled: Mapping[str, float] | None = None
) -> Callable[[str, Tensor], Tensor]:
    """Weights of unit gain, norm weights near 1.3, biases near 0.2: far enough from 0 and 1 to be seen. `scaled`: what some weights'
    products are multiplied by, by name; it is part of their gain, because programs take exponentials of scores as they are."""
    factors = {name: 1 / abs(x) for name, x in (scaled or {}).items() if x}
    generators: dict[torch.device, torch.Generator] = {}

    def convert(name: str, p: Tensor) -> Tensor:
        generator = generators.setdefault(p.device, torch.Generator(p.device).manual_seed(seed))
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float32, device=p.device)
        if p.dim() >= 2:
            noise *= p.shape[-1] ** -0.5 * factors.get(name, 1.0)
        else:
            noise = 0.3 * noise + (0.2 if name.endswith("bias") else 1.3)
        return noise

    return convert


def softcap_of(attention: nn.Module) -> float | None:
    """What an attention says may bound its scores."""
    return next(
        (
            float(v)
            for n in decoder_layer.SOFTCAPS
            if isinstance(v := attention.__dict__.get(n), int | float)
        ),
        None,
    )


def kind_of(module: nn.Module) -> tuple[Any, ...]:
    """What a module's forward can depend on besides the values of its weights."""
    return tuple(
        (
            name,
            type(m),
            plain.scalars(m),
            id(m.__dict__.get("config")),
            tuple((n, p.shape) for n, p in m._parameters.items() if p is not None),
        )
        for name, m in module.named_modules()
    )


# -- inputs -------------------------------------------------------------------------------------------------------------


class ProbeCache:
    """The least a cache can be: concatenates keys and values of one layer."""

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None):
        self.keys, self.values = keys, values

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], -2)
        self.values = values if self.values is None else torch.cat([self.values, values], -2)
        return self.keys, self.values

    def get_seq_length(self, *_: Any) -> int:
        return 0 if self.keys is None else self.keys.shape[-2]

    def to(self, dtype: torch.dtype) -> ProbeCache:
        """A copy in another dtype."""
        if self.keys is None or self.values is None:
            return ProbeCache()
        return ProbeCache(self.keys.to(dtype), self.values.to(dtype))

    def part(self, rows: slice) -> ProbeCache:
        """That of some sequences, in memory of its own."""
        return ProbeCache(
            *(None if x is None else x[rows].clone() for x in (self.keys, self.values))
        )


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer: x (b, s, k), RoPE's cos and sin, and the mask, all in one dtype."""

    x: Tensor
    cos: Tensor
    sin: Tensor
    mask: Tensor | None
    positions: Tensor
    rope: Rope

    def to(self, dtype: torch.dtype) -> LayerCall:
        mask = None if self.mask is None else _bias(self.mask != 0, dtype)
        return replace(
            self, x=self.x.to(dtype), cos=self.cos.to(dtype), sin=self.sin.to(dtype), mask=mask
        )

    def part(self, rows: slice) -> LayerCall:
        """The call of some sequences, in memory of its own: kernels have variants for tensors that lie at odd addresses."""
        mask = None if self.mask is None else self.mask[rows].clone()
        return replace(
            self,
            mask=mask,
            **{
                name: getattr(self, name)[rows].clone() for name in ("x", "cos", "sin", "positions")
            },
        )

    def kwargs(self, layer: nn.Module, cache: Any) -> dict[str, Any]:
        """A layer's keyword arguments, as a model's forward gives them."""
        rope: Any = (self.cos, self.sin)
        if self.rope.is_complex:
            rope = torch.complex(*(x.to(torch.promote_types(x.dtype, torch.float32)) for x in rope))
        known = inspect.signature(type(layer).forward).parameters
        name = next((n for n in decoder_layer.CACHES if n in known), decoder_layer.CACHES[0])
        return dict(
            attention_mask=self.mask,
            position_ids=self.positions,
            use_cache=cache is not None,
            position_embeddings=rope,
            **{name: cache},
        )


def layer_calls(
    batch: int,
    like: Tensor,
    rope: Rope,
    lengths: Sequence[int],
    generator: torch.Generator,
    dtype: torch.dtype,
    *,
    scale: float = 1.0,
    masked: bool = True,
    samples: int = 1,
) -> Iterator[LayerCall]:
    """Calls of a layer whose norms have weights like `like` that extend sequences by `lengths`: row 0 padded on the left by 2, from the
    third call on in a window of 4. Several samples of such a batch come as one."""
    rows, batch = batch, batch * samples
    past, width, device = 0, like.shape[0], like.device
    for number, length in enumerate(lengths):
        x = scale * torch.randn(batch, length, width, generator=generator)
        angles = in_order(
            6.0 * torch.rand(batch, length, rope.width // 2, generator=generator), rope.order
        )
        query, key = torch.arange(past, past + length)[:, None], torch.arange(past + length)[None]
        hidden = (key > query) | ((key <= query - 4) & (number >= 2))
        mask = hidden.repeat(batch, 1, 1)
        mask[::rows] |= (key < 2) & (key < query)
        # far from each other: what a layer makes of them beside RoPE is seen
        positions = (
            torch.arange(past, past + length)[None] + torch.arange(batch)[:, None] % rows * FAR
        )
        yield LayerCall(
            x.to(device, dtype),
            angles.cos().to(device, rope.dtype),
            angles.sin().to(device, rope.dtype),
            _bias(mask[:, None].to(device), dtype) if masked else None,
            positions.to(device),
            rope,
        )
        past += length


def _bias(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill(
        hidden, torch.finfo(dtype).min
    )


def distance(a: Tensor, b: Tensor, base: Tensor | None = None) -> float:
    """The largest difference, in units of the largest |b − base|."""
    scale = (b if base is None else b - base).abs().max()
    return float((a - b).abs().max() / scale.clamp_min(torch.finfo(torch.float32).tiny))


# -- the probes ---------------------------------------------------------------------------------------------------------


@dataclass
class Probes:
    """Outcomes so far, by kind of module; None is a pass."""

    outcomes: dict[Any, Any] = field(default_factory=dict)

    def _once(self, key: Any, probe: Callable[[], Any]) -> Any:
        if key not in self.outcomes:
            try:
                with torch.no_grad():
                    self.outcomes[key] = probe()
            except Exception as e:  # foreign code on made-up inputs may raise anything; whatever it is, it is a "no"
                self.outcomes[key] = Rejected(f"could not be run on a probe ({described(e)})")
        return self.outcomes[key]

    def norm(
        self, name: str, norm: nn.Module, eps: float, offsets: Sequence[float]
    ) -> tuple[bool, float] | Rejected:
        """Whether a module is LayerNorm or RMSNorm as ops `layer_norm` and `rms_norm` compute them, and which of `offsets` it adds to its
        weight. A bias is added to either."""

        def probe() -> tuple[bool, float] | Rejected:
            g = torch.Generator().manual_seed(0)
            other = twin(norm, randomised(0))
            bias = 0.0 if norm._parameters.get("bias") is None else other.bias
            fars = dict.fromkeys(product((False, True), offsets), 0.0)
            for scale in (1.0, 1e-3):
                x = (
                    scale
                    * (
                        0.5
                        + torch.randn(3, 5, *norm.weight.shape, generator=g, dtype=torch.float32)
                    )
                ).to(norm.weight.device)
                y, oracles = (
                    other.forward(x),
                    [table.lookup(op).oracle for op in ("rms_norm", "layer_norm")],
                )
                fars = {
                    (centred, offset): max(
                        far,
                        distance(y, oracles[centred](x, eps=eps) * (other.weight + offset) + bias),
                    )
                    for (centred, offset), far in fars.items()
                }
            centred, offset = nearest = min(fars, key=lambda kind: fars[kind])
            if fars[nearest] < TOLERANCE:
                return nearest
            text = (
                f"{'(x − mean(x)) / sqrt(var(x) + eps)' if centred else 'x / sqrt(mean(x²) + eps)'} · "
                f"{f'({offset:g} + w)' if offset else 'w'}{' + b' if norm._parameters.get('bias') is not None else ''}"
            )
            return Rejected(
                f"{name} ({type(norm).__name__}) is not {text}: off by {fars[nearest]:.2g} on a probe"
            )

        return self._once(("norm", name, eps, kind_of(norm)), probe)  # type: ignore[no-any-return]

    def rotary(self, rotary: nn.Module, config: Any, dtype: torch.dtype) -> Rope | Rejected:
        """What RoPE a model's module gives to layers of a dtype."""

        def probe() -> Rope | Rejected:
            device = next((b.device for b in rotary.buffers()), torch.device("cpu"))
            kinds = sorted(
                set(
                    rotary_kinds(
                        rotary, config, len(getattr(config, "layer_types", None) or ()) or 1
                    )
                )
            )
            at = torch.tensor([[0, 3]], device=device)
            tables = [
                rotary_rows(rotary, torch.zeros(1, 2, 8, dtype=dtype, device=device), at, kind)[0]
                for kind in kinds
            ]
            ropes = {_rope_of(cos) for cos in tables}
            return (
                ropes.pop()
                if len(ropes) == 1
                else Rejected("RoPE differs in more than numbers from layer to layer")
            )

        return self._once(("rotary", id(rotary), dtype), probe)  # type: ignore[no-any-return]

    def activation(self, module: nn.Module, ops: Sequence[str]) -> str | Rejected:
        """Which of `ops` an activation module computes."""

        def probe() -> str | Rejected:
            xs = [
                torch.linspace(-end, end, 721, dtype=torch.float64) for end in (9, 1000)
            ]  # some clip what is large
            ys = [module.forward(x) for x in xs]
            found = [
                op
                for op in ops
                if all(
                    isinstance(y, Tensor) and distance(_activated(op, x), y) < 1e-6
                    for x, y in zip(xs, ys, strict=True)
                )
            ]
            return (
                found[0]
                if found
                else Rejected(f"({type(module).__name__}) is none of {', '.join(ops)}")
            )

        return self._once(("activation", kind_of(module)), probe)

    def passing(self, mlp: Any, like: nn.Module) -> MlpStandIn | Rejected:
        """What stands for an MLP that runs its own forward, and gives as it does a tensor or more; `like`: a norm before it."""

        def probe() -> MlpStandIn:
            # routers and norms may be kept in float32, while the rest is not
            dtypes = list(dict.fromkeys((like.weight.dtype, *(p.dtype for p in mlp.parameters()))))
            for dtype in dtypes:
                try:
                    y = mlp.forward(like.weight.new_zeros(1, 1, like.weight.shape[0], dtype=dtype))
                except RuntimeError:
                    if dtype is dtypes[-1]:
                        raise
                else:
                    break
            return MlpStandIn(more=isinstance(y, tuple)).eval()

        return self._once(("passing", kind_of(mlp)), probe)  # type: ignore[no-any-return]

    def layer(self, candidate: Any) -> Rejected | None:
        """Whether a decoder layer with its parts done by their programs still computes what its own forward does."""
        layer = candidate.module

        def probe() -> Rejected | None:
            g = torch.Generator().manual_seed(1)
            other = twin(_but_for_mlp(candidate), randomised(1, scalings(layer)))
            composed, like = candidate.compose(other), any_norm(other, candidate.layouts[0]).weight
            wide = replace(candidate.rope, dtype=torch.float32)
            for scale in (1.0, 1e-3):
                stock, ours = ProbeCache(), ProbeCache()
                for call in layer_calls(2, like, wide, (6, 1, 1, 1), g, torch.float32, scale=scale):
                    want = other.forward(call.x, **call.kwargs(layer, stock))
                    got = composed(
                        torch_kernels(
                            candidate.parts, call.x.shape[0] * call.x.shape[1], torch.float32
                        ),
                        call.x,
                        call.kwargs(layer, ours),
                    )
                    if not isinstance(want, Tensor):
                        return Rejected(f"the layer returns a {type(want).__name__}, not a tensor")
                    far = max(
                        distance(got, want, call.x),
                        distance(ours.keys, stock.keys),
                        distance(ours.values, stock.values),
                    )
                    if not far < TOLERANCE:
                        return Rejected(_layer_differs(candidate.layouts[0], far))
            return None

        return self._once(
            ("layer", _done_by(candidate), candidate.layouts, candidate.rope, kind_of(layer)), probe
        )

    def step(self, candidate: Any) -> Rejected | None:
        """Whether a decoder layer computes a token as its parts' programs do, attention and its cache included."""
        layer, row = candidate.module, candidate.layouts[0]

        def probe() -> Rejected | None:
            g, slots = torch.Generator().manual_seed(3), 12
            other = twin(_but_for_mlp(candidate), randomised(3, scalings(layer)))
            step, prompt = (
                layer_step(other, candidate.parts, row, candidate.rope),
                layer_prefill(other, candidate.parts, row),
            )
            stock, past, wide = ProbeCache(), 0, replace(candidate.rope, dtype=torch.float32)
            for number, call in enumerate(
                layer_calls(2, any_norm(other, row).weight, wide, (6, 1, 1, 1), g, torch.float32)
            ):
                keys, values = stock.keys, stock.values
                want = other.forward(call.x, **call.kwargs(layer, stock))
                if not number and row.latent is not None and (no := _expanded(candidate, stock)):
                    return no
                if not number:  # row 0 is padded, which prompts by kernels are not
                    far = (
                        0.0
                        if prompt is None
                        else _prompt_differs(prompt, step, call, want, stock, slots)
                    )
                else:
                    assert keys is not None and values is not None
                    room = [nn.functional.pad(x, (0, 0, 0, slots - past)) for x in (keys, values)]
                    lo = torch.tensor([2, 0]).clamp_min(past - 3 if number >= 2 else 0)
                    bounds = (
                        x.to(call.x.device, torch.int32)
                        for x in (lo, torch.full((2,), past), torch.full((2,), past + 1))
                    )
                    at = StepInputs(*step.tables(call.cos, call.sin), *room, *bounds)
                    got = step(
                        torch_kernels(candidate.parts, 2, torch.float32, slots), call.x[:, 0], at
                    )
                    now = [x[:, :, : past + 1] for x in room]
                    far = max(
                        distance(got, want[:, 0], call.x[:, 0]),
                        distance(now[0], stock.keys),
                        distance(now[1], stock.values),
                    )
                if not far < TOLERANCE:
                    formula = "softmax(scale · rope(q) · rope(k)) · v" + (
                        " over latents" if row.latent is not None else ""
                    )
                    return Rejected(f"attention is not {formula}: off by {far:.2g} on a probe")
                past += call.x.shape[1]
            return None

        return self._once(
            ("step", _done_by(candidate), candidate.layouts, candidate.rope, kind_of(layer)), probe
        )

    def latent_rope(self, layer: Any, row: LayerLayout, dtype: torch.dtype) -> Rope | Rejected:
        """The RoPE of a layer whose attention is over latents. Whether it takes it as one complex tensor is tried: it is called with cos
        and sin first."""

        def probe() -> Rope:
            assert row.latent is not None
            inner = layer._modules[row.attention]._modules
            rope = Rope(
                inner[row.projections[1]].out_features - inner[row.latent.norm].weight.shape[0],
                dtype,
            )
            other, wide = (
                twin(
                    stand_in(layer, {"_modules": {**layer._modules, row.mlp: MlpStandIn()}}),
                    randomised(5),
                ),
                torch.float32,
            )
            like, as_complex = (
                any_norm(other, row).weight,
                replace(rope, order="once", is_complex=True, dtype=torch.float32),
            )
            real, imaginary = (
                next(
                    layer_calls(
                        3,
                        like,
                        replace(r, dtype=wide),
                        (4,),
                        torch.Generator().manual_seed(5),
                        wide,
                    )
                )
                for r in (rope, as_complex)
            )
            try:
                other.forward(real.x, **real.kwargs(layer, None))
            except (AttributeError, TypeError, ValueError, RuntimeError):
                other.forward(imaginary.x, **imaginary.kwargs(layer, None))
                return as_complex
            return rope

        return self._once(("rope", dtype, kind_of(layer)), probe)  # type: ignore[no-any-return]

    def causal(self, found: Any) -> Rejected | None:
        """Whether a causal LM is its embedding, its layers one after another, a norm and its head, and nothing else."""

        def probe() -> Rejected | None:
            g = torch.Generator().manual_seed(4)
            h = hollow(found, 48, lambda m: twin(m, randomised(4)), g)
            ids = torch.randint(0, 48, (2, 5), generator=g).to(found.embedding.device)
            positions = torch.tensor([[0, 1, 2, 3, 4], [2, 3, 4, 5, 6]]).to(ids.device)
            logits = h.model.forward(input_ids=ids, position_ids=positions, use_cache=False).logits
            x = h.embedding[ids] * found.embedding_scale(torch.float32)
            if len(h.seen) != len(found.layers):
                return Rejected(f"the model calls {len(h.seen)} of its {len(found.layers)} layers")
            given = x
            for number, (seen, seen_cos, seen_sin, y) in enumerate(h.seen):
                cos, sin = rotary_rows(found.rotary, x, positions, found.kinds[number])
                if any(
                    not torch.equal(in_order(found.rope.of_pairs(t), found.rope.order), t)
                    for t in (cos, sin)
                ):
                    return Rejected(
                        "RoPE's cos and sin are not one number for each pair of elements"
                    )
                far = max(distance(seen, given), distance(seen_cos, cos), distance(seen_sin, sin))
                if not far < TOLERANCE:
                    return Rejected(
                        f"layer {number} is not given {'the embedding' if not number else 'what the layer before it gave'}, "
                        f"or not RoPE of the positions: off by {far:.2g} on a probe"
                    )
                given = y
            far = distance(
                head_of(found.head, h.weights, given.flatten(0, 1)), logits.flatten(0, 1)
            )
            if not far < TOLERANCE:
                return Rejected(
                    f"the model is not head(norm(layers(embedding))): off by {far:.2g} on a probe"
                )
            return None

        return self._once(("causal", id(found.model)), probe)

    def module(self, candidate: Any) -> Rejected | None:
        """Whether an MLP or LoRA linear with its part done by its program still computes what its own forward does."""
        module, part = candidate.module, candidate.parts[0]

        def probe() -> Rejected | None:
            g = torch.Generator().manual_seed(2)
            other = twin(module, randomised(2, scalings(module)))
            composed, sizes = candidate.compose(other), dict(part.block.sizes)
            device = next(other.parameters()).device
            for batch, length in ((1, 1), (2, 3)):
                x = torch.randn(batch, length, sizes["k"], generator=g, dtype=torch.float32).to(
                    device
                )
                far = distance(
                    composed(torch_kernels(candidate.parts, batch * length, torch.float32), x, {}),
                    other.forward(x),
                )
                if not far < TOLERANCE:
                    return Rejected(
                        f"the module computes something else than the pattern: off by {far:.2g} on a probe"
                    )
            return None

        return self._once((candidate.kind, _done_by(candidate), kind_of(module)), probe)


def _done_by(candidate: Any) -> tuple[Any, ...]:
    """What does the parts of a candidate: an adapter that is scaled by 0 says nothing about one that is not."""
    return tuple((p.block, p.scalings) for p in candidate.parts)


def _but_for_mlp(candidate: Any) -> Any:
    """A matched layer, with something simple for an MLP that runs its own forward."""
    layer = candidate.module
    aside = {} if candidate.aside is None else {candidate.layouts[0].mlp: candidate.aside}
    return stand_in(layer, {"_modules": {**layer._modules, **aside}})


def _expanded(candidate: Any, cache: ProbeCache) -> Rejected | None:
    """Refuse a layer that caches something else than latents and rotated keys, as transformers 5.4 does."""
    sizes = next(dict(p.block.sizes) for p in candidate.parts if p.role == "attention")
    seen = [None if x is None else (x.shape[1], x.shape[3]) for x in (cache.keys, cache.values)]
    if seen == [(1, sizes["latent"]), (1, sizes["rope"])]:
        return None
    each = " and ".join("nothing" if s is None else f"{s[0]} heads of {s[1]}" for s in seen)
    return Rejected(
        f"it caches {each}, not latents of {sizes['latent']} and rotated keys of {sizes['rope']}, as later transformers do"
    )


def _prompt_differs(
    prompt: LayerPrefill,
    step: LayerStep,
    call: LayerCall,
    want: Tensor,
    stock: ProbeCache,
    slots: int,
) -> float:
    """How far the last row of a layer's first call is from what `prompt` makes of it, keys and values included."""
    assert stock.keys is not None and stock.values is not None
    tokens, x = call.x.shape[1], call.x[-1]
    keys, values = (
        torch.zeros(1, y.shape[1], slots, y.shape[3], dtype=y.dtype, device=y.device)
        for y in (stock.keys, stock.values)
    )
    kernels: dict[str, Kernel] = {
        name: partial(run_kernel_graph, in_dtype(block, tokens, torch.float32))
        for name, block in prompt.blocks.items()
    }
    cos, sin = (t[:, None] for t in step.tables(call.cos[-1], call.sin[-1]))
    got = prompt(kernels, x.clone(), PromptInputs(cos, sin, keys, values))
    return max(
        distance(got, want[-1], x),
        distance(keys[0, :, :tokens], stock.keys[-1]),
        distance(values[0, :, :tokens], stock.values[-1]),
    )


def _layer_differs(row: LayerLayout, far: float) -> str:
    what = (
        "x + attention(norm(x)) + mlp(norm(x))"
        if row.parallel
        else "x + attention(norm(x)), then h + mlp(norm(h))"
    )
    return f"the layer computes something else: off by {far:.2g} on a probe; it is not {what}, norms and multipliers as its layout has them"


def _rope_of(cos: Tensor) -> Rope:
    """The RoPE that gives these numbers (…, positions, width)."""
    for order in ("halves", "pairs"):
        rope = Rope(cos.shape[-1], cos.dtype, order)
        if cos.shape[-1] % 2 == 0 and torch.equal(in_order(rope.of_pairs(cos), order), cos):
            return rope
    return Rope(2 * cos.shape[-1], cos.dtype, "once")


def _activated(activation: str, x: Tensor) -> Tensor:
    g = KernelGraph()
    g.mark_output(activated(g, g.new_input(tuple(x.shape), torch.float32, name="x"), activation))
    return run_kernel_graph(g, [x], torch.float64)[0]
