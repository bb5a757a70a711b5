"""Time the end of a decoding step: the choice of the next token.

    python -m scripts.bench_choices --what select,processors,generate --json choices.json

- `select`: the greedy choice by `argmax_kernel`, by vocabulary and batch. Alone, with and without
  overlapping launches, and what it adds to a chain of embedding, RMSNorm and head.
- `processors`: every processor that changes probabilities, as a captured step runs it.
- `generate`: ms per token of `generate` with the model's captured forward. Tokens are chosen
  greedily and by sampling, on the device and on the host.

Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers.generation.logits_process as hf
from transformers import LogitsProcessorList, StoppingCriteriaList

from mirage_hf.codegen.kernel_launch import launch
from mirage_hf.decode import install, processors
from mirage_hf.decode.control import Control, TokenHistory
from mirage_hf.decode.kernels import sampling
from mirage_hf.decode.kernels.embedding import EmbeddingOutput, embed
from mirage_hf.decode.processor_ops import TextSoFar
from mirage_hf.decode.processors import CallTensors
from mirage_hf.decode.sampler import Sampler
from mirage_hf.pipeline import resolver
from scripts.bench_chain import HEAD, Chain
from scripts.bench_reports import Budget, Report, run_all
from scripts.benching import DEVICE, captured, need_gpu, take_turns
from scripts.configs import MODELS, random_model

VOCABULARIES = (32000, 50257, 128256, 151936, 256000)
CHAINED = ("qwen3-0.6b", "llama-3.2-1b")
#: Pairs to try: the logits of a thread block, and its warps.
CHUNKS = ((1024, 4), (2048, 4), (2048, 8), (4096, 8), (8192, 8))

WARPERS: dict[str, Callable[[], Any]] = {
    "temperature": lambda: hf.TemperatureLogitsWarper(0.7),
    "top k": lambda: hf.TopKLogitsWarper(50),
    "top p": lambda: hf.TopPLogitsWarper(0.9),
    "top h": lambda: hf.TopHLogitsWarper(0.4),
    "min p": lambda: hf.MinPLogitsWarper(0.05),
    "typical": lambda: hf.TypicalLogitsWarper(0.9),
    "epsilon": lambda: hf.EpsilonLogitsWarper(3e-4),
    "eta": lambda: hf.EtaLogitsWarper(3e-4, device=DEVICE),
    "repetition": lambda: hf.RepetitionPenaltyLogitsProcessor(1.2),
    "bad words": lambda: hf.NoBadWordsLogitsProcessor([[5], [3, 4], [1, 2, 3]]),
}

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sample": {"top_k": 0},
    "top k": {"top_k": 50},
    "top p": {"top_k": 0, "top_p": 0.9},
    "top p, min p": {"top_p": 0.9, "min_p": 0.05},
    "typical": {"top_k": 0, "typical_p": 0.9},
}


# -- the greatest logit ---------------------------------------------------------------------------


def greedy_launch(batch: int, vocab: int, block: int, warps: int) -> Callable[[Any], None]:
    """Return a function that launches the greedy choice.

    Its rows never finish, so it can run any number of times.

    Args:
        batch: Rows.
        vocab: Logits of a row.
        block: Logits of a thread block.
        warps: Warps of a thread block.
    """
    usual_block, sampling.argmax_block = sampling.argmax_block, lambda *_: block
    try:
        # __wrapped__ goes past the cache, because argmax_block is replaced here.
        usual_launch = sampling.argmax_launch.__wrapped__(batch, vocab)
        sampler = Sampler.allocate(batch, vocab, torch.device(DEVICE))
    finally:
        sampling.argmax_block = usual_block
    kernel, c = replace(usual_launch, num_warps=warps), started(batch)
    alive = c.alive.view(torch.uint8)
    state = [c.ids, c.position, c.length, c.budget, alive, c.eos, c.pad, c.report]

    def run(logits: torch.Tensor) -> None:
        launch(kernel, [logits, *state, sampler.best, sampler.counter])

    return run


def started(batch: int) -> Control:
    """Return the control block of a call that has begun."""
    c = Control.allocate(batch, 1024, torch.device(DEVICE))
    c.start(
        length=100,
        position=torch.tensor([[99]], device=DEVICE),
        lowest=None,
        budget=1 << 40,
        eos=None,
        pad=None,
    )
    return c


def select(batch: int, vocab: int, rounds: int) -> dict[str, Any]:
    """Return µs of a launch of each kind, alone."""
    logits = [torch.randn(batch, vocab, device=DEVICE).bfloat16() for _ in range(4)]
    kinds = {
        f"{chunk} by {warps} warps": captured(
            greedy_launch(batch, vocab, chunk, warps), logits * 50
        )
        for chunk, warps in CHUNKS
    }
    kinds["torch.argmax"] = captured(lambda x: x.argmax(-1), logits * 50)
    take_turns(kinds.values(), rounds)
    return {"us": {name: c.result()["us"] for name, c in kinds.items()}}


def chained(model: str, batch: int, rounds: int) -> dict[str, Any]:
    """Return µs of a chain: embedding, RMSNorm + head, and nothing or a greedy choice."""
    sizes, device = MODELS[model], torch.device(DEVICE)
    chain = Chain(sizes, batch)
    block = chain.blocks()[HEAD]
    head = resolver.resolve(
        block.program(batch), device=DEVICE, tune="never", pattern=block.pattern.name
    )
    norm = torch.ones(1, sizes.hidden, dtype=torch.bfloat16, device=DEVICE)
    weight = chain.model(0, DEVICE).head
    logits = torch.zeros(batch, sizes.vocab, dtype=torch.bfloat16, device=DEVICE)
    tables = torch.zeros(1, 1024, sizes.head_dim, dtype=torch.bfloat16, device=DEVICE)
    inputs = EmbeddingOutput.allocate(
        batch, sizes.hidden, sizes.head_dim, (None,), torch.bfloat16, device
    )
    c = started(batch)

    def step(end: Callable[[Any], None] | None) -> Callable[[Any], None]:
        def run(_: Any) -> None:
            embed(c, weight, tables, tables, inputs, by_kernel=True)
            operands = [inputs.x, norm, weight.t()]
            if head.runs_kernel:
                head.run(operands, [logits])
            else:
                logits.copy_(head.run(operands)[0])
            if end is not None:
                end(logits)

        return run

    kinds = {"nothing": captured(step(None), [logits] * 50)}
    kinds |= {
        f"{chunk} by {warps} warps": captured(
            step(greedy_launch(batch, sizes.vocab, chunk, warps)), [logits] * 50
        )
        for chunk, warps in CHUNKS
    }
    take_turns(kinds.values(), rounds)
    us = {name: c.result()["us"] for name, c in kinds.items()}
    return {
        "us": us,
        "added_us": {name: t - us["nothing"] for name, t in us.items()},
        "head": "kernel" if head.runs_kernel else "library",
    }


# -- processors -----------------------------------------------------------------------------------


def processor(name: str, batch: int, vocab: int, rounds: int) -> dict[str, Any]:
    """Return µs of one processor in a graph, and of HF's class called from the host.

    The host's time includes a copy of the scores.
    """
    scores = [4 * torch.randn(batch, vocab, device=DEVICE).bfloat16().float() for _ in range(4)]
    p = WARPERS[name]()
    row = processors.TABLE[type(p)]
    history = TokenHistory.allocate(batch, 1024, torch.device(DEVICE))
    ids = torch.randint(vocab, (batch, 500), device=DEVICE)
    history.start(ids, 100)
    values = [v.to(DEVICE) for v in row.values(p, CallTensors(vocab))]
    ours = captured(
        lambda x: row.run(
            TextSoFar(history.ids, history.prompt, history.slots), x, *row.sizes(p), *values
        ),
        scores,
    )
    take_turns([ours], rounds)
    host = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for x in scores:
            p(ids, x.clone())
        torch.cuda.synchronize()
        host.append((time.perf_counter() - started) * 1e6 / len(scores))
    return {"us": ours.result()["us"], "host_us": statistics.median(host)}


# -- generate -------------------------------------------------------------------------------------


def generates(model_name: str, batch: int, new: int, rounds: int) -> dict[str, Any]:
    """Return ms per token of calls that choose in different ways, on device and host."""
    model = random_model(model_name, torch.device(DEVICE))
    runner = install(model)
    ids = torch.randint(1000, (batch, 128), device=DEVICE)
    by_host = StoppingCriteriaList(
        [lambda ids, scores, **kw: torch.zeros(len(ids), dtype=torch.bool, device=ids.device)]
    )
    found: dict[str, dict[str, list[float]]] = {
        name: {"device": [], "host": []} for name in SAMPLING
    }
    # One kind after another, not in turns, because graphs are kept for few kinds of choices.
    for name, options in SAMPLING.items():
        for n in range(rounds + 2):
            for where, extra in (
                ("device", {}),
                ("host", {"stopping_criteria": by_host, "logits_processor": LogitsProcessorList()}),
            ):
                torch.cuda.synchronize()
                started = time.perf_counter()
                model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=new,
                    **{"do_sample": True, **options},
                    **extra,
                )
                torch.cuda.synchronize()
                if n >= 2:
                    found[name][where].append((time.perf_counter() - started) * 1e3 / new)
    return {
        "ms_per_token": {
            name: {where: statistics.median(t) for where, t in each.items()}
            for name, each in found.items()
        },
        "counts": dict(runner.counts) | dict(runner.selections),
    }


def show(row: dict[str, Any]) -> str:
    """Return a row for the terminal."""

    def text(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k} {text(v)}" for k, v in value.items()) + "}"
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    return f"{row['name']}: " + ", ".join(
        f"{k} {text(v)}" for k, v in row.items() if k not in ("name", "gpu", "seconds")
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--what", type=lambda s: s.split(","), default=["select", "processors", "generate"]
    )
    parser.add_argument(
        "--model",
        default="llama-3.2-1b",
        help=f"the model that gives vocabulary and forward: one of {', '.join(MODELS)}",
    )
    parser.add_argument("--batch", type=lambda s: [int(n) for n in s.split(",")], default=[1, 8])
    parser.add_argument("--new", type=int, default=128, help="tokens of a generate")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all numbers there")
    args = parser.parse_args()
    need_gpu("bench_choices")
    jobs: dict[str, Callable[[], dict[str, Any]]] = {}
    rounds, vocab = args.rounds, MODELS[args.model].vocab
    for b in args.batch:
        if "select" in args.what:
            jobs |= {f"select, {v}, batch {b}": partial(select, b, v, rounds) for v in VOCABULARIES}
            jobs |= {
                f"select after the head of {m}, batch {b}": partial(chained, m, b, rounds)
                for m in CHAINED
            }
        if "processors" in args.what:
            jobs |= {
                f"{name}, batch {b}": partial(processor, name, b, vocab, rounds) for name in WARPERS
            }
        if "generate" in args.what:
            jobs[f"generate, batch {b}"] = partial(generates, args.model, b, args.new, rounds)
    run_all(Report(args.json, vars(args)), jobs, Budget(), show)


if __name__ == "__main__":
    main()
