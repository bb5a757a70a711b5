"""Swap the modules of a model for kernels, and back."""
