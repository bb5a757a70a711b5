"""Random linears with weights in codes: kernels are as close to float64 as torch.

Sizes, groups, orders of codes, zero points, norms, joined weights and biases are random. Each
linear goes through search, proof and code generation. Its container is made by its library if that
is installed.
"""

import pytest

from mirage_hf.codegen import compile as compiler
from tests.helpers import random_linears
from tests.helpers.random_linears import LATER_SEEDS
from tests.helpers.thorough import count
from tests.helpers.triton_interpreter import run

pytest.importorskip("triton")

#: Some of these configurations have no kernel. More than 200 have.
SEEDS = 220

#: Seeds of act-order and of blocks of GGUF.
LATER = 60

#: Seeds of one test.
CHUNK = 5


def check(found: random_linears.Summary) -> None:
    """Assert that all results of a range of seeds are right."""
    assert not found.wrong, found.wrong
    assert found.kernels >= 2 * found.tried
    # Tiles of words fit few sizes. A joined weight ends within a tile, or a row does.
    assert all("int4" in c and "bytes" not in c for c in found.without_kernel)
    assert len(found.without_kernel) <= 0.2 * found.tried


def chunks(first: int, number: int) -> list[tuple[int, int]]:
    """Return the ranges of seeds from `first` on, so many in all."""
    stop = first + number
    return [(start, min(start + CHUNK, stop)) for start in range(first, stop, CHUNK)]


@pytest.mark.parametrize(
    ("start", "stop"), chunks(0, count(SEEDS, 4)) + chunks(LATER_SEEDS, count(LATER, 3))
)
def test_kernels_are_as_close_to_float64_as_torch(start, stop):
    code = f"from tests.helpers import random_linears; random_linears.main({start}, {stop})"
    check(random_linears.Summary(**run(code)))


@pytest.mark.parametrize("seed", sorted({*range(count(SEEDS, 4)), 18, 30, 57, 1000, 1001, 1002}))
def test_kernels_compile_for_a_gpu(seed):
    """The interpreter takes more than the compiler, such as a sum of floats of 8 bits."""
    c = random_linears.config(seed)
    for program, _ in list(random_linears.kernels(c, random_linears.case(c).program))[:2]:
        assert compiler.ahead_of_time(program, 90)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("start", "stop"), chunks(0, count(SEEDS, 60)) + chunks(LATER_SEEDS, count(LATER, 40))
)
def test_kernels_on_a_gpu_are_as_close_to_float64_as_torch(start, stop):
    check(random_linears.summary(range(start, stop), "cuda"))
