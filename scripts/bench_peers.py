"""The peers of `bench_generate`: each is set up once, and then called in turns with the others."""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from transformers import PreTrainedModel, StaticCache
from transformers.generation.streamers import BaseStreamer

import mirage_hf as mi
from mirage_hf.attention_interface import AttentionReport, attention_report
from mirage_hf.errors import OptimizeWarning
from mirage_hf.trace.experts.form import ExpertsForm, form_of
from scripts.bench_prompts import Prompts, mask_of, text_vocab
from scripts.coded_models import product_bytes, with_products
from scripts.configs import random_model
from scripts.scripted_drafts import assisted_by_script, drafting, with_errors

PEERS = ("eager", "static", "compile", "liger", "ours")
BARE, ATTENTION, PLAIN, PRODUCT = "bare", "attention", "plain", "product"

#: The static cache with this `experts_implementation`.
BATCHED = "batched_mm"
#: The peers that draft, and the drafts that need no model.
DRAFTED, ASSISTED, LOOKUP = "drafted", "assisted", "lookup"


@dataclass(frozen=True)
class Peer:
    """A peer that is set up.

    Attributes:
        call: Generates `new` tokens. It may take a streamer.
        model: The optimized model, if the peer is ours.
        weight_bytes: Bytes of weights that no other peer shares.
        holds: What must stay alive as long as the peer, such as the tensors of a CUDA graph.
    """

    call: Callable[..., Any]
    model: PreTrainedModel | None = None
    weight_bytes: int = 0
    holds: Any = None


@lru_cache(maxsize=1)
def weights_of(name: str, device: torch.device, layers: int | None) -> PreTrainedModel:
    """Return the model that rows of one name share. Peers that change a model change a twin."""
    return random_model(name, device, layers=layers)


@lru_cache(maxsize=1)
def assistant_weights(name: str, device: torch.device, layers: int | None) -> PreTrainedModel:
    """Return the assistant that peers of several rows share."""
    return random_model(name, device, layers=layers)


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """Return a second model over the same weights."""
    forms = (form_of(module) for module in model.modules())
    codes = [x for form in forms if isinstance(form, ExpertsForm) for x in form.parameters]
    return copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *codes)})


def set_up(
    name: str,
    model: PreTrainedModel,
    bare: PreTrainedModel,
    prompts: Prompts,
    args: argparse.Namespace,
) -> Peer:
    """Return a peer by its name.

    Args:
        name: The peer's name.
        model: The model of the row.
        bare: The same model without adapters and codes.
        prompts: The prompts of the row.
        args: The options of the benchmark.
    """
    if name in (BARE, PLAIN):
        return ours(bare, prompts, args.new, args.tune)
    if name == "ours":
        return ours(model, prompts, args.new, args.tune)
    if name in (DRAFTED, ASSISTED):
        return drafted(model, name == DRAFTED, prompts, args)
    if name == "compile":
        if prompts.ids.device.type != "cuda":
            raise RuntimeError("needs a GPU")
        return compiled_step(twin(model), prompts, args.new)
    if name == "liger":
        return Peer(generate_with(with_liger(model), prompts, args.new))
    stock = with_products(twin(bare), args.weights) if name == PRODUCT else twin(model)
    if name == ATTENTION:
        stock.set_attn_implementation("mirage")
    if name == BATCHED:
        stock.set_experts_implementation(BATCHED)
    is_static = name in ("static", ATTENTION, PRODUCT, BATCHED)
    options = {"cache_implementation": "static"} if is_static else {}
    call = generate_with(stock, prompts, args.new, **options)
    # this peer has codes of its own, and all others share their weights
    return Peer(call, weight_bytes=product_bytes(stock) if name == PRODUCT else 0)


def generate_with(
    model: PreTrainedModel, prompts: Prompts, new: int, **options: Any
) -> Callable[..., torch.Tensor]:
    """Return a call that generates greedily with these options."""

    def call(streamer: BaseStreamer | None = None) -> torch.Tensor:
        return model.generate(
            **prompts.inputs,
            max_new_tokens=new,
            do_sample=False,
            streamer=streamer,
            **options,
        )

    return call


def compiled_step(model: PreTrainedModel, prompts: Prompts, new: int) -> Peer:
    """Return replays of one captured step at growing lengths.

    Every call starts after the prompt.
    """
    if model.config.is_encoder_decoder:
        raise RuntimeError("the step alone is timed for causal models")
    if prompts.images:
        raise RuntimeError("the step alone is not timed after images")
    ids = prompts.ids
    if not mask_of(ids).all():
        raise RuntimeError("the step alone is not timed after padding")
    prompt = ids.shape[1]
    cache = StaticCache(config=model.config, max_cache_len=prompt + new)
    forward = torch.compile(model.forward, mode="max-autotune-no-cudagraphs", dynamic=False)
    with torch.no_grad():
        token = (
            model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        )
        position = torch.full((ids.shape[0], 1), prompt, device=ids.device)
        lengths = [layer.cumulative_length for layer in cache.layers]

        def step() -> None:
            logits = forward(
                input_ids=token, position_ids=position, past_key_values=cache, use_cache=True
            ).logits
            token.copy_(logits[:, -1:].argmax(-1))
            position.add_(1)

        def rewind() -> None:
            position.fill_(prompt)
            for length in lengths:
                length.fill_(prompt)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
                rewind()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()

    def call() -> None:
        rewind()
        for _ in range(new - 1):  # the first token comes from the prefill
            graph.replay()

    return Peer(call, holds=(token, cache, position))


def with_liger(model: PreTrainedModel) -> PreTrainedModel:
    """Return a twin with Liger's kernels. Whatever Liger changes for all models is put back."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    module = vars(sys.modules[type(model).__module__])
    before, patched = dict(module), twin(model)
    try:
        _apply_liger_kernel_to_instance(
            model=patched, rope=False, cross_entropy=False, fused_linear_cross_entropy=False
        )
    finally:
        module.update(before)
    return patched


def made_fast(model: PreTrainedModel, **options: Any) -> PreTrainedModel:
    """Optimize a model in place, and return it.

    Raises:
        OptimizeWarning: Nothing was replaced. The text says why.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".* was replaced, it runs as before", OptimizeWarning)
        return mi.optimize(model, **options)  # type: ignore[no-any-return]


def ours(model: PreTrainedModel, prompts: Prompts, new: int, tune: str) -> Peer:
    """Return an optimized twin."""
    fast = made_fast(twin(model), batch_sizes=(len(prompts.ids),), tune=tune)
    return Peer(generate_with(fast, prompts, new), fast)


def attention_since(before: AttentionReport) -> AttentionReport:
    """Return which attention by name ran since an earlier report."""
    now = attention_report()
    kernels = [
        replace(k, calls=k.calls - old.calls, calls_compiled=k.calls_compiled - old.calls_compiled)
        for k, old in zip(now.kernels, before.kernels, strict=False)
    ] + list(now.kernels[len(before.kernels) :])
    return AttentionReport(
        tuple(k for k in kernels if k.calls or k.calls_compiled),
        Counter(now.by_torch) - Counter(before.by_torch),
        {title: why for title, why in now.without.items() if title not in before.without},
    )


# -- drafts ----------------------------------------------------------------------------------------


def drafted(
    model: PreTrainedModel, is_ours: bool, prompts: Prompts, args: argparse.Namespace
) -> Peer:
    """Return a peer that drafts: an optimized twin, or a stock one."""
    fast = twin(model)
    if is_ours:
        batch_sizes, counts = (len(prompts.ids),), (args.draft_tokens,)
        made_fast(fast, batch_sizes=batch_sizes, draft_tokens=counts, tune=args.tune)
    options = draft_options(model, is_ours, prompts, args)
    call = generate_with(fast, prompts, args.new, **options)
    optimized = fast if is_ours else None
    if args.accept is None:
        return Peer(call, optimized)
    rows, length = prompts.ids.shape
    script = torch.zeros(rows, length + args.new, dtype=torch.long, device=prompts.ids.device)

    def scripted(streamer: BaseStreamer | None = None) -> torch.Tensor:
        by_script = (
            drafting(script) if is_ours else assisted_by_script(fast, script, args.draft_tokens)
        )
        with by_script:
            return call(streamer)

    settle(script, scripted, args.accept, text_vocab(model.config))
    return Peer(scripted, optimized)


def draft_options(
    model: PreTrainedModel, is_ours: bool, prompts: Prompts, args: argparse.Namespace
) -> dict[str, Any]:
    """Return the option of generate that asks for drafts. An assistant of ours is optimized."""
    schedule = "heuristic_transient" if args.adapt else "constant"
    if args.draft == LOOKUP:
        return {
            "prompt_lookup_num_tokens": args.draft_tokens,
            "num_assistant_tokens_schedule": schedule,
        }
    assistant = twin(assistant_weights(args.draft, model.device, args.layers))
    assistant.generation_config.num_assistant_tokens = args.draft_tokens
    assistant.generation_config.num_assistant_tokens_schedule = schedule
    assistant.generation_config.assistant_confidence_threshold = 0.0
    if is_ours:
        sizes = (len(prompts.ids),)
        made_fast(assistant, batch_sizes=sizes, draft_tokens=(1,), tune=args.tune)
    return {"assistant_model": assistant}


#: Runs that may be needed until a text is that of its own drafts.
MOST_RUNS = 40


def settle(
    script: torch.Tensor, call: Callable[[], torch.Tensor], accept: float, vocab: int
) -> None:
    """Write drafts into a script until the call that takes them gives the text they come from.

    Logits of random weights often nearly tie. A token's logits round in another way if it has
    another place in its step, so drafts that change can change the text. Each run keeps at least
    one token more than the run before.
    """
    text = call()
    for _ in range(MOST_RUNS):
        script.copy_(with_errors(text, accept, vocab))
        before, text = text, call()
        if torch.equal(text, before):
            return


def draft_counts(peer: Peer | None) -> Counter[str]:
    """Return how many drafts our peer has made and taken until now."""
    if peer is None or peer.model is None:
        return Counter()
    counts = peer.model.mirage.report.decode
    return Counter({k: n for k, n in counts.items() if k.startswith("drafts: ")})
