"""Prompts by kernels, and short ones in a CUDA graph over a bucket of tokens, so that the host's work is done once for many prompts.

Where a model's steps are all by kernels so are its prompts, but for products and attention, which are the library's; elsewhere HF's own
forward runs, or is captured. A chain of ours is only kept if it gave what HF's forward gives.

A prompt is filled up on the right: what is causal does not see later tokens, and the logits are those of its own last token. Keys of
the filling are cleared. For the chain padding on the left is moved there, too, so that no row needs a mask; the keys go where they belong.
Prompts that a sliding window cuts are for the chain as well: filled up, HF's forward would leave the filling's keys in rings.

The first prompt of a model runs HF's forward as it is; later ones the chain, and the second of a bucket is captured, where it is short:
what the GPU does for a long one takes longer than the host's launches. So there are four ways, of which `Session.prefill` takes the first
that can be:

1. The chain captured, replayed before the host has looked at the model (`Prompts.graph`, `at_once`): where its weights lie where they lay.
2. Captured, the chain or HF's forward: from the second prompt of a bucket on (`CacheBlock.prompts` counts them). What cannot be captured is
   not tried again in that state of the model: `_refused` says it of both, `_refused_by_kernels` of the chain.
3. The chain, called (`Prompts.by_kernels`): not the first prompt of a batch size in a state of the model (`_first`), and not once it was
   found to differ (`_checked`, by kind of shape).
4. HF's forward, called.

Only wanting memory is no refusal: it is tried again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mirage_hf.decode.cache import CacheBlock, Ring
from mirage_hf.decode.graphs import capture
from mirage_hf.decode.program import MaskPlan
from mirage_hf.errors import MirageError, described
from mirage_hf.layers.model_kernels import ModelKernels
from mirage_hf.layers.prefill import PromptInputs, WindowAttention
from mirage_hf.layers.row_chunks import MIN_CHUNK_ROWS

GRAIN, LONG_GRAIN = MIN_CHUNK_ROWS, 256
"""Buckets are multiples of the first; beyond eight times the second, of that: their rows are in fewer pieces then."""
FEW_LAYERS = 16
"""Up to which the roots of the dtypes' precisions bound what rounding explains. Of 32 layers with random adapters (Llama-3.1-8B, H200) 9.2%
of the size were seen, in bfloat16, of which the root is 8.8%."""
MOST_TOKENS = 2048
"""Tokens of a batch beyond which nothing is captured. Measured at 128 only (Llama-3.2-1B, H200: the prefill's kernels take about
2 ms, the first token 9.6 ms without a graph and 5.6 with one); where the GPU takes as long as the host is an estimate."""
CHECKED = 3 * GRAIN
"""Tokens of the prompt on which a chain is compared with HF's forward before it is called, where the prompt of the call has more than
MOST_TOKENS and goes beyond no window."""


@dataclass(frozen=True)
class Shape:
    """What tells programs of prompts apart."""

    batch: int
    tokens: int
    """Filled up: a multiple of GRAIN."""
    padded: bool
    """Whether rows have padding on the left."""
    cuts: tuple[int | None, ...]
    """Of each layer the window that hides some of the tokens from others, None where none does."""
    beyond: int
    """The least number of tokens that goes beyond every window and ring that these go beyond; 0 where there is none."""

    @classmethod
    def of(cls, length: int, block: CacheBlock, masks: MaskPlan) -> Shape | None:
        """The shape of a block's prompts of so many tokens; None where they do not fit in, filled up."""
        tokens = _filled_up(length)
        if tokens > block.capacity:
            return None
        cuts = masks.cutting(tokens, len(block.windows))
        around = [ring.window for ring in block.rings if ring is not None and tokens > ring.spare]
        return cls(
            block.batch,
            tokens,
            block.lowest is not None,
            cuts,
            max([*(w + 1 for w in cuts if w is not None), *around], default=0),
        )

    @property
    def few(self) -> bool:
        """Whether the host takes longer than the GPU, so that capturing them pays."""
        return self.batch * self.tokens <= MOST_TOKENS

    @property
    def plain(self) -> bool:
        """Whether HF's forward of prompts that are filled up leaves what it leaves of those that are not."""
        return not self.padded and not self.beyond

    @property
    def kind(self) -> Shape:
        """What is equal of shapes that one check is enough for."""
        return replace(self, tokens=0)

    @property
    def checked(self) -> int:
        """Tokens of the prompt on which a chain is compared with HF's forward before it is called."""
        return self.tokens if self.few else min(self.tokens, _filled_up(max(CHECKED, self.beyond)))


def _filled_up(length: int) -> int:
    grain = GRAIN if length <= 8 * LONG_GRAIN else LONG_GRAIN
    return -(-length // grain) * grain


@dataclass(frozen=True)
class Filled:
    """A batch's prompts, filled up on the right: what a chain reads, or HF's forward where no row has padding."""

    ids: Tensor
    """(batch, bucket), every row from its own first token on."""
    last: Tensor
    """(batch,): the index of each row's last token."""
    sources: Tensor | None
    """(batch, bucket): of each slot the token whose key goes there, where rows have left padding; None where token n goes to slot n."""
    around: Mapping[Ring, Tensor]
    """The same (batch, slots but the spare one) of rings with fewer slots than the prompt has tokens."""

    @classmethod
    def allocate(cls, block: CacheBlock, tokens: int, padded: bool) -> Filled:
        """Room for prompts of so many tokens, filling included."""
        with torch.inference_mode(False):

            def ints(*dims: int) -> Tensor:
                return torch.zeros(dims, dtype=torch.long, device=block.device)

            around = {
                ring: ints(block.batch, ring.spare)
                for ring in block.rings
                if ring is not None and tokens > ring.spare
            }
            return cls(
                ints(block.batch, tokens),
                torch.full((block.batch,), tokens - 1, dtype=torch.long, device=block.device),
                ints(block.batch, tokens) if padded else None,
                around,
            )

    def take(self, input_ids: Tensor, padding: Tensor | None) -> None:
        """Put prompts (batch, length) there. `padding`: of each row (batch, 1), where there is any."""
        length, tokens = input_ids.shape[1], self.ids.shape[1]
        # 0 · NaN would reach the prompt from a key behind it: nothing that other calls have left, and no token that this one has not
        if padding is None:
            self.ids[:, :length].copy_(input_ids)
            self.ids[:, length:].copy_(input_ids[:, -1:].expand(-1, tokens - length))
            self.last.fill_(length - 1)
        else:
            assert self.sources is not None
            slots = torch.arange(tokens, device=self.ids.device)
            self.ids.copy_(input_ids.gather(1, (slots + padding).clamp_max_(length - 1)))
            self.last.copy_(length - 1 - padding[:, 0])
            self.sources.copy_((slots - padding).clamp_min_(0))
        for ring, sources in self.around.items():
            own = self.last[:, None] + 1  # a ring counts from a row's own first token on
            sources.copy_(ring.held(own, torch.zeros_like(own)).clamp_min_(0))

    def sources_of(self, ring: Ring | None) -> Tensor | None:
        """Of the first slots of a layer the tokens (batch, slots) whose keys go there, None where token n goes to slot n."""
        return self.sources if ring is None else self.around.get(ring)


@dataclass(frozen=True)
class PrefillGraph:
    """A captured prefill and what it reads."""

    graph: Any
    prompt: Filled
    addresses: tuple[int, ...] | None
    """Of the weights that it reads by kernels; None of a capture of HF's forward."""
    held: Any
    """What the graph reads besides."""
    layers: frozenset[int]
    """Those whose keys and values it writes."""

    @property
    def by_kernels(self) -> bool:
        return self.addresses is not None

    def reads_what_is_there(self, steps: ModelKernels | None) -> bool:
        """Whether all that the graph reads is known to lie where it lay, so that it may be replayed whatever was done to the model, if
        nobody sees what comes of it. `steps`: those by which it is."""
        return self.by_kernels and steps is not None and _addresses(steps) == self.addresses

    def run(self, input_ids: Tensor, block: CacheBlock) -> None:
        """Prefill a prompt (batch, length) into the block that the graph was captured for, logits included."""
        self.prompt.take(input_ids, block.lowest)
        block.written = set(
            self.layers
        )  # no forward says so, and one that failed may have left less there
        self.graph.replay()


def can_call(device: torch.device) -> bool:
    """Whether the kernels of prompts are worth calling one by one."""
    return device.type == "cuda"


class Prompts:
    """The prompts of one model by kernels or captured: which there are, and which cannot be. `count` is told what happens to each."""

    def __init__(self, count: Callable[[str], None]):
        self.count = count
        self._refused: dict[Shape, object] = {}
        self._refused_by_kernels: dict[Shape, object] = {}
        """The state of the model that was refused."""
        self._first: dict[int, object] = {}
        """By batch the last state of the model whose first prompt has been left to HF's forward."""
        self._checked: dict[Shape, tuple[object, bool]] = {}
        """By kind of shape a state of the model, and whether its prompts may be called."""

    def by_kernels(
        self,
        model: Any,
        block: CacheBlock,
        input_ids: Tensor,
        shape: Shape,
        steps: ModelKernels,
        able: Callable[[], ModelKernels | None],
        key: object,
    ) -> bool:
        """Prefill a prompt (batch, length), filled up to `shape`, by kernels without a graph, logits included. False where HF's forward is
        to run, whatever failed, and for the first prompt of a state `key` of the model, as for that nothing need be made ready."""
        batch, kind = shape.batch, shape.kind
        known, good = self._checked.get(kind, (None, False))
        if known == key and not good:
            return False
        if known != key and self._first.get(batch) != key:
            self._first[batch] = key
            return False
        try:
            _make_room(block, steps)
            if able() is not steps:
                return False
            if known != key:
                _check(model, block, replace(shape, tokens=shape.checked), steps)
            prompt = Filled.allocate(block, shape.tokens, shape.padded)
            prompt.take(input_ids, block.lowest)
            run, _ = _chain(steps, block, prompt, shape.cuts)
            block.dirty, block.written = (
                max(block.dirty, shape.tokens),
                set(range(len(steps.layers))),
            )
            run()
        except torch.OutOfMemoryError:
            self.count("not by kernels: out of memory")  # another time there may be more
            return False
        except Exception as error:  # whatever there is against it, HF's own prefill is the way out
            self.count(f"not by kernels: {described(error)}")
            self._checked[kind] = key, False
            return False
        self._checked[kind] = key, True
        self.count("called, by kernels")
        return True

    def graph(
        self,
        model: Any,
        block: CacheBlock,
        shape: Shape,
        present: ModelKernels | None,
        able: Callable[[], ModelKernels | None],
        key: object,
        at_once: bool,
        own: bool = True,
    ) -> PrefillGraph | None:
        """Return the one that serves prompts of `shape`, captured now if it is the second of them; None where HF's prefill runs. `present`:
        the model's kernels; `able` gives them where they serve this call. `key`: the state of the model. `at_once`: only one that may be
        replayed before anybody has looked at the model. `own`: whether HF's forward may be captured where the shape is a plain one."""
        what = "prefill", shape
        if self._refused.get(shape) == key:
            return None
        graphs = block.graphs_for(key)
        found: PrefillGraph | None = graphs.get(what)
        if found is not None and found.by_kernels and (present is None or present.changed()):
            del graphs[what]
            found = None
        if at_once and (found is None or not found.reads_what_is_there(present)):
            return None
        if found is None:
            found = self._second(model, block, shape, able, key, own and shape.plain)
            if found is None:
                return None
            graphs[what] = found
        self.count("captured, by kernels" if found.by_kernels else "captured")
        return found

    def _second(
        self,
        model: Any,
        block: CacheBlock,
        shape: Shape,
        able: Callable[[], ModelKernels | None],
        key: object,
        own: bool,
    ) -> PrefillGraph | None:
        """A capture, if a prompt of the bucket has run before."""
        block.prompts[shape] += 1
        if block.prompts[shape] < 2 or not block.keys or not block.logits.numel():
            return None
        block.dirty = max(block.dirty, shape.tokens)  # what warming up writes
        steps = None if self._refused_by_kernels.get(shape) == key else able()
        if steps is not None and steps.no_prefill:
            self.count(f"not by kernels: {steps.no_prefill}")
            steps = None
        return self._captured(model, block, shape, steps, key, own)

    def _captured(
        self,
        model: Any,
        block: CacheBlock,
        shape: Shape,
        steps: ModelKernels | None,
        key: object,
        own: bool,
    ) -> PrefillGraph | None:
        """By `steps`; where that cannot be HF's forward, and None where that cannot be captured either."""
        if steps is None and not own:
            return None
        for again in (True, False):
            try:
                return capture_prefill(model, block, shape, steps)
            except (
                Exception
            ) as error:  # whatever there is against this call, HF's own prefill is the way out
                failed = error.with_traceback(None)  # which keeps the memory of what was tried
            if not (again and isinstance(failed, torch.OutOfMemoryError)):
                break
            block.make_room()
        why = f"capture failed ({type(failed).__name__}: {(str(failed) or '-').splitlines()[0]})"
        self.count(f"{'called' if steps is None else 'not by kernels'}: {why}")
        if isinstance(failed, torch.OutOfMemoryError):
            block.drop_graphs()
            block.prompts[shape] = 0  # another time there may be more
            return None
        if steps is None:
            self._refused[shape] = key
            return None
        self._refused_by_kernels[shape] = key
        if isinstance(failed, MirageError):  # what is wrong here is not called either
            self._checked[shape.kind] = key, False
        return self._captured(model, block, shape, None, key, own)


def _random(model: Any, block: CacheBlock, tokens: int) -> Tensor:
    """Prompts (batch, tokens) of tokens that the model has a row for: of others, as a wider head gives, no GPU survives the look-up."""
    generator = torch.Generator().manual_seed(tokens)
    rows = model.get_input_embeddings().weight.shape[0]
    return torch.randint(rows, (block.batch, tokens), generator=generator, device="cpu").to(
        block.device
    )


def _make_room(block: CacheBlock, steps: ModelKernels) -> None:
    """As a prompt's forward would where it is the first of its block, or those before it ended in its midst."""
    if len(block.values) < len(steps.layers):
        for n, layer in enumerate(steps.layers):
            assert layer.prefill is not None
            sizes = layer.prefill.sizes["attention"]
            like = steps.embedding.new_empty(
                (block.batch, sizes["kv_heads"], 0, sizes["head_dim"]), dtype=sizes["dtype"]
            )
            block.claim(n, like, like)
    if not block.logits.numel():
        block.set_logits(steps.embedding.new_zeros((block.batch, steps.vocab)))


def _stock(
    model: Any, block: CacheBlock, ids: Tensor, last: Tensor, padding: Tensor | None = None
) -> tuple[Callable[[], None], Any]:
    """HF's forward of prompts (batch, tokens) into a block that has room for them, and what it reads besides. `last`: (1,), which token's
    logits count; `padding`: of each row (batch, 1), on the left."""
    with torch.inference_mode(False):
        positions, mask = (
            torch.arange(ids.shape[1], device=block.device)[None]
            .expand(ids.shape[0], -1)
            .contiguous(),
            None,
        )
        if padding is not None:
            mask = (positions >= padding).long()
            positions.sub_(padding).clamp_min_(0)

    def run() -> None:
        outputs = model(
            input_ids=ids,
            position_ids=positions,
            past_key_values=block.prefill_cache(),
            use_cache=True,
            attention_mask=mask,
            return_dict=True,
            logits_to_keep=last,
        )
        logits = outputs.logits[:, -1]
        if (logits.shape, logits.dtype) != (block.logits.shape, block.logits.dtype):
            raise RuntimeError(
                f"logits of {tuple(logits.shape)}, {logits.dtype}, for a block that held {tuple(block.logits.shape)}"
            )
        block.logits.copy_(logits)

    return run, positions


def capture_prefill(
    model: Any, block: CacheBlock, shape: Shape, steps: ModelKernels | None = None
) -> PrefillGraph:
    """Capture prompts of `shape` into a block that has held a prompt: by `steps`, or HF's forward.

    Errors: MirageError where the kernels of `steps` do not give what HF's forward gives, or that sees what a prompt is filled up with;
    RuntimeError where nothing can be captured.
    """
    prompt, kept = Filled.allocate(block, shape.tokens, shape.padded), block.logits.clone()
    try:
        if steps is not None:
            run, held = _chain(steps, block, prompt, shape.cuts)
            _compare(model, block, prompt, run)
        else:
            run, held = _stock(model, block, prompt.ids, prompt.last[:1])
            prompt.ids.copy_(_random(model, block, shape.tokens))
            _check_causal(run, block, prompt.ids, prompt.last)
        graph, block.graph_pool = capture(run, block.device, block.graph_pool)
    finally:
        block.logits.copy_(kept)
    layers = block.written if steps is None else range(len(steps.layers))
    return PrefillGraph(
        graph, prompt, None if steps is None else _addresses(steps), held, frozenset(layers)
    )


def _check(model: Any, block: CacheBlock, shape: Shape, steps: ModelKernels) -> None:
    """Errors: MirageError where the kernels of `steps` do not give what HF's forward gives of prompts of that shape."""
    prompt = Filled.allocate(block, shape.tokens, shape.padded)
    block.dirty = max(block.dirty, shape.tokens)
    _compare(model, block, prompt, _chain(steps, block, prompt, shape.cuts)[0])


def _addresses(steps: ModelKernels) -> tuple[int, ...]:
    return tuple([w.data_ptr() for w in steps.weights])


def _chain(
    steps: ModelKernels, block: CacheBlock, prompt: Filled, cuts: Sequence[int | None]
) -> tuple[Callable[[], None], Any]:
    """What runs prompts by kernels and the library, and what it reads besides. `cuts`: each layer's window, where it hides tokens of these
    prompts. Errors: MirageError where there are no kernels."""
    batch, tokens = prompt.ids.shape
    bands = {w: WindowAttention.of(w, tokens, steps.embedding) for w in cuts if w is not None}
    cos, sin = (table.repeat(1, batch, 1)[:, :, None] for table in steps.rotary_tables(tokens))
    kernels = steps.prefill_kernels(batch * tokens)

    def run() -> None:
        layer_inputs = (
            PromptInputs(
                cos[layer.rope_table],
                sin[layer.rope_table],
                block.keys[n],
                block.values[n],
                prompt.sources_of(block.rings[n]),
                None if (cut := cuts[n]) is None else bands[cut],
            )
            for n, layer in enumerate(steps.layers)
        )
        with torch.no_grad():
            steps.run_prompt(kernels, prompt.ids, prompt.last, layer_inputs, block.logits)

    return run, (cos, sin, kernels, bands)


def _compare(model: Any, block: CacheBlock, prompt: Filled, ours: Callable[[], None]) -> None:
    """See that a chain that reads `prompt` gives what HF's forward gives, with padding where it is for that. Errors: MirageError."""
    tokens, padding, kept = prompt.ids.shape[1], None, block.lowest
    if prompt.sources is not None:
        padding = (1 + 7 * torch.arange(block.batch, device=block.device)[:, None]) % (tokens // 2)
    ids = _random(model, block, tokens)
    stock, _ = _stock(model, block, ids, torch.full((1,), tokens - 1, device=block.device), padding)
    block.begin(padding)
    try:
        prompt.take(ids, padding)
        far, allowed = _distance(stock, ours, block, tokens)
    finally:
        block.begin(kept)
    if not far <= allowed:
        raise MirageError(
            f"prefill: logits, keys or values are {far:.2g} of their size away from those of the model's own forward; "
            f"{allowed:.2g} is allowed"
        )


def _check_causal(stock: Callable[[], None], block: CacheBlock, ids: Tensor, last: Tensor) -> None:
    """Models may look ahead: by their config, or because somebody has set is_causal of their attentions."""
    bucket = ids.shape[1]
    length = bucket // 2
    last.fill_(length - 1)

    def filled_up() -> None:
        ids[:, length:] = ids[:, :1]
        stock()

    far, _ = _distance(stock, filled_up, block, length)
    last.fill_(bucket - 1)
    # the same kernels on the same shapes: nothing is rounded otherwise, but where experts are given other numbers of tokens
    if not far <= torch.finfo(block.logits.dtype).eps:
        raise MirageError(
            f"prefill: tokens see what comes after them, logits, keys or values change by {far:.2g} of their size"
        )


def _distance(
    first: Callable[[], None], second: Callable[[], None], block: CacheBlock, tokens: int
) -> tuple[float, float]:
    """How far what two calls leave of `tokens` tokens, padding left out, is apart, of its size, and what rounding may explain."""
    layers = [(memory[n], block.rings[n]) for memory in (block.keys, block.values) for n in memory]
    seen = [
        block.logits,
        *(x[:, :, : tokens if ring is None else min(tokens, ring.spare)] for x, ring in layers),
    ]
    hidden: list[Tensor | None] = [None] * len(seen)
    if block.lowest is not None:
        slots = torch.arange(tokens, device=block.device)
        hidden[1:] = [
            (
                slots < block.lowest
                if ring is None
                else slots[: x.shape[2]] >= tokens - block.lowest
            )[:, None, :, None]
            for x, (_, ring) in zip(seen[1:], layers, strict=True)
        ]
    first()
    want = [x.clone() for x in seen]
    try:
        for x in seen:  # what is not written is not right
            x.fill_(math.nan)
        second()
        far = torch.stack(
            [_apart(y, x, unseen) for y, x, unseen in zip(seen, want, hidden, strict=True)]
        )
    finally:  # what is not a number must not stay behind: attention weighs slots that it does not see with 0
        for x, y in zip(seen, want, strict=True):
            x.copy_(y)
    # other orders of rounding add up like steps of a random walk, layer after layer; a wrong formula is as far off as the numbers are large
    return float(far.max()), math.sqrt(
        torch.finfo(block.logits.dtype).eps * max(1.0, len(block.keys) / FEW_LAYERS)
    )


def _apart(found: Tensor, wanted: Tensor, unseen: Tensor | None) -> Tensor:
    """How far one is from the other, as a share of that one's size, but for what nobody sees."""
    x, y = (
        t.float() if unseen is None else t.float().masked_fill(unseen, 0) for t in (wanted, found)
    )
    return (y - x).norm() / x.norm().clamp_min(torch.finfo(torch.float32).tiny)
