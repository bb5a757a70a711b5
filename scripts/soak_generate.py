"""Make many generate calls of mixed kinds: every text is stock's, and memory stays flat.

    python -m scripts.soak_generate --calls 1000 --device cuda

Two small random float32 models take calls whose kind is drawn by a seed. The kinds are: other
sizes, padding, stop tokens, processors, sampling, streamers, caches passed in and out, threads,
nested calls, Ctrl-C, changed weights, released memory, and calls that run stock (soak_kinds.py).
Half of the kinds draft tokens, by prompt lookup or by an assistant (soak_drafts.py). Greedy texts
are compared with those of stock models that go through the same changes.

The second half repeats the calls of the first, so libraries have loaded what they need. Memory is
measured at the start, after the first half and at the end. In the second half it may grow by
LIMITS.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mirage_hf.api import optimize
from scripts.soak_drafts import DRAFTED
from scripts.soak_kinds import PLAIN, some, steps_of
from tests.helpers.generate_features import GREEDY, KERNELS, ROWS, WIDE, Pair, small
from tests.helpers.tiny_models import prompt

KINDS = {**PLAIN, **DRAFTED}
MIB = 2**20
#: By how much memory may grow, in MiB: tensors of the device as torch counts them, our pools, the
#: whole GPU, this process, and tensors that Python can reach. Objects of Python are in thousands.
LIMITS = {
    "tensors": 8.0,
    "pools": 1.0,
    "driver": 32.0,
    "host": 64.0,
    "reachable tensors": 1.0,
    "objects": 0.4,
}


def drafting_pair(family: str, device: str, options: Mapping[str, Any], **sizes: Any) -> Pair:
    """Return a stock model, its optimized twin, and an assistant that drafts for the twin."""
    stock = small(family, torch.float32, device, **sizes)
    # its blocks have the sizes of the model's, so they share kernels
    assistant = small(family, torch.float32, device, **{**sizes, "num_hidden_layers": 1}, seed=1)
    optimize(assistant, batch_sizes=ROWS, **options)
    return Pair(stock, "kernels", {"draft_tokens": (3,), **options}, assistant=assistant)


# -- memory ---------------------------------------------------------------------------------------


def memory(pairs: list[Pair]) -> dict[str, float]:
    """Make the same few calls, then return what is in use, by the names of LIMITS."""
    for pair in pairs:
        for batch, length in ((1, 7), (2, 7), (3, 7), (1, 300)):  # as many blocks as are kept
            for drafts in ({"assistant_model": pair.assistant}, {"prompt_lookup_num_tokens": 3}):
                pair.agree({"inputs": prompt(batch, length), **GREEDY}, drafts=drafts)
    gc.collect()
    objects = gc.get_objects()
    tensors = [x for x in objects if type(x) in (torch.Tensor, torch.nn.Parameter)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    used = {
        "pools": sum(p.runner.bytes for p in pairs) / MIB,
        "reachable tensors": sum(storages.values()) / MIB,
        "objects": len(objects) / 1000,
    }
    if (device := pairs[0].device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        used |= {
            "tensors": torch.cuda.memory_allocated(device) / MIB,
            "driver": (total - free) / MIB,
        }
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # what was freed is given back
        used["host"] = (
            int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / MIB
        )
    return used


def soak(
    pairs: list[Pair], calls: int, seed: int, limits: Mapping[str, float] = LIMITS
) -> dict[str, int]:
    """Make calls and compare each with stock. Return how their steps ran.

    Args:
        pairs: The models.
        calls: How many calls.
        seed: The seed of their random choices.
        limits: By how much memory may grow, by kind. Kinds that are not named may grow.

    Raises:
        AssertionError: A call differs; the message names it.
    """
    rng, half, reported = random.Random(seed), -(-calls // 2), time.perf_counter()
    before = memory(pairs)
    print(f"at the start: {shown(before)}", flush=True)
    done: Counter[str] = Counter()
    for n in range(calls):
        if n == half:
            rng = random.Random(seed)
            before = memory(pairs)
            print(f"after {n} calls: {shown(before)}", flush=True)
        name, pair = rng.choice(list(KINDS)), rng.choice(pairs)
        state = rng.getstate()
        try:
            KINDS[name](pair, rng)
            assert not pair.runner.pool._leased, "memory of the pool is still leased"
        except Exception as error:
            rng.setstate(state)
            raise AssertionError(
                f"call {n} of seed {seed}, {name} on {pair.stock.config.model_type}, like "
                f"{some(rng)}: {error}\n"
                f"counts: {dict(pair.runner.counts)}"
            ) from error
        done[name] += 1
        if time.perf_counter() - reported > 30:
            reported = time.perf_counter()
            print(f"{n + 1} of {calls} calls", flush=True)
    after = memory(pairs)
    print(f"after {calls} calls: {shown(after)}\nkinds: {dict(done)}", flush=True)
    counts: Counter[str] = Counter()
    for pair in pairs:
        counts += pair.runner.counts
        steps = steps_of(pair)
        assert steps == dict(pair.wanted) and steps[KERNELS], (
            f"steps {steps}, wanted {dict(pair.wanted)}"
        )
        counts.update({f"drafts: {what}": n for what, n in pair.runner.drafts.items()})
    grown = {what: after[what] - before[what] for what in after}
    text = f"memory grew in {calls - half} calls by {shown(grown)}"
    assert all(grown[what] <= limit for what, limit in limits.items() if what in grown), (
        f"{text}; the limits are {shown(limits)}"
    )
    print(text, flush=True)
    return dict(counts)


def shown(used: Mapping[str, float]) -> str:
    """Return what `memory` counts as text for the terminal."""
    unit = {"objects": "thousand"}
    return ", ".join(f"{what} {x:.1f} {unit.get(what, 'MiB')}" for what, x in used.items())


def main() -> None:
    """Run the soak."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.device.startswith("cuda"):
        if not torch.cuda.is_available():
            sys.exit("soak_generate: no GPU here; --device cpu runs the same calls without graphs")
        torch.backends.cuda.matmul.allow_tf32 = False
    start = time.perf_counter()
    pairs = [
        drafting_pair(family, args.device, {"tune": "never"}, **WIDE)
        for family in ("llama", "mistral")
    ]
    print(f"two models optimized in {time.perf_counter() - start:.0f} s", flush=True)
    counts = soak(pairs, args.calls, args.seed)
    print(
        f"{counts}\n{args.calls} calls in {time.perf_counter() - start:.0f} s: every text is "
        "stock's"
    )


if __name__ == "__main__":
    main()
