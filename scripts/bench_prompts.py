"""Random prompts for `bench_generate`: of text, with padding, with images, or of sound."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig, PreTrainedModel

from scripts.survey_images import random_images, with_images

#: The padding token; no prompt holds it elsewhere.
PADDING = 0
#: The width of images in pixels, for models that take any width.
IMAGE_WIDTH = 448


def random_ids(
    model: PreTrainedModel, batch: int, length: int, seed: int, padded: bool = False
) -> torch.Tensor:
    """Return prompts (batch, length).

    With `padded`, rows go from the whole length down to half of it, with padding on the left.
    """
    generator = torch.Generator(model.device).manual_seed(seed)
    ids = torch.randint(
        PADDING + 1,
        text_vocab(model.config),
        (batch, length),
        device=model.device,
        generator=generator,
    )
    if padded:
        for row in range(batch):
            ids[row, : row * length // (2 * batch)] = PADDING
    return ids


def text_vocab(config: PretrainedConfig) -> int:
    """Return how many tokens of the vocabulary come before those that stand for images."""
    special = [
        token
        for name, token in vars(config).items()
        if name.startswith(("image_", "video_", "vision_", "boi_", "eoi_"))
        and name.endswith(("_token_id", "_token_index"))
        and isinstance(token, int)
    ]
    return min([config.get_text_config(decoder=True).vocab_size, *special])


def mask_of(ids: torch.Tensor) -> torch.Tensor:
    """Return the attention mask of prompts."""
    return (ids != PADDING).long()


def inputs_of(
    model: PreTrainedModel, ids: torch.Tensor, images: int = 0
) -> dict[str, torch.Tensor]:
    """Return what generate takes: the prompts, or as many recordings of 30 s for Whisper.

    Each prompt gets `images` images.
    """
    if images:
        return image_inputs_of(model, ids, images)
    if model.main_input_name == "input_ids":
        return {"input_ids": ids, "attention_mask": mask_of(ids)}
    c = model.config
    generator = torch.Generator(ids.device).manual_seed(0)
    features = torch.randn(
        len(ids),
        c.num_mel_bins,
        2 * c.max_source_positions,
        device=ids.device,
        generator=generator,
    )
    return {model.main_input_name: features.to(model.dtype)}


def image_inputs_of(
    model: PreTrainedModel, ids: torch.Tensor, images: int
) -> dict[str, torch.Tensor]:
    """Return what generate takes for prompts with images between their parts."""
    config = model.config
    patches = IMAGE_WIDTH // config.vision_config.patch_size
    with torch.device(ids.device):
        torch.manual_seed(0)
        pixels = random_images(model, config.model_type, images * len(ids), patches)
    given = {n: x.to(model.dtype) if x.is_floating_point() else x for n, x in pixels.items()}
    return with_images(model, config.model_type, ids, given, images)


@dataclass(frozen=True)
class Prompts:
    """The prompts of a row.

    Attributes:
        ids: Their text (batch, length).
        inputs: What generate takes.
        images: How many images each has.
    """

    ids: torch.Tensor
    inputs: dict[str, torch.Tensor]
    images: int = 0

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt, those of images included."""
        mask = self.inputs.get("attention_mask", mask_of(self.ids))
        return mask.sum(-1).tolist()  # type: ignore[no-any-return]


def prompts_of(
    model: PreTrainedModel, batch: int, length: int, args: argparse.Namespace
) -> Prompts:
    """Return the prompts of a row, the same for all peers."""
    ids = random_ids(model, batch, length, seed=0, padded=args.padded)
    return Prompts(ids, inputs_of(model, ids, args.images), args.images)
