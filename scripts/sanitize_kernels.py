"""Launch every kernel of the hand-written cases twice, for compute-sanitizer. Needs a GPU.

    compute-sanitizer --tool memcheck --error-exitcode 9 python -m scripts.sanitize_kernels
    compute-sanitizer --tool racecheck --error-exitcode 9 python -m scripts.sanitize_kernels
    compute-sanitizer --tool racecheck python -m scripts.sanitize_kernels --part 1/4

If the blocks of a kernel share a loop, the second launch finds the counters that the first launch
left. Both launches must give equal results.
"""

from __future__ import annotations

import argparse
import sys

import torch

from mirage_hf.codegen import compile as compiler
from mirage_hf.codegen import triton
from mirage_hf.tune import measure
from tests.helpers import kernel_cases


def part(text: str) -> tuple[int, int]:
    """Return K and N of "K/N".

    Raises:
        ValueError: K is not one of 1 to N.
    """
    number, _, parts = text.partition("/")
    if not 1 <= int(number) <= int(parts):
        raise ValueError(text)
    return int(number), int(parts)


def main() -> None:
    """Run all cases, and exit with an error if two runs of a case differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part", type=part, default=(1, 1), metavar="K/N", help="every N-th case from the K-th on"
    )
    number, parts = parser.parse_args().part
    if not torch.cuda.is_available():
        sys.exit("sanitize_kernels: no GPU here")
    cases = kernel_cases.cases()[number - 1 :: parts]
    for case in cases:
        program = triton.generate(case.ugraph, case.schedules)
        inputs = measure.random_inputs(case.ugraph.program, "cuda")
        run = compiler.load(program.source, program.digest).run
        first, second = run(inputs), run(inputs)
        torch.cuda.synchronize()
        if not all(map(torch.equal, first, second)):
            sys.exit(f"sanitize_kernels: {case.name}: two runs differ")
    print(f"{len(cases)} cases, {sum(len(c.schedules) for c in cases)} kernels", flush=True)


if __name__ == "__main__":
    main()
