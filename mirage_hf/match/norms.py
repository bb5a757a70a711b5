"""Norms as sizes of the blocks that they are part of."""

from __future__ import annotations

from typing import Any

from torch import nn

from mirage_hf.errors import Rejected
from mirage_hf.match import plain
from mirage_hf.match.module_probes import norm_epsilon, probe_norm
from mirage_hf.match.probe import Probes

#: The sizes of a block without a norm.
NO_NORM: dict[str, Any] = {
    "norm": False,
    "eps": 1e-6,
    "offset": 0.0,
    "centred": False,
    "norm_bias": False,
}


def match_norm(
    parent: nn.Module,
    name: str,
    probes: Probes,
    rules: tuple[plain.ModuleRule, ...] = plain.NORM,
) -> dict[str, Any] | Rejected:
    """Return a norm as sizes of the block that it is part of.

    Args:
        parent: The module that has the norm.
        name: The norm's name there, or "" if there is none.
        probes: The outcomes of probes so far.
        rules: What the norm must be.
    """
    if not name:
        return dict(NO_NORM)
    if no := plain.check_child(parent, name, rules):
        return no
    return norm_sizes(name, parent._modules[name], probes)  # type: ignore[arg-type]


def norm_sizes(name: str, norm: nn.Module, probes: Probes) -> dict[str, Any] | Rejected:
    """Return the sizes of a norm that follows the rules."""
    kind = probe_norm(probes, name, norm)
    if isinstance(kind, Rejected):
        return kind
    return {
        "norm": True,
        "eps": norm_epsilon(norm),
        "offset": kind.offset,
        "centred": kind.centred,
        "norm_bias": norm._parameters.get("bias") is not None,
    }
