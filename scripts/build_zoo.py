"""Fill a kernel zoo ahead of time: search, prove and tune the blocks of models at batch sizes, and keep what was found.

    python scripts/build_zoo.py --configs llama-3.2-1b,llama-3.1-8b --batch-sizes 1,8
    torchrun --nproc-per-node 8 scripts/build_zoo.py --configs all       # spread over GPUs, and over hosts that share the folder

One layer of each model is made with random weights and optimised as a user would do it; its kernels are the whole model's.
What the zoo already has is not made again, so a run that was stopped goes on where it was.
"""
from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from configs import MODELS, random_model

ROOT = Path(__file__).resolve().parent.parent
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def build(name: str, batch: int, dtype: str, device: torch.device, args: argparse.Namespace) -> None:
    """Optimise one layer of one model for one batch size, with an empty cache; what lands there goes into the zoo."""
    import mirage_hf as mi
    from mirage_hf.zoo.store import Store

    zoo = Store(args.out, writable=True)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["MIRAGE_HF_CACHE"] = cache
        model = mi.optimize(random_model(name, device, DTYPES[dtype], layers=1), batch_sizes=(batch,), zoo=str(args.out), tune=args.tune)
        kept = [(entry, zoo.put(entry)) for entry in Store(Path(cache) / "zoo").entries()]
    lines = [f"{name}, batch {batch}, {dtype}: {len(kept)} new kernels in {time.perf_counter() - started:.1f} s"]
    lines += [f"  {where if isinstance(where, Path) else where.reason}: {describe(entry)}" for entry, where in kept]
    if args.verbose or not kept:
        lines += ["  " + line for line in str(model.mirage.report).splitlines()]
    print("\n".join(lines), flush=True)


def describe(entry) -> str:
    return ", ".join(f"{t.name} {t.median_us:.2f} µs" for t in entry.timings) or "not timed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", default="llama-3.2-1b,llama-3.1-8b,qwen3-0.6b", help=f"all, or of {', '.join(MODELS)}, with commas")
    parser.add_argument("--batch-sizes", default="1", help="with commas")
    parser.add_argument("--dtypes", default="bfloat16", help=f"of {', '.join(DTYPES)}, with commas")
    parser.add_argument("--out", type=Path, default=ROOT / "kernel_zoo", help="the zoo to fill")
    parser.add_argument("--tune", default="full", choices=("auto", "never", "full"))
    parser.add_argument("--untimed", action="store_true", help="go on without a GPU: kernels are then ranked by the cost model alone")
    parser.add_argument("--verbose", action="store_true", help="print optimize()'s reports")
    args = parser.parse_args()
    names = [n for n in MODELS if n != "smoke"] if args.configs == "all" else args.configs.split(",")
    unknown = [n for n in names if n not in MODELS] + [d for d in args.dtypes.split(",") if d not in DTYPES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(MODELS)} and {', '.join(DTYPES)}")
    if not torch.cuda.is_available() and not args.untimed:
        sys.exit("build_zoo: no GPU here, so nothing can be timed; run it on the GPU that the zoo is for, or give --untimed")

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    jobs = [(n, int(b), d) for n in names for d in args.dtypes.split(",") for b in args.batch_sizes.split(",")]
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, batch, dtype in jobs[rank::world]:
        build(name, batch, dtype, device, args)


if __name__ == "__main__":
    main()
