"""Which prefill a prompt gets: captured or called, by kernels or by Hugging Face's forward.

If kernels run all of a model's steps, they run its prompts, too. There products and attention stay
in the library. Kernels are used only after they have given what HF's forward gives. A captured
prefill serves a bucket of lengths. Prompts are padded on the right, which causal attention does not
see. The keys of that padding are cleared.

If layers keep states, a padding on the right would move the states on. Then stock's own prefill is
captured for prompts of one exact length. It fills a cache of stock's, which the graph copies into
the block. HF's forward is captured for one length, too, if prompts exceed a window: padding would
take the place of tokens in it.

There are four ways. A call takes the first one that is possible:

1. Captured already, by kernels or by HF's forward, if all memory that the graph reads is in use.
   It is replayed before the fingerprint of the model is taken (`Prefills.captured` with
   `unseen_model`).
2. Captured, from the second prompt of a bucket on. Long prompts are not captured: for them the GPU
   takes longer than the host's launches.
3. Kernels, called (`Prefills.run_kernels`), except for the first prompt of a batch size.
4. HF's forward, called.

A way that failed is not tried again while the model stays in the same state, unless only memory was
missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mirage_hf.decode.cache_block import CacheBlock
from mirage_hf.decode.call_plan import CallInputs
from mirage_hf.decode.graphs import capture
from mirage_hf.decode.model_memory import ModelMemory
from mirage_hf.decode.prefill_checks import (
    check_causal,
    check_kernels,
    check_without_mask,
    random_prompts,
)
from mirage_hf.decode.prefill_runs import forward_run, kernel_run, make_room, stock_run
from mirage_hf.decode.prompts import BucketedPrompts, PromptShape
from mirage_hf.decode.summed_products import SummedProducts
from mirage_hf.errors import MirageError, described
from mirage_hf.layers.model_kernels import ModelKernels

#: Most graphs of one block for prompts of one exact length.
MOST_EXACT = 8


@dataclass(frozen=True)
class PrefillGraph:
    """A captured prefill.

    Attributes:
        graph: The CUDA graph.
        prompts: The prompts that it reads.
        memory: The memory of the model that it reads.
        held: Everything else that it reads.
        layers: Layers whose keys and values it writes.
        by_kernels: Whether it runs our kernels, not HF's forward.
    """

    graph: Any
    prompts: BucketedPrompts
    memory: ModelMemory
    held: Any
    layers: frozenset[int]
    by_kernels: bool

    def run(self, input_ids: Tensor, block: CacheBlock) -> None:
        """Prefill a prompt (batch, length) into the block of the capture, logits included."""
        self.prompts.take(input_ids, block.lowest)
        # no forward notes the layers, and a forward that raised may have left fewer
        block.written = set(self.layers)
        self.graph.replay()


@dataclass(frozen=True)
class PrefillRequest:
    """A prompt that needs a prefill.

    Attributes:
        inputs: What stock's decoding method would get.
        cache: The cache that stock would fill.
        block: Memory of the call.
        shape: Shape of the prompt.
        state: State of the model. Results of earlier captures hold while it is equal.
        model_kernels: The model's kernels, if it has any.
        usable_kernels: Returns the kernels if they serve this call, else None.
    """

    inputs: CallInputs
    cache: Any
    block: CacheBlock
    shape: PromptShape
    state: object
    model_kernels: ModelKernels | None
    usable_kernels: Callable[[], ModelKernels | None]

    @property
    def model(self) -> Any:
        """The model."""
        return self.inputs.model


class Prefills:
    """The prefills of one model by graphs or kernels, and the states in which they failed.

    Args:
        count: Called with how each prompt was run, or why not by kernels.
    """

    def __init__(self, count: Callable[[str], None]):
        self.count = count
        #: By shape: the state of the model in which neither way could be captured.
        self._not_captured: dict[PromptShape, object] = {}
        #: By shape: the state of the model in which kernels could not be captured.
        self._not_captured_by_kernels: dict[PromptShape, object] = {}
        #: By batch: the last state of the model whose first prompt was left to HF's forward.
        self._first: dict[int, object] = {}
        #: By kind of shape: a state of the model, and whether kernels may be called in it.
        self._checked: dict[PromptShape, tuple[object, bool]] = {}
        #: The last state of the model in which steps after stock's prefill took nothing unusual.
        self._usual: object = None
        #: The last state of the model, and the longest prompt of it that had no sums of products.
        self._without_products: tuple[object, int] = (None, 0)

    @contextlib.contextmanager
    def summing_products(self, state: object, tokens: int) -> Iterator[None]:
        """Compute sums of products as matrix products, unless a longer prompt had none.

        Looking for them costs the host some time for each torch op.
        """
        state_without, most = self._without_products
        if state_without == state and tokens <= most:
            yield
            return
        with SummedProducts() as mode:
            yield
        if not mode.count:
            self._without_products = state, tokens

    def note_usual(self, state: object) -> None:
        """Note that the model's own methods give steps after stock's prefill nothing unusual."""
        self._usual = state

    # -- called

    def run_kernels(self, request: PrefillRequest, input_ids: Tensor) -> bool:
        """Prefill a prompt (batch, length) by kernels without a graph, logits included.

        Returns:
            False if HF's forward must run. That is so after any failure, and for the first prompt
            after the model changed.
        """
        shape, state = request.shape, request.state
        checked_state, is_good = self._checked.get(shape.kind, (None, False))
        if checked_state == state and not is_good:
            return False
        if checked_state != state and self._first.get(shape.batch) != state:
            self._first[shape.batch] = state
            return False
        try:
            if not _try_kernels(request, input_ids, is_checked=checked_state == state):
                return False
        except torch.OutOfMemoryError:
            self.count("not by kernels: out of memory")  # another time there may be more
            return False
        except Exception as error:  # whatever failed, HF's own prefill is the way out
            self.count(f"not by kernels: {described(error)}")
            self._checked[shape.kind] = state, False
            return False
        self._checked[shape.kind] = state, True
        self.count("called, by kernels")
        return True

    # -- captured

    def captured(
        self, request: PrefillRequest, *, unseen_model: bool, may_capture_forward: bool
    ) -> PrefillGraph | None:
        """Return the captured prefill for a prompt. The second prompt of a shape captures it.

        Args:
            request: The prompt.
            unseen_model: Return only one that may be replayed before the fingerprint of the model
                is taken.
            may_capture_forward: Whether HF's forward may be captured for plain shapes.

        Returns:
            The graph, None if a called prefill must run.
        """
        block, shape, state = request.block, request.shape, request.state
        if self._not_captured.get(_alike(shape)) == state:
            return None
        name = "prefill", shape
        graphs = block.graphs_for(state)
        graph: PrefillGraph | None = graphs.get(name)
        model_kernels = request.model_kernels
        if graph is not None and graph.by_kernels and _have_changed(model_kernels):
            del graphs[name]
            graph = None
        if unseen_model and (graph is None or not graph.memory.serves(request.model)):
            return None
        if graph is None:
            graph = self._capture_second(request, may_capture_forward and shape.is_plain)
            if graph is None:
                return None
            graphs[name] = graph
            _forget_oldest(graphs)
        self.count("captured, by kernels" if graph.by_kernels else "captured")
        return graph

    def _capture_second(
        self, request: PrefillRequest, may_capture_forward: bool
    ) -> PrefillGraph | None:
        """Return a capture if a prompt of the shape has run before."""
        block, shape = request.block, request.shape
        block.prompts[shape] += 1
        if block.prompts[shape] < 2 or not (block.keys or block.states):
            return None
        if not block.logits.numel() or (shape.by_stock and self._usual != request.state):
            return None
        block.dirty = max(block.dirty, shape.tokens)  # the warm-ups write so far
        model_kernels = None
        if self._not_captured_by_kernels.get(shape) != request.state:
            model_kernels = request.usable_kernels()
        if model_kernels is not None and model_kernels.no_prefill:
            self.count(f"not by kernels: {model_kernels.no_prefill}")
            model_kernels = None
        if model_kernels is not None:
            graph = self._capture(request, model_kernels)
            was_out_of_memory = not block.prompts[shape]
            if graph is not None or was_out_of_memory:
                return graph
        return self._capture(request, None) if may_capture_forward else None

    def _capture(
        self, request: PrefillRequest, model_kernels: ModelKernels | None
    ) -> PrefillGraph | None:
        """Capture a prefill by kernels, or by HF's forward if there are none. Note a failure."""
        block, shape, state = request.block, request.shape, request.state
        try:
            return _capture_with_room(request, model_kernels)
        except Exception as error:  # whatever failed, HF's own prefill is the way out
            failed = error.with_traceback(None)  # a traceback keeps the memory of what was tried
        how = "called" if model_kernels is None else "not by kernels"
        self.count(f"{how}: capture failed ({described(failed)})")
        if isinstance(failed, torch.OutOfMemoryError):
            block.drop_graphs()
            block.prompts[shape] = 0  # another time there may be more
        elif model_kernels is None:
            self._not_captured[_alike(shape)] = state
        else:
            self._not_captured_by_kernels[shape] = state
            if isinstance(failed, MirageError):  # what gives wrong results is not called either
                self._checked[shape.kind] = state, False
        return None


def _try_kernels(request: PrefillRequest, input_ids: Tensor, *, is_checked: bool) -> bool:
    """Check kernels unless they were, and run them. Return whether they serve this call."""
    model_kernels, block, shape = request.model_kernels, request.block, request.shape
    assert model_kernels is not None
    make_room(block, model_kernels)
    if request.usable_kernels() is not model_kernels:
        return False
    if not is_checked:
        checked_shape = replace(shape, tokens=shape.checked_tokens)
        prompts = BucketedPrompts.allocate(block, checked_shape)
        block.dirty = max(block.dirty, checked_shape.tokens)
        run = kernel_run(model_kernels, block, prompts, checked_shape).run
        check_kernels(request.model, block, prompts, run)
    prompts = BucketedPrompts.allocate(block, shape)
    prompts.take(input_ids, block.lowest)
    prefill = kernel_run(model_kernels, block, prompts, shape)
    block.dirty = max(block.dirty, shape.tokens)
    block.written = set(range(len(model_kernels.layers)))
    prefill.run()
    return True


def _capture_with_room(request: PrefillRequest, model_kernels: ModelKernels | None) -> PrefillGraph:
    """Capture a prefill, and once more after freeing memory if there was too little."""
    with contextlib.suppress(torch.OutOfMemoryError):
        return capture_prefill(request, model_kernels)
    request.block.make_room()
    return capture_prefill(request, model_kernels)


def _alike(shape: PromptShape) -> PromptShape:
    """Return the shape that stands for all that a failed capture rules out."""
    return shape.kind if shape.is_exact else shape


def _forget_oldest(graphs: dict[Any, Any]) -> None:
    """Keep few graphs of prompts of one length each: there may be as many lengths as prompts."""
    exact = [name for name in graphs if name[0] == "prefill" and name[1].is_exact]
    for name in exact[:-MOST_EXACT]:
        del graphs[name]


def capture_prefill(request: PrefillRequest, model_kernels: ModelKernels | None) -> PrefillGraph:
    """Capture prefills of a shape over a block that has held a prompt.

    Args:
        request: A prompt of the shape.
        model_kernels: The kernels to capture. None captures HF's forward.

    Raises:
        MirageError: Kernels do not give what HF's forward gives, or HF's forward sees later tokens,
            or it needs a mask of ones.
        RuntimeError: The prefill cannot be captured.
    """
    model, block, shape = request.model, request.block, request.shape
    prompts, logits = BucketedPrompts.allocate(block, shape), block.logits.to("cpu", copy=True)
    try:
        if model_kernels is not None:
            prefill = kernel_run(model_kernels, block, prompts, shape)
            check_kernels(model, block, prompts, prefill.run)
        elif shape.by_stock:
            prompts.ids.copy_(random_prompts(model, block, shape.tokens))
            prefill, masked = (
                stock_run(request.inputs, request.cache, block, prompts.ids, with_mask=with_mask)
                for with_mask in (False, True)
            )
            check_without_mask(masked.run, prefill.run, block, shape.tokens)
        else:
            prefill = forward_run(model, block, prompts.ids, prompts.last[:1])
            random = random_prompts(model, block, shape.tokens)
            if shape.is_exact:  # nothing follows the prompt
                prompts.ids.copy_(random)
            else:
                check_causal(prefill.run, block, prompts, random)
        graph, block.graph_pool = capture(prefill.run, block.device, block.graph_pool)
    finally:
        block.logits.copy_(logits)
    if model_kernels is None:
        memory, layers = ModelMemory.of_model(model), frozenset(block.written)
    else:
        memory = ModelMemory.of_kernels(model_kernels)
        layers = frozenset(range(len(model_kernels.layers)))
    return PrefillGraph(
        graph, prompts, memory, prefill.held, layers, by_kernels=model_kernels is not None
    )


def _have_changed(model_kernels: ModelKernels | None) -> bool:
    """Return whether a model has lost its kernels, or a number that they were made for."""
    return model_kernels is None or bool(model_kernels.changed())
