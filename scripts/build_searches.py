"""Search for the programs of models, and keep what is found for programs of other sizes.

    python -m scripts.build_searches
    python -m scripts.build_searches --configs qwen3-0.6b,qwen3.5-4b --batch-sizes 1,4

It needs no GPU. A program is searched only if the folder has no search that serves its sizes. So a
stopped run can go on, and a model that is like an earlier one adds little.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from mirage_hf.decode.explaining import meta_model, planned_step
from mirage_hf.decode.tracing import Traces, wanted_traces
from mirage_hf.errors import MirageError, Rejected
from mirage_hf.formats import CodedWeight, Coding, coded_weight
from mirage_hf.layers.prefill import layer_prefill
from mirage_hf.match.matches import Matches
from mirage_hf.patterns.attention import ATTENTION, ROPES, for_long_caches
from mirage_hf.patterns.prompt import PROMPT_NORM, PROMPT_ROTATION
from mirage_hf.patterns.schema import PatternBlock
from mirage_hf.pipeline.layer_choice import make_outcome
from mirage_hf.pipeline.request import Request
from mirage_hf.pipeline.resolver import kernel_request
from mirage_hf.pipeline.reuse import search_to_keep
from mirage_hf.swap.coded_forward import decoding_program, has_reversed_columns, product_program
from mirage_hf.zoo import known_search
from scripts.build_zoo import ROOT, block_to_make, blocks_of, matched
from scripts.coded_models import with_codes
from scripts.configs import config_of, names, random_model

#: A search that is packaged should miss nothing, so it may take this long.
SECONDS = 300.0

#: Kernels are generated for this target, and not run.
TARGET = "sm_90"

#: Formats of linears that are searched for.
OF_LINEARS = ("int4", "int4-zeros", "int8", "fp8", "nf4")

#: Prompts of so many tokens are searched for. They serve chunks of 64 to 4096 tokens.
PROMPTS = (128, 2048)


def requests_of(name: str, rows: int) -> Iterator[Request]:
    """Yield a request for each program that `optimize()` would search for a model.

    Args:
        name: A model of scripts/configs.py.
        rows: The number of sequences.
    """
    found = matched(name, "bfloat16", torch.device("cpu"), 0)
    for block in dict.fromkeys(itertools.chain.from_iterable(blocks_of(found))):
        yield _block_request(block, rows)
        if block.pattern.searched_at is not None:
            yield _block_request(for_long_caches(block), rows)
    if not isinstance(found.causal, Rejected):  # other models' prompts run their own forward
        for block in _prompt_blocks(found):
            for tokens in PROMPTS:
                yield _block_request(block, rows * tokens)
    model = meta_model(config_of(name), torch.bfloat16)
    if wanted_traces(model, found) is Traces.NONE:
        return
    plan = planned_step(model, rows)
    for one in plan.attentions:
        block = ATTENTION.block(**one.sizes)
        yield _block_request(block, rows)
        yield _block_request(for_long_caches(block), rows)
    graphs = [program.graph for program in plan.programs.values()]
    for graph in [*graphs, *(region.graph for region in plan.regions_to_run())]:
        yield kernel_request(graph, target=TARGET, pattern="traced")


def _prompt_blocks(found: Matches) -> list[PatternBlock]:
    """Return the blocks of prompts that run by kernels."""
    layers = (m for m in found.modules if m.kind == "layer")
    prefills = (layer_prefill(m.operands, m.parts, m.layer_layout) for m in layers)
    blocks = (prefill.blocks.values() for prefill in prefills if prefill is not None)
    return list(dict.fromkeys(itertools.chain.from_iterable(blocks)))


def prompt_requests() -> Iterator[Request]:
    """Yield a request for each norm and rotation of prompts that run the model's own forward.

    A search serves a quarter to four times its sizes, so a few sizes serve all models.
    """
    for tokens, dtype in itertools.product(PROMPTS, (None, torch.float32)):
        for rope, rotary in itertools.product(filter(None, ROPES), (None, 64)):
            block = PROMPT_ROTATION.block(
                kv_heads=8,
                group=4,
                head_dim=128,
                norm="",
                eps=0.0,
                dtype=torch.bfloat16,
                rope=rope,
                rotary=rotary,
                rope_dtype=dtype,
                packing="",
            )
            yield _block_request(block, tokens)
    for tokens, k, (offset, centred) in itertools.product(
        PROMPTS, (128, 2048), ((0.0, False), (1.0, False), (0.0, True))
    ):
        sizes = {"eps": 1e-6, "offset": offset, "centred": centred, "norm_bias": centred}
        block = PROMPT_NORM.block(k=k, dtype=torch.bfloat16, **sizes)
        yield _block_request(block, tokens)


def coded_requests(kind: str) -> Iterator[Request]:
    """Yield requests for what prompts need of linears in codes: to decode them, and to multiply.

    The sizes of one model serve all models of usual sizes.

    Args:
        kind: A format of scripts/coded_models.py.
    """
    model = with_codes(random_model("llama-3.1-8b", "cpu", layers=1), kind)
    codings: dict[Coding, None] = {}
    for module in model.modules():
        weight = coded_weight(module, torch.bfloat16)
        if isinstance(weight, CodedWeight):
            codings.setdefault(weight.coding)
    for coding in codings:
        yield kernel_request(decoding_program(coding), target=TARGET, pattern="decoding")
        if not has_reversed_columns(coding):
            product = product_program(coding, torch.bfloat16, has_bias=False)
            yield kernel_request(product, target=TARGET, pattern="linear")


def _block_request(block: PatternBlock, rows: int) -> Request:
    wanted = block_to_make(block, rows)
    return kernel_request(
        wanted.program,
        target=TARGET,
        pattern=wanted.pattern,
        like=wanted.like,
        next_may_launch_early=wanted.next_may_launch_early,
    )


def main() -> None:
    """Build the searches."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    everything = [name for name in names() if name != "smoke"]
    parser.add_argument("--configs", default=",".join(everything), help="with commas")
    parser.add_argument("--batch-sizes", default="1,4", help="with commas")
    parser.add_argument("--weights", default=",".join(OF_LINEARS), help="formats, with commas")
    parser.add_argument("--out", type=Path, default=ROOT / "kernel_zoo", help="the zoo to add to")
    args = parser.parse_args()
    chosen = args.configs.split(",")
    if unknown := [name for name in chosen if name not in names()]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(names())}")
    for name, rows in itertools.product(chosen, map(int, args.batch_sizes.split(","))):
        try:
            requests = list(requests_of(name, rows))
        except MirageError as e:
            print(f"{name}, batch {rows}: {e}", flush=True)
            continue
        for request in requests:
            if line := add(request, args.out):
                print(f"{name}, batch {rows}: {line}", flush=True)
    for request in prompt_requests():
        if line := add(request, args.out):
            print(f"prompts: {line}", flush=True)
    for kind in filter(None, args.weights.split(",")):
        for request in coded_requests(kind):
            if line := add(request, args.out):
                print(f"{kind}: {line}", flush=True)


def add(request: Request, zoo: Path) -> str:
    """Search for a program unless a search of the zoo serves it. Return what was added."""
    if known_search.nearest([zoo], request.program) is not None:
        return ""
    started = time.perf_counter()
    outcome = make_outcome(replace(request, options=replace(request.options, time_limit=SECONDS)))
    seconds = time.perf_counter() - started
    search = search_to_keep(outcome)
    if search is None:
        return f"{request.pattern} {request.key.title}: nothing was found in {seconds:.1f} s"
    path = search.write(zoo)
    return f"{path.name}: {request.pattern} {request.key.title}, {seconds:.1f} s"


if __name__ == "__main__":
    main()
