"""What the counters of a search mean, in words.

A counter that is not named here is shown under its own name.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

#: For each field of `Counters`: the group, and what is counted.
LABELS = {
    "candidates": ("found", "candidates found"),
    "best_us": ("found", "best estimate so far (µs)"),
    "values": ("values", "values kept"),
    "examined": ("values", "values examined"),
    "derivations": ("values", "derivations of values"),
    "outside_goal": ("pruned", "values outside every goal"),
    "cancelling": ("pruned", "derivations that cancel"),
    "expansions": ("variants", "states of the search for variants"),
    "variants": ("variants", "variants: ways to compute it"),
    "plans": ("kernels", "plans: ways to cut variants into kernels"),
    "kernels": ("kernels", "kernels evaluated"),
    "dominated": ("pruned", "states another of which costs less"),
    "illegal": ("pruned", "kernels that cannot be"),
    "cost_pruned": ("pruned", "plans cut by their cost"),
    "forms": ("search", "normal forms held at most"),
    "width": ("search", "width: monomials of a product"),
    "seconds": ("search", "seconds"),
    "first_seconds": ("search", "seconds to the first kernel"),
}
#: The groups in the order in which they are shown.
GROUPS = ("found", "values", "variants", "kernels", "pruned", "search", "other")


def rows(counters: Any) -> list[tuple[str, str, str]]:
    """Return (group, label, number) of every counter, in the order of groups.

    Counters that were never reached are left out.
    """
    labelled = []
    for f in fields(counters):
        value = getattr(counters, f.name)
        group, label = LABELS.get(f.name, ("other", f.name.replace("_", " ")))
        if isinstance(value, float):
            if value < 0 or value != value or value == float("inf"):
                continue
            text = f"{value:.3f}"
        else:
            text = f"{value:,}" if isinstance(value, int) else str(value)
        labelled.append((group, label, text))
    return sorted(labelled, key=lambda row: GROUPS.index(row[0]))
