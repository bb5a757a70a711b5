"""Decoding: `generate` of one model instance, over a cache pool, with steps in CUDA graphs.

The files, in the order in which a call of `generate` meets them:

- `generate_method`, `routing`, `model_obstacles`, `not_covered`: Take the calls that we cover, and
  leave all others to stock.
- `runner`, `model_fingerprint`, `cache_pool`, `counters`: Keep what one model needs between calls.
- `generate`: Run one covered call. It shows the path of a token from top to bottom.
- `call_plan`, `prompt_plan`, `masks`, `selection`, `draft_planning`: Plan a call.
- `session`, `cache_block`, `control`, `rings`, `cache_layers`, `cache_exchange`, `sources`: Keep
  the memory of a call.
- `prefill`, `prefill_checks`, `prefill_runs`, `prompts`, `summed_products`, `stock_masks`,
  `model_memory`: Run the prompt.
- `step`, `step_inputs`, `graphs`: Run a step: the model's own forward, called or captured.
- `step_program`: Run a step as one chain of kernels, if every layer matched.
- `tracing`: Otherwise trace steps, before the first call. The next three lines are about these.
- `step_forms`, `recorded_inputs`, `step_recording`: Record the torch ops of a step.
- `step_kernels`, `decoded_products`, `trace_check`, `rounding`, `trace_report`: Find its kernels,
  compare it with that of stock, and report it.
- `step_plans`, `step_beginning`, `traced_step`, `explaining`: Choose a traced step for a call, run
  it, or explain it.
- `choosing`, `sampler`, `processors`, `processor_ops`, `uniform_numbers`, `token_reader`: Choose
  the next tokens on the device, and read them on the host.
- `drafts`, `draft_sources`, `assistants`, `draft_schedule`, `verifying`: Propose tokens, and verify
  them.
- `kernels`: Hold the hand-written Triton kernels.
"""

from mirage_hf.decode.cache_pool import CachePool
from mirage_hf.decode.explaining import explain_step, layout_of, meta_model
from mirage_hf.decode.generate_method import DecodeError, Generate, install, uninstall
from mirage_hf.decode.masks import has_windows
from mirage_hf.decode.runner import DecodeRunner
from mirage_hf.decode.step import CapturedForward, Step
from mirage_hf.decode.step_plans import TracedSteps
from mirage_hf.decode.tracing import WOULD_BE_TRACED, Traces, trace_steps, wanted_traces

__all__ = [
    "WOULD_BE_TRACED",
    "CachePool",
    "CapturedForward",
    "DecodeError",
    "DecodeRunner",
    "Generate",
    "Step",
    "TracedSteps",
    "Traces",
    "explain_step",
    "has_windows",
    "install",
    "layout_of",
    "meta_model",
    "trace_steps",
    "uninstall",
    "wanted_traces",
]
