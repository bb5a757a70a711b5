"""The name of this attention, and a limit, which several files of this folder share."""

from __future__ import annotations

NAME = "mirage"

#: Lengths of the cache whose kernels compiled graphs may hold, for each batch size of a model's
#: heads. Each makes a graph of its own, and torch.compile gives up on a function after 8. Other
#: lengths share a graph with SDPA.
MOST_TRACED = 4
