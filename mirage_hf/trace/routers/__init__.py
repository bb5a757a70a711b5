"""Routers, which choose experts by the greatest scores: one op of a recording, and its kernel.

The files, in processing order:

- `steps`: Describe a router as calls of torch ops on tensors of a few numbers for each row.
- `op`: Run a router by torch, as the op `mirage_hf::route`.
- `finder`: Find the routers of a recording, and put the op in their place.
- `tiles`: Write the kernel of a router from top to bottom: its loads, tiles and stores.
- `writers`, `elements`, `choices`: Write each torch op of a router as lines of the kernel.
- `text`: Write the whole kernel.
"""
