"""Record the torch ops of a model's step, and plan which of them kernels run.

The files, in processing order:

- `fake_mode`, `record`, `sizes`: Record a step on fake tensors, and make one recording for all
  sizes.
- `host_values`, `questions`: Answer what a model reads on the host while it is recorded.
- `attention`, `coded_linear`, `torch_functions`: Make attention and linears in codes one node each.
  Keep kernels of other libraries out.
- `experts`: Let the chosen experts of a mixture be one node, and write them as programs.
- `row_values`, `successive`: In steps that verify drafts, give each row its own number of cached
  tokens, and move states on token by token.
- `routers`: Replace the nodes of a router by one op, and write it as a kernel.
- `whole_writes`, `short_convolution`: Replace other nodes by one.
- `torch_ops`, `term`, `term_operands`, `lowerings`, `composites`, `terms`: Read nodes as terms,
  which are ops of the op table.
- `groups`, `program`: Cut terms into groups around products, and write each as a program.
- `cached_attention`: Find attention over a cache, which the kernel of a pattern runs.
- `axes`, `region_finder`, `regions`: Write updates of states and elementwise ops as programs.
- `order`, `step_ops`, `scheduling`, `binding`, `step_plan`: Order kernels and torch ops, and run
  them.
- `position_ops`: Find the ops that depend on positions alone, and compute them for all positions.
- `near_ties`, `weight_names`: Help to check a step, and to report it.
"""
