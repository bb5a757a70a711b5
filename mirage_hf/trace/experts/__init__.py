"""The chosen experts of a mixture: one op of a recording, and programs that compute it.

The files, in processing order:

- `form`: Read from a module what its experts compute.
- `decoded`: Run it without kernels of its own: decode weights, and multiply by torch's products.
- `fixed_shape`: Let experts run in a form that can be recorded.
- `op`: Let the experts of a module be the op `mirage_hf::experts` while a step is recorded.
- `dense`: Find products with all experts, and put the same op in their place.
- `gate`, `writer`: Write the function between the linears, and products with chosen weights.
- `programs`: Write the op as two programs, with the sums that follow.
- `row_layout`: Sort the rows that a prompt's tokens give to experts into blocks, and add them up.
- `row_blocks`: Run prompts by kernels over such blocks.
"""
