"""Record the torch ops of a model's step, and plan which of them kernels run.

The files, in processing order:

- `record`, `sizes`: Record a step on fake tensors, and make one recording for all sizes.
- `host_values`, `questions`: Answer what a model reads on the host while it is recorded.
- `attention`, `coded_linear`, `experts`, `fixed_experts`, `torch_functions`: Let attention, linears
  in codes and experts be one node each, and keep kernels of other libraries out.
- `row_values`, `successive`: In steps that verify drafts, give each row its own number of cached
  tokens, and move states on token by token.
- `whole_writes`, `short_convolution`, `dense_experts`, `router_finder`: Replace nodes by one.
- `torch_ops`, `term`, `term_operands`, `lowerings`, `composites`, `terms`: Read nodes as terms,
  which are rows of the op table.
- `groups`, `program`: Cut terms into groups around products, and write each as a program.
- `cached_attention`: Find attention over a cache, which the kernel of a pattern runs.
- `experts_form`, `experts_gate`, `experts_programs`: Write chosen experts as programs.
- `axes`, `region_finder`, `regions`: Write updates of states and elementwise ops as programs.
- `router`, `router_steps`, `router_text`, `router_tiles`, `router_writers`, `router_elements`,
  `router_choices`: Run a router, and write it as a kernel.
- `order`, `units`, `scheduling`, `binding`, `plan`: Order kernels and torch ops, and run them.
- `near_ties`, `weight_names`: Help to check a step, and to report it.
"""
