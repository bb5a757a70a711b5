"""Kernels that stream codes: a warp copies weights through a ring, others multiply them.

`products` finds what such a kernel computes in a block graph, `layout` says how it lies in shared
memory, `kernel` writes the text, and `helpers` holds the functions that the text calls.
"""
