"""The choice of next tokens from logits, by kernels on CUDA and by torch elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mirage_hf import errors
from mirage_hf.codegen.kernel_launch import launch
from mirage_hf.codegen.optional_triton import HAS_TRITON
from mirage_hf.decode.cache_block import CacheBlock
from mirage_hf.decode.choosing import NOTHING, Chooser, Picked, choose_greedily, draw, settle
from mirage_hf.decode.control import Control, TokenHistory
from mirage_hf.decode.drafts import Drafts
from mirage_hf.decode.kernels import sampling
from mirage_hf.decode.kernels.sizes import MAX_ROWS, MAX_VOCAB, check_tensor
from mirage_hf.decode.kernels.total_order import FLOATS


@dataclass(frozen=True, eq=False)
class Sampler:
    """Chooses the next tokens of a batch: kernels on CUDA, torch elsewhere.

    It owns scratch memory, so its calls must run one after the other.

    Attributes:
        batch: Rows.
        vocab: Columns of the logits.
        by_kernels: Launch kernels, otherwise run torch.
        best: (batch · blocks,) int64: results of the blocks of `argmax_kernel`.
        counter: (1,) int32: blocks of `argmax_kernel` that are done; 0 between launches.
        greatest: (batch · blocks,) float32: results of the blocks of `sample_kernel`.
        weight: (batch · blocks,) float64: likewise.
        arrived: (batch,) int32: blocks of `sample_kernel` that are done; 0 between launches.
        token: (batch,) int64: what `sample` and `greatest_tokens` return.
        none_ended: (batch,) bool, all False.
    """

    batch: int
    vocab: int
    by_kernels: bool
    best: Tensor
    counter: Tensor
    greatest: Tensor
    weight: Tensor
    arrived: Tensor
    token: Tensor
    none_ended: Tensor

    @classmethod
    def allocate(
        cls, batch: int, vocab: int, device: torch.device, by_kernels: bool | None = None
    ) -> Sampler:
        """Return a sampler for (batch, vocab) logits.

        Args:
            batch: Rows.
            vocab: Columns of the logits.
            device: Where the logits are.
            by_kernels: Launch Triton kernels, otherwise run torch. None launches kernels on CUDA.
                True on a CPU needs Triton's interpreter.

        Raises:
            InputError: More than MAX_ROWS rows or MAX_VOCAB tokens, unless `by_kernels` is False.
        """
        fits = 0 < batch <= MAX_ROWS and 0 < vocab <= MAX_VOCAB
        if not fits and by_kernels is not False:
            raise errors.InputError(
                f"decode: logits are {errors.shape((batch, vocab))}; "
                f"the kernels take 1 to {MAX_ROWS} rows and 1 to {MAX_VOCAB} tokens, "
                "use choose_greedily"
            )
        argmax_blocks = -(-vocab // sampling.argmax_block(batch, vocab)) if fits else 0
        sample_blocks = -(-vocab // sampling.SAMPLE_BLOCK)

        def zeros(count: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        with torch.inference_mode(False):
            return cls(
                batch=batch,
                vocab=vocab,
                by_kernels=device.type == "cuda" if by_kernels is None else by_kernels,
                best=zeros(batch * argmax_blocks, torch.int64),
                counter=zeros(1, torch.int32),
                greatest=zeros(batch * sample_blocks, torch.float32),
                weight=zeros(batch * sample_blocks, torch.float64),
                arrived=zeros(batch, torch.int32),
                token=zeros(batch, torch.int64),
                none_ended=zeros(batch, torch.bool),
            )

    def argmax(self, control: Control, logits: Tensor) -> None:
        """Choose the greatest logits and move on, as `choose_greedily` does, in one launch.

        Args:
            control: State of the call.
            logits: (batch, vocab), contiguous; only read.

        Raises:
            InputError: The logits or the state are of another size.
        """
        if logits.dtype not in FLOATS:
            raise errors.InputError(
                f"decode: logits are {logits.dtype}; they must be float16, bfloat16 or float32"
            )
        self._check("control.ids", control.ids, (self.batch, 1), torch.long)
        self._check("logits", logits, (self.batch, self.vocab), logits.dtype)
        if not self.by_kernels:
            choose_greedily(control, logits)
            return
        state = [
            control.ids,
            control.position,
            control.length,
            control.budget,
            control.alive.view(torch.uint8),
            control.eos,
            control.pad,
            control.report,
        ]
        what = sampling.argmax_launch(self.batch, self.vocab)
        launch(what, [logits.detach(), *state, self.best, self.counter, self.token])

    def greatest_tokens(self, logits: Tensor) -> Tensor:
        """Return the tokens of the greatest logits, in one launch, and leave the state as it is.

        Args:
            logits: (batch, vocab), contiguous; only read.

        Returns:
            (batch,) tokens, which the next call overwrites.

        Raises:
            InputError: The logits are of another size.
        """
        self._check("logits", logits, (self.batch, self.vocab), logits.dtype)
        if not self.by_kernels or logits.dtype not in FLOATS:
            return torch.argmax(logits.float() if logits.dtype == torch.float64 else logits, dim=-1)
        what = sampling.argmax_launch(self.batch, self.vocab, advances=False)
        unused = [self.token] * 8  # the state
        launch(what, [logits.detach(), *unused, self.best, self.counter, self.token])
        return self.token

    def sample(self, scores: Tensor, numbers: Tensor) -> Tensor:
        """Choose tokens from the softmax of scores as `choosing.draw` does, in one launch.

        Args:
            scores: (batch, vocab) float32, contiguous.
            numbers: (batch, 1) float64 in [0, 1).

        Returns:
            (batch,) tokens, which the next call overwrites.

        Raises:
            InputError: A tensor does not fit.
        """
        self._check("scores", scores, (self.batch, self.vocab), torch.float32)
        self._check("numbers", numbers, (self.batch, 1), torch.float64)
        if not self.by_kernels:
            return draw(scores.softmax(-1), numbers)
        what = sampling.sample_launch(self.batch, self.vocab)
        launch(
            what, [scores.detach(), numbers, self.greatest, self.weight, self.token, self.arrived]
        )
        return self.token

    def advance(self, control: Control, token: Tensor, ended: Tensor | None = None) -> None:
        """Take tokens as chosen and move the state on as `choosing.settle` does, in one launch.

        NOTHING is reported, and token 0 is fed in its place.

        Args:
            control: State of the call.
            token: (batch,) int64.
            ended: (batch,) bool: rows that end here whatever their token is.

        Raises:
            InputError: A tensor does not fit.
        """
        self._check("control.ids", control.ids, (self.batch, 1), torch.long)
        self._check("token", token, (self.batch,), torch.long)
        ended_rows = self.none_ended if ended is None else ended
        self._check("ended", ended_rows, (self.batch,), torch.bool)
        if not self.by_kernels:
            settle(control, token, ended)
            control.ids.masked_fill_(control.ids == NOTHING, 0)
            return
        state = [
            control.ids,
            control.position,
            control.length,
            control.budget,
            control.alive.view(torch.uint8),
            control.eos,
            control.report,
        ]
        launch(sampling.advance_launch(self.batch), [token, ended_rows.view(torch.uint8), *state])

    def _check(self, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        check_tensor(name, tensor, shape, dtype, self.best.device)


def sampler_of(block: CacheBlock) -> Sampler:
    """Return a block's sampler, made when its first call has logits."""
    batch, vocab = block.logits.shape
    sampler: Sampler | None = block.sampler
    if sampler is None or (sampler.batch, sampler.vocab) != (batch, vocab):
        fits = batch <= MAX_ROWS and vocab <= MAX_VOCAB and HAS_TRITON
        sampler = Sampler.allocate(batch, vocab, block.device, by_kernels=None if fits else False)
        block.sampler = sampler
    return sampler


class Greedy(Chooser):
    """Chooses the greatest logit."""

    def __init__(self, sampler: Sampler):
        super().__init__(("greedy",))
        self.sampler = sampler

    def choose(self, control: Control, logits: Tensor) -> None:
        """Choose the greatest logit of every row and move the state on."""
        if logits.dtype in FLOATS:
            self.sampler.argmax(control, logits)
        else:
            choose_greedily(control, logits)

    def pick(
        self, control: Control, drafts: Drafts, history: TokenHistory, logits: Tensor
    ) -> Picked:
        """Return the greatest logit of every row."""
        return Picked(drafts.sampler.greatest_tokens(logits))
