"""Tiny models, and the comparison of an installed `generate` with stock on the same model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import (
    EncoderDecoderCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StoppingCriteria,
)
from transformers.generation.streamers import BaseStreamer

from mirage_hf.decode.cache_layers import INDEXED_LAYERS, states_of
from mirage_hf.decode.choosing import draw
from mirage_hf.decode.uniform_numbers import UniformNumbers, draw_seed

torch.set_num_threads(1)

VOCABULARY, PAD, WINDOW = 99, 0, 9
SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    pad_token_id=PAD,
    bos_token_id=1,
    eos_token_id=2,
    initializer_range=0.15,
)
FULL = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2")


def tiny(family: str, seed: int = 0, **changes: Any) -> Any:
    """Return a random float32 model in eval mode.

    All layers of Mistral and half of the layers of Gemma2 slide over WINDOW tokens.
    """
    sizes = {**SIZES, **changes}
    kinds = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**sizes)),
        "mistral": lambda: MistralForCausalLM(MistralConfig(**sizes, sliding_window=WINDOW)),
        "qwen2": lambda: Qwen2ForCausalLM(
            Qwen2Config(**{k: v for k, v in sizes.items() if k != "head_dim"})
        ),
        "qwen3": lambda: Qwen3ForCausalLM(
            Qwen3Config(
                **sizes,
                use_sliding_window=True,
                sliding_window=WINDOW,
                layer_types=["full_attention", "sliding_attention"],
            )
        ),
        "gemma2": lambda: Gemma2ForCausalLM(
            Gemma2Config(**sizes, sliding_window=WINDOW, query_pre_attn_scalar=8)
        ),
    }
    torch.manual_seed(seed)
    model = kinds[family]().eval()
    model.generation_config.eos_token_id = None
    return model


def prompt(batch: int = 1, length: int = 7, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed)
    )


def left_padded(lengths: tuple[int, ...] = (4, 11, 7), seed: int = 0) -> dict[str, torch.Tensor]:
    ids = prompt(len(lengths), max(lengths), seed)
    mask = torch.ones_like(ids)
    for row, n in enumerate(lengths):
        ids[row, : max(lengths) - n] = PAD
        mask[row, : max(lengths) - n] = 0
    return {"input_ids": ids, "attention_mask": mask}


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a printable character per token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    characters = ["<pad>", "<s>", "</s>"] + [chr(33 + i) for i in range(VOCABULARY - 3)]
    backend = Tokenizer(
        models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<pad>")
    )
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        padding_side="left",
    )


class Recorder(BaseStreamer):
    """A streamer that records every call it gets, and those of its processor and criterion."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.processor, self.criterion = _Processor(self.events), _Criterion(self.events)

    def put(self, value: torch.Tensor) -> None:
        self.events.append(("put", value.dtype, value.tolist()))

    def end(self) -> None:
        self.events.append(("end",))


class _Processor(LogitsProcessor):
    def __init__(self, events: list[tuple[Any, ...]]):
        self.events = events

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.events.append(("process", input_ids.tolist(), scores.dtype))
        return scores


class _Criterion(StoppingCriteria):
    def __init__(self, events: list[tuple[Any, ...]]):
        self.events = events

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.events.append(
            ("criterion", input_ids.tolist(), None if scores is None else len(scores))
        )
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


Arguments = dict[str, Any] | Callable[[], dict[str, Any]]


@contextmanager
def our_numbers() -> Iterator[None]:
    """Make one call of stock sampling use our random numbers.

    Inside, stock computes its own probabilities and picks the tokens that our numbers choose.
    """
    numbers: list[UniformNumbers] = []
    steps = itertools.count()
    stock = torch.multinomial

    def multinomial(probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
        if not numbers:
            numbers.append(
                UniformNumbers(draw_seed(), probabilities.shape[0], probabilities.device)
            )
        if not (probabilities >= 0).all():
            raise RuntimeError("stock's own check: a NaN")
        return draw(probabilities, numbers[0].at(next(steps)))[:, None]

    torch.multinomial = multinomial
    try:
        yield
    finally:
        torch.multinomial = stock


def both(model: Any, arguments: Arguments, seed: int = 5) -> tuple[Any, Any]:
    """Run stock and ours with the same seed and random numbers, and return both outputs."""

    def run(generate: Callable[..., Any]) -> Any:
        given = arguments() if callable(arguments) else arguments
        torch.manual_seed(seed)
        return generate(**given)

    with our_numbers():
        stock = run(lambda **kw: type(model).generate(model, **kw))
    return stock, run(model.generate)


def handled(runner: Any) -> int:
    """Return the number of calls that the pool served."""
    return sum(n for what, n in runner.counts.items() if not what.startswith("stock"))


def assert_same(stock: Any, ours: Any, rounding: float = 2e-5) -> None:
    """Assert equal tokens and types.

    Scores, logits and caches must be equal up to rounding, which may be `rounding` for scores and
    logits.
    """
    assert type(stock) is type(ours)
    if isinstance(stock, torch.Tensor):
        assert stock.dtype == ours.dtype and stock.tolist() == ours.tolist()
        return
    assert list(stock.keys()) == list(ours.keys())
    assert stock.sequences.tolist() == ours.sequences.tolist()
    for name in ("scores", "logits"):
        theirs, mine = getattr(stock, name), getattr(ours, name)
        assert (theirs is None) == (mine is None)
        if theirs is not None:
            assert isinstance(mine, tuple) and len(theirs) == len(mine)
            for a, b in zip(theirs, mine, strict=True):
                torch.testing.assert_close(b, a, rtol=1e-4, atol=rounding)
    if stock.past_key_values is not None:
        assert_same_cache(
            stock.past_key_values,
            ours.past_key_values,
            (stock.sequences != PAD).long().cummax(-1).values,
        )


def assert_same_cache(stock: Any, ours: Any, mask: torch.Tensor | None = None) -> None:
    """Assert that two caches hold the same keys, values, states and indexer keys, up to rounding.

    `mask` (batch, tokens) is 0 at left padding. No token sees those keys, so they may differ.
    """
    if isinstance(stock, EncoderDecoderCache):
        assert type(stock) is type(ours) and stock.is_updated == ours.is_updated
        assert_same_cache(stock.self_attention_cache, ours.self_attention_cache, mask)
        assert_same_cache(stock.cross_attention_cache, ours.cross_attention_cache)
        return
    assert type(stock) is type(ours) and len(stock.layers) == len(ours.layers)
    assert stock.get_seq_length() == ours.get_seq_length()
    for a, b in zip(stock.layers, ours.layers, strict=True):
        assert type(a) is type(b)
        theirs, mine = states_of(a), states_of(b)
        assert theirs.keys() == mine.keys()
        for name, state in theirs.items():
            torch.testing.assert_close(mine[name], state, rtol=1e-4, atol=2e-5)
        if not hasattr(a, "is_initialized"):  # a layer that keeps only states
            continue
        assert a.is_initialized == b.is_initialized
        if not a.is_initialized:
            continue
        if a.keys is None:  # a layer that uses another one's keys
            assert b.keys is None
            continue
        assert (a.dtype, a.device) == (b.dtype, b.device)
        assert getattr(a, "cumulative_length", None) == getattr(b, "cumulative_length", None)
        held = [(a.keys, b.keys), (a.values, b.values)]
        if isinstance(a, INDEXED_LAYERS):
            assert a.is_indexer_initialized and b.is_indexer_initialized
            held.append((a.indexer_keys[:, None], b.indexer_keys[:, None]))
        for theirs, mine in held:
            if mask is not None:
                length = a.get_seq_length()
                seen = torch.nn.functional.pad(mask != 0, (0, length), value=True).to(mine.device)
                seen = seen[:, None, length - theirs.shape[2] : length, None]
                assert bool(mine.isfinite().all())  # keys that are seen with weight 0
                theirs, mine = theirs * seen, mine * seen
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-5)
