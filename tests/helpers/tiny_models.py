"""Tiny models of many families, and kernels that run their program op by op.

With these kernels, swapping is tested without a search.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as tf
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from mirage_hf.graph.execute import run_kernel_graph
from mirage_hf.graph.ugraph import library_ugraph
from mirage_hf.zoo.key import key_of

torch.set_num_threads(1)

SIZES: dict[str, Any] = dict(
    vocab_size=99,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    initializer_range=0.15,
)
WINDOW = 9
FOUR = ("llama", "mistral", "qwen2", "qwen3")
#: Families that match in full, besides the first four.
OTHERS = ("granite", "gemma", "gemma2", "gemma3", "olmo2", "phi3")
#: Families with mechanisms of others, or with RoPE over pairs or in some layers only.
MORE = ("olmo3", "exaone4", "smollm3", "glm", "glm4", "ernie4_5")
#: Families with LayerNorm: with or without a gate in the MLP, with attention and MLP parallel or
#: not.
CENTRED = ("starcoder2", "stablelm", "cohere", "cohere2", "gpt_neox", "phi", "nemotron")


def longrope(family: str, reach: int, seed: int = 0) -> Any:
    """Return a model whose RoPE uses other frequencies for texts longer than `reach` tokens."""
    part = {"partial_rotary_factor": 0.5} if family == "phi3" else {}
    pairs = SIZES["hidden_size"] // SIZES["num_attention_heads"] // (4 if part else 2)
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * n for n in range(pairs)],
        "rope_theta": 10000.0,
        **part,
        "long_factor": [2.0 + 0.5 * n for n in range(pairs)],
        "original_max_position_embeddings": reach,
    }
    more = {"original_max_position_embeddings": reach} if family == "phi3" else {}
    return tiny(
        family,
        seed,
        rope_scaling=rope,
        max_position_embeddings=8 * reach,
        num_hidden_layers=2,
        **more,
    )


class Louder(LlamaDecoderLayer):
    """A decoder layer that no pattern knows. Its MLP is known."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return 1.05 * super().forward(*args, **kwargs)


def louder(model: Any) -> Any:
    for layer in model.model.layers:
        layer.__class__ = Louder
    return model


def tiny(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a random model of a family in eval mode.

    Norm weights and biases are random too. Sliding windows are WINDOW tokens wide.
    """
    s = {**SIZES, **changes}
    mixed = ["full_attention", "sliding_attention", "full_attention"][: s["num_hidden_layers"]]
    kinds = {
        "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**s)),
        "mistral": lambda: tf.MistralForCausalLM(
            tf.MistralConfig(**{"sliding_window": WINDOW, **s})
        ),
        "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**s)),
        "qwen3": lambda: tf.Qwen3ForCausalLM(
            tf.Qwen3Config(
                **{
                    "head_dim": 8,
                    "use_sliding_window": True,
                    "sliding_window": WINDOW,
                    "layer_types": mixed,
                    **s,
                }
            )
        ),
        "gemma": lambda: tf.GemmaForCausalLM(tf.GemmaConfig(**{"head_dim": 8, **s})),
        "gemma2": lambda: tf.Gemma2ForCausalLM(
            tf.Gemma2Config(
                **{"head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8, **s}
            )
        ),
        "gemma3": lambda: tf.Gemma3ForCausalLM(
            tf.Gemma3TextConfig(
                **{
                    "head_dim": 8,
                    "sliding_window": WINDOW,
                    "query_pre_attn_scalar": 8,
                    "layer_types": mixed,
                    **s,
                }
            )
        ),
        "olmo2": lambda: tf.Olmo2ForCausalLM(tf.Olmo2Config(**s)),
        "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**{"partial_rotary_factor": 0.5, **s})),
        "granite": lambda: tf.GraniteForCausalLM(
            tf.GraniteConfig(
                **{
                    "residual_multiplier": 0.22,
                    "embedding_multiplier": 12.0,
                    "logits_scaling": 3.0,
                    "attention_multiplier": 0.3,
                    **s,
                }
            )
        ),
        "olmo3": lambda: tf.Olmo3ForCausalLM(
            tf.Olmo3Config(**{"sliding_window": WINDOW, "layer_types": mixed, **s})
        ),
        "exaone4": lambda: tf.Exaone4ForCausalLM(
            tf.Exaone4Config(**{"sliding_window": WINDOW, "layer_types": mixed, **s})
        ),
        "smollm3": lambda: tf.SmolLM3ForCausalLM(
            tf.SmolLM3Config(**{"no_rope_layers": [0, 1, 1][: s["num_hidden_layers"]], **s})
        ),
        "glm": lambda: tf.GlmForCausalLM(tf.GlmConfig(**{"head_dim": 8, **s})),
        "glm4": lambda: tf.Glm4ForCausalLM(tf.Glm4Config(**{"head_dim": 8, **s})),
        "ernie4_5": lambda: tf.Ernie4_5ForCausalLM(tf.Ernie4_5Config(**{"head_dim": 8, **s})),
        "louder": lambda: louder(tf.LlamaForCausalLM(tf.LlamaConfig(**s))),
        "starcoder2": lambda: tf.Starcoder2ForCausalLM(
            tf.Starcoder2Config(**{"sliding_window": WINDOW, **s})
        ),
        "stablelm": lambda: tf.StableLmForCausalLM(
            tf.StableLmConfig(**{"partial_rotary_factor": 0.5, **s})
        ),
        "cohere": lambda: tf.CohereForCausalLM(tf.CohereConfig(**{"logit_scale": 0.25, **s})),
        "cohere2": lambda: tf.Cohere2ForCausalLM(
            tf.Cohere2Config(**{"head_dim": 8, "sliding_window": WINDOW, "layer_types": mixed, **s})
        ),
        "gpt_neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**{"rotary_pct": 0.5, **s})),
        "gpt_oss": lambda: tf.GptOssForCausalLM(
            tf.GptOssConfig(
                **{
                    "head_dim": 8,
                    "sliding_window": WINDOW,
                    "layer_types": mixed,
                    "num_local_experts": 4,
                    "num_experts_per_tok": 2,
                    **s,
                }
            )
        ),
        "phi": lambda: tf.PhiForCausalLM(tf.PhiConfig(**{"partial_rotary_factor": 0.5, **s})),
        "nemotron": lambda: tf.NemotronForCausalLM(tf.NemotronConfig(**{"head_dim": 8, **s})),
        "arcee": lambda: tf.ArceeForCausalLM(tf.ArceeConfig(**s)),
        "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**s, num_local_experts=2)),
    }
    torch.manual_seed(seed)
    try:
        model = kinds[family]().eval()
    except StrictDataclassError as e:  # transformers 5.4 cannot make a default config of these
        if family not in ("olmo2", "cohere2"):
            raise
        pytest.skip(f"{family}: {e}")
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(0.2 * torch.randn_like(p))
    model.generation_config.eos_token_id = None
    return model.to(dtype)


@dataclass
class Resolved:
    """Stand in for the result of `resolve`: run the program itself.

    A `scale` other than 1 makes a wrong kernel.
    """

    program: Any
    runs_kernel: bool = True
    runs_generated: bool = True
    scale: float = 1.0
    source: str = "cache"
    seconds: float = 0.0
    reason: str = ""
    time_us: float | None = None
    library_us: float | None = None
    error_bound: float = 1e-30
    candidates: int = 1
    outcome: None = None
    unkept: str = ""
    in_place: tuple[tuple[int, int], ...] = ()

    @property
    def why_library(self) -> str:
        return "" if self.runs_kernel else self.reason

    @property
    def digest(self) -> str:
        return key_of(self.program, "cpu").digest

    @property
    def ugraph(self) -> Any:
        return library_ugraph(self.program)

    def run(
        self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        for t, x in zip(self.program.inputs, inputs, strict=True):
            assert tuple(x.shape) == t.dims and x.dtype == t.dtype, (t, x.shape, x.dtype)
            assert all(
                a == b for a, b, d in zip(x.stride(), t.strides, t.dims, strict=True) if d > 1
            ), (t, x.stride())
        results = run_kernel_graph(self.program, inputs)
        results = [y * self.scale if self.scale != 1 else y for y in results]
        if out is None:
            return results
        return [x.copy_(y) for x, y in zip(out, results, strict=True)]


def prompt(batch: int = 1, length: int = 7, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 99, (batch, length), generator=torch.Generator().manual_seed(seed))


def decode_logits(model: Any, batch: int = 1, steps: int = 4, **kwargs: Any) -> torch.Tensor:
    """Return the logits of a prefill and some single-token steps over a dynamic cache."""
    ids, outputs = prompt(batch, 6, seed=5), []
    with torch.no_grad():
        out = model(ids, use_cache=True, **kwargs)
        for step in range(steps):
            outputs.append(out.logits[:, -1])
            token = prompt(batch, 1, seed=10 + step)
            out = model(token, past_key_values=out.past_key_values, use_cache=True, **kwargs)
    return torch.stack([*outputs, out.logits[:, -1]])


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Return what restore() must bring back: classes, dictionaries, weights, addresses."""
    return {
        "classes": {n: type(m) for n, m in model.named_modules()},
        "dicts": {
            n: {k: v for k, v in m.__dict__.items() if not isinstance(v, dict)}
            for n, m in model.named_modules()
        },
        "keys": {n: set(m.__dict__) for n, m in model.named_modules()},
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "pointers": {k: v.data_ptr() for k, v in model.state_dict().items()},
    }


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    exact = all(a[k] == b[k] for k in ("classes", "dicts", "keys", "pointers"))
    return (
        exact
        and a["state"].keys() == b["state"].keys()
        and all(v.is_meta or torch.equal(v, b["state"][k]) for k, v in a["state"].items())
    )


def twin_of(model: Any) -> Any:
    return copy.deepcopy(model)


def parted_at_a_tie(model: Any, ids: torch.Tensor, change: Any, tokens: int = 256) -> int | None:
    """Find where greedy 16-bit tokens of one row differ before and after `change(model)`.

    Assert that they differ only at a tie. There, stock's logits of the two tokens differ by less
    than the error of these logits. Assert also that the logits of the whole text are about as close
    to float32 as stock's.

    Returns:
        The position of the first difference, or None.
    """
    exact = twin_of(model).float()

    def run() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the new tokens, their logits, and the distance of the logits from float32."""
        out = model.generate(
            ids,
            do_sample=False,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        with torch.no_grad():
            true = exact(out.sequences[:, :-1]).logits[0, ids.shape[1] - 1 :]
        seen = torch.cat(out.logits)
        return out.sequences[0, ids.shape[1] :], seen, (seen - true).abs()

    before, seen, noise = run()
    change(model)
    after, _, error = run()
    stocks, ours = (float(e.pow(2).mean().sqrt()) for e in (noise, error))
    assert ours <= 1.5 * stocks, (
        f"{tokens} tokens: logits are {ours:.4f} (rms) off float32, stock's {stocks:.4f}"
    )
    if torch.equal(before, after):
        return None
    at = int((before != after).nonzero()[0])
    gap, worst = float((seen[at, before[at]] - seen[at, after[at]]).abs()), float(noise[at].max())
    assert gap < worst, f"token {at}: the logits differ by {gap:.4f}, stock is {worst:.4f} off"
    return at


def rows_parted(model: Any, stock: Any, tokens: torch.Tensor, arguments: dict[str, Any]) -> int:
    """Count rows whose tokens differ, and assert that each differs only at a tie.

    `stock` is the 16-bit output of `model` for `arguments`, with its logits. At a tie, the float32
    logits of the two tokens differ by at most twice the error of stock's logits in that row. A
    repetition penalty is applied to them first.
    """
    given, penalty = (
        arguments.get("input_ids", arguments.get("inputs")),
        arguments.get("repetition_penalty"),
    )
    length, start = (
        min(stock.sequences.shape[1], tokens.shape[1]),
        stock.sequences.shape[1] - len(stock.logits),
    )
    rows = (stock.sequences[:, :length] != tokens[:, :length]).any(-1).nonzero()[:, 0].tolist()
    exact = twin_of(model).float() if rows else None
    for row in rows:
        text = stock.sequences[row : row + 1]
        at = int((text[0, :length] != tokens[row, :length]).nonzero()[0])
        assert at >= start, f"row {row}: the prompt itself differs at {at}"
        mask = torch.ones_like(text)
        mask[:, : given.shape[1]] = arguments.get("attention_mask", torch.ones_like(given))[
            row : row + 1
        ]
        with torch.no_grad():
            true = exact(
                text, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)
            ).logits[0, start - 1 : -1]
        noise = float((torch.stack([x[row] for x in stock.logits]) - true).abs().max()) * (
            penalty or 1
        )
        logits = true[at - start][None]
        if penalty is not None:
            logits = tf.RepetitionPenaltyLogitsProcessor(penalty)(text[:, :at], logits)
        gap = float((logits[0, text[0, at]] - logits[0, tokens[row, at]]).abs())
        where = (
            f"row {row} of {len(tokens)} differs at token {at - start}: "
            f"in float32 by {gap:.4f}, stock is up to {noise:.4f} off"
        )
        print(where)
        assert gap <= 2 * noise, where
    return len(rows)
