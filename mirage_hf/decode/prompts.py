"""Prompts padded to a bucket of tokens, so that one captured prefill serves many of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mirage_hf.decode.cache_block import CacheBlock
from mirage_hf.decode.masks import MaskPlan
from mirage_hf.decode.rings import Ring
from mirage_hf.layers.row_chunks import MIN_CHUNK_ROWS

#: Buckets are multiples of GRAIN. From 8 · LONG_GRAIN on they are multiples of LONG_GRAIN, so that
#: longer prompts have fewer row chunks.
GRAIN, LONG_GRAIN = MIN_CHUNK_ROWS, 256
#: Most tokens of a batch whose prefill is captured. It was measured at 128 tokens only
#: (Llama-3.2-1B, H200). The kernels take about 2 ms there. The first token takes 9.6 ms without a
#: graph and 5.6 ms with one. The number at which the GPU takes as long as the host is an estimate.
MAX_CAPTURED_TOKENS = 2048
#: The same for prompts of one length. Forms that no library speeds up make tensors of 2 MB a token
#: (Mamba-2), and a graph keeps its memory.
MAX_STOCK_TOKENS = 512
#: Kernels are compared with HF's forward before they are called. This is the number of tokens of
#: the compared prompt, for prompts of more than MAX_CAPTURED_TOKENS that exceed no window.
CHECKED_TOKENS = 3 * GRAIN


def prompt_bucket(length: int) -> int:
    """Round a number of tokens up to a bucket."""
    grain = GRAIN if length <= 8 * LONG_GRAIN else LONG_GRAIN
    return -(-length // grain) * grain


@dataclass(frozen=True)
class PromptShape:
    """The shape of prompts. A block has a captured prefill for each shape.

    Attributes:
        batch: Rows.
        tokens: The bucket, a multiple of GRAIN.
        padded: Whether rows have padding on the left.
        windows: For each layer the window that hides some of the tokens from others, or None.
        exceeds_windows_from: The least number of tokens that exceeds the same windows and rings as
            these tokens. 0 if they exceed none.
        is_exact: Whether prompts have just so many tokens, because states would see a padding, or
            because it would take the place of tokens within a window.
        by_stock: Whether stock's own prefill runs them, and fills a cache of stock's.
    """

    batch: int
    tokens: int
    padded: bool
    windows: tuple[int | None, ...]
    exceeds_windows_from: int
    is_exact: bool = False
    by_stock: bool = False

    @classmethod
    def exactly(cls, length: int, block: CacheBlock) -> PromptShape:
        """Return the shape of prompts of `length` tokens that stock's own prefill runs."""
        return cls(block.batch, length, False, (), 0, is_exact=True, by_stock=True)

    @classmethod
    def of(cls, length: int, block: CacheBlock, masks: MaskPlan) -> PromptShape | None:
        """Return the shape of prompts of `length` tokens, None if their bucket does not fit."""
        tokens = prompt_bucket(length)
        if tokens > block.capacity:
            return None
        windows = masks.windows_within(tokens, len(block.windows))
        exceeded = [window + 1 for window in windows if window is not None]
        exceeded += [
            ring.window for ring in block.rings if ring is not None and tokens > ring.length
        ]
        padded = block.lowest is not None
        return cls(block.batch, tokens, padded, windows, max(exceeded, default=0))

    def for_forward(self, length: int) -> PromptShape:
        """Return the shape of prompts of `length` tokens that HF's forward runs.

        The keys of a bucket's padding would lie in rings where those of the prompt belong. So
        prompts that exceed a window have a shape for each length.
        """
        if self.padded or not self.exceeds_windows_from:
            return self
        return replace(self, tokens=length, is_exact=True)

    @property
    def is_short(self) -> bool:
        """Whether the host takes longer than the GPU, so that a capture saves time."""
        most = MAX_STOCK_TOKENS if self.is_exact else MAX_CAPTURED_TOKENS
        return self.batch * self.tokens <= most

    @property
    def is_plain(self) -> bool:
        """Whether HF's forward leaves the same keys for prompts that are padded to `tokens`."""
        return not self.padded and (self.is_exact or not self.exceeds_windows_from)

    @property
    def kind(self) -> PromptShape:
        """The shape that stands for all shapes that one check covers."""
        return replace(self, tokens=0)

    @property
    def checked_tokens(self) -> int:
        """Tokens of the prompt on which kernels are compared with HF's forward."""
        if self.is_short:
            return self.tokens
        return min(self.tokens, prompt_bucket(max(CHECKED_TOKENS, self.exceeds_windows_from)))


@dataclass(frozen=True)
class BucketedPrompts:
    """A batch's prompts, padded on the right to a bucket: what a prefill reads.

    Attributes:
        ids: (batch, bucket). Each row starts with its own first token.
        last: (batch,): index of each row's last token.
        sources: (batch, bucket): for each slot the token whose key goes there, if rows have left
            padding. None if token n goes to slot n.
        ring_sources: The same (batch, slots except the spare one) for rings with fewer slots than
            the prompts have tokens.
    """

    ids: Tensor
    last: Tensor
    sources: Tensor | None
    ring_sources: Mapping[Ring, Tensor]

    @classmethod
    def allocate(cls, block: CacheBlock, shape: PromptShape) -> BucketedPrompts:
        """Return room for prompts of a shape."""
        batch, tokens, device = block.batch, shape.tokens, block.device

        def integers(*dims: int) -> Tensor:
            return torch.zeros(dims, dtype=torch.long, device=device)

        with torch.inference_mode(False):
            return cls(
                ids=integers(batch, tokens),
                last=torch.full((batch,), tokens - 1, dtype=torch.long, device=device),
                sources=integers(batch, tokens) if shape.padded else None,
                ring_sources={
                    ring: integers(batch, ring.length)
                    for ring in block.rings
                    if ring is not None and tokens > ring.length
                },
            )

    def take(self, input_ids: Tensor, left_padding: Tensor | None) -> None:
        """Copy prompts here.

        Args:
            input_ids: (batch, length).
            left_padding: (batch, 1), None if no row has any.
        """
        length, tokens = input_ids.shape[1], self.ids.shape[1]
        # Every row's bucket is filled with tokens of this call. Otherwise another call could leave
        # a NaN in a key after the prompt. It would reach the prompt, because 0 · NaN is NaN.
        if left_padding is None:
            self.ids[:, :length].copy_(input_ids)
            self.ids[:, length:].copy_(input_ids[:, -1:].expand(-1, tokens - length))
            self.last.fill_(length - 1)
        else:
            assert self.sources is not None
            slots = torch.arange(tokens, device=self.ids.device)
            self.ids.copy_(input_ids.gather(1, (slots + left_padding).clamp_max_(length - 1)))
            self.last.copy_(length - 1 - left_padding[:, 0])
            self.sources.copy_((slots - left_padding).clamp_min_(0))
        for ring, sources in self.ring_sources.items():
            own_length = self.last[:, None] + 1  # a ring counts from a row's own first token on
            positions = ring.positions(own_length, torch.zeros_like(own_length))
            sources.copy_(positions.clamp_min_(0))

    def sources_of(self, ring: Ring | None) -> Tensor | None:
        """Return the tokens whose keys go to a layer's slots, None if token n goes to slot n."""
        return self.sources if ring is None else self.ring_sources.get(ring)
