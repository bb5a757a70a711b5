"""Random images for the types of `survey_models` that take them, and for `bench_generate`.

`IMAGES` names the types that also get a text with an image. The model says how many features the
image has, and the text has as many image tokens. `NEEDED` names the types that never generate from
text alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from scripts.survey_configs import SPECIAL_TOKENS

Inputs = dict[str, Tensor]

#: The width of a small image in patches.
FEW_PATCHES = 4


def _square(model: Any, _: int = FEW_PATCHES) -> Inputs:
    """Return an image, as wide as the config says."""
    vision = model.config.vision_config
    size = vision.image_size
    size = size[0] if isinstance(size, (tuple, list)) else size
    return {"pixel_values": torch.rand(1, 3, size, size)}


def _sized(model: Any, _: int = FEW_PATCHES) -> Inputs:
    """Return an image and its size."""
    inputs = _square(model)
    return inputs | {"image_sizes": torch.tensor([inputs["pixel_values"].shape[-2:]])}


def _tiled(model: Any, _: int = FEW_PATCHES) -> Inputs:
    """Return a list of images with one image."""
    return {"pixel_values": _square(model)["pixel_values"][None]}


def _patches(model: Any, patches: int = FEW_PATCHES) -> Inputs:
    """Return an image as a row for each patch, as many patches high as wide."""
    vision = model.config.vision_config
    channels = getattr(vision, "in_channels", 3)
    width = channels * vision.temporal_patch_size * vision.patch_size**2
    grid = torch.tensor([[1, patches, patches]])
    return {"pixel_values": torch.rand(patches**2, width), "image_grid_thw": grid}


#: How a type takes an image besides its text: from the model and the width in patches. The width
#: counts only if the type takes images of any size.
IMAGES: Mapping[str, Callable[[Any, int], Inputs]] = {
    "gemma3": _square,
    "idefics3": _tiled,
    "internvl": _square,
    "llava": _square,
    "mistral3": _sized,
    "paligemma": _square,
    "qwen2_5_vl": _patches,
    "qwen2_vl": _patches,
    "qwen3_5": _patches,
    "qwen3_vl": _patches,
    "smolvlm": _tiled,
}

#: Types with an argument that marks image tokens, and its name.
_MARKED = {
    "gemma3": "token_type_ids",
    "paligemma": "token_type_ids",
    "qwen2_5_vl": "mm_token_type_ids",
    "qwen2_vl": "mm_token_type_ids",
    "qwen3_5": "mm_token_type_ids",
    "qwen3_vl": "mm_token_type_ids",
}


def _batch_of(images: Callable[[Any], Tensor]) -> Callable[[Any, int], Inputs]:
    """Return a function that makes a random image for each text."""

    def inputs(model: Any, batch: int) -> Inputs:
        shape = images(model).shape[1:]
        return {"pixel_values": torch.rand(batch, *shape)}

    return inputs


def _before_the_text(
    count: int, *, frames: int = 0, qformer: bool = False, mask: bool = False
) -> Callable[[Any, int], Inputs]:
    """Return a function that makes texts whose image tokens come first.

    Args:
        count: Features of an image or frame.
        frames: Frames of a video, 0 for an image.
        qformer: Whether a part of the model reads the text with the image.
        mask: Whether the model wants a mask of the image tokens.
    """

    def inputs(model: Any, batch: int) -> Inputs:
        token = getattr(model.config, "image_token_index", None)
        token = token or getattr(model.config, "video_token_index", None) or 190
        features = torch.full((batch, count * max(frames, 1)), token)
        text = torch.randint(5, SPECIAL_TOKENS, (batch, 9))
        ids = torch.cat([features, text], dim=1)
        pixels = _square(model)["pixel_values"].expand(batch, -1, -1, -1)
        if frames:
            pixels = pixels[:, None].repeat(1, frames, 1, 1, 1)
        made = {"pixel_values": pixels, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if qformer:
            made |= {"qformer_input_ids": text, "qformer_attention_mask": torch.ones_like(text)}
        if mask:
            made["image_embeds_position_mask"] = (ids == token).long()
        return made

    return inputs


def _patches_with_places(model: Any, batch: int) -> Inputs:
    """Return images as rows with the row, the column and the pixels of a patch."""
    pixels = torch.rand(batch, 4, model.config.vision_config.patch_embed_hidden_size)
    places = torch.tensor([[1, 1], [1, 2], [2, 1], [2, 2]]).expand(batch, 4, 2)
    return {"flattened_patches": torch.cat([places, pixels], dim=-1)}


#: What a type needs besides text in every call, made for a number of texts.
NEEDED: Mapping[str, Callable[[Any, int], Inputs]] = {
    "blip": _batch_of(lambda model: _square(model)["pixel_values"]),
    "blip-2": _before_the_text(4),
    "idefics": lambda model, batch: {
        "pixel_values": _square(model)["pixel_values"].expand(batch, -1, -1, -1)[:, None],
        "image_attention_mask": torch.ones(batch, 9, 1, dtype=torch.long),
    },
    "instructblip": _before_the_text(4, qformer=True),
    "instructblipvideo": _before_the_text(4, frames=4, qformer=True),
    "kosmos-2": _before_the_text(4, mask=True),
    "pix2struct": _patches_with_places,
    "pp_formulanet": _batch_of(lambda model: _square(model)["pixel_values"]),
    "udop": lambda model, batch: {"bbox": torch.zeros(batch, 9, 4)},
    "vision-encoder-decoder": _batch_of(
        lambda model: torch.rand(1, 3, *[model.config.encoder.image_size] * 2)
    ),
}


def image_inputs(model: Any, model_type: str) -> Inputs:
    """Return the arguments of generate for a text with a small image."""
    torch.manual_seed(4)
    images = random_images(model, model_type)
    text = torch.randint(5, SPECIAL_TOKENS, (1, 8))
    return with_images(model, model_type, text, images)


def random_images(
    model: Any, model_type: str, count: int = 1, patches: int = FEW_PATCHES
) -> Inputs:
    """Return several images as a type takes them."""
    images = [IMAGES[model_type](model, patches) for _ in range(count)]
    return {name: torch.cat([image[name] for image in images]) for name in images[0]}


def with_images(
    model: Any, model_type: str, text: Tensor, images: Inputs, count: int = 1
) -> Inputs:
    """Return the arguments of generate for texts with images between their parts.

    Args:
        model: The model, which says how many tokens an image has.
        model_type: Its type.
        text: Tokens of the texts without images (batch, length).
        images: The images of all texts.
        count: How many images each text has.
    """
    config = model.config
    token = getattr(config, "image_token_id", None)
    token = config.image_token_index if token is None else token
    with torch.no_grad():
        features = model.get_image_features(**images).pooler_output
    tokens = sum(f.reshape(-1, f.shape[-1]).shape[0] for f in features) // (count * len(text))
    image = torch.full((len(text), tokens), token, device=text.device)
    first, *others = text.tensor_split(count + 1, dim=1)
    ids = torch.cat([first, *(x for part in others for x in (image, part))], dim=1)
    inputs = images | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model_type in _MARKED:
        inputs[_MARKED[model_type]] = (ids == token).long()
    return inputs
