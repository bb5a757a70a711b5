"""Small random encoder-decoder models, and inputs for their encoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    PegasusConfig,
    PegasusForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

VOCABULARY = 211
SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    d_model=64,
    encoder_layers=1,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=128,
    decoder_ffn_dim=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=2,
    forced_eos_token_id=None,
    init_std=0.3,
)
#: Positions that the models' tables have.
POSITIONS = 160
TEXT = {**SIZES, "max_position_embeddings": POSITIONS}
OF_T5: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    d_model=64,
    d_kv=16,
    d_ff=128,
    num_layers=2,
    num_heads=4,
    pad_token_id=0,
    eos_token_id=1,
    decoder_start_token_id=0,
    initializer_factor=3.0,
)
#: 150 states for 300 frames: no multiple of a bucket.
OF_WHISPER: dict[str, Any] = dict(
    num_mel_bins=16,
    max_source_positions=150,
    max_target_positions=POSITIONS,
    suppress_tokens=[7],
    begin_suppress_tokens=[5, 6],
)

MODELS: dict[str, Callable[[], Any]] = {
    "bart": lambda: BartForConditionalGeneration(BartConfig(**TEXT)),
    "m2m_100": lambda: M2M100ForConditionalGeneration(M2M100Config(**TEXT)),
    "marian": lambda: MarianMTModel(MarianConfig(**TEXT)),
    "pegasus": lambda: PegasusForConditionalGeneration(PegasusConfig(**TEXT)),
    "t5": lambda: T5ForConditionalGeneration(T5Config(**OF_T5)),
    "whisper": lambda: WhisperForConditionalGeneration(WhisperConfig(**SIZES, **OF_WHISPER)),
}


def built(name: str) -> Any:
    """Return a small random model that ends no text by itself."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def whisper_with_timestamps() -> Any:
    """Return a Whisper whose generate may predict timestamps. Their tokens are from 204 on."""
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": 400}
    model = WhisperForConditionalGeneration(WhisperConfig(**sizes, **OF_WHISPER)).eval()
    generation = model.generation_config
    generation.pad_token_id, generation.no_timestamps_token_id = 0, 203
    generation.is_multilingual = False
    return model


def inputs(model: Any, batch: int, length: int = 11, seed: int = 3) -> dict[str, Tensor]:
    """Return what an encoder takes: texts of different lengths, or 3 s of sound."""
    generator = torch.Generator().manual_seed(seed)
    if model.main_input_name == "input_features":
        features = torch.randn(batch, 16, 300, generator=generator)
        return {"input_features": features.to(model.device, model.dtype)}
    ids = torch.randint(5, VOCABULARY, (batch, length), generator=generator)
    mask = (torch.arange(length) < length - 2 * torch.arange(batch)[:, None]).long()
    return {
        "input_ids": (ids * mask).to(model.device),
        "attention_mask": mask.to(model.device),
    }
