"""How many cases the tests try.

`make test` has ten minutes on two cores, so it tries some of them. `make thorough` tries all.
"""

from __future__ import annotations

import os

THOROUGH = os.environ.get("MIRAGE_HF_THOROUGH") == "1"


def count(full: int, short: int) -> int:
    """Return how many random programs a test tries."""
    return full if THOROUGH else short
