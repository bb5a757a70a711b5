"""What an encoder gives to the steps of a decoder.

It is written once in a call, after stock's prefill, and read by every step: the encoder's output,
the keys and values of cross-attention, and which of them each row sees. The memory of a block has
slots for a bucket of lengths, so that a captured step serves many of them.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from mirage_hf.decode.cache_block import CacheBlock
from mirage_hf.decode.cache_exchange import has_keys
from mirage_hf.decode.control import Control
from mirage_hf.decode.not_covered import NotCoveredError
from mirage_hf.decode.rings import bucket
from mirage_hf.trace.attention import for_each_token
from mirage_hf.trace.record import Input, TraceError

#: Names in `CacheBlock.sources`: the encoder's output (batch, slots, width), which slots each row
#: sees (batch, slots), and the same as an additive mask (batch, 1, 1, slots). The names of keys and
#: values (batch, heads, slots, dim) go on with the number of a layer.
STATES, SEEN, MASK = "source.states", "source.seen", "source.mask"
KEYS, VALUES = "source_keys", "source_values"

#: What a model does with `attention_mask` after its encoder: it hides these slots of the encoder's
#: output, or hides none, or makes another mask of it. With "output" it hides what the mask in the
#: encoder's output says, and ignores its own.
MaskUse = Literal["hides", "ignores", "other", "output"]


@dataclass
class EncoderOutput(BaseModelOutput):
    """The output of an encoder, with the fields that encoders of sound and of experts add."""

    attention_mask: Tensor | None = None
    router_logits: tuple[Tensor, ...] | None = None


@dataclass(frozen=True, eq=False)
class Source:
    """What the encoder gave in one call.

    Attributes:
        states: Its output (batch, length, width).
        seen: (batch, length): 0 where a row must not look. None if rows see everything.
    """

    states: Tensor
    seen: Tensor | None

    @property
    def slots(self) -> int:
        """The slots of its bucket."""
        return bucket(self.states.shape[1])

    @classmethod
    def of(cls, kwargs: dict[str, Any], mask_use: MaskUse) -> Source:
        """Read the arguments that stock's decoding method would get.

        Args:
            kwargs: The model's kwargs.
            mask_use: What the model does with `attention_mask`.

        Raises:
            NotCoveredError: The encoder's output or its mask is of an unknown form.
        """
        outputs = kwargs.get("encoder_outputs")
        if outputs is None:
            raise NotCoveredError("a call without encoder_outputs, which its steps read")
        states = outputs[0]
        if not isinstance(states, Tensor) or states.ndim != 3:
            raise NotCoveredError("encoder_outputs that are not (batch, length, width)")
        mask, of_output = kwargs.get("attention_mask"), getattr(outputs, "attention_mask", None)
        if mask_use == "output":
            mask = of_output
        elif mask_use == "hides" and of_output is not None and not _are_equal(mask, of_output):
            raise NotCoveredError("an attention_mask that is not that of the encoder's output")
        if mask is None or mask_use == "ignores":
            return cls(states, None)
        if mask_use in ("hides", "output") and mask.shape == states.shape[:2]:
            return cls(states, mask)
        if bool(mask.all()):
            return cls(states, None)
        raise NotCoveredError("padding in a mask that the model maps to the encoder's output")

    def store(self, block: CacheBlock, cache: EncoderDecoderCache) -> None:
        """Copy it into a block, with the keys and values of cross-attention from stock's cache.

        Raises:
            NotCoveredError: Keys are not of the encoder's length.
        """
        batch, length = self.states.shape[:2]
        block.store_source(STATES, self.states)
        dtype = self.states.dtype
        for n, layer in enumerate(cache.cross_attention_cache.layers):
            if not has_keys(layer):
                continue
            if layer.keys.shape[-2] != length or len(layer.keys) != batch:
                raise NotCoveredError("cross-attention to something else than the encoder's output")
            block.store_source(f"{KEYS}.{n}", layer.keys)
            block.store_source(f"{VALUES}.{n}", layer.values)
            dtype = layer.keys.dtype
        ones = torch.ones(batch, length, dtype=torch.long, device=self.states.device)
        seen = ones if self.seen is None else (self.seen != 0).long()
        block.store_source(SEEN, seen, dim=-1)
        hidden = block.sources[SEEN][:, None, None] == 0
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        block.store_source(MASK, mask.masked_fill_(hidden, float("-inf")), dim=-1)


def _are_equal(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and a.shape == b.shape and bool((a == b).all())


def is_source(operand: Any) -> bool:
    """Return whether an operand in a recording is what an encoder gave."""
    return isinstance(operand, Input) and operand.name.partition(".")[0] in (KEYS, VALUES)


def source_keys(block: CacheBlock) -> list[Tensor]:
    """Return the keys of cross-attention in a block."""
    return [x for name, x in block.sources.items() if name.startswith(f"{KEYS}.")]


def step_arguments(
    model: Any, block: CacheBlock, rows: Control, cache: Any, masks: Any
) -> dict[str, Any]:
    """Return what a decoder's step takes, beside its options.

    Args:
        model: A model whose decoder follows an encoder.
        block: The block, which holds what the encoder gave.
        rows: The rows of the step: those of the block, or new tokens of them.
        cache: The cache of self-attention.
        masks: The masks of self-attention.
    """
    tokens = len(rows.ids) // block.batch
    sources = {name: for_each_token(x, tokens) for name, x in block.sources.items() if name != MASK}
    layers = []
    for n in range(len(block.rings)):
        layer = DynamicLayer()
        if f"{KEYS}.{n}" in sources:
            layer.keys, layer.values = sources[f"{KEYS}.{n}"], sources[f"{VALUES}.{n}"]
            layer.dtype, layer.device = layer.keys.dtype, layer.keys.device
            layer.is_initialized = True
        layers.append(layer)
    of_source = DynamicCache()
    of_source.layers = layers
    outputs = EncoderOutput(last_hidden_state=sources[STATES])
    arguments = decoder_inputs(model, outputs, sources[SEEN], rows.ids, masks, rows.positions())
    return {**arguments, "past_key_values": EncoderDecoderCache(cache, of_source)}


def decoder_inputs(
    model: Any,
    outputs: EncoderOutput,
    seen: Tensor | None,
    ids: Tensor,
    mask: Any,
    positions: Tensor,
) -> dict[str, Any]:
    """Return what the forward of a decoder after an encoder takes, except for its cache.

    Args:
        model: The model.
        outputs: What the encoder gave.
        seen: Which slots of it each row sees, None if all.
        ids: The decoder's tokens.
        mask: Their mask, None if there is none.
        positions: Their positions.
    """
    of_decoder = "decoder_" if model.config.is_encoder_decoder else ""
    arguments: dict[str, Any] = {f"{of_decoder}input_ids": ids, "encoder_outputs": outputs}
    if mask is not None:
        arguments[f"{of_decoder}attention_mask"] = mask
    if of_decoder and seen is not None:
        arguments["attention_mask"] = seen
    if takes_positions(model):
        arguments["decoder_position_ids"] = positions
    return arguments


def follows_encoder(model: Any) -> bool:
    """Return whether a model's decoder reads what an encoder gave.

    Whisper's decoder is also a model of its own, which is given what another model's encoder gave.
    """
    return bool(model.config.is_encoder_decoder) or _takes(type(model).forward, "encoder_outputs")


def decoder_config(model: Any) -> Any:
    """Return the config of a model's decoder."""
    config = model.config
    if follows_encoder(model) and not config.is_encoder_decoder:
        # its config is that of the whole model, and says how many layers the encoder has
        config = copy.copy(config)
        config.is_encoder_decoder = True
    return config.get_text_config(decoder=True)


def new_cache(model: Any) -> Any:
    """Return an empty cache, as stock's generate makes it."""
    config = decoder_config(model)
    if not follows_encoder(model):
        return DynamicCache(config=config)
    return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))


def source_width(model: Any) -> int:
    """Return the width of the encoder's output.

    Raises:
        TraceError: Its config does not have it.
    """
    config = getattr(model.get_encoder(), "config", model.config)
    # an encoder of texts and images has a config of its own for texts
    parts = config.get_text_config(encoder=True), config.get_text_config()
    width = next((w for p in parts if isinstance(w := getattr(p, "hidden_size", None), int)), None)
    if width is None:
        raise TraceError("the config of its encoder has no hidden_size")
    return width


def takes_positions(model: Any) -> bool:
    """Return whether a model's forward takes the positions of a decoder's tokens."""
    return _takes(type(model).forward, "decoder_position_ids")


@cache
def _takes(forward: Any, name: str) -> bool:
    """Return whether a forward names an argument."""
    return name in inspect.signature(forward).parameters


def decoder_arguments(model: Any, kwargs: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Return the mask and the positions of a decoder's tokens, by the names of causal models.

    Args:
        model: A model whose decoder follows an encoder.
        kwargs: Its kwargs.
        tokens: Tokens that are new.
    """
    if not model.config.is_encoder_decoder:
        return kwargs
    mask, positions = kwargs.get("decoder_attention_mask"), kwargs.get("decoder_position_ids")
    if positions is None and mask is not None and mask.ndim == 2 and takes_positions(model):
        positions = (mask.long().cumsum(-1) - 1).clamp_min(0)[:, -tokens:]
    return {"attention_mask": mask, "position_ids": positions}
