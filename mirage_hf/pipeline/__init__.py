"""The way from a program to its kernels: look up, else search, verify, tune and store.

`find_outcome.find_outcome` takes all these steps. `superoptimizer.superoptimize` asks it for all
µGraphs of a program, and `resolver.resolve` for the one kernel to run. In the order of processing:

- `request`: what is asked for.
- `results`: look up results of earlier calls and prove them again; store new ones.
- `checkpoint`: the same in one file that the user names.
- `search_and_verify`, `windows`: search a program, whole or window by window.
- `tuned_kernels`: find tuned kernels, whose schedules others may take.
- `reuse`: prove what a search found for other sizes, in place of a search.
- `searching_ahead`, `search_worker`: the same for several programs at once, in worker processes.
- `choose`: choose schedules for the verified candidates, by measuring or by the cost model.
- `tuning_ahead`: measure several programs in turns.
- `outcome`: the result: candidates with schedules and times, and the entry to store.
- `superoptimizer`, `superoptimizer_options`, `search_result`: `superoptimize()`.
- `instances`: results for one size of their symbolic dims.
- `resolver`, `layer_choice`, `resize`: the kernel that `optimize()` runs, chosen for a layer, and
  cut to other sizes.
- `background`, `background_tuner`: the same in another process, while a model is used.
- `handwritten`: µGraphs that the user wrote.
- `run_ugraph`, `torch_op`: run kernels, directly and inside compiled graphs.
- `html_report`, `progress_bar`: show a search on a page and on a terminal.
- `memory`, `versions`: keep results in this process, and say when stored ones are out of date.
"""
