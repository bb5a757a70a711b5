"""Kernels that stream codes: a warp copies weights through a ring, others multiply them.

- `products`: What such a kernel computes, and how codes lie.
- `finding`: Find it in a block graph.
- `tables`: Turn the table that codes are looked up in into bytes.
- `layout`: Divide its work by a schedule, and lay out its shared memory.
- `writer`: What all parts of its text need.
- `factor`: Write how threads compute what codes are multiplied with.
- `multiplying`: Write the products.
- `pairs`: Write the products of two short groups of columns at a time.
- `copying`: Write the warp that copies.
- `kernel`: Write the kernel.
- `helpers`: The device functions that the text calls.
"""
