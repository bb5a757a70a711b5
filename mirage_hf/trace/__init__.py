"""Recorded computations of models: which torch ops run, and which of them kernels take over."""
