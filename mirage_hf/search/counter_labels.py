"""Label the counters of a search in plain words.

A counter without a label here is shown under its own name.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

#: The group and the label of each field of `Counters`.
LABELS = {
    "candidates": ("found", "candidates found"),
    "best_us": ("found", "best estimate so far (µs)"),
    "values": ("values", "values kept"),
    "examined": ("values", "values examined"),
    "derivations": ("values", "derivations of values"),
    "outside_goal": ("pruned", "values that can be part of no output"),
    "cancelling": ("pruned", "derivations that compute and cancel"),
    "expansions": ("variants", "states of the search for variants"),
    "variants": ("variants", "variants: ways to compute it"),
    "plans": ("kernels", "plans: ways to cut variants into kernels"),
    "kernels": ("kernels", "kernels evaluated"),
    "dominated": ("pruned", "states replaced by cheaper ones"),
    "illegal": ("pruned", "kernels that break a rule of block graphs"),
    "cost_pruned": ("pruned", "plans that cost more than those kept"),
    "forms": ("search", "normal forms held at most"),
    "width": ("search", "width: monomials of a product"),
    "seconds": ("search", "seconds"),
    "first_seconds": ("search", "seconds to the first kernel"),
}
#: The groups in the order in which they are shown.
GROUPS = ("found", "values", "variants", "kernels", "pruned", "search", "other")


def labelled(counters: Any, name: str) -> str:
    """Return the number of one counter with its label, like "226 values kept"."""
    return f"{getattr(counters, name)} {LABELS[name][1]}"


def rows(counters: Any) -> list[tuple[str, str, str]]:
    """Return (group, label, number) of every counter, in the order of groups.

    Counters that were never reached are left out.
    """
    labelled_rows = []
    for f in fields(counters):
        value = getattr(counters, f.name)
        group, label = LABELS.get(f.name, ("other", f.name.replace("_", " ")))
        if isinstance(value, float):
            if value < 0 or value != value or value == float("inf"):
                continue
            text = f"{value:.3f}"
        else:
            text = f"{value:,}" if isinstance(value, int) else str(value)
        labelled_rows.append((group, label, text))
    return sorted(labelled_rows, key=lambda row: GROUPS.index(row[0]))
