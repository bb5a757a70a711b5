"""Fill a kernel zoo ahead of time: search, prove, tune and keep the blocks of models.

    python -m scripts.build_zoo --configs llama-3.2-1b,llama-3.1-8b --batch-sizes 1,8
    python -m scripts.build_zoo --configs llama-3.1-8b --draft-tokens 3,7
    python -m scripts.build_zoo --configs llama-3.1-8b --weights int4,nf4 --batch-sizes 1,16
    torchrun --nproc-per-node 8 -m scripts.build_zoo --configs all

Under torchrun the work is spread over GPUs, and over hosts that share the folder. One layer of each
model is made with random weights, and matched as optimize() matches it. Among the fastest kernels
of each block, those that make the whole layer fastest are kept. Entries that the zoo has stay, so a
stopped run can go on. `--anew` makes everything again. `--draft-tokens` adds kernels for steps that
verify so many drafts.

With `--weights`, linears hold codes of a format (coded_models.py). Such a layer is optimized and
generates, with an empty cache. The kernels that were measured for its steps and prompts are then
added. What the package has is not made again. With `--anew`, everything is.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

import mirage_hf
from mirage_hf.decode import has_windows
from mirage_hf.errors import CodegenError, Rejected, SearchError, VerificationError, described
from mirage_hf.layers.part import StepShape, block_at
from mirage_hf.match.eligible import generating
from mirage_hf.match.matcher import match
from mirage_hf.match.matches import Matches
from mirage_hf.patterns import PATTERNS
from mirage_hf.patterns.attention import for_long_caches
from mirage_hf.patterns.prompt import PROMPT_NORM, PROMPT_ROTATION
from mirage_hf.patterns.schema import PatternBlock
from mirage_hf.pipeline import zoo_exchange
from mirage_hf.pipeline.layer_choice import BlockToMake, make_entries
from mirage_hf.pipeline.resolver import KernelFinder
from mirage_hf.swap.coded_forward import PRODUCT_ROWS
from mirage_hf.zoo.entry import Entry
from mirage_hf.zoo.key import Key, key_of, target_of
from mirage_hf.zoo.store import Store, packaged_store, user_store
from scripts import build_cubins, index_zoo
from scripts.coded_models import LINEAR_FORMATS, with_codes
from scripts.configs import MODELS, config_of, random_model, with_adapters

ROOT = Path(__file__).resolve().parent.parent
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def matched(name: str, dtype: str, device: torch.device, lora: int) -> Matches:
    """Return what `optimize()` matches in a model of one layer.

    Args:
        name: A model of scripts/configs.py.
        dtype: "bfloat16" or "float16".
        device: Where the layer is made.
        lora: The rank of adapters on every linear, 0 for none.
    """
    model = random_model(name, device, DTYPES[dtype], layers=1)
    if lora:
        model = with_adapters(model, lora)
    found = match(model, list(PATTERNS), generating(model))
    for no in found.rejected:
        print(f"{name}: {no.name} is no {no.pattern}: {no.reason}", flush=True)
    if isinstance(found.causal, Rejected):
        print(f"{name}: has no steps of its own: {found.causal.reason}", flush=True)
    return found


def blocks_of(found: Matches) -> list[list[PatternBlock]]:
    """Return the distinct blocks of a model's layer, in order, and its head."""
    heads = [] if isinstance(found.causal, Rejected) else [[found.causal.head.block]]
    return [list(dict.fromkeys(part.block for m in found.modules for part in m.parts)), *heads]


def block_to_make(block: PatternBlock, rows: int) -> BlockToMake:
    """Return what to make for a block at a number of rows."""
    return BlockToMake(
        block.program(rows),
        block.pattern.name,
        block.searched(rows),
        block.pattern.next_may_launch_early,
    )


def key_to_make(wanted: BlockToMake, device: torch.device) -> Key:
    """Return the key under which the kernel of a block is stored."""
    early = wanted.next_may_launch_early
    return key_of(wanted.program, target_of(device), next_may_launch_early=early)


def build(
    blocks: Sequence[tuple[PatternBlock, int]],
    device: torch.device,
    zoo: Store,
    args: argparse.Namespace,
) -> Iterator[str]:
    """Make the kernels that the zoo lacks, of a layer's blocks at numbers of rows.

    Yields:
        A line for each.
    """
    layer: list[Entry | BlockToMake] = []
    for block, rows in blocks:
        wanted = block_to_make(block, rows)
        have = zoo.get(key_to_make(wanted, device))
        if isinstance(have, Entry) and (have.timings or args.untimed) and not args.anew:
            yield f"{have.folder}: is there, {describe(have)}"
            layer.append(have)
        else:
            layer.append(wanted)
    started = time.perf_counter()
    made = make_entries(layer, device, args.tune)
    for block, rows in blocks:
        if block.pattern.searched_at is not None:
            wanted = block_to_make(for_long_caches(block), rows)
            have = zoo.get(key_to_make(wanted, device))
            if not isinstance(have, Entry) or args.anew:
                made += make_entries([wanted], device, args.tune)
    for entry in made:
        kept = (
            Rejected(f"{entry.folder}: not kept, every candidate failed here")
            if entry.failed
            else zoo.put(entry)
        )
        where = kept.relative_to(zoo.root) if isinstance(kept, Path) else kept.reason
        seconds = time.perf_counter() - started
        yield f"{where}: made with its layer in {seconds:.1f} s, {describe(entry)}"


def build_with_codes(
    name: str,
    dtype: str,
    device: torch.device,
    kind: str,
    batch: int,
    zoo: Store,
    anew: bool,
) -> Iterator[str]:
    """Make the kernels that the package and a zoo lack, of a model whose linears hold codes.

    A model of one layer is optimized and generates with an empty cache. The kernels that were
    measured are checked once more, and added to the zoo.

    Args:
        name: A model of scripts/configs.py.
        dtype: "bfloat16" or "float16".
        device: Where the layer is made.
        kind: A format of scripts/coded_models.py.
        batch: The number of sequences.
        zoo: The zoo.
        anew: Make again what there is, and measure more.

    Yields:
        A line for each.
    """
    model = with_codes(random_model(name, device, DTYPES[dtype], layers=1), kind)
    ids = torch.randint(3, 100, (batch, PRODUCT_ROWS), device=device)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache, in_cache(cache):
        options = {
            "tune": "full" if anew else "auto",
            "zoo": zoo.root if zoo.root.is_dir() else None,
        }
        mirage_hf.optimize(model, batch_sizes=(batch,), **options)
        model.generate(ids, max_new_tokens=4, do_sample=False)
        mirage_hf.restore(model)
        seconds = time.perf_counter() - started
        made = user_store()
        measure_kernels_of_prompts(made, KernelFinder(device, zoo=options["zoo"]))
        lines = [f"{name} in {kind}, batch {batch}: optimized and generated in {seconds:.1f} s"]
        for folder, entry in made.verify():
            if isinstance(entry, Entry) and entry.timings:
                checked = zoo_exchange.verified_entry(entry, folder, made)
                kept = checked if isinstance(checked, Rejected) else zoo.put(checked)
                reason = kept.reason if isinstance(kept, Rejected) else describe(entry)
                lines.append(f"{folder.relative_to(made.root)}: {reason}")
    yield from lines


def measure_kernels_of_prompts(made: Store, finder: KernelFinder) -> None:
    """Measure the kernels of norms and RoPE for prompts.

    `optimize()` compares them with stock and does not tune them. If a kernel cannot be measured,
    the reason is printed, and its entry stays without times.
    """
    names = PROMPT_NORM.name, PROMPT_ROTATION.name
    for _, entry in list(made.verify()):
        if isinstance(entry, Entry) and entry.pattern in names and not entry.timings:
            try:
                finder.measuring_few().resolve(entry.ugraph.program, pattern=entry.pattern)
            except (SearchError, VerificationError, CodegenError, torch.OutOfMemoryError) as e:
                print(f"{entry.folder}: not measured: {described(e)}", flush=True)


@contextmanager
def in_cache(folder: str) -> Iterator[None]:
    """Keep kernels in a folder in place of the user's cache."""
    before = os.environ.get("MIRAGE_HF_CACHE")
    os.environ["MIRAGE_HF_CACHE"] = folder
    try:
        yield
    finally:
        del os.environ["MIRAGE_HF_CACHE"]
        if before is not None:
            os.environ["MIRAGE_HF_CACHE"] = before


def describe(entry: Entry) -> str:
    """Describe an entry in one line."""
    return (
        ", ".join(f"{t.name} {t.median_us:.2f} µs" for t in entry.timings)
        or f"not timed: {entry.search.get('reason') or 'no GPU'}"
    )


def main() -> None:
    """Build the zoo."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--configs",
        default="llama-3.2-1b,llama-3.1-8b,qwen3-0.6b",
        help=f"all, or of {', '.join(MODELS)}, with commas",
    )
    parser.add_argument("--batch-sizes", default="1", help="with commas")
    parser.add_argument(
        "--draft-tokens", default="", help="numbers of drafts that a step verifies, with commas"
    )
    parser.add_argument("--dtypes", default="bfloat16", help=f"of {', '.join(DTYPES)}, with commas")
    parser.add_argument(
        "--lora",
        type=int,
        default=0,
        metavar="RANK",
        help="adapters of this rank on every linear (PEFT, unmerged)",
    )
    parser.add_argument(
        "--weights",
        default="",
        help=f"linears in codes: of {', '.join(LINEAR_FORMATS)}, with commas",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "kernel_zoo", help="the zoo to fill")
    parser.add_argument("--tune", choices=("auto", "never", "full"), help="full if not given")
    parser.add_argument(
        "--untimed",
        action="store_true",
        help="go on without a GPU: kernels are then ranked by the cost model alone",
    )
    parser.add_argument("--anew", action="store_true", help="make again what the zoo already has")
    args = parser.parse_args()
    names = (
        [n for n in MODELS if n != "smoke"] if args.configs == "all" else args.configs.split(",")
    )
    kinds = [kind for kind in args.weights.split(",") if kind]
    for given, known in (
        (names, tuple(MODELS)),
        (args.dtypes.split(","), tuple(DTYPES)),
        (kinds, LINEAR_FORMATS),
    ):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    if kinds and (args.lora or args.draft_tokens or args.tune or args.untimed):
        parser.error("--weights goes with none of --lora, --draft-tokens, --tune and --untimed")
    args.tune = args.tune or "full"
    if not torch.cuda.is_available() and not args.untimed:
        sys.exit(
            "build_zoo: no GPU here, so nothing can be timed; run it on the GPU that the zoo is "
            "for, or give --untimed"
        )

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    zoo = Store(args.out.resolve(), writable=True)
    # Every process sees the same layers and takes its share. A block belongs to the first layer
    # with it.
    jobs: list[Callable[[], Iterator[str]]] = []
    seen: set[tuple[PatternBlock, int]] = set()
    tokens = [1, *(1 + int(n) for n in args.draft_tokens.split(",") if n)]
    sizes = list(itertools.product(map(int, args.batch_sizes.split(",")), tokens))
    for name, dtype in itertools.product(names, args.dtypes.split(",")):
        for kind, (batch, _) in itertools.product(kinds, sizes):
            jobs.append(partial(build_with_codes, name, dtype, device, kind, batch, zoo, args.anew))
        if kinds:
            continue
        windowed = has_windows(config_of(name))
        shapes = [StepShape(batch, n, windowed and n > 1) for batch, n in sizes]
        for layer in blocks_of(matched(name, dtype, device, args.lora)):
            for shape in shapes:
                at = [block_at(block, shape) for block in layer]
                blocks = [b for b in at if not isinstance(b, Rejected) and b not in seen]
                seen.update(blocks)
                jobs.append(partial(build, blocks, device, zoo, args))
    for number, job in list(enumerate(jobs, 1))[rank::world]:
        for line in job():
            print(f"{number} of {len(jobs)}  {line}", flush=True)
    if zoo.root == packaged_store().root.resolve() and world == 1:
        for sm in build_cubins.ARCHITECTURES:
            print(build_cubins.build(sm), flush=True)
        index_zoo.write(ROOT / "kernel_zoo")


if __name__ == "__main__":
    main()
