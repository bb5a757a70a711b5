"""How much tests try: some in `make test`, which has ten minutes on two cores, all of it in `make thorough`."""

from __future__ import annotations

import os

THOROUGH = os.environ.get("MIRAGE_HF_THOROUGH") == "1"


def count(full: int, short: int) -> int:
    """How many random programs a test tries."""
    return full if THOROUGH else short
