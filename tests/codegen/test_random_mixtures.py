"""Kernels of random mixtures of experts, against float64: 1,000 of them on a GPU."""

from __future__ import annotations

import pytest

from tests.helpers import random_mixtures, thorough, triton_interpreter
from tests.helpers.random_mixtures import CASES, ROUTINGS, case_of

#: Cases of one test on a GPU.
_CHUNK = 50


def test_cases_are_of_all_kinds() -> None:
    cases = [case_of(n, is_small=False) for n in range(200)]
    assert {case.routing for case in cases} == {*ROUTINGS}
    assert {case.outside for case in cases} == {True, False}
    kinds = {case.text.split(": ")[1].split(",")[0].partition(" in ")[0] for case in cases}
    assert kinds == {"gate and up", "down", "whole", "codes"}
    assert len({str(case.program) for case in cases}) > 180


@pytest.mark.parametrize("part", range(4))
def test_random_mixtures_on_a_cpu(part: int) -> None:
    numbers = range(part, thorough.count(CASES, 100), 4)
    assert not random_mixtures.wrong(numbers, "interpreted cpu", is_small=False)


@pytest.mark.parametrize("part", range(4))
def test_random_mixtures_in_the_interpreter(part: int) -> None:
    pytest.importorskip("triton")
    count = thorough.count(60, 6)
    code = (
        "from tests.helpers import random_mixtures as m; "
        f"m.main({part * count}, {(part + 1) * count})"
    )
    assert triton_interpreter.run(code) == []


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, CASES, _CHUNK))
def test_random_mixtures_on_a_gpu(first: int) -> None:
    assert not random_mixtures.wrong(range(first, first + _CHUNK), "cuda", is_small=False)
