"""Mutants of kernels that decode weights: the numeric check refuses all of them."""

from __future__ import annotations

import pytest

from tests.helpers.thorough import count
from tests.helpers.triton_interpreter import run

pytest.importorskip("triton")

#: `make thorough` tries all.
COUNT = count(100_000, 60)

#: Kinds of changes that must be among the mutants.
KINDS = {
    "decoding",
    "another nibble",
    "another constant zero point",
    "codes changed",
    "codes of another address",
    "another table",
    "scales changed",
    "scales of another type",
    "divisors changed",
    "scales of another address",
    "zeros changed",
    "zeros of another address",
}


@pytest.fixture(scope="module")
def tally() -> dict:
    """Return what the numeric check said of the mutants."""
    return run(
        f"from tests.helpers import coded_text_mutants; coded_text_mutants.main(count={COUNT})"
    )


def test_no_wrong_kernel_passes_the_numeric_check(tally):
    assert not tally["passed"] and not tally["broken"], tally
    assert sum(tally["refused"].values()) >= count(700, 60)


def test_the_kernels_themselves_pass(tally):
    assert tally["originals"] >= 14 and not tally["faults"], tally["faults"]


def test_all_kinds_of_changes_are_tried(tally):
    assert tally["refused"].keys() >= KINDS, tally["refused"]
