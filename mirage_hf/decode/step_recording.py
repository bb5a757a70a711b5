"""Record a step of a model, as its own forward runs it, over a block of fake tensors.

It is recorded as `CapturedForward` runs it. So masks, positions, rings and the cache are the same.

A step that verifies drafts is recorded likewise. The forward takes one token of each row, and each
new token of a text is a row (`Drafts.as_rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mirage_hf.decode.cache_block import CacheBlock
from mirage_hf.decode.cache_exchange import of_self_attention, read_cache
from mirage_hf.decode.control import Control
from mirage_hf.decode.drafts import Drafts
from mirage_hf.decode.masks import MaskPlan
from mirage_hf.decode.recorded_inputs import (
    PLAIN_MASK,
    mask_inputs,
    plain_mask,
    step_inputs,
    tensors_of,
)
from mirage_hf.decode.rings import GRAIN
from mirage_hf.decode.routing import cache_name
from mirage_hf.decode.sources import (
    MASK,
    SEEN,
    EncoderOutput,
    Source,
    decoder_inputs,
    follows_encoder,
    new_cache,
    source_keys,
    source_width,
)
from mirage_hf.decode.step import CapturedForward
from mirage_hf.decode.step_forms import FORMS, Form
from mirage_hf.errors import described
from mirage_hf.trace.attention import attention_as_one_node, masked_keys
from mirage_hf.trace.coded_linear import coded_linears_as_one_node
from mirage_hf.trace.experts.fixed_shape import experts_of_fixed_shape
from mirage_hf.trace.experts.op import experts_as_one_node
from mirage_hf.trace.fake_mode import FakeOnceMode
from mirage_hf.trace.host_values import HostValues
from mirage_hf.trace.record import (
    Recording,
    TraceError,
    host_reads_named,
    numbers_of,
    record,
)
from mirage_hf.trace.row_values import RowValues
from mirage_hf.trace.sizes import generalized, has_mixed_sizes
from mirage_hf.trace.torch_functions import torch_functions_only

#: Tokens of the prompt that fills the cache before a step is recorded.
_PROMPT = 4


def record_step(
    model: Any,
    masks: MaskPlan,
    batch: int,
    windows: Sequence[int | None],
    sizes: tuple[int, int],
    axes: int = 0,
    *,
    gives_positions: bool = True,
    mask_in_output: bool = False,
    forms: Sequence[Form] = FORMS,
    tokens: int | None = None,
) -> Recording:
    """Record a model's step for caches of any number of slots.

    Args:
        model: The model, whose modules are stock's.
        masks: Its masks.
        batch: The number of rows.
        windows: For each layer the window that its cache slides over.
        sizes: Two capacities of caches. The same layers use rings in both.
        axes: The axes of its positions.
        gives_positions: Whether its steps are given positions.
        mask_in_output: Whether it reads the mask in the output of its encoder.
        forms: The forms to try. The first one in which the step can be recorded counts.
        tokens: The new tokens of each row in a step that verifies drafts. None: one, as all rows
            have the same length.

    Raises:
        TraceError: The step cannot be recorded. The error of the first form is raised.
    """
    with (
        closing(FakeOnceMode()) as mode,
        attention_as_one_node(),
        torch_functions_only(),
        coded_linears_as_one_node(model) as coded,
        experts_of_fixed_shape(model),
        experts_as_one_node(),
    ):
        with (
            _errors_named("with an empty cache of transformers"),
            mode,
            torch.no_grad(),
            host_reads_named(),
        ):
            prompt = _fake_prompt(model, batch)
        with_source = prompt.source is not None
        smallest = sizes[0], GRAIN * with_source
        others = [(sizes[1], smallest[1])]
        # slots of the encoder's output must not be taken for slots of the cache
        source_size = next(n * GRAIN for n in (2, 3, 4) if n * GRAIN not in sizes)
        if with_source:
            others.append((sizes[0], source_size))

        def at(
            capacity: int, source_slots: int, form: Form, only_inputs: bool = False
        ) -> Recording:
            with _errors_named("over a cache with fixed slots"):
                with mode:
                    block = CacheBlock(
                        batch, capacity, tuple(windows), model.device, axes, source_slots
                    )
                    _fill(block, prompt)
                    rows, logits = block.control, block.logits
                    if tokens is not None:
                        for key, state in block.states.items():  # each row has its own at first
                            block.states[key] = state.repeat_interleave(tokens, 0)
                        drafts = Drafts.allocate(batch, tokens, block.logits, None)
                        rows, logits = drafts.as_rows(rows), drafts.logits
                    step = CapturedForward(
                        model,
                        block,
                        masks,
                        logits_to_keep=False,
                        graphs=False,
                        graph_key=None,
                        gives_positions=gives_positions,
                        rows=rows,
                        logits=logits,
                    )
                step.mask_in_output = mask_in_output
                return _record(step, mode, form, only_inputs)

        def of_all_sizes(form: Form) -> Recording:
            recording = at(*smallest, form)
            grows = _grows(recording, smallest[0])
            for other in others:
                second = at(*other, form, only_inputs=not grows)
                if not grows:
                    second = replace(recording, inputs=second.inputs)
                recording = generalized(recording, second, (smallest, other))
            if has_mixed_sizes(recording):  # a product of two sizes is not linear in both
                both = sizes[1], source_size
                recording = generalized(recording, at(*both, form), (both, both))
            return recording

        why = ""  # an error itself would keep the caches of its stack alive
        for form in forms:
            try:
                return replace(of_all_sizes(form), coded=coded)
            except TraceError as error:
                why = why or str(error)
    raise TraceError(why)


def _grows(recording: Recording, capacity: int) -> bool:
    """Return whether a recording may differ at another capacity.

    Models that keep only states have no keys. If none of their ops knows the capacity, one
    recording is enough.
    """
    if any(name.startswith(("keys.", "source")) for name in recording.inputs):
        return True
    for node in recording.nodes:
        known = [recording.meta(x) for x in node.operands] + node.outputs
        if any(meta is not None and capacity in meta.shape for meta in known):
            return True
        if capacity in numbers_of(node):
            return True
    return False


@contextmanager
def _errors_named(where: str) -> Iterator[None]:
    """Turn whatever a forward raises over a cache into a TraceError that says over which."""
    try:
        yield
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(f"{where} its forward raised {described(error)}") from None


@dataclass(frozen=True)
class _FakePrompt:
    """A short prompt of fake tensors: stock's cache, the last logits, and the encoder's output."""

    cache: Any
    logits: Tensor
    source: Source | None


def _fake_prompt(model: Any, batch: int) -> _FakePrompt:
    """Run stock's prefill of a short prompt on fake tensors."""
    cache = new_cache(model)
    ids = torch.zeros(batch, _PROMPT, dtype=torch.long, device=model.device)
    if not follows_encoder(model):
        logits = model(input_ids=ids, use_cache=True, **{cache_name(model): cache}).logits
        return _FakePrompt(cache, logits[:, -1], None)
    width = source_width(model)
    states = torch.zeros(batch, _PROMPT, width, dtype=model.dtype, device=model.device)
    outputs = EncoderOutput(last_hidden_state=states)
    positions = torch.arange(_PROMPT, device=model.device).expand(batch, -1)
    arguments = decoder_inputs(model, outputs, None, ids, None, positions)
    logits = model(**arguments, past_key_values=cache, use_cache=True).logits
    return _FakePrompt(cache, logits[:, -1], Source(states, None))


def _fill(block: CacheBlock, prompt: _FakePrompt) -> None:
    """Copy what a prompt of fake tensors left into a block."""
    with torch.no_grad():
        read_cache(block, prompt.cache, _PROMPT)
        if prompt.source is not None:
            prompt.source.store(block, prompt.cache)
        block.set_logits(prompt.logits)


def _record(step: CapturedForward, mode: Any, form: Form, only_inputs: bool) -> Recording:
    """Record a step over a filled block.

    With `only_inputs`, nothing runs, and the recording has no nodes.
    """
    host, block = HostValues(), step.block
    control = step.rows
    with mode, torch.no_grad():
        masks: Any = step.masks_now()
        if form.plain_mask:
            masks = plain_mask(control)
        if form.bool_masks:
            masks = _of_each(masks, lambda mask: mask == 0)
    if form.host_length:
        seen = host.symbol(block.control.length, _PROMPT)
        for layer in of_self_attention(step.cache).layers:
            layer.seen = seen
    named = {PLAIN_MASK: masks} if form.plain_mask else masks
    of_rows = {**tensors_of(control), "logits": step.logits}
    inputs = step_inputs(block) | of_rows | mask_inputs(named, step.ring_slots)
    hidden: dict[int, Callable[[], Tensor]] = {}
    if form.hides_unused:
        hidden[block.capacity] = lambda: control.slots > block.control.length
    if form.hides_source:  # rows of a call see the same slots, or the check finds a difference
        step.gives_source_mask = False
        hidden[block.source_slots] = lambda: block.sources[SEEN][:1] == 0
    run = partial(step.run, masks)
    if form.newest_last:
        run = partial(_run_newest_last, step, masks)
    row_values = None
    if control is not block.control:  # rows are of several lengths
        with_rows = [x for name, x in inputs.items() if name not in Control.FOR_ALL_ROWS]
        row_values = RowValues(block.control.length, control.length, with_rows)
    with masked_keys(source_keys(block), block.sources.get(MASK)):
        return record(
            (lambda: None) if only_inputs else run,
            inputs,
            mode,
            block.control.length,
            host,
            hidden,
            row_values,
        )


def _run_newest_last(step: CapturedForward, masks: Any) -> None:
    """Run a step that gets the keys of unused slots first, and the newest key last."""
    block = step.block
    if any(block.rings):
        raise TraceError("it counts the keys of a layer, but sliding layers share their slots")
    order = (block.control.slots[0] + block.control.length + 1) % block.capacity
    for layer in of_self_attention(step.cache).layers:
        layer.order = order
    step.run(_of_each(masks, lambda mask: mask.index_select(-1, order)))


def _of_each(masks: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return what a function gives for each mask of a step."""
    if isinstance(masks, dict):
        return {name: _of_each(mask, function) for name, mask in masks.items()}
    return None if masks is None else function(masks)
