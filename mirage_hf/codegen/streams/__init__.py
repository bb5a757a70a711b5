"""Kernels that stream codes: a warp copies weights through a ring, others multiply them.

- `products`: Find what such a kernel computes in a block graph.
- `layout`: Divide its work by a schedule, and lay out its shared memory.
- `kernel`: Write its text.
- `helpers`: The device functions that the text calls.
"""
