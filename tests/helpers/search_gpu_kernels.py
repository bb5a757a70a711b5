"""Search the kernels of the GPU tests' models on a machine without a GPU.

With MIRAGE_HF_TEST_KERNELS=FOLDER the tests start with the kernels in that folder and spend no GPU
time on searches. An interrupted run continues where it stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mirage_hf import errors
from mirage_hf.match.eligible import generating
from mirage_hf.match.matcher import match
from mirage_hf.patterns import PATTERNS
from mirage_hf.patterns.attention import for_long_caches
from mirage_hf.pipeline import layer_choice, resolver
from mirage_hf.swap.optimization import Optimization
from mirage_hf.zoo.entry import Entry
from mirage_hf.zoo.key import key_of
from mirage_hf.zoo.store import Store
from tests.decode import test_families_gpu as families
from tests.decode import test_features_gpu
from tests.decode import test_rings_gpu as ring_tests
from tests.helpers import generate_features
from tests.helpers.tiny_models import tiny


def models() -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    """Yield names, models and numbers of rows."""
    for name, (family, dtype, how) in test_features_gpu.PAIRS.items():
        if how == "kernels":
            yield (
                name,
                generate_features.small(family, dtype, "cpu", **generate_features.WIDE),
                generate_features.ROWS,
            )
    for name, dtype in families.CASES:
        family, changes = name.partition(",")[0], families.MODELS[name]
        yield (
            f"{name}, {dtype}",
            generate_features.small(family, dtype, "cpu", **{**generate_features.WIDE, **changes}),
            (1, 3),
        )
    for name, (family, dtype, how, _, changes) in ring_tests.PAIRS.items():
        if how == "kernels":
            sizes = {
                **generate_features.WIDE,
                **changes,
                "max_position_embeddings": 16384,
                "sliding_window": ring_tests.WINDOW,
            }
            yield f"rings, {name}", tiny(family, dtype=dtype, **sizes), (1, 3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where to keep what is found")
    parser.add_argument("--target", default="sm_90", help="the GPU that it is for")
    args = parser.parse_args()
    zoo = Store(args.folder / "zoo", writable=True)
    for name, model, rows in models():
        made = 0
        layers = Optimization(
            model, "cpu", rows, match(model, list(PATTERNS), generating(model))
        ).wanted
        blocks = dict.fromkeys(part.block for layer in layers for part in layer)
        blocks |= dict.fromkeys(
            for_long_caches(b) for b in list(blocks) if b.pattern.searched_at is not None
        )
        for block in blocks:
            for r in rows:
                program = block.program(r)
                early = block.pattern.next_may_launch_early
                key = key_of(program, args.target, next_may_launch_early=early)
                if not isinstance(zoo.get(key), Entry):
                    try:
                        request = resolver.kernel_request(
                            program,
                            target=args.target,
                            pattern=block.pattern.name,
                            like=block.searched(r),
                            next_may_launch_early=early,
                            tune="never",
                        )
                        found = layer_choice.make_outcome(request)
                        made += isinstance(zoo.put(found.entry()), Path)
                    except errors.MirageError as e:
                        print(f"{name}: {block.pattern.name}, {r} rows: {e}")
        print(f"{name}: {made} made", flush=True)


if __name__ == "__main__":
    main()
