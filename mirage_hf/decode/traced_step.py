"""The traced step: a model's own forward, recorded once, with kernels in place of its products.

It is recorded as `CapturedForward` runs it, over a block of fake tensors. So masks, positions,
rings and the cache are the same. What no kernel runs, runs as the torch op that was recorded.

A step that verifies drafts is recorded likewise. The forward takes one token of each row, and each
new token of a text is a row (`Drafts.as_rows`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mirage_hf.decode.cache_block import CacheBlock
from mirage_hf.decode.cache_exchange import of_self_attention, read_cache
from mirage_hf.decode.choosing import Chooser
from mirage_hf.decode.control import Control
from mirage_hf.decode.drafts import Drafts
from mirage_hf.decode.masks import MaskPlan
from mirage_hf.decode.rings import GRAIN, Ring, bucket, rings_of
from mirage_hf.decode.routing import cache_name
from mirage_hf.decode.sources import (
    MASK,
    SEEN,
    EncoderOutput,
    MaskUse,
    Source,
    decoder_inputs,
    follows_encoder,
    new_cache,
    source_keys,
    source_width,
)
from mirage_hf.decode.step import CapturedForward, Step, step_masks
from mirage_hf.errors import described
from mirage_hf.layers.part import StepShape
from mirage_hf.layers.step import TokenBounds
from mirage_hf.trace.attention import attention_as_one_node, masked_keys
from mirage_hf.trace.coded_linear import coded_linears_as_one_node, is_replaced
from mirage_hf.trace.experts import experts_as_one_node
from mirage_hf.trace.fixed_experts import experts_of_fixed_shape
from mirage_hf.trace.host_values import HostValues
from mirage_hf.trace.plan import StepPlan
from mirage_hf.trace.record import (
    FakeOnceMode,
    Recording,
    TraceError,
    host_reads_named,
    numbers_of,
    record,
)
from mirage_hf.trace.row_values import RowValues
from mirage_hf.trace.sizes import Size, Sizes, generalized, has_mixed_sizes, shape_at
from mirage_hf.trace.successive import kept_name
from mirage_hf.trace.torch_functions import torch_functions_only

#: Tokens of the prompt that fills the cache before a step is recorded.
_PROMPT = 4

#: The names of inputs that each step makes anew.
_MADE_BY_STEP = ("mask.", "ring_slot.")
#: The name of the mask that has a number for each slot.
PLAIN_MASK = "plain"

Rings = tuple[Ring | None, ...]


@dataclass(frozen=True)
class Form:
    """How a model's forward is given what a step knows.

    Attributes:
        host_length: Whether it reads the number of tokens in the cache as an integer.
        plain_mask: Whether it takes a mask (batch, slots) of 0 and 1, and makes its own of it.
        bool_masks: Whether its masks are true for slots that a row sees, in place of 0 and −inf.
        hides_unused: Whether each softmax over the slots of the cache hides those without a token,
            because the model makes no mask in a step.
        hides_source: Likewise for the slots of the encoder's output. The model gets no mask for
            them, because it would map it to other slots.
        newest_last: Whether it gets keys in such an order that the newest comes last, because it
            takes their number for the length of the text.
    """

    host_length: bool = False
    plain_mask: bool = False
    bool_masks: bool = False
    hides_unused: bool = False
    hides_source: bool = False
    newest_last: bool = False


#: The forms in which a step is recorded, until one of them can be recorded and gives the logits of
#: stock.
FORMS = (
    Form(),
    Form(host_length=True),
    Form(plain_mask=True),
    Form(bool_masks=True),
    Form(hides_unused=True),
    Form(hides_unused=True, host_length=True),
    Form(hides_source=True),
    Form(newest_last=True),
)


@dataclass(frozen=True)
class TracedSteps:
    """The traced steps of one model.

    Attributes:
        plans: By the number of rows and the layers' rings.
        kernels: How many different kernels there are.
        bytes_read: Bytes of weights that searched kernels read in a step, and of all weights.
        axes: The axes of the model's positions, 0 if positions have none.
        mask_use: What an encoder-decoder model does with `attention_mask` in steps.
        gives_positions: Whether the model's own methods give its steps positions.
        uses_rings: Whether steps over rings are stock's, too. If not, blocks have none.
        form: The form in which they were recorded.
        drafting: The plans of steps that verify drafts, by shape. Their blocks have no rings.
    """

    plans: dict[tuple[int, Rings], StepPlan]
    kernels: int
    bytes_read: tuple[int, int]
    axes: int = 0
    mask_use: MaskUse = "hides"
    gives_positions: bool = True
    uses_rings: bool = True
    form: Form = FORMS[0]
    drafting: dict[StepShape, StepPlan] = field(default_factory=dict)

    @property
    def all_plans(self) -> list[StepPlan]:
        """All plans."""
        return [*self.plans.values(), *self.drafting.values()]

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        """The shapes of the steps that verify drafts."""
        return tuple(self.drafting)

    @property
    def keeps_states(self) -> bool:
        """Whether layers keep states besides keys and values."""
        return any(state_names(plan.recording) for plan in self.all_plans)

    @property
    def call_options(self) -> dict[str, Any]:
        """What `plan_call` takes of a model whose steps were traced."""
        names = ("axes", "mask_use", "uses_rings", "only_traced")
        return {name: getattr(self, name) for name in names}

    def bytes_read_in(self, shape: StepShape) -> int:
        """Return the bytes of weights that a step reads."""
        plan = self.drafting_plan(shape)
        assert plan is not None
        return plan.weight_bytes

    def products_us(self, shape: StepShape) -> float | None:
        """Return None: what runs as torch ops was not measured."""
        return None

    @property
    def reach(self) -> float:
        """The greatest length of a text for which a step runs the recorded ops."""
        return min(plan.recording.reach for plan in self.all_plans)

    @property
    def only_traced(self) -> bool:
        """Whether the model's own forward over our cache need not be stock's."""
        return self.form != FORMS[0]

    @property
    def most_slots(self) -> float:
        """The greatest capacity of a cache whose slots have a row in all tables of the model."""
        return min(most_slots(plan.recording) for plan in self.all_plans)

    def reads_replaced_codes(self) -> bool:
        """Return whether some linear has other codes now than those that the steps read."""
        return any(is_replaced(x) for plan in self.all_plans for x in plan.recording.coded)

    @property
    def weights(self) -> Iterator[Tensor]:
        """The parameters that the steps read."""
        for plan in self.all_plans:
            for held in plan.recording.held_tensors:
                if isinstance(held, nn.Parameter):
                    yield held

    def plan_for(
        self, block: CacheBlock, shape: StepShape, drafts: Drafts | None
    ) -> StepPlan | None:
        """Return the plan for a block, None if none was traced for its rows or rings.

        Args:
            block: Memory of a call.
            shape: The shape of the step.
            drafts: State of the drafts, if the call drafts.
        """
        if drafts is not None:
            return self.drafting_plan(shape)
        return self.plans.get((block.batch, tuple(block.rings)))

    def drafting_plan(self, shape: StepShape) -> StepPlan | None:
        """Return the plan of steps whose rows may have several lengths. One row has one length."""
        plan = self.drafting.get(shape)
        if plan is not None or shape.rows > 1:
            return plan
        return next(
            (p for (rows, rings), p in self.plans.items() if rows == 1 and not any(rings)), None
        )


class TracedStep(Step):
    """A recorded forward, with kernels in place of some of its ops."""

    def __init__(
        self,
        plan: StepPlan,
        block: CacheBlock,
        masks: MaskPlan,
        drafts: Drafts | None = None,
        *,
        graphs: bool,
        graph_key: object,
    ):
        super().__init__(block, graphs, graph_key)
        self.plan, self.masks, self.drafts = plan, masks, drafts
        self._inputs = step_inputs(block) | {"logits": self.logits}
        self._of_tokens = {} if drafts is None else self._bounds_of_tokens(drafts)
        #: The states after each token (tokens, batch, …) by name. A replayed step has its own.
        self._kept: dict[str, Tensor] = {}
        self._run: Callable[[], None] | None = None
        self._bool_masks = {n for n, x in plan.recording.inputs.items() if x.dtype == torch.bool}

    @property
    def logits(self) -> Tensor:
        """The logits that the step leaves."""
        return self.block.logits if self.drafts is None else self.drafts.logits

    def held(self) -> Any:
        """Return what a captured graph reads besides the block and the model."""
        return self._run, self._of_tokens, self._kept

    def _forward(self) -> None:
        if self._run is None:
            self._keep_states()
            self._run = self.plan.bind(self._inputs, sizes_of(self.block))
        with torch.no_grad():
            rows = self.block.control
            if self.drafts is not None:
                rows = self.drafts.as_rows(rows)
                self._inputs.update(tensors_of(rows))
            if self.plan.reads_masks():
                masks, slots = step_masks(self.masks, self.block, rows)
                if f"mask.{PLAIN_MASK}" in self.plan.recording.inputs:
                    masks = {PLAIN_MASK: plain_mask(rows)}
                inputs = mask_inputs(masks, slots)
                for name in inputs.keys() & self._bool_masks:
                    inputs[name] = inputs[name] == 0
                self._inputs.update(inputs)
            self._inputs.update(self._bounds())
            self._run()

    def _to_token(self, chooser: Chooser) -> None:
        super()._to_token(chooser)
        if self.drafts is not None:
            self.settle(self.drafts.report[:, -2])

    def settle(self, taken: Tensor) -> None:
        """Let the states of each row be those after the tokens that it takes.

        Args:
            taken: (batch,): how many of the tokens that were fed a row takes.
        """
        rows = torch.arange(len(taken), device=taken.device)
        index = (taken - 1).clamp_min(0) * len(taken) + rows
        for name, kept in self._kept.items():
            torch.index_select(kept.flatten(0, 1), 0, index, out=self._inputs[name])

    def allocate_kept(self, count: int) -> bool:
        """Make memory that keeps the states of a step of one token so many times.

        Returns:
            Whether there was less, so that graphs which use it are no longer right.
        """
        if self._kept and len(next(iter(self._kept.values()))) >= count:
            return False
        for (layer, name), state in self.block.states.items():
            with torch.inference_mode(False):
                self._kept[f"{name}.{layer}"] = state.new_zeros((count, *state.shape))
        return True

    def keep(self, place: int) -> None:
        """Keep the present states at a place, if there is memory for them."""
        for name, kept in self._kept.items():
            kept[place].copy_(self._inputs[name])

    def _keep_states(self) -> None:
        """Make memory for the states after each token."""
        moves = self.plan.recording.moves
        for name in {*moves.values()} - {*moves}:  # what the first token reads
            state = self._inputs[name]
            tokens = sum(kept.startswith(f"{name}@") for kept in moves)
            with torch.inference_mode(False):
                kept = state.new_zeros((tokens, *state.shape))
            self._kept[name] = kept
            self._inputs |= {kept_name(name, token): x for token, x in enumerate(kept)}

    def _bounds(self) -> dict[str, Tensor]:
        """Return the slots that attention's kernels read and write, by layer."""
        block, windows = self.block, dict(self.masks.windows)
        made: dict[Any, dict[str, Tensor]] = {}
        bounds: dict[str, Tensor] = {}
        for one in self.plan.by_kernels:
            ring = block.rings[one.layer]
            window = windows[one.mask.removeprefix("mask.")]  # the mask that attention was given
            if (ring, window) not in made:
                made[ring, window] = self._bounds_of(ring, window)
            bounds |= {f"{name}.{one.layer}": x for name, x in made[ring, window].items()}
        return bounds

    def _bounds_of(self, ring: Ring | None, window: int | None) -> dict[str, Tensor]:
        """Return the bounds of attention's program by name (batch, 1), or (batch, tokens)."""
        control, drafts = self.block.control, self.drafts
        if ring is not None:
            slot = ring.slot(control)
            lo = torch.zeros_like(slot)
        else:
            slot, lo = control.length.expand_as(control.lowest), control.lowest
            if drafts is not None:
                slot = slot + drafts.ahead
            if window is not None:
                lo = torch.maximum(lo, slot - window + 1)
        bounds = {"lo": lo, "slot": slot}
        bounds = {name: x.to(torch.int32) for name, x in bounds.items()}
        if (of_tokens := self._of_tokens.get(window)) is not None:
            if drafts is not None and window is not None:
                of_tokens.first.copy_((slot + drafts.number - window + 1).clamp_min(0))
            names = ("first", "last", "new_first", "new_last")
            bounds |= {name: getattr(of_tokens, name) for name in names}
        return bounds

    def _bounds_of_tokens(self, drafts: Drafts) -> dict[int | None, TokenBounds]:
        """Return what each token sees, by window. There is nothing for steps of one token."""
        if drafts.tokens.shape[1] == 1:
            return {}
        return {
            window: TokenBounds.of(
                torch.zeros_like(drafts.tokens, dtype=torch.int32),
                window,
                self.block.capacity,
                windowed=window is not None,
            )
            for _, window in self.masks.windows
        }


def mask_inputs(masks: Any, ring_slots: Mapping[Ring, Tensor]) -> dict[str, Tensor]:
    """Return the masks of a step and the slots in rings by the names that recordings have."""
    named = masks if isinstance(masks, dict) else {"": masks}
    inputs = {f"mask.{kind}": x for kind, x in named.items() if x is not None}
    return inputs | {f"ring_slot.{ring.window}": slot for ring, slot in ring_slots.items()}


def plain_mask(control: Control) -> Tensor:
    """Return a mask (batch, slots): 1 for the tokens in the cache and the new one, else 0."""
    return ((control.slots <= control.length) & (control.slots >= control.lowest)).long()


def why_no_traced_step(
    traced: TracedSteps, block: CacheBlock, shape: StepShape, drafts: Drafts | None = None
) -> str:
    """Return why steps over a block must run the model's own forward, or "" if a trace serves."""
    step_plan = traced.plan_for(block, shape, drafts)
    if step_plan is None and drafts is not None:
        return f"no traced steps of {shape}"
    if step_plan is None:
        return "sliding windows of several lengths, of which the cache holds only some in rings"
    recorded, inputs = step_plan.recording.inputs, step_inputs(block)
    if drafts is not None:
        inputs |= {**tensors_of(drafts.as_rows(block.control)), "logits": drafts.logits}
    moves = step_plan.recording.moves
    wanted = {
        name: x
        for name, x in recorded.items()
        if not name.startswith(_MADE_BY_STEP) and name not in moves
    }
    if inputs.keys() != wanted.keys():
        return "layers without keys of their own"
    for name, x in inputs.items():
        if (shape_at(wanted[name], sizes_of(block)), wanted[name].dtype) != (x.shape, x.dtype):
            return f"{name} of {tuple(x.shape)}, {x.dtype}"
    return ""


def sizes_of(block: CacheBlock) -> Sizes:
    """Return the sizes of a block that integers in recordings depend on."""
    return block.capacity, block.source_slots


def tensors_of(control: Control) -> dict[str, Tensor]:
    """Return the tensors of a control by the names that recordings have."""
    return {name: x for name, x in vars(control).items() if isinstance(x, Tensor)}


def step_inputs(block: CacheBlock) -> dict[str, Tensor]:
    """Return the tensors that a step reads and writes, by the names that recordings have."""
    inputs = tensors_of(block.control)
    for layer, keys in block.keys.items():
        inputs |= {f"keys.{layer}": keys, f"values.{layer}": block.values[layer]}
    inputs |= {f"indexer_keys.{layer}": x for layer, x in block.indexer_keys.items()}
    inputs |= {f"{name}.{layer}": x for (layer, name), x in block.states.items()}
    for number, (_, slab) in enumerate(block.ring_slabs):
        inputs[f"ring.{number}"] = slab
    return inputs | block.sources | {"logits": block.logits}


def state_names(recording: Recording) -> list[str]:
    """Return the names of the states besides keys and values."""
    return [name for name in recording.inputs if name.startswith(("conv.", "recurrent."))]


def rings_variants(
    windows: Sequence[int | None],
) -> list[tuple[Rings, tuple[int | None, ...], tuple[int, int]]]:
    """Return the rings that a model's layers may lie in: none, and those of long caches.

    Each choice comes with the windows that give these rings, and with two capacities that do.
    """
    none = (None,) * len(windows)
    variants: list[tuple[Rings, tuple[int | None, ...], tuple[int, int]]] = [
        (none, none, (2 * GRAIN, 3 * GRAIN))
    ]
    lengths = [w for w in windows if w is not None]
    if lengths:
        sizes = bucket(max(lengths) + 2 * GRAIN), bucket(max(lengths) + 8 * GRAIN)
        rings, others = (tuple(rings_of(tuple(windows), size)) for size in sizes)
        if rings == others:
            variants.append((rings, tuple(windows), sizes))
    return variants


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
        sizes: Two capacities at which its layers lie in the same rings.
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


def most_slots(recording: Recording) -> float:
    """Return the greatest capacity at which all slices by it lie in the tensors that they slice."""
    most = math.inf
    for node in recording.nodes:
        if node.name != "aten.slice" or len(node.args) < 4:
            continue
        sliced, dim, _, end = node.args[:4]
        count = recording.meta(sliced).shape[dim]
        if isinstance(end, Size) and type(count) is int and end.factors[0] > 0:
            most = min(most, (count - end.rest) // end.factors[0])
    return most
