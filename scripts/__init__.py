"""Benchmarks, reports and tools. Run them as modules: `python -m scripts.NAME`."""
