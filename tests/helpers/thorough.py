"""How much the tests try.

`make test` tries some of it, because it has ten minutes on two cores. `make thorough` tries all.
"""

from __future__ import annotations

import os

THOROUGH = os.environ.get("MIRAGE_HF_THOROUGH") == "1"


def count(full: int, short: int) -> int:
    """Return how many random programs a test tries."""
    return full if THOROUGH else short
