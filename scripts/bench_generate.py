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
    batched_mm static, with experts_implementation="batched_mm"; the default is "grouped_mm"
    liger      HF's generate with Liger's norms and MLPs, if Liger is installed (RoPE left out)
    ours       generate after mirage_hf.optimize()
    bare       with --lora: ours, for the same model without adapters
    plain      with --weights: ours, for the same model with bfloat16 weights
    product    with --weights: static, with torch's own product of int4, int8 or float8 in linears
    drafted    with --draft: ours, with steps that verify drafts
    assisted   with --draft: HF's generate with the same drafts, for batches of 1

The floor is the bytes that a step must read, divided by 4.47 TB/s. These are the weights, and the
keys and values of the prompt and half of the new tokens. The embedding table does not count, and a
tied head counts once.

`ms_per_token` is the whole call divided by its new tokens, prefill included. `step_ms` is the time
between later tokens as a streamer sees them. `first_token_ms` is the time to the first one.
`peak_mib_over_weights` is the peak of a peer's set-up and first calls, beyond its weights and what
peers before it hold. `optimize_mib` is what our `optimize` leaves allocated.

Weights are random. The prompt of an encoder-decoder model is the text of its encoder, or 30 s of
sound for Whisper. With --images, each prompt also has images. Their tokens come on top of those of
--prompt, and the vision model's weights do not count for the floor. With --weights, linears hold
codes of the format's own library (coded_models.py), and eager and static run them as transformers
does: it decodes int4 at the first forward.

For short prompts, kernels are profiled, and logits of causal models without images are compared
with float32. --times-only leaves both out.

--draft says where drafts come from: prompt lookup, or an assistant, another model of the list. Its
weights are random, so its own drafts are hardly ever taken. With --accept P, the source runs, but
its drafts are replaced by the model's own greedy tokens. Each of these is right with probability P.
`drafts` says how many were made and taken. Each step verifies --draft-tokens drafts. With --adapt
the number depends on how many were taken before, in HF's assisted decoding too.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from transformers import PreTrainedModel

from mirage_hf.attention_interface import attention_report
from scripts.bench_measures import (
    Measured,
    allocated_bytes,
    closeness,
    measure,
    share_in_searched_kernels,
    sync,
)
from scripts.bench_options import parser_of, why_wrong
from scripts.bench_peers import (
    ATTENTION,
    DRAFTED,
    Peer,
    attention_since,
    draft_counts,
    set_up,
    twin,
    weights_of,
)
from scripts.bench_prompts import Prompts, prompts_of
from scripts.bench_reports import Budget, Report, alone, run_all, run_side_by_side
from scripts.benching import BYTES_PER_SECOND, explained, gpu_state, say, within
from scripts.coded_models import coded_bytes, with_codes
from scripts.configs import floor_bytes, with_adapters

#: Logits are compared and kernels profiled only if a batch of prompts has at most this many tokens.
FEW_TOKENS = 4096


# -- one row ---------------------------------------------------------------------------------------


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
    peers = [p for p in args.peers if p != "liger" or find_spec("liger_kernel") is not None]
    for chosen in [[peer] for peer in peers] if args.apart else [peers]:
        group = PeerGroup(name, model, bare, prompts, args)
        measured = group.measure(chosen)
        row |= group.facts
        row["peers"] |= {peer: asdict(r) for peer, r in measured.items()}
        free()
    return row


class PeerGroup:
    """Peers of one row, which are set up and then timed in turns.

    Attributes:
        facts: Facts about our peers other than times.
    """

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        bare: PreTrainedModel,
        prompts: Prompts,
        args: argparse.Namespace,
    ):
        self.model, self.bare, self.prompts, self.args = model, bare, prompts, args
        self.device, (batch, prompt) = prompts.ids.device, prompts.ids.shape
        self.title = f"{name}, batch {batch}, prompt {prompt}"
        self.facts: dict[str, Any] = {}
        self._attention_before = attention_report()

    def measure(self, names: Sequence[str]) -> dict[str, Measured]:
        """Set up some peers, and time them in turns."""
        results = {name: Measured() for name in names}
        found = {name: self._set_up(name, results[name]) for name in names}
        peers = {name: peer for name, peer in found.items() if peer is not None}
        calls = {name: peer.call for name, peer in peers.items()}
        with alone():
            say(f"{self.title}: timing {', '.join(calls)}")
            self.facts["gpu_before"] = gpu_state()
            drafts_before = draft_counts(peers.get(DRAFTED))
            measure(calls, results, self.args, self.device)
            if ATTENTION in peers:
                report = attention_since(self._attention_before)
                self.facts["attention_report"] = str(report).splitlines()
            if (peer := peers.get(DRAFTED)) is not None and peer.model is not None:
                self.facts["drafts"] = dict(draft_counts(peer) - drafts_before)
                self.facts["report_of_drafted"] = str(peer.model.mirage.report).splitlines()
            if "ours" in peers and (fast := peers["ours"].model) is not None:
                self.facts |= beyond_times(calls, self.model, fast, self.prompts, self.args)
        return results

    def _set_up(self, name: str, result: Measured) -> Peer | None:
        """Set up a peer, call it until it is warm, and note what that took. None if it fails."""
        say(f"{self.title}: setting up {name}")
        started, before = time.perf_counter(), allocated_bytes(self.device)
        has_gpu = self.device.type == "cuda"
        if has_gpu:
            torch.cuda.reset_peak_memory_stats()
        peer = None
        try:
            with within(self.args.cap):
                peer = set_up(name, self.model, self.bare, self.prompts, self.args)
                if name == "ours":
                    self.facts["optimize_s"] = time.perf_counter() - started
                    allocated = allocated_bytes(self.device) - before
                    self.facts["optimize_mib"] = allocated / 2**20
                # The first call of static compiles. In ours it runs the prompt by HF's forward.
                for _ in range(1 if name == "eager" else 2):
                    peer.call()
                sync(self.device)
                if name == ATTENTION:
                    self._check_attention()
        except Exception as e:  # a rival that fails is a line in the table, not the end of the run
            if self.args.strict:
                raise
            peer = None
            result.failed = explained(e)
            say(f"{self.title}: {name} failed, {result.failed}")
            gc.collect()
            if has_gpu:
                torch.cuda.empty_cache()  # so that its reserved memory is not counted for the next
        result.setup_s = time.perf_counter() - started
        if has_gpu:
            weights = before + (0 if peer is None else peer.weight_bytes)
            result.peak_mib_over_weights = (torch.cuda.max_memory_allocated() - weights) / 2**20
        return peer

    def _check_attention(self) -> None:
        """Check that kernels ran the attention of the peer that names it."""
        ran = attention_since(self._attention_before)
        if not ran.kernels:
            raise RuntimeError(f"no kernel of ours ran: {ran}")


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


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(__doc__)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            "bench_generate: no GPU here; run it on the GPU whose times you want, or give --device "
            "cpu"
        )
    if why := why_wrong(args):
        parser.error(why)
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
