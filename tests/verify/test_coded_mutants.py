"""Mutants of µGraphs that decode weights: no wrong decoding is proven."""

from __future__ import annotations

import pytest

from tests.helpers import coded_mutants
from tests.helpers.thorough import count

#: `make thorough` tries all.
COUNT = count(100_000, 500)

#: Kinds of wrong decodings that must be among the mutants.
KINDS = {
    "nibbles in another order",
    "codes of another place",
    "codes transposed",
    "words read in another order",
    "scales off by one",
    "scales of another place",
    "scales shared by too many",
    "scales transposed",
    "no scales",
    "divisors changed",
    "no divisors",
    "another table",
    "scaled after the wrong sum",
    "scaled after the wrong loop",
    "another constant zero point",
    "dropped op",
    "no zero points",
    "zero point subtracted twice",
    "zero points scaled otherwise",
    "zeros off by one",
    "zeros transposed",
}


@pytest.fixture(scope="module")
def tally() -> coded_mutants.Tally:
    """Return what the proof said of the mutants."""
    return coded_mutants.tally(ugraphs=1, count=COUNT)


def test_no_wrong_decoding_is_proven(tally):
    assert tally.originals >= 40
    assert not tally.proven, tally.proven
    assert tally.refused.total() >= count(5000, 450)


def test_most_wrong_decodings_are_refused_for_their_values(tally):
    assert tally.unevaluated <= 0.25 * tally.refused.total()


def test_all_kinds_of_wrong_decodings_are_tried(tally):
    assert tally.refused.keys() >= KINDS, KINDS - tally.refused.keys()


def test_mutants_that_compute_the_same_are_proven(tally):
    """So a mutant is left out only if two checks find it equal."""
    assert tally.equal > 0 and not tally.disputed and not tally.unclear, tally


#: Kinds of wrong decodings of blocks of GGUF that must be among the mutants.
KINDS_OF_BLOCKS = {
    "high bits of codes transposed",
    "high bits of codes of another place",
    "high bits of scales transposed",
    "starts of high bits of codes exchanged",
    "starts of minima off by one",
    "minima off by one",
    "minimum factors exchanged",
    "factors off by one",
    "dropped op",
}


def test_no_wrong_decoding_of_fields_of_bytes_is_proven():
    """The proof does not know which numbers `bits` gives, so it refuses some that are equal."""
    found = coded_mutants.tally(1, count(100_000, 220), programs=coded_mutants.BLOCKS)
    assert not found.proven and not found.unclear, found
    assert found.refused.total() >= 180 and found.refused.keys() >= KINDS_OF_BLOCKS
    kinds = {label.split(": ")[1] for label in found.disputed}
    assert kinds <= {"changed constant", "duplicated factor"}, found.disputed
