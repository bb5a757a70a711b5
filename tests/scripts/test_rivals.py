"""Rivals of benchmarks that may not be installed."""

import torch

from scripts import rivals


def test_rivals_that_are_not_installed_say_so():
    assert (
        rivals.Rival("x", torch.neg, needs="no_such_package").absent
        == "no_such_package is not installed"
    )
    assert rivals.Rival("x", torch.neg).absent == ""
