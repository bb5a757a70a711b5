"""`generate` of one model instance: greedy and sampling through the pool, everything else through stock, counted."""

from __future__ import annotations

import copy
import inspect
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from mirage_hf.decode.cache import CacheBlock, CachePool, bucket
from mirage_hf.decode.call_plan import CallPlan, NotCovered, plan_call
from mirage_hf.decode.graphs import can_capture
from mirage_hf.decode.model_fingerprint import ModelFingerprint, still_expected, take_fingerprint
from mirage_hf.decode.prefill import PrefillGraph, Prompts, Shape, can_call
from mirage_hf.decode.program import CapturedForward, Chooser, Step
from mirage_hf.decode.routing import effective, refused_arguments, refused_model, refused_options
from mirage_hf.decode.session import Outdated, Session
from mirage_hf.decode.step_program import CHANGED, StepProgram, obstacle
from mirage_hf.errors import MirageError, described
from mirage_hf.layers.model_kernels import ModelKernels
from mirage_hf.swap.plain_copies import leave_out_of_copies, restore_in_copies

GraphKey = tuple[Any, Any]
"""What captured graphs depend on: what a walk over the model found, and the masks it wants."""


class DecodeError(MirageError, ValueError):
    """A model that `install` cannot take, or a `generate` that outlived its model."""


class Counting:
    """Adds to counters from several threads. What an attempt at a call has counted can be taken back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_thread = threading.local()

    def count(self, counter: Counter[str], what: str, by: int = 1) -> None:
        self._add(counter, what, by)
        if (attempt := getattr(self._of_thread, "attempt", None)) is not None:
            attempt.append((counter, what, by))

    @contextmanager
    def attempt(self) -> Iterator[Callable[[], None]]:
        """Note what this thread counts in the block, but for attempts within it; gives what takes it back, to be called behind it."""
        outer, counted = (
            getattr(self._of_thread, "attempt", None),
            list[tuple[Counter[str], str, int]](),
        )

        def take_back() -> None:
            for counter, what, by in counted:
                self._add(counter, what, -by)

        self._of_thread.attempt = counted
        try:
            yield take_back
        finally:
            self._of_thread.attempt = outer

    def _add(self, counter: Counter[str], what: str, by: int) -> None:
        with self._lock:
            counter[what] += by
            if not counter[what]:
                del counter[what]


# -- the runner ---------------------------------------------------------------------------------------------------------


class DecodeRunner:
    """What one model's `generate` keeps between calls: the cache pool with its graphs, and counts of what went where.

    `counts` holds "captured" (replayed steps), "called: <why>" (the same loop without a graph) and "stock: <why>"; where there are
    kernels for whole steps also "step: all by kernels" or "step: <why the model's own forward runs>". `prefills` counts those that were
    replayed ("captured", "captured, by kernels") or run by kernels without a graph ("called, by kernels") and what was refused; the others
    ran HF's forward. `selections` counts where calls chose that wanted more than the greatest logit: "on the device" or "by the host:
    <why>".
    """

    def __init__(
        self,
        *,
        mode: str = "graph",
        max_cache_len: int | None = None,
        depth: int | None = None,
        steps: ModelKernels | None = None,
        valid_for: object = None,
    ):
        self.steps, self.valid_for, self.no_steps = steps, valid_for, ""
        self.mode, self.max_cache_len, self.depth = mode, max_cache_len, depth
        self.pool = CachePool()
        self.counts: Counter[str] = Counter()
        self.prefills: Counter[str] = Counter()
        self.selections: Counter[str] = Counter()
        self.counting = Counting()
        self.prompts = Prompts(partial(self.counting.count, self.prefills))
        self._graph_key: GraphKey = (None, None)
        self._last: ModelFingerprint | None = None
        self._looked_at: object = None
        self._uncapturable: dict[object, tuple[object, str]] = {}

    @property
    def bytes(self) -> int:
        """Bytes of device memory in the cache pool."""
        return self.pool.bytes

    def release(self) -> None:
        """Free the pool and its graphs. Calls under way keep theirs until they end; the next call starts anew."""
        self.pool.release()

    def count(self, what: str, where: Counter[str] | None = None, by: int = 1) -> None:
        """Add to the counts, or to others of this object."""
        self.counting.count(self.counts if where is None else where, what, by)

    # -- one covered call

    def run(
        self,
        call: CoveredCall,
        model: Any,
        input_ids: Tensor,
        processors: Any,
        criteria: StoppingCriteriaList,
        config: Any,
        kwargs: dict[str, Any],
    ) -> Any:
        """Do what stock's decoding method would, from prefill to output; raise NotCovered before any effect if it cannot."""
        plan = plan_call(
            model,
            input_ids,
            processors,
            criteria,
            config,
            kwargs,
            users_cache=call.users_cache,
            max_cache_len=self.max_cache_len,
            expected=self._expected(model),
        )
        self._let_go(model, plan)
        drawn, tries = torch.get_rng_state(), 2
        while True:
            with self.counting.attempt() as take_back:
                found = self._attempt(
                    call, model, plan, input_ids, processors, criteria, config, kwargs
                )
            if isinstance(found, tuple):
                break
            take_back()
            torch.set_rng_state(
                drawn
            )  # a call takes one seed of the generator, however often it is tried
            if found is not None:
                self._last = None
                plan = replace(plan, fingerprint=found, expected=False)
                if found.obstacle is not None:
                    raise NotCovered(found.obstacle)
                self._let_go(model, plan)
                continue
            self.pool.drop_idle()
            tries -= 1
            if not tries:
                raise NotCovered("out of memory")
        self._last = plan.fingerprint
        result, session = found
        if call.streamer is not None:
            call.streamer.end()
        if not config.return_dict_in_generate:
            return result
        record = session.record
        return GenerateDecoderOnlyOutput(
            sequences=result,
            scores=None if record.scores is None else tuple(record.scores),
            logits=None if record.logits is None else tuple(record.logits),
            past_key_values=plan.cache,
        )

    def _expected(self, model: Any) -> ModelFingerprint | None:
        """What the last call found, where a captured prompt may run while the host looks at the model: that takes milliseconds."""
        steps, last = self.steps, self._last
        able = (
            steps is not None
            and self.mode != "eager"
            and can_capture(model.device) is None
            and _looks_up_in(model, steps.embedding)
        )
        return last if able and last is not None and still_expected(model, last) else None

    def _attempt(
        self,
        call: CoveredCall,
        model: Any,
        plan: CallPlan,
        input_ids: Tensor,
        processors: Any,
        criteria: StoppingCriteriaList,
        config: Any,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Session] | ModelFingerprint | None:
        """Prefill and decode; what a look at the model found where the plan expects another, and None where the device's memory did not
        suffice, if the caller has seen nothing of it."""
        returns_cache = bool(config.return_dict_in_generate) or plan.cache_is_users
        session = None
        try:
            block = self.pool.lease(
                input_ids.shape[0], bucket(plan.slots), plan.windows, input_ids.device
            )
            session = Session(self, model, plan, block, returns_cache)
            session.prefill(call.streamer, input_ids, config, kwargs)
            result = session.decode(call.streamer, input_ids, processors, criteria, config)
            if returns_cache:
                session.shown |= plan.cache_is_users
                session.block.put(plan.cache, session.cached)
            return result, session
        except Outdated as e:
            return e.found
        except torch.OutOfMemoryError:
            if session is not None and session.shown:
                raise
            return None
        finally:
            if session is not None:
                session.end()

    def _let_go(self, model: Any, plan: CallPlan) -> None:
        """Keep no kernels, and with them no weights, of a model that has replaced some of these: they would be memory for nothing."""
        steps, found = self.steps, plan.fingerprint.model
        if steps is None or found in (self.valid_for, self._looked_at):
            return
        self._looked_at = found
        present = set(map(id, model.parameters()))
        if not all(id(weight) in present for weight in steps.weights):
            self.steps, self.valid_for, self.no_steps = None, None, CHANGED
            self.pool.drop_idle()

    def graph_key_of(self, plan: CallPlan) -> GraphKey:
        """What graphs captured for this call depend on. While it stays equal it is one object, so that comparing it costs nothing."""
        found, last = (plan.fingerprint.key, plan.masks), self._graph_key
        if found == last:
            return last
        self._graph_key = found
        return found  # whatever another thread has made of it meanwhile, which may expect another model

    def prefill_graph(
        self,
        model: Any,
        plan: CallPlan,
        block: CacheBlock,
        input_ids: Tensor,
        key: GraphKey,
        at_once: bool = False,
    ) -> PrefillGraph | None:
        """Return the captured prefill that serves a prompt, captured now if it is the second of its bucket; None where HF's runs.
        `at_once`: only one that may be replayed before anybody has looked at the model."""
        if (
            self.mode == "eager"
            or can_capture(block.device)
            or plan.fingerprint.no_graph
            or not plan.prompt_alone
        ):
            return None
        shape = self._shape(plan, block, input_ids)
        if shape is None or not shape.few:
            return None
        # HF's forward may have a table of positions, and no GPU survives the look-up of one that is not there for a filling's token
        reach = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        own = plan.fingerprint.rope is None and (reach is None or shape.tokens <= reach)
        return self.prompts.graph(
            model, block, shape, self.steps, partial(self._able, plan, block), key, at_once, own
        )

    def prefill_by_kernels(
        self, model: Any, plan: CallPlan, block: CacheBlock, input_ids: Tensor, key: GraphKey
    ) -> bool:
        """Prefill by kernels without a graph; False where HF's forward is to run."""
        steps = self.steps
        if steps is None or steps.no_prefill or not can_call(block.device) or not plan.prompt_alone:
            return False
        shape = self._shape(plan, block, input_ids)
        if shape is None or block.batch not in steps.rows:
            return False
        if (
            not block.keys and plan.fingerprint.model != self.valid_for
        ):  # no room as its kernels want it for a model that may want another
            return False
        return self.prompts.by_kernels(
            model, block, input_ids, shape, steps, partial(self._able, plan, block), key
        )

    def _shape(self, plan: CallPlan, block: CacheBlock, input_ids: Tensor) -> Shape | None:
        """What a prompt is filled up to, None where it cannot be."""
        shape, rope = Shape.of(input_ids.shape[1], block, plan.masks), plan.fingerprint.rope
        return None if shape is None or (rope is not None and shape.tokens > rope.reach) else shape

    def _able(self, plan: CallPlan, block: CacheBlock) -> ModelKernels | None:
        """The model's kernels where they serve a call."""
        return None if obstacle(self.steps, plan, block, self.valid_for) else self.steps

    def step(
        self,
        model: Any,
        plan: CallPlan,
        block: CacheBlock,
        key: GraphKey,
        chooser: Chooser | None,
        again: bool = False,
    ) -> Step:
        """Return the step for a block, with or without graphs as the model, the device and what chooses allow. `again`: for a call that is
        counted."""
        steps = self.steps
        forward = self.no_steps or obstacle(steps, plan, block, self.valid_for)
        why = (
            "mode is eager"
            if self.mode == "eager"
            else can_capture(block.device) or plan.fingerprint.no_graph
        )
        if why is None and forward and plan.fingerprint.rope is not None:
            why = plan.fingerprint.rope.reason
        state, failed = self._uncapturable.get(_way(chooser), (None, None))
        if why is None and state == key:
            why = failed
        if not again:
            self.count("captured" if why is None else f"called: {why}")
            if steps is not None or self.no_steps:
                self.count(f"step: {forward or 'all by kernels'}")
        if steps is not None and not forward:
            return StepProgram(steps, block, plan.masks, graphs=why is None, graph_key=key)
        return CapturedForward(
            model,
            block,
            plan.masks,
            logits_to_keep=plan.logits_to_keep,
            graphs=why is None,
            graph_key=key,
        )

    def capture_failed(
        self, step: Step, chooser: Chooser | None, error: Exception, again: bool = False
    ) -> None:
        """Count the call as one of called steps, and remember that this state of the model cannot be captured with this chooser. `again`:
        for a call that has been counted so."""
        why = f"capture failed ({described(error)})"
        if not isinstance(error, torch.OutOfMemoryError):  # another time there may be more
            self._uncapturable[_way(chooser)] = step.graph_key, why
        if again:
            return
        self.count(f"called: {why}")
        self.count("captured", by=-1)


def _looks_up_in(model: Any, embedding: Tensor) -> bool:
    """Whether the model's tokens are rows of that table, and nobody says which on their way to it: of a larger one there may be tokens that
    are none, and that no GPU survives."""
    table = model.get_input_embeddings()
    return getattr(table, "_parameters", {}).get("weight") is embedding and not any(
        m._forward_pre_hooks or "forward" in m.__dict__ for m in (model, model.base_model, table)
    )


def _way(chooser: Chooser | None) -> object:
    """What a capture may fail by, apart from the model."""
    return None if chooser is None else chooser.key


# -- generate -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CoveredCall:
    """The callable given to HF's `custom_generate`, with what HF drops on the way to a callable."""

    runner: DecodeRunner
    streamer: Any
    users_cache: bool

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        return self.runner.run(
            self,
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            model_kwargs,
        )


class Generate:
    """An instance-level `generate`: a small object in the model's `__dict__`, bound to the model by a weak reference.

    Copies and pickled models have their class's own `generate`. The weak reference lets `del model` free memory.
    """

    def __init__(self, model: Any, runner: DecodeRunner):
        self._model = weakref.ref(model)
        self.runner = runner
        self._accepted: dict[str, Any] | None = None
        self.__doc__ = type(model).generate.__doc__

    __name__ = "generate"

    def _owner(self) -> Any:
        model = self._model()
        if model is None:
            raise DecodeError(
                "generate: its model has been deleted; keep a reference to the model while you use its generate"
            )
        return model

    @property
    def __self__(self) -> Any:
        return self._owner()

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(type(self._owner()).generate.__get__(self._owner()))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return stock's `generate`, of the copy of the model if there is one."""
        model = self._owner()
        return type(model).generate.__get__(memo.get(id(model), model))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner(), "generate")

    def __repr__(self) -> str:
        return f"<mirage_hf generate of {type(self._owner()).__name__}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._owner()
        stock = type(model).generate
        covered = self._cover(model, stock, args, kwargs)
        if isinstance(covered, str):
            self.runner.count(f"stock: {covered}")
            return stock(model, *args, **kwargs)
        config, why = dict(model.config.__dict__), None
        try:
            result = stock(model, **covered)
        except NotCovered as reason:
            why = str(reason)
        if why is not None:  # not in the handler, which keeps the memory of what was tried
            self.runner.count(f"stock: {why}")
            return stock(model, *args, **kwargs)
        if covered.get("generation_config") is None:  # with one stock does not look at the model's
            self._accepted = config
        return result

    def _cover(
        self, model: Any, stock: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any] | str:
        """Return the arguments with which stock's generate ends in our callable, or why it must not."""
        names = _parameters(stock)
        if len(args) > len(names):
            return "too many arguments"
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if len(arguments) != len(args) + len(kwargs):
            return "an argument given twice"
        given = arguments.get("generation_config")
        option = effective(arguments, given, model.generation_config)
        refused = refused_model(model) or refused_arguments(arguments) or refused_options(option)
        if refused is not None:
            return refused
        cache = arguments.get("past_key_values")
        streamer = arguments.pop("streamer", None)
        tokenizer = arguments.pop("tokenizer", None)
        if option("stop_strings") is not None:
            # HF builds this criterion from the tokenizer, which it drops for callables: build it here
            criteria = arguments.get("stopping_criteria") or []
            if tokenizer is None:
                return "stop_strings without a tokenizer"
            if any(type(c) is StopStringCriteria for c in criteria):
                return "stop_strings beside a StopStringCriteria"
            mine = StopStringCriteria(tokenizer=tokenizer, stop_strings=option("stop_strings"))
            arguments["stopping_criteria"] = StoppingCriteriaList([mine, *criteria])
            arguments.pop("stop_strings", None)
            if given is not None and given.stop_strings is not None:
                arguments["generation_config"] = given = copy.copy(given)
                given.stop_strings = None
            if model.generation_config.stop_strings is not None:
                return "stop_strings in the model's generation_config"
        arguments["custom_generate"] = CoveredCall(self.runner, streamer, cache is not None)
        return (
            _merged(arguments, names)
            if given is None and self._is_accepted(model.config)
            else arguments
        )

    def _is_accepted(self, config: Any) -> bool:
        """Whether stock's generate took a model config with these very values before."""
        known, now = self._accepted, config.__dict__
        return (
            known is not None
            and len(known) == len(now)
            and all(known.get(name, self) is value for name, value in now.items())
        )


def _merged(arguments: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The same with generation options in a GenerationConfig: without one stock's generate builds the model's default config, to see
    whether options were set in the model's (which `_is_accepted` knows), and that takes it longer than all else that it prepares."""
    config = GenerationConfig()
    options = {
        name: value
        for name, value in arguments.items()
        if name not in names and name in vars(config)
    }
    by_name = "max_length", "min_length", "watermarking_config"
    if any(value is None for value in options.values()) or not options.keys().isdisjoint(by_name):
        return arguments  # None takes the place of the model's own; stock asks whether the first two are given, and converts the third
    for name, value in options.items():
        setattr(config, name, value)
    return {name: value for name, value in arguments.items() if name not in options} | {
        "generation_config": config
    }


_PARAMETERS: dict[Any, tuple[str, ...]] = {}


def _parameters(stock: Any) -> tuple[str, ...]:
    """Return the names of generate's positional parameters, `self` left out."""
    if stock not in _PARAMETERS:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        _PARAMETERS[stock] = tuple(
            p.name for p in inspect.signature(stock).parameters.values() if p.kind in kinds
        )[1:]
    return _PARAMETERS[stock]


def install(
    model: Any,
    *,
    mode: str = "graph",
    max_cache_len: int | None = None,
    depth: int | None = None,
    steps: ModelKernels | None = None,
) -> DecodeRunner:
    """Give a model instance a `generate` of its own that decodes through the pool; nothing else of it or of HF changes.

    `mode` "graph" replays captured steps where the device can, "eager" calls them. `max_cache_len` is the most cache
    slots a call may use; longer ones go the stock way. `depth` is how many steps may be ahead of the host (None: 2 on a GPU, 0 on a
    CPU). `steps`: kernels for whole steps of this model as it is now. Installing again starts anew.
    Errors: DecodeError for what is not a transformers model that generates, or has an instance-level `generate` already.
    """
    if mode not in ("graph", "eager"):
        raise DecodeError(f"install: mode must be 'graph' or 'eager', it is {mode!r}")
    if max_cache_len is not None and max_cache_len < 1:
        raise DecodeError(
            f"install: max_cache_len must be at least 1, it is {max_cache_len}; leave it out for no limit"
        )
    if not isinstance(model, nn.Module) or not isinstance(model, GenerationMixin):
        raise DecodeError(
            f"install: {type(model).__name__} is not a transformers model with generate(); pass the causal LM itself "
            "(of a PeftModel its base model: peft_model.get_base_model())"
        )
    present = model.__dict__.get("generate")
    if present is not None and not isinstance(present, Generate):
        raise DecodeError(
            f"install: this {type(model).__name__} already has an instance-level generate ({present!r}); "
            "delete it with `del model.generate` first"
        )
    uninstall(model)
    runner = DecodeRunner(
        mode=mode,
        max_cache_len=max_cache_len,
        depth=depth,
        steps=steps,
        valid_for=take_fingerprint(model).model if steps is not None else None,
    )
    model.__dict__["generate"] = Generate(model, runner)
    leave_out_of_copies(model, "generate")
    return runner


def uninstall(model: Any) -> None:
    """Take the instance-level `generate` away again and free its pool; without one, nothing happens."""
    present = model.__dict__.get("generate")
    if isinstance(present, Generate):
        present.runner.release()
        del model.__dict__["generate"]
        restore_in_copies(model, "generate")
