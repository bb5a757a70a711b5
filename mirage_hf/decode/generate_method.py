"""The `generate` of one model instance.

It runs covered calls over the cache pool (generate.py), and all others by stock's `generate`.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from mirage_hf.decode.call_plan import CallInputs
from mirage_hf.decode.draft_planning import DraftRequest
from mirage_hf.decode.generate import generate
from mirage_hf.decode.model_fingerprint import take_fingerprint
from mirage_hf.decode.not_covered import NotCoveredError
from mirage_hf.decode.routing import (
    effective_options,
    rejected_arguments,
    rejected_model,
    rejected_options,
)
from mirage_hf.decode.runner import DecodeRunner
from mirage_hf.decode.step_plans import TracedSteps
from mirage_hf.errors import MirageError
from mirage_hf.layers.model_kernels import ModelKernels
from mirage_hf.swap.plain_copies import leave_out_of_copies, restore_in_copies

_LOOKUP = "prompt_lookup_num_tokens"
#: Stock's methods that may run one of several segments.
_SEGMENTS = {
    GenerationMode.GREEDY_SEARCH: "_sample",
    GenerationMode.SAMPLE: "_sample",
    GenerationMode.ASSISTED_GENERATION: "_assisted_decoding",
}


class DecodeError(MirageError, ValueError):
    """A model that `install` cannot take, or a `generate` that outlived its model."""


@dataclass(frozen=True)
class CoveredCall:
    """The callable given to HF's `custom_generate`.

    It holds the arguments that HF does not pass on to a callable.

    Attributes:
        runner: What the model keeps between calls.
        streamer: Gets every token, if there is one. Stock's generate gives it the prompt.
        cache_is_users: Whether the user passed a cache.
        is_segment: Whether the model's own generate calls the standard one, maybe several times.
        drafts: What the call says about drafts.
    """

    runner: DecodeRunner
    streamer: Any
    cache_is_users: bool
    is_segment: bool = False
    drafts: DraftRequest = field(default_factory=DraftRequest)

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        inputs_tensor: Tensor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Run the call, as stock's decoding method would."""
        inputs = CallInputs(
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            model_kwargs,
            inputs_tensor,
        )
        try:
            return generate(
                self.runner,
                inputs,
                streamer=self.streamer,
                cache_is_users=self.cache_is_users,
                drafts=self.drafts,
            )
        except NotCoveredError as reason:
            # earlier segments stay as they are, so only this one runs stock
            mode = generation_config.get_generation_mode(self.drafts.assistant)
            if not self.is_segment or mode not in _SEGMENTS:
                raise
            self.runner.count(f"stock: {reason}")
        if mode is GenerationMode.ASSISTED_GENERATION:
            given = {"assistant_model": self.drafts.assistant, "inputs_tensor": inputs_tensor}
            # stock's generate did not see the assistant, as it gives none to a callable
            model._validate_generation_mode(mode, generation_config, given)
            model_kwargs |= given
        return getattr(type(model), _SEGMENTS[mode])(
            model,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            streamer=self.streamer,
            **model_kwargs,
        )


class _PromptStreamer:
    """A streamer that notes when it has been given the prompt, and hands the prompt on."""

    def __init__(self, streamer: Any):
        self.streamer = streamer
        self.has_prompt = False

    def put(self, value: Tensor) -> None:
        """Hand the prompt on."""
        self.has_prompt = True
        self.streamer.put(value)


class _StreamerWithPrompt:
    """A streamer that has been given the prompt already. It drops the first tokens it gets."""

    def __init__(self, streamer: Any):
        self.streamer = streamer
        self._is_prompt = True

    def put(self, value: Tensor) -> None:
        """Hand tokens on, except for the prompt."""
        if not self._is_prompt:
            self.streamer.put(value)
        self._is_prompt = False

    def end(self) -> None:
        """Hand on that the call is over."""
        self.streamer.end()


class Generate:
    """An instance-level `generate`: a small object in the model's `__dict__`.

    Copies and pickled models have their class's own `generate`. The model is referenced weakly, so
    that `del model` frees memory.
    """

    def __init__(self, model: Any, runner: DecodeRunner):
        self._model = weakref.ref(model)
        self.runner = runner
        #: The model config's values in which stock's generate last found no generation options.
        self._config_without_options: dict[str, Any] | None = None
        self.__doc__ = type(model).generate.__doc__

    __name__ = "generate"

    def _owner(self) -> Any:
        model = self._model()
        if model is None:
            raise DecodeError(
                "generate: its model has been deleted; keep a reference to the model while you use "
                "its generate"
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
        """Generate as stock's `generate` does, through the pool if the call is covered."""
        tuning = self.runner.tuning
        with nullcontext() if tuning is None else tuning.call():
            return self._generate(*args, **kwargs)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        model = self._owner()
        stock = type(model).generate
        names = _positional_parameters(stock)
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if len(args) > len(names):
            covered: dict[str, Any] | str = "too many arguments"
        elif len(arguments) != len(args) + len(kwargs):
            covered = "an argument given twice"
        else:
            covered = self._cover(model, names, dict(arguments))
        if isinstance(covered, str):
            self.runner.count(f"stock: {covered}")
            return stock(model, *args, **kwargs)
        config_before, why_not = dict(model.config.__dict__), None
        counted = self.runner.counts.total()
        try:
            result = stock(model, **covered)
        except NotCoveredError as reason:
            why_not = str(reason)
        if why_not is not None:  # not in the handler, which keeps the memory of what was tried
            self.runner.count(f"stock: {why_not}")
            prompted = covered.get("streamer")
            if prompted is not None and prompted.has_prompt:
                arguments["streamer"] = _StreamerWithPrompt(prompted.streamer)
            return stock(model, **arguments)
        if self.runner.counts.total() == counted:
            self.runner.count("stock: the model's own generate did not call the inherited one")
        if covered.get("generation_config") is None:  # with one, stock ignores the model's
            self._config_without_options = config_before
        return result

    def _cover(
        self, model: Any, names: tuple[str, ...], arguments: dict[str, Any]
    ) -> dict[str, Any] | str:
        """Return arguments that make stock's generate call our callable, or why it must not.

        Args:
            model: The model.
            names: Positional parameters of `generate`.
            arguments: The arguments of this call, which are changed in place.
        """
        given = arguments.get("generation_config")
        option = effective_options(arguments, given, model.generation_config)
        rejected = (
            rejected_model(model, is_traced=self.runner.traced is not None)
            or rejected_arguments(arguments)
            or rejected_options(option)
        )
        if (
            rejected is None
            and not self.runner.traced
            and arguments.get("inputs_embeds") is not None
        ):
            rejected = "inputs_embeds"
        if rejected is not None:
            return rejected
        tokenizer = arguments.pop("tokenizer", None)
        if option("stop_strings") is not None:
            rejected = _use_stop_strings(arguments, option("stop_strings"), tokenizer)
            if rejected := rejected or _hide_option(arguments, "stop_strings", model):
                return rejected
        streamer = arguments.get("streamer")
        if streamer is not None:
            arguments["streamer"] = _PromptStreamer(streamer)
        cache_is_users = arguments.get("past_key_values") is not None
        is_own = type(model).generate is not GenerationMixin.generate
        assistant = arguments.get("assistant_model")
        if assistant is not None and (option("num_return_sequences") or 1) > 1:
            return "assisted decoding with options that stock rejects"
        if not is_own:  # a model's own generate may treat calls with an assistant in another way
            arguments.pop("assistant_model", None)
        lookup = None
        if getattr(model, "_is_stateful", False) and (option(_LOOKUP) is not None):
            # stock's generate refuses drafts for such models, because it cannot put states back
            lookup = option(_LOOKUP), option("max_matching_ngram_size")
            if (rejected := _hide_option(arguments, _LOOKUP, model)) is not None:
                return rejected
        drafts = DraftRequest(assistant, option("num_assistant_tokens_schedule"), lookup)
        arguments["custom_generate"] = CoveredCall(
            self.runner, streamer, cache_is_users, is_own, drafts
        )
        if given is None and not is_own and self._has_no_options(model.config):
            return _with_config(arguments, names)
        return arguments

    def _has_no_options(self, config: Any) -> bool:
        """Return whether stock's generate found no generation options in these values before.

        The values of the model config must be the same objects.
        """
        known, now = self._config_without_options, config.__dict__
        return (
            known is not None
            and len(known) == len(now)
            # `self` stands for a missing name, because no value is this object
            and all(known.get(name, self) is value for name, value in now.items())
        )


def _use_stop_strings(arguments: dict[str, Any], stop_strings: Any, tokenizer: Any) -> str | None:
    """Put a criterion in place of stop strings, or return why that is impossible.

    HF builds the criterion from the tokenizer, which it does not pass on to a callable.
    """
    criteria = arguments.get("stopping_criteria") or []
    if tokenizer is None:
        return "stop_strings without a tokenizer"
    if any(type(criterion) is StopStringCriteria for criterion in criteria):
        return "stop_strings beside a StopStringCriteria"
    own = StopStringCriteria(tokenizer=tokenizer, stop_strings=stop_strings)
    arguments["stopping_criteria"] = StoppingCriteriaList([own, *criteria])
    return None


def _hide_option(arguments: dict[str, Any], name: str, model: Any) -> str | None:
    """Hide an option from stock's generate, or return why that is impossible."""
    if getattr(model.generation_config, name) is not None:
        return f"{name} in the model's generation_config"
    arguments.pop(name, None)
    given = arguments.get("generation_config")
    if given is not None and getattr(given, name) is not None:
        given = copy.copy(given)
        setattr(given, name, None)
        arguments["generation_config"] = given
    return None


def _with_config(arguments: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Move generation options into a GenerationConfig, if stock treats that the same.

    Without one, stock's generate builds the model's default config, to see whether options were set
    in the model's (`_has_no_options` knows). That takes longer than all its other preparations.
    """
    config = GenerationConfig()
    options = {
        name: value
        for name, value in arguments.items()
        if name not in names and name in vars(config)
    }
    # None takes the place of the model's own value. Stock asks whether the two lengths are given,
    # and converts the watermarking config.
    special = ("max_length", "min_length", "watermarking_config")
    if any(value is None for value in options.values()) or not options.keys().isdisjoint(special):
        return arguments
    for name, value in options.items():
        setattr(config, name, value)
    others = {name: value for name, value in arguments.items() if name not in options}
    return {**others, "generation_config": config}


_positional: dict[Any, tuple[str, ...]] = {}


def _positional_parameters(stock: Any) -> tuple[str, ...]:
    """Return the names of generate's positional parameters, without `self`."""
    if stock not in _positional:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(stock).parameters.values()
        _positional[stock] = tuple(p.name for p in parameters if p.kind in kinds)[1:]
    return _positional[stock]


# -- putting it on a model -------------------------------------------------------------------------


def install(
    model: Any,
    *,
    mode: str = "graph",
    max_cache_len: int | None = None,
    depth: int | None = None,
    model_kernels: ModelKernels | None = None,
    traced: TracedSteps | None = None,
) -> DecodeRunner:
    """Give a model instance a `generate` of its own that decodes through the pool.

    Nothing else of the model or of HF changes. Installing again starts anew.

    Args:
        model: A transformers model that generates.
        mode: "graph" replays captured steps where the device can, "eager" calls them.
        max_cache_len: The most cache slots that a call may use. Stock serves longer calls.
        depth: Steps that may be ahead of the host. None means 2 on a GPU and 0 on a CPU.
        model_kernels: Kernels for whole steps of this model as it is now.
        traced: Traced steps of this model as it is now.

    Returns:
        What the model keeps between calls.

    Raises:
        DecodeError: The model is not one of transformers that generates. Or it has an
            instance-level `generate` already. Or an option is impossible.
    """
    if mode not in ("graph", "eager"):
        raise DecodeError(f"install: mode must be 'graph' or 'eager', it is {mode!r}")
    if max_cache_len is not None and max_cache_len < 1:
        raise DecodeError(
            f"install: max_cache_len must be at least 1, it is {max_cache_len}; "
            "leave it out for no limit"
        )
    if not isinstance(model, nn.Module) or not isinstance(model, GenerationMixin):
        raise DecodeError(
            f"install: {type(model).__name__} is not a transformers model with generate(); "
            "pass the causal LM itself (of a PeftModel its base model: "
            "peft_model.get_base_model())"
        )
    present = model.__dict__.get("generate")
    if present is not None and not isinstance(present, Generate):
        raise DecodeError(
            f"install: this {type(model).__name__} already has an instance-level generate "
            f"({present!r}); delete it with `del model.generate` first"
        )
    uninstall(model)
    fingerprint = take_fingerprint(model) if model_kernels or traced else None
    runner = DecodeRunner(
        mode=mode,
        max_cache_len=max_cache_len,
        depth=depth,
        model_kernels=model_kernels,
        made_for=fingerprint and fingerprint.facts,
        traced=traced,
        traced_for=fingerprint and fingerprint.graph_facts,
    )
    model.__dict__["generate"] = Generate(model, runner)
    leave_out_of_copies(model, "generate")
    return runner


def uninstall(model: Any) -> None:
    """Take the instance-level `generate` away and free its pool, if there is one."""
    present = model.__dict__.get("generate")
    if isinstance(present, Generate):
        present.runner.release()
        del model.__dict__["generate"]
        restore_in_copies(model, "generate")
