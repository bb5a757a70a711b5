"""Time `model.generate()` beside its rivals.

All peers run in one process over one set of weights and take turns. Numbers are medians with their
spread.

    bench="python -m scripts.bench_generate"
    $bench --model llama-3.2-1b --prompt 128 --batch 1 --json out.json
    $bench --batch 1,4,16 --prompt 128,2048 --seconds 900 --json m.json --resume
    $bench --batch 4 --prompt 128,2048 --side-by-side --json m4.json
    $bench --model llama-3.1-8b --lora 16 --peers bare,ours --json lora.json
    $bench --batch 4 --prompt 512 --padded --peers static,ours --json padded.json
    $bench --model llama-3.1-8b --weights int4 --peers static,product,plain,ours --json int4.json
    $bench --model gemma-3-4b --images 1 --batch 1,4,16 --times-only --json images.json
    $bench --draft lookup --draft-tokens 7 --accept 0.8 --peers ours,drafted,assisted --json d.json
    $bench --model llama-3.1-8b --draft llama-3.2-1b --peers ours,drafted,assisted --json a.json

Each model, batch size and prompt length is a row of the JSON file, written as soon as it is
measured. Peers:

    eager      HF's generate with its default cache
    static     HF's generate with cache_implementation="static", which compiles by itself
    compile    only the step: torch.compile max-autotune in a CUDA graph, static cache, argmax
    attention  static, with attn_implementation="mirage"
    liger      HF's generate with Liger's norms and MLPs, if Liger is installed (RoPE left out)
    ours       generate after mirage_hf.optimize()
    bare       with --lora: ours, for the same model without adapters
    plain      with --weights: ours, for the same model with bfloat16 weights
    product    with --weights int4: static, with torch's own int4 product in each linear
    drafted    with --draft: ours, with steps that verify drafts
    assisted   with --draft: HF's generate with the same drafts, for batches of 1

The floor is the bytes that a step must read, divided by 4.47 TB/s. These are the weights, and the
keys and values of the prompt and half of the new tokens. The embedding table does not count, and a
tied head counts once.

`ms_per_token` is the whole call divided by its new tokens, prefill included. `step_ms` is the time
between later tokens as a streamer sees them. `first_token_ms` is the time to the first one.
`peak_mib_over_weights` is the peak of a peer's set-up and first calls, beyond its weights and what
peers before it hold. `optimize_mib` is what our `optimize` leaves allocated. Weights
are random. The prompt of an encoder-decoder model is the text of its encoder, or 30 s of sound for
Whisper. With --images, each prompt also has images. Their tokens come on top of those of --prompt,
and the vision model's weights do not count for the floor. If the prompts are short, kernels are
profiled, and logits of causal models are compared with float32 if there are no images. --times-only
leaves both out. With --weights, linears hold codes of the format's own library (coded_models.py),
and eager and static run them as transformers does: it decodes int4 at the first forward.

--draft says where drafts come from: prompt lookup, or an assistant, another model of the list. Its
weights are random, so its own drafts are hardly ever taken. With --accept, the source runs and its
drafts are replaced by the model's own greedy tokens, each of which is wrong with the rest of the
probability. `drafts` says how many were made and taken. Each step verifies --draft-tokens drafts.
With --adapt the number depends on how many were taken before, in HF's assisted decoding, too.
"""

from __future__ import annotations

import argparse
import copy
import gc
import inspect
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel, StaticCache
from transformers.generation.streamers import BaseStreamer

from mirage_hf.attention_interface import AttentionReport, attention_report
from mirage_hf.trace.experts_form import ExpertsForm, form_of
from scripts.benching import (
    BYTES_PER_SECOND,
    Budget,
    Report,
    alone,
    explained,
    gpu_state,
    run_all,
    run_side_by_side,
    say,
    spread,
    within,
)
from scripts.coded_models import (
    FORMATS,
    coded_bytes,
    product_bytes,
    with_codes,
    with_int4_products,
)
from scripts.configs import config_of, floor_bytes, names, random_model, with_adapters
from scripts.scripted_drafts import assisted_by_script, drafting, with_errors
from scripts.survey_images import IMAGES, random_images, with_images

PEERS = ("eager", "static", "compile", "liger", "ours")
BARE, ATTENTION, PLAIN, PRODUCT = "bare", "attention", "plain", "product"
#: The padding token; no prompt holds it elsewhere.
PADDING = 0
#: Logits are compared and kernels profiled only if a batch of prompts has at most this many tokens.
FEW_TOKENS = 4096
#: The peers that draft, and the drafts that need no model.
DRAFTED, ASSISTED, LOOKUP = "drafted", "assisted", "lookup"
#: The width of images in pixels, for models that take any width.
IMAGE_WIDTH = 448


@dataclass
class Measured:
    """One peer's numbers.

    Times are in ms, with the spread of their runs. If the peer failed, `failed` says why.
    """

    setup_s: float = 0.0
    ms_per_token: dict[str, float] = field(default_factory=dict)
    first_token_ms: dict[str, float] = field(default_factory=dict)
    step_ms: dict[str, float] = field(default_factory=dict)
    peak_mib_over_weights: float = 0.0
    failed: str = ""


class Clock(BaseStreamer):
    """A streamer that notes when it was made and when each token arrives.

    The first put is the prompt.
    """

    def __init__(self) -> None:
        """Start the clock."""
        self.started = time.perf_counter()
        self.at: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Note the time, once for each token of a burst (batch, tokens)."""
        is_burst = bool(self.at) and value.dim() == 2
        self.at += [time.perf_counter()] * (value.shape[1] if is_burst else 1)

    def end(self) -> None:
        """Do nothing."""


def random_ids(
    model: PreTrainedModel, batch: int, length: int, seed: int, padded: bool = False
) -> torch.Tensor:
    """Return prompts (batch, length).

    With `padded`, rows go from the whole length down to half of it, with padding on the left.
    """
    generator = torch.Generator(model.device).manual_seed(seed)
    ids = torch.randint(
        PADDING + 1,
        text_vocab(model.config),
        (batch, length),
        device=model.device,
        generator=generator,
    )
    if padded:
        for row in range(batch):
            ids[row, : row * length // (2 * batch)] = PADDING
    return ids


def text_vocab(config: PretrainedConfig) -> int:
    """Return how many tokens of the vocabulary come before those that stand for images."""
    special = [
        token
        for name, token in vars(config).items()
        if name.startswith(("image_", "video_", "vision_", "boi_", "eoi_"))
        and name.endswith(("_token_id", "_token_index"))
        and isinstance(token, int)
    ]
    return min([config.get_text_config(decoder=True).vocab_size, *special])


def mask_of(ids: torch.Tensor) -> torch.Tensor:
    """Return the attention mask of prompts."""
    return (ids != PADDING).long()


def inputs_of(
    model: PreTrainedModel, ids: torch.Tensor, images: int = 0
) -> dict[str, torch.Tensor]:
    """Return what generate takes: the prompts, or as many recordings of 30 s for Whisper.

    Each prompt gets `images` images.
    """
    if images:
        return image_inputs_of(model, ids, images)
    if model.main_input_name == "input_ids":
        return {"input_ids": ids, "attention_mask": mask_of(ids)}
    c = model.config
    generator = torch.Generator(ids.device).manual_seed(0)
    features = torch.randn(
        len(ids),
        c.num_mel_bins,
        2 * c.max_source_positions,
        device=ids.device,
        generator=generator,
    )
    return {model.main_input_name: features.to(model.dtype)}


def image_inputs_of(
    model: PreTrainedModel, ids: torch.Tensor, images: int
) -> dict[str, torch.Tensor]:
    """Return what generate takes for prompts with images between their parts."""
    config = model.config
    patches = IMAGE_WIDTH // config.vision_config.patch_size
    with torch.device(ids.device):
        torch.manual_seed(0)
        pixels = random_images(model, config.model_type, images * len(ids), patches)
    given = {n: x.to(model.dtype) if x.is_floating_point() else x for n, x in pixels.items()}
    return with_images(model, config.model_type, ids, given, images)


@dataclass(frozen=True)
class Prompts:
    """The prompts of a row.

    Attributes:
        ids: Their text (batch, length).
        inputs: What generate takes.
        images: How many images each has.
    """

    ids: torch.Tensor
    inputs: dict[str, torch.Tensor]
    images: int = 0

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt, those of images included."""
        mask = self.inputs.get("attention_mask", mask_of(self.ids))
        return mask.sum(-1).tolist()  # type: ignore[no-any-return]


def prompts_of(
    model: PreTrainedModel, batch: int, length: int, args: argparse.Namespace
) -> Prompts:
    """Return the prompts of a row, the same for all peers."""
    ids = random_ids(model, batch, length, seed=0, padded=args.padded)
    return Prompts(ids, inputs_of(model, ids, args.images), args.images)


def sync(device: torch.device) -> None:
    """Wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes of tensors on a GPU, 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """Return a second model over the same weights."""
    forms = (form_of(module) for module in model.modules())
    codes = [x for form in forms if isinstance(form, ExpertsForm) for x in form.parameters]
    return copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *codes)})


# -- the peers: each is set up once and then called. A call makes `new` tokens. -------------------


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


def compiled_step(model: PreTrainedModel, prompts: Prompts, new: int) -> Callable[[], None]:
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

    # A graph does not keep alive what it reads.
    call.reads = (token, cache, position)  # type: ignore[attr-defined]
    return call


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


def ours(
    model: PreTrainedModel, prompts: Prompts, new: int, tune: str
) -> tuple[Callable[..., torch.Tensor], PreTrainedModel]:
    """Return a call of an optimized twin, and the twin."""
    import mirage_hf as mi

    fast = mi.optimize(twin(model), batch_sizes=(len(prompts.ids),), tune=tune)
    return generate_with(fast, prompts, new), fast


def drafts_of(
    model: PreTrainedModel, is_ours: bool, prompts: Prompts, args: argparse.Namespace
) -> dict[str, Any]:
    """Return the option of generate that asks for drafts. An assistant of ours is optimized."""
    import mirage_hf as mi

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
        mi.optimize(assistant, batch_sizes=(len(prompts.ids),), tune=args.tune)
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


def drafted(
    model: PreTrainedModel, is_ours: bool, prompts: Prompts, args: argparse.Namespace
) -> tuple[Callable[..., torch.Tensor], PreTrainedModel | None]:
    """Return a call that drafts, of an optimized twin or of stock, and the twin if it is ours."""
    import mirage_hf as mi

    peer = twin(model)
    if is_ours:
        batch_sizes, counts = (len(prompts.ids),), (args.draft_tokens,)
        mi.optimize(peer, batch_sizes=batch_sizes, draft_tokens=counts, tune=args.tune)
    options = drafts_of(model, is_ours, prompts, args)
    call = generate_with(peer, prompts, args.new, **options)
    fast = peer if is_ours else None
    if args.accept is None:
        return call, fast
    rows, length = prompts.ids.shape
    script = torch.zeros(rows, length + args.new, dtype=torch.long, device=prompts.ids.device)

    def scripted(streamer: BaseStreamer | None = None) -> torch.Tensor:
        by_script = (
            drafting(script) if is_ours else assisted_by_script(peer, script, args.draft_tokens)
        )
        with by_script:
            return call(streamer)

    settle(script, scripted, args.accept, text_vocab(model.config))
    return scripted, fast


# -- measuring ------------------------------------------------------------------------------------


def timed_call(call: Callable[[], Any], device: torch.device) -> float:
    """Return the ms that a call takes, the GPU's work included."""
    sync(device)
    started = time.perf_counter()
    call()
    sync(device)
    return (time.perf_counter() - started) * 1e3


def measure(
    calls: dict[str, Callable[..., Any]],
    results: dict[str, Measured],
    args: argparse.Namespace,
    device: torch.device,
) -> None:
    """Time the peers in turns, and write the times into `results`.

    Each turn has a call without a streamer for the whole time, and one with a streamer for the
    others. With `--long-calls`, one call with a streamer gives all times.
    """
    totals: dict[str, list[float]] = {name: [] for name in calls}
    firsts: dict[str, list[float]] = {name: [] for name in calls}
    steps: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(args.rounds):
        for name, call in calls.items():
            if name == "compile" or not args.long_calls:
                totals[name].append(timed_call(call, device))
            if name == "compile":
                continue
            sync(device)
            clock = Clock()
            total = timed_call(partial(call, streamer=clock), device)
            if args.long_calls:
                totals[name].append(total)
            tokens = clock.at[1:] if len(clock.at) > args.new else clock.at
            firsts[name].append((tokens[0] - clock.started) * 1e3)
            if len(tokens) > 1:
                steps[name].append((tokens[-1] - tokens[0]) * 1e3 / (len(tokens) - 1))
    for name in calls:
        r = results[name]
        if name == "compile":
            r.step_ms = spread([t / (args.new - 1) for t in totals[name]])
        else:
            r.ms_per_token = spread([t / args.new for t in totals[name]])
            r.first_token_ms, r.step_ms = spread(firsts[name]), spread(steps[name])


def share_in_searched_kernels(
    call: Callable[[], Any], names: tuple[str, ...], new: int
) -> dict[str, Any]:
    """Profile one generate: the share of GPU time in searched kernels, and the longest kernels."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] = times.get(event.name, 0.0) + event.time_range.elapsed_us()
    total = sum(times.values())
    searched = sum(t for name, t in times.items() if name.startswith(names))
    longest = sorted(times.items(), key=lambda item: -item[1])[:12]
    return {
        "share": searched / total if total else 0.0,
        "searched_us_per_token": searched / new,
        "gpu_us_per_token": total / new,
        "longest_us_per_token": {name[:100]: t / new for name, t in longest},
    }


@torch.no_grad()
def closeness(
    model: PreTrainedModel, fast: PreTrainedModel, ids: torch.Tensor, tokens: int = 17
) -> dict[str, float]:
    """Return how far the logits of stock and ours are from float32: first token and later steps.

    Our logits are those from which our `generate` chose its tokens. Stock and float32 are fed with
    the same tokens.
    """
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    mask = mask_of(ids)
    out = fast.generate(
        ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **options
    )
    mine = torch.stack([x.float() for x in out.logits], 1)

    takes_states = "cache_params" in inspect.signature(model.forward).parameters
    cache_name = "cache_params" if takes_states else "past_key_values"

    def logits(m: PreTrainedModel) -> torch.Tensor:
        cache = {cache_name: DynamicCache(config=m.config)}
        fed, found = [ids, *out.sequences[:, ids.shape[1] : -1].split(1, 1)], []
        seen = mask.new_empty(ids.shape[0], 0)
        for x in fed:
            seen = torch.cat([seen, mask if x is ids else torch.ones_like(x)], 1)
            positions = (seen.cumsum(-1) - 1).clamp_min(0)[:, -x.shape[1] :]
            given = {} if seen.all() else {"attention_mask": seen, "position_ids": positions}
            found.append(m(input_ids=x, **cache, use_cache=True, **given).logits[:, -1:].float())
        return torch.cat(found, 1)

    stock = logits(model)
    wide = copy.deepcopy(model).float()
    exact = logits(wide)
    del wide
    found: dict[str, float] = {}
    for what, part in (("first", slice(0, 1)), ("steps", slice(1, None))):
        for who, seen in (("stock", stock), ("ours", mine)):
            far = (seen - exact)[:, part]
            found |= {
                f"{what}_{who}_max": far.abs().max().item(),
                f"{what}_{who}_rms": far.square().mean().sqrt().item(),
            }
        found[f"{what}_rms_ratio"] = found[f"{what}_ours_rms"] / found[f"{what}_stock_rms"]
        found[f"{what}_same_top1"] = (
            (stock.argmax(-1) == mine.argmax(-1))[:, part].float().mean().item()
        )
    return found


# -- one row --------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def weights_of(name: str, device: torch.device, layers: int | None) -> PreTrainedModel:
    """Return the model that rows of one name share. Peers that change a model change a twin."""
    return random_model(name, device, layers=layers)


@lru_cache(maxsize=1)
def assistant_weights(name: str, device: torch.device, layers: int | None) -> PreTrainedModel:
    """Return the assistant that peers of several rows share."""
    return random_model(name, device, layers=layers)


def titled(name: str, args: argparse.Namespace) -> str:
    """Return the row's name: the model and all that changes it or its prompts."""
    adapters = f" + LoRA {args.lora}" if args.lora else ""
    adapters += f", {args.weights}" if args.weights else ""
    images = f" + {args.images} image{'s' * (args.images > 1)}" if args.images else ""
    cut = f", {args.layers} layer{'s' * (args.layers > 1)}" if args.layers else ""
    drafts = ""
    if args.draft:
        right = "" if args.accept is None else f", {args.accept:.0%} right"
        drafts = f" + {args.draft_tokens} drafts by {args.draft}{right}"
    return name + cut + adapters + images + drafts + (", padded" if args.padded else "")


def cache_bytes(model: PreTrainedModel, tokens: Sequence[int]) -> int:
    """Return the bytes of keys and values that a step reads.

    Sliding layers read at most their window.
    """
    c = model.config.get_text_config(decoder=True)
    if not hasattr(c, "num_attention_heads"):  # a model of recurrences alone
        return 0
    kinds = getattr(c, "layer_types", None) or ["full_attention"] * c.num_hidden_layers
    seen = sum(
        min(n, c.sliding_window) if kind == "sliding_attention" else n
        for kind in kinds
        if kind.endswith("attention")
        for n in tokens
    )
    kv_heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    if model.config.is_encoder_decoder:  # also those of the encoder's output
        of_sound = (
            getattr(c, "max_source_positions", 0) if model.main_input_name != "input_ids" else 0
        )
        seen += c.num_hidden_layers * sum(of_sound or n for n in tokens)
    numbers: int = 2 * seen * kv_heads * head_dim
    return numbers * model.dtype.itemsize


def set_up(
    peer: str,
    model: PreTrainedModel,
    bare: PreTrainedModel,
    prompts: Prompts,
    args: argparse.Namespace,
) -> tuple[Callable[..., Any], Any]:
    """Return a peer's call, and the optimized model if the peer is ours."""
    if peer in (BARE, PLAIN):
        return ours(bare, prompts, args.new, args.tune)[0], None
    if peer == "ours":
        return ours(model, prompts, args.new, args.tune)
    if peer in (DRAFTED, ASSISTED):
        call, fast = drafted(model, peer == DRAFTED, prompts, args)
        call.drafts_of = fast  # type: ignore[attr-defined]
        return call, None
    if peer == "compile":
        if prompts.ids.device.type != "cuda":
            raise RuntimeError("needs a GPU")
        return compiled_step(twin(model), prompts, args.new), None
    if peer == "liger":
        return generate_with(with_liger(model), prompts, args.new), None
    stock = with_int4_products(twin(bare)) if peer == PRODUCT else twin(model)
    if peer == ATTENTION:
        stock.set_attn_implementation("mirage")
    is_static = peer in ("static", ATTENTION, PRODUCT)
    options = {"cache_implementation": "static"} if is_static else {}
    call: Any = generate_with(stock, prompts, args.new, **options)
    if peer == PRODUCT:  # it has codes of its own, and all others share their weights
        call.weight_bytes = product_bytes(stock)
    return call, None


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


def free() -> None:
    """Free memory that nothing refers to any more."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def bench(name: str, batch: int, prompt: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one row: all peers at one batch size and prompt length."""
    device = torch.device(args.device)
    bare = weights_of(name, device, args.layers)
    model = with_adapters(twin(bare), args.lora) if args.lora else bare
    if args.weights:
        model = with_codes(twin(bare), args.weights)
    prompts = prompts_of(model, batch, prompt, args)
    floor = coded_bytes(model, batch) if args.weights else floor_bytes(model, batch)
    cached = cache_bytes(model, [n + args.new // 2 for n in prompts.lengths])
    peers = [p for p in args.peers if p != "liger" or find_spec("liger_kernel") is not None]
    row: dict[str, Any] = {
        "model": titled(name, args),
        "layers": model.config.get_text_config(decoder=True).num_hidden_layers,
        "batch": batch,
        "prompt": prompt,
        "new": args.new,
        "dtype": "bfloat16",
        "floor_ms": (floor + cached) / BYTES_PER_SECOND * 1e3,
        "weight_bytes": floor,
        "cache_bytes": cached,
        "peers": {},
    } | {how: True for how in ("apart", "side_by_side", "long_calls") if getattr(args, how)}
    if args.images:
        row |= {"images": args.images, "image_tokens": prompts.lengths[0] - prompt}
    for group in [[peer] for peer in peers] if args.apart else [peers]:
        measured = bench_peers(group, name, model, bare, prompts, args, row)
        row["peers"] |= {peer: asdict(r) for peer, r in measured.items()}
        free()
    return row


def bench_peers(
    peers: Sequence[str],
    name: str,
    model: PreTrainedModel,
    bare: PreTrainedModel,
    prompts: Prompts,
    args: argparse.Namespace,
    row: dict[str, Any],
) -> dict[str, Measured]:
    """Measure some peers in turns. Facts about ours other than times go into the row."""
    device, (batch, prompt) = prompts.ids.device, prompts.ids.shape
    results = {peer: Measured() for peer in peers}
    calls: dict[str, Callable[..., Any]] = {}
    fast, attended = None, attention_report()
    for peer in peers:
        say(f"{name}, batch {batch}, prompt {prompt}: setting up {peer}")
        started = time.perf_counter()
        before = allocated_bytes(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            with within(args.cap):
                calls[peer], found = set_up(peer, model, bare, prompts, args)
                if found is not None:
                    fast = found
                    row["optimize_s"] = time.perf_counter() - started
                    row["optimize_mib"] = (allocated_bytes(device) - before) / 2**20
                # The first call of static compiles. In ours it runs the prompt by HF's forward.
                for _ in range(1 if peer == "eager" else 2):
                    calls[peer]()
                sync(device)
                if peer == ATTENTION and not (ran := attention_since(attended)).kernels:
                    raise RuntimeError(f"no kernel of ours ran: {ran}")
        except Exception as e:  # a rival that fails is a line in the table, not the end of the run
            if args.strict:
                raise
            calls.pop(peer, None)
            results[peer].failed = explained(e)
            say(f"{name}: {peer} failed, {results[peer].failed}")
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()  # so that its reserved memory is not counted for the next
        results[peer].setup_s = time.perf_counter() - started
        if device.type == "cuda":
            weights = before + getattr(calls.get(peer), "weight_bytes", 0)
            results[peer].peak_mib_over_weights = (
                torch.cuda.max_memory_allocated() - weights
            ) / 2**20
    with alone():
        say(f"{name}, batch {batch}, prompt {prompt}: timing {', '.join(calls)}")
        row["gpu_before"] = gpu_state()
        before = drafts_so_far(calls)
        measure(calls, results, args, device)
        if ATTENTION in calls:
            row["attention_report"] = str(attention_since(attended)).splitlines()
        if DRAFTED in calls:
            by_us = calls[DRAFTED].drafts_of.mirage.report  # type: ignore[attr-defined]
            row["drafts"] = dict(drafts_so_far(calls) - before)
            row["report_of_drafted"] = str(by_us).splitlines()
        if "ours" in calls and fast is not None:
            row |= beyond_times(calls, model, fast, prompts, args)
    return results


def drafts_so_far(calls: dict[str, Callable[..., Any]]) -> Counter[str]:
    """Return how many drafts our peer has made and taken until now, if it is among the calls."""
    if DRAFTED not in calls:
        return Counter()
    counts = calls[DRAFTED].drafts_of.mirage.report.decode  # type: ignore[attr-defined]
    return Counter({k: n for k, n in counts.items() if k.startswith("drafts: ")})


def beyond_times(
    calls: dict[str, Callable[..., Any]],
    model: PreTrainedModel,
    fast: PreTrainedModel,
    prompts: Prompts,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Return facts about ours other than its times: report, equal tokens, profile, logits."""
    ids = prompts.ids
    row: dict[str, Any] = {"report": str(fast.mirage.report).splitlines()}
    if "eager" in calls and not args.long_calls:
        a, b = calls["eager"](), calls["ours"]()
        row["same_tokens_as_eager"] = int((a == b)[:, -args.new :].all(0).long().cumprod(0).sum())
    if sum(prompts.lengths) <= FEW_TOKENS and not args.times_only:
        if ids.device.type == "cuda":
            row["searched"] = share_in_searched_kernels(
                calls["ours"], tuple(args.kernel_names), args.new
            )
        if not (model.config.is_encoder_decoder or prompts.images or args.weights):
            say("comparing logits with float32")
            row["logits"] = closeness(model, fast, ids)
    return row


def table(report: dict[str, Any]) -> str:
    """Return a row as text for the terminal."""
    lines = [
        f"{report['model']}, batch {report['batch']}, prompt {report['prompt']}, {report['new']} "
        f"new tokens: floor  {report['floor_ms']:.3f} ms/token",
        f"{'peer':<10}{'ms/token':>10}{'min..max':>18}{'step ms':>10}{'first ms':>10}"
        f"{'set-up s':>10}{'MiB more':>10}",
    ]
    for peer, r in report["peers"].items():
        if r["failed"]:
            lines.append(f"{peer:<10}{r['failed']}")
            continue
        each = r["ms_per_token"] or r["step_ms"]
        shown = f"{each['median']:10.3f}" if r["ms_per_token"] else f"{'(step)':>10}"
        first = f"{r['first_token_ms']['median']:10.2f}" if r["first_token_ms"] else f"{'-':>10}"
        step = f"{r['step_ms']['median']:10.3f}" if r["step_ms"] else f"{'-':>10}"
        between = f"{each['min']:.3f}..{each['max']:.3f}"
        lines.append(
            f"{peer:<10}{shown}{between:>18}{step}{first}{r['setup_s']:10.1f}"
            f"{r['peak_mib_over_weights']:10.0f}"
        )
    if report.get("drafts"):
        made, taken = (report["drafts"].get(f"drafts: {k}", 0) for k in ("drafted", "taken"))
        steps = report["drafts"]["drafts: steps of a row"]
        lines.append(
            f"drafts: {taken / made:.1%} of {made} taken, {1 + taken / steps:.2f} tokens a step"
        )
    if "searched" in report:
        s = report["searched"]
        lines.append(
            f"GPU time in searched kernels: {s['share']:.1%} of {s['gpu_us_per_token']:.0f} µs a "
            "token"
        )
    if "logits" in report:
        d = report["logits"]
        lines += [
            f"logits of the {what}, from float32 (rms, max): stock {d[f'{what}_stock_rms']:.4g}, "
            f"{d[f'{what}_stock_max']:.4g}; ours {d[f'{what}_ours_rms']:.4g}, "
            f"{d[f'{what}_ours_max']:.4g}"
            for what in ("first", "steps")
        ]
    return "\n".join(lines)


def numbers(text: str) -> tuple[int, ...]:
    """Parse positive numbers with commas."""
    given = tuple(int(n) if n.strip().isdecimal() else 0 for n in text.split(","))
    if min(given) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers of 1 and more, as 1 or 1,8")
    return given


def why_no_images(args: argparse.Namespace) -> str:
    """Return why prompts cannot have the images that they should have, or an empty text."""
    for name in args.model.split(","):
        config = config_of(name)
        if config.model_type not in IMAGES or not hasattr(config, "vision_config"):
            return f"--images: {name} takes no images here"
    if args.padded:
        return "--images: prompts with images are not padded"
    if min(args.prompt) <= args.images:
        return f"--images: {args.images} images need {args.images + 1} or more tokens of text"
    return ""


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="llama-3.2-1b", help=f"one or more of {', '.join(names())}, with commas"
    )
    parser.add_argument(
        "--prompt", type=numbers, default=(128,), help="tokens, one length or more with commas"
    )
    parser.add_argument("--new", type=int, default=128, help="tokens, 2 or more")
    parser.add_argument("--batch", type=numbers, default=(1,), help="one size or more with commas")
    parser.add_argument(
        "--peers",
        type=lambda s: tuple(s.split(",")),
        default=PEERS,
        help=f"default: {','.join(PEERS)}",
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each peer")
    parser.add_argument(
        "--cap", type=float, default=150.0, help="seconds that setting up one peer may take"
    )
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="start no row after this time"
    )
    parser.add_argument(
        "--lora",
        type=int,
        default=0,
        metavar="RANK",
        help="adapters of this rank on every linear (PEFT, unmerged)",
    )
    parser.add_argument(
        "--padded",
        action="store_true",
        help="prompts from the whole length down to half of it, with padding on the left",
    )
    parser.add_argument(
        "--weights",
        default="",
        choices=("", *FORMATS),
        help="the linears of the layers, or their experts, hold codes of this format",
    )
    parser.add_argument(
        "--images",
        type=int,
        default=0,
        metavar="N",
        help="each prompt has so many random images besides its tokens of text",
    )
    parser.add_argument(
        "--times-only",
        action="store_true",
        help="profile no kernels, and compare no logits with float32",
    )
    parser.add_argument(
        "--draft",
        default="",
        metavar=f"{LOOKUP}|MODEL",
        help="where the drafts of the peers drafted and assisted come from",
    )
    parser.add_argument(
        "--draft-tokens", type=int, default=4, metavar="K", help="drafts of a step, 1 to 15"
    )
    parser.add_argument(
        "--accept", type=float, metavar="P", help="the probability that a draft is right"
    )
    parser.add_argument(
        "--adapt", action="store_true", help="let the number of drafts depend on how many are taken"
    )
    parser.add_argument("--layers", type=int, help="a model cut down to so many layers")
    parser.add_argument("--tune", default="auto", choices=("auto", "never", "full"))
    parser.add_argument(
        "--kernel-names", nargs="*", default=("mirage",), help="how names of searched kernels begin"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, help="write all numbers there, row by row")
    parser.add_argument(
        "--resume", action="store_true", help="keep the rows that the JSON file has"
    )
    parser.add_argument(
        "--apart",
        action="store_true",
        help="peers one after another, their memory freed in between, if not all fit",
    )
    parser.add_argument(
        "--side-by-side",
        action="store_true",
        help="set up all rows at the same time, each in a process and with weights of its own, "
        "then time one after another; the GPU needs memory for all",
    )
    parser.add_argument(
        "--long-calls",
        action="store_true",
        help="take all times of a round from one call with a streamer",
    )
    parser.add_argument("--strict", action="store_true", help="stop at a peer that fails")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            "bench_generate: no GPU here; run it on the GPU whose times you want, or give --device "
            "cpu"
        )
    known = (
        *PEERS,
        ATTENTION,
        *([BARE] if args.lora else []),
        *([PLAIN] if args.weights else []),
        *([PRODUCT] if args.weights == "int4" else []),
        *([DRAFTED, ASSISTED] if args.draft else []),
    )
    unknown = set(args.peers) - set(known)
    if args.side_by_side and (args.apart or args.seconds < math.inf):
        parser.error(
            "--side-by-side needs memory for all at once and ends when it ends: without --apart "
            "and --seconds"
        )
    if args.draft not in ("", LOOKUP, *names()):
        parser.error(f"--draft {args.draft}: give {LOOKUP} or one of {', '.join(names())}")
    if args.accept is not None and not (args.draft and 0 <= args.accept <= 1):
        parser.error("--accept is a probability, and needs --draft")
    if args.images and (why := why_no_images(args)):
        parser.error(why)
    if unknown or args.new < 2:
        parser.error(
            f"unknown peers {', '.join(unknown)}; there are {', '.join(known)}"
            if unknown
            else "--new must be 2 or more"
        )
    report = Report(args.json, vars(args), args.resume)
    if others := [
        r["name"]
        for r in report.rows
        if r["new"] != args.new or args.layers not in (None, r.get("layers"))
    ]:
        sys.exit(
            f"{args.json}: of other --new or --layers: {'; '.join(others)}; give another file, or "
            "leave --resume out"
        )
    jobs = {
        f"{titled(name, args)}, batch {batch}, prompt {prompt}": partial(
            bench, name, batch, prompt, args
        )
        for name in args.model.split(",")
        for prompt in args.prompt
        for batch in args.batch
    }
    if args.side_by_side:
        run_side_by_side(report, jobs, args.cap * len(args.peers), table)
    else:
        run_all(report, jobs, Budget(args.seconds), table)


if __name__ == "__main__":
    main()
