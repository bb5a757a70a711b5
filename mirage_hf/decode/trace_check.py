"""Compare traced steps with stock's before they are used."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mirage_hf.decode.cache_block import CacheBlock
from mirage_hf.decode.cache_exchange import cached_layers, held_tokens, read_cache
from mirage_hf.decode.drafts import Drafts
from mirage_hf.decode.masks import MaskPlan
from mirage_hf.decode.rounding import perturbed, tolerance_of
from mirage_hf.decode.routing import cache_name
from mirage_hf.decode.sources import (
    EncoderOutput,
    MaskUse,
    Source,
    decoder_config,
    decoder_inputs,
    follows_encoder,
    new_cache,
    source_width,
)
from mirage_hf.decode.summed_products import SummedProducts
from mirage_hf.decode.traced_step import TracedStep
from mirage_hf.errors import described
from mirage_hf.layers.part import StepShape
from mirage_hf.trace.near_ties import KeepChoices, TakeChoices
from mirage_hf.trace.record import TraceError
from mirage_hf.trace.step_plan import StepPlan

#: Lengths of the texts whose next step is compared with stock's.
LENGTHS = (3, 6, 17)
#: How many times stock's step is perturbed if a row differs by more than is usual.
_PERTURBATIONS = 2
#: The row may differ by this many times what the perturbations move it.
_SLACK = 2
#: The row may differ by no more than this share of its largest logit.
_MOST = 0.75
#: A mask hides slots of an encoder's output if logits with it are those of the output without these
#: slots. They may differ by this share of what the mask changes.
_NEAR = 0.25
#: Samples or frames of sound for each slot of an encoder's output, in known models and between.
_SAMPLES = (2, 4, 8, 80, 160, 320, 640, 1280)


@dataclass(frozen=True)
class _Prompt:
    """The texts of one comparison.

    Attributes:
        ids: (batch, length + 1): tokens, of which the step feeds the last.
        padding: (batch,): left padding.
        source: What an encoder gave, if the model has one.
    """

    ids: Tensor
    padding: Tensor
    source: Source | None

    @property
    def length(self) -> int:
        """Tokens before the step."""
        return self.ids.shape[1] - 1

    @property
    def mask(self) -> Tensor:
        """(batch, length + 1): 0 for padding."""
        slots = torch.arange(self.length + 1, device=self.ids.device)[None]
        return (slots >= self.padding[:, None]).long()


class UnfitFormError(TraceError):
    """A step that cannot be recorded in one form, or differs from stock's if it is."""


class TraceCheck:
    """Compares steps after texts of several lengths, with padding, with stock's steps.

    Args:
        model: The model.
        masks: Its masks.
        axes: The axes of its positions.
        gives_positions: Whether its steps are given positions.
    """

    def __init__(self, model: Any, masks: MaskPlan, axes: int, *, gives_positions: bool = True):
        self.model, self.masks, self.axes = model, masks, axes
        self.gives_positions = gives_positions
        self.mask_use: MaskUse = "hides"
        if follows_encoder(model):
            self.mask_use = _mask_use(model)
        self.tolerance = tolerance_of(model)

    def run(self, plan: StepPlan, batch: int, windows: Sequence[int | None], capacity: int) -> None:
        """Compare a plan's steps with stock's.

        Raises:
            UnfitFormError: They differ.
        """
        try:
            self._run(plan, batch, windows, capacity)
        except TraceError:
            has_mask = follows_encoder(self.model)
            if not has_mask or (before := self.mask_use) not in ("hides", "output"):
                raise
            self.mask_use = "other"
            try:
                self._run(plan, batch, windows, capacity)
            except TraceError:
                self.mask_use = before  # what is wrong with this plan is something else
                raise

    def _run(
        self, plan: StepPlan, batch: int, windows: Sequence[int | None], capacity: int
    ) -> None:
        device = self.model.device
        vocab = decoder_config(self.model).vocab_size
        generator = torch.Generator().manual_seed(batch)
        as_usual, what = 0, ""
        for length in LENGTHS:
            ids = torch.randint(0, vocab, (batch, length + 1), generator=generator)
            # a single row has left padding, too, after one of the texts
            padding = torch.arange(batch, device=device) + (length == LENGTHS[1])
            prompt = _Prompt(
                ids.to(device),
                padding % min(length, 3),
                _random_source(self.model, batch, length + 2, generator, self.mask_use),
            )
            what = f"step of {_rows(batch)} after {length} tokens"
            try:
                wanted, ours, choices = self._steps(plan, prompt, windows, capacity)
                is_usual = self._is_close(wanted, ours)
                allowed = None if is_usual else self._allowed(prompt, wanted, choices)
            except Exception as error:  # stock's forward may raise anything
                raise UnfitFormError(f"the check of a step raised {described(error)}") from None
            if allowed is not None and not _are_within(wanted, ours, allowed):
                raise _differ(what, wanted, ours)
            as_usual += is_usual
        if not as_usual:
            raise UnfitFormError(f"the traced {what} differs from stock's, as after other texts")

    def _is_close(self, wanted: Tensor, ours: Tensor) -> bool:
        """Return whether logits differ by no more than is usual."""
        return _are_within(wanted, ours, self._usual(wanted))

    def _usual(self, wanted: Tensor) -> Tensor:
        """Return how far logits may be from stock's."""
        return self.tolerance * wanted.abs().max().float().clamp_min(1e-6)

    def _allowed(self, prompt: _Prompt, wanted: Tensor, choices: KeepChoices) -> Tensor:
        """Return how far each row of our logits may be from stock's, if some row is far from them.

        A row can be ill-conditioned, such as one of a single token in a deep model with recurrent
        states. Then other rounding moves stock's own logits as much as ours.

        Args:
            prompt: The prompt.
            wanted: Stock's logits after it.
            choices: The experts that stock chose in its step.
        """
        moved = torch.zeros(len(wanted), device=wanted.device)
        for seed in range(_PERTURBATIONS):
            stock = _StockRun(self, prompt)
            with torch.no_grad():
                stock.feed_prompt(prompt.length)
                with (
                    self.model._optimize_model_for_decode(),
                    perturbed(self.model, seed),
                    TakeChoices(choices, self.tolerance),
                ):
                    other = stock.feed(prompt.length, prompt.length + 1)
            moved = moved.maximum((other - wanted).abs().amax(-1).float())
        most = _MOST * wanted.abs().amax(-1).float()
        return (_SLACK * moved).minimum(most).maximum(self._usual(wanted))

    def run_drafts(self, plan: StepPlan, shape: StepShape, capacity: int) -> None:
        """Compare a plan's steps of several tokens of each row with stock's steps of one token.

        Two steps follow each other. The first one is fed wrong tokens after the first ones of a
        row. The second one begins after the right ones, so rows have texts of several lengths.

        Raises:
            UnfitFormError: They differ.
        """
        batch, tokens, model = shape.batch, shape.tokens, self.model
        vocab = decoder_config(model).vocab_size
        generator = torch.Generator().manual_seed(shape.rows)
        length = LENGTHS[1]
        ids = torch.randint(0, vocab, (batch, length + 2 * tokens), generator=generator)
        padding = torch.arange(1, batch + 1, device=model.device) % 3
        source = _random_source(model, batch, length + 2, generator, self.mask_use)
        texts = _Prompt(ids.to(model.device), padding, source)
        try:
            pairs = self._two_steps(plan, shape, texts, length, capacity)
        except Exception as error:  # stock's forward may raise anything
            raise UnfitFormError(f"the check of a step raised {described(error)}") from None
        for (wanted, ours), which in zip(pairs, ("first", "second"), strict=True):
            if not self._is_close(wanted, ours):
                raise _differ(f"{which} step of {shape} after {length} tokens", wanted, ours)

    def _two_steps(
        self, plan: StepPlan, shape: StepShape, texts: _Prompt, length: int, capacity: int
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the logits of stock's steps and of ours, for each of two of our steps.

        Args:
            plan: The plan.
            shape: Its shape.
            texts: The texts.
            length: How many of their tokens are the prompt.
            capacity: Slots of the block.
        """
        model, ids, tokens = self.model, texts.ids, shape.tokens
        stock = _StockRun(self, texts)
        with torch.no_grad():
            layers = cached_layers(decoder_config(model))
            block = stock.prefill(length, (None,) * layers, capacity)
        with torch.no_grad(), model._optimize_model_for_decode():
            drafts = Drafts.allocate(shape.batch, tokens, block.logits, None)
            by_place, choices = [], []
            for place in range(length, length + 2 * tokens):
                with KeepChoices() as kept:
                    by_place.append(stock.feed(place, place + 1))
                choices.append(kept)
            step = TracedStep(plan, block, self.masks, drafts, graphs=False, graph_key=None)

            def ours(ahead: Tensor) -> tuple[Tensor, Tensor]:
                """Feed `drafts.tokens`. Return the logits of stock's steps and of ours."""
                drafts.ahead.copy_(ahead)
                places = ahead + drafts.number
                with TakeChoices(_of_places(choices, places), self.tolerance):
                    step.feed()
                return _at_places(by_place, places), drafts.logits.clone()

            number, nothing = drafts.number, torch.zeros_like(drafts.ahead)
            # rows take 1, 2, … of the tokens that the first step feeds
            taken = 1 + torch.arange(shape.batch, device=ids.device)[:, None] % tokens
            right = ids[:, length : length + tokens]
            wrong = (right + 1) % block.logits.shape[1]
            drafts.tokens.copy_(torch.where(number < taken, right, wrong))
            wanted, found = ours(nothing)
            is_right = (number < taken).flatten()
            first = wanted[is_right], found[is_right]
            step.settle(taken[:, 0])
            drafts.tokens.copy_(ids.gather(1, length + taken + number))
            return [first, ours(taken)]

    def _steps(
        self, plan: StepPlan, prompt: _Prompt, windows: Sequence[int | None], capacity: int
    ) -> tuple[Tensor, Tensor, KeepChoices]:
        """Return the logits of stock's step and of ours after all but the last token.

        The third result is the experts that stock chose. Our step takes them where scores nearly
        tie.
        """
        stock = _StockRun(self, prompt)
        with torch.no_grad():
            block = stock.prefill(prompt.length, windows, capacity)
        with torch.no_grad(), self.model._optimize_model_for_decode():
            block.control.ids.copy_(prompt.ids[:, prompt.length :])
            with KeepChoices() as choices:
                wanted = stock.feed(prompt.length, prompt.length + 1)
            with TakeChoices(choices, self.tolerance):
                TracedStep(plan, block, self.masks, graphs=False, graph_key=None)._forward()
        wanted = wanted.float() if wanted.dtype == torch.float64 else wanted
        return wanted, block.logits, choices


class _StockRun:
    """Stock's forward over the texts of a comparison, and over stock's own cache."""

    def __init__(self, check: TraceCheck, prompt: _Prompt):
        self.check, self.prompt = check, prompt
        self.positions = (prompt.mask.cumsum(-1) - 1).clamp_min(0)
        self.cache = new_cache(check.model)

    def feed(self, first: int, last: int) -> Tensor:
        """Feed the tokens from `first` to `last`, and return the last logits."""
        model = self.check.model
        cache = {cache_name(model): self.cache}
        return model(**self._arguments(first, last), **cache, use_cache=True).logits[:, -1]  # type: ignore[no-any-return]

    def feed_prompt(self, length: int) -> Tensor:
        """Feed a prompt of so many tokens, and return the last logits.

        As in stock's generate, experts do not run in the form for steps, which copies the weights
        of each token's experts.
        """
        with SummedProducts():
            logits = self.feed(0, length)
        if held_tokens(self.cache) == 1 < length:  # FSMT drops all tokens of a prompt but the last
            self.cache = new_cache(self.check.model)
            for first in range(length):
                logits = self.feed(first, first + 1)
        return logits

    def prefill(self, length: int, windows: Sequence[int | None], capacity: int) -> CacheBlock:
        """Feed a prompt of so many tokens, and return a block that holds it, before the next step.

        Args:
            length: Tokens of the prompt.
            windows: For each layer the window that its cache slides over.
            capacity: Slots of the block.
        """
        prompt, check = self.prompt, self.check
        logits = self.feed_prompt(length)
        source_slots = 0 if prompt.source is None else prompt.source.slots
        device = prompt.ids.device
        block = CacheBlock(
            len(prompt.ids), capacity, tuple(windows), device, check.axes, source_slots
        )
        lowest = prompt.padding[:, None] if bool(prompt.padding.any()) else None
        block.begin(lowest)
        read_cache(block, self.cache, length)
        if prompt.source is not None:
            prompt.source.store(block, self.cache)
        block.set_logits(logits)
        block.control.start(
            length=length,
            position=self.positions[:, length - 1 : length],
            lowest=lowest,
            budget=prompt.ids.shape[1],
            eos=None,
            pad=None,
        )
        block.control.length.add_(1)
        block.control.position.add_(1)
        return block

    def _arguments(self, first: int, last: int) -> dict[str, Any]:
        """Return what stock's forward takes for the tokens from `first` to `last`."""
        prompt, check = self.prompt, self.check
        ids = prompt.ids[:, first:last].contiguous()  # as stock's generate gives them
        positions = self.positions[:, first:last].contiguous()
        is_padded = bool(prompt.padding.any())
        # steps of models that keep only states take no mask
        takes_mask = is_padded and (bool(check.masks.windows) or not first)
        mask = prompt.mask[:, :last] if takes_mask else None
        if prompt.source is not None:
            outputs = EncoderOutput(last_hidden_state=prompt.source.states)
            if check.mask_use == "output":
                outputs.attention_mask = prompt.source.seen
            return decoder_inputs(check.model, outputs, prompt.source.seen, ids, mask, positions)
        if check.axes:
            positions = positions.expand(check.axes, *positions.shape)
        arguments = {"input_ids": ids}
        if check.gives_positions:
            arguments["position_ids"] = positions
        return arguments if mask is None else {**arguments, "attention_mask": mask}


def _at_places(by_place: Sequence[Tensor], places: Tensor) -> Tensor:
    """Return rows of several tensors (batch, …): for each row those at its places (batch, n).

    Rows of the result (batch · n, …) are those of the first row, then those of the second, …
    """
    rows = torch.arange(len(places), device=places.device)[:, None]
    return torch.stack([*by_place])[places, rows].flatten(0, 1)


def _of_places(choices: Sequence[KeepChoices], places: Tensor) -> KeepChoices:
    """Return the choices of several steps of stock as those of one step of several tokens."""
    kept = KeepChoices()
    for of_steps in zip(*(each.places for each in choices), strict=False):
        same = len({x.shape for x in of_steps}) == 1 and len(of_steps[0]) == len(places)
        kept.places.append(_at_places(of_steps, places) if same else of_steps[0])
    return kept


def _are_within(wanted: Tensor, ours: Tensor, allowed: Tensor) -> bool:
    """Return whether no row of logits differs by more than is allowed for it."""
    return bool(((wanted - ours).abs().amax(-1).float() <= allowed).all())


def _differ(what: str, wanted: Tensor, ours: Tensor) -> UnfitFormError:
    difference, most = (x.abs().max().item() for x in (wanted - ours, wanted))
    return UnfitFormError(
        f"the traced {what} differs from stock's by {difference:.1e}, with logits up to {most:.1e}"
    )


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _random_source(
    model: Any, batch: int, length: int, generator: torch.Generator, mask_use: MaskUse
) -> Source | None:
    """Return what an encoder may have given, with padding on the right if steps see it."""
    if not follows_encoder(model):
        return None
    states = torch.randn(batch, length, source_width(model), generator=generator)
    states = states.to(model.device, model.dtype)
    if mask_use not in ("hides", "output"):
        return Source(states, None)
    padding = torch.arange(1, batch + 1, device=model.device)[:, None] % 3
    slots = torch.arange(length, device=model.device)[None]
    return Source(states, (slots < length - padding).long())


def _mask_use(model: Any) -> MaskUse:
    """Return what a model does with `attention_mask` after its encoder.

    Raises:
        TraceError: Its forward raised.
    """
    if not model.config.is_encoder_decoder:
        return "ignores"  # it takes no such mask
    ids = torch.ones(1, 2, dtype=torch.long, device=model.device)
    positions = torch.arange(2, device=model.device)[None]
    source = _random_source(model, 1, 6, torch.Generator().manual_seed(0), "ignores")
    assert source is not None
    half = (torch.arange(6, device=model.device) < 3).long()[None]

    def logits(seen: Tensor | None, of_output: Tensor | None = None, length: int = 6) -> Tensor:
        states = source.states[:, :length]
        outputs = EncoderOutput(last_hidden_state=states, attention_mask=of_output)
        arguments = decoder_inputs(model, outputs, seen, ids, None, positions)
        with torch.no_grad():
            return model(**arguments, use_cache=False).logits  # type: ignore[no-any-return]

    try:
        whole, hidden = logits(None), logits(half)
        if not torch.equal(whole, hidden):
            # a model that maps samples to slots takes these slots for samples, and hides others
            shorter = logits(None, length=3)
            effect, distance = ((hidden - x).abs().max() for x in (whole, shorter))
            return "hides" if distance <= _NEAR * effect else "other"
    except Exception as error:  # stock's forward may raise anything
        raise TraceError(f"its decoder raised {described(error)}") from None
    with contextlib.suppress(Exception):  # as above: the model takes no mask there
        if not torch.equal(whole, logits(None, half)):
            return "output"
    # encoders of sound have several samples for one slot of their output, and may map the mask
    for samples in _SAMPLES:
        samples_of_half = torch.arange(6 * samples, device=model.device)[None] < 3 * samples
        with contextlib.suppress(Exception):  # as above: the model takes no mask of this length
            if not torch.equal(whole, logits(samples_of_half.long())):
                return "other"
    return "ignores"
