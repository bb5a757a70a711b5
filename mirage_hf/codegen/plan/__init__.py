"""Decide how a kernel is laid out, before a line of it is written.

The modules, in the order in which they build on each other:

- `tiling`: how tiles cut the axes of a block graph.
- `stages`: in which order stages run, and what each reads.
- `code_order`: codes that tensor cores multiply, and the order in which threads hold them.
- `code_runs`: sums over codes, which each thread begins on its own.
- `small_codes`: 4-bit floats whose products are small until they are summed.
- `layout`: the dims of tensors inside the kernel, and the products that run on tensor cores.
- `loop_bounds`: loops that only visit what is within their bounds.
- `pipelining`: which loads Triton copies asynchronously, and which must be loaded differently.
- `cooperation`: blocks that share the loop of one tile.
- `masks`: where tiles reach past the end of an axis.
- `code_words`: which codes lie in one word, and that tiles consist of whole words.
- `kernel_plan`: all of that for one placed op and one schedule.
"""

from mirage_hf.codegen.plan.kernel_plan import KernelPlan, Planner, check_roles, plan_kernel

__all__ = ["KernelPlan", "Planner", "check_roles", "plan_kernel"]
