"""Decoding: `generate` of one model instance, over a cache pool, with steps in CUDA graphs."""

from mirage_hf.decode.cache_pool import CachePool
from mirage_hf.decode.explaining import explain_step, layout_of, meta_model
from mirage_hf.decode.generate_method import DecodeError, Generate, install, uninstall
from mirage_hf.decode.masks import has_windows
from mirage_hf.decode.runner import DecodeRunner
from mirage_hf.decode.step import CapturedForward, Step
from mirage_hf.decode.traced_step import TracedSteps
from mirage_hf.decode.tracing import WOULD_BE_TRACED, trace_steps, wants_experts, wants_trace

__all__ = [
    "WOULD_BE_TRACED",
    "CachePool",
    "CapturedForward",
    "DecodeError",
    "DecodeRunner",
    "Generate",
    "Step",
    "TracedSteps",
    "explain_step",
    "has_windows",
    "install",
    "layout_of",
    "meta_model",
    "trace_steps",
    "uninstall",
    "wants_experts",
    "wants_trace",
]
